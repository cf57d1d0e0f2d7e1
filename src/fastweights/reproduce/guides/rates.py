"""Which rate should fast weights write with? Several rates, an LSTM and a GRU of as many parameters on many tasks.

The sizes are units of fast weights; LSTM and GRU have as many as bring their parameters closest. Every task trains for
a fixed number of batches, frames or passes, on sequences that are new where they are drawn.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import nn
from fastweights.checks import check_positive
from fastweights.reproduce._experiment import check_settings, find_size, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.ba2016 import facial_expression, glimpses, mnist_glimpses
from fastweights.reproduce.guides import when_an_lstm_is_better as small
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.reproduce.popgym import memory_tasks
from fastweights.reproduce.recall import frame
from fastweights.runs import Record, RunFolder, Score, metric_key
from fastweights.tasks import faces, holding, mnist, state_tracking
from fastweights.training import ActorCritic, train, train_actor_critic

EXPERIMENT = "guides/rates"
QUICK_MINUTES = 2
DATA = None

ModelName = Literal["learnt", "paper", "per-unit", "lstm", "gru"]
TITLES: dict[ModelName, str] = {
    "learnt": "rate=None",
    "paper": "rate=0.5",
    "per-unit": "rate=0.5 / hidden_size",
    "lstm": "torch.nn.LSTM",
    "gru": "torch.nn.GRU",
}
DECAY = 0.95  # the layer's default; the experiments of Ba et al. have 0.9

TaskName = Literal[
    "repeat-previous",
    "signs",
    "recall",
    "long-recall",
    "adding",
    "long-adding",
    "agent",
    "slow-agent",
    "parity",
    "s3",
    "fer2013",
    "fer2013-standardised",
    "mnist",
    "readings",
]


@dataclass(frozen=True)
class Settings:
    """Which rate fast weights write with: tasks to learn with several rates, with an LSTM and with a GRU."""

    models: tuple[ModelName, ...] = ("learnt", "paper", "per-unit", "lstm", "gru")
    """Rates of fast weights and layers beside them, each a column of the table."""
    tasks: tuple[TaskName, ...] = ("repeat-previous", "signs")
    """Tasks to learn, and `readings`, the length of what an untrained layer reads; some take hours."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and of what is drawn: one training run for each."""
    effort: float = 1.0
    """Share of each task's training, of its batches, frames, words or passes: a tenth shows whether it runs."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""


TRAINED: tuple[TaskName, ...] = (
    "repeat-previous", "signs", "recall", "adding", "agent", "slow-agent", "parity", "s3", "fer2013",
    "fer2013-standardised", "mnist", "long-recall", "long-adding",
)  # fmt: skip
PRESETS = {
    "quick": Settings(),
    "full": Settings(tasks=TRAINED, seeds=(1, 2, 3)),
    "readings": Settings(models=("paper", "per-unit", "learnt"), tasks=("readings",), seeds=(0,)),
}

run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every task, size, model and seed of the settings.

    Raises:
        DataError: the images of a task are missing or damaged.
        RunError: a task needs popgym, and it is not installed.
    """
    for name in settings.tasks:
        if name in GLIMPSE_EPOCHS:
            load_images(name)
        elif name in AGENTS:
            memory_tasks.make_environments("RepeatPreviousEasy", memory_tasks.Settings())
    rows = [
        Row(model, units, name)
        for name in settings.tasks
        for units in TASKS[name].units
        for model in settings.models
        if model in TASKS[name].models
    ]

    def measure(row: Row, seed: int) -> Record:
        name, model = cast(TaskName, row.task), cast(ModelName, row.model)
        values, layer = TASKS[name].train(model, row.hidden_size or 1, seed, settings)
        scores = dict(zip(map(metric_key, TASKS[name].metrics), values, strict=True))
        rate = {"rate": layer.rates()[0]} if isinstance(layer, nn.FastWeightsRNN) else {}
        return scores | {"parameters": count_parameters(layer)} | rate

    scores = []
    for name in settings.tasks:
        pairs = [(TITLES[cast(ModelName, row.model)], row.hidden_size) for row in rows if row.task == name]
        scores += [Score(metric, {}, TASKS[name].floor, pairs) for metric in TASKS[name].metrics]
    return prepare_whole(settings, folder, rows, measure, scores, titles=TITLES, without=("tasks",))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=(), lists=("models", "tasks", "seeds"))
    check_positive(effort=settings.effort)
    for name in settings.tasks:
        if not set(settings.models) & set(TASKS[name].models):
            raise ValueError(f"{name} needs one of the models {', '.join(TASKS[name].models)}, got {settings.models}")


# The layers


