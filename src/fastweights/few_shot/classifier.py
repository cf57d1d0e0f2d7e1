"""The classifier: describe the classes, then predict."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_sizes
from fastweights.errors import ExamplesError, WeightsError
from fastweights.few_shot import saved
from fastweights.few_shot.images import Kind, counted, pixels
from fastweights.nn import FewShotNetwork, MatchingHead
from fastweights.nn.modes import evaluating


class Predictions(NamedTuple):
    """What a classifier answers."""

    labels: list[Any]  # of the most probable class of each image, as the user gave them
    probabilities: Tensor  # [N,classes], in the order of `FewShotClassifier.classes`


class FewShotClassifier:
    """A trained few-shot network in use: show it a few examples of each class, and it tells others apart.

    Describing trains nothing: it writes the fast weights anew, and what was described before is forgotten. The
    published `"omniglot"` is the Hebbian network of Munkhdalai & Trischler 2018, table 1, for up to 30 classes of
    handwritten characters.

    The fast weights are a sum over the examples, M = sum_i k_i v_i^T (eq 2), in which a class with more of them than
    the others would outshout these. So all classes count alike: the mean of a class's examples stands for it, `shots`
    times. Matching Networks compare with the examples themselves where all classes have equally many.

    Args:
        network: an `nn.FewShotNetwork`; it is used as it is, in evaluation mode.
        shots: examples of a class that it was trained with.
        ink: it was trained on drawings, with ink as 1 on paper that is 0; image files, which have dark ink on light
            paper, are then turned over.
        trained_on: what it was trained on, in words.
        licence: of its weights, in words.

    Raises:
        ValueError: `shots` is less than 1 or more than 100,000, or `ink`, `trained_on` or `licence` of another type, or
            the network has parts that cannot be saved: its encoder must be an `nn.ConvEncoder` or an
            `nn.ResidualEncoder`, and its head an `nn.FastWeightsHead`, an `nn.MatchingHead` or an `nn.PrototypeHead`.

    Examples:
        >>> import torch
        >>> import fastweights
        >>> classifier = fastweights.FewShotClassifier.load("omniglot")
        >>> drawings = torch.zeros(3, 1, 28, 28)  # ink is 1, paper 0
        >>> drawings[0, :, 4:24, 13:15] = 1
        >>> drawings[1, :, 13:15, 4:24] = 1
        >>> drawings[2] = drawings[0].roll(2, -1)
        >>> classifier.describe(drawings[:2], ["upright", "level"])
        >>> found = classifier.predict(drawings[2:])
        >>> found.labels, classifier.classes, found.probabilities.shape
        (['upright'], ['level', 'upright'], torch.Size([1, 2]))
    """

    def __init__(
        self, network: FewShotNetwork, *, shots: int, ink: bool = False, trained_on: str = "", licence: str = ""
    ) -> None:
        check_sizes(shots=shots)
        encoder = saved.built_of(network)["encoder"]
        saved.check_about({"shots": shots, "ink": ink, "trained_on": trained_on, "licence": licence})
        self.network, self.shots, self.ink = network, shots, ink
        self.trained_on, self.licence = trained_on, licence
        self._kind = Kind(encoder["channels"], encoder["size"], ink)
        self._classes: list[Any] = []
        self._memory: Any = None

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> "FewShotClassifier":
        """Load a classifier that comes with the package, by its name ("omniglot"), or that `save` wrote, by its path.

        It computes in float32 on the CPU until it is moved; nothing in the file is executed.

        Raises:
            WeightsError: there is none of that name, or the file is missing, damaged or no classifier.
        """
        network, about = saved.load(name)
        return cls(network, **about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network to a .safetensors file, without what was described; it is written beside and renamed.

        Raises:
            WeightsError: the name ends in something else, a weight is not finite, or the disk refuses.
        """
        about = {"shots": self.shots, "ink": self.ink, "trained_on": self.trained_on, "licence": self.licence}
        saved.save(path, self.network, about)

    @property
    def num_classes(self) -> int:
        """The most classes that can be described."""
        return self.network.num_classes

    @property
    def classes(self) -> list[Any]:
        """The labels that were described, in the order of the columns of the probabilities; empty before."""
        return list(self._classes)

    def describe(self, images: Any, labels: Any, *, resize: bool = False) -> None:
        """Learn classes from labelled images; what was described before is forgotten, unless these are refused.

        The order of the images does not matter.

        Args:
            images: [N,channels,size,size], a tensor or an array, uint8 or floating point of 0 to 1; or a list of image
                files.
            labels: one an image: strings, or integers of 0 and up without gaps.
            resize: bring files of another size to the network's by the mean over areas, a drawing on paper made square
                and of any other image the middle square, and make files in colour grey for a network that takes grey.

        Raises:
            ExamplesError: another size, mode, range or dtype, a file that cannot be read or is blank, labels with gaps
                or of another number than the images, one class alone, or more classes than the network has columns.
            WeightsError: the network answers NaN or infinity.
        """
        images = counted(images)
        classes, columns = _columns(labels, len(images), self.num_classes)
        checked = pixels(images, self._kind, resize=resize)
        with evaluating(self.network), torch.no_grad():
            features = self._features(checked)
            each = isinstance(self.network.head, MatchingHead)
            described, targets = _evened(features, columns.to(features.device), len(classes), self.shots, each=each)
            memory = self.network.head.describe(described[None], targets[None])
        self._classes, self._memory = classes, memory

    def predict(self, images: Any, *, resize: bool = False) -> Predictions:
        """Tell which of the described classes images are of; arguments as those of `describe`.

        Shapes: probabilities [N,classes].

        Raises:
            ExamplesError: nothing was described, or as `describe`.
            WeightsError: as `describe`.
        """
        if not self._classes:
            raise ExamplesError("no class has been described: call describe(images, labels) first")
        checked = pixels(counted(images), self._kind, resize=resize)
        with evaluating(self.network), torch.no_grad():
            features = self._features(checked)
            logits = self.network.head.predict(features[None], self._memory)[0]
            # A column without a class has a logit too.
            probabilities = logits[:, : len(self._classes)].softmax(-1)
            _require_finite(probabilities)
        return Predictions([self._classes[column] for column in probabilities.argmax(-1).tolist()], probabilities)

    def to(self, device: Any) -> "FewShotClassifier":
        """Move the network and what was described, such as to "cuda"; images may be anywhere."""
        self.network.to(device)
        if self._memory is not None:
            self._memory = type(self._memory)(*(self._moved(tensor, device) for tensor in self._memory))
        return self

    def _moved(self, tensor: Tensor | None, device: Any) -> Tensor | None:
        """As a module's buffers are: a dtype is of floating point alone, and not of labels."""
        return tensor if tensor is None else tensor.to(device if tensor.is_floating_point() else self._device)

    def _features(self, images: Tensor) -> Tensor:
        features = self.network.features(images.to(self._device))
        _require_finite(features)
        return features

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    def __repr__(self) -> str:
        described = f"described: {', '.join(map(str, self._classes))}" if self._classes else "nothing described"
        shape = f"[{self._kind.channels},{self._kind.size},{self._kind.size}]"
        trained = f", trained on {self.trained_on}" if self.trained_on else ""
        return f"FewShotClassifier(images {shape}, up to {self.num_classes} classes{trained}; {described})"


