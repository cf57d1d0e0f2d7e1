"""Short training of the small networks of the guides."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@torch.enable_grad()
def fit(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int = 32,
    weight_decay: float = 0.0,
) -> None:
    """Train a network with Adam, on the squared error of numbers [n,k] or the cross entropy of classes [n]."""
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch_size):  # type: ignore[no-untyped-call]
            answers = network(x[rows])
            loss = F.mse_loss(answers, y[rows]) if y.is_floating_point() else F.cross_entropy(answers, y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
