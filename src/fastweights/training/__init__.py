"""Training loops that resume exactly where they were killed, and the folders they write."""

from fastweights.training.comparison import Comparison, Measured, Scores, calibration_error, compare
from fastweights.training.curriculum import CurriculumSchedule, train_curriculum
from fastweights.training.episode_scores import EpisodeScores, evaluate_episodes, held_out_episodes
from fastweights.training.episodes import EpisodeSchedule, train_episodes
from fastweights.training.evaluation import evaluate
from fastweights.training.ewc import ElasticWeightConsolidation
from fastweights.training.progress import Progress, shown
from fastweights.training.run_folder import RunFolder, environment
from fastweights.training.schedule import Schedule, epoch_order
from fastweights.training.streams import Streams, StreamSchedule, StreamScores, evaluate_streams, train_streams
from fastweights.training.supervised import train

__all__ = [
    "Comparison",
    "CurriculumSchedule",
    "ElasticWeightConsolidation",
    "EpisodeSchedule",
    "EpisodeScores",
    "Measured",
    "Progress",
    "RunFolder",
    "Schedule",
    "Scores",
    "StreamSchedule",
    "StreamScores",
    "Streams",
    "calibration_error",
    "compare",
    "environment",
    "epoch_order",
    "evaluate",
    "evaluate_episodes",
    "evaluate_streams",
    "held_out_episodes",
    "shown",
    "train",
    "train_curriculum",
    "train_episodes",
    "train_streams",
]
