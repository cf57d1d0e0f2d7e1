"""Time the block of `ops.conv_block` and its pooling beside torch's: `python benchmarks/conv_block.py`.

A 3 x 3 convolution, 2 x 2 max pooling and leaky ReLU go to convolution.csv; pooling and leaky ReLU alone, of images
with their channels side by side, to pooling.csv. One thread, at the sizes of `ConvEncoder`; training is forward and
backward. Both take turns in one process; a time is the median of the rounds. Nothing is timed unless outputs and
gradients of the block are as close to those in double precision as torch's, within twice its error or 1e-5, and those
of pooling equal to the last bit. Memory stays with the process, as in `fastweights reproduce`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights._allocator import keep_freed_memory
from fastweights.bench.parity import distance
from fastweights.bench.run import append_csv, machine_columns
from fastweights.ops.conv_block import conv_leaky_max_pool, leaky_max_pool
from fastweights.timing import medians

OURS, TORCH = "fastweights", "torch"
BLOCKS = [(80, 3, 32, 84), (160, 1, 64, 28)]  # images, their channels, those of the result, pixels of a side
POOLS = [(80, 32, 84), (80, 32, 42), (160, 64, 28), (160, 64, 14)]  # images, channels, pixels of a side
LEAST = 1e-5  # of the norm

Forward = Callable[..., Tensor]


def torch_block(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.leaky_relu(F.max_pool2d(F.conv2d(images, weight, bias, padding=1), 2, ceil_mode=True), 0.2)


def train(forward: Forward, inputs: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs, and the gradients of the inputs that have one."""
    outputs = forward(*inputs)
    return outputs.detach(), *torch.autograd.grad(outputs, [t for t in inputs if t.requires_grad], gradient)


def infer(forward: Forward, inputs: list[Tensor], gradient: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return forward(*inputs)


def require_block_parity(
    ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], inputs: list[Tensor], gradient: Tensor
) -> None:
    doubles = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    exact = train(torch_block, doubles, gradient.double())
    for our, their, right in zip(ours, theirs, exact, strict=True):
        error, torchs = distance(our, right), distance(their, right)
        if not error <= 2 * torchs + LEAST:
            raise SystemExit(f"{tuple(inputs[0].shape)}: off by {error:.1e}, torch by {torchs:.1e}, nothing is timed")


def require_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], inputs: list[Tensor], gradient: Tensor) -> None:
    if not all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True)):
        raise SystemExit(f"{tuple(inputs[0].shape)}: not what torch gives, nothing is timed")


def measure(
    path: Path, rounds: int, case: dict[str, Any], rivals: dict[str, Forward], inputs: list[Tensor], require: Any
) -> None:
    """Append and print what both rivals take, and how many times what torch takes."""
    gradient = torch.randn_like(infer(rivals[OURS], inputs))
    require(*(train(forward, inputs, gradient) for forward in rivals.values()), inputs, gradient)
    for mode, run in (("inference", infer), ("training", train)):
        times = medians({name: partial(run, forward, inputs, gradient) for name, forward in rivals.items()}, rounds)
        rows = []
        for name, (taken, counted) in times.items():
            ratio = taken / times[TORCH].milliseconds
            shown = case | {
                "mode": mode,
                "rival": name,
                "milliseconds": round(taken, 3),
                "ratio_to_torch": round(ratio, 3),
            }
            rows.append(machine_columns() | shown | {"rounds": counted})
            print(*shown.values())
        append_csv(path, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="the folder of both CSV files")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for count, inputs, channels, size in BLOCKS:
            images, weight = (
                torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)
                for shape in ((count, inputs, size, size), (channels, inputs, 3, 3))
            )
            tensors = [images, weight.requires_grad_(), torch.randn(channels, dtype=dtype).requires_grad_()]
            case = {"dtype": name, "images": count, "inputs": inputs, "channels": channels, "size": size}
            rivals = {OURS: conv_leaky_max_pool, TORCH: torch_block}
            measure(options.output / "convolution.csv", options.rounds, case, rivals, tensors, require_block_parity)
        for count, channels, size in POOLS:
            images = torch.randn(count, channels, size, size, dtype=dtype).to(memory_format=torch.channels_last)
            case = {"dtype": name, "images": count, "channels": channels, "size": size}
            rivals = {
                rival: partial(leaky_max_pool, impl=impl) for rival, impl in ((OURS, "cpu"), (TORCH, "reference"))
            }
            measure(
                options.output / "pooling.csv", options.rounds, case, rivals, [images.requires_grad_()], require_equal
            )


if __name__ == "__main__":
    main()
