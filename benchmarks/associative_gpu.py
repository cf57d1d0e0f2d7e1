"""Time both forms of the Triton kernel beside cuDNN's LSTM: `PYTHONPATH=src python benchmarks/associative_gpu.py`.

Every rival is a layer, F.linear of the input and its recurrence, in float32. Nothing is timed unless both forms keep
parity with the float64 reference at every hidden size (|kernel - reference64| / |reference64| at most 1e-5, or three
times the error of eager float32). Rivals take turns; a time is the median over rounds between two CUDA events.

The columns after the times, of which gpu.py tells, count work by formula, for one sequence and step with H hidden
units, D inputs and chunks of K steps (K = T in the attention form), where a hidden state meets (K+1)/2 others on
average, and one inner step:

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
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch
from torch import Tensor
from torch.nn import LSTM
from torch.nn import functional as F

BATCH, INPUT_SIZE = 128, 100
STEPS, HIDDEN_SIZES = (19, 80, 120, 160, 200, 320, 640, 2000), (50, 100, 200)
LONGEST_ATTENTION = 640  # beyond, the attention form takes half a second and more

OPTIONS = gpu.parse_arguments(__doc__.splitlines()[0], Path(__file__).with_suffix(".csv"))

from fastweights.ops import _triton  # noqa: E402
from fastweights.ops.associative import Constants, Inputs, reference  # noqa: E402
from fastweights.ops.associative import triton as kernel  # noqa: E402

CONSTANTS = Constants(decay=0.9, rate=0.5)


class Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: str, *inputs: Tensor) -> Tensor:
        outputs = kernel.forward(Inputs(*inputs), CONSTANTS, form)
        ctx.save_for_backward(outputs, *inputs)
        ctx.form = form
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        outputs, *inputs = ctx.saved_tensors
        return None, *kernel.backward(grad_outputs, outputs, Inputs(*inputs), CONSTANTS, ctx.form)[:5]


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
    def results(function: Callable[..., Tensor], dtype: torch.dtype, draw: int) -> list[Tensor]:
        x = torch.randn(steps, batch, INPUT_SIZE, generator=torch.Generator().manual_seed(draw)).to(device)
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, *layer_inputs(size, batch, device))]
        outputs = function(*inputs)
        return [outputs.detach(), *torch.autograd.grad(outputs.square().mean(), inputs)]

    def eager(x: Tensor, weight_ih: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        return reference.recurrence(Inputs(F.linear(x, weight_ih, bias), *rest), CONSTANTS)

    kernels = {form: functools.partial(results, functools.partial(ours, form)) for form in kernel.FORMS}
    gpu.require_parity(kernels, functools.partial(results, eager), f"T={steps}, H={size}")


def count_work(steps: int, size: int, form: str, backward: bool) -> tuple[int, int]:
    """Floating operations and bytes of a sequence step, by the formulas above."""
    chunk, square, matrix = kernel.chunk_length(steps, size, form), size * size, form == "matrix"
    operations = 2 * INPUT_SIZE * size + 2 * square + 2 * size * (chunk + 1) + 4 * square * matrix
    elements = INPUT_SIZE + 3 * size
    if backward:
        operations += 4 * INPUT_SIZE * size + 6 * square + 8 * size * (chunk + 1) + 10 * square * matrix
        elements += 2 * INPUT_SIZE + 13 * size + 2 * square // chunk * matrix
    return operations, 4 * elements


def make_rivals(x: Tensor, size: int, batch: int, device: str) -> gpu.Rivals:
    """Return a forward pass of each layer, and what its backward pass differentiates."""
    inputs, lstm = layer_inputs(size, batch, device), LSTM(INPUT_SIZE, size).to(device)
    rivals: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        form: (functools.partial(ours, form, x, *inputs), [x, *inputs[:5]])
        for form in kernel.FORMS
        if form == "matrix" or len(x) <= LONGEST_ATTENTION
    }
    return rivals | {gpu.LSTM: (lambda: lstm(x)[0], [x, *lstm.parameters()])}


def main(options: argparse.Namespace) -> None:
    device = options.device
    batch, all_steps, sizes = (1, (2,), (3,)) if options.dry_run else (BATCH, STEPS, HIDDEN_SIZES)
    reason = _triton.unavailable(torch.empty(0, device=device))
    if reason is not None:
        raise SystemExit(reason)
    for size in sizes:
        # Long runs under a strong memory are chaotic: parity is judged where two correct answers can agree.
        require_parity(size, min(19, max(all_steps)), min(8, batch), device)
    reached = gpu.measure_rates(options)
    for steps, size in itertools.product(all_steps, sizes):
        x = torch.randn(steps, batch, INPUT_SIZE, generator=torch.Generator().manual_seed(1)).to(device)
        columns = {"batch": batch, "steps": steps, "input_size": INPUT_SIZE, "hidden_size": size}

        def count(rival: str, direction: str, steps: int = steps, size: int = size) -> tuple[int, int] | None:
            if rival not in kernel.FORMS:
                return None
            operations, moved = count_work(steps, size, rival, direction != "forward")
            return batch * steps * operations, batch * steps * moved

        calls = gpu.make_directions(make_rivals(x.requires_grad_(), size, batch, device))
        gpu.save(gpu.make_rows(options, calls, lambda _, columns=columns: columns, count, reached), options)


if __name__ == "__main__":
    main(OPTIONS)
