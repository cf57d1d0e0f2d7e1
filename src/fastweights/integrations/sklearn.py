"""`memory.AdaptiveClassifier` as an estimator of scikit-learn (`pip install scikit-learn`)."""

from collections.abc import Sequence
from numbers import Real
from typing import Any, Self

import numpy
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import nn

from fastweights import memory
from fastweights.checks import check_sizes
from fastweights.memory.inputs import as_batch, count_inputs, slice_inputs
from fastweights.memory.network import check_network


class AdaptiveClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier of scikit-learn that learns new classes from a few examples, and tells inputs of no class.

    `fit` learns the classes that are there at first, and `partial_fit` learns a label that it has not seen as a new
    class, from one example on. It is [`memory.AdaptiveClassifier`][fastweights.memory.AdaptiveClassifier] with labels
    of any kind, for `clone`, `Pipeline`, `GridSearchCV` and the like.

    `predict` always answers a class, the likeliest one; `predict_unknown` says of which inputs not to believe it.

    Args:
        body: None takes the features as they are: X is [N,d], an array, a DataFrame or lists of numbers. Otherwise a
            network that makes features [N,d] of inputs X. Arrays, DataFrames and lists of numbers or of tensors reach
            it as one tensor, floating ones in its dtype; a tensor or a dict of tensors as it is; all else, such as
            texts, as a list.
        head: features [N,d] -> logits [N,V], the trained output layer, if there is one. Its columns are the V labels of
            `fit` in sorted order, as a `LabelEncoder` has them.
        unknown_rate: the share of inputs of known classes that may be called unknown.
        old_loss: the largest share of right answers to the classes of `fit` that all later ones may cost.
        capacity: the greatest number of examples of `partial_fit` that are kept.
        batch_size: how many inputs the body takes at once.

    Attributes:
        classes_: the labels, sorted; a label that `partial_fit` learns joins them.
        report_: what `fit` chose, and what to expect; `print` shows a table.
        adaptive_: the `memory.AdaptiveClassifier`, for `undo`, `forget` and `save`. Its names are the labels as texts.
        n_features_in_, feature_names_in_: of X, without a body.

    Examples:
        >>> from sklearn.datasets import load_digits
        >>> from fastweights.integrations.sklearn import AdaptiveClassifier
        >>> X, y = load_digits(return_X_y=True)
        >>> X, y, X_test, y_test = X[:1200], y[:1200], X[1200:], y[1200:]
        >>> classifier = AdaptiveClassifier().fit(X[y != 3], y[y != 3])
        >>> threes = X_test[y_test == 3]
        >>> bool(classifier.predict_unknown(threes).mean() > 0.5)
        True
        >>> classifier = classifier.partial_fit(X[y == 3][:5], [3] * 5)
        >>> bool((classifier.predict(threes) == 3).mean() > 0.9), classifier.score(X_test, y_test) > 0.85
        (True, True)
        >>> classifier.predict_proba(threes).shape, classifier.classes_.tolist()
        ((62, 10), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(
        self,
        body: nn.Module | None = None,
        head: nn.Module | None = None,
        *,
        unknown_rate: float = 0.05,
        old_loss: float = 0.01,
        capacity: int = 10_000,
        batch_size: int = 256,
    ) -> None:
        self.body = body
        self.head = head
        self.unknown_rate = unknown_rate
        self.old_loss = old_loss
        self.capacity = capacity
        self.batch_size = batch_size

    @property
    def classes_(self) -> NDArray[Any]:
        """The labels, sorted."""
        check_is_fitted(self, "adaptive_")
        return numpy.unique([self._label(name) for name in self.adaptive_.classes])

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 (as scikit-learn names it)
        """Learn the classes that are there at first, and forget all others.

        Args:
            X: N inputs, more than there are classes; twenty or more of each class are enough.
            y: [N] their labels: integers, texts or whatever else scikit-learn takes as classes, of two at least.

        Warns:
            UserWarning: as `memory.AdaptiveClassifier.fit`, where a rate that was asked for is not met on examples that
                were left out, or a class has fewer than five.

        Raises:
            ValueError: inputs, labels or settings are not as they must be.
        """
        inputs, labels = self._read(X, y, reset=True)
        names = {str(label): label for label in sorted(set(labels))}
        if len(names) < 2:
            raise ValueError(f"fit() needs examples of two classes at least, got one class: {labels[0]!r}")
        adaptive = memory.AdaptiveClassifier(
            nn.Identity() if self.body is None else self.body,
            self.head,
            classes=list(names),
            capacity=self.capacity,
        )
        self.report_ = adaptive.fit(
            inputs,
            [str(label) for label in labels],
            unknown_rate=self.unknown_rate,
            old_loss=self.old_loss,
            batch_size=self.batch_size,
        )
        self.adaptive_, self._labels = adaptive, names
        return self

    def partial_fit(self, X: Any, y: Any, classes: Sequence[Any] | None = None) -> Self:  # noqa: N803
        """Learn from more examples: a label that is not known yet is a new class, from one example on.

        Examples of a class of `fit` move the place where it is expected; they do not train anything. The first call of
        an estimator that is not fitted is `fit`.

        Args:
            X: N inputs.
            y: [N] their labels.
            classes: all labels that y may have, as other estimators want to know them; None allows any.

        Warns:
            UserWarning: as `memory.AdaptiveClassifier.add_examples`, where examples of a new class would not be
                answered as it.

        Raises:
            ValueError: inputs or labels are not as they must be, or of another kind than those of `fit`; nothing was
                changed.
        """
        if classes is not None and (others := set(numpy.asarray(y).tolist()) - set(numpy.asarray(classes).tolist())):
            raise ValueError(f"y has labels that are not among classes: {sorted(others, key=str)}")
        if not hasattr(self, "adaptive_"):
            return self.fit(X, y)
        inputs, labels = self._read(X, y, reset=False)
        known = next(iter(self._labels.values()))
        if _kind(known) is not _kind(labels[0]):
            raise ValueError(f"y must have labels of the kind of those of fit(), such as {known!r}, got {labels[0]!r}")
        names = {label: name for name, label in self._labels.items()}  # an integer finds the float that it equals
        names |= {label: str(label) for label in labels if label not in names}
        self.adaptive_.add_examples(inputs, [names[label] for label in labels])
        self._labels = {name: label for label, name in names.items()}
        return self

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the likeliest class of each input, [N], also of those that fit none; `predict_unknown` tells those."""
        answers = self._answer(X)
        names = [name for some in answers for name in some.names]
        return numpy.array([self._label(name) for name in names], dtype=self.classes_.dtype)

    def predict_proba(self, X: Any) -> NDArray[numpy.float64]:  # noqa: N803
        """Return how likely each of `classes_` is, if the input is of one of them: [N,classes], rows sum to one."""
        answers = self._answer(X)
        names = numpy.array(answers[0].classes)
        chances = numpy.concatenate([some.probabilities.double().numpy() for some in answers])
        foreign = chances.sum(1) == 0  # float32 has no number that is small enough
        best = numpy.array([name for some in answers for name in some.names])
        chances[foreign] = best[foreign, None] == names
        shares: NDArray[numpy.float64] = chances / chances.sum(1, keepdims=True)
        return shares[:, numpy.argsort(numpy.array([self._label(name) for name in names]))]

    def predict_unknown(self, X: Any) -> NDArray[numpy.bool_]:  # noqa: N803
        """Return which inputs fit no class well enough, [N]: of those of known classes about `unknown_rate` do not."""
        unknown: NDArray[numpy.bool_] = torch.cat([some.unknown for some in self._answer(X)]).numpy()
        return unknown

    def _answer(self, X: Any) -> list[memory.Answers]:  # noqa: N803
        check_is_fitted(self)
        check_sizes(batch_size=self.batch_size)
        inputs, _ = self._read(X, None, reset=False)
        if not (count := count_inputs(inputs)):
            raise ValueError("X has no inputs: there must be one at least")
        firsts = range(0, count, self.batch_size)
        return [self.adaptive_.predict(slice_inputs(inputs, first, first + self.batch_size)) for first in firsts]

    def _read(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, list[Any]]:  # noqa: N803
        """Return inputs as the body takes them, and labels as Python has them, checked as scikit-learn does."""
        if self.body is not None:
            check_network(self.body, self.head)
            inputs = as_batch(X, self.body)
        elif y is None and not reset:
            inputs = torch.from_numpy(validate_data(self, X, reset=False, dtype=numpy.float32))
        else:
            X, y = validate_data(self, X, y, reset=reset, dtype=numpy.float32)  # noqa: N806
            inputs = torch.from_numpy(X)
        if y is None and not reset:
            return inputs, []
        labels = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        return inputs, list(labels) if labels.dtype.kind in "mM" else labels.tolist()  # no date is a number

    def _label(self, name: str) -> Any:
        if name not in self._labels:
            raise ValueError(f"adaptive_ has learnt {name!r} without partial_fit(), which alone knows its label")
        return self._labels[name]


def _kind(label: Any) -> type:
    """Return what labels must have in common to be sorted."""
    return next((kind for kind in (str, Real) if isinstance(label, kind)), type(label))
