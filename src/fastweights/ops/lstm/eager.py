"""The LSTM with its backward pass written out, in PyTorch: on any device and in any dtype.

What does not depend on the step before is computed for all steps at once: the input's products, the slopes of the
gates, and the gradients of the weights. A step then is one product and a few operations on [B,4H], and the mask costs
one on [B,H].
"""

import torch
from torch import Tensor

from fastweights.ops.lstm.reference import LSTMInputs
from fastweights.ops.products import RepeatedProduct, multiply


def forward(inputs: LSTMInputs) -> tuple[Tensor, ...]:
    """Run the recurrence.

    Returns:
        The hidden states after every step [T,B,H], zero past a length, the state [B,H], [B,H] after the last one, and
        what `backward` needs: the gates [T,B,4H], the cells before every step and after the last [T+1,B,H], and their
        tanh after every step [T,B,H].
    """
    x, weight_ih, bias, weight_hh, hidden, cell, mask, lengths, starts = inputs
    gates = multiply(x, weight_ih).to(cell.dtype).add_(bias)  # written over step by step
    steps, batch, size = x.shape[0], *hidden.shape
    cells, outputs = gates.new_empty(steps + 1, batch, size), gates.new_empty(steps, batch, size)
    tanhs = torch.empty_like(outputs)
    reads = outputs if mask is None else torch.empty_like(outputs)  # the outputs as the next step reads them
    cells[0] = cell
    read = hidden.contiguous() if mask is None else hidden * mask
    recur = RepeatedProduct(weight_hh, batch, steps)
    for step in range(steps):
        if starts is not None:
            anew = starts[step].unsqueeze(1)
            read = read.masked_fill(anew, 0)
            cells[step].masked_fill_(anew, 0)
        gate = gates[step].add_(recur(read.to(weight_hh.dtype)))
        gate[:, : 2 * size].sigmoid_()
        gate[:, 2 * size : 3 * size].tanh_()
        gate[:, 3 * size :].sigmoid_()
        i, f, g, o = gate.chunk(4, 1)
        torch.mul(f, cells[step], out=cells[step + 1]).addcmul_(i, g)
        torch.tanh(cells[step + 1], out=tanhs[step])
        read = torch.mul(o, tanhs[step], out=outputs[step])
        if mask is not None:
            read = torch.mul(read, mask, out=reads[step])
    if lengths is None:
        return outputs, outputs[-1].clone(), cells[-1].clone(), gates, cells, tanhs
    # Past its length a sequence runs on, and nobody sees it: its state is read where it ended.
    lengths = lengths.clamp(0, steps)
    index = lengths.view(1, -1, 1).expand(1, -1, size)
    last = torch.where(index[0] > 0, outputs.gather(0, (index - 1).clamp(min=0))[0], hidden)
    outputs.masked_fill_(_find_padding(lengths, steps), 0)
    return outputs, last, cells.gather(0, index)[0], gates, cells, tanhs


