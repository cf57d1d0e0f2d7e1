"""Associative retrieval of Ba et al. 2016, section 4.1: which digit came after this letter?

A sequence is K pairs of a letter and a digit, no letter twice, then "??" and one of the letters: `c9k8j3f1??c`, and the
answer is the digit that followed it, `9`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check_integers
from fastweights.tasks.floor import Floor, exact_floor

LETTERS = 26
DIGITS = 10
VOCABULARY = "abcdefghijklmnopqrstuvwxyz0123456789?"
SIZES = (100_000, 10_000, 20_000)  # training, validation, test


class RetrievalExamples(NamedTuple):
    """Sequences and their answers."""

    inputs: Tensor  # [N, 2 K + 3] int64, indices into VOCABULARY
    targets: Tensor  # [N] int64, the digit 0..9


def sample(count: int, pairs: int = 4, *, generator: torch.Generator) -> RetrievalExamples:
    """Draw sequences, each with its own letters, digits and query.

    Shapes: inputs [count, 2 pairs + 3], targets [count], both int64 on the generator's device.

    Raises:
        ValueError: `count` is negative, or `pairs` is not between 1 and 26.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import associative_retrieval
        >>> examples = associative_retrieval.sample(1000, generator=torch.Generator().manual_seed(0))
        >>> examples.inputs.shape, examples.targets.shape
        (torch.Size([1000, 11]), torch.Size([1000]))
        >>> text = associative_retrieval.text(examples.inputs[0])
        >>> text[text.index(text[-1]) + 1] == str(examples.targets[0].item())
        True
    """
    check_integers(0, count=count)
    _check_pairs(pairs)
    device = generator.device
    letters = torch.rand(count, LETTERS, generator=generator, device=device).argsort(1)[:, :pairs]
    digits = torch.randint(DIGITS, (count, pairs), generator=generator, device=device)
    asked = torch.randint(pairs, (count, 1), generator=generator, device=device)
    inputs = torch.full((count, 2 * pairs + 3), VOCABULARY.index("?"), device=device)
    inputs[:, 0 : 2 * pairs : 2] = letters
    inputs[:, 1 : 2 * pairs : 2] = LETTERS + digits
    inputs[:, -1:] = letters.gather(1, asked)
    return RetrievalExamples(inputs, digits.gather(1, asked).squeeze(1))


def splits(sizes: tuple[int, ...] = SIZES, pairs: int = 4, *, seed: int) -> list[RetrievalExamples]:
    """Draw the splits of one data set, of exactly these sizes, all from one seed.

    Raises:
        ValueError: as `sample`.

    Examples:
        >>> from fastweights.tasks import associative_retrieval
        >>> train, validation, test = associative_retrieval.splits((500, 50, 100), pairs=8, seed=0)
        >>> len(train.inputs), len(validation.inputs), test.inputs.shape
        (500, 50, torch.Size([100, 19]))
    """
    generator = torch.Generator().manual_seed(seed)
    return [sample(size, pairs, generator=generator) for size in sizes]


def text(inputs: Tensor) -> str:
    """Return one sequence [2 K + 3] as the paper prints it.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import associative_retrieval
        >>> associative_retrieval.text(torch.tensor([2, 35, 36, 36, 2]))
        'c9??c'
    """
    return "".join(VOCABULARY[index] for index in inputs.tolist())


def floor(pairs: int = 4) -> Floor:
    """Compute the score of the best model that knows the digits of a sequence, but not which of them is asked for.

    Raises:
        ValueError: `pairs` is not between 1 and 26.

    Examples:
        >>> from fastweights.tasks import associative_retrieval
        >>> floor = associative_retrieval.floor(4)
        >>> print(f"{floor.error:.1f} % {floor.cross_entropy:.3f} nats")
        61.7 % 1.187 nats
    """
    _check_pairs(pairs)
    return exact_floor([pairs], DIGITS)


def _check_pairs(pairs: int) -> None:
    if not 1 <= pairs <= LETTERS:
        raise ValueError(f"pairs must lie between 1 and {LETTERS} (letters do not repeat), got {pairs}")
