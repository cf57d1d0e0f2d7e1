"""`fastweights bench associative`: times every case of a selection and appends to a CSV file, case by case."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from fastweights.bench import machine, rows
from fastweights.bench.associative import cases, memory
from fastweights.bench.associative.cases import Case, Selection
from fastweights.bench.associative.parity import require_parity
from fastweights.bench.associative.problem import Problem
from fastweights.bench.associative.rivals import rivals
from fastweights.bench.measuring import beside, measuring
from fastweights.bench.timing import Timing, append_csv, medians
from fastweights.errors import FastWeightsError
from fastweights.ops.autocast import lstm_takes_bfloat16

CASE = ["threads", "batch", "steps", "input_size", "hidden_size", "precision", "mode", "rival"]
COLUMNS = [*machine.COLUMNS, *CASE, *rows.timing_columns("lstm")]
MEMORY_COLUMNS = [*machine.COLUMNS, *CASE, *rows.MEMORY]
HEADINGS = ("threads", "T", "H", "precision", "mode", "ours", "eager", "compiled", "LSTM", "ours/LSTM", "eager/ours")
LINE = "{:>7} {:>5} {:>4} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}"


def run(selection: Selection, output: Path) -> None:
    """Check parity, time every case, append its rows to a CSV file, print them; then measure memory where asked.

    Raises:
        FastWeightsError: the layer and the reference disagree anywhere (then nothing is timed), a file has other
            columns or cannot be written, or `torch.nn.LSTM`, the measure of all, does not run in bfloat16 here.
    """
    heading = LINE.format(*HEADINGS) + "\n"
    with measuring(output, COLUMNS, MEMORY_COLUMNS if selection.memory else None) as where:
        for case in selection.cases():  # all of them first: red after an hour of timing would be late
            require_parity(Problem(case))
        if "bfloat16" in selection.precisions and not lstm_takes_bfloat16("cpu"):
            raise FastWeightsError("torch.nn.LSTM does not run in bfloat16 on this processor: time float32")
        for case in selection.cases():
            problem = Problem(case)
            for count in selection.threads:
                torch.set_num_threads(count)
                calls, skipped = rivals(problem, selection)
                times = medians(calls, selection.rounds, selection.budget)
                print(f"{heading}{_line(count, case, times)}", flush=True)  # first: seen even where it cannot be kept
                heading = ""
                of = functools.partial(_row, where, count, case)
                append_csv(output, rows.timings(of, times, skipped, cases.LSTM))
        print(f"milliseconds, median, B={selection.batch}; appended to {output}")
        if selection.memory:
            _measure_memory(selection, where, beside(output))


def _measure_memory(selection: Selection, where: rows.Row, output: Path) -> None:
    for case in selection.cases():
        if case.mode != "training" or case.precision != "float32":
            continue
        threads = min(selection.threads)
        measured = {rival: memory.peak(case, rival, threads) for rival in memory.RIVALS}
        rows.append_peaks(output, case, functools.partial(_row, where, threads, case), measured)
    print(f"appended to {output}")


def _row(where: rows.Row, threads: int, case: Case, rival: str) -> rows.Row:
    return where | {
        "threads": threads,
        "batch": case.batch,
        "steps": case.steps,
        "input_size": case.input_size,
        "hidden_size": case.hidden_size,
        "precision": case.precision,
        "mode": case.mode,
        "rival": rival,
    }


def _line(threads: int, case: Case, times: Mapping[str, Timing]) -> str:
    def best(names: tuple[str, ...]) -> float | None:
        return min((times[name].milliseconds for name in names if name in times), default=None)

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    ours, lstm, eager = times[cases.OURS].milliseconds, times[cases.LSTM].milliseconds, best(cases.EAGER)
    shown = [ours, eager, best(cases.COMPILED), lstm, ours / lstm, None if eager is None else eager / ours]
    sizes = (threads, case.steps, case.hidden_size, case.precision, case.mode)
    return LINE.format(*sizes, *map(cell, shown))
