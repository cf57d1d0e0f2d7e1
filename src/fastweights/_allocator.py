"""Keep freed blocks in the process, so that the next training step finds them there."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # as in glibc's malloc.h
_NEVER = -1


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed blocks until the process ends; return False where it cannot be asked.

    glibc gives a large tensor's memory back as soon as the tensor is freed, and the system clears every page that the
    next step asks for again. Memory that was once needed, even to load the data, then stays taken: it is for a command
    that does nothing but train to call, not for an import.
    """
    mallopt = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
