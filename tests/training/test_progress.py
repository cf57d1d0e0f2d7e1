import io
import logging

import pytest

from fastweights.training import progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_lines_tell_loss_speed_and_time_left(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr("fastweights.training.progress.time.monotonic", clock)
    with caplog.at_level(logging.INFO):
        lines = progress.Lines()
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


def test_the_bar_shows_loss_speed_and_note():
    from rich.console import Console

    bar = progress.Bar()
    bar.display.live.console = console = Console(file=io.StringIO(), width=160)
    bar.start("LSTM, R=50", total=10, done=0)
    for step in range(1, 6):
        bar.update(step, 0.5)
    bar.note("epoch 1: validation error 3.00 %")
    console.print(bar.display.get_renderable())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("LSTM, R=50", "5/10", "loss 0.5000", "steps/s", "left", "epoch 1: validation error 3.00 %"):
        assert part in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    with progress.show_progress() as shown:
        assert isinstance(shown, progress.Bar if terminal else progress.Lines)
