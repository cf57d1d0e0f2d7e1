"""A recurrent layer whose hidden state writes and reads a matrix memory by the delta rule."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_choice, check_integers, check_normalized, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import RecurrentLayer, RecurrentState, run_without_autocast
from fastweights.ops.autocast import autocast_is_on
from fastweights.ops.recurrent_delta import (
    IMPLEMENTATIONS,
    StepInputs,
    recurrent_delta,
    recurrent_delta_step,
)

_KEPT = 4.0  # the decay's bias at the start: 0.98 of the memory is kept
# Units of a head: up to the first values start as small as keys, from the second on sixteen times as large.
_FEW, _MANY = 16, 32


class _Parts(NamedTuple):
    hidden: Tensor
    memory: Tensor
    convolution: Tensor


class DeltaFastWeightsState(RecurrentState, _Parts):
    """The state that a `DeltaFastWeightsRNN` hands from one piece of a sequence to the next.

    For an unbatched sequence all three lack the batch axis.

    Attributes:
        hidden: [B,H].
        memory: [B,N,W,W], rows of keys, columns of values; W = H / N.
        convolution: the products of the last inputs, [B,C-1,4H+2N]; [B,0,4H+2N] without a convolution.

    Examples:
        >>> import torch
        >>> from fastweights.nn import DeltaFastWeightsState
        >>> state = DeltaFastWeightsState(
        ...     hidden=torch.zeros(2, 6), memory=torch.zeros(2, 2, 3, 3), convolution=torch.zeros(2, 3, 28)
        ... )
        >>> state.detach().memory.shape
        torch.Size([2, 2, 3, 3])
    """


class DeltaFastWeightsRNN(RecurrentLayer[DeltaFastWeightsState]):
    """A recurrent layer that follows a state and recalls: its hidden state writes and reads a memory by the delta rule.

    The cell is that of Ba et al. 2016 with keys, values and queries of its own, and a decay and a rate that it chooses
    at every step, all of them from the input and the hidden state. A step is

        [z; q; k; v; a; b] = u_t + weight_hh h_{t-1},  u a short convolution over the steps of weight_ih x_t + bias
        q, k = silu(q) / |silu(q)|, silu(k) / |silu(k)|,  v = silu(v)       of each head
        M = sigmoid(a) M_{t-1};  M_t = M + sigmoid(b) k (v - M^T k)^T
        h_t = relu(LN(z + M_t^T q))
        y_t = h_t, or h_t * silu(gate x_t) with `output_gate`

    The memory is what the delta rule of Schlag, Irie & Schmidhuber 2021 makes of it, so that an old value gives way to
    a new one; that the output of a step chooses what the next one writes is as in the recurrent delta network of Irie
    et al. 2021 ("Going beyond linear transformers with recurrent fast weight programmers"). Here there is also a hidden
    state of its own, normalised and through a ReLU, and a decay. Nonlinear matrix memories, as M2RNN (arXiv 2603.14360)
    and E88 have, are its neighbours. Its steps cannot be computed in chunks, as those of `FastWeightProgrammer` can:
    nothing of a step is known before the one before it.

    Parameters: `weight_ih` [4H+2N,D], `weight_hh` [4H+2N,H] and `bias` [4H+2N], rows: z; q, k and v, the heads of each
    one behind the other; a and b of each head; `norm.weight` and `norm.bias` [H]; `convolution_weight` [4H+2N,C], the
    oldest step first, and `convolution_bias` [4H+2N]; `gate.weight` [H,D] and `gate.bias` [H]. Weights start uniform by
    their fan-in, those of q and k within a quarter of that, and those of v within four times it, so that what is read
    counts beside z: in heads of less than 32 units within less, down to a quarter in those of 16, where it is in the
    way of the state. Those of h into z start as half of the identity, and the bias of a as 4. The convolution starts
    uniform by its steps, as that of `torch.nn.Conv1d` does, but for a and b, where it starts as the identity; the gate
    starts as `torch.nn.Linear` does.

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of units.
        num_heads: N, which divides H into heads of two units or more: each has a memory of (H / N)² numbers. More heads
            hold less and follow a state better: of 64 units four heads followed the words of S5, and one head did not.
            They are also faster, as long as each has 16 units or more. In heads of less than 32 units recall begins
            later.
        convolution: C, the steps that the convolution reads, its own among them; 0 leaves it out. It brings a key and
            the value a step later together, which the hidden state does too: 64 units recalled four keys after twice as
            many passes without it. Without it they followed S3 after half the passes, and with four heads and half the
            learning rate S5 with each of three seeds (with it with one of three). A language model of 1.5 million
            weights had a seventh less perplexity without it, or as much where a tenth of the outputs was given on. A
            training pass takes up to a quarter less time without it.
        output_gate: let the input of a step choose what of the hidden state is given out. The state is not affected. A
            language model of 1.5 million weights had a fifth less perplexity with it. What is given out is otherwise
            normalised, as large whatever the inputs are, and large beside word embeddings that begin small: a tenth of
            it was as good as the gate, and both were better (with values that started smaller; docs/recall.md).
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        impl: "cpu" is the C++ kernel, of float32 and float64 on a processor; "reference" is a loop over the steps in
            plain PyTorch, several times slower; "auto" takes the kernel where it can. On a GPU, and with bfloat16 or
            float16, that is the loop.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size or `impl` is out of range, or `num_heads` does not divide `hidden_size` into heads of two
            units or more.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.DeltaFastWeightsRNN(input_size=5, hidden_size=6, num_heads=2)
        >>> y, state = layer(torch.randn(7, 3, 5))         # x [T,B,D]
        >>> y.shape, state.hidden.shape, state.memory.shape  # [T,B,H], [B,H], [B,N,W,W]
        (torch.Size([7, 3, 6]), torch.Size([3, 6]), torch.Size([3, 2, 3, 3]))
        >>> y, state = layer(torch.randn(4, 3, 5), state.detach())  # goes on where the first piece ended
    """

    _state_type = DeltaFastWeightsState

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int = 1,
        *,
        convolution: int = 4,
        output_gate: bool = False,
        batch_first: bool = False,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_heads=num_heads)
        check_normalized(hidden_size=hidden_size)
        check_integers(0, convolution=convolution)
        check_choice(IMPLEMENTATIONS, impl=impl)
        if hidden_size % num_heads:
            raise ValueError(f"num_heads must divide hidden_size, got {num_heads} heads of {hidden_size} units")
        if hidden_size == num_heads:
            raise ValueError(
                f"num_heads must leave two units or more to a head, got {num_heads} heads of {hidden_size} units: "
                "normalised, a key of one unit is 1 or -1 whatever is read, and learns nothing"
            )
        self.input_size, self.hidden_size, self.num_heads = input_size, hidden_size, num_heads
        self.convolution, self.batch_first, self.impl = convolution, batch_first, impl
        options = {"device": device, "dtype": dtype}
        rows = 4 * hidden_size + 2 * num_heads
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, **options))
        self.weight_hh = nn.Parameter(torch.empty(rows, hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(rows, **options))
        self.norm = nn.LayerNorm(hidden_size, **options)
        self.convolution_weight = nn.Parameter(torch.empty(rows, convolution, **options)) if convolution else None
        self.convolution_bias = nn.Parameter(torch.empty(rows, **options)) if convolution else None
        self.gate = nn.Linear(input_size, hidden_size, **options) if output_gate else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset all: uniform by fan-in, less into q and k, more into v; h into z half the identity; 0.98 is kept."""
        size = self.hidden_size
        for weight in (self.weight_ih, self.weight_hh):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            weight[size : 3 * size].mul_(0.25)
            # With values no larger than keys a reading was 2 % of the sum that the norm sees, and less in wider layers:
            # recall began late. In narrow heads a loud memory is in the way of the state (docs/recall.md).
            weight[3 * size : 4 * size].mul_(4 * (min(max(size // self.num_heads, _FEW), _MANY) / _MANY) ** 4)
        nn.init.eye_(self.weight_hh[:size]).mul_(0.5)
        nn.init.zeros_(self.bias)
        self.bias[4 * size : 4 * size + self.num_heads] = _KEPT
        self.norm.reset_parameters()
        # Those of a and b at random would take away the decay's start: some heads would forget at every step.
        for parameter in (self.convolution_weight, self.convolution_bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -1 / math.sqrt(self.convolution), 1 / math.sqrt(self.convolution))
                nn.init.zeros_(parameter[4 * size :])
        if self.convolution_weight is not None:
            self.convolution_weight[4 * size :, -1] = 1
        if self.gate is not None:
            self.gate.reset_parameters()

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight_hh.dtype

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        size, width = self.hidden_size, self.hidden_size // self.num_heads
        before = 0 if self.convolution_weight is None else self.convolution_weight.shape[1] - 1
        return {
            "hidden": (*batch, size),
            "memory": (*batch, self.num_heads, width, width),
            "convolution": (*batch, before, len(self.weight_ih)),
        }

    def _run(
        self, x: Tensor, state: DeltaFastWeightsState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, DeltaFastWeightsState]:
        hidden, end = self._recur(x, state, lengths, starts)
        return hidden if self.gate is None else hidden * F.silu(self.gate(x)), end

    def _recur(
        self, x: Tensor, state: DeltaFastWeightsState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, DeltaFastWeightsState]:
        """Run over x [T,B,D] -> the hidden states [T,B,H], zero past each length, and the last state."""
        dtype = self._dtype
        if state is None:
            shapes = self._state_shapes((x.shape[1],)).values()
            state = DeltaFastWeightsState(*(x.new_zeros(shape, dtype=dtype) for shape in shapes))
        hidden, memory, last = (tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in state)
        norm, taps = self.norm, self.convolution_weight
        shift, read = (None, None) if taps is None else (self.convolution_bias, last)
        alone = x.shape[0] == 1 and lengths is None and starts is None
        if alone and x.dtype == dtype and self.impl != "reference" and not autocast_is_on(x.device.type, dtype):
            products = (x[0], self.weight_ih, self.bias, self.weight_hh)
            step = StepInputs(*products, norm.weight, norm.bias, hidden, memory, taps, shift, read)
            if (taken := recurrent_delta_step(step)) is not None:
                outputs, *end = taken
                return outputs.unsqueeze(0), self._state_of(end, last)
        if taps is None:  # the state has no numbers of a convolution, but they are a part of the graph
            last = last.clone(memory_format=torch.contiguous_format) + x[:1, :1].sum().to(dtype)

        def recur(drive: Tensor) -> tuple[Tensor, DeltaFastWeightsState]:
            weights = (self.weight_hh, norm.weight, norm.bias)
            outputs, *end = recurrent_delta(
                drive,
                *weights,
                hidden,
                memory,
                taps=taps,
                taps_bias=shift,
                last=read,
                lengths=lengths,
                starts=starts,
                impl=self.impl,
            )
            return outputs, self._state_of(end, last)

        return run_without_autocast(recur, (F.linear(x, self.weight_ih, self.bias),), dtype)

    def _state_of(self, end: list[Any], last: Tensor) -> DeltaFastWeightsState:
        """Return the state of a run's last tensors; without a convolution its part of no numbers stays."""
        hidden, memory, recent = end
        return DeltaFastWeightsState(hidden, memory, last if recent is None else recent)

    def extra_repr(self) -> str:
        sizes = ["input_size", "hidden_size"]
        return describe(vars(self), sizes, num_heads=1, convolution=4, impl="auto", batch_first=False)
