"""A causal language model with memories: against loops over time, against itself, and against what it must refuse."""

import json
import math
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fastweights import memory
from fastweights.errors import HubError, MemoryFileError
from fastweights.memory.language_model import adaptive_language_model
from tests.memory.language_models import ARCHITECTURES, CLASSES, make_model

WEIGHTS = (0.3, 0.2, 0.2, 0.1, 0.2)
THETA, WIDTH, RATE = 0.1, 2.0, 0.2
ORDER, GROWTH, PRIOR = 3, 3.0, 2.0
NEAR, LAST, NEAREST = 20, 15, 8  # what the cache and MbPA see, and neighbours


def text(count: int, seed: int = 1, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, CLASSES, (rows, count), generator=torch.Generator().manual_seed(seed))


def adapt(model: Any, weights: Any = WEIGHTS, store: Any = None, **more: Any) -> Any:
    head = model.get_output_embeddings()
    store = memory.EpisodicMemory(1000, head.weight.shape[1]) if store is None else store
    return memory.AdaptiveLanguageModel(
        model,
        cache=memory.NeuralCache(NEAR, CLASSES, THETA),
        mbpa=memory.StreamMbPA(head, LAST, neighbours=NEAREST, lr=RATE),
        knn=memory.UnboundedCache(store, CLASSES, neighbours=NEAREST, bandwidth=WIDTH),
        ngram=memory.NGramCache(store, CLASSES, order=ORDER, growth=GROWTH, prior=PRIOR),
        weights=weights,
        **more,
    )


@pytest.fixture
def lm() -> Any:
    return adapt(make_model())


def loop(model: Any, texts: list[torch.Tensor]) -> Any:
    """log p of the tokens of the last text, position after position, in NumPy: every text was read before the next."""
    keys: list[Any] = []
    words: list[Any] = []
    predictions: list[Any] = []
    scores = []
    for number, ids in enumerate(texts):
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
        stored = list(words)
        states, logits = output.hidden_states[-1][0].numpy(), output.logits[0].double().numpy()
        for t, word in enumerate(ids[0, 1:].tolist()):
            h, own = states[t].astype(np.float64), logits[t]
            p = [softmax(own), np.full(CLASSES, 1 / CLASSES), softmax(own), np.full(CLASSES, 1 / CLASSES)]
            p.append(follow(softmax(own), stored, words[len(stored) :]))
            if keys:
                last: Any = range(max(0, len(keys) - NEAR), len(keys))
                p[1] = share([THETA * h @ keys[i] for i in last], [words[i] for i in last])
                last = sorted(range(max(0, len(keys) - LAST), len(keys)), key=lambda i: ((keys[i] - h) ** 2).sum())
                kernel = {i: 1 / (1e-3 + ((keys[i] - h) ** 2).sum()) for i in last[:NEAREST]}
                adapted = own.copy()
                for i, weight in kernel.items():
                    residual = predictions[i] - np.eye(CLASSES)[words[i]]
                    adapted -= RATE * weight / sum(kernel.values()) * (keys[i] @ h) * residual
                p[2] = softmax(adapted)
                near = sorted(range(len(keys)), key=lambda i: ((keys[i] - h) ** 2).sum())[:NEAREST]
                p[3] = share([-((keys[i] - h) ** 2).sum() / (2 * WIDTH**2) for i in near], [words[i] for i in near])
            if number == len(texts) - 1:
                scores.append(math.log(sum(w * each[word] for w, each in zip(WEIGHTS, p, strict=True))))
            keys.append(h)
            words.append(word)
            predictions.append(softmax(own))
    return np.array(scores)


def follow(own: np.ndarray, stored: list[int], text: list[int]) -> np.ndarray:
    """What n-grams make of a model's prediction: a text goes on after what is stored."""
    p, past = PRIOR * own, stored + text
    for i, word in enumerate(past):
        n = 0
        while n < min(ORDER, i) and past[i - 1 - n] == past[-1 - n]:
            n += 1
        p[word] += GROWTH**n * (n > 0)
    return np.asarray(p / p.sum())


def softmax(logits: Any) -> np.ndarray:
    likely = np.exp(np.asarray(logits) - np.max(logits))
    return np.asarray(likely / likely.sum())


def share(likeness: list[float], words: list[int]) -> np.ndarray:
    return np.bincount(words, softmax(likeness), minlength=CLASSES)


def test_scores_are_the_loop_over_time(lm):
    first, second = text(12), text(30, 2)
    second[0, 9:16], second[0, 20:24] = first[0, 2:9], second[0, 11:15]
    expected = loop(lm.model, [first])
    np.testing.assert_allclose(lm.score(first)[0].numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(lm.score(second)[0].numpy(), loop(lm.model, [first, second]), atol=2e-5)
    assert len(lm.store) == 11 + 29
    assert torch.equal(lm.store.values, torch.cat([first[0, 1:], second[0, 1:]]))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_certified(name):
    lm = adapt(make_model(name))
    lm.write(text(40)[0])
    certificate = memory.certify(lm, text(24, 2, rows=2))
    assert certificate.passed, str(certificate)
    # Generation is that distribution too. (Of RWKV the cached state is another model, with or without memories.)
    row = lm.generate(text(9, 3), **GREEDY, use_cache=name != "rwkv")
    distribution = lm.distribution(row)
    assert torch.equal(distribution[0, -6:].argmax(1), row[0, -6:])


def test_probabilities_of_a_large_vocabulary_add_up_to_one():
    classes = 260_000
    model = make_model(vocab_size=classes)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # logits as far apart as those of a trained model
    lm = memory.AdaptiveLanguageModel(model, cache=memory.NeuralCache(NEAR, classes), weights=[0.9, 0.1])
    ids = text(9)
    sums = lm.distribution(ids).double().exp().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=2e-6, rtol=0)
    with torch.no_grad():
        exact = model(ids).logits[0, :-1].double().log_softmax(1)
    torch.testing.assert_close(lm.score_plain(ids)[0], exact[range(8), ids[0, 1:]].float(), atol=3e-6, rtol=0)


