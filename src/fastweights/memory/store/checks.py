"""Checks of the tensors that are given to a memory: each returns them as the memory holds them, or raises an error."""

from typing import Any

import torch
from torch import Tensor

from fastweights.memory.store.ring import squared_lengths


def as_tensor(name: str, given: Any) -> Tensor:
    """Return what was given as a tensor, detached."""
    try:
        return torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be numbers: {type(given).__name__} cannot become a tensor ({error})") from error


def check_vectors(
    name: str, vectors: Any, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return keys or queries [n,size] in a memory's dtype, detached, and their squared lengths [n]; all are finite."""
    given = as_tensor(name, vectors)
    if given.dim() != 2 or given.shape[1] != size:
        raise ValueError(f"{name} must be [n,{size}], the memory's key_size; got {list(given.shape)}")
    if not given.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {given.dtype}")
    cast = given.to(device=device, dtype=dtype)
    lengths = squared_lengths(cast)
    good = lengths <= torch.finfo(lengths.dtype).max / 16  # false of NaN too; a distance is up to four times this
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        if bool(given[row].isnan().any()):
            reason = "has a NaN"
        elif bool(given[row].isinf().any()):
            reason = "is infinite"
        elif bool(cast[row].isinf().any()):
            reason = f"becomes infinite in the memory's {dtype}"
        else:
            reason = f"is so long that squared distances would overflow {lengths.dtype}"
        raise ValueError(f"row {row} of {name} {reason}; nothing was changed: {name} must be finite numbers")
    return cast, lengths


def check_values(values: Any, count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values [count,*shape] in a memory's dtype, detached; the cast loses nothing but precision."""
    given = as_tensor("values", values)
    if tuple(given.shape) != (count, *shape):
        raise ValueError(f"values must be {[count, *shape]}, one for each of {count} keys; got {list(given.shape)}")
    if not torch.can_cast(given.dtype, dtype):
        raise ValueError(f"values are {given.dtype}, the memory holds {dtype}: give value_dtype={given.dtype} to it")
    if given.is_floating_point() or given.is_complex():
        _refuse_values(~_finite(given), given, "is not finite")
    cast = given.to(device=device, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        _refuse_values(~_finite(cast), given, f"becomes infinite in the memory's {dtype}")
    else:
        _refuse_values(cast.to(given.dtype) != given.to(device), given, f"does not fit into the memory's {dtype}")
    return cast


def check_stream(h: Tensor, targets: Tensor, width: int | None, num_classes: int) -> None:
    """Refuse what is not activations [T,d], of a known width or of any, and labels [T]."""
    if h.dim() != 2 or len(h) != len(targets) or targets.dim() != 1 or h.shape[1] != (width or h.shape[1]):
        raise ValueError(
            f"log_prob takes activations [T,{width or 'd'}] and targets [T], got h {list(h.shape)} and targets "
            f"{list(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be class indices, int64, got {targets.dtype}")
    wrong = (targets < 0) | (targets >= num_classes)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"target {int(targets[index])} at {index} is not one of the {num_classes} classes, 0 to {num_classes - 1}"
        )
    if not h.dtype.is_floating_point or not bool(torch.isfinite(h).all()):
        raise ValueError(f"activations must be finite floating-point numbers, got {h.dtype} with NaN or infinity")


def _finite(values: Tensor) -> Tensor:
    return (values.float() if values.element_size() == 1 else values).isfinite()  # torch has no isfinite of float8


def _refuse_values(bad: Tensor, values: Tensor, reason: str) -> None:
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"row {place[0]} of values has {values[place].item()}, which {reason}; nothing was changed")


def as_token_ids(given: Any) -> Tensor:
    """Return token ids as a tensor of integers."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"token ids must be integers, got {type(given).__name__}") from error
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ValueError(f"token ids must be integers, got {ids.dtype}")
    return ids


def check_token_ids(ids: Tensor, classes: int) -> Tensor:
    """Return token ids in int64; they are of the model's tokens, 0 to V - 1."""
    wrong = ids[(ids < 0) | (ids >= classes)]
    if len(wrong):
        raise ValueError(
            f"the text has the token {int(wrong[0])}, and the model's are 0 to {classes - 1}: it was made by another "
            "tokenizer than the model's"
        )
    return ids.long()


def check_prompts(input_ids: Any, classes: int | None) -> Tensor:
    """Return texts [B,T] of the model's tokens, or of any where the number of classes is None."""
    ids = as_token_ids(input_ids)
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids must be texts [B,T], got {list(ids.shape)}")
    return ids if classes is None else check_token_ids(ids, classes)


def check_texts(
    input_ids: Any, attention_mask: Tensor | None, classes: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens of each row of texts [B,T] that are no padding [t], and their places [t]."""
    ids = check_prompts(input_ids, classes=None)
    mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask must be [B,T] like input_ids, {list(ids.shape)}, got {list(mask.shape)}")
    rows = []
    for row, (line, valid) in enumerate(zip(ids, mask, strict=True)):
        places = valid.nonzero()[:, 0]
        if len(places) < 2:
            raise ValueError(f"row {row} has {len(places)} tokens: a text of at least two is needed")
        rows.append((check_token_ids(line[places], classes).to(device), places.to(device)))
    return rows
