"""The classifier: describe the classes, then predict."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from fastweights.checks import check_sizes
from fastweights.errors import ExamplesError, WeightsError
from fastweights.few_shot.encoders import ConvEncoder, ResidualEncoder
from fastweights.few_shot.fast_weights_head import FastWeightsHead
from fastweights.few_shot.images import Kind, read_pixels
from fastweights.few_shot.metric_heads import MatchingHead, PrototypeHead
from fastweights.few_shot.network import FewShotNetwork
from fastweights.nn.modes import evaluating
from fastweights.pretrained import Pretrained, find_published, is_description, load_model

_ENCODERS = (ConvEncoder, ResidualEncoder)
_HEADS = (FastWeightsHead, MatchingHead, PrototypeHead)
_MOST = 100_000  # the largest number of shots


class Predictions(NamedTuple):
    """The answers of a classifier for N images."""

    labels: list[Any]  # for each image, the label under which its most probable class was described
    probabilities: Tensor  # [N,classes], in the order of `FewShotClassifier.classes`


class FewShotClassifier(Pretrained):
    """A trained few-shot network in use: describe each class by a few examples, and it predicts the classes of others.

    Describing trains nothing: it writes the fast weights anew, and forgets the earlier description. The
    published `"omniglot"` is the Hebbian network of Munkhdalai & Trischler 2018, table 1, for up to 30 classes of
    handwritten characters.

    The fast weights are a sum over the examples, M = sum_i k_i v_i^T (eq 2), in which a class with more
    examples than the others would outweigh them. So all classes count alike: each is written `shots` times as the mean
    of its examples. Matching Networks compare with the examples themselves where all classes have equally many.

    Args:
        network: a `FewShotNetwork`; it is used as it is, in evaluation mode.
        shots: the number of examples of a class in the network's training.
        ink: True for a network that was trained on drawings with ink 1 on paper 0; image files, most of which have dark
            ink on light paper, are then inverted where their border is bright.
        trained_on: the training data, in words.
        licence: the licence of its weights, in words.

    Raises:
        ValueError: `shots` is less than 1 or more than 100,000, `ink`, `trained_on` or `licence` has another type, or
            the network has parts that cannot be saved: its encoder must be a `ConvEncoder` or a `ResidualEncoder`,
            and its head a `FastWeightsHead`, a `MatchingHead` or a `PrototypeHead`.

    Examples:
        >>> import torch
        >>> import fastweights
        >>> classifier = fastweights.FewShotClassifier.load("omniglot")
        >>> drawings = torch.zeros(3, 1, 28, 28)  # ink is 1, paper 0
        >>> drawings[0, :, 4:24, 13:15] = 1
        >>> drawings[1, :, 13:15, 4:24] = 1
        >>> drawings[2] = drawings[0].roll(2, -1)
        >>> classifier.describe(drawings[:2], ["upright", "level"])
        >>> answers = classifier.predict(drawings[2:])
        >>> answers.labels, classifier.classes, answers.probabilities.shape
        (['upright'], ['level', 'upright'], torch.Size([1, 2]))
    """

    def __init__(
        self, network: FewShotNetwork, *, shots: int, ink: bool = False, trained_on: str = "", licence: str = ""
    ) -> None:
        check_sizes(shots=shots)
        if shots > _MOST or type(ink) is not bool or type(trained_on) is not str or type(licence) is not str:
            raise ValueError(
                f"shots must be 1 to {_MOST:,}, ink a bool, trained_on and licence words; got {shots=}, {ink=}, "
                f"{trained_on=}, {licence=}"
            )
        _check_network(network)
        self.network, self.shots, self.ink = network, shots, ink
        self.trained_on, self.licence = trained_on, licence
        encoder: Any = network.encoder
        self.kind = Kind(encoder.channels, encoder.size, ink)
        self._classes: list[Any] = []
        self._memory: Any = None

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Self:
        """Load a classifier as `from_pretrained` does, or from a single file, which is what `save` once wrote.

        Nothing in the files is executed. It computes on the CPU until it is moved.

        Args:
            name: "omniglot", which comes with the package, a folder, or "owner/name" on a hub.

        Raises:
            WeightsError: there is none of that name, or it is damaged or no classifier.
            HubError: as `from_pretrained`.
        """
        path = Path(name).expanduser()
        if path.is_file():
            return load_model(cls, _read_description(path), path)
        if not path.is_dir() and path.name == str(name) and not find_published(name):
            raise WeightsError(f"there is no classifier {str(name)!r}: give omniglot, a folder, or owner/name on a hub")
        return cls.from_pretrained(name)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the network to a folder, as `save_pretrained` does, without what was described.

        Raises:
            WeightsError: the disk refuses.
        """
        self.save_pretrained(folder)

    def _weighted(self) -> nn.Module:
        return self.network

    @property
    def num_classes(self) -> int:
        """The largest number of classes that can be described."""
        return int(self.network.head.num_classes)

    @property
    def classes(self) -> list[Any]:
        """The labels that were described, in the order of the columns of the probabilities; empty before."""
        return list(self._classes)

    def describe(self, images: Any, labels: Any, *, resize: bool = False) -> None:
        """Learn classes from labelled images, in place of those described before; refused images change nothing.

        The order of the images does not matter.

        Args:
            images: [N,channels,size,size], a tensor or an array, uint8 or floating point of 0 to 1; or a list of image
                files or of images of PIL.
            labels: one an image: strings, or integers of 0 and up.
            resize: resize files of another size to the network's: a drawing is made square first, any other image is
                cut to its middle square; colour is made grey for a network that takes grey.

        Raises:
            ExamplesError: another size, mode, range or dtype, a file that cannot be read or is blank, labels
                below 0 or of another number than the images, one class alone, or more classes than the network has
                columns.
            WeightsError: the network answers NaN or infinity.
        """
        pixels = read_pixels(images, self.kind, resize=resize)
        classes, columns = _number_classes(labels, len(pixels), self.num_classes)
        pixels, columns = pixels.to(self._device), columns.to(self._device)
        with evaluating(self.network), torch.no_grad():
            features = self.network.features(pixels)
            _require_finite(features)
            each = isinstance(self.network.head, MatchingHead)
            described, targets = _even_out(features, columns, len(classes), self.shots, each=each)
            memory = self.network.head.describe(described[None], targets[None])
        self._classes, self._memory = classes, memory

    def predict(self, images: Any, *, resize: bool = False) -> Predictions:
        """Predict the classes of images; images and `resize` are as `describe` takes them.

        Shapes: probabilities [N,classes].

        Raises:
            ExamplesError: nothing was described, or as `describe`.
            WeightsError: the network answers NaN or infinity.
        """
        if not self._classes:
            raise ExamplesError("no class has been described: call describe(images, labels) first")
        pixels = read_pixels(images, self.kind, resize=resize).to(self._device)
        with evaluating(self.network), torch.no_grad():
            features = self.network.features(pixels)
            _require_finite(features)
            logits = self.network.head.predict(features[None], self._memory)[0]
            # The columns without a class have logits too.
            probabilities = logits[:, : len(self._classes)].softmax(-1)
            _require_finite(probabilities)
            labels = [self._classes[column] for column in probabilities.argmax(-1).tolist()]
        return Predictions(labels, probabilities)

    def to(self, device: Any) -> "FewShotClassifier":
        """Move the network and the description to a device, such as "cuda"; images may be anywhere."""
        self.network.to(device)
        if self._memory is not None:
            self._memory = type(self._memory)(*(self._move(tensor, device) for tensor in self._memory))
        return self

    def _move(self, tensor: Tensor | None, device: Any) -> Tensor | None:
        """Return the tensor moved as a module's buffers are: a dtype applies to floating point alone, not to labels."""
        return tensor if tensor is None else tensor.to(device if tensor.is_floating_point() else self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    def __repr__(self) -> str:
        described = f"described: {', '.join(map(str, self._classes))}" if self._classes else "nothing described"
        shape = f"[{self.kind.channels},{self.kind.size},{self.kind.size}]"
        trained = f", trained on {self.trained_on}" if self.trained_on else ""
        return f"FewShotClassifier(images {shape}, up to {self.num_classes} classes{trained}; {described})"


def _check_network(network: nn.Module) -> None:
    """Refuse parts that cannot be saved and built again, or that do not fit one another."""
    encoder, head = (getattr(network, name, None) for name in ("encoder", "head"))
    if not (isinstance(network, FewShotNetwork) and isinstance(encoder, _ENCODERS) and isinstance(head, _HEADS)):
        encoders, heads = (", ".join(kind.__name__ for kind in kinds) for kinds in (_ENCODERS, _HEADS))
        raise ValueError(
            f"FewShotClassifier needs a FewShotNetwork whose encoder is one of {encoders} and whose head is one of "
            f"{heads}; got a {type(network).__name__} with {type(encoder).__name__} and {type(head).__name__}"
        )
    if isinstance(head, FastWeightsHead) and head.in_features != encoder.features:
        raise ValueError(
            f"the head must take the {encoder.features} features of the encoder, got in_features={head.in_features}"
        )


def _read_description(path: Path) -> dict[str, Any]:
    """Return how to build a classifier that `save` wrote as a single file: safetensors, whose metadata say it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            description: dict[str, Any] = json.loads((file.metadata() or {})["few_shot_classifier"])
    except (KeyError, OSError, RecursionError, SafetensorError, ValueError) as error:
        raise WeightsError(f"{path} is damaged, or not a classifier: FewShotClassifier.save writes them") from error
    if not is_description(description):
        raise WeightsError(f"{path} is not a classifier that this version reads: save it again as a folder")
    return description


def _require_finite(answers: Tensor) -> None:
    if not bool(answers.isfinite().all()):
        raise WeightsError("the network returned NaN or infinity: check its weights")


def _number_classes(labels: Any, images: int, most: int) -> tuple[list[Any], Tensor]:
    """Return the classes in order, and the index of each image's class [N]."""
    if isinstance(labels, Tensor):
        labels = labels.tolist()
    elif hasattr(labels, "__array__"):  # such as a column of pandas
        labels = np.asarray(labels).tolist()
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence):
        raise ExamplesError(f"labels must be a list of strings, or of integers of 0 and up; got {labels!r}")
    if len(labels) != images:
        raise ExamplesError(f"there must be one label for each image, got {len(labels)} labels and {images} images")
    kinds = {str if isinstance(one, str) else int if _is_integer(one) else type(one) for one in labels}
    if kinds not in ({str}, {int}):
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ExamplesError(f"labels must be strings, or integers of 0 and up; got {named}")
    classes = sorted(set(labels))
    if kinds == {int} and classes[0] < 0:
        raise ExamplesError(f"labels must be integers of 0 and up, got {classes[0]}")
    if len(classes) < 2:
        raise ExamplesError(f"at least 2 classes must be described, got {classes[0]!r} alone")
    if len(classes) > most:
        raise ExamplesError(f"the network takes at most {most} classes, got {len(classes)}")
    columns = {label: column for column, label in enumerate(classes)}
    return classes, torch.tensor([columns[label] for label in labels])


def _is_integer(label: Any) -> bool:
    return isinstance(label, int | np.integer) and not isinstance(label, bool)


def _even_out(features: Tensor, columns: Tensor, classes: int, shots: int, *, each: bool) -> tuple[Tensor, Tensor]:
    """Return equally many features of every class [n,D] and their columns [n], from features [N,D] and columns [N].

    A class's mean stands for it as many times as it had examples in training: a sum of more would be surer
    than it is right. With `each`, for a head that compares with every example, the examples themselves are returned
    where all classes have equally many.
    """
    groups = [features[columns == column] for column in range(classes)]
    if not each or len({len(group) for group in groups}) > 1:
        groups = [group.mean(0).expand(shots, -1) for group in groups]
    return torch.cat(groups), torch.arange(classes, device=features.device).repeat_interleave(len(groups[0]))