class Peeking(memory.AdaptiveLanguageModel):
    """Stores a token before it is scored, as many published results did."""

    def score(self, input_ids, attention_mask=None, remember=True, **options):
        self.write(input_ids[0], tag="peek")
        scores = super().score(input_ids, attention_mask, remember, **options)
        self.undo("peek")
        return scores


class Unnormalised(memory.AdaptiveLanguageModel):
    """Adds what memories give to the model's own probabilities."""

    total = 1.2

    def distribution(self, input_ids, *, context=None):
        return super().distribution(input_ids, context=context) + math.log(self.total)


class NearlyNormalised(Unnormalised):
    total = 1.0001


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Peeking, ["distribution", "future", "itself"]),
        (Unnormalised, ["add up", "distribution", "itself"]),
        (NearlyNormalised, ["add up"]),
    ],
)
def test_a_certificate_is_not_given_to_what_cheats(kind, wrong):
    model = make_model()
    lm = kind(model, cache=memory.NeuralCache(100, CLASSES, 1.0), weights=[0.5, 0.5])
    certificate = memory.certify(lm, text(24))
    assert not certificate.passed
    failed = [check.name for check in certificate.checks if not check.passed]
    assert [any(word in name for name in failed) for word in wrong] == [True] * len(wrong)
    assert "FAIL" in str(certificate)


def test_a_certificate_takes_texts_of_the_model_and_changes_nothing():
    lm = adapt(make_model("gpt2"))
    lm.model.train()
    lm.model.transformer.ln_f.eval()  # frozen by its owner
    assert memory.certify(lm, text(90)).passed  # longer than the model's 64 positions
    assert lm.model.training
    assert not lm.model.transformer.ln_f.training
    assert memory.certify(lm, text(12).tolist()).passed  # type: ignore[arg-type]
    for wrong in (torch.full((1, 20), CLASSES), torch.zeros(1, 20), text(7), text(20)[0]):
        with pytest.raises(ValueError, match=r"token|texts"):
            memory.certify(lm, wrong)
    lm.detach()
    with pytest.raises(ValueError, match="detached"):
        memory.certify(lm, text(24))
    assert not lm.attached


def test_rows_are_texts_of_their_own_and_all_are_remembered(lm):
    other = adapt(lm.model)
    for each in (lm, other):
        each.write(text(12)[0])
    rows = text(20, 2, rows=2)
    together = lm.score(rows)
    apart = torch.cat([other.score(row[None], remember=False) for row in rows])
    torch.testing.assert_close(together, apart)
    assert len(other.store) == 11
    assert torch.equal(lm.store.values[11:], rows[:, 1:].flatten())
    # What all of them have left is seen by the next.
    for row in rows:
        other.write(row)
    torch.testing.assert_close(lm.score(text(20, 3), remember=False), other.score(text(20, 3), remember=False))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_neither_read_nor_stored(lm, side):
    ids, padding = text(20), torch.full((1, 4), 2)
    expected = lm.score(ids, remember=False)
    parts, masks = [padding, ids], [torch.zeros(1, 4), torch.ones(1, 20)]
    if side == "right":
        parts, masks = parts[::-1], masks[::-1]
    found = lm.score(torch.cat(parts, 1), torch.cat(masks, 1).long())
    valid = slice(4, None) if side == "left" else slice(0, 19)
    assert torch.equal(found[:, valid], expected)
    assert float(found.sum() - found[:, valid].sum()) == pytest.approx(0, abs=1e-4)
    assert torch.equal(lm.store.values, ids[0, 1:])


def test_a_long_text_is_read_in_windows_that_share_one_past(lm):
    ids = text(50)
    scores = lm.score(ids, remember=False, context=16)
    plain = torch.cat([lm.score_plain(ids[:, first : first + 17]) for first in range(0, 49, 16)], 1)
    torch.testing.assert_close(lm.score_plain(ids, context=16), plain)
    other = adapt(lm.model)
    pieces = [other.score(ids[:, first : first + 17], context=16) for first in range(0, 49, 16)]
    torch.testing.assert_close(scores, torch.cat(pieces, 1))
    torch.testing.assert_close(lm.distribution(ids, context=16).gather(2, ids[:, 1:, None])[..., 0], scores)
    longer = lm.score(text(90), remember=False)
    assert longer.shape == (1, 89)  # longer than the model's 64 positions
    assert torch.equal(lm.score(text(90), remember=False, context=1000), longer)


def test_a_distribution_does_not_depend_on_how_many_positions_are_computed_at_once(lm, monkeypatch):
    lm.write(text(40)[0])
    ids = text(50, 2)
    whole = lm.distribution(ids, context=16)
    monkeypatch.setattr(adaptive_language_model, "PROBABILITIES", 5 * CLASSES)
    torch.testing.assert_close(lm.distribution(ids, context=16), whole)


