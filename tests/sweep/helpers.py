import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from fastweights import sweep
from fastweights.sweep import Plan
from tests.sweep import fake_experiment
from tests.sweep.fake_experiment import Settings

ROOT = Path(__file__).parents[2]
EXPERIMENT = "ba2016/associative-retrieval"
TINY = ["--models", "fast-weights", "--hidden-sizes", "4", "--train-examples", "300", "--validation-examples", "50"]
TINY += ["--test-examples", "50", "--epochs", "1", "--embedding-size", "5", "--checkpoint-seconds", "0"]
QUICK = {"heartbeat": 1, "grace": 5}


def plan(folder, *words, settings=None, **more):
    space = sweep.parse(Settings, words or ["x=0:10"])
    return Plan(fake_experiment.NAME, settings or Settings(), space, folder / "sweep", **more)


def params(rows):
    return [row.params for row in rows if row.state == "finished"]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def begun(row, folder):
    return (folder / row.folder / "begun").read_text().count("begun")


def start(words, seconds=QUICK, cwd=ROOT, **more):
    command = [
        sys.executable,
        "-m",
        "tests.sweep.fake_experiment",
        json.dumps(seconds | more),
        "sweep",
        *map(str, words),
    ]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def trials(folder):
    with contextlib.suppress(OSError):
        return json.loads((folder / "sweep.json").read_text())["trials"]
    return []
