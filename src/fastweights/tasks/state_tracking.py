"""State tracking: after every element of a word, name the product of all so far.

The words are uniform over a group, and the product before the first element is the identity:

    parity    bits, and whether the number of ones so far is odd
    S3        the 6 orders of three things: the smallest group in which the order of the factors matters
    S5        the 120 orders of five things, the smallest symmetric group that is not solvable: no circuit of constant
              depth follows its words (Barrington 1989), and so neither do a transformer or a linear recurrence with
              diagonal transitions (Merrill et al. 2024, "The illusion of state in state-space models")

A network that has learnt the product and not the training's lengths follows longer words as well.
"""

import functools
import itertools
import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fastweights.checks import check_choice, check_integers, check_sizes
from fastweights.tasks.floor import Floor

Group = Literal["parity", "S3", "S5"]
GROUPS: tuple[Group, ...] = get_args(Group)


class StateExamples(NamedTuple):
    """Words of a group, and their products."""

    inputs: Tensor  # [N,T] int64, elements of the group
    targets: Tensor  # [N,T] int64, the product of the elements up to this step


def sample(count: int, steps: int, group: Group = "parity", *, generator: torch.Generator) -> StateExamples:
    """Draw words of uniform elements.

    Shapes: inputs and targets [count, steps], int64 below `size(group)`, on the generator's device.

    Raises:
        ValueError: the group is unknown, `count` is negative or `steps` is not positive.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import state_tracking
        >>> words = state_tracking.sample(2, 6, "parity", generator=torch.Generator().manual_seed(0))
        >>> bool((words.targets == words.inputs.cumsum(1) % 2).all())
        True
    """
    check_integers(0, count=count)
    check_sizes(steps=steps)
    inputs = torch.randint(size(group), (count, steps), generator=generator, device=generator.device)
    return StateExamples(inputs, products(inputs, group))


def size(group: Group) -> int:
    """Return the number of elements of a group.

    Raises:
        ValueError: the group is unknown.

    Examples:
        >>> from fastweights.tasks import state_tracking
        >>> [state_tracking.size(group) for group in state_tracking.GROUPS]
        [2, 6, 120]
    """
    return len(_table(group))


def products(inputs: Tensor, group: Group) -> Tensor:
    """Return the product of the elements of words [N,T] of integers up to each step: [N,T] int64.

    The n-th element of S3 and S5 is the n-th of `itertools.permutations`, in their order, as a map; the product of a
    and then b is b after a. The elements of parity are its bits.

    Raises:
        ValueError: the group is unknown or has no such element, or the words are not [N,T] with a step at least.
        TypeError: the elements are no integers.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import state_tracking
        >>> state_tracking.products(torch.tensor([[1, 1, 0, 1]]), "parity").tolist()
        [[1, 0, 0, 1]]
        >>> turn = torch.tensor([[3, 3, 3]])  # 0 -> 1 -> 2 -> 0, three times
        >>> state_tracking.products(turn, "S3").tolist()
        [[3, 4, 0]]
    """
    table = _table(group).to(inputs.device)
    if inputs.is_floating_point() or inputs.is_complex() or inputs.dtype == torch.bool:
        raise TypeError(f"inputs must be integers, got {inputs.dtype}")
    if inputs.dim() != 2 or inputs.shape[1] == 0:
        raise ValueError(f"inputs must be [N,T] with at least one step, got shape {tuple(inputs.shape)}")
    if ((inputs < 0) | (inputs >= len(table))).any():
        low, high = (int(bound) for bound in torch.aminmax(inputs))
        raise ValueError(f"inputs must lie between 0 and {len(table) - 1}, elements of {group}, got {low} to {high}")
    inputs = inputs.long()  # torch takes bytes as a mask
    states = [inputs[:, 0]]
    for element in inputs[:, 1:].unbind(1):
        states.append(table[states[-1], element])
    return torch.stack(states, 1)


def floor(steps: int, group: Group = "parity") -> Floor:
    """Compute the score, over all steps, of the best model that knows no element but the newest.

    It is right in the first step, where the product is the element itself; later ones are uniform to it.

    Raises:
        ValueError: the group is unknown, or `steps` is not positive.

    Examples:
        >>> from fastweights.tasks import state_tracking
        >>> state_tracking.floor(40, "parity").accuracy
        0.5125
    """
    check_sizes(steps=steps)
    elements = size(group)
    accuracy = (1 + (steps - 1) / elements) / steps
    nats = math.log(elements) * (steps - 1) / steps
    return Floor(accuracy, nats / math.log(2), 100 * (1 - accuracy), nats)


@functools.cache
def _table(group: Group) -> Tensor:
    """Return the product of each element (row) and then each other (column): [G,G]."""
    check_choice(GROUPS, group=group)
    if group == "parity":
        return torch.tensor([[0, 1], [1, 0]])
    orders = torch.tensor(list(itertools.permutations(range(int(group[1:])))))  # [G,n]
    after = orders[:, orders].transpose(0, 1)  # [a,b,n]: b of a
    places = len(orders[0]) ** torch.arange(len(orders[0]))
    codes, order = (orders * places).sum(1).sort()
    table: Tensor = order[torch.searchsorted(codes, (after * places).sum(2))]
    return table
