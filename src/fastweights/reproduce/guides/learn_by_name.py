"""A class learnt by its name from five examples: AdaptiveClassifier beside its rivals, on digits, news and characters.

In each set some classes are left out in turn: a network learns the others, and then the class that was left out is
learnt from five of its examples, in several draws. `AdaptiveClassifier` has its defaults, but some constants behind
them were chosen on these very sets. The settings of each rival are the best of a small grid on the very test, for each
class that is left out.
"""

import functools
import itertools
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.evaluation import calibration_error
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides import _characters as characters
from fastweights.reproduce.guides._characters import Examples
from fastweights.reproduce.guides._scores import area_under_curve
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Record, Score, metric_key
from fastweights.tasks import mnist, omniglot
from fastweights.tasks.mnist import MNIST
from fastweights.tasks.omniglot import Omniglot
from fastweights.tasks.text import dated_news
from fastweights.timing import measure_processor_seconds, medians

EXPERIMENT = "guides/learn-by-name"
QUICK_MINUTES = 2
DATA = "mnist"

ModelName = Literal[
    "alone",
    "adaptive-12",
    "adaptive-100",
    "adaptive-all",
    "features-12",
    "features-all",
    "means",
    "gaussians",
    "imprinting",
    "hebbian-row",
    "trained",
    "trained-beside-12",
    "mbpa-12",
    "mbpa-100",
    "mbpa-all",
    "mixture",
]
TITLES: dict[str, str] = {
    "alone": "the network alone",
    "adaptive-12": "AdaptiveClassifier, 12 a class",
    "adaptive-100": "AdaptiveClassifier, 100 a class",
    "adaptive-all": "AdaptiveClassifier, all",
    "features-12": "AdaptiveClassifier, features alone, 12 a class",
    "features-all": "AdaptiveClassifier, features alone, all",
    "means": "class means",
    "gaussians": "a Gaussian a class, one covariance",
    "imprinting": "imprinting",
    "hebbian-row": "Hebbian row",
    "trained": "last layer trained on the five",
    "trained-beside-12": "last layer trained on the five and 12 a class",
    "mbpa-12": "MbPA, 12 a class",
    "mbpa-100": "MbPA, 100 a class",
    "mbpa-all": "MbPA, all",
    "mixture": "half AdaptiveClassifier, half MbPA, 12 a class",
}
SetName = Literal["mnist", "reuters", "omniglot"]
SETS: dict[str, str] = {"mnist": "MNIST", "reuters": "Reuters topics", "omniglot": "Omniglot"}
SCORES = ("old classes right, %", "new class right, %")
OF_ADAPTIVE = (
    "calibration error, %",
    "area under the curve, %",
    "old classes called unknown, %",
    "strangers called unknown, %",
    "new class called unknown, %",
    "milliseconds to learn five and answer",
    "milliseconds an answer",
    "milliseconds of 100 answers",
)
CLASSES = 10  # of each set, which are left out in turn
FEW = 5  # examples of the new class
NEW = "the new class"
FEATURES = 64
LEAST_ARTICLES = 30  # of a topic, for training
WORDS, VOCABULARY = 200, 20_000  # of an article, and of all

Answer = Callable[[Tensor], Tensor]  # features -> log probabilities or scores, the new class last


@dataclass(frozen=True)
class Settings:
    """Learn a class by name: what the old classes and the new one get right, and what is called unknown."""

    models: tuple[ModelName, ...] = get_args(ModelName)
    """Methods to compare, each a row of the tables, by the examples of each old class that they are given."""
    sets: tuple[SetName, ...] = ("mnist", "reuters", "omniglot")
    """Data sets; in Omniglot 12 examples of each old class are all there are."""
    seeds: tuple[int, ...] = tuple(range(CLASSES))
    """Numbers of the classes that are left out, from 0, which also seed the networks."""
    draws: int = 10
    """Draws of five examples of the new class."""
    slow_draws: int = 3
    """Draws for MbPA, which answers slowly."""
    slow_queries: int = 200
    """Test inputs for MbPA, of the old classes and of the new one."""
    rounds: int = 20
    """Rounds of the timed answers, the median of which counts."""
    data_dir: Path | None = None
    """Folder that has the folders of the data sets; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train the networks on: cpu, cuda, ..."""


