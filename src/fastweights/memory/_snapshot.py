"""A whole memory in one safetensors file, with a checksum over all of it."""

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.errors import MemoryFileError
from fastweights.memory._checks import squared_lengths
from fastweights.memory._ring import Entries
from fastweights.memory._state import State

FORMAT = "fastweights episodic memory 1"
Settings = dict[str, Any]


def write(path: Path, state: State, generation: int) -> None:
    """Write beside the place and rename; OSError or SafetensorError leaves what is there."""
    tensors = {name: one.detach().cpu().contiguous() for name, one in _tensors(state).items()}
    facts = _facts(state) | {"generation": generation}
    facts["crc32"] = _checksum(facts, tensors)
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, part, metadata={"format": FORMAT, "memory": json.dumps(facts)})
        sync(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """What was written or renamed is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, device: torch.device) -> tuple[State, int]:
    """A memory and its generation.

    Raises:
        MemoryFileError: the file is damaged or no memory.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise MemoryFileError(f"{path} is not an episodic memory, or one of another version: {metadata}")
            facts = json.loads(metadata["memory"])
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if facts.pop("crc32") != _checksum(facts, tensors):
            raise ValueError("its checksum is another")
        return _state(facts, tensors, device), facts["generation"]
    except OSError as error:
        raise MemoryFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise MemoryFileError(
            f"{path} is damaged ({error}): put a good copy of the whole folder in its place; nothing was changed"
        ) from error


def settings(state: State) -> Settings:
    """What cannot change in the life of a memory."""
    ring = state.ring
    return {
        "capacity": ring.capacity,
        "key_size": ring.keys.shape[1],
        "value_shape": list(ring.values.shape[1:]),
        "value_dtype": str(ring.values.dtype),
        "dtype": str(ring.keys.dtype),
    }


def _facts(state: State) -> Settings:
    return settings(state) | {
        "start_of_numbers": state.next_number,
        "next_tag": state.history.next_tag,
        "tags": [[tag, name] for tag, name in state.history.names.items()],
    }


def _tensors(state: State) -> dict[str, Tensor]:
    entries, history = state.entries(), state.history
    changes = [[0, *one[0], one[1]] if isinstance(one, tuple) else [1, len(one), 0, 0] for one in history.changes]
    removed = [one for one in history.changes if not isinstance(one, tuple)]
    found = _named("memory", entries) | {
        "undo.initial": torch.tensor(history.initial, dtype=torch.int64).view(-1, 2),
        "undo.changes": torch.tensor(changes, dtype=torch.int64).view(-1, 4),
        "undo.removed": torch.from_numpy(np.concatenate([np.empty(0, np.int64), *removed])),
    }
    return found | (_named("overwritten", history.overwritten()) if history.held else {})


def _named(place: str, entries: Entries) -> dict[str, Tensor]:
    return {
        f"{place}.keys": entries.keys,
        f"{place}.values": entries.values,
        f"{place}.numbers": torch.from_numpy(entries.numbers),
        f"{place}.tags": torch.from_numpy(entries.tags),
    }


def _entries(place: str, tensors: dict[str, Tensor], device: torch.device) -> Entries:
    return Entries(
        tensors[f"{place}.keys"].to(device),
        tensors[f"{place}.values"].to(device),
        tensors[f"{place}.numbers"].numpy().copy(),
        tensors[f"{place}.tags"].numpy().copy(),
    )


def _state(facts: Settings, tensors: dict[str, Tensor], device: torch.device) -> State:
    state = State(
        facts["capacity"],
        facts["key_size"],
        tuple(facts["value_shape"]),
        _dtype(facts["value_dtype"]),
        _dtype(facts["dtype"]),
        device,
    )
    entries = _entries("memory", tensors, device)
    if len(entries.numbers) > state.ring.capacity:
        raise ValueError("it holds more entries than its capacity")
    state.ring.append(entries, squared_lengths(entries.keys))
    state.next_number = facts["start_of_numbers"]
    history = state.history
    history.next_tag = facts["next_tag"]
    history.names = dict(facts["tags"])
    history.initial = [(first, last) for first, last in tensors["undo.initial"].tolist()]
    removed, done = tensors["undo.removed"].numpy(), 0
    for kind, first, last, tag in tensors["undo.changes"].tolist():
        if kind:
            history.changes.append(removed[done : done + first].copy())
            done += first
        else:
            history.changes.append(((first, last), tag))
    if "overwritten.keys" in tensors:
        history.hold(_entries("overwritten", tensors, device))
    return state


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, not copied where it is whole and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if len(flat) else memoryview(b"")


def _checksum(facts: Settings, tensors: dict[str, Tensor]) -> int:
    found = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        one = tensors[name]
        found = zlib.crc32(f"{name} {one.dtype} {list(one.shape)}".encode(), found)
        found = zlib.crc32(raw(one), found)
    return found
