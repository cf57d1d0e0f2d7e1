"""The kernels of a softmax that adapts along a stream; `memory.StreamMbPA` is their definition, in plain PyTorch."""

from fastweights.ops.stream.cpu import Neighbours, Ring, adapt, find, part_classes, predict, subtract, unavailable

__all__ = ["Neighbours", "Ring", "adapt", "find", "part_classes", "predict", "subtract", "unavailable"]
