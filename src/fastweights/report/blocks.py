"""The parts that a report is made of, and the Markdown of each; the page of HTML is a template."""

import re
from dataclasses import dataclass

from fastweights.hub import escape


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


def to_markdown(block: Block) -> str:
    """Return a block as Markdown in which no string of the run's is markup."""
    match block:
        case Heading(text, level):
            return f"{'#' * level} {escape(text)}"
        case Paragraph(text):
            return escape(text)
        case Command(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}sh\n{text}\n{fence}"
        case Table(_, header, rows, right):
            rule = ["---:" if name in right else "---" for name in header]
            lines = [map(escape, header), rule, *(map(escape, row) for row in rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Picture(label, _, file, caption):
            return f"![{escape(label)}]({file})\n\n{escape(caption)}"
