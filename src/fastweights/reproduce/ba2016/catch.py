"""Catch, figure 6 of Ba et al. 2016: agents with IRNN, LSTM and fast weights remember where a ball was.

Section 4.4 of "Using fast weights to attend to the recent past".
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy
from torch import nn

from fastweights import processes
from fastweights.errors import RunError
from fastweights.nn import IRNN, FastWeightsRNN
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Curve, Member, Progress, Record, RunFolder, Score, read_members
from fastweights.tasks import catch
from fastweights.training import ActorCritic, ActorCriticSchedule, train_actor_critic

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

EXPERIMENT = "ba2016/catch"
QUICK_MINUTES = 4  # 157 s of a processor for three agents at 1.9 million frames, and the scores
DATA = None
METRICS = ("validation_loss",)  # the mean return, negated

ModelName = Literal["irnn", "lstm", "fast-weights"]
TITLES: dict[ModelName, str] = {"irnn": "IRNN", "lstm": "LSTM", "fast-weights": "Fast weights"}

TOP = 5  # best drawn settings; the paper's curves are the mean of that many
# Where settings are drawn, each evenly over its logarithm; those of one model concern it alone.
RANGES = {
    "learning_rate": (3e-4, 5e-3),
    "entropy": (3e-3, 3e-2),
    "forgotten": (0.03, 0.3),  # the fraction that the fast matrix loses in a step: 1 - decay
    "rate": (0.1, 1.0),
    "irnn_identity_scale": (0.25, 1.0),
}


@dataclass(frozen=True)
class Settings:
    """Catch of Ba et al. 2016: catch a ball that was shown for a few frames only."""

    models: tuple[ModelName, ...] = ("irnn", "lstm", "fast-weights")
    """Models to train and test, each a row of the table."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights, the balls and the actions: one training run for each."""
    draw_settings: bool = False
    """Draw the learning rate, entropy, decay, rate and scale of IRNN for each seed, in place of the values given here:
    the paper's curves are over settings."""

    size: int = 16
    """Pixels along each side of the screen, and frames of an episode: N in the paper."""
    visible: int = 3
    """Frames shown before the screen goes blank: M in the paper."""
    frames: int = 2_000_000
    """Actions in training, in all games together."""
    episodes: int = 1000
    """Games played for each point of the curves, and for the test."""
    scores: int = 20
    """Number of points of each curve: scores taken during training, evenly over the frames."""

    games: int = 64
    """Games played at once."""
    steps: int = 15
    """Actions in each game between two updates: the n of n-step returns."""
    learning_rate: float = 3e-3
    """Learning rate of Adam."""
    annealing: Literal["none", "cosine"] = "none"
    """Schedule of the learning rate: none (constant), or a cosine that falls to zero at the last frame."""
    clip_norm: float = 0.5
    """Largest norm of the gradient: a larger one is scaled down to it."""
    discount: float = 0.99
    """Discount of a reward for each action that it lies ahead."""
    entropy: float = 0.01
    """Weight of the policy's entropy in the loss."""
    value: float = 0.5
    """Weight of the squared error of the values in the loss."""

    hidden_size: int = 128
    """Recurrent units, and ReLU units in front of them."""
    decay: float = only("fast-weights", 0.9, "Fraction of the fast matrix kept after each step.")
    rate: float = only("fast-weights", 0.5, "Strength of each write of a hidden state.")
    inner_steps: int = only("fast-weights", 1, "Reads of the fast matrix in each step (S in the paper).")
    identity_scale: float = only("fast-weights", 0.05, "Multiple of the identity at which the recurrent weights start.")
    irnn_identity_scale: float = only("irnn", 0.5, "Multiple of the identity at which the recurrent weights start.")

    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 10.0
    """Seconds between checkpoints."""


