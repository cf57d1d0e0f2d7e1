from pathlib import Path
from typing import Any

import pytest

from fastweights.bench.hebbian_softmax import cases, results
from fastweights.bench.hebbian_softmax.run import COLUMNS, MEMORY_COLUMNS
from fastweights.bench.published import Row, read

PUBLISHED = Path(__file__).parents[3] / "benchmarks"


def row(rival: str, value: float | None, **more: Any) -> Row:
    found: dict[str, Any] = dict.fromkeys(MEMORY_COLUMNS, "") | {
        "date": "2026-01-02",
        "commit": "abc",
        "processor": "Abacus",
        "torch": "2.13.0",
        "threads": 1,
        "batch": 1024,
        "classes": 1000,
        "hidden_size": 256,
        "rival": rival,
        "present": 100,
        "milliseconds": "" if value is None else value,
        "mebibytes": "" if value is None else value,
    }
    return {name: str(value) for name, value in (found | more).items()}


@pytest.mark.parametrize(
    ("name", "columns"), [("hebbian_softmax", COLUMNS), ("hebbian_softmax_memory", MEMORY_COLUMNS)]
)
def test_the_published_files_have_the_columns_that_are_written(name, columns):
    path = PUBLISHED / f"{name}.csv"
    for found in read(path) if path.exists() else ():
        assert list(found) == columns
        assert found["rival"] in cases.RIVALS


def test_steps_are_a_table():
    rows = [row(cases.OURS, 9, commit="old")]
    rows += [row(name, value, threads=2) for name, value in zip(cases.RIVALS, (3, 2, 1), strict=True)]
    rows += [row(name, value) for name, value in zip(cases.RIVALS, (10.5, 10, 10.1), strict=True)]
    rows += [row(name, None, classes=267_735, skipped="too large") for name in cases.RIVALS]
    text = results.steps_table(rows)
    assert "1024 activations in float32; Abacus, PyTorch 2.13.0, commit abc, 2026-01-02." in text
    assert text.splitlines()[4:7] == [
        "| 1 | 1000 | 256 | 10.50 | 10.00 | 1.05 | 10.10 | 1.01 |",
        "| 1 | 267735 | 256 | - | - | - | - | - |",
        "| 2 | 1000 | 256 | 3.00 | 2.00 | 1.50 | 1.00 | 0.50 |",
    ]
    assert "Not measured: fastweights at V=267735, d=256: too large; torch.nn.Linear at" in text


def test_memory_is_a_table_with_what_may_be_added():
    rows = [row(cases.OURS, 21), row(cases.PLAIN, 20), row(cases.OURS, None, classes=33_278, skipped="too large")]
    lines = results.memory_table(rows).splitlines()
    added = (8 * 1000 + 4 * (1024 + 100) * 256) / 2**20
    assert added == pytest.approx(1.1, abs=0.01)
    assert lines[4:6] == [
        "| 1000 | 256 | 21.0 | 20.0 | 1.1 | 21.1 |",
        "| 33278 | 256 | - | - | 1.4 | - |",
    ]
    assert lines[-1] == "Not measured: fastweights at V=33278, d=256: too large."
