"""The recurrence of Ba et al. 2016 in plain PyTorch: the definition that every kernel is held to.

One step, from h(t) and A(t-1) to h(t+1) and A(t):

1. z = W h(t) + C x(t+1) + b                      (held fixed while the inner loop runs)
2. A(t) = decay A(t-1) + rate h(t) h(t)^T         (eq 1: what is read holds h(t) and all before it)
3. h_0 = f(z)
4. h_{s+1} = f(LN(z + A(t) h_s)), s = 0 .. S-1    (eq 5);   h(t+1) = h_S

`drive` is C x + b for the whole sequence, one product made by the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.checks import check_between, check_choice, check_not_negative, check_positive
from fastweights.ops._native import check_lengths, check_tensors

NONLINEARITIES = {"relu": torch.relu, "tanh": torch.tanh}
MOST_INNER_STEPS = 10_000  # a typing error beyond any use, and what still fits every integer on the way


@dataclass(frozen=True)
class Constants:
    """The numbers of the recurrence that are not learnt.

    Args:
        decay: what is left of the fast matrix after each step, 0 to 1.
        rate: the strength with which a hidden state is written, at least 0.
        inner_steps: readings of the fast matrix in each step, 1 to 10,000.
        nonlinearity: "relu" or "tanh".
        normalize_initial: whether a layer norm stands in front of h_0 too.
        eps: what the layer norm adds to the variance, above 0.

    Raises:
        ValueError: a number is out of range.
    """

    decay: float
    rate: float
    inner_steps: int = 1
    nonlinearity: str = "relu"
    normalize_initial: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_between(0, 1, decay=self.decay)
        check_not_negative(rate=self.rate)
        steps = self.inner_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_INNER_STEPS:
            raise ValueError(f"inner_steps must be a whole number from 1 to {MOST_INNER_STEPS:,}, got {steps!r}")
        check_choice(NONLINEARITIES, nonlinearity=self.nonlinearity)
        check_positive(eps=self.eps)


class Inputs(NamedTuple):
    """The tensors of the recurrence, in the order in which the references and the kernels take them.

    Examples:
        >>> import torch
        >>> from fastweights.ops.associative import Constants, Inputs
        >>> from fastweights.ops.associative.reference import matrix_form
        >>> inputs = Inputs(torch.randn(7, 2, 5), torch.eye(5), None, None, torch.zeros(2, 5), None, None)
        >>> matrix_form(inputs, Constants(decay=0.95, rate=0.01)).shape
        torch.Size([7, 2, 5])
    """

    drive: Tensor  # [T,B,H]
    weight_hh: Tensor  # [H,H]
    norm_weight: Tensor | None  # [H]; None switches the layer norm off
    norm_bias: Tensor | None  # [H]; None where `norm_weight` is
    hidden: Tensor  # [B,H]
    memory: Tensor | None  # [B,H,H]; None is zeros
    lengths: Tensor | None  # int64 [B]; None is T for all


def input_shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs by name, lengths left out."""
    drive = inputs.drive
    if drive.dim() != 3:
        raise ValueError(f"drive must be [T,B,H], got shape {tuple(drive.shape)}")
    if (inputs.norm_weight is None) != (inputs.norm_bias is None):
        raise ValueError("norm_weight and norm_bias come together: give both, or neither")
    steps, batch, size = drive.shape
    return {
        "drive": (steps, batch, size),
        "weight_hh": (size, size),
        "norm_weight": (size,),
        "norm_bias": (size,),
        "hidden": (batch, size),
        "memory": (batch, size, size),
    }


def check_inputs(inputs: Inputs) -> None:
    """Refuse inputs that do not fit together in shape, dtype or device."""
    drive = inputs.drive
    check_tensors(inputs[:-1], input_shapes(inputs), drive, "drive")
    check_lengths(inputs.lengths, drive.shape[1], drive.device)


def _step(
    inputs: Inputs, drive: Tensor, hidden: Tensor, read: Callable[[Tensor], Tensor], constants: Constants
) -> Tensor:
    """Take steps 1, 3 and 4 for the whole batch; `read(v)` gives A(t) v."""
    activation = NONLINEARITIES[constants.nonlinearity]

    def normalize(u: Tensor) -> Tensor:
        if inputs.norm_weight is None:
            return u
        return F.layer_norm(u, u.shape[-1:], inputs.norm_weight, inputs.norm_bias, constants.eps)

    z = drive + hidden @ inputs.weight_hh.T
    h = activation(normalize(z) if constants.normalize_initial else z)
    for _ in range(constants.inner_steps):
        h = activation(normalize(z + read(h)))
    return h


