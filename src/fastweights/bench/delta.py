"""`fastweights bench delta`: gated delta rules, and the layer around one, beside what transformers runs on a CPU."""

import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastweights.bench.parity import MOST_BYTES, allowed_error, distance, parity_error
from fastweights.bench.problems import Calls
from fastweights.bench.published import (
    Cell,
    Columns,
    Row,
    last_measured,
    last_of_each,
    left_out,
    number,
    place,
    places,
    show,
    show_ratio,
    table,
)
from fastweights.bench.run import Line, explain_lack_of_memory
from fastweights.nn import FastWeightProgrammer
from fastweights.ops.delta import gated_delta_rule

OURS, LAYER, EAGER, TRANSFORMERS = "fastweights", "fastweights layer", "eager", "transformers"
RIVALS = (OURS, LAYER, EAGER, TRANSFORMERS)
GATED, KIMI = "gated delta", "Kimi delta"  # a decay for each head; for each channel of its keys
RULES = (GATED, KIMI)
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
MEMORY_RIVALS = RIVALS

# (q, k, v, g, beta, state) -> the outputs and the last state
Rule = Callable[..., tuple[Tensor, Tensor]]
_NAMES = ("q", "k", "v", "g", "beta", "the initial state")


@dataclass(frozen=True)
class DeltaCase:
    """One size in one mode; the default is a layer of Qwen3-Next's size."""

    precision: ClassVar[str] = "float32"
    steps: int = 4096
    mode: str = "training"
    hidden_size: int = 128  # K and V of a head
    batch: int = 1
    heads: int = 16
    rule: str = GATED

    def __str__(self) -> str:
        return f"{self.rule}, T={self.steps}, K=V={self.hidden_size}, {self.mode}"

    @property
    def state_bytes(self) -> int:
        """Bytes of all heads' memories in float32."""
        return 4 * self.batch * self.heads * self.hidden_size**2

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
    rules: tuple[str, ...] = RULES

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
    return 0


def list_rivals() -> list[str]:
    """Return the rivals that are installed: all, or all but transformers."""
    return [rival for rival in RIVALS if rival != TRANSFORMERS or importlib.util.find_spec("transformers")]


def explain_absence(case: DeltaCase, rival: str) -> str | None:
    """Return why a rival is not run; None where it is."""
    if case.steps > MOST_EAGER_STEPS and (rival == EAGER or (rival, case.rule) == (TRANSFORMERS, KIMI)):
        return f"takes minutes at more than {MOST_EAGER_STEPS} steps"
    return explain_lack_of_memory(count_kept_bytes(case, rival))


class DeltaProblem:
    """The tensors of one case, the same for every rival: keys and queries of length one, gates of sigmoids."""

    def __init__(self, case: DeltaCase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.steps * case.hidden_size)
        draw = functools.partial(torch.randn, generator=generator)
        shape = (case.batch, case.steps, case.heads)
        q, k, v, grad = (draw(*shape, case.hidden_size) for _ in range(4))
        q, k = (torch.nn.functional.normalize(tensor, dim=-1) for tensor in (q, k))
        g = torch.nn.functional.logsigmoid(draw((*shape, case.hidden_size) if case.rule == KIMI else shape) + 4)
        state, grad_state = (draw(case.batch, case.heads, case.hidden_size, case.hidden_size) for _ in range(2))
        self.inputs = [q, k, v, g, draw(shape).sigmoid(), state]
        self.grads = [grad, grad_state]
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
        with torch.random.fork_rng():
            torch.manual_seed(0)
            rule = {GATED: "gated_delta", KIMI: "kda"}[case.rule]
            layer = FastWeightProgrammer(case.heads * case.hidden_size, case.heads, rule=rule, batch_first=True)
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
        def decode() -> None:
            state = start
            with torch.inference_mode():
                for _ in range(TOKENS):
                    state = step(state)

        return decode


