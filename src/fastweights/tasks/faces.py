"""Faces and their expressions, 48 x 48 grey pixels: FER2013, and CMU Multi-PIE as in Ba et al. 2016, section 4.3.

FER2013 (Goodfellow et al. 2013, "Challenges in representation learning") is free to look at and unaligned. Multi-PIE
(Gross et al. 2010) is licensed, and comes as a folder of its own; its faces have to be aligned before.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_choice, check_integers, check_sizes
from fastweights.errors import DataError
from fastweights.folders import find_files
from fastweights.tasks import datasets
from fastweights.tasks._archives import read_images
from fastweights.tasks._packed import Arrays, load_or_make
from fastweights.tasks.image_files import photograph, read_image

SIDE = 48  # pixels
PARTS = ("train", "validation", "test")

_FER2013_PARTS = ("Training", "PublicTest", "PrivateTest")
_FORMAT = 1  # version of the packed file: another number leaves older files alone

EXPRESSIONS = ("neutral", "smile", "surprise", "squint", "disgust", "scream")  # Multi-PIE's expressions
# By session and recording: in the first, people were neutral, then smiled.
_EXPRESSION = {
    ("01", "01"): 0, ("01", "02"): 1,
    ("02", "01"): 0, ("02", "02"): 2, ("02", "03"): 3,
    ("03", "01"): 0, ("03", "02"): 1, ("03", "03"): 4,
    ("04", "01"): 0, ("04", "02"): 0, ("04", "03"): 5,
}  # fmt: skip
_CAMERAS = ("050", "051", "140")  # the three central ones, at -15, 0 and 15 degrees
_NAME = re.compile(r"(\d{3})_(0\d)_(0\d)_(\d{3})_(\d{2})\.(?:png|jpg)")  # identity, session, recording, camera, light


class Faces(NamedTuple):
    """Faces, what they express, and which part each is of."""

    images: Tensor  # [N, 48, 48], uint8
    labels: Tensor  # [N], int64: which of the names
    parts: Tensor  # [N], int64: which of `PARTS`: 0 to learn from, 1 to validate on, 2 to test on
    names: list[str]  # names of the expressions

    def part(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the images [n, 48, 48] and labels [n] of a part: "train", "validation" or "test".

        Raises:
            ValueError: there is no such part.
        """
        check_choice(PARTS, part=name)
        chosen = self.parts == PARTS.index(name)
        return self.images[chosen], self.labels[chosen]


def load_fer2013(data_dir: str | os.PathLike[str] | None = None) -> Faces:
    """Load FER2013: 35,887 faces of seven expressions, found by a search engine.

    They are looked for as `datasets.get` does. The public test of the challenge is for validation, the private one for
    the test. Some pictures are in it several times: those of the training part that are in another part too, and those
    of the validation part that are in the test, are left out here. The first call decodes the archive and packs it into
    the user's cache.

    Shapes: images [35138, 48, 48] uint8, labels and parts [35138] int64.

    Raises:
        DataError: as `datasets.get`, or the archive is damaged or has a member that is no such face.

    Examples:
        >>> from fastweights.tasks import faces
        >>> data = faces.load_fer2013("/data")  # doctest: +SKIP
        >>> data.names  # doctest: +SKIP
        ['angry', 'disgust', 'fear', 'happy', 'neutral', 'sad', 'surprise']
    """
    archive = datasets.get("fer2013", data_dir) / datasets.DATASETS["fer2013"].files[0].name
    fields = ("images", "labels", "parts", "names")
    arrays = load_or_make(f"fer2013-{_FORMAT}", fields, [archive], lambda: _decode(archive))
    images, labels, parts = (torch.from_numpy(arrays[name]) for name in fields[:3])
    return Faces(images, labels, parts, arrays["names"].tolist())


