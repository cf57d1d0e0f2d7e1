"""Memory that a training step gives back stays with the process, where the next step finds it."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h
_NEVER = -1


def keep_memory() -> bool:
    """Ask the C library to return no memory to the system before the process ends; False where it cannot be asked.

    glibc gives a large tensor's memory back as soon as the tensor is freed, and the system clears every page that the
    next step asks for anew: with tensors of some tens of megabytes that was a third of a training step. For a process
    that does nothing but train, so it is for a command to call, not for an import.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
