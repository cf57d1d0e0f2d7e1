"""The examples that were added to a classifier: features and names in an episodic memory, and their sums by class."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral, Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.memory.store.episodic import EpisodicMemory

LONGEST_NAME = 128  # bytes of UTF-8
SHORTEST_WORD = 4  # letters: many shorter words are one letter away from another


class Group(NamedTuple):
    """The examples of a class."""

    features: Tensor  # [n,d] float32
    logits: Tensor  # [n,V] of the network, or of no columns


class Groups(NamedTuple):
    """The examples of all classes, and what they were made of."""

    entries: object  # the identity of the memory's entries
    numbers: Tensor  # the numbers of those entries
    renaming: tuple[str, str] | None  # as in `gather`
    by_class: dict[str, Group]  # a class that stays as it was keeps its group


def list_names(names: Any, what: str) -> list[str]:
    """Return names of any ordered kind, such as an array of NumPy, as a list of plain strings.

    Args:
        names: the names.
        what: what they are called in an error.
    """
    if isinstance(names, str | bytes | Mapping | Set) or not isinstance(names, Iterable):
        raise ValueError(f"{what} must be a list of strings, got {names!r:.60}")
    each = list(names)
    for row, name in enumerate(each):
        if not isinstance(name, str):
            hint = ": str() makes one of it" if isinstance(name, Number) else ""
            raise ValueError(f"{what}[{row}] must be a string, got {name!r}{hint}")
    return [str(name) for name in each]


def name_labels(labels: Sequence[Any], classes: Sequence[str]) -> list[str]:
    """Return the names of a data set's labels: strings are names, integers are positions among the classes."""
    named, names = set(classes), list[str]()
    for row, label in enumerate(labels):
        value = label.item() if isinstance(label, Tensor | np.ndarray) and label.ndim == 0 else label
        if isinstance(value, str):
            names.append(str(value))
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"label {row} must be a name or a position among classes, got {value!r:.60}: give names")
        position = int(value)
        if not 0 <= position < len(classes):
            raise ValueError(
                f"label {row} is {position}, which is no position among {len(classes)} classes, 0 to "
                f"{len(classes) - 1}: give names"
            )
        name = classes[position]
        if name != str(position) and str(position) in named:
            raise ValueError(
                f"label {row} is {position}, which may be the class {str(position)!r} or position {position} among "
                f"classes, {name!r}: give names"
            )
        names.append(name)
    return names


def encode_name(name: str) -> Tensor:
    """Return a name as a value of the memory."""
    try:
        code = name.encode() if isinstance(name, str) else b""
    except UnicodeEncodeError:  # half of a pair of surrogates
        code = b""
    if not 0 < len(code) <= LONGEST_NAME or b"\0" in code:
        raise ValueError(f"a class has a name of 1 to {LONGEST_NAME} bytes of UTF-8, got {name!r}")
    return torch.tensor(list(code.ljust(LONGEST_NAME, b"\0")), dtype=torch.uint8)


def encode_names(names: Sequence[str]) -> Tensor:
    """Return names as values of the memory, [n,LONGEST_NAME]."""
    values = {name: encode_name(name) for name in set(names)}
    return torch.stack([values[name] for name in names]) if names else torch.empty(0, LONGEST_NAME, dtype=torch.uint8)


def _decode(values: Tensor) -> list[str]:
    return [code.decode() for code in values.numpy().view(f"S{LONGEST_NAME}").reshape(-1).tolist()]


def _check_room(store: EpisodicMemory, names: Sequence[str], old: Sequence[str], capacity: int) -> None:
    """Refuse examples of some names if a new class could only be kept at the price of another's last example.

    Args:
        store: the examples that are there.
        names: those of the ones that are to be added.
        old: the classes that need no example, for there are statistics of them.
        capacity: how many examples may be kept.
    """
    if len(store) + len(names) <= capacity:
        return
    if len(names) > capacity:
        raise ValueError(f"{len(names)} examples do not fit into capacity={capacity}: add fewer of them")
    new = {*names, *_decode(store.values)} - set(old)
    if len(new) > capacity:
        raise ValueError(
            f"capacity={capacity} has no room for one example of {len(new)} new classes each: forget() some, or make a "
            "classifier with a greater capacity"
        )


