"""Time the Triton kernels of the gated recurrence on a GPU: `PYTHONPATH=src python benchmarks/gated_gpu.py`.

Beside them: the same layer in eager PyTorch, its cell under torch.compile with a loop over time around it, and cuDNN's
LSTM of 100 units, which has about as many parameters. All in float32; nothing is timed unless every output, state and
gradient keeps parity with the float64 reference (|kernel - reference64| / |reference64| at most 1e-5, or three times
the error of eager float32). Rivals take turns; a time is the median over rounds between two CUDA events.

A training step is that of the paper's model: embedding, layer, output layer, cross entropy, clipping of the gradient
and Nadam, the states carried on from step to step. `seconds_for_5000_steps` is 5,000 times its median: the paper's
table 2 has 22 minutes for Ba et al.'s cell, 14 for an LSTM, 20 for a HyperNetwork and 25 for this model, on a P100.
`peak_mebibytes` is the most that was allocated during one call more than before it.

The columns after that, of which gpu.py tells, count work by formula, for one sequence and step with D inputs, H units,
M = H+D+1, N = H+1, W = H(M+N) numbers of both fast matrices, S and P units of the slow network, U = 4H+2M+2N numbers of
an update and chunks of K steps:

    operations   forward          2P(D+2S+U)                  the slow network's products
                                  2W + 5W                     both reads; both writes
                 backward adds    2P(2D+4S+2U)                gradients of its inputs and of its weights
                                  10W + 16W                   written twice more; a read and a write undone
    elements     forward          2D + 4P + S + 2U + 2H + 4   x twice; drive, inners, updates written and read; states,
                                                              outputs and trace written
                 backward adds    4D + 9P + 6S + 6U + 4H + 4  x and its gradient twice; inners thrice, their gradient
                                                              twice, the drive's four times; states and z's gradient
                                                              thrice; updates thrice, their gradient too; outputs twice,
                                                              their gradient, trace
                                  2W + 2W/K                   the scratch, written and read
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch
from torch import Tensor
from torch.nn import functional as F

OPTIONS = gpu.parse_arguments(__doc__.splitlines()[0], Path(__file__).with_suffix(".csv"))

from fastweights import nn  # noqa: E402
from fastweights.ops.gated import triton as kernel  # noqa: E402

SYMBOLS, FEATURES, INNER, LSTM_UNITS = 15, 15, 100, 100
SIZES = ((256, 32, 40), (1024, 32, 40), (256, 128, 40), (256, 32, 100))  # B, T, H; the first is the paper's
LONGEST_EAGER = 128 * 256 * 40 * 97  # numbers of all steps' fast matrices, each of which eager keeps several times
OURS = "triton"
TRAINING_STEPS = 5000


class Compiled(torch.nn.Module):
    """The cell under torch.compile, with the loop over time around it."""

    def __init__(self, size: int, backend: str) -> None:
        super().__init__()
        self.cell = nn.GatedFastWeightsRNNCell(FEATURES, size, slow_inner_size=INNER, impl="reference")
        self.step: Callable[..., Any] = torch.compile(self.cell, backend=backend)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        outputs = []
        for now in x:
            y, state = self.step(now, state)
            outputs.append(y)
        return torch.stack(outputs), state


def layers(batch: int, steps: int, size: int, device: str) -> dict[str, torch.nn.Module]:
    """The rivals that have room for these sizes."""
    torch.compiler.reset()  # else what it compiled for other sizes counts towards its limit, and the rest runs eagerly

    def ours(impl: str) -> torch.nn.Module:
        return nn.GatedFastWeightsRNN(FEATURES, size, slow_inner_size=INNER, impl=impl)

    rivals = {OURS: ours("triton"), gpu.LSTM: torch.nn.LSTM(FEATURES, LSTM_UNITS)}
    if batch * steps * size * (2 * size + FEATURES + 2) <= LONGEST_EAGER:
        rivals["eager"] = ours("reference")
        rivals["torch.compile cell"] = Compiled(size, "inductor" if device == "cuda" else "eager")
    return {name: layer.to(device) for name, layer in rivals.items()}


def require_parity(size: int, steps: int, batch: int, device: str) -> None:
    torch.manual_seed(size)
    weights = nn.GatedFastWeightsRNN(FEATURES, size, slow_inner_size=INNER).state_dict()
    shapes = (size,), (size,), (size, size + FEATURES + 1), (size, size + 1)
    leading = [(steps, batch, size), *((batch, *shape) for shape in shapes)]

    def results(impl: str, dtype: torch.dtype, draw: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(draw)
        x = torch.randn(steps, batch, FEATURES, generator=generator).to(device)
        start = [torch.randn(batch, *shape, generator=generator).to(device) * shape[-1] ** -0.5 for shape in shapes]
        grads = [torch.randn(shape, generator=generator).to(device) for shape in leading]
        layer = nn.GatedFastWeightsRNN(FEATURES, size, slow_inner_size=INNER, impl=impl)
        layer.load_state_dict(weights)
        layer.to(device, dtype)
        given = [tensor.to(dtype).requires_grad_() for tensor in (x, *start)]
        y, state = layer(given[0], nn.GatedFastWeightsState(*given[1:]))
        # The sum of a layer norm's outputs, or of their squares, hardly has a gradient.
        gradients = torch.autograd.grad((y, *state), [*given, *layer.parameters()], [t.to(dtype) for t in grads])
        return [y.detach(), *(tensor.detach() for tensor in state), *gradients]

    kernels = {OURS: functools.partial(results, "triton")}
    gpu.require_parity(kernels, functools.partial(results, "reference"), f"T={steps}, H={size}")


def count_work(steps: int, size: int, direction: str) -> tuple[int, int]:
    """Floating operations and bytes of a sequence step, by the formulas above."""
    rows = 4 * size + 2 * (size + FEATURES + 1) + 2 * (size + 1)
    both, state = size * (2 * size + FEATURES + 2), size
    operations = 2 * INNER * (FEATURES + 2 * state + rows) + 7 * both
    elements = 2 * FEATURES + 4 * INNER + state + 2 * rows + 2 * size + 4
    if direction != "forward":
        operations += 2 * INNER * (2 * FEATURES + 4 * state + 2 * rows) + 26 * both
        elements += 4 * FEATURES + 9 * INNER + 6 * state + 6 * rows + 4 * size + 4
        elements += 2 * both + 2 * both // kernel.chunk_steps(steps)
    return operations, 4 * elements


def training(layer: torch.nn.Module, width: int, characters: Tensor, targets: Tensor) -> Callable[[], None]:
    """A step of truncated backpropagation through time, which carries its states on."""
    device = characters.device
    embedding = torch.nn.Embedding(SYMBOLS, FEATURES, device=device)
    output = torch.nn.Linear(width, SYMBOLS, device=device)
    parameters = [p for module in (embedding, layer, output) for p in module.parameters()]
    optimizer = torch.optim.NAdam(parameters, lr=0.002)
    carried: list[Any] = [None]

    def step() -> None:
        optimizer.zero_grad()
        y, state = layer(embedding(characters), carried[0])
        F.cross_entropy(output(y).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        carried[0] = state.detach() if isinstance(state, nn.GatedFastWeightsState) else tuple(t.detach() for t in state)

    return step


def measure_peak(call: Callable[[], object], device: str) -> float | str:
    if device != "cuda":
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def make_directions(batch: int, steps: int, size: int, device: str) -> dict[str, dict[str, gpu.Call]]:
    """Return by direction a call of every rival."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, batch, FEATURES, generator=generator).to(device).requires_grad_()
    characters, targets = (torch.randint(SYMBOLS, (steps, batch), generator=generator).to(device) for _ in range(2))
    rivals = layers(batch, steps, size, device)
    passes = {name: ((lambda layer=layer: layer(x)[0]), [x, *layer.parameters()]) for name, layer in rivals.items()}
    steps_of = {
        name: training(layer, LSTM_UNITS if name == gpu.LSTM else size, characters, targets)
        for name, layer in rivals.items()
    }
    return gpu.make_directions(passes) | {"training step": steps_of}


