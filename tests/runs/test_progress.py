import io
import logging

import pytest

from fastweights.runs import progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_lines_tell_loss_speed_and_time_left(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr("fastweights.runs.progress.time.monotonic", clock)
    with caplog.at_level(logging.INFO):
        lines = progress.LogLines()
        lines.start("LSTM", total=1000, done=200)
        clock.now += 1
        lines.update(210, 2.0)  # too soon for a line
        clock.now += 19
        lines.update(400, 1.2345)
        lines.note("epoch 1: validation error 3.00 %")
    assert caplog.messages == [
        "LSTM: resumes at step 200 of 1000",
        "LSTM: step 400 of 1000, loss 1.2345, 10 steps/s, 1 min 00 s left",
        "LSTM: epoch 1: validation error 3.00 %",
    ]


PARTS = ["epoch 1: validation error 3.00 %", "loss 0.5000", "10 steps/s", "500/1000 in 50 s"]


@pytest.mark.parametrize(
    ("width", "title", "shown"),
    [
        (160, "LSTM, R=50", PARTS),
        (80, "LSTM, R=50", PARTS[:2]),
        (80, "Memories at random, 1,000 a task, seed 1", ["loss 0.5000"]),
        (60, "LSTM, R=50", ["loss 0.5000", "10 steps/s"]),
        (60, "Memories at random, 1,000 a task, seed 1", []),
        (40, "Memories at random, 1,000 a task, seed 1", []),
    ],
)
def test_the_bar_never_cuts_the_share_and_the_time_left(monkeypatch, width, title, shown):
    monkeypatch.setenv("COLUMNS", str(width))
    clock = Clock()
    bar = progress.Bar()
    bar.display.get_time = clock
    bar.start(title, total=1000, done=0)
    for step in range(10, 510, 10):
        clock.now += 1
        bar.update(step, 0.5)
    bar.note(PARTS[0])
    with bar.display.console.capture() as capture:
        bar.display.console.print(bar.display.get_renderable())
    (line,) = capture.get().splitlines()
    assert len(line) <= width
    if width > 40:
        assert line.startswith(title)
    _, _, rest = line.partition(" 50 % ")
    time_left, _, details = rest.partition(" left")
    assert time_left == "0:00:50"
    assert details.strip() == ", ".join(shown)


def test_runs_side_by_side_are_told_apart(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr("fastweights.runs.progress.time.monotonic", clock)
    with caplog.at_level(logging.INFO):
        first = progress.LogLines()
        second = first.beside()
        first.start("LSTM", total=1000, done=0)
        second.start("IRNN", total=100, done=50)
        clock.now += 20
        first.update(400, 1.0)
        second.update(60, 2.0)
    assert caplog.messages[2:] == [
        "LSTM: step 400 of 1000, loss 1.0000, 20 steps/s, 30 s left",
        "IRNN: step 60 of 100, loss 2.0000, 2.0 s/step, 1 min 20 s left",
    ]
    bar = progress.Bar()
    other = bar.beside()
    bar.start("LSTM", total=1000, done=0)
    other.start("IRNN", total=100, done=50)
    bar.update(400, 1.0)
    assert [(task.description, task.completed) for task in bar.display.tasks] == [("LSTM", 400), ("IRNN", 50)]


def test_a_line_may_come_before_anything_has_started(caplog):
    bar, lines = progress.Bar(), progress.LogLines()
    with bar.display.console.capture() as capture:
        bar.note("ptb: the beginning of validation [1]")
    assert capture.get().strip() == "ptb: the beginning of validation [1]"
    with caplog.at_level(logging.INFO):
        lines.note("ptb: the beginning of validation")
    assert caplog.messages == ["ptb: the beginning of validation"]


def test_passes_of_one_title_share_a_bar():
    bar = progress.Bar()
    for title in ("LSTM", "scoring", "scoring", "dynamic evaluation"):
        bar.start(title, total=10, done=0)
        bar.update(10, 0.5)
    assert [task.description for task in bar.display.tasks] == ["LSTM", "scoring", "dynamic evaluation"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    with progress.show_progress() as shown:
        assert isinstance(shown, progress.Bar if terminal else progress.LogLines)