def test_a_text_that_was_read_is_recalled_and_taken_back(lm):
    ids = text(30)
    before = lm.score(ids, remember=False)
    lm.write(ids, tag="book")
    assert float(lm.score(ids, remember=False).mean()) > float(before.mean()) + 0.5
    lm.undo("book")
    assert torch.equal(lm.score(ids, remember=False), before)
    assert len(lm.store) == 0
    assert torch.equal(lm.score(ids, tag="scored"), before)
    assert len(lm.store) == 29
    lm.undo("scored")
    assert torch.equal(lm.score(ids, remember=False), before)
    with pytest.raises(ValueError, match="book"):
        lm.undo("book")


def test_the_oldest_make_room_and_come_back_with_undo():
    model = make_model()
    lm = memory.AdaptiveLanguageModel(model, cache=memory.NeuralCache(10, CLASSES, THETA), weights=[0.5, 0.5])
    lm.write(text(20)[0])
    before = lm.score(text(9, 2), remember=False)
    lm.write(text(20, 3)[0], tag="later")
    assert not torch.equal(lm.score(text(9, 2), remember=False), before)
    lm.undo("later")
    assert torch.equal(lm.score(text(9, 2), remember=False), before)


def test_what_a_small_memory_has_lost_is_seen_by_no_predictor(tmp_path):
    model = make_model()
    lm = adapt(model, store=memory.EpisodicMemory(7, 16))  # fewer than the cache and MbPA have room for
    lm.score(text(30))
    lm.save_pretrained(tmp_path)
    again = memory.AdaptiveLanguageModel.from_pretrained(model, tmp_path)
    assert torch.equal(again.score(text(20, 2), remember=False), lm.score(text(20, 2), remember=False))
    assert len(lm.cache) == len(lm.mbpa) == 7


GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def greedy(lm, ids):
    """Continue by the most likely token of the distribution, one at a time."""
    rows = []
    for row in ids:
        for _ in range(GREEDY["max_new_tokens"]):
            asked = torch.cat([row, row[:1]])[None]
            row = torch.cat([row, lm.distribution(asked)[0, -1].argmax()[None]])
        rows.append(row)
    return torch.stack(rows)


