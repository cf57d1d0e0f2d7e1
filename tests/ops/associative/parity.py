"""The cases that cover every path of the kernel, and what the kernel and the reference give for them.

As a program (`python -m tests.ops.associative.parity`) it runs a few of them: for what can only be chosen before the
library loads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.associative import Constants, Inputs, cpu, reference

from ..parity import DOUBLE, DRAWS, SINGLE, check_parity, error

INPUTS = ("drive", "weight_hh", "norm_weight", "norm_bias", "hidden", "memory", "strengths")
FIXED = ("lengths", "starts", "clears")
Tensors = dict[str, Any]  # all of these, None for one that is left out


@dataclass(frozen=True)
class Case:
    size: int
    steps: int
    batch: int
    inner_steps: int = 1
    nonlinearity: str = "relu"
    norm: str = "norm"  # or "plain", "norm-initial"
    memory: bool = True
    lengths: bool = True
    rate: float | None = None
    starts: bool = False
    control: bool = False  # strengths and clears

    def __str__(self) -> str:
        parts = [f"H{self.size}", f"T{self.steps}", f"B{self.batch}", f"S{self.inner_steps}", self.nonlinearity]
        given = (name for name in ("memory", "lengths", "starts", "control") if getattr(self, name))
        return "-".join([*parts, self.norm, *given])

    @property
    def constants(self) -> Constants:
        # Stronger memories make long runs chaotic: rounding grows until two correct answers have little in common.
        rate = 0.02 if self.norm == "plain" else 1 / (self.size + 2) / (1 if self.inner_steps == 1 else 2)
        rate = rate if self.rate is None else self.rate
        return Constants(0.95, rate, self.inner_steps, self.nonlinearity, self.norm == "norm-initial")

    def inputs(self, seed: int = 0) -> Tensors:
        """Random inputs in float32; without a layer norm so small that the fast matrix stays below one."""
        steps, batch, size = self.steps, self.batch, self.size
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        spread = 1.0 if self.norm != "plain" else size**-0.5
        inputs: Tensors = {
            "drive": spread * normal(steps, batch, size),
            "weight_hh": 0.05 * torch.eye(size) + 0.1 * size**-0.5 * normal(size, size),
            "norm_weight": 1 + 0.2 * normal(size) if self.norm != "plain" else None,
            "norm_bias": 0.2 * normal(size) if self.norm != "plain" else None,
            "hidden": spread * normal(batch, size),
            "memory": 0.3 * size**-0.5 * normal(batch, size, size) if self.memory else None,
            **dict.fromkeys(("strengths", *FIXED)),
        }
        if self.lengths:
            lengths = torch.randint(0, steps + 1, (batch,), generator=generator)
            lengths[batch // 2] = steps
            if batch > 1:
                lengths[0] = 0
            inputs["lengths"] = lengths
        if self.starts:
            starts = torch.rand(steps, batch, generator=generator) < 0.2
            starts[:, -1] = False  # one sequence goes on as before, and one restarts at once
            starts[0, 0] = True
            inputs["starts"] = starts
        if self.control:
            inputs["strengths"] = torch.randn(steps, batch, generator=generator).abs()
            inputs["clears"] = torch.rand(steps, batch, generator=generator) < 0.3
        return inputs


def _cases() -> list[Case]:
    """Every width with every kind of step; sequences, batches, memory and lengths take turns."""
    kinds = [
        *itertools.product((1, 3), ("relu", "tanh"), ("norm", "plain")),
        (1, "relu", "norm-initial"),
        (3, "tanh", "norm-initial"),
    ]
    cases = []
    for i, size in enumerate((1, 3, 20, 50, 63, 100, 200)):
        longer, shorter = size + 11, max(1, size // 4)
        for j, (inner_steps, nonlinearity, norm) in enumerate(kinds):
            # Eager PyTorch keeps the past of every step: where the sequence is long, only a small batch is cheap.
            long = (i + j) % 2 == 0 and size < 200
            most = 2 if long and size == 100 else 3
            batch = (1, 5, 33)[(i + j // 2) % most]
            steps = longer if long else shorter
            memory, lengths = (i + j // 4) % 2 == 0, (i + j // 2 + j) % 2 == 0
            cases.append(Case(size, steps, batch, inner_steps, nonlinearity, norm, memory, lengths))
    return cases


CASES = _cases()
LONG = [
    Case(200, 211, 1, 3),
    *(Case(20, 300, 2), Case(80, 300, 9)),  # past 256 steps the chunks of the matrix form grow
]
STARTS = [
    Case(20, 31, 33, 3, "relu", "norm", starts=True),
    Case(63, 15, 5, 1, "tanh", "norm-initial", memory=False, lengths=False, starts=True, control=True),
    Case(3, 60, 40, 2, "tanh", "plain", lengths=False, starts=True),
    Case(50, 40, 3, 1, "relu", "norm", control=True),
    Case(80, 20, 9, 2, rate=0.005, starts=True, control=True),
]
FEW = [
    Case(20, 31, 33, 3, "relu", "norm"),
    Case(63, 15, 5, 1, "tanh", "norm-initial", memory=False),
    Case(3, 14, 1, 3, "tanh", "plain", lengths=False),
    Case(50, 9, 33, 1, "relu", "plain"),
]
TOGETHER = Case(80, 20, 9, 2, rate=0.005)  # slow weights so large that sequences take their steps together


def gradient_of_outputs(case: Case) -> Tensor:
    return torch.randn(case.steps, case.batch, case.size, generator=torch.Generator().manual_seed(1))


def positional(case: Case, inputs: Tensors, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The arguments of the kernel's functions, and of the reference's."""
    given = (inputs[name] for name in INPUTS)
    tensors = [None if t is None else t.to(dtype) for t in given]
    return Inputs._make((*tensors, *(inputs[name] for name in FIXED))), case.constants


