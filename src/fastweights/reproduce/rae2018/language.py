"""Language, tables 1 and 2 and figures 4 to 7 of Rae et al. 2018: plain and Hebbian Softmax on rare words.

Sections 4.2 to 4.4 and appendix A of "Fast parametric learning with activation memorization".
"""

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastweights.errors import RunError
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._language import (
    OF_SCORES,
    MemorySettings,
    build_trained,
    check_language,
    prepare_corpora,
    train_and_score,
)
from fastweights.reproduce._members import Members
from fastweights.runs import Bars, Curve, Member, Progress, Record, RunFolder, read_members
from fastweights.tasks import text
from fastweights.tasks.text import dated_news, gutenberg

EXPERIMENT = "rae2018/language"
QUICK_MINUTES = 14
DATA = "ptb"
METRICS = ("validation_loss", "validation_perplexity")  # scores that a search can choose by

__all__ = ["PRESETS", "Settings", "build_trained", "check", "run"]

ModelName = Literal["softmax", "hebbian"]
TextName = Literal["ptb", "wikitext-2", "wikitext-103", "gutenberg", "reuters21578", "gigaword"]

TITLES: dict[ModelName, str] = {"softmax": "LSTM", "hebbian": "LSTM + Hebbian"}
TEXTS: dict[TextName, str] = {
    "ptb": "Penn Treebank",
    "wikitext-2": "WikiText-2",
    "wikitext-103": "WikiText-103",
    "gutenberg": "Gutenberg",
    "reuters21578": "Reuters-21578",
    "gigaword": "GigaWord",
}
EDGES = (100, 1_000, 10_000)  # edges of table 2's buckets of frequency
# The rows of table 1 by the names of their scores, each added to the title of the model.
MEMORIES = {"": "", "cache_": " + cache", "cache_mbpa_": " + cache + MbPA"}
# Table 1: perplexity on validation and on test.
PAPER: dict[tuple[ModelName, str], tuple[float, float]] = {
    ("softmax", ""): (36.0, 36.4),
    ("softmax", "cache_"): (34.5, 34.8),
    ("hebbian", ""): (34.1, 34.3),
    ("hebbian", "cache_"): (29.7, 29.9),
    ("hebbian", "cache_mbpa_"): (29.0, 29.2),
}
# Table 2: perplexity on test, the most frequent words first, and of all.
PAPER_BY_FREQUENCY: dict[tuple[TextName, ModelName], tuple[float | None, ...]] = {
    ("wikitext-103", "softmax"): (12.1, 2.2e2, 1.2e3, 9.7e3, 36.4),
    ("wikitext-103", "hebbian"): (12.1, 1.8e2, 7.6e2, 5.2e3, 34.3),
    ("gutenberg", "softmax"): (19.0, 9.8e2, 6.9e3, 8.6e4, 47.9),
    ("gutenberg", "hebbian"): (18.1, 9.4e2, 6.6e3, 5.9e4, 45.5),
    ("gigaword", "softmax"): (39.4, 6.5e3, 3.7e4, None, 53.5),
    ("gigaword", "hebbian"): (33.2, 3.2e3, 1.6e4, None, 43.7),
}


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the language models and of their training."""

    models: tuple[ModelName, ...] = ("softmax", "hebbian")
    """Softmax layers to train and test."""
    texts: tuple[TextName, ...] = ("ptb",)
    """Texts to train the models on."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and of dropout: one training run for each."""

    epochs: int = 4
    """Passes over the training text."""
    batch_size: int = 20
    """Pieces of the text that are read side by side."""
    segment: int = 35
    """Words over which the gradient is propagated back."""
    carry_state: bool = True
    """Begin each segment with the final state of the segment before it, not with zeros."""
    sampled: int = 1024
    """Words in the softmax of each pass except the last, drawn again for each segment; 0 takes the whole vocabulary."""
    learning_rate: float = 4e-3
    """Learning rate of Adam."""
    annealing: Literal["none", "cosine"] = "cosine"
    """Schedule of the learning rate: none (constant), or a cosine that falls to zero at the end of the last pass."""
    clip_norm: float = 1.0
    """Largest norm of the gradient: a larger one is scaled down to it."""
    bfloat16: bool = False
    """Products in bfloat16: several times faster where the processor has instructions for it."""

    embedding_size: int = 192
    """Features of a word, and of the input of the softmax."""
    hidden_size: int = 192
    """Units of the LSTM."""
    layer_norm: bool = False
    """Normalise the gates and the cell of the LSTM."""
    input_dropout: float = 0.1
    """Dropout on the inputs of the LSTM."""
    output_dropout: float = 0.2
    """Dropout on the input of the softmax."""

    gamma: float = only("hebbian", 0.1, "Smallest weight of an activation in the smoothed weights of its word.")
    limit: int = only("hebbian", 100, "Occurrences after which a word is learnt by gradient descent alone.")
    objective: Literal["l2", "inner_product", "svm", "sparse_softmax"] = only(
        "hebbian", "l2", "Inner objective by which a word's weights are smoothed."
    )
    counting: Literal["literal", "running_mean", "constant"] = only(
        "hebbian", "literal", "Way in which the smoothing fades as a word is seen more often, or stays (constant)."
    )
    plain_epochs: int = only("hebbian", 0, "Passes at the end, in which no word is smoothed any more.")


