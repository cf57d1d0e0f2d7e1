"""`fastweights bench delta`: the rules of today's models, and our layer, beside what transformers runs on a CPU."""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastweights.bench.parity import MOST_BYTES, allowed_error, distance, parity_error
from fastweights.bench.problems import Calls
from fastweights.bench.published import (
    Cell,
    Columns,
    Row,
    last_of_each,
    last_of_every,
    left_out,
    number,
    places,
    places_of,
    show,
    show_ratio,
    table,
)
from fastweights.bench.rules import (
    GATED,
    KIMI,
    MAMBA,
    MAMBA2,
    MAMBA2_HEADS,
    RULES,
    Function,
    Sizes,
    count_result_numbers,
    describe_state,
)
from fastweights.bench.run import Line, explain_lack_of_memory
from fastweights.nn import FastWeightProgrammer

OURS, LAYER, EAGER, TRANSFORMERS = "fastweights", "fastweights layer", "eager", "transformers"
RIVALS = (OURS, LAYER, EAGER, TRANSFORMERS)
DECODING = "decoding"
MODES = ("training", "inference", DECODING)  # forward plus backward; forward alone; one token after another
TOKENS = 20  # tokens decoded in a call
MOST_EAGER_STEPS = 512  # step by step, a rule takes minutes past them
PARITY_STEPS = 256  # steps compared: four chunks

BASE = ("fastweights", OURS)
COLUMNS = ["rule", "batch", "steps", "heads", "hidden_size", "mode", "rival", "tokens"]
UNIT = "milliseconds of a pass, or of a decoded token"
PER = "tokens"
MEMORY_COLUMNS = COLUMNS


@dataclass(frozen=True)
class DeltaCase:
    """One size in one mode; the default is a layer of Qwen3-Next's size."""

    precision: ClassVar[str] = "float32"
    steps: int = 4096
    mode: str = "training"
    hidden_size: int = 128  # features of a head: `rules.py` says what the Mambas make of it
    batch: int = 1
    heads: int = 16
    rule: str = GATED

    def __str__(self) -> str:
        return f"{self.rule}, T={self.steps}, state={self.state}, {self.mode}"

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch, self.steps, self.heads, self.hidden_size)

    @property
    def state(self) -> str:
        return describe_state(self.rule, self.heads, self.hidden_size)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all sequences in float32."""
        return 4 * torch.Size(RULES[self.rule].state(self.sizes)).numel()

    def tokens(self, rival: str) -> int:
        """Return by how much a call's time is divided."""
        return TOKENS if self.mode == DECODING else 1


@dataclass(frozen=True)
class DeltaSelection:
    """The cases that a run of the command times: passes, and decoding at every size."""

    threads: tuple[int, ...] = (1, 2)
    steps: tuple[int, ...] = (512,)
    hidden_sizes: tuple[int, ...] = (128,)
    modes: tuple[str, ...] = ("training",)
    rounds: int = 15
    memory: bool = False
    batch: int = 1
    budget: float = 60.0  # seconds that the rounds of one case may take, of all rivals together
    rules: tuple[str, ...] = tuple(RULES)

    def cases(self) -> list[DeltaCase]:
        sizes = [*itertools.product(self.modes, self.steps), (DECODING, 1)]
        return [
            DeltaCase(steps, mode, size, self.batch, rule=rule)
            for rule in self.rules
            for mode, steps in sizes
            for size in self.hidden_sizes
        ]

    def memory_cases(self) -> list[DeltaCase]:
        return [case for case in self.cases() if case.mode == "training"]


QUICK = DeltaSelection()
FULL = DeltaSelection(steps=(512, 4096), hidden_sizes=(64, 128), modes=MODES[:2], memory=True)


def count_kept_bytes(case: DeltaCase, rival: str) -> int:
    """Return what a rival keeps for its backward pass; little unless it is said here."""
    if case.mode != "training":
        return 0
    if rival == EAGER:  # three memories of every step
        return 3 * case.state_bytes * case.steps
    if (rival, case.rule) == (TRANSFORMERS, KIMI):  # six numbers for every pair of steps of a chunk and every channel
        return 4 * 6 * 64 * case.batch * case.steps * case.heads * case.hidden_size
    if (rival, case.rule) == (TRANSFORMERS, MAMBA2):  # about nine for every pair of steps of a chunk and every head
        return 4 * 9 * 256 * case.batch * case.steps * MAMBA2_HEADS * case.heads
    return 0


def list_rivals(case: DeltaCase) -> list[str]:
    """Return the rivals that have a case's rule and are installed."""
    rule = RULES[case.rule]
    absent = {LAYER} if rule.layer is None else set()
    if rule.theirs is None or importlib.util.find_spec("transformers") is None:
        absent.add(TRANSFORMERS)
    return [rival for rival in RIVALS if rival not in absent]


