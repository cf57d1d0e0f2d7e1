"""Language: every layer, and one of your own, as a language model of a text, all with as many parameters.

Which word comes next, in the frame of `recall/mqar`: two blocks of mixer and MLP, and a head tied to the embedding.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import processes
from fastweights.checks import check_integers
from fastweights.nn.modes import evaluating
from fastweights.reproduce._experiment import one_line_errors, only, run_of, settings_of
from fastweights.reproduce._language import prepare_corpora, unigram_perplexity
from fastweights.reproduce._members import Members
from fastweights.reproduce.recall._bench import (
    DELTA,
    SEARCHED,
    TITLES,
    FrameSettings,
    ModelName,
    check_frame,
    choose_rates,
    model_of,
    rate_of,
    rates_may_fail,
    schedule,
    title_of,
)
from fastweights.reproduce.recall._entrants import Entrant, Nothing, count_weights, enter, find_width
from fastweights.reproduce.recall._own_layer import check_layer
from fastweights.reproduce.recall.frame import Frame, Mixer
from fastweights.runs import Curve, Member, Progress, Record, RunFolder, read_members
from fastweights.tasks import text
from fastweights.tasks.recall import IGNORED
from fastweights.training import epoch_order, train_epochs
from fastweights.training.language import SampledSoftmax, to_perplexity
from fastweights.training.loop import count_steps, hash_tensors

EXPERIMENT = "recall/language"
QUICK_MINUTES = 10
DATA = "ptb"
METRICS = ("validation_loss", "validation_perplexity")

__all__ = ["DATA", "EXPERIMENT", "METRICS", "PRESETS", "QUICK_MINUTES", "TITLES", "Settings", "check", "run"]

TextName = Literal["ptb", "wikitext-2"]
TEXTS: dict[TextName, str] = {"ptb": "Penn Treebank", "wikitext-2": "WikiText-2"}
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Settings(FrameSettings):
    """Language: which word comes next, guessed by layers with equally many parameters?"""

    models: tuple[ModelName, ...] = ("lstm", "hidden-delta")
    """Layers of the library to compare, each a row of the table."""
    layer: str | None = None
    """Layer of your own beside them, FILE.py:CLASS: it takes (input_size, hidden_size), and x [B,T,D] -> y [B,T,H]."""
    text: TextName = "ptb"
    """Text to learn: Penn Treebank or WikiText-2."""
    parameters: int = 1_500_000
    """Number of weights of each network, embedding among them, which sets its size: WikiText-2 wants more."""
    steps: int = 128
    """Words in a window; the network knows nothing before it. Words that are scored have half a window before them."""
    epochs: int = 3
    """Passes over the training text."""
    batch_size: int = 32
    """Windows in a step."""
    sampled: int = 1024
    """Words in the softmax of each pass except the last, drawn again for each step; 0 takes all words."""
    bfloat16: bool = False
    """Products in bfloat16 in training: several times faster where the processor has instructions for it."""
    dropout: float = 0.1
    """Dropout of the embedding, of what each mixer and MLP adds, and of what the head reads."""
    delta_heads: int = only((*DELTA, *SEARCHED), 4, "Heads.")
    data_dir: Path | None = None
    """Folder that has the folders of the texts; by default $FASTWEIGHTS_DATA, then the user's cache."""


