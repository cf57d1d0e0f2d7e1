"""`fastweights bench associative`: the fast-weights layer beside eager PyTorch, torch.compile and `torch.nn.LSTM`."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.bench.parity import allowed_error, choose_examples, distance, parity_error
from fastweights.bench.problems import Calls, Forward, LayerProblem, compile_one_size, prepare_warm_pass
from fastweights.bench.published import (
    Column,
    Columns,
    Row,
    group,
    heading,
    last_measured,
    left_out,
    show,
    show_ratio,
    table,
)
from fastweights.bench.run import Line, explain_lack_of_memory
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN
from fastweights.ops.associative import Inputs, reference
from fastweights.ops.autocast import lstm_takes_bfloat16

logger = logging.getLogger(__name__)

OURS, ATTENTION, MATRIX, LSTM = "fastweights", "eager attention form", "eager matrix form", "torch.nn.LSTM"
STARTS = "fastweights, starts"  # where one step in ten begins another sequence
EAGER = (ATTENTION, MATRIX)
COMPILED_ATTENTION, COMPILED_MATRIX = "compiled attention form", "compiled matrix form"
COMPILED_STEP = "compiled matrix step"
COMPILED = (COMPILED_ATTENTION, COMPILED_MATRIX, COMPILED_STEP)
PRECISIONS = ("float32", "bfloat16")  # bfloat16: autocast, the parameters stay float32
MODES = ("training", "inference")  # forward plus backward; forward alone
# The compiler unrolls all steps into one program: past this it works for many minutes on each.
MOST_COMPILED_STEPS = 24
MOST_SECONDS = 5.0  # an eager call that takes longer is left out: three rounds of it would not fit the budget
_LONG = 100  # steps from which a quarter of them foretells the whole
_GRADIENTS = "the gradient of "
DECAY, RATE = 0.9, 0.5  # the paper's

BASE = ("lstm", LSTM)
COLUMNS = ["batch", "steps", "input_size", "hidden_size", "precision", "mode", "rival"]
UNIT = "milliseconds"
MEMORY_COLUMNS = COLUMNS
MEMORY_RIVALS = (OURS, ATTENTION, MATRIX, LSTM)


@dataclass(frozen=True)
class AssociativeCase:
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
class AssociativeSelection:
    """The cases that a run of the command times; the default takes about two minutes."""

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

    def cases(self) -> list[AssociativeCase]:
        sizes = itertools.product(self.precisions, self.modes, self.steps, self.hidden_sizes)
        return [
            AssociativeCase(steps, size, precision, mode, self.batch, self.input_size)
            for precision, mode, steps, size in sizes
        ]

    def memory_cases(self) -> list[AssociativeCase]:
        return [case for case in self.cases() if (case.mode, case.precision) == ("training", "float32")]

    def compiles(self, case: AssociativeCase) -> bool:
        """Return whether the compiler is given this case."""
        return self.compile and case.precision in self.compiled_precisions and case.steps <= MOST_COMPILED_STEPS


QUICK = AssociativeSelection()
FULL = AssociativeSelection(
    steps=(11, 19, 24, 200, 2000),
    hidden_sizes=(20, 50, 100, 200),
    precisions=PRECISIONS,
    modes=MODES,
    compile=True,
    compiled_precisions=("float32",),  # an hour of compiling, with bfloat16 it would be two
    memory=True,
)


def count_kept_bytes(case: AssociativeCase, rival: str) -> int:
    """Return what an eager form keeps for its backward pass, or holds at once without one; 0 for the other rivals.

    The attention form stacks the past again at every step, T (T + 1) / 2 states in all; the matrix form keeps a matrix
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