def test_generate_is_the_models_own_in_every_way():
    lm = adapt(make_model("gpt2"))
    lm.write(text(40)[0])
    ids = text(9, 2, rows=2)
    expected = greedy(lm, ids)
    for use_cache in (True, False):
        assert torch.equal(lm.generate(ids, use_cache=use_cache, **GREEDY), expected)
    assert not torch.equal(lm.model.generate(ids, **GREEDY), expected)
    padded = torch.cat([torch.full((2, 3), 2), ids], 1)
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 9)], 1).long()
    assert torch.equal(lm.generate(padded, attention_mask=mask, **GREEDY)[:, 3:], expected)
    shown: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    for use_cache in (True, False):  # the tokens would be the same where the padding is seen, and the scores not
        options = shown | GREEDY | {"use_cache": use_cache}
        scores = lm.generate(padded, attention_mask=mask, **options).scores
        torch.testing.assert_close(scores, lm.generate(ids, **options).scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(lm.generate(expected[:1], prompt_lookup_num_tokens=3, **GREEDY)[0, :15], expected[0])
    assistant = make_model("gpt2", seed=3)
    assert torch.equal(lm.generate(ids[:1], assistant_model=assistant, **GREEDY), expected[:1])
    streamer = Words()
    assert torch.equal(lm.generate(ids[:1], streamer=streamer, **GREEDY), expected[:1])
    assert streamer.words == expected[0].tolist()
    assert len(lm.store) == 39  # nothing of all that was remembered


def test_passes_that_other_processors_make_are_not_the_texts():
    lm = adapt(make_model())
    lm.write(text(40)[0])
    ids, scale = text(9, 3), 1.5
    expected = ids
    for _ in range(GREEDY["max_new_tokens"]):
        own = lm.distribution(torch.cat([expected, expected[:, :1]], 1))[:, -1]
        with torch.no_grad():
            free = lm.model(expected[:, 8:]).logits[:, -1].log_softmax(1)  # without the prompt but for its last token
        expected = torch.cat([expected, (free + scale * (own - free)).argmax(1, keepdim=True)], 1)
    for use_cache in (True, False):
        assert torch.equal(lm.generate(ids, guidance_scale=scale, use_cache=use_cache, **GREEDY), expected)


def test_what_has_no_tokens_of_the_model_is_not_continued(lm):
    for wrong in (torch.full((1, 5), CLASSES), text(9)[0], torch.empty(1, 0, dtype=torch.int64), torch.ones(1, 5)):
        with pytest.raises(ValueError, match=r"token|texts"):
            lm.generate(wrong, **GREEDY)
    with pytest.raises(ValueError, match="give input_ids"):
        lm.generate(inputs_embeds=lm.model.get_input_embeddings()(text(9)), **GREEDY)


def test_beams_of_the_same_tokens_behind_other_padding_stay_apart():
    lm = adapt(make_model())
    lm.write(text(40)[0])
    ids = text(9, 12).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options: dict[str, Any] = {"num_beams": 5, "num_return_sequences": 5, "length_penalty": 0.0, **GREEDY}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    together = lm.generate(ids, attention_mask=mask, **options)
    apart = [lm.generate(ids[:1], attention_mask=row[None], **options).sequences_scores for row in mask]
    torch.testing.assert_close(together.sequences_scores, torch.cat(apart), atol=1e-4, rtol=1e-4)


class Words(transformers.generation.BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.words: list[int] = []

    def put(self, value):
        self.words += value.flatten().tolist()

    def end(self):
        pass


def test_samples_are_drawn_from_the_mixture_before_temperature_and_penalties():
    lm = adapt(make_model())
    lm.write(text(40)[0])
    ids = text(9, 2)
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": None}
    drawn = lm.generate(ids, do_sample=True, max_new_tokens=2, temperature=0.5, top_k=0, **options)
    expected = lm.distribution(drawn.sequences)[0, -2:]
    for scores, own in zip(drawn.scores, expected, strict=True):
        torch.testing.assert_close(scores[0].log_softmax(0), (own / 0.5).log_softmax(0), atol=1e-4, rtol=1e-4)
    # A penalty of the settings multiplies log p of the mixture, of the tokens that the text has.
    punished = lm.generate(ids, do_sample=False, max_new_tokens=1, repetition_penalty=2.0, **options)
    own = lm.distribution(punished.sequences)[0, -1]
    own[ids[0]] *= 2.0
    torch.testing.assert_close(punished.scores[0][0], own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_memory_follows_the_beam(use_cache):
    lm = adapt(make_model())
    lm.write(text(40)[0])
    ids = text(9, 2, rows=2)
    options: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0}
    found = lm.generate(ids, use_cache=use_cache, return_dict_in_generate=True, output_scores=True, **options, **GREEDY)
    scores = lm.score(found.sequences, remember=False)[:, 8:].sum(1)
    torch.testing.assert_close(scores, found.sequences_scores, atol=1e-4, rtol=1e-4)
    assert len({tuple(row) for row in found.sequences.tolist()}) == 8


def test_bfloat16_models_are_adapted_in_float32():
    lm = adapt(make_model(dtype=torch.bfloat16))
    lm.write(text(30)[0])
    certificate = memory.certify(lm, text(24, 2))
    assert certificate.passed, str(certificate)
    assert lm.store.dtype == torch.float32
    assert lm.generate(text(9), **GREEDY).shape == (1, 15)


def test_the_model_is_left_as_it_was_and_detached(lm):
    model = lm.model.train()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    with lm:
        lm.score(text(20))
        assert model.training
        assert not model.lm_head._forward_pre_hooks
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    for call in (lambda: lm.score(text(20)), lambda: lm.generate(text(9), **GREEDY), lambda: lm.write(text(9))):
        with pytest.raises(ValueError, match="detached"):
            call()
    assert len(lm.store) == 19
    lm.attach()
    assert lm.score(text(20)).shape == (1, 19)


def test_fit_finds_the_best_of_its_candidates_in_one_pass():
    model = make_model()
    validation = torch.cat([text(40)] * 3, 1)[0]
    lm = adapt(model, weights=None)
    with pytest.raises(ValueError, match="fit"):
        lm.score(text(20))
    passes: list[Any] = []
    model.register_forward_hook(lambda *each: passes.append(each))
    passes.clear()
    candidates: dict[str, Any] = {"thetas": [0.01, 0.3], "bandwidths": [0.5, 3.0], "rates": [0.05, 0.5]}
    weights = lm.fit(validation, context=40, **candidates)
    assert len(passes) == 3  # three windows
    assert float(weights.sum()) == pytest.approx(1)
    assert len(lm.store) == 0
    fitted = float(lm.score(validation[None], remember=False, context=40).mean())
    assert fitted > float(lm.score_plain(validation[None], context=40).mean()) + 0.3
    # Each candidate alone, as a grid would find it.
    for name, values in (
        ("cache", candidates["thetas"]),
        ("mbpa", candidates["rates"]),
        ("knn", candidates["bandwidths"]),
        ("ngram", [(growth, prior) for growth in (2.0, 4.0, 8.0, 16.0, 32.0) for prior in 4.0 ** np.arange(-1, 8)]),
    ):
        gains = [single(model, name, value, validation) for value in values]
        chosen = {
            "cache": lm.cache.theta,
            "mbpa": lm.mbpa.descent.lr,
            "knn": lm.knn.bandwidth,
            "ngram": (lm.ngram.growth, lm.ngram.prior),
        }[name]
        assert chosen == values[gains.index(max(gains))]


def test_candidates_may_be_any_numbers_each_once():
    validation = torch.cat([text(40)] * 2, 1)[0]
    lm, other = adapt(make_model(), weights=None), adapt(make_model(), weights=None)
    lm.cache.theta = 0.0
    weights = lm.fit(validation, thetas=np.array([0.01, 0.3]), rates=torch.tensor([0.05, 0.5]))
    torch.testing.assert_close(other.fit(validation, thetas=(0.01, 0.3, 0.01), rates=[0.05, 0.5, 0.05]), weights)
    assert lm.settings == pytest.approx(other.settings)
    for wrong in ({"thetas": [-1.0]}, {"rates": [None]}, {"bandwidths": [0.0]}):
        with pytest.raises(ValueError, match="must be positive"):
            lm.fit(validation, **wrong)


def test_a_text_of_one_pattern_rules_no_predictor_out():
    lm = memory.AdaptiveLanguageModel(make_model())
    weights = lm.fit(torch.arange(64) % 7)
    assert float(weights.min()) >= 1 / (63 + 5)
    assert float(weights.sum()) == pytest.approx(1)


def test_a_text_too_short_to_choose_by_is_told():
    lm = memory.AdaptiveLanguageModel(make_model())
    with pytest.warns(UserWarning, match="a text of 3 tokens, which says little: give at least 50"):
        lm.fit(torch.tensor([1, 2, 3]))


def single(model, name, value, validation):
    """The likelihood of the text in the best mixture of the model and one memory."""
    head = model.get_output_embeddings()
    store = memory.EpisodicMemory(1000, 16)
    only: Any = {
        "cache": lambda: memory.NeuralCache(NEAR, CLASSES, value),
        "mbpa": lambda: memory.StreamMbPA(head, LAST, neighbours=NEAREST, lr=value),
        "knn": lambda: memory.UnboundedCache(store, CLASSES, neighbours=NEAREST, bandwidth=value),
        "ngram": lambda: memory.NGramCache(store, CLASSES, order=ORDER, growth=value[0], prior=value[1]),
    }
    lm = memory.AdaptiveLanguageModel(model, **{name: only[name]()}, weights=[0.0, 1.0])
    alone = lm.score(validation[None], remember=False, context=40)[0]
    plain = lm.score_plain(validation[None], context=40)[0]
    return float(memory.mix([plain, alone], memory.fit_weights([plain, alone])).mean())


def test_a_saved_memory_is_loaded_for_the_same_model_alone(lm, tmp_path):
    lm.write(text(30)[0], tag="book")
    expected = lm.score(text(20, 2), remember=False)
    lm.save_pretrained(tmp_path)
    found: Any = memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path)
    assert torch.equal(found.score(text(20, 2), remember=False), expected)
    assert torch.equal(found.weights, lm.weights)
    found.undo("book")
    assert len(found.store) == 0
    lm.save_pretrained(tmp_path)  # over its own
    with pytest.raises(MemoryFileError, match="another model"):
        memory.AdaptiveLanguageModel.from_pretrained(make_model(seed=1), tmp_path)
    with pytest.raises(MemoryFileError, match="another model"):
        adapt(make_model(seed=1)).save_pretrained(tmp_path)
    with pytest.raises(HubError, match="there is no folder"):
        memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MemoryFileError, match="save_pretrained"):
        memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path / "empty")
    whole = json.loads((tmp_path / "language_model.json").read_text())
    for damaged in ('{"format": "another"}', "[" * 100_000, json.dumps(whole | {"cache": []})):
        (tmp_path / "language_model.json").write_text(damaged)
        with pytest.raises(MemoryFileError, match="damaged"):
            memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path)