PRESETS = {
    "quick": Settings(),
    # Of Penn Treebank 416 features, for DeltaFastWeightsRNN in heads of 32: multiples of 16 are faster by far.
    "ten-million": Settings(
        parameters=10_060_000,
        epochs=8,
        sampled=2048,
        bfloat16=True,
        learning_rates=(2e-3,),
        dropout=0.3,
        delta_heads=13,
    ),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every layer with every learning rate and seed.

    Raises:
        DataError: the text is not there.
        RunError: a layer comes nowhere near the number of parameters.
    """
    corpus = prepare_corpora(lambda: load_corpora(settings), 1)[settings.text]
    entrants = enter(settings, settings.layer)
    with one_line_errors():
        count_windows(corpus.train, settings.steps)
        words = len(corpus.vocabulary)
        sizes = {name: find_features(entrant, words, settings) for name, entrant in entrants.items()}
        for name, entrant in entrants.items():
            if entrant.own is not None:
                check_layer(entrant.own, sizes[name], settings.steps, settings.device, bfloat16=settings.bfloat16)

    def title(entrant: Entrant, rate: float) -> str:
        return title_of(f"{entrant.title} on {TEXTS[settings.text]}", rate)

    members = {
        (name, rate, seed): RunFolder(
            Path(folder, f"{name}-{settings.text}-{rate:g}-seed{seed}"),
            {"model": title(entrant, rate), "hidden_size": sizes[name], "seed": seed, "learning_rate": rate}
            | entrant.about
            | settings_of(settings, name, without=("layer", "learning_rates"))
            | {"vocabulary": corpus.vocabulary.digest},
        )
        for name, entrant in entrants.items()
        for rate in settings.learning_rates
        for seed in settings.seeds
    }

    def train_member(name: str, rate: float, seed: int, member: RunFolder, progress: Progress) -> None:
        mixers = functools.partial(entrants[name].mixer, sizes[name])
        network = make_network(mixers, name, sizes[name], words, settings).to(settings.device)
        with rates_may_fail(settings, progress):
            train_epochs(
                _Reader(network, corpus, settings, rate, seed),
                schedule(settings, rate, settings.epochs),
                member,
                steps_per_epoch=count_steps(count_windows(corpus.train, settings.steps), settings.batch_size),
                seed=seed,
                identity={"data": hash_tensors({split: (getattr(corpus, split),) for split in _SPLITS})},
                shared=True,
                title=f"{title(entrants[name], rate)}, {sizes[name]} features, seed {seed}",
                progress=progress,
            )

    requested = [
        (title(entrant, rate), sizes[name]) for name, entrant in entrants.items() for rate in settings.learning_rates
    ]
    floors = {split: unigram_perplexity(getattr(corpus, split), corpus.vocabulary.counts) for split in _SPLITS[1:]}
    return Members(members, train_member, lambda: table(read_members(folder), requested, floors))


def load_corpora(settings: Settings) -> dict[TextName, text.Corpus]:
    """Load the text.

    Raises:
        DataError: it is not there.
    """
    return {settings.text: text.load(settings.text, settings.data_dir)}


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_frame(settings, settings.epochs, sizes=("parameters", "steps", "epochs", "batch_size"))
    check_integers(0, sampled=settings.sampled)
    enter(settings, settings.layer)


def make_network(mixers: Callable[[], Mixer], name: str, size: int, words: int, settings: Settings) -> Frame:
    """Return a language model of so many words.

    Args:
        mixers: makes the mixer of a block.
        name: of its layer.
        size: features.
        words: V, those of the vocabulary.
        settings: of the experiment.
    """
    return Frame(
        mixers,
        vocabulary_size=words,
        embedding_size=size,
        positions=settings.steps if name == "attention" and settings.convolution == 0 else 0,
        mlp_multiple=settings.mlp_multiple,
        dropout=settings.dropout,
        block_dropout=settings.dropout,
    )


def find_features(entrant: Entrant, words: int, settings: Settings) -> int:
    """Return the features with which the language model of a layer comes closest to `settings.parameters`.

    Raises:
        RunError: none comes near.
        ValueError: the layer cannot be made.
    """

    def count(size: int) -> int:
        with torch.device("meta"):
            rest = make_network(Nothing, entrant.name, size, words, settings)
        return entrant.count(size) + count_weights(rest)

    return find_width(entrant.title, count, settings.parameters)


def count_windows(stream: Tensor, steps: int) -> int:
    """Return the windows of a pass over a text [N], which begins at any of the first `steps` words.

    Raises:
        ValueError: the text is too short for one.
    """
    if (count := (len(stream) - steps) // steps) < 1:
        raise ValueError(f"steps must be at most half of the {len(stream):,} words of the text, got {steps:,}")
    return count


def cut_windows(stream: Tensor, steps: int, first: int) -> Tensor:
    """Return the windows of a pass, and the word after each: a text [N] from its word `first` on -> [M,steps+1].

    Examples:
        >>> import torch
        >>> from fastweights.reproduce.recall.language import cut_windows
        >>> cut_windows(torch.arange(10), 3, first=2).tolist()
        [[2, 3, 4, 5], [5, 6, 7, 8]]
    """
    count = count_windows(stream, steps)
    return stream[first : first + count * steps + 1].unfold(0, steps + 1, steps)


def cut_scored(stream: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return windows that overlap by half, and the words to guess: a text [N] -> inputs and targets [M,steps] int64.

    Each word but the first is guessed once; all but those of the first window have half a window before them, or more.
    Other targets are `IGNORED`.

    Examples:
        >>> import torch
        >>> from fastweights.reproduce.recall.language import cut_scored
        >>> inputs, targets = cut_scored(torch.arange(8), 4)
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]], [[1, 2, 3, 4], [-100, -100, 5, 6], [-100, -100, 7, -100]])
    """
    stride = (steps + 1) // 2
    count = 1 + max(0, math.ceil((len(stream) - 1 - steps) / stride))
    whole = F.pad(stream.long(), (0, (count - 1) * stride + steps + 1 - len(stream)))
    guessed = whole.clone()
    guessed[len(stream) :] = IGNORED
    inputs = whole[:-1].unfold(0, steps, stride)
    targets = guessed[1:].unfold(0, steps, stride).clone()
    targets[1:, : steps - stride] = IGNORED
    return inputs, targets


class _Reader:
    """A language model and its text: windows in another order in every pass, perplexities of validation and test."""

    complete = False
    carried: Any = None

    def __init__(self, model: Frame, corpus: text.Corpus, settings: Settings, rate: float, seed: int) -> None:
        self.model: nn.Module = model
        self.scored: nn.Module = model
        self.network, self.settings, self.seed = model, settings, seed
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, weight_decay=settings.weight_decay, fused=True
        )
        self.corpus = corpus
        self.state_size = model.state_size(settings.steps)
        self.sampled = SampledSoftmax(corpus.vocabulary.counts, settings.sampled) if settings.sampled else None
        self.ordered, self.windows = -1, torch.empty(0, dtype=torch.int64)  # a pass, and its windows in their order

    def loss(self, epoch: int, index: int) -> Tensor:
        settings = self.settings
        if epoch != self.ordered:
            draw = numpy.random.default_rng([self.seed, epoch])
            windows = cut_windows(self.corpus.train, settings.steps, int(draw.integers(settings.steps)))
            self.ordered, self.windows = epoch, windows[epoch_order(len(windows), self.seed, epoch)].long()
        batch = self.windows[index * settings.batch_size : (index + 1) * settings.batch_size]
        own = batch[processes.own_rows(len(batch))].to(settings.device)
        inputs, targets = own[:, :-1], own[:, 1:].flatten()
        with torch.autocast(torch.device(settings.device).type, torch.bfloat16, enabled=settings.bfloat16):
            h = self.network.encode(inputs).flatten(0, 1)
            if self.sampled is None or epoch == settings.epochs - 1:
                loss = F.cross_entropy(self.network.read(h).float(), targets)
            else:
                loss = self.sampled(h, self.network.embedding.weight, None, targets)
        return loss * (len(own) / len(batch))

    def score(self, step: int) -> tuple[Record, str]:
        scores = self._score("validation")
        perplexity = scores["validation_perplexity"]
        return scores, f"pass {self.ordered + 1}: validation perplexity {perplexity:.2f}"

    def test(self, step: int) -> Record:
        floor = unigram_perplexity(self.corpus.test, self.corpus.vocabulary.counts)
        return self._score("test") | {"test_floor": floor, "state_size": self.state_size}

    @processes.in_main
    def _score(self, split: str) -> Record:
        inputs, targets = cut_scored(getattr(self.corpus, split), self.settings.steps)
        loss, size = 0.0, self.settings.batch_size
        with evaluating(self.network), torch.no_grad():
            for x, y in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
                marked = y != IGNORED
                logits = self.network(x.to(self.settings.device), marked.to(self.settings.device))
                loss += F.cross_entropy(logits, y[marked].to(logits.device), reduction="sum").item()
        loss /= int((targets != IGNORED).sum())
        return {f"{split}_loss": loss, f"{split}_perplexity": to_perplexity(loss)}


