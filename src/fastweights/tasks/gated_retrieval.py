"""Associative retrieval of Schlag & Schmidhuber 2017, section 4: one long stream of storages and queries.

The paper's example of two queries, the input above its targets, which are spaces but for the two answers:

    S(hgb,c),S(ceaf,e),S(df,g),S(hac,b),Q(ceaf)e.S(hf,h),S(cc,d),Q(cc)d.
                                              e                      d

Before a query stand 1 to 10 storage tokens `S(key,value),`, and it asks for a key stored since the query before. Keys
have 2 to 4 characters, values one, all drawn uniformly from a to h with replacement. What the text leaves open:

- Where the target stands. At the ")" of the query, one step before the answer itself is read. The targets as printed in
  the paper do not settle it: they have 77 characters for 68 inputs, and the answers at 37 and 75, where the ")" stand
  at 42 and 65 (counted from 0).
- How many storage tokens and characters a key has: uniform over 1 to 10 and over 2 to 4. A token then has 9 characters
  on average and a query 8, so that one query takes 9 * 5.5 + 8 = 57.5 characters with its storage tokens: the paper's
  "roughly 5.7 million characters" for 100,000 queries.
- Which key is asked for: that of one of the storage tokens since the last query, each as likely.
- What a key means that was stored twice since the last query: the value stored last.
- How a stream is cut for the batch: into pieces of one length, without regard to the queries (`streams`).
"""

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check_sizes
from fastweights.tasks.floor import Floor, exact_floor

VOCABULARY = "abcdefghSQ(),. "
CHARACTERS = 8  # a to h, the characters of keys and values
KEY_LENGTHS = (2, 3, 4)
TOKENS = 10  # the most storage tokens before a query
SIZES = (100_000, 5_000, 5_000)  # queries for training, validation, test
QUERY_CHARACTERS = 57.5  # on average, with the storage tokens before it

SPACE = VOCABULARY.index(" ")
_NOTHING = len(VOCABULARY)  # fills the places that a shorter key or block leaves empty
TOKEN = re.compile(r"S\(([a-h]{2,4}),([a-h])\),|Q\(([a-h]{2,4})\)([a-h])\.")


class Stream(NamedTuple):
    """Characters in order: one stream [L], or B of them side by side [steps, B]."""

    inputs: Tensor  # indices into VOCABULARY
    targets: Tensor  # the answer at the ")" of a query, elsewhere SPACE
    distances: Tensor  # from the value last stored under the key to the ")" that asks for it; 0 where no answer is due


