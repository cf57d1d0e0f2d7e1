"""Errors that are the user's to mend: the command line prints them in one line, without a traceback."""

import difflib
import re
from collections.abc import Iterable


class FastWeightsError(Exception):
    """Something the user gave or owns is not as it must be; the message says what would be right."""


class DataError(FastWeightsError):
    """A data set is missing, damaged or not what it claims to be."""


class RunError(FastWeightsError):
    """A run's folder, settings or checkpoint cannot be used as asked."""


class FolderError(RunError):
    """A run's folder holds another run, is in use or damaged, or the disk refuses it: another folder will do."""


class BusyError(FolderError):
    """Another process trains in a run's folder."""


class TrainingError(FastWeightsError):
    """Training met numbers that it cannot go on with."""


class MemoryFileError(FastWeightsError):
    """A saved memory is in use, damaged or not as asked for, or the disk refuses it."""


class ExamplesError(FastWeightsError, ValueError):
    """A classifier cannot take the examples or labels that it was given."""


class WeightsError(FastWeightsError):
    """Saved weights are missing, damaged or not those of what is to be loaded, or the disk refuses them."""


class HubError(FastWeightsError):
    """A model or memory that others share is neither a folder here nor to be had from a hub, or that refuses one."""


class KernelError(FastWeightsError, RuntimeError):
    """A kernel was asked for by name and cannot run here."""


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return a question for an error, with a space behind it, or nothing where no known word is near.

    Examples:
        >>> from fastweights.errors import did_you_mean
        >>> did_you_mean("gatd", ["gated", "attention"]), did_you_mean("lstm", ["gated", "attention"])
        ('did you mean gated? ', '')
    """
    close = find_nearest(word, known, most=most, cutoff=cutoff)
    return f"did you mean {' or '.join(close)}? " if close else ""


def find_nearest(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known words that a mistyped one may have been, in small letters or capitals.

    They have nearly its letters; where none has, its letters are the last of their initials.

    Examples:
        >>> from fastweights.errors import find_nearest
        >>> [find_nearest(word, ["learning_rate", "lstm"]) for word in ("lerning_rate", "LSTM", "lr", "decay")]
        [['learning_rate'], ['lstm'], ['learning_rate'], []]
    """
    word, names = word.lower(), {name.lower(): name for name in known}
    close = difflib.get_close_matches(word, names, n=most, cutoff=cutoff)
    if not close and len(word) > 1:
        initials = {name: "".join(part[:1] for part in re.split("[-_]", name)) for name in names}
        close = [name for name in names if initials[name].endswith(word)][:most]
    return [names[name] for name in close]


def one_line(error: BaseException, lines: int = 1) -> str:
    """Return the first lines of an error's message as one, or the name of its type where it has none.

    Examples:
        >>> from fastweights.errors import one_line
        >>> one_line(RuntimeError("no such device\\nException raised from ...")), one_line(AssertionError())
        ('no such device', 'AssertionError')
    """
    return " ".join(" ".join(str(error).strip().splitlines()[:lines]).split()) or type(error).__name__