def test_a_save_that_fails_leaves_memory_and_settings_as_they_were(lm, tmp_path, monkeypatch):
    lm.write(text(30)[0])
    lm.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    lm.weights = [0.1, 0.3, 0.3, 0.2, 0.1]
    lm.write(text(20)[0])
    with memory.EpisodicMemory.open(tmp_path):  # another writer
        with pytest.raises(MemoryFileError, match="is being written by"):
            lm.save_pretrained(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".writer"} == before

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("fastweights.memory.store._writer.write_snapshot", refuse)
        with pytest.raises(MemoryFileError, match="No space left"):
            lm.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    lm.save_pretrained(tmp_path)
    assert len(memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path).store) == 29 + 19


def test_what_killed_processes_had_begun_is_removed_by_a_later_save(lm, tmp_path):
    parts = [tmp_path / f".{name}.0123.part" for name in ("language_model.json", "README.md")]
    for part in parts:
        part.write_bytes(b"{")
    lm.save_pretrained(tmp_path)
    assert not any(part.exists() for part in parts)


def test_another_kind_of_memory_is_not_replaced(lm, tmp_path):
    store = memory.EpisodicMemory(10, 3)
    store.write(torch.zeros(2, 3), torch.arange(2))
    store.save(tmp_path)
    with pytest.raises(MemoryFileError, match="no language model's"):
        lm.save_pretrained(tmp_path)
    assert len(memory.EpisodicMemory.load(tmp_path)) == 2


def test_what_is_opened_can_be_saved_elsewhere(lm, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    lm.save_pretrained(there)
    lm.write(text(30)[0])
    lm.save_pretrained(here)
    writer: Any = memory.AdaptiveLanguageModel.open(make_model(), here)
    with writer:
        writer.weights = [0.1, 0.3, 0.3, 0.2, 0.1]
        for folder in (here, there):
            writer.save_pretrained(folder)
            found: Any = memory.AdaptiveLanguageModel.from_pretrained(make_model(), folder)
            assert len(found.store) == 29
            assert torch.equal(found.weights, writer.weights)


def test_what_is_opened_is_written_to_the_disk(lm, tmp_path):
    lm.save_pretrained(tmp_path)
    with memory.AdaptiveLanguageModel.open(make_model(), tmp_path) as writer:
        writer.write(text(30)[0])
        reader = memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path)
        assert len(reader.store) == 29
        writer.score(text(10))
        assert reader.store.refresh()
        torch.testing.assert_close(reader.score(text(20, 2), remember=False), writer.score(text(20, 2), remember=False))
    with pytest.raises(ValueError, match="detached"):
        writer.write(text(30)[0])


