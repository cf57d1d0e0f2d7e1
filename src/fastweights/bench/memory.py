"""Peak memory of one pass, in a process of its own: an allocator that has served other rivals would hide it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastweights.bench.alone import AloneError, alone

MOST_SECONDS = 300.0
# Every tensor of 64 KiB or more is mapped by itself and given back at once. Otherwise holes in the heap, which aligned
# blocks do not fit into again, treble what many equal tensors hold in one run and not in the next.
PLAIN = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak(module: str, told: dict[str, Any]) -> int | str:
    """Bytes that `python -m module`, told JSON, prints as the rise of one pass, or why that was not measured."""
    if not available():
        return "this system does not tell a process its peak of memory"
    try:
        return int(alone(module, told, MOST_SECONDS, **PLAIN))
    except AloneError as error:
        return f"the process {error}"


def available() -> bool:
    """Whether this system has what `rise` asks: Linux, with /proc."""
    return Path("/proc/self/clear_refs").exists()


def rise(call: Callable[[], object]) -> int:
    """Bytes that a call adds at its highest to what this process held before it.

    Run twice, it differs by one or two mebibytes: the bookkeeping of pages, and what the heap had left over for small
    tensors.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # or the pass would first use up what the construction gave back
        libc.malloc_trim(0)
    before = _highest(reset=True)
    call()
    return _highest() - before


def _highest(*, reset: bool = False) -> int:
    """The most bytes that this process has held since the last reset.

    Not `ru_maxrss`: a child begins with its parent's there, so that a parent who has held gigabytes would hide all, and
    what loading torch took for a moment could not be forgotten.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])
