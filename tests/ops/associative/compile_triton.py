"""Compile every path of the kernels, for GPUs not here: `python -m tests.ops.associative.compile_triton`."""

import torch

from fastweights.ops.associative import Constants, _kernels
from fastweights.ops.associative.triton import options

from ..triton_compiler import AMD, NVIDIA, compile_kernel

FULL, BARE = (Constants(0.9, 0.5, nonlinearity="tanh", normalize_initial=True), True), (Constants(0.9, 0.5), False)
INPUTS = ("norm", "memory", "strengths", "lengths", "starts", "clears")
CASES = [
    (NVIDIA, 50, torch.float32, FULL),
    (NVIDIA, 50, torch.float32, BARE),
    (NVIDIA, 50, torch.float64, FULL),
    (NVIDIA, 200, torch.float32, FULL),
    (AMD, 50, torch.float32, FULL),
]
WHOLE = ("first", "count", "batch", "inner", "segment", "room", "chunk")

if __name__ == "__main__":
    for target, size, dtype, (constants, present) in CASES:
        given = options(size, dtype, constants, **dict.fromkeys(INPUTS, present))
        for replay in (False, True):
            extra = {"EPS": constants.eps, "REPLAY": replay}
            compile_kernel(_kernels.recurrence, {**given, **extra}, WHOLE, dtype, target)
        compile_kernel(_kernels.gradients, {**given, "WRITTEN": present}, WHOLE, dtype, target)
