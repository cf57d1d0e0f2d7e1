"""`fastweights show gated`: choose a trained network and an example, read it step by step, and draw it."""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.nn import GatedFastWeightsState
from fastweights.report.figures import svg
from fastweights.reproduce._experiment import least_error, read_settings
from fastweights.reproduce.schlag2017.associative_retrieval import (
    EXPERIMENT,
    TITLES,
    Settings,
    StreamModel,
    check,
    load_trained,
)
from fastweights.reproduce.schlag2017.fast_matrices import Trajectory, draw_fast_matrices, key_of, value_of
from fastweights.runs import load_run
from fastweights.tasks import gated_retrieval as task

VALUES = task.VOCABULARY[: task.CHARACTERS]
FOLDER = Path("runs", *EXPERIMENT.split("/"), "quick")
FILE = "fast_matrices.svg"
EARLIER = 10  # queries read before the example: enough for the typical state in mid-stream
SEARCHED = 300  # queries of the test stream among which a telling example is searched


class Drawing(NamedTuple):
    """The weights, the example and answer in words, and its file."""

    weights: str
    example: str
    answer: str
    figure: Path


def show(
    run: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    text: str | None = None,
    example: int | None = None,
) -> Drawing:
    """Draw the fast matrices of a trained gated network while it reads one example.

    Examples:
        >>> show("nowhere")
        Traceback (most recent call last):
            ...
        fastweights.errors.RunError: nowhere holds no result.json; give the folder that `fastweights reproduce` printed

    Args:
        run: a folder that `fastweights reproduce schlag2017/associative-retrieval` wrote. None: its default folder,
            and where that has no trained network, the weights that come with the package.
        output: the SVG file; None is `fast_matrices.svg` in the run's folder, or here for the package's weights.
        text: an example of your own; where it has several queries, the last is drawn.
        example: the number of a query of the test stream, from 1; None chooses one of a few tokens.

    Raises:
        RunError: no run, no weights, no such example, or an output that cannot be written.
    """
    if text is not None and example is not None:
        raise RunError("--text and --example both choose the example: give one of them")
    figure = None if output is None else Path(output)
    if figure is not None and (figure.is_dir() or figure.suffix != ".svg"):
        raise RunError(f"--output {figure} is not the name of an SVG file, such as {FILE}")
    settings, folder = _choose_run(run)
    check(settings)
    if text is not None:
        _check_text(text)
    _, place, origin, network = load_trained(settings, folder)[0]
    network.eval()
    trajectory = _read_text(network, settings, text) if text is not None else _read_query(network, settings, example)
    if figure is None:
        figure = Path(FILE) if place is None else folder / FILE
    try:
        write_files({figure: svg(draw_fast_matrices(trajectory)).encode()})
    except OSError as error:
        raise RunError(f"cannot write {figure}: {error.strerror}; choose another --output") from error
    right = value_of(trajectory.tokens[-1])
    answer = f"{right} has a chance of {float(trajectory.answer[VALUES.index(right)]):.1%}"
    return Drawing(origin, "".join(trajectory.tokens[trajectory.before :]), answer, figure)


def _choose_run(folder: str | os.PathLike[str] | None) -> tuple[Settings, Path]:
    """Return the settings of the run's best network on validation, and the run's folder."""
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
        best = min(ready, key=least_error)
        settings = read_settings(Settings, best, run.folder)
        return dataclasses.replace(settings, models=("gated",), seeds=(best.seed or 0,)), run.folder
    if folder is None:
        return Settings(), FOLDER
    raise RunError(
        f"{folder} holds no trained {TITLES['gated'].lower()}: train them with `fastweights reproduce {EXPERIMENT} "
        f"--models gated --output {folder}`, at least one pass, or leave RUN out"
    )


def _check_text(text: str) -> None:
    try:
        task.parse(text)
    except ValueError as error:
        raise RunError(f"--text {text!r}: {error}") from error


def _read_text(network: StreamModel, settings: Settings, text: str) -> Trajectory:
    earlier = _draw_queries(settings)[:EARLIER]
    *more, last = _split_queries(text)
    origin = f"carried from {len(earlier)} queries of the test stream"
    origin += " and the text before this example" if more else ""
    return read_example(network, "".join([*earlier, *more]), last, origin)


def _read_query(network: StreamModel, settings: Settings, number: int | None) -> Trajectory:
    """Read a query of the test stream by its number, else the first telling one that the network answers."""
    queries = _draw_queries(settings)

    def read(chosen: int) -> Trajectory:
        earlier = queries[max(0, chosen - 1 - EARLIER) : chosen - 1]
        origin = f"carried from the {len(earlier)} queries before it in the test stream" if earlier else "zeros"
        return read_example(network, "".join(earlier), queries[chosen - 1], origin)

    if number is not None:
        if not 1 <= number <= len(queries):
            raise RunError(f"--example must be the number of one of the {len(queries)} test queries, got {number}")
        return read(number)
    telling = [place for place, query in enumerate(queries[:SEARCHED], start=1) if place > 1 and _is_telling(query)]
    for candidate in telling:
        trajectory = read(candidate)
        right = VALUES.index(value_of(trajectory.tokens[-1]))
        if trajectory.answer.argmax() == right and trajectory.answer.max() > 0.5:
            return trajectory
    return read(telling[0] if telling else 1)