PRESETS = {"quick": Settings(sets=("mnist",), seeds=(0,)), "full": Settings()}


class Case(NamedTuple):
    """Features of a network that never saw the class which is left out."""

    head: nn.Linear
    train: Examples
    test: Examples
    new: Tensor  # of the class that is left out, to draw the five from
    new_test: Tensor | None  # None: those that are not drawn
    strangers: Tensor  # of classes that nobody has learnt


class Draw(NamedTuple):
    """Five examples of the new class, and inputs that test it."""

    five: Tensor
    test: Tensor


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every method for every set and class that is left out.

    Raises:
        DataError: a data set is missing or damaged.
    """
    data: dict[str, Any] = {name: load(name, settings.data_dir) for name in settings.sets}
    know = functools.cache(lambda: embed_characters(data["omniglot"], settings))  # one network for all characters

    @functools.lru_cache(1)
    def make_case(name: str, seed: int) -> Case:
        with torch.random.fork_rng():  # a member whose case is there draws as one that makes it
            torch.manual_seed(seed)
            if name == "omniglot":
                return know()(seed)
            return (leave_out_digit if name == "mnist" else leave_out_topic)(data[name], seed, settings)

    def measure(row: Row, seed: int) -> Record:
        name = str(row.task)
        case = make_case(name, seed)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # such as that 12 examples of a class are few
            if row.model in RIVALS:
                scores = measure_rival(RIVALS[row.model], case, settings)[: len(SCORES)]
            else:
                scores = measure_adaptive(row.model, case, settings)
        found = zip([*metrics(name, SCORES), *metrics(name, OF_ADAPTIVE)], scores, strict=False)
        return {metric_key(metric): value for metric, value in found}

    rows = [
        Row(model, task=name)
        for name in settings.sets
        for model in settings.models
        if name != "omniglot" or not model.endswith(("-100", "-all"))
    ]

    def scores_of(names: Sequence[str], models: Collection[str]) -> list[Score]:
        """Return the metrics of some models, without rows of those that are not measured in a set."""
        of_set = {
            name: [(TITLES[row.model], None) for row in rows if row.task == name and row.model in models]
            for name in settings.sets
        }
        return [Score(metric, {}, None, of_set[name]) for name in settings.sets for metric in metrics(name, names)]

    table = scores_of(SCORES, TITLES) + scores_of(OF_ADAPTIVE, ADAPTIVE)
    members = prepare_whole(settings, folder, rows, measure, table, titles=TITLES, without=("sets",))
    return members._replace(alone=True)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    sizes = ("draws", "slow_draws", "slow_queries", "rounds")
    check_settings(settings, sizes=sizes, lists=("models", "sets", "seeds"))
    if max(settings.seeds) >= CLASSES:
        raise ValueError(f"seeds must be at most {CLASSES - 1}, a class each; got {settings.seeds}")


def metrics(name: str, names: Sequence[str]) -> list[str]:
    """Return the metrics of a set, as the tables have them."""
    title = f"AdaptiveClassifier on {SETS[name]}" if names is OF_ADAPTIVE else SETS[name]
    return [f"{title}: {metric}" for metric in names]


# The three sets


def load(name: str, data_dir: Path | None) -> Any:
    """Return a data set.

    Raises:
        DataError: it is missing or damaged.
    """
    if name == "mnist":
        return mnist.load(data_dir)
    return omniglot.load(data_dir) if name == "omniglot" else read_topics(data_dir)


def embed(body: nn.Module, x: Tensor, settings: Settings) -> Tensor:
    """Return features, on the CPU."""
    return torch.cat([body(part.to(settings.device)).cpu() for part in torch.split(x, 1000)])


def train(body: nn.Module, head: nn.Linear, examples: Examples, settings: Settings, **schedule: Any) -> None:
    """Train a network on the device; the head is put back on the CPU."""
    network = nn.Sequential(body, head).to(settings.device)
    characters.train(network, (examples[0].to(settings.device), examples[1].to(settings.device)), **schedule)
    head.cpu()


def part(labels: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the other classes, and their labels counted without the one that is left out."""
    return labels != left, labels - (labels > left).long()


