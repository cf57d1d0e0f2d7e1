import pytest

from fastweights.bench.alone import AloneError
from fastweights.bench.associative import cases, memory
from fastweights.bench.associative.cases import Case
from fastweights.bench.memory import available

MIB = 2**20


@pytest.mark.skipif(not available(), reason="this system does not tell its peak of memory")
@pytest.mark.slow
def test_the_matrix_form_needs_a_matrix_for_every_step():
    case = Case(steps=30, hidden_size=64, batch=64, input_size=16)
    kept = cases.kept_bytes(cases.MATRIX, case)  # 30 MiB
    eager, ours = (memory.peak(case, rival) for rival in (cases.MATRIX, cases.OURS))
    assert isinstance(eager, int)
    assert isinstance(ours, int)
    assert kept <= eager < 2 * kept
    assert ours < eager - kept / 2
    # At the least the outputs and the gradients of drive and x.
    assert ours > 4 * 30 * 64 * (64 + 64 + 16) * 0.8


@pytest.mark.skipif(not available(), reason="this system does not tell its peak of memory")
def test_what_the_parent_has_held_does_not_count():
    held = bytearray(200 * MIB)
    held[::4096] = b"x" * len(held[::4096])
    measured = memory.peak(Case(steps=2, hidden_size=8, batch=2, input_size=4), cases.LSTM)
    assert isinstance(measured, int)
    assert measured < 4 * MIB


def test_what_cannot_be_measured_says_why(monkeypatch):
    case = Case(steps=2, hidden_size=4, batch=2, input_size=2)

    def alone(*_, **__):
        raise AloneError("was ended by signal 9")

    monkeypatch.setattr("fastweights.bench.memory.alone", alone)
    assert memory.peak(case, cases.OURS) == "the process was ended by signal 9"
    monkeypatch.setattr("fastweights.bench.memory.available", lambda: False)
    assert memory.peak(case, cases.OURS) == "this system does not tell a process its peak of memory"
    assert "more than half" in str(memory.peak(Case(10**6, 1000), cases.MATRIX))
