from typing import Any

import pytest

from fastweights.bench import mbpa
from fastweights.bench.mbpa import LOOP, OURS, RIVALS, MbPACase, require_parity
from fastweights.bench.published import Row
from tests.bench.helpers import make_row

SIZES: dict[str, Any] = {"classes": 20, "key_size": 6, "neighbours": 5, "entries": 30, "batch": 8}


@pytest.mark.parametrize("output", mbpa.OUTPUTS)
@pytest.mark.parametrize("optimizer", mbpa.OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_rivals_are_green(output, optimizer, steps):
    require_parity(MbPACase(steps, output, optimizer, **SIZES))


def test_a_time_is_of_one_query():
    case = MbPACase(1)
    assert {rival: case.queries(rival) for rival in case.rivals} == dict(zip(RIVALS, (256, 16, 2, 2), strict=True))
    small = MbPACase(5, "mlp", "sgd", **mbpa.SMALL)
    assert [small.queries(rival) for rival in small.rivals] == [256, 16, 64]


def test_one_query_at_a_time_is_timed_of_one_step():
    cases = [(case.steps, case.batch) for case in mbpa.QUICK.cases()]
    assert cases == [(1, 256), (1, 1), (5, 256), *[(1, 256), (5, 256)] * 3]


def row(rival: str, value: float, **more: Any) -> Row:
    sizes = {"steps": 1, "classes": 10_000, "key_size": 400, "neighbours": 256, "batch": 256, "entries": 5000}
    return make_row(mbpa.COLUMNS, rival, value, **{"output": "linear", "optimizer": "sgd"} | sizes | more)


def test_queries_are_a_table():
    rows = [row(OURS, 9, commit="old")]
    rows += [row(name, value, output="mlp") for name, value in ((OURS, 2), (LOOP, 9), (mbpa.VMAP, 4))]
    rows += [row(name, value) for name, value in zip(RIVALS, (0.5, 20, 40, 41), strict=True)]
    text = mbpa.times_table(rows)
    assert "float32; 5000 entries; Abacus, PyTorch 2.13.0, commit abc, 2026-01-02." in text
    assert text.splitlines()[4:] == [
        "| 1 | linear | sgd | 1 | 10000 | 400 | 256 | 256 | 0.500 | 20.000 | 40.000 | 41.000 | 80.0 |",
        "| 1 | mlp | sgd | 1 | 10000 | 400 | 256 | 256 | 2.000 | - | 9.000 | 4.000 | 4.5 |",
    ]
