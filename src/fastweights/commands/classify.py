"""`fastweights classify`: folders of images in, one line an image out."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fastweights.few_shot.classifier import FewShotClassifier
from fastweights.tasks import image_folder

_ESCAPED = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})  # a name with one of them stays one field of a line


def classify(described: Path, images: Sequence[Path], weights: str, *, resize: bool) -> None:
    """Print the file, the class and its probability of each image, described by the folders of `described`."""
    # The shell leaves a ~ after `--described=`. That of an unknown user stays, and is reported as a missing file.
    described, *images = (Path(os.path.expanduser(path)) for path in (described, *images))
    by_class = image_folder.files(described)
    folders = [path for path in images if path.is_dir()]
    asked = [file for path in images for file in (image_folder.images_in(path) if path in folders else [path])]
    _warn_of_others(described, [*(described / name for name in by_class), *folders])
    classifier = FewShotClassifier.load(weights)
    labels = [label for label, paths in by_class.items() for _ in paths]
    classifier.describe([path for paths in by_class.values() for path in paths], labels, resize=resize)
    answers = classifier.predict(asked, resize=resize)
    for path, label, probability in zip(asked, answers.labels, answers.probabilities.amax(1).tolist(), strict=True):
        print(f"{str(path).translate(_ESCAPED)}\t{label.translate(_ESCAPED)}\t{probability:.3f}")


def _warn_of_others(described: Path, folders: Sequence[Path]) -> None:
    """Report on standard error which files are not read, so that nobody looks for them among the answers."""
    others = sorted(path for path in described.iterdir() if path.is_file() and not path.name.startswith("."))
    others += [path for folder in folders for path in image_folder.list_unread(folder)]
    if others:
        print(
            f"fastweights: passed over {len(others)} of the files and folders, such as {others[0]}: of a folder, the "
            f"files in it that end in {', '.join(image_folder.SUFFIXES)} are read; of {described}, those in its "
            "folders",
            file=sys.stderr,
        )
