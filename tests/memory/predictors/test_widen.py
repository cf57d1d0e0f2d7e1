"""A last layer with room for further classes."""

import pytest
import torch
from torch import nn

from fastweights.memory import widen_output


@pytest.mark.parametrize("bias", [True, False])
def test_a_wider_layer_answers_as_the_old_one(bias):
    torch.manual_seed(0)
    head = nn.Linear(8, 5, bias=bias, dtype=torch.float64).eval()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    wide = widen_output(head, 3)
    x = torch.randn(1000, 8, dtype=torch.float64)
    torch.testing.assert_close(wide(x)[:, :5], head(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wide(x)[:, 5:], head(x).mean(1, keepdim=True).expand(-1, 3), rtol=1e-9, atol=1e-9)
    assert torch.equal(wide(x).argmax(1), head(x).argmax(1))
    for name, value in before.items():
        assert torch.equal(wide.state_dict()[name][:5], value)
        assert torch.equal(wide.state_dict()[name][5:], value.mean(0).expand(3, *value.shape[1:]))
    with torch.no_grad():
        wide.weight.zero_()
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert (wide.training, wide.weight.dtype, wide.weight.requires_grad) == (False, torch.float64, True)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_stays_frozen(frozen):
    head = nn.Linear(8, 5)
    getattr(head, frozen).requires_grad_(False)
    asked = {name: parameter.requires_grad for name, parameter in widen_output(head).named_parameters()}
    assert asked == {"weight": frozen != "weight", "bias": frozen != "bias"}


def test_what_cannot_be_widened_is_refused():
    with pytest.raises(TypeError, match=r"takes a torch.nn.Linear, got Identity"):
        widen_output(nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes must be an integer of at least 1, got 0"):
        widen_output(nn.Linear(2, 2), 0)
