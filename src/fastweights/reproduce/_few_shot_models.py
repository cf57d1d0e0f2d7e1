"""The rivals of the few-shot tables of Munkhdalai & Trischler 2018, all on the same encoder."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.reproduce._few_shot import Data, Row, Split, Table, check_few_shot
from fastweights.reproduce._few_shot_settings import OF_EVERY_SCHEDULE, EpisodicSettings, shared_schedule
from fastweights.training import EpisodeSchedule

ModelName = Literal["hebbian", "gradient", "matching", "prototypical", "maml", "maml-first-order", "fine-tuning"]
TITLES: dict[ModelName, str] = {
    "hebbian": "Fast weights, Hebbian",
    "gradient": "Fast weights, gradient",
    "matching": "Matching Networks",
    "prototypical": "Prototypical Networks",
    "maml": "MAML",
    "maml-first-order": "MAML, first order",
    "fine-tuning": "Fine-tuning",
}
OF_ONE_NUMBER = ("maml", "maml-first-order")  # of classes: a column of their softmax layer learns what it starts as
_COMPARE = ("matching", "prototypical", "fine-tuning")  # have no hidden layer
_OF_MAML = {"maml_tasks", "maml_tasks_per_step", "maml_validate_every", "maml_steps", "maml_rate"}
_OF_SHARING = {"tasks", "tasks_per_step", "validate_every", "pool"}


@dataclass(frozen=True)
class RivalSettings(EpisodicSettings):
    """What a table of rivals can be asked for."""

    models: tuple[ModelName, ...] = ("hebbian", "gradient", "matching", "prototypical", "maml", "fine-tuning")
    """The rows of the table."""
    matching_scale: float = 10.0
    """Matching Networks: what the cosines are multiplied by in the softmax, 1 in their paper."""
    label_noise: float = 0.0
    """Hebbian: uniform noise of the labels either way, in training."""
    second_order: bool = False
    """Gradient: differentiate the error gradients too."""
    gradient_tasks_per_step: int = 16
    """Gradient: tasks in an update, in place of `tasks_per_step`, for as many updates: g is computed for each weight of
    each task, and for many of them that takes longer than the encoder."""
    maml_tasks: int = 16_000
    """MAML: to train on; it can share no example between tasks."""
    maml_tasks_per_step: int = 4
    """MAML: tasks in an update."""
    maml_validate_every: int = 800
    """MAML: tasks between two validations."""
    maml_steps: int = 1
    """MAML: gradient steps on a description."""
    maml_rate: float = 0.1
    """MAML: their learning rate."""


def check_rivals(table: Table, settings: Any, *, positive: tuple[str, ...] = ()) -> None:
    """Refuse settings that cannot run, before anything is trained or written; call it inside `refused`.

    Raises:
        ValueError: a setting is out of range.
    """
    check_few_shot(table, settings, positive=(*positive, *(_OF_MAML - {"maml_rate"}), "gradient_tasks_per_step"))
    if not 0 < settings.maml_rate < 100:
        raise ValueError(f"maml_rate must be more than 0 and less than 100, got {settings.maml_rate}")
    if not 0 < settings.matching_scale < 1000:
        raise ValueError(f"matching_scale must be more than 0 and less than 1000, got {settings.matching_scale}")
    check_label_noise(settings.label_noise)


def check_label_noise(noise: float) -> None:
    if not 0 <= noise < 100:
        raise ValueError(f"label_noise must be at least 0 and less than 100, got {noise}")


def network(row: Row, encoder: torch_nn.Module, settings: Any, data: dict[Split, Data]) -> torch_nn.Module:
    """The model of a row on an encoder; fine-tuning learns to tell the classes of the training data."""
    model, ways = row.model, row.ways
    features: Any = encoder.features
    if model in ("hebbian", "gradient"):
        head = few_shot.FastWeightsHead(
            features,
            ways,
            hidden_size=settings.hidden_size,
            rule="hebbian" if model == "hebbian" else "gradient",
            label_noise=settings.label_noise if model == "hebbian" else 0.0,
            second_order=settings.second_order and model == "gradient",
        )
        return few_shot.FewShotNetwork(encoder, head)
    if model == "matching":
        return few_shot.FewShotNetwork(encoder, few_shot.MatchingHead(ways, scale=settings.matching_scale))
    if model == "prototypical":
        return few_shot.FewShotNetwork(encoder, few_shot.PrototypeHead(ways))
    if model == "fine-tuning":
        return few_shot.FineTuning(encoder, 1 + int(data["train"].labels.max()), ways)
    steps, rate = settings.maml_steps, settings.maml_rate
    return few_shot.MAML(
        encoder, ways, hidden_size=settings.hidden_size, steps=steps, lr=rate, second_order=model == "maml"
    )


def hidden_size(settings: Any, row: Row) -> int | None:
    return None if row.model in _COMPARE else settings.hidden_size


def foreign(model: str) -> set[str]:
    """The settings that a model has nothing to do with."""
    found = _OF_SHARING if model in OF_ONE_NUMBER else _OF_MAML
    found = found if model == "hebbian" else found | {"label_noise"}
    found = found if model == "matching" else found | {"matching_scale"}
    return found if model == "gradient" else found | {"second_order", "gradient_tasks_per_step"}


def schedule(settings: Any, model: str) -> EpisodeSchedule:
    """How a model is trained.

    Raises:
        ValueError: numbers of tasks that do not go into one another, or a learning rate out of range.
    """
    if model == "gradient":
        shared, own = shared_schedule(settings, model), settings.gradient_tasks_per_step
        tasks, every = (count // settings.tasks_per_step * own for count in (shared.tasks, shared.validate_every))
        return replace(shared, tasks=tasks, validate_every=every, tasks_per_step=own)
    if model not in OF_ONE_NUMBER:
        return shared_schedule(settings, model)
    try:
        return EpisodeSchedule(
            tasks=settings.maml_tasks,
            tasks_per_step=settings.maml_tasks_per_step,
            validate_every=settings.maml_validate_every,
            **{name: getattr(settings, name) for name in OF_EVERY_SCHEDULE},
        )
    except ValueError as error:
        raise ValueError(f"of maml_tasks, maml_tasks_per_step and maml_validate_every: {error}") from None
