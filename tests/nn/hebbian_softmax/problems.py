"""What the tests of Hebbian Softmax share: a head, its optimizer, and batches."""

import torch

from fastweights import nn

FEATURES, CLASSES = 6, 9


def problem(batches=12, size=16, *, seed=0, scale=1.0):
    """Batches of activations and labels; the last class comes late, and one never."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for index in range(batches):
        classes = CLASSES - 1 if index > batches // 2 else CLASSES - 2
        h = scale * torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
        drawn.append((h, torch.randint(0, classes, (size,), generator=generator)))
    return drawn


def head_and_optimizer(**options):
    torch.manual_seed(1)
    head = nn.HebbianSoftmax(FEATURES, CLASSES, dtype=torch.float64, **options)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.3, momentum=0.5)
    return head, optimizer


def step(head, optimizer, *batches):
    optimizer.zero_grad()
    for h, target in batches:
        head.loss(h, target).backward()
    optimizer.step()
