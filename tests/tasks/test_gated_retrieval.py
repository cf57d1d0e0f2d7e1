import itertools
import math
import re
from collections import Counter, defaultdict
from functools import cache

import pytest
import torch

from fastweights.tasks import gated_retrieval as task
from fastweights.tasks.floor import repetitions

INPUTS = "S(hgb,c),S(ceaf,e),S(df,g),S(hac,b),Q(ceaf)e.S(hf,h),S(cc,d),Q(cc)d."
TARGETS = " " * 42 + "e" + " " * 22 + "d" + " " * 2


def sample(queries, seed=0):
    return task.sample(queries, generator=torch.Generator().manual_seed(seed))


def blocks(characters):
    """The storage tokens (key, value) and the key asked for, one query after the other."""
    for block, asked in re.findall(r"((?:S\(\w+,\w\),)+)Q\((\w+)\)\w\.", characters):
        yield re.findall(r"S\((\w+),(\w)\),", block), asked


def near(samples, expected):
    """Whether the mean lies within four standard errors."""
    samples = torch.as_tensor(samples, dtype=torch.float64)
    return abs(samples.mean().item() - expected) < 4 * samples.std().item() / math.sqrt(len(samples))


def test_the_papers_example_has_its_answers_where_the_keys_close():
    stream = task.parse(INPUTS)
    assert task.text(stream.inputs) == INPUTS
    assert task.text(stream.targets) == TARGETS
    assert stream.distances[[42, 65]].tolist() == [42 - INPUTS.index("e),"), 65 - INPUTS.index("d),")] == [26, 7]
    assert stream.distances.sum() == 26 + 7
    assert f"    {INPUTS}\n    {TARGETS.rstrip()}\n" in str(task.__doc__)
    assert set(INPUTS + TARGETS) <= set(task.VOCABULARY)
    assert len(task.VOCABULARY) == 15


@pytest.mark.parametrize("queries", [1, 2, 20_000])
def test_a_sample_is_what_its_characters_say(queries):
    stream = sample(queries)
    parsed = task.parse(task.text(stream.inputs))
    assert (stream.targets != task.SPACE).sum() == queries
    for mine, independent in zip(stream, parsed, strict=True):
        assert mine.dtype == torch.uint8
        assert torch.equal(mine, independent)


def test_keys_that_repeat_are_sampled_and_the_last_value_counts():
    overwritten = 0
    for stored, asked in blocks(task.text(sample(20_000).inputs)):
        values = [value for key, value in stored if key == asked]
        overwritten += values[0] != values[-1]
    assert overwritten > 20  # the sample of the test above holds what it is there to check
    stream = task.parse("S(ab,c),S(dd,e),S(ab,f),Q(ab)f.")
    assert task.text(stream.targets) == " " * 28 + "f" + " " * 2
    assert stream.distances.tolist() == [0] * 28 + [28 - 21] + [0] * 2


def test_everything_that_is_drawn_is_uniform():
    names = ("tokens", "length", "character", "value", "asked")
    counts: dict[str, Counter[object]] = {name: Counter() for name in names}
    for stored, asked in blocks(task.text(sample(20_000).inputs)):
        counts["tokens"][len(stored)] += 1
        for key, value in stored:
            counts["length"][len(key)] += 1
            counts["character"].update(key)
            counts["value"][value] += 1
        keys = [key for key, _ in stored]
        if len(keys) == 10 and keys.count(asked) == 1:
            counts["asked"][keys.index(asked)] += 1
    for name, classes in zip(names, (10, 3, 8, 8, 10), strict=True):
        assert len(counts[name]) == classes, name
        expected = counts[name].total() / classes
        # Chi squared has mean classes - 1 and variance twice that: five standard deviations.
        chi = sum((count - expected) ** 2 / expected for count in counts[name].values())
        assert chi < classes - 1 + 5 * math.sqrt(2 * (classes - 1)), name


