"""The recurrence of Ba et al. 2016 in plain PyTorch: the definition that every kernel is held to.

One step, from h(t) and A(t-1) to h(t+1) and A(t):

1. z = W h(t) + C x(t+1) + b                      (held fixed while the inner loop runs)
2. A(t) = decay A(t-1) + rate h(t) h(t)^T         (eq 1: what is read holds h(t) and all before it)
3. h_0 = f(z)
4. h_{s+1} = f(LN(z + A(t) h_s)), s = 0 .. S-1    (eq 5);   h(t+1) = h_S

In method 2 of appendix B h_s stands in place of z in step 4: A(t) + I is what the state settles under.

`drive` is C x + b for the whole sequence, one product made by the caller. Before a step that `starts` marks, h(t) and
A(t-1) are zeros: another sequence begins. For the multi-level network of section 4.2, `strengths` multiplies the rate
of each step's write, and a step that `clears` marks forgets h(t) once it is written: step 1 finds zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.checks import check_between, check_choice, check_not_negative, check_positive, is_integer
from fastweights.ops._native import check_flags, check_lengths, check_tensors

NONLINEARITIES = {"relu": torch.relu, "tanh": torch.tanh}
MOST_INNER_STEPS = 10_000  # more is a typing error; this still fits every integer on the way


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
        hold_input: whether every reading is added to z, which is method 1 of appendix B; otherwise to the state that
            reads, method 2.

    Raises:
        ValueError: a number is out of range.
    """

    decay: float
    rate: float
    inner_steps: int = 1
    nonlinearity: str = "relu"
    normalize_initial: bool = False
    eps: float = 1e-5
    hold_input: bool = True

    def __post_init__(self) -> None:
        check_between(0, 1, decay=self.decay)
        check_not_negative(rate=self.rate)
        steps = self.inner_steps
        if not is_integer(steps) or not 1 <= steps <= MOST_INNER_STEPS:
            raise ValueError(f"inner_steps must be a whole number from 1 to {MOST_INNER_STEPS:,}, got {steps!r}")
        check_choice(NONLINEARITIES, nonlinearity=self.nonlinearity)
        check_positive(eps=self.eps)


class Inputs(NamedTuple):
    """The tensors of the recurrence, in the order in which the references and the kernels take them.

    Examples:
        >>> import torch
        >>> from fastweights.ops.associative import Constants, Inputs
        >>> from fastweights.ops.associative.reference import matrix_form
        >>> inputs = Inputs(torch.randn(7, 2, 5), torch.eye(5), None, None, torch.zeros(2, 5))
        >>> matrix_form(inputs, Constants(decay=0.95, rate=0.01)).shape
        torch.Size([7, 2, 5])
    """

    drive: Tensor  # [T,B,H]
    weight_hh: Tensor  # [H,H]
    norm_weight: Tensor | None  # [H]; None switches the layer norm off
    norm_bias: Tensor | None  # [H]; None where `norm_weight` is
    hidden: Tensor  # [B,H]
    memory: Tensor | None = None  # [B,H,H]; None is zeros
    strengths: Tensor | None = None  # [T,B]; None is ones
    lengths: Tensor | None = None  # int64 [B]; None is T for all
    starts: Tensor | None = None  # bool [T,B]; None is nowhere, and below
    clears: Tensor | None = None  # bool [T,B]


FIXED = 3  # the last inputs, which have no gradient


