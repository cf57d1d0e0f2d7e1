"""The file of a saved classifier, `classifier.safetensors`, beside the files of the memory that has its examples."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights import files
from fastweights.errors import MemoryFileError
from fastweights.memory._class_densities import Densities

FORMAT = "fastweights adaptive classifier 1"
FILE = "classifier.safetensors"

Identity = tuple[int, int, int]


class Fitted(NamedTuple):
    """What a classifier knows of the network and its classes; never changed, so that any thread may read it."""

    classes: tuple[str, ...]  # of the network, in the order of its logits
    forgotten: frozenset[str]  # of those
    capacity: int
    network: str  # the fingerprint of the network when its features were read
    densities: Densities


def identify(folder: Path) -> Identity:
    """Return what changes when the file is replaced."""
    try:
        found = (folder / FILE).stat()
    except OSError as error:
        raise MemoryFileError(f"cannot read the classifier in {folder / FILE}: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_classifier(folder: Path) -> tuple[Fitted, Identity]:
    """Return what is saved, and which file it is from."""
    from safetensors import SafetensorError

    from fastweights.memory._disk import read_safetensors  # needs safetensors

    path = folder / FILE
    identity = identify(folder)  # before the file is read: a newer one is read again by the next refresh
    try:
        metadata, found = read_safetensors(path)
        if metadata.get("format") != FORMAT:
            raise MemoryFileError(f"{path} is not a saved classifier, or one of another version: {metadata}")
        # Copies: the tensors would change with the file, or end the process where it is cut short.
        tensors = {name: found[name].clone() for name in Densities._fields}
        return _decode(json.loads(metadata["classifier"]), tensors), identity
    except OSError as error:
        raise MemoryFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MemoryFileError(
            f"{path} is damaged ({error}): put a good copy of the whole folder in its place"
        ) from error


def _decode(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Fitted:
    from fastweights.memory._disk import checksum  # needs safetensors

    if facts.pop("crc32") != checksum(facts, tensors):
        raise ValueError("its checksum is another")
    classes, forgotten, capacity = tuple(facts["classes"]), frozenset(facts["forgotten"]), facts["capacity"]
    if not (1 < len(classes) == len(set(classes)) and forgotten < set(classes) and capacity > 0):
        raise ValueError(f"it cannot be that of the classes {classes}, {set(forgotten)} are forgotten")
    densities = Densities(**tensors)
    width = len(densities.origin)
    shapes = {
        "center": [width - 1],
        "origin": [width],
        "rotation": [width, width],
        "spread": [width],
        "counts": [len(classes)],
        "means": [len(classes), width],
    }
    for name, tensor in tensors.items():
        if list(tensor.shape) != shapes.get(name, []) or tensor.dtype != torch.float64 or not tensor.isfinite().all():
            raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype} for {len(classes)} classes, or not finite")
    return Fitted(classes, forgotten, capacity, facts["network"], densities)


@contextlib.contextmanager
def replacing(folder: Path, fitted: Fitted) -> Iterator[None]:
    """Write the file beside its place, and put it there when the block has ended: an error leaves the old one there.

    So the block can change what must change with it: a disk that has no room for the file refuses before the block.
    """
    from safetensors.torch import save

    from fastweights.memory._disk import checksum  # needs safetensors

    facts = fitted._asdict() | {"forgotten": sorted(fitted.forgotten)}
    tensors = {name: tensor.contiguous() for name, tensor in facts.pop("densities")._asdict().items()}
    facts["crc32"] = checksum(facts, tensors)
    contents = save(tensors, {"format": FORMAT, "classifier": json.dumps(facts)})
    path = folder / FILE
    try:
        with files.replacing(path, contents):
            yield
    except OSError as error:
        raise MemoryFileError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
