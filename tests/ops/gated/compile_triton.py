"""Compile every path of the kernels, for GPUs not here: `python -m tests.ops.gated.compile_triton`.

Prints what each takes of registers, and of memory where those are too few.
"""

import torch

from fastweights.ops.gated import _kernels
from fastweights.ops.gated.triton import fast_options, slow_options

from ..triton_compiler import AMD, NVIDIA, compile_kernel, resources

# H, D, P: the paper's sizes and the largest matrices that are taken; whether there are lengths, starts and states.
CASES = [
    (NVIDIA, torch.float32, (40, 15, 100), False),
    (NVIDIA, torch.float32, (100, 15, 200), True),
    (NVIDIA, torch.float64, (40, 15, 100), True),
    (AMD, torch.float32, (40, 15, 100), True),
    (AMD, torch.float32, (100, 15, 1000), False),
]
WHOLE = ("steps", "batch", "longest")

if __name__ == "__main__":
    for target, dtype, (size, features, inner), present in CASES:
        slow = slow_options(inner, size, dtype, lengths=present, starts=present)
        fast = fast_options(size, features, dtype, lengths=present, starts=present)
        for kernel, given in (
            (_kernels.slow_forward, slow),
            (_kernels.slow_backward, {**slow, "STATES": present}),
            (_kernels.fast_forward, {**fast, "EPS": 1e-5, "TRACE": present}),
            (_kernels.fast_backward, {**fast, "LAST": present}),
        ):
            compiled = compile_kernel(kernel, given, WHOLE, dtype, target)
            where = f"{target.arch} {dtype} H={size} D={features} P={inner}"
            print(f"{where}, {kernel.__name__}: {resources(compiled)}", flush=True)
