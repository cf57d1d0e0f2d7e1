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

import torch
from torch import Tensor
from torch.nn import functional as F

NONLINEARITIES = {"relu": torch.relu, "tanh": torch.tanh}


@dataclass(frozen=True)
class Constants:
    """The numbers of the recurrence that are not learnt."""

    decay: float
    rate: float
    inner_steps: int = 1
    nonlinearity: str = "relu"
    normalize_initial: bool = False
    eps: float = 1e-5


def _step(
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    read: Callable[[Tensor], Tensor],
    constants: Constants,
) -> Tensor:
    """Steps 1, 3 and 4 for the whole batch; `read(v)` gives A(t) v."""
    activation = NONLINEARITIES[constants.nonlinearity]

    def normalize(u: Tensor) -> Tensor:
        if norm_weight is None:
            return u
        return F.layer_norm(u, u.shape[-1:], norm_weight, norm_bias, constants.eps)

    z = drive + hidden @ weight_hh.T
    h = activation(normalize(z) if constants.normalize_initial else z)
    for _ in range(constants.inner_steps):
        h = activation(normalize(z + read(h)))
    return h


def matrix_form(
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
) -> Tensor:
    """Run the recurrence with the fast matrix A formed at every step (eq 1): T H^2 for each example.

    Shapes: drive [T,B,H], weight_hh [H,H], norm_weight and norm_bias [H] or None (no layer norm), hidden [B,H],
    memory [B,H,H] or None (zeros), lengths [B] int64 or None -> outputs [T,B,H], zero from each length on.
    `memory` is A(t-1) as the sequence begins: all that was written before `hidden`.
    """
    drive = _valid(drive, lengths)
    steps, batch, size = drive.shape
    if memory is None:
        memory = drive.new_zeros(batch, size, size)
    outputs = []
    for t in range(steps):
        written = constants.rate * hidden.unsqueeze(2) * hidden.unsqueeze(1)
        memory = constants.decay * memory + written

        def read(v: Tensor, memory: Tensor = memory) -> Tensor:
            return (memory @ v.unsqueeze(2)).squeeze(2)

        hidden = _step(drive[t], weight_hh, norm_weight, norm_bias, hidden, read, constants)
        hidden = _masked(hidden, lengths, t)
        outputs.append(hidden)
    return torch.stack(outputs)


def attention_form(
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
) -> Tensor:
    """Run the recurrence as attention over the stored hidden states (eq 4): A is never formed, T^2 H an example.

    The same shapes and the same result as `matrix_form`.
    """
    drive = _valid(drive, lengths)
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

        hidden = _step(drive[t], weight_hh, norm_weight, norm_bias, hidden, read, constants)
        hidden = _masked(hidden, lengths, t)
        stored.append(hidden)
    return torch.stack(stored[1:])


def recurrence(
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
) -> Tensor:
    """The form that costs less: attention up to T = 2 H, the matrix beyond."""
    run = attention_form if drive.shape[0] <= 2 * drive.shape[2] else matrix_form
    return run(drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths, constants)


FORMS = {"auto": recurrence, "attention": attention_form, "matrix": matrix_form}


def final_memory(
    outputs: Tensor,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
) -> Tensor:
    """The fast matrix after the last valid step, A(T-1): all but the newest hidden state is written (eq 3).

    Shapes: outputs [T,B,H], hidden [B,H] and memory [B,H,H] as the sequence began -> [B,H,H].
    """
    written, weight, kept = _written(outputs, hidden, lengths, constants)
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
    """Gradients of outputs [T,B,H], hidden [B,H] and memory [B,H,H] from that of `final_memory`, [B,H,H]."""
    written, weight, kept = _written(outputs, hidden, lengths, constants)
    gradient = (weight.unsqueeze(2) * (written @ (grad + grad.transpose(1, 2)))).transpose(0, 1)
    last = torch.zeros_like(gradient[:1])  # the newest hidden state is not written yet
    return torch.cat([gradient[1:], last]), gradient[0], None if memory is None else kept * grad


def _written(
    outputs: Tensor, hidden: Tensor, lengths: Tensor | None, constants: Constants
) -> tuple[Tensor, Tensor, Tensor]:
    """h(0) .. h(T-1) [B,T,H], the weight of each in the final memory [B,T], and that of the initial one [B,1,1]."""
    steps = outputs.shape[0]
    written = torch.cat([hidden.unsqueeze(0), outputs[:-1]]).transpose(0, 1)
    position = torch.arange(steps, device=outputs.device)
    length = lengths if lengths is not None else torch.full((1,), steps, device=outputs.device)
    age = length.unsqueeze(1) - 1 - position  # [B,T]; negative past the end
    weight = constants.rate * _powers(constants.decay, age.clamp(min=0), outputs.dtype) * (age >= 0)
    return written, weight, _powers(constants.decay, length, outputs.dtype).view(-1, 1, 1)


def _powers(decay: float, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    # In double whatever the dtype: a float raised to an integer tensor would be a float32.
    return torch.pow(decay, exponents.double()).to(dtype)


def _valid(drive: Tensor, lengths: Tensor | None) -> Tensor:
    # Whatever a padded tensor holds past a length, NaN too, must not reach a gradient through a product with zero.
    if lengths is None:
        return drive
    steps = torch.arange(drive.shape[0], device=drive.device)
    return torch.where((steps.unsqueeze(1) < lengths).unsqueeze(2), drive, torch.zeros_like(drive))


def _masked(hidden: Tensor, lengths: Tensor | None, t: int) -> Tensor:
    if lengths is None:
        return hidden
    return torch.where((t < lengths).unsqueeze(1), hidden, torch.zeros_like(hidden))
