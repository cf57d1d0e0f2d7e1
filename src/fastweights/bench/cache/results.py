"""What the published CSV file says, as a table in Markdown. Nothing here needs torch."""

from fastweights.bench.cache import cases
from fastweights.bench.published import NOTHING, Row, last_measured, markdown, measured_at, number, values

CASE = ("threads", "window", "classes", "hidden_size")


def table(rows: list[Row]) -> str:
    """Milliseconds a position, and how many times the loop's positions a second ours scores."""
    rows = last_measured(rows, (*CASE, "rival"))
    headings = ["threads", "window", "V", "d", "fastweights", "loop over time", "times the positions of the loop"]
    lines = []
    for key, of_case in values(rows, CASE).items():
        ours, loop = (of_case.get(rival) for rival in cases.RIVALS)
        ratio = NOTHING if ours is None or loop is None else number(loop / ours, digits=0)
        lines.append([*key, number(ours, digits=4), number(loop, digits=1), ratio])
    told = f"Milliseconds a position, the median, float32; {measured_at(rows[-1])}."
    return f"{told}\n\n{markdown(headings, lines)}"
