"""A measurement in a process of its own, which can be ended with all that it has started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class AloneError(Exception):
    """Why the process gave no answer."""


def alone(module: str, told: dict[str, Any], limit: float, **environment: str) -> str:
    """What `python -m module`, told JSON, prints.

    Raises:
        AloneError: it failed, was ended by a signal, or took more than `limit` seconds.
    """
    words = [sys.executable, "-m", module, json.dumps(told)]
    pipe = subprocess.PIPE
    # A group of its own: a compiler's helpers would go on when it is ended, and slow down what is timed next.
    with subprocess.Popen(
        words, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise AloneError(f"took more than {limit:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode < 0:
        raise AloneError(f"was ended by signal {-process.returncode}")
    if process.returncode > 0:
        complaint = [line.strip() for line in errors.splitlines() if line.strip()] or ["without a word"]
        raise AloneError(f"failed: {complaint[-1][:200]}")
    return output


def trials(module: str, told: Mapping[str, dict[str, Any]], limit: float) -> tuple[list[str], dict[str, str]]:
    """Which rivals `python -m module` compiles and runs once, and why it does not do so with the others.

    A compilation cannot be stopped midway: it leaves helpers at work and the compiler in disorder, and what is timed
    afterwards is wrong. So each is tried by a process that can be ended; what it compiled, this one finds in
    the compiler's cache on the disk.
    """
    found: list[str] = []
    skipped = {}
    for rival, words in told.items():
        try:
            alone(module, words, limit)
        except AloneError as error:
            skipped[rival] = f"compiling {error}"
        else:
            found.append(rival)
    return found, skipped
