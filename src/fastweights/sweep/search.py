"""The search: optuna shares and retries the trials, and each trial runs the experiment in a folder of its own."""

import contextlib
import logging
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from filelock import FileLock, Timeout

from fastweights import reproduce
from fastweights.errors import FastWeightsError, RunError, TrainingError, one_line
from fastweights.runs import describe_changes, load_run
from fastweights.sweep import outcome
from fastweights.sweep.plan import Plan, Value

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5  # between a worker's signs of life
GRACE_SECONDS = 30  # without one: then the trial is queued again
POLL_SECONDS = 0.5  # between looks at the trials of other workers
_BUSY_SECONDS = 60  # seconds to wait for the lock of an SQLite file
_STOP_SECONDS = 15.0  # seconds for a further worker to end after an interrupt
_ATTEMPTS = 4  # attempts at making the tables of a search
_RETRIES = 10  # retries of a trial, which may itself kill its worker
_REASON = 300  # characters of an error that the storage keeps


def run(plan: Plan, *, workers: int = 1, words: Sequence[str] = ()) -> list[outcome.TrialRow]:
    """Run the trials that the search still lacks, beside all other workers, and write `sweep.json` and `sweep.svg`.

    Returns when all trials have ended, those of other workers too. A trial that was begun is resumed: its folder is
    found by its settings.

    Args:
        plan: the search.
        workers: processes to run trials in; those beyond this one run `fastweights` with `words`.
        words: the command line of a further worker.

    Raises:
        RunError: the search cannot be made or resumed, or every trial has failed.
        FastWeightsError: optuna is not installed.

    Examples:
        >>> import dataclasses, tempfile
        >>> from pathlib import Path
        >>> from fastweights import reproduce
        >>> from fastweights.sweep import Plan, parse, run
        >>> Settings = reproduce.load("ba2016/associative-retrieval").Settings
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
    optuna = _require_optuna()
    url = plan.storage or _sqlite_url(plan.output)
    over = threading.Event()
    with _storage_errors(url), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        study = _open_study(plan, url, over)
        try:
            with _further_workers(plan, min(workers, plan.total - _ended(study)), words):
                _work(plan, study)
        finally:
            over.set()
        rows = outcome.list_rows(plan, study.get_trials(deepcopy=False))
    outcome.write(plan, rows, picture=True)
    failed = [row.reason for row in rows if row.state == "failed"]
    if failed and not any(row.state == "finished" for row in rows):
        raise RunError(f"all {len(failed)} trials have failed; the error of the first: {failed[0]}")
    return rows


def _work(plan: Plan, study: "optuna.Study") -> None:
    import optuna

    waits = False
    # Held until a trial has its worker's name, so that two workers of one folder never begin the last trial both.
    # Workers that share a database alone may, and then there is a trial more than asked.
    turn = FileLock(plan.output / ".turn")
    while True:
        with turn:
            missing = plan.total - _ended(study)
            if missing <= 0:
                return
            optuna.storages.fail_stale_trials(study)  # also queues them again
            running = _count_running(study)
            if running < missing:
                waits = False
                try:
                    study.optimize(lambda trial: _run_trial(plan, trial, turn), n_trials=1)
                except ValueError as error:
                    if "Cannot tell a" not in str(error):  # optuna's words for a trial that has ended
                        raise
                    logger.info("a trial was taken over by another worker, which took this one for dead")
        if running < missing:
            outcome.write(plan, outcome.list_rows(plan, study.get_trials(deepcopy=False)))
            continue
        if not waits:
            logger.info("waiting for the trials of other workers, %d now", running)
        waits = True
        time.sleep(POLL_SECONDS)


def _count_running(study: "optuna.Study") -> int:
    trials = study.get_trials(deepcopy=False)
    # A worker that dies before it has said its name has not begun anything.
    return sum(trial.state.name == "RUNNING" and "worker" in trial.user_attrs for trial in trials)


def _ended(study: "optuna.Study") -> int:
    """Return how many trials have finished or failed for good; a point of a grid that was run twice counts once."""
    ended = (trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED"))
    return len({trial.system_attrs.get("grid_id", trial.number) for trial in ended})


def _run_trial(plan: Plan, trial: "optuna.Trial", turn: FileLock) -> float:
    import optuna

    trial.set_user_attr("worker", f"{socket.gethostname()}:{os.getpid()}")
    turn.release()
    if plan.sampler != "grid":
        trial.study.sampler = _sampler(plan, trial)
    params = {name: dimension.suggest(name, trial) for name, dimension in plan.space.items()}
    title = f"trial {trial.number} ({outcome.describe(params)})"
    logger.info("%s begins", title)
    began = time.monotonic()
    trial.set_user_attr("reason", None)
    try:
        value, test = _measure(plan, params)
        trial.set_user_attr("test_score", test)
    except _FailedError as error:
        trial.set_user_attr("reason", str(error)[:_REASON])
        logger.info("%s failed: %s", title, error)
        # A pruned trial tells TPE to keep away, a failed one nothing.
        raise optuna.TrialPruned from error
    except (Exception, KeyboardInterrupt) as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        with contextlib.suppress(Exception):  # the first error counts; the trial then ends because its heartbeat stops
            trial.set_user_attr("reason", reason[:_REASON])
            optuna.storages.RetryHeartbeatStaleTrialCallback()(trial.study, trial.study.trials[trial.number])
        raise
    logger.info("%s: %s %.4g, %.0f s", title, plan.metric, value, time.monotonic() - began)
    return value


def _sampler(plan: Plan, trial: "optuna.Trial") -> "optuna.samplers.BaseSampler":
    """Return a sampler for the k-th trial that is no retry: a resumed search draws what an unbroken one does."""
    import numpy
    import optuna

    trials = trial.study.get_trials(deepcopy=False)
    retried = [optuna.storages.RetryHeartbeatStaleTrialCallback.retried_trial_number(each) for each in trials]
    first = trial.number if retried[trial.number] is None else retried[trial.number]
    place = retried[:first].count(None)
    seed = int(numpy.random.SeedSequence([plan.sampler_seed, place]).generate_state(1)[0])
    return optuna.samplers.TPESampler(seed=seed) if plan.sampler == "tpe" else optuna.samplers.RandomSampler(seed=seed)


class _FailedError(Exception):
    """These settings give no value: no fault of the machine's, so that the search goes on."""


