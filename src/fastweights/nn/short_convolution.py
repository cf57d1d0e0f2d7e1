"""A causal convolution over the last few steps, which is told where sequences end and restart."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.checks import check_sizes
from fastweights.ops.lengths import take_recent
from fastweights.ops.short_convolution import short_convolution
from fastweights.pretrained import Pretrained

_EXACT = (torch.float32, torch.float64)  # what is less exact is convolved in float32
_MOST = 2**14  # numbers of one step; with more the kernel is the faster one


class ShortConvolution(Pretrained, nn.Module):
    """A convolution of each feature by itself over the last steps: y_t = bias + sum_i weight[:, i] x_{t-W+1+i}.

    Parameters: `weight` [C,W] and `bias` [C], which start uniform, as those of `torch.nn.Conv1d` with `groups=C`.

    Args:
        features: C.
        steps: W, how many steps an output reads: its own and the W - 1 before it.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size is out of range.

    Examples:
        >>> import torch
        >>> from fastweights.nn.short_convolution import ShortConvolution
        >>> convolution = ShortConvolution(features=6, steps=4)
        >>> y, last = convolution(torch.randn(2, 7, 6))        # x [B,T,C]
        >>> y.shape, last.shape                                # [B,T,C], [B,W-1,C]
        (torch.Size([2, 7, 6]), torch.Size([2, 3, 6]))
        >>> y, last = convolution(torch.randn(2, 1, 6), last)  # goes on where the first piece ended
    """

    def __init__(self, features: int, steps: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_sizes(features=features, steps=steps)
        self.features, self.steps = features, steps
        self.weight = nn.Parameter(torch.empty(features, steps, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all parameters: uniform by the number of steps."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(self.steps), 1 / math.sqrt(self.steps))

    def forward(
        self,
        x: Tensor,
        last: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        impl: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """Run over sequences.

        Args:
            x: [B,T,C].
            last: the inputs before x, [B,W-1,C]; None is zeros.
            lengths: valid steps of each sequence, int64 [B].
            starts: the steps before which another sequence begins, bool [B,T], none past a length: the inputs before
                such a step are zeros.
            impl: "auto", "reference" or "cpu".

        Returns:
            The outputs [B,T,C], and the inputs before the step after each last valid one, [B,W-1,C].

        Raises:
            ValueError: x or last has another shape.
        """
        if x.dim() != 3 or x.shape[2] != self.features:
            raise ValueError(f"x must be [B,T,C] with C = features = {self.features}, got shape {tuple(x.shape)}")
        before, (batch, steps, features) = self.steps - 1, x.shape
        if last is not None and last.shape != (batch, before, features):
            raise ValueError(f"last must have shape {(batch, before, features)} for this x, got {tuple(last.shape)}")
        # A compiler would make a program for one step of its own, and an export one for no other number.
        plain = not torch.compiler.is_compiling() and steps == 1 and impl != "cpu" and x.numel() <= _MOST
        weight, bias = self.weight, self.bias
        if (
            plain
            and lengths is None
            and starts is None
            and last is not None
            and x.dtype == last.dtype == weight.dtype in _EXACT
        ):
            # In a stream the way to the kernel takes three times as long as a product and a sum.
            inputs = torch.cat((last, x), 1)
            return (inputs * weight.t()).sum(1, keepdim=True) + bias, inputs[:, 1:].clone(
                memory_format=torch.contiguous_format
            )
        y = short_convolution(x, weight, bias, last, starts=starts, impl=impl)
        if last is None:
            last = x.new_zeros(batch, before, features)
        return y, take_recent(x, last, lengths, starts)

    def extra_repr(self) -> str:
        return f"{self.features}, steps={self.steps}"
