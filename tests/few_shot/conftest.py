from pathlib import Path

import pytest
import torch

from fastweights import few_shot
from fastweights.few_shot import FewShotClassifier

DRAWINGS = Path(__file__).parents[2] / "docs" / "guides" / "drawings"  # of characters that the published one never saw


def network(channels=1, size=28, classes=5, **head):
    torch.manual_seed(0)
    encoder = few_shot.ConvEncoder(channels, 16, size=size)
    return few_shot.FewShotNetwork(encoder, few_shot.FastWeightsHead(16, classes, hidden_size=32, **head))


@pytest.fixture
def small():
    """A network for up to 5 classes of drawings, with its weights as they were drawn."""
    return FewShotClassifier(network(), shots=1, ink=True)


@pytest.fixture
def images():
    """Ten drawings [10,1,28,28]."""
    return 0.2 * torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(1))
