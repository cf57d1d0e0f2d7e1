"""Facial expressions, table 2 of Ba et al. 2016: IRNN, LSTM, ConvNet, fast weights that are told when to store.

Section 4.3 and appendix A.2 of "Using fast weights to attend to the recent past". The paper's faces, CMU Multi-PIE, are
licensed: without a folder of them the models are trained on FER2013, which is harder and has no number in the paper.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from fastweights.reproduce._experiment import run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.ba2016.glimpses import TITLES, GlimpseSettings, check_glimpses, prepare_glimpses
from fastweights.tasks import faces

__all__ = ["DATA", "EXPERIMENT", "PAPER", "PRESETS", "QUICK_MINUTES", "TITLES", "Settings", "check", "run"]

EXPERIMENT = "ba2016/facial-expression"
QUICK_MINUTES = 23  # docs/results/ba2016-facial-expression: 1,360 s, on a machine that was busy with other work
DATA = "fer2013"

# Test error in per cent: 100 minus the accuracies of table 2.
PAPER: dict[tuple[str, int | None], float] = {
    ("IRNN", 200): 18.89,
    ("LSTM", 200): 18.68,
    ("ConvNet", 200): 11.77,
    ("Fast weights", 200): 13.66,
}


@dataclass(frozen=True)
class Settings(GlimpseSettings):
    """Which expression is it, in 24 patches of 12 x 12 pixels, one after another?"""

    hidden_sizes: tuple[int, ...] = (200,)
    """Recurrent units, and features of every layer of the ConvNet: 200 in the paper."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    multi_pie: Path | None = None
    """Folder of aligned faces of CMU Multi-PIE; without it, faces of FER2013 are used."""


_CHOSEN = Settings(
    models=("irnn", "lstm", "convnet", "fast-weights", "linear"), standardize=True, dropout=0.2, rate=None
)  # docs/papers/ba2016.md has the trials
PRESETS = {"quick": _CHOSEN, "paper": replace(_CHOSEN, seeds=(1, 2, 3), epochs=30)}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model, size and seed of the settings.

    Raises:
        DataError: the faces are not there, or damaged.
    """
    data = load_faces(settings)
    splits = {part: data.part(part) for part in faces.PARTS}
    paper = {} if settings.multi_pie is None else PAPER
    classes = len(data.names)
    return prepare_glimpses(
        settings,
        folder,
        splits,
        paper,
        classes=classes,
        layers=2,
    )


def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_glimpses(settings, faces.SIDE, layers=2)


def load_faces(settings: Settings) -> faces.Faces:
    """Return Multi-PIE where there is a folder of it, else FER2013.

    Raises:
        DataError: the faces are not there, or damaged.
    """
    if settings.multi_pie is not None:
        return faces.load_multi_pie(settings.multi_pie)
    return faces.load_fer2013(settings.data_dir)
