"""The recurrences as functions: a reference in plain PyTorch, and kernels that give the same answer faster."""

from fastweights.ops import _library


def kernel_status() -> dict[str, str]:
    """Which kernels are in use, and why not the others.

    Examples:
        >>> from fastweights.ops import kernel_status
        >>> sorted(kernel_status())
        ['cpu', 'triton']
    """
    import torch

    from fastweights.ops import _triton

    missing = _triton.MISSING or (None if torch.cuda.is_available() else "there is no GPU")
    return {
        "cpu": f"not in use: {_library.MISSING}" if _library.MISSING else f"in use ({_library.STATUS})",
        "triton": f"not in use: {missing}" if missing else "in use",
    }
