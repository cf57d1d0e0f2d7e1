"""A law of sizes: what solves a small problem by its defaults solves it at ten times and at a hundred times the size.

A default that was found at one width, length, number of features, classes or examples fails here at another. Each entry
is as hard at every size as a problem can be: signals and noise keep their ratio, and inputs are numbers of unit size.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import few_shot, memory, nn, training
from fastweights.nn.fast_weight_programmer import RULES

LEARNING_RATE = training.Schedule(epochs=1).learning_rate
CLIP = 1.0
SOLVED, RECALLED = 0.9, 0.8  # the share of right answers
MOST_UPDATES = 2000  # small layers need many, and take little time for each


@dataclass(frozen=True)
class Problem:
    """A small problem: `solve` gives the score at a size, which is to be at least `least` at each of the sizes."""

    name: str
    axis: str  # units, features, classes, examples or steps
    sizes: tuple[int, int, int]  # ten times apart
    solve: Callable[[int], float]
    least: float
    slow: Sequence[int] = ()  # sizes that take more than some seconds

    def __str__(self) -> str:
        return f"{self.name}, {self.axis}"


def by(solve: Callable[..., float], axis: str, *arguments: Any, **options: Any) -> Callable[[int], float]:
    """Return the score as a function of one argument, by its name."""
    return lambda size: solve(*arguments, **options, **{axis: size})


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Recurrent layers: which of four symbols was read two steps before?

SYMBOLS, BACK = 4, 2


def repeat_previous(
    make: Callable[[int, int], torch.nn.Module], *, units: int = 32, features: int = 8, steps: int = 12
) -> float:
    """Return the share of right answers of the last of some updates by Adam, which end when nearly all are right."""
    torch.manual_seed(0)
    layer, output = make(features, units), torch.nn.Linear(units, SYMBOLS)
    symbols = torch.randn(SYMBOLS, features, generator=generator(1))
    batch = max(4, 32 * 12 // steps)

    def draw(draws: torch.Generator) -> tuple[Tensor, Tensor]:
        symbol = torch.randint(SYMBOLS, (steps, batch), generator=draws)
        return symbols[symbol], symbol[:-BACK]

    return learn([layer, output], draw, lambda x: output(layer(x)[0][BACK:]))


def learn(
    parts: Sequence[torch.nn.Module],
    draw: Callable[[torch.Generator], tuple[Any, Tensor]],
    answer: Callable[[Any], Tensor],
    solved: float = SOLVED,
) -> float:
    """Train on batches until most answers of the last five are right, or for long; return how many are."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer, draws, right = torch.optim.Adam(parameters, LEARNING_RATE), generator(2), []
    for _ in range(MOST_UPDATES):
        x, targets = draw(draws)
        logits = answer(x)
        right.append(float((logits.argmax(-1) == targets).float().mean()))
        if len(right) >= 5 and sum(right[-5:]) / 5 >= solved:
            break
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    return sum(right[-5:]) / 5


class Programmer(torch.nn.Module):
    """Fast weights of one head, as wide as it is told; their inputs are projected to that width."""

    def __init__(self, features: int, units: int, **options: Any) -> None:
        super().__init__()
        self.project = torch.nn.Linear(features, units)
        self.layer = nn.FastWeightProgrammer(units, 1, **options)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.project(x))


def layers(
    name: str,
    make: Callable[[int, int], torch.nn.Module],
    *,
    units: tuple[int, int, int] = (8, 80, 800),
    steps: tuple[int, int, int] = (12, 120, 1200),
    slow: Sequence[int] = (),
) -> list[Problem]:
    """Return the problems of a recurrent layer."""
    axes = {"units": units, "features": (8, 80, 800), "steps": steps}
    return [
        Problem(
            name,
            axis,
            sizes,
            by(repeat_previous, axis, make),
            SOLVED,
            slow,
        )
        for axis, sizes in axes.items()
    ]


# Recall: some keys are read together with their values, then keys alone.


