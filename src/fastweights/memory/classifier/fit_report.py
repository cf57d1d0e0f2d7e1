"""What fitting an adaptive classifier came to, to be printed."""

import math
from typing import NamedTuple

LEAST_NEW = 0.2  # share of a new class's inputs: fit warns below it
MOST_REPEATED = 0.1  # share of the examples: fit warns above it
LEAST_UNKNOWN = 3  # examples that may be called unknown: a rate of fewer is not delivered, and fit says so


class FitReport(NamedTuple):
    """What `AdaptiveClassifier.fit` chose, and what to expect of inputs that it has not seen, as shares.

    All shares are measured on examples that were left out: those of old classes by folds, and those of new classes by
    leaving out old classes and learning them again from a few of their examples. The network was trained on those: of
    classes that it never saw, and of inputs of another kind, fewer may be answered and fewer called unknown. A share
    that could not be measured is NaN.

    Printed, it is a table.

    Attributes:
        examples: how many different ones there were.
        repeated: how many more there were, each equal to another of its class.
        classes: how many old ones.
        features: how many the body makes.
        axes: on how many of their principal axes the densities are.
        shrinkage: how far the covariance within classes is drawn towards a sphere.
        right: the share of old inputs that are answered rightly.
        unknown_rate: the share of old inputs that may be called unknown, as it was asked.
        unknown: the share that are.
        told: the share of inputs of a class that nobody has learnt that are called unknown.
        old_loss: the share of old answers that new classes may cost, as it was asked.
        shots: numbers of examples of a new class, for the two that follow.
        lost: the share of old answers that a new class costs.
        new: the share of its inputs that are answered as it.
    """

    examples: int
    repeated: int
    classes: int
    features: int
    axes: int
    shrinkage: float
    right: float
    unknown_rate: float
    unknown: float
    told: float
    old_loss: float
    shots: tuple[int, ...]
    lost: tuple[float, ...]
    new: tuple[float, ...]

    def __str__(self) -> str:
        rows = [
            ("examples of old classes", f"{self.examples:,} of {self.classes:,} classes"),
            ("features, axes in use", f"{self.features:,}, {self.axes:,}"),
            ("old inputs answered rightly", _per_cent(self.right)),
            ("old inputs called unknown", f"{_per_cent(self.unknown)} (asked: {_per_cent(self.unknown_rate)})"),
            ("inputs of a class nobody learnt called unknown", f"at best {_per_cent(self.told)}"),
        ]
        for shots, lost, new in zip(self.shots, self.lost, self.new, strict=True):
            of = "1 example" if shots == 1 else f"{shots} examples"
            rows.append((f"a class learnt from {of}: its inputs right", f"at best {_per_cent(new)}"))
            rows.append(
                ("    old answers that it costs", f"{_per_cent(lost)} (asked: at most {_per_cent(self.old_loss)})")
            )
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def find_lacks(report: FitReport, kept: int, few: dict[str, int]) -> list[str]:
    """Return in words what was asked and is not met on the examples that were left out.

    Args:
        report: what was measured on them.
        kept: how many there were.
        few: the classes that have too few, and how many.
    """
    lacks = []
    if few:
        shown = ", ".join(f"{name!r} {count}" for name, count in list(few.items())[:5])
        lacks.append(
            f"{len(few)} classes have too few examples to say what to expect of them ({shown}"
            f"{', ...' if len(few) > 5 else ''}): give fit() five of each at least, better twenty"
        )
    elif 0 < report.unknown_rate * report.examples < LEAST_UNKNOWN:
        lacks.append(
            f"unknown_rate={report.unknown_rate:g} of {report.examples} examples is less than {LEAST_UNKNOWN} of them, "
            "which is too few to measure it by: several times as many inputs may be called unknown; give fit() "
            f"{math.ceil(LEAST_UNKNOWN / report.unknown_rate)} examples at least"
        )
    if report.repeated > MOST_REPEATED * (report.examples + report.repeated):
        lacks.append(
            f"{report.repeated} of {report.examples + report.repeated} examples repeat another of their class, and "
            "were left out: give fit() each of them once"
        )
    for asked, measured, name, what in (
        (report.unknown_rate, report.unknown, "unknown_rate", "of old inputs that were left out are called unknown"),
        *(
            (report.old_loss, lost, "old_loss", f"of old answers are lost to a class learnt from {shots}")
            for shots, lost in zip(report.shots, report.lost, strict=True)
        ),
    ):
        chance = 3 * math.sqrt(max(asked * (1 - asked), 1e-4) / kept)  # the error of a share that so few examples give
        if kept * asked >= 1 and measured - asked > 0.01 + chance:  # a share of less than one of them cannot be told
            lacks.append(
                f"{100 * measured:.1f} % {what}, where {name}={asked:g} asks for {100 * asked:g} %: give fit() more "
                f"examples of each class (it had {report.examples} of {report.classes} classes)"
            )
    new = [share for shots, share in zip(report.shots, report.new, strict=True) if shots <= 5 and not math.isnan(share)]
    if new and new[-1] < LEAST_NEW:
        lacks.append(
            f"of a class learnt from a few examples only {100 * new[-1]:.0f} % of the inputs would be answered as it: "
            f"the features do not tell the old classes apart well, or old_loss={report.old_loss:g} is too strict for "
            f"them, or {report.examples} examples are too few"
        )
    return lacks


def _per_cent(share: float) -> str:
    return "not measured" if math.isnan(share) else f"{100 * share:.1f} %"
