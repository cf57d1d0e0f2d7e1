"""Measure how a trained classifier learns a new class from five examples: AdaptiveClassifier and its rivals.

python docs/learn_by_name.py [mnist] [reuters] [omniglot], then python docs/fill.py. FASTWEIGHTS_DATA has the sets.

In each set some classes are left out in turn: the network learns the others, and then the left-out class from five of
its examples, in several draws. The settings of each rival are the best of a grid on the very test. AdaptiveClassifier
has its defaults; but the constants behind them were chosen on these three sets too.
"""

import itertools
import json
import lzma
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.runs import describe_environment
from fastweights.tasks import mnist, omniglot

RESULTS = Path(__file__).parent / "results" / "learn-by-name"
FILLS = {"12 a class": 12, "100 a class": 100, "all": None}
DRAWS = 10
FEW = 5
NEW = "the new class"
SUBSET = 200  # test inputs of rivals that answer slowly, old and new
BINS = 15  # of the calibration error

Split = tuple[Tensor, Tensor]  # features [n,d] and class indices [n]
Rival = Callable[[Tensor], Tensor]  # features -> log probabilities or scores, the new class last


class Case(NamedTuple):
    """Features of one network that never saw the class which is left out."""

    name: str
    head: nn.Linear
    train: Split
    test: Split
    new_train: Tensor
    new_test: Tensor
    unknown: Tensor  # of classes that nobody learns


# The three sets


