"""`fastweights bench mbpa`: times every case of a selection and appends to a CSV file, case by case."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from fastweights.bench import machine, rows
from fastweights.bench.mbpa import cases
from fastweights.bench.mbpa.cases import Case, Selection
from fastweights.bench.mbpa.parity import require_parity
from fastweights.bench.mbpa.problem import Problem
from fastweights.bench.measuring import measuring
from fastweights.bench.published import number
from fastweights.bench.timing import Timing, append_csv, each, medians

CASE = ["threads", "output", "optimizer", "steps", "classes", "key_size", "neighbours", "batch", "entries", "rival"]
CASE += ["queries"]
COLUMNS = [*machine.COLUMNS, *CASE, *rows.timing_columns("loop")]
HEADINGS = ("threads", "output", "optimizer", "T", "V", "at once", "ours", "not stored", "loop", "vmap", "loop/ours")
LINE = "{:>7} {:>7} {:>9} {:>3} {:>6} {:>7} {:>8} {:>10} {:>8} {:>8} {:>9}"


def run(selection: Selection, output: Path) -> None:
    """Check parity, time every case, append its rows to a CSV file and print them.

    Raises:
        FastWeightsError: a rival differs from the loop (then nothing is timed), or the file has other columns or cannot
            be written.
    """
    heading = LINE.format(*HEADINGS) + "\n"
    with measuring(output, COLUMNS) as where:
        for case in selection.cases():  # all of them first: red after minutes of timing would be late
            require_parity(Problem(case))
        for case in selection.cases():
            for count in selection.threads:
                torch.set_num_threads(count)
                times = _times(Problem(case), selection)
                print(f"{heading}{_line(count, case, times)}", flush=True)  # first: seen even where it cannot be kept
                heading = ""
                of = functools.partial(_row, where, count, case)
                append_csv(output, rows.timings(of, times, {}, cases.LOOP, "loop"))
    print(f"milliseconds a query, median; appended to {output}")


def _times(problem: Problem, selection: Selection) -> dict[str, Timing]:
    sizes = {rival: problem.case.queries(rival) for rival in problem.case.rivals}
    calls = {rival: functools.partial(problem.answer(rival), problem.queries[:size]) for rival, size in sizes.items()}
    return each(medians(calls, selection.rounds, selection.budget), sizes)


def _row(where: rows.Row, threads: int, case: Case, rival: str) -> rows.Row:
    return where | {
        "threads": threads,
        "output": case.output,
        "optimizer": case.optimizer,
        "steps": case.steps,
        "classes": case.classes,
        "key_size": case.key_size,
        "neighbours": case.neighbours,
        "batch": case.batch,
        "entries": case.entries,
        "rival": rival,
        "queries": case.queries(rival),
    }


def _line(threads: int, case: Case, times: Mapping[str, Timing]) -> str:
    taken = {name: timing.milliseconds for name, timing in times.items()}
    shown = (number(taken.get(rival), digits=3) for rival in cases.RIVALS)
    ratio = number(taken[cases.LOOP] / taken[cases.OURS], digits=1)
    return LINE.format(threads, case.output, case.optimizer, case.steps, case.classes, case.batch, *shown, ratio)
