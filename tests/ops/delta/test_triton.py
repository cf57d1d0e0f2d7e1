"""The Triton kernels of the delta family: parity with the reference, in the interpreter and on a GPU (`gpu`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import nn
from fastweights.errors import KernelError
from fastweights.ops.delta import dplr_delta_rule, gated_delta_rule, simple_gla
from fastweights.ops.delta import triton as kernel

from ..parity import check_parity
from ..triton_here import child, poisoned, skip_unless_available
from .cases import Case, run
from .parity import CASES as LARGE

# The interpreter takes about 5 ms for a step of one head of one sequence, forwards and backwards: few small cases, and
# of those the default tests have the ones with most parts.
in_detail = pytest.mark.slow
CASES = [
    Case("gated_delta", 5, ragged=True, restarted=True, channels=True),
    Case("decay", 5, heads=2, key_heads=1, weighed=True, ragged=True),
    Case("delta", 1, initial=False, heads=1),
    pytest.param(Case("gated_delta", 66, ragged=True, restarted=True, heads=1), marks=in_detail),
    pytest.param(Case("gated_delta", 66, 3, 2, batch=1, heads=4, key_heads=2, channels=True), marks=in_detail),
    pytest.param(Case("sum", 65, 17, 3, batch=1, heads=1), marks=in_detail),
    pytest.param(Case("decay", 9, 20, 18, restarted=True, channels=True, strongest=80.0), marks=in_detail),
    pytest.param(Case("gated_delta", 6, 40, 270, batch=1, heads=1), marks=in_detail),  # three slices of the values
]


def check(case: Case, device: str, draws: int) -> None:
    def compute(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(case, dtype, impl, draw, device)

    check_parity(compute, ["triton"], draws=draws)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case, device: str) -> None:
    check(case, device, 1 if device == "cpu" else 32)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in LARGE if case.rule != "dplr"], ids=str)
def test_parity_of_larger_cases(case: Case) -> None:
    skip_unless_available("cuda")
    check(case, "cuda", 32)


def test_some_heads_after_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("gated_delta", 3, batch=3, heads=3, channels=True)
    whole = run(case, torch.float64, "triton", device=device)
    monkeypatch.setattr(kernel, "ROOM", 4 * 64 * 5 * 4 * 8)  # of four
    for name, tensor in run(case, torch.float64, "triton", device=device).items():
        assert torch.equal(tensor, whole[name]), name


def packed(impl: str, device: str, bounds: tuple[int, ...]) -> list[Tensor]:
    arrays = replace(Case("gated_delta", 70, channels=True, batch=1), initial=False).inputs()
    tensors: dict[str, Any] = {
        name: torch.from_numpy(array).to(device).requires_grad_() for name, array in arrays.items()
    }
    state = torch.linspace(-1, 1, 4 * 2 * 5 * 4, dtype=torch.float64, device=device).view(4, 2, 5, 4).requires_grad_()
    outputs, last = gated_delta_rule(
        **tensors,
        initial_state=state,
        cu_seqlens=torch.tensor(bounds, device=device),
        output_final_state=True,
        impl=impl,
    )
    assert last is not None
    gradients = torch.autograd.grad(outputs.sin().sum() + last.cos().sum(), [*tensors.values(), state])
    return [tensor.detach().cpu() for tensor in (outputs, last, *gradients)]


def test_packed_sequences(device: str) -> None:
    for mine, true in zip(*(packed(impl, device, (0, 1, 1, 66, 70)) for impl in ("triton", "reference")), strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-12)


@in_detail
@pytest.mark.filterwarnings("ignore:Deterministic behavior")
def test_results_do_not_depend_on_what_memory_held(device: str) -> None:
    case = Case("gated_delta", 5, ragged=True, restarted=True, channels=True)
    clean = run(case, torch.float32, "triton", device=device)
    with poisoned():
        dirty = run(case, torch.float32, "triton", device=device)
    for name, tensor in clean.items():
        assert torch.equal(tensor, dirty[name]), name


def test_padding_reaches_nothing(device: str) -> None:
    tensors: dict[str, Any] = {
        name: torch.from_numpy(array).to(device) for name, array in Case("gated_delta", 4, heads=1).inputs().items()
    }
    lengths = torch.tensor([0, 2], device=device)
    expected = gated_delta_rule(**tensors, lengths=lengths, output_final_state=True, impl="triton")
    past = torch.arange(4, device=device) >= lengths.unsqueeze(1)
    for name in ("q", "k", "v", "g", "beta"):
        fill = past.view(2, 4, *[1] * (tensors[name].dim() - 2))
        tensors[name] = tensors[name].masked_fill(fill, torch.nan).requires_grad_()
    outputs, state = gated_delta_rule(**tensors, lengths=lengths, output_final_state=True, impl="triton")
    torch.testing.assert_close((outputs, state), expected, rtol=0, atol=0)
    assert state is not None
    assert (outputs[past] == 0).all()
    for gradient in torch.autograd.grad(outputs.sum() + state.sum(), [tensors[name] for name in ("q", "v", "g")]):
        assert gradient.isfinite().all()
        assert (gradient[past] == 0).all()


def test_no_sequences(device: str) -> None:
    q = torch.zeros(0, 3, 2, 4, requires_grad=True, device=device)
    outputs, _ = gated_delta_rule(q, q, q, None, None, impl="triton")
    assert torch.autograd.grad(outputs.sum(), q)[0].shape == q.shape


def test_numbers_out_of_range_are_refused_where_they_can_be_looked_at() -> None:
    skip_unless_available("cpu")
    x = torch.randn(1, 3, 1, 2)
    with pytest.raises(ValueError, match=r"g must be logs of decays, at most 0, got 0\.5"):
        gated_delta_rule(x, x, x, torch.full((1, 3, 1), 0.5), None, impl="triton")
    with pytest.raises(ValueError, match="cu_seqlens"):
        simple_gla(x, x, x, None, cu_seqlens=torch.tensor([0, 2, 1, 3]), impl="triton")


def test_what_it_cannot_compute_is_told() -> None:
    skip_unless_available("cpu")
    x = torch.randn(1, 2, 1, 4)
    with pytest.raises(KernelError, match="dplr_delta_rule, the rule with a matrix of rank one, has no triton kernel"):
        dplr_delta_rule(x, x, x, x, x, -x.abs(), impl="triton")
    wide = torch.randn(1, 1, 1, 513)
    with pytest.raises(KernelError, match="keys of up to 512 features, got 513"):
        simple_gla(wide, wide, x[:, :1], None, impl="triton")


@pytest.mark.slow
def test_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    # The interpreter takes much that the compiler refuses; the compiler needs no GPU.
    skip_unless_available("cpu")
    done = child("-m", "tests.ops.delta.compile_triton", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_layer_takes_it_by_name(device: str) -> None:
    torch.manual_seed(0)
    layer = nn.FastWeightProgrammer(8, 2, rule="kda", impl="triton").to(device)
    x = torch.randn(3, 1, 8, device=device)
    y, _ = layer(x)
    layer.impl = "reference"
    torch.testing.assert_close(y, layer(x)[0])
