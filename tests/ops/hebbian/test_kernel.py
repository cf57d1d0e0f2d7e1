"""The C++ kernel of the smoothing: parity with the reference, and the laws of a compiled function."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastweights import nn
from fastweights.errors import KernelError
from fastweights.ops import _native
from fastweights.ops.hebbian import cpu, smooth

from ..parity import needs_kernel
from . import parity
from .parity import CASES, Case

DTYPES = [torch.float32, torch.float64]


@needs_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    parity.require_parity(case)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", parity.SIZES)
def test_reads_and_writes_nothing_beside_the_tensors(size: int, dtype: torch.dtype) -> None:
    case = Case(size)
    weight, counts, [activations], [labels] = case.tensors(dtype)
    around = 512
    wholes, inner = [], []
    for tensor, filler in ((weight, torch.nan), (counts, -7), (activations, torch.nan), (labels, 2**40)):
        whole = torch.full((tensor.numel() + 2 * around,), filler, dtype=tensor.dtype)
        wholes.append(whole)
        inner.append(whole[around:-around].view(tensor.shape).copy_(tensor))
    smooth(inner[0], inner[1], [inner[2]], [inner[3]], impl="cpu", **case.options())
    expected, counted = case.run(dtype, "cpu")
    assert torch.equal(inner[0], expected)
    assert torch.equal(inner[1], counted)
    assert torch.equal(inner[2], activations)
    assert torch.equal(inner[3], labels)
    for whole, filler in zip(wholes, (torch.nan, -7, torch.nan, 2**40), strict=True):
        for guard in (whole[:around], whole[-around:]):
            assert guard.isnan().all() if whole.is_floating_point() else (guard == filler).all()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0, 1])
def test_what_is_past_the_limit_stays_bit_for_bit(limit: int, dtype: torch.dtype) -> None:
    """Denormal numbers among it, and what is not a number."""
    weight, counts, activations, labels = Case(20).tensors(dtype)
    counts.clamp_min_(limit)
    weight[0, :3] = torch.tensor([torch.nan, torch.inf, torch.finfo(dtype).tiny / 8])
    before, counted = weight.clone(), counts.clone()
    smooth(weight, counts, activations, labels, gamma=0.5, limit=limit, impl="cpu")
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(weight.view(bits), before.view(bits))
    assert torch.equal(counts, counted.index_add(0, labels[0], torch.ones_like(labels[0])))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_mean_that_is_no_number_leaves_its_class_as_it_is(dtype: torch.dtype, impl: str) -> None:
    case = Case(20)
    weight, counts, [activations], [labels] = case.tensors(dtype)
    counts.zero_()
    expected = weight.clone()
    before = weight[0].clone()
    smooth(expected, counts.clone(), [activations], [labels], impl=impl, **case.options())
    activations[labels == 0, 3] = torch.nan
    smooth(weight, counts, [activations], [labels], impl=impl, **case.options())
    assert torch.equal(weight[0], before)
    assert torch.equal(weight[1:], expected[1:])


@needs_kernel
@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e30), (torch.float64, 1e200), (torch.float64, 4e307)])
def test_means_of_huge_activations_have_the_largest_norm(dtype: torch.dtype, large: float, impl: str) -> None:
    """Whose squares the dtype does not hold."""
    weight, counts = torch.zeros(2, 30, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    labels = torch.ones(4, dtype=torch.int64)
    smooth(weight, counts, [torch.full((4, 30), large, dtype=dtype)], [labels], gamma=0, limit=9, impl=impl)
    torch.testing.assert_close(weight.norm(dim=1), torch.tensor([0.0, 10.0], dtype=dtype))


@needs_kernel
def test_parity_where_norms_overflow() -> None:
    case = Case(20, scale=1e200)
    torch.testing.assert_close(case.run(torch.float64, "cpu"), case.run(torch.float64, "reference"), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_reference_makes_no_float64_of_float32(scale: float) -> None:
    """Which not every device has."""

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            assert all(result.dtype != torch.float64 for result in tree_leaves(results) if isinstance(result, Tensor))
            return results

    case = Case(20, scale=scale)
    weight, counts, activations, labels = case.tensors(torch.float32)
    with Watched():
        smooth(weight, counts, activations, labels, impl="reference", **case.options())


@needs_kernel
@pytest.mark.parametrize("wrong", [-1, parity.CLASSES, 2**40, -(2**63)])
def test_a_label_that_is_no_class_changes_nothing(wrong: int) -> None:
    weight, counts, activations, labels = Case(20).tensors(torch.float32)
    before, counted = weight.clone(), counts.clone()
    labels[0][17] = wrong
    with pytest.raises(IndexError, match=r"the hebbian kernel got an index out of range with activations of shape"):
        smooth(weight, counts, activations, labels, gamma=0.5, limit=9)
    assert torch.equal(weight, before)
    assert torch.equal(counts, counted)


@needs_kernel
def test_what_autograd_has_saved_is_known_to_have_changed() -> None:
    weight, counts, activations, labels = Case(20).tensors(torch.float32)
    weight.requires_grad_()
    rates = torch.ones(int(counts.max()) + 1, requires_grad=True)
    losses = weight.square().sum(), rates[counts].sum()
    smooth(weight, counts, activations, labels, gamma=0.5, limit=9, impl="cpu")
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@needs_kernel
def test_more_classes_or_activations_than_the_kernel_sorts_are_refused() -> None:
    empty, labels = torch.empty(2**31 + 1, 0), torch.zeros(0, dtype=torch.int64)
    assert "at most 2,147,483,648 classes and activations" in str(cpu.unavailable(empty, labels, empty[:0], labels))


OTHERS: list[tuple[str, Any, str]] = [
    ("weight", lambda w: w.T.contiguous().T, "contiguous tensors, weight is not"),
    ("counts", lambda c: torch.stack([c, c], 1)[:, 0], "contiguous tensors, counts is not"),
    ("activations", lambda h: torch.stack([h, h], 2)[..., 0], "contiguous tensors, activations is not"),
    ("activations", lambda h: torch._neg_view(-h), "contiguous tensors, activations is not"),
    ("activations", lambda h: h.double(), "activations in torch.float32 on the cpu, got torch.float64"),
    ("weight", lambda w: w.bfloat16(), "float32 and float64, got torch.bfloat16"),
    ("labels", lambda y: torch.stack([y, y], 1)[:, 0], "contiguous tensors, labels is not"),
]


@needs_kernel
@pytest.mark.parametrize(("name", "change", "reason"), OTHERS)
def test_the_reference_takes_what_the_kernel_does_not(name: str, change: Any, reason: str) -> None:
    case = Case(20)
    weight, counts, [h], [labels] = case.tensors(torch.float32)
    given: dict[str, Tensor] = {"weight": weight, "counts": counts, "activations": h, "labels": labels}
    given[name] = change(given[name])
    weight, counts, h, labels = given.values()
    expected, counted = weight.float().clone(), counts.clone()
    smooth(expected, counted, [h.float().contiguous()], [labels], impl="reference", **case.options())
    with pytest.raises(KernelError, match=reason):
        smooth(weight, counts, [h], [labels], impl="cpu", **case.options())
    smooth(weight, counts, [h], [labels], **case.options())
    torch.testing.assert_close(weight, expected.to(weight.dtype))
    assert torch.equal(counts, counted)


@needs_kernel
def test_activations_in_the_memory_of_the_weights() -> None:
    weight, counts = torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)
    labels = torch.tensor([1, 2])
    expected = torch.cat([weight[:1], weight[:2], weight[3:]])
    assert "the same memory" in str(cpu.unavailable(weight, counts, weight[:2], labels))
    smooth(weight, counts, [weight[:2]], [labels], gamma=1, limit=9)
    torch.testing.assert_close(weight, expected)


@needs_kernel
def test_a_head_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    exact = cpu.smooth

    def counted(*given: Any) -> None:
        calls.append(given)
        exact(*given)

    monkeypatch.setattr(cpu, "smooth", counted)
    head = nn.HebbianSoftmax(4, 6)
    head.loss(torch.randn(3, 4), torch.tensor([0, 0, 5]))
    head.memorize()
    assert len(calls) == 1
    assert head.counts.tolist() == [2, 0, 0, 0, 0, 1]


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "MISSING", "it was not built")
    case = Case(20)
    expected, _ = case.run(torch.float32, "reference")
    assert torch.equal(case.run(torch.float32, "auto")[0], expected)
    with pytest.raises(KernelError, match="impl='cpu' was asked for, but it was not built"):
        case.run(torch.float32, "cpu")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"impl": "triton"}, "impl must be one of auto, reference, cpu, got 'triton'"),
        ({"counting": "twice"}, "counting must be one of literal, running_mean, constant, got 'twice'"),
        ({"counts": torch.zeros(2)}, r"weight must be \[V,d\] and counts \[V\], got \[3, 2\] and \[2\]"),
        ({"activations": [torch.zeros(1, 3)]}, r"activations must be \[n,2\] and labels \[n\], got \[1, 3\] and \[1\]"),
        ({"labels": [torch.zeros(2)]}, r"got \[1, 2\] and \[2\]"),
    ],
)
def test_refusals(others: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "weight": torch.zeros(3, 2),
        "counts": torch.zeros(3, dtype=torch.int64),
        "activations": [torch.zeros(1, 2)],
        "labels": [torch.zeros(1, dtype=torch.int64)],
    }
    with pytest.raises(ValueError, match=message):
        smooth(**{**given, **others}, gamma=0.5, limit=1)


def test_no_batch_and_an_empty_one_change_nothing() -> None:
    weight, counts = torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)
    smooth(weight, counts, [], [], gamma=0.5, limit=1)
    smooth(weight, counts, [torch.zeros(0, 2)], [torch.zeros(0, dtype=torch.int64)], gamma=0.5, limit=1)
    assert weight.sum() == 6
    assert counts.sum() == 0
