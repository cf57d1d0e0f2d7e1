"""`fastweights bench gated`: the layer of Schlag & Schmidhuber 2017 beside its rivals, and the models of their table 2.

A pass of the layer is timed beside plain PyTorch, torch.compile and an LSTM; whole models by a step of their training.
"""

import functools
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.bench import associative, published
from fastweights.bench.parity import allowed_error, choose_examples, distance, parity_error
from fastweights.bench.problems import Calls, Forward, LayerProblem, compile_one_size, prepare_warm_pass
from fastweights.bench.published import Columns, Row, heading, last_measured, left_out, number, show, show_ratio, table
from fastweights.bench.run import Line, explain_lack_of_memory
from fastweights.nn import (
    FastWeightsRNN,
    GatedFastWeightsRNN,
    GatedFastWeightsRNNCell,
    GatedFastWeightsState,
    HyperLSTM,
)
from fastweights.tasks import gated_retrieval

logger = logging.getLogger(__name__)

OURS, EAGER, LSTM = "fastweights", "eager", "torch.nn.LSTM"
STARTS = associative.STARTS
COMPILED_CELL, COMPILED_LOOP = "compiled cell", "compiled loop"
COMPILED = (COMPILED_CELL, COMPILED_LOOP)
ATTENTION, HYPER = "AttentionFW", "HyperLSTM"
MODELS = (ATTENTION, LSTM, HYPER, OURS)  # as table 2 of the paper has them
PAPER_MINUTES = {ATTENTION: 22, LSTM: 14, HYPER: 20, OURS: 25}  # 5,000 steps on a P100
PARTS = ("layer", "model")  # a layer's pass; a training step of a whole model, embedding to optimizer
MODES = ("training", "inference")  # forward plus backward; forward alone
# The loop is unrolled into one program: past this the compiler works for many minutes on it.
MOST_COMPILED_STEPS = 32
CHARACTERS = len(gated_retrieval.VOCABULARY)
ATTENTION_SIZE = 207
ATTENTION_DECAY = 0.9
LEARNING_RATE = 0.002  # the paper's
CLIP_NORM = 0.1
DRAWS = 5  # draws of x that differ by rounding
_SHORTEST = len("S(aa,b),Q(aa)b.")  # no query takes fewer characters
_STATE = GatedFastWeightsState._fields

BASE = ("lstm", LSTM)
COLUMNS = ["batch", "steps", "input_size", "hidden_size", "precision", "mode", "part", "rival", "units", "parameters"]
UNIT = "milliseconds"
MEMORY_COLUMNS = COLUMNS
MEMORY_RIVALS = (OURS, EAGER, LSTM)


@dataclass(frozen=True)
class GatedCase:
    """One size in one mode; the default is the paper's."""

    precision: ClassVar[str] = "float32"
    steps: int = 32
    hidden_size: int = 40  # the slow network's state has the same size
    mode: str = "training"
    batch: int = 256
    input_size: int = 15
    inner_size: int = 100
    part: str = "layer"

    def __str__(self) -> str:
        return f"T={self.steps}, H={self.hidden_size}, {self.mode}"

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of one sequence's state."""
        size = self.hidden_size
        return [(size,), (size,), (size, size + self.input_size + 1), (size, size + 1)]

    @property
    def matrix_numbers(self) -> int:
        """Numbers in both fast matrices of one sequence."""
        return sum(math.prod(shape) for shape in self.state_shapes[2:])

    @property
    def layer_parameters(self) -> int:
        """Parameters of our layer."""
        rows = self.hidden_size + 4 * self.hidden_size + 2 * (2 * self.hidden_size + self.input_size + 2)
        return self.inner_size * (self.hidden_size + self.input_size + 1) + rows * (self.inner_size + 1)

    @property
    def lstm_size(self) -> int:
        """Units, in tens, of the LSTM with about as many parameters (one bias a gate): 100 at the paper's sizes."""
        half = (self.input_size + 1) / 2
        return max(10, 10 * round((math.sqrt(half**2 + self.layer_parameters / 4) - half) / 10))

    def units(self, rival: str) -> int:
        """Return the hidden units of a rival."""
        if self.part == "model":
            return _model_sizes()[rival][0]
        return self.lstm_size if rival == LSTM else self.hidden_size

    def parameters(self, rival: str) -> int:
        """Return the parameters of a rival; torch gives each gate of an LSTM two biases."""
        if self.part == "model":
            return _model_sizes()[rival][1]
        return 4 * self.lstm_size * (self.lstm_size + self.input_size + 2) if rival == LSTM else self.layer_parameters


