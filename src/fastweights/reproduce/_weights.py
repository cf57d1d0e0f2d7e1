"""Trained weights that come with the package, as safetensors: nothing is executed when they are read."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from fastweights.files import WEIGHTS, write_files


def weights_path(experiment: str, model: str) -> Path:
    """Return the file of the weights of an experiment's model; it may not exist."""
    return WEIGHTS / f"{experiment.replace('/', '_').replace('-', '_')}_{model.replace('-', '_')}.safetensors"


def publish_weights(experiment: str, model: str, weights: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """Put a model's weights into the package, with facts about them such as seed and commit."""
    from safetensors.torch import save

    path = weights_path(experiment, model)
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    write_files({path: save(tensors, {"about": json.dumps(about)})})
    return path


def load_weights(experiment: str, model: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Load a model's weights and the facts about them, or None where the package has none."""
    from safetensors import safe_open

    path = weights_path(experiment, model)
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.offset_keys()}
        return weights, json.loads(file.metadata()["about"])
