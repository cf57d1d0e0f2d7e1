"""Put what runs and timings wrote into the pages: no number in the documentation is typed by hand.

python docs/fill.py
"""

import csv
import re
from pathlib import Path

from fastweights.report import load_run, markdown_table, write_page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def table(folder: Path) -> str:
    """The table of a published run, as Markdown."""
    return markdown_table(load_run(folder)).strip() + "\n"


def speed() -> str:
    """The newest timings of benchmarks/associative.csv, as a Markdown table."""
    with (ROOT / "benchmarks" / "associative.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = rows[-1]
    rows = [row for row in rows if (row["date"], row["commit"]) == (last["date"], last["commit"])]
    cases: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:  # of several timings of one case the last stays
        key = row["threads"], row["steps"], row["hidden_size"]
        cases.setdefault(key, {})[row["rival"]] = float(row["milliseconds"])
    lines = [
        f"Milliseconds for the layer's forward plus backward pass, {last['batch']} sequences of {last['input_size']} "
        f"features, float32, on one {last['processor']} machine ({last['date']}, `fastweights bench associative`; "
        "eager is the better of the two forms in plain PyTorch):",
        "",
        "| threads | steps | units | fastweights | `torch.nn.LSTM` | eager | of the LSTM's time | faster than eager |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (threads, steps, size), times in cases.items():
        ours, lstm = times["fastweights"], times["torch.nn.LSTM"]
        eager = min(times["eager attention form"], times["eager matrix form"])
        lines.append(
            f"| {threads} | {steps} | {size} | {ours:.2f} | {lstm:.2f} | {eager:.2f} | {ours / lstm:.2f} "
            f"| {eager / ours:.1f} times |"
        )
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """The README with the published table and the newest timings between their marks."""
    parts = {"table": table(RESULTS / "ba2016-associative-retrieval"), "speed": speed()}
    for name, part in parts.items():
        mark = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = mark.sub(lambda found, part=part: f"{found[1]}\n{part}\n{found[2]}", text)
    return text


def main() -> None:
    for folder in sorted(path.parent for path in RESULTS.glob("*/result.json")):
        write_page(folder)
        (folder / "table.md").write_text(table(folder))
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))


if __name__ == "__main__":
    main()
