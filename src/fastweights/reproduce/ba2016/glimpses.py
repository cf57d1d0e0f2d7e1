"""The glimpse networks of Ba et al. 2016, sections 4.2 and 4.3: their settings, and the way to their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from fastweights.nn import IRNN, FastWeightsRNN
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Curve, Progress, RunFolder, Score
from fastweights.tasks.glimpses import GLIMPSES, VISITS, mark_stores, take_glimpses
from fastweights.training import Schedule, train

ModelName = Literal["irnn", "lstm", "convnet", "fast-weights"]
RECURRENT = ("irnn", "lstm", "fast-weights")

TITLES: dict[ModelName, str] = {
    "irnn": "IRNN",
    "lstm": "LSTM",
    "convnet": "ConvNet",
    "fast-weights": "Fast weights",
}


@dataclass(frozen=True)
class GlimpseSettings:
    """The settings of both experiments."""

    models: tuple[ModelName, ...] = ("irnn", "lstm", "convnet", "fast-weights")
    """Models to train and test, each a row of the table."""
    hidden_sizes: tuple[int, ...] = (50,)
    """Recurrent units, and features of each layer of the ConvNet: the columns of the paper's table."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and of the order of the images: one training run for each."""

    epochs: int = 10
    """Passes over the training images, at most."""
    patience: int = 100
    """Epochs without a better validation error before a run stops."""
    batch_size: int = 128
    """Images in a step."""
    learning_rate: float = 4e-3
    """Learning rate of Adam."""
    annealing: Literal["none", "cosine"] = "cosine"
    """Schedule of the learning rate: none (constant), or a cosine that falls to zero at the last epoch."""
    clip_norm: float = 5.0
    """Largest norm of the gradient: a larger one is scaled down to it."""

    patch_size: int = only(
        RECURRENT, 100, "Hidden units of the layer that encodes a glimpse, in front of the recurrent layer."
    )
    readout_size: int = only(RECURRENT, 100, "ReLU units between the last hidden state and the softmax.")
    decay: float = only("fast-weights", 0.9, "Fraction of the fast matrix kept after each step.")
    rate: float = only("fast-weights", 0.5, "Strength of each write of a hidden state.")
    inner_steps: int = only("fast-weights", 1, "Reads of the fast matrix in each step (S in the paper).")
    layer_norm: bool = only("fast-weights", True, "Layer normalisation of the sum in an inner step (eq 5).")
    identity_scale: float = only("fast-weights", 0.05, "Multiple of the identity at which the recurrent weights start.")
    stores: Literal["marked", "every"] = only(
        "fast-weights",
        "marked",
        "Glimpses after which the state is stored: those marked in section 4.2, or every one.",
    )
    clear: bool = only("fast-weights", True, "Reset the hidden state after it is stored at a mark.")
    irnn_identity_scale: float = only("irnn", 0.5, "Multiple of the identity at which the recurrent weights start.")

    data_dir: Path | None = None
    """Folder that has the folder of the data set; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with: these models are small, and one is as fast as two or faster."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


class GlimpseModel(nn.Module):
    """A ReLU layer for each glimpse, a recurrent layer, a readout of its last state: images [B,S,S] -> logits [B,C].

    The fast weights are told when to store (`tasks.glimpses.mark_stores`): the state that a marked glimpse leaves is
    written into the fast matrix, and with `clear` the hidden state is empty when the next glimpse comes.
    """

    stores: Tensor  # [T,1]: whether the state before each step is written
    clears: Tensor

    def __init__(self, model: ModelName, side: int, classes: int, hidden_size: int, settings: GlimpseSettings) -> None:
        super().__init__()
        self.patch = nn.Sequential(nn.Linear((side // 4) ** 2, settings.patch_size), nn.ReLU())
        self.core: nn.Module
        if model == "irnn":
            self.core = IRNN(settings.patch_size, hidden_size, identity_scale=settings.irnn_identity_scale)
        elif model == "lstm":
            self.core = nn.LSTM(settings.patch_size, hidden_size)
        else:
            self.core = FastWeightsRNN(
                settings.patch_size,
                hidden_size,
                decay=settings.decay,
                rate=settings.rate,
                inner_steps=settings.inner_steps,
                layer_norm=settings.layer_norm,
                identity_scale=settings.identity_scale,
            )
        marks = mark_stores().roll(1).unsqueeze(1)  # a step writes the state that the glimpse before it left
        self.register_buffer("stores", marks | (settings.stores == "every"), persistent=False)
        self.register_buffer("clears", marks & settings.clear, persistent=False)
        self.readout = nn.Sequential(
            nn.Linear(hidden_size, settings.readout_size), nn.ReLU(), nn.Linear(settings.readout_size, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(take_glimpses(images).transpose(0, 1))
        logits: Tensor = self.readout(self.core(x, **self.control(x))[0][-1])
        return logits

    def control(self, x: Tensor) -> dict[str, Tensor]:
        """Return what the recurrent layer is told of each step of x [T,B,D]: `strengths` and `clears`, or nothing."""
        if not isinstance(self.core, FastWeightsRNN):
            return {}
        shape = x.shape[:2]
        return {"strengths": self.stores.to(x.dtype).expand(shape), "clears": self.clears.expand(shape)}


class PatchConvNet(nn.Module):
    """A ConvNet over the same patches: images [B,S,S] -> logits [B,C].

    Its first layer has the patches as receptive fields, at both scales. With three layers the second joins each
    quadrant's five, and the third the four quadrants; with two layers the second joins all patches. Fields do not
    overlap, so that every layer is a linear map shared over places.
    """

    def __init__(self, side: int, classes: int, features: int, *, layers: int) -> None:
        super().__init__()
        first, patches = nn.Linear((side // 4) ** 2, features), GLIMPSES // VISITS - 1  # the coarse one once
        joined = [patches * features, VISITS * features] if layers == 3 else [VISITS * patches * features]
        self.layers = nn.ModuleList([first, *(nn.Linear(size, features) for size in joined)])
        self.readout = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Tensor:
        glimpses = take_glimpses(images)
        h = glimpses.view(-1, VISITS, GLIMPSES // VISITS, glimpses.shape[2])[:, :, :-1]  # [B,4,5,P]
        for index, layer in enumerate(self.layers):
            if index > 0:
                h = h.flatten(len(self.layers) - index)
            h = layer(h).relu()
        logits: Tensor = self.readout(h)
        return logits


def make_network(
    model: ModelName, side: int, classes: int, hidden_size: int, settings: GlimpseSettings, *, layers: int
) -> nn.Module:
    """Return one of the four networks: images [B,side,side] -> logits [B,classes]; `layers` are the ConvNet's."""
    if model == "convnet":
        return PatchConvNet(side, classes, hidden_size, layers=layers)
    return GlimpseModel(model, side, classes, hidden_size, settings)


