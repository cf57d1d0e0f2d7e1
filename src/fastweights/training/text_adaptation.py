"""A causal language model that is adapted to texts, and what that gives: the work of `fastweights adapt`."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.errors import DataError, FastWeightsError, one_line
from fastweights.memory import (
    AdaptiveLanguageModel,
    Certificate,
    EpisodicMemory,
    certify,
    mix,
)
from fastweights.training.language_scores import perplexity
from fastweights.training.loop import Progress

SUFFIXES = (".txt", ".md")
_FITTED, _MOST_FITTED = 0.2, 4096  # of the text, and tokens, that settings are fitted on
_PIECE = 4096  # tokens that are scored by one call
_PARTS = 8  # of the text, by which the perplexity is reported
_CERTIFIED = 192  # tokens
_PASSAGE = 120  # tokens
_MOST_STORED = 1_000_000


class Part(NamedTuple):
    """A part of a text, and its perplexities without and with the memories."""

    first: int  # token
    last: int
    plain: float
    adapted: float


class Adaptation(NamedTuple):
    """The result of adapting a model to texts."""

    model: str
    texts: str
    fitted_tokens: int
    context: int
    plain: float  # perplexity
    adapted: float
    parts: tuple[Part, ...]
    settings: dict[str, float | None]
    weights: dict[str, float]
    certificate: Certificate
    words: list[str]  # of a passage that gains about as much as the whole
    bits: list[float]  # that each of them gains


def load_language_model(name: str) -> tuple[Any, Any]:
    """Return a causal language model of transformers in evaluation mode, and its tokenizer.

    Args:
        name: a local folder, a file of llama.cpp (.gguf), or a name on the hub, where there is a network.

    Raises:
        FastWeightsError: there is no such model, it cannot be read, or transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise FastWeightsError("language models need transformers: run `pip install '.[hf]'`") from error
    logging.disable_progress_bar()
    path, options = Path(os.path.expanduser(name)), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FastWeightsError(f"{name} is no file")
        path, options = path.parent, {"gguf_file": path.name}
    place = str(path) if path.exists() else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        model = AutoModelForCausalLM.from_pretrained(place, **options, dtype="auto" if not options else torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise FastWeightsError(f"cannot load the language model {name}: {one_line(error)}") from error
    return model.eval(), tokenizer


def read_texts(path: Path) -> tuple[str, str]:
    """Return the texts of a file, or of the files of a folder in the order of their names, and which they are.

    Raises:
        DataError: there is none, or one cannot be read.
    """
    path = path.expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    else:
        files = [path]
    if not files:
        raise DataError(f"{path}: there are no texts in it; expected files that end in {' or '.join(SUFFIXES)}")
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    return text, f"{path}, {len(files)} file{'s' if len(files) > 1 else ''}"


def adapt_to_texts(
    name: str, texts: Path, *, context: int = 512, save: Path | None = None, progress: Progress | None = None
) -> Adaptation:
    """Fit memories on the beginning of texts, score the rest as it is read, and certify the scores.

    The first fifth, at most 4,096 tokens, is for the settings and is not scored; it is remembered then. The certificate
    is of the end of the texts, before it is read.

    Args:
        name: a model, as `load_language_model` takes it.
        texts: a file or a folder.
        context: the tokens that the model reads at once.
        save: a folder for the memory.
        progress: a receiver of progress.

    Raises:
        FastWeightsError: a model or text that cannot be read or is too short, or a folder that holds another memory.
    """
    text, described = read_texts(texts)
    model, tokenizer = load_language_model(name)
    progress = progress or Progress()
    with one_line_value_errors():
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        if len(ids) < 64:
            raise DataError(f"{described}: it has {len(ids)} tokens; a text of at least 64 is needed")
        head = model.get_output_embeddings()
        width = 0 if head is None else head.weight.shape[1]  # 0 is refused below, for the right reason
        store = EpisodicMemory(min(len(ids), _MOST_STORED), width, device=model.device) if width else None
        lm = AdaptiveLanguageModel(model, tokenizer=tokenizer, store=store)
        start = min(int(_FITTED * len(ids)), _MOST_FITTED)
        shares = lm.fit(ids[:start], context=context)
        certificate = certify(lm, ids[None, -min(_CERTIFIED, context, len(ids) - start) :])
        lm.write(ids[: start + 1], context=context)
        plain, adapted = _score(lm, shares, ids[start:], context, progress)
        if save is not None:
            lm.save_pretrained(save)
    bounds = [len(plain) * part // _PARTS for part in range(_PARTS + 1)]
    parts = [
        Part(start + first, start + last, perplexity(plain[first:last]), perplexity(adapted[first:last]))
        for first, last in itertools.pairwise(bounds)
    ]
    words, bits = _choose_passage(tokenizer, ids[start + 1 :], (adapted - plain) / torch.log(torch.tensor(2.0)))
    return Adaptation(
        name,
        described,
        start,
        context,
        perplexity(plain),
        perplexity(adapted),
        tuple(parts),
        lm.settings,
        dict(zip(lm.names, shares.tolist(), strict=True)),
        certificate,
        words,
        bits,
    )


def continue_text(name: str, memory: Path, prompt: str, tokens: int) -> str:
    """Return a text, continued by a model with the memory that was saved for it, the most likely token each time.

    Raises:
        FastWeightsError: a model or memory that cannot be read, or an empty prompt.
    """
    model, tokenizer = load_language_model(name)
    with one_line_value_errors():
        lm = AdaptiveLanguageModel.from_pretrained(model, memory.expanduser(), tokenizer=tokenizer)
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64)
        if not ids.numel():
            raise FastWeightsError("--prompt is empty: give the beginning of a text")
        found = lm.generate(ids, max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones_like(ids))
    return str(tokenizer.decode(found[0], skip_special_tokens=True))


def _score(
    lm: AdaptiveLanguageModel, shares: Tensor, ids: Tensor, context: int, progress: Progress
) -> tuple[Tensor, Tensor]:
    """Return log p of each token of a text after the first, without and with the memories, which remember it."""
    plain: list[Tensor] = []
    adapted: list[Tensor] = []
    count = len(ids) - 1
    progress.start("adapting", -(-count // _PIECE), 0)
    for number, first in enumerate(range(0, count, _PIECE)):
        each = lm.score_each(ids[None, first : first + _PIECE + 1], context=context)
        plain.append(each["model"][0].cpu())
        adapted.append(mix(list(each.values()), shares)[0].cpu())
        progress.update(number + 1, -float(adapted[-1].mean()))
    return torch.cat(plain), torch.cat(adapted)


def _choose_passage(tokenizer: Any, ids: Tensor, bits: Tensor) -> tuple[list[str], list[float]]:
    """Return the words of the passage whose gain is nearest to the mean of all, and the bits that each gains."""
    size = min(_PASSAGE, len(ids))
    gains = bits.double().unfold(0, size, max(1, size // 2)).mean(1)
    first = int((gains - bits.double().mean()).abs().argmin()) * max(1, size // 2)
    words: list[str] = []
    found: list[float] = []
    for token, gain in zip(ids[first : first + size].tolist(), bits[first : first + size].tolist(), strict=True):
        piece = str(tokenizer.decode([token]))
        if words and not piece[:1].isspace() and piece:
            words[-1] += piece.strip()
            found[-1] += gain
        else:
            words.append(piece.strip() or "\u21b5")
            found.append(gain)
    return words, found


@contextlib.contextmanager
def one_line_value_errors() -> Iterator[None]:
    """Turn what a model or memory refuses into an error of the user's, in one line."""
    try:
        yield
    except ValueError as error:
        raise FastWeightsError(one_line(error)) from error
