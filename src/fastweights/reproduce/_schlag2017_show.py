"""`fastweights show gated`: which network, which example, and the figure of the two."""

import dataclasses
import math
import re
from pathlib import Path
from typing import NamedTuple

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.report.fast_matrices import fast_matrices
from fastweights.report.figures import svg
from fastweights.report.trajectory import Trajectory, key_of, value_of
from fastweights.reproduce._schlag2017 import TITLES, Settings, StreamModel
from fastweights.reproduce._schlag2017_trajectory import VALUES, tokens_of, trajectory
from fastweights.reproduce.schlag2017_associative_retrieval import EXPERIMENT, check, trained
from fastweights.runs import Member, load_run
from fastweights.tasks import gated_retrieval as task

FOLDER = Path("runs", *EXPERIMENT.split("/"), "quick")
FILE = "fast_matrices.svg"
EARLIER = 10  # queries that are read before the example: enough for a state as it is in mid-stream
SEARCHED = 300  # queries of the test stream among which an example is looked for


class Shown(NamedTuple):
    """What was drawn, in words, and where it is."""

    weights: str
    example: str
    answer: str
    figure: Path


def show(
    run: Path | None = None, output: Path | None = None, *, text: str | None = None, example: int | None = None
) -> Shown:
    """Draw the fast matrices of a trained gated network while it reads one example.

    Examples:
        >>> show(Path("nowhere"))
        Traceback (most recent call last):
            ...
        fastweights.errors.RunError: nowhere holds no result.json; give the folder that `fastweights reproduce` printed

    Args:
        run: a folder that `fastweights reproduce schlag2017/associative-retrieval` wrote. None: its default folder,
            and where that has no trained network, the weights that come with the package.
        output: the SVG file; None is `fast_matrices.svg` in the run's folder, or here for the package's weights.
        text: an example of one's own; where it has several queries, the last is drawn.
        example: the number of a query of the test stream, from 1; None chooses one of a few tokens.

    Raises:
        RunError: no run, no weights, no such example, or an output that cannot be written.
    """
    if text is not None and example is not None:
        raise RunError("--text and --example both choose the example: give one of them")
    if output is not None and (output.is_dir() or output.suffix != ".svg"):
        raise RunError(f"--output {output} is no name of an SVG file, such as {FILE}")
    settings, folder = _run(run)
    check(settings)
    if text is not None:
        _parsed(text)
    _, place, origin, network = trained(settings, folder)[0]
    network.eval()
    drawn = _of_text(network, settings, text) if text is not None else _of_stream(network, settings, example)
    if output is None:
        output = Path(FILE) if place is None else folder / FILE
    try:
        write_files({output: svg(fast_matrices(drawn)).encode()})
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror}; choose another --output") from error
    right = value_of(drawn.tokens[-1])
    answer = f"{right} has a chance of {float(drawn.answer[VALUES.index(right)]):.1%}"
    return Shown(origin, "".join(drawn.tokens[drawn.before :]), answer, output)


def _run(folder: Path | None) -> tuple[Settings, Path]:
    """The settings of the run's best network on validation, and its folder."""
    if folder is None and not (FOLDER / "result.json").is_file():
        return Settings(), FOLDER
    run = load_run(folder or FOLDER)
    if run.experiment != EXPERIMENT:
        raise RunError(f"{run.folder} is a run of {run.experiment}; give one of {EXPERIMENT}")
    ready = [
        member
        for member in run.members
        if member.name == f"gated-{member.hidden_size}-seed{member.seed}"
        and member.epochs
        and (run.folder / member.name / "checkpoint.pt").is_file()
    ]
    if ready:
        return _settings(min(ready, key=_error), run.folder), run.folder
    if folder is None:
        return Settings(), FOLDER
    raise RunError(
        f"{folder} holds no trained {TITLES['gated'].lower()}: train them with `fastweights reproduce {EXPERIMENT} "
        f"--models gated --output {folder}`, at least one pass, or leave RUN out"
    )


def _error(member: Member) -> float:
    errors = [record.get("validation_error") for record in member.epochs]
    return min((error for error in errors if isinstance(error, (int, float))), default=math.inf)


def _settings(member: Member, folder: Path) -> Settings:
    """A member's own settings, which need not be the defaults."""
    given = {}
    for field in dataclasses.fields(Settings):
        if field.name in member.settings:
            given[field.name] = value = member.settings[field.name]
            kind = type(field.default)
            if not (type(value) is kind or (kind is float and type(value) is int)):
                path = folder / member.name / "settings.json"
                raise RunError(f"{path}: {field.name} is {value!r}; it must be of type {kind.__name__}")
    return dataclasses.replace(Settings(), **given, models=("gated",), seeds=(member.seed or 0,))


def _parsed(text: str) -> None:
    try:
        task.parse(text)
    except ValueError as error:
        raise RunError(f"--text {text!r}: {error}") from error


def _of_text(network: StreamModel, settings: Settings, text: str) -> Trajectory:
    earlier = _queries(settings)[:EARLIER]
    *more, last = _split(text)
    origin = f"carried from {len(earlier)} queries of the test stream" + " and the text before this example" * bool(
        more
    )
    return trajectory(network, "".join([*earlier, *more]), last, origin)


def _of_stream(network: StreamModel, settings: Settings, number: int | None) -> Trajectory:
    queries = _queries(settings)
    if number is not None:
        if not 1 <= number <= len(queries):
            raise RunError(f"--example must be one of the test stream's {len(queries)} queries, got {number}")
        return _of_query(network, queries, number)
    fitting = [number for number, query in enumerate(queries[:SEARCHED], start=1) if number > 1 and _telling(query)]
    for candidate in fitting:
        drawn = _of_query(network, queries, candidate)
        if drawn.answer.argmax() == VALUES.index(value_of(drawn.tokens[-1])) and drawn.answer.max() > 0.5:
            return drawn
    return _of_query(network, queries, fitting[0] if fitting else 1)


def _of_query(network: StreamModel, queries: list[str], number: int) -> Trajectory:
    earlier = queries[max(0, number - 1 - EARLIER) : number - 1]
    origin = f"carried from the {len(earlier)} queries before it in the test stream" if earlier else "zeros"
    return trajectory(network, "".join(earlier), queries[number - 1], origin)


def _telling(query: str) -> bool:
    """Whether the query asks for one of the first of a few tokens, whose keys and values all differ."""
    *stored, asking = tokens_of(query)
    keys, values = [key_of(token) for token in stored], {value_of(token) for token in stored}
    return 4 <= len(stored) <= 5 and len(set(keys)) == len(values) == len(keys) and keys.index(key_of(asking)) < 2


def _queries(settings: Settings) -> list[str]:
    sizes = (settings.train_queries, settings.validation_queries, settings.test_queries)
    return _split(task.text(task.splits(sizes, seed=settings.data_seed)[2].inputs))


def _split(characters: str) -> list[str]:
    """The stream's queries, each with the storage tokens before it."""
    return re.findall(r"[^.]+\.", characters)
