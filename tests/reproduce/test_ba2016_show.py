"""`fastweights show attention`: what a trained network attends to, and the figure of it."""

import dataclasses

import pytest
import torch

from fastweights import nn
from fastweights.cli import main
from fastweights.errors import RunError
from fastweights.reproduce.ba2016.show import record_attention, show

from .helpers import TINY

EXPERIMENTS = ("ba2016/associative-retrieval", "ba2016/mnist-glimpses", "ba2016/facial-expression")


@pytest.fixture
def trained(tmp_path, made_up):
    def train(name, models=("fast-weights",)):
        settings = dataclasses.replace(TINY[name].settings, models=models, epochs=1)
        TINY[name].module.run(settings, tmp_path / "run")
        return tmp_path / "run"

    return train


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_best_network_of_a_run_is_drawn(name, trained, capsys):
    folder = trained(name)
    assert main(["show", "attention", str(folder), "--example", "2"]) == 0
    words = capsys.readouterr().out
    assert "has a chance of" in words
    assert f"figure: {folder / 'attention.svg'}" in words
    first = (folder / "attention.svg").read_text()
    assert first.startswith("<?xml")
    assert show(folder, example=2).figure.read_text() == first
    assert show(folder, folder / "other.svg", example=3).figure.read_text() != first


def test_what_was_read_and_the_answer_are_told(trained):
    seen = show(trained("ba2016/associative-retrieval"))
    assert len(seen.example) == 11
    assert seen.example[8:10] == "??"
    right = seen.example[seen.example.index(seen.example[-1]) + 1]  # the digit after the letter that is asked for
    assert seen.answer.startswith(f"{right} has a chance of ")


def test_the_attention_is_what_is_read_of_the_stored_states():
    torch.manual_seed(0)
    layer = nn.FastWeightsRNN(4, 6, rate=0.3, layer_norm=False, identity_scale=0.0, dtype=torch.float64)
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    attention, (y, state) = record_attention(layer, x)
    assert attention.shape == (5, 2, 4)
    drive = x @ layer.get_parameter("weight_ih").T  # without slow weights the state is f(C x + what was read)
    read = torch.einsum("tbn,nbh->tbh", attention, y[:-1])
    torch.testing.assert_close((drive + read).relu(), y, rtol=1e-12, atol=1e-12)
    assert (attention.transpose(0, 1).triu(0)[:, :4] == 0).all()  # no step reads its own state, or a later one
    more, _ = record_attention(_Going(layer, state), x)
    expected = record_attention(layer, torch.cat([x, x]))[0]
    torch.testing.assert_close(more, expected[5:, :, 5:], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="one FastWeightsRNN of one layer, got 0"):
        record_attention(torch.nn.LSTM(4, 6), x)


class _Going(torch.nn.Module):
    """A network whose layer goes on from a state."""

    def __init__(self, layer, state):
        super().__init__()
        self.layer, self.state = layer, state

    def forward(self, x):
        return self.layer(x, self.state)


def test_runs_and_examples_that_are_not_there_are_refused(trained, tmp_path, capsys):
    folder = trained("ba2016/mnist-glimpses", models=("lstm",))
    for call, message in (
        (lambda: show(folder), "holds no trained network with fast weights"),
        (lambda: show(tmp_path), "holds no result.json"),
        (lambda: show(folder, tmp_path / "a.png"), r"a\.png is not the name of an SVG file, such as attention\.svg"),
    ):
        with pytest.raises(RunError, match=message):
            call()
    trained("ba2016/mnist-glimpses")
    with pytest.raises(RunError, match="--example must be the number of one of the 40 test examples, got 41"):
        show(folder, example=41)
    assert main(["show", "attention", str(folder), "--text", "c9"]) == 1
    assert "--text is for `show gated`" in capsys.readouterr().err
    settings = TINY["rae2018/rare-classes"].settings
    TINY["rae2018/rare-classes"].module.run(dataclasses.replace(settings, epochs=1), tmp_path / "rare")
    with pytest.raises(RunError, match="is a run of rae2018/rare-classes; give one of ba2016/associative-retrieval, "):
        show(tmp_path / "rare")
