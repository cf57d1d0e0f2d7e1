"""The progress of a training run: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from fastweights.training.loop import Progress

logger = logging.getLogger(__name__)

LINE_SECONDS = 15.0  # between lines where there is no terminal


class Lines(Progress):
    """A line of the log every quarter of a minute: loss, steps a second, time left."""

    def __init__(self) -> None:
        self.title, self.total, self.first, self.began, self.shown = "", 0, 0, 0.0, 0.0

    def start(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.first = title, total, done
        self.began = self.shown = time.monotonic()
        logger.info("%s: %s", title, f"resumes at step {done} of {total}" if done else f"{total} steps")

    def update(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self.shown < LINE_SECONDS:
            return
        self.shown = now
        speed = (step - self.first) / (now - self.began)
        left = format_seconds((self.total - step) / speed) if speed > 0 else "?"
        logger.info(
            "%s: step %d of %d, loss %.4f, %.0f steps/s, %s left", self.title, step, self.total, loss, speed, left
        )

    def note(self, text: str) -> None:
        logger.info("%s: %s", self.title, text)


class Bar(Progress):
    """A bar on the terminal, drawn by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Display

        self.display = Display(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} steps/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True),
            expand=True,
        )
        self.task: Any = None
        self.title = ""

    def start(self, title: str, total: int, done: int) -> None:
        self.title = title
        self.task = self.display.add_task(title, total=total, completed=done, loss="-", speed="-", note="")

    def update(self, step: int, loss: float) -> None:
        speed = self.display.tasks[self.task].speed
        self.display.update(
            self.task, completed=step, loss=f"{loss:.4f}", speed="-" if speed is None else f"{speed:.0f}"
        )

    def note(self, text: str) -> None:
        self.display.update(self.task, note=text)


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """Show progress by a bar where standard error is a terminal and rich is there, elsewhere by lines of the log."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield Lines()
        return
    bar = Bar()
    with bar.display:
        yield bar


def format_seconds(seconds: float) -> str:
    """Return seconds as a person says them.

    Examples:
        >>> format_seconds(42.4), format_seconds(605), format_seconds(7260)
        ('42 s', '10 min 05 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
