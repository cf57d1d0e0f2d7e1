"""What the published CSV files say: the newest timings and peaks, as tables in Markdown. Nothing here needs torch."""

from fastweights.bench.hebbian_softmax import cases
from fastweights.bench.hebbian_softmax.cases import Case
from fastweights.bench.published import NOTHING, Row, last_measured, left_out, markdown, measured_at, number, values

_CASE = ("threads", "classes", "hidden_size")
_SIZES = {"V": "classes", "d": "hidden_size"}


def newest(rows: list[Row]) -> list[Row]:
    """The rows that were measured last, all on one machine at one commit."""
    return last_measured(rows, (*_CASE, "batch", "rival"))


def _heading(last: Row, what: str) -> str:
    return f"{what}, {last['batch']} activations in float32; {measured_at(last)}.\n"


def steps_table(rows: list[Row]) -> str:
    """A training step beside that of a plain softmax."""
    rows = newest(rows)
    headings = ["threads", "V", "d", "fastweights", "`torch.nn.Linear`", "of its time", "past the limit", "of its time"]
    lines = []
    for key, of_case in values(rows, _CASE).items():
        ours, plain, past = (of_case.get(name) for name in cases.RIVALS)
        lines.append([*key, *map(number, (ours, plain)), _share(ours, plain), number(past), _share(past, plain)])
    told = _heading(rows[-1], "Milliseconds of a training step, the median")
    return f"{told}\n{markdown(headings, lines)}{left_out(rows, _SIZES)}"


def _share(value: float | None, plain: float | None) -> str:
    return NOTHING if value is None or plain is None else f"{value / plain:.2f}"


def memory_table(rows: list[Row]) -> str:
    """The newest peaks of memory, and what the head may add to that of a plain softmax."""
    rows = newest(rows)
    present = {(row["classes"], row["hidden_size"]): int(row["present"]) for row in rows}
    headings = ["V", "d", "fastweights", "`torch.nn.Linear`", "counters, activations, sums", "both of these"]
    lines = []
    for (classes, size), of_case in values(rows, ("classes", "hidden_size"), "mebibytes").items():
        case = Case(int(classes), int(size), int(rows[-1]["batch"]))
        added = case.added_bytes(present[classes, size]) / 2**20
        ours, plain = of_case.get(cases.OURS), of_case.get(cases.PLAIN)
        shown = ours, plain, added, None if plain is None else plain + added
        lines.append([classes, size, *(number(value, digits=1) for value in shown)])
    told = _heading(rows[-1], "Peak memory of a training step in MiB")
    return f"{told}\n{markdown(headings, lines)}{left_out(rows, _SIZES)}"