def train_network(
    body: nn.Module,
    head: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    batch: int,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    network = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(batch):
            loss = F.cross_entropy(network(change(x[rows])), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval().requires_grad_(False)


def embed(body: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([body(part) for part in x.split(1000)])


def leave_out(labels: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the other classes, and their labels counted without the one that is left out."""
    return labels != left, labels - (labels > left).long()


def mnist_cases() -> Iterator[Case]:
    """Leave out each digit: a multilayer perceptron with 64 features, three epochs."""
    data = mnist.load()
    x, y = data.train_images.flatten(1) / 255, data.train_labels
    test_x, test_y = data.test_images.flatten(1) / 255, data.test_labels
    for digit in range(10):
        torch.manual_seed(digit)
        body, head = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 64)), nn.Linear(64, 9)
        (old, labels), (old_test, test_labels) = leave_out(y, digit), leave_out(test_y, digit)
        train_network(body, head, x[old], labels[old], epochs=3, batch=64)
        new_test = embed(body, test_x[~old_test])
        yield Case(
            str(digit),
            head,
            (embed(body, x[old]), labels[old]),
            (embed(body, test_x[old_test]), test_labels[old_test]),
            embed(body, x[~old]),
            new_test,
            new_test,
        )


def read_reuters() -> tuple[list[str], list[list[str]], Tensor, Tensor]:
    """Return the topics, and of every document of one topic its words, its topic and whether it is for training."""
    file = Path(os.environ["FASTWEIGHTS_DATA"]) / "reuters21578" / "reuters21578.jsonl.xz"
    with lzma.open(file, "rt") as lines:
        documents = [json.loads(line) for line in lines]
    documents = [one for one in documents if len(one["topics"]) == 1 and one["body"] and one["split"] != "NOT-USED"]
    counts = Counter(one["topics"][0] for one in documents if one["split"] == "TRAIN")
    topics = [topic for topic, count in counts.most_common() if count >= 30]
    documents = [one for one in documents if one["topics"][0] in topics]
    words = [re.findall(r"[a-z]+", f"{one['title']} {one['body']}".lower())[:200] for one in documents]
    labels = torch.tensor([topics.index(one["topics"][0]) for one in documents])
    return topics, words, labels, torch.tensor([one["split"] == "TRAIN" for one in documents])


def reuters_cases() -> Iterator[Case]:
    """Leave out each of the ten most frequent topics: an embedding bag and one layer with 64 features, 15 epochs."""
    topics, words, labels, training = read_reuters()
    for left, topic in enumerate(topics[:10]):
        torch.manual_seed(left)
        old, others = leave_out(labels, left)
        counts = Counter(word for row in (old & training).nonzero()[:, 0].tolist() for word in words[row])
        index = {word: number + 1 for number, (word, _) in enumerate(counts.most_common(20_000))}
        x = torch.zeros(len(words), 200, dtype=torch.long)
        for row, text in enumerate(words):
            known = torch.tensor([index[word] for word in text if word in index], dtype=torch.long)
            x[row, : len(known)] = known
        body = nn.Sequential(nn.EmbeddingBag(20_001, 64, padding_idx=0), nn.Linear(64, 64))
        head = nn.Linear(64, len(topics) - 1)
        train_network(body, head, x[old & training], others[old & training], epochs=15, batch=32)
        features = embed(body, x)
        yield cut(topic, head, features, old, others, training)


def cut(topic: str, head: nn.Linear, features: Tensor, old: Tensor, labels: Tensor, training: Tensor) -> Case:
    rows = old & training, old & ~training
    train, test = ((features[mask], labels[mask]) for mask in rows)
    new_test = features[~old & ~training]
    return Case(topic, head, train, test, features[~old & training], new_test, new_test)


def omniglot_cases() -> Iterator[Case]:
    """Take a character of each of ten unseen alphabets: a convolutional network of 121 characters, 40 epochs."""
    torch.manual_seed(0)
    data = omniglot.load()
    drawings = data.images[:, :, None].float() / 255
    known = drawings[: data.background : 8]

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    def shift(x: Tensor) -> Tensor:
        """Move every drawing by up to two pixels, so that the network does not learn them by heart."""
        return torch.stack([one.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2)) for one in x])

    def examples(some: Tensor) -> Split:
        return some.flatten(0, 1), torch.arange(len(some)).repeat_interleave(some.shape[1])

    body = nn.Sequential(*block(1, 32), *block(32, 64), *block(64, 64), nn.Flatten(), nn.Linear(576, 64))
    head = nn.Linear(64, len(known))
    x, y = examples(known[:, :12])
    train_network(body, head, x, y, epochs=40, batch=32, change=shift)
    test_x, test_y = examples(known[:, 12:])
    unseen = torch.arange(data.background, len(drawings))
    chosen = [int(unseen[data.alphabet[unseen] == one][0]) for one in data.alphabet[unseen].unique()[:10]]
    strangers = embed(body, drawings[[int(one) for one in unseen if int(one) not in chosen], :2].flatten(0, 1))
    train, test = (embed(body, x), y), (embed(body, test_x), test_y)
    for one in chosen:
        features = embed(body, drawings[one])
        yield Case(data.names[one], head, train, test, features, features, strangers)


# Scores


def take(split: Split, count: int | None, generator: torch.Generator) -> Split:
    """Return some examples of each class."""
    features, labels = split
    if count is None:
        return split
    order = torch.randperm(len(labels), generator=generator)
    kept = torch.cat([order[labels[order] == one][:count] for one in range(int(labels.max()) + 1)])
    return features[kept], labels[kept]


def calibration_error(probabilities: Tensor, right: Tensor) -> float:
    sure, bins = probabilities, (probabilities * BINS).long().clamp(max=BINS - 1)
    gaps = [
        float((bins == one).double().mean() * (sure[bins == one].mean() - right[bins == one].double().mean()).abs())
        for one in bins.unique()
    ]
    return sum(gaps)


def area_under_curve(positive: Tensor, negative: Tensor) -> float:
    ranks = torch.cat([positive, negative]).double().argsort().argsort()[: len(positive)] + 1
    count = len(positive)
    return float((ranks.double().sum() - count * (count + 1) / 2) / (count * len(negative)))


def measure(answer: Rival, case: Case, new_test: Tensor, rows: Tensor | None = None) -> dict[str, float]:
    """Return the per cent of old and of new test inputs that are right, and the calibration error over both."""
    features, labels = case.test if rows is None else (case.test[0][rows], case.test[1][rows])
    old, new = answer(features).softmax(1), answer(new_test).softmax(1)
    right_old, right_new = old.argmax(1) == labels, new.argmax(1) == len(case.head.weight)
    error = calibration_error(torch.cat([old.amax(1), new.amax(1)]), torch.cat([right_old, right_new]))
    return {
        "old": 100 * float(right_old.double().mean()),
        "new": 100 * float(right_new.double().mean()),
        "calibration_error": 100 * error,
    }


# The rivals: each makes an answer from the old examples, the five and one point of its grid


def answer_by_means(case: Case, old: Split, five: Tensor, cosine: bool) -> Rival:
    prepare: Callable[[Tensor], Tensor] = F.normalize if cosine else (lambda x: x)
    means = torch.stack([prepare(old[0][old[1] == one]).mean(0) for one in range(len(case.head.weight))])
    means = torch.cat([means, prepare(five).mean(0, keepdim=True)])
    return lambda x: -torch.cdist(prepare(x), means)


def answer_by_gaussians(case: Case, old: Split, five: Tensor, shrinkage: float) -> Rival:
    means = torch.stack([old[0][old[1] == one].mean(0) for one in range(len(case.head.weight))])
    centred = old[0] - means[old[1]]
    covariance = centred.T @ centred / (len(centred) - len(means))
    sphere = covariance.diagonal().mean() * torch.eye(len(covariance))
    precision = torch.linalg.inv((1 - shrinkage) * covariance + shrinkage * sphere)
    means = torch.cat([means, five.mean(0, keepdim=True)])
    offsets = -0.5 * ((means @ precision) * means).sum(1)
    return lambda x: x @ precision @ means.T + offsets


def answer_by_row(case: Case, row: Tensor) -> Rival:
    weight, bias = torch.cat([case.head.weight, row[None]]), case.head.bias
    return lambda x: F.linear(x, weight, torch.cat([bias, bias.mean()[None]]))


def answer_by_imprinting(case: Case, old: Split, five: Tensor, scale: float) -> Rival:
    length = case.head.weight.norm(dim=1).mean()
    return answer_by_row(case, scale * length * F.normalize(F.normalize(five).mean(0), dim=0))


def answer_by_hebbian_row(case: Case, old: Split, five: Tensor, scale: float) -> Rival:
    """Put the smoothed row of a HebbianSoftmax after one pass over the five: their mean, scaled."""
    return answer_by_row(case, scale * five.mean(0))


def answer_by_training(case: Case, old: Split, five: Tensor, replay: int, lr: float, steps: int) -> Rival:
    torch.manual_seed(0)
    layer = memory.widen_output(case.head).requires_grad_(True)
    x, y = take(old, replay, torch.Generator().manual_seed(0)) if replay else (five[:0], torch.empty(0).long())
    x, y = torch.cat([x, five]), torch.cat([y, torch.full((len(five),), len(case.head.weight))])
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    with torch.enable_grad():
        for _ in range(steps):
            loss = F.cross_entropy(layer(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return layer.requires_grad_(False)


def answer_by_mbpa(case: Case, old: Split, five: Tensor, neighbours: int, steps: int, units: float) -> Rival:
    store = memory.EpisodicMemory(len(old[1]) + FEW, old[0].shape[1])
    store.write(*old)
    store.write(five, torch.full((FEW,), len(case.head.weight)))
    unit = float(1 / store.keys.square().sum(1).mean())
    wide = memory.widen_output(case.head)
    return memory.MbPA(nn.Identity(), wide, store, neighbours=neighbours, steps=steps, lr=units * unit)


SCALES = [(0.25,), (0.5,), (0.75,), (1.0,), (1.5,)]
TRAINING = [(0.001, 20), (0.001, 100), (0.01, 20), (0.01, 100)]
RIVALS: dict[str, tuple[Callable[..., Rival], list[Any]]] = {
    "class means": (answer_by_means, [(False,), (True,)]),
    "a Gaussian a class, one covariance": (answer_by_gaussians, [(0.01,), (0.1,), (0.5,)]),
    "imprinting": (answer_by_imprinting, SCALES),
    "Hebbian row": (answer_by_hebbian_row, [(0.01,), (0.03,), (0.1,), (0.3,), (1.0,)]),
    "last layer trained on the five": (answer_by_training, [(0, *one) for one in TRAINING]),
    "last layer trained on the five and 12 a class": (answer_by_training, [(12, *one) for one in TRAINING]),
}
MBPA_GRID = list(itertools.product((10, 40), (5, 20), (10.0, 30.0)))
BOTH = MBPA_GRID[0]  # of the mixture with AdaptiveClassifier


def adaptive(case: Case, old: Split, head: bool = True) -> memory.AdaptiveClassifier:
    names = [str(one) for one in range(len(case.head.weight))]
    classifier = memory.AdaptiveClassifier(nn.Identity(), case.head if head else None, classes=names)
    classifier.fit(old[0], [names[one] for one in old[1].tolist()])
    return classifier


def log_probabilities(classifier: memory.AdaptiveClassifier) -> Rival:
    return lambda x: classifier.predict(x).probabilities.log()


def answer_by_both(classifier: memory.AdaptiveClassifier, case: Case, old: Split, five: Tensor) -> Rival:
    ours, theirs = log_probabilities(classifier), answer_by_mbpa(case, old, five, *BOTH)
    return lambda x: torch.logaddexp(ours(x), theirs(x).log_softmax(1))


class Draw(NamedTuple):
    """Five examples of the new class, and the inputs that test it."""

    five: Tensor
    test: Tensor


def draws_of(case: Case) -> list[Draw]:
    found = []
    for seed in range(DRAWS):
        order = torch.randperm(len(case.new_train), generator=torch.Generator().manual_seed(seed))
        # Where the two are the same few drawings, those that were not drawn are the test.
        test = case.new_test[order[FEW:]] if case.new_test is case.new_train else case.new_test
        found.append(Draw(case.new_train[order[:FEW]], test))
    return found


def average(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: mean(row[key] for row in rows) for key in rows[0]}


def measure_case(case: Case, fills: dict[str, int | None]) -> dict[str, Any]:
    """Return the scores of everything on one case, each the mean over the draws."""
    draws, labels = draws_of(case), case.test[1]
    alone = 100 * float((case.head(case.test[0]).argmax(1) == labels).double().mean())
    scores: dict[str, Any] = {"the network alone": {"old": alone, "new": 0.0}}
    unknown: dict[str, Any] = {}
    mbpa: dict[str, Any] = {}
    for fill, count in fills.items():
        old = take(case.train, count, torch.Generator().manual_seed(1))
        for title, head in (("AdaptiveClassifier", True), ("AdaptiveClassifier, features alone", False)):
            classifier = adaptive(case, old, head)
            seen, strange = classifier.predict(case.test[0]), classifier.predict(case.unknown)
            unknown[f"{title}, {fill}"] = {
                "area": 100 * area_under_curve(strange.unknown_score, seen.unknown_score),
                "flagged_old": 100 * float(seen.unknown.double().mean()),
                "flagged_unknown": 100 * float(strange.unknown.double().mean()),
            }
            rows, flagged = [], []
            for draw in draws:
                classifier.add_examples(draw.five, NEW, tag="draw")
                rows.append(measure(log_probabilities(classifier), case, draw.test))
                flagged.append(100 * float(classifier.predict(draw.test).unknown.double().mean()))
                classifier.undo("draw")
            scores[f"{title}, {fill}"] = average(rows)
            unknown[f"{title}, {fill}"]["flagged_new"] = mean(flagged)
        # MbPA answers slowly: three draws and a part of the test.
        some = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))[:SUBSET]
        mbpa[fill] = {
            json.dumps(point): average(
                [
                    measure(answer_by_mbpa(case, old, one.five, *point), case, one.test[:SUBSET], some)
                    for one in draws[:3]
                ]
            )
            for point in MBPA_GRID
        }
        classifier, rows = adaptive(case, old), []
        for draw in draws[:3]:
            classifier.add_examples(draw.five, NEW, tag="draw")
            rows.append(measure(answer_by_both(classifier, case, old, draw.five), case, draw.test[:SUBSET], some))
            classifier.undo("draw")
        scores[f"half AdaptiveClassifier, half MbPA, {fill}"] = average(rows)
    rivals = {
        title: {
            json.dumps(point): average(
                [measure(make(case, case.train, one.five, *point), case, one.test) for one in draws]
            )
            for point in points
        }
        for title, (make, points) in RIVALS.items()
    }
    return {"name": case.name, "scores": scores, "unknown": unknown, "mbpa": mbpa, "rivals": rivals}


def time_milliseconds(run: Callable[[], object], repeats: int = 100) -> float:
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - before))
    return median(times)


def measure_cost(case: Case) -> dict[str, float]:
    """Return the medians of adding five examples and of predictions beyond the network, in milliseconds."""
    classifier, five = adaptive(case, take(case.train, 100, torch.Generator().manual_seed(1))), case.new_train[:FEW]

    def add() -> None:
        classifier.add_examples(five, NEW, tag="five")
        classifier.predict(five[:1])  # which is the first to need what has changed

    def time_adding() -> float:
        before = time.perf_counter()
        add()
        taken = 1000 * (time.perf_counter() - before)
        classifier.undo("five")
        return taken

    adding = median(time_adding() for _ in range(100))
    add()
    return {
        "add_five_and_predict_one": adding,
        "predict_one": time_milliseconds(lambda: classifier.predict(five[:1])),
        "predict_100": time_milliseconds(lambda: classifier.predict(case.test[0][:100])),
    }


SETS: dict[str, Callable[[], Iterator[Case]]] = {
    "mnist": mnist_cases,
    "reuters": reuters_cases,
    "omniglot": omniglot_cases,
}


def main() -> None:
    with torch.no_grad():
        for name in sys.argv[1:] or list(SETS):
            fills = {"all": None} if name == "omniglot" else FILLS  # 12 of each are all there are
            cases = []
            cases_of_set = SETS[name]()
            while True:
                with torch.enable_grad():
                    case = next(cases_of_set, None)
                if case is None:
                    break
                cases.append(measure_case(case, fills))
                cost = measure_cost(case)
                print(name, case.name, {key: one["new"] for key, one in cases[-1]["scores"].items()}, flush=True)
            RESULTS.mkdir(parents=True, exist_ok=True)
            record = {"set": name, "environment": describe_environment(), "cost": cost, "draws": DRAWS, "cases": cases}
            (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