def table(
    members: Sequence[Member], requested: Sequence[tuple[str, int]], floors: Mapping[str, float]
) -> dict[str, Any]:
    """Return a row for each layer and learning rate, and one for the best rate on validation where there are several.

    Args:
        members: of the run, whose texts may differ.
        requested: the titles and sizes of this time.
        floors: the perplexity of a model that knows how often each word is, of each split of this time's text.
    """
    results: dict[tuple[str, int | None], list[Record]] = {pair: [] for pair in requested}
    rates: dict[tuple[str, int | None], set[float]] = {}
    for member in sorted(members, key=lambda member: member.seed or 0):
        mine = results.setdefault((member.model, member.hidden_size), [])
        if member.result is not None:
            mine.append(member.result)
        rates.setdefault(layer_of(member), set()).add(rate_of(member))
    best = choose(members)
    rows = [_row(title, size, "", mine, floors["test"]) for (title, size), mine in results.items()] + [
        _row(*pair, f", at the best learning rate on validation, {rate_of(seeds[0]):g}", _results(seeds))
        for pair in dict.fromkeys((model_of(title), size) for title, size in results)
        if len(rates.get(pair, ())) > 1 and (seeds := best.get(pair))
    ]
    curves = [Curve("validation_perplexity", "validation perplexity", floors["validation"])]
    return {"requested": requested, "rows": rows, "curves": curves}


def choose(members: Sequence[Member]) -> dict[tuple[str, int | None], list[Member]]:
    """Return, for each layer, text and size, the finished seeds of the learning rate that is the best on validation."""
    return choose_rates(members, layer_of)


def layer_of(member: Member) -> tuple[str, int | None]:
    """Return a member's layer and text, and its size."""
    return model_of(member.model), member.hidden_size


def _results(seeds: Sequence[Member]) -> list[Record]:
    return [seed.result or {} for seed in seeds]


def _row(title: str, size: int | None, about: str, results: Sequence[Record], floor: float | None = None) -> Record:
    return {
        "model": title,
        "hidden_size": size,
        "metric": f"test perplexity{about}",
        "ours": [result["test_perplexity"] for result in results],
        "floor": results[0]["test_floor"] if results else floor,
    }