class AssociativeProblem(LayerProblem):
    """The tensors and modules of one case, the same for every rival: our layer, and an LSTM of the same size."""

    def __init__(self, case: AssociativeCase) -> None:
        super().__init__(case, case.hidden_size)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = FastWeightsRNN(case.input_size, case.hidden_size, decay=DECAY, rate=RATE)
            self.lstm = nn.LSTM(case.input_size, case.hidden_size)

    def forwards(self) -> dict[str, Forward]:
        return {
            OURS: lambda x: self.layer(x)[0],
            STARTS: self.restart,
            ATTENTION: lambda x: self.eager(x, reference.attention_form),
            MATRIX: lambda x: self.eager(x, reference.matrix_form),
            LSTM: lambda x: self.lstm(x)[0],
        }

    def compiled(self, rival: str) -> Forward:
        if rival == COMPILED_STEP:
            return self.loop(compile_one_size(self.matrix_step))
        return compile_one_size(self.forwards()[ATTENTION if rival == COMPILED_ATTENTION else MATRIX])

    def eager(self, x: Tensor, form: Callable[..., Tensor]) -> Tensor:
        """Run a form of the reference on our layer's parameters."""
        drive, weight_hh, gain, shift = self._drive(x)
        hidden = drive.new_zeros(drive.shape[1:])
        return form(Inputs(drive, weight_hh, gain, shift, hidden), self.layer.constants)

    def loop(self, step: Callable[..., tuple[Tensor, Tensor]]) -> Forward:
        """Return a loop over `matrix_step`, or over its compiled form."""

        def forward(x: Tensor) -> Tensor:
            drive, *parameters = self._drive(x)
            hidden = drive.new_zeros(drive.shape[1:])
            memory = drive.new_zeros(*hidden.shape, hidden.shape[-1])
            outputs = []
            for now in drive.unbind():
                hidden, memory = step(now, *parameters, hidden, memory)
                outputs.append(hidden)
            return torch.stack(outputs)

        return forward

    def matrix_step(
        self, drive: Tensor, weight_hh: Tensor, gain: Tensor, shift: Tensor, hidden: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden state after one step of the matrix form, and the matrix that it read."""
        constants = self.layer.constants
        inputs = Inputs(drive.unsqueeze(0), weight_hh, gain, shift, hidden, memory)
        outputs = reference.matrix_form(inputs, constants)
        # The form keeps its matrix to itself; a compiler sees that this is the same and forms it once.
        written = constants.rate * hidden.unsqueeze(2) * hidden.unsqueeze(1)
        return outputs[0], constants.decay * memory + written

    def _drive(self, x: Tensor) -> tuple[Tensor, ...]:
        named = dict(self.layer.named_parameters())
        drive = F.linear(x, named["weight_ih"], named["bias"])
        return drive, named["weight_hh"], named["norm.weight"], named["norm.bias"]


def rivals(case: AssociativeCase, selection: AssociativeSelection) -> tuple[Calls, dict[str, str]]:
    """Return a pass of every rival that can run here, and why the others cannot."""
    problem = AssociativeProblem(case)

    def refuse(rival: str) -> str | None:
        reason = explain_lack_of_memory(count_kept_bytes(case, rival))
        return reason or (explain_too_slow(problem, rival) if rival in EAGER else None)

    return problem.calls(refuse, COMPILED if selection.compiles(case) else (), selection.compile_limit)


def explain_too_slow(problem: AssociativeProblem, rival: str) -> str | None:
    """Return why an eager form is not run to its end: a quarter of the steps foretells more than `MOST_SECONDS`."""
    steps = problem.case.steps
    if steps < _LONG:
        return None
    call = problem.prepare(problem.forwards()[rival], steps // 4)
    began = time.perf_counter()
    call()
    # Attention reads all that came before; a matrix costs the same at every step.
    seconds = (time.perf_counter() - began) * (16 if rival == ATTENTION else 4)
    return None if seconds <= MOST_SECONDS else f"would take about {seconds:.0f} s a call"


def prepare_pass(case: AssociativeCase, rival: str) -> Callable[[], None]:
    """Return the pass of a rival whose peak memory is measured."""
    return prepare_warm_pass(AssociativeProblem(case), rival)


def require_parity(case: AssociativeCase) -> None:
    """Raise FastWeightsError where the layer's error against float64 exceeds 1e-5 (bfloat16: 2^-8) and 3 times eager's.

    The layer runs on the whole batch, just as it is timed. Long sequences in float64 would not fit: there the reference
    runs on some examples of the batch, and the gradient that goes into the layer is zero for all others, so that the
    gradients of the parameters are comparable too.

    A unit that float64 puts within rounding of the rectifier's edge may fall on its other side in float32, and its
    example then has another gradient, of equal right. Up to one example in ten is left out for it, where the outputs
    agree and the float64 gradient itself becomes another when x moves by no more than rounding.

    A case in bfloat16 is refused, too, where torch's LSTM, the measure of all, does not run in it.
    """
    problem = AssociativeProblem(case)
    examples = choose_parity_examples(case)
    compared = _compare(problem, examples)
    few = compared.red.startswith(_GRADIENTS) and 0 < len(compared.apart) <= len(examples) / 10
    if few and _lie_at_an_edge(problem, examples[compared.apart], compared.most):
        count = len(compared.apart)
        logger.info("parity: %d of %d examples have a unit at the rectifier's edge", count, len(examples))
        compared = _compare(problem, examples[~torch.isin(torch.arange(len(examples)), compared.apart)])
    if compared.red:
        raise parity_error(compared.red)
    if case.precision == "bfloat16" and not lstm_takes_bfloat16("cpu"):
        raise FastWeightsError("torch.nn.LSTM does not run in bfloat16 on this processor: time float32")


def choose_parity_examples(case: AssociativeCase) -> Tensor:
    """Return the examples that the float64 reference is run on: all, or as many as fit, spread over the batch."""
    form = case.steps / 2 if case.steps <= 2 * case.hidden_size else case.hidden_size  # as `recurrence` chooses
    return choose_examples(case.batch, 8 * case.steps * case.hidden_size * form)


class _Comparison(NamedTuple):
    red: str  # the differences and their sizes; empty if there are none
    apart: Tensor  # examples whose gradient of x differs by more than rounding
    most: float  # the largest error of an example in the gradient of x


def _compare(problem: AssociativeProblem, examples: Tensor) -> _Comparison:
    case, layer = problem.case, problem.layer
    double = _copy_in_double(problem)
    x, grad = problem.x[:, examples], problem.grad[:, examples]
    exact = _differentiate(problem, lambda x: double(x)[0], double, x.double(), grad.double())
    plain = _differentiate(problem, lambda x: problem.eager(x, reference.recurrence), layer, x, grad)
    sparse = torch.zeros_like(problem.grad)
    sparse[:, examples] = grad
    ours = _differentiate(problem, lambda x: layer(x)[0], layer, problem.x, sparse)
    apart = torch.empty(0, dtype=torch.int64)
    red, limit = "", 0.0
    for name, true in exact.items():
        per_example = name in ("the outputs", f"{_GRADIENTS}x")
        value = ours[name][:, examples] if per_example else ours[name]
        error, eager = distance(value, true), distance(plain[name], true)
        most = allowed_error(eager, case.precision)
        if name == f"{_GRADIENTS}x":
            limit = most
            apart = (~(_measure_errors(value, true) <= most)).nonzero().squeeze(1)
        if not error <= most and not red:  # a NaN is red
            red = f"{name} at {case} differ from the float64 reference by {error:.1e}, eager {case.precision} by "
            red += f"{eager:.1e}"
    return _Comparison(red, apart, limit)


def _lie_at_an_edge(problem: AssociativeProblem, examples: Tensor, most: float) -> bool:
    """Return whether each example has another gradient when x moves by a few units in float32's last place."""
    double = _copy_in_double(problem)
    x, grad = problem.x[:, examples].double(), problem.grad[:, examples].double()

    def gradient(x: Tensor) -> Tensor:
        return _differentiate(problem, lambda x: double(x)[0], double, x, grad)[f"{_GRADIENTS}x"]

    generator = torch.Generator().manual_seed(0)
    here = gradient(x)
    changed = torch.zeros(len(examples), dtype=torch.bool)
    for _ in range(8):
        moved = gradient(x + 1e-6 * x.std() * torch.randn(x.shape, generator=generator, dtype=x.dtype))
        changed |= _measure_errors(moved, here) > max(most, 1e-4)
    return bool(changed.all())


def _measure_errors(value: Tensor, true: Tensor) -> Tensor:
    """Return the error of every example of [T,B,D]."""
    errors: Tensor = (value.double() - true).norm(dim=(0, 2)) / true.norm(dim=(0, 2))
    return errors


def _copy_in_double(problem: AssociativeProblem) -> FastWeightsRNN:
    case = problem.case
    sizes = case.input_size, case.hidden_size
    double = FastWeightsRNN(*sizes, decay=DECAY, rate=RATE, impl="reference", dtype=torch.float64)
    double.load_state_dict(problem.layer.state_dict())
    return double


def _differentiate(
    problem: AssociativeProblem, forward: Callable[[Tensor], Tensor], layer: FastWeightsRNN, x: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    """Return the outputs, and in training the gradient of every input."""
    # Autocast would round the float64 reference as well.
    context = contextlib.nullcontext() if x.dtype == torch.float64 else problem.autocast()
    if problem.case.mode == "inference":
        with torch.inference_mode(), context:
            return {"the outputs": forward(x)}
    x = x.detach().requires_grad_()
    with context:
        outputs = forward(x)
    inputs = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(outputs, list(inputs.values()), grad.to(outputs.dtype))
    names = (f"{_GRADIENTS}{name}" for name in inputs)
    return {"the outputs": outputs.detach(), **dict(zip(names, gradients, strict=True))}


def lines(case: AssociativeCase) -> list[Line]:
    """Return the line that is printed for a case."""
    sizes = ("threads", 7, "threads"), ("T", 5, "steps"), ("H", 4, "hidden_size")
    how = ("precision", 9, "precision"), ("mode", 9, "mode")
    times = (
        ("ours", 9, show(OURS)),
        ("eager", 9, show(*EAGER)),
        ("compiled", 9, show(*COMPILED)),
        ("LSTM", 9, show(LSTM)),
    )
    ratios = ("ours/LSTM", 10, show_ratio(OURS, LSTM)), ("eager/ours", 10, show_ratio(EAGER, OURS))
    return [[*sizes, *how, *times, *ratios, ("starts/ours", 11, show_ratio(STARTS, OURS))]]


RATIOS: Columns = (
    ("ours / LSTM", show_ratio(OURS, LSTM)),
    ("faster than eager", show_ratio(EAGER, OURS, 1, " times")),
)
GRID: Columns = (
    ("T", "steps"),
    ("H", "hidden_size"),
    ("fastweights", show(OURS)),
    ("`torch.nn.LSTM`", show(LSTM)),
    ("eager attention", show(ATTENTION)),
    ("eager matrix", show(MATRIX)),
    ("best `torch.compile`", show(*COMPILED)),
    *RATIOS,
)
PEAKS: Columns = (
    ("T", "steps"),
    ("H", "hidden_size"),
    ("fastweights", show(OURS, digits=1)),
    ("`torch.nn.LSTM`", show(LSTM, digits=1)),
    ("eager attention", show(ATTENTION, digits=1)),
    ("eager matrix", show(MATRIX, digits=1)),
)


def group_by_setting(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each precision, mode and number of threads: float32 first, then training first."""
    settings = group(rows, ("precision", "mode", "threads"), (*PRECISIONS, *MODES))
    return {
        f"{mode}, {precision}, {threads} thread{'s' * (threads != '1')}": of_setting
        for (precision, mode, threads), of_setting in settings.items()
    }


def speed_table(rows: list[Row]) -> str:
    """Return the short table of "How fast": training in float32 at the sizes of the retrieval task."""
    rows = [row for row in rows if (row["precision"], row["mode"]) == ("float32", "training")]
    rows = [row for row in rows if int(row["steps"]) in QUICK.steps and int(row["hidden_size"]) in QUICK.hidden_sizes]
    rows = last_measured(rows)
    last = rows[-1]
    compiled = any(row["rival"] in COMPILED and row["milliseconds"] for row in rows)
    columns: list[Column] = [
        ("threads", "threads"),
        ("steps", "steps"),
        ("units", "hidden_size"),
        ("fastweights", show(OURS)),
    ]
    columns += [("`torch.nn.LSTM`", show(LSTM)), ("eager", show(*EAGER))]
    columns += [("best `torch.compile`", show(*COMPILED))] * compiled
    shown = table([row for row in rows if int(row["threads"]) in QUICK.threads], [*columns, *RATIOS])
    return (
        f"Milliseconds for the layer's forward plus backward pass, {last['batch']} sequences of {last['input_size']} "
        f"features, float32, on one {last['processor']} machine ({last['date']}, `fastweights bench associative`; "
        f"eager is the better of the two forms in plain PyTorch):\n\n{shown}"
    )


def grid_tables(rows: list[Row]) -> str:
    """Return all of the newest timings, a table for each precision, mode and number of threads."""
    rows = last_measured(rows)
    return heading(rows[-1], "Milliseconds, the median") + "".join(
        f"\n**{setting}**\n\n{table(of_setting, GRID)}{left_out(of_setting)}"
        for setting, of_setting in group_by_setting(rows).items()
    )


def peaks_table(rows: list[Row]) -> str:
    """Return the newest peaks of memory."""
    rows = last_measured(rows)
    setting = next(iter(group_by_setting(rows)))
    title = f"{heading(rows[-1], 'Peak memory in MiB')}\n**{setting}**"
    return f"{title}\n\n{table(rows, PEAKS, 'mebibytes')}{left_out(rows)}"
