"""The recurrent delta rule step by step in plain PyTorch: the definition that the kernel is checked against.

    [z; q; k; v; a; b] = drive_t + W h_{t-1}                               the drive convolved, with taps
    q, k = silu(q) / |silu(q)|, silu(k) / |silu(k)|,   v = silu(v)         of each head
    M = sigmoid(a_t) M_{t-1}
    M_t = M + sigmoid(b_t) k (v - M^T k)^T
    h_t = relu(LN(z + M_t^T q))

Before a step that `starts` marks, h, M and the drive are zeros: another sequence begins.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.short_convolution import short_convolution

EPS = 1e-5  # added to the variance by the layer norm
FIXED = 2  # the last inputs, which have no gradient


class Inputs(NamedTuple):
    """The tensors of the recurrence, in the order in which the reference and the kernel take them."""

    drive: Tensor  # [T,B,4H+2N]
    weight: Tensor  # [4H+2N,H]
    gain: Tensor  # [H]
    bias: Tensor  # [H]
    hidden: Tensor  # [B,H]
    memory: Tensor  # [B,N,W,W], rows of keys; W = H / N
    taps: Tensor | None = None  # [4H+2N,C], of the drive; None is no convolution
    taps_bias: Tensor | None = None  # [4H+2N]; None is zero
    last: Tensor | None = None  # [B,C-1,4H+2N], the drive before the first step; None is zeros
    lengths: Tensor | None = None  # int64 [B]; None is T for all
    starts: Tensor | None = None  # bool [T,B]; None is nowhere


def shapes_of(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs that have gradients, by name, as the drive and the state give them.

    Raises:
        ValueError: the drive, the state or the taps have another number of axes, or no step, or something of a
            convolution is given without its taps.
    """
    drive, hidden, memory = inputs.drive, inputs.hidden, inputs.memory
    if drive.dim() != 3 or drive.shape[0] == 0 or hidden.dim() != 2 or memory.dim() != 4:
        raise ValueError(
            "drive must be [T,B,4H+2N] with at least one step, hidden [B,H] and memory [B,N,W,W], got "
            f"{list(drive.shape)}, {list(hidden.shape)} and {list(memory.shape)}"
        )
    (steps, batch, _), size, heads = drive.shape, hidden.shape[1], memory.shape[1]
    if heads == 0 or size == 0 or size % heads:
        raise ValueError(f"the heads of memory must divide the {size} units of hidden, got {heads}")
    rows, width = 4 * size + 2 * heads, size // heads
    return {
        "drive": (steps, batch, rows),
        "weight": (rows, size),
        "gain": (size,),
        "bias": (size,),
        "hidden": (batch, size),
        "memory": (batch, heads, width, width),
        **_shapes_of_convolution(inputs, batch, rows),
    }


