"""Make what a caller gives as inputs into the batches that a body takes."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

Transform = Callable[[Any], Tensor]

AT_ONCE = 256  # items of a Dataset that are read together, if nobody says how many
_NUMBERS = "buifc"  # the kinds of NumPy's dtypes that tensors have
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Batch(NamedTuple):
    """A part of the inputs."""

    inputs: Any  # as the body takes them
    labels: list[Any] | None  # one an input, or None where there are none


def as_batch(inputs: Any, body: nn.Module, transform: Transform | None = None) -> Any:
    """Return inputs as a body takes them: numbers as one tensor, all else as it is, in a list where it was an array.

    Args:
        inputs: a tensor or a dict, which stay as they are; an array, a data frame, or a list of numbers or of tensors
            of one shape, which become one tensor, in the dtype of the body's weights if it floats; or anything else.
        body: what takes them.
        transform: what makes a tensor of each item of a list or an array, or None.

    Raises:
        ValueError: a single text, or items that `transform` does not make tensors of one shape of.
    """
    _check_several(inputs)
    if isinstance(inputs, Tensor | Mapping):
        return inputs
    items = inputs
    if hasattr(inputs, "__array__"):
        array = np.asarray(inputs)
        if array.ndim == 0:
            return inputs
        if array.dtype.kind not in _NUMBERS:
            items = array.tolist()
        elif transform is None:
            return _as_tensor(array, body)
        else:
            items = list(array)
    if transform is not None:
        return _transform(items, body, transform)
    return _stack(items, body) if isinstance(items, list | tuple) and items else items


def read_batches(
    inputs: Any, body: nn.Module, transform: Transform | None = None, size: int | None = None
) -> Iterator[Batch]:
    """Go through inputs batch by batch, each as the body takes it.

    Args:
        inputs: as `as_batch` takes them; a Dataset of inputs or of (input, label) pairs; or a DataLoader of such, whose
            own batches are kept.
        body: what takes them.
        transform: as `as_batch` takes it; a DataLoader's batches are tensors already, unless its `collate_fn` makes
            lists.
        size: how many inputs there are in a batch; None for one batch of all, or of `AT_ONCE` items of a Dataset.
    """
    if isinstance(inputs, DataLoader):
        for batch in inputs:
            some, labels = _part(batch)
            yield Batch(_move(as_batch(some, body, transform), body), labels)
    elif isinstance(inputs, Dataset):
        items = _items(inputs)
        while some := [_part_item(item) for item in islice(items, size or AT_ONCE)]:
            each = [one for one, _ in some]
            batch = default_collate(each) if isinstance(each[0], Mapping) else as_batch(each, body, transform)
            labels = [label for _, found in some for label in found]
            yield Batch(_move(batch, body), labels if len(labels) == len(each) else None)
    elif size is None:
        yield Batch(as_batch(inputs, body, transform), None)
    else:
        count = count_inputs(inputs)
        # A data frame is sliced by the names of its rows where these are numbers.
        whole = inputs if isinstance(inputs, Tensor) or not hasattr(inputs, "__array__") else np.asarray(inputs)
        for first in range(0, count, size):
            yield Batch(as_batch(slice_inputs(whole, first, first + size), body, transform), None)


def is_stream(inputs: Any) -> bool:
    """Return whether inputs are read item by item, and may have labels with them."""
    return isinstance(inputs, DataLoader | Dataset)


def is_shuffled(inputs: Any) -> bool:
    """Return whether inputs are known to come in another order each time."""
    return isinstance(inputs, DataLoader) and isinstance(inputs.sampler, _SHUFFLING)


def count_inputs(inputs: Any) -> int:
    """Return how many inputs there are, in a dict as many as in each of its values."""
    _check_several(inputs)
    if not isinstance(inputs, Mapping):
        if not hasattr(inputs, "__getitem__") or not hasattr(inputs, "__len__"):
            raise ValueError(
                "inputs must be all inputs at once, as a tensor or an array [N,...], a list, a dict of such, a Dataset "
                f"or a DataLoader; got {inputs!r:.60}"
            )
        return len(inputs)
    counts = {name: len(part) for name, part in inputs.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"a dict of inputs must have equally many under each name, got {counts}")
    return next(iter(counts.values()))


def slice_inputs(inputs: Any, first: int, last: int) -> Any:
    """Return some of the inputs; of a dict, some of each of its values, in one of its type, such as a BatchEncoding."""
    if not isinstance(inputs, Mapping):
        return inputs[first:last]
    parts = {name: part[first:last] for name, part in inputs.items()}
    if not isinstance(inputs, MutableMapping):
        return parts
    some = copy.copy(inputs)
    some.update(parts)
    return some


def _check_several(inputs: Any) -> None:
    """Refuse a single text, which would be taken letter by letter."""
    for where, one in inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]:
        if isinstance(one, str | bytes):
            place = f"inputs[{where!r}]" if where else "inputs"
            raise ValueError(f"{place} must be a list of texts, got the single text {one!r:.60}: give a list, [text]")


def _place(inputs: Tensor, body: nn.Module) -> Tensor:
    """Return a tensor that was made here where the body's weights are, in their dtype if it floats."""
    weight = next((each for each in body.parameters() if each.is_floating_point()), torch.empty(0))
    return inputs.to(weight.device, weight.dtype) if inputs.is_floating_point() else inputs.to(weight.device)