def backward(
    grads: tuple[Tensor | None, ...], kept: tuple[Tensor, ...], inputs: LSTMInputs, wanted: list[bool]
) -> list[Tensor]:
    """Return the gradients of the inputs that have one, from those of the three results; empty where none is wanted."""
    of_outputs, of_hidden, of_cell = grads
    outputs, gates, cells, tanhs = kept
    x, weight_ih, _, weight_hh, first, _, mask, lengths, starts = inputs
    steps, batch, size = tanhs.shape
    i, f, g, o = gates.chunk(4, 2)
    # By how much each gate's drive moves the cell, and for the last the hidden state.
    slopes = torch.empty_like(gates)
    of_i, of_f, of_g, of_o = slopes.chunk(4, 2)
    torch.mul(i, g, out=of_i).addcmul_(of_i, i, value=-1)
    torch.mul(cells[:-1], f, out=of_f).addcmul_(of_f, f, value=-1)
    torch.mul(g, g, out=of_g).neg_().add_(1).mul_(i)
    torch.mul(tanhs, o, out=of_o).addcmul_(of_o, o, value=-1)
    through = (1 - tanhs.square()).mul_(o)  # from the hidden state to the cell
    of_drive = slopes  # written over step by step
    hidden, cell = (torch.zeros_like(first) if grad is None else grad.clone() for grad in (of_hidden, of_cell))
    if lengths is not None:
        lengths, ends = lengths.clamp(0, steps).unsqueeze(1), (hidden, cell)
        hidden, cell = torch.zeros_like(hidden), torch.zeros_like(cell)
        if of_outputs is not None:
            of_outputs = of_outputs.masked_fill(_find_padding(lengths.squeeze(1), steps), 0)
    recur = RepeatedProduct(weight_hh.t(), batch, steps)
    for step in reversed(range(steps)):
        if lengths is not None:  # the gradient of a state begins at the last step of its sequence
            hidden, cell = (torch.where(lengths == step + 1, *pair) for pair in zip(ends, (hidden, cell), strict=True))
        if of_outputs is not None:
            hidden += of_outputs[step]
        cell.addcmul_(hidden, through[step])
        moved = of_drive[step]
        moved[:, 3 * size :].mul_(hidden)
        moved[:, : 3 * size].view(batch, 3, size).mul_(cell.unsqueeze(1))
        cell.mul_(f[step])
        hidden = recur(moved.to(weight_hh.dtype)).to(cell.dtype)
        if mask is not None:
            hidden.mul_(mask)
        if starts is not None:
            anew = starts[step].unsqueeze(1)
            hidden.masked_fill_(anew, 0)
            cell.masked_fill_(anew, 0)
    if lengths is not None:
        hidden, cell = (torch.where(lengths == 0, *pair) for pair in zip(ends, (hidden, cell), strict=True))
    flat = of_drive.view(steps * batch, 4 * size)
    of_x = of_weight_ih = of_bias = of_weight_hh = x.new_empty(0)
    if wanted[0]:
        of_x = multiply(of_drive.to(weight_hh.dtype), weight_ih.t())
    if any(wanted[1:4]):
        before = torch.cat([first.unsqueeze(0), outputs[:-1]])
        if starts is not None:
            before.masked_fill_(starts.unsqueeze(2), 0)
        if mask is not None:
            before.mul_(mask)
        # One product for both weights; its parts are copied apart, for an operator's results share no memory.
        rows = torch.cat([x, before.to(weight_hh.dtype)], 2).view(steps * batch, x.shape[2] + size)
        of_weights = multiply(flat.t().to(weight_hh.dtype), rows.t())
        of_weight_ih, of_weight_hh = (part.contiguous() for part in of_weights.split_with_sizes([x.shape[2], size], 1))
        of_bias = flat.sum(0)
    every = [of_x, of_weight_ih, of_bias, of_weight_hh, hidden, cell]
    return [gradient if want else x.new_empty(0) for gradient, want in zip(every, wanted, strict=True)]


def fake_forward(inputs: LSTMInputs) -> tuple[Tensor, ...]:
    """Return what `forward` returns, without numbers."""
    steps, (batch, size), empty = inputs.x.shape[0], inputs.hidden.shape, inputs.cell.new_empty
    state = (batch, size)
    shapes = [(steps, *state), state, state, (steps, batch, 4 * size), (steps + 1, *state), (steps, *state)]
    return tuple(empty(shape) for shape in shapes)


def fake_backward(inputs: LSTMInputs, wanted: list[bool]) -> list[Tensor]:
    """Return what `backward` returns, without numbers."""
    pairs = zip(inputs, wanted, strict=False)
    return [
        inputs.x.new_empty(0) if not want else torch.empty_like(given) for given, want in pairs if given is not None
    ]


def _find_padding(lengths: Tensor, steps: int) -> Tensor:
    """Return where the steps are past the lengths [B]: [T,B,1] of bool."""
    return (torch.arange(steps, device=lengths.device).unsqueeze(1) >= lengths).unsqueeze(2)
