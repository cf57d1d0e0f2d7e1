"""What is timed, and what is left out because this machine could not hold it."""

import itertools
from dataclasses import dataclass

from fastweights.bench.machine import too_much

OURS, ATTENTION, MATRIX, LSTM = "fastweights", "eager attention form", "eager matrix form", "torch.nn.LSTM"
EAGER = (ATTENTION, MATRIX)
COMPILED_ATTENTION, COMPILED_MATRIX, COMPILED_STEP = (
    "compiled attention form",
    "compiled matrix form",
    "compiled matrix step",
)
COMPILED = (COMPILED_ATTENTION, COMPILED_MATRIX, COMPILED_STEP)
PRECISIONS = ("float32", "bfloat16")  # bfloat16: autocast, the parameters stay float32
MODES = ("training", "inference")  # forward plus backward; forward alone
# The compiler unrolls all steps into one program: past this it works for many minutes on each.
MOST_COMPILED_STEPS = 24


@dataclass(frozen=True)
class Case:
    """One size in one precision and mode."""

    steps: int
    hidden_size: int
    precision: str = "float32"
    mode: str = "training"
    batch: int = 128
    input_size: int = 100

    def __str__(self) -> str:
        return f"T={self.steps}, H={self.hidden_size}, {self.precision}, {self.mode}"


@dataclass(frozen=True)
class Selection:
    """What a run of the command times; the default takes about two minutes."""

    threads: tuple[int, ...] = (1, 2)
    steps: tuple[int, ...] = (11, 19)  # 4 and 8 pairs of the retrieval task
    hidden_sizes: tuple[int, ...] = (50, 100)
    precisions: tuple[str, ...] = ("float32",)
    modes: tuple[str, ...] = ("training",)
    rounds: int = 30
    compile: bool = False
    compiled_precisions: tuple[str, ...] = PRECISIONS
    memory: bool = False
    batch: int = 128
    input_size: int = 100
    budget: float = 15.0  # seconds that the rounds of one case may take, of all rivals together
    compile_limit: float = 600.0  # seconds for one compilation

    def cases(self) -> list[Case]:
        return [
            Case(steps, size, precision, mode, self.batch, self.input_size)
            for precision, mode, steps, size in itertools.product(
                self.precisions, self.modes, self.steps, self.hidden_sizes
            )
        ]

    def compiles(self, case: Case) -> bool:
        """Whether the compiler is given this case."""
        return self.compile and case.precision in self.compiled_precisions and case.steps <= MOST_COMPILED_STEPS


QUICK = Selection()
FULL = Selection(
    steps=(11, 19, 24, 200, 2000),
    hidden_sizes=(20, 50, 100, 200),
    precisions=PRECISIONS,
    modes=MODES,
    compile=True,
    compiled_precisions=("float32",),  # an hour of compiling, with bfloat16 it would be two
    memory=True,
)


def kept_bytes(rival: str, case: Case) -> int:
    """What an eager form keeps for its backward pass, or holds at once without one; 0 for the rivals that keep little.

    The attention form stacks the past anew at every step, T (T + 1) / 2 states in all; the matrix form keeps a matrix
    of every step. bfloat16 is counted as float32, for autocast keeps copies in both.
    """
    training = case.mode == "training"
    size = case.hidden_size
    if rival == ATTENTION:
        states = case.steps * (case.steps + 1) // 2 if training else 2 * case.steps
        return 4 * case.batch * states * size
    if rival == MATRIX:
        return 4 * case.batch * (case.steps if training else 3) * size**2
    return 0


def too_large(rival: str, case: Case, memory: int | None = None) -> str | None:
    """Why a rival is not run: it would need more than half of the machine's memory; None where it fits."""
    return too_much(kept_bytes(rival, case), memory)
