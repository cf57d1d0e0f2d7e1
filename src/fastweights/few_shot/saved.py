"""A classifier in one file: safetensors, with JSON that says how it is built; nothing in it is executed."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fastweights.errors import WeightsError
from fastweights.few_shot.encoders import ConvEncoder, ResidualEncoder
from fastweights.few_shot.fast_weights_head import FastWeightsHead
from fastweights.few_shot.metric_heads import MatchingHead, PrototypeHead
from fastweights.few_shot.network import FewShotNetwork
from fastweights.files import WEIGHTS
from fastweights.pretrained import MEND, describe, is_description, load_model, pick_weights, serialise, write_weights

if TYPE_CHECKING:
    from fastweights.few_shot.classifier import FewShotClassifier

    Made = TypeVar("Made", bound=FewShotClassifier)

PUBLISHED = ("omniglot",)  # names of the classifiers that come with the package
_KEY, _VERSION = "few_shot_classifier", 2
_MOST = 100_000  # the largest number of shots

_ENCODERS = (ConvEncoder, ResidualEncoder)
_HEADS = (FastWeightsHead, MatchingHead, PrototypeHead)
_ABOUT = {"shots": int, "ink": bool, "trained_on": str, "licence": str}


def check_network(network: nn.Module) -> None:
    """Refuse a network of other parts than a classifier can be of, or of parts that do not fit one another.

    Raises:
        ValueError: it is such a network.
    """
    encoder, head = (getattr(network, name, None) for name in ("encoder", "head"))
    if not (isinstance(network, FewShotNetwork) and isinstance(encoder, _ENCODERS) and isinstance(head, _HEADS)):
        raise ValueError(
            f"FewShotClassifier needs a FewShotNetwork whose encoder is one of {_list(_ENCODERS)} and whose head is "
            f"one of {_list(_HEADS)}; got a {type(network).__name__} with "
            f"{type(encoder).__name__} and {type(head).__name__}"
        )
    if isinstance(head, FastWeightsHead) and head.in_features != encoder.features:
        raise ValueError(
            f"the head must take the {encoder.features} features of the encoder, got in_features={head.in_features}"
        )


def check_about(about: dict[str, Any]) -> None:
    """Refuse notes about a classifier that a file cannot hold.

    Raises:
        ValueError: a value is of another type, or out of range.
    """
    for key, value in about.items():
        if type(value) is not _ABOUT[key] or (type(value) is int and not 1 <= value <= _MOST):
            raise ValueError(
                f"{key}={value!r} cannot be saved: shots must be 1 to {_MOST:,}, ink a bool, trained_on and "
                "licence words"
            )


def save(path: str | os.PathLike[str], classifier: "FewShotClassifier") -> None:
    """Write a classifier, its weights in float32, beside its place and rename it.

    Raises:
        WeightsError: the file's name does not end in .safetensors, a weight is not finite, or the disk refuses.
    """
    target = Path(os.path.expanduser(path))
    if target.suffix != ".safetensors":
        raise WeightsError(f"a classifier is saved in a file that ends in .safetensors, got {target}")
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in pick_weights(classifier, target).items()
    }
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise WeightsError(f"{name} has NaN or infinity: {target} is not written")
    metadata = {"version": _VERSION, **describe(classifier)}
    write_weights(target, {target: serialise(tensors, {_KEY: json.dumps(metadata)})})


def load(cls: "type[Made]", name: str | os.PathLike[str]) -> "Made":
    """Load a saved classifier.

    Raises:
        WeightsError: there is none of that name, or the file is missing, damaged or no classifier.
    """
    from safetensors import SafetensorError, safe_open

    path = _find_file(name)
    try:
        with safe_open(path, framework="pt") as file:
            description = _read_metadata(path, (file.metadata() or {}).get(_KEY))
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read ({' '.join(str(error).split())}): {MEND}") from error
    classifier = load_model(cls, description, path)
    for key, tensor in classifier.network.state_dict().items():
        right = not tensor.is_floating_point() or tensor.dtype == torch.float32
        if not right or not bool(tensor.isfinite().all()):
            raise WeightsError(f"{path}: {key} must be finite numbers of torch.float32: {MEND}")
    return classifier


def _find_file(name: str | os.PathLike[str]) -> Path:
    if str(name) in PUBLISHED:
        return WEIGHTS / f"{name}.safetensors"
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path
    if path.suffix == ".safetensors":
        raise WeightsError(f"there is no file {path}")
    raise WeightsError(
        f"there is no classifier {str(name)!r}: give {' or '.join(PUBLISHED)}, or a file that ends in .safetensors"
    )


def _read_metadata(path: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        raise WeightsError(f"{path} is not a classifier: it was not written by FewShotClassifier.save")
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its metadata is not JSON ({error}): {MEND}") from error
    if not isinstance(metadata, dict) or metadata.pop("version", None) != _VERSION or not is_description(metadata):
        raise WeightsError(f"{path} is not a classifier of version {_VERSION}, which this package reads: {MEND}")
    return metadata


def _list(kinds: tuple[type, ...]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