def test_a_query_has_57_and_a_half_characters():
    stream = sample(100_000)
    # n tokens of 6 + k characters and a query of 5 + k, where k is 3 on average; the query's is one of the tokens'.
    mean = 5.5 * (6 + 3) + (5 + 3)
    # Variance: of n, (10^2 - 1) / 12, at 9 characters each; of k, 2 / 3: n times, once for the query, twice together.
    variance = 81 * 99 / 12 + (5.5 + 1 + 2) * 2 / 3
    assert mean == 57.5
    assert abs(len(stream.inputs) / 100_000 - mean) < 4 * math.sqrt(variance / 100_000)
    ends = (stream.inputs == task.VOCABULARY.index(".")).nonzero().flatten()
    lengths = ends.diff(prepend=torch.tensor([-1])).double()
    assert near(lengths, mean)
    assert lengths.var().item() == pytest.approx(variance, rel=0.02)


def test_splits_have_their_sizes_and_come_from_the_seed():
    first, again, other = (task.splits((30, 20, 10), seed=seed) for seed in (1, 1, 2))
    assert [int((split.targets != task.SPACE).sum()) for split in first] == [30, 20, 10]
    for mine, same, different in zip(first, again, other, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(mine, same, strict=True))
        assert task.text(mine.inputs) != task.text(different.inputs)
    for sizes in ((30, 20, 10), (20, 20, 20)):  # no split begins as another does
        texts = [task.text(split.inputs) for split in task.splits(sizes, seed=1)]
        assert len({text[:50] for text in texts}) == 3
    assert task.SIZES == (100_000, 5_000, 5_000)


@pytest.mark.parametrize("batch_size", [1, 7, 16])
def test_parallel_streams_are_the_stream_in_pieces(batch_size):
    stream = sample(50)
    parallel = task.streams(stream, batch_size)
    steps = len(stream.inputs) // batch_size
    for whole, pieces in zip(stream, parallel, strict=True):
        assert pieces.shape == (steps, batch_size)
        assert torch.equal(pieces.t().flatten(), whole[: steps * batch_size])
    segments = [task.segment(parallel, start, 32) for start in range(0, steps, 32)]
    assert {len(segment.inputs) for segment in segments[:-1]} == {32}
    for pieces, *parts in zip(parallel, *segments, strict=True):
        assert all(part.dtype == torch.int64 for part in parts)
        assert torch.equal(torch.cat(parts), pieces)


def test_a_distance_beyond_the_step_is_a_value_of_the_piece_before():
    parallel = task.streams(task.parse(INPUTS), 2)  # 34 steps: the second piece begins after S(hac,b)
    step, piece = (parallel.distances > torch.arange(34).unsqueeze(1)).nonzero().flatten().tolist()
    assert (step, piece) == (42 - 34, 1)


@pytest.mark.parametrize(("draws", "kinds"), [(1, 8), (4, 8), (5, 3)])
def test_repetitions_are_those_of_all_sequences(draws, kinds):
    expected = Counter(
        tuple(sorted(Counter(sequence).values(), reverse=True))
        for sequence in itertools.product(range(kinds), repeat=draws)
    )
    found = {tuple(counts): chance for counts, chance in repetitions(draws, kinds)}
    assert found == pytest.approx({counts: number / kinds**draws for counts, number in expected.items()}, rel=1e-12)


def scores(characters, *, keys_known):
    """What two guessers score at each query: one knows how many tokens carry each value, one their keys as well."""
    for stored, asked in blocks(characters):
        last = dict(stored)
        counts = Counter(last[key] if keys_known else value for key, value in stored)
        share = counts[last[asked]] / len(stored)
        yield float(counts.most_common(1)[0][0] == last[asked]), -math.log2(share)


def test_floor_is_what_a_guesser_scores_who_reads_no_key():
    right, bits = zip(*scores(task.text(sample(60_000).inputs), keys_known=False), strict=True)
    assert len(right) == 60_000
    assert near(right, task.floor().accuracy)
    assert near(bits, task.floor().bits)
    assert task.floor()[:2] == pytest.approx((0.445773, 1.685331), abs=1e-6)


