"""What the published CSV file says, as a table in Markdown. Nothing here needs torch."""

from fastweights.bench.mbpa import cases
from fastweights.bench.published import NOTHING, Row, last_measured, markdown, measured_at, number, values

CASE = ("threads", "output", "optimizer", "steps", "classes", "key_size", "neighbours", "batch")


def table(rows: list[Row]) -> str:
    """Milliseconds a query, and how many times the loop's queries a second ours answers."""
    rows = last_measured(rows, (*CASE, "rival"))
    names = ["threads", "output", "optimizer", "T", "V", "d", "K", "queries at once"]
    rivals = ["fastweights", "nothing stored", "autograd loop", "`torch.func.vmap`"]
    lines = []
    for key, of_case in values(rows, CASE, words=(*cases.OUTPUTS, *cases.OPTIMIZERS)).items():
        ours, loop = of_case.get(cases.OURS), of_case.get(cases.LOOP)
        ratio = NOTHING if ours is None or loop is None else number(loop / ours, digits=1)
        lines.append([*key, *(number(of_case.get(rival), digits=3) for rival in cases.RIVALS), ratio])
    told = f"Milliseconds a query, the median, float32; {rows[-1]['entries']} entries; {measured_at(rows[-1])}."
    return f"{told}\n\n{markdown([*names, *rivals, 'times the queries of the loop'], lines)}"