def sample(queries: int, *, generator: torch.Generator) -> Stream:
    """Draw a stream of so many queries, each after storage tokens of its own.

    Shapes: inputs, targets and distances [L], uint8 (a byte a character: millions of them stay small) on the
    generator's device. L varies: 57.5 a query on average.

    Raises:
        ValueError: `queries` is not positive.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import gated_retrieval
        >>> stream = gated_retrieval.sample(2, generator=torch.Generator().manual_seed(5))
        >>> gated_retrieval.text(stream.inputs)
        'S(ade,g),S(db,d),Q(ade)g.S(dcbf,g),S(heef,c),S(gg,a),S(de,h),S(dd,h),Q(heef)c.'
        >>> gated_retrieval.text(stream.targets)
        '                      g                                                    c  '
        >>> stream.distances[stream.distances > 0].tolist()
        [16, 33]
    """
    check_sizes(queries=queries)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (queries, *shape), generator=generator, device=generator.device)

    tokens = draw(1, TOKENS + 1, 1)
    lengths = draw(KEY_LENGTHS[0], KEY_LENGTHS[-1] + 1, TOKENS, 1)
    keys = draw(0, CHARACTERS, TOKENS, KEY_LENGTHS[-1])
    values = draw(0, CHARACTERS, TOKENS)
    asked = draw(0, math.lcm(*range(1, TOKENS + 1)), 1) % tokens  # a multiple of any number of tokens: none is favoured

    place = torch.arange(TOKENS, device=generator.device)
    keys.masked_fill_(place[: KEY_LENGTHS[-1]] >= lengths, _NOTHING)
    key = keys.gather(1, asked.unsqueeze(2).expand(-1, 1, KEY_LENGTHS[-1]))
    stored = place < tokens
    last = (place * (stored & (keys == key).all(2))).amax(1, keepdim=True)
    answer = values.gather(1, last)

    # Every query as 11 rows of 10 cells, S(kkkk,v), and at last Q(kkkk)v. and the cells with nothing are then left out.
    cells = torch.full((queries, TOKENS + 1, 10), _NOTHING, dtype=torch.uint8, device=generator.device)
    for column, character in ((0, "S"), (1, "("), (6, ","), (8, ")"), (9, ",")):
        cells[:, :TOKENS, column] = VOCABULARY.index(character)
    cells[:, :TOKENS, 2:6], cells[:, :TOKENS, 7] = keys.byte(), values.byte()
    cells[:, :TOKENS].masked_fill_(~stored.unsqueeze(2), _NOTHING)
    for column, character in ((0, "Q"), (1, "("), (6, ")"), (8, ".")):
        cells[:, TOKENS, column] = VOCABULARY.index(character)
    cells[:, TOKENS:, 2:6], cells[:, TOKENS:, 7] = key.byte(), answer.byte()

    kept = cells != _NOTHING
    position = kept.flatten(1).cumsum(1, dtype=torch.uint8)  # 8 bits are enough for at most 109 characters
    targets, distances = torch.full_like(cells, SPACE), torch.zeros_like(cells)
    targets[:, TOKENS:, 6] = answer.byte()
    distances[:, TOKENS:, 6] = position[:, [10 * TOKENS + 6]] - position.gather(1, 10 * last + 7)
    return Stream(*(field.masked_select(kept) for field in (cells, targets, distances)))


def splits(sizes: tuple[int, ...] = SIZES, *, seed: int) -> list[Stream]:
    """Draw the streams of one data set, of exactly so many queries each, all from one seed.

    Raises:
        ValueError: as `sample`.

    Examples:
        >>> from fastweights.tasks import gated_retrieval
        >>> train, validation, test = gated_retrieval.splits((200, 10, 20), seed=0)
        >>> [int((stream.targets != gated_retrieval.SPACE).sum()) for stream in (train, validation, test)]
        [200, 10, 20]
    """
    generator = torch.Generator().manual_seed(seed)
    return [sample(size, generator=generator) for size in sizes]


def streams(stream: Stream, batch_size: int) -> Stream:
    """Cut a stream [L] into `batch_size` consecutive pieces [L // batch_size, batch_size] that are read side by side.

    What is left over at the end is dropped. A piece may begin between a storage token and its query: where `distances`
    is larger than the step (the first is 0), what is asked for stands in the piece before.

    Raises:
        ValueError: `stream` is not [L], or `batch_size` is not between 1 and L.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import gated_retrieval
        >>> stream = gated_retrieval.sample(1000, generator=torch.Generator().manual_seed(0))
        >>> parallel = gated_retrieval.streams(stream, 16)
        >>> len(stream.inputs), parallel.inputs.shape
        (56654, torch.Size([3540, 16]))
    """
    if stream.inputs.dim() != 1:
        raise ValueError(f"stream must be one stream [L], as sample returns it, got {list(stream.inputs.shape)}")
    length = len(stream.inputs)
    if not 1 <= batch_size <= length:
        raise ValueError(f"batch_size must lie between 1 and the {length} characters of the stream, got {batch_size}")
    steps = length // batch_size
    return Stream(*(field[: steps * batch_size].view(batch_size, steps).t().contiguous() for field in stream))