def _shapes_of_convolution(inputs: "Inputs | StepInputs", batch: int, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the taps, of their bias and of what they read before the first step."""
    taps = inputs.taps
    if taps is None:
        for name in ("taps_bias", "last"):
            if getattr(inputs, name) is not None:
                raise ValueError(f"{name} belongs to a convolution: give its taps too, or leave it out")
        return dict.fromkeys(("taps", "taps_bias", "last"), ())
    if taps.dim() != 2 or taps.shape[1] == 0:
        raise ValueError(f"taps must be [4H+2N,C] with a step at least, got {list(taps.shape)}")
    read = taps.shape[1]
    return {"taps": (rows, read), "taps_bias": (rows,), "last": (batch, read - 1, rows)}


class StepInputs(NamedTuple):
    """The tensors of one step of `nn.DeltaFastWeightsRNN`: its input, its parameters and its state."""

    x: Tensor  # [B,D]
    weight_ih: Tensor  # [4H+2N,D]
    bias_ih: Tensor | None  # [4H+2N]
    weight_hh: Tensor  # [4H+2N,H]
    gain: Tensor  # [H]
    bias: Tensor  # [H]
    hidden: Tensor  # [B,H]
    memory: Tensor  # [B,N,W,W]
    taps: Tensor | None = None  # [4H+2N,C]; None is no convolution
    taps_bias: Tensor | None = None  # [4H+2N]; None is zero
    last: Tensor | None = None  # [B,C-1,4H+2N], which taps need


def step_shapes_of(inputs: StepInputs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs of a step, by name, as x, the state and the taps give them.

    Raises:
        ValueError: x, the state or the taps have another number of axes, or something of a convolution is missing.
    """
    x, hidden, memory = inputs.x, inputs.hidden, inputs.memory
    if x.dim() != 2 or hidden.dim() != 2 or memory.dim() != 4:
        raise ValueError(
            "x must be [B,D], hidden [B,H] and memory [B,N,W,W], got "
            f"{', '.join(str(list(tensor.shape)) for tensor in (x, hidden, memory))}"
        )
    if inputs.taps is not None and inputs.last is None:
        raise ValueError("taps need last, [B,C-1,4H+2N], what they read before this step, got None")
    (batch, features), size, heads = x.shape, hidden.shape[1], memory.shape[1]
    if heads == 0 or size == 0 or size % heads:
        raise ValueError(f"the heads of memory must divide the {size} units of hidden, got {heads}")
    rows, width = 4 * size + 2 * heads, size // heads
    return {
        "x": (batch, features),
        "weight_ih": (rows, features),
        "bias_ih": (rows,),
        "weight_hh": (rows, size),
        "gain": (size,),
        "bias": (size,),
        "hidden": (batch, size),
        "memory": (batch, heads, width, width),
        **_shapes_of_convolution(inputs, batch, rows),
    }


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Run the recurrence.

    Returns:
        The outputs [T,B,H], zero past a length, and the memory after each last valid step [B,N,W,W].
    """
    drive, weight, gain, bias, hidden, memory, taps, taps_bias, last, lengths, starts = inputs
    size, heads = hidden.shape[1], memory.shape[1]
    if lengths is not None:  # a number that is not finite is not read past a length, and spoils no gradient from there
        inside = torch.arange(len(drive), device=drive.device).unsqueeze(1) < lengths
        drive = torch.where(inside.unsqueeze(2), drive, torch.zeros_like(drive))
    if taps is not None:
        turned = None if starts is None else starts.t()
        driven = short_convolution(drive.transpose(0, 1), taps, taps_bias, last, starts=turned, impl="reference")
        drive = driven.transpose(0, 1)
    outputs = []
    for step, now in enumerate(drive.unbind()):
        valid = None if lengths is None else step < lengths
        if starts is not None:
            anew = starts[step] if valid is None else starts[step] & valid
            hidden = torch.where(anew.unsqueeze(1), torch.zeros_like(hidden), hidden)
            memory = torch.where(anew.view(-1, 1, 1, 1), torch.zeros_like(memory), memory)
        mixed = now + hidden @ weight.t()
        z, *vectors, a, b = torch.split(mixed, [size] * 4 + [heads] * 2, 1)
        q, k, v = (F.silu(vector).view(-1, heads, size // heads) for vector in vectors)
        q, k = F.normalize(q, dim=2), F.normalize(k, dim=2)
        decayed = a.sigmoid().view(-1, heads, 1, 1) * memory
        missing = v - (k.unsqueeze(2) @ decayed).squeeze(2)
        written = b.sigmoid().unsqueeze(2) * missing
        after = decayed + k.unsqueeze(3) * written.unsqueeze(2)
        found = (q.unsqueeze(2) @ after).flatten(1)
        new = F.relu(F.layer_norm(z + found, (size,), gain, bias, EPS))
        if valid is None:
            hidden, memory = new, after
            outputs.append(new)
            continue
        outputs.append(torch.where(valid.unsqueeze(1), new, torch.zeros_like(new)))
        hidden = torch.where(valid.unsqueeze(1), new, hidden)
        memory = torch.where(valid.view(-1, 1, 1, 1), after, memory)
    return torch.stack(outputs), memory
