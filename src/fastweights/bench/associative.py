"""`fastweights bench associative`: the layer of Ba et al. 2016 beside its eager reference and `torch.nn.LSTM`."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import LSTM
from torch.nn import functional as F

from fastweights.bench.timing import append_csv, medians, today
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN
from fastweights.ops.associative import reference
from fastweights.training import environment

BATCH = 128
INPUT_SIZE = 100
STEPS = (11, 19)  # 4 and 8 pairs of the retrieval task
HIDDEN_SIZES = (50, 100)

OURS, ATTENTION, MATRIX, RIVAL = "fastweights", "eager attention form", "eager matrix form", "torch.nn.LSTM"


def run(output: Path, *, threads: Sequence[int], rounds: int) -> None:
    """Time forward plus backward at every size, print the table and append it to a CSV file.

    Raises:
        FastWeightsError: the kernel and the reference disagree (then nothing is timed), or the file cannot be written.
    """
    from rich.console import Console
    from rich.table import Table

    machine = environment()
    table = Table(title=f"forward plus backward, B = {BATCH}, float32, milliseconds (median of {rounds})")
    for heading in ("threads", "T", "H", "ours", "eager attention", "eager matrix", "LSTM", "ours/LSTM", "eager/ours"):
        table.add_column(heading, justify="right")
    rows = []
    before = torch.get_num_threads()
    try:
        for count, steps, size in itertools.product(threads, STEPS, HIDDEN_SIZES):
            torch.set_num_threads(count)
            rivals = _rivals(steps, size)
            times = medians(rivals, rounds)
            eager = min(times[ATTENTION], times[MATRIX])
            cells = [f"{times[name]:.2f}" for name in (OURS, ATTENTION, MATRIX, RIVAL)]
            ratios = [times[OURS] / times[RIVAL], eager / times[OURS]]
            table.add_row(str(count), str(steps), str(size), *cells, *(f"{ratio:.2f}" for ratio in ratios))
            rows += [
                {
                    "date": today(),
                    "commit": machine["commit"],
                    "processor": machine["processor"],
                    "torch": machine["torch"],
                    "kernel": machine["kernels"]["cpu"],
                    "threads": count,
                    "batch": BATCH,
                    "steps": steps,
                    "input_size": INPUT_SIZE,
                    "hidden_size": size,
                    "rival": name,
                    "milliseconds": round(time, 4),
                    "ratio_to_lstm": round(time / times[RIVAL], 4),
                    "rounds": rounds,
                }
                for name, time in times.items()
            ]
    finally:
        torch.set_num_threads(before)
    Console().print(table)  # before the file: what was measured is seen even where it cannot be kept
    append_csv(output, rows)
    print(f"appended to {output}")


def _rivals(steps: int, size: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(steps * size)
    x = torch.randn(steps, BATCH, INPUT_SIZE, generator=generator).requires_grad_()
    grad = torch.randn(steps, BATCH, size, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = FastWeightsRNN(INPUT_SIZE, size, decay=0.9)
        lstm = LSTM(INPUT_SIZE, size)
    eager = {
        ATTENTION: lambda: _eager(reference.attention_form, layer, x),
        MATRIX: lambda: _eager(reference.matrix_form, layer, x),
    }
    _require_parity(layer, x, grad, eager[ATTENTION])
    outputs: dict[str, Callable[[], Tensor]] = {OURS: lambda: layer(x)[0], **eager, RIVAL: lambda: lstm(x)[0]}

    def timed(forward: Callable[[], Tensor]) -> Callable[[], object]:
        parameters = [x, *layer.parameters(), *lstm.parameters()]

        def call() -> None:
            for parameter in parameters:
                parameter.grad = None
            forward().backward(grad)  # type: ignore[no-untyped-call]

        return call

    return {name: timed(forward) for name, forward in outputs.items()}


def _eager(form: Callable[..., Tensor], layer: FastWeightsRNN, x: Tensor) -> Tensor:
    named = dict(layer.named_parameters())
    drive = F.linear(x, named["weight_ih"], named["bias"])
    hidden = drive.new_zeros(drive.shape[1:])
    norm = named["norm.weight"], named["norm.bias"]
    return form(drive, named["weight_hh"], *norm, hidden, None, None, layer.constants)


def _require_parity(layer: FastWeightsRNN, x: Tensor, grad: Tensor, eager: Callable[[], Tensor]) -> None:
    """The kernel's error against float64 is at most 1e-5, or three times that of eager float32."""

    def tensors(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        gradients = torch.autograd.grad(outputs, inputs, grad.to(outputs.dtype))
        return [outputs.detach(), *gradients]

    inputs = [x, *layer.parameters()]
    double = FastWeightsRNN(INPUT_SIZE, layer.hidden_size, decay=0.9, impl="reference", dtype=torch.float64)
    double.load_state_dict(layer.state_dict())
    x64 = x.detach().double().requires_grad_()
    exact = tensors(double(x64)[0], [x64, *double.parameters()])
    names = ["the outputs", "the gradient of x", *(f"the gradient of {name}" for name, _ in layer.named_parameters())]
    for name, true, ours, plain in zip(
        names, exact, tensors(layer(x)[0], inputs), tensors(eager(), inputs), strict=True
    ):
        error, allowed = (float((value.double() - true).norm() / true.norm()) for value in (ours, plain))
        if error > max(1e-5, 3 * allowed):
            raise FastWeightsError(
                f"parity is red, so nothing is timed: {name} at T={x.shape[0]}, H={layer.hidden_size} differ from the "
                f"float64 reference by {error:.1e}, eager float32 by {allowed:.1e}"
            )
