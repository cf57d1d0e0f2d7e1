"""Several processes train as one process does, in every loop, and the first alone writes."""

import contextlib
import faulthandler
import functools
import io
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from fastweights import cli, processes
from fastweights.errors import RunError, TrainingError
from fastweights.nn import LSTMLanguageModel
from fastweights.reproduce import command
from fastweights.reproduce.sprechmann2018 import language
from fastweights.training import (
    LanguageSchedule,
    Progress,
    RunFolder,
    Schedule,
    train,
    train_epochs,
    train_language_model,
)
from tests.reproduce.helpers import TINY, make_up
from tests.training import shared_runs
from tests.training.helpers import StopAt, StoppedError, contents, records, without_seconds

V, BATCH, SEGMENT, STEPS = 20, 6, 5, 50
TEXT = (torch.rand(3, BATCH * (STEPS // 2 * SEGMENT + 1), generator=torch.Generator().manual_seed(0)) ** 2 * V).long()
SPLITS = dict(zip(("train", "validation", "test"), TEXT, strict=True))
PLAIN, HEBBIAN = None, {"gamma": 0.1, "limit": 20}
PATIENCE = 300  # seconds, of a busy machine


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", do_nothing)


class Losses(Progress):
    """The mean loss since the epoch began, after each step."""

    def __init__(self):
        self.seen = []

    def update(self, step, loss):
        self.seen.append(loss)


def train_on(path, *, seed=0, hebbian=HEBBIAN, dtype=torch.float64, progress=None, sampled=0, dropout=0.0, **changes):
    """Train for 50 steps, with a checkpoint at each; the seed is that of the weights."""
    torch.manual_seed(seed)
    dropouts: Any = {f"{part}_dropout": dropout for part in ("embedding", "input", "state", "output")}
    model = LSTMLanguageModel(V, 6, 8, hebbian=hebbian, dtype=dtype, **dropouts)
    options = {"batch_size": BATCH, "segment": SEGMENT, "learning_rate": 0.01, "checkpoint_seconds": 0} | changes
    schedule = LanguageSchedule(epochs=2, validation_streams=2, sampled=sampled, **options)
    progress = Losses() if progress is None else progress
    with RunFolder(path, {"seed": 1}) as folder:
        result = train_language_model(model, SPLITS, schedule, folder, seed=1, progress=progress)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    return {"losses": getattr(progress, "seen", None), "result": result, "weights": weights}


def in_processes(count, function, folder, *arguments, dying=0):
    """Return what a function of a folder returns in each of some processes, as torchrun starts them.

    Each has a folder of its own, as on machines that share no disk; all are in `folder`. The last `dying` of them are
    killed on the way and return nothing.
    """
    # A fork of the tests' own process would have locks that its threads held, which nobody releases any more.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])  # once for all tests, which takes seconds
    results = context.Queue()
    # As torchrun's agent has one.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    workers = [
        context.Process(target=work, args=(rank, count, store.port, results, function, folder, arguments))
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=PATIENCE) for _ in workers[dying:])
    for worker in workers:
        worker.join()
    return [found[rank] for rank in range(count - dying)]


def work(rank, count, port, results, function, folder, arguments):
    """Put what a function returns, in one of some processes, or the error that it ends with."""
    faulthandler.dump_traceback_later(0.9 * PATIENCE)  # where it hangs, if it does
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(count),
        "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    os.fsync = do_nothing
    torch.set_num_threads(1)
    try:
        results.put((rank, function(folder / f"process-{rank}", *arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def do_nothing(_):
    """Stand for writing to the disk itself, which takes the time of many checkpoints."""


in_two_processes = functools.partial(in_processes, 2)


def from_other_weights(path, options):
    """Train from weights of each process's own: the main one's count."""
    return train_on(path, seed=processes.rank(), **options)


@pytest.mark.parametrize(
    ("hebbian", "dtype", "tolerance"),
    [(PLAIN, torch.float64, 1e-12), (HEBBIAN, torch.float64, 1e-12), (HEBBIAN, torch.float32, 1e-5)],
    ids=["plain", "hebbian", "hebbian in float32"],
)
def test_two_processes_train_as_one_does_and_one_writes(tmp_path, hebbian, dtype, tolerance):
    options = {"hebbian": hebbian, "dtype": dtype}
    alone = train_on(tmp_path / "alone", **options)
    main, other = in_two_processes(from_other_weights, tmp_path, options)
    assert main["result"] == other["result"]
    assert len(main["losses"]) == STEPS
    assert main["losses"] == pytest.approx(alone["losses"], abs=tolerance)
    assert other["losses"] == main["losses"]
    for key in ("validation_loss", "test_loss"):
        assert main["result"][key] == pytest.approx(alone["result"][key], abs=1e-5)
    for name, weight in main["weights"].items():
        assert weight == pytest.approx(alone["weights"][name], abs=10 * tolerance)
        assert (other["weights"][name] == weight).all()
    assert contents(tmp_path / "process-0").keys() == contents(tmp_path / "alone").keys()
    assert [record["kind"] for record in records(tmp_path / "process-0")] == ["epoch", "epoch", "result"]
    assert not (tmp_path / "process-1").exists()


finish = functools.partial(train_on, segment=2 * SEGMENT)


def stop(path, **options):
    """Train until a kill in the second epoch."""
    with contextlib.suppress(StoppedError):
        finish(path, progress=StopAt(17), **options)


def stop_and_resume(path):
    for name, options in {"two": {}, "drawn": {"dropout": 0.2, "sampled": 8}}.items():
        finish(path / f"{name}-unbroken", **options)
        stop(path / name, **options)
        finish(path / name, **options)
    stop(path / "two-one")
    finish(path / "one-two")


def test_a_killed_run_goes_on_with_as_many_processes_or_others(tmp_path):
    main = tmp_path / "process-0"
    stop(main / "one-two")
    in_two_processes(stop_and_resume, tmp_path)
    finish(main / "two-one")
    for name in ("two", "drawn"):  # the same instructions: the same bits
        assert without_seconds(main / name) == without_seconds(main / f"{name}-unbroken")
    expected = without_seconds(main / "two")
    for name in ("one-two", "two-one"):
        for record, other in zip(without_seconds(main / name), expected, strict=True):
            assert {key: pytest.approx(value, abs=1e-5) for key, value in other.items()} == record


def draw_and_resume(path):
    """Return what each step has drawn: of an unbroken run, and of one that was killed and resumed."""
    x, y = torch.zeros(12, 2), torch.zeros(12, dtype=torch.int64)
    splits = dict.fromkeys(SPLITS, (x, y))
    drawn: dict[str, list[float]] = {"unbroken": [], "killed": []}

    for name, progress in (("unbroken", Progress()), ("killed", StopAt(4)), ("killed", Progress())):
        model = torch.nn.Linear(2, 2)

        def loss(inputs, targets, model=model, name=name):
            drawn[name].append(float(torch.rand(())))
            return torch.nn.functional.cross_entropy(model(inputs), targets)

        schedule = Schedule(epochs=2, batch_size=4, checkpoint_seconds=0)
        with RunFolder(path / name, {}) as folder, contextlib.suppress(StoppedError):
            train(model, splits, schedule, folder, seed=1, loss=loss, progress=progress)
    return drawn


def test_each_process_draws_its_own_numbers_and_the_same_again_when_resumed(tmp_path):
    main, other = in_two_processes(draw_and_resume, tmp_path)
    assert len({*main["unbroken"], *other["unbroken"]}) == 2 * len(main["unbroken"]) == 12
    for drawn in (main, other):
        assert drawn["killed"][:4] == drawn["unbroken"][:4]
        assert drawn["killed"][-3:] == drawn["unbroken"][-3:]


class Whole:
    """Stands for a learner that knows of no parts."""

    model = scored = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())


def refusals(path, finished):
    """Return what is said to each process of what several cannot do."""
    said = []

    def refused(error, call):
        with pytest.raises(error) as caught:
            call()
        said.append(str(caught.value))

    refused(ValueError, lambda: train_on(path, batch_size=5))
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    with RunFolder(path, {"seed": 1}) as folder:
        splits = {name: (x, y) for name in SPLITS}
        linear, schedule, learner = torch.nn.Linear(2, 2), Schedule(epochs=1, batch_size=3), Whole()
        refused(RunError, lambda: train(linear, splits, schedule, folder, seed=1))
        refused(RunError, lambda: train_epochs(learner, schedule, folder, steps_per_epoch=1, seed=1))  # type: ignore
        # An error that the main process alone meets.
        refused(RunError, lambda: RunFolder(finished if processes.rank() == 0 else path, {"seed": 2}).check())
    refused(TrainingError, lambda: train_on(path, learning_rate=1e30, dtype=torch.float32))
    with contextlib.chdir(path.parent):
        assert cli.main(["reproduce", "ba2016/catch", "--games", "5"]) == 1
        assert cli.main(["reproduce", "schlag2017/associative-retrieval", "--batch-size", "5"]) == 1
        assert cli.main(["reproduce", "sprechmann2018/language", "--batch-size", "5"]) == 1
        assert cli.main(["sweep", "ba2016/associative-retrieval", "--search", "rate=0.1:1"]) == 1
    return said


def test_what_several_processes_cannot_do_is_refused_in_all(tmp_path):
    with RunFolder(tmp_path / "other", {"seed": 1}):
        pass
    main, other = in_two_processes(refusals, tmp_path, tmp_path / "other")
    assert [text.replace("process-0", "process-1") for text in main] == other
    batch, last, training, check, infinite = main
    assert batch == "batch_size must be a multiple of the number of processes, 2, got 5"
    assert last == "the last batch of an epoch must be at least the number of processes, 2, got 1: start fewer"
    assert training == "training runs in one process, got 2: start it without torchrun"
    assert "seed was 1, now 2" in check
    assert "NaN or infinite" in infinite
    assert {path.name for path in tmp_path.iterdir()} == {"other", "process-0"}
    assert "metrics.jsonl" not in contents(tmp_path / "process-0")


def run_an_experiment(path, name):
    """Run an experiment on made-up data by the command line, twice; return the statuses, output and errors."""
    tiny = TINY[name]
    line = command(name, "quick", tiny.module.PRESETS["quick"], tiny.settings)
    said, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        make_up(patch)
        statuses = [cli.main([*shlex.split(line)[1:], "--output", str(path)]) for _ in range(2)]
    return statuses, said.getvalue(), errors.getvalue()


ALONE = ("sprechmann2018/permuted-mnist", "sprechmann2018/incremental-classes", "munkhdalai2018/timing")
# One of each loop: the others differ in their data and networks alone, and seconds of two processes are dear.
SHARED = (
    language.EXPERIMENT,
    "ba2016/associative-retrieval",
    "rae2018/omniglot-curriculum",
    "munkhdalai2018/omniglot",
    "ba2016/catch",
)
EXACT = ("ba2016/associative-retrieval", "rae2018/omniglot-curriculum")  # in the others each process draws by itself


@pytest.mark.parametrize(
    "name",
    [name if name == language.EXPERIMENT else pytest.param(name, marks=pytest.mark.slow) for name in SHARED],
)
def test_an_experiment_of_several_processes_is_written_and_printed_by_one(tmp_path, name):
    main, other = in_two_processes(run_an_experiment, tmp_path, name)
    assert main[0] == other[0] == [0, 0]
    assert "index.html" in main[1]
    assert other[1] == ""
    assert run_an_experiment(tmp_path / "alone", name)[0] == [0, 0]
    found, expected = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("process-0", "alone"))
    assert len(found["rows"]) == len(expected["rows"])
    for row, other_row in zip(found["rows"], expected["rows"], strict=True):
        assert len(row["ours"]) == len(other_row["ours"])
        if name in EXACT:
            assert row["ours"] == pytest.approx(other_row["ours"], rel=1e-3, abs=1e-5)
    for folder in (tmp_path / "alone").iterdir():
        if folder.is_dir():
            assert contents(folder).keys() == contents(tmp_path / "process-0" / folder.name).keys()
    assert not (tmp_path / "process-1").exists()


@pytest.mark.parametrize("name", ALONE)
def test_an_experiment_that_cannot_be_shared_refuses_several_processes(tmp_path, name):
    line = f"fastweights: error: {name} runs in one process, got 2: start it without torchrun\n"
    assert in_two_processes(run_an_experiment, tmp_path, name) == [([1, 1], "", 2 * line)] * 2
    assert not list(tmp_path.glob("process-*"))


def train_shared(path, name, dtype, dies_at=None):
    """Run a loop, and return what it raises where it does."""
    torch.set_default_dtype(dtype)
    try:
        return shared_runs.run(name, path / "run", dies_at=dies_at)
    except RunError as error:
        return str(error)


@pytest.fixture
def alone(tmp_path):
    """A loop in one process, by the name and the type of its numbers: one that is started as the others are."""

    def run(name, dtype):
        return in_processes(1, train_shared, tmp_path / "alone", name, dtype)[0]

    return run


def check_alike(name, dtype, count, found, expected):
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    apart = shared_runs.differences(found, expected)
    print(f"{name}, {count} processes, {dtype}: {apart}")
    assert max(apart["losses"], apart["weights"]) < tolerance
    assert apart["scores"] < 100 * tolerance  # of which some are per cent


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [
        *((name, 2, torch.float64) for name in shared_runs.RUNS),
        *(
            pytest.param(name, 3, torch.float32, marks=pytest.mark.slow)
            for name in shared_runs.LOOPS
            if name in shared_runs.RUNS
        ),
    ],
)
def test_every_loop_trains_in_several_processes_as_in_one(tmp_path, alone, name, count, dtype):
    found = in_processes(count, train_shared, tmp_path, name, dtype)
    expected = alone(name, dtype)
    assert len(expected["losses"]) >= 50
    check_alike(name, dtype, count, found[0], expected)
    for other in found[1:]:
        assert other["result"] == found[0]["result"]
        assert all((weight == found[0]["weights"][key]).all() for key, weight in other["weights"].items())
    assert not (tmp_path / "process-1").exists()  # the main process alone has written


def train_drawn(path, name):
    """Run a loop twice, the second time with a kill between two scores."""
    unbroken = shared_runs.run(name, path / "unbroken")
    with contextlib.suppress(StoppedError):
        shared_runs.run(name, path / "killed", progress=StopAt(33))
    return unbroken, shared_runs.run(name, path / "killed")


@pytest.mark.parametrize("name", shared_runs.DRAWN)
def test_what_each_process_draws_leaves_one_model_and_is_drawn_again(tmp_path, name):
    (main, resumed), (other, _) = in_two_processes(train_drawn, tmp_path, name)
    assert without_seconds(tmp_path / "process-0" / "unbroken") == without_seconds(tmp_path / "process-0" / "killed")
    assert main["result"] == other["result"]
    for key, weight in main["weights"].items():
        assert (other["weights"][key] == weight).all()
        assert (resumed["weights"][key] == weight).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [(name, *counts) for name, counts in zip(shared_runs.LOOPS, [(2, 3), (3, 2), (3, 1), (2, 3), (3, 2)], strict=True)],
)
def test_a_process_killed_ends_all_and_another_number_goes_on(tmp_path, alone, name, before, after):
    began = time.monotonic()
    said = in_processes(before, train_shared, tmp_path, name, torch.float64, 33, dying=1)
    # A process that hangs waits for a day; to start three takes a busy machine long.
    assert time.monotonic() - began < 120
    for rank, line in enumerate(said):
        assert line.startswith(f"process {rank} of {before} has lost another one (")
        assert line.endswith("); the same command goes on from the last checkpoint")
        assert "\n" not in line
    expected = alone(name, torch.float64)
    found, *others = in_processes(after, train_shared, tmp_path, name, torch.float64)
    assert len(found["losses"]) <= len(expected["losses"]) - 32
    assert all(other["result"] == found["result"] for other in others)
    if name in shared_runs.RUNS:
        check_alike(
            name, torch.float64, after, found, expected | {"losses": expected["losses"][-len(found["losses"]) :]}
        )


