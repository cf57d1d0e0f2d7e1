"""Measurements in a process of their own: peak memory, and whether a rival can be compiled.

Peak memory: an allocator that has served other rivals would hide it. Compilations: one cannot be stopped midway, for it
leaves helpers at work and the compiler in disorder, and what is timed afterwards is wrong; a process can be ended.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

MOST_SECONDS = 300.0
# Every tensor of 64 KiB or more is mapped by itself and given back at once. Otherwise holes in the heap, which aligned
# blocks do not fit into again, treble what many equal tensors hold in one run and not in the next.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class ProcessError(Exception):
    """A process gave no answer; the message says why."""


def run_alone(module: str, task: dict[str, Any], limit: float, **environment: str) -> str:
    """Run `python -m module TASK`, return what it prints, and end it with all processes that it has started.

    Raises:
        ProcessError: it failed, was ended by a signal, or took more than `limit` seconds.
    """
    words = [sys.executable, "-m", module, json.dumps(task)]
    pipe = subprocess.PIPE
    # A group of its own: else a compiler's helpers would outlive it, and slow down the next timing.
    with subprocess.Popen(
        words, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"took more than {limit:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode < 0:
        raise ProcessError(f"was ended by signal {-process.returncode}")
    if process.returncode > 0:
        complaint = [line.strip() for line in errors.splitlines() if line.strip()] or ["without a word"]
        raise ProcessError(f"failed: {complaint[-1][:200]}")
    return output


def measure_peak(case: Any, rival: str, threads: int) -> int | str:
    """Return the bytes that one pass adds at its highest to what a process held before it, or why there are none.

    What it held before: the libraries, warmed by a tiny pass, the modules and the inputs.
    """
    if not can_measure_peak():
        return "this system does not tell a process its peak of memory"
    try:
        return int(run_alone(__name__, _describe(case, rival, threads), MOST_SECONDS, **ALLOCATOR))
    except ProcessError as error:
        return f"the process {error}"


def can_measure_peak() -> bool:
    """Return whether this system has what the peak is read from: Linux, with /proc."""
    return Path("/proc/self/clear_refs").exists()


def try_compilations(problem: Any, rivals: Iterable[str], limit: float) -> tuple[list[str], dict[str, str]]:
    """Return the rivals that can be compiled and run for this number of threads, and why the others cannot.

    What the other process compiled, this one finds in the compiler's cache on the disk.
    """
    torch._dynamo.reset()  # or the sizes of earlier cases would count as dynamic
    compiled: list[str] = []
    skipped = {}
    for rival in rivals:
        threads = torch.get_num_threads()  # the compiler writes it into the code
        task = _describe(problem.case, rival, threads) | {"problem": type(problem).__name__}
        try:
            run_alone(__name__, task, limit)
        except ProcessError as error:
            skipped[rival] = f"compiling {error}"
        else:
            compiled.append(rival)
    return compiled, skipped


def _describe(case: Any, rival: str, threads: int) -> dict[str, Any]:
    """Return a task: the class of the case, in the subject's module, and what to make it of."""
    kind = type(case)
    return {"subject": kind.__module__, "kind": kind.__name__, "case": asdict(case), "rival": rival, "threads": threads}


def main(words: str) -> None:
    """Run the task that `measure_peak` or `try_compilations` has sent to this process."""
    task = json.loads(words)
    torch.set_num_threads(task["threads"])
    subject = importlib.import_module(task["subject"])
    case = getattr(subject, task["kind"])(**task["case"])
    if "problem" in task:
        problem = getattr(subject, task["problem"])(case)
        problem.prepare(problem.compiled(task["rival"]))()
    else:
        print(measure_rise(subject.prepare_pass(case, task["rival"])))


def measure_rise(call: Callable[[], object]) -> int:
    """Return the bytes that a call adds at its highest to what this process held before it.

    Two runs differ by one or two mebibytes: the bookkeeping of pages, and what the heap has left for small tensors.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # else the pass would first reuse the memory that construction freed
        libc.malloc_trim(0)
    before = _read_peak(reset=True)
    call()
    return _read_peak() - before


def _read_peak(*, reset: bool = False) -> int:
    """Return the most bytes that this process has held since the last reset.

    Not `ru_maxrss`: a child begins with its parent's there, so that a parent who has held gigabytes would hide all, and
    what loading torch took for a moment could not be forgotten.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main(sys.argv[1])
