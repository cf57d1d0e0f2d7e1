"""Files that are either the old or the new, never half written."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parent / "weights"  # trained ones that come with the package


def encode_json(record: dict[str, Any]) -> bytes:
    """Return a record as the bytes of a file that a person can read."""
    return json.dumps(record, indent=2).encode() + b"\n"


def write_files(files: dict[Path, bytes]) -> None:
    """Write all files beside their places, then rename them into place; OSError leaves every old file whole."""
    parts = {path.with_name(f".{path.name}.{os.getpid()}.part"): path for path in files}
    try:
        for part, path in parts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(files[path])
                file.flush()
                os.fsync(file.fileno())
        for part, path in parts.items():
            os.replace(part, path)
    except OSError:
        for part in parts:
            with contextlib.suppress(OSError):
                part.unlink()
        raise
