"""The page of a language model that was adapted to texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.report.blocks import Block, Heading, Paragraph, Picture, Table, to_markdown
from fastweights.report.figures import draw_passages, svg
from fastweights.report.page import inline, render_html

if TYPE_CHECKING:
    from fastweights.training.text_adaptation import Adaptation

_PASSAGE = "passage.svg"


def adaptation_blocks(found: "Adaptation") -> list[Block]:
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


def write_adaptation(found: "Adaptation", folder: Path) -> Path:
    """Write index.html, report.md and the passage into a folder, and return the path of index.html.

    Raises:
        RunError: the folder cannot be written.
    """
    figure = draw_passages([("A passage that gains as much as the whole", found.words, found.bits)])
    caption = "Green words are likelier with the memories, orange ones less likely; the colour is full at four bits."
    blocks = [*adaptation_blocks(found), Picture("A passage", inline(figure), _PASSAGE, caption)]
    files = {
        _PASSAGE: svg(figure),
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
