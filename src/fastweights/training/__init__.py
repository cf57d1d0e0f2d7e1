"""Training loops that resume exactly where they were killed."""

import sys
from typing import Any

from fastweights import evaluation as _evaluation
from fastweights.runs import Progress, RunFolder, show_progress
from fastweights.training.actor_critic import (
    ActorCritic,
    ActorCriticSchedule,
    Played,
    check_environments,
    play,
    train_actor_critic,
)
from fastweights.training.curriculum import CurriculumSchedule, train_curriculum
from fastweights.training.episodes import (
    Augment,
    EpisodeSchedule,
    EpisodeScores,
    evaluate_episodes,
    held_out_episodes,
    kind_of_tasks,
    train_episodes,
)
from fastweights.training.ewc import ElasticWeightConsolidation
from fastweights.training.language import LanguageSchedule, train_language_model
from fastweights.training.loop import Learner, Schedule, train_epochs
from fastweights.training.streams import Streams, StreamSchedule, StreamScores, evaluate_streams, train_streams
from fastweights.training.supervised import epoch_order, evaluate, train

__all__ = [
    "ActorCritic",
    "ActorCriticSchedule",
    "Augment",
    "CurriculumSchedule",
    "ElasticWeightConsolidation",
    "EpisodeSchedule",
    "EpisodeScores",
    "LanguageSchedule",
    "Learner",
    "Played",
    "Progress",
    "RunFolder",
    "Schedule",
    "StreamSchedule",
    "StreamScores",
    "Streams",
    "check_environments",
    "epoch_order",
    "evaluate",
    "evaluate_episodes",
    "evaluate_streams",
    "held_out_episodes",
    "kind_of_tasks",
    "play",
    "show_progress",
    "train",
    "train_actor_critic",
    "train_curriculum",
    "train_episodes",
    "train_epochs",
    "train_language_model",
    "train_streams",
]

# The names and modules that evaluation has now, and that of progress, for one release.
for _module in ("comparison", "dynamic_evaluation", "language_scores"):
    sys.modules[f"{__name__}.{_module}"] = sys.modules[f"{_evaluation.__name__}.{_module}"]
sys.modules[f"{__name__}.progress"] = sys.modules["fastweights.runs.progress"]


def __getattr__(name: str) -> Any:
    if name in _evaluation.__all__:
        return getattr(_evaluation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
