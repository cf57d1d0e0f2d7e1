"""Archives and their digests, written out from the definitions."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable

from PIL import Image

LABELS = b"0123456789" * 50
MEMBERS = {"images/a.txt": b"first", "images/b.txt": b"second"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def members_sha256(members: dict[str, bytes]) -> str:
    """The digest of an archive, written out from its definition."""
    return sha256("".join(f"{name}\0{sha256(data)}\n" for name, data in sorted(members.items())).encode())


def zip_bytes(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def tar_xz_bytes(members: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda member: None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            change(member)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def png_bytes(image: Image.Image, level: int = 9) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=level)
    return stream.getvalue()
