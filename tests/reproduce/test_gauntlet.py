import dataclasses
import re
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import RunError, TrainingError
from fastweights.reproduce._experiment import find_size
from fastweights.reproduce.recall import _bench, _entrants, gauntlet
from fastweights.reproduce.recall._cells import BACK, COPIED, SUMMED
from fastweights.reproduce.recall._own_layer import OwnMixer, load_layer
from fastweights.runs import load_run
from fastweights.tasks.recall import IGNORED

from .helpers import TINY, members_of, records, result

TINY_SETTINGS: gauntlet.Settings = TINY["recall/gauntlet"].settings

GRU = """
    import torch

    class MyGRU(torch.nn.Module):
        def __init__(self, input_size, hidden_size):
            super().__init__()
            self.gates = torch.nn.Linear(input_size + hidden_size, 2 * hidden_size)
            self.candidate = torch.nn.Linear(input_size + hidden_size, hidden_size)

        def forward(self, x):
            h, ys = x.new_zeros(len(x), self.candidate.out_features), []
            for now in x.unbind(1):
                reset, keep = self.gates(torch.cat([now, h], 1)).sigmoid().chunk(2, 1)
                h = keep * h + (1 - keep) * self.candidate(torch.cat([now, reset * h], 1)).tanh()
                ys.append(h)
            return torch.stack(ys, 1)
"""


@pytest.fixture
def write(tmp_path):
    """Write a file of a layer, and return it as --layer takes it."""

    def write(source, name="Mine"):
        (tmp_path / "mine.py").write_text(textwrap.dedent(source))
        return f"{tmp_path / 'mine.py'}:{name}"

    return write


def layer_of(body, *, state="", init="", base="torch.nn.Module"):
    """The source of a layer with an affine map and this forward pass."""
    return f"""
import torch

class Mine({base}):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.map = torch.nn.Linear(input_size, hidden_size)
        {init or "pass"}

    def forward(self, x):
        {body}
"""


def refused(layer, **change):
    with pytest.raises(RunError) as refusal:
        gauntlet.check(dataclasses.replace(TINY_SETTINGS, layer=layer, **change))
    message = str(refusal.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1 / 0", "running .*mine.py raised ZeroDivisionError: division by zero"),
        ("def (", "running .*mine.py raised SyntaxError"),
        ("import sys; sys.exit(3)", "running .*mine.py raised SystemExit"),
        ("import torch\nclass Mein(torch.nn.Module): pass", "has no class Mine; did you mean Mein"),
        ("Mine = 3", "has no class Mine; give FILE.py:CLASS"),
        ("def Mine(a, b): return a", r"mine.py:Mine: Mine\(\d+, \d+\) must be a torch.nn.Module, got int"),
        ("class Mine:\n  def __init__(self, size): pass", "raised TypeError: .*must take .input_size, hidden_size"),
        ("import torch\nclass Mine(torch.nn.Module):\n  def __init__(s, i, h): super().__init__()", "no parameters"),
        (layer_of("return x").replace("Linear(input_size, ", "LazyLinear("), "parameters without a size"),
        (layer_of("return x", init="raise SystemExit(3)"), r"raised SystemExit: 3; it must take"),
        (layer_of("return self.map(x)[:, -1]"), r"y \[B,T,H\] of shape \(3, 1, (\d+)\) .* got \(3, \1\)"),
        (layer_of("return self.map(x)[..., 1:]"), "must return y .B,T,H. of shape"),
        (layer_of("return {'y': self.map(x)}"), "a tensor; got dict"),
        (layer_of("return ()"), "a tensor; got tuple"),
        (layer_of("return self.map(x).long()"), "must return floating-point numbers, got torch.int64"),
        (layer_of("return self.map(x) * float('nan')"), "not finite .NaN or infinite. for random inputs"),
        (layer_of("return self.map(x).flip(1)"), "is not causal: another x from step 1 on changes y before it"),
        (layer_of("return self.map(x - x.mean(1, keepdim=True))"), "is not causal"),
        (layer_of("return self.map(x) + self.map(x).roll(-31, 1)"), "is not causal"),
        (
            layer_of(
                "return self.map(x) + self.gate * x.flip(1)", init="self.gate = torch.nn.Parameter(torch.zeros(()))"
            ),
            "is not causal after 3 steps of training",
        ),
        (
            layer_of("y = self.map(x); y[:, 8:12] = y[:, 8:12].mean(1, True); return y"),
            "is not causal",
        ),
        (layer_of("return self.map(x - x.mean(0))"), "mixes the rows of a batch: another x in row 0"),
        (layer_of("return self.map(x) + x.roll(-1, 0)"), "mixes the rows of a batch: another x in row 0"),
        (
            layer_of("return torch.cat([self.map(x[:1]) + x[1:2], self.map(x[1:])])"),
            "mixes the rows of a batch: another x in row 1",
        ),
        (layer_of("return self.map(x.cumsum(0))"), "mixes the rows of a batch"),
        (
            layer_of(
                "return self.norm(self.map(x).transpose(1, 2)).transpose(1, 2)",
                init="self.norm = torch.nn.BatchNorm1d(hidden_size)",
            ),
            "mixes the rows",
        ),
        (layer_of("self.h += self.map(x).mean().item(); return self.map(x) + self.h", init="self.h = 0"), "another y"),
        (layer_of("return self.map(x).detach()"), "no gradient reaches its parameters"),
        (layer_of("return self.map(x).sign() * 0 + (self.map(x) * 0).sqrt()"), "the gradient of .* is not finite"),
        (layer_of("return self.map(x[:, :9])"), r"of shape \(3, 64, \d+\).*got \(3, 9,"),
        (layer_of("raise KeyError('here')"), r"running it on x of shape \(3, 1, \d+\) raised KeyError: 'here'"),
        (layer_of("raise SystemExit(3)"), "running it on x of shape .* raised SystemExit: 3"),
        (layer_of("return self.map(x.double())"), "running it on x of shape .* raised RuntimeError: .*dtype"),
    ],
)  # fmt: skip
def test_a_layer_of_ones_own_that_cannot_be_compared_is_refused_in_one_line(write, source, message):
    told = refused(write(source))
    assert re.search(message, told), told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "lstm",
            "--layer takes FILE.py:CLASS, such as my_layer.py:MyLayer, got 'lstm'; --models has the library's own",
        ),
        ("nowhere.py:Mine", "--layer nowhere.py:Mine: there is no file nowhere.py"),
        ("nowhere.py:", "--layer takes FILE.py:CLASS"),
        (":Mine", "--layer takes FILE.py:CLASS"),
        ("torch.nn:GRU", "--layer takes FILE.py:CLASS"),
    ],
)
def test_a_layer_that_is_not_there_is_refused(given, message):
    assert message in refused(given)


