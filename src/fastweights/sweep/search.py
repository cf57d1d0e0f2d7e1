"""The search: claims trials, runs the experiment for each, and tells what came of it."""

import contextlib
import logging
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from fastweights import reproduce
from fastweights.errors import FastWeightsError, RunError, TrainingError
from fastweights.runs import load_run
from fastweights.sweep import outcome
from fastweights.sweep.board import Board
from fastweights.sweep.database import storage_errors
from fastweights.sweep.plan import Plan
from fastweights.sweep.space import Value

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5  # between looks at what the other workers do
STOP_SECONDS = 15.0  # for a further worker to end after an interrupt
_REASON = 300  # characters of an error that the storage keeps


def run(plan: Plan, *, workers: int = 1, words: Sequence[str] = ()) -> list[outcome.TrialRow]:
    """Run the trials that the search still lacks, beside all other workers, and write `sweep.json` and `sweep.svg`.

    Returns when every trial of the search has ended, those of other workers too. What was begun is gone on with: a
    trial's folder is found by its settings.

    Args:
        plan: the search.
        workers: processes to run trials in; those beyond this one run `fastweights` with `words`.
        words: the command line of a further worker.

    Raises:
        RunError: the search cannot be made or gone on with, or every trial has failed.
        FastWeightsError: optuna is not installed.

    Examples:
        >>> import dataclasses, tempfile
        >>> from pathlib import Path
        >>> from fastweights.reproduce.ba2016.associative_retrieval import Settings
        >>> from fastweights.sweep import Plan, parse, run
        >>> tiny = Settings(models=("lstm",), hidden_sizes=(4,), train_examples=100, test_examples=20, epochs=1)
        >>> tiny = dataclasses.replace(tiny, validation_examples=20)
        >>> plan = Plan(
        ...     "ba2016/associative-retrieval",
        ...     tiny,
        ...     parse(Settings, ["learning_rate=0.001,0.01"]),
        ...     Path(tempfile.mkdtemp()),
        ...     sampler="grid",
        ... )
        >>> [row.state for row in run(plan)]
        ['finished', 'finished']
    """
    board = Board(plan)
    with storage_errors(board.url):
        missing = plan.total - board.done()
        with _further_workers(plan, min(workers, missing), words):
            _work(board)
        rows = outcome.rows(plan, board.trials())
    outcome.write(plan, rows, picture=True)
    failed = [row.reason for row in rows if row.state == "failed"]
    if failed and not any(row.state == "finished" for row in rows):
        raise RunError(f"all {len(failed)} trials have failed, the first so: {failed[0]}")
    return rows


def _work(board: Board) -> None:
    waits = False
    while True:
        trial = board.claim()
        if trial is not None:
            waits = False
            with board.alive(trial):
                _run_trial(board, trial)
            outcome.write(board.plan, outcome.rows(board.plan, board.trials()))
        elif running := board.running():
            if not waits:
                logger.info("waiting for the trials of other workers, %d now", running)
            waits = True
            time.sleep(POLL_SECONDS)
        else:
            return


def _run_trial(board: Board, trial: "optuna.Trial") -> None:
    try:
        _measure_trial(board, trial)
    except BaseException as error:
        if isinstance(error, Exception) and board.lost(trial):
            logger.info("trial %d was taken over by another worker", trial.number)
            return
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        with contextlib.suppress(Exception):  # the first error is the one to tell; without this, silence ends the trial
            trial.set_user_attr("reason", reason[:_REASON])
            board.end(trial)
        raise


def _measure_trial(board: Board, trial: "optuna.Trial") -> None:
    plan = board.plan
    params = {name: dimension.suggest(name, trial) for name, dimension in plan.space.items()}
    title = f"trial {trial.number} ({outcome.shown(params)})"
    logger.info("%s begins", title)
    began = time.monotonic()
    trial.set_user_attr("worker", f"{socket.gethostname()}:{os.getpid()}")
    try:
        value, test = _measured(plan, params)
    except _FailedError as error:
        trial.set_user_attr("reason", str(error)[:_REASON])
        board.end(trial, failed=True)
        logger.info("%s failed: %s", title, error)
        return
    trial.set_user_attr("test_score", test)
    board.end(trial, value=value)
    logger.info("%s: %s %.4g, %.0f s", title, plan.metric, value, time.monotonic() - began)


class _FailedError(Exception):
    """These settings give no value: no fault of the machine's, so that the search goes on."""


def _measured(plan: Plan, params: dict[str, Value]) -> tuple[float, float | None]:
    """The trial's value and its test score, after training what its folder still lacks."""
    try:
        settings, folder = plan.of(params), plan.folder(params)
    except (TypeError, ValueError) as error:
        raise _FailedError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    # A worker that was thought dead may still be training here, and the same settings may have been drawn twice.
    with FileLock(folder / ".lock"):
        try:
            reproduce.load(plan.experiment).run(settings, folder, preset=plan.preset)
        except TrainingError as error:
            raise _FailedError(str(error).split(";")[0]) from error
        except RunError as error:
            refused = not any(folder.glob("*/settings.json"))  # nothing is written before all settings are accepted
            if refused and not isinstance(error.__cause__, OSError):
                raise _FailedError(str(error)) from error
            raise
        members = load_run(folder).members
    results = [member.result or {} for member in members]
    scores = [_number(result, plan.metric) for result in results]
    if None in scores or not scores:
        known = sorted(key for key in results[0] if key.startswith("validation")) if results else []
        raise RunError(f"the result has no {plan.metric!r} to choose by; --metric can be {' or '.join(known)}")
    value = statistics.fmean(score for score in scores if score is not None)
    if not math.isfinite(value):
        raise _FailedError(f"{plan.metric} is {value}")
    tests = [_number(result, plan.metric.replace("validation", "test", 1)) for result in results]
    found = [score for score in tests if score is not None and "validation" in plan.metric]
    return value, statistics.fmean(found) if len(found) == len(results) else None


def _number(result: dict[str, Any], metric: str) -> float | None:
    value = result.get(metric)
    return value if isinstance(value, int | float) else None


@contextlib.contextmanager
def _further_workers(plan: Plan, count: int, words: Sequence[str]) -> Iterator[None]:
    """Processes that do the same beside this one; what they have to say goes to a file each."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for index in range(2, count + 1):
            log = plan.output / f"worker-{index}.log"
            with log.open("wb") as file:
                command = [sys.executable, "-m", "fastweights", *words]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)
            started.append((process, log))
        yield
        for process, log in started:
            if process.wait():
                logger.warning("a worker ended with status %d: %s", process.returncode, _last_line(log))
    except OSError as error:
        raise FastWeightsError(f"cannot start a worker in {plan.output}: {error.strerror}") from error
    finally:
        for process, _ in started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process, _ in started:
            _await(process)


def _await(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_bytes().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {os.fspath(log)}"