def load_multi_pie(
    folder: str | os.PathLike[str], *, test_identities: int = 20, validation_identities: int = 20, seed: int = 0
) -> Faces:
    """Load the near frontal faces of a folder of CMU Multi-PIE: three central cameras, six expressions, all lights.

    Every file under the folder that has a name of Multi-PIE, such as `001_01_01_051_07.png` (identity, session,
    recording, camera, light), and from cameras 05_0, 05_1 or 14_0, is read: its middle square at 48 x 48 pixels, grey.
    Files of other names are passed over. The paper aligned faces by eyes and nose: crop them so before.

    Identities are split, so that nobody in the test was in training: 317 for training and 20 for the test, as in
    the paper, if all 337 are there. We part another 20 from the 317 to choose the epoch by.

    Args:
        folder: with the images, in folders of any depth.
        test_identities: people to test on.
        validation_identities: people to validate on.
        seed: of the choice of people.

    Raises:
        DataError: there is no such folder, it has too few identities, or an image is damaged.
        ValueError: a number of identities is less than 1, or the seed negative.

    Examples:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> from fastweights.tasks import faces
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for person in ("001", "002", "003"):
        ...     Image.new("L", (60, 60)).save(root / f"{person}_02_02_051_00.png")
        >>> data = faces.load_multi_pie(root, test_identities=1, validation_identities=1)
        >>> data.images.shape, data.names[data.labels[0]], sorted(data.parts.tolist())
        (torch.Size([3, 48, 48]), 'surprise', [0, 1, 2])
    """
    check_sizes(test_identities=test_identities, validation_identities=validation_identities)
    check_integers(0, seed=seed)
    root = Path(os.path.expanduser(folder))
    if not root.is_dir():
        raise DataError(
            f"{root} is not a folder: give one that has the images of Multi-PIE, such as 001_01_01_051_07.png"
        )
    found = sorted(_find_near_frontal(root))
    people = sorted({person for _, person, _ in found})
    held_out = test_identities + validation_identities
    if len(people) <= held_out:
        raise DataError(
            f"{root} has near frontal faces of {len(people)} identities in {len(found):,} images with names of "
            f"Multi-PIE: more than {held_out} are needed, {test_identities} to test and {validation_identities} to "
            "validate on"
        )
    order = np.random.default_rng(seed).permutation(people)
    part_of = {person: 2 if place < test_identities else int(place < held_out) for place, person in enumerate(order)}
    images = torch.empty(len(found), SIDE, SIDE, dtype=torch.uint8)
    for index, (path, _, _) in enumerate(found):
        images[index] = photograph(read_image(path, DataError).convert("L"), SIDE)[0]
    labels = torch.tensor([label for _, _, label in found])
    return Faces(images, labels, torch.tensor([part_of[person] for _, person, _ in found]), list(EXPRESSIONS))


def _find_near_frontal(root: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield the path, the identity and the expression of each image of a central camera."""
    for path in find_files(root, "**/*_*_*_*_*.*"):
        name = _NAME.fullmatch(path.name.lower())
        if name and name[4] in _CAMERAS and (name[2], name[3]) in _EXPRESSION:
            yield path, name[1], _EXPRESSION[name[2], name[3]]


def _decode(archive: Path) -> Arrays:
    """Return the arrays to pack: the fields of `Faces`."""
    members: list[tuple[int, str, str, bytes]] = []  # part, name, expression, pixels
    try:
        for member, pixels in read_images(archive, SIDE):
            part, _, rest = member.partition("/")
            if part not in _FER2013_PARTS or rest.count("/") != 1:
                raise DataError(f"its member {member!r} is not named like a face, such as Training/happy/1.jpg")
            members.append((_FER2013_PARTS.index(part), member, rest.partition("/")[0], pixels.tobytes()))
    except DataError as error:
        raise DataError(f"{archive}: {error}; expected FER2013 as Training/, PublicTest/ and PrivateTest/") from error
    last = {pixels: part for part, *_, pixels in sorted(members)}  # the last part that a picture is in
    faces = [face for face in sorted(members) if last[face[3]] == face[0]]
    names = sorted({name for _, _, name, _ in faces})
    return {
        "images": np.frombuffer(b"".join(pixels for *_, pixels in faces), np.uint8).reshape(-1, SIDE, SIDE).copy(),
        "labels": np.array([names.index(name) for _, _, name, _ in faces], np.int64),
        "parts": np.array([part for part, *_ in faces], np.int64),
        "names": np.array(names),
    }
