"""Few-shot tasks: what each holds, how often, and what is refused."""

import itertools

import pytest
import torch
from torch import Tensor

from fastweights.errors import DataError
from fastweights.tasks.episodes import Episodes, EpisodeSampler

CLASSES, EACH = 8, 6
LABELS = torch.arange(CLASSES * EACH) % CLASSES


def generator(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(labels=LABELS, *, ways=3, shots=2, queries=3, groups=None) -> EpisodeSampler:
    """A sampler whose examples are their own numbers."""
    return EpisodeSampler(torch.arange(len(labels)), labels, ways=ways, shots=shots, queries=queries, groups=groups)


def numbers(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Which of the data set's examples are described [tasks,n] and asked [tasks,m]."""
    return episodes.examples[episodes.description], episodes.examples[episodes.queries]


def check(episodes: Episodes, labels=LABELS, ways=3, shots=2, queries=3):
    """All that holds of any task."""
    described, asked = numbers(episodes)
    for task in range(len(described)):
        classes = episodes.classes[task].tolist()
        assert len(set(classes)) == ways
        assert len(set(described[task].tolist() + asked[task].tolist())) == ways * (shots + queries)
        for chosen, given, many in (
            (described[task], episodes.labels[task], shots),
            (asked[task], episodes.targets[task], queries),
        ):
            assert given.bincount().tolist() == [many] * ways
            assert [classes[label] for label in given.tolist()] == labels[chosen].tolist()
    index = torch.cat([episodes.description.flatten(), episodes.queries.flatten()])
    assert torch.equal(index.unique(), torch.arange(len(episodes.examples)))
    assert len(episodes.examples.unique()) == len(episodes.examples)


@pytest.mark.parametrize("pool", [None, 3, 5, 100])
def test_what_every_task_holds(pool):
    episodes = numbered().draw(50, generator(), pool=pool)
    assert episodes.description.shape == episodes.labels.shape == (50, 6)
    assert episodes.queries.shape == episodes.targets.shape == (50, 9)
    check(episodes)
    if pool is not None:
        assert len(episodes.classes.unique()) <= min(pool, CLASSES)
        assert len(episodes.examples) <= min(pool, CLASSES) * 5


def chi_square(counts: Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("pool", [None, 5])
def test_a_task_is_as_likely_as_any_other(pool):
    """Its ordered classes, and which example of a class is the first described; 99.9% of chance lies below."""
    sampler, draws = numbered(ways=2, shots=1, queries=1), generator(1)
    single = [sampler.draw(1, draws, pool=pool) for _ in range(2000)]
    orders = list(itertools.permutations(range(CLASSES), 2))
    drawn = torch.tensor([orders.index(tuple(tasks.classes[0].tolist())) for tasks in single])
    assert chi_square(drawn.bincount(minlength=56)) < 93.2  # 55 degrees of freedom
    described = torch.stack([numbers(tasks)[0][0, 0] for tasks in single])
    assert chi_square(described.bincount(minlength=48)) < 82.7  # 47


def test_tasks_of_one_pool_are_uniform_over_its_classes():
    tasks = numbered(ways=2, shots=1, queries=1).draw(6000, generator(2), pool=4)
    classes = tasks.classes.unique()
    assert len(classes) == 4
    counts = torch.zeros(CLASSES, CLASSES)
    counts.index_put_(tuple(tasks.classes.T), torch.tensor(1.0), accumulate=True)
    pairs = counts[classes][:, classes]
    assert not pairs.diagonal().any()
    assert chi_square(pairs[~torch.eye(4, dtype=torch.bool)]) < 31.3  # 11
    assert chi_square(tasks.description[:, 0].bincount(minlength=8)) < 24.4  # 7: each example


def test_the_generator_decides():
    sampler = numbered()
    first, second, other = (sampler.draw(4, generator(seed), pool=5) for seed in (3, 3, 4))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    assert not torch.equal(first.classes, other.classes)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    sampler.draw(4, generator())
    sampler.partition(generator())
    assert torch.equal(torch.get_rng_state(), state)


def test_classes_of_unlike_sizes_never_lend_an_example():
    counts = torch.tensor([5, 40, 7, 5, 11])
    labels = torch.arange(5).repeat_interleave(counts)
    labels = labels[torch.randperm(len(labels), generator=generator())]
    sampler = numbered(labels)
    for pool in (None, 4):
        check(sampler.draw(300, generator(1), pool=pool), labels)
    asked = torch.cat([part.flatten() for part in numbers(sampler.draw(600, generator(2)))])
    assert len(asked.unique()) == len(labels)  # and every one that there is comes up


def test_groups_never_meet():
    groups = torch.randint(0, 40, (len(LABELS),), generator=generator())
    sampler = numbered(ways=3, shots=1, queries=1, groups=groups)
    for episodes in (sampler.draw(200, generator(1)), sampler.draw(200, generator(2), pool=6)):
        check(episodes, shots=1, queries=1)
        together = groups[torch.cat(numbers(episodes), 1)]
        assert all(len(set(row)) == 6 for row in together.tolist())
    every = sampler.partition(generator(3))
    assert all(len(set(row)) == 6 for row in groups[torch.cat(numbers(every), 1)].tolist())


def test_a_pool_of_which_no_task_can_be_had_is_left():
    """Classes 0 and 1 share all their groups, as do 2 and 3, and so on."""
    labels = torch.arange(8).repeat_interleave(2)
    groups = torch.arange(4).repeat_interleave(4)
    sampler = numbered(labels, ways=2, shots=1, queries=1, groups=groups * 2 + torch.arange(16) % 2)
    for seed in range(20):
        classes = sampler.draw(3, generator(seed), pool=2).classes
        assert (classes[:, 0] // 2 != classes[:, 1] // 2).all()


@pytest.mark.parametrize("ways", [2, 3, 8])
def test_a_partition_has_each_class_once_at_most(ways):
    episodes = numbered(ways=ways).partition(generator())
    assert episodes.classes.shape == (CLASSES // ways, ways)
    assert len(episodes.classes.unique()) == episodes.classes.numel()
    check(episodes, ways=ways)
    assert not torch.equal(episodes.classes, numbered(ways=ways).partition(generator(1)).classes)


def test_examples_may_be_made_when_they_are_asked_for():
    class Made:
        def __len__(self) -> int:
            return len(LABELS)

        def __getitem__(self, index: Tensor) -> Tensor:
            assert len(index.unique()) == len(index)  # each is asked for once
            return index.float()[:, None] * torch.ones(3)

    sampler = EpisodeSampler(Made(), LABELS, ways=3, shots=2, queries=3)
    episodes = sampler.draw(9, generator())
    expected = numbered().draw(9, generator())
    assert torch.equal(episodes.examples[:, 0].long(), expected.examples)
    moved = episodes.to("cpu")
    assert isinstance(moved, Episodes)
    assert torch.equal(moved.queries, episodes.queries)


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (ValueError, {"ways": 0}, "ways must be an integer of at least 1, got 0"),
        (ValueError, {"shots": 1.0}, "shots must be an integer of at least 1, got 1.0"),
        (ValueError, {"queries": True}, "queries must be an integer of at least 1, got True"),
        (ValueError, {"labels": LABELS[1:]}, r"labels must be \[48\] int64, got \[47\] torch.int64"),
        (ValueError, {"labels": LABELS.float()}, r"labels must be \[48\] int64, got \[48\] torch.float32"),
        (ValueError, {"groups": LABELS[1:]}, r"groups must be \[48\], one for each example; got \[47\]"),
        (ValueError, {"groups": LABELS.float()}, r"groups must be a tensor \[48\] int64, got torch.float32"),
        (ValueError, {"groups": LABELS.tolist()}, r"groups must be a tensor \[48\] int64, got a list"),
        (
            ValueError,
            {"examples": LABELS.numpy()},
            r"examples must be a tensor, or an object that returns one .* got a ndarray",
        ),
        (DataError, {"ways": 9}, "there are 8 classes: too few for tasks of 9"),
        (DataError, {"queries": 5}, "class 0 has 6 examples: too few for 2 described and 5 queries"),
        (DataError, {"labels": LABELS + 1}, "class 0 has no example: labels must be 0 to 8, without gaps"),
        (
            DataError,
            {"labels": LABELS * 2**58},
            f"class 1 has no example: labels must be 0 to {7 * 2**58}, without gaps",
        ),
        (DataError, {"labels": LABELS - 1}, "labels must be 0 to classes - 1, one an example: the least of them is -1"),
        (DataError, {"examples": LABELS[:0], "labels": LABELS[:0]}, "one an example: there are none"),
    ],
)
def test_refuses_what_no_tasks_can_be_made_of(error, options, match):
    usual = {"examples": torch.arange(len(LABELS)), "labels": LABELS, "ways": 3, "shots": 2, "queries": 3}
    with pytest.raises(error, match=match):
        EpisodeSampler(**usual | options)


def test_refuses_draws_that_cannot_be_made(monkeypatch):
    monkeypatch.setattr("fastweights.tasks.episodes._ATTEMPTS", 30)  # it gives up sooner
    sampler = numbered()
    for tasks, pool, given, message in (
        (0, None, generator(), "tasks must be an integer of at least 1, got 0"),
        (2.5, None, generator(), r"tasks must be an integer of at least 1, got 2\.5"),
        (1, 2, generator(), "pool must be an integer of at least the 3 ways, or None; got 2"),
        (1, 7.5, generator(), r"pool must be an integer of at least the 3 ways, or None; got 7\.5"),
        (1, None, 5, r"generator must be a torch\.Generator, got a int"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.draw(tasks, given, pool=pool)  # type: ignore[arg-type]
    hopeless = numbered(groups=torch.zeros_like(LABELS))
    with pytest.raises(DataError, match="no 3-way tasks found in which no two examples share a group"):
        hopeless.draw(2, generator())
    with pytest.raises(DataError, match="2 of 2 tasks have no examples of other groups: use smaller groups"):
        hopeless.partition(generator())
