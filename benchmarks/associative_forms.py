"""Which form of the recurrence is faster: the C++ kernel in both, forward plus backward, one thread, float32.

python benchmarks/associative_forms.py appends to benchmarks/associative_forms.csv; docs/fill.py makes the table of
docs/performance.md of it. The rule that follows from it is `choose_form` in src/fastweights/ops/associative/cpu.py.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastweights.bench.run import append_csv, machine_columns
from fastweights.ops.associative import Constants, Inputs, cpu
from fastweights.timing import medians

BATCHES, SIZES, STEPS = (1, 8, 16, 32, 128), (20, 50, 100, 200), (10, 20, 40, 80, 120, 160, 240, 320)
LARGEST = 128 * 120 * 100  # numbers in the drive: a quarter of a second a pass or less
ROUNDS = 5


def make_passes(steps: int, batch: int, size: int) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)
    drive = torch.randn(steps, batch, size, generator=generator)
    grad = torch.randn(steps, batch, size, generator=generator)
    tensors = (0.05 * torch.eye(size), torch.ones(size), torch.zeros(size), torch.zeros(batch, size))
    inputs = Inputs(drive, *tensors)

    def both_ways(form: str) -> Callable[[], Any]:
        arguments = (inputs, Constants(0.9, 0.5), form)
        return lambda: cpu.backward(grad, cpu.forward(*arguments)[0], *arguments)

    return {form: both_ways(form) for form in ("attention", "matrix")}


def measure_processor(call: Callable[[], Any]) -> float:
    """Return the seconds of the processor, not of the clock: what else runs here does not count."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main() -> None:
    torch.set_num_threads(1)
    machine = {name: cell for name, cell in machine_columns().items() if name != "torch"}
    rows = []
    for batch, size, steps in itertools.product(BATCHES, SIZES, STEPS):
        if batch * size * steps > LARGEST:
            continue
        times = medians(make_passes(steps, batch, size), ROUNDS, measure=measure_processor)
        sizes = {"batch": batch, "hidden_size": size, "steps": steps}
        rows.append(machine | sizes | {form: round(timing.milliseconds, 4) for form, timing in times.items()})
    append_csv(Path(__file__).with_suffix(".csv"), rows)


if __name__ == "__main__":
    main()
