"""Checks of the numbers and names that a caller gives, with one wording for the whole package.

Each raises ValueError, names the argument, repeats its value and says what would be right. A bool is no number, and
NumPy's numbers are.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, TypeGuard

from fastweights.errors import did_you_mean


def is_integer(number: object) -> TypeGuard[int]:
    """Return whether this is an integer, of Python or of NumPy.

    Examples:
        >>> import numpy
        >>> from fastweights.checks import is_integer
        >>> [is_integer(number) for number in (3, numpy.array([3, 5]).max(), 3.0, True)]
        [True, True, False, False]
    """
    return isinstance(number, Integral) and not isinstance(number, bool)


def to_plain(value: Any) -> Any:
    """Return a number of NumPy as Python's own, which JSON has, and anything else as it is.

    Examples:
        >>> import numpy
        >>> from fastweights.checks import to_plain
        >>> to_plain(numpy.int64(3)), to_plain(numpy.float32(0.5)), to_plain("relu")
        (3, 0.5, 'relu')
    """
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_sizes(**sizes: int) -> None:
    """Refuse what is not an integer of at least 1."""
    check_integers(1, **sizes)


def check_integers(least: int, /, **numbers: int) -> None:
    """Refuse what is not an integer of at least `least`."""
    for name, number in numbers.items():
        if not is_integer(number) or number < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")


def check_normalized(**sizes: int) -> None:
    """Refuse one unit with layer normalization: less its own mean it is 0, whatever the layer reads."""
    for name, size in sizes.items():
        if size < 2:
            words = "one unit less its own mean is 0, whatever the layer reads"
            raise ValueError(f"{name} must be at least 2 with layer normalization, got {size!r}: {words}")


def check_finite(**numbers: float) -> None:
    """Refuse what is not a finite number."""
    for name, number in numbers.items():
        if not _is_finite(number):
            raise ValueError(f"{name} must be finite, got {number!r}")


def check_positive(**numbers: float) -> None:
    """Refuse what is not a finite number above 0."""
    for name, number in numbers.items():
        if not (_is_finite(number) and number > 0):
            raise ValueError(f"{name} must be positive and finite, got {number!r}")


def check_not_negative(**numbers: float) -> None:
    """Refuse what is not a finite number of at least 0."""
    for name, number in numbers.items():
        if not (_is_finite(number) and number >= 0):
            raise ValueError(f"{name} must be finite and not negative, got {number!r}")


def check_between(low: float, high: float, /, **numbers: float) -> None:
    """Refuse what is not a number from `low` to `high`, both included."""
    for name, number in numbers.items():
        if not (_is_finite(number) and low <= number <= high):
            raise ValueError(f"{name} must lie between {low} and {high}, got {number!r}")


def check_dropout(**probabilities: float) -> None:
    """Refuse what is not a probability with which something can be dropped: at least 0 and less than 1."""
    for name, number in probabilities.items():
        if not (_is_finite(number) and 0 <= number < 1):
            raise ValueError(f"{name} must be a probability less than 1, got {number!r}")


def check_choice(choices: Iterable[str], /, **names: str) -> None:
    """Refuse a name that is not one of the choices."""
    choices = tuple(choices)
    for name, choice in names.items():
        if choice not in choices:
            hint = did_you_mean(str(choice), choices).strip()
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {choice!r}{hint and '; '}{hint}")


def _is_finite(number: float) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(number)
