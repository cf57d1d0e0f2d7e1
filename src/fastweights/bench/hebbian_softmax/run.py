"""`fastweights bench hebbian-softmax`: times every case of a selection and appends to a CSV file, case by case."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from fastweights.bench import machine, rows
from fastweights.bench.hebbian_softmax import cases, memory
from fastweights.bench.hebbian_softmax.cases import Case, Selection
from fastweights.bench.hebbian_softmax.parity import require_parity
from fastweights.bench.hebbian_softmax.problem import Problem, TrainingStep, labels
from fastweights.bench.measuring import beside, measuring
from fastweights.bench.published import number
from fastweights.bench.timing import Timing, append_csv, medians

CASE = ["threads", "batch", "classes", "hidden_size", "rival"]
COLUMNS = [*machine.COLUMNS, *CASE, *rows.timing_columns("plain")]
MEMORY_COLUMNS = [*machine.COLUMNS, *CASE, "present", *rows.MEMORY]
HEADINGS = ("threads", "V", "d", "ours", "past limit", "plain", "ours/plain", "past/plain")
LINE = "{:>7} {:>7} {:>5} {:>9} {:>10} {:>9} {:>10} {:>10}"


def run(selection: Selection, output: Path) -> None:
    """Check parity, time every case, append its rows to a CSV file, print them; then measure memory where asked.

    Raises:
        FastWeightsError: the head is not a plain softmax or does not smooth as the paper has it (then nothing is
            timed), or a file has other columns or cannot be written.
    """
    with measuring(output, COLUMNS, MEMORY_COLUMNS if selection.memory else None) as where:
        for case in selection.cases():  # all of them first: red after minutes of timing would be late
            if not case.too_large:
                require_parity(Problem(case))
        _time(selection, where, output)
        print(f"milliseconds of a training step, median, B={selection.batch}; appended to {output}")
        if selection.memory:
            _measure_memory(selection, where, beside(output))


def _time(selection: Selection, where: rows.Row, output: Path) -> None:
    heading = LINE.format(*HEADINGS) + "\n"
    for case in selection.cases():
        for count in selection.threads:
            torch.set_num_threads(count)
            times: dict[str, Timing] = {}
            skipped: dict[str, str] = {}
            if reason := case.too_large:
                skipped = dict.fromkeys(cases.RIVALS, reason)
            else:
                problem = Problem(case)
                calls = {rival: TrainingStep(problem, rival) for rival in cases.RIVALS}
                times = medians(calls, selection.rounds, selection.budget)
            print(f"{heading}{_line(count, case, times)}", flush=True)  # first: seen even where it cannot be kept
            heading = ""
            of = functools.partial(_row, where, count, case)
            append_csv(output, rows.timings(of, times, skipped, cases.PLAIN, "plain"))


def _measure_memory(selection: Selection, where: rows.Row, output: Path) -> None:
    threads = min(selection.threads)
    for case in selection.cases():
        measured = {rival: memory.peak(case, rival, threads) for rival in memory.RIVALS}
        present = len(set(labels(case)[0].tolist()))
        rows.append_peaks(output, case, functools.partial(_memory_row, where, threads, case, present), measured)
    print(f"appended to {output}")


def _row(where: rows.Row, threads: int, case: Case, rival: str) -> rows.Row:
    return where | {
        "threads": threads,
        "batch": case.batch,
        "classes": case.classes,
        "hidden_size": case.hidden_size,
        "rival": rival,
    }


def _memory_row(where: rows.Row, threads: int, case: Case, present: int, rival: str) -> rows.Row:
    return _row(where, threads, case, rival) | {"present": present}


def _line(threads: int, case: Case, times: Mapping[str, Timing]) -> str:
    taken = {name: timing.milliseconds for name, timing in times.items()}
    shown = [taken.get(name) for name in (cases.OURS, cases.PAST_LIMIT, cases.PLAIN)]
    ratios = [taken[name] / taken[cases.PLAIN] if taken else None for name in (cases.OURS, cases.PAST_LIMIT)]
    sizes = threads, case.classes, case.hidden_size
    return LINE.format(*sizes, *map(number, shown), *(number(ratio, digits=3) for ratio in ratios))
