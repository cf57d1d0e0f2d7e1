"""Sequences packed into one row give what each gives by itself, and bounds that are none are refused."""

from typing import Any

import pytest
import torch

from fastweights.ops.delta import gated_delta_rule

from ..parity import error, needs_kernel
from .cases import RULES, Case

LENGTHS = (1, 70, 0, 64, 3, 130)  # some shorter than a chunk, some longer, one of no steps
CASES = [
    *(Case(rule, sum(LENGTHS), 6, 5, batch=1) for rule in RULES),
    *(Case(rule, sum(LENGTHS), 6, 5, batch=1, channels=True) for rule in ("decay", "gated_delta")),
    Case("gated_delta", sum(LENGTHS), 6, 5, batch=1, initial=False),
    Case("gated_delta", sum(LENGTHS), 6, 5, batch=1, heads=6, key_heads=2),
    Case("decay", sum(LENGTHS), 6, 5, batch=1, heads=6, key_heads=2, weighed=True),
]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpu", marks=needs_kernel)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_sequences_are_separate_ones(case: Case, impl: str) -> None:
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
    if case.initial:
        tensors["initial_state"] = draw(len(LENGTHS), case.heads, case.keys, case.values)
    for tensor in tensors.values():
        tensor.requires_grad_()
    starts = torch.zeros(1, case.steps, dtype=torch.bool)
    starts[:, 100] = True
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0)
    rule = RULES[case.rule]
    packed = rule(**tensors, cu_seqlens=bounds, starts=starts, output_final_state=True, impl=impl)
    outputs, states = [], []
    for index, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        own = {
            name: tensor if name == "skip" else tensor[:, start:end]
            for name, tensor in tensors.items()
            if name != "initial_state"
        }
        if case.initial:
            own["initial_state"] = tensors["initial_state"][index : index + 1]
        if start == end:
            states.append(own.get("initial_state", torch.zeros(1, case.heads, case.keys, case.values).double()))
            continue
        output, state = rule(**own, starts=starts[:, start:end], output_final_state=True, impl=impl)
        outputs.append(output)
        states.append(state)
    separate = (torch.cat(outputs, 1), torch.cat(states))
    grads = [draw(*result.shape, seed=1) for result in packed]
    inputs = list(tensors.values())
    gradients = [torch.autograd.grad(results, inputs, grads) for results in (packed, separate)]
    for mine, true in zip((*packed, *gradients[0]), (*separate, *gradients[1]), strict=True):
        assert error(mine.detach(), true.detach()) < 1e-13


@needs_kernel
def test_packed_sequences_in_compiled_and_twice_differentiated_code() -> None:
    case = Case("gated_delta", 5, 2, 2, batch=1, initial=False, channels=True)
    tensors = [torch.from_numpy(array).requires_grad_() for array in case.inputs().values()]
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)

    def run(*values: torch.Tensor) -> Any:
        return gated_delta_rule(*values, cu_seqlens=bounds, output_final_state=True)

    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(*tensors), run(*tensors))


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpu", marks=needs_kernel)])
@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([0, 3, 2, 5], r"cu_seqlens must ascend from 0 to the number of steps, 5 here, got \[0, 3, 2, 5\]"),
        ([0, 3], "must ascend from 0 to the number of steps, 5 here"),
        ([0, 3, 7], "must ascend from 0 to the number of steps, 5 here"),
        ([1, 5], "must ascend from 0 to the number of steps, 5 here"),
        ([-4, 5], "must ascend from 0 to the number of steps, 5 here"),
        ([5], r"cu_seqlens must hold the start of each packed sequence and the end of the last, got shape \[1\]"),
        ([[0, 5]], r"cu_seqlens must hold .* got shape \[1, 2\]"),
    ],
)
def test_bounds_that_are_none_are_refused(bounds: list[int], words: str, impl: str) -> None:
    tensors: dict[str, Any] = {
        name: torch.from_numpy(array) for name, array in Case("gated_delta", 5, batch=1, initial=False).inputs().items()
    }
    with pytest.raises(ValueError, match=words):
        gated_delta_rule(**tensors, cu_seqlens=torch.tensor(bounds), impl=impl)


def test_what_does_not_go_with_packed_sequences_is_refused() -> None:
    one, two = (
        {name: torch.from_numpy(array) for name, array in Case("gated_delta", 5, batch=batch).inputs().items()}
        for batch in (1, 2)
    )
    bounds: Any = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="sequences packed into one row, B = 1, got a batch of 2"):
        gated_delta_rule(**two, cu_seqlens=bounds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cu_seqlens already say how long each sequence is: leave lengths out"):
        gated_delta_rule(**one, cu_seqlens=bounds, lengths=torch.tensor([5]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"initial_state must be \[N,H,K,V\], \[2, 2, 5, 4\] here, got \[1, 2, 5, 4\]"):
        gated_delta_rule(**one, cu_seqlens=bounds)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cu_seqlens must be int64 or int32 on cpu, got torch\.float32"):
        gated_delta_rule(**one, cu_seqlens=bounds.float())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cu_seqlens must be a tensor, got a list"):
        gated_delta_rule(**one, cu_seqlens=[0, 5])  # type: ignore[arg-type]
