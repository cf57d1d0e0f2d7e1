"""`fastweights adapt`: a causal language model that is adapted to texts, from the arguments to the page."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.errors import DataError, FastWeightsError, RunError, one_line
from fastweights.evaluation import choose_learning_rate, evaluate_dynamically, perplexity
from fastweights.files import write_files
from fastweights.folders import decode_text, find_files
from fastweights.hub import CARD
from fastweights.memory import (
    AdaptiveLanguageModel,
    Certificate,
    EpisodicMemory,
    certify,
    mix,
)
from fastweights.memory.language_model.adaptive_language_model import FEWEST_TOKENS
from fastweights.memory.language_model.certificate import LEAST
from fastweights.memory.language_model.loading import load_language_model
from fastweights.report import print_blocks
from fastweights.report.blocks import Block, Heading, Paragraph, Picture, Table, to_markdown
from fastweights.report.figures import draw_passages, svg
from fastweights.report.page import inline, render_html
from fastweights.report.passage import choose_passage
from fastweights.runs import Progress, show_progress

SUFFIXES = (".txt", ".md")
_SAVED = "language_model.json"  # a file that `AdaptiveLanguageModel.save_pretrained` writes
_FITTED, _MOST_FITTED = 0.2, 4096  # settings are fitted on this fraction of the text, and at most this many tokens
_LEAST = int(FEWEST_TOKENS / _FITTED)  # tokens of a text
_PIECE = 4096  # tokens that are scored by one call
_PARTS = 8  # parts of the text whose perplexities are reported
_CERTIFIED = 192  # tokens
_PASSAGE = 120  # tokens
_SEGMENT = 128  # tokens of a step of dynamic evaluation
_MOST_STORED = 1_000_000
_PICTURE = "passage.svg"


class Part(NamedTuple):
    """A part of a text, and its perplexities without and with the memories."""

    first: int  # token
    last: int
    plain: float
    adapted: float


class Following(NamedTuple):
    """The result of dynamic evaluation: all weights follow the text."""

    perplexity: float
    learning_rate: float


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
    words: list[str]  # words of a passage that gains about as much as the whole text
    bits: list[float]  # bits gained by each word
    following: Following | None


def adapt(
    name: str,
    texts: Path,
    *,
    suffixes: Sequence[str] = SUFFIXES,
    context: int = 512,
    dynamic: bool = False,
    save: Path | None = None,
    output: Path | None = None,
) -> None:
    """Adapt a language model to texts, print what that gives, and write a page about it.

    Args:
        name: a model, as `load_language_model` takes it.
        texts: a file or a folder.
        suffixes: as of `read_texts`.
        context: the tokens that the model reads at once, at most as many as it can.
        dynamic: whether dynamic evaluation reads the texts too.
        save: a folder for the memory.
        output: a folder for the page; without, `runs/adapt` and the name of the model.

    Raises:
        FastWeightsError: the model or a text cannot be read, a folder cannot be written, or the certificate failed.
    """
    output = output or Path("runs", "adapt", Path(name).absolute().name.removesuffix(".gguf"))
    check_folder("--output", output)
    with show_progress() as progress:
        found = adapt_to_texts(
            name, texts, suffixes=suffixes, context=context, dynamic=dynamic, save=save, progress=progress
        )
    print_blocks([block for block in adaptation_blocks(found) if isinstance(block, Paragraph | Table)])
    page = write_adaptation(found, output)
    print(f"page: {page}" + (f"\nmemory: {save}" if save else ""))
    if wrong := [check.name for check in found.certificate.checks if not check.passed]:
        raise FastWeightsError(
            f"the certificate failed, so these perplexities are not valid; not true: {'; '.join(wrong)}"
        )


def read_texts(path: Path, suffixes: Sequence[str] = SUFFIXES) -> tuple[str, str]:
    """Return the texts of a file, or of the files of a folder in the order of their names, and which they are.

    Args:
        path: a file, or a folder, whose hidden files and folders are left out.
        suffixes: endings of the files of a folder that are read, in small or capital letters.

    Raises:
        DataError: there is none, one cannot be read or is no text in UTF-8, or all are empty.
    """
    path = path.expanduser()
    others: list[Path] = []
    if path.is_dir():
        endings = [suffix.lower() if suffix.startswith(".") else f".{suffix.lower()}" for suffix in suffixes]
        there = find_files(path)
        there = [file for file in there if file.name != CARD or not (file.parent / _SAVED).exists()]
        files = [file for file in there if file.suffix.lower() in endings]
        others = [file for file in there if file.suffix.lower() not in endings]
        if not files:
            instead = f"; others are there, such as {others[0]}: --suffix reads them" if others else ""
            raise DataError(
                f"--text {path}: there are no texts in it; expected files that end in {' or '.join(endings)}{instead}"
            )
    else:
        files = [path]
    try:
        text = "\n\n".join(decode_text(file.read_bytes(), file) for file in files)
    except OSError as error:
        inside = f" {error.filename}" if path.is_dir() else ""
        raise DataError(f"--text {path}:{inside} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise DataError(f"--text {path}: it holds only white space; a text of at least {_LEAST} tokens is needed")
    left_out = f", {len(others)} left out, such as {others[0].relative_to(path)}" if others else ""
    return text, f"{path}, {len(files)} file{'s' if len(files) > 1 else ''}{left_out}"


def adapt_to_texts(
    name: str,
    texts: Path,
    *,
    suffixes: Sequence[str] = SUFFIXES,
    context: int = 512,
    dynamic: bool = False,
    save: Path | None = None,
    progress: Progress | None = None,
) -> Adaptation:
    """Fit memories on the beginning of texts, score the rest as it is read, and certify the scores.

    The first fifth, at most 4,096 tokens, is for the settings and is not scored; it is remembered then. The certificate
    is of a part near the end, before it is read: the memories hold what is before it. Dynamic evaluation finds its
    learning rate on the first fifth, and reads that before the rest, too.

    Args:
        name: a model, as `load_language_model` takes it.
        texts: a file or a folder.
        suffixes: as of `read_texts`.
        context: the tokens that the model reads at once, at most as many as it can.
        dynamic: whether dynamic evaluation reads the texts too, with weights of 32 bits.
        save: a folder for the memory.
        progress: a receiver of progress.

    Raises:
        FastWeightsError: a model or text that cannot be read or is too short, or a folder that holds another memory.
    """
    text, described = read_texts(texts, suffixes)
    if save is not None:
        check_folder("--save", save)
    model, tokenizer = load_language_model(name)
    progress = progress or Progress()
    with one_line_value_errors():
        if save is not None and (save / _SAVED).exists():
            AdaptiveLanguageModel.from_pretrained(model, save, tokenizer=tokenizer)  # another model's is refused
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        if len(ids) < _LEAST:
            raise DataError(f"{described}: it has {len(ids)} tokens; a text of at least {_LEAST} is needed")
        width = getattr(model.get_output_embeddings(), "in_features", 0)  # 0 is refused below, for the right reason
        store = EpisodicMemory(min(len(ids), _MOST_STORED), width, device=model.device) if width else None
        lm = AdaptiveLanguageModel(model, tokenizer=tokenizer, store=store)
        context = min(context, lm.longest or context)
        start = min(int(_FITTED * len(ids)), _MOST_FITTED)
        shares = lm.fit(ids[:start], context=context)
        lm.write(ids[: start + 1], context=context)
        plain, adapted, certificate = _score(lm, shares, ids[start:], context, progress)
        if save is not None:
            lm.save_pretrained(save)
        following = _follow(lm, ids, start, context, progress) if dynamic else None
    bounds = [len(plain) * part // _PARTS for part in range(_PARTS + 1)]
    parts = [
        Part(start + first, start + last, perplexity(plain[first:last]), perplexity(adapted[first:last]))
        for first, last in itertools.pairwise(bounds)
    ]
    words, bits = _describe_passage(tokenizer, ids[start + 1 :], (adapted - plain) / torch.log(torch.tensor(2.0)))
    return Adaptation(
        Path(name).name if Path(name).expanduser().exists() else name,
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
        following,
    )


def continue_text(name: str, memory: Path, prompt: str, tokens: int, copy_after: int | None = None) -> str:
    """Return a text, continued by a model with the memory that was saved for it, the most likely token each time.

    Args:
        name: a model, as `load_language_model` takes it.
        memory: a folder that `adapt` has written.
        prompt: the beginning of the text.
        tokens: of the continuation.
        copy_after: as of `AdaptiveLanguageModel.generate`.

    Raises:
        FastWeightsError: a model or memory that cannot be read, or an empty prompt.
    """
    memory = memory.expanduser()
    if not (memory / _SAVED).is_file():
        raise FastWeightsError(
            f"--memory {memory} holds no memory of a language model: give a folder that --save has written"
        )
    if not prompt.strip():
        raise FastWeightsError("--prompt is empty: give the beginning of a text")
    model, tokenizer = load_language_model(name)
    with one_line_value_errors():
        lm = AdaptiveLanguageModel.from_pretrained(model, memory, tokenizer=tokenizer)
        ids = torch.tensor([tokenizer(prompt, verbose=False)["input_ids"]], dtype=torch.int64)
        if not ids.numel():
            raise FastWeightsError(f"--prompt {prompt!r} has no tokens: give the beginning of a text")
        if lm.longest is not None and ids.numel() + tokens > lm.longest:
            raise FastWeightsError(
                f"--prompt has {ids.numel():,} tokens and --tokens adds {tokens:,}: {name} reads {lm.longest:,} at most"
            )
        found = lm.generate(
            ids,
            copy_after=copy_after,
            max_new_tokens=tokens,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
        )
    return str(tokenizer.decode(found[0], skip_special_tokens=True))


def _score(
    lm: AdaptiveLanguageModel, shares: Tensor, ids: Tensor, context: int, progress: Progress
) -> tuple[Tensor, Tensor, Certificate]:
    """Return log p of each token of a text after the first, without and with the memories, which remember it.

    The certificate is of the beginning of the last piece that is whole, or of the only one.
    """
    plain: list[Tensor] = []
    adapted: list[Tensor] = []
    size = context * max(1, _PIECE // context)  # whole windows
    firsts = range(0, len(ids) - 1, size)
    progress.start("adapting", len(firsts), 0)
    for number, first in enumerate(firsts):
        piece = ids[None, first : first + size + 1]
        if number == max(0, len(firsts) - 2):
            certificate = certify(lm, piece[:, : max(LEAST, min(_CERTIFIED, context))])
        each = lm.score_each(piece, context=context)
        plain.append(each["model"][0].cpu())
        adapted.append(mix(list(each.values()), shares)[0].cpu())
        progress.update(number + 1, -float(adapted[-1].mean()))
    return torch.cat(plain), torch.cat(adapted), certificate._replace(memory_bytes=lm.memory_bytes)


def _follow(lm: AdaptiveLanguageModel, ids: Tensor, start: int, context: int, progress: Progress) -> Following:
    """Return the perplexity of a text from a token on where all weights of the model follow it from the beginning."""
    model = lm.model.float().requires_grad_(True)
    options: dict[str, Any] = {"segment": _SEGMENT, "context": context, "bos_token_id": lm.bos_token_id}
    rate = choose_learning_rate(model, ids[: start + 1], progress=progress, **options)
    scores = evaluate_dynamically(model, ids, learning_rate=rate, progress=progress, **options)
    return Following(perplexity(scores[start:]), rate)


def _describe_passage(tokenizer: Any, ids: Tensor, bits: Tensor) -> tuple[list[str], list[float]]:
    """Return the words of the passage whose gain is nearest to the mean of all, and the bits that each gains."""
    part = choose_passage(bits, _PASSAGE)
    words: list[str] = []
    found: list[float] = []
    passage = ids[part]
    # Of the text so far: a token alone may be half a letter, or lose the space before it.
    texts = [
        str(tokenizer.decode(passage[:end], clean_up_tokenization_spaces=False)).rstrip("\ufffd")
        for end in range(len(passage) + 1)
    ]
    for before, after, gain in zip(texts, texts[1:], bits[part].tolist(), strict=False):
        piece = after[len(before) :]
        word = piece.strip() or ("\u21b5" if "\n" in piece else "")
        begins = piece[:1].isspace() or before[-1:].isspace()
        if not words or (begins and words[-1]):
            words.append(word)
            found.append(gain)
        else:
            words[-1] += word
            found[-1] += gain
    return words, found


def check_folder(option: str, folder: Path) -> None:
    """Refuse what is no folder that can be written, or made, before there is anything to write.

    Raises:
        FastWeightsError: it is no such folder.
    """
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise FastWeightsError(f"{folder} is not a folder: {option} takes a folder, and makes it if needed")
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise FastWeightsError(f"{option} {folder}: {place} cannot be written to; choose another folder")


@contextlib.contextmanager
def one_line_value_errors() -> Iterator[None]:
    """Turn what a model or memory refuses into an error of the user's, in one line."""
    try:
        yield
    except ValueError as error:
        raise FastWeightsError(one_line(error)) from error


