"""Where fast weights help, figure 2 of Munkhdalai & Trischler 2018: fwCNN on mini-ImageNet with parts left out.

Section 5.3 of "Metalearning with Hebbian fast weights": 5-way 1-shot tasks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.reproduce import munkhdalai2018_mini_imagenet as mini_imagenet
from fastweights.reproduce._few_shot import Data, Row, Split, Table, check_few_shot, run_table
from fastweights.reproduce._few_shot_models import check_label_noise
from fastweights.reproduce._few_shot_settings import shared_schedule
from fastweights.reproduce._settings import refused

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "check", "run"]

EXPERIMENT = "munkhdalai2018/ablation"

Variant = Literal["baseline", "softmax-fast", "softmax-both", "hidden-softmax", "truncated", "hidden-fast", "drawn"]
TITLES: dict[Variant, str] = {
    "baseline": "Hidden layer fast and slow (red)",
    "softmax-fast": "Softmax layer fast only (green)",
    "softmax-both": "Softmax layer fast and slow (blue)",
    "hidden-softmax": "Hidden and softmax layers (yellow)",
    "truncated": "Truncated gradients (violet)",
    "hidden-fast": "Hidden layer fast only",
    "drawn": "Softmax layer drawn at first",
}
_HEADS: dict[Variant, dict[str, Any]] = {
    "baseline": {},
    "softmax-fast": {"hidden": "slow", "softmax": "fast"},
    "softmax-both": {"hidden": "slow", "softmax": "both"},
    "hidden-softmax": {"hidden": "both", "softmax": "both"},
    "truncated": {"stop_gradient": True},
    "hidden-fast": {"hidden": "fast"},
    "drawn": {"inverse_start": False},
}


@dataclass(frozen=True)
class Settings(mini_imagenet.Photographs):
    """Leave out or move parts of the fast weights."""

    models: tuple[Variant, ...] = (
        "baseline",
        "softmax-fast",
        "softmax-both",
        "hidden-softmax",
        "truncated",
    )
    """The bars of the figure; further there are hidden-fast, which the text tells of, and drawn, the paper's way to
    start the softmax layer."""
    shots: tuple[int, ...] = (1,)
    """Described examples of a class in the tests."""
    tasks: int = 96_000
    """To train on."""
    tasks_per_step: int = 32
    """Tasks in an update."""
    validate_every: int = 9600
    """Tasks between two validations."""
    label_noise: float = 0.01
    """Uniform noise of the hidden layer's labels either way, in training."""


PRESETS = {
    "quick": Settings(models=("baseline", "truncated"), tasks=32_000, validate_every=3200),
    "paper": Settings(seeds=(1, 2, 3)),
}


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train every variant for every seed, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        DataError: mini-ImageNet is missing or damaged.
        TrainingError: the numbers are not finite.
    """
    check(settings)
    run_table(TABLE, settings, folder, preset=preset, fresh=fresh)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    with refused():
        check_few_shot(TABLE, settings, positive=("filters",))
        check_label_noise(settings.label_noise)


def network(settings: Settings, row: Row, data: dict[Split, Data]) -> torch_nn.Module:
    """The variant of a row."""
    encoder = mini_imagenet.convolutional(settings, data)
    variant: Any = row.model
    head = few_shot.FastWeightsHead(
        encoder.features,
        row.ways,
        hidden_size=settings.hidden_size,
        label_noise=settings.label_noise,
        **_HEADS[variant],
    )
    return few_shot.FewShotNetwork(encoder, head)


TABLE = Table(
    experiment=EXPERIMENT,
    presets=PRESETS,
    titles=TITLES,
    paper={"test": {("baseline", 5, 1): 50.21}},
    load=mini_imagenet.load,
    network=network,
    hidden_size=lambda settings, row: settings.hidden_size,
    schedule=shared_schedule,
    foreign=lambda model: set(),
    augment=mini_imagenet.augment,
)
