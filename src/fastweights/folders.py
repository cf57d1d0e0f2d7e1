"""Which files of a user's folder are read, and what is text: one rule for every reader."""

import re
from pathlib import Path

from fastweights.errors import DataError


def find_files(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Return the files of a folder whose paths in it match a pattern, small and capital letters alike, by name.

    What begins with a dot is hidden: such files are left out, and all that such folders hold.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights.folders import find_files
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("notes.txt", "more/LETTER.TXT", "read.md", ".draft.txt", ".git/description.txt"):
        ...     (folder / name).parent.mkdir(exist_ok=True)
        ...     (folder / name).touch()
        >>> [path.name for path in find_files(folder, "**/*.txt")]
        ['LETTER.TXT', 'notes.txt']
    """
    if "[" not in pattern:  # what stands between brackets is a choice of letters already
        pattern = re.sub("[A-Za-z]", lambda match: f"[{match[0].lower()}{match[0].upper()}]", pattern)
    return sorted(path for path in folder.glob(pattern) if path.is_file() and not is_hidden(path, folder))


def is_hidden(path: Path, folder: Path) -> bool:
    """Return whether a file or folder is hidden, or lies in a hidden folder of this one."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def decode_text(contents: bytes, path: Path) -> str:
    """Return a file's text, with ends of lines as Unix has them and without a byte order mark.

    Raises:
        DataError: it is not UTF-8, or has the character 0.

    Examples:
        >>> from pathlib import Path
        >>> from fastweights.folders import decode_text
        >>> decode_text("two\\r\\nlines".encode("utf-8-sig"), Path("notes.txt"))
        'two\\nlines'
    """
    try:
        text = contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8: save the text as UTF-8 (iconv does it)") from error
    check_text(text, path)
    return text.replace("\r\n", "\n")


def check_text(text: str, path: Path) -> None:
    """Refuse the character 0, which no text has and which is every second byte of English in UTF-16.

    Raises:
        DataError: it is there.
    """
    if "\0" in text:
        raise DataError(f"{path}: it has the character 0, so it is not text, or is UTF-16: save it as UTF-8")
