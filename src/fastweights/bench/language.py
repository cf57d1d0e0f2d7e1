"""`fastweights bench language`: training a language model beside `torch.nn.LSTM`, and scoring a text with memories."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.bench.parity import allowed_error, distance, parity_error
from fastweights.bench.problems import Calls, draw_words
from fastweights.bench.published import Columns, Row, last_measured, place, show, show_ratio, table
from fastweights.bench.run import Line
from fastweights.evaluation import score_text
from fastweights.memory import EpisodicMemory, MbPA, NeuralCache, Predictor, StreamMbPA
from fastweights.nn import HebbianSoftmax, LSTMLanguageModel

LSTM = "LSTM"  # torch's, with the same head, in training; the model without a memory in scoring
OURS, HEBBIAN = "fastweights", "fastweights, Hebbian"
CACHE, BOTH = "LSTM + cache", "LSTM + cache + MbPA"
RIVALS = (LSTM, OURS, HEBBIAN, CACHE, BOTH)
RIVALS_OF = {"training": (LSTM, OURS, HEBBIAN), "scoring": (LSTM, CACHE, BOTH)}
THETA = 0.3
LEARNING_RATE = 1e-3
DROPOUT = 0.2  # dropout of state and output, in ours alone: torch's LSTM drops no state
WORDS = 4096  # words scored by a timed call
COMPARED = 24  # words that every memory's scores are compared at
MOST_ERROR = {"cache": 1e-3, "MbPA": 1e-2}  # in log p; MbPA reads probabilities of 16 bits, rounded by up to 2^-9
_LEAST = -100.0  # log p of a word that the cache does not hold is minus infinity

BASE = ("LSTM", LSTM)
_SIZE_COLUMNS = ["classes", "embedding_size", "hidden_size", "window", "neighbours"]
COLUMNS = ["part", "batch", "steps", *_SIZE_COLUMNS, "rival", "words"]
UNIT = "milliseconds of a training step, or of a word that is scored"
PER = "words"


@dataclass(frozen=True)
class LanguageCase:
    """A language model, and what is timed of it."""

    part: str
    classes: int  # V
    embedding_size: int  # E
    hidden_size: int  # H
    batch: int = 1
    steps: int = 1
    window: int = 0  # words that are remembered
    neighbours: int = 0
    scored: int = WORDS

    def __str__(self) -> str:
        return f"{self.part}, V={self.classes}, E={self.embedding_size}, H={self.hidden_size}"

    def words(self, rival: str) -> int:
        """Return how many words a time is of."""
        return self.scored if self.part == "scoring" else 1


@dataclass(frozen=True)
class LanguageSelection:
    """The cases that a run of the command times: models of the size of those that are published, and their texts'."""

    threads: tuple[int, ...] = (1, 2)
    rounds: int = 15
    budget: float = 90.0  # seconds that the rounds of one case may take, of all rivals together

    def cases(self) -> list[LanguageCase]:
        return [
            LanguageCase("training", 10_000, 256, 512, batch=20, steps=35),
            LanguageCase("training", 10_000, 256, 512, batch=32, steps=35),
            LanguageCase("training", 33_278, 160, 512, batch=32, steps=35),
            LanguageCase("scoring", 33_278, 160, 512, window=5000, neighbours=256),
        ]


QUICK = LanguageSelection()
FULL = LanguageSelection(budget=300.0)


