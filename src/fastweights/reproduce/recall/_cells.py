"""The cells of the gauntlet: three problems of recall, three of a state, three of holding what was seen."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fastweights.errors import RunError
from fastweights.reproduce.recall._bench import DrawnSettings, Problem, Split, redraw_from
from fastweights.reproduce.recall._growing import count_pairs, shorten
from fastweights.tasks import holding, recall, state_tracking

CellName = Literal["mqar-4", "mqar-64", "mqar-forgetting", "parity", "s3", "s5", "adding", "copying", "repeat-previous"]
KEYS = 512  # tokens of recall: the least power of two that holds a sequence of 256 steps
WORD = 40  # elements of a word in training
SUMMED = 50  # steps of the adding problem
COPIED, BLANKS, SYMBOLS = 10, 30, 8  # symbols to copy, steps between them and the first request, kinds of symbols
BACK = 8  # cards between one and the question for its suit


@dataclass(frozen=True)
class Cell:
    """A problem of the gauntlet."""

    draw: Callable[[int, torch.Generator, bool], Split]
    """Draws so many sequences and their answers, of training and validation or (True) of the test."""
    floor: Callable[[], float]
    """Returns the accuracy of a model that does not remember."""
    epochs: int
    """Passes over the training sequences: at most five minutes of one core for an LSTM."""
    problem: Problem
    """The problem without its sequences."""
    grow: Callable[[int, torch.Generator, float], Split] | None = None
    """Draws so many of training for a pass, by the last accuracy on validation; None: all passes have the same."""

    @property
    def steps(self) -> int:
        """The length of the test's sequences."""
        return self.draw(1, torch.Generator(), True)[0].shape[1]


def _recall(epochs: int, steps: int, pairs: int, updates: int = 0, *, growing: bool = False) -> Cell:
    def sample(count: int, generator: torch.Generator, some: int = pairs) -> Split:
        length, changed = shorten(some, steps, pairs, updates)
        return recall.sample(count, length, some, updates=changed, vocabulary_size=KEYS, generator=generator)

    def grow(count: int, generator: torch.Generator, accuracy: float) -> Split:
        return sample(count, generator, count_pairs(accuracy, pairs))

    return Cell(
        lambda count, generator, test: sample(count, generator),
        lambda: recall.floor(steps, pairs, updates=updates).accuracy,
        epochs,
        Problem({}, {}, vocabulary_size=KEYS, positions=steps),
        grow if growing else None,
    )


def _follow(epochs: int, group: state_tracking.Group, *, growing: bool = False) -> Cell:
    def draw(count: int, generator: torch.Generator, test: bool) -> Split:
        return state_tracking.sample(count, 2 * WORD if test else WORD, group, generator=generator)

    size = state_tracking.size(group)
    problem = Problem({}, {}, vocabulary_size=size, guess=1 / size if growing else None)
    return Cell(draw, lambda: state_tracking.floor(2 * WORD, group).accuracy, epochs, problem)


def _add(count: int, generator: torch.Generator, test: bool) -> Split:
    return holding.sample_sums(count, SUMMED, generator=generator)


def _copy(count: int, generator: torch.Generator, test: bool) -> Split:
    return holding.sample_copies(count, COPIED, BLANKS, symbols=SYMBOLS, generator=generator)


def _repeat(count: int, generator: torch.Generator, test: bool) -> Split:
    return holding.sample_cards(count, BACK, generator=generator)


CELLS: dict[CellName, Cell] = {
    "mqar-4": _recall(14, 64, 4),
    "mqar-64": _recall(10, 256, 64, growing=True),  # from 64 at once neither LSTM nor DeltaFastWeightsRNN began
    "mqar-forgetting": _recall(14, 64, 4, updates=4),
    "parity": _follow(16, "parity"),
    "s3": _follow(16, "S3"),
    "s5": _follow(24, "S5", growing=True),  # from whole words none of eight layers learnt any (docs/recall.md)
    "adding": Cell(_add, lambda: 0.0, 16, Problem({}, {}, numbers=2, positions=SUMMED, variance=holding.SUM_VARIANCE)),
    "copying": Cell(
        _copy, lambda: 1 / SYMBOLS, 16, Problem({}, {}, vocabulary_size=SYMBOLS + 2, positions=2 * COPIED + BLANKS)
    ),
    # Of the 51 cards that are not the newest, 13 have one of the other suits.
    "repeat-previous": Cell(
        _repeat, lambda: 13 / 51, 16, Problem({}, {}, vocabulary_size=holding.CARDS, positions=holding.CARDS)
    ),
}


@functools.lru_cache(maxsize=1)  # members follow one another cell by cell
def draw_problem(name: CellName, settings: DrawnSettings) -> Problem:
    """Draw the sequences of a cell.

    Raises:
        RunError: they do not fit into memory.
    """
    cell, generator = CELLS[name], torch.Generator().manual_seed(settings.data_seed)
    sizes = {split: getattr(settings, f"{split}_examples") for split in ("train", "validation", "test")}
    try:
        drawn = {split: cell.draw(size, generator, split == "test") for split, size in sizes.items()}
        splits = {
            split: (inputs.contiguous().to(settings.device), targets.to(settings.device))
            for split, (inputs, targets) in drawn.items()
        }
    except (RuntimeError, MemoryError) as error:  # torch raises the first where memory ends
        raise RunError(f"{sum(sizes.values()):,} sequences of {name} do not fit into memory; ask for fewer") from error
    redraw = None if cell.grow is None else redraw_from(settings, cell.grow)
    if redraw is not None:
        splits["train"] = redraw(0, 0.0)
    return cell.problem._replace(splits=splits, floors={"test": cell.floor()}, redraw=redraw)
