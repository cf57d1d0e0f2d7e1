"""What is timed, and what is left out because this machine could not hold it."""

import itertools
import math
from dataclasses import dataclass

from fastweights.bench.machine import too_much

OURS, EAGER, LSTM = "fastweights", "eager", "torch.nn.LSTM"
COMPILED_CELL, COMPILED_LOOP = "compiled cell", "compiled loop"
COMPILED = (COMPILED_CELL, COMPILED_LOOP)
ATTENTION, HYPER = "AttentionFW", "HyperLSTM"
MODELS = (ATTENTION, LSTM, HYPER, OURS)  # as table 2 of the paper has them
PAPER_MINUTES = {ATTENTION: 22, LSTM: 14, HYPER: 20, OURS: 25}  # 5,000 steps on a P100
PARTS = ("layer", "model")  # a layer's pass; a training step of a whole model, embedding to optimizer
MODES = ("training", "inference")  # forward plus backward; forward alone
# The loop is unrolled into one program: past this the compiler works for many minutes on it.
MOST_COMPILED_STEPS = 32


@dataclass(frozen=True)
class Case:
    """One size in one mode; the default is the paper's."""

    steps: int = 32
    hidden_size: int = 40  # of the slow network's state too
    mode: str = "training"
    batch: int = 256
    input_size: int = 15
    inner_size: int = 100

    def __str__(self) -> str:
        return f"T={self.steps}, H={self.hidden_size}, {self.mode}"

    @property
    def matrix_numbers(self) -> int:
        """Numbers in both fast matrices of one sequence."""
        return self.hidden_size * (2 * self.hidden_size + self.input_size + 2)

    @property
    def parameters(self) -> int:
        """Of our layer."""
        rows = self.hidden_size + 4 * self.hidden_size + 2 * (2 * self.hidden_size + self.input_size + 2)
        return self.inner_size * (self.hidden_size + self.input_size + 1) + rows * (self.inner_size + 1)

    @property
    def lstm_size(self) -> int:
        """Units, in tens, of the LSTM with about as many parameters (one bias a gate): 100 at the paper's sizes."""
        half = (self.input_size + 1) / 2
        return max(10, 10 * round((math.sqrt(half**2 + self.parameters / 4) - half) / 10))


@dataclass(frozen=True)
class Selection:
    """What a run of the command times; the default is the paper's sizes."""

    threads: tuple[int, ...] = (1, 2)
    steps: tuple[int, ...] = (32,)
    hidden_sizes: tuple[int, ...] = (40,)
    modes: tuple[str, ...] = ("training",)
    rounds: int = 30
    compile: bool = True
    memory: bool = False
    batch: int = 256
    budget: float = 60.0  # seconds that the rounds of one case may take, of all rivals together
    compile_limit: float = 600.0  # seconds for one compilation

    def cases(self) -> list[Case]:
        return [
            Case(steps, size, mode, self.batch)
            for mode, steps, size in itertools.product(self.modes, self.steps, self.hidden_sizes)
        ]

    def models(self) -> list[Case]:
        """The cases whose whole models are trained: table 2 is of the paper's sizes alone."""
        return [case for case in self.cases() if (case.hidden_size, case.mode) == (Case().hidden_size, "training")]

    def memory_cases(self) -> list[Case]:
        """The sizes that were asked for; where none were, some that show how the peak grows."""
        sizes: tuple[tuple[int, int], ...] = tuple(itertools.product(self.steps, self.hidden_sizes))
        if any((self.steps, self.hidden_sizes) == (told.steps, told.hidden_sizes) for told in (QUICK, FULL)):
            sizes = GROWTH
        return [Case(steps, size, batch=self.batch) for steps, size in sizes]

    def compiles(self, case: Case) -> list[str]:
        """What the compiler is given of this case."""
        if not self.compile:
            return []
        return [name for name in COMPILED if name != COMPILED_LOOP or case.steps <= MOST_COMPILED_STEPS]


QUICK = Selection()
FULL = Selection(steps=(32, 128), hidden_sizes=(20, 40, 80), modes=MODES, memory=True)
GROWTH = ((32, 20), (32, 40), (32, 80), (32, 160), (128, 40), (512, 40))  # T, H of the peaks of memory


def kept_bytes(rival: str, case: Case) -> int:
    """What plain PyTorch keeps for its backward pass, or holds at once without one; 0 for the rivals that keep little.

    Of every step: the matrices, what was written, the gate, and one minus the gate. A compiler may do with half.
    """
    kept = {EAGER: 4, COMPILED_CELL: 2, COMPILED_LOOP: 2}.get(rival, 0)
    return 4 * kept * case.batch * case.matrix_numbers * (case.steps if case.mode == "training" else 1)


def too_large(rival: str, case: Case) -> str | None:
    """Why a rival is not run: it would need more than half of the machine's memory; None where it fits."""
    return too_much(kept_bytes(rival, case))
