"""Language models in training: they learn a language, from all words or from a sample, and refuse other texts."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from fastweights.evaluation import evaluate_language_model
from fastweights.nn import LSTMLanguageModel
from fastweights.runs import load_checkpoint
from fastweights.training import LanguageSchedule, RunFolder, train_language_model
from fastweights.training.language import SampledSoftmax

from .helpers import records

V = 12
SCHEDULE = LanguageSchedule(
    epochs=3, batch_size=4, segment=5, learning_rate=0.01, checkpoint_seconds=0, validation_streams=2
)


def make_texts(length=84):
    """A text whose words follow one another, and now and then do not."""
    generator = torch.Generator().manual_seed(0)
    steps = 1 + (torch.rand(3, length, generator=generator) < 0.1).long()
    return dict(zip(("train", "validation", "test"), steps.cumsum(1) % V, strict=True))


def make_model():
    torch.manual_seed(0)
    return LSTMLanguageModel(V, 6, 8, input_dropout=0.2, state_dropout=0.2, hebbian={"gamma": 0.1, "limit": 20})


def test_the_perplexity_is_that_of_each_word_after_those_before_it():
    model, text = make_model(), make_texts()["test"]
    with torch.no_grad():
        logits, _ = model.eval()(text[:-1].unsqueeze(1))
    expected = F.cross_entropy(logits.squeeze(1), text[1:]).item()
    assert evaluate_language_model(model.train(), text) == pytest.approx(expected, rel=1e-5)
    assert model.training
    side_by_side = evaluate_language_model(model, text, streams=4)
    with torch.no_grad():
        pieces = text.view(4, -1).t()
        logits, _ = model.eval()(pieces[:-1])
    assert side_by_side == pytest.approx(F.cross_entropy(logits.flatten(0, 1), pieces[1:].flatten()).item(), rel=1e-5)


@pytest.mark.parametrize(("sampled", "bfloat16"), [(0, False), (6, False), (6, True)])
def test_it_learns_and_the_words_that_are_left_out_of_a_sample_too(tmp_path, sampled, bfloat16):
    torch.manual_seed(0)
    model = LSTMLanguageModel(V, 6, 16)
    schedule = LanguageSchedule(epochs=6, batch_size=4, learning_rate=0.03, sampled=sampled, bfloat16=bfloat16)
    with RunFolder(tmp_path, {}) as folder:
        result = train_language_model(model, make_texts(3000), schedule, folder, seed=1)
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)  # of the text, nats a word
    assert math.exp(entropy) < result["test_perplexity"] < 1.15 * math.exp(entropy)
    assert result["test_loss"] == pytest.approx(math.log(result["test_perplexity"]))
    assert "validation_error" not in result


def test_a_sample_estimates_the_whole_sum():
    torch.manual_seed(0)
    counts = (1e5 / torch.arange(1, 2001)).long()
    weight, bias = 0.5 * torch.randn(2000, 16), (counts / counts.sum()).log()
    h = torch.randn(500, 16)
    targets = torch.distributions.Categorical(logits=h @ weight.T + bias).sample()
    whole = F.cross_entropy(h @ weight.T + bias, targets)
    sampled = SampledSoftmax(counts, 1000)
    estimate = torch.stack([sampled(h, weight, bias, targets) for _ in range(20)]).mean()
    assert estimate.item() == pytest.approx(whole.item(), abs=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": torch.arange(7)}, "7 tokens cannot be cut into 4 streams of two tokens or more: give 3 at most"),
        (
            {"test": torch.tensor([0, V])},
            r"test has tokens from 0 to 12, and the model's are 0 to 11.*another vocabulary",
        ),
        ({"validation": torch.tensor([0, 1])}, "2 tokens cannot be cut into 2"),
        ({"test": torch.tensor([3])}, "test has 1 token"),
        ({"train": torch.empty(0, dtype=torch.int64)}, "train has 0 tokens"),
    ],
)
def test_texts_that_cannot_be_read_are_refused_before_anything_is_written(tmp_path, change, message):
    with RunFolder(tmp_path, {}) as folder:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match=message):
            train_language_model(make_model(), make_texts() | change, SCHEDULE, folder, seed=1)
        assert sorted(tmp_path.iterdir()) == before


def test_a_hebbian_softmax_remembers_what_is_learnt_from_a_sample(tmp_path):
    model, text = make_model(), make_texts()
    schedule = LanguageSchedule(epochs=2, batch_size=4, segment=5, sampled=6)
    with RunFolder(tmp_path, {}) as folder:
        train_language_model(model, text, schedule, folder, seed=1)
    state = load_checkpoint(tmp_path / "checkpoint.pt")
    assert state is not None
    best = state["best"]
    passes = 2 if best["head.counts"].sum() > 80 else 1
    assert (
        best["head.counts"].tolist()
        == (passes * torch.bincount(text["train"].view(4, -1)[:, 1:].flatten(), minlength=V)).tolist()
    )


def test_the_last_passes_smooth_no_more(tmp_path):
    # Without a rate nothing but the smoothing moves the weights.
    once, twice, always = (
        validation_losses(tmp_path / str(plain), plain_epochs=plain, epochs=4, learning_rate=1e-30)
        for plain in (3, 2, 0)
    )
    assert len({*once}) == 1
    assert len({*twice}) == 2
    assert len({*always}) == 4
    assert twice[:2] == always[:2]


def validation_losses(path, **changes):
    schedule = LanguageSchedule(batch_size=4, segment=5, **changes)
    model = make_model()
    limit = model.head.limit
    with RunFolder(path, {}) as folder:
        train_language_model(model, make_texts(), schedule, folder, seed=1)
    assert model.head.limit == limit > 0
    return [record["validation_loss"] for record in records(path) if "validation_loss" in record]


def test_a_segment_may_begin_with_zeros(tmp_path):
    losses = []
    for carry_state in (True, False):
        torch.manual_seed(0)
        model = LSTMLanguageModel(V, 6, 8)
        schedule = LanguageSchedule(epochs=1, batch_size=4, segment=5, learning_rate=1e-12, carry_state=carry_state)
        with RunFolder(tmp_path / str(carry_state), {}) as folder:
            train_language_model(model, make_texts(), schedule, folder, seed=1)
        losses.append(
            json.loads((tmp_path / str(carry_state) / "metrics.jsonl").read_text().splitlines()[0])["train_loss"]
        )
    streams = make_texts()["train"].view(4, -1).t()
    with torch.no_grad():
        pieces = [model.loss(streams[at : at + 5], streams[at + 1 : at + 6])[0] for at in range(0, 20, 5)]
    assert losses[1] == pytest.approx(float(sum(pieces)) / 4, rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)