def make_room(store: EpisodicMemory, added: Sequence[str], old: Sequence[str], capacity: int) -> tuple[Tensor, Tensor]:
    """Return which examples of the memory must go, and which of those that are to be added can stay.

    It is always the oldest of the class that has the most that goes, until no more than `capacity` are left.
    """
    _check_room(store, added, old, capacity)
    there = len(store)
    if there + len(added) <= capacity:
        return torch.empty(0, dtype=torch.long), torch.arange(len(added))
    names, index = np.unique([*_decode(store.values), *added], return_inverse=True)
    ages = np.arange(len(index), 0, -1)
    by_class = np.argsort(index, kind="stable")
    # Who has the most younger ones in its class goes first, which is the order of taking turns.
    younger = np.empty(len(index), int)
    younger[by_class] = np.searchsorted(index[by_class], index[by_class], side="right") - np.arange(len(index))
    first_to_stay = np.lexsort((ages, np.isin(names, old)[index], younger))
    gone = torch.from_numpy(first_to_stay[capacity:])
    stay = torch.ones(there + len(added), dtype=torch.bool)
    stay[gone] = False
    return gone[gone < there], stay[there:].nonzero()[:, 0]


def gather(
    store: EpisodicMemory,
    answer: Callable[[Tensor], Tensor],
    before: Groups | None,
    renaming: tuple[str, str] | None = None,
) -> Groups:
    """Return the examples by class; where some were only appended since `before`, only those are gone through.

    Args:
        store: the examples.
        answer: features [n,d] -> logits [n,V].
        before: what was returned before, or None.
        renaming: a name in the memory, and the one that its examples have by now.
    """
    ring, numbers = store.entries(), store.numbers
    done, by_class = 0, dict[str, Group]()
    if (
        before is not None
        and before.entries is ring.identity
        and before.renaming == renaming
        and torch.equal(numbers[: len(before.numbers)], before.numbers)
    ):
        done, by_class = len(before.numbers), before.by_class.copy()
    rows = torch.arange(done, len(numbers))
    names, index = np.unique(_rename(_decode(ring.values_at(rows)), renaming), return_inverse=True)
    features, groups = ring.keys_at(rows), torch.from_numpy(index.reshape(-1))
    logits = answer(features)
    for number, name in enumerate(names.tolist()):
        new = Group(features[groups == number], logits[groups == number])
        if name in by_class:
            new = Group(*map(torch.cat, zip(by_class[name], new, strict=True)))
        by_class[name] = new
    return Groups(ring.identity, numbers, renaming, by_class)


def read_names(store: EpisodicMemory, renaming: tuple[str, str] | None) -> list[str]:
    """Return the name of each example, oldest first; `renaming` as in `gather`."""
    return _rename(_decode(store.values), renaming)


def _rename(names: list[str], renaming: tuple[str, str] | None) -> list[str]:
    return names if renaming is None else [renaming[1] if name == renaming[0] else name for name in names]


def find_alike(name: str, others: Iterable[str]) -> str | None:
    """Return another name that this one may have been meant to be, or None.

    It differs in capitals and spaces alone, or in one letter of a word that is no short one: left out, put in, changed
    or exchanged with the next. Numbers in names tell classes apart.

    Examples:
        >>> [find_alike(name, ["heron", "digit 3", "cat"]) for name in ("herron", "Heron ", "digit 4", "bat")]
        ['heron', 'heron', None, None]
    """
    words = name.casefold().split()
    for other in others:
        if other != name and _are_alike(words, other.casefold().split()):
            return other
    return None


def _are_alike(words: list[str], others: list[str]) -> bool:
    if "".join(words) == "".join(others):
        return True
    if len(words) != len(others):
        return False
    changed = [pair for pair in zip(words, others, strict=True) if pair[0] != pair[1]]
    if len(changed) != 1:
        return False
    short, long = sorted(changed[0], key=len)
    if len(short) < SHORTEST_WORD or len(long) > len(short) + 1:
        return False
    first = next((place for place, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(short))
    left, right = short[first:], long[first:]
    if len(long) > len(short):
        return right[0].isalpha() and left == right[1:]
    exchanged = left[:2] == right[1::-1] and left[2:] == right[2:]
    return (left[0] + right[0]).isalpha() and (left[1:] == right[1:] or exchanged)