def test_who_knows_the_stored_keys_scores_a_little_more():
    accuracy = bits = 0.0
    for tokens in range(1, 11):
        for sizes, grouped in groups(tokens):
            for counts, chance in value_counts(sizes).items():
                shares = [count / tokens for count in counts]
                accuracy += grouped * chance * max(shares) / 10
                bits -= grouped * chance * sum(share * math.log2(share) for share in shares) / 10
    assert f"{accuracy:.4f} and {bits:.4f} bits" in str(task.floor.__doc__)
    right, surprise = zip(*scores(task.text(sample(60_000).inputs), keys_known=True), strict=True)
    assert near(right, accuracy)
    assert near(surprise, bits)


def groups(tokens):
    """The chance that tokens fall into groups of one key each of these sizes."""
    for sizes, _ in repetitions(tokens, tokens):
        ways = math.factorial(tokens) // math.prod(map(math.factorial, sizes))
        yield tuple(sizes), ways // math.prod(map(math.factorial, Counter(sizes).values())) * apart(tuple(sizes))


@cache
def apart(sizes):
    """The chance that each group has one key and no two groups the same, less the cases in which the last joins one."""
    *others, last = sizes
    chance = sum(8**length / (3 * 8**length) ** last for length in (2, 3, 4))
    if not others:
        return chance
    joined = [apart((*others[:i], others[i] + last, *others[i + 1 :])) for i in range(len(others))]
    return apart(tuple(others)) * chance - sum(joined)


@cache
def value_counts(sizes):
    """The chance that values drawn for groups of these sizes are carried by so many tokens each."""
    result: dict[tuple[int, ...], float] = {(): 1.0}
    for size in sizes:
        grown: dict[tuple[int, ...], float] = defaultdict(float)
        for counts, chance in result.items():
            for index in range(8):
                more = list(counts) if index < len(counts) else [*counts, 0]
                more[min(index, len(counts))] += size
                grown[tuple(sorted(more))] += chance / 8
        result = grown
    return result


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        ("S(ab,c),Q(ab)c", r"expected `S\(key,value\),` or `Q\(key\)value\.`.* at character 8: got 'Q\(ab\)c'"),
        ("S(ab,c),S(a,c),Q(ab)c.", "at character 8: got 'S"),
        ("S(abcde,c),", "at character 0: got 'S"),
        ("S(ab,i),", "at character 0: got 'S"),
        (
            "S(ab,c),Q(ab)d.",
            "expected the answer 'c', the value last stored under 'ab', at character 8: got 'Q",
        ),
        ("S(ab,c),S(ab,d),Q(ab)c.", "expected the answer 'd'"),
        ("S(ab,c),Q(ab)c.S(bb,c),Q(ab)c.", r"since the last query, one of \['bb'\], at character 23: got 'Q\(ab"),
        ("Q(ab)c.", r"one of \[\], at character 0"),
        ("S(ab,c)," * 11 + "Q(ab)c.", "expected a query after 10 storage tokens at character 80"),
        ("S(ab,c),Q(ab)c.S(ab,c),", "expected a query after the last storage tokens, got the end at character 23"),
        ("", "expected a query, got no characters"),
    ],
)
def test_what_is_no_stream_is_refused_with_the_place(characters, message):
    with pytest.raises(ValueError, match=message):
        task.parse(characters)


def test_bad_arguments_are_refused():
    stream = sample(2)
    length = len(stream.inputs)
    parallel = task.streams(stream, 2)
    for queries in (0, -1):
        with pytest.raises(ValueError, match=f"queries must be an integer of at least 1, got {queries}"):
            task.sample(queries, generator=torch.Generator())
    for batch_size in (0, length + 1):
        with pytest.raises(ValueError, match=f"between 1 and the {length} characters of the stream, got {batch_size}"):
            task.streams(stream, batch_size)
    with pytest.raises(ValueError, match=r"must be one stream \[L\].*, got \[\d+, 2\]"):
        task.streams(parallel, 2)
    with pytest.raises(ValueError, match=r"must be streams side by side \[steps, B\].*, got \[\d+\]"):
        task.segment(stream, 0, 32)
    for start in (-1, length // 2):
        with pytest.raises(ValueError, match=rf"one of the {length // 2} steps .*, got {start}"):
            task.segment(parallel, start, 32)
    with pytest.raises(ValueError, match="length must be an integer of at least 1, got 0"):
        task.segment(parallel, 0, 0)