def make_layer(
    model: ModelName, features: int, units: int, *, decay: float = DECAY, batch_first: bool = False
) -> torch.nn.Module:
    """Return a layer by default, or with a rate that is a number and the paper's start."""
    if model == "lstm":
        return torch.nn.LSTM(features, units, batch_first=batch_first)
    if model == "gru":
        return torch.nn.GRU(features, units, batch_first=batch_first)
    numbers = {"learnt": None, "paper": small.PAPERS_RATE, "per-unit": small.PAPERS_RATE / units}
    scale = None if model == "learnt" else small.PAPERS_SCALE
    rate = numbers[model]
    return nn.FastWeightsRNN(features, units, decay=decay, rate=rate, identity_scale=scale, batch_first=batch_first)


def count_parameters(layer: torch.nn.Module) -> int:
    """Return how many numbers of a layer are learnt."""
    return sum(parameter.numel() for parameter in layer.parameters())


def make_equal(model: ModelName, features: int, units: int, **options: Any) -> tuple[torch.nn.Module, int]:
    """Return a layer with about as many parameters as fast weights of so many units, and its own units."""
    with torch.device("meta"):  # shapes alone
        wanted = count_parameters(make_layer("learnt", features, units))
        own = find_size(lambda size: count_parameters(make_layer(model, features, size)), wanted)
    return make_layer(model, features, own, **options), own


# The tasks: each trains a layer, and returns its scores and the layer

Trained = tuple[list[float], torch.nn.Module]


def shorten(count: int, settings: Settings) -> int:
    """Return the share of a task's training that the settings ask for."""
    return max(1, round(settings.effort * count))


def add_or_recall(
    name: small.TaskName, steps: int, model: ModelName, units: int, seed: int, settings: Settings
) -> Trained:
    """Train on batches of a sum or a recall, as `guides/when-an-lstm-is-better` does."""
    layers = []

    def make(features: int) -> torch.nn.Module:
        layers.append(make_equal(model, features, units)[0])
        return layers[0]

    steps = shorten(steps, settings)
    own = replace(small.Settings(), scored=(steps,), device=settings.device)
    return [small.train(small.TASKS[name], make, seed, own)[steps]], layers[0]


BACK, DEALT = 3, 20  # of RepeatPrevious: whose suit is asked for