def main(options: argparse.Namespace) -> None:
    device, all_sizes = options.device, ((1, 2, 3),) if options.dry_run else SIZES
    batch, steps, size = all_sizes[0]
    reason = kernel.unavailable(torch.empty(steps, batch, FEATURES), torch.empty(batch, size, device=device))
    if reason is not None:
        raise SystemExit(reason)
    for size in sorted({size for _, _, size in all_sizes}):
        require_parity(size, min(19, steps), min(8, batch), device)
    reached = gpu.measure_rates(options)
    for batch, steps, size in all_sizes:

        def describe(rival: str, batch: int = batch, steps: int = steps, size: int = size) -> dict[str, Any]:
            units = LSTM_UNITS if rival == gpu.LSTM else size
            return {"batch": batch, "steps": steps, "input_size": FEATURES, "hidden_size": units}

        def count(
            rival: str, direction: str, batch: int = batch, steps: int = steps, size: int = size
        ) -> tuple[int, int] | None:
            if rival != OURS or direction == "training step":
                return None
            operations, moved = count_work(steps, size, direction)
            return batch * steps * operations, batch * steps * moved

        def measure_more(direction: str, milliseconds: float, call: gpu.Call) -> dict[str, Any]:
            seconds = round(TRAINING_STEPS * milliseconds / 1e3, 1) if direction == "training step" else ""
            return {"seconds_for_5000_steps": seconds, "peak_mebibytes": measure_peak(call, device)}

        calls = make_directions(batch, steps, size, device)
        gpu.save(gpu.make_rows(options, calls, describe, count, reached, measure_more), options)


if __name__ == "__main__":
    main(OPTIONS)