def _as_tensor(array: np.ndarray[Any, Any], body: nn.Module) -> Tensor:
    try:
        # A copy, in this machine's order of bytes: an array may be read-only, or a view.
        return _place(torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C")), body)
    except TypeError as error:
        raise ValueError(f"inputs are an array of {array.dtype}, which no tensor has: make float32 of it") from error


def _stack(items: Sequence[Any], body: nn.Module) -> Any:
    """Return numbers and tensors of one shape as one tensor, all else as it is."""
    first = items[0]
    if isinstance(first, Tensor):
        kinds = {(each.shape, each.dtype) if isinstance(each, Tensor) else None for each in items}
        return _place(torch.stack(list(items)), body) if len(kinds) == 1 else items
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, Real | np.ndarray | np.generic):
        try:
            array = np.asarray(items)
        except ValueError:  # of several lengths
            return items
        if array.dtype.kind in _NUMBERS:
            return _as_tensor(array, body)
    return items


def _transform(items: Any, body: nn.Module, transform: Transform) -> Tensor:
    if not isinstance(items, Sequence):
        raise ValueError(
            f"inputs must be a list of items for transform, or a tensor that needs none; got {items!r:.60}: give a "
            "list of it"
        )
    found: list[Tensor] = []
    for row, item in enumerate(items):
        one = transform(item)
        if not isinstance(one, Tensor):
            raise ValueError(f"transform must return a tensor, got {type(one).__name__} of item {row}")
        if found and one.shape != found[0].shape:
            raise ValueError(
                f"transform must return tensors of one shape, got {list(found[0].shape)} of item 0 and "
                f"{list(one.shape)} of item {row}"
            )
        found.append(one)
    if not found:
        raise ValueError("there are no inputs: give at least one")
    return _place(torch.stack(found), body)


def _items(dataset: Dataset[Any]) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return iter(dataset)
    return (dataset[number] for number in range(len(dataset)))


def _part(batch: Any) -> tuple[Any, list[Any] | None]:
    """Return the inputs of a DataLoader's batch, and its labels if it has some."""
    whole = isinstance(batch, tuple | list) and len(batch) in (1, 2)
    if not whole or not isinstance(batch[0], Tensor | Mapping | list | tuple | np.ndarray):
        return batch, None
    if len(batch) == 1:
        return batch[0], None
    labels = batch[1].tolist() if isinstance(batch[1], Tensor | np.ndarray) else batch[1]
    return batch[0], list(labels) if isinstance(labels, tuple | list) else [labels]


def _part_item(item: Any) -> tuple[Any, list[Any]]:
    """Return the input of a Dataset's item, and its label in a list, which is empty if it has none."""
    if not isinstance(item, tuple):
        return item, []
    if len(item) not in (1, 2):
        raise ValueError(f"a Dataset must have inputs, or pairs of an input and its label; got a tuple of {len(item)}")
    return item[0], list(item[1:])


def _move(batch: Any, body: nn.Module) -> Any:
    """Return a batch that was read here, or each part of a dict, as `_place` does."""
    if isinstance(batch, Tensor):
        return _place(batch, body)
    if isinstance(batch, dict):
        return {name: _place(part, body) if isinstance(part, Tensor) else part for name, part in batch.items()}
    return batch
