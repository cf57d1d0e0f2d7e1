"""What a convolution still reads after each sequence, against a loop over the sequences."""

import pytest
import torch

from fastweights.ops.lengths import take_recent


@pytest.mark.parametrize("count", [0, 1, 3, 6])
@pytest.mark.parametrize("steps", [0, 1, 4, 9])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_the_recent_inputs_are_those_of_a_loop(steps: int, count: int, ragged: bool, restarted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = 6
    x, before = (torch.randn(batch, length, 2, generator=generator) for length in (steps, count))
    lengths = torch.randint(steps + 1, (batch,), generator=generator) if ragged else None
    starts = torch.rand(batch, steps, generator=generator) < 0.2 if restarted else None  # past a length too
    found = take_recent(x, before, lengths, starts)
    for row in range(batch):
        recent = [*before[row]]
        for step in range(steps if lengths is None else int(lengths[row])):
            if starts is not None and starts[row, step]:
                recent = [torch.zeros(2)] * len(recent)
            recent.append(x[row, step])
        assert torch.equal(found[row], torch.stack(recent[len(recent) - count :]) if count else found.new_zeros(0, 2))
