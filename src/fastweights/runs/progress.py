"""The progress of a training run: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

from fastweights import processes

logger = logging.getLogger(__name__)

LINE_SECONDS = 15.0  # between lines where there is no terminal


class Progress:
    """A receiver of a training loop's progress; this one shows nothing."""

    def start(self, title: str, total: int, done: int) -> None:
        """Note that a run of `total` steps begins, `done` of them made by an earlier process."""

    def update(self, step: int, loss: float) -> None:
        """Note that `step` steps are done; `loss` is the mean since the epoch began."""

    def note(self, text: str) -> None:
        """Show a line, such as the scores of an epoch."""

    def beside(self) -> "Progress":
        """Return a receiver that shows another run at the same place."""
        return Progress()


class LogLines(Progress):
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
        speed_shown = format_speed(speed)
        logger.info("%s: step %d of %d, loss %.4f, %s, %s left", self.title, step, self.total, loss, speed_shown, left)

    def note(self, text: str) -> None:
        logger.info("%s", f"{self.title}: {text}" if self.title else text)

    def beside(self) -> Progress:
        return LogLines()


class _Details:
    """Parts of a line for rich: those that have room, in their order, each whole."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = [part for part in parts if part]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        line = ""
        for part in self.parts:
            longer = f"{line}, {part}" if line else part
            line = longer if len(longer) <= options.max_width else line
        yield Text(line, end="")

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        return Measurement(0, min(options.max_width, len(", ".join(self.parts))))


def _make_display() -> Any:
    """Return an empty display of bars."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Display
    from rich.table import Column

    class Details(ProgressColumn):
        def render(self, task: Any) -> _Details:
            done = f"{task.completed:.0f}/{task.total:.0f} in {format_seconds(task.elapsed or 0)}"
            return _Details([task.fields["note"], f"loss {task.fields['loss']}", format_speed(task.speed), done])

    console = Console(stderr=True)
    title = Column(no_wrap=True, max_width=console.width - 20)
    return Display(
        TextColumn("{task.description}", markup=False, table_column=title),
        *([BarColumn(bar_width=20)] if console.width >= 100 else []),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left"),
        Details(table_column=Column()),
        console=console,
    )


class Bar(Progress):
    """A bar on the terminal, drawn by rich: what is done and the time left are whole, the rest stands where it can."""

    def __init__(self, display: Any = None) -> None:
        self.display = _make_display() if display is None else display
        self.task: Any = None
        self.title = ""

    def start(self, title: str, total: int, done: int) -> None:
        if self.task is not None and title == self.title:  # such as one of many passes over a text
            self.display.remove_task(self.task)
        self.title = title
        self.task = self.display.add_task(title, total=total, completed=done, loss="-", note="")

    def update(self, step: int, loss: float) -> None:
        self.display.update(self.task, completed=step, loss=f"{loss:.4f}")

    def note(self, text: str) -> None:
        if self.task is None:  # nothing has started, as where a trained model is scored
            self.display.console.print(text, markup=False, highlight=False)
        else:
            self.display.update(self.task, note=text)

    def beside(self) -> Progress:
        return Bar(self.display)


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """Show progress by a bar where standard error is a terminal and rich is there, elsewhere by lines of the log.

    Of several processes the main one alone shows it.
    """
    if processes.rank() > 0:
        yield Progress()
        return
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield LogLines()
        return
    bar = Bar()
    with bar.display:
        yield bar


def format_speed(speed: float | None) -> str:
    """Return steps a second in words, of slow steps the seconds that one takes.

    Examples:
        >>> format_speed(12.3), format_speed(0.25), format_speed(None)
        ('12 steps/s', '4.0 s/step', '- steps/s')
    """
    if not speed:
        return "- steps/s"
    return f"{speed:.0f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"


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