def find_rule(case: DeltaCase, rival: str) -> Rule:
    """Return the rule of a rival; transformers has another function for a token than for a pass."""
    if rival == TRANSFORMERS:
        model, names = {
            GATED: ("qwen3_next", ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")),
            KIMI: ("kimi_linear", ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")),
        }[case.rule]
        theirs = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        # Where flash-linear-attention is installed, the name alone may stand for its kernel.
        function = inspect.unwrap(getattr(theirs, names[case.mode == DECODING]))
        return lambda q, k, v, g, beta, state: function(q, k, v, g, beta, initial_state=state, output_final_state=True)
    impl = "reference" if rival == EAGER else "auto"

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, end = gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, impl=impl)
        assert end is not None
        return outputs, end

    return rule


def require_parity(case: DeltaCase) -> None:
    """Raise FastWeightsError where a rule's error against float64 exceeds 1e-5 and three times eager float32's.

    What is compared are the outputs, the last state, and in training the gradients of all inputs, over the first 256
    steps, and for as many heads as the float64 reference has room for: a head knows nothing of the others. The layer
    calls the rule that is compared.
    """
    problem = DeltaProblem(case)
    steps = min(case.steps, PARITY_STEPS)
    kept = 8 * 4 * steps * case.batch * case.hidden_size**2
    heads = min(case.heads, max(1, MOST_BYTES // kept))
    q, k, v, g, beta = (tensor[:, :steps, :heads] for tensor in problem.inputs[:-1])
    inputs = [q, k, v, g, beta, problem.inputs[-1][:, :heads]]
    grads = [problem.grads[0][:, :steps, :heads], problem.grads[1][:, :heads]]
    reference = find_rule(case, EAGER)
    exact = _differentiate(reference, [tensor.double() for tensor in inputs], grads, case.mode)
    eager = _differentiate(reference, inputs, grads, case.mode)
    for rival in {OURS, TRANSFORMERS}.intersection(list_rivals()):
        values = _differentiate(find_rule(case, rival), inputs, grads, case.mode)
        for name, true in exact.items():
            error, other = distance(values[name], true), distance(eager[name], true)
            if not error <= allowed_error(other):  # a NaN is red
                raise parity_error(
                    f"{name} of {rival} at {case} differ from the float64 reference by {error:.1e}, eager float32 by "
                    f"{other:.1e}"
                )


def _differentiate(rule: Rule, inputs: list[Tensor], grads: list[Tensor], mode: str) -> dict[str, Tensor]:
    """Return the outputs, the last state, and in training the gradient of every input."""
    training = mode == "training"
    inputs = [tensor.clone().requires_grad_(training) for tensor in inputs]
    results = rule(*inputs)
    tensors = {"the outputs": results[0].detach(), "the last state": results[1].detach()}
    if training:
        gradients = torch.autograd.grad(results, inputs, [grad.to(inputs[0].dtype) for grad in grads])
        pairs = zip(_NAMES, gradients, strict=True)
        tensors |= {f"the gradients of {name}": gradient for name, gradient in pairs}
    return tensors


def rivals(case: DeltaCase, selection: DeltaSelection) -> tuple[Calls, dict[str, str]]:
    """Return the call of every rival that can run here, and why the others cannot."""
    installed = list_rivals()
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
        ("K", 4, "hidden_size"),
        ("mode", 9, "mode"),
    )
    times = ("ours", 9, show(OURS)), ("layer", 9, show(LAYER)), ("eager", 9, show(EAGER))
    more = ("transformers", 12, show(TRANSFORMERS)), ("transformers/ours", 17, show_ratio(TRANSFORMERS, OURS))
    return [[*sizes, *times, *more]]


def count_result_bytes(case: DeltaCase) -> int:
    """Return the bytes of what a training pass returns: outputs, last state, and the gradients of all inputs."""
    steps = case.batch * case.steps * case.heads
    decays = case.hidden_size if case.rule == KIMI else 1
    return 4 * (4 * steps * case.hidden_size + steps + decays * steps) + 2 * case.state_bytes


def _show(rival: str) -> Cell:
    """Return a cell of a time: a token takes a fraction of a millisecond."""
    return lambda row, values: show(rival, digits=3 if row["mode"] == DECODING else 1)(row, values)


def _show_results(row: Mapping[str, str], _: Mapping[str, float]) -> str:
    steps, size, batch, heads = (int(row[name]) for name in ("steps", "hidden_size", "batch", "heads"))
    return number(count_result_bytes(DeltaCase(steps, row["mode"], size, batch, heads, row["rule"])) / 2**20, 0)


TIMES: Columns = (
    ("rule", "rule"),
    ("mode", "mode"),
    ("threads", "threads"),
    ("T", "steps"),
    ("K = V", "hidden_size"),
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
    ("K = V", "hidden_size"),
    ("fastweights", show(OURS, digits=0)),
    ("its outputs and gradients", _show_results),
    ("its layer", show(LAYER, digits=0)),
    ("eager", show(EAGER, digits=0)),
    ("transformers", show(TRANSFORMERS, digits=0)),
)


def times_table(rows: list[Row]) -> str:
    """Return a table of the rules and the layer beside plain PyTorch and transformers."""
    levels = last_of_each(rows)
    rows = [row for of_level in levels.values() for row in of_level]
    what = "Milliseconds of a pass or of a decoded token, the median, in float32"
    title = f"{what}; batch {rows[-1]['batch']}, {rows[-1]['heads']} heads. {places(levels)}.\n"
    cells = table(rows, TIMES, words=(*RULES, *MODES, *levels))
    return f"{title}\n{cells}{left_out(rows, _SIZES)}"


def peaks_table(rows: list[Row]) -> str:
    """Return a table of the newest peaks of memory."""
    rows = last_measured(rows)
    last = rows[-1]
    what = "Peak memory of a training pass in MiB, beyond the inputs"
    title = f"{what}; batch {last['batch']}, {last['heads']} heads; {place(last)}.\n"
    return f"{title}\n{table(rows, PEAKS, 'mebibytes', words=RULES)}{left_out(rows, _SIZES)}"


_SIZES = {"rule": "rule", "T": "steps", "K": "hidden_size"}
