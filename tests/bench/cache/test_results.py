from pathlib import Path
from typing import Any

from fastweights.bench.cache import cases, results
from fastweights.bench.cache.run import COLUMNS
from fastweights.bench.published import Row, read

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "cache.csv"


def row(rival: str, value: float, **more: Any) -> Row:
    found: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {
        "date": "2026-01-02",
        "commit": "abc",
        "processor": "Abacus",
        "torch": "2.13.0",
        "threads": 1,
        "window": 2000,
        "classes": 10_000,
        "hidden_size": 400,
        "rival": rival,
        "milliseconds": value,
    }
    return {name: str(value) for name, value in (found | more).items()}


def test_the_published_file_has_the_columns_that_are_written():
    for found in read(PUBLISHED) if PUBLISHED.exists() else ():
        assert list(found) == COLUMNS
        assert found["rival"] in cases.RIVALS


def test_positions_are_a_table():
    rows = [row(cases.OURS, 9, commit="old")]
    rows += [row(cases.OURS, 0.02345, threads=2), row(cases.LOOP, 40, threads=2)]
    rows += [row(cases.OURS, 0.05), row(cases.LOOP, 50)]
    text = results.table(rows)
    assert "float32; Abacus, PyTorch 2.13.0, commit abc, 2026-01-02." in text
    assert text.splitlines()[4:] == [
        "| 1 | 2000 | 10000 | 400 | 0.0500 | 50.0 | 1,000 |",
        "| 2 | 2000 | 10000 | 400 | 0.0234 | 40.0 | 1,706 |",
    ]
