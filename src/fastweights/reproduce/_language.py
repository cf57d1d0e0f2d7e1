"""The model, its training and scoring, for both language experiments.

The settings of the memories are chosen, and their mixtures fitted, on validation.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fastweights import processes
from fastweights.checks import check_positive, check_sizes
from fastweights.errors import TrainingError
from fastweights.evaluation import (
    by_frequency,
    evaluate_dynamically,
    measure_gradients,
    perplexity,
    score_text,
)
from fastweights.evaluation.language_scores import encode
from fastweights.memory import EpisodicMemory, NeuralCache, Predictor, StreamMbPA, UnboundedCache, fit_weights, mix
from fastweights.memory.predictors.fit import choose_setting
from fastweights.nn import LSTMLanguageModel
from fastweights.nn.modes import evaluating
from fastweights.report.passage import choose_passage
from fastweights.reproduce._experiment import one_line_errors, settings_of
from fastweights.runs import Member, Progress, Record, RunFolder
from fastweights.tasks.text import Corpus, cut_streams
from fastweights.training import LanguageSchedule, train_language_model

Name = TypeVar("Name", bound=str)
Rival = Literal["dynamic", "knn"]
Keys = Literal["input", "state"]
Chosen = tuple[float, ...]  # the values of a predictor's settings, as `_CHOSEN` names them

# The rows of the table by the names of their scores in the records: the title, and the predictors that are mixed.
ROWS = {
    "": ("LSTM", ("LSTM",)),
    "cache_": ("LSTM + cache", ("LSTM", "cache")),
    "mbpa_": ("LSTM + MbPA", ("LSTM", "MbPA")),
    "cache_mbpa_": ("LSTM + cache + MbPA", ("LSTM", "cache", "MbPA")),
    "dynamic_": ("LSTM, dynamic evaluation", ("dynamic evaluation",)),
    "knn_": ("LSTM + kNN-LM", ("LSTM", "kNN-LM")),
}
# What is chosen of each predictor, in words.
_CHOSEN = {
    "cache": ("theta",),
    "MbPA": ("neighbours", "learning rate"),
    "kNN-LM": ("temperature",),
    "dynamic evaluation": ("learning rate", "decay"),
}
WORDS_SHOWN = 120  # words of the test that are shown
_STREAMS = 20  # pieces of the training text that are read side by side
_STEPS = 128  # steps of dynamic evaluation computed at once
_WORDS = 500_000  # words of the training text that give dynamic evaluation the sizes of gradients


@dataclass(frozen=True)
class MemorySettings:
    """Settings of the memories of a trained language model, which need not be trained again for others."""

    memory_size: int = 5000
    """Last words of the text that the cache and MbPA remember."""
    neighbours: tuple[int, ...] = (16, 64, 256)
    """Numbers of remembered words that MbPA adapts to; the beginning of validation chooses one."""
    cache_keys: Keys = "input"
    """Keys of the cache: the input of the softmax, or the state of the LSTM."""
    thetas: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6)
    """Factors of the likeness in the cache; the beginning of validation chooses one. Empty: no cache."""
    local_rates: tuple[float, ...] = (0.15, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    """Learning rates of MbPA; the beginning of validation chooses one. An empty list leaves MbPA out."""
    searched: int = 10_000
    """Words at the beginning of validation that choose these; mixtures are fitted on all of validation."""


@dataclass(frozen=True)
class RivalSettings:
    """Settings of the rivals of these memories."""

    rivals: tuple[Rival, ...] = ()
    """Rivals in the table: dynamic evaluation and kNN-LM. Each takes longer than all memories, so quick has none."""
    dynamic_segment: int = 20
    """Words between two steps of dynamic evaluation."""
    dynamic_rates: tuple[float, ...] = (3e-5, 1e-4, 2e-4)
    """Learning rates of dynamic evaluation; the beginning of validation chooses one."""
    dynamic_decays: tuple[float, ...] = (5e-4, 2e-3, 1e-2, 5e-2)
    """Decays of dynamic evaluation towards the trained weights; the beginning of validation chooses one."""
    knn_words: int = 100_000
    """Words at the end of the training text that kNN-LM remembers; it compares every word with all of them."""
    knn_temperatures: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    """Temperatures of kNN-LM; the beginning of validation chooses one."""
    knn_neighbours: int = 256
    """Remembered words that kNN-LM weighs."""


# If these change, a trained model is scored again, and not trained again.
OF_SCORES = tuple(field.name for kind in (MemorySettings, RivalSettings) for field in dataclasses.fields(kind))
# Names that a member's settings share with the arguments of the model, of its Hebbian softmax and of the schedule.
_OF_MODEL = (
    "embedding_size", "hidden_size", "layer_norm",
    "embedding_dropout", "input_dropout", "state_dropout", "output_dropout",
)  # fmt: skip
_OF_HEBBIAN = ("gamma", "limit", "objective", "counting")
_OF_SCHEDULE = tuple(field.name for field in dataclasses.fields(LanguageSchedule))


def check_language(settings: Any) -> None:
    """Refuse numbers out of range: those of the memories, of the models and of their training.

    Raises:
        ValueError: one is.
    """
    check_sizes(memory_size=settings.memory_size, searched=settings.searched)
    for neighbours in settings.neighbours:
        check_sizes(neighbours=neighbours)
    if settings.local_rates and not settings.neighbours:
        raise ValueError("neighbours names no number: give one or more, or leave MbPA out with no local_rates")
    for name in ("thetas", "local_rates"):
        for value in getattr(settings, name):
            check_positive(**{name: value})
    for model in settings.models:
        make_model(2, settings_of(settings, model))
        processes.check_divisible(batch_size=schedule(settings, model).batch_size)


def make_model(vocabulary_size: int, own: Record) -> LSTMLanguageModel:
    """Return a language model with weights that are not trained, from the settings of a member."""
    return LSTMLanguageModel(vocabulary_size, **_pick(own, _OF_MODEL), hebbian=_pick(own, _OF_HEBBIAN) or None)


def build_trained(member: Member, weights: Mapping[str, Tensor]) -> LSTMLanguageModel:
    """Return the model of a member with its trained weights."""
    model = make_model(len(weights["embedding.weight"]), member.settings)
    model.load_state_dict(weights)
    return model


def schedule(settings: Any, model: str) -> LanguageSchedule:
    """Return how long and how fast a model is trained, along a cosine where the settings have no annealing.

    Raises:
        ValueError: a number out of range.
    """
    own: Record = {"annealing": "cosine"} | settings_of(settings, model)
    return LanguageSchedule(
        **_pick(own, _OF_SCHEDULE), patience=own["epochs"], checkpoint_seconds=settings.checkpoint_seconds
    )


def _pick(own: Record, names: Sequence[str]) -> Record:
    return {name: own[name] for name in names if name in own}


def prepare_corpora(load: Callable[[], dict[Name, Corpus]], batch_size: int) -> dict[Name, Corpus]:
    """Load texts that are to be trained on, prepared by one process; the others map what it has prepared.

    Raises:
        RunError: a text is too short for so many pieces.
    """
    if processes.count() > 1:
        processes.on_main(lambda: len(load()))
    corpora = load()
    for corpus in corpora.values():
        with one_line_errors():
            cut_streams(corpus.train, batch_size)
    return corpora


def train_and_score(
    settings: Any,
    name: str,
    corpus: Corpus,
    member: RunFolder,
    progress: Progress,
    *,
    seed: int,
    title: str,
    buckets: Sequence[int] | int,
) -> None:
    """Train the model that `--models` calls `name` on a text, and score it with its memories.

    A model that is trained already is not trained again, and is scored again if the settings of its scores change.
    """
    own = settings_of(settings, name)
    model = make_model(len(corpus.vocabulary), own).to(settings.device)
    splits = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    result = train_language_model(
        model, splits, schedule(settings, name), member, seed=seed, title=title, progress=progress
    )
    state, asked = member.load() or {}, _pick(own, OF_SCORES)
    if state.get("scored") != asked:
        scores = processes.on_main(lambda: score_model(model, corpus, settings, progress, buckets=buckets))
        progress.note(describe_scores(scores))
        member.save(state | {"scored": asked}, result | scores)


def describe_scores(scores: Record) -> str:
    """Return the perplexities on test in a line."""
    found = {title: scores.get(f"test_{row}perplexity") for row, (title, _) in ROWS.items()}
    return ", ".join(f"{title} {value:.2f}" for title, value in found.items() if value is not None)


def score_model(
    model: LSTMLanguageModel,
    corpus: Corpus,
    settings: MemorySettings,
    progress: Progress,
    *,
    buckets: Sequence[int] | int,
) -> Record:
    """Return the perplexities of a trained model with each memory on validation and test, and what was fitted.

    The rivals are scored too if `settings` are also `RivalSettings`. `buckets` are those by how often words occur in
    training, as `by_frequency` takes them.

    Settings are chosen on the beginning of validation, those of a memory by its mixture with the model. Then the
    mixtures are fitted on all of validation, and the test is scored once. Every text begins with empty memories, but
    for the training text that kNN-LM remembers: of validation the test knows the fitted numbers alone.
    """
    rivals = settings if isinstance(settings, RivalSettings) else RivalSettings()
    beginning = corpus.validation[: settings.searched + 1]
    memories = _Memories(model, corpus, settings, rivals)
    progress.note(f"{corpus.name}: the beginning of validation, to choose the settings of the memories")
    first: dict[str, Tensor] = {}
    for several in memories.in_turn():
        tried = {f"{name} {value}": memories.make(name, value, len(beginning)) for name, value in several}
        first |= score_text(model, beginning, tried, by_state=memories.by_state(tried), progress=progress)
        del tried  # their room is needed

    best = {
        name: choose_setting(first["model"], {value: first[f"{name} {value}"] for value in values})
        for name, values in memories.values.items()
    }
    chosen = dict(best)
    follow = None
    if "dynamic" in rivals.rivals:
        follow = _DynamicEvaluation(model, corpus, rivals, progress)
        progress.note(f"{corpus.name}: the same for dynamic evaluation")
        learning_rate, decay = chosen["dynamic evaluation"] = follow.choose(beginning)

    record: Record = {}
    weights: dict[str, Tensor] = {}
    mixed: dict[str, Tensor] = {}
    for split, tokens in (("validation", corpus.validation), ("test", corpus.test)):
        progress.note(f"{corpus.name}: {split}")
        empty = {name: memories.make(name, value, len(tokens)) for name, value in best.items()}
        scores = score_text(model, tokens, empty, by_state=memories.by_state(empty), progress=progress)
        scores["LSTM"] = scores.pop("model")
        if follow is not None:
            scores["dynamic evaluation"] = follow.score(tokens, learning_rate, decay)
        parts = {row: [scores[name] for name in names] for row, (_, names) in ROWS.items() if {*names} <= {*scores}}
        if split == "validation":
            weights = {row: fit_weights(several) for row, several in parts.items()}
        mixed = {row: mix(several, weights[row]) for row, several in parts.items()}
        record |= {f"{split}_{row}perplexity": perplexity(log_p) for row, log_p in mixed.items()}
        record[f"{split}_floor"] = unigram_perplexity(tokens, corpus.vocabulary.counts)
    fitted = {ROWS[row][0]: _describe_fit(row, chosen, shares) for row, shares in weights.items() if row}
    record |= {"test_by_frequency": split_by_frequency(mixed, corpus, buckets), "fitted": fitted}
    remembered = {row: log_p for row, log_p in mixed.items() if row in ("", "cache_", "mbpa_", "cache_mbpa_")}
    return record | ({"passage": describe_passage(remembered, corpus)} if len(remembered) > 1 else {})


class _Memories:
    """Makes the empty memories of a model; kNN-LM's has the end of the training text."""

    def __init__(
        self, model: LSTMLanguageModel, corpus: Corpus, settings: MemorySettings, rivals: RivalSettings
    ) -> None:
        self.model, self.words, self.settings, self.rivals = model, len(corpus.vocabulary), settings, rivals
        values: dict[str, list[Chosen]] = {
            "cache": [(theta,) for theta in settings.thetas],
            "MbPA": [*itertools.product(settings.neighbours, settings.local_rates)],
        }
        if "knn" in rivals.rivals:
            values["kNN-LM"] = [(temperature,) for temperature in rivals.knn_temperatures]
            self.trained = read_activations(model, corpus.train[-rivals.knn_words - 1 :])
        self.values = {name: several for name, several in values.items() if several}

    def in_turn(self) -> list[list[tuple[str, Chosen]]]:
        """Return the values that are tried, of all memories, in the passes that try them.

        All caches share one. Every other memory has its own: that of MbPA holds a prediction of all words at every
        position, and kNN-LM's a copy of the training text's.
        """
        pairs = [(name, value) for name, values in self.values.items() for value in values]
        caches = [pair for pair in pairs if pair[0] == "cache"]
        return [caches, *([pair] for pair in pairs if pair not in caches)]

    def by_state(self, made: Mapping[str, Predictor]) -> list[str]:
        """Return the names of the memories that compare states of the LSTM."""
        return [
            name for name, each in made.items() if self.settings.cache_keys == "state" and isinstance(each, NeuralCache)
        ]

    def make(self, name: str, values: Chosen, length: int) -> Predictor:
        """Return a memory for a text of so many tokens, with values of the settings that are to be chosen."""
        size, value = self.settings.memory_size, values[-1]
        if name == "cache":
            return NeuralCache(size, self.words, value)
        if name == "MbPA":
            return StreamMbPA(self.model.head, size, neighbours=int(values[0]), lr=value, half=True)
        h, targets = self.trained
        store = EpisodicMemory(len(h) + length, h.shape[1], device=h.device)
        store.write(h, targets)
        return UnboundedCache(store, self.words, neighbours=self.rivals.knn_neighbours, bandwidth=math.sqrt(value / 2))