def _require_finite(answers: Tensor) -> None:
    if not bool(answers.isfinite().all()):
        raise WeightsError("the network answers NaN or infinity: its weights are damaged, or were trained so")


def _columns(labels: Any, images: int, most: int) -> tuple[list[Any], Tensor]:
    """The classes in order, and which of them each image is of [N]."""
    if isinstance(labels, Tensor | np.ndarray):
        labels = labels.tolist()
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence):
        raise ExamplesError(f"labels must be a list of strings, or of integers of 0 and up; got {labels!r}")
    if len(labels) != images:
        raise ExamplesError(f"there must be one label an image, got {len(labels)} labels and {images} images")
    kinds = {str if isinstance(one, str) else int if _is_integer(one) else type(one) for one in labels}
    if kinds not in ({str}, {int}):
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ExamplesError(f"labels must be strings, or integers of 0 and up; got {named}")
    classes = sorted(set(labels))
    if kinds == {int} and classes != list(range(len(classes))):
        if classes[0] < 0:
            raise ExamplesError(f"labels must be integers of 0 and up, got {classes[0]}")
        gap = next(index for index, label in enumerate(classes) if index != label)
        raise ExamplesError(f"class {gap} has no example: labels must be 0 to {classes[-1]}, without gaps")
    if len(classes) < 2:
        raise ExamplesError(f"at least 2 classes must be described, got {classes[0]!r} alone")
    if len(classes) > most:
        raise ExamplesError(f"the network has columns for {most} classes at most, got {len(classes)}")
    columns = {label: column for column, label in enumerate(classes)}
    return classes, torch.tensor([columns[label] for label in labels])


def _is_integer(label: Any) -> bool:
    return isinstance(label, int | np.integer) and not isinstance(label, bool)


def _evened(features: Tensor, columns: Tensor, classes: int, shots: int, *, each: bool) -> tuple[Tensor, Tensor]:
    """Equally many features of every class [n,D] and their columns [n], of features [N,D] and their columns [N].

    A class's mean stands for it as many times as it had examples in training: a sum of more would be surer of itself
    than it is right. `each`: the examples themselves where all have equally many, to a head that compares with each.
    """
    own = [features[columns == column] for column in range(classes)]
    if not each or len({len(found) for found in own}) > 1:
        own = [found.mean(0).expand(shots, -1) for found in own]
    return torch.cat(own), torch.arange(classes, device=features.device).repeat_interleave(len(own[0]))
