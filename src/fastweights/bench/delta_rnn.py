"""`fastweights bench delta-rnn`: the layer whose hidden state writes a memory by the delta rule, beside an LSTM."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastweights.bench.parity import allowed_error, choose_examples, distance, parity_error
from fastweights.bench.problems import Calls
from fastweights.bench.published import (
    Cell,
    Columns,
    Row,
    last_measured,
    last_of_each,
    left_out,
    place,
    places,
    show,
    show_ratio,
    table,
)
from fastweights.bench.run import Line, explain_lack_of_memory
from fastweights.nn import DeltaFastWeightsRNN, DeltaFastWeightsState

OURS, EAGER, LSTM = "fastweights", "eager", "torch.nn.LSTM"
NO_CONVOLUTION = "no convolution"  # ours, with convolution=0
RIVALS = (OURS, NO_CONVOLUTION, EAGER, LSTM)
STEP = "step"  # one step of one sequence after another, as in a stream
MODES = ("training", "inference", STEP)
STREAMED = 50  # steps in a call
HEADS = (1, 4)
WIDE, WIDE_HEAD = 256, 32  # from so many units on, heads of so many are timed too
MOST_EAGER_STEPS = 256  # step by step, a pass takes a minute past them
PARITY_STEPS = 64  # steps compared: rounding grows from step to step

BASE = ("lstm", LSTM)
COLUMNS = ["batch", "steps", "input_size", "hidden_size", "heads", "mode", "rival", "parameters", "tokens"]
UNIT = "milliseconds of a pass, or of a streamed step"
PER = "tokens"
MEMORY_COLUMNS = COLUMNS
MEMORY_RIVALS = RIVALS


@dataclass(frozen=True)
class DeltaRnnCase:
    """One size in one mode; the default is the size that the layer's speed is judged by."""

    precision: ClassVar[str] = "float32"
    steps: int = 256
    hidden_size: int = 64
    mode: str = "training"
    batch: int = 128
    heads: int = 1

    def __str__(self) -> str:
        return f"T={self.steps}, H={self.hidden_size}, {self.heads} heads, {self.mode}"

    @property
    def input_size(self) -> int:
        """As many features as units, as in a stack of layers."""
        return self.hidden_size

    def parameters(self, rival: str) -> int:
        """Return the parameters of a rival: an LSTM of as many units has nearly as many."""
        return sum(parameter.numel() for parameter in self.make_layer(rival, device="meta").parameters())

    def make_layer(self, rival: str, device: str = "cpu") -> nn.Module:
        """Return the layer of a rival, with its initial weights."""
        if rival == LSTM:
            return nn.LSTM(self.input_size, self.hidden_size, device=device)
        options: dict[str, Any] = {"convolution": 0} if rival == NO_CONVOLUTION else {}
        return DeltaFastWeightsRNN(self.input_size, self.hidden_size, self.heads, **options, device=device)

    def tokens(self, rival: str) -> int:
        """Return by how much a call's time is divided."""
        return STREAMED if self.mode == STEP else 1