@pytest.mark.parametrize(
    "source",
    [
        GRU.replace("MyGRU", "Mine"),
        "from torch.nn import GRU as Mine",
        "import torch\nclass Mine(torch.nn.LSTM): pass",
        "from fastweights.nn import FastWeightsRNN as Mine",
        layer_of("return self.map(x).bfloat16()"),
        layer_of("return self.map.double()(x.double())"),
        layer_of("return self.map.bfloat16()(x.bfloat16())"),
        layer_of("return (self.map(torch.nn.functional.dropout(x, 0.5, self.training)),)"),
        layer_of("return self.map(x)", init="assert hidden_size % 4 == 0, 'four heads'"),
        "import torch\ndef Mine(a, b): return torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh())",
    ],
)
def test_layers_of_many_kinds_are_taken(write, source):
    for parameters in (10_000, 100_000, 1_000_000):
        settings = dataclasses.replace(TINY_SETTINGS, layer=write(source), models=("lstm",), parameters=parameters)
        gauntlet.check(dataclasses.replace(settings, cells=("adding",)))


@pytest.mark.parametrize(
    ("source", "size"),
    [
        (GRU.replace("MyGRU", "Mine"), None),
        ("from torch.nn import GRU as Mine", 8),
        ("from torch.nn import LSTM as Mine", 16),
        (layer_of("return self.map(x)", init="self.state_size = 77"), 77),
        (layer_of("return self.map(x), [x[:, -1], {}, None]"), 8),
        (layer_of("return self.map(x), None"), None),
    ],
)
def test_the_state_is_what_a_layer_says_or_returns(write, source, size):
    assert OwnMixer(load_layer(write(source)), 8).state_size(30) == size


def test_the_page_has_the_steps_of_every_cell():
    page = (Path(__file__).parents[2] / "docs" / "gauntlet.md").read_text()
    settings = gauntlet.PRESETS["full"]
    steps = {cell: gauntlet.count_epochs(cell, settings) * -(-settings.train_examples // 64) for cell in gauntlet.CELLS}
    told = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d,]+) \|$", page, re.MULTILINE)
    assert {cell: int(number.replace(",", "")) for cell, number in told} == steps


