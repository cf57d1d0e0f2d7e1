"""Fast weights and memory for PyTorch: networks that learn as they run."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastweights.few_shot import FewShotClassifier

__version__ = "0.1.0"
__all__ = [
    "FewShotClassifier",
    "bench",
    "errors",
    "evaluation",
    "few_shot",
    "integrations",
    "memory",
    "nn",
    "ops",
    "report",
    "reproduce",
    "sweep",
    "tasks",
    "training",
]


def __getattr__(name: str) -> Any:
    # All of it loads on first use (PEP 562), so that the command line can set the environment before torch loads.
    if name == "FewShotClassifier":
        return importlib.import_module(f"{__name__}.few_shot").FewShotClassifier
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