def recall(make: Callable[[int, int], torch.nn.Module], *, units: int, pairs: int = 2) -> float:
    """Return the share of right values of the last of some updates."""
    torch.manual_seed(0)
    features, values = 16, 4
    layer, output = make(features, units), torch.nn.Linear(units, values)
    keys = torch.randn(2 * pairs, features, generator=generator(1))
    contents = torch.randn(values, features, generator=generator(3))

    def draw(draws: torch.Generator) -> tuple[Tensor, Tensor]:
        key = torch.rand(32, 2 * pairs, generator=draws).argsort(1)[:, :pairs]
        value = torch.randint(values, (32, pairs), generator=draws)
        order = torch.rand(32, pairs, generator=draws).argsort(1)
        read = torch.cat([keys[key] + contents[value], keys[key.gather(1, order)]], 1)
        return read.transpose(0, 1), value.gather(1, order).t()

    return learn([layer, output], draw, lambda x: output(layer(x)[0][pairs:]), RECALLED)


# A text in which each word has one successor.


def follow_words(*, vocabulary_size: int = 10, units: int = 64) -> float:
    torch.manual_seed(0)
    model = nn.LSTMLanguageModel(vocabulary_size, units, units)
    successors = torch.randperm(vocabulary_size, generator=generator(1))

    def draw(draws: torch.Generator) -> tuple[Tensor, Tensor]:
        words = [torch.randint(vocabulary_size, (32,), generator=draws)]
        for _ in range(20):
            words.append(successors[words[-1]])
        text = torch.stack(words)
        return text[:-1], text[1:]

    return learn([model], draw, lambda x: model(x)[0])


# Classes of examples around a centre each: of a centre's numbers and of the noise each has unit size.


def draw_classes(
    classes: int, features: int, draws: torch.Generator, *counts: int, noise: float = 0.5
) -> list[tuple[Tensor, Tensor]]:
    """Return several sets of examples [n,features] and labels [n] of the same classes, so many of each class."""
    centres, sets = torch.randn(classes, features, generator=draws), []
    for count in counts:
        labels = torch.arange(classes).repeat_interleave(count)
        x = centres[labels] + noise * torch.randn(len(labels), features, generator=draws)
        sets.append((x / (1 + noise**2) ** 0.5, labels))
    return sets


def share(answers: Tensor, labels: Tensor) -> float:
    return float((answers == labels).float().mean())


