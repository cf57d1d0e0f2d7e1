"""The trials of a search in optuna's storage: who runs which, so that each is run once and none is lost.

Every trial has a place, 0 to N - 1. A worker queues a trial for a free place and takes one out of the queue; the
database lets only one worker take it. A place whose trial was lost is free again. What optuna has for this does not
suffice: its grid gives a point to two workers at once, its count of trials is one worker's own, and its retry is lost
with a worker that dies between noticing and queueing.
"""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fastweights.errors import RunError
from fastweights.runs import describe_changes
from fastweights.sweep import database
from fastweights.sweep.database import open_storage, quiet, require_database, require_optuna, sqlite_url, storage_errors
from fastweights.sweep.plan import Plan

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, TrialState

LEFT_SECONDS = 3.0  # a trial that waits so long was queued by a worker that is no more


class Board:
    """The trials of one search, as all its workers see them.

    Args:
        plan: the search. A new one is written into the storage, a present one is compared.

    Raises:
        RunError: the storage cannot be used, or holds another search.
    """

    def __init__(self, plan: Plan) -> None:
        require_optuna()
        import optuna

        self.plan = plan
        self._optuna = optuna
        self._states = optuna.trial.TrialState
        self._seen: dict[tuple[int, TrialState], float] = {}
        self.url = plan.storage or sqlite_url(plan.output)
        if plan.storage:
            require_database(plan.storage)
        try:
            plan.output.mkdir(parents=True, exist_ok=True)
            # Two workers that make the tables at once would trip over each other.
            with FileLock(plan.output / ".lock", timeout=database.BUSY_SECONDS):
                self._open()
        except Timeout:
            raise RunError(f"another process has held {plan.output / '.lock'} for {database.BUSY_SECONDS} s") from None
        except OSError as error:
            raise RunError(
                f"cannot write into {plan.output}: {error.strerror}; make it writable and leave room on the disk, or "
                "choose another --output"
            ) from error

    def _open(self) -> None:
        import optuna

        self.storage = open_storage(self.url)
        with storage_errors(self.url):
            self.study = optuna.create_study(
                storage=self.storage,
                study_name=self.plan.output.as_posix() if self.plan.storage else "sweep",
                direction=self.plan.direction,
                load_if_exists=True,
            )
            self._study_id = self.storage.get_study_id_from_name(self.study.study_name)
            self._identify()

    def _identify(self) -> None:
        now = self.plan.definition()
        before = self.study.user_attrs.get("definition")
        where = f"the storage of {self.plan.output}"
        if before is None and self.study.get_trials(deepcopy=False):
            raise RunError(f"{where} holds a study that is no sweep: choose another --output")
        if before is None:
            self.study.set_user_attr("definition", now)
        elif changed := describe_changes(before, now):
            raise RunError(
                f"{where} holds another sweep: {changed}. Give the same search to go on with it, or choose another "
                "--output"
            )

    def trials(self) -> "list[FrozenTrial]":
        """The trials that have a place in the search, dead ones too, in the order of their numbers."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if _place(trial) is not None]

    def done(self) -> int:
        """How many places are done with, finished or failed for good."""
        ended = (self._states.COMPLETE, self._states.PRUNED)
        return len({_place(trial) for trial in self.trials() if trial.state in ended})

    def running(self) -> int:
        """How many trials are with some worker, this one or another."""
        return sum(trial.state in (self._states.RUNNING, self._states.WAITING) for trial in self._within())

    def claim(self) -> "optuna.Trial | None":
        """A trial for this worker alone, or None where no place is free now."""
        while True:
            self._bury()
            live = {_place(trial) for trial in self.trials() if trial.state != self._states.FAIL}
            free = [place for place in range(self.plan.total) if place not in live]
            if free:
                self._queue(free)
            elif not any(self._idle(trial, self._states.WAITING, LEFT_SECONDS) for trial in self._within()):
                return None
            with quiet():
                trial = self.study.ask()
            if self._is_mine(trial):
                self.study.sampler = self._sampler(trial.user_attrs["place"])
                return trial
            self.study.tell(trial, state=self._states.FAIL)

    @contextlib.contextmanager
    def alive(self, trial: "optuna.Trial") -> Iterator[None]:
        """Signs of life for a trial, from a thread, while the body runs."""
        trial_id = self._trial_id(trial.number)
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(database.HEARTBEAT_SECONDS):
                try:
                    self.storage.record_heartbeat(trial_id)
                except Exception as error:  # the database is busy or away: the next beat may reach it
                    logging.getLogger(__name__).debug("no heartbeat: %s", error)
            self.storage.remove_session()

        self.storage.record_heartbeat(trial_id)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def end(self, trial: "optuna.Trial", *, value: float | None = None, failed: bool = False) -> None:
        """Finish a trial with its value, fail it for good, or give it back to be run again."""
        # A pruned trial tells TPE to keep away, a failed one nothing: a reason of its own against one of the machine's.
        state = self._states.COMPLETE if value is not None else self._states.FAIL
        with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            # Already finished: this worker was thought dead, and another has the trial.
            self.study.tell(trial, value, state=self._states.PRUNED if failed else state, skip_if_finished=True)

    def lost(self, trial: "optuna.Trial") -> bool:
        """Whether the trial was taken from this worker, which had been silent for too long."""
        try:
            return self.storage.get_trial(self._trial_id(trial.number)).state.is_finished()
        except self._optuna.exceptions.StorageInternalError:
            return False

    def _within(self) -> "list[FrozenTrial]":
        return [trial for trial in self.trials() if trial.user_attrs["place"] < self.plan.total]

    def _bury(self) -> None:
        """Fail the trials whose workers have died, so that their places are free."""
        with quiet():
            self._optuna.storages.fail_stale_trials(self.study)
        for trial in self.study.get_trials(deepcopy=False):
            # Optuna looks only at trials that have had a heartbeat, which comes before the first parameter.
            unborn = len(trial.params) < len(self.plan.space)
            if unborn and self._idle(trial, self._states.RUNNING, database.GRACE_SECONDS):
                with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
                    self.study.tell(trial.number, state=self._states.FAIL, skip_if_finished=True)

    def _idle(self, trial: "FrozenTrial", state: "TrialState", seconds: float) -> bool:
        """Whether this worker has seen the trial in this state for so long: no clock but its own counts."""
        if trial.state != state:
            return False
        now = time.monotonic()
        return now - self._seen.setdefault((trial.number, state), now) >= seconds

    def _queue(self, free: list[int]) -> None:
        """A new trial for a free place; what an earlier trial there had drawn is kept."""
        deaths: collections.Counter[int] = collections.Counter()
        drawn: dict[int, dict[str, Any]] = {}
        for trial in self.trials():
            if trial.state == self._states.FAIL:
                place = trial.user_attrs["place"]
                deaths[place] += "reason" not in trial.user_attrs
                if trial.params.keys() == self.plan.space.keys():
                    drawn[place] = trial.params
        # One that kills its worker each time must not keep all the others from being run: it goes last.
        place = min(free, key=lambda place: (deaths[place], place))
        point = self.plan.points[place] if self.plan.points else {}
        self.study.enqueue_trial(drawn.get(place, point), user_attrs={"place": place})

    def _is_mine(self, trial: "optuna.Trial") -> bool:
        """Two workers may have queued the same place: the trial with the lowest number has it."""
        place = trial.user_attrs.get("place")
        if place is None or place >= self.plan.total:
            return False
        others = [other for other in self.trials() if _place(other) == place and other.number < trial.number]
        if all(other.state == self._states.FAIL for other in others):
            return True
        trial.set_user_attr("place", None)
        return False

    def _sampler(self, place: int) -> "optuna.samplers.BaseSampler":
        """Seeded by the place: no two trials draw the same, and a resumed search draws what an unbroken one does."""
        import numpy
        import optuna

        seed = int(numpy.random.SeedSequence([self.plan.sampler_seed, place]).generate_state(1)[0])
        if self.plan.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed)
        return optuna.samplers.RandomSampler(seed=seed)

    def _trial_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._study_id, number)


def _place(trial: "FrozenTrial") -> int | None:
    place = trial.user_attrs.get("place")
    return place if isinstance(place, int) else None
