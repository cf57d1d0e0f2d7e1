"""The recurrences as functions: a reference in plain PyTorch, and kernels that give the same answer faster."""

from fastweights.ops import _native


def missing_kernels() -> str | None:
    """Return why the C++ kernels cannot be used, or None when they can.

    Examples:
        >>> from fastweights.ops import missing_kernels
        >>> reason = missing_kernels()
    """
    return _native.MISSING


def kernel_status() -> dict[str, str]:
    """Return which kernels are in use, and why not the others.

    Examples:
        >>> from fastweights.ops import kernel_status
        >>> sorted(kernel_status())
        ['cpu', 'triton']
    """
    import torch

    from fastweights.ops import _triton

    missing = _triton.MISSING or (None if torch.cuda.is_available() else "there is no GPU")
    return {
        "cpu": f"not in use: {_native.MISSING}" if _native.MISSING else f"in use ({_native.STATUS})",
        "triton": f"not in use: {missing}" if missing else "in use",
    }
