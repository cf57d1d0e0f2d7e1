"""Measure the published few-shot classifier, as a user has it, on classes of Omniglot that it never saw.

python docs/few_shot_classifier.py, then python docs/fill.py

Tasks are of the test classes of `omniglot.few_shot_split`, each through `describe` and `predict`, on one core.
"""

import contextlib
import io
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import FewShotClassifier, cli
from fastweights.runs import describe_environment
from fastweights.tasks import omniglot

DOCS = Path(__file__).parent
RESULT = DOCS / "results" / "few-shot-classifier" / "measured.json"
CLASSIFIED = RESULT.with_name("classified.txt")
COMMAND = "fastweights classify --described docs/guides/drawings/described docs/guides/drawings/asked --resize"
TASKS, QUERIES, TIMINGS = 1000, 5, 200
NORMAL = 1.96  # standard errors either way that hold the mean in 95 of 100 cases
KINDS = {
    "5-way 1-shot": (1,) * 5,
    "5-way 5-shot": (5,) * 5,
    "5-way, 1 to 5 examples of a class": (1, 2, 3, 4, 5),
    "5-way, 10 examples of one class, 1 of the others": (10, 1, 1, 1, 1),
    "20-way 1-shot": (1,) * 20,
}


def task(images: Tensor, counts: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return described images and labels, and queries with theirs, of classes drawn from [classes,20,28,28]."""
    classes = torch.randperm(len(images), generator=generator)[: len(counts)].tolist()
    described, asked = [], []
    for index, count in zip(classes, counts, strict=True):
        order = torch.randperm(images.shape[1], generator=generator)
        described.append(images[index, order[:count]])
        asked.append(images[index, order[count : count + QUERIES]])
    labels = torch.arange(len(counts))
    return (
        torch.cat(described)[:, None],
        labels.repeat_interleave(torch.tensor(counts)),
        torch.cat(asked)[:, None],
        labels.repeat_interleave(QUERIES),
    )


def as_sum(classifier: FewShotClassifier, x: Tensor, y: Tensor, asked: Tensor, ways: int) -> Tensor:
    """Return the log probabilities where every example counts equally, however many its class has."""
    network = classifier.network
    with torch.no_grad():
        memory = network.describe(x[None], y[None])
        return network.predict(asked[None], memory)[0, :, :ways].log_softmax(-1)


def accuracy(classifier: FewShotClassifier, images: Tensor, counts: Sequence[int], tasks: int) -> dict[str, Any]:
    """Return the accuracy in per cent, half of its 95 % interval over the tasks, and the cross entropy."""
    generator = torch.Generator().manual_seed(0)
    right: dict[str, list[float]] = {"evened": [], "summed": []}
    nats: dict[str, list[float]] = {"evened": [], "summed": []}
    for _ in range(tasks):
        x, y, asked, targets = task(images, counts, generator)
        classifier.describe(x, y)
        answers = {"evened": classifier.predict(asked).probabilities.log()}
        if len(set(counts)) > 1 or counts[0] != classifier.shots:
            answers["summed"] = as_sum(classifier, x, y, asked, len(counts))
        for name, found in answers.items():
            right[name].append(float((found.argmax(-1) == targets).double().mean()))
            nats[name].append(float(F.nll_loss(found, targets)))
    found_of = {}
    for name, each in right.items():
        if each:
            half = NORMAL * statistics.stdev(each) / math.sqrt(len(each))
            found_of[name] = {"accuracy": 100 * statistics.fmean(each), "interval": 100 * half}
            found_of[name]["nats"] = statistics.fmean(nats[name])
    return {"tasks": tasks, **found_of}


def milliseconds(call: Callable[[], Any]) -> dict[str, float]:
    """Return the median time of many calls, and the least, on which other work on the machine has least effect."""
    times = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return {"median": statistics.median(times), "least": min(times)}


def timings(classifier: FewShotClassifier, images: Tensor) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in ("5-way 1-shot", "5-way 5-shot", "20-way 1-shot"):
        x, y, asked, _ = task(images, KINDS[name], generator)
        if int(y.max()) < classifier.num_classes:
            found[f"describe, {name}"] = milliseconds(partial(classifier.describe, x, y))
    many = images.flatten(0, 1)[:100, None]
    found["predict one"] = milliseconds(lambda: classifier.predict(asked[:1]))
    found["predict 100 at once"] = milliseconds(lambda: classifier.predict(many))
    return found


def classified() -> str:
    """Return the lines that the command of the guide prints, run in the repository's root."""
    told = io.StringIO()
    with contextlib.chdir(DOCS.parent), contextlib.redirect_stdout(told):
        if cli.main(COMMAND.split()[1:]):
            raise SystemExit("the command of the guide failed")
    return told.getvalue()


def main(tasks: int = TASKS) -> None:
    torch.set_num_threads(1)
    classifier = FewShotClassifier.load("omniglot")
    data = omniglot.load()
    images = data.images[omniglot.few_shot_split(data).test]
    scores = {}
    for name, counts in KINDS.items():
        if len(counts) <= classifier.num_classes:
            scores[name] = accuracy(classifier, images, counts, tasks)
            print(name, scores[name], flush=True)
    record = {
        "environment": describe_environment(),
        "trained_on": classifier.trained_on,
        "bytes": os.path.getsize(DOCS.parent / "src" / "fastweights" / "weights" / "omniglot" / "model.safetensors"),
        "parameters": sum(parameter.numel() for parameter in classifier.network.parameters()),
        "queries": QUERIES,
        "timings": TIMINGS,
        "scores": scores,
        "milliseconds": timings(classifier, images),
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    CLASSIFIED.write_text(classified())


if __name__ == "__main__":
    main()