def segment(parallel: Stream, start: int, length: int) -> Stream:
    """Take the steps from `start` on of parallel streams, as layers and losses read them: int64.

    Shapes: [length, B] each, and fewer steps where the streams end before.

    Raises:
        ValueError: `parallel` is not [steps, B], `start` is not one of its steps, or `length` is not positive.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import gated_retrieval
        >>> stream = gated_retrieval.sample(1000, generator=torch.Generator().manual_seed(0))
        >>> parallel = gated_retrieval.streams(stream, 16)
        >>> for start in range(0, len(parallel.inputs), 32):  # truncated backpropagation through time
        ...     inputs, targets, distances = gated_retrieval.segment(parallel, start, 32)
        >>> inputs.shape, inputs.dtype
        (torch.Size([20, 16]), torch.int64)
    """
    if parallel.inputs.dim() != 2:
        shape = list(parallel.inputs.shape)
        raise ValueError(f"parallel must be streams side by side [steps, B], as streams returns them, got {shape}")
    steps = len(parallel.inputs)
    if not 0 <= start < steps:
        raise ValueError(f"start must be one of the {steps} steps of the streams, 0 to {steps - 1}, got {start}")
    check_sizes(length=length)
    return Stream(*(field[start : start + length].long() for field in parallel))


def text(indices: Tensor) -> str:
    """Return the characters of inputs or targets [L], as the paper prints them.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import gated_retrieval
        >>> gated_retrieval.text(torch.tensor([9, 10, 2, 2, 11, 3, 13]))
        'Q(cc)d.'
    """
    return "".join(VOCABULARY[index] for index in indices.tolist())


def parse(characters: str) -> Stream:
    """Read a stream back from its characters alone, and find its targets and distances without the generator's help.

    Shapes: inputs, targets and distances [L], uint8.

    Raises:
        ValueError: a character is out of place, a query asks for a key that was not stored since the query before, an
            answer is not the value last stored, more than 10 storage tokens follow one another, or no query the last.

    Examples:
        >>> from fastweights.tasks import gated_retrieval
        >>> stream = gated_retrieval.parse("S(hgb,c),S(ceaf,e),S(df,g),S(hac,b),Q(ceaf)e.S(hf,h),S(cc,d),Q(cc)d.")
        >>> gated_retrieval.text(stream.targets)
        '                                          e                      d  '
        >>> stream.distances.nonzero().flatten().tolist(), stream.distances[stream.distances > 0].tolist()
        ([42, 65], [26, 7])
    """
    if not characters:
        raise ValueError("expected a query, got no characters")
    targets, distances = [SPACE] * len(characters), [0] * len(characters)
    stored: dict[str, int] = {}  # where the value stands that was last stored under a key
    tokens = position = 0
    while position < len(characters):
        match = TOKEN.match(characters, position)
        where = f"at character {position}: got {characters[position : position + 12]!r}"
        if match is None:
            raise ValueError(f"expected `S(key,value),` or `Q(key)value.`, key and value of a to h, {where}")
        key, value, query, answer = match.groups()
        if query is None:
            tokens += 1
            if tokens > TOKENS:
                raise ValueError(f"expected a query after {TOKENS} storage tokens {where}")
            stored[key] = match.start(2)
        else:
            if query not in stored:
                raise ValueError(f"expected a key stored since the last query, one of {sorted(stored)}, {where}")
            value = characters[stored[query]]
            if answer != value:
                raise ValueError(f"expected the answer {value!r}, the value last stored under {query!r}, {where}")
            asked = match.end(3)
            targets[asked], distances[asked] = VOCABULARY.index(answer), asked - stored[query]
            stored, tokens = {}, 0
        position = match.end()
    if tokens:
        raise ValueError(f"expected a query after the last storage tokens, got the end at character {position}")
    inputs = [VOCABULARY.index(character) for character in characters]
    return Stream(*(torch.tensor(field, dtype=torch.uint8) for field in (inputs, targets, distances)))


def floor() -> Floor:
    """Compute the score, over the answers alone, of the best model that knows the values stored, but no keys.

    It is exact: over every number of storage tokens and every way in which their values can repeat. The model knows how
    many of the storage tokens since the last query carry each value. Keys that repeat change nothing here: they alone
    decide which token holds the answer, and values do not depend on keys. A model that also knew the stored keys, and
    so which values no longer count, but not the key that is asked for, would have 0.4474 and 1.6801 bits.

    Examples:
        >>> from fastweights.tasks import gated_retrieval
        >>> floor = gated_retrieval.floor()
        >>> print(f"{floor.accuracy:.4f} {floor.bits:.4f} bits")
        0.4458 1.6853 bits
    """
    return exact_floor(range(1, TOKENS + 1), CHARACTERS)