class TorchModel(nn.Module):
    """The same model around `torch.nn.LSTM`, without dropout."""

    def __init__(self, like: LSTMLanguageModel) -> None:
        super().__init__()
        self.embedding = nn.Embedding(like.vocabulary_size, like.embedding_size)
        self.lstm = nn.LSTM(like.embedding_size, like.hidden_size)
        self.projection = nn.Linear(like.hidden_size, like.embedding_size, bias=False)
        self.head = nn.Linear(like.embedding_size, like.vocabulary_size)
        self.head.weight = self.embedding.weight
        ours = like.state_dict()
        self.embedding.load_state_dict({"weight": ours["embedding.weight"]})
        self.projection.load_state_dict({"weight": ours["projection.weight"]})
        self.head.load_state_dict({"weight": ours["embedding.weight"], "bias": ours["head.bias"]})
        weights = {f"{name}_l0": ours[f"layers.0.{name}"] for name in ("weight_ih", "weight_hh")}
        bias = ours["layers.0.bias"]
        self.lstm.load_state_dict(weights | {"bias_ih_l0": bias, "bias_hh_l0": torch.zeros_like(bias)})

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of each next token: tokens, targets [T,B] -> a number."""
        y, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(self.projection(y)).flatten(0, 1), targets.flatten())


def make_model(case: LanguageCase, *, hebbian: bool = False, dropout: float = 0.0) -> LSTMLanguageModel:
    """Return our model with weights that are drawn again, the same for all rivals."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LSTMLanguageModel(
            case.classes,
            case.embedding_size,
            case.hidden_size,
            state_dropout=dropout,
            output_dropout=dropout,
            hebbian={"gamma": 0.1, "limit": 100} if hebbian else None,
        )


def draw_text(case: LanguageCase, length: int) -> Tensor:
    """Return a text [length], its words as frequent as Zipf has them."""
    return draw_words(length, case.classes, torch.Generator().manual_seed(case.classes))


