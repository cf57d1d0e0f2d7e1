"""The environment of a run: versions, processor, threads, kernels and commit."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Return what this process runs with: versions, processor, threads, kernels and git commit.

    Examples:
        >>> from fastweights.runs import describe_environment
        >>> sorted(describe_environment())[:3]
        ['commit', 'device', 'fastweights']
    """
    # Imported here: whoever only reads runs needs neither torch nor numpy.
    import numpy
    import torch

    import fastweights
    from fastweights.ops import kernel_status

    return {
        "fastweights": fastweights.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processors": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "kernels": kernel_status(),
    }


def _commit() -> str | None:
    """Return the commit of the checkout that the package runs from, None for an installed copy."""
    source = Path(__file__).resolve().parents[3]
    if not (source / "pyproject.toml").exists() or not (source / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()


def _processor() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