class _DynamicEvaluation:
    """Dynamic evaluation of a model, with the sizes of its gradients on the training text."""

    def __init__(self, model: LSTMLanguageModel, corpus: Corpus, settings: RivalSettings, progress: Progress) -> None:
        self.model, self.settings, self.progress = model, settings, progress
        streams = min(100, len(corpus.train) // 2)
        most = max(1, _WORDS // (streams * settings.dynamic_segment))
        self.statistics = measure_gradients(
            model, corpus.train, streams=streams, segment=settings.dynamic_segment, most=most
        )

    def choose(self, tokens: Tensor) -> tuple[float, float]:
        """Return the learning rate and the decay under which a text is likeliest; weights that run away lose."""
        pairs = itertools.product(self.settings.dynamic_rates, self.settings.dynamic_decays)
        likely = {pair: self._follow(tokens, *pair).double().mean().nan_to_num(nan=-math.inf).item() for pair in pairs}
        return max(likely, key=lambda pair: likely[pair])

    def score(self, tokens: Tensor, learning_rate: float, decay: float) -> Tensor:
        """Return log p of each token of a text after the first.

        Raises:
            TrainingError: they are not finite.
        """
        scores = self._follow(tokens, learning_rate, decay)
        if not bool(scores.isfinite().all()):
            raise TrainingError(
                f"dynamic evaluation became NaN or infinite with the learning rate {learning_rate} and the decay "
                f"{decay}, the best on the beginning of validation: give smaller --dynamic-rates"
            )
        return scores

    def _follow(self, tokens: Tensor, learning_rate: float, decay: float) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="dynamic evaluation has diverged")  # these lose
            return evaluate_dynamically(
                self.model,
                tokens,
                self.statistics,
                learning_rate=learning_rate,
                decay=decay,
                segment=self.settings.dynamic_segment,
                progress=self.progress,
            )


def _describe_fit(row: str, chosen: Mapping[str, Chosen], weights: Tensor) -> dict[str, float]:
    """Return what was chosen and fitted of a row, in words."""
    _, names = ROWS[row]
    settings = {
        word: value for name in names for word, value in zip(_CHOSEN.get(name, ()), chosen.get(name, ()), strict=True)
    }
    shares = {f"weight of {name}": weight for name, weight in zip(names, weights.tolist(), strict=True)}
    return settings | (shares if len(names) > 1 else {})


def read_activations(model: LSTMLanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Read a training text in pieces side by side: the inputs of the softmax [n,d], and the next words [n]."""
    streams = cut_streams(tokens, min(_STREAMS, len(tokens) // 2))
    parts, state = [], None
    with evaluating(model), torch.no_grad():
        for start in range(0, len(streams) - 1, _STEPS):
            part = slice(start, min(start + _STEPS, len(streams) - 1))
            h, targets, state = encode(model, streams, part, state)
            parts.append((h.flatten(0, 1), targets.flatten()))
    h, targets = (torch.cat(several) for several in zip(*parts, strict=True))
    return h, targets


def split_by_frequency(
    mixed: Mapping[str, Tensor], corpus: Corpus, buckets: Sequence[int] | int
) -> dict[str, list[Any]]:
    """Return perplexities on test by how often the words occur in training, the most frequent first.

    A bucket without words has none.
    """
    split = {
        ROWS[row][0]: by_frequency(log_p, corpus.test[1:], corpus.vocabulary.counts, buckets)[::-1]
        for row, log_p in mixed.items()
    }
    table: dict[str, list[Any]] = {"occurrences in training": [bucket.name for bucket in split["LSTM"]]}
    table["words of the test"] = [bucket.tokens for bucket in split["LSTM"]]
    return table | {
        title: [bucket.perplexity if bucket.tokens else None for bucket in several] for title, several in split.items()
    }


def describe_passage(mixed: Mapping[str, Tensor], corpus: Corpus) -> dict[str, list[Any]]:
    """Return some words of the test, and what the memories add to log2 p of each, in bits."""
    gain = (list(mixed.values())[-1] - mixed[""]).double() / math.log(2)
    part = choose_passage(gain, WORDS_SHOWN)
    return {
        "words": corpus.vocabulary.decode(corpus.test[1:][part]),
        "bits": [round(bits, 3) for bits in gain[part].tolist()],
    }


def unigram_perplexity(tokens: Tensor, counts: Tensor) -> float:
    """Return the perplexity of a text under the shares of the words in training: what a model without context knows."""
    often = counts.double().clamp(min=1)
    return perplexity((often / often.sum()).log()[tokens[1:].long()])