def deal(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Deal cards from shuffled decks, one-hot [T,count,52], and the suits [T - 3,count] of three cards before."""
    cards, suits = holding.sample_cards(count, BACK, DEALT, generator=generator)
    return F.one_hot(cards.T, holding.CARDS).float(), suits.T[BACK:]


def repeat_previous(model: ModelName, units: int, seed: int, settings: Settings) -> Trained:
    """Learn to name the suit of three cards before, with supervision: 400 batches of 32 decks."""
    network = Classifier(model, holding.CARDS, units, holding.SUITS, seed).to(settings.device)

    def answer(cards: Tensor) -> Tensor:
        return cast(Tensor, network(cards))[BACK:].flatten(0, 1)

    fit(network, answer, deal, 32, shorten(400, settings), 3e-3, 1.0, seed, settings)
    return [100 - wrong(answer, deal(1000, torch.Generator().manual_seed(0)), settings)], network.layer


def draw_signs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw six inputs [6,count,4], and whether the first and the last have the same sign [count]."""
    x = torch.randn(6, count, 4, generator=generator)
    return x, (x[0, :, 0] * x[-1, :, 0] > 0).long()


def compare_signs(model: ModelName, units: int, seed: int, settings: Settings) -> Trained:
    """Learn whether the first of six inputs and the last have the same sign: 240 batches of 128, fast."""
    network = Classifier(model, 4, units, 2, seed).to(settings.device)

    def answer(x: Tensor) -> Tensor:
        return cast(Tensor, network(x))[-1]

    fit(network, answer, draw_signs, 128, shorten(240, settings), 1e-2, 5.0, seed, settings)
    return [wrong(answer, draw_signs(2000, torch.Generator().manual_seed(0)), settings)], network.layer


class Classifier(torch.nn.Module):
    """A layer and a readout of each step: x [T,B,D] -> logits [T,B,C]."""

    def __init__(self, model: ModelName, features: int, units: int, classes: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, own = make_equal(model, features, units)
        self.readout = torch.nn.Linear(own, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.readout(self.layer(x)[0])
        return logits


def fit(
    network: torch.nn.Module,
    answer: Callable[[Tensor], Tensor],
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]],
    batch: int,
    steps: int,
    learning_rate: float,
    clip_norm: float,
    seed: int,
    settings: Settings,
) -> None:
    """Train a network on batches that are new at every step."""
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, targets = draw(batch, generator)
        loss = F.cross_entropy(answer(x.to(settings.device)), targets.to(settings.device).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()


@torch.no_grad()
def wrong(answer: Callable[[Tensor], Tensor], test: tuple[Tensor, Tensor], settings: Settings) -> float:
    """Return how many answers of 100 are wrong."""
    x, targets = (part.to(settings.device) for part in test)
    return 100 * float((answer(x).argmax(1) != targets.flatten()).double().mean())


FRAMES = 300_000
AGENTS: dict[TaskName, float] = {"agent": 1e-2, "slow-agent": 3e-3}  # their learning rates
ENTROPY = 1e-3  # weight of the policy's entropy


def play(name: TaskName, model: ModelName, units: int, seed: int, settings: Settings) -> Trained:
    """Train an agent on RepeatPreviousEasy, as `popgym/memory-tasks` does, with more frames; `units` are that one's."""
    theirs: memory_tasks.ModelName = model if model in ("lstm", "gru") else "fast-weights"
    own = memory_tasks.Settings(
        frames=shorten(FRAMES, settings),
        gru_learning_rate=AGENTS[name],
        lstm_learning_rate=AGENTS[name],
        fast_weights_learning_rate=AGENTS[name],
        gru_entropy=ENTROPY,
        lstm_entropy=ENTROPY,
        fast_weights_entropy=ENTROPY,
    )
    environments = memory_tasks.make_environments("RepeatPreviousEasy", own)
    size = memory_tasks.find_hidden_size(theirs, own, *memory_tasks.count_spaces(environments))
    torch.manual_seed(seed)
    policy = ActorCritic(environments, make_layer(model, own.encoder_size, size)).to(settings.device)
    with tempfile.TemporaryDirectory() as path, RunFolder(Path(path) / "run", {"seed": seed}) as folder:
        schedule = memory_tasks.schedule(theirs, own)
        result = train_actor_critic(policy, environments, schedule, folder, seed=seed, title=TITLES[model])
    return [result["test_return"]], policy.core


WORD, EPOCHS, WORDS = 40, 3, 20_000  # of state tracking: elements, and passes over so many words


def follow(group: state_tracking.Group, model: ModelName, units: int, seed: int, settings: Settings) -> Trained:
    """Learn words of a group, in the frame of `recall/state-tracking`, three passes at most."""
    batch, count = 64, shorten(WORDS, settings)
    train_words = state_tracking.sample(count, WORD, group, generator=torch.Generator().manual_seed(0))
    test_words = state_tracking.sample(2000, 2 * WORD, group, generator=torch.Generator().manual_seed(1))
    (inputs, targets), (test_inputs, test_targets) = (
        (words.inputs.to(settings.device), words.targets.to(settings.device)) for words in (train_words, test_words)
    )
    torch.manual_seed(seed)
    layers = []

    def mix() -> frame.Mixer:
        layer, own = make_equal(model, units, units, batch_first=True)
        layers.append(layer)
        return frame.Recurrence(layer, frame.linear(own, units, std=frame.STD_OUT), units)

    network = frame.Frame(mix, vocabulary_size=state_tracking.size(group), embedding_size=units).to(settings.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.1)
    order = torch.Generator().manual_seed(seed)
    steps = max(1, count // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(count, generator=order).split(batch)[:steps]:  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(network(inputs[rows]).flatten(0, 1), targets[rows].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            right = (network(test_inputs).argmax(2) == test_targets).double()
        if right[:, :WORD].mean() == 1:
            break
    return [100 * float(right[:, WORD:].mean())], layers[-1]


GLIMPSE_EPOCHS: dict[TaskName, int] = {"mnist": 2, "fer2013": 3, "fer2013-standardised": 3}


@cache
def load_images(name: TaskName) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    """Return the splits of MNIST or FER2013, and the number of classes; standardised: each image by its own pixels."""
    if name == "mnist":
        return mnist_glimpses.load_splits(mnist_glimpses.Settings()), mnist.CLASSES
    data = facial_expression.load_faces(facial_expression.Settings())
    splits = {part: data.part(part) for part in faces.PARTS}
    if name == "fer2013-standardised":
        splits = {part: (standardise(images), labels) for part, (images, labels) in splits.items()}
    return splits, len(data.names)


def standardise(images: Tensor) -> Tensor:
    """Return images [N,S,S] each of mean 0 and deviation 1."""
    pixels = images.flatten(1).float()
    mean, spread = pixels.mean(1, keepdim=True), pixels.std(1, keepdim=True).clamp(min=1)
    return ((pixels - mean) / spread).view(images.shape)


def look(name: TaskName, model: ModelName, units: int, seed: int, settings: Settings) -> Trained:
    """Train a glimpse network of Ba et al. 2016, as `ba2016/mnist-glimpses` does, for fewer epochs."""
    own: glimpses.GlimpseSettings = mnist_glimpses.Settings() if name == "mnist" else facial_expression.Settings()
    own = replace(own, epochs=shorten(GLIMPSE_EPOCHS[name], settings))
    splits, classes = load_images(name)
    splits = {part: (x.to(settings.device), y.to(settings.device)) for part, (x, y) in splits.items()}
    torch.manual_seed(seed)
    layer, size = make_equal(model, own.patch_size, units, decay=own.decay)
    network = glimpses.GlimpseModel("lstm", splits["train"][0].shape[-1], classes, size, own)
    network.core = layer
    network.to(settings.device)
    with tempfile.TemporaryDirectory() as path, RunFolder(Path(path) / "run", {"seed": seed}) as folder:
        result = train(network, splits, glimpses.schedule(own), folder, seed=seed, title=TITLES[model])
    return [result["test_error"]], layer


READ_AT = [(steps, decay) for steps in (24, 200) for decay in (0.5, 0.95, 0.99)]


@torch.no_grad()
def measure_readings(model: ModelName, units: int, seed: int, settings: Settings) -> Trained:
    """Return how long A h_0 is beside z in an untrained layer, the least and the most over lengths and decays.

    It is that of the last of some steps of 32 random features.
    """
    ratios = []
    for steps, decay in READ_AT:
        torch.manual_seed(seed)
        layer = cast(nn.FastWeightsRNN, make_layer(model, 32, units, decay=decay).to(settings.device))
        x = torch.randn(steps, 16, 32).to(settings.device)
        _, (hidden, memory) = layer(x[:-1])
        weight_ih, weight_hh, bias = (getattr(layer, name) for name in ("weight_ih", "weight_hh", "bias"))
        drive = F.linear(x[-1], weight_ih, bias) + F.linear(hidden, weight_hh)
        memory = decay * memory + layer.rates()[0] * hidden.unsqueeze(2) * hidden.unsqueeze(1)
        reading = (memory @ drive.relu().unsqueeze(2)).squeeze(2)
        ratios.append(float((reading.norm(dim=1) / drive.norm(dim=1)).mean()))
    return [min(ratios), max(ratios)], layer


class Task(NamedTuple):
    """A task: its metrics, the units of fast weights, how a layer is trained on it, its floor, and who can learn it."""

    metrics: tuple[str, ...]
    units: tuple[int, ...]
    train: Callable[[ModelName, int, int, Settings], Trained]
    floor: float | None = None
    models: tuple[ModelName, ...] = ("learnt", "paper", "per-unit", "lstm", "gru")


RECALL, ADDING = (small.TASKS[name].floor for name in ("recall", "adding"))
TASKS: dict[TaskName, Task] = {
    "repeat-previous": Task(("RepeatPrevious with supervision: right, %",), (16, 64, 256), repeat_previous, 25),
    "signs": Task(("signs at a learning rate of 0.01: wrong, %",), (16, 64), compare_signs, 50),
    "recall": Task(
        ("recall in 3000 steps: wrong, %",),
        (20, 50, 100, 256),
        partial(add_or_recall, "recall", 3000),
        RECALL,
    ),
    "adding": Task(
        ("adding in 1000 steps: squared error",),
        (16, 64, 256),
        partial(add_or_recall, "adding", 1000),
        ADDING,
    ),
    "agent": Task(
        ("agent of RepeatPreviousEasy at a learning rate of 0.01: return",),
        (122,),
        partial(play, "agent"),
        -0.5,
    ),
    "slow-agent": Task(
        ("agent of RepeatPreviousEasy at a learning rate of 0.003: return",),
        (122,),
        partial(play, "slow-agent"),
        -0.5,
    ),
    "parity": Task(("parity in words of twice the length: right, %",), (64,), partial(follow, "parity"), 50),
    "s3": Task(("S3 in words of twice the length: right, %",), (64,), partial(follow, "S3"), 100 / 6),
    "fer2013": Task(("FER2013 in glimpses: wrong, %",), (200,), partial(look, "fer2013")),
    "fer2013-standardised": Task(
        ("FER2013 in glimpses and standardised: wrong, %",), (200,), partial(look, "fer2013-standardised")
    ),
    "mnist": Task(("MNIST in glimpses: wrong, %",), (50, 100, 200), partial(look, "mnist")),
    "long-recall": Task(("recall in 6000 steps: wrong, %",), (256,), partial(add_or_recall, "recall", 6000), RECALL),
    "long-adding": Task(
        ("adding in 3000 steps: squared error",), (256,), partial(add_or_recall, "adding", 3000), ADDING
    ),
    "readings": Task(
        ("what is read beside z: least", "what is read beside z: most"),
        (16, 64, 256, 1024),
        measure_readings,
        models=("paper", "per-unit", "learnt"),
    ),
}
