"""The glimpse networks of Ba et al. 2016, sections 4.2 and 4.3: their settings, and the way to their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_dropout
from fastweights.nn import IRNN, FastWeightsRNN
from fastweights.reproduce._experiment import check_settings, except_for, one_line_errors, only, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Curve, Progress, RunFolder, Score
from fastweights.tasks.glimpses import GLIMPSES, VISITS, mark_stores, take_glimpses
from fastweights.training import Schedule, train

ModelName = Literal["irnn", "lstm", "convnet", "fast-weights", "linear"]
RECURRENT = ("irnn", "lstm", "fast-weights")

TITLES: dict[ModelName, str] = {
    "irnn": "IRNN",
    "lstm": "LSTM",
    "convnet": "ConvNet",
    "fast-weights": "Fast weights",
    "linear": "Linear map",
}
_EACH = GLIMPSES // VISITS  # glimpses of a visit


@dataclass(frozen=True)
class GlimpseSettings:
    """The settings of both experiments."""

    models: tuple[ModelName, ...] = ("irnn", "lstm", "convnet", "fast-weights")
    """Models to train and test, each a row of the table; `linear` is a softmax of the pixels alone."""
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
    standardize: bool = False
    """Bring the pixels of each image to mean 0 and standard deviation 1; without it they are 0 to 1."""
    weight_decay: float = 0.0
    """Decay of the weights in a step, as a multiple of the learning rate."""
    dropout: float = except_for(
        ("linear",), 0.0, "Fraction dropped, in training, of what encodes a glimpse and of what the softmax reads."
    )

    patch_size: int = only(
        RECURRENT, 100, "Hidden units of the layer that encodes a glimpse, in front of the recurrent layer."
    )
    places: bool = only(
        RECURRENT, False, "Tell with each glimpse where it is, by a bias of its own in the layer that encodes it."
    )
    readout_size: int = only(RECURRENT, 100, "ReLU units between the last hidden state and the softmax.")
    decay: float = only("fast-weights", 0.9, "Fraction of the fast matrix kept after each step.")
    rate: float | None = only("fast-weights", 0.5, "Strength of each write of a hidden state; None: it is learnt.")
    inner_steps: int = only("fast-weights", 1, "Reads of the fast matrix in each step (S in the paper).")
    layer_norm: bool = only("fast-weights", True, "Layer normalisation of the sum in an inner step (eq 5).")
    identity_scale: float = only("fast-weights", 0.05, "Multiple of the identity at which the recurrent weights start.")
    stores: Literal["marked", "every"] = only(
        "fast-weights",
        "marked",
        "Glimpses after which the state is stored: those marked in section 4.2, or every one.",
    )
    clear: bool = only("fast-weights", True, "Reset the hidden state after it is stored at a mark.")
    own_integration: bool = only(
        "fast-weights", False, "Weights of their own for the glimpse that ends a visit, and integrates what was stored."
    )
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
    written into the fast matrix, and with `clear` the hidden state is empty when the next glimpse comes. With
    `own_integration` the coarse glimpse that ends a visit has a layer of its own, which takes the state over.
    """

    stores: Tensor  # [T,1]: whether the state before each step is written
    clears: Tensor

    def __init__(self, model: ModelName, side: int, classes: int, hidden_size: int, settings: GlimpseSettings) -> None:
        super().__init__()
        self.standardize = settings.standardize
        self.dropout = nn.Dropout(settings.dropout)
        self.patch = nn.Sequential(nn.Linear((side // 4) ** 2, settings.patch_size), nn.ReLU())
        # The same as 24 more inputs, one for each glimpse. It starts at zero, as if nothing were told.
        self.places = nn.Parameter(torch.zeros(GLIMPSES, 1, settings.patch_size)) if settings.places else None
        self.core = _make_core(model, hidden_size, settings)
        own = model == "fast-weights" and settings.own_integration
        self.integration = _make_core(model, hidden_size, settings) if own else None
        marks = mark_stores().roll(1).unsqueeze(1)  # a step writes the state that the glimpse before it left
        self.register_buffer("stores", marks | (settings.stores == "every"), persistent=False)
        self.register_buffer("clears", marks & settings.clear, persistent=False)
        self.readout = nn.Sequential(
            nn.Linear(hidden_size, settings.readout_size), nn.ReLU(), nn.Linear(settings.readout_size, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        encode, activation = self.patch
        seen = encode(take_glimpses(read_pixels(images, self.standardize)).transpose(0, 1))
        x = self.dropout(activation(seen if self.places is None else seen + self.places))
        first, activation, last = self.readout
        logits: Tensor = last(self.dropout(activation(first(self.remember(x)))))
        return logits

    def remember(self, x: Tensor) -> Tensor:
        """Return the last hidden state [B,H] of the recurrent layer over x [T,B,D]."""
        told = self.control(x)
        if self.integration is None:
            return self.core(x, **told)[0][-1]  # type: ignore[no-any-return]
        state = None
        for begin in range(0, GLIMPSES, _EACH):
            end = begin + _EACH - 1
            for layer, steps in ((self.core, slice(begin, end)), (self.integration, slice(end, end + 1))):
                y, state = layer(x[steps], state, **{name: each[steps] for name, each in told.items()})
        return y[-1]  # type: ignore[no-any-return]

    def control(self, x: Tensor) -> dict[str, Tensor]:
        """Return what the recurrent layer is told of each step of x [T,B,D]: `strengths` and `clears`, or nothing."""
        if not isinstance(self.core, FastWeightsRNN):
            return {}
        shape = x.shape[:2]
        return {"strengths": self.stores.to(x.dtype).expand(shape), "clears": self.clears.expand(shape)}


def _make_core(model: ModelName, hidden_size: int, settings: GlimpseSettings) -> nn.Module:
    if model == "irnn":
        return IRNN(settings.patch_size, hidden_size, identity_scale=settings.irnn_identity_scale)
    if model == "lstm":
        return nn.LSTM(settings.patch_size, hidden_size)
    return FastWeightsRNN(
        settings.patch_size,
        hidden_size,
        decay=settings.decay,
        rate=settings.rate,
        inner_steps=settings.inner_steps,
        layer_norm=settings.layer_norm,
        identity_scale=settings.identity_scale,
    )


class PatchConvNet(nn.Module):
    """A ConvNet over the same patches: images [B,S,S] -> logits [B,C].

    Its first layer has the patches as receptive fields, at both scales. With three layers the second joins each
    quadrant's five, and the third the four quadrants; with two layers the second joins all patches. Fields do not
    overlap, so that every layer is a linear map shared over places.
    """

    def __init__(self, side: int, classes: int, features: int, settings: GlimpseSettings, *, layers: int) -> None:
        super().__init__()
        self.standardize = settings.standardize
        self.dropout = nn.Dropout(settings.dropout)
        first, patches = nn.Linear((side // 4) ** 2, features), _EACH - 1  # the coarse one once
        joined = [patches * features, VISITS * features] if layers == 3 else [VISITS * patches * features]
        self.layers = nn.ModuleList([first, *(nn.Linear(size, features) for size in joined)])
        self.readout = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Tensor:
        glimpses = take_glimpses(read_pixels(images, self.standardize))
        h = glimpses.view(-1, VISITS, _EACH, glimpses.shape[2])[:, :, :-1]  # [B,4,5,P]
        for index, layer in enumerate(self.layers):
            if index > 0:
                h = h.flatten(len(self.layers) - index)
            h = layer(h).relu()
            if index in (0, len(self.layers) - 1):  # what encodes a glimpse, and what the softmax reads
                h = self.dropout(h)
        logits: Tensor = self.readout(h)
        return logits


class LinearMap(nn.Module):
    """A softmax of the pixels alone, by which the others are measured: images [B,S,S] -> logits [B,C]."""

    def __init__(self, side: int, classes: int, settings: GlimpseSettings) -> None:
        super().__init__()
        self.standardize = settings.standardize
        self.readout = nn.Linear(side**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.readout(read_pixels(images, self.standardize).flatten(1))
        return logits


def read_pixels(images: Tensor, standardize: bool) -> Tensor:
    """Return images [B,S,S], uint8 or 0 to 1, as floating point: of 0 to 1, or each with mean 0 and deviation 1."""
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images
    return F.layer_norm(pixels, pixels.shape[1:]) if standardize else pixels


def rows_of(settings: GlimpseSettings) -> list[tuple[ModelName, int | None]]:
    """Return the models and sizes of the table's rows; the linear map has no size, and so one row."""
    rows: list[tuple[ModelName, int | None]] = [
        (model, None if model == "linear" else size) for size in settings.hidden_sizes for model in settings.models
    ]
    return list(dict.fromkeys(rows))


def make_network(
    model: ModelName, side: int, classes: int, hidden_size: int | None, settings: GlimpseSettings, *, layers: int
) -> nn.Module:
    """Return one of the networks: images [B,side,side] -> logits [B,classes]; `layers` are the ConvNet's."""
    if model == "linear" or hidden_size is None:
        return LinearMap(side, classes, settings)
    if model == "convnet":
        return PatchConvNet(side, classes, hidden_size, settings, layers=layers)
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
            Path(folder, "-".join([model, *([] if hidden_size is None else [str(hidden_size)]), f"seed{seed}"])),
            {"model": TITLES[model], "hidden_size": hidden_size, "seed": seed}
            | settings_of(settings, model, without=("hidden_sizes",)),
        )
        for model, hidden_size in rows_of(settings)
        for seed in settings.seeds
    }
    side = splits["train"][0].shape[-1]

    def train_member(
        model: ModelName, hidden_size: int | None, seed: int, member: RunFolder, progress: Progress
    ) -> None:
        network = make_network(model, side, classes, hidden_size, settings, layers=layers).to(settings.device)
        # With a decay of zero its steps are Adam's.
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        features = "" if hidden_size is None else f", {hidden_size} features"
        title = f"{TITLES[model]}{features}, seed {seed}"
        train(
            network, splits, schedule(settings), member, seed=seed, optimizer=optimizer, title=title, progress=progress
        )

    commonest, labels = splits["train"][1].bincount().argmax(), splits["test"][1]
    floor = 100 * float((labels != commonest).float().mean())

    def table() -> dict[str, Any]:
        return {
            "requested": [(TITLES[model], size) for model, size in rows_of(settings)],
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
    check_dropout(dropout=settings.dropout)
    if not 0 <= settings.weight_decay * settings.learning_rate < 1:
        raise ValueError(
            f"weight_decay times learning_rate must be at least 0 and less than 1, got {settings.weight_decay} times "
            f"{settings.learning_rate}"
        )
    for model, hidden_size in rows_of(settings):
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
