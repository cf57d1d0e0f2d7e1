"""Time both forms of the Triton kernel beside cuDNN's LSTM: `PYTHONPATH=src python benchmarks/associative_gpu.py`.

Every rival is a layer, F.linear of the input and its recurrence, in float32. Nothing is timed unless both forms keep
parity with the float64 reference at every hidden size (|kernel - reference64| / |reference64| at most 1e-5, or three
times the error of eager float32). Rivals take turns; a time is the median over rounds between two CUDA events.

The columns after the times count work by formula, for one sequence and step with H hidden units, D inputs and chunks of
K steps (K = T in the attention form), where a hidden state meets (K+1)/2 others on average, and one inner step:

    operations   forward          2DH + 2H^2 + 2H(K+1)              the input, W, the read by attention
                   matrix also    4H^2                              the read of M, the next M
                 backward adds    4DH + 6H^2 + 8H(K+1)              again without the input, W^T and dW, the read's
                                                                    transpose, the gradient of what was written
                   matrix also    10H^2                             again, the transpose, the gradients of M and of h
    elements     forward          D + 3H                            x, the drive written and read, outputs
                 backward adds    2D + 13H                          x and its gradient; h copied, drive, outputs twice,
                                                                    grad outputs, grad drive thrice, states, normalised
                                                                    and read gradients written (their reads hit L2)
                   matrix also    2H^2/K                            every M written and read

`bound` is the least time that these would take at the rates that the device reaches in the same process at copying and
at a float32 matrix product; `fraction` is that over the time taken. A recurrence is a chain of small steps, whose time
is mostly latency: the fraction says how far from full the device is, not how far the kernel is from what can be done.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, INPUT_SIZE = 128, 100
STEPS, HIDDEN_SIZES = (19, 200, 2000), (50, 100, 200)
WARM_UP = 3
CSV = Path(__file__).with_suffix(".csv")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds that the medians are over")
    parser.add_argument("--output", type=Path, default=CSV, help="the CSV file that rows are appended to")
    parser.add_argument("--dry-run", action="store_true", help="all of it at tiny sizes on the CPU; writes nothing")
    return parser.parse_args()


ARGUMENTS = arguments() if __name__ == "__main__" else argparse.Namespace(dry_run=False)
if ARGUMENTS.dry_run:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import LSTM  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fastweights.bench.timing import append_csv, today  # noqa: E402
from fastweights.ops import _triton  # noqa: E402
from fastweights.ops.associative import Constants, reference  # noqa: E402
from fastweights.ops.associative import triton as kernel  # noqa: E402

CONSTANTS = Constants(decay=0.9, rate=0.5)


class Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: str, *inputs: Tensor) -> Tensor:
        outputs = kernel.forward(*inputs, None, None, CONSTANTS, form)
        ctx.save_for_backward(outputs, *inputs)
        ctx.form = form
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        outputs, *inputs = ctx.saved_tensors
        return None, *kernel.backward(grad_outputs, outputs, *inputs, None, None, CONSTANTS, ctx.form)[:5]


def layer_inputs(size: int, batch: int, device: str) -> list[Tensor]:
    """weight_ih [H,D], bias [H], weight_hh [H,H], gain and shift [H], hidden [B,H]."""
    generator = torch.Generator().manual_seed(size)
    weight_ih = torch.randn(size, INPUT_SIZE, generator=generator) * INPUT_SIZE**-0.5
    rest = torch.zeros(size), 0.05 * torch.eye(size), torch.ones(size), torch.zeros(size), torch.zeros(batch, size)
    return [tensor.to(device).requires_grad_() for tensor in (weight_ih, *rest)]


def ours(form: str, x: Tensor, weight_ih: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
    outputs: Tensor = Recurrence.apply(form, F.linear(x, weight_ih, bias), *rest)
    return outputs


def require_parity(size: int, steps: int, batch: int, device: str) -> None:
    x = torch.randn(steps, batch, INPUT_SIZE, generator=torch.Generator().manual_seed(0)).to(device)

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, *layer_inputs(size, batch, device))]
        outputs = function(*inputs)
        return [outputs.detach(), *torch.autograd.grad(outputs.square().mean(), inputs)]

    def eager(x: Tensor, weight_ih: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        return reference.recurrence(F.linear(x, weight_ih, bias), *rest, None, None, CONSTANTS)

    exact, plain = results(eager, torch.float64), results(eager, torch.float32)
    for form in kernel.FORMS:
        found = results(lambda *inputs, form=form: ours(form, *inputs), torch.float32)
        for index, tensors in enumerate(zip(found, plain, exact, strict=True)):
            error, allowed = (float((t.double() - tensors[2]).norm() / tensors[2].norm()) for t in tensors[:2])
            if not error <= max(1e-5, 3 * allowed):
                raise SystemExit(
                    f"parity is red, so nothing is timed: result {index} of the {form} form at T={steps}, H={size} is "
                    f"off by {error:.1e}, eager float32 by {allowed:.1e}"
                )


def work(steps: int, size: int, form: str, backward: bool) -> tuple[int, int]:
    """Floating operations and bytes of a sequence step, by the formulas above."""
    chunk, square, matrix = kernel.chunk_length(steps, size, form), size * size, form == "matrix"
    operations = 2 * INPUT_SIZE * size + 2 * square + 2 * size * (chunk + 1) + 4 * square * matrix
    elements = INPUT_SIZE + 3 * size
    if backward:
        operations += 4 * INPUT_SIZE * size + 6 * square + 8 * size * (chunk + 1) + 10 * square * matrix
        elements += 2 * INPUT_SIZE + 13 * size + 2 * square // chunk * matrix
    return operations, 4 * elements


def timed(calls: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Milliseconds of each, medians over rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + rounds):
        for name, call in calls.items():
            if device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                end.synchronize()
                taken = begin.elapsed_time(end)
            else:
                began = time.perf_counter()
                call()
                taken = 1e3 * (time.perf_counter() - began)
            if turn >= WARM_UP:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def peaks(device: str, n: int) -> tuple[float, float]:
    """Bytes and floating operations a millisecond that the device reaches: a copy, and a product of [n,n] matrices."""
    source, square = torch.ones(16 * n * n, device=device), torch.ones(n, n, device=device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), "product": lambda: square @ square}
    times = timed(calls, 10, device)
    return 2 * source.nbytes / times["copy"], 2 * n**3 / times["product"]


def measure(steps: int, size: int, batch: int, device: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward, and of forward and backward, by rival."""
    x = torch.randn(steps, batch, INPUT_SIZE, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    grad = torch.randn(steps, batch, size, generator=torch.Generator().manual_seed(2)).to(device)
    inputs, lstm = layer_inputs(size, batch, device), LSTM(INPUT_SIZE, size).to(device)
    rivals: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        form: (lambda form=form: ours(form, x, *inputs), [x, *inputs[:5]]) for form in kernel.FORMS
    }
    rivals["torch.nn.LSTM"] = lambda: lstm(x)[0], [x, *lstm.parameters()]

    def forward(run: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            run()

    def both(run: Callable[[], Tensor], parameters: list[Tensor]) -> None:
        torch.autograd.grad(run(), parameters, grad)

    first = timed({name: lambda run=run: forward(run) for name, (run, _) in rivals.items()}, rounds, device)
    second = timed({name: lambda pair=pair: both(*pair) for name, pair in rivals.items()}, rounds, device)
    return {name: (first[name], second[name]) for name in rivals}


def main(rounds: int, output: Path, dry_run: bool) -> None:
    device, batch, all_steps, sizes = "cuda", BATCH, STEPS, HIDDEN_SIZES
    if dry_run:
        device, batch, all_steps, sizes, rounds = "cpu", 1, (2,), (3,), 1
    reason = _triton.unavailable(torch.empty(0, device=device))
    if reason is not None:
        raise SystemExit(reason)
    for size in sizes:
        # Long runs under a strong memory are chaotic: parity is judged where two correct answers can agree.
        require_parity(size, min(19, max(all_steps)), min(8, batch), device)
    bandwidth, speed = peaks(device, 8 if dry_run else 8192)
    rows = []
    for steps, size in itertools.product(all_steps, sizes):
        times = measure(steps, size, batch, device, rounds)
        for rival, pair in times.items():
            for index, direction in enumerate(("forward", "forward and backward")):
                row: dict[str, Any] = {
                    "date": today(),
                    "device": torch.cuda.get_device_name() if device == "cuda" else device,
                    "torch": torch.__version__,
                    "batch": batch,
                    "steps": steps,
                    "input_size": INPUT_SIZE,
                    "hidden_size": size,
                    "rival": rival,
                    "direction": direction,
                    "milliseconds": round(pair[index], 4),
                    "ratio_to_lstm": round(pair[index] / times["torch.nn.LSTM"][index], 4),
                    "operations": "",
                    "bytes": "",
                    "bound_milliseconds": "",
                    "fraction": "",
                    "rounds": rounds,
                }
                if rival in kernel.FORMS:
                    operations, moved = (batch * steps * count for count in work(steps, size, rival, index == 1))
                    bound = max(operations / speed, moved / bandwidth)
                    row |= {
                        "operations": operations,
                        "bytes": moved,
                        "bound_milliseconds": round(bound, 5),
                        "fraction": round(bound / pair[index], 5),
                    }
                rows.append(row)
                if not dry_run:
                    print(*(row[key] for key in ("steps", "hidden_size", "rival", "direction", "milliseconds")))
    if dry_run:
        print(f"{len(rows)} rows with {len(rows[0])} columns: in a dry run nothing is timed or written")
        return
    append_csv(output, rows)
    print(f"appended to {output}")


if __name__ == "__main__":
    main(ARGUMENTS.rounds, ARGUMENTS.output, ARGUMENTS.dry_run)
