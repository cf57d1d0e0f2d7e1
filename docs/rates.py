"""Train layers with several write rates, an LSTM and a GRU of as many parameters: which default serves most tasks?

python docs/rates.py, then python docs/fill.py. It needs MNIST and FER2013 (FASTWEIGHTS_DATA) and popgym. Every run is
written when it ends, and the same command goes on with those that are missing: after a change to this file, remove what
it wrote.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import nn
from fastweights.reproduce.ba2016 import _glimpses, facial_expression, mnist_glimpses
from fastweights.reproduce.guides import when_an_lstm_is_better as small
from fastweights.reproduce.popgym import memory_tasks
from fastweights.reproduce.recall import _frame
from fastweights.runs import RunFolder, describe_environment
from fastweights.tasks import faces, mnist, state_tracking
from fastweights.training import ActorCritic, train, train_actor_critic

RESULTS = Path(__file__).parent / "results" / "rates"
SEEDS = (1, 2, 3)
DECAY = 0.95  # the layer's default; the experiments of Ba et al. have 0.9
CARDS, SUITS, BACK, DEALT = 52, 4, 3, 20  # of RepeatPrevious: a deck, and whose suit is asked for
FRAMES = 300_000
SCORED = {
    "adding": (300, 1000),
    "adding for longer": (300, 1000, 3000),
    "recall": (1000, 3000),
    "recall for longer": (3000, 6000),
}  # batches after which a network is tested
WORD, EPOCHS, WORDS = 40, 3, 20_000  # of state tracking: elements, and passes over so many words
GLIMPSE_EPOCHS = {"mnist": 2, "fer2013": 3}

Make = Callable[..., torch.nn.Module]  # takes features and units, by name `decay` and `batch_first`
Scores = dict[str, float]


def fast_weights(rate: Callable[[int], float | None]) -> Make:
    """Return how to make a layer by default, or with a rate that its units decide and the paper's start."""

    def make(features: int, units: int, *, decay: float = DECAY, batch_first: bool = False) -> torch.nn.Module:
        number = rate(units)
        scale = None if number is None else small.PAPERS_SCALE
        return nn.FastWeightsRNN(
            features, units, decay=decay, rate=number, identity_scale=scale, batch_first=batch_first
        )

    return make


def of_torch(kind: Callable[..., torch.nn.Module]) -> Make:
    def make(features: int, units: int, *, decay: float = DECAY, batch_first: bool = False) -> torch.nn.Module:
        return kind(features, units, batch_first=batch_first)

    return make


DEFAULT, PAPER = "`rate=None`", "`rate=0.5`"
PER_UNIT = "`rate=0.5 / hidden_size`"
LSTM, GRU = "`torch.nn.LSTM`", "`torch.nn.GRU`"
LAYERS: dict[str, Make] = {
    DEFAULT: fast_weights(lambda units: None),
    PAPER: fast_weights(lambda units: 0.5),
    PER_UNIT: fast_weights(lambda units: 0.5 / units),
    LSTM: of_torch(torch.nn.LSTM),
    GRU: of_torch(torch.nn.GRU),
}


