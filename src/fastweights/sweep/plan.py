"""A search as it was asked for: what is searched, how, and from which settings."""

import dataclasses
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastweights import reproduce
from fastweights.errors import RunError
from fastweights.sweep.space import OF_THE_MACHINE, Space, Value, applied, grid

Record = dict[str, Any]
Sampler = Literal["tpe", "random", "grid"]

DEFAULT_TRIALS = 30
METRICS = ("validation_error", "validation_loss")  # of an experiment that names no others
_MOST_TRIALS = 100_000


@dataclass(frozen=True)
class Plan:
    """A search over the settings of an experiment; what cannot be searched is refused when the plan is made.

    Args:
        experiment: as `fastweights list` shows it.
        settings: what all trials share.
        space: what is searched, from `parse`.
        output: the folder of the search.
        preset: the preset that `settings` started from, for the command that the search prints.
        sampler: "tpe" learns from the trials so far, "random" does not, "grid" runs every combination once.
        trials: finished trials to have in the end, over all workers; None is 30, or the whole grid.
        storage: an optuna URL; None is an SQLite file in `output`.
        metric: the key of the result's record that decides, averaged over the models, sizes and seeds of a trial.
        direction: "minimize" or "maximize".
        sampler_seed: of what is drawn: the trial in place k draws from this seed and k alone.

    Raises:
        RunError: settings, trials, metric or grid are not possible.

    Examples:
        >>> from pathlib import Path
        >>> from fastweights.reproduce.ba2016.associative_retrieval import Settings
        >>> from fastweights.sweep import Plan, parse
        >>> space = parse(Settings, ["decay=0.8,0.9,0.95", "inner_steps=1:2"])
        >>> Plan("ba2016/associative-retrieval", Settings(), space, Path("runs/mine"), sampler="grid").total
        6
    """

    experiment: str
    settings: Any
    space: Space
    output: Path
    preset: str = "quick"
    sampler: Sampler = "tpe"
    trials: int | None = None
    storage: str | None = None
    metric: str = "validation_error"
    direction: Literal["minimize", "maximize"] = "minimize"
    sampler_seed: int = 0
    points: tuple[dict[str, Value], ...] = dataclasses.field(init=False, default=())
    """The points of a grid, in the order in which they are run."""

    def __post_init__(self) -> None:
        if self.trials is not None and not 1 <= self.trials <= _MOST_TRIALS:
            raise RunError(f"--trials must lie between 1 and {_MOST_TRIALS:,}, got {self.trials}")
        if not 0 <= self.sampler_seed < 2**32:
            raise RunError(f"--sampler-seed must lie between 0 and {2**32 - 1:,}, got {self.sampler_seed}")
        if self.metric.startswith("test"):
            raise RunError(f"--metric {self.metric}: settings are chosen by validation, never by the test score")
        module = reproduce.load(self.experiment)
        known = getattr(module, "METRICS", METRICS)
        if self.metric not in known:
            raise RunError(f"the result has no {self.metric!r} to choose by; --metric can be {' or '.join(known)}")
        if self.sampler == "grid":
            points = grid(self.space)
            if self.trials is not None and self.trials > len(points):
                raise RunError(f"the grid has {len(points)} points: give at most --trials {len(points)}, or leave it")
            # Shuffled: the beginning of a long grid then says something of all of it.
            random.Random(self.sampler_seed).shuffle(points)
            object.__setattr__(self, "points", tuple(points))
        check = getattr(module, "check", None)
        if check is None:
            return
        check(self.settings)
        for name, dimension in self.space.items():
            for value in dimension.ends:
                try:
                    check(self.of({name: value}))
                except RunError as error:
                    raise RunError(f"--search {name}={dimension} cannot run: {error}") from None

    @property
    def total(self) -> int:
        """Finished trials to have in the end."""
        return self.trials or len(self.points) or DEFAULT_TRIALS

    def of(self, params: dict[str, Value]) -> Any:
        """The experiment's settings in the trial with these values."""
        return applied(self.settings, params)

    def folder(self, params: dict[str, Value]) -> Path:
        """The run folder of a trial, named by its settings: who runs them again finds the checkpoint."""
        text = json.dumps(self._shared(self.of(params)), sort_keys=True)
        return self.output / "trials" / hashlib.sha256(text.encode()).hexdigest()[:12]

    def definition(self) -> Record:
        """What decides the trials, as plain JSON values: the same for everybody who works on this search."""
        own: Record = {
            "experiment": self.experiment,
            "--sampler": self.sampler,
            "--sampler-seed": self.sampler_seed,
            "--metric": self.metric,
            "--direction": self.direction,
        }
        own |= {f"--search {name}": str(dimension) for name, dimension in self.space.items()}
        shared = {name: value for name, value in self._shared(self.settings).items() if name not in self.space}
        return own | shared

    @staticmethod
    def _shared(settings: Any) -> Record:
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        plain = {name: value for name, value in values.items() if name not in OF_THE_MACHINE}
        return dict(json.loads(json.dumps(plain, default=str)))
