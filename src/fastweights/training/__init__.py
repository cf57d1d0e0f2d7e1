"""Training loops that resume exactly where they were killed."""

from fastweights.runs import Progress, RunFolder, show_progress
from fastweights.training.actor_critic import ActorCritic, ActorCriticSchedule, check_environments, train_actor_critic
from fastweights.training.comparison import Comparison, Measured, Scores, calibration_error, compare
from fastweights.training.curriculum import CurriculumSchedule, train_curriculum
from fastweights.training.dynamic_evaluation import evaluate_dynamically, measure_gradients
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
from fastweights.training.language_scores import (
    FrequencyBucket,
    StreamMemory,
    by_frequency,
    evaluate_language_model,
    perplexity,
    score_text,
)
from fastweights.training.loop import Learner, Schedule, train_epochs
from fastweights.training.streams import Streams, StreamSchedule, StreamScores, evaluate_streams, train_streams
from fastweights.training.supervised import epoch_order, evaluate, train

__all__ = [
    "ActorCritic",
    "ActorCriticSchedule",
    "Augment",
    "Comparison",
    "CurriculumSchedule",
    "ElasticWeightConsolidation",
    "EpisodeSchedule",
    "EpisodeScores",
    "FrequencyBucket",
    "LanguageSchedule",
    "Learner",
    "Measured",
    "Progress",
    "RunFolder",
    "Schedule",
    "Scores",
    "StreamMemory",
    "StreamSchedule",
    "StreamScores",
    "Streams",
    "by_frequency",
    "calibration_error",
    "check_environments",
    "compare",
    "epoch_order",
    "evaluate",
    "evaluate_dynamically",
    "evaluate_episodes",
    "evaluate_language_model",
    "evaluate_streams",
    "held_out_episodes",
    "kind_of_tasks",
    "measure_gradients",
    "perplexity",
    "score_text",
    "show_progress",
    "train",
    "train_actor_critic",
    "train_curriculum",
    "train_episodes",
    "train_epochs",
    "train_language_model",
    "train_streams",
]