@dataclass(frozen=True)
class Settings(MemorySettings, TrainingSettings):
    """Language models of Rae et al. 2018: a plain softmax and one that remembers activations of rare words."""

    local_rates: tuple[float, ...] = ()
    """Learning rates of MbPA; the beginning of validation chooses one. An empty list leaves MbPA out."""
    data_dir: Path | None = None
    """Folder that has the folders of the texts; by default $FASTWEIGHTS_DATA, then the user's cache."""
    books: Path | None = None
    """Folder of Gutenberg's books for the text gutenberg, such as pg11.txt, 11.txt or 11-0.txt, the paper's among them;
    by default the 106 books of the data set."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints."""


# Section 4.2.1 and appendix A.1.
_PAPER = Settings(
    texts=("wikitext-103",),
    epochs=90,
    batch_size=512,
    segment=100,
    carry_state=False,
    sampled=0,
    learning_rate=1e-3,
    annealing="none",
    embedding_size=2048,
    hidden_size=2048,
    layer_norm=True,
    input_dropout=0.3,
    output_dropout=0.0,
    gamma=0.25,
    limit=500,
    memory_size=10_000,
    neighbours=(1024,),
    thetas=(0.1, 0.2, 0.3),
    local_rates=(0.3,),
)
PRESETS = {
    # What the last pass teaches at a rate that falls to zero, smoothing would undo (docs/papers/rae2018.md).
    "quick": Settings(plain_epochs=1),
    # For one core that has instructions for bfloat16.
    "small": Settings(texts=("wikitext-2", "ptb"), seeds=(1, 2, 3), sampled=2048, bfloat16=True, plain_epochs=1),
    "paper": _PAPER,
    "paper-gutenberg": dataclasses.replace(_PAPER, texts=("gutenberg",), epochs=80, gamma=0.1, limit=500),
    "paper-gigaword": dataclasses.replace(_PAPER, texts=("gigaword",), epochs=2, gamma=0.1, limit=500),
}


class Trained(NamedTuple):
    """A model on a text: a row of the tables, but for its memories."""

    model: ModelName
    text: TextName


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Train each model on each text with every seed, score it with its memories.

    Raises:
        DataError: a text is not there.
    """
    corpora = prepare_corpora(lambda: load_corpora(settings), settings.batch_size)

    def train_member(row: Trained, seed: int, member: RunFolder, progress: Progress) -> None:
        title = f"{title_of(row, member.settings)}, seed {seed}"
        train_and_score(settings, row.model, corpora[row.text], member, progress, seed=seed, title=title, buckets=EDGES)

    members = member_folders(settings, corpora, folder)
    return Members(members, train_member, lambda: table(settings, read_members(folder)))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    check_settings(settings, sizes=(), lists=("models", "texts", "seeds"))
    check_language(settings)


def load_corpora(settings: Settings) -> dict[TextName, text.Corpus]:
    """Load the texts that are asked for.

    Raises:
        DataError: a text is not there.
        RunError: GigaWord is asked for, which has no usual place, without its folder; or books, and not Gutenberg.
    """
    if "gigaword" in settings.texts and settings.data_dir is None:
        raise RunError("GigaWord is licensed and is not searched for: give the folder of its files as --data-dir")
    if settings.books is not None and "gutenberg" not in settings.texts:
        raise RunError(f"--books {settings.books} is only for the text gutenberg, which is not among the texts")
    return {name: _load_corpus(name, settings) for name in settings.texts}


def _load_corpus(name: TextName, settings: Settings) -> text.Corpus:
    if name == "gigaword":
        return dated_news.load_gigaword(settings.data_dir or ".")
    if name == "gutenberg" and settings.books is not None:
        return gutenberg.load(folder=settings.books)
    return text.load(name, settings.data_dir)


def member_folders(
    settings: Settings, corpora: Mapping[TextName, text.Corpus], folder: str | os.PathLike[str]
) -> dict[tuple[Trained, int], RunFolder]:
    """Return the folder of each model, text and seed."""
    members = {}
    for name in settings.texts:
        digest = corpora[name].vocabulary.digest  # a text of other words is refused
        for model in settings.models:
            own = settings_of(settings, model, without=("texts", "books"))
            smoothing = f"-{own['gamma']}-{own['limit']}-{own['objective']}" if model == "hebbian" else ""
            if own.get("counting", "literal") != "literal":
                smoothing += f"-{own['counting']}"
            if own.get("plain_epochs", 0):
                smoothing += f"-plain{own['plain_epochs']}"
            for seed in settings.seeds:
                row = Trained(model, name)
                about = {"model": title_of(row, own), "hidden_size": own["hidden_size"], "seed": seed, "text": name}
                path = Path(folder, f"{name}-{model}{smoothing}-{own['hidden_size']}-seed{seed}")
                members[row, seed] = RunFolder(path, about | own | {"vocabulary": digest}, may_change=OF_SCORES)
    return members


def title_of(row: Trained, own: Record, memory: str = "") -> str:
    """Return the name of a model in the table, with its memories; that of a Hebbian one says how it smooths."""
    title = f"{TITLES[row.model]}{MEMORIES[memory]}, {TEXTS[row.text]}"
    if row.model == "softmax":
        return title
    smoothing = [f"gamma = {own['gamma']:g}", f"T = {own['limit']}"]
    smoothing += [own[name] for name, usual in (("objective", "l2"), ("counting", "literal")) if own[name] != usual]
    if plain := own.get("plain_epochs", 0):  # a member of before this setting has none
        smoothing.append(f"last {plain} passes plain" if plain > 1 else "last pass plain")
    return f"{title} ({', '.join(smoothing)})"


class Group(NamedTuple):
    """A model of the tables, and the results of its finished seeds."""

    row: Trained
    own: Record  # settings of its members
    results: list[Record]


def table(settings: Settings, members: list[Member]) -> dict[str, Any]:
    """Return the tables' rows, the validation curves of figures 4 and 5, and table 2 as bars."""
    asked = [
        (Trained(model, name), settings_of(settings, model)) for name in settings.texts for model in settings.models
    ]
    groups = {(title_of(row, own), own["hidden_size"]): Group(row, own, []) for row, own in asked}
    for member in sorted(members, key=lambda member: member.seed or 0):
        row = Trained("hebbian" if "gamma" in member.settings else "softmax", member.settings["text"])
        group = groups.setdefault((member.model, member.hidden_size), Group(row, member.settings, []))
        if member.result and "validation_floor" in member.result:  # the member has been scored
            group.results.append(member.result)
    texts, models = list(TEXTS), list(TITLES)
    several = sorted(groups.values(), key=lambda group: (texts.index(group.row.text), models.index(group.row.model)))
    return {
        "requested": list(groups),
        "rows": [*perplexities(several), *(line for group in several for line in by_frequency(group))],
        "curves": [Curve("validation_perplexity", "validation perplexity")],
        "bars": draw_frequencies(several),
    }


