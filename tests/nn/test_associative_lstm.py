"""The Associative LSTM against a loop over complex numbers, and what its memory is for."""

import numpy as np
import pytest
import torch

from fastweights.nn import AssociativeLSTM, AssociativeLSTMState


def scaled(layer: AssociativeLSTM, factor: float) -> AssociativeLSTM:
    """Weights so large that keys and updates pass the bound."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)
    return layer


def bound(z):
    return z / np.maximum(1, np.abs(z))


def loop(layer, x, hidden, memory):
    """One sequence x [T,D] from the equations, one head and one copy at a time, in complex numbers."""
    heads, half = layer.heads, layer.hidden_size // 2
    input_weights, hidden_weights, bias = (
        parameter.detach().numpy() for parameter in (layer.weight_ih, layer.weight_hh, layer.bias)
    )
    permutations = layer.permutations.numpy()
    h = hidden[:half] + 1j * hidden[half:]
    c = [row[:half] + 1j * row[half:] for row in memory]
    outputs = []
    for now in x:
        rows = input_weights @ now + hidden_weights @ np.concatenate([h.real, h.imag]) + bias
        f, i, o = 1 / (1 + np.exp(-rows[: 3 * half].reshape(3, half)))
        parts = rows[3 * half :].reshape(3, 2, heads, half)
        write, read, update = bound(parts[:, 0] + 1j * parts[:, 1])  # [heads,H/2] each
        for s, order in enumerate(permutations):
            c[s] = f * c[s]
            for k in range(heads):
                c[s] = c[s] + write[k][order] * (i * update[k])
        found = []
        for k in range(heads):
            found.append(bound(sum(read[k][order] * c[s] for s, order in enumerate(permutations)) / len(c)))
        h = o * sum(found) / heads
        outputs.append(np.concatenate([h.real, h.imag]))
    return np.stack(outputs), outputs[-1], np.stack([np.concatenate([row.real, row.imag]) for row in c])


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize(("copies", "heads", "hidden_size"), [(1, 1, 2), (4, 3, 50), (2, 1, 6), (1, 2, 10)])
def test_it_is_the_papers_equations(copies, heads, hidden_size, factor):
    torch.manual_seed(0)
    layer = scaled(AssociativeLSTM(3, hidden_size, copies=copies, heads=heads, dtype=torch.float64), factor)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    start = AssociativeLSTMState(
        torch.randn(2, hidden_size, dtype=torch.float64), torch.randn(2, copies, hidden_size, dtype=torch.float64)
    )
    y, state = layer(x, start)
    for index in range(2):
        outputs, hidden, memory = loop(
            layer, x[:, index].numpy(), start.hidden[index].numpy(), start.memory[index].numpy()
        )
        for mine, theirs in ((y[:, index], outputs), (state.hidden[index], hidden), (state.memory[index], memory)):
            torch.testing.assert_close(mine, torch.from_numpy(theirs), rtol=1e-12, atol=1e-12)


def test_gradients_where_the_bound_acts():
    torch.manual_seed(1)
    layer = scaled(AssociativeLSTM(2, 4, copies=2, heads=2, dtype=torch.float64), 4.0)
    x = (2 * torch.randn(2, 2, 2, dtype=torch.float64)).requires_grad_()
    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        y, state = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        return y, *state

    assert torch.autograd.gradcheck(run, (x, *parameters))
    assert torch.autograd.gradgradcheck(run, (x, *parameters))


def test_gradients_are_finite_where_keys_and_memory_are_zero():
    layer = AssociativeLSTM(3, 4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    y, _ = layer(torch.zeros(2, 1, 3))
    y.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_hidden_states_stay_in_the_unit_disc():
    torch.manual_seed(0)
    y, _ = scaled(AssociativeLSTM(3, 10), 30.0)(torch.randn(20, 2, 3))
    real, imaginary = y.chunk(2, dim=-1)
    assert torch.hypot(real, imaginary).max() <= 1 + 1e-6


@pytest.mark.parametrize(("heads", "hidden_size"), [(1, 20), (3, 50), (3, 100)])
def test_the_number_of_parameters_does_not_depend_on_the_copies(heads, hidden_size):
    rows = 3 * hidden_size // 2 + 3 * heads * hidden_size
    for copies in (1, 4):
        layer = AssociativeLSTM(100, hidden_size, copies=copies, heads=heads)
        assert sum(parameter.numel() for parameter in layer.parameters()) == rows * (100 + hidden_size + 1)


def retrieval_error(copies: int, pairs: int = 8, half: int = 100) -> float:
    """How far what a key finds lies from what was stored under it, relative to the size of that.

    The inputs hold the write key, the read key and the update themselves; the gates are open.
    """
    torch.manual_seed(0)
    layer = AssociativeLSTM(6 * half, 2 * half, copies=copies, heads=1)
    generator = torch.Generator().manual_seed(1)
    angles = 2 * torch.pi * torch.rand(pairs, half, generator=generator)
    keys = torch.cat([angles.cos(), angles.sin()], 1)
    inverses = torch.cat([angles.cos(), -angles.sin()], 1)
    values = 0.05 * torch.randn(pairs, 2 * half, generator=generator)
    nothing = torch.zeros(pairs, 2 * half)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.weight_ih[3 * half :] = torch.eye(6 * half)
        layer.bias[: 3 * half] = 20
        _, state = layer(torch.cat([keys, nothing, values], 1))
        found, _ = layer(torch.cat([nothing, inverses, nothing], 1), state)
    return float((found - values).norm() / values.norm())


def test_one_pair_is_found_again_exactly():
    assert retrieval_error(copies=1, pairs=1) < 1e-5


def test_more_copies_find_what_was_stored_with_less_noise():
    errors = [retrieval_error(copies) for copies in (1, 4, 16)]
    assert errors[0] == pytest.approx(np.sqrt(7), rel=0.15)  # seven other pairs of the same size interfere
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.15)
    assert errors[2] == pytest.approx(errors[0] / 4, rel=0.2)


def test_permutations_are_drawn_from_the_seed_and_saved():
    torch.manual_seed(0)
    layer, other = AssociativeLSTM(3, 40), AssociativeLSTM(3, 40)
    torch.manual_seed(0)
    again = AssociativeLSTM(3, 40)
    assert torch.equal(layer.permutations, again.permutations)
    assert not torch.equal(layer.permutations, other.permutations)
    assert torch.equal(layer.permutations.sort(1).values, torch.arange(20).expand(4, 20))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.permutations, layer.permutations)
    assert "permutations" not in dict(layer.named_parameters())
    before = layer.permutations.clone()
    layer.to(torch.bfloat16).reset_parameters()
    assert layer.permutations.dtype == torch.int64
    assert not torch.equal(layer.permutations, before)


def test_a_layer_made_on_no_device_is_filled_later():
    layer = AssociativeLSTM(3, 4, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(2, 1, 3))[0].isfinite().all()


def test_an_odd_size_is_refused():
    with pytest.raises(ValueError, match="hidden_size must be even, half real parts and half imaginary, got 25"):
        AssociativeLSTM(3, 25)


def test_the_repr_names_what_was_chosen():
    text = repr(AssociativeLSTM(3, 4, copies=2, heads=1, batch_first=True))
    assert text == "AssociativeLSTM(3, 4, copies=2, heads=1, batch_first=True)"
