"""Peak memory of one pass, in a process of its own: an allocator that has served other rivals would hide it."""

import ctypes
import gc
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from fastweights.bench.associative import cases
from fastweights.bench.associative.alone import AloneError, alone
from fastweights.bench.associative.cases import Case

RIVALS = (cases.OURS, cases.ATTENTION, cases.MATRIX, cases.LSTM)
MOST_SECONDS = 300.0
# Every tensor of 64 KiB or more is mapped by itself and given back at once. Otherwise holes in the heap, which aligned
# blocks do not fit into again, treble what the matrix form holds in one run and not in the next.
PLAIN = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak(case: Case, rival: str, threads: int = 1) -> int | str:
    """Bytes that one pass adds at its highest to what the process held before it, or why that was not measured.

    What was held before: the libraries, warmed by a tiny pass, the modules and x. Run twice, it differs by one or two
    mebibytes: the bookkeeping of pages, and what the heap had left over for small tensors.

    Examples:
        >>> from fastweights.bench.associative.cases import Case
        >>> peak(Case(10**6, 1000), "eager matrix form").startswith("needs about")
        True
    """
    reason = cases.too_large(rival, case)
    if reason is not None:
        return reason
    if not available():
        return "this system does not tell a process its peak of memory"
    told = {"case": asdict(case), "rival": rival, "threads": threads}
    try:
        return int(alone("fastweights.bench.associative.memory", told, MOST_SECONDS, **PLAIN))
    except AloneError as error:
        return f"the process {error}"


def available() -> bool:
    """Whether this system has what `peak` asks: Linux, with /proc."""
    return Path("/proc/self/clear_refs").exists()


def measure(case: Case, rival: str, threads: int) -> int:
    """What `peak` gives, measured in this process."""
    import torch

    from fastweights.bench.associative.problem import Problem

    torch.set_num_threads(threads)
    problem = Problem(case)
    tiny = Problem(replace(case, steps=2, batch=2))
    tiny.timed(tiny.forwards()[rival])()
    call = problem.timed(problem.forwards()[rival])
    del tiny
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


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(measure(Case(**given["case"]), given["rival"], given["threads"]))