def bind_rare_classes(*, features: int = 64, classes: int = 20, examples: int = 20) -> float:
    """Return the share that a Hebbian softmax gets right of classes of one example each, beside as many common ones."""
    torch.manual_seed(0)
    (x, labels), (asked, right) = draw_classes(classes, features, generator(1), examples, 4)
    kept = (labels < classes // 2) | (torch.arange(len(labels)) % examples == 0)
    x, labels = x[kept], labels[kept]
    head = nn.HebbianSoftmax(features, classes)
    head.attach(optimizer := torch.optim.Adam(head.parameters(), LEARNING_RATE))
    for _ in range(max(1, 100 // examples)):
        for rows in torch.randperm(len(x), generator=generator(2)).split(32):
            optimizer.zero_grad()
            head.loss(x[rows], labels[rows]).backward()
            optimizer.step()
    rare = right >= classes // 2
    return share(head.eval()(asked[rare]).argmax(1), right[rare])


class Encoder(torch.nn.Module):
    def __init__(self, size: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.layer = torch.nn.Linear(size, features)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = F.leaky_relu(self.layer(x), 0.2)
        return h


def tell_apart(
    make: Callable[[int, int], torch.nn.Module],
    *,
    features: int = 64,
    classes: int = 5,
    examples: int = 1,
    updates: int = 0,
) -> float:
    """Return the share of right answers in new tasks, after some updates on others."""
    torch.manual_seed(0)
    network, draws = make(features, classes), generator(1)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE) if updates else None
    right = []
    for update in range(updates + 4):
        (described, labels), (asked, targets) = draw_classes(classes, 64, draws, examples, 2)
        x = torch.cat([described, asked])
        index = torch.arange(len(x))[None]
        network.train(update < updates)
        logits = network(x, index[:, : len(labels)], labels[None], index[:, len(labels) :])[0]
        if update >= updates:
            right.append(share(logits.argmax(1), targets))
        elif optimizer is not None:
            optimizer.zero_grad()
            F.cross_entropy(logits, targets).backward()
            optimizer.step()
    return sum(right) / len(right)


def under(head: Callable[[int, int], torch.nn.Module]) -> Callable[[int, int], torch.nn.Module]:
    def make(features: int, classes: int) -> torch.nn.Module:
        return few_shot.FewShotNetwork(Encoder(64, features), head(features, classes))

    return make


def few_shot_heads(
    name: str,
    make: Callable[[int, int], torch.nn.Module],
    *,
    updates: int = 0,
    least: float = 0.9,
    slow: Sequence[int] = (),
) -> list[Problem]:
    axes = {"features": (16, 160, 1600), "classes": (3, 30, 300), "examples": (1, 10, 100)}
    return [
        Problem(
            name,
            axis,
            sizes,
            by(tell_apart, axis, make, updates=updates),
            least,
            slow,
        )
        for axis, sizes in axes.items()
    ]


def tell_unequal_apart(make: Callable[[int], Any], times: int) -> float:
    """Return the share of right answers where one of five classes has so many times the examples of the others."""
    (x, labels), (asked, targets) = draw_classes(5, 64, generator(1), 2 * times, 20)
    kept = (labels == 0) | (torch.arange(len(x)) % (2 * times) < 2)
    head = make(5)
    return share(head.predict(asked[None], head.describe(x[None, kept], labels[None, kept]))[0].argmax(1), targets)


# Memories.


def find_nearest(*, features: int = 64, examples: int = 1000) -> float:
    (x, labels), (asked, targets) = draw_classes(10, features, generator(1), max(1, examples // 10), 10)
    store = memory.EpisodicMemory(len(x), features)
    store.write(x, labels)
    return share(memory.attend(store.search(asked, 1), 10).argmax(1), targets)


def remember_stream(make: Callable[[int, int], Any], *, features: int = 64, steps: int = 1000) -> float:
    """Return the nats that half a cache and half a guess among fifty words gain on the guess, in the second half."""
    ((x, labels),) = draw_classes(50, features, generator(1), max(1, steps // 50))
    order = torch.randperm(len(x), generator=generator(2))
    log_p = make(features, 50).log_prob(x[order], labels[order])
    guess = torch.full_like(log_p, 0.02).log()
    return float((memory.mix([guess, log_p], [0.5, 0.5]) - guess)[len(x) // 2 :].mean())


def read_again(*, features: int = 32, classes: int = 50, steps: int = 400) -> float:
    """Return the nats a token that a language model of random weights gains with its memories on a text read before."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=classes,
        hidden_size=features,
        intermediate_size=2 * features,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
    )
    lm = memory.AdaptiveLanguageModel(transformers.LlamaForCausalLM(config).eval())
    text = torch.randint(classes, (steps,), generator=generator(1))
    lm.fit(text[: steps // 2].repeat(2))
    lm.write(text)
    return float((lm.score(text[None]) - lm.score_plain(text[None])).mean())


def fit_mixture(positions: int) -> float:
    """Return one less how far the weight of a predictor that is right in four of five cases is from the best one."""
    right, wrong = torch.tensor(0.9).log(), torch.tensor(0.1).log()
    first = torch.arange(positions) % 5 != 0
    weights = memory.fit_weights([torch.where(first, right, wrong), torch.where(first, wrong, right)])
    return 1 - abs(float(weights[0]) - 0.875)


# Training.


def train_softmax(*, features: int = 32, classes: int = 10, examples: int = 30) -> float:
    torch.manual_seed(0)
    sets = draw_classes(classes, features, generator(1), examples, 5, 5)
    splits = dict(zip(("train", "validation", "test"), sets, strict=True))
    schedule = training.Schedule(epochs=min(200, 30_000 // len(sets[0][0])), batch_size=32)
    with (
        tempfile.TemporaryDirectory() as path,
        training.RunFolder(Path(path) / "run", {}) as folder,
    ):
        result = training.train(torch.nn.Linear(features, classes), splits, schedule, folder, seed=1)
    return 1 - float(result["test_error"]) / 100


def follow_a_bump(*, length: float = 1, features: int = 32) -> float:
    """Return how much of the network's squared error is gone; `length` is what the features are multiplied by."""
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, features), torch.nn.Tanh())
    output = torch.nn.Linear(features, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *output.parameters()], 1e-2 / (features / 32) ** 0.5)
    x = torch.linspace(-3, 3, 200)[:, None]
    for _ in range(300):
        optimizer.zero_grad()
        F.mse_loss(output(body(x)), x.sin()).backward()
        optimizer.step()

    class Longer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            longer: Tensor = length * body(x)
            return longer

    with torch.no_grad():
        output.weight /= length  # the same function
    store = memory.EpisodicMemory(100, features, value_shape=(1,), value_dtype=torch.float32)
    model = memory.MbPA(Longer(), output, store, neighbours=8, steps=20)
    draws = generator(1)
    seen = 6 * torch.rand(60, 1, generator=draws) - 3

    def truth(x: Tensor) -> Tensor:
        return x.sin() + 1.5 * torch.exp(-4 * (x - 1) ** 2)

    model.write(seen, truth(seen) + 0.05 * torch.randn(60, 1, generator=draws))
    with torch.no_grad():
        alone = F.mse_loss(output(Longer()(x)), truth(x))
    return 1 - float(F.mse_loss(model(x), truth(x)) / alone)


def draw_encoded(classes: int, features: int, *counts: int, apart: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Draw examples [n,features] and labels [n] of classes as an encoder gives them.

    They spread ever less from direction to direction, and sixteen directions tell the classes apart. Or classes are
    apart: each has one of the last directions of its own, in which the others hardly differ.
    """
    draws = generator(1)
    turn = torch.linalg.qr(torch.randn(features, features, generator=draws))[0]
    spread = torch.arange(1.0, features + 1).rsqrt()
    centres, sets = 1.5 * torch.randn(classes, 16, generator=draws), []
    for count in counts:
        labels = torch.arange(classes).repeat_interleave(count)
        x = torch.randn(len(labels), features, generator=draws)
        if apart:
            x[torch.arange(len(labels)), features - 1 - labels] += 6
        else:
            x[:, :16] += centres[labels]
        sets.append((spread * x @ turn, labels))
    return sets


def learn_a_class(
    *, features: int = 64, classes: int = 10, examples: int = 20, asked: str = "new", apart: bool = False
) -> float:
    """Return the share of a new class that is answered as it from five examples, or of the old ones as they are; or one
    less how far the share of old inputs that are called unknown is from five per cent."""
    (x, labels), (others, right) = draw_encoded(classes + 1, features, examples, max(40, 1000 // classes), apart=apart)
    names = [f"class {label}" for label in range(classes)]
    old, new = labels < classes, labels == classes
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), None, classes=names)
    classifier.fit(x[old], [names[label] for label in labels[old]])
    held_out = others[right < classes]
    if asked == "unknown":
        return 1 - abs(float(classifier.predict(held_out).unknown.float().mean()) - 0.05)
    classifier.add_examples(x[new][:5], "new")
    if asked == "old":
        answers = classifier.predict(held_out).names
        wanted = [names[label] for label in right[right < classes].tolist()]
        return sum(map(str.__eq__, answers, wanted)) / len(answers)
    answers = classifier.predict(others[right == classes]).names
    return sum(answer == "new" for answer in answers) / len(answers)


PROBLEMS = [
    *layers("FastWeightsRNN", nn.FastWeightsRNN, slow=[800, 1200]),
    *layers("DeltaFastWeightsRNN", nn.DeltaFastWeightsRNN, slow=[800, 1200]),
    *layers("IRNN", nn.IRNN, slow=[1200]),
    *layers("GatedFastWeightsRNN", nn.GatedFastWeightsRNN, units=(4, 40, 400), slow=[400, 1200]),
    *layers("AssociativeLSTM", nn.AssociativeLSTM, units=(6, 60, 600), steps=(4, 40, 400), slow=[400, 600, 800]),
    *layers("HyperLSTM", nn.HyperLSTM, units=(4, 40, 400), steps=(4, 40, 400), slow=[400, 800]),
    *layers("FastWeightProgrammer", Programmer, slow=[800]),
    *(
        Problem(
            f"FastWeightProgrammer, {rule}",
            "units",
            (8, 80, 800),
            by(recall, "units", partial(Programmer, rule=rule)),
            RECALLED,
            slow=[800],
        )
        for rule in RULES
    ),
    Problem(
        "LSTMLanguageModel",
        "classes",
        (10, 100, 1000),
        by(follow_words, "vocabulary_size"),
        SOLVED,
        slow=[1000],
    ),
    Problem("LSTMLanguageModel", "units", (8, 80, 800), by(follow_words, "units"), SOLVED, slow=[800]),
    Problem("HebbianSoftmax", "features", (16, 160, 1600), by(bind_rare_classes, "features"), 0.8),
    Problem("HebbianSoftmax", "classes", (10, 100, 1000), by(bind_rare_classes, "classes"), 0.8),
    Problem("HebbianSoftmax", "examples", (5, 50, 500), by(bind_rare_classes, "examples"), 0.8),
    *few_shot_heads("FastWeightsHead", under(few_shot.FastWeightsHead), updates=300, least=0.6, slow=[300]),
    *few_shot_heads("PrototypeHead", under(lambda _, classes: few_shot.PrototypeHead(classes))),
    *few_shot_heads("MatchingHead", under(lambda _, classes: few_shot.MatchingHead(classes))),
    *few_shot_heads("FineTuningHead", under(lambda _, classes: few_shot.FineTuningHead(classes))),
    *few_shot_heads(
        "MAML",
        lambda features, classes: few_shot.MAML(Encoder(64, features), classes),
        updates=300,
        least=0.6,
        slow=[100, 300, 1600],
    ),
    *(
        Problem(
            f"{make.__name__}, unequal classes", "examples", (1, 10, 100), by(tell_unequal_apart, "times", make), 0.9
        )
        for make in (few_shot.MatchingHead, few_shot.PrototypeHead)
    ),
    Problem("EpisodicMemory", "features", (16, 160, 1600), by(find_nearest, "features"), 0.9),
    Problem("EpisodicMemory", "examples", (100, 1000, 10_000), by(find_nearest, "examples"), 0.9),
    Problem(
        "NeuralCache",
        "features",
        (16, 160, 1600),
        by(remember_stream, "features", lambda _, classes: memory.NeuralCache(2000, classes)),
        1.5,
    ),
    Problem(
        "NeuralCache",
        "steps",
        (500, 5000, 50_000),
        by(remember_stream, "steps", lambda _, classes: memory.NeuralCache(2000, classes)),
        1.5,
    ),
    Problem("AdaptiveLanguageModel", "features", (16, 160, 1600), by(read_again, "features"), 1.0),
    Problem("AdaptiveLanguageModel", "classes", (50, 500, 5000), by(read_again, "classes"), 1.0),
    Problem("fit_weights", "examples", (100, 1000, 10_000), fit_mixture, 0.98),
    Problem("MbPA, length of the features", "units", (1, 10, 100), by(follow_a_bump, "length"), 0.5),
    Problem("MbPA", "features", (16, 160, 1600), by(follow_a_bump, "features"), 0.5),
    Problem("AdaptiveClassifier, a new class", "features", (16, 128, 1280), by(learn_a_class, "features"), 0.75),
    Problem(
        "AdaptiveClassifier, old classes", "features", (16, 128, 1280), by(learn_a_class, "features", asked="old"), 0.9
    ),
    Problem(
        "AdaptiveClassifier, unknown", "features", (16, 128, 1280), by(learn_a_class, "features", asked="unknown"), 0.97
    ),
    Problem(
        "AdaptiveClassifier, a new class that differs where no old one does",
        "features",
        (12, 50, 100),
        by(learn_a_class, "features", apart=True),
        0.75,
    ),
    Problem("AdaptiveClassifier, a new class", "classes", (3, 30, 300), by(learn_a_class, "classes"), 0.75),
    Problem("AdaptiveClassifier, a new class", "examples", (6, 60, 600), by(learn_a_class, "examples"), 0.75),
    Problem("train", "features", (16, 160, 1600), by(train_softmax, "features"), 0.9),
    Problem("train", "classes", (3, 30, 300), by(train_softmax, "classes"), 0.9),
    Problem("train", "examples", (3, 30, 300), by(train_softmax, "examples"), 0.9),
]


@pytest.mark.parametrize(
    ("problem", "size"),
    [
        pytest.param(problem, size, marks=[pytest.mark.slow] * (size in problem.slow), id=f"{problem}: {size}")
        for problem in PROBLEMS
        for size in problem.sizes
    ],
)
def test_a_small_problem_is_solved_at_every_size(problem: Problem, size: int):
    assert problem.solve(size) >= problem.least
