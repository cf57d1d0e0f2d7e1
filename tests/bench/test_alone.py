"""A process of its own, and what becomes of what it started."""

import os
import time

import pytest

from fastweights.bench.alone import AloneError, alone

CHILD = """
import json, os, subprocess, sys, time
told = json.loads(sys.argv[1])
if "fail" in told:
    sys.exit(told["fail"])
if "signal" in told:
    os.kill(os.getpid(), told["signal"])
if "helper" in told:
    helper = subprocess.Popen(["sleep", "60"])
    open(told["helper"], "w").write(str(helper.pid))
    time.sleep(60)
print(told["say"], os.environ["SETTING"])
"""


@pytest.fixture(autouse=True)
def _child(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_it_is_told_and_answers():
    assert alone("child", {"say": "yes"}, 30, SETTING="set") == "yes set\n"


def test_a_failure_says_why():
    with pytest.raises(AloneError, match=r"^failed: nothing works$"):
        alone("child", {"fail": "nothing works"}, 30)
    with pytest.raises(AloneError, match=r"^failed: without a word$"):
        alone("child", {"fail": 3}, 30)
    with pytest.raises(AloneError, match=r"^was ended by signal 9$"):
        alone("child", {"signal": 9}, 30)


def test_its_helpers_end_with_it(tmp_path):
    with pytest.raises(AloneError, match=r"^took more than 2 s$"):
        alone("child", {"helper": str(tmp_path / "pid")}, 2)
    helper = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not alive(helper):
            break
        time.sleep(0.05)
    assert not alive(helper)


def alive(process: int) -> bool:
    """A zombie that nobody has collected yet has ended all the same."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{process}")
