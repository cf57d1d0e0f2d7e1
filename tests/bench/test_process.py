"""A process of its own, and what becomes of what it started."""

import os
import time

import pytest
import torch

from fastweights.bench import associative, process
from fastweights.bench.process import ProcessError, run_alone

CHILD = """
import json, os, subprocess, sys, time
task = json.loads(sys.argv[1])
if "fail" in task:
    sys.exit(task["fail"])
if "signal" in task:
    os.kill(os.getpid(), task["signal"])
if "helper" in task:
    helper = subprocess.Popen(["sleep", "60"])
    open(task["helper"], "w").write(str(helper.pid))
    time.sleep(60)
print(task["say"], os.environ["SETTING"])
"""
CASE = associative.AssociativeCase(2, 8, batch=2, input_size=4)


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "child"


def test_it_is_given_a_task_and_answers(child):
    assert run_alone(child, {"say": "yes"}, 30, SETTING="set") == "yes set\n"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"fail": "nothing works"}, "failed: nothing works"),
        ({"fail": 3}, "failed: without a word"),
        ({"signal": 9}, "was ended by signal 9"),
    ],
)
def test_a_failure_says_why(child, task, message):
    with pytest.raises(ProcessError, match=f"^{message}$"):
        run_alone(child, task, 30)


def test_its_helpers_end_with_it(child, tmp_path):
    with pytest.raises(ProcessError, match=r"^took more than 2 s$"):
        run_alone(child, {"helper": str(tmp_path / "pid")}, 2)
    helper = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not is_alive(helper):
            break
        time.sleep(0.05)
    assert not is_alive(helper)


def is_alive(process: int) -> bool:
    """A zombie that nobody has collected yet has ended all the same."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{process}")


@pytest.mark.skipif(not process.can_measure_peak(), reason="this system does not tell its peak of memory")
def test_what_the_parent_has_held_does_not_count():
    held = bytearray(200 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    peak = process.measure_peak(CASE, associative.LSTM, 1)
    assert isinstance(peak, int)
    assert peak < 4 * 2**20


@pytest.mark.skipif(not process.can_measure_peak(), reason="this system does not tell its peak of memory")
def test_what_the_process_has_held_before_does_not_count():
    held = b"x" * 2**27
    del held
    assert process.measure_rise(lambda: b"x" * 2**25) == pytest.approx(2**25, abs=4 * 2**20)


def test_what_cannot_be_measured_says_why(monkeypatch):
    def fail(*_, **__):
        raise ProcessError("was ended by signal 9")

    monkeypatch.setattr(process, "run_alone", fail)
    peak = process.measure_peak(CASE, associative.OURS, 1)
    assert peak == "the process was ended by signal 9"
    monkeypatch.setattr(process, "can_measure_peak", lambda: False)
    peak = process.measure_peak(CASE, associative.OURS, 1)
    assert peak == "this system does not tell a process its peak of memory"


def test_what_cannot_be_compiled_says_why(monkeypatch):
    tried = []

    def fail(module, task, limit):
        tried.append((module, task["subject"], task["rival"], task["case"]["steps"], task["threads"], limit))
        raise ProcessError("failed: no g++")

    monkeypatch.setattr(process, "run_alone", fail)
    ready, skipped = process.try_compilations(associative.AssociativeProblem(CASE), ["a", "b"], 7)
    assert (ready, skipped) == ([], dict.fromkeys("ab", "compiling failed: no g++"))
    how = 2, torch.get_num_threads(), 7
    assert tried == [("fastweights.bench.process", "fastweights.bench.associative", name, *how) for name in "ab"]


@pytest.mark.slow
def test_a_compilation_that_takes_too_long_is_left_out():
    ready, skipped = process.try_compilations(associative.AssociativeProblem(CASE), associative.COMPILED, 0.5)
    assert (ready, skipped) == ([], dict.fromkeys(associative.COMPILED, "compiling took more than 0.5 s"))
