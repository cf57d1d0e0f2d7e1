"""Checkpoints that a kill at any moment leaves whole."""

import io
from pathlib import Path
from typing import Any

import torch

from fastweights.errors import RunError
from fastweights.files import write_files


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint beside its place and rename it, so that there is always a whole one.

    Raises:
        RunError: the disk refuses; the checkpoint that was there before is still whole.

    Examples:
        >>> import tempfile, pathlib
        >>> from fastweights.training import checkpoint
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint.pt"
        >>> checkpoint.save(path, {"step": 3})
        >>> checkpoint.load(path)
        {'step': 3}
    """
    # Serialised in memory first: a full disk is then an OSError of one write, not a failure within torch's writer.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_files({path: buffer.getvalue()})
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}; what was there before is untouched: make room and run the same "
            "command again, or choose another --output"
        ) from error


def load(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint, or None where there is none yet. Nothing in it is executed (`weights_only`).

    Raises:
        RunError: the file is damaged or no checkpoint of ours; it is left as it is.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    try:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can fail anywhere within the unpickler
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(
            f"{path} is damaged ({reason}): put a good copy in its place, or start over with --fresh"
        ) from error
    if not isinstance(state, dict):
        raise RunError(f"{path} holds a {type(state).__name__}, not a checkpoint; start over with --fresh")
    return state
