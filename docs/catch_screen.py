"""Draw screens of the game Catch, after figure 6 a of Ba et al. 2016: docs/figures/catch_screen.svg.

python docs/catch_screen.py
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from fastweights.report.figures import COLOURS, INK, svg
from fastweights.tasks.catch import CatchGames

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATH = Path(__file__).parent / "figures" / "catch_screen.svg"
SIZE, VISIBLE, BALL = 16, 3, 11
SHOWN = (1, 2, 3, 4, 10, 16)  # frames, from 1


def play() -> list[tuple[NDArray[numpy.uint8], NDArray[numpy.uint8]]]:
    """Return what the agent sees in each frame of an episode that it wins, and what it does not see."""
    games = CatchGames(1, size=SIZE, visible=VISIBLE)
    games.start(numpy.array([BALL]))
    frames = [(games.observe()[0], games.screens()[0])]
    while not games.ended:
        games.move(numpy.array([2 if games.paddles[0] < BALL else 1]))
        frames.append((games.observe()[0], games.screens()[0]))
    return [(seen, whole - seen) for seen, whole in frames]


def figure(frames: list[tuple[NDArray[numpy.uint8], NDArray[numpy.uint8]]]) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    picture = Figure(figsize=(9, 1.9), layout="constrained", facecolor="white")
    for axes, number in zip(picture.subplots(1, len(SHOWN)), SHOWN, strict=True):
        seen, unseen = frames[number - 1]
        axes.set(xlim=(0, SIZE), ylim=(SIZE, 0), xticks=[], yticks=[], aspect="equal", title=f"frame {number}")
        for pixels, look in ((seen, {"color": INK}), (unseen, {"edgecolor": COLOURS[0], "facecolor": "none"})):
            for row, column in numpy.argwhere(pixels):
                axes.add_patch(Rectangle((column, row), 1, 1, **look))
    return picture


if __name__ == "__main__":
    PATH.write_text(svg(figure(play())))