def launch(words, *arguments):
    """Run a loop's script by a launcher; return how it ended and what it said."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, str(root / "tests" / "training" / "shared_runs.py"), *map(str, arguments)]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=100)


def torchrun(count):
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*words, f"--nproc-per-node={count}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streams", "actor critic"])
def test_torchrun(tmp_path, alone, name):
    killed = launch(torchrun(2), name, tmp_path / "run", 33)
    assert killed.returncode == 1
    assert "Signal 9 (SIGKILL)" in killed.stderr
    assert [record["kind"] for record in records(tmp_path / "run")][-1] == "epoch"
    finished = launch(torchrun(3), name, tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    assert records(tmp_path / "run")[-1]["kind"] == "result"
    if name in shared_runs.RUNS:
        expected = alone(name, torch.float32)["result"]
        for key in ("validation_loss", "test_loss"):
            assert records(tmp_path / "run")[-1][key] == pytest.approx(expected[key], abs=1e-5)


@pytest.mark.slow
def test_accelerate_launch(tmp_path, alone):
    pytest.importorskip("accelerate")
    name = "supervised, Hebbian"
    words = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--mixed_precision=no"]
    finished = launch([*words, "--num_machines=1", "--dynamo_backend=no"], name, tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    expected = alone(name, torch.float32)["result"]
    assert records(tmp_path / "run")[-1]["test_loss"] == pytest.approx(expected["test_loss"], abs=1e-5)
