"""Batch normalisation of a batch that several processes share, with the statistics of the whole."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fastweights import processes


class SharedBatchNorm(TorchFunctionMode):
    """Has batch normalisation of `torch.nn` take its statistics from the parts of all processes; all must be inside.

    Examples:
        >>> import torch
        >>> from fastweights.nn.batch_norm import SharedBatchNorm
        >>> layer, x = torch.nn.BatchNorm1d(3), torch.randn(8, 3)
        >>> with SharedBatchNorm():  # one process has all
        ...     y = layer(x)
        >>> torch.allclose(y, layer(x), atol=1e-5)
        True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_batch_norm if func is F.batch_norm else func)(*args, **kwargs or {})


class _Total(torch.autograd.Function):
    """The sum over all processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return processes.add(numbers.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return processes.add(gradient)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise [B,C,...] as `torch.nn.functional.batch_norm` does, over the parts of all processes."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    count = x.new_tensor([x.numel() // x.shape[1]])
    sums: Tensor = _Total.apply(torch.cat([x.sum(dims), count]))  # type: ignore[no-untyped-call]
    mean, total = sums[:-1] / sums[-1], sums[-1].detach()
    centred = x - mean.view(shape)
    squares: Tensor = _Total.apply(centred.square().sum(dims))  # type: ignore[no-untyped-call]
    variance = squares / total
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    y = centred * (variance + eps).rsqrt().view(shape)
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
    return y.to(input.dtype)