def _measure(plan: Plan, params: dict[str, Value]) -> tuple[float, float | None]:
    """Return the trial's value and its test score, after training what its folder still lacks."""
    try:
        settings, folder = plan.with_values(params), plan.folder(params)
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
    scores = _numbers(results, plan.metric)
    if not scores or len(scores) < len(results):
        known = sorted(key for key in results[0] if key.startswith("validation")) if results else []
        raise RunError(f"the result has no {plan.metric!r} to choose by; --metric can be {' or '.join(known)}")
    value = statistics.fmean(scores)
    if not math.isfinite(value):
        raise _FailedError(f"{plan.metric} is {value}")
    tests = _numbers(results, plan.metric.replace("validation", "test", 1)) if "validation" in plan.metric else []
    return value, statistics.fmean(tests) if len(tests) == len(results) else None


def _numbers(results: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    return [result[metric] for result in results if isinstance(result.get(metric), int | float)]


def _require_optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise FastWeightsError(f"a sweep needs optuna ({error}): `pip install '.[sweep]'` in the checkout") from None
    # Ours are the lines to read; optuna's errors go where the program's own log goes.
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _open_study(plan: Plan, url: str, over: threading.Event) -> "optuna.Study":
    """Return the study of the search, made where there is none; another search in its place is refused.

    Its heartbeats end when `over` is set.
    """
    import optuna
    import sqlalchemy

    for _ in range(_ATTEMPTS - 1):
        try:
            return _make_study(plan, url, over)
        except (
            sqlalchemy.exc.IntegrityError,
            sqlalchemy.exc.ProgrammingError,
            optuna.exceptions.StorageInternalError,
        ):
            # A worker on another machine, which knows nothing of the lock in this folder, is making the same tables.
            time.sleep(POLL_SECONDS)
    return _make_study(plan, url, over)


def _make_study(plan: Plan, url: str, over: threading.Event) -> "optuna.Study":
    import optuna
    import sqlalchemy

    if plan.storage:  # looked at before a folder is made
        try:
            engine = sqlalchemy.create_engine(url)
        except ImportError as error:
            raise RunError(f"--storage needs the database's driver ({error}): install it with pip") from error
        if not url.startswith("sqlite"):  # where the first look would make the file
            engine.connect().close()
        engine.dispose()
    try:
        plan.output.mkdir(parents=True, exist_ok=True)
        # Two workers that make the tables at once would trip over each other.
        with FileLock(plan.output / ".lock", timeout=_BUSY_SECONDS):
            storage = _make_storage(url, over)
            study = optuna.create_study(
                storage=storage,
                study_name=plan.output.as_posix() if plan.storage else "sweep",
                direction=plan.direction,
                load_if_exists=True,
                sampler=optuna.samplers.GridSampler(plan.grid(), seed=plan.sampler_seed)
                if plan.sampler == "grid"
                else None,
            )
            _check_study(plan, study)
    except RuntimeError as error:  # tables of another version of optuna
        raise RunError(f"cannot use the storage: {error}") from error
    except Timeout:
        raise RunError(f"another process has held {plan.output / '.lock'} for {_BUSY_SECONDS} s") from None
    except OSError as error:
        raise RunError(
            f"cannot write into {plan.output}: {error.strerror}; make it writable and leave room on the disk, or "
            "choose another --output"
        ) from error
    return study


def _make_storage(url: str, over: threading.Event) -> "optuna.storages.RDBStorage":
    import optuna
    import sqlalchemy

    class Storage(optuna.storages.RDBStorage):
        def record_heartbeat(self, trial_id: int) -> None:
            # An interrupt between two lines of optuna's leaves the thread that calls this without its end. Python would
            # wait for it for ever, and other workers for its trial.
            if over.is_set():
                raise SystemExit  # ends the thread without a message
            super().record_heartbeat(trial_id)

    local = url.startswith("sqlite")
    storage = Storage(
        url,
        engine_kwargs={"connect_args": {"timeout": _BUSY_SECONDS, "isolation_level": None}} if local else None,
        heartbeat_interval=HEARTBEAT_SECONDS,
        grace_period=GRACE_SECONDS,
        heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=_RETRIES),
    )
    if local:
        # Begun at the first write, as sqlite3 does, two transactions could both take a trial that waits.
        sqlalchemy.event.listen(storage.engine, "begin", lambda on: on.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def _check_study(plan: Plan, study: "optuna.Study") -> None:
    now, before = plan.definition(), study.user_attrs.get("definition")
    where, trials = f"the storage of {plan.output}", study.get_trials(deepcopy=False)
    if before is None and trials:
        raise RunError(f"{where} holds a study that is not a sweep: choose another --output")
    if before is None:
        study.set_user_attr("definition", now)
    elif changes := describe_changes(before, now):
        raise RunError(
            f"{where} holds another sweep: {changes}. Give the same search to continue it, or choose another --output"
        )
    elif plan.sampler == "grid" and any("place" in trial.user_attrs for trial in trials):
        raise RunError(
            f"{where} holds a grid that an older fastweights began: move its study.db away, and the same command goes "
            f"through the grid again and reuses what is trained in {plan.output / 'trials'}"
        )


def _sqlite_url(output: Path) -> str:
    return f"sqlite:///{quote((output / 'study.db').as_posix())}"


@contextlib.contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    """Raise the errors of a database as one line, without its password."""
    import optuna
    import sqlalchemy

    try:
        yield
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = one_line(getattr(cause, "orig", None) or cause or error)
        try:
            address = sqlalchemy.make_url(url).render_as_string(hide_password=True)
        except sqlalchemy.exc.SQLAlchemyError:
            address = "that --storage names"
            reason = f"{url!r} is no URL such as sqlite:///study.db or mysql+pymysql://user@host/database"
        raise RunError(
            f"cannot use the storage {address}: {reason}; repair it and run the same command again, or choose another "
            "--storage"
        ) from error


@contextlib.contextmanager
def _further_workers(plan: Plan, count: int, words: Sequence[str]) -> Iterator[None]:
    """Run processes that do the same beside this one; their messages go to a file each."""
    processes: list[tuple[subprocess.Popen[bytes], Path]] = []
    command = [sys.executable, "-m", "fastweights", *words]
    try:
        for index in range(2, count + 1):
            log = plan.output / f"worker-{index}.log"
            try:
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file
                    )
            except OSError as error:
                raise FastWeightsError(f"cannot start a worker in {plan.output}: {error.strerror}") from error
            processes.append((process, log))
        yield
        for process, log in processes:
            if process.wait():
                lines = log.read_bytes().decode(errors="replace").strip().splitlines() or [f"see {log}"]
                logger.warning("a worker ended with status %d: %s", process.returncode, lines[-1])
    finally:
        for process, _ in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process, _ in processes:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
