"""Time `ops.pooling` beside torch's max pooling and leaky ReLU: `python benchmarks/pooling.py`.

One thread; images with their channels side by side, of the sizes in `ConvEncoder`. Training is forward and backward.
Both take turns in one process; a time is the median of the rounds. Nothing is timed unless outputs and gradients are
equal to the last bit. Memory stays with the process, as in `fastweights reproduce`.
"""

import argparse
from pathlib import Path

import torch

from fastweights._allocator import keep_freed_memory
from fastweights.bench.machine import columns
from fastweights.bench.timing import beside_torch
from fastweights.ops.pooling import leaky_max_pool

OURS, TORCH = "fastweights", "torch"
CASES = [(80, 32, 84), (80, 32, 42), (160, 64, 28), (160, 64, 14)]  # images, channels, pixels of a side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".csv"))
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for count, channels, size in CASES:
            images = torch.randn(count, channels, size, size, dtype=dtype).to(memory_format=torch.channels_last)
            gradient = torch.randn_like(leaky_max_pool(images))

            def inference(impl: str, images: torch.Tensor = images) -> torch.Tensor:
                return leaky_max_pool(images, impl=impl)

            def training(
                impl: str, images: torch.Tensor = images, gradient: torch.Tensor = gradient
            ) -> tuple[torch.Tensor, ...]:
                pooled = leaky_max_pool(images.requires_grad_(), impl=impl)
                return pooled, *torch.autograd.grad(pooled, images, gradient)

            for ours, theirs in zip(training("cpu"), training("reference"), strict=True):
                if not torch.equal(ours, theirs):
                    raise SystemExit(f"{count} images of {size} pixels: not what torch gives, nothing is timed")
            images.requires_grad_(False)
            for mode, call in (("inference", inference), ("training", training)):
                case = {"dtype": str(dtype).removeprefix("torch."), "images": count, "channels": channels, "size": size}
                rivals = {OURS: lambda call=call: call("cpu"), TORCH: lambda call=call: call("reference")}
                beside_torch(options.output, columns(), case | {"mode": mode}, rivals, options.rounds)


if __name__ == "__main__":
    main()