def named(outputs: Tensor, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Results by name, those of inputs that were left out without an entry."""
    pairs = zip(("outputs", *INPUTS), (outputs, *gradients), strict=True)
    return {name: tensor for name, tensor in pairs if tensor is not None}


def eager(case: Case, inputs: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs, and every gradient by the name of its input, of the reference."""
    given, constants = positional(case, inputs, dtype)
    count = len(INPUTS)
    tensors: Any = [None if tensor is None else tensor.detach().requires_grad_() for tensor in given[:count]]
    outputs = reference.recurrence(Inputs(*tensors, *given[count:]), constants)
    outputs.backward(gradient_of_outputs(case).to(dtype))
    return named(outputs.detach(), [None if tensor is None else tensor.grad for tensor in tensors])


def kernel(case: Case, inputs: Tensors, dtype: torch.dtype, form: str) -> dict[str, Tensor]:
    """The same, of the kernel."""
    arguments = positional(case, inputs, dtype)
    outputs, _, trace = cpu.forward(*(*arguments, form, False, True))
    return named(outputs, cpu.backward(gradient_of_outputs(case).to(dtype), outputs, *(*arguments, form, trace)))


def final(case: Case, inputs: Tensors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the matrix form gives: the outputs, and the fast matrix after the last step."""
    outputs, memory, _ = cpu.forward(*(*positional(case, inputs, dtype), "matrix", True))
    return outputs, memory


FORMS = ("attention", "matrix")


def draws(case: Case) -> int:
    """Return as many draws as take a moment: few of a large case, whose norms are of many roundings as it is."""
    return max(2, min(DRAWS, 20_000 // (case.steps * case.batch * case.size * case.inner_steps)))


def floor(case: Case) -> float:
    """Return the least norm to divide an error by.

    The layer norm of a single unit gives its bias whatever it is fed: every gradient but the bias's is zero, up to
    rounding, and has no norm to be measured by. The gradient that comes in has: about one a step.
    """
    return 1.0 if case.size == 1 and case.norm != "plain" else 0.0


def check(case: Case, forms: Sequence[str], draws: int) -> None:
    def run(implementation: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = case.inputs(draw)
        if implementation == "reference":
            return eager(case, inputs, dtype)
        return kernel(case, inputs, dtype, implementation)

    check_parity(run, forms, draws=draws, floor=floor(case))
    if "matrix" in forms:
        for dtype, tolerance in ((torch.float32, SINGLE), (torch.float64, DOUBLE)):
            given, constants = positional(case, case.inputs(), dtype)
            outputs, made = final(case, case.inputs(), dtype)
            expected = reference.final_memory(
                outputs,
                given.hidden,
                given.memory,
                given.lengths,
                constants,
                starts=given.starts,
                strengths=given.strengths,
            ).double()
            off = error(made, expected)
            assert off <= tolerance, f"the final memory in {dtype} is off by {off:.1e}"


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


if __name__ == "__main__":
    for case in (*FEW, TOGETHER, *STARTS):
        check(case, FORMS, draws=1)
    print(_native.STATUS)