def _is_telling(query: str) -> bool:
    """Tell whether the query asks for one of the first of a few tokens, whose keys and values all differ."""
    *stored, asking = split_tokens(query)
    keys, values = [key_of(token) for token in stored], {value_of(token) for token in stored}
    return 4 <= len(stored) <= 5 and len(set(keys)) == len(values) == len(keys) and keys.index(key_of(asking)) < 2


def _draw_queries(settings: Settings) -> list[str]:
    sizes = (settings.train_queries, settings.validation_queries, settings.test_queries)
    return _split_queries(task.text(task.splits(sizes, seed=settings.data_seed)[2].inputs))


def _split_queries(characters: str) -> list[str]:
    """Split a stream into its queries, each with the storage tokens before it."""
    return re.findall(r"[^.]+\.", characters)


def split_tokens(characters: str) -> list[str]:
    """Split a stream into its storage and query tokens.

    Examples:
        >>> split_tokens("S(hf,h),S(cc,d),Q(cc)d.")
        ['S(hf,h),', 'S(cc,d),', 'Q(cc)d.']
    """
    return [match.group() for match in task.TOKEN.finditer(characters)]


@torch.no_grad()
def read_example(network: StreamModel, earlier: str, example: str, origin: str) -> Trajectory:
    """Read an example a character at a time, after a stream that came before it.

    Eight networks read it side by side, which differ in the value stored under the key that is asked for: the
    difference between the true one's matrices and the others' is the trace of that value.

    Args:
        network: a trained one, of gated fast weights.
        earlier: the stream before, whole tokens, perhaps none; its last token is a part of the picture.
        example: storage tokens and one query, as `task.parse` takes them.
        origin: the source of the state at the beginning of the example, in words.
    """
    tokens = (*split_tokens(earlier)[-1:], *split_tokens(example))
    before = len(tokens) - len(split_tokens(example))
    inputs = _encode("".join(tokens)).unsqueeze(1).repeat(1, len(VALUES))
    key, true = key_of(tokens[-1]), VALUES.index(value_of(tokens[-1]))
    asked = max(index for index in range(before, len(tokens) - 1) if key_of(tokens[index]) == key)
    inputs[sum(map(len, tokens[: asked + 1])) - 3] = torch.arange(len(VALUES))

    at_query = len(inputs) - len(tokens[-1]) + tokens[-1].index(")")
    first = _read_stream(network, earlier[: len(earlier) - len("".join(tokens[:before]))], copies=len(VALUES))
    states = [first]
    for step, column in enumerate(inputs):
        logits, state = network(column.unsqueeze(0), states[-1])
        states.append(GatedFastWeightsState(*state))
        if step == at_query:
            answer = logits[0, true].softmax(0)[: len(VALUES)]
    fast_1, fast_2 = (torch.stack([getattr(state, name) for state in states]) for name in ("fast_1", "fast_2"))

    ends = torch.tensor([len(token) for token in tokens]).cumsum(0).tolist()
    return Trajectory(
        tokens=tokens,
        before=before,
        fast_1=fast_1[:, true].numpy(),
        fast_2=fast_2[:, true].numpy(),
        trace_1=_subtract_others(fast_1, true).numpy(),
        trace_2=_subtract_others(fast_2, true).numpy(),
        recall=answer_chances(network, [_take(states[end], true) for end in ends], tokens[before:-1]).numpy(),
        answer=answer.numpy(),
        origin=origin,
    )


@torch.no_grad()
def answer_chances(network: StreamModel, states: Sequence[GatedFastWeightsState], stored: Sequence[str]) -> Tensor:
    """Return the chance of each token's value as the answer, if its key were asked for from each of the states.

    Shapes: states' tensors without the batch axis -> [storage tokens, states]. The states stay as they are.
    """
    together = GatedFastWeightsState(*map(torch.stack, zip(*states, strict=True)))
    chances = []
    for token in stored:
        query = _encode(f"Q({key_of(token)})").unsqueeze(1).expand(-1, len(states))
        logits, _ = network(query, together)
        chances.append(logits[-1].softmax(1)[:, VALUES.index(value_of(token))])
    return torch.stack(chances)


def _read_stream(network: StreamModel, characters: str, *, copies: int) -> GatedFastWeightsState:
    """Return the state of so many networks after a stream; zeros after none."""
    _, state = network(_encode(characters or task.VOCABULARY[0]).unsqueeze(1))
    state = GatedFastWeightsState(*(tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for tensor in state))
    return state if characters else GatedFastWeightsState(*map(torch.zeros_like, state))


def _subtract_others(fast: Tensor, true: int) -> Tensor:
    others = [index for index in range(len(VALUES)) if index != true]
    return (fast[:, true].unsqueeze(1) - fast[:, others]).mean(1)  # zero up to rounding before the value is read


def _take(state: GatedFastWeightsState, index: int) -> GatedFastWeightsState:
    return GatedFastWeightsState(*(tensor[index] for tensor in state))


def _encode(characters: str) -> Tensor:
    return torch.tensor([task.VOCABULARY.index(character) for character in characters])
