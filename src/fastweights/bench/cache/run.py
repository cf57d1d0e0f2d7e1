"""`fastweights bench cache`: times every case of a selection and appends to a CSV file, case by case."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from fastweights.bench import machine, rows
from fastweights.bench.cache import cases
from fastweights.bench.cache.cases import LOOP, OURS, POSITIONS, Case, Selection
from fastweights.bench.cache.parity import require_parity
from fastweights.bench.cache.problem import Problem
from fastweights.bench.measuring import measuring
from fastweights.bench.published import number
from fastweights.bench.timing import append_csv, each, medians

CASE = ["threads", "window", "classes", "hidden_size", "rival", "positions"]
COLUMNS = [*machine.COLUMNS, *CASE, *rows.timing_columns("loop")]
HEADINGS = ("threads", "window", "ours", "loop", "loop/ours")
LINE = "{:>7} {:>7} {:>8} {:>8} {:>9}"


def run(selection: Selection, output: Path) -> None:
    """Check parity, time every case, append its rows to a CSV file and print them.

    Raises:
        FastWeightsError: the losses differ (then nothing is timed), or the file has other columns or cannot be written.
    """
    heading = LINE.format(*HEADINGS) + "\n"
    with measuring(output, COLUMNS) as where:
        for case in selection.cases():  # all of them first: red after minutes of timing would be late
            require_parity(Problem(case))
        for case in selection.cases():
            problem = Problem(case)
            for count in selection.threads:
                torch.set_num_threads(count)
                calls: dict[str, Callable[[], object]] = {OURS: problem.ours(), LOOP: problem.loop()}
                times = each(medians(calls, selection.rounds, selection.budget), POSITIONS)
                ours, loop = (times[rival].milliseconds for rival in cases.RIVALS)
                shown = number(ours, digits=4), number(loop), number(loop / ours, digits=0)
                print(f"{heading}{LINE.format(count, case.window, *shown)}", flush=True)  # first, as elsewhere
                heading = ""
                of = functools.partial(_row, where, count, case)
                append_csv(output, rows.timings(of, times, {}, LOOP, "loop"))
    print(f"milliseconds a position, median; appended to {output}")


def _row(where: rows.Row, threads: int, case: Case, rival: str) -> rows.Row:
    return where | {
        "threads": threads,
        "window": case.window,
        "classes": case.classes,
        "hidden_size": case.hidden_size,
        "rival": rival,
        "positions": POSITIONS[rival],
    }
