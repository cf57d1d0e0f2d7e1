"""What is timed."""

from dataclasses import dataclass

OURS, LOOP = "fastweights", "loop over time"
RIVALS = (OURS, LOOP)
POSITIONS = {OURS: 512, LOOP: 5}  # that a timed call scores


@dataclass(frozen=True)
class Case:
    """A stream, and how much of it the cache remembers."""

    window: int
    classes: int = 10_000  # V
    hidden_size: int = 400  # d

    def __str__(self) -> str:
        return f"window={self.window}, V={self.classes}, d={self.hidden_size}"


@dataclass(frozen=True)
class Selection:
    """What a run of the command times."""

    threads: tuple[int, ...] = (1, 2)
    windows: tuple[int, ...] = (2000,)
    rounds: int = 15
    budget: float = 60.0  # seconds that the rounds of one case may take, of both rivals together

    def cases(self) -> list[Case]:
        return [Case(window) for window in self.windows]


QUICK = Selection()
FULL = Selection(windows=(500, 2000, 8000))