def test_the_layers_of_the_page_go_through(write):
    page = (Path(__file__).parents[2] / "docs" / "gauntlet.md").read_text()
    source = "".join(re.findall("```python\n(.*?)```", page, re.DOTALL))
    for name in ("MyLayer", "MyGRU"):
        gauntlet.check(dataclasses.replace(TINY_SETTINGS, layer=write(source, name)))


def test_a_file_may_import_what_lies_beside_it_and_is_run_once(write, tmp_path):
    (tmp_path / "parts_beside.py").write_text("runs = []")
    layer = write(layer_of("return self.map(x)") + "\nimport parts_beside\nparts_beside.runs.append(1)")
    load_layer(layer)
    gauntlet.check(dataclasses.replace(TINY_SETTINGS, layer=layer))
    assert sys.modules["parts_beside"].runs == [1]


def test_a_gru_in_ten_lines_gets_its_row_and_a_later_command_adds_to_the_table(write, tmp_path, capsys):
    layer, folder = write(GRU, "MyGRU"), tmp_path / "run"
    gauntlet.run(dataclasses.replace(TINY_SETTINGS, models=("lstm",), cells=("parity",)), folder)
    with_own = dataclasses.replace(TINY_SETTINGS, models=("lstm",), layer=layer)
    gauntlet.run(with_own, folder)
    names = [f"{name}-{cell}-0.003-seed1" for name in ("lstm", "mine.MyGRU") for cell in ("adding", "mqar-4", "parity")]
    assert sorted(path.name for path in members_of(folder)) == sorted({*names} - {"mine.MyGRU-parity-0.003-seed1"})
    rows = [(row["model"], row["metric"]) for row in result(folder)["rows"]]
    assert rows == [
        ("LSTM", "score, mean of 3 of 9 cells"),
        ("mine.py:MyGRU", "score, mean of 2 of 9 cells"),
        ("LSTM", "test accuracy, mqar-4"),
        ("mine.py:MyGRU", "test accuracy, mqar-4"),
        ("LSTM", "test accuracy, parity"),
        ("LSTM", "test accuracy, adding"),
        ("mine.py:MyGRU", "test accuracy, adding"),
    ]
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "mine.py:MyGRU" in shown
    assert "mqar-4" in shown
    assert shown.strip().endswith("lines.svg")
    for member in load_run(folder).members:
        found = (member.result or {})["parameters"]
        assert abs(found - TINY_SETTINGS.parameters) < _entrants.NEAR * TINY_SETTINGS.parameters
    before = [records(member) for member in members_of(folder)]
    gauntlet.run(with_own, folder)
    assert [records(member) for member in members_of(folder)] == before
    write(GRU.replace("tanh", "sin"), "MyGRU")
    with pytest.raises(RunError, match="holds a run with other settings: source was"):
        gauntlet.run(with_own, folder)


@pytest.mark.parametrize(
    "source",
    [
        layer_of("return self.map(x.double())", init="self.double()"),
        layer_of("return self.map(x.bfloat16())", init="self.bfloat16()"),
        layer_of("return (self.map(x), {'a': 1})"),
    ],
)
def test_layers_of_many_kinds_are_trained(write, tmp_path, source):
    gauntlet.run(dataclasses.replace(TINY_SETTINGS, models=("lstm",), layer=write(source)), tmp_path / "run")
    for member in load_run(tmp_path / "run").members:
        assert (member.result or {})["test_loss"] > 0


def test_two_processes_train_ones_own_layer_to_the_same_numbers(write, tmp_path):
    settings = dataclasses.replace(TINY_SETTINGS, models=("lstm",), layer=write(GRU, "MyGRU"), cells=("adding",))
    runs = [tmp_path / "one", tmp_path / "two"]
    for folder, workers in zip(runs, (1, 2), strict=True):
        gauntlet.run(settings, folder, workers=workers)
    alone, beside = ([records(member) for member in members_of(folder)] for folder in runs)
    assert alone == beside


def test_numbers_that_are_not_finite_in_training_are_told(write, tmp_path):
    late = layer_of(
        "self.calls += self.training; return self.map(x) / (self.calls < 30)",  # after all that is checked
        init="self.calls = 0",
    )
    settings = dataclasses.replace(TINY_SETTINGS, models=("lstm",), layer=write(late), cells=("adding",), effort=1.0)
    with pytest.raises(TrainingError, match=r"mine\.py:Mine, adding"):
        gauntlet.run(settings, tmp_path / "run")