class Spelling:
    """A tokenizer whose tokens are letters."""

    def __init__(self, letters: int = 26) -> None:
        self.letters = letters

    def get_vocab(self):
        return {chr(97 + index): index for index in range(self.letters)}

    def __call__(self, words, **options):
        return {"input_ids": [ord(letter) - 97 for letter in words if letter.isalpha()]}


class Beginning(Spelling):
    """A tokenizer that begins every text with a token."""

    bos_token_id = 60

    def __call__(self, words, **options):
        return {"input_ids": [self.bos_token_id, *super().__call__(words)["input_ids"]]}


def test_every_window_begins_with_the_token_that_texts_began_with_in_training(tmp_path):
    lm, ids = adapt(make_model(), tokenizer=Beginning()), text(30)
    assert lm.bos_token_id == 60
    expected, first = [], 0
    while first < 29:  # windows of seven tokens, of which one is the first token
        part = ids[0, first : first + 7]
        with torch.no_grad():
            logits = lm.model(torch.cat([torch.tensor([60]), part[:-1]])[None]).logits[0, 1:]
        expected.append(logits.log_softmax(1).gather(1, part[1:, None])[:, 0])
        first += 6
    assert len(expected) == 5
    torch.testing.assert_close(lm.score_plain(ids, context=7)[0], torch.cat(expected), atol=1e-5, rtol=0)
    assert lm.score(ids, context=1).shape == (1, 29)  # the first token and one of the text
    assert len(lm.store) == 29
    assert memory.certify(lm, text(90, 2)).passed
    own = torch.cat([torch.tensor([60]), ids[0]])[None]  # a text that begins with it is not given a second one
    with torch.no_grad():
        plain = lm.model(own).logits[0, :-1].log_softmax(1).gather(1, own[0, 1:, None])[:, 0]
    torch.testing.assert_close(lm.score_plain(own)[0], plain, atol=1e-5, rtol=0)
    assert lm.score_plain(text(64)).shape == (1, 63)  # as many as the model's positions: two windows
    lm.save(tmp_path)
    assert memory.AdaptiveLanguageModel.from_pretrained(lm.model, tmp_path).bos_token_id == 60
    facts = json.loads((tmp_path / "language_model.json").read_text())
    del facts["bos_token_id"]  # as an earlier version wrote it
    (tmp_path / "language_model.json").write_text(json.dumps(facts))
    again = memory.AdaptiveLanguageModel.from_pretrained(lm.model, tmp_path, tokenizer=Beginning())
    assert again.bos_token_id is None


def test_a_first_token_is_taken_from_a_tokenizer_that_writes_it_alone():
    assert adapt(make_model(), tokenizer=Spelling()).bos_token_id is None
    assert adapt(make_model(), tokenizer=Beginning(), bos_token_id=None).bos_token_id is None
    assert adapt(make_model(), bos_token_id=0).bos_token_id == 0
    for wrong in (CLASSES, -1, 1.0, "a"):
        with pytest.raises(ValueError, match="bos_token_id must be"):
            adapt(make_model(), bos_token_id=wrong)


def test_text_is_read_through_the_tokenizer(tmp_path):
    model = make_model()
    lm = adapt(model, tokenizer=Spelling())
    lm.write("the cat")
    assert lm.store.values.tolist() == [7, 4, 2, 0, 19]
    lm.save_pretrained(tmp_path)
    with pytest.raises(MemoryFileError, match="another tokenizer"):
        memory.AdaptiveLanguageModel.from_pretrained(model, tmp_path, tokenizer=Spelling(25))
    with pytest.raises(ValueError, match="at least two tokens"):
        lm.write("")
    with pytest.raises(ValueError, match="tokenizer"):
        adapt(model).write("the cat")
    with pytest.raises(ValueError, match="the model was trained with"):
        adapt(model, tokenizer=Spelling(100))
    with pytest.raises(ValueError, match="tokenizer must be"):
        adapt(model, tokenizer=str.split)


def test_strings_and_what_a_tokenizer_returns_are_scored_and_continued_as_their_tokens_are():
    lm = adapt(make_model(), tokenizer=Spelling())
    lm.write("the cat sat on the mat and the dog sat on the cat")
    ids = torch.tensor([Spelling()("the dog sat")["input_ids"]])
    both = torch.cat([torch.zeros(1, 2, dtype=torch.int64), ids], 1)
    mask = (torch.arange(both.shape[1]) >= 2).long()[None]
    padded = transformers.BatchEncoding({"input_ids": both, "attention_mask": mask})
    expected = lm.score(ids, remember=False)
    assert torch.equal(lm.score("the dog sat", remember=False), expected)
    torch.testing.assert_close(lm.score(padded, remember=False)[:, 2:], expected)
    assert torch.equal(lm.score_plain("the dog sat"), lm.score_plain(ids))
    assert torch.equal(lm.distribution("the dog sat"), lm.distribution(ids))
    continued = lm.generate(ids, **GREEDY)
    assert torch.equal(lm.generate("the dog sat", **GREEDY), continued)
    assert torch.equal(lm.generate(padded, **GREEDY)[:, 2:], continued)
    assert lm.generate("t", **GREEDY).shape == (1, 1 + GREEDY["max_new_tokens"])
    uneven = {"input_ids": both.repeat(2, 1), "attention_mask": torch.cat([mask, torch.ones_like(mask)])}
    with pytest.raises(ValueError, match="texts must have one length, got rows of 9, 11 tokens without padding"):
        lm.score_plain(uneven)
    for call in (adapt(make_model()).score, adapt(make_model()).generate):
        with pytest.raises(ValueError, match=r"a string needs the tokenizer: make the model with tokenizer=\.\.\."):
            call("the dog sat")


