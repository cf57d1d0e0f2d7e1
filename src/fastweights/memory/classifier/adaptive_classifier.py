"""A trained classifier that learns new classes by name, from a few examples each, and says what it does not know."""

import operator
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fastweights.checks import check_between, check_sizes
from fastweights.errors import MemoryFileError
from fastweights.files import replacing
from fastweights.hub import FOLDER, escape, find_folder
from fastweights.memory.classifier._examples import (
    LONGEST_NAME,
    Group,
    Groups,
    encode_name,
    encode_names,
    find_alike,
    gather,
    list_names,
    make_room,
    name_labels,
    read_names,
)
from fastweights.memory.classifier._file import FILE, Fitted, Identity, encode, identify, read_classifier
from fastweights.memory.classifier._new_classes import Learnt, NewClasses, Old, learn_classes, view_old, weigh_classes
from fastweights.memory.classifier._separation import score_rows
from fastweights.memory.classifier._statistics import (
    SHOTS,
    find_distinct,
    find_doubt,
    find_farthest,
    fit_statistics,
    score_inputs,
    spread_classes,
    weigh,
)
from fastweights.memory.classifier.fit_report import FitReport, find_lacks
from fastweights.memory.inputs import Transform, count_inputs, is_shuffled, is_stream, read_batches
from fastweights.memory.network import Network
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.saved import FILES, MEMORY, NOTHING, Saved

FEWEST_EXAMPLES = 5  # an old class that has fewer is warned of
LEAST_SIZE, MOST_SIZE = 1e-30, 1e18  # of the largest feature: squares and their sums are finite in float32
MOST_FAR = 30  # times as far from its class as most examples: fit warns of one that is farther
FEWEST_CHECKED = 4  # a new class that has fewer is not checked
CHANGED = (
    "the network has other weights: old and new features cannot be compared. Put the weights back, or make a new "
    "AdaptiveClassifier, fit() it and add the examples again"
)

_Read = tuple[Tensor, Tensor | None]  # features [B,d] and logits [B,V] of a batch


class Answers(NamedTuple):
    """What a classifier says about a batch of inputs."""

    names: list[str]  # [B]: the likeliest class of each input
    unknown: Tensor  # [B] bool: inputs that fit no class well enough
    probabilities: Tensor  # [B,classes]; with `unknown_probability` they sum to one
    classes: tuple[str, ...]  # the columns' names
    unknown_score: Tensor  # [B]: log odds that no class fits; `unknown` where it is above the threshold
    # [B]: how likely no class fits, if as many inputs were foreign as old ones may be called unknown: where that is one
    # in twenty, an input that is called unknown need not be so with a probability of one half.
    unknown_probability: Tensor


class Example(NamedTuple):
    """An example that was added to a classifier."""

    number: int  # of all that were ever added, the first is 0: it stays the example's own
    name: str  # of its class
    features: Tensor  # [d], what the body made of it


class _View(NamedTuple):
    """All that an answer needs; never changed, so that any number of threads may read it."""

    classes: tuple[str, ...]  # those of the network that are not forgotten, then the new ones by name
    old: Old
    new: NewClasses
    learnt: dict[str, tuple[Group, Learnt]]  # by name, with what each was made of
    made_of: tuple[Any, ...]  # what the old classes were made of


