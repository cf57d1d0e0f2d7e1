"""Few-shot tasks over any labelled examples: whole batches of them drawn at once, on tensors."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_sizes, is_integer
from fastweights.errors import DataError

_PARTITIONS = 20  # attempts at partitioning all classes again, where two of a task share too many groups
_ATTEMPTS = 1000  # attempts at drawing a task again in which examples of one group met


class Examples(Protocol):
    """A tensor [N,...], or an object that makes examples when it is indexed by a tensor of any shape."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor) -> Tensor: ...


class Episodes(NamedTuple):
    """Tasks, each with a description (labelled examples) and queries; an example that several share is held once."""

    examples: Tensor  # [E,...]: all that occur in these tasks
    description: Tensor  # [tasks,n] int64: which of the examples
    labels: Tensor  # [tasks,n] int64: 0 to ways - 1, drawn again for each task
    queries: Tensor  # [tasks,m] int64: which of the examples
    targets: Tensor  # [tasks,m] int64
    classes: Tensor  # [tasks,ways] int64: which class of the data set each label is

    def to(self, device: Any) -> "Episodes":
        return Episodes(*(tensor.to(device) for tensor in self))


class EpisodeSampler:
    """Draw few-shot tasks of `ways` classes, `shots` described examples of each and `queries` to be told apart.

    Classes are drawn uniformly, then different examples of each; label 0 to ways - 1 is the place in that draw, so that
    a class has another label in each task.

    Args:
        examples: [N,...], or an object with `len` and `[index]`.
        labels: [N] int64, 0 to classes - 1.
        ways: classes of a task.
        shots: described examples of a class.
        queries: examples of a class to be told, other ones.
        groups: [N] int64; examples of one group never meet in a task, such as two of the same sentence.

    Raises:
        DataError: a class without examples or below 0, or too few classes, or a class with too few examples.
        ValueError: a number less than 1, or shapes do not fit.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.episodes import EpisodeSampler
        >>> examples, labels = torch.rand(200, 1, 28, 28), torch.arange(10).repeat_interleave(20)
        >>> sampler = EpisodeSampler(examples, labels, ways=5, shots=1, queries=3)
        >>> tasks = sampler.draw(8, torch.Generator().manual_seed(0))
        >>> tasks.description.shape, tasks.queries.shape
        (torch.Size([8, 5]), torch.Size([8, 15]))
        >>> tasks.examples[tasks.queries].shape
        torch.Size([8, 15, 1, 28, 28])
    """

    def __init__(
        self,
        examples: Examples,
        labels: Tensor,
        *,
        ways: int,
        shots: int,
        queries: int,
        groups: Tensor | None = None,
    ) -> None:
        check_sizes(ways=ways, shots=shots, queries=queries)
        if isinstance(examples, list | tuple | np.ndarray):
            raise ValueError(
                f"examples must be a tensor, or an object that returns one for [index]; got a {type(examples).__name__}"
            )
        if not isinstance(labels, Tensor):
            raise ValueError(f"labels must be a tensor [{len(examples)}] int64, got a {type(labels).__name__}")
        if labels.shape != (len(examples),) or labels.dtype != torch.int64:
            raise ValueError(f"labels must be [{len(examples)}] int64, got {list(labels.shape)} {labels.dtype}")
        if groups is not None and not (isinstance(groups, Tensor) and groups.dtype == torch.int64):
            found = groups.dtype if isinstance(groups, Tensor) else f"a {type(groups).__name__}"
            raise ValueError(f"groups must be a tensor [{len(examples)}] int64, got {found}")
        if groups is not None and groups.shape != labels.shape:
            raise ValueError(f"groups must be [{len(examples)}], one for each example; got {list(groups.shape)}")
        self.examples = examples
        self.groups = None if groups is None else groups.cpu()
        self.ways, self.shots, self.queries = ways, shots, queries
        self.order, self.counts = _sort_by_class(labels.cpu())
        self.starts = self.counts.cumsum(0) - self.counts
        if len(self.counts) < ways:
            raise DataError(f"there are {len(self.counts)} classes: too few for tasks of {ways}")
        if int(self.counts.min()) < shots + queries:
            worst = int(self.counts.argmin())
            raise DataError(
                f"class {worst} has {int(self.counts[worst])} examples: too few for {shots} described and {queries} "
                "queries"
            )

    def __str__(self) -> str:
        of = f"{len(self.counts)} classes and {len(self.order)} examples"
        return f"{self.ways}-way {self.shots}-shot tasks with {self.queries} queries a class, of {of}"

    def draw(self, tasks: int, generator: torch.Generator, *, pool: int | None = None) -> Episodes:
        """Draw so many tasks, each of `ways` classes.

        With `pool`, all of them are drawn from so many classes, and shots + queries examples of each: what an encoder
        computes of an example then serves every task that has it. Without groups, each task by itself is distributed as
        without a pool.

        Shapes: of the tasks, as `Episodes` has them: examples [E,...], description and labels [tasks,ways * shots],
        queries and targets [tasks,ways * queries], classes [tasks,ways].

        Raises:
            DataError: tasks whose examples are of different groups are not to be found.
            ValueError: `tasks` is less than 1, or `pool` less than the ways, or there is no generator.

        Examples:
            >>> import torch
            >>> from fastweights.tasks.episodes import EpisodeSampler
            >>> labels = torch.arange(10).repeat_interleave(20)
            >>> sampler = EpisodeSampler(torch.rand(200, 8), labels, ways=5, shots=1, queries=3)
            >>> tasks = sampler.draw(64, torch.Generator().manual_seed(0), pool=6)
            >>> tasks.examples.shape, tasks.classes.shape  # 6 classes, 4 examples of each
            (torch.Size([24, 8]), torch.Size([64, 5]))
        """
        check_sizes(tasks=tasks)
        if pool is not None and (not is_integer(pool) or pool < self.ways):
            raise ValueError(f"pool must be an integer of at least the {self.ways} ways, or None; got {pool!r}")
        if not isinstance(generator, torch.Generator):
            raise ValueError(f"generator must be a torch.Generator, got a {type(generator).__name__}")
        source = self._source(pool, generator)
        classes, chosen = self._tasks(tasks, source, generator)
        for _ in range(_ATTEMPTS):
            meeting = self._find_meeting(chosen)
            if len(meeting) == 0:
                return self._episodes(classes, chosen)
            if len(meeting) == tasks:  # perhaps no other tasks are to be had of this pool
                source = self._source(pool, generator)
            classes[meeting], chosen[meeting] = self._tasks(len(meeting), source, generator)
        raise DataError(f"no {self.ways}-way tasks found in which no two examples share a group: use smaller groups")

    def partition(self, generator: torch.Generator) -> Episodes:
        """Part all classes into tasks at random, each class in one of them; what is left over is in none.

        Raises:
            DataError: as `draw`.
        """
        tasks = len(self.counts) // self.ways
        for _ in range(_PARTITIONS):
            order = torch.randperm(len(self.counts), generator=generator)
            classes = order[: tasks * self.ways].view(tasks, self.ways)
            chosen = self._examples(classes, generator)
            for _ in range(_ATTEMPTS):
                meeting = self._find_meeting(chosen)
                if len(meeting) == 0:
                    return self._episodes(classes, chosen)
                chosen[meeting] = self._examples(classes[meeting], generator)
        raise DataError(f"{len(meeting)} of {tasks} tasks have no examples of other groups: use smaller groups")

    def _source(self, pool: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """Return the classes of a pool [pool], and the indices of its examples of each [pool,shots + queries]."""
        if pool is None:
            return None
        classes = _choose(torch.tensor([len(self.counts)]), min(pool, len(self.counts)), generator)[0]
        return classes, self._examples(classes, generator)

    def _tasks(
        self, tasks: int, source: tuple[Tensor, Tensor] | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return classes [tasks,ways], and the indices of their examples [tasks,ways,shots + queries]."""
        if source is None:
            classes = _choose(torch.full((tasks,), len(self.counts)), self.ways, generator)
            return classes, self._examples(classes, generator)
        classes, examples = source
        own = _choose(torch.full((tasks,), len(classes)), self.ways, generator)
        per_class = examples.shape[1]
        order = _choose(torch.full((tasks * self.ways,), per_class), per_class, generator)
        return classes[own], examples[own].gather(2, order.view(tasks, self.ways, per_class))

    def _examples(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Return the indices of different examples of each class [...]: [...,shots + queries]."""
        places = _choose(self.counts[classes].flatten(), self.shots + self.queries, generator)
        return self.order[self.starts[classes].unsqueeze(-1) + places.view(*classes.shape, -1)]

    def _find_meeting(self, chosen: Tensor) -> Tensor:
        """Return the indices of the tasks that have two examples of one group."""
        if self.groups is None:
            return torch.empty(0, dtype=torch.long)
        groups = self.groups[chosen].flatten(1).sort(dim=1).values
        return (groups[:, 1:] == groups[:, :-1]).any(1).nonzero().flatten()

    def _episodes(self, classes: Tensor, chosen: Tensor) -> Episodes:
        """Return the tasks of classes [tasks,ways] and indices of examples [tasks,ways,shots + queries]."""
        needed, index = torch.unique(chosen, return_inverse=True)
        described, asked = index.split([self.shots, self.queries], dim=2)
        labels = torch.arange(self.ways).view(1, -1, 1)
        return Episodes(
            self.examples[needed],
            described.flatten(1),
            labels.expand_as(described).flatten(1).contiguous(),
            asked.flatten(1),
            labels.expand_as(asked).flatten(1).contiguous(),
            classes,
        )


def _sort_by_class(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of all examples, class after class [N], and how many each class has [classes]."""
    if len(labels) == 0 or int(labels.min()) < 0:
        found = f"the least of them is {int(labels.min())}" if len(labels) else "there are none"
        raise DataError(f"labels must be 0 to classes - 1, one an example: {found}")
    classes, counts = torch.unique(labels, return_counts=True)
    if (most := int(classes[-1])) >= len(classes):
        gap = int((classes != torch.arange(len(classes))).int().argmax())
        raise DataError(f"class {gap} has no example: labels must be 0 to {most}, without gaps")
    return labels.argsort(stable=True), counts


def _choose(counts: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return, for each of [N] counts, `size` different numbers below it in random order: [N,size]."""
    # Floyd's algorithm (Bentley & Floyd 1987) for all at once: its work does not grow with the counts, and one may
    # be a thousand times the others.
    chances = torch.rand(2, len(counts), size, generator=generator, dtype=torch.float64)
    chosen = torch.full((len(counts), size), -1)
    for place in range(size):
        last = counts - size + place
        drawn = (chances[0, :, place] * (last + 1)).long()
        known = (chosen[:, :place] == drawn.unsqueeze(1)).any(1)
        chosen[:, place] = torch.where(known, last, drawn)
    return chosen.gather(1, chances[1].argsort(1))
