"""Associative retrieval, table and figure 3 of Ba et al. 2016: IRNN, LSTM, Associative LSTM, fast weights.

Section 4.1 and appendix A.1 of "Using fast weights to attend to the recent past".
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fastweights.errors import RunError
from fastweights.nn import IRNN, AssociativeLSTM, FastWeightsRNN
from fastweights.reproduce import command
from fastweights.reproduce._settings import OF_THE_MACHINE, check_settings, make_ready, refused
from fastweights.runs import RunFolder, Score, write_result
from fastweights.tasks import associative_retrieval as task
from fastweights.training import Schedule, show_progress, train

EXPERIMENT = "ba2016/associative-retrieval"

ModelName = Literal["irnn", "lstm", "associative-lstm", "fast-weights"]

TITLES: dict[ModelName, str] = {
    "irnn": "IRNN",
    "lstm": "LSTM",
    "associative-lstm": "Associative LSTM",
    "fast-weights": "Fast weights",
}

# Test error in per cent, 4 pairs: the table under section 4.1.
PAPER: dict[tuple[str, int | None], float] = {
    ("IRNN", 20): 62.11,
    ("IRNN", 50): 60.23,
    ("IRNN", 100): 0.34,
    ("LSTM", 20): 60.81,
    ("LSTM", 50): 1.85,
    ("LSTM", 100): 0.0,
    ("Associative LSTM", 20): 60.13,
    ("Associative LSTM", 50): 1.62,
    ("Associative LSTM", 100): 0.0,
    ("Fast weights", 20): 1.81,
    ("Fast weights", 50): 0.0,
    ("Fast weights", 100): 0.0,
}


@dataclass(frozen=True)
class Settings:
    """Associative retrieval of Ba et al. 2016: which digit came after this letter?"""

    models: tuple[ModelName, ...] = ("irnn", "lstm", "fast-weights")
    """The rows of the table."""
    hidden_sizes: tuple[int, ...] = (50,)
    """Recurrent units: the columns R of the paper's table."""
    seeds: tuple[int, ...] = (1,)
    """One training run for each: of the weights and of the order of the examples."""

    pairs: int = 4
    """Letter-digit pairs in a sequence: 4 in the paper, 8 is the hard variant."""
    train_examples: int = task.SIZES[0]
    """Training sequences."""
    validation_examples: int = task.SIZES[1]
    """Validation sequences: early stopping and the choice of the best epoch."""
    test_examples: int = task.SIZES[2]
    """Test sequences."""
    data_seed: int = 0
    """Of the sequences themselves, which every run shares."""

    epochs: int = 30
    """Passes over the training sequences, at most."""
    patience: int = 8
    """Epochs without a better validation error before a run stops."""
    batch_size: int = 128
    """Sequences in a step."""
    learning_rate: float = 1e-3
    """Of Adam."""
    annealing: Literal["none", "cosine"] = "none"
    """How the learning rate falls: not at all, or along a cosine to zero at the last of the epochs."""
    clip_norm: float = 5.0
    """The norm that the gradient is clipped to."""

    embedding_size: int = 100
    """Features of a character."""
    readout_size: int = 100
    """ReLU units between the last hidden state and the softmax."""
    decay: float = 0.9
    """Fast weights: what is left of the fast matrix after a step."""
    rate: float = 0.5
    """Fast weights: how strongly a hidden state is written."""
    inner_steps: int = 1
    """Fast weights: reads of the fast matrix in a step (S)."""
    layer_norm: bool = True
    """Fast weights: normalise what is summed in an inner step (eq 5)."""
    normalize_initial: bool = False
    """Fast weights: normalise in front of h_0 too."""
    identity_scale: float = 0.05
    """Fast weights: the recurrent weights start as this multiple of the identity."""
    irnn_identity_scale: float = 0.5
    """IRNN: the recurrent weights start as this multiple of the identity."""
    associative_lstm_copies: int = 4
    """Associative LSTM: copies of the memory."""
    associative_lstm_heads: int = 3
    """Associative LSTM: keys that write and read in a step."""
    associative_lstm_epochs: int = 40
    """Associative LSTM: in place of `epochs`, because one of its epochs takes as long as seven of the LSTM's."""

    threads: int = 1
    """Threads to compute with: these models are small, and one is as fast as two or faster."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""
    checkpoint_seconds: float = 10.0
    """Seconds between checkpoints."""


PRESETS = {
    "quick": Settings(),
    "paper": Settings(
        models=("irnn", "lstm", "associative-lstm", "fast-weights"),
        hidden_sizes=(20, 50, 100),
        seeds=(1, 2, 3),
        epochs=100,
        patience=100,
        annealing="cosine",
    ),
}

_OF_THE_TABLE = ("models", "hidden_sizes", "seeds")
_OF_THE_ASSOCIATIVE_LSTM = ("associative_lstm_copies", "associative_lstm_heads")
_OF_FAST_WEIGHTS = ("decay", "rate", "inner_steps", "layer_norm", "normalize_initial", "identity_scale")


class RetrievalModel(nn.Module):
    """Embedding, one recurrent layer, and a readout of its last hidden state: inputs [B,T] -> logits [B,10]."""

    def __init__(self, model: ModelName, hidden_size: int, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(task.VOCABULARY), settings.embedding_size)
        self.core: nn.Module
        if model == "irnn":
            self.core = IRNN(settings.embedding_size, hidden_size, identity_scale=settings.irnn_identity_scale)
        elif model == "lstm":
            self.core = nn.LSTM(settings.embedding_size, hidden_size)
        elif model == "associative-lstm":
            self.core = AssociativeLSTM(
                settings.embedding_size,
                hidden_size,
                copies=settings.associative_lstm_copies,
                heads=settings.associative_lstm_heads,
            )
        else:
            self.core = FastWeightsRNN(
                settings.embedding_size,
                hidden_size,
                **{name: getattr(settings, name) for name in _OF_FAST_WEIGHTS},
            )
        self.readout = nn.Sequential(
            nn.Linear(hidden_size, settings.readout_size), nn.ReLU(), nn.Linear(settings.readout_size, task.DIGITS)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        y, _ = self.core(self.embedding(inputs.T))
        logits: Tensor = self.readout(y[-1])
        return logits


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train every model, size and seed of the settings, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        TrainingError: the numbers are not finite.
    """
    members = _members(settings, folder)
    schedule = _checked(settings)
    make_ready(EXPERIMENT, members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    splits = _splits(settings)
    _write_table(settings, folder, preset)
    with show_progress() as progress:
        for (model, hidden_size, seed), member in members.items():
            with member, torch.random.fork_rng():
                torch.manual_seed(seed)
                network = RetrievalModel(model, hidden_size, settings).to(settings.device)
                title = f"{TITLES[model]}, R={hidden_size}, seed {seed}"
                own = dataclasses.replace(schedule, epochs=_epochs(settings, model))
                train(network, splits, own, member, seed=seed, title=title, progress=progress)
            _write_table(settings, folder, preset)


def _epochs(settings: Settings, model: ModelName) -> int:
    return settings.associative_lstm_epochs if model == "associative-lstm" else settings.epochs


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    _checked(settings)


def _splits(settings: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    sizes = (settings.train_examples, settings.validation_examples, settings.test_examples)
    try:
        drawn = task.splits(sizes, settings.pairs, seed=settings.data_seed)
        names = ("train", "validation", "test")
        return {
            name: (split.inputs.to(settings.device), split.targets.to(settings.device))
            for name, split in zip(names, drawn, strict=True)
        }
    except (RuntimeError, MemoryError) as error:  # torch raises the first where memory ends
        raise RunError(f"{sum(sizes):,} sequences do not fit into memory; ask for fewer") from error


def _members(settings: Settings, folder: Path) -> dict[tuple[ModelName, int, int], RunFolder]:
    members = {}
    for hidden_size in settings.hidden_sizes:
        for model in settings.models:
            for seed in settings.seeds:
                own = {"model": TITLES[model], "hidden_size": hidden_size, "seed": seed}
                elsewhere = {*OF_THE_MACHINE, *_OF_THE_TABLE, "associative_lstm_epochs"}
                if model != "fast-weights":
                    elsewhere |= {*_OF_FAST_WEIGHTS}
                if model != "associative-lstm":
                    elsewhere |= {*_OF_THE_ASSOCIATIVE_LSTM}
                if model != "irnn":
                    elsewhere.add("irnn_identity_scale")
                own |= {name: value for name, value in vars(settings).items() if name not in elsewhere}
                own["epochs"] = _epochs(settings, model)
                path = folder / f"{model}-{hidden_size}-seed{seed}"
                members[model, hidden_size, seed] = RunFolder(path, own)
    return members


def _checked(settings: Settings) -> Schedule:
    """The schedule, once everything that the settings ask for has been seen to be possible."""
    with refused():
        check_settings(
            settings,
            positive=(
                "hidden_sizes",
                "train_examples",
                "validation_examples",
                "test_examples",
                "embedding_size",
                "readout_size",
                "associative_lstm_epochs",
            ),
            not_empty=("models", "hidden_sizes", "seeds"),
        )
        task.floor(settings.pairs)
        for model in settings.models:
            for hidden_size in settings.hidden_sizes:
                RetrievalModel(model, hidden_size, settings)
        return Schedule(
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            annealing=settings.annealing,
            clip_norm=settings.clip_norm,
            patience=settings.patience,
            checkpoint_seconds=settings.checkpoint_seconds,
        )


def _write_table(settings: Settings, folder: Path, preset: str) -> None:
    floor = task.floor(settings.pairs)
    write_result(
        folder,
        experiment=EXPERIMENT,
        preset=preset,
        command=command(EXPERIMENT, preset, PRESETS[preset], settings),
        requested=[(TITLES[model], size) for size in settings.hidden_sizes for model in settings.models],
        scores=[Score("test error, %", PAPER if settings.pairs == 4 else {}, floor.error)],
        floor_log_likelihood=-floor.cross_entropy,
    )
