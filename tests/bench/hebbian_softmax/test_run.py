import csv
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastweights import cli
from fastweights.bench.hebbian_softmax import cases, memory
from fastweights.bench.hebbian_softmax.cases import FULL, QUICK, RIVALS, Case, Selection
from fastweights.bench.hebbian_softmax.problem import BATCHES, Problem, TrainingStep
from fastweights.bench.hebbian_softmax.run import COLUMNS, MEMORY_COLUMNS, run
from fastweights.bench.memory import available
from fastweights.errors import FastWeightsError
from fastweights.nn import HebbianSoftmax

TINY = Selection(threads=(1, 2), classes=(9, 40), hidden_sizes=(6,), rounds=2, batch=12)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def selected(monkeypatch, *words):
    """What the command line asks to be run, and where to."""
    given: list[Any] = []
    monkeypatch.setattr("fastweights.bench.hebbian_softmax.run.run", lambda *arguments: given.extend(arguments))
    assert cli.main(["bench", "hebbian-softmax", *words]) == 0
    return given


def test_every_rival_is_timed(tmp_path, capsys):
    before = torch.get_num_threads()
    run(TINY, tmp_path / "a.csv")
    run(replace(TINY, threads=(1,), classes=(7,)), tmp_path / "a.csv")  # is appended
    assert torch.get_num_threads() == before
    rows = read(tmp_path / "a.csv")
    assert list(rows[0]) == COLUMNS
    sizes = [(classes, threads) for classes in ("9", "40") for threads in "12"] + [("7", "1")]
    found = [(row["classes"], row["threads"], row["rival"]) for row in rows]
    assert found == [(*size, rival) for size in sizes for rival in RIVALS]
    assert {row["ratio_to_plain"] for row in rows if row["rival"] == cases.PLAIN} == {"1.0"}
    assert {(row["rounds"], row["batch"], row["hidden_size"], row["skipped"]) for row in rows} == {("2", "12", "6", "")}
    printed = capsys.readouterr().out.splitlines()
    assert "ours/plain" in printed[0]
    assert len(printed) == 1 + 4 + 1 + 1 + 1 + 1


def test_steps_train_and_smooth():
    """Past the limit a head only counts, and ends where the plain softmax does."""
    problem = Problem(Case(40, 6, batch=12))
    steps: dict[str, Any] = {rival: TrainingStep(problem, rival) for rival in RIVALS}
    for step in steps.values():
        for _ in range(BATCHES):
            step()
    ours, plain, past = (step.module.weight.detach() for step in steps.values())
    torch.testing.assert_close(past, plain)
    assert not torch.allclose(ours, plain, atol=0.1)
    assert not torch.equal(plain, problem.weight)
    assert int(steps[cases.OURS].module.counts.sum()) == BATCHES * 12
    assert int(steps[cases.PAST_LIMIT].module.counts.sum()) == BATCHES * 12 + 40


def test_labels_have_the_frequencies_of_zipf():
    counts = Problem(Case(20, 2, batch=5000)).labels.flatten().bincount(minlength=20)
    assert float(counts[0] / counts[9]) == pytest.approx(10, rel=0.2)
    assert counts.min() > 0


def test_nothing_is_printed_or_written_while_parity_is_red(tmp_path, monkeypatch, capsys):
    exact = HebbianSoftmax.loss
    monkeypatch.setattr(
        HebbianSoftmax, "loss", lambda self, *told: exact(self, *told) * (1 + 1e-3 * (self.num_classes == 40))
    )
    # The first case is green: it is not timed before the second is looked at.
    with pytest.raises(FastWeightsError, match="nothing is timed: the loss at V=40, d=6 differs"):
        run(TINY, tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    assert capsys.readouterr().out == ""


def test_other_columns_are_refused_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fastweights.bench.hebbian_softmax.run.require_parity", lambda problem: pytest.fail("looked at")
    )
    (tmp_path / "a.csv").write_text("name,age\n")
    with pytest.raises(FastWeightsError, match="has other columns"):
        run(TINY, tmp_path / "a.csv")
    (tmp_path / "b_memory.csv").write_text("name,age\n")
    with pytest.raises(FastWeightsError, match=r"b_memory\.csv has other columns"):
        run(Selection(memory=True), tmp_path / "b.csv")