def matrix_form(inputs: Inputs, constants: Constants) -> Tensor:
    """Run the recurrence with the fast matrix A formed at every step (eq 1): T H^2 for each example.

    Shapes: drive [T,B,H], weight_hh [H,H], norm_weight and norm_bias [H] or None (no layer norm), hidden [B,H],
    memory [B,H,H] or None (zeros), lengths [B] int64 or None -> outputs [T,B,H], zero from each length on.
    `memory` is A(t-1) as the sequence begins: all that was written before `hidden`.
    """
    hidden, memory, lengths = inputs.hidden, inputs.memory, inputs.lengths
    drive = _clear_padding(inputs.drive, lengths)
    steps, batch, size = drive.shape
    if memory is None:
        memory = drive.new_zeros(batch, size, size)
    outputs = []
    for t in range(steps):
        written = constants.rate * hidden.unsqueeze(2) * hidden.unsqueeze(1)
        memory = constants.decay * memory + written

        def read(v: Tensor, memory: Tensor = memory) -> Tensor:
            return (memory @ v.unsqueeze(2)).squeeze(2)

        hidden = _step(inputs, drive[t], hidden, read, constants)
        hidden = _mask(hidden, lengths, t)
        outputs.append(hidden)
    return torch.stack(outputs)


def attention_form(inputs: Inputs, constants: Constants) -> Tensor:
    """Run the recurrence as attention over the stored hidden states (eq 4): A is never formed, T^2 H an example.

    The same shapes and the same result as `matrix_form`.
    """
    hidden, memory, lengths = inputs.hidden, inputs.memory, inputs.lengths
    drive = _clear_padding(inputs.drive, lengths)
    stored = [hidden]
    ages = torch.arange(drive.shape[0] - 1, -1, -1, device=drive.device)
    weights = constants.rate * _powers(constants.decay, ages, drive.dtype)  # the newest last
    for t in range(drive.shape[0]):
        past = torch.stack(stored, dim=1)  # [B,t+1,H]

        def read(v: Tensor, past: Tensor = past, t: int = t) -> Tensor:
            scores = (past @ v.unsqueeze(2)).squeeze(2) * weights[-(t + 1) :]  # [B,t+1]
            result = (scores.unsqueeze(1) @ past).squeeze(1)
            if memory is not None:
                result = result + constants.decay ** (t + 1) * (memory @ v.unsqueeze(2)).squeeze(2)
            return result

        hidden = _step(inputs, drive[t], hidden, read, constants)
        hidden = _mask(hidden, lengths, t)
        stored.append(hidden)
    return torch.stack(stored[1:])


def recurrence(inputs: Inputs, constants: Constants) -> Tensor:
    """Run the form that costs less: attention up to T = 2 H, the matrix beyond."""
    run = attention_form if inputs.drive.shape[0] <= 2 * inputs.drive.shape[2] else matrix_form
    return run(inputs, constants)


FORMS = {"auto": recurrence, "attention": attention_form, "matrix": matrix_form}


def final_memory(
    outputs: Tensor,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
) -> Tensor:
    """Return the fast matrix after the last valid step, A(T-1): all but the newest hidden state is written (eq 3).

    Shapes: outputs [T,B,H], hidden [B,H] and memory [B,H,H] as the sequence began -> [B,H,H].
    """
    written, weight, kept = _weigh_written(outputs, hidden, lengths, constants)
    result = (weight.unsqueeze(2) * written).transpose(1, 2) @ written
    return result if memory is None else result + kept * memory


def final_memory_backward(
    grad: Tensor,
    outputs: Tensor,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of outputs [T,B,H], hidden [B,H] and memory [B,H,H] from that of `final_memory`, [B,H,H].

    Autograd has no graph of a matrix that a kernel made; and it would take two products where this takes one.
    """
    written, weight, kept = _weigh_written(outputs, hidden, lengths, constants)
    gradient = (weight.unsqueeze(2) * (written @ (grad + grad.transpose(1, 2)))).transpose(0, 1)
    last = torch.zeros_like(gradient[:1])  # the newest hidden state is not written yet
    return torch.cat([gradient[1:], last]), gradient[0], None if memory is None else kept * grad


def _weigh_written(
    outputs: Tensor, hidden: Tensor, lengths: Tensor | None, constants: Constants
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h(0) .. h(T-1) [B,T,H], each one's weight in the final memory [B,T], and the initial one's [B,1,1]."""
    steps = outputs.shape[0]
    written = torch.cat([hidden.unsqueeze(0), outputs[:-1]]).transpose(0, 1)
    position = torch.arange(steps, device=outputs.device)
    length = torch.full((1,), steps, device=outputs.device) if lengths is None else lengths.clamp(0, steps)
    age = length.unsqueeze(1) - 1 - position  # [B,T]; negative past the end
    weight = constants.rate * _powers(constants.decay, age.clamp(min=0), outputs.dtype) * (age >= 0)
    return written, weight, _powers(constants.decay, length, outputs.dtype).view(-1, 1, 1)


def _powers(decay: float, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    # In double whatever the dtype: a float raised to an integer tensor would be a float32.
    return torch.pow(decay, exponents.double()).to(dtype)


def _clear_padding(drive: Tensor, lengths: Tensor | None) -> Tensor:
    # Whatever a padded tensor holds past a length, NaN too, must not reach a gradient through a product with zero.
    if lengths is None:
        return drive
    steps = torch.arange(drive.shape[0], device=drive.device)
    return torch.where((steps.unsqueeze(1) < lengths).unsqueeze(2), drive, torch.zeros_like(drive))


def _mask(hidden: Tensor, lengths: Tensor | None, t: int) -> Tensor:
    if lengths is None:
        return hidden
    return torch.where((t < lengths).unsqueeze(1), hidden, torch.zeros_like(hidden))