def leave_out_digit(data: MNIST, digit: int, settings: Settings) -> Case:
    """Leave out a digit: a multilayer perceptron, three epochs."""
    x, test_x = (images.flatten(1) / 255 for images in (data.train_images, data.test_images))
    body = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, FEATURES))
    head = nn.Linear(FEATURES, 9)
    (old, labels), (old_test, test_labels) = part(data.train_labels, digit), part(data.test_labels, digit)
    train(body, head, (x[old], labels[old]), settings, epochs=3, batch_size=64)
    features, test_features = embed(body, x, settings), embed(body, test_x, settings)
    return Case(
        head,
        (features[old], labels[old]),
        (test_features[old_test], test_labels[old_test]),
        features[~old],
        test_features[~old_test],
        test_features[~old_test],
    )


class Topics(NamedTuple):
    """Articles of one topic each: their words, topics by how many articles they have, and which are for training."""

    words: list[list[str]]
    labels: Tensor
    training: Tensor


def read_topics(data_dir: Path | None) -> Topics:
    """Return the articles of Reuters-21578 with one topic, of those that have 30 for training.

    Raises:
        DataError: the data set is missing or damaged.
    """
    articles = [
        article
        for article in dated_news.read_reuters(data_dir)
        if len(article.topics) == 1 and article.body and article.split != "NOT-USED"
    ]
    counts = Counter(article.topics[0] for article in articles if article.split == "TRAIN")
    topics = [topic for topic, count in counts.most_common() if count >= LEAST_ARTICLES]
    articles = [article for article in articles if article.topics[0] in topics]
    words = [re.findall("[a-z]+", f"{one.title} {one.body}".lower())[:WORDS] for one in articles]
    labels = torch.tensor([topics.index(article.topics[0]) for article in articles])
    return Topics(words, labels, torch.tensor([article.split == "TRAIN" for article in articles]))


