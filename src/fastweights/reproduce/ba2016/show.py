"""`fastweights show attention`: how much each step of a trained fast-weights network attends to every earlier one."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.nn import FastWeightsRNN
from fastweights.ops.associative import Inputs, attention_scores
from fastweights.report.figures import INK, svg
from fastweights.reproduce._experiment import least_error, read_settings
from fastweights.reproduce.ba2016 import associative_retrieval, facial_expression, mnist_glimpses
from fastweights.reproduce.ba2016.glimpses import GlimpseSettings, make_network
from fastweights.runs import Member, load_checkpoint, load_run
from fastweights.tasks import associative_retrieval as retrieval
from fastweights.tasks import faces, mnist
from fastweights.tasks.glimpses import GLIMPSES, VISITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("runs", *associative_retrieval.EXPERIMENT.split("/"), "quick")
FILE = "attention.svg"


class Attention(NamedTuple):
    """The example that was drawn, the answer of the network, and the file of the figure."""

    example: str
    answer: str
    figure: Path


class _Reading(NamedTuple):
    """A trained network and one example of the test data."""

    network: nn.Module
    inputs: Tensor  # a batch of one
    steps: Sequence[str]  # the input of each step, T of them
    classes: Sequence[str]
    right: int
    example: str


def show(
    run: str | os.PathLike[str] | None = None, output: str | os.PathLike[str] | None = None, *, example: int = 1
) -> Attention:
    """Draw how much each step of a trained network of Ba et al. 2016 attends to every earlier one, in one example.

    The network is the run's best one with fast weights, on validation. Drawn are the products of eq 4: the weight,
    strength and age counted in, with which a stored state is read.

    Args:
        run: a folder that `fastweights reproduce` wrote, of an experiment of Ba et al. 2016 on examples; None is the
            default folder of ba2016/associative-retrieval.
        output: the SVG file; None is `attention.svg` in the run's folder.
        example: the number of an example of the test data, from 1.

    Raises:
        RunError: no run, no trained network with fast weights, no such example, or an output that cannot be written.
        DataError: the data that it was trained on are not here.

    Examples:
        >>> show("nowhere")
        Traceback (most recent call last):
            ...
        fastweights.errors.RunError: nowhere holds no result.json; give the folder that `fastweights reproduce` printed
    """
    trained = load_run(run or FOLDER)
    if trained.experiment not in _READERS:
        raise RunError(f"{trained.folder} is a run of {trained.experiment}; give one of {', '.join(_READERS)}")
    figure = trained.folder / FILE if output is None else Path(output)
    if figure.is_dir() or figure.suffix != ".svg":
        raise RunError(f"--output {figure} is not the name of an SVG file, such as {FILE}")
    ready = [
        member
        for member in trained.members
        if member.model == associative_retrieval.TITLES["fast-weights"]
        and member.epochs
        and (trained.folder / member.name / "checkpoint.pt").is_file()
    ]
    if not ready:
        raise RunError(f"{trained.folder} holds no trained network with fast weights: train one, at least one epoch")
    best = min(ready, key=least_error)
    reading = _READERS[trained.experiment](best, trained.folder, example)
    state = load_checkpoint(trained.folder / best.name / "checkpoint.pt") or {}
    try:
        reading.network.load_state_dict(state.get("best", {}))
    except RuntimeError as error:
        raise RunError(
            f"the weights in {trained.folder / best.name} have other sizes than its settings give"
        ) from error
    scores, logits = record_attention(reading.network.eval(), reading.inputs)
    chances = logits[0].softmax(0)
    answer = f"{reading.classes[reading.right]} has a chance of {float(chances[reading.right]):.1%}"
    drawing = draw_attention(scores[:, 0].numpy(), reading.steps, f"{reading.example}: {answer}")
    try:
        write_files({figure: svg(drawing).encode()})
    except OSError as error:
        raise RunError(f"cannot write {figure}: {error.strerror}; choose another --output") from error
    return Attention(reading.example, answer, figure)


@torch.no_grad()
def record_attention(network: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Call a network that has one `FastWeightsRNN` of one layer, and return its attention and what the network gave.

    The layer is called once, time first. Row t of the attention [T,B,T-1] is a step that reads, column n the state that
    step n left, both from 0: `ops.associative.attention_scores` without the state before the first step.

    Raises:
        ValueError: the network has no such layer, or several.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> from fastweights.reproduce.ba2016.show import record_attention
        >>> attention, (y, state) = record_attention(nn.FastWeightsRNN(10, 20), torch.randn(7, 3, 10))
        >>> attention.shape
        torch.Size([7, 3, 6])
    """
    layers = [module for module in network.modules() if isinstance(module, FastWeightsRNN) and module.num_layers == 1]
    if len(layers) != 1:
        raise ValueError(f"the network must have one FastWeightsRNN of one layer, got {len(layers)}")
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []

    def keep(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], results: Any) -> None:
        calls.append((arguments, options, results[0]))

    handle = layers[0].register_forward_hook(keep, with_kwargs=True)
    try:
        answer = network(inputs)
    finally:
        handle.remove()
    (layer,), (((x, *state), options, outputs),) = layers, calls
    hidden, memory = next(filter(None, [*state, options.pop("state", None)]), (torch.zeros_like(outputs[0]), None))
    named: dict[str, Any] = dict(layer.named_parameters())
    recurrence = Inputs(
        F.linear(x, named["weight_ih"], named["bias"]),
        named["weight_hh"],
        named.get("norm.weight"),
        named.get("norm.bias"),
        hidden,
        memory,
        **options,
    )
    constants = replace(layer.constants, rate=layer.rates()[0])
    return attention_scores(outputs, recurrence, constants)[:, :, 1:], answer


