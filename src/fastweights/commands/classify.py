"""`fastweights classify`: folders of images in, one line an image out."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fastweights.errors import ExamplesError, FastWeightsError
from fastweights.few_shot.classifier import FewShotClassifier
from fastweights.few_shot.images import read_pixels
from fastweights.tasks import image_folder

_ESCAPED = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})  # a name with one of them stays one field of a line


def classify(described: Path, images: Sequence[Path], weights: str, *, resize: bool) -> None:
    """Print the file, the class and its probability of each image, described by the folders of `described`."""
    # The shell leaves a ~ after `--described=`. That of an unknown user stays, and is reported as a missing file.
    described, *images = (Path(os.path.expanduser(path)) for path in (described, *images))
    if not described.is_dir():
        raise FastWeightsError(
            f"--described {described} is not a folder: give one that has a folder of images for each class"
        )
    by_class = image_folder.files(described)
    folders = [path for path in images if path.is_dir()]
    asked = [file for path in images for file in (image_folder.images_in(path) if path in folders else [path])]
    unread = image_folder.tell_unread([*(described / name for name in by_class), *folders])
    for words in filter(None, (image_folder.tell_loose(described), unread)):
        print(f"fastweights: left out: {words}", file=sys.stderr)
    classifier = FewShotClassifier.load(weights)
    refused: list[str] = []
    examples, labels = [], []
    for label, paths in by_class.items():
        read = _keep_readable(paths, classifier, refused, resize=resize)
        if not read:
            raise FastWeightsError(
                f"{label} has no image that can be read: {image_folder.list_refused(refused[-len(paths) :])}"
            )
        examples += read
        labels += [label] * len(read)
    classifier.describe(examples, labels, resize=resize)
    if asked := _keep_readable(asked, classifier, refused, resize=resize):
        answers = classifier.predict(asked, resize=resize)
        for path, label, sure in zip(asked, answers.labels, answers.probabilities.amax(1).tolist(), strict=True):
            print(f"{str(path).translate(_ESCAPED)}\t{label.translate(_ESCAPED)}\t{sure:.3f}")
    if refused:
        raise FastWeightsError(f"left out: {image_folder.list_refused(refused)}")


def _keep_readable(
    paths: Sequence[Path], classifier: FewShotClassifier, refused: list[str], *, resize: bool
) -> list[Path]:
    """Return the images that can be read; why others cannot goes to `refused`."""
    read = []
    for path in paths:
        try:
            read_pixels([path], classifier.kind, resize=resize)
            read.append(path)
        except ExamplesError as error:
            refused.append(str(error))
    return read
