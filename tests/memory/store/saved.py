"""What the tests of saved memories share: small ones, and what lies on the disk."""

import torch

from fastweights import memory


def rows(*numbers):
    return torch.tensor([[float(number), 0.0] for number in numbers])


def opened(path, capacity=4, **options):
    return memory.EpisodicMemory.open(path, capacity, 2, **options)


def loaded(path):
    return memory.EpisodicMemory.load(path).values.tolist()


def everything(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}