class AdaptiveClassifier(Saved):
    """A trained classifier that learns new classes by name from a few examples, without training.

    The network answers for the classes that it was trained on. A new class is answered where the Gaussian density of
    its examples, in the network's features, outweighs those of the old classes and the network's own certainty. A class
    that nobody has seen is weighed in the same way, which tells inputs that fit no class: `unknown`. Beside its density
    a new class has a logistic regression, which separates its examples from those of the old ones.

    Of the old classes statistics are kept, and the features and logits of 2,000 examples at most, which are saved with
    the classifier: by those `fit` chooses its thresholds, and each new class is held to `old_loss`. Of new classes the
    examples' features are kept in an `EpisodicMemory`. The order of examples does not matter. The network is never
    changed and is read in evaluation mode; after training it further, fit and add again.

    Any number of threads may ask and change one classifier. `save` writes it to a folder; there `open` makes changes
    that are on the disk when the method returns, one writer at a time, and `load` reads, with `refresh` to follow.

    Inputs are tensors [N,...], arrays, data frames, lists of numbers or of tensors, which reach the body as one tensor
    (what floats, in the dtype of its weights); a dict of tensors, texts in a list and all else, which
    reach it as they are; or a `torch.utils.data.Dataset` or `DataLoader` of inputs, or of (input, label) pairs.

    Args:
        body: one batch of inputs of any kind -> features [B,d].
        head: features [B,d] -> logits [B,V], the trained output layer; None answers old classes by densities alone.
        classes: the names of the V old classes, in the order of the logits; at least two.
        capacity: the greatest number of examples that are kept. Past it, the class that has the most of them loses its
            oldest, an old class before a new one that has as many; an `undo` does not bring them back.
        transform: one item -> a tensor, applied to each item of a list, an array or a Dataset, such as a picture of
            PIL, before they are stacked; tensors, dicts and a DataLoader's tensors need none. It is not saved.

    Raises:
        ValueError: a part that is no module, a class that is named twice, fewer than two classes, or a name that is
            empty or longer than 128 bytes.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> body, generator = torch.nn.Identity(), torch.Generator().manual_seed(0)
        >>> def draw(place, n):
        ...     return torch.tensor(place) + 0.3 * torch.randn(n, 2, generator=generator)
        >>> classifier = memory.AdaptiveClassifier(body, classes=["cat", "dog", "hen"])
        >>> old = torch.cat([draw([2.0, 0.0], 50), draw([0.0, 2.0], 50), draw([-2.0, 0.0], 50)])
        >>> report = classifier.fit(old, ["cat"] * 50 + ["dog"] * 50 + ["hen"] * 50)
        >>> report.examples, report.classes, report.unknown_rate  # print(report) shows the table
        (150, 3, 0.05)
        >>> classifier.add_examples(draw([0.0, -2.0], 5), ["owl"] * 5, tag="today")
        >>> answers = classifier.predict(torch.tensor([[0.0, -2.1], [2.0, 0.1]]))
        >>> answers.names, answers.probabilities.shape, answers.classes
        (['owl', 'cat'], torch.Size([2, 4]), ('cat', 'dog', 'hen', 'owl'))
        >>> classifier.remove(classifier.examples()[4].number)  # had it been a mistake
        >>> classifier.rename("owl", "barn owl")
        >>> classifier.classes, len(classifier)
        (('cat', 'dog', 'hen', 'barn owl'), 4)
        >>> classifier.undo("today")
        >>> classifier.classes
        ('cat', 'dog', 'hen')
    """

    def __init__(
        self,
        body: nn.Module,
        head: nn.Module | None = None,
        *,
        classes: Iterable[str],
        capacity: int = 10_000,
        transform: Transform | None = None,
    ) -> None:
        check_sizes(capacity=capacity)
        if transform is not None and not callable(transform):
            raise ValueError(f"transform must make a tensor of one item, as a function does, got {transform!r:.60}")
        trained = list_names(classes, "classes")
        if len(set(trained)) != len(trained) or len(trained) < 2:
            raise ValueError(
                f"classes must be a list of at least two different names, in the order of the logits; got {trained!r}"
            )
        for name in trained:
            encode_name(name)
        self._network = Network(body, head, len(trained))
        self._first_names = tuple(trained)  # until fit; from then on `_fitted` has the names
        self._capacity, self._transform = capacity, transform
        self._fitted: Fitted | None = None
        self._store: EpisodicMemory | None = None  # made by fit, which is the first to know how wide features are
        self._folder: Path | None = None  # the folder that it was read from
        self._opened = False  # True after open(): changes are written to the folder
        self._checked: Any = None  # the `marks` of the network when its checksum was last that of `fit`
        self._file: Identity | None = None  # the file as it was last read or written; None after an unsaved change
        self._now: _View | None = None  # None when something has changed since
        self._groups: Groups | None = None
        self._last: _View | None = None  # the view before, whose unchanged parts are used again

    # Properties

    @property
    def body(self) -> nn.Module:
        """The network that makes features."""
        return self._network.body

    @property
    def head(self) -> nn.Module | None:
        """Its output layer, if there is one."""
        return self._network.head

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes: the network's, then the new ones in the order of their names."""
        return self._trained if self._fitted is None else self._view().classes

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that can be undone, in the order in which they were opened."""
        return () if self._store is None else self._store.tags

    def __len__(self) -> int:
        """Return the number of examples that were added and are kept."""
        return 0 if self._store is None else len(self._store)

    def __repr__(self) -> str:
        state = f"{len(self):,} of {self._capacity:,} examples added" if self._store is not None else "not fitted"
        return f"AdaptiveClassifier({len(self.classes)} classes, {state})"

    @property
    def _trained(self) -> tuple[str, ...]:
        """The names of the network's classes, the forgotten ones too, in the order of the logits."""
        return self._first_names if self._fitted is None else self._fitted.classes

    # Changes

    def fit(
        self,
        inputs: Any,
        names: Iterable[str] | None = None,
        *,
        unknown_rate: float = 0.05,
        old_loss: float = 0.01,
        batch_size: int = 256,
    ) -> FitReport:
        """Learn what the old classes look like, and choose every rate and threshold, on examples left out in turn.

        Give examples that the network was not trained on if you have some, twenty or more of each class: a network is
        surer on its training set than elsewhere, so that more than `unknown_rate` of new inputs would be called
        unknown. With some hundred examples in all, rates of one in a hundred are estimates from one or two of them. A
        class that has more than half of all examples decides the rates: of small ones beside it more inputs may be
        called unknown, and more answers lost, than was asked.
        Examples that were added before stay.

        Args:
            inputs: N inputs that can be sliced, for example a tensor [N,...] or a list, or a dict of such, as a
                tokenizer makes, a Dataset or a DataLoader: examples of every old class that is not forgotten, more than
                there are classes. Some arrays of [N,V] numbers must fit into memory.
            names: [N] their classes; None for the labels of a Dataset or a DataLoader of pairs, where an integer is a
                position in `classes`. An example that is there several times in a class counts once.
            unknown_rate: the share of inputs of known classes, old and learnt together, that may be called unknown.
            old_loss: the largest share of right answers to old inputs that the new classes may cost, all of them
                together. More of it makes new classes win more of their own inputs.
            batch_size: how many inputs the network takes at once; a DataLoader has batches of its own.

        Returns:
            What was chosen and what to expect, to be printed.

        Warns:
            UserWarning: what was asked is not met on examples that were left out, a new class would hardly be answered,
                many examples repeat others, one lies very far from its class, or a class has fewer than five examples.
                The classifier is fitted all the same.

        Raises:
            ValueError: names that are no old classes, classes without examples, features that are not [N,d] or not
                finite; nothing was changed.
                The same of a network that was changed after examples were added: those are kept as its features.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        check_sizes(batch_size=batch_size)
        check_between(0, 1, unknown_rate=unknown_rate, old_loss=old_loss)
        if names is not None:
            names = list_names(names, "names")
            _check_order(inputs)
            if not is_stream(inputs) and (count := count_inputs(inputs)) != len(names):
                raise ValueError(f"there must be a name for each input, got {len(names)} names and {count} inputs")
            self._check_names(names)
        elif not is_stream(inputs):
            raise ValueError("fit() needs the names of the inputs: only a Dataset or a DataLoader has labels with them")
        marks, network = self._network.marks(), self._network.fingerprint()
        pairs, labelled = self._read(inputs, batch_size)
        if names is None:
            if labelled is None:
                raise ValueError(f"fit() needs names: the {type(inputs).__name__} has inputs without labels")
            names = name_labels(labelled, self._trained)
            self._check_names(names)
        named = set(names)
        given = [name for name in self._trained if name in named]
        features = torch.cat([feature for feature, _ in pairs])
        if is_stream(inputs) and len(features) != len(names):
            raise ValueError(f"there must be a name for each input, got {len(names)} names and {len(features)} inputs")
        if len(features) != len(names):
            raise ValueError(f"the body made {len(features)} rows of features from {len(names)} inputs")
        largest = float(features.abs().max())
        if largest and not LEAST_SIZE <= largest <= MOST_SIZE:
            raise ValueError(
                f"the largest of the features is {largest:.0e}, beyond what float32 computes with: let the body scale "
                "them to about 1"
            )
        columns = torch.tensor([position for position, name in enumerate(self._trained) if name in named])
        logits = None
        if self.head is not None:
            every = len(columns) == len(self._trained)
            logits = torch.cat([logit if every else logit[:, columns] for _, logit in pairs if logit is not None])
        del pairs  # large where classes are many
        index = {name: number for number, name in enumerate(given)}
        labels = torch.tensor([index[name] for name in names])
        # An example that is there twice would be known when it is left out.
        once = find_distinct(features, labels)
        if len(once) <= len(given):
            raise ValueError(
                f"fit() needs more different examples than classes, got {len(once)} of {len(given)} classes: of the "
                f"{len(names)} examples the others have equal features"
            )
        if len(once) < len(names):  # a copy of the logits is large where classes are many
            features, labels, logits = features[once], labels[once], None if logits is None else logits[once]
        farthest, times = find_farthest(features, labels)
        found, trials = fit_statistics(features, labels, logits, unknown_rate, old_loss)
        del logits
        # A forgotten class that was not given has no statistics; it is never answered.
        statistics = spread_classes(found, columns, len(self._trained))
        report = FitReport(
            examples=len(once),
            repeated=len(names) - len(once),
            classes=len(given),
            features=features.shape[1],
            axes=found.whole.space.axes.shape[1],
            shrinkage=found.rates.shrinkage,
            right=trials.right,
            unknown_rate=unknown_rate,
            unknown=trials.unknown,
            told=trials.told,
            old_loss=old_loss,
            shots=SHOTS,
            lost=trials.lost,
            new=trials.new,
        )
        store = self._store_of(features.shape[1])
        with store.lock:
            if self._fitted is not None and network != self._fitted.network and (len(store) or store.tags):
                raise ValueError(f"examples were added, and now {CHANGED}")
            forgotten = frozenset[str]() if self._fitted is None else self._fitted.forgotten
            renaming = None if self._fitted is None else self._fitted.renaming
            fitted = Fitted(self._trained, forgotten, self._capacity, network, statistics, renaming)
            with self._changing(store, fitted):
                self._checked = marks
        if times > MOST_FAR:
            warnings.warn(
                f"example {int(once[farthest])}, of {given[int(labels[farthest])]!r}, lies {times:,.0f} times as far "
                "from its class as most examples do, and so changes what is measured of all: if it is an error, leave "
                "it out and fit() again",
                stacklevel=2,
            )
        counts = Counter(given[label] for label in labels.tolist())
        few = {name: count for name, count in counts.items() if count < FEWEST_EXAMPLES}
        for lack in find_lacks(report, len(found.kept.labels), few):
            warnings.warn(lack, stacklevel=2)
        return report

    def _check_names(self, names: Sequence[str]) -> None:
        """Refuse names of old examples by which the old classes could not be learnt."""
        known, named = set(self._trained), set(names)
        for row, name in enumerate(names):
            if name not in known:
                raise ValueError(
                    f"names[{row}] is {name!r}, which is no class of the network: fit() is for the old classes "
                    f"({_list(self._trained)}), add_examples() for new ones"
                )
        if missing := set(self._old_classes()) - named:
            raise ValueError(f"fit() needs examples of every old class; there are none of {_list(sorted(missing))}")
        if len(named) < 2:
            raise ValueError(f"fit() needs examples of two classes at least, forgotten ones too; got only {names[0]!r}")
        if len(names) <= len(named):
            raise ValueError(f"fit() needs more examples than classes, got {len(names)} of {len(named)}")

    def _read(
        self, inputs: Any, size: int | None = None
    ) -> tuple[list[tuple[Tensor, Tensor | None]], list[Any] | None]:
        """Return the features and the logits of inputs, batch by batch, and their labels where they have some.

        Args:
            inputs: as `read_batches` takes them.
            size: of a batch; None for one batch of all.
        """
        width = None if self._store is None else self._store.key_size
        pairs, labels, count = list[_Read](), list[Any](), 0
        for batch in read_batches(inputs, self.body, self._transform, size):
            pairs.append(self._network.read(batch.inputs, width, count))
            labels += batch.labels or []
            count += len(pairs[-1][0])
        if not pairs:
            raise ValueError(f"there are no inputs in the {type(inputs).__name__}: give at least one")
        return pairs, labels or None

    def add_examples(self, inputs: Any, names: Iterable[str] | str, tag: str | None = None) -> None:
        """Learn from labelled examples: a name that is not known yet is a new class, from one example on.

        Examples of an old class move the place where it is expected, so that fewer of its inputs are called unknown or
        given to a new class. They do not correct a mistake between two old classes, for the network stays as it is.

        Args:
            inputs: n inputs, one batch for the body; or a Dataset or a DataLoader, whose labels are not read.
            names: [n] their classes, or one name for all of them.
            tag: a name under which `undo` takes them back.

        Warns:
            UserWarning: a new class has nearly the name of another one, by capitals, spaces or a letter; or most
                examples of a new class, of four or more, would not be answered as it if each was left out in turn, with
                the reason. They were added all the same.

        Raises:
            ValueError: not as many names as examples, an empty or too long name, features that are not [n,d] or not
                finite, more examples or new classes than `capacity`, or a network that was changed after `fit`; nothing
                was changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        store, fitted = self._check_fitted()
        marks = self._network.marks()
        if marks != self._checked:
            self._check_network(fitted)
            self._checked = marks
        if not isinstance(names, str):
            _check_order(inputs)
        features = _join([feature for feature, _ in self._read(inputs)[0]])
        each = [str(names)] * len(features) if isinstance(names, str) else list_names(names, "names")
        if len(each) != len(features):
            raise ValueError(f"there must be a name for each example: {len(each)} names, {len(features)} examples")
        values = encode_names(each)
        with store.lock:
            self._finish_renaming()
            old = self._old_classes()
            leave, stay = make_room(store, each, old, self._capacity)
            before = self._gather()
            store.write(features[stay], values[stay], tag, remove=leave)
            self._now = None
            groups = self._gather()
        known = [*old, *sorted(before.keys() - set(old))]
        for name in dict.fromkeys(each):
            if name not in known:
                if (alike := find_alike(name, known)) is not None:
                    warnings.warn(
                        f"{name!r} is a new class, and there is {alike!r} already: if they are the same, "
                        f"rename({name!r}, {alike!r}) makes one of them",
                        stacklevel=2,
                    )
                known.append(name)
            count = _count(groups, name)
            # It takes a view of the whole: as often as the examples double, and from four of them on.
            if name in old or count < FEWEST_CHECKED or count.bit_length() == _count(before, name).bit_length():
                continue
            if lack := self._find_lack(name):
                warnings.warn(lack, stacklevel=2)

    def _find_lack(self, name: str) -> str | None:
        """Return why a new class's own examples are not answered as it, or None if they are."""
        view = self._view()
        _, learnt = view.learnt.get(name, (None, None))
        if learnt is None or not len(learnt.own_odds):
            return None
        won = learnt.own_odds - view.new.evidence > learnt.own_best
        if 2 * int(won.sum()) >= len(won):
            return None
        taken = Counter(learnt.own_names[~won].tolist()).most_common(1)[0][0]
        by_odds = int((learnt.own_odds > learnt.own_best).sum())
        start = (
            f"only {int(won.sum())} of the {len(won)} examples of {name!r} would be answered as it if each was left "
            f"out; most of the others as {self._trained[taken]!r}"
        )
        if 2 * by_odds >= len(won):
            old_loss = view.old.found.rates.old_loss
            return (
                f"{start}. Answering them rightly would cost more than old_loss={old_loss:g} of the old answers: fit() "
                "with a greater old_loss, or add examples"
            )
        return f"{start}. The features do not tell them apart so far: add examples, or train the network"

    def _old_classes(self) -> list[str]:
        """Return the classes of the network that are not forgotten."""
        forgotten = frozenset[str]() if self._fitted is None else self._fitted.forgotten
        return [name for name in self._trained if name not in forgotten]

    def forget(self, name: str) -> int:
        """Forget a class for good, whatever is undone later; return how many added examples of it there were.

        A class of the network is not answered any more; a class of the same name may be learnt again afterwards.

        Raises:
            ValueError: there is no such class, or it is the last of the network's; nothing was changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        store, _ = self._check_fitted()
        with store.lock:
            self._finish_renaming()
            _, fitted = self._check_fitted()
            if name not in self.classes:
                raise ValueError(f"there is no class {name!r} to forget; the classes are {_list(self.classes)}")
            if name not in self._trained or name in fitted.forgotten:
                self._now = None
                return store.remove_class(encode_name(name))
            forgotten = fitted.forgotten | {name}
            if len(forgotten) == len(self._trained):
                raise ValueError(f"{name!r} is the last class of the network: there must be one left to compare with")
            with self._changing(store, fitted._replace(forgotten=forgotten)):
                # Before the class itself: what is left of them would look like a new class of that name.
                return store.remove_class(encode_name(name))

    def examples(self) -> list[Example]:
        """Return the examples that were added and are kept, in the order in which they were added."""
        store, _ = self._check_fitted()
        with store.lock:
            _, fitted = self._check_fitted()
            names, numbers, keys = read_names(store, fitted.renaming), store.numbers.tolist(), store.keys
        return [Example(*parts) for parts in zip(numbers, names, keys, strict=True)]

    def remove(self, number: int) -> None:
        """Remove one example for good, whatever is undone later: one that has a wrong name, say.

        A new class whose last example it is is gone with it.

        Args:
            number: of the example, as `examples` tells it.

        Raises:
            ValueError: there is no such example; nothing was changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        store, _ = self._check_fitted()
        with store.lock:
            numbers = store.numbers.tolist()
            if isinstance(number, Example):
                raise ValueError(
                    f"remove() takes an example's number, got an Example of {number.name!r}: remove({number.number})"
                )
            if number not in numbers:
                raise ValueError(f"there is no example {number!r:.60}: examples() has the {len(numbers)} that are kept")
            store.remove([numbers.index(number)])
            self._now = None

    def rename(self, old: str, new: str) -> None:
        """Give a class another name. A class that has that name already becomes one with it.

        The examples keep their numbers and tags. Once a class of the network has another name, `fit` and `add_examples`
        know it by that one.

        Args:
            old: a class of the network, or a new one.
            new: its name from now on.

        Raises:
            ValueError: there is no such class, the name is empty or too long, or both are of the network; nothing was
                changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        store, _ = self._check_fitted()
        code = encode_name(new)
        with store.lock:
            self._finish_renaming()
            _, fitted = self._check_fitted()
            if old not in self.classes:
                raise ValueError(f"there is no class {old!r} to rename; the classes are {_list(self.classes)}")
            if old not in self._old_classes():
                store.rename_class(encode_name(old), code)
                self._now = None
            elif old != new:
                if new in fitted.classes:
                    state = " that was forgotten" if new in fitted.forgotten else ""
                    raise ValueError(
                        f"{new!r} is a class of the network{state}: two of its outputs cannot have one name"
                    )
                classes = tuple(new if name == old else name for name in fitted.classes)
                with self._changing(store, fitted._replace(classes=classes, renaming=(old, new))):
                    pass
                with suppress(MemoryFileError):  # it is renamed; what is left over is done before the next such change
                    self._finish_renaming()

    def _finish_renaming(self) -> None:
        """Rename in the memory what is renamed in the file, where that was left over: before names in it change."""
        store, fitted = self._check_fitted()
        if fitted.renaming is not None:
            before, after = fitted.renaming
            store.rename_class(encode_name(before), encode_name(after))
            with self._changing(store, fitted._replace(renaming=None)):
                pass

    def undo(self, tag: str) -> None:
        """Take back all examples that were added under a tag, as if they had never been added.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        store, _ = self._check_fitted()
        with store.lock:
            store.undo(tag)
            self._now = None

    def keep(self, tag: str) -> None:
        """Make the examples under a tag final: they can no longer be undone.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        store, _ = self._check_fitted()
        store.keep(tag)

    # Answers

    def predict(self, inputs: Any) -> Answers:
        """Name the class of each input, with the probabilities of all classes, and tell which inputs are unknown.

        Args:
            inputs: B inputs, one batch for the body; or a Dataset or a DataLoader, whose labels are not read.

        Returns:
            `Answers`: names [B], unknown [B] bool, probabilities [B,classes] float32, the classes of their columns,
            unknown_score and unknown_probability [B] float32, all on the CPU.

        Raises:
            ValueError: `fit` was not called yet, or features that are not [B,d] or not finite.
        """
        view = self._view()
        pairs, _ = self._read(inputs)
        features = _join([feature for feature, _ in pairs])
        logits = None if self.head is None else _join([logit for _, logit in pairs if logit is not None])
        rates, model = view.old.found.rates, view.old.whole
        points, none = model.points(features), features[:, :0]
        scored = score_inputs(rates, model.densities, view.old.indices, points, none if logits is None else logits)
        rows = score_rows(model.scale_points(points), view.new.rows)
        densities = view.new.gaussians.log_densities(model.densities.place(points))
        odds, lacks = weigh(rates, densities, rows, scored)
        score = view.new.weigh_unknown(find_doubt(rates, scored.strangeness), lacks) + rates.offset
        among = torch.cat([scored.answers, odds - view.new.evidence], 1).softmax(1)
        known = score.neg().sigmoid()  # 1 - score.sigmoid() would be 0 where that rounds to 1
        return Answers(
            [view.classes[best] for best in among.argmax(1).tolist()],
            score > rates.offset,
            (among * known[:, None]).float(),
            view.classes,
            score.float(),
            score.sigmoid().float(),
        )

    def _view(self) -> _View:
        """Return what answers need, made again if something has changed."""
        view = self._now
        if view is None:
            store, _ = self._check_fitted()
            with store.lock:
                view = self._now = self._make_view()
        return view

    def _gather(self) -> dict[str, Group]:
        """Return the examples that are there now, by class."""
        store, _ = self._check_fitted()
        assert self._fitted is not None
        self._groups = gather(store, self._network.answer, self._groups, self._fitted.renaming)
        return self._groups.by_class

    def _make_view(self) -> _View:
        _, fitted = self._check_fitted()
        statistics, names = fitted.statistics, self._old_classes()
        groups = self._gather()
        position = {name: row for row, name in enumerate(self._trained)}
        added = {position[name]: groups[name] for name in names if name in groups}
        made_of = (statistics, names, *added.values())
        last = self._last
        same = last is not None and _are_same(last.made_of, made_of)
        index = [position[name] for name in names]
        features = {one: group.features for one, group in added.items()}
        old = last.old if same and last else view_old(statistics, index, features)
        learnt = {
            name: pair for name, pair in (last.learnt if same and last else {}).items() if groups.get(name) is pair[0]
        }
        new = sorted(groups.keys() - set(names))
        changed = [name for name in new if name not in learnt]
        found = learn_classes(
            old, [groups[name].features for name in changed], [groups[name].logits for name in changed]
        )
        learnt |= {name: (groups[name], one) for name, one in zip(changed, found, strict=True)}
        classes = weigh_classes(old, [learnt[name][1] for name in new])
        view = self._last = _View((*names, *new), old, classes, learnt, made_of)
        return view

    def _store_of(self, key_size: int) -> EpisodicMemory:
        """Return the memory, which is made if there is none yet."""
        if self._store is None:
            self._store = EpisodicMemory(
                2 * self._capacity, key_size, value_shape=(LONGEST_NAME,), value_dtype=torch.uint8, device="cpu"
            )
        return self._store

    def _check_fitted(self) -> tuple[EpisodicMemory, Fitted]:
        if self._store is None or self._fitted is None:
            raise ValueError(
                "the classifier is not fitted: call fit(inputs, names) with examples of the old classes first"
            )
        return self._store, self._fitted

    @contextmanager
    def _changing(self, store: EpisodicMemory, fitted: Fitted) -> Iterator[None]:
        """Change what is known of the old classes once the block has ended, on the disk too if it was opened there."""
        if self._opened and self._folder is not None:
            if not store.is_writer:
                raise MemoryFileError(
                    f"{self._folder} is closed, or was opened by another process: open() it to change it, or load() it "
                    "for a copy in memory"
                )
            path = self._folder / FILE
            try:
                with replacing(path, encode(fitted)):
                    yield
            except OSError as error:
                raise MemoryFileError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
            self._file = identify(path)
        else:
            yield
            self._file = None
        self._fitted, self._now = fitted, None

    # On the disk

    def save(self, path: str | PathLike[str], *, beside: Mapping[str, bytes] = NOTHING) -> None:
        """Write the classifier, without its network, to a folder; a classifier of the same network there is replaced.

        Args:
            path: a folder; it is made.
            beside: other files of the folder, by name, which are replaced in the same step.

        Raises:
            ValueError: the classifier is not fitted, or its network was changed after `fit`.
            MemoryFileError: the folder has the classifier of another network, or a writer, or the disk refuses.
        """
        store, _ = self._check_fitted()
        folder = Path(path)
        if (folder / FILE).exists():
            self._check_folder(folder, read_classifier(folder / FILE)[0])
        with store.lock:
            _, fitted = self._check_fitted()
            self._check_network(fitted)
            store.save(folder, beside={FILE: encode(fitted), **beside})

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        body: nn.Module,
        head: nn.Module | None = None,
        *,
        transform: Transform | None = None,
    ) -> Self:
        """Read a saved classifier as it is now, also while another process changes it; `refresh` follows that one.

        Args:
            path: the folder of `save`.
            body: the network that the classifier was saved with.
            head: its output layer, if it had one.
            transform: as the classifier was made with; it is not saved.

        Raises:
            MemoryFileError: there is no classifier, it is damaged, or was saved with another network.
        """
        return cls._from_folder(Path(path), body, head, EpisodicMemory.load, transform)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        body: nn.Module,
        head: nn.Module | None = None,
        *,
        transform: Transform | None = None,
    ) -> Self:
        """Open a saved classifier to change it: a change is on the disk when its method returns, one writer at a time.

        Use it in a `with` statement, or `close()` it.

        Args:
            path: the folder of `save`.
            body: the network that the classifier was saved with.
            head: its output layer, if it had one.
            transform: as the classifier was made with; it is not saved.

        Raises:
            MemoryFileError: there is no classifier, it has another writer, is damaged, or was saved with another
                network.

        Examples:
            >>> import tempfile, torch
            >>> from fastweights import memory
            >>> body, path, places = torch.nn.Identity(), tempfile.mkdtemp(), 5 * torch.eye(3)
            >>> classifier = memory.AdaptiveClassifier(body, classes=["a", "b"])
            >>> report = classifier.fit(places[:2].repeat(30, 1) + 0.1 * torch.randn(60, 3), ["a", "b"] * 30)
            >>> classifier.save(path)
            >>> reader = memory.AdaptiveClassifier.load(path, body)
            >>> with memory.AdaptiveClassifier.open(path, body) as writer:
            ...     writer.add_examples(places[2] + 0.1 * torch.randn(5, 3), "c")
            >>> reader.refresh(), reader.classes
            (True, ('a', 'b', 'c'))
        """
        classifier = cls._from_folder(Path(path), body, head, EpisodicMemory.open, transform)
        classifier._opened = True
        return classifier

    @classmethod
    def _from_folder(
        cls, folder: Path, body: nn.Module, head: nn.Module | None, read: Any, transform: Transform | None
    ) -> Self:
        if not (folder / MEMORY).exists():
            raise MemoryFileError(
                f"{folder} holds no saved classifier, there is no {MEMORY}: fit() one and save() it there first, or "
                "put a good copy of the whole folder in its place"
            )
        store = read(folder, device="cpu")
        try:
            (fitted, file), _ = store.read_beside(FILE, read_classifier)
            _check_store(folder, store, fitted)
            classifier = cls(body, head, classes=fitted.classes, capacity=fitted.capacity, transform=transform)
            marks = classifier._network.marks()
            classifier._check_folder(folder, fitted)
        except BaseException:
            store.close()
            raise
        classifier._store, classifier._fitted = store, fitted
        classifier._folder, classifier._file, classifier._checked = folder, file, marks
        return classifier

    def _describe(self) -> tuple[str, str, str]:
        words = (
            f"A classifier of {len(self.classes)} classes, without its network: {escape(_list(self.classes))}. The "
            "network must be the one that it was saved with. Whoever has it can read the features of the examples: of "
            "those that were added, and of at most 2,000 that it was fitted on."
        )
        code = (
            "from fastweights.memory import AdaptiveClassifier\n\n"
            f'classifier = AdaptiveClassifier.from_pretrained("{FOLDER}", body, head)'
        )
        return "An adaptive classifier", words, code

    @classmethod
    def from_pretrained(
        cls,
        name: str | PathLike[str],
        body: nn.Module,
        head: nn.Module | None = None,
        *,
        transform: Transform | None = None,
        **download: Any,
    ) -> Self:
        """Read what `save_pretrained` or `push_to_hub` has written, for the same network; changes here stay here.

        Args:
            name: a folder, or "owner/name" on a hub.
            body: the network that the classifier was saved with.
            head: its output layer, if it had one.
            transform: as the classifier was made with; it is not saved.
            download: `revision`, `token`, `cache_dir` and `local_files_only` of a download.

        Raises:
            MemoryFileError: there is no classifier, it is damaged, or was saved with another network.
            HubError: there is neither a folder nor a repository of that name, or the hub cannot be reached.
        """
        return cls.load(find_folder(name, (FILE, *FILES), **download), body, head, transform=transform)

    def refresh(self) -> bool:
        """Follow the writer of a classifier that `load` has read: make the changes that it has made since.

        Returns:
            True if anything has changed. A classifier that was opened is its own writer: False.

        Raises:
            MemoryFileError: the saved classifier is damaged, gone, or of another network; nothing was changed.
            ValueError: a classifier that was not loaded, or was changed here since.
        """
        store, _ = self._check_fitted()
        with store.lock:
            _, fitted = self._check_fitted()
            refused = (
                "refresh() is for a classifier that load() has read and that was not changed here since: load() the "
                "saved one again"
            )
            if self._folder is None or self._file is None:
                raise ValueError(refused)
            before = fitted, self._file
            folder = self._folder

            def read(path: Path) -> tuple[Fitted, Identity]:
                if identify(path) == before[1]:
                    return before
                found = read_classifier(path)
                self._check_folder(folder, found[0])
                return found

            # The memory after the file: examples go before the class that they were of, and must not be seen without.
            try:
                (fitted, file), changed = store.read_beside(FILE, read)
            except ValueError as error:  # the examples alone were changed here
                raise ValueError(refused) from error
            changed |= file != self._file
            if changed:
                self._fitted, self._file, self._now = fitted, file, None
        return changed

    def close(self) -> None:
        """Let another process change the saved classifier; this object still answers."""
        if self._store is not None:
            self._store.close()

    def _check_network(self, fitted: Fitted) -> None:
        if fitted.network != self._network.fingerprint():
            raise ValueError(f"since fit(), {CHANGED}")

    def _check_folder(self, folder: Path, fitted: Fitted) -> None:
        if fitted.network != self._network.fingerprint():
            raise MemoryFileError(
                f"{folder} holds a classifier that was saved with another network: body and head must have the weights "
                "and dtypes that they had then; after training them further, fit() again and save() to another folder"
            )


def _check_order(inputs: Any) -> None:
    """Refuse inputs that come in another order than their names."""
    if is_shuffled(inputs):
        raise ValueError("names are in one order, and the DataLoader in another each time: make it with shuffle=False")


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _count(groups: dict[str, Group], name: str) -> int:
    return len(groups[name].features) if name in groups else 0


def _are_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether views are made of the same statistics, names and groups."""
    return (
        len(before) == len(now)
        and before[1] == now[1]
        and all(map(operator.is_, before[2:], now[2:]))
        and before[0] is now[0]
    )


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:10]))
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def _check_store(folder: Path, store: EpisodicMemory, fitted: Fitted) -> None:
    found = store.key_size, store.value_shape, store.value_dtype
    expected = len(fitted.statistics.whole.space.center), (LONGEST_NAME,), torch.uint8
    if found != expected:
        raise MemoryFileError(
            f"{folder} has a memory that is not that of its classifier: key size, shape and dtype of values are "
            f"{found}, not {expected}; put a good copy of the whole folder in its place"
        )
