"""Several processes train a language model as one process does, and the first alone writes."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import distributed

from fastweights import cli, processes
from fastweights.errors import RunError, TrainingError
from fastweights.nn import LSTMLanguageModel
from fastweights.reproduce import command
from fastweights.reproduce.sprechmann2018 import language
from fastweights.training import LanguageSchedule, Progress, RunFolder, Schedule, train, train_language_model
from tests.reproduce.helpers import TINY, make_up
from tests.training.helpers import StopAt, StoppedError, contents, records, without_seconds

V, BATCH, SEGMENT, STEPS = 20, 6, 5, 50
TEXT = (torch.rand(3, BATCH * (STEPS // 2 * SEGMENT + 1), generator=torch.Generator().manual_seed(0)) ** 2 * V).long()
SPLITS = dict(zip(("train", "validation", "test"), TEXT, strict=True))
PLAIN, HEBBIAN = None, {"gamma": 0.1, "limit": 20}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Write the many checkpoints without the time of the disk itself."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Losses(Progress):
    """The mean loss since the epoch began, after each step."""

    def __init__(self):
        self.seen = []

    def update(self, step, loss):
        self.seen.append(loss)


def train_on(path, *, seed=0, hebbian=HEBBIAN, dtype=torch.float64, progress=None, sampled=0, **changes):
    """Train for 50 steps with every dropout, with a checkpoint at each; the seed is that of the weights."""
    torch.manual_seed(seed)
    model = LSTMLanguageModel(
        V, 6, 8, hebbian=hebbian, embedding_dropout=0.2, input_dropout=0.2, state_dropout=0.2, output_dropout=0.2,
        dtype=dtype,
    )  # fmt: skip
    options = {"batch_size": BATCH, "segment": SEGMENT, "learning_rate": 0.01, "checkpoint_seconds": 0} | changes
    schedule = LanguageSchedule(epochs=2, validation_streams=2, sampled=sampled, **options)
    progress = Losses() if progress is None else progress
    with RunFolder(path, {"seed": 1}) as folder:
        result = train_language_model(model, SPLITS, schedule, folder, seed=1, progress=progress)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    return {"losses": getattr(progress, "seen", None), "result": result, "weights": weights}


def in_two_processes(function, folder, *arguments):
    """Return what a function of a folder returns in each of two processes, as torchrun starts them.

    Each has a folder of its own, as on machines that share no disk; both are in `folder`.
    """
    # As torchrun's agent has one.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def work(rank):
        os.environ |= {
            "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2",
            "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        }  # fmt: skip
        torch.set_num_threads(1)
        try:
            results.put((rank, function(folder / f"process-{rank}", *arguments)))
        except BaseException:
            results.put((rank, traceback.format_exc()))
            raise
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()

    workers = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    return found[0], found[1]


def from_other_weights(path, options):
    """Train from weights of each process's own: the main one's count."""
    return train_on(path, seed=processes.rank(), **options)


@pytest.mark.parametrize(
    ("hebbian", "sampled", "dtype", "tolerance"),
    [
        (PLAIN, 0, torch.float64, 1e-12),
        (PLAIN, 8, torch.float64, 1e-12),
        (HEBBIAN, 0, torch.float64, 1e-12),
        (HEBBIAN, 0, torch.float32, 1e-5),
    ],
    ids=["plain", "sampled", "hebbian", "hebbian in float32"],
)
def test_two_processes_train_as_one_does_and_one_writes(tmp_path, hebbian, sampled, dtype, tolerance):
    options = {"hebbian": hebbian, "sampled": sampled, "dtype": dtype}
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


def stop(path):
    """Train until a kill in the second epoch."""
    with contextlib.suppress(StoppedError):
        finish(path, progress=StopAt(17))


def stop_and_resume(path):
    finish(path / "unbroken")
    stop(path / "two")
    finish(path / "two")
    stop(path / "two-one")
    finish(path / "one-two")


def test_a_killed_run_goes_on_with_as_many_processes_or_others(tmp_path):
    main = tmp_path / "process-0"
    stop(main / "one-two")
    in_two_processes(stop_and_resume, tmp_path)
    finish(main / "two-one")
    expected = without_seconds(main / "unbroken")
    assert without_seconds(main / "two") == expected  # the same instructions: the same bits
    for name in ("one-two", "two-one"):
        for record, other in zip(without_seconds(main / name), expected, strict=True):
            assert {key: pytest.approx(value, abs=1e-5) for key, value in other.items()} == record


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
        model, splits = torch.nn.Linear(2, 2), {name: (x, y) for name in SPLITS}
        refused(RunError, lambda: train(model, splits, Schedule(epochs=1), folder, seed=1))
        # An error that the main process alone meets.
        refused(RunError, lambda: RunFolder(finished if processes.rank() == 0 else path, {"seed": 2}).check())
    refused(TrainingError, lambda: train_on(path, learning_rate=1e30, dtype=torch.float32))
    with contextlib.chdir(path.parent):
        assert cli.main(["reproduce", "ba2016/associative-retrieval"]) == 1
        assert cli.main(["reproduce", "sprechmann2018/language", "--batch-size", "5"]) == 1
        assert cli.main(["sweep", "ba2016/associative-retrieval", "--search", "rate=0.1:1"]) == 1
    return said


def test_what_several_processes_cannot_do_is_refused_in_all(tmp_path):
    with RunFolder(tmp_path / "other", {"seed": 1}):
        pass
    main, other = in_two_processes(refusals, tmp_path, tmp_path / "other")
    assert [text.replace("process-0", "process-1") for text in main] == other
    batch, training, check, infinite = main
    assert batch == "batch_size must be a multiple of the number of processes, 2, got 5"
    assert "training runs in one process, and here are 2: only language models" in training
    assert "seed was 1, now 2" in check
    assert "NaN or infinite" in infinite
    assert {path.name for path in tmp_path.iterdir()} == {"other", "process-0"}
    assert "metrics.jsonl" not in contents(tmp_path / "process-0")


def run_an_experiment(path):
    """Run an experiment by the command line, twice; return the exit status and what is printed."""
    line = command(language.EXPERIMENT, "quick", language.PRESETS["quick"], TINY[language.EXPERIMENT].settings)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        statuses = [cli.main([*shlex.split(line)[1:], "--output", str(path)]) for _ in range(2)]
    return statuses, said.getvalue()


def test_an_experiment_of_several_processes_is_written_and_printed_by_one(tmp_path, monkeypatch):
    make_up(monkeypatch)
    main, other = in_two_processes(run_an_experiment, tmp_path)
    assert main[0] == other[0] == [0, 0]
    assert "perplexity" in main[1]
    assert other[1] == ""
    assert run_an_experiment(tmp_path / "alone")[0] == [0, 0]
    found, expected = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("process-0", "alone"))
    assert len(found["rows"]) == len(expected["rows"]) == 12
    for row, other_row in zip(found["rows"], expected["rows"], strict=True):
        assert row["ours"] == pytest.approx(other_row["ours"], rel=1e-4)
    assert (
        contents(tmp_path / "process-0" / "ptb-6-seed1").keys() == contents(tmp_path / "alone" / "ptb-6-seed1").keys()
    )
    assert not (tmp_path / "process-1").exists()


SCRIPT = """
import sys
from pathlib import Path
from fastweights import processes
from tests.training.test_processes import train_on
train_on(Path(sys.argv[1]))
print(processes.rank(), processes.count())
"""


@pytest.mark.slow
def test_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [*torchrun, "--nproc-per-node=2", tmp_path / "script.py", tmp_path / "run"]
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.split()) == ["0", "1", "2", "2"]
    alone = train_on(tmp_path / "alone")["result"]
    assert records(tmp_path / "run")[-1]["test_loss"] == pytest.approx(alone["test_loss"], abs=1e-5)
