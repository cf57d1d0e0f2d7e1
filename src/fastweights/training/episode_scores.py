"""What a few-shot network's answers to tasks are worth, and the tasks that stand apart for a test."""

import math
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.errors import TrainingError
from fastweights.nn.modes import evaluating
from fastweights.tasks.episodes import Episodes, EpisodeSampler

VALIDATION, TEST = -1, -2  # what stands in for a step where the tasks to validate and to test on are drawn
_NORMAL = 1.96  # standard errors either way that hold the mean in 95 of 100 cases


class EpisodeScores(NamedTuple):
    """What a network's answers to the queries of some tasks are worth."""

    tasks: int
    accuracy: float  # per cent, the mean over the tasks
    # Per cent either way: where the mean lies, with 95 % confidence, had more tasks been drawn. Of one task NaN.
    interval: float
    cross_entropy: float  # nats


def evaluate_episodes(network: nn.Module, episodes: Episodes) -> EpisodeScores:
    """What a few-shot network's answers to the queries of these tasks are worth, among as many classes as they have.

    Raises:
        ValueError: the tasks have no queries.
        TrainingError: an answer is NaN.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot, nn
        >>> from fastweights.tasks.episodes import EpisodeSampler
        >>> from fastweights.training import evaluate_episodes
        >>> labels = torch.arange(6).repeat_interleave(4)
        >>> tasks = EpisodeSampler(torch.eye(6)[labels], labels, ways=3, shots=1, queries=2).draw(
        ...     10, torch.Generator().manual_seed(0)
        ... )
        >>> evaluate_episodes(few_shot.FewShotNetwork(torch.nn.Identity(), few_shot.PrototypeHead(3)), tasks).accuracy
        100.0
    """
    if episodes.queries.numel() == 0:
        raise ValueError(f"there must be queries to answer, got {list(episodes.queries.shape)}")
    with evaluating(network), torch.no_grad():
        # A network with more columns than the tasks have classes has a logit for each.
        logits = answers(network, episodes)[..., : episodes.classes.shape[1]]
        if logits.isnan().any():
            raise TrainingError("an answer of the network is NaN: look for numbers that are none in the examples")
        right = (logits.argmax(-1) == episodes.targets).double().mean(1)
        loss = F.cross_entropy(logits.flatten(0, 1), episodes.targets.flatten())
    spread = float(right.std()) if len(right) > 1 else math.nan
    return EpisodeScores(
        len(right), 100 * float(right.mean()), 100 * _NORMAL * spread / math.sqrt(len(right)), float(loss)
    )


def held_out_episodes(sampler: EpisodeSampler, tasks: int, seed: int) -> Episodes:
    """The tasks that `train_episodes` tests on with this seed.

    Raises:
        ValueError: `tasks` is less than 1, or the seed out of range.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.episodes import EpisodeSampler
        >>> from fastweights.training import held_out_episodes
        >>> labels = torch.arange(6).repeat_interleave(4)
        >>> sampler = EpisodeSampler(torch.eye(6)[labels], labels, ways=3, shots=1, queries=2)
        >>> held_out_episodes(sampler, 10, seed=1).queries.shape
        torch.Size([10, 6])
    """
    check_seed(seed)
    return sampler.draw(tasks, task_generator(seed, TEST))


def check_seed(seed: int) -> None:
    """Refuse what no generator takes.

    Raises:
        ValueError: it is not an integer of 0 to 2^63 - 1.
    """
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer of 0 to 2^63 - 1, got {seed!r}")


def kind_of_tasks(ways: int, shots: int, split: str) -> str:
    """What their scores are called in metrics.jsonl."""
    return f"{ways}-way_{shots}-shot_{split}"


def task_generator(seed: int, step: int) -> torch.Generator:
    # Torch's generator takes 32 bits of its seed: they are mixed from both numbers.
    mixed = numpy.random.SeedSequence([seed, step % 2**32]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))


def answers(network: nn.Module, episodes: Episodes) -> Tensor:
    logits: Tensor = network(episodes.examples, episodes.description, episodes.labels, episodes.queries)
    return logits
