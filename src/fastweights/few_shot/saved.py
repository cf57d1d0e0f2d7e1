"""A classifier in one file: safetensors, with JSON that says how its network is built; nothing in it is executed."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastweights.errors import WeightsError
from fastweights.few_shot.encoders import ConvEncoder, ResidualEncoder
from fastweights.few_shot.fast_weights_head import FastWeightsHead
from fastweights.few_shot.metric_heads import MatchingHead, PrototypeHead
from fastweights.few_shot.network import FewShotNetwork
from fastweights.files import WEIGHTS, write_files

PUBLISHED = ("omniglot",)  # names of what comes with the package
_VERSION = 1
_MOST = 100_000  # the largest size that a file may ask for
_MOST_BLOCKS = 20
_MEND = "put a good copy in its place"

_ENCODERS: dict[str, type[nn.Module]] = {part.__name__: part for part in (ConvEncoder, ResidualEncoder)}
_HEADS: dict[str, type[nn.Module]] = {part.__name__: part for part in (FastWeightsHead, MatchingHead, PrototypeHead)}
_ABOUT = {"shots": int, "ink": bool, "trained_on": str, "licence": str}


def describe_network(network: nn.Module) -> dict[str, Any]:
    """Return how to build a network again, in plain JSON values: each part's kind and `config`.

    Raises:
        ValueError: the network has parts that a file cannot hold, or they do not fit one another.
    """
    encoder, head = (getattr(network, name, None) for name in ("encoder", "head"))
    kinds = type(encoder).__name__, type(head).__name__
    if not isinstance(network, FewShotNetwork) or kinds[0] not in _ENCODERS or kinds[1] not in _HEADS:
        raise ValueError(
            f"a classifier is of a FewShotNetwork with one of {', '.join(_ENCODERS)} under one of "
            f"{', '.join(_HEADS)}; got a {type(network).__name__} with {' under '.join(kinds)}"
        )
    if isinstance(head, FastWeightsHead) and head.in_features != network.encoder.features:
        raise ValueError(f"the head takes {head.in_features} features and the encoder makes {network.encoder.features}")
    parts = {"encoder": network.encoder, "head": network.head}
    for role, part in parts.items():
        if wrong := _find_wrong_size(part.config):
            raise ValueError(f"a file cannot say that the {role} has {wrong}")
    return {role: {"kind": type(part).__name__, **part.config} for role, part in parts.items()}


def check_about(about: dict[str, Any]) -> None:
    """Refuse notes about a classifier that a file cannot hold.

    Raises:
        ValueError: a value is of another type, or out of range.
    """
    if wrong := _find_wrong_note(about):
        raise ValueError(
            f"a file cannot say {wrong}; shots must be at most {_MOST:,}, ink a bool, trained_on and licence words"
        )


def save(path: str | os.PathLike[str], network: nn.Module, about: dict[str, Any]) -> None:
    """Write a network's weights, in float32, beside their place and rename them.

    Raises:
        WeightsError: the file's name does not end in .safetensors, a weight is not finite, or the disk refuses.
    """
    from safetensors.torch import save as serialised

    target = Path(os.path.expanduser(path))
    if target.suffix != ".safetensors":
        raise WeightsError(f"a classifier is saved in a file that ends in .safetensors, got {target}")
    tensors = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in network.state_dict().items()
    }
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise WeightsError(f"{name} has numbers that are not finite: {target} is not written")
    metadata = {"version": _VERSION, **describe_network(network), **about}
    try:
        write_files({target: serialised(tensors, {"few_shot_classifier": json.dumps(metadata)})})
    except OSError as error:
        raise WeightsError(f"cannot write {target}: {error.strerror}; what was there before is whole") from error


def load(name: str | os.PathLike[str]) -> tuple[FewShotNetwork, dict[str, Any]]:
    """Load the network of a saved classifier, and the notes about it.

    Raises:
        WeightsError: there is none of that name, or the file is missing, damaged or no classifier.
    """
    from safetensors import SafetensorError, safe_open

    path = _find_file(name)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = _read_metadata(path, (file.metadata() or {}).get("few_shot_classifier"))
            network = _build_empty(path, metadata)
            expected = network.state_dict()
            # Before anything is read: what the metadata asks for may be far more than the file has.
            _check_names(path, set(expected), set(file.keys()))
            for key, tensor in expected.items():
                shape = file.get_slice(key).get_shape()
                if shape != list(tensor.shape):
                    raise WeightsError(f"{path}: {key} must be {list(tensor.shape)}, got {shape}: {_MEND}")
            weights = {key: file.get_tensor(key).clone() for key in expected}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read ({' '.join(str(error).split())}): {_MEND}") from error
    for key, tensor in weights.items():
        if tensor.dtype != expected[key].dtype or not bool(tensor.isfinite().all()):
            raise WeightsError(f"{path}: {key} must be finite numbers of {expected[key].dtype}: {_MEND}")
    network.load_state_dict(weights, assign=True)
    network.encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.eval(), {key: metadata[key] for key in _ABOUT}


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


def _check_names(path: Path, expected: set[str], found: set[str]) -> None:
    for names, what in ((expected - found, "is missing"), (found - expected, "is not of its network")):
        if names:
            raise WeightsError(f"{path}: the tensor {min(names)} {what}: {_MEND}")


def _read_metadata(path: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        raise WeightsError(f"{path} is no classifier: it was not written by FewShotClassifier.save")
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its description of itself is no JSON ({error}): {_MEND}") from error
    if not isinstance(metadata, dict) or metadata.get("version") != _VERSION:
        version = metadata.get("version") if isinstance(metadata, dict) else None
        raise WeightsError(f"{path} is of version {version!r}, and this package reads version {_VERSION}: update it")
    values = {key: value for key, value in metadata.items() if key not in ("version", "encoder", "head")}
    if set(values) != set(_ABOUT):
        raise WeightsError(f"{path}: it must say {', '.join(_ABOUT)}, got {', '.join(values) or 'nothing'}: {_MEND}")
    if wrong := _find_wrong_note(values):
        raise WeightsError(f"{path}: it has {wrong}: {_MEND}")
    return metadata


def _build_empty(path: Path, metadata: dict[str, Any]) -> FewShotNetwork:
    """Build the network that the metadata asks for, without memory for its weights."""
    with torch.device("meta"):
        encoder = _build_part(path, "encoder", metadata.get("encoder"), _ENCODERS)
        features = {"in_features": encoder.features}
        return FewShotNetwork(encoder, _build_part(path, "head", metadata.get("head"), _HEADS, features))


def _build_part(
    path: Path, role: str, values: Any, kinds: dict[str, type[nn.Module]], more: dict[str, int] | None = None
) -> Any:
    config = dict(values) if isinstance(values, dict) else {}
    kind = config.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise WeightsError(f"{path}: its {role} must be one of {', '.join(kinds)}, got {kind!r}: {_MEND}")
    if wrong := _find_wrong_size(config):
        raise WeightsError(f"{path}: its {role} has {wrong}: {_MEND}")
    try:
        part: Any = kinds[kind](**config, **(more or {} if kind == "FastWeightsHead" else {}))
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} is damaged: {' '.join(str(error).split())}: {_MEND}") from error
    if part.config.keys() != config.keys():
        raise WeightsError(f"{path}: its {role} must say {', '.join(part.config)}, got {', '.join(config)}: {_MEND}")
    return part


def _find_wrong_size(config: dict[str, Any]) -> str | None:
    """Return the first size that is out of range, with its name."""
    for key, value in config.items():
        sizes = value if isinstance(value, list) else [value]
        most = _MOST_BLOCKS if key == "blocks" else _MOST
        if len(sizes) > _MOST_BLOCKS or any(type(size) is int and not 1 <= size <= most for size in sizes):
            return f"{key} {value!r}"
    return None


def _find_wrong_note(about: dict[str, Any]) -> str | None:
    """Return the first note about a classifier that has another type, or a size out of range, with its name."""
    for key, value in about.items():
        if type(value) is not _ABOUT[key] or (type(value) is int and not 1 <= value <= _MOST):
            return f"{key} {value!r}"
    return None
