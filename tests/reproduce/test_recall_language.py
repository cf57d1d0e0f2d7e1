import dataclasses
import math

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import RunError, TrainingError
from fastweights.reproduce.recall import _entrants, language
from fastweights.reproduce.recall.frame import Frame
from fastweights.runs import load_run
from fastweights.tasks import text
from fastweights.tasks.recall import IGNORED

from .helpers import TINY, made_up_text, members_of, records, result

pytestmark = pytest.mark.usefixtures("made_up")

SETTINGS: language.Settings = TINY["recall/language"].settings
GRU = """
import torch
class MyGRU(torch.nn.GRU):
    pass
"""
LERP = """
class Lerp(torch.nn.Linear):
    def forward(self, x):
        h, ys = x.new_zeros(x.shape[0], self.out_features), []
        for now in super().forward(x).unbind(1):
            h = torch.lerp(h, now, 0.5)
            ys.append(h)
        return torch.stack(ys, 1)
"""


def make(model="lstm", size=8, words=20, settings=SETTINGS):
    torch.manual_seed(0)
    (entrant,) = _entrants.enter(dataclasses.replace(settings, models=(model,))).values()
    network = language.make_network(lambda: entrant.mixer(size), model, size, words, settings)
    for parameter in network.parameters():  # as it starts, every guess is nearly the same
        parameter.data.mul_(3)
    return network


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 16, 500])
@pytest.mark.parametrize("count", [2, 3, 8, 9, 40, 121])
def test_every_word_but_the_first_is_guessed_once_with_half_a_window_before_it(steps, count):
    stream = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(count))
    inputs, targets = language.cut_scored(stream, steps)
    assert inputs.shape == targets.shape == (len(inputs), steps)
    marked = targets != IGNORED
    assert torch.equal(targets[marked], stream[1:])
    for window, row in enumerate(marked.tolist()):
        for step in (step for step, scored in enumerate(row) if scored):
            assert window == 0 or step >= steps // 2
            place = window * ((steps + 1) // 2) + step  # in the text, of the word that is read
            assert torch.equal(inputs[window, : step + 1], stream[place - step : place + 1])
            assert targets[window, step] == stream[place + 1]


@pytest.mark.parametrize("steps", [1, 4, 5, 20])
def test_the_windows_of_a_pass_begin_at_any_word_and_leave_out_less_than_two_windows(steps):
    stream = torch.arange(41)
    for first in range(steps):
        windows = language.cut_windows(stream, steps, first)
        assert len(windows) == language.count_windows(stream, steps)
        assert torch.equal(windows[:, :-1].flatten(), torch.arange(first, first + len(windows) * steps))
        assert torch.equal(windows[:, 1:], windows[:, :-1] + 1)
        assert len(stream) - windows[:, 1:].numel() <= 2 * steps
    with pytest.raises(ValueError, match="steps must be at most half of the 41 words of the text, got 21"):
        language.count_windows(stream, 21)


@pytest.mark.parametrize("model", ["lstm", "attention", "hidden-delta"])
def test_the_perplexity_is_that_of_every_word_guessed_alone(model):
    corpus, steps = made_up_text("ptb"), SETTINGS.steps
    network = make(model)
    reader = language._Reader(network, corpus, SETTINGS, 1e-3, 1)
    found = reader._score("test")["test_perplexity"]
    stream, half, loss = corpus.test.long(), steps // 2, 0.0
    network.eval()
    for place in range(1, len(stream)):
        # The window that guesses it: the first, or the one in whose later half the word before it stands.
        window = max(0, math.ceil((place - steps) / half))
        before = stream[window * half : place]
        with torch.no_grad():
            loss -= network(before.unsqueeze(0))[0, -1].log_softmax(0)[stream[place]].item()
    assert found == pytest.approx(math.exp(loss / (len(stream) - 1)), rel=1e-4)
    assert abs(found / 20 - 1) > 1e-3  # and not that of guesses without a network


def test_a_network_that_knows_nothing_is_as_perplexed_as_there_are_words():
    network = make()
    torch.nn.init.zeros_(network.embedding.weight)
    reader = language._Reader(network, made_up_text("ptb"), SETTINGS, 1e-3, 1)
    assert reader._score("validation")["validation_perplexity"] == pytest.approx(20, rel=1e-5)


@pytest.mark.parametrize("sampled", [0, 8])
def test_the_last_pass_has_the_softmax_of_all_words(sampled):
    settings = dataclasses.replace(SETTINGS, sampled=sampled, dropout=0.0)
    network, corpus = make(settings=settings), made_up_text("ptb")
    reader = language._Reader(network, corpus, settings, 1e-3, 1)
    losses = []
    for epoch in (0, settings.epochs - 1):
        torch.manual_seed(0)
        loss = reader.loss(epoch, 0)
        batch = reader.windows[: settings.batch_size]
        whole = torch.nn.functional.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        losses.append(abs((loss - whole).item()))
    assert losses[1] < 1e-5
    assert (losses[0] < 1e-5) == (sampled == 0)


def test_dropout_is_of_what_blocks_add_and_of_what_the_head_reads_and_only_in_training():
    network = make(settings=dataclasses.replace(SETTINGS, dropout=0.5))
    tokens = torch.arange(12).view(2, 6)
    network.eval()
    assert torch.equal(network(tokens), network(tokens))
    network.train()
    assert (network.encode(tokens) == 0).float().mean().item() == pytest.approx(0.5, abs=0.2)
    assert (network.blocks[0].dropout(torch.ones(1000)) == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    bare = Frame(lambda: _entrants.Nothing(), vocabulary_size=3, embedding_size=2)
    assert [part.p for part in bare.modules() if isinstance(part, torch.nn.Dropout)] == [0.0] * 4


def test_all_layers_have_nearly_as_many_weights_and_one_of_ones_own_stands_beside(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(GRU)
    layer = f"{tmp_path / 'mine.py'}:MyGRU"
    settings = dataclasses.replace(SETTINGS, models=("lstm", "attention"), layer=layer, learning_rates=(1e-2, 1e-3))
    folder = tmp_path / "run"
    language.run(settings, folder)
    for member in load_run(folder).members:
        assert abs((member.result or {})["parameters"] - settings.parameters) < _entrants.NEAR * settings.parameters
    assert len(members_of(folder)) == 6
    rows = result(folder)["rows"]
    assert [row["model"] for row in rows if "best learning rate" in row["metric"]] == [
        "LSTM on Penn Treebank", "Softmax attention on Penn Treebank", "mine.py:MyGRU on Penn Treebank",
    ]  # fmt: skip
    for row in rows:
        # Five words of twenty come again for a while: whoever learns them is below the words' own numbers.
        assert 5 < row["ours"][0] < 1.1 * row["floor"]
    best = next(row["ours"] for row in rows if row["model"] == "LSTM on Penn Treebank")
    scores = {
        member.settings["learning_rate"]: member.result or {}
        for member in load_run(folder).members
        if "LSTM" in member.model
    }
    assert best == [min(scores.values(), key=lambda each: each["validation_loss"])["test_perplexity"]]
    assert main(["report", str(folder)]) == 0
    assert "mine.py:MyGRU" in capsys.readouterr().out


def test_texts_and_sizes_in_one_folder_are_not_mixed(tmp_path):
    rates = dataclasses.replace(SETTINGS, models=("lstm",), learning_rates=(1e-2, 1e-3))
    language.run(rates, tmp_path)
    other = dataclasses.replace(rates, text="wikitext-2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "load", lambda name, data_dir=None: made_up_text(name, words=30))
        language.run(other, tmp_path)
    language.run(dataclasses.replace(rates, parameters=5000, learning_rates=(3e-3, 3e-2)), tmp_path)
    rows = [row for row in result(tmp_path)["rows"] if "best" in row["metric"]]
    assert len({row["hidden_size"] for row in rows if row["model"] == "LSTM on Penn Treebank"}) == 2
    assert [row["model"] for row in rows].count("LSTM on WikiText-2") == 1
    assert len(rows) == 3
    assert all(len(row["ours"]) == 1 for row in result(tmp_path)["rows"])
    assert len({row["floor"] for row in result(tmp_path)["rows"]}) == 2


def test_a_rate_that_is_too_fast_is_a_part_of_a_sweep(tmp_path):
    settings = dataclasses.replace(SETTINGS, models=("lstm",), clip_norm=1e9, learning_rates=(1e12, 1e-2))
    language.run(settings, tmp_path)
    rows = {row["model"]: row["ours"] for row in result(tmp_path)["rows"]}
    assert rows["LSTM on Penn Treebank, learning rate 1e+12"] == []
    assert len(rows["LSTM on Penn Treebank, learning rate 0.01"]) == 1
    with pytest.raises(TrainingError):
        language.run(dataclasses.replace(settings, learning_rates=(1e12,)), tmp_path / "alone")


def test_a_layer_of_ones_own_may_stand_alone_and_is_looked_at_as_it_is_trained(tmp_path):
    (tmp_path / "mine.py").write_text(GRU + LERP)
    alone = dataclasses.replace(SETTINGS, models=(), layer=f"{tmp_path / 'mine.py'}:MyGRU", bfloat16=True)
    language.run(alone, tmp_path / "run")
    assert [row["model"] for row in result(tmp_path / "run")["rows"]] == [
        "mine.py:MyGRU on Penn Treebank, learning rate 0.01"
    ]
    lerp = dataclasses.replace(alone, layer=f"{tmp_path / 'mine.py'}:Lerp")
    language.run(dataclasses.replace(lerp, bfloat16=False), tmp_path / "lerp")
    with pytest.raises(RunError, match=r"with products in bfloat16; --no-bfloat16 leaves them out"):
        language.run(lerp, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(RunError, match="models is empty: give at least one value"):
        language.run(dataclasses.replace(alone, layer=None), tmp_path / "none")


def test_words_are_learnt(tmp_path):
    """Words that follow one another in a fixed order are guessed by any layer."""
    order = torch.arange(600, dtype=torch.int32) % 7
    corpus = text.Corpus("ptb", text.Vocabulary([*"abcdefg"], torch.bincount(order)), order, order[:100], order[:90])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "load", lambda *_: corpus)
        language.run(dataclasses.replace(SETTINGS, epochs=40, sampled=3, learning_rates=(3e-2,)), tmp_path)
    for member in members_of(tmp_path):
        assert records(member)[-1]["test_perplexity"] < 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"steps": 301}, "steps must be at most half of the 600 words of the text, got 301"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"sampled": -1}, "sampled must be an integer of at least 0, got -1"),
        ({"parameters": 0}, "parameters must be an integer of at least 1, got 0"),
        ({"parameters": 30}, "LSTM has .* parameters with 1 feature, and comes no closer to 30"),
        ({"dropout": 1.5}, "dropout must lie between 0 and 1, got 1.5"),
        ({"layer": "mine.py"}, "--layer takes FILE.py:CLASS"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_anything_is_written(change, message, tmp_path):
    with pytest.raises(RunError, match=message):
        language.run(dataclasses.replace(SETTINGS, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()
