"""Tasks of POPGym (Morad et al. 2023): agents with GRU, LSTM and three memories, all of equally many weights.

"POPGym: benchmarking partially observable reinforcement learning".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fastweights import processes
from fastweights.checks import check_integers
from fastweights.errors import RunError
from fastweights.nn import DeltaFastWeightsRNN, FastWeightsRNN, GatedFastWeightsRNN
from fastweights.reproduce._experiment import check_settings, find_size, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Lines, Member, Progress, Record, RunFolder, read_members
from fastweights.training import ActorCritic, ActorCriticSchedule, train_actor_critic

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

EXPERIMENT = "popgym/memory-tasks"
QUICK_MINUTES = 9  # docs/results/popgym-memory-tasks: 26 minutes of three seeds, beside another training
DATA = None
METRICS = ("validation_loss",)  # the mean return, negated

ModelName = Literal["gru", "lstm", "fast-weights", "gated-fast-weights", "hidden-delta"]
TITLES: dict[ModelName, str] = {
    "gru": "GRU",
    "lstm": "LSTM",
    "fast-weights": "Fast weights",
    "gated-fast-weights": "Gated fast weights",
    "hidden-delta": "Delta rule of the hidden state",
}

EnvironmentName = Literal[
    "RepeatFirstEasy",
    "RepeatPreviousEasy",
    "CountRecallEasy",
    "HigherLowerEasy",
    "AutoencodeEasy",
    "ConcentrationEasy",
]
# The mean return of actions that are drawn evenly: one suit of four is right; of counts one of 27, and of higher and
# lower one of two, where a card like the last is neither; of pairs of cards the mean of episodes that were played so.
FLOOR: dict[EnvironmentName, float] = {
    "RepeatFirstEasy": -0.5,
    "RepeatPreviousEasy": -0.5,
    "CountRecallEasy": 2 / 27 - 1,
    "HigherLowerEasy": 0.0,
    "AutoencodeEasy": -0.5,
    "ConcentrationEasy": -0.19,
}


@dataclass(frozen=True)
class Settings:
    """POPGym of Morad et al. 2023: act on what was seen some steps ago."""

    models: tuple[ModelName, ...] = tuple(TITLES)
    """Models to train and test, each a row of the table in each environment."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights, the episodes and the actions: one training run for each."""
    environments: tuple[EnvironmentName, ...] = tuple(FLOOR)
    """Names of the POPGym environments to train in."""

    frames: int = 100_000
    """Actions in training, in all episodes together, in each environment."""
    episodes: int = 48
    """Episodes played for each point of the curves, and for the test."""
    scores: int = 10
    """Number of points of each curve: scores taken during training, evenly over the frames."""

    parallel: int = 16
    """Episodes played at once."""
    steps: int = 16
    """Actions in each episode between two updates: the n of n-step returns."""
    clip_norm: float = 0.5
    """Largest norm of the gradient: a larger one is scaled down to it."""
    discount: float = 0.5
    """Discount of a reward for each action that it lies ahead."""
    value: float = 0.5
    """Weight of the squared error of the values in the loss."""

    # Each model's own, the best of four pairs on RepeatPreviousEasy (docs/popgym.md).
    gru_learning_rate: float = only("gru", 3e-3, "Learning rate of Adam.", recorded_as="learning_rate")
    lstm_learning_rate: float = only("lstm", 3e-3, "Learning rate of Adam.", recorded_as="learning_rate")
    fast_weights_learning_rate: float = only(
        "fast-weights", 3e-3, "Learning rate of Adam.", recorded_as="learning_rate"
    )
    gated_fast_weights_learning_rate: float = only(
        "gated-fast-weights", 3e-3, "Learning rate of Adam.", recorded_as="learning_rate"
    )
    hidden_delta_learning_rate: float = only(
        "hidden-delta", 1e-2, "Learning rate of Adam.", recorded_as="learning_rate"
    )
    gru_entropy: float = only("gru", 1e-2, "Weight of the policy's entropy.", recorded_as="entropy")
    lstm_entropy: float = only("lstm", 1e-2, "Weight of the policy's entropy.", recorded_as="entropy")
    fast_weights_entropy: float = only("fast-weights", 1e-3, "Weight of the policy's entropy.", recorded_as="entropy")
    gated_fast_weights_entropy: float = only(
        "gated-fast-weights", 1e-2, "Weight of the policy's entropy.", recorded_as="entropy"
    )
    hidden_delta_entropy: float = only("hidden-delta", 1e-3, "Weight of the policy's entropy.", recorded_as="entropy")

    parameters: int = 20_000
    """Number of weights of each agent, which sets its hidden size: models are compared at equal numbers."""
    encoder_size: int = 32
    """ReLU units in front of the recurrent layer."""
    decay: float = only("fast-weights", 0.95, "Fraction of the fast matrix kept after each step.")
    rate: float | None = only("fast-weights", None, "Strength of each write of a hidden state; None: it is learnt.")
    identity_scale: float | None = only(
        "fast-weights", None, "Multiple of the identity at which the recurrent weights start; None: by the hidden size."
    )
    inner_steps: int = only("fast-weights", 1, "Reads of the fast matrix in each step (S in the paper).")
    slow_inner_size: int = only("gated-fast-weights", 32, "Units between the slow network's two layers.")
    delta_heads: int = only("hidden-delta", 1, "Heads, each with a memory of its own.")
    convolution: int = only("hidden-delta", 4, "Width, in steps, of the short convolutions; 0 leaves them out.")

    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 10.0
    """Seconds between checkpoints."""


