"""Tables with a row for each model and a column for each metric."""

import math
from pathlib import Path

import pytest

from fastweights.report import pivot_blocks, print_blocks
from fastweights.report.blocks import to_markdown
from fastweights.runs import Member, Row, Run

KEY = "5-way_1-shot_test_accuracy"
METRIC = "5-way 1-shot test accuracy, %"


def member(model, accuracy, interval, name="test", seed=1):
    result = {
        "tasks": 16_000,
        "seconds": 90.0,
        f"5-way_1-shot_{name}_accuracy": accuracy,
        f"{name}_accuracy": accuracy,
        f"5-way_1-shot_{name}_interval": interval,
    }
    return Member("m", {"model": model, "seed": seed}, {}, [], result)


def written(blocks):
    return "\n\n".join(map(to_markdown, blocks)).splitlines()


def run(rows, members, experiment="munkhdalai2018/omniglot"):
    return Run(Path("."), experiment, "quick", rows, members)


def test_mean_interval_over_tasks_spread_over_runs_and_the_papers():
    members = [member("Hebbian", 98.0, 0.3), member("Hebbian", 99.0, 0.4, seed=2)]
    members += [member("MAML", 97.0, 0.2), member("MAML", 60.0, 0.2, name="other")]  # two networks of one seed
    rows = [Row("Hebbian", 288, METRIC, (98.0, 99.0), 99.4, 20.0), Row("MAML", 288, METRIC, (97.0,), None, 20.0)]
    lines = written(pivot_blocks(run(rows, members)))
    assert lines[0] == "| model | 5-way 1-shot | tasks | minutes |"
    both = math.hypot(0.3, 0.4) / 2
    assert lines[2] == f"| Hebbian | 98.50 ± {both:.2f} ± {math.sqrt(0.5):.2f} (99.4) | 16,000 | 1.5 |"
    assert lines[3] == "| MAML | 97.00 ± 0.20 | 32,000 | 3.0 |"
    assert lines[5].strip("*_") == (
        "Per cent ± the 95 % confidence interval over the tasks, then ± the sample standard deviation over 2 seeds; "
        "in parentheses the paper's."
    )


@pytest.mark.parametrize("width", [40, 100])
def test_a_narrow_terminal_has_a_number_a_line(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    title = "Fast weights, gradient"
    rows = [Row(title, 288, METRIC, (98.0,), 99.4, 20.0), Row("MAML", 288, METRIC, (97.0,), None, 20.0)]
    print_blocks(pivot_blocks(run(rows, [member(title, 98.0, 0.3), member("MAML", 97.0, 0.2)])))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    numbers = ["5-way 1-shot 98.00 ± 0.30 (99.4)", "tasks 16,000", "minutes 1.5"]
    assert (f"model {title}" in lines) == (lines[1:4] == numbers) == (width == 40)
    assert (f"{title} 98.00 ± 0.30 (99.4) 16,000 1.5" in lines) == (width == 100)


def test_what_is_not_trained_yet_and_another_test_have_columns_of_their_own():
    rows = [
        Row("Hebbian", 288, METRIC, (), 99.4, 20.0),
        Row("Hebbian", 288, "5-way 1-shot all-inclusive accuracy, %", (50.0,), None, 20.0),
    ]
    lines = written(pivot_blocks(run(rows, [member("Hebbian", 50.0, 1.0, "all-inclusive")])))
    assert lines[0] == "| model | 5-way 1-shot | 5-way 1-shot all-inclusive | tasks | minutes |"
    assert lines[2] == "| Hebbian | - | 50.00 ± 1.00 | 16,000 | 1.5 |"
    untrained = [Row("Chance", None, METRIC, (20.0,)), Row("Hebbian", 288, METRIC, (50.0,))]
    lines = written(pivot_blocks(run(untrained, [member("Hebbian", 50.0, 1.0)])))
    assert lines[2:4] == ["| Chance | 20.00 | - | - |", "| Hebbian | 50.00 ± 1.00 | 16,000 | 1.5 |"]
    assert "over the tasks (none for models that were not trained), of one seed." in lines[5]


def test_a_run_whose_members_tell_no_interval_has_none():
    plain = Member("m", {"model": "LSTM", "seed": 1}, {}, [], {KEY: 1.0})
    assert pivot_blocks(run([Row("LSTM", 50, METRIC, (1.0,))], [plain])) == []


def test_times_and_their_ratios():
    rows = [
        Row("Hebbian", None, "training: ms a task", (10.0,)),
        Row("Hebbian", None, "training: times Hebbian", (1.0,)),
        Row("MAML", None, "training: ms a task", (35.0,)),
        Row("MAML", None, "training: times Hebbian", (3.5,)),
        Row("Hebbian", None, "training, at once: ms a task", (2.0,)),
        Row("Hebbian", None, "training, at once: times Hebbian", (1.0,)),
    ]
    lines = written(pivot_blocks(run(rows, [])))
    assert lines[0] == "| model | training | training, at once |"
    assert lines[2:4] == ["| Hebbian | 10.0 (1.00) | 2.0 (1.00) |", "| MAML | 35.0 (3.50) | - |"]
    assert pivot_blocks(run([Row("LSTM", 50, METRIC, (1.0,))], [])) == []


def test_cells_of_a_bench_stand_side_by_side_with_the_best_score_first():
    def score(model, cell, seed, accuracy, **result):
        settings = {"model": model, "hidden_size": 8, "seed": seed, "cell": cell, "learning_rate": 0.1}
        return Member(f"{model}-{cell}-{seed}", settings, {}, [], {"test_accuracy": accuracy, **result})

    def row(model, cell, *ours):
        return Row(model, 8, f"test accuracy, {cell}", ours, None, 0.5, {"cell": cell, "learning_rate": 0.1})

    own = {"parameters": 1000, "state_size": None, "milliseconds": 20.0}
    members = [score("mine", "parity", 1, 0.9, **own)]
    members += [
        score("LSTM", cell, seed, 0.75, parameters=900 + 200 * (cell == "s3"), state_size=16, milliseconds=7.4)
        for cell in ("parity", "s3")
        for seed in (1, 2)
    ]
    rows = [
        Row("mine", None, "score, mean of 1 of 9 cells", (0.8,), None, 0.0),
        Row("LSTM", None, "score, mean of 2 of 9 cells", (0.5, 0.5), None, 0.0),
        row("mine", "parity", 0.9),
        row("LSTM", "parity", 0.75, 0.75),
        row("LSTM", "s3", 0.75, 0.75),
    ]
    lines = written(pivot_blocks(run(rows, members, "recall/gauntlet")))
    assert lines[0] == "| layer | score | parity | s3 | parameters | state | ms |"
    assert lines[2:5] == [  # a layer that has been through more cells comes first
        "| LSTM | 0.500 ± 0.000 | 0.750 ± 0.000 | 0.750 ± 0.000 | 1,000 | 16 | 7 |",
        "| mine | 0.800 | 0.900 | - | 1,000 | - | 20 |",
        "| floor | 0.000 | 0.500 | 0.500 |  |  |  |",
    ]
    assert "of a layer that has not been through all cells, over its own" in lines[6]
    assert "2 seeds" in lines[6]
