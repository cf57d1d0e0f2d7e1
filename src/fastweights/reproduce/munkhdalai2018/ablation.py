"""Where fast weights help, figure 2 of Munkhdalai & Trischler 2018: fwCNN on mini-ImageNet with parts left out.

Section 5.3 of "Metalearning with Hebbian fast weights": 5-way 1-shot tasks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.reproduce._experiment import one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.munkhdalai2018._episodes import (
    Data,
    EpisodicSettings,
    Split,
    TasksRow,
    check_episodes,
    prepare_episodes,
)
from fastweights.reproduce.munkhdalai2018.mini_imagenet import PhotographSettings, augment, load, make_encoder

EXPERIMENT = "munkhdalai2018/ablation"
QUICK_MINUTES = 7  # docs/results/munkhdalai2018-ablation: a third of its tasks, of two bars of one seed
DATA = "mini-imagenet"

PAPER = {("baseline", 5, 1): 50.21}  # per cent, by model, ways and shots: the bars have no other number

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
_HEADS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "softmax-fast": {"hidden": "slow", "softmax": "fast"},
    "softmax-both": {"hidden": "slow", "softmax": "both"},
    "hidden-softmax": {"hidden": "both", "softmax": "both"},
    "truncated": {"stop_gradient": True},
    "hidden-fast": {"hidden": "fast"},
    "drawn": {"inverse_start": False},
}


@dataclass(frozen=True)
class Settings(PhotographSettings, EpisodicSettings):
    """Leave out or move parts of the fast weights."""

    models: tuple[Variant, ...] = ("baseline", "softmax-fast", "softmax-both", "hidden-softmax", "truncated")
    """Bars of the figure; hidden-fast follows the paper's text; drawn uses the paper's initialisation."""
    shots: tuple[int, ...] = (1,)
    """Described examples of a class in the tests."""
    tasks: int = 96_000
    """Training tasks."""
    tasks_per_step: int = 32
    """Training tasks in an update."""
    validate_every: int = 9600
    """Tasks between two validations."""
    label_noise: float = 0.01
    """Largest uniform noise added to the hidden layer's labels in training."""


PRESETS = {
    "quick": Settings(models=("baseline", "truncated"), tasks=32_000, validate_every=3200),
    "paper": Settings(seeds=(1, 2, 3)),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every variant for every seed.

    Raises:
        DataError: mini-ImageNet is missing or damaged.
    """
    return prepare_episodes(
        settings,
        folder,
        load,
        network,
        {"test": PAPER},
        titles=TITLES,
        augment=augment(settings),
    )


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_episodes(settings, sizes=("filters",))


def network(settings: Settings, row: TasksRow, data: dict[Split, Data]) -> torch_nn.Module:
    """Return the variant of a row."""
    encoder = make_encoder(settings, data)
    head = few_shot.FastWeightsHead(
        encoder.features,
        row.ways,
        hidden_size=settings.hidden_size,
        label_noise=settings.label_noise,
        **_HEADS[row.model],
    )
    return few_shot.FewShotNetwork(encoder, head)