def test_the_score_is_how_far_above_the_floor_the_cells_are_on_average(tmp_path):
    settings = dataclasses.replace(TINY_SETTINGS, models=("lstm",), seeds=(1, 2), learning_rates=(1e-5, 1e-2))
    gauntlet.run(settings, tmp_path)
    members = load_run(tmp_path).members
    score, *rows = result(tmp_path)["rows"]
    expected = [0.0, 0.0]
    for row in rows:
        own = row["settings"]
        group = [m for m in members if own.items() <= m.settings.items()]
        other = [m for m in members if m.settings["cell"] == own["cell"] and m not in group]
        errors = [sum((m.result or {})["validation_error"] for m in each) for each in (group, other)]
        assert errors[0] <= errors[1]
        assert row["ours"] == [(m.result or {})["test_accuracy"] for m in group]
        for seed, accuracy in enumerate(row["ours"]):
            expected[seed] += max(0, (accuracy - row["floor"]) / (1 - row["floor"])) / len(rows)
    assert score["ours"] == pytest.approx(expected)
    panels = load_run(tmp_path).lines
    assert [panel.title for panel in panels] == ["Score", "Score", "mqar-4", "adding"]
    assert [panel.against for panel in panels[:2]] == ["numbers in the state", "ms of a training pass"]


@pytest.mark.parametrize("name", gauntlet.CELLS)
def test_every_cell_can_be_answered_from_what_came_before_and_its_floor_is_not(name):
    problem = gauntlet.draw_problem(name, dataclasses.replace(TINY_SETTINGS, train_examples=400))
    inputs, targets = problem.splits["train"]
    marked = targets != IGNORED
    assert marked.any(1).all()
    assert 0 <= problem.floors["test"] < 1
    if problem.numbers:
        assert (problem.vocabulary_size, inputs.shape, targets.shape) == (0, (400, SUMMED, 2), (400, SUMMED))
        sums = (inputs[..., 0] * inputs[..., 1]).sum(1)
        assert torch.allclose(targets[:, -1], sums)
        assert sums.var().item() == pytest.approx(problem.variance, rel=0.25)
        assert marked.sum() == 400
        return
    assert inputs.max() < problem.vocabulary_size
    assert targets.max() < problem.vocabulary_size
    if name == "copying":
        assert torch.equal(targets[:, -COPIED:], inputs[:, :COPIED])
    if name == "repeat-previous":
        assert torch.equal(targets[:, BACK:], inputs[:, :-BACK] // 13)
    if problem.positions:
        lengths = {split: inputs.shape[1] for split, (inputs, _) in problem.splits.items()}
        assert problem.positions == lengths["validation"] == lengths["test"] >= lengths["train"]
        assert (lengths["train"] < lengths["test"]) == (problem.redraw is not None)  # those of training grow


@pytest.mark.parametrize("model", gauntlet.TITLES)
def test_every_layer_has_nearly_as_many_parameters_in_every_cell(model):
    settings = dataclasses.replace(gauntlet.PRESETS["full"], models=(model,))
    (entrant,) = _entrants.enter(settings).values()
    for cell, size in gauntlet.find_widths(entrant, settings).items():
        with torch.device("meta"):
            mixers = partial(_bench.make_mixer, model, size, settings)
            network = _bench.make_frame(
                mixers,
                size,
                dataclasses.replace(settings, device="meta"),
                gauntlet.CELLS[cell].problem._replace(positions=0),
            )
        count = sum(parameter.numel() for parameter in network.parameters())
        assert abs(count - settings.parameters) < 0.05 * settings.parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cells": ()}, "cells is empty: give at least one value"),
        ({"cells": ("parity", "parity")}, "cells has parity twice"),
        ({"effort": 0.0}, r"effort must be positive and finite, got 0\.0"),
        ({"parameters": 0}, "parameters must be an integer of at least 1, got 0"),
        ({"parameters": 50}, "LSTM in mqar-4 has .* parameters with 1 feature, and comes no closer to 50"),
        ({"mlp_multiple": -1}, "mlp_multiple must be an integer of at least 0, got -1"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(RunError, match=message):
        gauntlet.check(dataclasses.replace(TINY_SETTINGS, **change))


@pytest.mark.parametrize("multiple", [1, 2, 7, 64])
@pytest.mark.parametrize("target", [1, 100, 5_000, 1_000_000])
def test_a_size_is_found_though_others_are_refused(multiple, target):
    def count(size):
        if size % multiple:
            raise ValueError(size)
        return 3 * size**2

    sizes = [size for size in range(multiple, 2000, multiple)]
    assert find_size(count, target) in sorted(sizes, key=lambda size: abs(count(size) - target))[:1]


def test_a_size_is_not_looked_for_without_end():
    def refuse(size):
        raise ValueError(f"no size {size}")

    with pytest.raises(ValueError, match="no size 64"):
        find_size(refuse, 100)