def draw_attention(scores: "numpy.ndarray[Any, Any]", steps: Sequence[str], title: str) -> "Figure":
    """Draw the attention [T,T-1] of one example: a row for each step that reads, a column for each state it can read.

    Examples:
        >>> import numpy
        >>> from fastweights.reproduce.ba2016.show import draw_attention
        >>> figure = draw_attention(numpy.eye(3, 2, -1), ["c", "9", "?"], "c9?")
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['9', '?']
    """
    from matplotlib.figure import Figure

    side = 0.22 * len(steps)
    figure = Figure(figsize=(side + 2.0, side + 1.0), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_facecolor("none")
    largest = float(numpy.abs(scores).max()) or 1.0
    image = axes.imshow(scores[1:], cmap="RdBu_r", vmin=-largest, vmax=largest)
    axes.set_yticks(range(len(steps) - 1), steps[1:], fontsize=8)
    axes.set_xticks(range(len(steps) - 1), steps[:-1], fontsize=8, rotation=90 if max(map(len, steps)) > 1 else 0)
    axes.tick_params(colors=INK, length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("the state after this step", color=INK)
    axes.set_ylabel("is read in this step", color=INK)
    axes.set_title(title, fontsize=9, color=INK, parse_math=False)
    bar = figure.colorbar(image, shrink=0.6)
    bar.set_label("rate · strength · decay$^{age}$ · h(τ)·h$_s$", color=INK, fontsize=8)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_visible(False)
    return figure


def _read_retrieval(member: Member, folder: Path, example: int) -> _Reading:
    settings = read_settings(associative_retrieval.Settings, member, folder)
    inputs, targets = associative_retrieval.draw_splits(settings)["test"]
    place = _choose(example, len(targets))
    network = associative_retrieval.RetrievalModel("fast-weights", member.hidden_size or 0, settings)
    characters = [retrieval.VOCABULARY[index] for index in inputs[place].tolist()]
    classes = [str(digit) for digit in range(retrieval.DIGITS)]
    return _Reading(network, inputs[place : place + 1], characters, classes, int(targets[place]), "".join(characters))


def _read_digit(member: Member, folder: Path, example: int) -> _Reading:
    settings = read_settings(mnist_glimpses.Settings, member, folder)
    images, labels = mnist_glimpses.load_splits(settings)["test"]
    return _look(member, settings, images, labels, [str(digit) for digit in range(mnist.CLASSES)], 3, example)


def _read_face(member: Member, folder: Path, example: int) -> _Reading:
    settings = read_settings(facial_expression.Settings, member, folder)
    settings = replace(settings, multi_pie=settings.multi_pie and Path(settings.multi_pie))
    data = facial_expression.load_faces(settings)
    return _look(member, settings, *data.part(faces.PARTS[2]), data.names, 2, example)


def _look(
    member: Member,
    settings: GlimpseSettings,
    images: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    layers: int,
    example: int,
) -> _Reading:
    place, size = _choose(example, len(labels)), member.hidden_size or 0
    network = make_network("fast-weights", images.shape[1], len(classes), size, settings, layers=layers)
    each = GLIMPSES // VISITS
    steps = [
        f"{quadrant} {'coarse' if number in (0, each - 1) else f'fine {number}'}"
        for quadrant in ("top left", "top right", "bottom left", "bottom right")
        for number in range(each)
    ]
    return _Reading(network, images[place : place + 1], steps, classes, int(labels[place]), f"test image {example}")


def _choose(example: int, count: int) -> int:
    if not 1 <= example <= count:
        raise RunError(f"--example must be the number of one of the {count:,} test examples, got {example}")
    return example - 1


_READERS: dict[str, Callable[[Member, Path, int], _Reading]] = {
    associative_retrieval.EXPERIMENT: _read_retrieval,
    mnist_glimpses.EXPERIMENT: _read_digit,
    facial_expression.EXPERIMENT: _read_face,
}
