"""Catch as environments of gymnasium, one game and many side by side (`pip install '.[rl]'` in the checkout).

Where this module is imported, `gymnasium.make("fastweights/Catch-v0", size=16, visible=3)` makes one and
`gymnasium.make_vec` many at once; `"fastweights.tasks.catch_environments:fastweights/Catch-v0"` imports it.
"""

from typing import Any

import gymnasium
import numpy
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from fastweights.tasks.catch import ACTIONS, CatchGames

ENVIRONMENT = "fastweights/Catch-v0"

Screen = NDArray[numpy.uint8]
_FRAMES_PER_SECOND = 8
_PIXELS = 256  # about the side of a rendered screen


class CatchEnv(gymnasium.Env[Screen, numpy.int64]):
    """One game of Catch (Ba et al. 2016, section 4.4), an environment of gymnasium.

    Observations are [N,N] uint8 of 0 and 1, actions 0 left, 1 stay, 2 right. `render()` gives an image
    [pixels,pixels,3] uint8 of the whole screen, darker while the player sees none of it.

    Args:
        size: N, the pixels of a side.
        visible: M, the frames that are shown before the screen is blank.
        render_mode: "rgb_array", or None.

    Raises:
        ValueError: `size` is below 2, `visible` is not between 1 and `size`, or there is no such `render_mode`.

    Examples:
        >>> import gymnasium
        >>> from fastweights.tasks import catch_environments
        >>> environment = gymnasium.make("fastweights/Catch-v0", size=16, visible=3, render_mode="rgb_array")
        >>> observation, _ = environment.reset(seed=1)
        >>> observation.shape, int(observation.sum()), environment.render().shape
        ((16, 16), 3, (256, 256, 3))
        >>> for _ in range(15):
        ...     observation, reward, terminated, truncated, _ = environment.step(1)
        >>> reward, terminated, truncated
        (1.0, True, False)
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": _FRAMES_PER_SECOND}  # noqa: RUF012

    def __init__(self, size: int = 16, visible: int = 3, render_mode: str | None = None) -> None:
        self.games = CatchGames(1, size=size, visible=visible)
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode must be rgb_array or None, got {render_mode!r}")
        self.render_mode = render_mode
        self.observation_space = _observations(size)
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Screen, dict[str, Any]]:
        super().reset(seed=seed)
        self.games.draw(self.np_random)
        return self.games.observe()[0], {}

    def step(self, action: numpy.int64) -> tuple[Screen, float, bool, bool, dict[str, Any]]:
        reward = self.games.move(numpy.array([action]))
        return self.games.observe()[0], float(reward[0]), self.games.ended, False, {}

    def render(self) -> NDArray[numpy.uint8] | None:
        return None if self.render_mode is None else _draw(self.games)[0]


class CatchVectorEnv(VectorEnv[Screen, NDArray[numpy.int64], Any]):
    """Games of Catch side by side, a vector environment of gymnasium: millions of steps a second.

    All games begin and end together, and restart within the step that ends them (`AutoresetMode.SAME_STEP`): the
    observations are then the next games' first, and `info["final_obs"]` has the last of those that ended. `render()`
    gives a tuple of images.

    Shapes: observations [B,N,N] uint8 of 0 and 1, actions [B] int64, rewards [B] float32.

    Args:
        num_envs: B, the number of games.
        size: N, the pixels of a side.
        visible: M, the frames that are shown before the screen is blank.
        render_mode: "rgb_array", or None.

    Raises:
        ValueError: as `CatchEnv`, or `num_envs` is below 1.

    Examples:
        >>> import gymnasium
        >>> from fastweights.tasks import catch_environments
        >>> environments = gymnasium.make_vec("fastweights/Catch-v0", num_envs=1000, size=24, visible=5)
        >>> observations, _ = environments.reset(seed=1)
        >>> observations, rewards, *_ = environments.step(environments.action_space.sample())
        >>> observations.shape, rewards.shape
        ((1000, 24, 24), (1000,))
    """

    metadata: dict[str, Any] = CatchEnv.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1, size: int = 16, visible: int = 3, render_mode: str | None = None) -> None:
        single = CatchEnv(size, visible, render_mode)
        self.games = CatchGames(num_envs, size=size, visible=visible)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space = single.observation_space
        self.single_action_space = single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Screen, dict[str, Any]]:
        if seed is not None and not isinstance(seed, int | numpy.integer):
            raise TypeError(f"seed must be one integer, which draws all games, or None, got {seed!r}")
        super().reset(seed=None if seed is None else int(seed))
        self.games.draw(self.np_random)
        return self.games.observe(), {}

    def step(
        self, actions: NDArray[numpy.int64]
    ) -> tuple[Screen, NDArray[numpy.float32], NDArray[numpy.bool_], NDArray[numpy.bool_], dict[str, Any]]:
        rewards = self.games.move(actions)
        ended = numpy.full(self.num_envs, self.games.ended)
        info: dict[str, Any] = {}
        if self.games.ended:
            info = {"final_obs": self.games.observe(), "_final_obs": ended}
            self.games.draw(self.np_random)
        return self.games.observe(), rewards, ended, numpy.zeros_like(ended), info

    def render(self) -> tuple[NDArray[numpy.uint8], ...] | None:
        return None if self.render_mode is None else tuple(_draw(self.games))


def _observations(size: int) -> Any:
    return gymnasium.spaces.Box(0, 1, (size, size), numpy.uint8)


def _draw(games: CatchGames) -> NDArray[numpy.uint8]:
    """Return the screens as images [B,pixels,pixels,3]: white on black, and on grey while the players see nothing."""
    scale = max(1, _PIXELS // games.size)
    screens = games.screens().repeat(scale, 1).repeat(scale, 2)
    ink, ground = (255, 0) if games.row < games.visible else (160, 64)
    image = numpy.where(screens > 0, numpy.uint8(ink), numpy.uint8(ground))
    return numpy.repeat(image[..., None], 3, axis=3)


gymnasium.register(ENVIRONMENT, entry_point=f"{__name__}:CatchEnv", vector_entry_point=f"{__name__}:CatchVectorEnv")