@pytest.mark.parametrize("copy_after", [1, 4, 12])
def test_a_text_that_was_read_is_recalled_word_for_word_where_copies_are_asked_for(copy_after):
    lm, stored = adapt(make_model()), text(200, 5)
    lm.write(stored)
    # The second text shares its first words with the first one, more than a cache of n-grams compares.
    other = torch.cat([stored[:, 50:80], text(50, 6)], 1)
    lm.write(other)
    options = {**GREEDY, "max_new_tokens": 20, "copy_after": copy_after}
    for first, whole in ((20, stored), (35, stored), (10, other[:, 15:])):
        prompt = whole[:, first : first + 16]
        expected = whole[:, first : first + 36]
        assert torch.equal(lm.generate(prompt, **options), expected)
        assert not torch.equal(lm.generate(prompt, **{**options, "copy_after": None}), expected)
    # Rows of a batch, with padding.
    rows = torch.cat([stored[:, 20:36], other[:, 25:41]])
    padded = torch.cat([torch.full((2, 3), 2), rows], 1)
    mask = (torch.arange(19) >= 3).long().repeat(2, 1)
    found = lm.generate(padded, attention_mask=mask, **options)[:, 3:]
    assert torch.equal(found, torch.cat([stored[:, 20:56], other[:, 25:61]])[:, : found.shape[1]])
    # What the text that is being written has itself is not copied, or it would be repeated to the end.
    lm.store.clear()
    twice = torch.cat([stored[:, :40], stored[:, :15]], 1)
    assert torch.equal(lm.generate(twice, **options), lm.generate(twice, **{**options, "copy_after": None}))


def test_copies_of_too_many_or_no_words_are_refused():
    lm = adapt(make_model())
    for wrong, message in (
        (0, "copy_after must be an integer of at least 1, got 0"),
        (65, "copy_after must be at most 64"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.generate(text(9), **GREEDY, copy_after=wrong)


def headless(model):
    model.set_output_embeddings(None)
    return model


def encoder_decoder():
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "vocab_size": CLASSES}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**small, **heads))


def not_finite(model):
    torch.nn.init.constant_(model.model.norm.weight, math.inf)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.nn.Linear(2, 2), "AutoModelForCausalLM"),
        (encoder_decoder, "encoder-decoder"),
        (lambda: headless(make_model()), "no output embedding"),
        (lambda: not_finite(make_model()), "not finite"),
    ],
)
def test_other_models_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        memory.AdaptiveLanguageModel(make(), cache=memory.NeuralCache(10, CLASSES), weights=[0.5, 0.5])


