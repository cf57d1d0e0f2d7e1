"""The page of a run: one HTML file that needs nothing else, the same as Markdown, and the figure."""

import html
import os
from pathlib import Path
from string import Template

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.report.blocks import to_html, to_markdown
from fastweights.report.content import FIGURE, contents
from fastweights.report.figures import INK, learning_curves, svg
from fastweights.runs import load_run

# The policy refuses scripts and every request, whatever a run's strings hold.
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { --text: #1f2328; --quiet: #59636e; --line: #d1d9e0; --back: #ffffff; --raised: #f6f8fa; --shade: #1f232833;
  --accent: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --quiet: #9198a1; --line: #3d444d; --back: #0d1117; --raised: #161b22; --shade: #e6edf340;
    --accent: #4493f8; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 1rem/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 0.75rem; padding-bottom: 0.3rem; border-bottom: 1px solid var(--line); }
p, figcaption { max-width: 44rem; overflow-wrap: anywhere; }
p { margin: 0.75rem 0; }
/* A shade at an edge past which there is more to scroll to; at the end a patch that scrolls along covers it. */
.scroll { overflow-x: auto; background-repeat: no-repeat; background-attachment: local, local, scroll, scroll;
  background-image: linear-gradient(to right, var(--back) 50%, transparent),
    linear-gradient(to left, var(--back) 50%, transparent),
    linear-gradient(to right, var(--shade), transparent), linear-gradient(to left, var(--shade), transparent);
  background-position: left, right, left, right;
  background-size: 3rem calc(100% + 2px), 3rem calc(100% + 2px), 1rem 100%, 1rem 100%; }
.note, figcaption { color: var(--quiet); font-size: 0.9rem; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem clamp(0.7rem, 2.2vw, 1.5rem) 0.4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; }
th { vertical-align: bottom; max-width: 9rem; overflow-wrap: break-word; color: var(--quiet); font-weight: 600; }
td { white-space: nowrap; }
th:first-child, td:first-child { position: sticky; left: 0; max-width: 40vw; background: var(--back);
  white-space: normal; overflow-wrap: break-word; }
.right { text-align: right; }
pre { margin: 0; padding: 0.8rem 1rem; overflow-x: auto; background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px; }
code { font: 0.9rem/1.4 ui-monospace, monospace; }
figure { margin: 1.5rem 0 0; }
figure svg { display: block; max-width: 100%; height: auto; }
@media (max-width: 30rem) {
  table { font-size: 0.8rem; }
  td:not(.right) { min-width: 4.3rem; white-space: normal; }
}
</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def write_page(folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write index.html, report.md and learning_curves.svg of a run into `output`, the run's own folder by default.

    Returns:
        The path of index.html.

    Raises:
        RunError: the folder is not a run's, or `output` cannot be written; what lay there before is then still whole.
    """
    run = load_run(folder)
    figure = learning_curves(run)
    blocks = contents(run, _inline(svg(figure, transparent=True), figure.get_figwidth()))
    title = html.escape(f"{run.experiment}, {run.preset}: fastweights")
    files = {
        FIGURE: svg(figure),
        "report.md": "\n\n".join(map(to_markdown, blocks)) + "\n",
        "index.html": PAGE.substitute(title=title, body="\n".join(map(to_html, blocks))),
    }
    target = run.folder if output is None else Path(output)
    _write(target, files)
    return target / "index.html"


def _inline(picture: str, inches: float) -> str:
    """The SVG as a part of a page: without the XML prologue, in the page's own text colour, never illegibly small."""
    body = picture[picture.index("<svg") + len("<svg") :].replace(INK, "currentColor")
    return f'<svg style="min-width: {0.7 * inches:.2f}in"{body}'


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        write_files({folder / name: text.encode("utf-8", "replace") for name, text in files.items()})
    except OSError as error:
        raise RunError(f"cannot write the report into {folder}: {error.strerror}") from error
