"""Compile every path of the Triton kernels for NVIDIA and AMD GPUs, none of which need be here.

`python -m tests.ops.associative.compile_triton`, without TRITON_INTERPRET: a process of its own, because Triton decides
as it is imported whether it interprets.
"""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastweights.ops.associative import Constants, _triton_kernels
from fastweights.ops.associative.triton import options

NVIDIA, AMD = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
FULL, BARE = (Constants(0.9, 0.5, nonlinearity="tanh", normalize_initial=True), True), (Constants(0.9, 0.5), False)
CASES = [
    (NVIDIA, 50, torch.float32, FULL),
    (NVIDIA, 50, torch.float32, BARE),
    (NVIDIA, 50, torch.float64, FULL),
    (NVIDIA, 200, torch.float32, FULL),
    (AMD, 50, torch.float32, FULL),
]
WHOLE = ("first", "count", "batch", "inner", "segment", "room", "chunk")


def compile_kernel(kernel: Any, constants: dict[str, Any], dtype: str, target: GPUTarget) -> Any:
    """The compiled kernel, with pointers aligned as PyTorch's are."""
    compiler = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    signature = {
        name: "constexpr" if name in constants else "i32" if name in WHOLE else f"*{dtype}" for name in kernel.arg_names
    }
    signature["lengths"] = "*i64"
    fixed = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=target, options=compiler)


if __name__ == "__main__":
    for target, size, dtype, (constants, present) in CASES:
        given = options(size, dtype, constants, norm=present, memory=present, lengths=present)
        name = {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
        for replay in (False, True):
            extra = {"EPS": constants.eps, "REPLAY": replay}
            compile_kernel(_triton_kernels.recurrence, {**given, **extra}, name, target)
        compile_kernel(_triton_kernels.gradients, {**given, "WRITTEN": present}, name, target)