def count_parameters(layer: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def make_equal(title: str, features: int, units: int, **options: Any) -> tuple[torch.nn.Module, int]:
    """Return a layer with about as many parameters as fast weights of so many units, and its own units."""
    with torch.device("meta"):  # shapes alone
        wanted = count_parameters(LAYERS[DEFAULT](features, units))
        own = min(range(1, units + 1), key=lambda size: abs(count_parameters(LAYERS[title](features, size)) - wanted))
    return LAYERS[title](features, own, **options), own


def final_rate(layer: torch.nn.Module) -> Scores:
    """Return the rate that a fast-weights layer of one layer has in the end."""
    return {"rate": layer.rates()[0]} if isinstance(layer, nn.FastWeightsRNN) else {}


def add_or_recall(name: str, title: str, units: int, seed: int) -> Scores:
    """Train on batches of a sum or a recall, as `guides/when-an-lstm-is-better` does."""
    layers = []

    def make(features: int) -> torch.nn.Module:
        layers.append(make_equal(title, features, units)[0])
        return layers[0]

    scores = small.train(
        small.TASKS[name.partition(" ")[0]], make, seed, replace(small.Settings(), scored=SCORED[name])
    )
    return {str(step): score for step, score in scores.items()} | final_rate(layers[0])


def deal(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Deal cards from shuffled decks, one-hot [T,count,52], and the suits [T - 3,count] of three cards before."""
    cards = torch.stack([torch.randperm(CARDS, generator=generator)[:DEALT] for _ in range(count)]).T
    return F.one_hot(cards, CARDS).float(), cards[:-BACK] // (CARDS // SUITS)


def repeat_previous(title: str, units: int, seed: int) -> Scores:
    """Learn to name the suit of three cards before, with supervision: 400 batches of 32 decks."""
    torch.manual_seed(seed)
    layer, own = make_equal(title, CARDS, units)
    readout = torch.nn.Linear(own, SUITS)
    parameters = [*layer.parameters(), *readout.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    test_cards, test_suits = deal(1000, torch.Generator().manual_seed(0))
    scores: Scores = {}
    for step in range(1, 401):
        cards, suits = deal(32, generator)
        loss = F.cross_entropy(readout(layer(cards)[0])[BACK:].flatten(0, 1), suits.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step in (200, 400):
            with torch.no_grad():
                right = readout(layer(test_cards)[0])[BACK:].argmax(2) == test_suits
            scores[str(step)] = 100 * float(right.double().mean())
    return scores | final_rate(layer)


def compare_signs(title: str, units: int, seed: int) -> Scores:
    """Learn whether the first of six inputs and the last have the same sign: 240 batches of 128, fast."""
    torch.manual_seed(seed)
    layer, own = make_equal(title, 4, units)
    readout = torch.nn.Linear(own, 2)
    parameters = [*layer.parameters(), *readout.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, count, 4, generator=generator)
        return x, (x[0, :, 0] * x[-1, :, 0] > 0).long()

    generator = torch.Generator().manual_seed(seed)
    for _ in range(240):
        x, targets = draw(128, generator)
        loss = F.cross_entropy(readout(layer(x)[0][-1]), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        optimizer.step()
    x, targets = draw(2000, torch.Generator().manual_seed(0))
    with torch.no_grad():
        wrong = readout(layer(x)[0][-1]).argmax(1) != targets
    return {"240": 100 * float(wrong.double().mean())} | final_rate(layer)


def play(learning_rate: float, title: str, units: int, seed: int) -> Scores:
    """Train an agent on RepeatPreviousEasy, as `fastweights reproduce popgym/memory-tasks` does, with more frames."""
    model: Any = {LSTM: "lstm", GRU: "gru"}.get(title, "fast-weights")
    settings = replace(
        memory_tasks.Settings(),
        frames=FRAMES,
        gru_learning_rate=learning_rate,
        lstm_learning_rate=learning_rate,
        fast_weights_learning_rate=learning_rate,
    )
    environments = memory_tasks.make_environments("RepeatPreviousEasy", settings)
    own = memory_tasks.find_hidden_size(model, settings, *memory_tasks.count_spaces(environments))
    torch.manual_seed(seed)
    policy = ActorCritic(environments, LAYERS[title](settings.encoder_size, own))
    with tempfile.TemporaryDirectory() as path, RunFolder(Path(path) / "run", {"seed": seed}) as folder:
        schedule = memory_tasks.schedule(model, settings)
        result = train_actor_critic(policy, environments, schedule, folder, seed=seed, title=title)
    return {"return": result["test_return"]} | final_rate(policy.core)


class Wide(torch.nn.Module):
    """A layer and its way back to the features of its frame."""

    def __init__(self, layer: torch.nn.Module, units: int, features: int) -> None:
        super().__init__()
        self.layer, self.out = layer, _frame.linear(units, features, std=_frame.STD_OUT)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.layer(x)[0])
        return y


def follow(group: state_tracking.Group, title: str, units: int, seed: int) -> Scores:
    """Learn words of a group, in the frame of `fastweights reproduce recall/state-tracking`, three passes at most."""
    train_words = state_tracking.sample(WORDS, WORD, group, generator=torch.Generator().manual_seed(0))
    test_words = state_tracking.sample(2000, 2 * WORD, group, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    layers = []

    def mix() -> Any:
        layer, own = make_equal(title, units, units, batch_first=True)
        layers.append(layer)
        return Wide(layer, own, units)

    network = _frame.Frame(mix, vocabulary_size=state_tracking.size(group), embedding_size=units)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.1)
    order, batch = torch.Generator().manual_seed(seed), 64
    steps = EPOCHS * (WORDS // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(WORDS, generator=order).split(batch)[: WORDS // batch]:
            logits = network(train_words.inputs[rows])
            loss = F.cross_entropy(logits.flatten(0, 1), train_words.targets[rows].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            right = (network(test_words.inputs).argmax(2) == test_words.targets).double()
        near, far = float(right[:, :WORD].mean()), float(right[:, WORD:].mean())
        if near == 1:
            break
    rates = {"rate": layers[-1].rates()[0]} if isinstance(layers[-1], nn.FastWeightsRNN) else {}
    return {"near": 100 * near, "far": 100 * far, "epochs": schedule.last_epoch * EPOCHS / steps} | rates


@cache
def load_images(data: str, standardised: bool) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    """Return the splits of MNIST or FER2013, and the number of classes; standardised: each image by its own pixels."""
    if data == "mnist":
        splits, classes = mnist_glimpses.load_splits(mnist_glimpses.Settings()), mnist.CLASSES
    else:
        read = facial_expression.load_faces(facial_expression.Settings())
        splits, classes = {part: read.part(part) for part in faces.PARTS}, len(read.names)

    def standardise(images: Tensor) -> Tensor:
        pixels = images.flatten(1).float()
        mean, spread = pixels.mean(1, keepdim=True), pixels.std(1, keepdim=True).clamp(min=1)
        return ((pixels - mean) / spread).view(images.shape)

    if standardised:
        splits = {part: (standardise(images), labels) for part, (images, labels) in splits.items()}
    return splits, classes


def look(data: str, standardised: bool, title: str, units: int, seed: int) -> Scores:
    """Train a glimpse network of Ba et al. 2016, as `fastweights reproduce` does, for fewer epochs."""
    settings: _glimpses.GlimpseSettings = mnist_glimpses.Settings()
    if data == "fer2013":
        settings = facial_expression.Settings()
    settings = replace(settings, epochs=GLIMPSE_EPOCHS[data])
    splits, classes = load_images(data, standardised)
    torch.manual_seed(seed)
    layer, own = make_equal(title, settings.patch_size, units, decay=settings.decay)
    network = _glimpses.GlimpseModel("lstm", splits["train"][0].shape[-1], classes, own, settings)
    network.core = layer
    with tempfile.TemporaryDirectory() as path, RunFolder(Path(path) / "run", {"seed": seed}) as folder:
        result = train(network, splits, _glimpses.schedule(settings), folder, seed=seed, title=title)
    return {"error": result["test_error"]} | final_rate(layer)


class Task(NamedTuple):
    """A row of the table: a task, how it is scored, the units of fast weights, and how to train a layer on it."""

    name: str
    metric: str
    units: int
    key: str  # of the scores
    decimals: int
    train: Callable[[str, int, int], Scores]  # takes a layer's title, the units and a seed
    floor: float | None = None


def list_tasks() -> list[Task]:
    """Return the tasks, quick ones first, so that what ends early has whole rows."""

    def adding(title: str, units: int, seed: int) -> Scores:
        return add_or_recall("adding", title, units, seed)

    def longer(title: str, units: int, seed: int) -> Scores:
        return add_or_recall("adding for longer", title, units, seed)

    def much_longer(title: str, units: int, seed: int) -> Scores:
        return add_or_recall("recall for longer", title, units, seed)

    def recall(title: str, units: int, seed: int) -> Scores:
        return add_or_recall("recall", title, units, seed)

    def popgym(learning_rate: float) -> Callable[[str, int, int], Scores]:
        return lambda title, units, seed: play(learning_rate, title, units, seed)

    def words(group: state_tracking.Group) -> Callable[[str, int, int], Scores]:
        return lambda title, units, seed: follow(group, title, units, seed)

    def images(data: str, standardised: bool = False) -> Callable[[str, int, int], Scores]:
        return lambda title, units, seed: look(data, standardised, title, units, seed)

    floors = {name: small.TASKS[name].floor for name in ("adding", "recall")}
    return [
        *(
            Task("RepeatPrevious, supervised", "right, %", units, "400", 1, repeat_previous, 25)
            for units in (16, 64, 256)
        ),
        *(Task("signs, learning rate 0.01", "wrong, %", units, "240", 1, compare_signs, 50) for units in (16, 64)),
        *(
            Task("recall, 3,000 steps", "wrong, %", units, "3000", 1, recall, floors["recall"])
            for units in (20, 50, 100, 256)
        ),
        *(
            Task("adding, 1,000 steps", "squared error", units, "1000", 4, adding, floors["adding"])
            for units in (16, 64, 256)
        ),
        Task("RepeatPreviousEasy, agent, learning rate 0.01", "return", 122, "return", 2, popgym(1e-2), -0.5),
        Task("RepeatPreviousEasy, agent, learning rate 0.003", "return", 122, "return", 2, popgym(3e-3), -0.5),
        Task("parity, words of twice the length", "right, %", 64, "far", 1, words("parity"), 50),
        Task("S3, words of twice the length", "right, %", 64, "far", 1, words("S3"), 100 / 6),
        Task("FER2013 in glimpses", "wrong, %", 200, "error", 1, images("fer2013")),
        Task("FER2013 in glimpses, standardised", "wrong, %", 200, "error", 1, images("fer2013", True)),
        *(Task("MNIST in glimpses", "wrong, %", units, "error", 2, images("mnist")) for units in (50, 100, 200)),
        Task("recall, 6,000 steps", "wrong, %", 256, "6000", 1, much_longer, floors["recall"]),
        Task("adding, 3,000 steps", "squared error", 256, "3000", 4, longer, floors["adding"]),
    ]


def read_runs() -> list[dict[str, Any]]:
    """Return the runs that have ended."""
    path = RESULTS / "members.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@torch.no_grad()
def length_of_reading(rate: float | None, units: int, steps: int, decay: float) -> float:
    """Return how long A h_0 is beside z in an untrained layer, at the last of some steps of 32 random features."""
    torch.manual_seed(0)
    layer: Any = fast_weights(lambda _: rate)(32, units, decay=decay)
    x = torch.randn(steps, 16, 32)
    _, (hidden, memory) = layer(x[:-1])
    drive = F.linear(x[-1], layer.weight_ih, layer.bias) + F.linear(hidden, layer.weight_hh)
    memory = decay * memory + layer.rates()[0] * hidden.unsqueeze(2) * hidden.unsqueeze(1)
    reading = (memory @ drive.relu().unsqueeze(2)).squeeze(2)
    return float((reading.norm(dim=1) / drive.norm(dim=1)).mean())


def measure_readings() -> dict[str, Any]:
    """Return the least and the greatest of these ratios over widths, lengths and decays, for each width."""
    cases = [(steps, decay) for steps in (24, 200) for decay in (0.5, 0.95, 0.99)]
    rates: dict[str, Callable[[int], float | None]] = {
        PAPER: lambda units: 0.5,
        PER_UNIT: lambda units: 0.5 / units,
        DEFAULT: lambda units: None,
    }
    return {
        title: {
            units: [pick(length_of_reading(rate(units), units, *case) for case in cases) for pick in (min, max)]
            for units in (16, 64, 256, 1024)
        }
        for title, rate in rates.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = RESULTS / "measured.json"
    record = json.loads(about.read_text()) if about.exists() else {"readings": measure_readings()}
    tasks = [{key: value for key, value in task._asdict().items() if key != "train"} for task in list_tasks()]
    record |= {"environment": describe_environment(), "layers": list(LAYERS), "tasks": tasks}
    about.write_text(json.dumps(record, indent=1) + "\n")
    done = {(run["task"], run["units"], run["layer"], run["seed"]) for run in read_runs()}
    for seed in SEEDS:
        for task in list_tasks():
            for title in LAYERS:
                if (task.name, task.units, title, seed) in done:
                    continue
                began = time.perf_counter()
                scores = task.train(title, task.units, seed)
                run = {"task": task.name, "units": task.units, "layer": title, "seed": seed, "scores": scores}
                with (RESULTS / "members.jsonl").open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(*run.values(), f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