def prepare_glimpses(
    settings: GlimpseSettings,
    folder: Path,
    splits: Mapping[str, tuple[Tensor, Tensor]],
    paper: Mapping[tuple[str, int | None], float],
    *,
    classes: int,
    layers: int,
) -> Members:
    """Return the members of a run on images [N,S,S]: every model, size and seed of the settings."""
    splits = {name: (x.to(settings.device), y.to(settings.device)) for name, (x, y) in splits.items()}
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
    side = splits["train"][0].shape[-1]

    def train_member(model: ModelName, hidden_size: int, seed: int, member: RunFolder, progress: Progress) -> None:
        network = make_network(model, side, classes, hidden_size, settings, layers=layers).to(settings.device)
        title = f"{TITLES[model]}, {hidden_size} features, seed {seed}"
        train(network, splits, schedule(settings), member, seed=seed, title=title, progress=progress)

    commonest, labels = splits["train"][1].bincount().argmax(), splits["test"][1]
    floor = 100 * float((labels != commonest).float().mean())

    def table() -> dict[str, Any]:
        return {
            "requested": [(TITLES[model], size) for size in settings.hidden_sizes for model in settings.models],
            "scores": [Score("test error, %", paper, floor)],
            "curves": [Curve("validation_error", "validation error, %")],
        }

    return Members(members, train_member, table)


@one_line_errors()
def check_glimpses(settings: GlimpseSettings, side: int, *, layers: int) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(
        settings,
        sizes=("hidden_sizes", "patch_size", "readout_size", "epochs"),
        lists=("models", "hidden_sizes", "seeds"),
    )
    schedule(settings)
    for model in settings.models:
        for hidden_size in settings.hidden_sizes:
            make_network(model, side, 2, hidden_size, settings, layers=layers)


def schedule(settings: GlimpseSettings) -> Schedule:
    """Return how long and how fast a model is trained.

    Raises:
        ValueError: a number out of range.
    """
    return Schedule(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        annealing=settings.annealing,
        clip_norm=settings.clip_norm,
        patience=settings.patience,
        checkpoint_seconds=settings.checkpoint_seconds,
    )
