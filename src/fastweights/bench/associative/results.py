"""What the published CSV files say: the newest timings, and tables of them in Markdown. Nothing here needs torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastweights.bench.associative import cases
from fastweights.bench.published import NOTHING, Row, best, heading, last_measured, left_out, markdown, number


@dataclass(frozen=True)
class Setting:
    """How a table's or a panel's cases are alike."""

    threads: int = 1
    precision: str = "float32"
    mode: str = "training"

    def __str__(self) -> str:
        return f"{self.mode}, {self.precision}, {self.threads} thread{'s' * (self.threads > 1)}"


Size = tuple[int, int]  # T, H
Times = dict[Size, dict[str, float]]  # milliseconds, or mebibytes, of each rival


def newest(rows: list[Row]) -> list[Row]:
    """The rows of the commit and machine that were measured last; of several of one rival and case, the last."""
    return last_measured(rows, ("threads", "batch", "steps", "input_size", "hidden_size", "precision", "mode", "rival"))


def chosen(rows: Iterable[Row], setting: Setting) -> list[Row]:
    """The rows of one setting."""
    wanted = str(setting.threads), setting.precision, setting.mode
    return [row for row in rows if (row["threads"], row["precision"], row["mode"]) == wanted]


def settings(rows: Iterable[Row]) -> list[Setting]:
    """The settings that were measured: float32 before bfloat16, training before inference."""
    found = {Setting(int(row["threads"]), row["precision"], row["mode"]) for row in rows}
    modes, precisions = cases.MODES, cases.PRECISIONS
    return sorted(found, key=lambda s: (precisions.index(s.precision), modes.index(s.mode), s.threads))


def times(rows: Iterable[Row], value: str = "milliseconds") -> Times:
    """What was measured at each size, the sizes in order."""
    found: Times = {}
    for row in rows:
        of_size = found.setdefault((int(row["steps"]), int(row["hidden_size"])), {})
        if row[value]:
            of_size[row["rival"]] = float(row[value])
    return dict(sorted(found.items()))


def speed_table(rows: list[Row]) -> str:
    """The README's table: training in float32 at the sizes of the retrieval task."""
    rows = [row for row in rows if (row["precision"], row["mode"]) == ("float32", "training")]
    rows = [row for row in rows if int(row["steps"]) in cases.QUICK.steps]
    rows = newest([row for row in rows if int(row["hidden_size"]) in cases.QUICK.hidden_sizes])
    last = rows[-1]
    compiled = any(row["rival"] in cases.COMPILED and row["milliseconds"] for row in rows)
    headings = ["threads", "steps", "units", "fastweights", "`torch.nn.LSTM`", "eager"]
    headings += ["best `torch.compile`"] * compiled + ["of the LSTM's time", "faster than eager"]
    lines = []
    for threads in sorted({int(row["threads"]) for row in rows} & set(cases.QUICK.threads)):
        for (steps, size), of_size in times(chosen(rows, Setting(threads))).items():
            ours, lstm, eager = of_size[cases.OURS], of_size[cases.LSTM], best(of_size, cases.EAGER)
            cells = [str(threads), str(steps), str(size), *map(number, (ours, lstm, eager))]
            cells += [number(best(of_size, cases.COMPILED))] * compiled
            lines.append([*cells, f"{ours / lstm:.2f}", NOTHING if eager is None else f"{eager / ours:.1f} times"])
    told = (
        f"Milliseconds for the layer's forward plus backward pass, {last['batch']} sequences of {last['input_size']} "
        f"features, float32, on one {last['processor']} machine ({last['date']}, `fastweights bench associative`; "
        "eager is the better of the two forms in plain PyTorch):"
    )
    return f"{told}\n\n{markdown(headings, lines)}"


def grid_tables(rows: list[Row]) -> str:
    """All of the newest timings, a table for each precision, mode and number of threads."""
    rows = newest(rows)
    return heading(rows[-1], "Milliseconds, the median") + "".join(
        f"\n**{setting}**\n\n{_grid(chosen(rows, setting))}" for setting in settings(rows)
    )


def _grid(rows: list[Row]) -> str:
    headings = ["T", "H", "fastweights", "`torch.nn.LSTM`", "eager attention", "eager matrix", "best `torch.compile`"]
    headings += ["of the LSTM's time", "faster than eager"]
    lines = []
    for (steps, size), of_size in times(rows).items():
        ours, lstm, eager = of_size[cases.OURS], of_size[cases.LSTM], best(of_size, cases.EAGER)
        shown = [ours, lstm, *(of_size.get(name) for name in cases.EAGER), best(of_size, cases.COMPILED)]
        ratios = f"{ours / lstm:.2f}", NOTHING if eager is None else f"{eager / ours:.1f} times"
        lines.append([str(steps), str(size), *map(number, shown), *ratios])
    return markdown(headings, lines) + left_out(rows)


def memory_table(rows: list[Row]) -> str:
    """The newest peaks of memory."""
    rows = newest(rows)
    headings = ["T", "H", "fastweights", "`torch.nn.LSTM`", "eager attention", "eager matrix"]
    order = (cases.OURS, cases.LSTM, *cases.EAGER)
    lines = [
        [str(steps), str(size), *(number(of_size.get(name), digits=1) for name in order)]
        for (steps, size), of_size in times(rows, "mebibytes").items()
    ]
    how = settings(rows)[0]
    return f"{heading(rows[-1], 'Peak memory in MiB')}\n**{how}**\n\n{markdown(headings, lines)}{left_out(rows)}"
