"""What the scripts that time kernels on a GPU share: options, parity, turns between CUDA events, the device's rates."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.bench.parity import allowed_error, distance
from fastweights.bench.run import append_csv, today
from fastweights.timing import measure_seconds, medians


def arguments(description: str, csv: Path) -> argparse.Namespace:
    """The command line; to be asked before a kernel is imported, since a dry run takes Triton's interpreter."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that the medians are over")
    parser.add_argument("--output", type=Path, default=csv, help="the CSV file that rows are appended to")
    parser.add_argument("--dry-run", action="store_true", help="all of it at tiny sizes on the CPU; writes nothing")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    return options


def require_parity(
    kernels: dict[str, Callable[[torch.dtype], list[Tensor]]], eager: Callable[[torch.dtype], list[Tensor]], where: str
) -> None:
    """Stop unless every kernel is off by at most 1e-5, or three times the error of eager float32."""
    exact, plain = eager(torch.float64), eager(torch.float32)
    for name, kernel in kernels.items():
        for index, tensors in enumerate(zip(kernel(torch.float32), plain, exact, strict=True)):
            error, eager_error = (distance(tensor, tensors[2]) for tensor in tensors[:2])
            if not error <= allowed_error(eager_error):
                raise SystemExit(
                    f"parity is red, so nothing is timed: result {index} of {name} at {where} is off by {error:.1e}, "
                    f"eager float32 by {eager_error:.1e}"
                )


def time_turns(calls: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Return the milliseconds of each call, medians over rounds in which they take turns."""
    times = medians(calls, rounds, measure=measure_events if device == "cuda" else measure_seconds)
    return {name: timing.milliseconds for name, timing in times.items()}


def measure_events(call: Callable[[], object]) -> float:
    """Return the seconds of a call between two CUDA events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def peaks(device: str, n: int) -> tuple[float, float]:
    """Bytes and floating operations a millisecond that the device reaches: a copy, and a product of [n,n] matrices."""
    source, square = torch.ones(16 * n * n, device=device), torch.ones(n, n, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), "product": lambda: square @ square}
    times = time_turns(calls, 10, device)
    return 2 * source.nbytes / times["copy"], 2 * n**3 / times["product"]


def where_and_when(device: str) -> dict[str, Any]:
    """The first columns of a row."""
    return {
        "date": today(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }


def work_done(operations: int, moved: int, milliseconds: float, reached: tuple[float, float]) -> dict[str, Any]:
    """The columns that compare a time with the least that its operations and bytes would take."""
    bandwidth, speed = reached
    bound = max(operations / speed, moved / bandwidth)
    return {
        "operations": operations,
        "bytes": moved,
        "bound_milliseconds": round(bound, 5),
        "fraction": round(bound / milliseconds, 5),
    }


def finish(rows: list[dict[str, Any]], output: Path, *, dry_run: bool) -> None:
    """Append the rows to the file, or in a dry run count them."""
    if dry_run:
        print(f"{len(rows)} rows with {len(rows[0])} columns: in a dry run nothing is timed or written")
        return
    append_csv(output, rows)
    print(f"appended to {output}")
