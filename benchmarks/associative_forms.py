"""Which form of the recurrence is faster: the C++ kernel in both, forward plus backward, one thread, float32.

python benchmarks/associative_forms.py appends to benchmarks/associative_forms.csv; docs/fill.py makes the table of
docs/performance.md of it. The rule that follows from it is `choose_form` in src/fastweights/ops/associative/cpu.py.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastweights.bench.timing import append_csv, today
from fastweights.ops.associative import Constants, cpu
from fastweights.runs import describe_environment

BATCHES, SIZES, STEPS = (1, 8, 16, 32, 128), (20, 50, 100, 200), (10, 20, 40, 80, 120, 160, 240, 320)
LARGEST = 128 * 120 * 100  # numbers in the drive: a quarter of a second a pass or less
ROUNDS = 5


def passes(steps: int, batch: int, size: int) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)
    drive = torch.randn(steps, batch, size, generator=generator)
    grad = torch.randn(steps, batch, size, generator=generator)
    inputs = (drive, 0.05 * torch.eye(size), torch.ones(size), torch.zeros(size), torch.zeros(batch, size), None, None)

    def both_ways(form: str) -> Callable[[], Any]:
        arguments: Any = (*inputs, Constants(0.9, 0.5), form)
        return lambda: cpu.backward(grad, cpu.forward(*arguments)[0], *arguments)

    return {form: both_ways(form) for form in ("attention", "matrix")}


def milliseconds(call: Callable[[], Any]) -> float:
    """Of the processor, not of the clock: what else runs here does not count."""
    began = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - began)


def main() -> None:
    torch.set_num_threads(1)
    machine = describe_environment()
    rows = []
    for batch, size, steps in itertools.product(BATCHES, SIZES, STEPS):
        if batch * size * steps > LARGEST:
            continue
        calls = passes(steps, batch, size)
        times: dict[str, list[float]] = {form: [] for form in calls}
        for _ in range(ROUNDS):
            for form, call in calls.items():
                times[form].append(milliseconds(call))
        rows.append(
            {
                "date": today(),
                "commit": machine["commit"],
                "processor": machine["processor"],
                "kernel": machine["kernels"]["cpu"],
                "batch": batch,
                "hidden_size": size,
                "steps": steps,
                **{form: round(statistics.median(taken), 4) for form, taken in times.items()},
            }
        )
    append_csv(Path(__file__).with_suffix(".csv"), rows)


if __name__ == "__main__":
    main()
