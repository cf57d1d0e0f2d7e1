"""Multi-query associative recall: keys and values are shown, then the keys again, and each asks for its value.

The task of Zoology (Arora et al. 2024, "Zoology: measuring and improving recall in efficient language models"), drawn
with its own settings. Of 2 pairs, 12 steps and a vocabulary of 14, without the random fill:

    inputs     3  9  5 12  .  .  5  .  .  .  3  .      the key 3 has the value 9, 5 has 12
    targets                     12           9         the value, at the step that shows its key again

Keys are the first half of the vocabulary (0 is no key), values the second half. The steps after the last pair are cut
into places of two steps; a place begins with a query or holds none. Each key in turn draws a free place, the n-th with
a chance in proportion to n^(a - 1), so that most are asked for soon. All other steps hold random tokens, among them
keys and values of the sequence.

In the *forgetting* variant some of the keys are shown again with another value before the first query, and the last
value counts. Our new values differ from all values of the sequence; Zoology's differ from that of some key.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.checks import check_between, check_integers, check_positive
from fastweights.tasks.floor import Floor

VOCABULARY_SIZE = 8192
POWER = 0.01  # a: nearly 1/n
IGNORED = -100  # the target of a step at which no answer is due, as torch's cross entropy takes it


class RecallExamples(NamedTuple):
    """Sequences, and the answers that are due in them."""

    inputs: Tensor  # [N,T] int64, below the size of the vocabulary
    targets: Tensor  # [N,T] int64, the value where a key is asked for, else IGNORED


def sample(
    count: int,
    steps: int = 64,
    pairs: int = 4,
    *,
    updates: int = 0,
    vocabulary_size: int = VOCABULARY_SIZE,
    power_a: float = POWER,
    random_non_queries: bool = True,
    generator: torch.Generator,
) -> RecallExamples:
    """Draw sequences, each with its own keys, values and places of the queries.

    Shapes: inputs and targets [count, steps], int64 on the generator's device.

    Args:
        count: the number of sequences.
        steps: the length of a sequence (Zoology's `input_seq_len`), even.
        pairs: the keys of a sequence, all of which are asked for (`num_kv_pairs`).
        updates: the keys that get another value before the first query (`num_updates`); 0 is plain recall.
        vocabulary_size: the number of tokens (`vocab_size`).
        power_a: the exponent of the power law of the places; 1 makes them uniform.
        random_non_queries: fill the steps between the queries with random tokens, in place of 0.
        generator: of the random numbers.

    Raises:
        ValueError: the pairs and their queries do not fit into the steps, the keys not into the vocabulary, or a number
            is out of range.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import recall
        >>> generator = torch.Generator().manual_seed(0)
        >>> examples = recall.sample(1000, steps=64, pairs=4, generator=generator)
        >>> examples.inputs.shape, int((examples.targets != recall.IGNORED).sum())
        (torch.Size([1000, 64]), 4000)
        >>> inputs, targets = (field[0].tolist() for field in examples)
        >>> values = dict(zip(inputs[0:8:2], inputs[1:8:2]))
        >>> all(values[token] == answer for token, answer in zip(inputs, targets) if answer != recall.IGNORED)
        True
    """
    check_integers(0, count=count)
    _check(steps, pairs, updates, power_a)
    least = max(2 * (pairs + 1), 2 * (pairs + updates), steps + 1)
    check_integers(least, vocabulary_size=vocabulary_size)
    device, half, shown = generator.device, vocabulary_size // 2, 2 * (pairs + updates)
    keys = _draw_distinct(count, pairs, 1, half, generator)
    values = _draw_distinct(count, pairs + updates, half, vocabulary_size, generator)
    updated = torch.rand(count, pairs, generator=generator, device=device).argsort(1)[:, :updates]
    answers = values[:, :pairs].scatter(1, updated, values[:, pairs:])

    # Successive draws without replacement are the order of exponential waiting times with these rates.
    rates = _rates((steps - shown) // 2, power_a).to(device)
    waits = torch.empty(count, len(rates), dtype=torch.float64, device=device).exponential_(generator=generator)
    asked = shown + 2 * (waits / rates).topk(pairs, dim=1, largest=False, sorted=True).indices

    inputs = torch.zeros(count, steps, dtype=torch.int64, device=device)
    if random_non_queries:
        inputs.random_(0, vocabulary_size, generator=generator)
    inputs[:, 0:shown:2] = torch.cat((keys, keys.gather(1, updated)), 1)
    inputs[:, 1:shown:2] = values
    inputs.scatter_(1, asked, keys)
    return RecallExamples(inputs, torch.full_like(inputs, IGNORED).scatter_(1, asked, answers))


def floor(steps: int = 64, pairs: int = 4, *, updates: int = 0, power_a: float = POWER) -> Floor:
    """Compute the score of the best model that knows the values and the place of a query, but no key.

    The pairs draw the places of their queries one after another, so that an early place tells of an early pair: the
    floor is a little better than one in `pairs`. A model that knows no key cannot tell which pairs got another value,
    so that with all of them updated it is one in `pairs`.

    Raises:
        ValueError: the pairs and their queries do not fit into the steps, or a number is out of range.

    Examples:
        >>> from fastweights.tasks import recall
        >>> round(recall.floor(64, 4).accuracy, 4), round(recall.floor(64, 4, power_a=1.0).accuracy, 4)
        (0.2882, 0.25)
    """
    _check(steps, pairs, updates, power_a)
    chances = _chances_of_pairs(_rates(steps // 2 - pairs - updates, power_a), pairs)
    first = chances * (1 - updates / pairs)
    chances = torch.cat(
        (first, chances.mean(1, keepdim=True).expand(-1, updates)), 1
    )  # chance of each value to be the answer
    accuracy = chances.amax(1).sum().item() / pairs
    nats = (torch.special.entr(chances).sum() - torch.special.entr(chances.sum(1)).sum()).item() / pairs
    return Floor(accuracy, nats / math.log(2), 100 * (1 - accuracy), nats)


def _check(steps: int, pairs: int, updates: int, power_a: float) -> None:
    check_integers(1, steps=steps, pairs=pairs)
    check_integers(0, updates=updates)
    check_positive(power_a=power_a)
    check_between(0, 10, power_a=power_a)  # higher powers of a place soon overflow
    if updates > pairs:
        raise ValueError(f"updates must be at most the {pairs} pairs, got {updates}")
    least = 2 * (2 * pairs + updates)
    if steps % 2 or steps < least:
        raise ValueError(
            f"steps must be even and at least {least}, for {pairs + updates} pairs and {pairs} queries of two steps "
            f"each, got {steps}"
        )


def _draw_distinct(count: int, size: int, low: int, high: int, generator: torch.Generator) -> Tensor:
    """Draw rows [count,size] of numbers from `low` up to `high`, all ways without a repetition equally likely.

    What repeats an earlier number of its row is drawn again. That treats all numbers alike, and so every row without a
    repetition is as likely as any other.
    """
    drawn = torch.randint(low, high, (count, size), generator=generator, device=generator.device)
    while True:
        ordered, order = drawn.sort(dim=1, stable=True)
        repeats = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        number = int(repeats.sum())
        if number == 0:
            return drawn
        again = torch.zeros_like(repeats).scatter(1, order, repeats)
        drawn[again] = torch.randint(low, high, (number,), generator=generator, device=generator.device)


def _rates(places: int, power_a: float) -> Tensor:
    """Return the chance of each place of a query to be drawn first: [places] float64."""
    weights = torch.arange(1, places + 1, dtype=torch.float64) ** (power_a - 1)
    return weights / weights.sum()


def _chances_of_pairs(rates: Tensor, pairs: int) -> Tensor:
    """Return the chance that a place [places] is that of each pair [pairs]: [places,pairs].

    A place is the n-th pair's if its exponential waiting time t is the n-th shortest: the integral over t of the
    waiting time's density times the chance that n - 1 others are shorter. Over log t the integrand falls off so fast
    that a sum over equal steps is exact to rounding.
    """
    step = 0.1
    times = torch.arange(-30, 5 - math.log(rates.min()), step, dtype=torch.float64).exp()
    sooner = 1 - torch.exp(-times.unsqueeze(1) * rates)  # [times,places]
    chances = []
    for rate, shorter in zip(rates, _count_others(sooner, pairs), strict=True):
        density = rate * times * torch.exp(-rate * times) * step
        chances.append(density @ shorter)
    return torch.stack(chances)


def _count_others(sooner: Tensor, most: int, counts: Tensor | None = None) -> Iterator[Tensor]:
    """Yield for each place the chances that 0, 1, ... of the others are sooner: [times,places] -> [times,most] each.

    `counts` are those of the places beside these. Each half is counted once for all of the other half.
    """
    if counts is None:
        counts = F.one_hot(torch.tensor(0), most).double().expand(len(sooner), most)
    places = sooner.shape[1]
    if places == 1:
        yield counts
        return
    halves = sooner[:, : places // 2], sooner[:, places // 2 :]
    for own, other in (halves, halves[::-1]):
        beside = counts
        for chance in other.T.unsqueeze(2):
            beside = beside * (1 - chance) + F.pad(beside, (1, -1)) * chance
        yield from _count_others(own, most, beside)
