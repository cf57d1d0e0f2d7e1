"""A user's own images: a folder with one folder of images for each class, such as that of ImageNet's training set."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check_sizes
from fastweights.errors import DataError
from fastweights.tasks.image_files import HEIC, drawing, photograph, read_image

_TOLD = 20  # reasons in a line
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


class ImageFolder(NamedTuple):
    """Images and what they are of."""

    images: Tensor  # [N,channels,size,size], uint8: red, green and blue, or grey
    labels: Tensor  # [N], int64: which of the names
    names: list[str]  # names of the classes, those of the folders


def load(
    folder: str | os.PathLike[str], *, size: int = 84, most: int | None = None, ink: bool = False, channels: int = 3
) -> ImageFolder:
    """Load the images of FOLDER/CLASS/*, their middle squares at `size` x `size` pixels, class after class by name.

    Files are read as `FewShotClassifier` reads them: turned as a viewer turns them, what is transparent on white,
    pixels the means over areas. A warning names the images that cannot be read, and says how many files and folders
    are of other kinds; all of them are left out.

    Args:
        folder: one folder a class; hidden files and folders, and `__MACOSX`, do not count.
        size: pixels of a side.
        most: images of a class, the first by name; None for all. All are held in memory, channels * size * size bytes
            each.
        ink: they are drawings, which become ink that is 255 on paper that is 0: what most of an image is counts as
            paper. Images of up to 4 * size pixels a side are taken whole, made square with paper; out of larger ones
            the part with ink is cut.
        channels: 3 for red, green and blue, 1 for grey.

    Raises:
        DataError: there is no such folder, it has fewer than two classes, or a class has no image that can be read; a
            drawing that is blank, on uneven paper or mostly ink cannot be read either.
        ValueError: `size` or `most` is no integer of at least 1, or `channels` neither 1 nor 3.

    Examples:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> from fastweights.tasks import image_folder
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (root / name).mkdir()
        ...     Image.new("RGB", (120, 90), "red").save(root / name / "1.png")
        >>> data = image_folder.load(root, size=32)
        >>> data.images.shape, data.labels.tolist(), data.names
        (torch.Size([2, 3, 32, 32]), [0, 1], ['cat', 'dog'])
    """
    check_sizes(size=size, most=1 if most is None else most)
    if channels not in (1, 3):
        raise ValueError(f"channels must be 3, for red, green and blue, or 1, for grey; got {channels!r}")
    by_class = files(folder)
    images = torch.empty(sum(len(found[:most]) for found in by_class.values()), channels, size, size, dtype=torch.uint8)
    labels: list[int] = []
    refused: list[str] = []
    for label, (name, found) in enumerate(by_class.items()):
        before, many = len(labels), len(refused)
        for path in found:
            if len(labels) - before == most:
                break
            try:
                image = read_image(path, DataError)
                image = image.convert("L") if channels == 1 else image
                images[len(labels)] = drawing(image, size, path, DataError) if ink else photograph(image, size)
                labels.append(label)
            except DataError as error:
                refused.append(str(error))
        if len(labels) == before:
            raise DataError(f"{name} has no image that can be read: {list_refused(refused[many:])}")
    root = Path(os.path.expanduser(folder))
    told = [tell_loose(root), tell_unread([root / name for name in by_class])]
    if refused:
        told.append(list_refused(refused))
    if some := "; ".join(each for each in told if each):
        warnings.warn(f"left out: {some}", UserWarning, stacklevel=2)
    return ImageFolder(images[: len(labels)], torch.tensor(labels), list(by_class))


def files(folder: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """Return the paths of the images FOLDER/CLASS/*, by class and by name.

    Raises:
        DataError: there is no such folder, it has fewer than two classes, or a class has no image.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights.tasks import image_folder
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        ...     (root / name).parent.mkdir(exist_ok=True)
        ...     (root / name).touch()
        >>> {name: [path.name for path in paths] for name, paths in image_folder.files(root).items()}
        {'cat': ['1.png', '2.png'], 'dog': ['1.png']}
    """
    root = Path(os.path.expanduser(folder))
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give one that has a folder of images for each class")
    classes = sorted(path for path in _list_shown(root) if path.is_dir())
    if len(classes) < 2:
        raise DataError(
            f"{root} has a folder of images for {len(classes)} class{'' if len(classes) == 1 else 'es'}: at least two "
            "are needed"
        )
    return {path.name: images_in(path) for path in classes}


def images_in(folder: Path) -> list[Path]:
    """Return the images that lie in a folder itself, by name.

    Raises:
        DataError: there is none.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights.tasks import image_folder
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("b.png", "a.JPG", "notes.txt"):
        ...     (folder / name).touch()
        >>> [path.name for path in image_folder.images_in(folder)]
        ['a.JPG', 'b.png']
    """
    images = sorted(path for path in _list_shown(folder) if _is_image(path))
    if not images:
        raise DataError(
            f"{folder} has no image: its files should end in {', '.join(SUFFIXES)}{_tell_what_is_there(folder)}"
        )
    return images


def list_unread(folder: Path) -> list[Path]:
    """Return the files and folders of a folder, by name, that `images_in` leaves out; hidden ones do not count.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights.tasks import image_folder
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("a.png", "b.tiff", ".hidden"):
        ...     (folder / name).touch()
        >>> (folder / "more.png").mkdir()
        >>> [path.name for path in image_folder.list_unread(folder)]
        ['b.tiff', 'more.png']
    """
    return sorted(path for path in _list_shown(folder) if not _is_image(path))


def tell_loose(root: Path) -> str:
    """Return in words which files lie beside the folders of the classes; "" where there are none.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights.tasks import image_folder
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> (root / "a.png").touch()
        >>> image_folder.tell_loose(root).partition(", such")[0]
        '1 beside the folders of classes'
    """
    loose = sorted(path for path in _list_shown(root) if not path.is_dir())
    return f"{len(loose)} beside the folders of classes, such as {loose[0]}" if loose else ""


def tell_unread(folders: Sequence[Path]) -> str:
    """Return in words what `images_in` leaves out of folders; "" where that is nothing.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights.tasks import image_folder
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "b.heic").touch()
        >>> image_folder.tell_unread([folder]).partition(", such")[0]
        '1 file or folder'
    """
    others = [path for folder in folders for path in list_unread(folder)]
    if not others:
        return ""
    count = "1 file or folder" if len(others) == 1 else f"{len(others)} files and folders"
    return (
        f"{count}, such as {others[0]}: of a folder, the files in it itself that end in {', '.join(SUFFIXES)} are read"
        f"{_tell_heic(others)}"
    )


def list_refused(reasons: Sequence[str]) -> str:
    """Return in one line why images cannot be read, of the first twenty.

    Examples:
        >>> from fastweights.tasks import image_folder
        >>> image_folder.list_refused(["a.png is blank", "b.png is mostly ink"])
        '2 images cannot be read: a.png is blank; b.png is mostly ink'
    """
    count = "an image" if len(reasons) == 1 else f"{len(reasons)} images"
    more = f"; and {len(reasons) - _TOLD} more" if len(reasons) > _TOLD else ""
    return f"{count} cannot be read: {'; '.join(reasons[:_TOLD])}{more}"


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def _tell_heic(paths: Sequence[Path]) -> str:
    some = any(path.suffix.lower() in HEIC for path in paths)
    return " (save .heic files as .jpg or .png)" if some else ""


def _tell_what_is_there(folder: Path) -> str:
    """Return in words what a folder without images has in their place: files of other endings, images further down."""
    others = list_unread(folder)
    files_there = [path for path in others if not path.is_dir()]
    deeper = next((path for path in others if path.is_dir() and any(map(_is_image, _list_shown(path)))), None)
    words = ""
    if files_there:
        count = "1 has another ending" if len(files_there) == 1 else f"{len(files_there)} have other endings"
        words += f"; {count}, such as {files_there[0]}{_tell_heic(files_there)}"
    return words + (f"; images lie one folder deeper, such as in {deeper}" if deeper else "")


def _list_shown(folder: Path) -> list[Path]:
    # What macOS packs beside a folder, under the same names as the images, is none of the user's.
    return [path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "__MACOSX"]
