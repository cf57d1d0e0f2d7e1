"""The Associative LSTM of Danihelka et al. 2016: key-value pairs in redundant complex-valued memories."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import RecurrentLayer, RecurrentState, mask_of, run_steps, run_without_autocast


class _Parts(NamedTuple):
    hidden: Tensor
    memory: Tensor


class AssociativeLSTMState(RecurrentState, _Parts):
    """The state that an Associative LSTM hands from one piece of a sequence to the next.

    The last axis of both holds H/2 complex numbers: their real parts, then their imaginary parts. For an unbatched
    sequence both lack the batch axis.

    Attributes:
        hidden: [B,H].
        memory: [B,copies,H].

    Examples:
        >>> import torch
        >>> from fastweights.nn import AssociativeLSTMState
        >>> state = AssociativeLSTMState(hidden=torch.zeros(2, 6), memory=torch.zeros(2, 4, 6))
        >>> state.detach().memory.shape
        torch.Size([2, 4, 6])
    """


class AssociativeLSTM(RecurrentLayer[AssociativeLSTMState]):
    """One layer of an LSTM whose cell is an associative array of complex numbers (Danihelka et al. 2016).

    A pair is stored as the elementwise complex product of its key and its value, and products add up in the memory;
    multiplying by the inverse of a key gives its value back, with noise from the other pairs. Each of `copies`
    memories stores under another permutation P_s of the key, so that their noise averages out. For head k:

        f, i, o = sigmoid(.)                  one real gate for both halves of a complex number, [H/2]
        r_k, q_k, u_k = bound(.)              write key, read key and update, complex [H/2]
        c_s = f c_s + sum_k P_s r_k (i u_k)   memory s, complex [H/2]
        h = o mean_k bound(mean_s P_s q_k c_s)

    where (.) are rows of weight_ih x(t) + weight_hh h(t-1) + bias, and bound(z) = z / max(1, |z|) elementwise.

    Our reading where the authors leave room: the update sees h(t-1) too, which they make optional. The heads share
    the gates and the memory, and each has a write key, a read key and an update of its own. What the heads read is
    bounded head by head and then averaged: reading is linear in the key, so heads summed before the bound would be one
    head with another key; and the mean keeps |h| at most 1. With one head these are the paper's equations. All
    parameters start uniform, as those of `torch.nn.LSTM`, the forget gate's bias like the others.

    Parameters: `weight_ih` [R,D], `weight_hh` [R,H], `bias` [R] with R = 3H/2 + 3 heads H. Their rows: forget, input
    and output gate, [H/2] each; then write keys, read keys and updates, each the real parts [heads,H/2] and then the
    imaginary parts. Buffer: `permutations` [copies,H/2], drawn from torch's generator on the CPU at construction,
    never trained, saved with the `state_dict`; copy s of a key r is r[permutations[s]].

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of hidden units, real and imaginary parts together: even.
        copies: the number of redundant memories, each with its own permutation.
        heads: the number of pairs written, and of keys read, in one step.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size is out of range, or hidden_size is odd.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.AssociativeLSTM(input_size=10, hidden_size=20)
        >>> y, state = layer(torch.randn(7, 3, 10))          # x [T,B,D]
        >>> y.shape, state.hidden.shape, state.memory.shape  # [T,B,H], [B,H], [B,copies,H]
        (torch.Size([7, 3, 20]), torch.Size([3, 20]), torch.Size([3, 4, 20]))
        >>> y, state = layer(torch.randn(5, 3, 10), state)   # goes on where the first piece ended
    """

    permutations: Tensor
    _state_type = AssociativeLSTMState

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        copies: int = 4,
        heads: int = 3,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size, copies=copies, heads=heads)
        if hidden_size % 2:
            raise ValueError(f"hidden_size must be even, half real parts and half imaginary, got {hidden_size}")
        self.input_size, self.hidden_size = input_size, hidden_size
        self.copies, self.heads, self.batch_first = copies, heads, batch_first
        rows = 3 * hidden_size // 2 + 3 * heads * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.weight_hh = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        places = torch.empty(copies, hidden_size // 2, device=device, dtype=torch.int64)
        self.register_buffer("permutations", places)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters: uniform by the number of hidden units, and new permutations."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        size = self.hidden_size // 2
        # On the CPU for every device: one seed gives the same layer everywhere.
        self.permutations.copy_(torch.stack([torch.randperm(size, device="cpu") for _ in range(self.copies)]))

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight_hh.dtype

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"hidden": (*batch, self.hidden_size), "memory": (*batch, self.copies, self.hidden_size)}

    def _run(
        self, x: Tensor, state: AssociativeLSTMState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, AssociativeLSTMState]:
        steps, batch = x.shape[:2]
        # The batch is the last axis inside: gates, halves and heads are then rows, which lie together.
        columns = x.reshape(steps * batch, self.input_size).t()
        drive = torch.addmm(self.bias.unsqueeze(1), self.weight_ih, columns).view(self.bias.numel(), steps, batch)
        return run_without_autocast(self._recur, (drive,), self._dtype, state, lengths, starts)

    def _recur(
        self, drive: Tensor, state: AssociativeLSTMState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, AssociativeLSTMState]:
        """Run over time: drive [R,T,B] -> outputs [T,B,H] and the last state."""
        _, steps, batch = drive.shape
        size, copies = self.hidden_size, self.copies
        if state is None:
            hidden = drive.new_zeros(size, batch)
            real = imaginary = drive.new_zeros(copies, size // 2, batch)
        else:
            hidden = state.hidden.to(drive.dtype).t()
            memory = state.memory.to(drive.dtype).permute(1, 2, 0).contiguous()  # [N,H,B]
            real, imaginary = memory.view(copies, 2, size // 2, batch).unbind(1)
        permute = self._permutation(drive)
        valid = None if lengths is None else mask_of(lengths, steps)
        outputs, (hidden, real, imaginary) = run_steps(
            lambda now, before: self._step(now, permute, *before),
            drive.unbind(1),
            (hidden, real, imaginary),
            valid,
            starts,
        )
        y: Tensor = _BatchBeforeUnits.apply(torch.stack(outputs))  # type: ignore[no-untyped-call]
        if valid is not None:
            y = torch.where(valid.unsqueeze(2), y, torch.zeros_like(y))
        memory = torch.stack((real, imaginary), 1).view(copies, size, batch).permute(2, 0, 1).contiguous()
        return y, AssociativeLSTMState(hidden.t().contiguous(), memory)

    def _permutation(self, like: Tensor) -> Tensor:
        """Return P_s of all copies one under another, as a matrix: [heads, copies H/2, H/2].

        Its product is exact, for every sum has one term, and its gradient, another product, adds up in a fixed
        order; gathering rows takes as long and scatters its gradient, on a GPU in no fixed order.
        """
        places = torch.arange(self.hidden_size // 2, device=like.device)
        matrix = (self.permutations.unsqueeze(2) == places).flatten(0, 1).to(like.dtype)
        return matrix.expand(self.heads, -1, -1)

    def _step(
        self, drive: Tensor, permute: Tensor, hidden: Tensor, real: Tensor, imaginary: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take one step: drive [R,B], hidden [H,B], the memory's two halves [N,H/2,B] -> the next three of these."""
        heads, copies, size, batch = self.heads, self.copies, self.hidden_size // 2, drive.shape[1]
        gates, vectors = torch.addmm(drive, self.weight_hh, hidden).split_with_sizes([3 * size, 6 * heads * size])
        forget, write, show = gates.sigmoid().view(3, size, batch).unbind(0)
        parts = _bound(vectors.view(3, 2, heads, size, batch), 1).view(6, heads, size, batch).unbind(0)
        # Keys of every head and copy, [K,N,H/2,B]; updates [K,1,H/2,B].
        key_real, key_imaginary, query_real, query_imaginary = (
            torch.bmm(permute, part).view(heads, copies, size, batch) for part in parts[:4]
        )
        update_real, update_imaginary = (part.mul(write).unsqueeze(1) for part in parts[4:])
        minus = -update_imaginary
        real = torch.addcmul((key_real * update_real + key_imaginary * minus).sum(0), real, forget)
        imaginary = torch.addcmul((key_real * update_imaginary + key_imaginary * update_real).sum(0), imaginary, forget)
        minus = -imaginary
        read_real = (query_real * real + query_imaginary * minus).mean(1)  # [K,H/2,B]
        read_imaginary = (query_real * imaginary + query_imaginary * real).mean(1)
        value = _bound(torch.stack((read_real, read_imaginary)), 0).mean(1)
        return (value * show).view(2 * size, batch), real, imaginary

    def extra_repr(self) -> str:
        return describe(vars(self), ["input_size", "hidden_size"], ["copies", "heads"], batch_first=False)


class _BatchBeforeUnits(torch.autograd.Function):
    """Transpose [T,H,B] to [T,B,H], with a copy on the way back too.

    Every gradient of the loop takes over the layout of this one; where the batch is not last in memory the backward
    pass takes half as long again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return y.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _bound(z: Tensor, axis: int) -> Tensor:
    """Return z / max(1, |z|), with real and imaginary parts along the axis.

    The maximum is taken before the root, whose slope at zero is infinite.
    """
    squared = z.square().sum(axis, keepdim=True)
    return z * F.threshold(squared, 1.0, 1.0).rsqrt()
