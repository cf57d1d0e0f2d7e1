"""What this machine can hold, and the columns that say where a row was measured."""

import os
from typing import Any

from fastweights.bench.timing import today

COLUMNS = ["date", "commit", "processor", "torch", "kernel"]


def columns() -> dict[str, Any]:
    """The columns of a run, taken at its beginning, so that a run over midnight is one run."""
    from fastweights.runs import describe_environment

    found = describe_environment()
    return {
        "date": today(),
        "commit": found["commit"],
        "processor": found["processor"],
        "torch": found["torch"],
        "kernel": found["kernels"]["cpu"],
    }


def too_much(needed: int, memory: int | None = None) -> str | None:
    """Why a rival that needs so many bytes is not run: half of the machine's memory is less; None where it fits.

    Examples:
        >>> too_much(3 * 2**30, memory=4 * 2**30)
        "needs about 3 GiB, more than half of the machine's 4"
    """
    memory = machine_memory() if memory is None else memory
    if needed <= memory / 2:
        return None
    return f"needs about {needed / 2**30:.0f} GiB, more than half of the machine's {memory / 2**30:.0f}"


def machine_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