def input_shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs that have gradients, by name."""
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
        "strengths": (steps, batch),
    }


def check_inputs(inputs: Inputs) -> None:
    """Refuse inputs that do not fit together in shape, dtype or device."""
    drive = inputs.drive
    check_tensors(inputs[:-FIXED], input_shapes(inputs), drive, "drive")
    check_lengths(inputs.lengths, drive.shape[1], drive.device)
    lay_out_flags(inputs)


def lay_out_flags(inputs: Inputs) -> list[Tensor | None]:
    """Return `starts` and `clears` contiguous, and refuse them where they do not fit."""
    steps, batch, _ = inputs.drive.shape
    flags = {"starts": inputs.starts, "clears": inputs.clears}
    return check_flags(flags, steps, batch, inputs.drive.device)


def oldest_read(starts: Tensor) -> Tensor:
    """Return the index of the first hidden state that each step reads, int64 [T,B]: none of another sequence.

    0 is h(0), with which the given memory comes; a step t that restarts reads none, t + 1.
    """
    index = torch.arange(1, len(starts) + 1, device=starts.device).unsqueeze(1)
    return torch.where(starts, index, torch.zeros_like(index)).cummax(0).values


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
        h = activation(normalize((z if constants.hold_input else h) + read(h)))
    return h


def matrix_form(inputs: Inputs, constants: Constants) -> Tensor:
    """Run the recurrence with the fast matrix A formed at every step (eq 1): T H^2 for each example.

    Shapes: those of `Inputs` -> outputs [T,B,H], zero from each length on.
    `memory` is A(t-1) as the sequence begins: all that was written before `hidden`.
    """
    hidden, memory, lengths, starts = inputs.hidden, inputs.memory, inputs.lengths, inputs.starts
    drive = _clear_padding(inputs.drive, lengths)
    strengths = None if inputs.strengths is None else _clear_padding(inputs.strengths, lengths)
    steps, batch, size = drive.shape
    if memory is None:
        memory = drive.new_zeros(batch, size, size)
    outputs = []
    for t in range(steps):
        if starts is not None:
            hidden, memory = clear(starts[t], hidden), clear(starts[t], memory)
        written = constants.rate * hidden.unsqueeze(2) * hidden.unsqueeze(1)
        if strengths is not None:
            written = strengths[t].view(-1, 1, 1) * written
        memory = constants.decay * memory + written
        if inputs.clears is not None:
            hidden = clear(inputs.clears[t], hidden)

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
    hidden, memory, lengths, starts = inputs.hidden, inputs.memory, inputs.lengths, inputs.starts
    drive = _clear_padding(inputs.drive, lengths)
    strengths = None if inputs.strengths is None else _clear_padding(inputs.strengths, lengths)
    stored = [hidden]
    oldest = None if starts is None else oldest_read(starts)
    ages = torch.arange(drive.shape[0] - 1, -1, -1, device=drive.device)
    weights = constants.rate * _powers(constants.decay, ages, drive.dtype)  # the newest last
    for t in range(drive.shape[0]):
        past, given = torch.stack(stored, dim=1), memory  # [B,t+1,H]
        weight = weights[-(t + 1) :]
        if strengths is not None:
            weight = weight * strengths[: t + 1].T  # [B,t+1]
        if starts is not None and oldest is not None:
            hidden = clear(starts[t], hidden)
            past = clear(torch.arange(t + 1, device=past.device) < oldest[t].unsqueeze(1), past)
            given = None if memory is None else clear(oldest[t] > 0, memory)
        if inputs.clears is not None:
            hidden = clear(inputs.clears[t], hidden)

        def read(
            v: Tensor, past: Tensor = past, weight: Tensor = weight, given: Tensor | None = given, t: int = t
        ) -> Tensor:
            scores = (past @ v.unsqueeze(2)).squeeze(2) * weight  # [B,t+1]
            result = (scores.unsqueeze(1) @ past).squeeze(1)
            if given is not None:
                result = result + constants.decay ** (t + 1) * (given @ v.unsqueeze(2)).squeeze(2)
            return result

        hidden = _step(inputs, drive[t], hidden, read, constants)
        hidden = _mask(hidden, lengths, t)
        stored.append(hidden)
    return torch.stack(stored[1:])


def attention_scores(outputs: Tensor, inputs: Inputs, constants: Constants) -> Tensor:
    """Return how strongly each step attended to each stored state in its last read: the products of eq 4.

    A step's read is the sum of the stored states h(0) .. h(T-1), each times its score, and of what was left of the
    given memory: score = rate strength decay^age h(n).v, where v is the state that asked.

    Args:
        outputs: h(1) .. h(T) that any form gave for these inputs, [T,B,H].
        inputs: without `lengths`.
        constants: those of the recurrence.

    Returns:
        [T,B,T]: step, sequence, stored state, the first of which is `inputs.hidden`; zero for what is not stored yet
        and for states of another sequence.

    Examples:
        >>> import torch
        >>> from fastweights.ops.associative import Constants, Inputs, associative, attention_scores
        >>> inputs = Inputs(torch.randn(7, 2, 5), torch.eye(5), None, None, torch.zeros(2, 5))
        >>> constants = Constants(decay=0.95, rate=0.01)
        >>> outputs = associative(inputs.drive, inputs.weight_hh, inputs.hidden, constants=constants)
        >>> attention_scores(outputs, inputs, constants).shape
        torch.Size([7, 2, 7])
    """
    steps = len(outputs)
    stored = torch.cat([inputs.hidden.unsqueeze(0), outputs[:-1]])  # [T,B,H]
    times = torch.arange(steps, device=outputs.device)
    ages = times.view(-1, 1, 1) - times  # [T,1,T]
    weights = constants.rate * _powers(constants.decay, ages.clamp(min=0), outputs.dtype) * (ages >= 0)
    previous, kept = stored, _powers(constants.decay, times + 1, outputs.dtype).view(-1, 1, 1)
    if inputs.strengths is not None:
        weights = weights * inputs.strengths.T
    if inputs.starts is not None:
        oldest = oldest_read(inputs.starts)
        weights = weights * (times >= oldest.unsqueeze(2))
        kept = kept * (oldest == 0).unsqueeze(2)
        previous = clear(inputs.starts, previous)
    if inputs.clears is not None:
        previous = clear(inputs.clears, previous)
    scores = weights

    def read(v: Tensor) -> Tensor:
        nonlocal scores
        scores = weights * torch.einsum("tbh,nbh->tbn", v, stored)
        result = torch.einsum("tbn,nbh->tbh", scores, stored)
        if inputs.memory is not None:
            result = result + kept * torch.einsum("bhk,tbk->tbh", inputs.memory, v)
        return result

    _step(inputs, inputs.drive, previous, read, constants)  # all steps at once: the start of each is known
    return scores


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
    *,
    starts: Tensor | None = None,
    strengths: Tensor | None = None,
) -> Tensor:
    """Return the fast matrix after the last valid step, A(T-1): all but the newest hidden state is written (eq 3).

    Shapes: outputs [T,B,H], hidden [B,H] and memory [B,H,H] as the sequence began, lengths [B], starts and strengths
    [T,B] -> [B,H,H].
    """
    written, weight, kept, gone = _weigh_written(outputs, hidden, lengths, starts, constants)
    if strengths is not None:
        weight = weight * _clear_padding(strengths, lengths).T
    result = (weight.unsqueeze(2) * written).transpose(1, 2) @ written
    if memory is None:
        return result
    return result + kept * (memory if gone is None else clear(gone, memory))


def final_memory_backward(
    grad: Tensor,
    outputs: Tensor,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
    *,
    starts: Tensor | None = None,
    strengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of outputs, hidden, memory and strengths from that of `final_memory`, [B,H,H].

    Autograd has no graph of a matrix that a kernel made; and it would take two products where this takes one.
    """
    written, weight, kept, gone = _weigh_written(outputs, hidden, lengths, starts, constants)
    read = written @ (grad + grad.transpose(1, 2))
    of_strengths = None
    if strengths is not None:
        of_strengths = (weight * (written * read).sum(2) / 2).T.contiguous()
        weight = weight * _clear_padding(strengths, lengths).T
    gradient = (weight.unsqueeze(2) * read).transpose(0, 1)
    last = torch.zeros_like(gradient[:1])  # the newest hidden state is not written yet
    of_memory = None
    if memory is not None:
        of_memory = kept * (grad if gone is None else clear(gone, grad))
    return torch.cat([gradient[1:], last]), gradient[0], of_memory, of_strengths