def test_what_half_of_the_memory_cannot_hold_is_left_out(tmp_path, monkeypatch, capsys):
    case = Case(1000, 10, batch=100)
    assert case.needed_bytes == 4 * (5 * 1000 * 10 + 3 * 100 * 1000)
    monkeypatch.setattr("fastweights.bench.machine.machine_memory", lambda: 2**21)
    assert Case(9, 6).too_large is None
    selection = replace(TINY, threads=(1,), classes=(9, 1000), hidden_sizes=(10,), batch=100, memory=True)
    monkeypatch.setattr("fastweights.bench.memory.peak", lambda module, told: 2**20)
    run(selection, tmp_path / "a.csv")
    reason = "needs about 0 GiB, more than half of the machine's 0"
    assert [row["skipped"] for row in read(tmp_path / "a.csv")] == [""] * 3 + [reason] * 3
    assert [row["skipped"] for row in read(tmp_path / "a_memory.csv")] == ["", "", reason, reason]
    assert "V=1000, d=10: fastweights needs about" in capsys.readouterr().out


def test_memory_goes_to_a_file_beside_the_timings(tmp_path, monkeypatch, capsys):
    peaks = {cases.OURS: 3 * 2**20, cases.PLAIN: 2**20}
    monkeypatch.setattr(memory, "peak", lambda case, rival, threads: peaks[rival])
    run(replace(TINY, threads=(2, 1), classes=(9,), rounds=1, memory=True), tmp_path / "a.csv")
    rows = read(tmp_path / "a_memory.csv")
    assert list(rows[0]) == MEMORY_COLUMNS
    assert [(row["rival"], row["mebibytes"], row["threads"]) for row in rows] == [
        ("fastweights", "3.0", "1"),
        ("torch.nn.Linear", "1.0", "1"),
    ]
    assert {row["present"] for row in rows} == {str(len(Problem(Case(9, 6, batch=12)).labels[0].unique()))}
    assert "V=9, d=6: fastweights 3.0, torch.nn.Linear 1.0" in capsys.readouterr().out


@pytest.mark.skipif(not available(), reason="this system does not tell its peak of memory")
@pytest.mark.slow
def test_the_head_keeps_little_more_than_a_plain_softmax():
    case = Case(4000, 64, batch=512)
    ours, other = (memory.peak(case, rival) for rival in memory.RIVALS)
    assert isinstance(ours, int)
    assert isinstance(other, int)
    logits = 4 * case.batch * case.classes
    assert 2 * logits <= other <= 5 * logits
    assert ours <= other + case.added_bytes(present=512) + 4 * 2**20  # to the precision of the measurement


def test_options_choose_what_is_timed(monkeypatch):
    default, path = selected(monkeypatch)
    assert (default, os.fspath(path)) == (QUICK, "benchmarks/hebbian_softmax.csv")
    assert selected(monkeypatch, "--full")[0] == FULL
    words = "--threads 1 --rounds 7 --classes 5 300000 --hidden-sizes 20 --batch 3 --memory --output b.csv"
    given, path = selected(monkeypatch, *words.split())
    assert given == Selection((1,), (5, 300_000), (20,), rounds=7, memory=True, batch=3)
    assert os.fspath(path) == "b.csv"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "bfloat16"), "`bench hebbian-softmax` times float32 alone; leave out --precision"),
        (("--mode", "inference"), "`bench hebbian-softmax` has a single mode; leave out --mode"),
        (("--steps", "3"), "`bench hebbian-softmax` has no steps; leave out --steps"),
        (("--no-compile",), "`bench hebbian-softmax` compiles nothing; leave out --compile"),
        (("--classes", "0"), "'0' is not a whole number from 1 to 100000000"),
    ],
)
def test_a_users_mistake_is_one_line(capsys, words, message):
    assert cli.main(["bench", "hebbian-softmax", *words]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err
