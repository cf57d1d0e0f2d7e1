"""A softmax layer learns all classes from a stream, beside a memory of what it is shown: which method answers soonest.

Everything that is drawn is a function of the seed, and the layer learns in seconds; so a member that was killed goes
through the stream again, and only what it had measured is not measured again.
"""

import io
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.memory import EpisodicMemory, MbPA, attend
from fastweights.report.figures import COLOURS
from fastweights.reproduce._experiment import resume
from fastweights.runs import Progress, RunFolder
from fastweights.tasks import image_folder, mini_imagenet
from fastweights.training import epoch_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ModelName = Literal["mbpa", "non-parametric", "mixture", "parametric"]
PARTS = ("train", "validation", "test")

_POINTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)
_DRAWN = 20  # neighbours in the picture, in two rows


class Images(NamedTuple):
    """Images of all classes, each in one of the parts."""

    images: Tensor  # [N,3,S,S] uint8
    labels: Tensor  # [N] int64
    part: Tensor  # [N] int64: to learn from, to validate and to test on, an index of PARTS
    names: list[str]  # names of the classes


class Features(NamedTuple):
    """Inputs of the softmax layer for one split of the classes into old and new."""

    parts: dict[str, tuple[Tensor, Tensor]]  # activations [n,d] and labels [n]: the old classes come first
    old: int  # classes
    head: nn.Linear  # on all classes: as pre-trained on the old ones, zero for the new


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    model: ModelName
    learning_rate: float  # learning rate of the softmax layer
    capacity: int
    neighbours: int
    mixing: float  # the parametric model's share of the mixture
    steps: int
    local_learning_rate: float
    optimizer: str


def number_within_class(labels: Tensor) -> Tensor:
    """Number the examples of each class from 0, [N] int64 -> [N].

    Examples:
        >>> import torch
        >>> from fastweights.reproduce.sprechmann2018._stream import number_within_class
        >>> number_within_class(torch.tensor([1, 0, 1, 1, 0]))
        tensor([0, 0, 1, 2, 1])
    """
    number = torch.empty_like(labels)
    number[labels.argsort(stable=True)] = torch.cat([torch.arange(int(count)) for count in labels.bincount()])
    return number


def load_images(settings: Any) -> Images:
    """Load mini-ImageNet, or a user's folder of classes, and give every image a part.

    Of each class the first `test_images` are to test on, the next `validation_images` to validate on, and the rest to
    learn from.

    Raises:
        DataError: the images are not there or damaged.
        ValueError: a class has too few of them.
    """
    most, validation, test = settings.images_per_class, settings.validation_images, settings.test_images
    if settings.images is None:
        data = mini_imagenet.load(settings.data_dir)
        pixels = data.images[:, :most].flatten(0, 1)
        labels = torch.arange(len(data.names)).repeat_interleave(data.images[:, :most].shape[1])
        names = data.names
    else:
        pixels, labels, names = image_folder.load(settings.images, most=most)
    if len(names) < 4:
        raise ValueError(f"{len(names)} classes cannot be split into old and new ones: give at least four")
    counts = labels.bincount(minlength=len(names))
    if int(counts.min()) <= test + validation:
        name, least = names[int(counts.argmin())], int(counts.min())
        raise ValueError(
            f"class {name} has {least} images, {test} for the test and {validation} for validation: none is "
            "left to train on"
        )
    number = number_within_class(labels)
    part = torch.where(number < test, 2, torch.where(number < test + validation, 1, 0))
    return Images(pixels, labels, part, names)


def order_classes(data: Images, seed: int) -> Tensor:
    """Return the classes in the order in which a split numbers them, [classes] int64: the first half is old."""
    return epoch_order(len(data.names), seed, 0)


def points(epochs: float) -> list[float]:
    """Return the moments at which the methods are compared, in passes over the stream.

    Examples:
        >>> from fastweights.reproduce.sprechmann2018._stream import points
        >>> points(0.3)
        [0.0, 0.02, 0.05, 0.1, 0.2, 0.3]
    """
    return sorted({*(point for point in _POINTS if point < epochs), epochs})