def _weigh_written(
    outputs: Tensor, hidden: Tensor, lengths: Tensor | None, starts: Tensor | None, constants: Constants
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return h(0) .. h(T-1) [B,T,H], each one's weight in the final memory [B,T], the initial one's [B,1,1].

    The last is which sequences have restarted since, and hold nothing of the initial memory: [B], or None.
    """
    steps = outputs.shape[0]
    written = torch.cat([hidden.unsqueeze(0), outputs[:-1]]).transpose(0, 1)
    position = torch.arange(steps, device=outputs.device)
    length = torch.full((1,), steps, device=outputs.device) if lengths is None else lengths.clamp(0, steps)
    age = length.unsqueeze(1) - 1 - position  # [B,T]; negative past the end
    weight = constants.rate * _powers(constants.decay, age.clamp(min=0), outputs.dtype) * (age >= 0)
    kept = _powers(constants.decay, length, outputs.dtype).view(-1, 1, 1)
    if starts is None:
        return written, weight, kept, None
    oldest = oldest_read(starts & (position.unsqueeze(1) < length))[-1]
    forgotten = position < oldest.unsqueeze(1)
    return clear(forgotten, written), weight * ~forgotten, kept, oldest > 0


def _powers(decay: float, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    # In double for every dtype: a float raised to an integer tensor would be a float32.
    return torch.pow(decay, exponents.double()).to(dtype)


def _clear_padding(tensor: Tensor, lengths: Tensor | None) -> Tensor:
    # Whatever a padded tensor holds past a length, NaN too, must not reach a gradient through a product with zero.
    if lengths is None:
        return tensor
    return clear(torch.arange(len(tensor), device=tensor.device).unsqueeze(1) >= lengths, tensor)


def clear(flags: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with zeros where the flags of its first axes say so, whatever stood there."""
    return torch.where(flags.view(*flags.shape, *[1] * (tensor.dim() - flags.dim())), torch.zeros_like(tensor), tensor)


def _mask(hidden: Tensor, lengths: Tensor | None, t: int) -> Tensor:
    if lengths is None:
        return hidden
    return torch.where((t < lengths).unsqueeze(1), hidden, torch.zeros_like(hidden))