def adaptation_blocks(found: Adaptation) -> list[Block]:
    """Return what adapting has given, as text and tables."""
    gain = 100 * (1 - found.adapted / found.plain)
    columns = ("without", "with memories", "less, %")
    rows = [
        (f"{part.first:,} to {part.last:,}", *_cells(part.plain, part.adapted))
        for part in found.parts
        if part.last > part.first
    ]
    rows.append(("all", *_cells(found.plain, found.adapted)))
    settings: list[tuple[str, ...]] = [
        (name, "the farthest neighbour" if value is None else f"{value:.4g}") for name, value in found.settings.items()
    ]
    settings += [(f"weight of {name}", f"{value:.3f}") for name, value in found.weights.items()]
    certificate = found.certificate
    speed = [1000 / each for each in (certificate.plain_milliseconds, certificate.adapted_milliseconds)]
    return [
        Heading(f"{found.model}, adapted", 1),
        Paragraph(
            f"{found.texts}: perplexity {found.plain:.2f} without memories and {found.adapted:.2f} with them, "
            f"{abs(gain):.1f} % {'less' if gain >= 0 else 'more'}. The first {found.fitted_tokens:,} tokens fitted the "
            "settings and are not among those; "
            f"the model reads {found.context:,} tokens at once."
        ),
        *([] if found.following is None else [Paragraph(_describe_following(found, found.following))]),
        Heading("As it reads"),
        Table("Perplexity by position", ("tokens", *columns), rows, right=columns),
        Heading("Settings"),
        Table("Settings", ("setting", "value"), settings, right=("value",)),
        Heading("Certificate" if certificate.passed else "Certificate: refused"),
        Table(
            "Certificate",
            ("what must be true", "is it", "found"),
            [(check.name, "yes" if check.passed else "NO", check.detail) for check in certificate.checks],
        ),
        Paragraph(
            f"{speed[1]:,.0f} tokens a second, {speed[0]:,.0f} without memories, which hold "
            f"{certificate.memory_bytes / 2**20:,.0f} MiB.",
            note=True,
        ),
    ]


