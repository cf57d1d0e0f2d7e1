"""Characters of Omniglot for the guides to new classes: those that a network knows, and one of each unseen alphabet."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.tasks.omniglot import Omniglot

EVERY = 8  # so many characters of the background have one that is learnt
ALPHABETS = 20  # of the other drawings

Examples = tuple[Tensor, Tensor]  # inputs [n,...] and class indices [n]


def drawings_of(data: Omniglot) -> Tensor:
    """Return the drawings [characters,20,1,28,28], ink 1 and paper 0."""
    return data.images[:, :, None].float() / 255


def learnt(data: Omniglot) -> Tensor:
    """Return the drawings of the characters that a network learns, of 30 alphabets."""
    return drawings_of(data)[: data.background : EVERY]


def unseen(data: Omniglot) -> list[int]:
    """Return the first character of each alphabet that no network has seen."""
    alphabets = data.alphabet[data.background :].tolist()
    return [data.background + alphabets.index(one) for one in sorted(set(alphabets))]


def number(drawings: Tensor) -> Examples:
    """Return drawings [classes,n,1,28,28] one after another, with their classes."""
    classes = torch.arange(len(drawings), device=drawings.device)
    return drawings.flatten(0, 1), classes.repeat_interleave(drawings.shape[1])


def make_network(classes: int) -> tuple[nn.Sequential, nn.Linear]:
    """Return a body with 64 features, three blocks of convolutions and a linear layer, and its head."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    blocks = [*block(1, 32), *block(32, 64), *block(64, 64)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 9, 64)), nn.Linear(64, classes)


def train(
    network: nn.Module,
    examples: Examples,
    *,
    epochs: int,
    batch_size: int,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Train a network on the cross entropy, by Adam, and freeze it; `change` is what a batch of inputs becomes."""
    x, y = examples
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(y)).split(batch_size):  # type: ignore[no-untyped-call]
                loss = F.cross_entropy(network(change(x[rows])), y[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    network.eval().requires_grad_(False)