@dataclass(frozen=True)
class GatedSelection:
    """The cases that a run of the command times; the default is the paper's sizes."""

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

    def cases(self) -> list[GatedCase]:
        """Return the passes of the layer, then the whole models: table 2 is of the paper's sizes alone."""
        sizes = itertools.product(self.modes, self.steps, self.hidden_sizes)
        layers = [GatedCase(steps, size, mode, self.batch) for mode, steps, size in sizes]
        whole = [case for case in layers if (case.hidden_size, case.mode) == (GatedCase().hidden_size, "training")]
        return [*layers, *(replace(case, part="model") for case in whole)]

    def memory_cases(self) -> list[GatedCase]:
        """Return the sizes that were asked for; where none were, some that show how the peak grows."""
        sizes: tuple[tuple[int, int], ...] = tuple(itertools.product(self.steps, self.hidden_sizes))
        asked = self.steps, self.hidden_sizes
        if any(asked == (default.steps, default.hidden_sizes) for default in (QUICK, FULL)):
            sizes = GROWTH
        return [GatedCase(steps, size, batch=self.batch) for steps, size in sizes]

    def compiles(self, case: GatedCase) -> list[str]:
        """Return the rivals of this case that are to be compiled."""
        if not self.compile:
            return []
        return [name for name in COMPILED if name != COMPILED_LOOP or case.steps <= MOST_COMPILED_STEPS]


QUICK = GatedSelection()
FULL = GatedSelection(steps=(32, 128), hidden_sizes=(20, 40, 80), modes=MODES, memory=True)
GROWTH = ((32, 20), (32, 40), (32, 80), (32, 160), (128, 40), (512, 40))  # T, H of the peaks of memory


def count_kept_bytes(case: GatedCase, rival: str) -> int:
    """Return what plain PyTorch keeps for its backward pass, or holds at once without one; 0 for the other rivals.

    Of every step: the matrices, what was written, the gate, and one minus the gate. A compiler may do with half.
    """
    kept = {EAGER: 4, COMPILED_CELL: 2, COMPILED_LOOP: 2}.get(rival, 0)
    return 4 * kept * case.batch * case.matrix_numbers * (case.steps if case.mode == "training" else 1)


class GatedProblem(LayerProblem):
    """The tensors and modules of one case: our layer, the same in plain PyTorch, an LSTM of as many parameters."""

    def __init__(self, case: GatedCase) -> None:
        super().__init__(case, max(case.hidden_size, case.lstm_size))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = GatedFastWeightsRNN(case.input_size, case.hidden_size, slow_inner_size=case.inner_size)
            self.lstm = nn.LSTM(case.input_size, case.lstm_size)
        self.plain = self._make_plain(GatedFastWeightsRNN)
        self.cell = self._make_plain(GatedFastWeightsRNNCell)

    def _make_plain(self, kind: Any) -> Any:
        """Return the layer or its cell as the reference, with the parameters of our layer."""
        case = self.case
        plain = kind(case.input_size, case.hidden_size, slow_inner_size=case.inner_size, impl="reference")
        plain.slow_in, plain.slow_out = self.layer.slow_in, self.layer.slow_out
        return plain

    def forwards(self) -> dict[str, Forward]:
        return {
            OURS: lambda x: self.layer(x)[0],
            STARTS: self.restart,
            EAGER: lambda x: self.plain(x)[0],
            LSTM: lambda x: self.lstm(x)[0],
        }

    def compiled(self, rival: str) -> Forward:
        if rival == COMPILED_CELL:
            return self.loop(compile_one_size(self.cell))
        return compile_one_size(self.forwards()[EAGER])

    def loop(self, cell: Callable[..., tuple[Tensor, GatedFastWeightsState]]) -> Forward:
        """Return a loop over the cell, or over its compiled form."""

        def forward(x: Tensor) -> Tensor:
            # Not None, which would be a second program for the compiler.
            state = GatedFastWeightsState(*(x.new_zeros(x.shape[1], *shape) for shape in self.case.state_shapes))
            outputs = []
            for now in x.unbind():
                y, state = cell(now, state)
                outputs.append(y)
            return torch.stack(outputs)

        return forward