def _describe_following(found: Adaptation, following: Following) -> str:
    gain = 100 * (1 - following.perplexity / found.plain)
    return (
        f"Dynamic evaluation, where all weights of the model follow the text: {following.perplexity:.2f}, "
        f"{abs(gain):.1f} % {'less' if gain >= 0 else 'more'} than without. Its learning rate, "
        f"{following.learning_rate:.2g}, was the best on those first tokens."
    )


def write_adaptation(found: Adaptation, folder: Path) -> Path:
    """Write index.html, report.md and the passage into a folder, and return the path of index.html.

    Raises:
        RunError: the folder cannot be written.
    """
    figure = draw_passages([("A passage that gains as much as the whole", found.words, found.bits)])
    caption = "Green words are likelier with the memories, orange ones less likely; the colour is full at four bits."
    blocks = [*adaptation_blocks(found), Picture("A passage", inline(figure), _PICTURE, caption)]
    files = {
        _PICTURE: svg(figure),
        "report.md": "\n\n".join(map(to_markdown, blocks)) + "\n",
        "index.html": render_html(f"{found.model}, adapted: fastweights", blocks),
    }
    try:
        write_files({folder / name: text.encode("utf-8", "replace") for name, text in files.items()})
    except OSError as error:
        raise RunError(f"cannot write the report into {folder}: {error.strerror}") from error
    return folder / "index.html"


def _cells(plain: float, adapted: float) -> Sequence[str]:
    return (
        f"{plain:.2f}",
        f"{adapted:.2f}",
        f"{round(100 * (1 - adapted / plain), 1) + 0.0:.1f}",
    )  # adding 0.0 turns -0.0 into 0.0