def leave_out_topic(data: Topics, topic: int, settings: Settings) -> Case:
    """Leave out a topic: the mean of words that are learnt, and a linear layer, 15 epochs."""
    old, labels = part(data.labels, topic)
    counts = Counter(word for row in (old & data.training).nonzero()[:, 0].tolist() for word in data.words[row])
    index = {word: number for number, (word, _) in enumerate(counts.most_common(VOCABULARY), 1)}
    x = torch.zeros(len(data.words), WORDS, dtype=torch.long)
    for row, text in enumerate(data.words):
        numbers = [index[word] for word in text if word in index]
        x[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
    body = nn.Sequential(nn.EmbeddingBag(VOCABULARY + 1, FEATURES, padding_idx=0), nn.Linear(FEATURES, FEATURES))
    head = nn.Linear(FEATURES, int(data.labels.max()))
    rows = old & data.training, old & ~data.training
    train(body, head, (x[rows[0]], labels[rows[0]]), settings, epochs=15, batch_size=32)
    features = embed(body, x, settings)
    known, test = ((features[mask], labels[mask]) for mask in rows)
    new_test = features[~old & ~data.training]
    return Case(head, known, test, features[~old & data.training], new_test, new_test)


def embed_characters(data: Omniglot, settings: Settings) -> Callable[[int], Case]:
    """Train a convolutional network, 40 epochs, and return a function that takes a character of an unseen alphabet."""
    torch.manual_seed(0)
    drawings = characters.learnt(data)
    body, head = characters.make_network(len(drawings))
    parts = [characters.number(drawings[:, :12]), characters.number(drawings[:, 12:])]
    train(body, head, parts[0], settings, epochs=40, batch_size=32, change=shift)
    known, test = ((embed(body, x, settings), y) for x, y in parts)
    taken = characters.unseen(data)[:CLASSES]
    others = [index for index in range(data.background, len(data.images)) if index not in taken]
    drawings = characters.drawings_of(data)
    strangers = embed(body, drawings[others, :2].flatten(0, 1), settings)
    return lambda seed: Case(head, known, test, embed(body, drawings[taken[seed]], settings), None, strangers)


def shift(x: Tensor) -> Tensor:
    """Move every drawing by up to two pixels, so that the network does not learn them by heart."""
    return torch.stack([one.roll(tuple(torch.randint(-2, 3, (2,)).tolist()), (1, 2)) for one in x])


# Scores


def take(examples: Examples, count: int | None, seed: int) -> Examples:
    """Return some examples of each class; None: all."""
    features, labels = examples
    if count is None:
        return examples
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    kept = torch.cat([order[labels[order] == one][:count] for one in range(int(labels.max()) + 1)])
    return features[kept], labels[kept]


def draw(case: Case, number: int) -> Draw:
    """Draw five examples of the new class."""
    order = torch.randperm(len(case.new), generator=torch.Generator().manual_seed(number))
    return Draw(case.new[order[:FEW]], case.new[order[FEW:]] if case.new_test is None else case.new_test)


def score(answer: Answer, case: Case, test: Examples, new: Tensor) -> tuple[float, ...]:
    """Return the per cent of old and of new test inputs that are right, then the calibration error over both."""
    targets = torch.cat([test[1], torch.full((len(new),), len(case.head.weight))])
    logits = answer(torch.cat([test[0], new]))
    right = 100 * (logits.argmax(1) == targets).double()
    old = len(test[1])
    return float(right[:old].mean()), float(right[old:].mean()), calibration_error(logits, targets)


def average(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean of each column."""
    return tuple(map(statistics.fmean, zip(*rows, strict=True)))


# AdaptiveClassifier: what `fit` is given of each old class, and whether it reads the head


ADAPTIVE: dict[str, tuple[int | None, bool]] = {
    "adaptive-12": (12, True),
    "adaptive-100": (100, True),
    "adaptive-all": (None, True),
    "features-12": (12, False),
    "features-all": (None, False),
}


def fit(case: Case, old: Examples, head: bool = True) -> memory.AdaptiveClassifier:
    """Return a classifier that is fitted to examples of the old classes."""
    names = [str(one) for one in range(len(case.head.weight))]
    classifier = memory.AdaptiveClassifier(nn.Identity(), case.head if head else None, classes=names)
    classifier.fit(old[0], [names[one] for one in old[1].tolist()])
    return classifier


def log_probabilities(classifier: memory.AdaptiveClassifier) -> Answer:
    """Return what a classifier answers, without the unknown."""
    return lambda x: classifier.predict(x).probabilities.log()


def measure_adaptive(model: str, case: Case, settings: Settings) -> tuple[float, ...]:
    """Return the scores of a classifier over the draws, then what it calls unknown and costs."""
    count, head = ADAPTIVE[model]
    classifier = fit(case, take(case.train, count, 1), head)
    seen, strange = classifier.predict(case.test[0]), classifier.predict(case.strangers)
    rows, unknown = [], []
    for number in range(settings.draws):
        five, test = draw(case, number)
        classifier.add_examples(five, NEW, tag="draw")
        rows.append(score(log_probabilities(classifier), case, case.test, test))
        unknown.append(_per_cent(classifier.predict(test).unknown))
        classifier.undo("draw")
    area = area_under_curve(strange.unknown_score, seen.unknown_score)
    flagged = (area, _per_cent(seen.unknown), _per_cent(strange.unknown), statistics.fmean(unknown))
    return (*average(rows), *flagged, *measure_times(classifier, case, settings))


def _per_cent(unknown: Tensor) -> float:
    return 100 * float(unknown.double().mean())


def measure_times(classifier: memory.AdaptiveClassifier, case: Case, settings: Settings) -> tuple[float, ...]:
    """Return the median milliseconds of processor time of learning and of answers, both beyond the network."""
    five = draw(case, 0).five
    many = case.test[0][:100]

    def learn() -> None:
        classifier.add_examples(five, NEW, tag="draw")
        classifier.predict(five[:1])  # which is the first to need what has changed

    def measure_learning(call: Callable[[], object]) -> float:
        seconds = measure_processor_seconds(call)
        classifier.undo("draw")
        return seconds

    learning = medians({"learn": learn}, settings.rounds, measure=measure_learning)
    learn()
    calls: dict[str, Callable[[], object]] = {
        "one": lambda: classifier.predict(five[:1]),
        "many": lambda: classifier.predict(many),
    }
    answers = medians(calls, settings.rounds, measure=measure_processor_seconds)
    return tuple(time.milliseconds for time in (learning | answers).values())


# The rivals: each makes an answer from the old examples, the five and one point of its grid


def keep_network(case: Case, old: Examples, five: Tensor) -> Answer:
    """Return the network as it is."""
    return case.head


def answer_by_means(case: Case, old: Examples, five: Tensor, cosine: bool) -> Answer:
    """Return how near the class means are, by the angle or by the distance."""
    prepare: Callable[[Tensor], Tensor] = F.normalize if cosine else (lambda x: x)
    means = [prepare(features).mean(0) for features in (*by_class(case, old), five)]
    return lambda x: -torch.cdist(prepare(x), torch.stack(means))


def by_class(case: Case, old: Examples) -> list[Tensor]:
    """Return the features of each old class."""
    return [old[0][old[1] == one] for one in range(len(case.head.weight))]


def answer_by_gaussians(case: Case, old: Examples, five: Tensor, shrinkage: float) -> Answer:
    """Return a Gaussian for each class, with the old classes' covariance, drawn towards a sphere."""
    means = torch.stack([features.mean(0) for features in by_class(case, old)])
    centred = old[0] - means[old[1]]
    covariance = centred.T @ centred / (len(centred) - len(means))
    sphere = covariance.diagonal().mean() * torch.eye(len(covariance))
    precision = torch.linalg.inv((1 - shrinkage) * covariance + shrinkage * sphere)
    means = torch.cat([means, five.mean(0, keepdim=True)])
    offsets = -0.5 * ((means @ precision) * means).sum(1)
    return lambda x: x @ precision @ means.T + offsets


def answer_by_row(case: Case, row: Tensor) -> Answer:
    """Return the head with one more row."""
    weight, bias = torch.cat([case.head.weight, row[None]]), case.head.bias
    return lambda x: F.linear(x, weight, torch.cat([bias, bias.mean()[None]]))


def answer_by_imprinting(case: Case, old: Examples, five: Tensor, scale: float) -> Answer:
    """Return the head with the direction of the five as a row, as long as the others in the mean, scaled."""
    length = case.head.weight.norm(dim=1).mean()
    return answer_by_row(case, scale * length * F.normalize(F.normalize(five).mean(0), dim=0))


def answer_by_hebbian_row(case: Case, old: Examples, five: Tensor, scale: float) -> Answer:
    """Return the head with the row of a HebbianSoftmax after one pass over the five: their mean, scaled."""
    return answer_by_row(case, scale * five.mean(0))


def answer_by_training(case: Case, old: Examples, five: Tensor, replay: int, lr: float, steps: int) -> Answer:
    """Return the head trained on the five, beside so many examples of each old class."""
    layer = memory.widen_output(case.head).requires_grad_(True)
    x, y = take(old, replay, 0) if replay else (five[:0], torch.empty(0, dtype=torch.long))
    x, y = torch.cat([x, five]), torch.cat([y, torch.full((len(five),), len(case.head.weight))])
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    with torch.enable_grad():
        for _ in range(steps):
            loss = F.cross_entropy(layer(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return layer.requires_grad_(False)


def answer_by_mbpa(case: Case, old: Examples, five: Tensor, neighbours: int, steps: int, units: float) -> Answer:
    """Return MbPA around the head, with a rate in units of one over the keys' mean squared length."""
    store = memory.EpisodicMemory(len(old[1]) + FEW, old[0].shape[1])
    store.write(*old)
    store.write(five, torch.full((len(five),), len(case.head.weight)))
    unit = float(1 / store.keys.square().sum(1).mean())
    wide = memory.widen_output(case.head)
    return memory.MbPA(nn.Identity(), wide, store, neighbours=neighbours, steps=steps, lr=units * unit)


def answer_by_both(case: Case, old: Examples, five: Tensor, *point: Any) -> Answer:
    """Return half of what AdaptiveClassifier answers and half of what MbPA does."""
    classifier = fit(case, old)
    classifier.add_examples(five, NEW)
    ours, theirs = log_probabilities(classifier), answer_by_mbpa(case, old, five, *point)
    return lambda x: torch.logaddexp(ours(x), theirs(x).log_softmax(1))


class Rival(NamedTuple):
    """A way to answer, the points of its grid, and the examples of each old class that it is given (None: all)."""

    make: Callable[..., Answer]
    points: Sequence[tuple[Any, ...]]
    old: int | None = None
    slow: bool = False  # fewer draws and queries


_SCALES = [(0.25,), (0.5,), (0.75,), (1.0,), (1.5,)]
_TRAINING = [(0.001, 20), (0.001, 100), (0.01, 20), (0.01, 100)]
_MBPA = list(itertools.product((10, 40), (5, 20), (10.0, 30.0)))
RIVALS: dict[str, Rival] = {
    "alone": Rival(keep_network, [()]),
    "means": Rival(answer_by_means, [(False,), (True,)]),
    "gaussians": Rival(answer_by_gaussians, [(0.01,), (0.1,), (0.5,)]),
    "imprinting": Rival(answer_by_imprinting, _SCALES),
    "hebbian-row": Rival(answer_by_hebbian_row, [(0.01,), (0.03,), (0.1,), (0.3,), (1.0,)]),
    "trained": Rival(answer_by_training, [(0, *point) for point in _TRAINING]),
    "trained-beside-12": Rival(answer_by_training, [(12, *point) for point in _TRAINING]),
    "mbpa-12": Rival(answer_by_mbpa, _MBPA, 12, slow=True),
    "mbpa-100": Rival(answer_by_mbpa, _MBPA, 100, slow=True),
    "mbpa-all": Rival(answer_by_mbpa, _MBPA, slow=True),
    "mixture": Rival(answer_by_both, _MBPA[:1], 12, slow=True),
}


def measure_rival(rival: Rival, case: Case, settings: Settings) -> tuple[float, ...]:
    """Return the scores of a rival over the draws, at the point where old and new classes together are best."""
    old, test, queries = take(case.train, rival.old, 1), case.test, None
    if rival.slow:
        queries = settings.slow_queries
        some = torch.randperm(len(test[1]), generator=torch.Generator().manual_seed(2))[:queries]
        test = test[0][some], test[1][some]
    draws = [draw(case, number) for number in range(settings.slow_draws if rival.slow else settings.draws)]

    def scores(point: tuple[Any, ...]) -> tuple[float, ...]:
        return average([score(rival.make(case, old, five, *point), case, test, new[:queries]) for five, new in draws])

    return max(map(scores, rival.points), key=lambda found: found[0] + found[1])
