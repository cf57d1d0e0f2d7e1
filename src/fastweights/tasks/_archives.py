"""Data files known by their content: a digest that stays the same however a mirror has packed it."""

import contextlib
import gzip
import hashlib
import io
import lzma
import os
import stat
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import IO, TYPE_CHECKING, NamedTuple

from fastweights.errors import DataError, one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The largest set known here has 35,887 members, and the most that any unpacks to is 212 MB of pixels. Both bounds leave
# room for an honest set more than twice as large, and stop within seconds an archive that was made to fill memory.
MAX_MEMBERS = 100_000
MAX_BYTES = 2**29
MAX_PIXELS = 2**20

_CHUNK = 2**20
_ZIP_ENTRY = b"PK\x01\x02"
DAMAGED = (
    EOFError,
    OverflowError,
    RuntimeError,
    ValueError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


class Content(NamedTuple):
    """The content of a file: its sha256, and the number of bytes of a stream or members of an archive."""

    sha256: str
    size: int


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, and the content that it should have.

    >>> DataFile("labels.gz", 10008, "ff7bcfd4").expected
    '10,008 bytes, sha256 ff7bcfd4'
    """

    name: str
    size: int  # bytes of the decompressed stream, or members of an archive
    sha256: str  # hash of that stream, or of the archive's sorted (member name, sha256) pairs; empty if unknown
    url: str | None = None
    pixels: bool = False  # the members are PNG images, and their pixels are digested

    @property
    def expected(self) -> str:
        """The content that the file should have, in words."""
        if not self.sha256:
            return "what is checked when it is loaded"
        return self.describe(Content(self.sha256, self.size))

    def describe(self, content: Content) -> str:
        """Any content that a file of this name can have, in words."""
        unit = "members" if self.name.endswith((".zip", ".tar.xz")) else "bytes"
        return f"{content.size:,} {unit}, sha256 {content.sha256}"


@dataclass(frozen=True)
class FileCheck:
    """The expected and the actual content of one file.

    >>> check_file(Path("nowhere"), DataFile("words.txt", 3, "2c26b46b"))
    FileCheck(path=...Path('nowhere'), ok=False, expected='3 bytes, sha256 2c26b46b', found='missing')
    """

    path: Path
    ok: bool
    expected: str
    found: str


def check_file(path: Path, file: DataFile) -> FileCheck:
    """Compare what lies at `path` with what `file` should hold; `found` says what is wrong."""
    if not os.path.isfile(path):
        return FileCheck(path, False, file.expected, "missing")
    if not file.sha256:
        return FileCheck(path, True, file.expected, f"{path.stat().st_size:,} bytes, not looked into")
    try:
        content = read_content(path, file.name, pixels=file.pixels)
    except DataError as error:
        return FileCheck(path, False, file.expected, str(error))
    ok = content == (file.sha256, file.size)
    found = file.describe(content)
    return FileCheck(path, ok, file.expected, found if ok else f"wrong content: {found}")


def read_content(path: Path, name: str, *, pixels: bool = False) -> Content:
    """Read a whole data file and digest its content.

    The format follows from `name`, as a file that is still being downloaded has another name on disk. A stream is
    digested decompressed. An archive is digested as its sorted (member name, sha256 of the member) pairs, so that
    neither the order nor the compression counts; with `pixels`, each member is an image and its pixels are digested,
    since mirrors also repack the images themselves.

    Raises:
        DataError: the file is damaged, cannot be read, or is an archive that no honest mirror would have made.
    """
    with _one_kind_of_error():
        if name.endswith(".zip"):
            return _archive_content(_zip_members(path), pixels)
        if name.endswith(".tar.xz"):
            return _archive_content(_tar_members(path), pixels)
        digest, budget = hashlib.sha256(), _Budget()
        with _open_stream(path, name) as stream:
            for chunk in _chunks(stream, budget):
                digest.update(chunk)
        return Content(digest.hexdigest(), budget.spent)


def read_images(path: Path, side: int, *, colour: bool = False) -> "Iterator[tuple[str, NDArray[np.uint8]]]":
    """Yield the members of a zip of square PNG or JPEG images, by name and in the archive's order.

    Shapes: [side,side] uint8, where 0 is black, or [side,side,3], red, green and blue.

    Raises:
        DataError: as `read_content`, once the member that is wrong is reached, or an image has another size.
    """
    import numpy as np

    with _one_kind_of_error():
        budget = _Budget()
        for name, stream in _zip_members(path):
            image = _read_image(name, stream, budget, colour=colour)
            if (image.width, image.height) != (side, side):
                raise DataError(f"its member {name!r} has {image.width} x {image.height} pixels")
            pixels = np.frombuffer(bytearray(image.pixels), np.uint8)
            yield name, pixels.reshape((side, side, 3) if colour else (side, side))


def read_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the members of a .tar.xz, whole, by name and in the archive's order.

    Raises:
        DataError: as `read_content`, once the member that is wrong is reached.
    """
    with _one_kind_of_error():
        for name, stream in _tar_members(path):
            yield name, stream.read()


@contextlib.contextmanager
def _one_kind_of_error() -> Iterator[None]:
    """Raise what is wrong with a file as a DataError."""
    try:
        yield
    except DAMAGED as error:
        raise DataError(f"damaged archive: {one_line(error)}") from error
    except OSError as error:
        raise DataError(f"cannot be read: {one_line(error)}") from error


class _Pixels(NamedTuple):
    """The pixels of an image, row after row: a byte each where they are grey, 0 is black, or red, green and blue."""

    width: int
    height: int
    pixels: bytes


class _Budget:
    """Counts what has been decompressed, and refuses to go on past the bound."""

    def __init__(self) -> None:
        self.spent = 0

    def spend(self, amount: int) -> None:
        self.spent += amount
        if self.spent > MAX_BYTES:
            raise DataError(f"refused: it unpacks to more than {MAX_BYTES:,} bytes")


class _BoundedReader(io.RawIOBase):
    """A stream for tarfile, which would read a header of any declared length into memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self._budget = _Budget()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._budget.spend(len(data))
        return data


def _open_stream(path: Path, name: str) -> io.BufferedIOBase:
    if name.endswith(".gz"):
        return gzip.open(path)
    if name.endswith(".xz"):
        return lzma.open(path)
    return path.open("rb")


def _chunks(stream: IO[bytes] | io.BufferedIOBase, budget: _Budget) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        budget.spend(len(chunk))
        yield chunk


def _archive_content(members: Iterable[tuple[str, IO[bytes]]], pixels: bool) -> Content:
    budget = _Budget()
    lines = []
    for name, stream in members:
        digest = hashlib.sha256()
        if pixels:
            width, height, grey = _read_image(name, stream, budget)
            digest.update(f"{width} {height}\n".encode() + grey)
        else:
            for chunk in _chunks(stream, budget):
                digest.update(chunk)
        lines.append(f"{name}\0{digest.hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return Content(hashlib.sha256(b"".join(sorted(lines))).hexdigest(), len(lines))


def _read_image(name: str, stream: IO[bytes], budget: _Budget, *, colour: bool = False) -> _Pixels:
    from PIL import Image

    data = b"".join(_chunks(stream, budget))
    try:
        with warnings.catch_warnings():
            # Pillow only warns of an image that is damaged, or large enough to fill memory; here both are errors.
            warnings.simplefilter("error")
            with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise DataError(f"refused: the image {name!r} has {width} x {height} pixels")
                budget.spend(width * height * (3 if colour else 1))
                return _Pixels(width, height, image.convert("RGB" if colour else "L").tobytes())
    except (Image.DecompressionBombError, LookupError, OSError, SyntaxError, ValueError, Warning) as error:
        raise DataError(f"damaged archive: the image {name!r}: {one_line(error)}") from error


def _zip_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    # zipfile reads the whole directory into memory before its entries can be counted, so they are counted by their
    # signature first.
    with path.open("rb") as stream:
        _check_count(sum(chunk.count(_ZIP_ENTRY) for chunk in iter(lambda: stream.read(_CHUNK), b"")))
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            parts = _check_member(member.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
            if not member.is_dir() and not _is_hidden(parts):
                with archive.open(member) as content:
                    yield "/".join(parts), content


def _tar_members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with lzma.open(path) as stream, tarfile.open(fileobj=_BoundedReader(stream), mode="r|") as archive:
        for count, member in enumerate(archive, start=1):
            _check_count(count)
            parts = _check_member(member.name, member.isreg() or member.isdir())
            content = archive.extractfile(member)
            if content is not None and not _is_hidden(parts):
                yield "/".join(parts), content


def _check_count(count: int) -> None:
    if count > MAX_MEMBERS:
        raise DataError(f"refused: it has more than {MAX_MEMBERS:,} members")


def _check_member(name: str, is_plain: bool) -> tuple[str, ...]:
    """Return the parts of a member's name, once it is known to be a file or folder inside the archive."""
    if not is_plain:
        raise DataError(f"refused: the member {name!r} is a link or a device, not a file")
    # Windows' rules know both kinds of slash, so they also catch paths that other systems would follow.
    member = PureWindowsPath(name)
    if not name or member.drive or member.root or ".." in member.parts:
        raise DataError(f"refused: the member {name!r} would lie outside the folder it is unpacked to")
    return member.parts


def _is_hidden(parts: tuple[str, ...]) -> bool:
    # The archive tools and file browsers of macOS leave such members behind; they are no part of a data set.
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)
