"""Associative retrieval, table and figure 3 of Ba et al. 2016: IRNN, LSTM, Associative LSTM, fast weights.

Section 4.1 and appendix A.1 of "Using fast weights to attend to the recent past".
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from fastweights.errors import RunError
from fastweights.nn import IRNN, AssociativeLSTM, FastWeightsRNN
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Progress, RunFolder, Score
from fastweights.tasks import associative_retrieval as task
from fastweights.training import Schedule, train

EXPERIMENT = "ba2016/associative-retrieval"
QUICK_MINUTES = 3  # docs/results/ba2016-associative-retrieval: 201 s of seed 1
DATA = None

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

    models: tuple[ModelName, ...] = ("fast-weights", "lstm", "irnn")
    """Models to train and test, each a row of the table."""
    hidden_sizes: tuple[int, ...] = (50,)
    """Recurrent units: the columns R of the paper's table."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and of the order of the examples: one training run for each."""

    pairs: int = 4
    """Letter-digit pairs in a sequence: 4 in the paper, 8 in the hard variant."""
    train_examples: int = task.SIZES[0]
    """Training sequences."""
    validation_examples: int = task.SIZES[1]
    """Validation sequences: they decide when to stop and which epoch is the best."""
    test_examples: int = task.SIZES[2]
    """Test sequences."""
    data_seed: int = 0
    """Seed of the sequences, which all runs share."""

    epochs: int = 30
    """Passes over the training sequences, at most."""
    patience: int = 8
    """Epochs without a better validation error before a run stops."""
    batch_size: int = 128
    """Sequences in a step."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    annealing: Literal["none", "cosine"] = "none"
    """Schedule of the learning rate: none (constant), or a cosine that falls to zero at the last epoch."""
    clip_norm: float = 5.0
    """Largest norm of the gradient: a larger one is scaled down to it."""

    embedding_size: int = 100
    """Features of a character."""
    readout_size: int = 100
    """ReLU units between the last hidden state and the softmax."""
    decay: float = only("fast-weights", 0.9, "Fraction of the fast matrix kept after each step.")
    rate: float = only("fast-weights", 0.5, "Strength of each write of a hidden state.")
    inner_steps: int = only("fast-weights", 1, "Reads of the fast matrix in each step (S in the paper).")
    layer_norm: bool = only("fast-weights", True, "Layer normalisation of the sum in an inner step (eq 5).")
    normalize_initial: bool = only(
        "fast-weights", False, "Layer normalisation of the first state of the inner steps too."
    )
    hold_input: bool = only(
        "fast-weights", True, "Add the input in each inner step: method 1 of appendix B; without it, method 2."
    )
    identity_scale: float = only("fast-weights", 0.05, "Multiple of the identity at which the recurrent weights start.")
    irnn_identity_scale: float = only("irnn", 0.5, "Multiple of the identity at which the recurrent weights start.")
    associative_lstm_copies: int = only("associative-lstm", 4, "Copies of the memory.")
    associative_lstm_heads: int = only("associative-lstm", 3, "Keys that write and read in each step.")
    associative_lstm_epochs: int = only(
        "associative-lstm",
        40,
        "Passes over the training sequences, in place of `epochs`: a pass takes as long as seven passes of the LSTM.",
        recorded_as="epochs",
    )

    threads: int = 1
    """Threads to compute with: these models are small, and one is as fast as two or faster."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
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
                decay=settings.decay,
                rate=settings.rate,
                inner_steps=settings.inner_steps,
                layer_norm=settings.layer_norm,
                normalize_initial=settings.normalize_initial,
                hold_input=settings.hold_input,
                identity_scale=settings.identity_scale,
            )
        self.readout = nn.Sequential(
            nn.Linear(hidden_size, settings.readout_size), nn.ReLU(), nn.Linear(settings.readout_size, task.DIGITS)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        y, _ = self.core(self.embedding(inputs.T))
        logits: Tensor = self.readout(y[-1])
        return logits


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model, size and seed of the settings."""
    splits = draw_splits(settings)
    members = {
        (model, hidden_size, seed): RunFolder(
            Path(folder, f"{model}-{hidden_size}-seed{seed}"),
            {"model": TITLES[model], "hidden_size": hidden_size, "seed": seed}
            | settings_of(settings, model, without=("hidden_sizes",)),
        )
        for hidden_size in settings.hidden_sizes
        for model in settings.models
        for seed in settings.seeds
    }

    def train_member(model: ModelName, hidden_size: int, seed: int, member: RunFolder, progress: Progress) -> None:
        network = RetrievalModel(model, hidden_size, settings).to(settings.device)
        title = f"{TITLES[model]}, R={hidden_size}, seed {seed}"
        train(network, splits, schedule(settings, model), member, seed=seed, title=title, progress=progress)

    return Members(members, train_member, lambda: table(settings))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    examples = ("train_examples", "validation_examples", "test_examples")
    sizes = ("hidden_sizes", *examples, "embedding_size", "readout_size", "epochs", "associative_lstm_epochs")
    check_settings(settings, sizes=sizes, lists=("models", "hidden_sizes", "seeds"))
    task.floor(settings.pairs)
    for model in settings.models:
        schedule(settings, model)
        for hidden_size in settings.hidden_sizes:
            RetrievalModel(model, hidden_size, settings)


def draw_splits(settings: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw the sequences [N,T] of training, validation and test, and the answer of each [N].

    Raises:
        RunError: they do not fit into memory.
    """
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


def schedule(settings: Settings, model: ModelName) -> Schedule:
    """Return how long and how fast a model is trained.

    Raises:
        ValueError: a number out of range.
    """
    return Schedule(
        epochs=settings_of(settings, model)["epochs"],
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        annealing=settings.annealing,
        clip_norm=settings.clip_norm,
        patience=settings.patience,
        checkpoint_seconds=settings.checkpoint_seconds,
    )


def table(settings: Settings) -> dict[str, Any]:
    """Return the table's rows and score: the paper's numbers are of four pairs."""
    floor = task.floor(settings.pairs)
    return {
        "requested": [(TITLES[model], size) for size in settings.hidden_sizes for model in settings.models],
        "scores": [Score("test error, %", PAPER if settings.pairs == 4 else {}, floor.error)],
        "floor_log_likelihood": -floor.cross_entropy,
    }
