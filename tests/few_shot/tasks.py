"""What the tests of the few-shot layers share: small tasks, and the papers' equations as loops over examples."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CLASSES, WIDTH = 3, 4


class Tasks(NamedTuple):
    """Few-shot tasks whose examples are vectors."""

    keys: Tensor  # [tasks,n,WIDTH]
    labels: Tensor  # [tasks,n]
    queries: Tensor  # [tasks,m,WIDTH]


def draw(tasks=3, described=6, asked=5, *, dtype=torch.float64, seed=0) -> Tasks:
    """Tasks in which every class has an example, in an order of chance."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tasks, described, generator=generator).argsort(1)
    return Tasks(
        torch.randn(tasks, described, WIDTH, dtype=dtype, generator=generator),
        (torch.arange(described) % CLASSES)[order],
        torch.randn(tasks, asked, WIDTH, dtype=dtype, generator=generator),
    )


class Encoder(torch.nn.Module):
    """A small encoder of vectors: one layer, tanh."""

    def __init__(self, features=WIDTH, dtype=torch.float64):
        super().__init__()
        self.features = features
        self.layer = torch.nn.Linear(WIDTH, features, dtype=dtype)

    def forward(self, examples: Tensor) -> Tensor:
        z: Tensor = self.layer(examples)
        return z.tanh()


def indexed(tasks: Tasks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tasks as a network's call takes them: examples, description, labels, queries."""
    count, described = tasks.labels.shape
    examples = torch.cat([tasks.keys, tasks.queries], 1)
    index = torch.arange(examples.shape[0] * examples.shape[1]).view(count, -1)
    return examples.flatten(0, 1), index[:, :described], tasks.labels, index[:, described:]


def array(tensor: Tensor | torch.nn.Module | None) -> np.ndarray:
    assert isinstance(tensor, Tensor)
    return tensor.detach().numpy()


def leaky(z: np.ndarray, slope: float = 0.2) -> np.ndarray:
    return np.where(z > 0, z, slope * z)


def hebbian(keys: np.ndarray, labels: np.ndarray, projection: np.ndarray) -> np.ndarray:
    """Munkhdalai & Trischler 2018, eq 2, an example at a time: sum_i k_i (R y_i)^T."""
    memory = np.zeros((keys.shape[1], len(projection)))
    for key, label in zip(keys, labels, strict=True):
        one_hot = np.zeros(projection.shape[1])
        one_hot[label] = 1
        memory += np.outer(key, projection @ one_hot)
    return memory


def mapped(mapping: torch.nn.Module, gradient: np.ndarray) -> np.ndarray:
    """Appendix A: g of every coordinate by itself, from its weights."""
    assert isinstance(mapping, torch.nn.Sequential)
    layers = [(array(layer.weight), array(layer.bias)) for layer in mapping if isinstance(layer, torch.nn.Linear)]
    result = np.empty_like(gradient)
    for place in np.ndindex(*gradient.shape):
        unit = gradient[place][None]
        for index, (weight, bias) in enumerate(layers):
            unit = weight @ unit + bias
            unit = leaky(unit) if index < len(layers) - 1 else unit
        result[place] = unit[0]
    return result


def assert_close(mine, reference, tolerance=1e-10):
    torch.testing.assert_close(
        torch.as_tensor(mine).detach(), torch.as_tensor(reference).detach(), rtol=tolerance, atol=tolerance
    )