def perplexities(groups: Sequence[Group]) -> list[Record]:
    """Return table 1: each model alone and with its memories, on validation and on test."""
    rows = []
    for place, split in enumerate(("validation", "test")):
        for row, own, results in groups:
            for memory in MEMORIES:
                name = f"{split}_{memory}perplexity"
                ours = [result[name] for result in results if name in result]
                paper = _read_paper(row, memory)[place]
                if ours or paper is not None or not memory:
                    rows.append(
                        {
                            "model": title_of(row, own, memory),
                            "hidden_size": own["hidden_size"],
                            "metric": f"{split} perplexity",
                            "ours": ours,
                            "paper": paper,
                            "floor": next((result[f"{split}_floor"] for result in results), None),
                        }
                    )
    return rows


def _read_paper(row: Trained, memory: str) -> tuple[float | None, float | None]:
    """Return the paper's perplexity on validation and on test; of two texts it gives that on test alone."""
    if row.text == "wikitext-103":
        return PAPER.get((row.model, memory), (None, None))
    return None, None if memory else PAPER_BY_FREQUENCY.get((row.text, row.model), (None,))[-1]


def by_frequency(group: Group) -> list[Record]:
    """Return table 2 of a model: its perplexity on test of words by how often they occur in training."""
    paper = PAPER_BY_FREQUENCY.get((group.row.text, group.row.model), (None,) * (len(EDGES) + 1))
    return [
        {
            "model": title_of(group.row, group.own),
            "hidden_size": group.own["hidden_size"],
            "metric": f"test perplexity, words seen {bucket} times",
            "ours": numbers,
            "paper": paper[place] if place <= len(EDGES) else None,
            "floor": None,
        }
        for place, (bucket, numbers) in enumerate(_read_buckets(group.results).items())
    ]


def draw_frequencies(groups: Sequence[Group]) -> list[Bars]:
    """Return table 2 as bars, a panel for each text: the means of the seeds."""
    panels = []
    for name in dict.fromkeys(group.row.text for group in groups if group.results):
        buckets = {title_of(row, own): _read_buckets(results) for row, own, results in groups if row.text == name}
        names = list(dict.fromkeys(bucket for each in buckets.values() for bucket in each))
        series = {
            title.replace(f", {TEXTS[name]}", ""): [
                statistics.fmean(numbers) if (numbers := each.get(bucket)) else None for bucket in names
            ]
            for title, each in buckets.items()
            if each
        }
        panels.append(Bars(f"{TEXTS[name]}, test", "perplexity", "occurrences in training", names, series, log=True))
    return panels


def _read_buckets(results: Sequence[Record]) -> dict[str, list[float]]:
    """Return the perplexity of each seed by bucket, the most frequent words first."""
    buckets: dict[str, list[float]] = {}
    for lines in (result["test_by_frequency"] for result in results):
        for bucket, number in zip(lines["occurrences in training"], lines["LSTM"], strict=True):
            buckets.setdefault(bucket, []).extend([] if number is None else [number])
    return buckets
