"""Products of queries with many keys, by the library that is fastest at them."""

import torch
from torch import Tensor


def multiply(x: Tensor, keys: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x K' [Q,n] of vectors x [Q,d] and keys K [n,d] of one dtype, plus a bias [n]; no gradient flows.

    Those of float32 on a processor go through oneDNN: torch's own, MKL's, take twice the time on those of AMD. PyTorch
    has no public name for it that takes tensors as they are; `to_mkldnn` would copy all keys.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, keys, bias, "none", [], "")
        return product
    return x @ keys.T if bias is None else torch.addmm(bias, x, keys.T)
