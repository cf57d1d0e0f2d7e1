"""Catch, the partially observable game of Ba et al. 2016, section 4.4: remember where the ball was, and be there.

On a screen of N x N binary pixels a ball falls from a random column of the first row, a row a frame. A paddle of two
pixels in the last row stays or moves left or right by a pixel. The screen is blank after the first M frames. When the
ball is in the last row the episode ends, with a reward of +1 if the paddle touches it and of -1 if not.

`fastweights.tasks.catch_environments` has it as environments of gymnasium.
"""

import textwrap

import numpy
from numpy.typing import NDArray

from fastweights.checks import check_integers, check_sizes, is_integer

ACTIONS = ("left", "stay", "right")
PADDLE = 2  # pixels


class CatchGames:
    """Games of Catch side by side, all in the same frame, as NumPy arrays: the rules, without any interface.

    Args:
        count: B, the number of games.
        size: N, the pixels of a side; an episode has N frames and N - 1 actions.
        visible: M, the frames that are shown; later ones are blank.

    Attributes:
        balls: [B] int64, the column of each ball.
        paddles: [B] int64, the left column of each paddle.
        row: the row of all balls, 0 to N - 1.

    Raises:
        ValueError: `count` is below 1, `size` below 2, or `visible` is not between 1 and `size`; an action is none of
            the three, or the games have ended.

    Examples:
        >>> import numpy
        >>> from fastweights.tasks.catch import CatchGames
        >>> games = CatchGames(2, size=3, visible=1)
        >>> games.start(numpy.array([0, 2]))
        >>> print(games.observe()[0])  # the ball at the top left, the paddle at the bottom
        [[1 0 0]
         [0 0 0]
         [1 1 0]]
        >>> games.move(numpy.array([1, 1])), games.move(numpy.array([1, 2]))  # stay; stay and right
        (array([0., 0.], dtype=float32), array([1., 1.], dtype=float32))
        >>> games.ended, int(games.observe().sum())
        (True, 0)
    """

    def __init__(self, count: int, *, size: int = 16, visible: int = 3) -> None:
        check_sizes(count=count)
        check_integers(PADDLE, size=size)
        if not is_integer(visible) or not 1 <= visible <= size:
            raise ValueError(f"visible must be a number of frames from 1 to {size} (size), got {visible!r}")
        self.count, self.size, self.visible = count, size, visible
        self._games = numpy.arange(count)
        self.start(numpy.zeros(count, dtype=numpy.int64))

    def draw(self, generator: numpy.random.Generator) -> None:
        """Begin new episodes, each ball in a column drawn uniformly."""
        self.start(generator.integers(self.size, size=self.count))

    def start(self, balls: NDArray[numpy.int64]) -> None:
        """Begin new episodes with the balls in these columns [B], the paddles in the middle."""
        self.balls = balls
        self.paddles = numpy.full(self.count, (self.size - PADDLE) // 2)
        self.row = 0

    def move(self, actions: NDArray[numpy.integer]) -> NDArray[numpy.float32]:
        """Move the paddles, 0 left, 1 stay, 2 right [B], and let the balls fall by a row; return the rewards [B].

        A paddle at the edge stays there.
        """
        if self.ended:
            raise ValueError(f"the games have ended after {self.size} frames (size): begin new ones")
        actions = numpy.asarray(actions)
        fit = actions.shape == (self.count,) and actions.dtype.kind in "iu"
        if not fit or actions.max() > 2 or actions.min() < 0:
            got = textwrap.shorten(str(actions.tolist()), 100)
            raise ValueError(f"actions must be {self.count} integers, 0 left, 1 stay or 2 right, got {got}")
        self.paddles = (self.paddles + actions - 1).clip(0, self.size - PADDLE)
        self.row += 1
        if not self.ended:
            return numpy.zeros(self.count, dtype=numpy.float32)
        distance = self.balls - self.paddles
        return numpy.where((distance >= 0) & (distance < PADDLE), numpy.float32(1), numpy.float32(-1))

    @property
    def ended(self) -> bool:
        """True when the balls are in the last row."""
        return self.row == self.size - 1

    def observe(self) -> NDArray[numpy.uint8]:
        """Return what the players see, [B,N,N] of 0 and 1: nothing after the first M frames."""
        return self.screens() if self.row < self.visible else self._blank()

    def screens(self) -> NDArray[numpy.uint8]:
        """Return the whole screens, [B,N,N] of 0 and 1, seen or not."""
        screens = self._blank()
        screens[self._games, self.row, self.balls] = 1
        for pixel in range(PADDLE):
            screens[self._games, self.size - 1, self.paddles + pixel] = 1
        return screens

    def _blank(self) -> NDArray[numpy.uint8]:
        return numpy.zeros((self.count, self.size, self.size), dtype=numpy.uint8)


def floor(size: int = 16) -> float:
    """Return the mean return of the best player that never sees the ball: its paddle covers two columns of N.

    Examples:
        >>> from fastweights.tasks import catch
        >>> catch.floor(16)
        -0.75
    """
    return 2 * PADDLE / size - 1
