from pathlib import Path
from typing import Any

from fastweights.bench.mbpa import cases, results
from fastweights.bench.mbpa.run import COLUMNS
from fastweights.bench.published import Row, read

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "mbpa.csv"


def row(rival: str, value: float, **more: Any) -> Row:
    found: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {
        "date": "2026-01-02",
        "commit": "abc",
        "processor": "Abacus",
        "torch": "2.13.0",
        "threads": 1,
        "output": "linear",
        "optimizer": "sgd",
        "steps": 1,
        "classes": 10_000,
        "key_size": 400,
        "neighbours": 256,
        "batch": 256,
        "entries": 5000,
        "rival": rival,
        "milliseconds": value,
    }
    return {name: str(value) for name, value in (found | more).items()}


def test_the_published_file_has_the_columns_that_are_written():
    for found in read(PUBLISHED) if PUBLISHED.exists() else ():
        assert list(found) == COLUMNS
        assert found["rival"] in cases.RIVALS


def test_queries_are_a_table():
    rows = [row(cases.OURS, 9, commit="old")]
    rows += [row(name, value, output="mlp") for name, value in ((cases.OURS, 2), (cases.LOOP, 9), (cases.VMAP, 4))]
    rows += [row(name, value) for name, value in zip(cases.RIVALS, (0.5, 20, 40, 41), strict=True)]
    text = results.table(rows)
    assert "float32; 5000 entries; Abacus, PyTorch 2.13.0, commit abc, 2026-01-02." in text
    assert text.splitlines()[4:] == [
        "| 1 | linear | sgd | 1 | 10000 | 400 | 256 | 256 | 0.500 | 20.000 | 40.000 | 41.000 | 80.0 |",
        "| 1 | mlp | sgd | 1 | 10000 | 400 | 256 | 256 | 2.000 | - | 9.000 | 4.000 | 4.5 |",
    ]