def test_memories_of_other_sizes_are_refused():
    model = make_model()
    head = model.get_output_embeddings()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cache": memory.NeuralCache(10, 7)}, "num_classes=61"),
        ({"cache": memory.NeuralCache(None, CLASSES)}, "memory of its own"),
        ({"cache": memory.NeuralCache(10, CLASSES), "weights": [0.5]}, "weight"),
        ({"cache": memory.NeuralCache(10, CLASSES), "weights": [0.9, 0.2]}, "sum 1"),
        ({"mbpa": memory.StreamMbPA(torch.nn.Linear(16, CLASSES), 10)}, "get_output_embeddings"),
        ({"mbpa": memory.StreamMbPA(head, 10, steps=2)}, "one step"),
        ({"knn": memory.UnboundedCache(memory.EpisodicMemory(10, 3), CLASSES)}, "width 16"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            memory.AdaptiveLanguageModel(model, **options)


def test_weights_of_the_three_memories_before_n_grams_make_those_three():
    lm = memory.AdaptiveLanguageModel(make_model(), weights=[0.4, 0.2, 0.2, 0.2])
    assert lm.names == ["model", "cache", "mbpa", "knn"]
    assert lm.score(text(20)).shape == (1, 19)
    assert memory.AdaptiveLanguageModel(make_model(), weights=[0.2] * 5).ngram is not None
    with pytest.raises(ValueError, match="takes a weight for each of the 5 predictors"):
        memory.AdaptiveLanguageModel(make_model(), weights=[0.5, 0.5])


def test_all_memories_are_made_where_none_is_given():
    lm = memory.AdaptiveLanguageModel(make_model())
    assert lm.names == ["model", "cache", "mbpa", "knn", "ngram"]
    lm.fit(torch.cat([text(60)] * 2, 1)[0])
    assert set(lm.settings) == {"theta", "rate", "bandwidth", "growth", "prior"}
    assert memory.certify(lm, text(24)).passed


def test_a_text_that_is_refused_changes_nothing(lm):
    lm.write(text(12)[0])
    wrong: list[tuple[Any, Any, str]] = [
        (text(12)[0], None, r"\[B,T\]"),
        (torch.full((1, 12), CLASSES), None, "another tokenizer"),
        (torch.zeros(1, 12), None, "integers"),
        (text(12)[:, :1], None, "at least two"),
        (torch.empty(1, 0, dtype=torch.int64), None, r"\[B,T\]"),
        (text(12), torch.zeros(1, 12), "0 tokens"),
        (text(12), torch.ones(1, 11), "attention_mask"),
    ]
    for ids, mask, words in wrong:
        with pytest.raises(ValueError, match=words):
            lm.score(ids, mask)
    for given in (torch.full((12,), CLASSES), [1], []):
        with pytest.raises(ValueError, match="token"):
            lm.write(given)
    assert len(lm.store) == 11
    # Hidden states that stop being finite in a later window, after the memory has seen an earlier one.
    before = lm.score(text(12, 2), remember=False)
    norm = lm.model.model.norm
    calls: list[int] = []

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        calls.append(1)
        return output if len(calls) == 1 else output * math.nan

    hook = norm.register_forward_hook(spoil)
    with pytest.raises(ValueError, match="not finite"):
        lm.score(text(40), context=20)
    hook.remove()
    assert len(lm.store) == 11
    torch.testing.assert_close(lm.score(text(12, 2), remember=False), before)


def write_until_killed(folder, tell):
    with memory.AdaptiveLanguageModel.open(make_model(), folder) as lm:
        for number in range(10_000):
            lm.write(text(6, number)[0])
            os.write(tell, b".")


def test_what_was_written_survives_a_kill(lm, tmp_path, threads):
    threads(1)  # a forked process must not need the threads of its parent
    lm.save_pretrained(tmp_path)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            write_until_killed(tmp_path, tell)
        finally:
            os._exit(1)
    os.close(tell)
    os.read(told, 1)  # one text is written
    time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    written = 1
    while data := os.read(told, 2**16):
        written += len(data)
    os.close(told)
    found = memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path)
    assert len(found.store) in (5 * written, 5 * (written + 1))  # one more may have reached the disk unsaid
    expected = torch.cat([text(6, number)[0, 1:] for number in range(len(found.store) // 5)])
    assert torch.equal(found.store.values, expected)
    assert found.score(text(20), remember=False).isfinite().all()


def test_predictions_may_be_kept_in_half_the_memory(lm):
    head = lm.model.get_output_embeddings()
    half = memory.StreamMbPA(head, LAST, neighbours=NEAREST, lr=2.0, half=True)  # far enough for every class to count
    other = memory.AdaptiveLanguageModel(lm.model, mbpa=half, weights=[0.0, 1.0])
    other.write(text(30)[0])
    before = other.score(text(20, 2), remember=False)
    whole = memory.StreamMbPA(head, LAST, neighbours=NEAREST, lr=2.0)
    expected = memory.AdaptiveLanguageModel(lm.model, mbpa=whole, weights=[0.0, 1.0])
    expected.write(text(30)[0])
    torch.testing.assert_close(before, expected.score(text(20, 2), remember=False), atol=1e-2, rtol=0)
    assert torch.equal(other.score(text(20, 2), remember=False), before)  # what was overwritten is back
    asked = other.distribution(text(20, 2)).gather(2, text(20, 2)[:, 1:, None])[..., 0]
    torch.testing.assert_close(asked, before, atol=1e-4, rtol=0)  # of the numbers that are kept, both of them
    assert memory.certify(other, text(24, 3)).passed
    row = other.generate(text(9, 3), **GREEDY)
    assert torch.equal(other.distribution(row)[0, -6:].argmax(1), row[0, -6:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_on_a_gpu_the_scores_are_the_same_and_certified(name):
    store = memory.EpisodicMemory(1000, 16).to("cuda")
    on_cpu, on_gpu = adapt(make_model(name)), adapt(make_model(name).cuda(), store=store)
    for number in range(2):
        ids = text(40, number)
        torch.testing.assert_close(on_gpu.score(ids).cpu(), on_cpu.score(ids), rtol=1e-3, atol=1e-3)
    certificate = memory.certify(on_gpu, text(24, 2, rows=2))
    assert certificate.passed, str(certificate)
    assert on_gpu.generate(text(9, 3).cuda(), **GREEDY).device.type == "cuda"


def test_a_memory_of_other_weights_is_refused_wherever_it_is_read_written_or_saved(tmp_path):
    lm, ids = adapt(make_model()), text(30)
    with torch.no_grad():
        lm.model.model.layers[0].mlp.up_proj.weight.mul_(1.1)  # nothing was written yet
        lm.write(ids, tag="first")
        lm.model.load_state_dict(lm.model.state_dict())  # the same weights, written once more
        expected = lm.score(ids, remember=False)
        lm.model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    for call in (
        lambda: lm.score(ids, remember=False),
        lambda: lm.distribution(ids),
        lambda: lm.write(ids),
        lambda: lm.generate(ids[:, :5], **GREEDY),
        lambda: lm.save_pretrained(tmp_path / "saved"),
        lambda: lm.save(tmp_path / "saved"),
    ):
        with pytest.raises(ValueError, match="the model's weights were changed, and the 29 entries of the memory are"):
            call()
    assert not (tmp_path / "saved").exists()
    assert len(lm.store) == 29
    with torch.no_grad():
        lm.model.model.layers[0].mlp.up_proj.weight.div_(1.1)
    lm.undo("first")
    lm.write(ids)
    torch.testing.assert_close(lm.score(ids, remember=False), expected, atol=1e-4, rtol=1e-4)


def test_the_same_weights_elsewhere_are_the_same(tmp_path):
    lm, ids = adapt(make_model()), text(30)
    lm.write(ids)
    before = lm.score(ids, remember=False)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.data = parameter.data.clone()
    assert torch.equal(lm.score(ids, remember=False), before)
    lm.model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="weights were changed"):
        lm.score(ids, remember=False)