def explain_absence(case: DeltaCase, rival: str) -> str | None:
    """Return why a rival is not run; None where it is."""
    slow = rival == EAGER or (rival == TRANSFORMERS and case.rule in (KIMI, MAMBA))
    if slow and case.steps > MOST_EAGER_STEPS:
        return f"takes minutes at more than {MOST_EAGER_STEPS} steps"
    return explain_lack_of_memory(count_kept_bytes(case, rival))


class DeltaProblem:
    """The tensors of one case, the same for every rival."""

    def __init__(self, case: DeltaCase) -> None:
        self.case, self.rule, token = case, RULES[case.rule], case.mode == DECODING
        generator = torch.Generator().manual_seed(case.steps * case.hidden_size)
        draw = functools.partial(torch.randn, generator=generator)
        self.inputs = self.rule.draw(draw, case.sizes, token)
        self.grads = [draw(self.rule.outputs(case.sizes, token)), draw(self.rule.state(case.sizes))]
        self.x, self.grad_x = (draw(case.batch, case.steps, case.heads * case.hidden_size) for _ in range(2))

    def call(self, rival: str) -> Callable[[], None]:
        """Return a pass of a rival, or its decoding of some tokens."""
        if rival == LAYER:
            return self._call_layer()
        rule, inputs = find_rule(self.case, rival), self.inputs
        if self.case.mode == DECODING:
            return self._decode(lambda state: rule(*inputs[:-1], state)[1], inputs[-1])
        return self._pass(rule, inputs, self.grads)

    def _call_layer(self) -> Callable[[], None]:
        case = self.case
        assert self.rule.layer is not None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            options: dict[str, Any] = {"rule": self.rule.layer, "batch_first": True}
            layer = FastWeightProgrammer(case.heads * case.hidden_size, case.heads, **options)
        if case.mode == DECODING:
            with torch.no_grad():
                _, state = layer(self.x)
            return self._decode(lambda state: layer(self.x, state)[1], state)
        return self._pass(lambda x, *_: layer(x), [self.x, *layer.parameters()], [self.grad_x])

    def _pass(
        self, forward: Callable[..., tuple[Any, Any]], inputs: list[Tensor], grads: list[Tensor]
    ) -> Callable[[], None]:
        """Return a forward pass, and in training the gradients of all inputs."""
        if self.case.mode == "inference":

            def infer() -> None:
                with torch.inference_mode():
                    forward(*inputs)

            return infer
        inputs = [tensor.requires_grad_() for tensor in inputs]

        def train() -> None:
            results = forward(*inputs)[: len(grads)]
            torch.autograd.grad(results, inputs, grads)

        return train

    def _decode(self, step: Callable[[Any], Any], start: Any) -> Callable[[], None]:
        own = start.clone() if isinstance(start, Tensor) else start  # a step of the Mambas changes its state in place

        def decode() -> None:
            state = own
            with torch.inference_mode():
                for _ in range(TOKENS):
                    state = step(state)

        return decode


def find_rule(case: DeltaCase, rival: str) -> Function:
    """Return the rule of a rival; transformers, and ours of the Mambas, have another function for a token."""
    rule, token = RULES[case.rule], case.mode == DECODING
    if rival == TRANSFORMERS:
        assert rule.theirs is not None
        return rule.theirs(token)
    return rule.ours(token, "reference" if rival == EAGER else "auto")


