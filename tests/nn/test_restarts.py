import pytest
import torch
from torch import nn

from fastweights.nn import FastWeightsRNN, run_with_starts

LAYERS = [nn.LSTM, nn.GRU, nn.RNN]


def zeros(state, *sequences):
    """A state whose sequences are zeros."""
    if isinstance(state, tuple):
        return tuple(zeros(tensor, *sequences) for tensor in state)
    state = state.clone()
    state[:, list(sequences)] = 0
    return state


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_sequence_that_starts_anew_equals_separate_ones(kind, batch_first):
    torch.manual_seed(0)
    layer = kind(3, 4, 2, batch_first=batch_first).double()
    x = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)
    _, before = layer(torch.randn(5, 2, 3, dtype=torch.float64).transpose(0, int(batch_first)))
    starts = torch.zeros(9, 2, dtype=torch.bool)
    starts[0, 1] = starts[4, 0] = starts[7] = True

    y, state = run_with_starts(
        layer, x.transpose(0, int(batch_first)), before, starts=starts.transpose(0, int(batch_first))
    )
    y = y.transpose(0, int(batch_first))

    def run(piece, state):
        y, state = layer(piece.transpose(0, int(batch_first)), state)
        return y.transpose(0, int(batch_first)), state

    first, middle = run(x[:4], zeros(before, 1))
    second, _ = run(x[4:7], zeros(middle, 0))
    third, end = run(x[7:], None)
    torch.testing.assert_close(y, torch.cat((first, second, third)), rtol=0, atol=1e-12)
    for ours, theirs in zip(state, end, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(y[7].sum(), x)
    assert not gradient[:7].any()


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_single_sequence_and_no_starts(batch_first):
    torch.manual_seed(0)
    layer, x = nn.LSTM(3, 4, batch_first=batch_first), torch.randn(6, 3)
    starts = torch.tensor([False, False, True, False, False, False])
    y, (hidden, _) = run_with_starts(layer, x, starts=starts)
    torch.testing.assert_close(y, torch.cat((layer(x[:2])[0], layer(x[2:])[0])))
    assert hidden.shape == (1, 4)
    torch.testing.assert_close(run_with_starts(layer, x)[0], layer(x)[0])


def test_what_cannot_start_anew_is_refused():
    x, starts = torch.randn(6, 2, 3), torch.zeros(6, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="a bidirectional GRU reads beyond a start"):
        run_with_starts(nn.GRU(3, 4, bidirectional=True), x, starts=starts)
    with pytest.raises(ValueError, match=r"starts must be \[T,B\] of the steps of x, \(6, 2\), got shape \(2, 6\)"):
        run_with_starts(nn.GRU(3, 4), x, starts=starts.T)
    with pytest.raises(TypeError, match=r"starts must be torch.bool, got torch.int64"):
        run_with_starts(nn.GRU(3, 4), x, starts=starts.long())
    packed = nn.utils.rnn.pack_sequence([x[:, 0]])
    with pytest.raises(TypeError, match="LSTM takes starts= with padded sequences alone"):
        run_with_starts(nn.LSTM(3, 4), packed, starts=starts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be an LSTM, GRU or RNN of torch\.nn, got a FastWeightsRNN: our layers"):
        run_with_starts(FastWeightsRNN(3, 4), x, starts=starts)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"x must be \[T,B,D\] or \[T,D\] with at least one step, got shape \(0, 2, 3\)"
    ):
        run_with_starts(nn.GRU(3, 4), x[:0], starts=starts[:0])
