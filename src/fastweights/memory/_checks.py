"""What is refused before it changes a memory."""

from typing import Any

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What distances of keys of this dtype are given in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact_dtype(device: torch.device) -> torch.dtype:
    """What differences are squared and summed in."""
    return torch.float32 if device.type == "mps" else torch.float64  # the one device without float64


def positive(name: str, number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")
    return number


def vectors(name: str, given: Any, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys or queries [n,size] in a memory's dtype, detached, and their squared lengths [n]; finite, or an error."""
    found = torch.as_tensor(given).detach()
    if found.dim() != 2 or found.shape[1] != size:
        raise ValueError(f"{name} must be [n,{size}], the memory's key_size; got {list(found.shape)}")
    if not found.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {found.dtype}")
    cast = found.to(device=device, dtype=dtype)
    lengths = squared_lengths(cast)
    good = lengths <= torch.finfo(lengths.dtype).max / 16  # false of NaN too; a distance is up to four times this
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        if bool(found[row].isnan().any()):
            reason = "has a NaN"
        elif bool(found[row].isinf().any()):
            reason = "is infinite"
        elif bool(cast[row].isinf().any()):
            reason = f"becomes infinite in the memory's {dtype}"
        else:
            reason = f"is so long that squared distances would overflow {lengths.dtype}"
        raise ValueError(f"row {row} of {name} {reason}; nothing was changed: {name} must be finite numbers")
    return cast, lengths


def squared_lengths(vectors: Tensor) -> Tensor:
    """[n,d] -> [n], rounded once."""
    out = vectors.new_empty(len(vectors), dtype=compute_dtype(vectors.dtype))
    step = max(1, 2**20 // max(1, vectors.shape[1]))
    for first in range(0, len(vectors), step):
        piece = vectors[first : first + step].to(exact_dtype(vectors.device))
        out[first : first + step] = piece.square().sum(1)
    return out


def stored_values(given: Any, count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values [count,*shape] in a memory's dtype, detached; nothing may be lost by the cast but precision."""
    found = torch.as_tensor(given).detach()
    if tuple(found.shape) != (count, *shape):
        raise ValueError(f"values must be {[count, *shape]}, one for each of {count} keys; got {list(found.shape)}")
    if not torch.can_cast(found.dtype, dtype):
        raise ValueError(f"values are {found.dtype}, the memory holds {dtype}: give value_dtype={found.dtype} to it")
    if found.is_floating_point() or found.is_complex():
        _refuse_values(~_finite(found), found, "is not finite")
    cast = found.to(device=device, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        _refuse_values(~_finite(cast), found, f"becomes infinite in the memory's {dtype}")
    else:
        _refuse_values(cast.to(found.dtype) != found.to(device), found, f"does not fit into the memory's {dtype}")
    return cast


def _finite(values: Tensor) -> Tensor:
    return (values.float() if values.element_size() == 1 else values).isfinite()  # torch tells it of no float8


def _refuse_values(bad: Tensor, values: Tensor, reason: str) -> None:
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"row {place[0]} of values has {values[place].item()}, which {reason}; nothing was changed")
