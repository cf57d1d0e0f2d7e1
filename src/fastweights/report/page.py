"""The page of a run: one HTML file that needs nothing else, the same as Markdown, and the figure."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.report.blocks import Block, to_markdown
from fastweights.report.content import BARS, FIGURE, LINES, PASSAGES, contents
from fastweights.report.figures import INK, bars, learning_curves, lines, panels_of, passages, svg
from fastweights.runs import Run, load_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_page(folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write index.html, report.md and the figures of a run into `output`, the run's own folder by default.

    Returns:
        The path of index.html.

    Raises:
        RunError: the folder is not a run's, or `output` cannot be written; what lay there before is then still whole.
    """
    run = load_run(folder)
    figures = {FIGURE: learning_curves(run), BARS: bars(run), LINES: lines(run), PASSAGES: passages(run)}
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    blocks = contents(run, {name: inline(figure) for name, figure in drawn.items()})
    files = {
        **{name: svg(figure) for name, figure in drawn.items()},
        "report.md": "\n\n".join(map(to_markdown, blocks)) + "\n",
        "index.html": render_html(f"{run.experiment}, {run.preset}: fastweights", blocks),
    }
    target = run.folder if output is None else Path(output)
    try:
        write_files({target / name: text.encode("utf-8", "replace") for name, text in files.items()})
    except OSError as error:
        raise RunError(f"cannot write the report into {target}: {error.strerror}") from error
    return target / "index.html"


def first_figure(run: Run) -> str:
    """Return the name of the file with a run's figure: its learning curves, or what it draws in their place.

    Examples:
        >>> from fastweights.runs import Lines, Run
        >>> panel = Lines("all cells", "score", "numbers in the state", {"LSTM": [(128, 0.5)]})
        >>> first_figure(Run(Path("."), "recall/gauntlet", "quick", [], [], lines=(panel,)))
        'lines.svg'
    """
    instead = [name for name, panels in ((BARS, run.bars), (LINES, run.lines)) if panels]
    return instead[0] if instead and not panels_of(run) else FIGURE


def render_html(title: str, blocks: list[Block]) -> str:
    """Return blocks as a page."""
    import jinja2

    source = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    template = jinja2.Template(source, autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    page: str = template.render(title=title, blocks=blocks, kind=lambda block: type(block).__name__, zip=zip)
    return page


def inline(figure: "Figure") -> str:
    """Return the SVG as a part of a page: without a prologue, in the page's text colour, never illegibly small."""
    picture = svg(figure, transparent=True)
    body = picture[picture.index("<svg") + len("<svg") :].replace(INK, "currentColor")
    return f'<svg style="min-width: {0.7 * figure.get_figwidth():.2f}in"{body}'
