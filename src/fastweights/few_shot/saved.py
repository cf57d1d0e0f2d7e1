"""A classifier in one file: safetensors, with JSON that says how its network is built; nothing in it is executed."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastweights.errors import WeightsError
from fastweights.files import WEIGHTS, write_files
from fastweights.nn import (
    ConvEncoder,
    FastWeightsHead,
    FewShotNetwork,
    MatchingHead,
    PrototypeHead,
    ResidualEncoder,
)
from fastweights.nn.fast_weights_linear import FastWeightsLinear

PUBLISHED = ("omniglot",)  # names of what comes with the package
_VERSION = 1
_MOST = 100_000  # of any size that a file may ask for, so that none fills memory
_MOST_BLOCKS = 20
_MEND = "put a good copy in its place"

_Parts = dict[str, tuple[type[nn.Module], dict[str, type]]]
_EVALUATION = ("standardise", "interpolated", "mirrored")  # what ConvEncoder does to images, True or False

# The parts that a file can ask for, and the types of what they are built with.
_ENCODERS: _Parts = {
    "ConvEncoder": (
        ConvEncoder,
        {"channels": int, "filters": int, "size": int, "blocks": int, **dict.fromkeys(_EVALUATION, bool)},
    ),
    "ResidualEncoder": (ResidualEncoder, {"channels": int, "size": int, "widths": list, "features": int}),
}
_HEADS: _Parts = {
    "FastWeightsHead": (
        FastWeightsHead,
        {"num_classes": int, "hidden_size": int, "rule": str, "hidden": str, "softmax": str},
    ),
    "MatchingHead": (MatchingHead, {"num_classes": int, "scale": float}),
    "PrototypeHead": (PrototypeHead, {"num_classes": int}),
}
_ABOUT = {"shots": int, "ink": bool, "trained_on": str, "licence": str}


def built_of(network: nn.Module) -> dict[str, Any]:
    """How to build a network again, as plain JSON values; what matters in training alone is not in it.

    Raises:
        ValueError: it has other parts than those that a file can ask for, or they do not fit.
    """
    encoder, head = (getattr(network, name, None) for name in ("encoder", "head"))
    kinds = type(encoder).__name__, type(head).__name__
    if not isinstance(network, FewShotNetwork) or kinds[0] not in _ENCODERS or kinds[1] not in _HEADS:
        raise ValueError(
            f"a classifier is of an nn.FewShotNetwork with one of {', '.join(_ENCODERS)} under one of "
            f"{', '.join(_HEADS)}; got a {type(network).__name__} with {' under '.join(kinds)}"
        )
    own: dict[str, Any] = {}
    if isinstance(encoder, ConvEncoder):
        own = {"filters": encoder.convolutions[0].out_channels, "blocks": len(encoder.convolutions)}
        own |= {name: getattr(encoder, name) for name in _EVALUATION}
    elif isinstance(encoder, ResidualEncoder):
        own = {"widths": [int(block.shortcut.out_channels) for block in encoder.blocks], "features": encoder.features}
    of_encoder = {"kind": kinds[0], "channels": network.encoder.channels, "size": network.encoder.size, **own}
    of_head = {"kind": kinds[1], "num_classes": network.num_classes}
    if isinstance(head, FastWeightsHead):
        if head.hidden.in_features != network.encoder.features:
            raise ValueError(
                f"the head takes {head.hidden.in_features} features and the encoder makes {network.encoder.features}"
            )
        rules = [layer.rule for layer in (head.hidden, head.softmax) if isinstance(layer, FastWeightsLinear)]
        of_head |= {"hidden_size": head.softmax.in_features, "rule": rules[0]}
        of_head |= {"hidden": _place(head.hidden), "softmax": _place(head.softmax)}
    if isinstance(head, MatchingHead):
        of_head["scale"] = head.scale
    built = {"encoder": of_encoder, "head": of_head}
    for role, known in (("encoder", _ENCODERS), ("head", _HEADS)):
        values = {key: value for key, value in built[role].items() if key != "kind"}
        if wrong := _misfit(values, known[built[role]["kind"]][1]):
            raise ValueError(f"a file cannot say that the {role} has {wrong}")
    return built


def check_about(about: dict[str, Any]) -> None:
    """Refuse what a file could not say of a classifier.

    Raises:
        ValueError: a value is of another type, or out of range.
    """
    if wrong := _misfit(about, _ABOUT):
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
    metadata = {"version": _VERSION, **built_of(network), **about}
    try:
        write_files({target: serialised(tensors, {"few_shot_classifier": json.dumps(metadata)})})
    except OSError as error:
        raise WeightsError(f"cannot write {target}: {error.strerror}; what was there before is whole") from error


def load(name: str | os.PathLike[str]) -> tuple[FewShotNetwork, dict[str, Any]]:
    """The network of a saved classifier, and what is known about it.

    Raises:
        WeightsError: there is none of that name, or the file is missing, damaged or no classifier.
    """
    from safetensors import SafetensorError, safe_open

    path = _path(name)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = _metadata(path, (file.metadata() or {}).get("few_shot_classifier"))
            network = _unfilled(path, metadata)
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


def _path(name: str | os.PathLike[str]) -> Path:
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


def _metadata(path: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        raise WeightsError(f"{path} is no classifier: it was not written by FewShotClassifier.save")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: what it says of itself is no JSON ({error}): {_MEND}") from error
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        version = found.get("version") if isinstance(found, dict) else None
        raise WeightsError(f"{path} is of version {version!r}, and this package reads version {_VERSION}: update it")
    values = {key: value for key, value in found.items() if key not in ("version", "encoder", "head")}
    _check_values(path, "it", values, _ABOUT)
    return found


def _unfilled(path: Path, metadata: dict[str, Any]) -> FewShotNetwork:
    """The network that the metadata asks for, without memory for its weights."""
    try:
        with torch.device("meta"):
            made, values = _part(path, "encoder", metadata.get("encoder"), _ENCODERS)
            encoder = made(**values)
            made, values = _part(path, "head", metadata.get("head"), _HEADS)
            features = {"in_features": encoder.features} if made is FastWeightsHead else {}
            return FewShotNetwork(encoder, made(**features, **values))
    except (OverflowError, RuntimeError, ValueError) as error:
        raise WeightsError(f"{path} is damaged: {' '.join(str(error).split())}: {_MEND}") from error


def _part(path: Path, role: str, given: Any, known: _Parts) -> tuple[type[nn.Module], dict[str, Any]]:
    """What is to be made, and with which values."""
    values = dict(given) if isinstance(given, dict) else {}
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in known:
        raise WeightsError(f"{path}: its {role} must be one of {', '.join(known)}, got {kind!r}: {_MEND}")
    made, types = known[kind]
    _check_values(path, f"its {role}", values, types)
    return made, values


def _check_values(path: Path, whose: str, values: dict[str, Any], types: dict[str, type]) -> None:
    if set(values) != set(types):
        raise WeightsError(
            f"{path}: {whose} must say {', '.join(types)}, got {', '.join(values) or 'nothing'}: {_MEND}"
        )
    if wrong := _misfit(values, types):
        raise WeightsError(f"{path}: {whose} has {wrong}: {_MEND}")


def _misfit(values: dict[str, Any], types: dict[str, type]) -> str | None:
    """The first value of another type or out of range, with its name."""
    for key, value in values.items():
        fits = type(value) is types[key]
        if fits and types[key] is int:
            fits = 1 <= value <= (_MOST_BLOCKS if key == "blocks" else _MOST)
        elif fits and types[key] is list:
            fits = len(value) <= _MOST_BLOCKS and all(type(one) is int and 1 <= one <= _MOST for one in value)
        if not fits:
            return f"{key} {value!r}"
    return None


def _place(layer: nn.Module) -> str:
    if not isinstance(layer, FastWeightsLinear):
        return "slow"
    return "both" if layer.slow else "fast"
