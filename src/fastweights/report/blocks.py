"""What a report is made of, and how each part is written as HTML and as Markdown."""

import html
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A heading, level 1 the title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain words; a note is set smaller, under what it explains."""

    text: str
    note: bool = False


@dataclass(frozen=True)
class Command:
    """A line for the shell."""

    text: str


@dataclass(frozen=True)
class Table:
    """A header and rows of text; the columns named in `right` are aligned to the right."""

    label: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A figure: the SVG that goes inside a page, and the file beside the Markdown that holds the same."""

    label: str
    svg: str
    file: str
    caption: str


Block = Heading | Paragraph | Command | Table | Picture


def to_html(block: Block) -> str:
    """The block as HTML; every string but the picture's SVG is escaped."""
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text, note):
            return f'<p class="note">{html.escape(text)}</p>' if note else f"<p>{html.escape(text)}</p>"
        case Command(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"
        case Table():
            return _html_table(block)
        case Picture(label, svg, _, caption):
            image = f'<div class="scroll" tabindex="0" role="img" aria-label="{html.escape(label)}">\n{svg}</div>'
            return f"<figure>\n{image}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"


def to_markdown(block: Block) -> str:
    """The block as Markdown in which no string of the run's is markup."""
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_markdown(text)}"
        case Paragraph(text):
            return _markdown(text)
        case Command(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}sh\n{text}\n{fence}"
        case Table(_, header, rows, right):
            rule = ["---:" if name in right else "---" for name in header]
            lines = [map(_markdown, header), rule, *(map(_markdown, row) for row in rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Picture(label, _, file, caption):
            return f"![{_markdown(label)}]({file})\n\n{_markdown(caption)}"


def _html_table(table: Table) -> str:
    classes = [' class="right"' if name in table.right else "" for name in table.header]

    def line(tag: str, scope: str, cells: tuple[str, ...]) -> str:
        written = zip(classes, map(html.escape, cells), strict=True)
        return f"<tr>{''.join(f'<{tag}{scope}{align}>{cell}</{tag}>' for align, cell in written)}</tr>"

    head = line("th", ' scope="col"', table.header)
    body = "\n".join(line("td", "", row) for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(table.label)}">\n<table>\n'
        f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _markdown(text: str) -> str:
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
    # An underscore between letters is no markup and stays readable: learning_rate.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)
