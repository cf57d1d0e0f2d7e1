"""Time `ops.convolution` beside torch's convolution, max pooling and leaky ReLU: `python benchmarks/convolution.py`.

One thread; the first blocks of `ConvEncoder`. Training is forward and backward, to the weights. Both take turns in
one process; a time is the median of the rounds. Nothing is timed unless outputs and gradients are as close to those in
double precision as torch's: within twice its error, or 1e-5. Memory stays with the process, as in `fastweights
reproduce`.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights._allocator import keep_freed_memory
from fastweights.bench.machine import columns
from fastweights.bench.timing import beside_torch
from fastweights.ops.convolution import conv_leaky_max_pool

OURS, TORCH = "fastweights", "torch"
CASES = [(80, 3, 32, 84), (160, 1, 64, 28)]  # images, their channels, those of the result, pixels of a side
LEAST = 1e-5  # of the norm


def torchs(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.leaky_relu(F.max_pool2d(F.conv2d(images, weight, bias, padding=1), 2, ceil_mode=True), 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".csv"))
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rivals = {OURS: conv_leaky_max_pool, TORCH: torchs}
    for dtype in (torch.float32, torch.bfloat16):
        for count, inputs, channels, size in CASES:
            shapes = (count, inputs, size, size), (channels, inputs, 3, 3)
            images, weight = (torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last) for shape in shapes)
            learnt = weight.requires_grad_(), torch.randn(channels, dtype=dtype).requires_grad_()
            gradient = torch.randn_like(conv_leaky_max_pool(images, *learnt))

            @torch.no_grad()
            def inference(
                rival: str, images: Tensor = images, learnt: tuple[Tensor, Tensor] = learnt
            ) -> tuple[Tensor, ...]:
                return (rivals[rival](images, *learnt),)

            def training(
                rival: str,
                images: Tensor = images,
                learnt: tuple[Tensor, Tensor] = learnt,
                gradient: Tensor = gradient,
            ) -> tuple[Tensor, ...]:
                found = rivals[rival](images, *learnt)
                return found.detach(), *torch.autograd.grad(found, learnt, gradient)

            exact = torchs(images.double(), *(tensor.double() for tensor in learnt))
            exact = exact.detach(), *torch.autograd.grad(exact, learnt, gradient.double())
            for right, *found in zip(exact, training(OURS), training(TORCH), strict=True):
                ours, theirs = (float((each - right).norm() / right.norm()) for each in found)
                if ours > 2 * theirs + LEAST:
                    raise SystemExit(f"{count} images of {size} pixels: off by {ours:.1e}, torch by {theirs:.1e}")
            case = {"dtype": str(dtype).removeprefix("torch."), "images": count, "inputs": inputs}
            case |= {"channels": channels, "size": size}
            for mode, call in (("inference", inference), ("training", training)):
                turns = {rival: lambda rival=rival, call=call: call(rival) for rival in rivals}
                beside_torch(options.output, columns(), case | {"mode": mode}, turns, options.rounds)


if __name__ == "__main__":
    main()