def choose_examples(labels: Tensor, old: int, scarce: float) -> Tensor:
    """Return the indices of the examples that are shown: all, but of every other new class only the first share."""
    rare = (labels >= old) & ((labels - old) % 2 == 1)
    return torch.where(~rare | (number_within_class(labels) < (labels.bincount()[labels] * scarce).ceil()))[0]


class StreamLearner:
    """A method on a split of the classes, from the first batch on."""

    def __init__(self, features: Features, method: Method, *, seed: int, scarce: float, batch_size: int) -> None:
        self.method, self.seed, self.batch_size = method, seed, batch_size
        self.old, self.classes = features.old, features.head.out_features
        self.parts = features.parts
        inputs, labels = features.parts["train"]
        chosen = choose_examples(labels.cpu(), features.old, scarce).to(labels.device)
        self.inputs, self.labels = inputs[chosen], labels[chosen]
        self.steps = math.ceil(len(chosen) / batch_size)  # steps of a pass
        self.head = nn.Linear(features.head.in_features, self.classes).to(inputs.device)
        self.head.load_state_dict(features.head.state_dict())
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=method.learning_rate)
        self.store = EpisodicMemory(method.capacity, inputs.shape[1], device=inputs.device)
        self.adapted = MbPA(
            nn.Identity(),
            self.head,
            self.store,
            neighbours=method.neighbours,
            steps=method.steps,
            lr=method.local_learning_rate,
            optimizer=method.optimizer,
        )
        self.step = 0

    def learn(self, until: int) -> None:
        """Go on with the stream up to a step: the layer learns from each batch, and the memory keeps it."""
        for step in range(self.step, until):
            epoch, index = divmod(step, self.steps)
            if index == 0 or step == self.step:
                self.order = epoch_order(len(self.labels), self.seed, epoch).to(self.labels.device)
            batch = self.order[index * self.batch_size : (index + 1) * self.batch_size]
            loss = F.cross_entropy(self.head(self.inputs[batch]), self.labels[batch])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.method.model != "parametric":
                self.store.write(self.inputs[batch], self.labels[batch])
        self.step = until

    @torch.no_grad()
    def log_probs(self, inputs: Tensor) -> Tensor:
        """Return the log probabilities of the classes, [n,d] -> [n,V]; a memory that is still empty says nothing."""
        model, share = self.method.model, self.method.mixing
        if model == "mbpa":
            return self.adapted(inputs).log_softmax(1)
        parametric: Tensor = self.head(inputs).log_softmax(1)
        if model == "parametric" or not len(self.store):
            uniform = torch.zeros_like(parametric) - math.log(self.classes)
            return uniform if model == "non-parametric" else parametric
        remembered = attend(self.store.search(inputs, self.method.neighbours), self.classes).to(parametric.dtype)
        mixed = remembered if model == "non-parametric" else share * parametric.exp() + (1 - share) * remembered
        return mixed.clamp(min=1e-12).log()  # a class that no neighbour has is as good as ruled out

    def scores(self, part: str) -> dict[str, float]:
        """Return the accuracies in per cent of the novel, the pre-trained and all classes, and the loss in nats."""
        inputs, labels = self.parts[part]
        answers = torch.cat([self.log_probs(block) for block in torch.split(inputs, 1000)])
        right = (answers.argmax(1) == labels).double()
        new = labels >= self.old
        rare = new & ((labels - self.old) % 2 == 1)
        return {
            "novel_accuracy": 100 * float(right[new].mean()),
            "pretrained_accuracy": 100 * float(right[~new].mean()),
            "scarce_accuracy": 100 * float(right[rare].mean()),
            "accuracy": 100 * float(right.mean()),
            "loss": float(F.nll_loss(answers, labels)),
        }


def follow(
    learner: StreamLearner, epochs: float, folder: RunFolder, title: str, progress: Progress
) -> list[dict[str, float]]:
    """Go through the stream, and return the scores at each of the `points`; resume where a killed process was."""
    moments = points(epochs)
    curve: list[dict[str, float]] = resume(folder, {"curve": [], "result": None})["curve"]
    progress.start(title, len(moments), len(curve))
    seconds = curve[-1]["seconds"] if curve else 0.0
    for index, moment in enumerate(moments):
        began = time.monotonic()
        learner.learn(round(moment * learner.steps))
        if index < len(curve):
            continue
        scores = learner.scores("test")
        seconds += time.monotonic() - began
        curve.append({"epoch": index, "passes": moment, "step": learner.step, "seconds": seconds, **scores})
        folder.append({"kind": "epoch", **curve[-1]})
        folder.save({"curve": curve, "result": None})
        progress.update(index + 1, scores["loss"])
    return curve