PRESETS = {
    "quick": Settings(),
    # Morad et al.'s frames and discount.
    "paper": Settings(seeds=(1, 2, 3), frames=15_000_000, scores=50, discount=0.99),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model and seed of the settings in each environment."""
    sizes = {
        (model, name): find_hidden_size(model, settings, *count_spaces(make_environments(name, settings)))
        for name in settings.environments
        for model in settings.models
    }
    members = {
        (model, name, seed): RunFolder(
            Path(folder, f"{name}-{model}-seed{seed}"),
            {"model": TITLES[model], "hidden_size": sizes[model, name], "seed": seed, "environment": name}
            | settings_of(settings, model, without=("environments",)),
        )
        for seed in settings.seeds  # outermost: the table is whole after the first
        for name in settings.environments
        for model in settings.models
    }

    def train_member(model: ModelName, name: EnvironmentName, seed: int, member: RunFolder, progress: Progress) -> None:
        environments = make_environments(name, settings)
        policy = ActorCritic(environments, make_layer(model, sizes[model, name], settings)).to(settings.device)
        title = f"{TITLES[model]}, {name}, seed {seed}"
        train_actor_critic(
            policy, environments, schedule(model, settings), member, seed=seed, title=title, progress=progress
        )

    return Members(members, train_member, lambda: table(read_members(folder)))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    sizes = ("frames", "episodes", "scores", "parallel", "steps", "parameters", "encoder_size", "slow_inner_size")
    check_settings(settings, sizes=(*sizes, "delta_heads"), lists=("models", "seeds", "environments"))
    check_integers(0, convolution=settings.convolution)
    processes.check_divisible(parallel=settings.parallel)
    for model in settings.models:
        schedule(model, settings)
    for name in settings.environments:
        environments = make_environments(name, settings)
        for model in settings.models:
            size = find_hidden_size(model, settings, *count_spaces(environments))
            ActorCritic(environments, make_layer(model, size, settings))


def make_environments(name: EnvironmentName, settings: Settings) -> "VectorEnv[Any, Any, Any]":
    """Return as many environments of POPGym as are played at once, of several processes this one's part.

    As in POPGym's own baselines an agent sees its last action too, and whether an episode has just begun; all of it is
    one-hot.

    Raises:
        RunError: popgym or gymnasium is not installed.
    """
    try:
        import popgym.envs
        from gymnasium.vector import AutoresetMode, SyncVectorEnv
        from popgym.wrappers import Antialias, Flatten, PreviousAction
    except ImportError as error:
        raise RunError(f"POPGym's tasks need popgym ({error}): `pip install '.[rl]'` in the checkout") from None

    def make() -> Any:
        return Flatten(Antialias(PreviousAction(getattr(popgym.envs, name)())))

    return SyncVectorEnv([make] * (settings.parallel // processes.count()), autoreset_mode=AutoresetMode.SAME_STEP)


def count_spaces(environments: "VectorEnv[Any, Any, Any]") -> tuple[int, int]:
    """Return how many numbers an observation has, and how many actions there are."""
    observations, actions = environments.single_observation_space, environments.single_action_space
    return observations.shape[0], int(actions.n)  # type: ignore[index,attr-defined]


def make_layer(model: ModelName, hidden_size: int, settings: Settings) -> nn.Module:
    """Return the recurrent layer of a model."""
    size = settings.encoder_size
    if model == "gru":
        return nn.GRU(size, hidden_size)
    if model == "lstm":
        return nn.LSTM(size, hidden_size)
    if model == "fast-weights":
        return FastWeightsRNN(
            size,
            hidden_size,
            decay=settings.decay,
            rate=settings.rate,
            inner_steps=settings.inner_steps,
            identity_scale=settings.identity_scale,
        )
    if model == "hidden-delta":
        return DeltaFastWeightsRNN(size, hidden_size, settings.delta_heads, convolution=settings.convolution)
    return GatedFastWeightsRNN(size, hidden_size, slow_inner_size=settings.slow_inner_size)


def find_hidden_size(model: ModelName, settings: Settings, observations: int, actions: int) -> int:
    """Return the hidden size with which an agent comes closest to `settings.parameters` weights.

    Args:
        model: of the recurrent layer.
        settings: with the number of weights, and the sizes that are given.
        observations: numbers of an observation.
        actions: that there are.

    Examples:
        >>> [find_hidden_size(model, Settings(), observations=10, actions=4) for model in TITLES]
        [65, 55, 122, 49, 53]
    """

    def count(hidden_size: int) -> int:
        return count_parameters(model, hidden_size, settings, observations, actions)

    return find_size(count, settings.parameters)


def count_parameters(model: ModelName, hidden_size: int, settings: Settings, observations: int, actions: int) -> int:
    """Return how many weights an agent has: the encoder's, the recurrent layer's, those of policy and value."""
    with torch.device("meta"):  # shapes alone
        layer = make_layer(model, hidden_size, settings)
    recurrent = sum(parameter.numel() for parameter in layer.parameters())
    return (observations + 1) * settings.encoder_size + recurrent + (hidden_size + 1) * (actions + 1)


def schedule(model: ModelName, settings: Settings) -> ActorCriticSchedule:
    """Return how long and how fast a model is trained.

    Raises:
        ValueError: a number out of range.
    """
    own = settings_of(settings, model)
    updates = max(1, round(settings.frames / (settings.scores * settings.parallel * settings.steps)))
    return ActorCriticSchedule(
        epochs=settings.scores,
        batch_size=settings.parallel,
        learning_rate=own["learning_rate"],
        clip_norm=settings.clip_norm,
        checkpoint_seconds=settings.checkpoint_seconds,
        updates=updates,
        steps=settings.steps,
        discount=settings.discount,
        entropy=own["entropy"],
        value=settings.value,
        episodes=settings.episodes,
    )


def table(members: Sequence[Member]) -> dict[str, Any]:
    """Return the table's rows, two for each environment and model, and the curves of each environment.

    The first is POPGym's own score, the highest mean return of the episodes between two scores in training (MMER); the
    second the test of the weights that were best on validation.
    """
    rows: list[Record] = []
    curves = []
    for name, floor in FLOOR.items():
        groups = {
            title: [each for each in members if (each.model, each.settings["environment"]) == (title, name)]
            for title in TITLES.values()
        }
        for metric, score in (("highest training return", _highest_return), ("test return", _test_return)):
            for title, group in groups.items():
                if ours := [value for member in group if (value := score(member)) is not None]:
                    about = {"model": title, "hidden_size": group[0].hidden_size, "metric": f"{metric}, {name}"}
                    rows.append(
                        about | {"ours": ours, "paper": None, "floor": floor, "settings": {"environment": name}}
                    )
        series = {title: _mean_curve(group) for title, group in groups.items()}
        if any(series.values()):
            curves.append(Lines(name, "mean return", "frames", {k: v for k, v in series.items() if v}, floor=floor))
    return {"requested": [], "rows": rows, "lines": curves}


def _highest_return(member: Member) -> float | None:
    returns = [record["train_return"] for record in member.epochs if "train_return" in record]
    return max(returns) if member.result and returns else None


def _test_return(member: Member) -> float | None:
    return member.result["test_return"] if member.result else None


def _mean_curve(members: Sequence[Member]) -> list[tuple[float, float]]:
    """Return the mean return on validation of the seeds that have finished, after so many frames."""
    finished = [member.epochs for member in members if member.result]
    return [
        (records[0]["frames"], fmean(record["validation_return"] for record in records))
        for records in zip(*finished, strict=False)
    ]
