"""Products of vectors with one matrix, by the library that is fastest at them on a processor.

PyTorch's own float32 products are MKL's, which takes twice oneDNN's time on processors of AMD, and a tenth less on
those of Intel. PyTorch has no public name for oneDNN's products of tensors as they are (`to_mkldnn` would copy all of
them), nor for a matrix that is packed once and multiplied often: its compiler's operators are called here.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.autocast import without_autocast


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W' [Q,n] of vectors x [Q,d] and a matrix W [n,d], plus a bias [n], all of one dtype; no gradient flows.

    Autocast does not round it.
    """
    if _is_intel() or not _takes_onednn(x):
        with without_autocast(x.device.type):
            return F.linear(x, weight, bias)
    return _run_onednn(x.contiguous(), weight.contiguous(), bias)


class RepeatedProduct:
    """The products x W' of several x [B,K], one after another, with one W [M,K]; no gradient flows.

    Args:
        weight: W.
        rows: B.
        times: the number of x. Where there are many of them W is packed first; else that costs more than it saves.
    """

    def __init__(self, weight: Tensor, rows: int, times: int) -> None:
        suits_mkl = _is_intel() and not weight.is_contiguous()  # MKL reads a transpose as fast as packed weights
        self.packed = rows >= 4 and rows * times >= 256 and _takes_onednn(weight) and not suits_mkl
        self.weight = weight
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)

    def __call__(self, x: Tensor) -> Tensor:
        return _run_onednn(x, self.weight, None) if self.packed else F.linear(x, self.weight)


@functools.cache
def _is_intel() -> bool:
    """Return whether the processor is one of Intel, for which MKL is written; False where the system does not say."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def _takes_onednn(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and not torch.compiler.is_compiling()  # a graph is left to its own compiler
    )


def _run_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
