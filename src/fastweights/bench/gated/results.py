"""What the published CSV files say: the newest timings and peaks, as tables in Markdown. Nothing here needs torch."""

from fastweights.bench.gated import cases
from fastweights.bench.gated.cases import Case
from fastweights.bench.published import (
    NOTHING,
    Row,
    best,
    heading,
    last_measured,
    left_out,
    markdown,
    number,
    values,
)

_CASE = ("mode", "threads", "steps", "hidden_size")


def newest(rows: list[Row], part: str) -> list[Row]:
    """The rows of one part that were measured last, all on one machine at one commit."""
    rows = [row for row in rows if row["part"] == part]
    return last_measured(rows, (*_CASE, "batch", "input_size", "rival")) if rows else []


def layers_table(rows: list[Row]) -> str:
    """A pass of the layer beside its rivals."""
    rows = newest(rows, "layer")
    headings = ["pass", "threads", "T", "H", "fastweights", "`torch.nn.LSTM`", "eager", "best `torch.compile`"]
    headings += ["of the LSTM's time", "faster than eager", "faster than compiled"]
    lines = []
    for key, of_case in values(rows, _CASE, words=cases.MODES).items():
        ours, lstm = of_case[cases.OURS], of_case[cases.LSTM]
        others = of_case.get(cases.EAGER), best(of_case, cases.COMPILED)
        faster = (NOTHING if other is None else f"{other / ours:.1f} times" for other in others)
        lines.append([*key, *map(number, (ours, lstm, *others)), f"{ours / lstm:.2f}", *faster])
    sizes = {(int(row["hidden_size"]), int(row["units"])) for row in rows if row["rival"] == cases.LSTM}
    units = ", ".join(f"{units} for H = {size}" for size, units in sorted(sizes))
    told = heading(rows[-1], "Milliseconds, the median, in float32")
    return f"{told}Units of the LSTM: {units}.\n\n{markdown(headings, lines)}{left_out(rows)}"


def models_table(rows: list[Row]) -> str:
    """A training step of each whole model, as ratios beside those of the paper's table 2."""
    rows = newest(rows, "model")
    sizes = {row["rival"]: [row["units"], f"{int(row['parameters']):,}"] for row in rows}
    measured = values(rows, ("steps", "threads"))
    headings = ["model", "units", "parameters", "paper, minutes", "paper, of the LSTM's"]
    for steps, threads in measured:
        headings += [f"T = {steps}, {threads} thread{'s' * (threads != '1')}: ms", "of the LSTM's"]
    lines = []
    for name in cases.MODELS:
        minutes = cases.PAPER_MINUTES[name]
        cells = [name, *sizes[name], str(minutes), f"{minutes / cases.PAPER_MINUTES[cases.LSTM]:.1f}"]
        for of_case in measured.values():
            cells += [number(of_case[name]), f"{of_case[name] / of_case[cases.LSTM]:.2f}"]
        lines.append(cells)
    return f"{heading(rows[-1], 'Milliseconds of a training step, the median')}\n{markdown(headings, lines)}"


def memory_table(rows: list[Row]) -> str:
    """The newest peaks of memory, and how much of ours is the states that go in and out."""
    rows = newest(rows, "layer")
    headings = ["T", "H", "fastweights", "its fast matrices in and out", "fastweights without them"]
    headings += ["eager", "`torch.nn.LSTM`", "of eager's"]
    lines = []
    for (steps, size), of_case in values(rows, ("steps", "hidden_size"), "mebibytes").items():
        last = rows[-1]
        case = Case(int(steps), int(size), batch=int(last["batch"]), input_size=int(last["input_size"]))
        states = 2 * 4 * case.batch * case.matrix_numbers / 2**20
        ours, eager = of_case[cases.OURS], of_case.get(cases.EAGER)
        shown = (ours, states, ours - states, eager, of_case.get(cases.LSTM))
        share = NOTHING if eager is None else f"{ours / eager:.3f}"
        lines.append([steps, size, *(number(value, digits=1) for value in shown), share])
    return f"{heading(rows[-1], 'Peak memory in MiB')}\n{markdown(headings, lines)}{left_out(rows)}"
