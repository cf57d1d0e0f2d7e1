from pathlib import Path
from typing import Any

import pytest

from fastweights.bench.gated import cases, results
from fastweights.bench.gated.run import COLUMNS, MEMORY_COLUMNS
from fastweights.bench.published import Row, read

PUBLISHED = Path(__file__).parents[3] / "benchmarks"


def row(rival: str, value: float | None, **more: Any) -> Row:
    found: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {
        "date": "2026-01-02",
        "commit": "abc",
        "processor": "Abacus",
        "torch": "2.13.0",
        "threads": 1,
        "batch": 256,
        "steps": 32,
        "input_size": 15,
        "hidden_size": 40,
        "precision": "float32",
        "mode": "training",
        "part": "layer",
        "rival": rival,
        "units": 100 if rival == cases.LSTM else 40,
        "parameters": 45_000,
        "milliseconds": "" if value is None else value,
        "mebibytes": "" if value is None else value,
    }
    return {name: str(value) for name, value in (found | more).items()}


@pytest.mark.parametrize(("name", "columns"), [("gated", COLUMNS), ("gated_memory", MEMORY_COLUMNS)])
def test_the_published_files_have_the_columns_that_are_written(name, columns):
    rows = read(PUBLISHED / f"{name}.csv")
    for found in rows:
        assert list(found) == columns
        assert found["part"] in cases.PARTS
        assert found["mode"] in cases.MODES
        assert found["rival"] in {*cases.MODELS, cases.EAGER, *cases.COMPILED}


def test_layers_are_a_table():
    rows = [row(cases.OURS, 9, commit="old"), row(cases.OURS, 2), row(cases.LSTM, 4), row(cases.EAGER, 10)]
    rows += [row(cases.COMPILED_LOOP, 5), row(cases.COMPILED_CELL, None, skipped="compiling failed: no g++")]
    rows += [row(name, 1, threads=2) for name in (cases.OURS, cases.LSTM)]
    rows += [row(name, 1, mode="inference") for name in (cases.LSTM, cases.OURS)]
    rows += [row(cases.OURS, 1, part="model", commit="later")]  # of another part: it empties nothing
    text = results.layers_table(rows)
    assert "256 sequences of 15 features; Abacus" in text
    assert "Units of the LSTM: 100 for H = 40.\n" in text
    assert text.splitlines()[5:8] == [
        "| training | 1 | 32 | 40 | 2.00 | 4.00 | 10.00 | 5.00 | 0.50 | 5.0 times | 2.5 times |",
        "| training | 2 | 32 | 40 | 1.00 | 1.00 | - | - | 1.00 | - | - |",
        "| inference | 1 | 32 | 40 | 1.00 | 1.00 | - | - | 1.00 | - | - |",
    ]
    assert "Not measured: compiled cell at T=32, H=40: compiling failed: no g++." in text


def test_models_are_ratios_beside_the_papers():
    rows = [
        row(name, value * threads, part="model", threads=threads)
        for threads in (2, 1)
        for name, value in zip(cases.MODELS, (40, 20, 30, 10), strict=True)
    ]
    lines = results.models_table(rows).splitlines()
    assert "T = 32, 1 thread: ms" in lines[2]
    assert lines[4:] == [
        "| AttentionFW | 40 | 45,000 | 22 | 1.6 | 40.00 | 2.00 | 80.00 | 2.00 |",
        "| torch.nn.LSTM | 100 | 45,000 | 14 | 1.0 | 20.00 | 1.00 | 40.00 | 1.00 |",
        "| HyperLSTM | 40 | 45,000 | 20 | 1.4 | 30.00 | 1.50 | 60.00 | 1.50 |",
        "| fastweights | 40 | 45,000 | 25 | 1.8 | 10.00 | 0.50 | 20.00 | 0.50 |",
    ]


def test_memory_is_a_table_with_the_matrices_in_flight():
    rows = [row(cases.OURS, 57.6), row(cases.LSTM, 40), row(cases.EAGER, 576)]
    rows += [row(cases.OURS, 20, hidden_size=20), row(cases.EAGER, None, hidden_size=20, skipped="too large")]
    lines = results.memory_table(rows).splitlines()
    assert lines[4:6] == [
        "| 32 | 20 | 20.0 | 2.2 | 17.8 | - | - | - |",
        "| 32 | 40 | 57.6 | 7.6 | 50.0 | 576.0 | 40.0 | 0.100 |",  # 2 * 256 * 40 * 97 numbers of four bytes
    ]
    assert lines[-1] == "Not measured: eager at T=32, H=20: too large."