@dataclass(frozen=True)
class DeltaRnnSelection:
    """The cases that a run of the command times: one head, four heads, and heads of 32 units in wide layers."""

    threads: tuple[int, ...] = (1, 2)
    steps: tuple[int, ...] = (256,)
    hidden_sizes: tuple[int, ...] = (64,)
    modes: tuple[str, ...] = ("training",)
    rounds: int = 15
    memory: bool = False
    batch: int = 128
    budget: float = 60.0  # seconds that the rounds of one case may take, of all rivals together

    def cases(self) -> list[DeltaRnnCase]:
        passes = [(mode, steps, self.batch) for mode, steps in itertools.product(self.modes, self.steps)]
        return [
            DeltaRnnCase(steps, size, mode, batch, heads)
            for (mode, steps, batch), size in itertools.product([*passes, (STEP, 1, 1)], self.hidden_sizes)
            for heads in (*HEADS, *([size // WIDE_HEAD] if size >= WIDE else []))
            if size % heads == 0  # 50 units have one head alone
        ]

    def memory_cases(self) -> list[DeltaRnnCase]:
        return [case for case in self.cases() if case.mode == "training"]


QUICK = DeltaRnnSelection()
FULL = DeltaRnnSelection(steps=(256, 2000), hidden_sizes=(64, 128), modes=MODES[:2], memory=True)


def count_kept_bytes(case: DeltaRnnCase, rival: str) -> int:
    """Return what plain PyTorch keeps for its backward pass, four memories of every step; 0 for the other rivals."""
    if rival != EAGER or case.mode != "training":
        return 0
    return 4 * 4 * case.batch * case.steps * case.hidden_size**2 // case.heads


class DeltaRnnProblem:
    """The tensors and layers of one case: ours with and without its convolution, in plain PyTorch, an LSTM."""

    def __init__(self, case: DeltaRnnCase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.steps * case.hidden_size)
        shape = (case.steps, case.batch, case.hidden_size)
        self.x, self.grad = (torch.randn(shape, generator=generator) for _ in range(2))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers: dict[str, Any] = {rival: case.make_layer(rival) for rival in (OURS, NO_CONVOLUTION, LSTM)}
            # a and b, whose convolution starts as the identity, read too
            nn.init.normal_(self.layers[OURS].convolution_weight)
        self.layers[EAGER] = make_plain(self.layers[OURS])

    def call(self, rival: str) -> Callable[[], None]:
        """Return a pass of a rival, or some steps of a stream, each of which goes on from the one before."""
        layer, x = self.layers[rival], self.x.clone().requires_grad_(self.case.mode == "training")
        parameters = [x, *layer.parameters()]

        def stream() -> None:
            state = None
            with torch.inference_mode():
                for _ in range(STREAMED):
                    _, state = layer(x, state)

        def infer() -> None:
            with torch.inference_mode():
                layer(x)

        def train() -> None:
            torch.autograd.grad(layer(x)[0], parameters, self.grad)

        return {STEP: stream, "inference": infer, "training": train}[self.case.mode]


def make_plain(layer: DeltaFastWeightsRNN, dtype: torch.dtype = torch.float32) -> DeltaFastWeightsRNN:
    """Return a layer in plain PyTorch, with the weights of another."""
    sizes = layer.input_size, layer.hidden_size, layer.num_heads
    plain = DeltaFastWeightsRNN(*sizes, convolution=layer.convolution, impl="reference", dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    return plain


def require_parity(case: DeltaRnnCase) -> None:
    """Raise FastWeightsError where the layer's error against float64 exceeds 1e-5 and three times eager float32's.

    What is compared are the outputs, the last state, and in training the gradients of x, of the state before and of
    every parameter, over the first 64 steps, and for as many sequences as the float64 reference has room for.
    """
    problem = DeltaRnnProblem(case)
    steps = min(case.steps, PARITY_STEPS)
    few = choose_examples(case.batch, 2 * count_kept_bytes(DeltaRnnCase(steps, case.hidden_size, batch=1), EAGER))
    x, grad = (tensor[:steps, few] for tensor in (problem.x, problem.grad))
    for rival, which in ((OURS, ""), (NO_CONVOLUTION, " without a convolution")):
        ours = problem.layers[rival]
        plain = make_plain(ours)
        with torch.no_grad():
            state = plain(x)[1]  # not zeros: a step from these reads neither the memory nor the hidden state
        exact = _differentiate(make_plain(ours, torch.float64), x.double(), state._map(Tensor.double), grad, case.mode)
        eager, found = (_differentiate(layer, x, state, grad, case.mode) for layer in (plain, ours))
        for name, true in exact.items():
            error, other = distance(found[name], true), distance(eager[name], true)
            if not error <= allowed_error(other):  # a NaN is red
                raise parity_error(
                    f"{name}{which} at {case} differ from the float64 reference by {error:.1e}, "
                    f"eager float32 by {other:.1e}"
                )


def _differentiate(
    layer: DeltaFastWeightsRNN, x: Tensor, state: DeltaFastWeightsState, grad: Tensor, mode: str
) -> dict[str, Tensor]:
    """Return the outputs, the last state, and in training the gradients of x, the state before, and every parameter."""
    training = mode == "training"
    x, hidden, memory, last = (tensor.clone().requires_grad_(training) for tensor in (x, *state))
    y, after = layer(x, DeltaFastWeightsState(hidden, memory, last))
    assert isinstance(y, Tensor)
    ends = {"hidden state": after.hidden, "memory": after.memory, "convolution": after.convolution}
    tensors = {"the outputs": y} | {f"the last {name}": tensor for name, tensor in ends.items()}
    if training:
        before = {"the hidden state before": hidden, "the memory before": memory, "the products before": last}
        leaves = {"x": x, **before, **dict(layer.named_parameters())}
        outer = [grad.to(y.dtype), after.memory.detach()]
        # Without a convolution there are no products before: they are empty, and nothing reads them.
        gradients = torch.autograd.grad([y, after.memory], list(leaves.values()), outer, materialize_grads=True)
        tensors |= {f"the gradients of {name}": each for name, each in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}


def explain_absence(case: DeltaRnnCase, rival: str) -> str | None:
    """Return why a rival is not run; None where it is."""
    if rival == EAGER and case.steps > MOST_EAGER_STEPS:
        return f"takes minutes at more than {MOST_EAGER_STEPS} steps"
    return explain_lack_of_memory(count_kept_bytes(case, rival))


def rivals(case: DeltaRnnCase, selection: DeltaRnnSelection) -> tuple[Calls, dict[str, str]]:
    """Return the call of every rival that can run here, and why the others cannot."""
    skipped = {rival: reason for rival in RIVALS if (reason := explain_absence(case, rival))}
    problem = DeltaRnnProblem(case)
    return {rival: problem.call(rival) for rival in RIVALS if rival not in skipped}, skipped


def prepare_pass(case: DeltaRnnCase, rival: str) -> Callable[[], None]:
    """Return the pass of a rival whose peak memory is measured, after a tiny one has warmed the libraries."""
    DeltaRnnProblem(DeltaRnnCase(2, 4 * case.heads, case.mode, 2, case.heads)).call(rival)()
    return DeltaRnnProblem(case).call(rival)


def lines(case: DeltaRnnCase) -> list[Line]:
    """Return the line that is printed for a case."""
    sizes = ("threads", 7, "threads"), ("T", 5, "steps"), ("H", 4, "hidden_size"), ("heads", 5, "heads")
    named = ("ours", OURS), ("without", NO_CONVOLUTION), ("eager", EAGER), ("LSTM", LSTM)
    times = [(name, 9, show(rival, digits=3)) for name, rival in named]
    ratios = ("ours/LSTM", 10, show_ratio(OURS, LSTM)), ("eager/ours", 10, show_ratio(EAGER, OURS, 1))
    return [[*sizes, ("mode", 9, "mode"), *times, *ratios]]


def _show(rival: str) -> Cell:
    """Return a cell of a time: a streamed step takes a fraction of a millisecond."""
    return lambda row, values: show(rival, digits=3 if row["mode"] == STEP else 1)(row, values)


TIMES: Columns = (
    ("pass", "mode"),
    ("threads", "threads"),
    ("T", "steps"),
    ("H", "hidden_size"),
    ("heads", "heads"),
    ("instructions", "kernel"),
    ("fastweights", _show(OURS)),
    ("without a convolution", _show(NO_CONVOLUTION)),
    ("`torch.nn.LSTM`", _show(LSTM)),
    ("eager", _show(EAGER)),
    ("ours / LSTM", show_ratio(OURS, LSTM)),
    ("without / LSTM", show_ratio(NO_CONVOLUTION, LSTM)),
    ("faster than eager", show_ratio(EAGER, OURS, 1, " times")),
)
PEAKS: Columns = (
    ("T", "steps"),
    ("H", "hidden_size"),
    ("heads", "heads"),
    ("fastweights", show(OURS, digits=0)),
    ("without a convolution", show(NO_CONVOLUTION, digits=0)),
    ("`torch.nn.LSTM`", show(LSTM, digits=0)),
    ("eager", show(EAGER, digits=0)),
)


def times_table(rows: list[Row]) -> str:
    """Return a table of the layer beside its rivals, as they were last timed with each set of instructions."""
    levels = last_of_each(rows, "mode", MODES)
    rows = [row for of_level in levels.values() for row in of_level]
    batch = max(int(row["batch"]) for row in rows)
    title = (
        f"Milliseconds, the median, in float32: of a pass over {batch} sequences of as many features as units, or of a "
        f"streamed step of one. {places(levels, 'mode')}.\n"
    )
    cells = table(_name_heads(rows), TIMES, words=(*MODES, *_words_of(rows), *levels))
    return f"{title}\n{cells}{left_out(rows, _SIZES)}"


def peaks_table(rows: list[Row]) -> str:
    """Return a table of the newest peaks of memory."""
    rows = last_measured(rows)
    title = f"Peak memory of a training pass in MiB, {rows[-1]['batch']} sequences in float32; {place(rows[-1])}.\n"
    cells = table(_name_heads(rows), PEAKS, "mebibytes", words=_words_of(rows))
    return f"{title}\n{cells}{left_out(rows, _SIZES)}"


_SIZES = {"T": "steps", "H": "hidden_size", "heads": "heads"}


def _words_of(rows: list[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_in_words(row["heads"]) for row in sorted(rows, key=lambda row: int(row["heads"]))))


def _name_heads(rows: list[Row]) -> list[Row]:
    """Return the rows with their heads in words, which no number of threads is taken for."""
    return [row | {"heads": _in_words(row["heads"])} for row in rows]


def _in_words(heads: str) -> str:
    return f"{heads} head{'s' * (heads != '1')}"
