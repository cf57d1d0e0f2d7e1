"""The text of a layer's `extra_repr`."""

from collections.abc import Iterable, Mapping


def describe(values: Mapping[str, object], sizes: Iterable[str], shown: Iterable[str] = (), **defaults: object) -> str:
    """Write some values: the sizes as plain numbers, what is always shown by name, and what is not its default.

    Examples:
        >>> from fastweights.nn._describe import describe
        >>> values = {"input_size": 3, "hidden_size": 4, "copies": 2, "heads": 1, "batch_first": True}
        >>> describe(values, ["input_size", "hidden_size"], ["copies"], heads=1, batch_first=False)
        '3, 4, copies=2, batch_first=True'
    """
    changed = [name for name, default in defaults.items() if values.get(name, default) != default]
    return ", ".join(
        [*(str(values[name]) for name in sizes), *(f"{name}={values[name]!r}" for name in [*shown, *changed])]
    )