def require_parity(case: DeltaCase) -> None:
    """Raise FastWeightsError where a rule's error against float64 exceeds 1e-5 and three times eager float32's.

    What is compared are the outputs, the last state, and in training the gradients of all inputs, over the first 256
    steps, and for as many heads as the float64 reference has room for: a head knows nothing of the others. The layer
    calls the rule that is compared.
    """
    steps = min(case.steps, PARITY_STEPS)
    kept = 8 * 4 * steps * case.state_bytes // (4 * case.heads)
    case = replace(case, steps=steps, heads=min(case.heads, max(1, MOST_BYTES // kept)))
    problem = DeltaProblem(case)
    inputs, grads = problem.inputs, problem.grads
    exact = _differentiate(case, EAGER, [tensor.double() for tensor in inputs], grads)
    eager = _differentiate(case, EAGER, inputs, grads)
    for rival in {OURS, TRANSFORMERS}.intersection(list_rivals(case)):
        values = _differentiate(case, rival, inputs, grads)
        for name, true in exact.items():
            error, other = distance(values[name], true), distance(eager[name], true)
            if not error <= allowed_error(other):  # a NaN is red
                raise parity_error(
                    f"{name} of {rival} at {case} differ from the float64 reference by {error:.1e}, eager float32 by "
                    f"{other:.1e}"
                )


def _differentiate(case: DeltaCase, rival: str, inputs: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    """Return the outputs, the last state, and in training the gradient of every input."""
    training = case.mode == "training"
    # Without gradients as they are timed: a copy of an expanded tensor is none. The state may change in place.
    copies = [tensor.clone().requires_grad_() for tensor in inputs] if training else [*inputs[:-1], inputs[-1].clone()]
    results = find_rule(case, rival)(*copies)
    tensors = {"the outputs": results[0].detach(), "the last state": results[1].detach()}
    if training:
        gradients = torch.autograd.grad(results, copies, [grad.to(copies[0].dtype) for grad in grads])
        pairs = zip(RULES[case.rule].names, gradients, strict=False)  # a pass of Mamba has no initial state
        tensors |= {f"the gradients of {name}": gradient for name, gradient in pairs}
    return tensors


def rivals(case: DeltaCase, selection: DeltaSelection) -> tuple[Calls, dict[str, str]]:
    """Return the call of every rival that can run here, and why the others cannot."""
    installed = list_rivals(case)
    skipped = {rival: reason for rival in installed if (reason := explain_absence(case, rival))}
    problem = DeltaProblem(case)
    return {rival: problem.call(rival) for rival in installed if rival not in skipped}, skipped


def prepare_pass(case: DeltaCase, rival: str) -> Callable[[], None]:
    """Return the pass of a rival whose peak memory is measured, after a tiny one has warmed the libraries."""
    DeltaProblem(DeltaCase(2, case.mode, 4, 1, 2, case.rule)).call(rival)()
    return DeltaProblem(case).call(rival)


def lines(case: DeltaCase) -> list[Line]:
    """Return the line that is printed for a case."""
    sizes = (
        ("rule", 11, "rule"),
        ("threads", 7, "threads"),
        ("T", 6, "steps"),
        ("state", 14, "state"),
        ("mode", 9, "mode"),
    )
    times = ("ours", 9, show(OURS)), ("layer", 9, show(LAYER)), ("eager", 9, show(EAGER))
    more = ("transformers", 12, show(TRANSFORMERS)), ("transformers/ours", 17, show_ratio(TRANSFORMERS, OURS))
    return [[*sizes, *times, *more]]


def count_result_bytes(case: DeltaCase) -> int:
    """Return the bytes of what a training pass returns: outputs, last state, and the gradients of all inputs."""
    return 4 * count_result_numbers(case.rule, case.sizes)


def _show(rival: str) -> Cell:
    """Return a cell of a time: a token takes a fraction of a millisecond."""
    return lambda row, values: show(rival, digits=3 if row["mode"] == DECODING else 1)(row, values)


def _case_of(row: Mapping[str, str]) -> DeltaCase:
    steps, size, batch, heads = (int(row[name]) for name in ("steps", "hidden_size", "batch", "heads"))
    return DeltaCase(steps, row["mode"], size, batch, heads, row["rule"])


def _show_state(row: Mapping[str, str], _: Mapping[str, float]) -> str:
    return _case_of(row).state


def _show_results(row: Mapping[str, str], _: Mapping[str, float]) -> str:
    return number(count_result_bytes(_case_of(row)) / 2**20, 0)


TIMES: Columns = (
    ("rule", "rule"),
    ("mode", "mode"),
    ("threads", "threads"),
    ("T", "steps"),
    ("features", "hidden_size"),
    ("state", _show_state),
    ("instructions", "kernel"),
    ("fastweights", _show(OURS)),
    ("its layer", _show(LAYER)),
    ("eager", _show(EAGER)),
    ("transformers", _show(TRANSFORMERS)),
    ("faster than transformers", show_ratio(TRANSFORMERS, OURS, 1, " times")),
)
PEAKS: Columns = (
    ("rule", "rule"),
    ("T", "steps"),
    ("features", "hidden_size"),
    ("state", _show_state),
    ("fastweights", show(OURS, digits=0)),
    ("its outputs and gradients", _show_results),
    ("its layer", show(LAYER, digits=0)),
    ("eager", show(EAGER, digits=0)),
    ("transformers", show(TRANSFORMERS, digits=0)),
)


def times_table(rows: list[Row]) -> str:
    """Return a table of the rules and the layer beside plain PyTorch and transformers."""
    levels = last_of_each(rows, "rule", tuple(RULES))
    newest = [row for of_level in levels.values() for row in of_level]
    what = "Milliseconds of a pass or of a decoded token, the median, in float32"
    title = f"{what}; batch {newest[-1]['batch']}. {places(levels, 'rule')}.\n"
    return f"{title}\n{table(newest, TIMES, words=(*RULES, *MODES, *levels))}{left_out(newest, _SIZES)}"


def peaks_table(rows: list[Row]) -> str:
    """Return a table of the newest peaks of memory of each rule."""
    newest = last_of_every(rows, "rule", tuple(RULES))
    what = "Peak memory of a training pass in MiB, beyond the inputs"
    title = f"{what}; batch {newest[-1]['batch']}; {places_of(newest, 'rule')}.\n"
    return f"{title}\n{table(newest, PEAKS, 'mebibytes', words=tuple(RULES))}{left_out(newest, _SIZES)}"


_SIZES = {"rule": "rule", "T": "steps", "features": "hidden_size"}