PRESETS = {
    "quick": Settings(),
    "paper": Settings(seeds=tuple(range(1, 21)), draw_settings=True, frames=10_000_000, scores=50),
    "paper-24": Settings(
        seeds=tuple(range(1, 21)), draw_settings=True, size=24, visible=5, steps=23, frames=20_000_000, scores=50
    ),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model and seed of the settings."""
    members = {
        (model, seed): RunFolder(
            Path(folder, f"{model}-seed{seed}"),
            {"model": TITLES[model], "hidden_size": settings.hidden_size, "seed": seed}
            | settings_of(draw(settings, seed), model, without=("draw_settings",)),
        )
        for model in settings.models
        for seed in settings.seeds
    }

    def train_member(model: ModelName, seed: int, member: RunFolder, progress: Progress) -> None:
        own, games = draw(settings, seed), make_games(settings)
        policy = ActorCritic(games, make_layer(model, own)).to(settings.device)
        title = f"{TITLES[model]}, N={settings.size}, M={settings.visible}, seed {seed}"
        train_actor_critic(policy, games, schedule(own), member, seed=seed, title=title, progress=progress)

    return Members(members, train_member, lambda: table(settings, read_members(folder)))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=("size", "visible", "frames", "episodes", "scores", "games", "steps", "hidden_size"))
    schedule(settings)
    processes.check_divisible(games=settings.games)
    games = make_games(settings)
    for model in settings.models:
        ActorCritic(games, make_layer(model, settings))


def draw(settings: Settings, seed: int) -> Settings:
    """Return the settings of a seed: with `draw_settings` what it draws from `RANGES`, the same for all models."""
    if not settings.draw_settings:
        return settings
    generator = numpy.random.default_rng([seed, 6])  # a generator of its own, so that figure 6 depends on nothing else
    drawn: dict[str, Any] = {
        name: float(f"{numpy.exp(generator.uniform(*numpy.log(ends))):.3g}") for name, ends in RANGES.items()
    }
    decay = 1 - drawn.pop("forgotten")
    return dataclasses.replace(settings, decay=decay, **drawn)


def make_games(settings: Settings, render_mode: str | None = None) -> "VectorEnv[Any, Any, Any]":
    """Return as many games of Catch as are played at once, of several processes this one's part.

    Raises:
        RunError: gymnasium is not installed.
        ValueError: the screen has no such size.
    """
    try:
        from fastweights.tasks.catch_environments import CatchVectorEnv
    except ImportError as error:
        raise RunError(f"Catch needs gymnasium ({error}): `pip install '.[rl]'` in the checkout") from None
    return CatchVectorEnv(settings.games // processes.count(), settings.size, settings.visible, render_mode)


def make_layer(model: ModelName, settings: Settings) -> nn.Module:
    """Return the recurrent layer of a model."""
    size = settings.hidden_size
    if model == "irnn":
        return IRNN(size, size, identity_scale=settings.irnn_identity_scale)
    if model == "lstm":
        return nn.LSTM(size, size)
    return FastWeightsRNN(
        size,
        size,
        decay=settings.decay,
        rate=settings.rate,
        inner_steps=settings.inner_steps,
        identity_scale=settings.identity_scale,
    )


def schedule(settings: Settings) -> ActorCriticSchedule:
    """Return how long and how fast a model is trained.

    Raises:
        ValueError: a number out of range.
    """
    updates = max(1, round(settings.frames / (settings.scores * settings.games * settings.steps)))
    return ActorCriticSchedule(
        epochs=settings.scores,
        batch_size=settings.games,
        learning_rate=settings.learning_rate,
        annealing=settings.annealing,
        clip_norm=settings.clip_norm,
        checkpoint_seconds=settings.checkpoint_seconds,
        updates=updates,
        steps=settings.steps,
        discount=settings.discount,
        entropy=settings.entropy,
        value=settings.value,
        episodes=settings.episodes,
    )


def table(settings: Settings, members: list[Member]) -> dict[str, Any]:
    """Return the table's rows, and the curves of figure 6: of all seeds, and of the best five where there are more."""
    floor = catch.floor(settings.size)
    curves = [Curve("validation_return", "mean return", floor, "frames", spread=settings.draw_settings)]
    if len(settings.seeds) > TOP:
        curves.append(dataclasses.replace(curves[0], label=f"mean return, best {TOP}", best=TOP))
    return {
        "requested": [(TITLES[model], settings.hidden_size) for model in settings.models],
        "scores": [Score("test return", {}, floor)],
        "rows": best_rows(members, floor) if len(settings.seeds) > TOP else [],
        "curves": curves,
    }


def best_rows(members: list[Member], floor: float) -> list[Record]:
    """Return a row for each model with the test returns of its best five seeds, chosen by validation."""
    rows = []
    for model in TITLES.values():
        results = [member.result for member in members if member.model == model and member.result]
        best = sorted(results, key=lambda result: float(result["validation_loss"]))[:TOP]
        if best:
            ours = [result["test_return"] for result in best]
            row = {"model": model, "hidden_size": members[0].hidden_size, "metric": f"test return, best {TOP}"}
            rows.append(row | {"ours": ours, "paper": None, "floor": floor})
    return rows
