"""Options, parity, turns between CUDA events and rows of the scripts that time the Triton kernels beside cuDNN's LSTM.

In a script's CSV file `bound_milliseconds` is the least time that the operations and bytes of a kernel, counted by the
script's formulas, would take at the rates that the device reaches in the same process at copying and at a float32
matrix product; `fraction` is that over the time taken. A recurrence is a chain of small steps, whose time is mostly
latency: the fraction says how far from full the device is, not how far the kernel is from what can be done.
"""

import argparse
import functools
import os
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from fastweights.bench.parity import allowed_error, distance
from fastweights.bench.run import append_csv, today
from fastweights.timing import measure_seconds, medians

LSTM = "torch.nn.LSTM"
DRAWS = 32
NO_WORK = dict.fromkeys(("operations", "bytes", "bound_milliseconds", "fraction"), "")

Call = Callable[[], object]
Rivals = Mapping[str, tuple[Callable[[], Tensor], list[Tensor]]]  # a forward pass, and what backward differentiates


def parse_arguments(description: str, csv: Path) -> argparse.Namespace:
    """Return the options; to be asked before a kernel is imported, since a dry run takes Triton's interpreter."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that the medians are over")
    parser.add_argument("--output", type=Path, default=csv, help="the CSV file that rows are appended to")
    parser.add_argument("--dry-run", action="store_true", help="all of it at tiny sizes on the CPU; writes nothing")
    options = parser.parse_args()
    options.device = "cuda"
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        options.device, options.rounds = "cpu", 1
    return options


def require_parity(
    kernels: dict[str, Callable[[torch.dtype, int], list[Tensor]]],
    eager: Callable[[torch.dtype, int], list[Tensor]],
    where: str,
) -> None:
    """Stop unless every kernel is off by at most 1e-5, or three times the error of eager float32, on average.

    The error of one draw says little: a long recurrence multiplies some draws' rounding by a hundred, now the kernel's
    and now eager's. What is judged is the mean over the draws less its standard error.
    """
    errors: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for draw in range(DRAWS):
        exact, plain = eager(torch.float64, draw), eager(torch.float32, draw)
        for name, kernel in kernels.items():
            for index, tensors in enumerate(zip(kernel(torch.float32, draw), plain, exact, strict=True)):
                off = distance(tensors[0], tensors[2]), distance(tensors[1], tensors[2])
                errors.setdefault((name, index), []).append(off)
    for (name, index), pairs in errors.items():
        off, eager_off = zip(*pairs, strict=True)
        error, eager_error = mean(off) - stdev(off) / len(off) ** 0.5, mean(eager_off)
        if not (isfinite(error) and error <= allowed_error(eager_error)):
            raise SystemExit(
                f"parity is red, so nothing is timed: result {index} of {name} at {where} is off by {error:.1e}, "
                f"eager float32 by {eager_error:.1e}"
            )


def make_directions(rivals: Rivals) -> dict[str, dict[str, Call]]:
    """Return a forward pass of each rival, and a forward and backward pass."""

    @functools.cache
    def draw_gradient(shape: torch.Size, device: torch.device) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)

    def differentiate(run: Callable[[], Tensor], parameters: list[Tensor]) -> None:
        y = run()
        torch.autograd.grad(y, parameters, draw_gradient(y.shape, y.device))

    return {
        "forward": {name: torch.no_grad()(run) for name, (run, _) in rivals.items()},
        "forward and backward": {name: functools.partial(differentiate, *rival) for name, rival in rivals.items()},
    }


def time_turns(calls: Mapping[str, Call], rounds: int, device: str) -> dict[str, float]:
    """Return the milliseconds of each call, medians over rounds in which they take turns."""
    times = medians(calls, rounds, measure=measure_events if device == "cuda" else measure_seconds)
    return {name: timing.milliseconds for name, timing in times.items()}


def measure_events(call: Call) -> float:
    """Return the seconds of a call between two CUDA events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def make_rows(
    options: argparse.Namespace,
    directions: Mapping[str, Mapping[str, Call]],
    sizes: Callable[[str], dict[str, Any]],
    work: Callable[[str, str], tuple[int, int] | None],
    reached: tuple[float, float],
    more: Callable[[str, float, Call], dict[str, Any]] = lambda *_: {},
) -> list[dict[str, Any]]:
    """Time all rivals of one case, print what they take, and return its rows.

    Args:
        sizes: the columns of a rival's sizes.
        work: the floating operations and the bytes of a rival in a direction, None where they are not counted.
        reached: what `measure_rates` gave.
        more: further columns of a direction, from its milliseconds and its call.
    """
    device = options.device
    where = {"date": today(), "device": torch.cuda.get_device_name() if device == "cuda" else device}
    rows = []
    for direction, calls in directions.items():
        times = time_turns(calls, options.rounds, device)
        for rival, milliseconds in times.items():
            case = sizes(rival) | {"rival": rival, "direction": direction, "milliseconds": round(milliseconds, 4)}
            row = where | {"torch": torch.__version__} | case
            row |= {"ratio_to_lstm": round(milliseconds / times[LSTM], 4)} | more(direction, milliseconds, calls[rival])
            counted = work(rival, direction)
            row |= NO_WORK if counted is None else compare_work(*counted, milliseconds, reached)
            rows.append(row | {"rounds": options.rounds})
            if not options.dry_run:
                print(*case.values())
    return rows


def measure_rates(options: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes and floating operations a millisecond that the device reaches: a copy, a product of matrices."""
    device, n = options.device, 8 if options.dry_run else 8192
    source, square = torch.ones(16 * n * n, device=device), torch.ones(n, n, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), "product": lambda: square @ square}
    times = time_turns(calls, 10, device)
    return 2 * source.nbytes / times["copy"], 2 * n**3 / times["product"]


def compare_work(operations: int, moved: int, milliseconds: float, reached: tuple[float, float]) -> dict[str, Any]:
    """Return the columns that compare a time with the least that its operations and bytes would take."""
    bandwidth, speed = reached
    bound = max(operations / speed, moved / bandwidth)
    shown = operations, moved, round(bound, 5), round(bound / milliseconds, 5)
    return dict(zip(NO_WORK, shown, strict=True))


def save(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Append the rows of a case to the file, so that nothing measured is lost; or in a dry run count them."""
    if options.dry_run:
        print(f"{len(rows)} rows with {len(rows[0])} columns: in a dry run nothing is timed or written")
        return
    append_csv(options.output, rows)
