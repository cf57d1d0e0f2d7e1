"""The reference against a loop in NumPy that was written from the equations alone, and against `torch.nn.LSTM`."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from fastweights.ops.lstm import lstm

from ..associative.numpy_loop import derivatives
from . import numpy_loop
from .cases import RESULTS, Case, draw_slopes

TOLERANCE = 1e-12
CASES = [
    Case(4, 6, 2),
    Case(1, 1, 1, 1),
    Case(4, 6, 3, masked=True),
    Case(3, 5, 3, ragged=True, starts=True),
    Case(3, 5, 3, masked=True, ragged=True, starts=True, norms=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_state_and_gradients_are_those_of_the_loop(case: Case) -> None:
    inputs, controls = case.inputs(), (case.mask(), case.lengths(), case.flags())
    expected = numpy_loop.lstm(inputs, *controls)
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in inputs.items()}
    result = case.run(tuple(tensors.values()), "reference")
    slopes = draw_slopes(result)

    def total(given: Mapping[str, numpy_loop.Array]) -> complex:
        results = numpy_loop.lstm(given, *controls)
        return complex(sum((results[name] * slope.numpy()).sum() for name, slope in zip(RESULTS, slopes, strict=True)))

    gradients = torch.autograd.grad(result, list(tensors.values()), slopes)
    for name in RESULTS:
        np.testing.assert_allclose(getattr(result, name).detach(), expected[name], rtol=TOLERANCE, atol=TOLERANCE)
    for (name, true), gradient in zip(derivatives(total, inputs).items(), gradients, strict=True):
        scale = np.abs(true).max()
        np.testing.assert_allclose(gradient, true, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=name)


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_outputs_state_and_gradients_are_those_of_torchs_lstm(impl: str) -> None:
    x, weight_ih, bias, weight_hh, hidden, cell = map(torch.from_numpy, Case(6, 9, 4).inputs().values())
    peer = torch.nn.LSTM(3, 6, dtype=torch.float64)
    peer.load_state_dict(
        {"weight_ih_l0": weight_ih, "weight_hh_l0": weight_hh, "bias_ih_l0": bias, "bias_hh_l0": 0 * bias}
    )
    inputs = [tensor.requires_grad_() for tensor in (x, weight_ih, bias, weight_hh, hidden, cell)]
    result = lstm(*inputs, impl=impl)
    y, (last, last_cell) = peer(x, (hidden.unsqueeze(0), cell.unsqueeze(0)))
    slopes = draw_slopes(result)
    parameters = dict(peer.named_parameters())
    own = [x, *(parameters[f"{name}_l0"] for name in ("weight_ih", "bias_ih", "weight_hh")), hidden, cell]
    expected = (y, last[0], last_cell[0])
    torch.testing.assert_close(tuple(result), expected, rtol=0, atol=TOLERANCE)
    ours = torch.autograd.grad(result, inputs, slopes)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, own, slopes), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=10 * TOLERANCE)


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_lengths_out_of_range_are_taken_as_none_and_all_of_the_steps(impl: str) -> None:
    inputs = [torch.from_numpy(array) for array in Case(4, 3, 2).inputs().values()]
    beyond, within = (lstm(*inputs, lengths=torch.tensor(lengths), impl=impl) for lengths in ([-2, 9], [0, 3]))
    torch.testing.assert_close(beyond, within, rtol=TOLERANCE, atol=TOLERANCE)
