"""The missing word, table 3 of Munkhdalai & Trischler 2018: which of five words was left out of a sentence?

Section 5.2 of "Metalearning with Hebbian fast weights": a two-layer LSTM under fast weights, on words and sentences of
the Penn Treebank that were not seen in training.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch import nn as torch_nn
from torch.nn import functional as F

from fastweights import few_shot
from fastweights.reproduce._experiment import one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.munkhdalai2018._episodes import (
    Data,
    ModelName,
    RivalSettings,
    Split,
    TasksRow,
    check_rivals,
    make_rival,
    prepare_episodes,
)
from fastweights.tasks import missing_word
from fastweights.tasks.episodes import Episodes, EpisodeSampler

EXPERIMENT = "munkhdalai2018/penn-treebank"
QUICK_MINUTES = 3  # docs/results/munkhdalai2018-penn-treebank: a twelfth of its tasks, of two models
DATA = "ptb"

# Per cent, by model and shots: of 400 random tasks, and of the partition of all test words.
PAPER: dict[tuple[str, int], tuple[float, float | None]] = {
    ("hebbian", 1): (43.75, 44.5),
    ("hebbian", 2): (47.65, 48.8),
    ("hebbian", 3): (51.6, 52.8),
    ("gradient", 1): (35.5, 36.1),
    ("gradient", 2): (45.5, 46.9),
    ("gradient", 3): (49.2, 52.7),
    ("matching", 1): (32.4, None),
    ("matching", 2): (36.1, None),
    ("matching", 3): (38.2, None),
}


@dataclass(frozen=True)
class Settings(RivalSettings):
    """Tell which of five words is missing, from one, two or three other sentences that it is missing from."""

    models: tuple[ModelName, ...] = ("hebbian", "gradient", "matching", "prototypical")
    """Models to train and test, each a row of the table."""
    shots: tuple[int, ...] = (1, 2, 3)
    """Described sentences of a word in the tests."""
    queries: int = 1
    """Queries of each word in training."""
    test_queries: int = 1
    """Queries of each word in validation and test."""
    test_tasks: int = 400
    """Test tasks drawn at random, besides those that partition all test words."""
    embedding_size: int = 300
    """Features of a word."""
    hidden_size: int = 200
    """Units of the LSTM's layers and of the layer under the softmax; 300 in the paper for two and three shots."""
    read_after: int = 2
    """Words after the gap at which the LSTM is read; 50 reads it at the end of every sentence."""


PRESETS = {
    "quick": Settings(models=("hebbian", "matching"), tasks=32_000),
    "paper": Settings(seeds=(1, 2, 3), tasks=384_000, validate_every=9600),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model for every seed.

    Raises:
        DataError: the Penn Treebank is missing or damaged.
    """
    random = {(model, 5, shots): both[0] for (model, shots), both in PAPER.items()}
    partition = {(model, 5, shots): both[1] for (model, shots), both in PAPER.items() if both[1] is not None}
    return prepare_episodes(
        settings,
        folder,
        load,
        network,
        {"test": random, "all-inclusive": partition},
        further=partition_words,
        untrained=("Nearest context, untrained", NearestContext()),
    )


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_rivals(settings, sizes=("embedding_size",))
    if settings.read_after < 0:
        raise ValueError(f"read_after must not be negative, got {settings.read_after}")


def load(settings: Settings) -> dict[Split, Data]:
    """Load the sentences of each split, the missing word of each, and which of them are one sentence."""
    sentences = max(4, max(*settings.shots, settings.training_shots) + max(settings.queries, settings.test_queries))
    data = missing_word.load(settings.data_dir, sentences=sentences)
    return {
        "train": Data(*data.train[:3]),
        "validation": Data(*data.validation[:3]),
        "test": Data(*data.test[:3]),
    }


def network(settings: Settings, row: TasksRow, data: dict[Split, Data]) -> torch_nn.Module:
    """Return the model of a row."""
    sentences = data["train"].examples
    assert isinstance(sentences, missing_word.Sentences)
    encoder = few_shot.SentenceEncoder(
        sentences.vocabulary_size,
        embedding_size=settings.embedding_size,
        hidden_size=settings.hidden_size,
        blank=missing_word.BLANK,
        read_after=settings.read_after,
        half=settings.half,
    )
    return make_rival(settings, row, encoder, data)


def partition_words(sampler: EpisodeSampler, seed: int) -> dict[str, Episodes]:
    """Return all test words in tasks of five, each word in one."""
    return {"all-inclusive": sampler.partition(torch.Generator().manual_seed(seed))}


class NearestContext(torch_nn.Module):
    """The label of the described sentence that has most words in the same places around the blank; it learns nothing.

    A word next to the blank counts 1, the next but one 1/2, and any word of both sentences, wherever it stands, 1/4 of
    its share of their words.
    """

    def forward(self, examples: Tensor, description: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        around = _words_around(examples)  # [E,4]
        weights = torch.tensor([0.5, 1.0, 1.0, 0.5])
        first, second = around[description].unsqueeze(1), around[queries].unsqueeze(2)
        alike = ((first == second) & (first > missing_word.UNKNOWN)).float() @ weights  # [tasks,m,n]
        scores = alike + 0.25 * _share_words(examples[queries], examples[description])
        ways = int(labels.max()) + 1
        of_class = scores.unsqueeze(-1) * F.one_hot(labels, ways).unsqueeze(1)
        return of_class.amax(2)


def _words_around(sentences: Tensor) -> Tensor:
    """Return the two words before the first blank and the two after it [N,4], 0 past the ends."""
    padded = F.pad(sentences, (2, 2))
    blank = (sentences == missing_word.BLANK).int().argmax(1, keepdim=True) + 2
    return padded.gather(1, blank + torch.tensor([-2, -1, 1, 2]))


def _share_words(queries: Tensor, described: Tensor) -> Tensor:
    """Return the share of a query's words [tasks,m,T] that a described sentence [tasks,n,T] has too: [tasks,m,n]."""
    known = queries > missing_word.UNKNOWN
    common = torch.stack(
        [(queries.unsqueeze(-1) == one[:, None, None]).any(-1) & known for one in described.unbind(1)], dim=2
    )  # [tasks,m,n,T]
    return common.sum(-1) / known.sum(-1, keepdim=True).clamp(min=1)
