"""Holding: what was seen once is asked for later, with other inputs in between.

    sums      numbers between 0 and 1, one of each half of them marked: at the end, the sum of the marked two. The
              adding problem of Hochreiter & Schmidhuber 1997, "Long short-term memory", as in Le et al. 2015 (arXiv
              1504.00941)
    copies    symbols, blanks, and then a request for each symbol in order (Arjovsky et al. 2016, arXiv 1511.06464)
    cards     a shuffled deck, card by card: after each, the suit of the card so many before it. RepeatPrevious of
              POPGym (Morad et al. 2023), with an answer in place of a reward

As in `tasks.recall` each step has a target, which is IGNORED where no answer is due.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.checks import check_between, check_integers, check_sizes
from fastweights.tasks.recall import IGNORED

CARDS, SUITS = 52, 4
SUM_VARIANCE = 1 / 6  # of the sum of two numbers between 0 and 1: the squared error of a model that answers 1


class HoldingExamples(NamedTuple):
    """Sequences, and the answers that are due in them."""

    inputs: Tensor  # [N,T] int64 symbols or cards; of sums [N,T,2], a number and its mark
    targets: Tensor  # [N,T], IGNORED where no answer is due; int64, of sums of the dtype of the numbers


def sample_sums(count: int, steps: int = 30, *, generator: torch.Generator) -> HoldingExamples:
    """Draw adding problems, whose answer is due at the last step.

    Shapes: inputs [count, steps, 2], targets [count, steps], floats on the generator's device.

    Raises:
        ValueError: `count` is negative, or `steps` is less than 2.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import holding
        >>> inputs, targets = holding.sample_sums(3, 8, generator=torch.Generator().manual_seed(0))
        >>> inputs.shape, inputs[..., 1].sum(1).tolist()  # two marks in each
        (torch.Size([3, 8, 2]), [2.0, 2.0, 2.0])
        >>> bool(torch.allclose(targets[:, -1], inputs.prod(2).sum(1)))
        True
    """
    check_integers(0, count=count)
    check_integers(2, steps=steps)
    numbers = torch.rand(steps, count, generator=generator, device=generator.device)
    marks, half = torch.zeros_like(numbers), steps // 2
    for first, places in ((0, half), (half, steps - half)):
        drawn = torch.randint(places, (count,), generator=generator, device=generator.device)
        marks[first + drawn, torch.arange(count, device=drawn.device)] = 1
    sums = (numbers * marks).sum(0).unsqueeze(1)
    return HoldingExamples(
        torch.stack([numbers, marks], 2).transpose(0, 1), F.pad(sums, (steps - 1, 0), value=float(IGNORED))
    )


def sample_copies(
    count: int, copied: int = 5, blanks: int = 10, *, symbols: int = 8, generator: torch.Generator
) -> HoldingExamples:
    """Draw symbols to copy, whose answers are due at the requests.

    A blank is `symbols`, a request `symbols + 1`.

    Shapes: inputs and targets [count, 2 copied + blanks], int64 on the generator's device.

    Raises:
        ValueError: `count` or `blanks` is negative, or `copied` or `symbols` is not positive.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import holding
        >>> inputs, targets = holding.sample_copies(1, 2, 3, generator=torch.Generator().manual_seed(0))
        >>> inputs.tolist(), targets.tolist()
        ([[4, 7, 8, 8, 8, 9, 9]], [[-100, -100, -100, -100, -100, 4, 7]])
    """
    check_integers(0, count=count, blanks=blanks)
    check_sizes(copied=copied, symbols=symbols)
    drawn = torch.randint(symbols, (copied, count), generator=generator, device=generator.device).T
    inputs = F.pad(F.pad(drawn, (0, blanks), value=symbols), (0, copied), value=symbols + 1)
    return HoldingExamples(inputs, F.pad(drawn, (copied + blanks, 0), value=IGNORED))


def sample_cards(count: int, back: int = 3, dealt: int = CARDS, *, generator: torch.Generator) -> HoldingExamples:
    """Draw decks of cards, each of which is asked for `back` cards later, by its suit.

    A card's suit is its number divided by 13.

    Shapes: inputs and targets [count, dealt], int64 on the CPU.

    Raises:
        ValueError: `count` is negative, `back` is not from 1 to 51, or `dealt` is not more than `back` and at most 52.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import holding
        >>> inputs, targets = holding.sample_cards(1, 2, 6, generator=torch.Generator().manual_seed(0))
        >>> inputs.tolist(), targets.tolist()
        ([[16, 4, 35, 26, 23, 21]], [[-100, -100, 1, 0, 2, 2]])
    """
    check_integers(0, count=count)
    check_sizes(back=back, dealt=dealt)
    check_between(1, CARDS - 1, back=back)
    if not back < dealt <= CARDS:
        raise ValueError(f"dealt must lie between {back + 1} and {CARDS} with back={back}, got {dealt!r}")
    decks = [torch.randperm(CARDS, generator=generator)[:dealt] for _ in range(count)]
    cards = torch.stack(decks) if decks else torch.empty(0, dealt, dtype=torch.int64)
    return HoldingExamples(cards, F.pad(cards[:, :-back] // (CARDS // SUITS), (back, 0), value=IGNORED))
