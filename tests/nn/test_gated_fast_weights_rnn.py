"""What is particular to the gated layer; the laws of every layer are in test_laws.py."""

from typing import Any

import pytest
import torch

from fastweights import nn


def test_the_papers_model_has_as_many_parameters_as_the_paper_says() -> None:
    embedding = torch.nn.Embedding(15, 15)
    layer = nn.GatedFastWeightsRNN(15, 40)
    output = torch.nn.Linear(40, 15)
    assert sum(p.numel() for module in (embedding, layer, output) for p in module.parameters()) == 46_234


def test_parameters_and_state_have_the_names_and_shapes_of_the_interface() -> None:
    layer = nn.GatedFastWeightsRNN(3, 5, slow_hidden_size=4, slow_inner_size=6)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "slow_in.weight": (6, 7),
        "slow_in.bias": (6,),
        "slow_out.weight": (4 + 4 * 5 + 2 * 9 + 2 * 6, 6),
        "slow_out.bias": (54,),
    }
    y, state = layer(torch.randn(7, 2, 3))
    assert y.shape == (7, 2, 5)
    shapes = {name: tuple(value.shape) for name, value in state._asdict().items()}
    assert shapes == {"hidden": (2, 5), "slow_hidden": (2, 4), "fast_1": (2, 5, 9), "fast_2": (2, 5, 6)}
    assert not any(tensor.requires_grad for tensor in state.detach())


def test_the_layers_parameters_load_into_the_cell() -> None:
    wide: Any = {"dtype": torch.float64}  # layer norm of the small numbers at the beginning makes much of a rounding
    layer, cell = nn.GatedFastWeightsRNN(3, 5, **wide), nn.GatedFastWeightsRNNCell(3, 5, **wide)
    cell.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2, 3, **wide)
    expected, _ = layer(x)
    state = None
    for step, now in enumerate(x):
        y, state = cell(now, state)
        torch.testing.assert_close(y, expected[step])


def test_a_step_reads_what_was_written_before_it() -> None:
    """F_{t+1} is first used one step later: from zero matrices the first output is that of zeros."""
    layer = nn.GatedFastWeightsRNN(3, 5)
    y, state = layer(torch.randn(1, 2, 3))
    assert torch.equal(y, torch.zeros_like(y))
    assert state.fast_1.abs().sum() > 0


def test_the_first_output_is_zero_whatever_is_read_and_so_is_that_after_a_start() -> None:
    x, starts = torch.randn(4, 2, 3), torch.zeros(4, 2, dtype=torch.bool)
    starts[2] = True
    y, _ = nn.GatedFastWeightsRNN(3, 5)(x, starts=starts)
    assert [bool((step == 0).all()) for step in y] == [True, False, True, False]
    y, _ = nn.GatedFastWeightsRNNCell(3, 5)(x[0])
    assert bool((y == 0).all())


def test_bfloat16_autocast_keeps_the_fast_matrices_in_float32() -> None:
    layer = nn.GatedFastWeightsRNN(15, 40)
    state = None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(10):
            y, state = layer(torch.randn(1000, 1, 15), state)
            assert y.dtype == torch.bfloat16
            assert {tensor.dtype for tensor in state} == {torch.float32}
            assert all(tensor.isfinite().all() for tensor in (y, *state))


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="impl must be one of auto, reference, cpu, triton, got 'cuda'"):
        nn.GatedFastWeightsRNN(3, 5, impl="cuda")


def test_a_step_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x must be \[B,D\] or \[D\] with D = 3, got shape \(2, 4\)"):
        nn.GatedFastWeightsRNNCell(3, 5)(torch.randn(2, 4))


def test_it_says_what_it_is() -> None:
    assert repr(nn.GatedFastWeightsRNN(3, 5, slow_hidden_size=4, batch_first=True)).startswith(
        "GatedFastWeightsRNN(\n  3, 5, slow_hidden_size=4, batch_first=True"
    )


@pytest.mark.parametrize(("slow", "inner"), [(40, 100), (8, 5), (7, 7)])
def test_the_slow_state_starts_on_an_orthogonal_way(slow, inner):
    torch.manual_seed(0)
    layer = nn.GatedFastWeightsRNN(3, 4, slow_hidden_size=slow, slow_inner_size=inner, dtype=torch.float64)
    way = layer.slow_out.weight[:slow] @ layer.slow_in.weight[:, :slow]
    kept = torch.linalg.svdvals(way)
    expected = torch.zeros(slow, dtype=torch.float64)
    expected[: min(slow, inner)] = 1  # an inner layer that is smaller holds no more
    torch.testing.assert_close(kept, expected)
    before = way.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.slow_out.weight[:slow] @ layer.slow_in.weight[:, :slow], before)


def test_a_layer_of_bfloat16_starts_too():
    layer = nn.GatedFastWeightsRNN(3, 4, dtype=torch.bfloat16)
    assert all(
        parameter.dtype == torch.bfloat16 and torch.isfinite(parameter).all() for parameter in layer.parameters()
    )


def test_bfloat16_autocast_stays_finite_over_ten_thousand_steps():
    """The paper's sizes, forwards and backwards; what is carried and what is written stays in float32."""
    torch.manual_seed(0)
    layer = nn.GatedFastWeightsRNN(15, 40)
    x = torch.randn(10_000, 2, 15, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
    assert y.dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in state)
    assert y.isfinite().all()
    assert y[-1].float().std() > 0.5  # layer norm's output, not a constant
    (y.float() * torch.randn(y.shape)).mean().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().max() > 0
    assert state.fast_1.abs().max() <= 1  # of tanh's, mixed with weights that sum to one
