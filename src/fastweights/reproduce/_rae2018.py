"""What the experiments after Rae et al. 2018 share: the two heads, on the network of section 4.1, which is that of
Matching Networks (Vinyals et al. 2016)."""

from typing import Literal

import torch
from torch import Tensor, nn

from fastweights.nn import HebbianSoftmax

ModelName = Literal["softmax", "hebbian"]
TITLES: dict[ModelName, str] = {"softmax": "Softmax", "hebbian": "Hebbian Softmax"}
FEATURES = 64  # filters of every block, and of what comes out


class ConvNet(nn.Module):
    """Four blocks of 3 x 3 convolution, batch normalisation, ReLU and 2 x 2 max pooling: images -> activations.

    Shapes: images [B,1,28,28], float -> [B,64], each filter's one value, never negative.

    Examples:
        >>> import torch
        >>> from fastweights.reproduce._rae2018 import ConvNet
        >>> ConvNet()(torch.rand(3, 1, 28, 28)).shape
        torch.Size([3, 64])
    """

    def __init__(self) -> None:
        super().__init__()
        blocks = []
        for features in (1, FEATURES, FEATURES, FEATURES):
            # The normalisation has a bias of its own.
            blocks += [nn.Conv2d(features, FEATURES, 3, padding=1, bias=False), nn.BatchNorm2d(FEATURES)]
            blocks += [nn.ReLU(), nn.MaxPool2d(2)]
        # Features side by side in memory: on a processor a step takes half the time.
        self.blocks = nn.Sequential(*blocks).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        activations: Tensor = self.blocks(images).flatten(1)
        return activations


class Classifier(nn.Module):
    """A body, the convolutional network, under a softmax layer: images [B,1,28,28] -> logits [B,V], and their loss.

    Examples:
        >>> import torch
        >>> from fastweights.nn import HebbianSoftmax
        >>> from fastweights.reproduce._rae2018 import Classifier
        >>> model = Classifier(HebbianSoftmax(64, 10))
        >>> model(torch.rand(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    def __init__(self, head: HebbianSoftmax, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = ConvNet() if body is None else body
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss(self.body(images), targets)
