"""Compile every path of the kernels, for GPUs not here: `python -m tests.ops.delta.compile_triton`.

Prints what each takes of registers, and of memory where those are too few.
"""

import torch

from fastweights.ops.delta import _kernels
from fastweights.ops.delta.triton import options

from ..triton_compiler import AMD, NVIDIA, compile_kernel, resources

FULL = {"BETA": True, "SKIP": False, "LENGTHS": True, "PACKED": False}
PACKED = {"BETA": True, "SKIP": False, "LENGTHS": False, "PACKED": True}
ADDITIVE = {"BETA": True, "SKIP": True, "LENGTHS": False, "PACKED": False}
BARE = dict.fromkeys(FULL, False)
# K and V; what decays; whether what is held is corrected; what else there is. Kimi Linear's sizes come first.
CASES = [
    (NVIDIA, torch.float32, (128, 128), "channel", True, FULL),
    (NVIDIA, torch.float32, (128, 128), "head", True, PACKED),
    (NVIDIA, torch.float32, (128, 64), "head", False, ADDITIVE),
    (NVIDIA, torch.float32, (512, 20), "none", False, BARE),
    (NVIDIA, torch.float32, (64, 64), "none", True, BARE),
    (NVIDIA, torch.float64, (64, 64), "channel", True, FULL),
    (AMD, torch.float32, (128, 128), "channel", True, FULL),
]
WHOLE = ("first", "rows", "steps", "heads", "key_heads", "chunks")

if __name__ == "__main__":
    for target, dtype, (keys, values), decay, correct, present in CASES:
        given = options(keys, values, dtype, 0.125, correct, DECAY=decay, **present)
        for kernel, flags in (
            (_kernels.forward, {"STATE": any(present.values()), "TRACE": any(present.values())}),
            (_kernels.backward, {"FINAL": any(present.values())}),
        ):
            compiled = compile_kernel(kernel, given | flags, WHOLE, dtype, target)
            where = f"{target.arch} {dtype} K={keys} V={values} {decay}"
            print(f"{where}, {kernel.__name__}: {resources(compiled)}", flush=True)