def finish(learner: StreamLearner, curve: list[dict[str, float]], folder: RunFolder, progress: Progress) -> None:
    """Write the result of a stream that was followed to its end, with the scores that `follow` returned."""
    validation = learner.scores("validation")
    result = {
        "kind": "result",
        "epoch": curve[-1]["epoch"],
        "steps": learner.step,
        "validation_loss": validation["loss"],
        "validation_error": 100 - validation["accuracy"],
        "test_loss": curve[-1]["loss"],
        "test_error": 100 - curve[-1]["accuracy"],
        "parameters": sum(parameter.numel() for parameter in learner.head.parameters()),
        "seconds": curve[-1]["seconds"],
    }
    folder.append(result)
    folder.save({"curve": curve, "result": result})
    progress.note(f"test error {result['test_error']:.2f} %")


def write_picture(path: Path, learner: StreamLearner, data: Images) -> None:
    """Draw figure 5, right: the query of a new class that MbPA alone names rightly, and its neighbours.

    Of several such queries it is the one whose answer MbPA improves most; where there is none, nothing is drawn.

    Args:
        path: the PNG file to write.
        stream: that of MbPA, as far as it has come.
        data: the images that the stream was made from.

    Raises:
        RunError: the disk refuses.
    """
    from matplotlib.figure import Figure

    answers, query = _choose_query(learner)
    if query is None:
        return
    inputs, labels = learner.parts["test"]
    names = [data.names[index] for index in order_classes(data, learner.seed)]
    nearest = learner.store.search(inputs[query : query + 1], min(_DRAWN, learner.method.neighbours))
    # Each embedding in the memory is that of an image that was shown.
    places = torch.cdist(
        nearest.keys[0], learner.parts["train"][0], compute_mode="donot_use_mm_for_euclid_dist"
    ).argmin(1)
    pixels = {part: data.images[data.part == PARTS.index(part)] for part in ("train", "test")}
    figure = Figure(figsize=(9, 4), facecolor="white", layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    above, below = halves
    name = names[int(labels[query])]
    image, axes = above.subplots(1, 2, width_ratios=(1, 2))
    _draw(image, pixels["test"][query], f"to be named: {name}", 9)
    axes.barh(list(answers), [float(answer[query, labels[query]]) for answer in answers.values()], color=COLOURS[0])
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"probability of {name}")
    cells = below.subplots(2, _DRAWN // 2).flat
    for place, value, cell in zip(places.tolist(), nearest.values[0].tolist(), cells, strict=False):
        _draw(cell, pixels["train"][place], names[value], 6)
    for cell in cells:  # these rows have fewer neighbours
        cell.axis("off")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    try:
        write_files({path: buffer.getvalue()})
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; choose another --output") from error


@torch.no_grad()
def _choose_query(learner: StreamLearner) -> tuple[dict[str, Tensor], int | None]:
    """Return the answers of each method to the test's images, and the index of the image to draw."""
    inputs, labels = learner.parts["test"]
    parametric = learner.head(inputs).softmax(1)
    remembered = attend(learner.store.search(inputs, learner.method.neighbours), learner.classes).to(parametric.dtype)
    share = learner.method.mixing
    answers = {"MbPA": learner.log_probs(inputs).exp(), "mixture": share * parametric + (1 - share) * remembered}
    answers["model"] = parametric
    right = {name: answer.argmax(1) == labels for name, answer in answers.items()}
    gain = (answers["MbPA"] - parametric).gather(1, labels.unsqueeze(1)).squeeze(1)
    gain[~right["MbPA"] | right["model"] | right["mixture"] | (labels < learner.old)] = -1
    query = int(gain.argmax())
    return answers, query if gain[query] > 0 else None


def _draw(axes: "Axes", image: Tensor, title: str, size: int) -> None:
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.set_title(title, fontsize=size, parse_math=False)
    axes.axis("off")
