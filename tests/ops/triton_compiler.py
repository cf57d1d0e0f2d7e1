"""Compile Triton kernels for NVIDIA and AMD GPUs, none of which need be here.

In a process of its own, without TRITON_INTERPRET: Triton decides as it is imported whether it interprets.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NVIDIA, AMD = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_NAMES = {torch.float32: "fp32", torch.float64: "fp64"}


def compile_kernel(
    kernel: Any, constants: dict[str, Any], whole: tuple[str, ...], dtype: torch.dtype, target: GPUTarget
) -> Any:
    """The compiled kernel, with pointers aligned as PyTorch's are; `whole` are its integers."""
    constants = dict(constants)
    compiler = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    signature = {
        name: "constexpr" if name in constants else "i32" if name in whole else f"*{_NAMES[dtype]}"
        for name in kernel.arg_names
    }
    whole_numbers = {"lengths": "*i64", "spans": "*i64", "oldest": "*i32", "starts": "*i1", "clears": "*i1"}
    signature |= {name: kind for name, kind in whole_numbers.items() if name in signature}
    fixed = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=target, options=compiler)


def resources(compiled: Any) -> str:
    """Registers of a thread, what it keeps in memory instead (spills and all), and the program's shared memory."""
    shared = f"{compiled.metadata.shared} bytes of shared memory, {compiled.metadata.num_warps} warps"
    if "amdgcn" in compiled.asm:
        counts = re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", compiled.asm["amdgcn"])
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts = re.findall(r"(REG|STACK):(\d+)", said)
    return ", ".join(f"{name} {number}" for name, number in counts) + f", {shared}"