class Model(nn.Module):
    """Characters [T,B] and a state -> logits [T,B,15] and the state, through a table of 15 features a character."""

    def __init__(self, layer: nn.Module, units: int) -> None:
        super().__init__()
        self.units = units
        self.embedding = nn.Embedding(CHARACTERS, CHARACTERS)
        self.layer = layer
        self.readout = nn.Linear(units, CHARACTERS)

    def forward(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.layer(self.embedding(inputs), state)
        return self.readout(y), state

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def make_models() -> dict[str, Model]:
    """Return the four of the paper's table 2; the sizes make about 50,000 parameters each.

    Examples:
        >>> {name: model.size for name, model in make_models().items()}
        {'AttentionFW': 49920, 'torch.nn.LSTM': 48540, 'HyperLSTM': 49744, 'fastweights': 46234}
    """
    size = GatedCase().hidden_size
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention = FastWeightsRNN(CHARACTERS, ATTENTION_SIZE, decay=ATTENTION_DECAY, rate=0.5)
        return {
            ATTENTION: Model(attention, ATTENTION_SIZE),
            LSTM: Model(nn.LSTM(CHARACTERS, 100), 100),
            HYPER: Model(HyperLSTM(CHARACTERS, 80, hyper_hidden_size=24, hyper_embedding_size=4), 80),
            OURS: Model(GatedFastWeightsRNN(CHARACTERS, size), size),
        }


@functools.cache
def _model_sizes() -> dict[str, tuple[int, int]]:
    """Return the units and the parameters of each model."""
    return {name: (model.units, model.size) for name, model in make_models().items()}


def make_training_step(model: Model, case: GatedCase) -> Callable[[], None]:
    """Return a step of truncated backpropagation over one segment; the state is carried on, cut from the graph."""
    generator = torch.Generator().manual_seed(0)
    stream = gated_retrieval.sample(case.batch * case.steps // _SHORTEST + 1, generator=generator)
    inputs, targets, _ = gated_retrieval.segment(gated_retrieval.streams(stream, case.batch), 0, case.steps)
    optimizer = torch.optim.NAdam(model.parameters(), lr=LEARNING_RATE)
    state: Any = None

    def step() -> None:
        nonlocal state
        logits, state = model(inputs, state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        state = tuple(leaf.detach() for leaf in state) if type(state) is tuple else state.detach()

    return step


def rivals(case: GatedCase, selection: GatedSelection) -> tuple[Calls, dict[str, str]]:
    """Return a pass of every layer, or a training step of every model, and why other rivals cannot be timed."""
    if case.part == "model":
        return {name: make_training_step(model, case) for name, model in make_models().items()}, {}

    def refuse(rival: str) -> str | None:
        return explain_lack_of_memory(count_kept_bytes(case, rival))

    return GatedProblem(case).calls(refuse, selection.compiles(case), selection.compile_limit)


def prepare_pass(case: GatedCase, rival: str) -> Callable[[], None]:
    """Return the pass of a rival whose peak memory is measured: it makes the states that it begins and ends with."""
    return prepare_warm_pass(GatedProblem(case), rival)


def require_parity(case: GatedCase) -> None:
    """Raise FastWeightsError where the layer's error against float64 exceeds 1e-5 and three times eager float32's.

    What is compared are the outputs, the state after the last step, and in training the gradient of x, of every
    parameter and of the state that it began with, which is not zero here. The layer runs on the whole batch, just as it
    is timed. Where the float64 reference would not fit, it runs on some examples, and the gradient that goes into the
    layer is zero for all others, so that the gradients of the parameters are comparable too.

    Over many steps the gradient hangs on few examples, whose rounding grows by chance: the error of eager float32 is
    five times as large for one x as for another that differs by rounding. So where one x is red, the median errors
    over five such x decide, the layer's and eager's.

    Among the whole models the only other kernel is that of AttentionFW.
    """
    if case.part == "model":
        attention = associative.AssociativeCase(case.steps, ATTENTION_SIZE, batch=case.batch, input_size=CHARACTERS)
        return associative.require_parity(attention)
    problem = GatedProblem(case)
    errors = [_measure_errors(problem, 0)]
    if not _find_red(errors):
        return
    errors += [_measure_errors(problem, draw) for draw in range(1, DRAWS)]
    if red := _find_red(errors):
        name, error, eager = red
        raise parity_error(
            f"{name} at {case} differ from the float64 reference by {error:.1e}, eager float32 by {eager:.1e}"
        )
    logger.info("parity: %s: red for one x, green by the medians over %d that differ by rounding", case, DRAWS)


_Errors = dict[str, tuple[float, float]]  # for each tensor: the layer's error, and eager's


def _find_red(draws: list[_Errors]) -> tuple[str, float, float] | None:
    """Return the first tensor that differs too much, and the two medians; None where none does."""
    for name in draws[0]:
        error, eager = (_median([errors[name][which] for errors in draws]) for which in (0, 1))
        if not error <= allowed_error(eager):  # a NaN is red
            return name, error, eager
    return None


def _median(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def _measure_errors(problem: GatedProblem, draw: int) -> _Errors:
    """Return the errors for x as it is (0), or moved by no more than rounding."""
    case, layer = problem.case, problem.layer
    some = choose_examples(case.batch, 4 * 8 * case.steps * case.matrix_numbers)
    double = GatedFastWeightsRNN(
        case.input_size, case.hidden_size, slow_inner_size=case.inner_size, impl="reference", dtype=torch.float64
    )
    double.load_state_dict(layer.state_dict())
    # A state within -1 and 1, as it stays; the gradients come from the outputs and from the last state. Batch first.
    x, grad = problem.x.transpose(0, 1), problem.grad[..., : case.hidden_size].transpose(0, 1)
    inputs = [x, *(torch.tanh(leaf) for leaf in _draw_state(case, 1))]
    grads = [grad, *_draw_state(case, 2)]
    if draw:
        generator = torch.Generator().manual_seed(draw)
        inputs[0] = inputs[0] + 1e-6 * inputs[0].std() * torch.randn(inputs[0].shape, generator=generator)
    few, few_grads = [tensor[some] for tensor in inputs], [tensor[some] for tensor in grads]
    sparse = [torch.zeros_like(tensor).index_copy(0, some, tensor[some]) for tensor in grads]
    doubles = [tensor.double() for tensor in few], [tensor.double() for tensor in few_grads]
    exact = _differentiate(double, *doubles, case.mode)
    eager = _differentiate(problem.plain, few, few_grads, case.mode)
    ours = _differentiate(layer, inputs, sparse, case.mode)
    shared = {f"the gradient of {name}" for name, _ in layer.named_parameters()}
    ours = {name: value if name in shared else value[some] for name, value in ours.items()}
    return {name: (distance(ours[name], true), distance(eager[name], true)) for name, true in exact.items()}


def _draw_state(case: GatedCase, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(case.batch, *shape, generator=generator) for shape in case.state_shapes]


def _differentiate(
    layer: GatedFastWeightsRNN, inputs: list[Tensor], grads: list[Tensor], mode: str
) -> dict[str, Tensor]:
    """Return the outputs, the last state, and in training the gradient of every input; tensors are batch first."""
    names = ["the outputs", *(f"the last {name}" for name in _STATE)]
    training = mode == "training"
    x, *state = (tensor.clone().requires_grad_(training) for tensor in inputs)
    with torch.inference_mode(not training):
        y, after = layer(x.transpose(0, 1).contiguous(), GatedFastWeightsState(*state))
    assert isinstance(y, Tensor)
    results = [y.transpose(0, 1), *after]
    tensors = {name: tensor.detach() for name, tensor in zip(names, results, strict=True)}
    if not training:
        return tensors
    initial = (f"the initial {name}" for name in _STATE)
    leaves = {"x": x, **dict(zip(initial, state, strict=True)), **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(results, list(leaves.values()), grads)
    return tensors | {f"the gradient of {name}": tensor for name, tensor in zip(leaves, gradients, strict=True)}


def lines(case: GatedCase) -> list[Line]:
    """Return the line that is printed for a pass of the layer, or the lines of the models."""
    sizes = ("threads", 7, "threads"), ("T", 5, "steps")
    if case.part == "layer":
        times = (
            ("ours", 9, show(OURS)),
            ("eager", 9, show(EAGER)),
            ("compiled", 9, show(*COMPILED)),
            ("LSTM", 9, show(LSTM)),
        )
        ratios = ("ours/LSTM", 10, show_ratio(OURS, LSTM)), ("eager/ours", 10, show_ratio(EAGER, OURS))
        more = ("compiled/ours", 13, show_ratio(COMPILED, OURS)), ("starts/ours", 11, show_ratio(STARTS, OURS))
        return [[*sizes, ("H", 4, "hidden_size"), ("mode", 9, "mode"), *times, *ratios, *more]]
    return [
        [
            *sizes,
            ("model", 13, lambda *_, name=name: name),
            ("parameters", 10, lambda *_, name=name: f"{case.parameters(name):,}"),
            ("ms a step", 9, show(name)),
            ("of LSTM's", 9, show_ratio(name, LSTM)),
            ("paper", 9, lambda *_, name=name: f"{PAPER_MINUTES[name] / PAPER_MINUTES[LSTM]:.1f}"),
        ]
        for name in MODELS
    ]


TIMES: Columns = (
    ("pass", "mode"),
    ("threads", "threads"),
    ("T", "steps"),
    ("H", "hidden_size"),
    ("fastweights", show(OURS)),
    ("`torch.nn.LSTM`", show(LSTM)),
    ("eager", show(EAGER)),
    ("best `torch.compile`", show(*COMPILED)),
    ("ours / LSTM", show_ratio(OURS, LSTM)),
    ("faster than eager", show_ratio(EAGER, OURS, 1, " times")),
    ("faster than compiled", show_ratio(COMPILED, OURS, 1, " times")),
)


def _show_states(row: Mapping[str, Any], values: Mapping[str, float], *, without: bool = False) -> str:
    case = GatedCase(
        int(row["steps"]), int(row["hidden_size"]), batch=int(row["batch"]), input_size=int(row["input_size"])
    )
    states = 2 * 4 * case.batch * case.matrix_numbers / 2**20
    return number(values[OURS] - states if without else states, digits=1)


PEAKS: Columns = (
    ("T", "steps"),
    ("H", "hidden_size"),
    ("fastweights", show(OURS, digits=1)),
    ("its fast matrices in and out", _show_states),
    ("fastweights without them", functools.partial(_show_states, without=True)),
    ("eager", show(EAGER, digits=1)),
    ("`torch.nn.LSTM`", show(LSTM, digits=1)),
    ("of eager's", show_ratio(OURS, EAGER, 3)),
)


def layers_table(rows: list[Row]) -> str:
    """Return a table of a pass of the layer beside its rivals."""
    rows = last_measured([row for row in rows if row["part"] == "layer"])
    sizes = {(int(row["hidden_size"]), int(row["units"])) for row in rows if row["rival"] == LSTM}
    units = ", ".join(f"{units} for H = {size}" for size, units in sorted(sizes))
    title = heading(rows[-1], "Milliseconds, the median, in float32")
    return f"{title}Units of the LSTM: {units}.\n\n{table(rows, TIMES, words=MODES)}{left_out(rows)}"


def models_table(rows: list[Row]) -> str:
    """Return a table of a training step of each whole model, as ratios beside those of the paper's table 2."""
    rows = last_measured([row for row in rows if row["part"] == "model"])
    sizes = {row["rival"]: [row["units"], f"{int(row['parameters']):,}"] for row in rows}
    times = {key: published.measured(of_case) for key, of_case in published.group(rows, ("steps", "threads")).items()}
    headings = ["model", "units", "parameters", "paper, minutes", "paper, of the LSTM's"]
    for steps, threads in times:
        headings += [f"T = {steps}, {threads} thread{'s' * (threads != '1')}: ms", "of the LSTM's"]
    cells = []
    for name in MODELS:
        minutes = PAPER_MINUTES[name]
        line = [name, *sizes[name], str(minutes), f"{minutes / PAPER_MINUTES[LSTM]:.1f}"]
        for values in times.values():
            line += [number(values[name]), f"{values[name] / values[LSTM]:.2f}"]
        cells.append(line)
    return f"{heading(rows[-1], 'Milliseconds of a training step, the median')}\n{published.markdown(headings, cells)}"


def peaks_table(rows: list[Row]) -> str:
    """Return a table of the newest peaks of memory, and how much of ours is the states that go in and out."""
    rows = last_measured([row for row in rows if row["part"] == "layer"])
    return f"{heading(rows[-1], 'Peak memory in MiB')}\n{table(rows, PEAKS, 'mebibytes')}{left_out(rows)}"
