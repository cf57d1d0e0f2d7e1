"""What is timed, and what is left out because this machine could not hold it."""

import itertools
from dataclasses import dataclass

from fastweights.bench.machine import too_much

OURS, PLAIN, PAST_LIMIT = "fastweights", "torch.nn.Linear", "fastweights past the limit"
RIVALS = (OURS, PLAIN, PAST_LIMIT)


@dataclass(frozen=True)
class Case:
    """One size of the head."""

    classes: int  # V
    hidden_size: int = 256  # d
    batch: int = 1024

    def __str__(self) -> str:
        return f"V={self.classes}, d={self.hidden_size}"

    @property
    def needed_bytes(self) -> int:
        """The weights of every rival, the gradient of one in the making and made, and a plain loss's logits.

        Those stand there as they are, as log probabilities and as their gradient.
        """
        weights = (len(RIVALS) + 2) * self.classes * self.hidden_size
        return 4 * (weights + 3 * self.batch * self.classes)

    @property
    def too_large(self) -> str | None:
        """Why the case is not run: it would need more than half of the machine's memory; None where it fits."""
        return too_much(self.needed_bytes)

    def added_bytes(self, present: int) -> int:
        """The most that the head may hold beside a plain one's step, with so many classes in the batch.

        A counter for each class, the batch's activations until the step, and sums for the classes present.
        """
        return 8 * self.classes + 4 * (self.batch + present) * self.hidden_size


@dataclass(frozen=True)
class Selection:
    """What a run of the command times; the default is a part of the whole grid that takes minutes."""

    threads: tuple[int, ...] = (1, 2)
    classes: tuple[int, ...] = (1000, 33_278)
    hidden_sizes: tuple[int, ...] = (256,)
    rounds: int = 30
    memory: bool = False
    batch: int = 1024
    budget: float = 60.0  # seconds that the rounds of one case may take, of all rivals together

    def cases(self) -> list[Case]:
        sizes = itertools.product(self.classes, self.hidden_sizes)
        return [Case(classes, hidden_size, self.batch) for classes, hidden_size in sizes]


QUICK = Selection()
# The words of WikiText-2 and of WikiText-103.
FULL = Selection(classes=(1000, 33_278, 267_735), hidden_sizes=(256, 1024), memory=True)