def prepare_training(case: LanguageCase, rival: str) -> Callable[[], None]:
    """Return a training step: the loss, its gradients and plain SGD; ours with dropout fixed over time."""
    text = draw_text(case, (case.steps + 1) * case.batch).view(case.steps + 1, case.batch)
    tokens, targets = text[:-1].contiguous(), text[1:].contiguous()
    ours = make_model(case, hebbian=rival == HEBBIAN, dropout=DROPOUT)
    model = TorchModel(ours) if rival == LSTM else ours
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if isinstance(ours.head, HebbianSoftmax):
        ours.head.attach(optimizer)

    def step() -> None:
        loss = model.loss(tokens, targets)
        (loss if isinstance(loss, Tensor) else loss[0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_memories(case: LanguageCase, model: LSTMLanguageModel, rival: str) -> dict[str, Predictor]:
    """Return the empty memories of a rival."""
    memories: dict[str, Predictor] = {}
    if rival in (CACHE, BOTH):
        memories["cache"] = NeuralCache(case.window, case.classes, THETA)
    if rival == BOTH:
        memories["MbPA"] = StreamMbPA(model.head, case.window, neighbours=case.neighbours, lr=1.0, half=True)
    return memories


def prepare_scoring(case: LanguageCase, rival: str) -> Callable[[], dict[str, Tensor]]:
    """Return a pass over the next words of a text, with memories that are full."""
    model = make_model(case)
    memories = make_memories(case, model, rival)
    score_text(model, draw_text(case, case.window + 1), memories)
    text = draw_text(case, case.scored + 1)
    return lambda: score_text(model, text, memories)


def rivals(case: LanguageCase, selection: LanguageSelection) -> tuple[Calls, dict[str, str]]:
    """Return the calls of all rivals."""
    prepare = prepare_training if case.part == "training" else prepare_scoring
    return {rival: prepare(case, rival) for rival in RIVALS_OF[case.part]}, {}


def require_parity(case: LanguageCase) -> None:
    """Raise FastWeightsError where our loss is not that of `torch.nn.LSTM`, or a memory's score not that of a loop.

    The loop asks `MbPA` and the equation of the cache at every word, and remembers the word then.
    """
    if case.part == "training":
        model = make_model(case)
        text = draw_text(case, 10 * case.batch).view(10, case.batch)
        expected, loss = TorchModel(model).loss(text[:-1], text[1:]), model.loss(text[:-1], text[1:])[0]
        error = distance(loss.detach(), expected.detach())
        if not error <= allowed_error(0):  # a NaN is red
            raise parity_error(f"the loss at {case} differs from that of torch.nn.LSTM by {error:.1e}")
        return
    model = make_model(case)
    text = draw_text(case, COMPARED + 1)
    scores = score_text(model, text, make_memories(case, model, BOTH))
    for name, expected in _score_in_a_loop(case, model, text).items():
        ours, theirs = (log_p.clamp(min=_LEAST) for log_p in (scores[name], expected))
        error = float((ours - theirs).abs().max())
        if not error <= MOST_ERROR[name]:
            raise parity_error(f"log p of {name} at {case} differs from that of a loop by {error:.1e}")


@torch.no_grad()
def _score_in_a_loop(case: LanguageCase, model: LSTMLanguageModel, text: Tensor) -> dict[str, Tensor]:
    h = model.eval().encode(text[:-1].unsqueeze(1))[0].squeeze(1)
    store = EpisodicMemory(case.window, case.embedding_size)
    mbpa = MbPA(nn.Identity(), model.head, store, neighbours=case.neighbours, lr=1.0)
    scores: dict[str, list[Tensor]] = {"cache": [], "MbPA": []}
    for position, (query, target) in enumerate(zip(h, text[1:], strict=True)):
        past = slice(max(0, position - case.window), position)
        found = torch.softmax(THETA * (h[past] @ query), 0)[text[1:][past] == target].sum()
        # Before anything is remembered, each predicts without: the cache all words alike.
        scores["cache"].append(found.log() if position else query.new_tensor(1 / case.classes).log())
        logits = mbpa(query.unsqueeze(0)) if position else model.head(query.unsqueeze(0))
        scores["MbPA"].append(logits.log_softmax(1)[0, target])
        mbpa.write(query.unsqueeze(0), target.unsqueeze(0))
    model.train()
    return {name: torch.stack(several) for name, several in scores.items()}


def lines(case: LanguageCase) -> list[Line]:
    """Return the line that is printed for a case."""
    sizes = ("threads", 7, "threads"), ("part", 8, "part"), ("batch", 5, "batch"), ("V", 6, "classes")
    if case.part == "training":
        times = ("LSTM", 8, show(LSTM)), ("ours", 8, show(OURS)), ("Hebbian", 8, show(HEBBIAN))
        ratios = ("ours/LSTM", 9, show_ratio(OURS, LSTM)), ("Hebbian/ours", 12, show_ratio(HEBBIAN, OURS))
    else:
        times = ("LSTM", 8, show(LSTM)), ("+ cache", 8, show(CACHE)), ("+ MbPA", 8, show(BOTH))
        ratios = ("cache/LSTM", 10, show_ratio(CACHE, LSTM)), ("both/LSTM", 9, show_ratio(BOTH, LSTM))
    return [[*sizes, *times, *ratios]]


_SIZES: Columns = (("threads", "threads"), ("V", "classes"), ("E", "embedding_size"), ("H", "hidden_size"))
TRAINING: Columns = (
    *_SIZES,
    ("batch", "batch"),
    ("T", "steps"),
    ("`torch.nn.LSTM`", show(LSTM, digits=1)),
    ("fastweights", show(OURS, digits=1)),
    ("with a Hebbian head", show(HEBBIAN, digits=1)),
    ("ours / LSTM", show_ratio(OURS, LSTM)),
    ("Hebbian / ours", show_ratio(HEBBIAN, OURS)),
)
SCORING: Columns = (
    *_SIZES,
    ("n", "window"),
    ("K", "neighbours"),
    ("LSTM alone", show(LSTM, digits=3)),
    ("+ cache", show(CACHE, digits=3)),
    ("+ cache + MbPA", show(BOTH, digits=3)),
    ("cache / alone", show_ratio(CACHE, LSTM)),
    ("both / alone", show_ratio(BOTH, LSTM)),
)


def training_table(rows: list[Row]) -> str:
    """Return a table of a training step beside that of `torch.nn.LSTM`."""
    return _write(rows, "training", "Milliseconds of a training step", TRAINING)


def scoring_table(rows: list[Row]) -> str:
    """Return a table of the time of a word that is scored, with memories and without."""
    return _write(rows, "scoring", "Milliseconds a word", SCORING)


def _write(rows: list[Row], part: str, title: str, columns: Columns) -> str:
    """Return a table with a line for each processor, as last measured on it: the ratios differ."""
    processors = dict.fromkeys(row["processor"] for row in rows)
    last = [last_measured([row for row in rows if row["processor"] == processor]) for processor in processors]
    places = "; ".join(place(several[-1]) for several in last)
    these = [row for several in last for row in several if row["part"] == part]
    shown = table(these, (("processor", "processor"), *columns), words=None)
    return f"{title}, the median, float32; {places}.\n\n{shown}"
