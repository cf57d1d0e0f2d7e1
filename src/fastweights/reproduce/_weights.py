"""Trained weights that come with the package, as safetensors: nothing is executed when they are read."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from fastweights.files import WEIGHTS, write_files


def path_of(experiment: str, model: str) -> Path:
    """Where the weights of an experiment's model are, if there are any."""
    return WEIGHTS / f"{experiment.replace('/', '_').replace('-', '_')}_{model.replace('-', '_')}.safetensors"


def publish(experiment: str, model: str, weights: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """Put a model's weights into the package, with what is to be known about them."""
    from safetensors.torch import save

    path = path_of(experiment, model)
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    write_files({path: save(tensors, {"about": json.dumps(about)})})
    return path


def published(experiment: str, model: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A model's weights and what is known about them, or None where the package has none."""
    from safetensors import safe_open

    path = path_of(experiment, model)
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.offset_keys()}
        return weights, json.loads(file.metadata()["about"])
