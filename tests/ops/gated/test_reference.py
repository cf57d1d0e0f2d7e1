"""The reference against a loop in NumPy that was written from the paper alone."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from fastweights.errors import KernelError
from fastweights.ops.gated import LAYER_NORMS, gated

from ..associative.numpy_loop import derivatives
from . import numpy_loop
from .cases import INPUTS, Case

TOLERANCE = 1e-12
RESULTS = ("outputs", "hidden", "slow_hidden", "fast_1", "fast_2")


@pytest.mark.parametrize("norms", LAYER_NORMS)
@pytest.mark.parametrize("case", [Case(4, 6, 2), Case(1, 3, 1, 1, 1, 1), Case(3, 5, 3, ragged=True)], ids=str)
def test_outputs_state_and_gradients_are_those_of_the_loop(case: Case, norms: str) -> None:
    inputs, lengths = case.inputs(), case.lengths()
    expected = numpy_loop.gated(inputs, lengths, norms)
    weights = {name: np.random.default_rng(8).normal(size=expected[name].shape) for name in RESULTS}

    def total(given: Mapping[str, numpy_loop.Array]) -> complex:
        results = numpy_loop.gated(given, lengths, norms)
        return complex(sum((results[name] * weights[name]).sum() for name in RESULTS))

    tensors = {name: torch.from_numpy(inputs[name]).requires_grad_() for name in INPUTS}
    given = None if lengths is None else torch.tensor(lengths)
    result = gated(*tensors.values(), lengths=given, layer_norm=norms, impl="reference")
    loss = sum((getattr(result, name) * torch.from_numpy(weights[name])).sum() for name in RESULTS)
    gradients = torch.autograd.grad(loss, list(tensors.values()))
    for name in RESULTS:
        np.testing.assert_allclose(getattr(result, name).detach(), expected[name], rtol=TOLERANCE, atol=TOLERANCE)
    for (name, true), gradient in zip(derivatives(total, inputs).items(), gradients, strict=True):
        scale = np.abs(true).max()
        np.testing.assert_allclose(gradient, true, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=name)


def test_the_reference_takes_lengths_out_of_range_as_none_and_all_of_the_steps() -> None:
    inputs = [torch.from_numpy(tensor) for tensor in Case(4, 3, 2).inputs().values()]
    beyond, within = (gated(*inputs, lengths=torch.tensor(lengths), impl="reference") for lengths in ([-2, 9], [0, 3]))
    for name in RESULTS:
        assert torch.equal(getattr(beyond, name), getattr(within, name)), name


@pytest.mark.parametrize("impl", ["cpu", "triton"])
def test_other_places_of_the_layer_norm_have_no_kernel(impl: str) -> None:
    inputs = [torch.from_numpy(tensor) for tensor in Case(4, 3, 2).inputs().values()]
    with pytest.raises(KernelError, match=f"impl='{impl}' was asked for, but layer_norm='both' is in plain PyTorch"):
        gated(*inputs, layer_norm="both", impl=impl)
    with pytest.raises(ValueError, match="layer_norm must be one of after, before, both, none, got 'befor'; did you"):
        gated(*inputs, layer_norm="befor")


def test_the_network_of_the_paper_has_as_many_rows() -> None:
    assert Case(40, 1, 1, 15, 40, 100).inputs()["slow_out_weight"].shape == (394, 100)
