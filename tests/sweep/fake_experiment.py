"""An experiment that measures a formula instead of training, and a process that searches it."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from fastweights import reproduce
from fastweights.errors import RunError, TrainingError
from fastweights.runs import Score, write_result
from fastweights.training import RunFolder

NAME = "fake/formula"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A parabola with its bottom at x = 3."""

    x: float = 0.0
    steps: int = 1
    kind: Literal["smooth", "rough"] = "smooth"
    sizes: tuple[int, ...] = (4,)
    switch: bool = True
    limit: float | None = None
    word: str = "a"
    pair: tuple[int, int] = (1, 2)
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    threads: int = 1


def check(settings: Settings) -> None:
    if settings.steps < 1:
        raise RunError(f"these settings cannot run: steps must be at least 1, got {settings.steps}")
    if settings.steps == 4 and settings.x == 2:
        raise RunError("these settings cannot run: 4 steps are too many where x is 2")


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    check(settings)
    with RunFolder(folder / "formula", {"model": "Formula", "hidden_size": settings.sizes[0], "seed": 1}) as member:
        with (folder / "begun").open("a") as begun:
            begun.write("begun\n")
        time.sleep(settings.seconds)
        if settings.x > 9:
            raise TrainingError("the loss became NaN in epoch 1; lower x")
        if not (folder / "formula" / "metrics.jsonl").exists():
            score = (settings.x - 3) ** 2 + settings.steps / 10
            member.append({"kind": "result", "validation_error": score, "test_error": score + 1, "validation_loss": 0})
    write_result(
        folder,
        experiment=NAME,
        preset=preset,
        command="",
        requested=[],
        scores=[Score("test error, %", {}, 0.0)],
        floor_log_likelihood=0.0,
    )


MODULE = SimpleNamespace(
    Settings=Settings, PRESETS={"quick": Settings()}, run=run, check=check, __doc__="Fake: a formula."
)


def main() -> None:
    """The command line with this experiment and quick heartbeats; they come first, as JSON."""
    from fastweights import cli
    from fastweights.sweep import search

    seconds = json.loads(sys.argv[1])
    search.HEARTBEAT_SECONDS, search.GRACE_SECONDS = seconds["heartbeat"], seconds["grace"]
    if seconds.get("fake", True):
        reproduce.load = lambda name: MODULE  # type: ignore[assignment,return-value]
    sys.exit(cli.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
