"""The file of a saved classifier, `classifier.safetensors`, beside the files of the memory that has its examples."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.errors import MemoryFileError
from fastweights.memory.classifier._densities import Densities, Model, Space
from fastweights.memory.classifier._statistics import FOLDS, Kept, Lacks, Rates, Statistics

FORMAT = "fastweights adaptive classifier 3"
BEFORE = "fastweights adaptive classifier 2"  # it is as this one, without what lies outside the axes
TOO_OLD = "fastweights adaptive classifier 1"
FILE = "classifier.safetensors"
PARTS = {"space": Space._fields, "densities": Densities._fields}  # the tensors of a model

Identity = tuple[int, int, int]


class Fitted(NamedTuple):
    """What a classifier knows of the network and its classes; never changed, so that any thread may read it."""

    classes: tuple[str, ...]  # the network's, in the order of its logits
    forgotten: frozenset[str]  # some of `classes`
    capacity: int
    network: str  # the fingerprint of the network when its features were read
    statistics: Statistics
    # An old name, and a new one, of a class of the network: examples of the first are of the second, until they are
    # renamed in the memory too. The memory and this file cannot be changed in one step.
    renaming: tuple[str, str] | None = None


def identify(path: Path) -> Identity:
    """Return what changes when the file is replaced."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise MemoryFileError(
            f"{path.parent} holds no saved classifier, there is no {path.name}: fit() one and save() it there first, "
            "or put a good copy of the whole folder in its place"
        ) from error
    except OSError as error:
        raise MemoryFileError(f"cannot read the classifier in {path}: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_classifier(path: Path) -> tuple[Fitted, Identity]:
    """Return what is saved in a file, and which file it is."""
    from safetensors import SafetensorError

    from fastweights.memory.store.disk import read_safetensors  # needs safetensors

    identity = identify(path)  # before the file is read: a newer one is read again by the next refresh
    try:
        metadata, found = read_safetensors(path)
        if metadata.get("format") == TOO_OLD:
            raise MemoryFileError(
                f"{path} was saved by an earlier version, whose thresholds were wrong where features are many: make a "
                "new AdaptiveClassifier, fit() it, add the examples again and save() it to another folder"
            )
        if metadata.get("format") not in (FORMAT, BEFORE):
            raise MemoryFileError(f"{path} is not a saved classifier, or one of another version: {metadata}")
        # Copies: the tensors would change with the file, or end the process where it is cut short.
        tensors = {name: tensor.clone() for name, tensor in found.items()}
        return _decode(json.loads(metadata["classifier"]), tensors), identity
    except OSError as error:
        raise MemoryFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MemoryFileError(
            f"{path} is damaged ({error}): put a good copy of the whole folder in its place"
        ) from error


def _decode(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Fitted:
    from fastweights.memory.store.disk import checksum  # needs safetensors

    if facts.pop("crc32") != checksum(facts, tensors):
        raise ValueError("its checksum is another")
    classes, forgotten, capacity = tuple(facts["classes"]), frozenset(facts["forgotten"]), facts["capacity"]
    if not (1 < len(classes) == len(set(classes)) and forgotten < set(classes) and capacity > 0):
        raise ValueError(f"it cannot be that of the classes {classes}, {set(forgotten)} are forgotten")
    if "space.outside" not in tensors:  # a file of BEFORE
        axes = tensors["space.axes"]
        tensors["space.outside"] = axes.new_zeros(*axes.shape[:2], 0)
    _check_shapes(tensors, len(classes))
    rates = Rates(**{name: _freeze(each) for name, each in facts["rates"].items()})
    rates = rates._replace(lacks=tuple(Lacks(*each) for each in rates.lacks))
    statistics = _join(tensors, rates)
    renaming = None
    if "renaming" in facts:
        before, after = renaming = tuple(facts["renaming"])
        if before in classes or after not in classes:
            raise ValueError(f"no class of {classes} can have been renamed from {before!r} to {after!r}")
    return Fitted(classes, forgotten, capacity, facts["network"], statistics, renaming)


def _split(found: Statistics) -> dict[str, Tensor]:
    """Return the tensors of what is known of the old classes, by name; those of the whole and of folds are stacked."""
    models = [found.whole, *found.folds]
    named = {
        f"{part}.{name}": torch.stack([getattr(getattr(model, part), name) for model in models])
        for part, names in PARTS.items()
        for name in names
    }
    named["scale"] = torch.stack([model.scale for model in models])
    return {name: tensor.contiguous() for name, tensor in (named | found.kept._asdict()).items()}


def _join(tensors: dict[str, Tensor], rates: Rates) -> Statistics:
    models = [
        Model(
            Space(*(tensors[f"space.{name}"][number] for name in Space._fields)),
            Densities(*(tensors[f"densities.{name}"][number] for name in Densities._fields)),
            tensors["scale"][number],
        )
        for number in range(FOLDS + 1)
    ]
    return Statistics(models[0], models[1:], Kept(*(tensors[name] for name in Kept._fields)), rates)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _check_shapes(tensors: dict[str, Tensor], classes: int) -> None:
    _, width, axes = tensors["space.axes"].shape
    outside = tensors["space.outside"].shape[2]
    size, kept, logits = axes + 1, len(tensors["features"]), tensors["logits"].shape[1]
    expected = {
        "space.center": [width],
        "space.axes": [width, axes],
        "space.outside": [width, outside],
        "space.distance": [],
        "densities.origin": [size],
        "densities.rotation": [size, size],
        "densities.spread": [size],
        "densities.counts": [classes],
        "densities.means": [classes, size],
        "scale": [size + outside],
    }
    shapes = {name: [FOLDS + 1, *shape] for name, shape in expected.items()}
    shapes |= {
        "features": [kept, width],
        "labels": [kept],
        "weights": [kept],
        "logits": [kept, classes if logits else 0],
    }
    kinds = {name: torch.float32 for name in ("space.center", "space.axes", "space.outside", "features", "logits")}
    kinds["labels"] = torch.int64
    for name, tensor in tensors.items():
        kind = kinds.get(name, torch.float64)
        if list(tensor.shape) != shapes.get(name) or tensor.dtype != kind or not tensor.isfinite().all():
            raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype} for {classes} classes, or not finite")
    labels = tensors["labels"]
    if not kept or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"there are labels of others than the {classes} classes, or none")


def encode(fitted: Fitted) -> bytes:
    """Return the contents of the file."""
    from safetensors.torch import save

    from fastweights.memory.store.disk import checksum  # needs safetensors

    facts = fitted._asdict() | {"forgotten": sorted(fitted.forgotten)}
    statistics = facts.pop("statistics")
    if facts["renaming"] is None:
        del facts["renaming"]
    facts["rates"], tensors = statistics.rates._asdict(), _split(statistics)
    facts["crc32"] = checksum(facts, tensors)
    return save(tensors, {"format": FORMAT, "classifier": json.dumps(facts)})
