"""`fastweights bench associative`: times every case of a selection and appends to a CSV file, case by case."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastweights.bench.associative import cases, memory
from fastweights.bench.associative.cases import Case, Selection
from fastweights.bench.associative.parity import require_parity
from fastweights.bench.associative.problem import Problem
from fastweights.bench.associative.rivals import rivals
from fastweights.bench.timing import Timing, append_csv, check_csv, medians, today
from fastweights.training import environment

MACHINE = ["date", "commit", "processor", "torch", "kernel"]
CASE = ["threads", "batch", "steps", "input_size", "hidden_size", "precision", "mode", "rival"]
COLUMNS = [*MACHINE, *CASE, "milliseconds", "ratio_to_lstm", "rounds", "skipped"]
MEMORY_COLUMNS = [*MACHINE, *CASE, "mebibytes", "skipped"]
HEADINGS = ("threads", "T", "H", "precision", "mode", "ours", "eager", "compiled", "LSTM", "ours/LSTM", "eager/ours")
LINE = "{:>7} {:>5} {:>4} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}"


def run(selection: Selection, output: Path) -> None:
    """Check parity, time every case, append its rows to a CSV file, print them; then measure memory where asked.

    Raises:
        FastWeightsError: the layer and the reference disagree anywhere (then nothing is timed), or a file has other
            columns or cannot be written.
    """
    beside = output.with_name(f"{output.stem}_memory{output.suffix}")
    check_csv(output, COLUMNS)  # before an hour of timing
    if selection.memory:
        check_csv(beside, MEMORY_COLUMNS)
    machine = _machine()
    before = torch.get_num_threads()
    heading = LINE.format(*HEADINGS) + "\n"
    try:
        for case in selection.cases():  # all of them first: red after an hour of timing would be late
            require_parity(Problem(case))
        for case in selection.cases():
            problem = Problem(case)
            for count in selection.threads:
                torch.set_num_threads(count)
                calls, skipped = rivals(problem, selection)
                times = medians(calls, selection.rounds, selection.budget)
                print(f"{heading}{_line(count, case, times)}", flush=True)  # first: seen even where it cannot be kept
                heading = ""
                append_csv(output, [machine | row for row in _rows(count, case, times, skipped)])
    finally:
        torch.set_num_threads(before)
    print(f"milliseconds, median, B={selection.batch}; appended to {output}")
    if selection.memory:
        _measure_memory(selection, machine, beside)


def _measure_memory(selection: Selection, machine: dict[str, Any], output: Path) -> None:
    for case in selection.cases():
        if case.mode != "training" or case.precision != "float32":
            continue
        threads = min(selection.threads)
        measured = {rival: memory.peak(case, rival, threads) for rival in memory.RIVALS}
        rows = [
            machine
            | _case(threads, case, rival)
            | {
                "mebibytes": round(peak / 2**20, 1) if isinstance(peak, int) else "",
                "skipped": "" if isinstance(peak, int) else peak,
            }
            for rival, peak in measured.items()
        ]
        append_csv(output, rows)
        shown = (f"{row['rival']} {row['mebibytes'] or row['skipped']}" for row in rows)
        print(f"peak memory in MiB, {case}: {', '.join(shown)}", flush=True)
    print(f"appended to {output}")


def _machine() -> dict[str, Any]:
    found = environment()
    return {
        "date": today(),  # of the beginning, so that a run over midnight is one run
        "commit": found["commit"],
        "processor": found["processor"],
        "torch": found["torch"],
        "kernel": found["kernels"]["cpu"],
    }


def _case(threads: int, case: Case, rival: str) -> dict[str, Any]:
    return {
        "threads": threads,
        "batch": case.batch,
        "steps": case.steps,
        "input_size": case.input_size,
        "hidden_size": case.hidden_size,
        "precision": case.precision,
        "mode": case.mode,
        "rival": rival,
    }


def _rows(threads: int, case: Case, times: Mapping[str, Timing], skipped: Mapping[str, str]) -> list[dict[str, Any]]:
    lstm = times[cases.LSTM].milliseconds
    timed = [
        _case(threads, case, rival)
        | {
            "milliseconds": round(milliseconds, 4),
            "ratio_to_lstm": round(milliseconds / lstm, 4),
            "rounds": rounds,
            "skipped": "",
        }
        for rival, (milliseconds, rounds) in times.items()
    ]
    nothing = {"milliseconds": "", "ratio_to_lstm": "", "rounds": 0}
    return timed + [_case(threads, case, rival) | nothing | {"skipped": why} for rival, why in skipped.items()]


def _line(threads: int, case: Case, times: Mapping[str, Timing]) -> str:
    def best(names: tuple[str, ...]) -> float | None:
        return min((times[name].milliseconds for name in names if name in times), default=None)

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    ours, lstm, eager = times[cases.OURS].milliseconds, times[cases.LSTM].milliseconds, best(cases.EAGER)
    shown = [ours, eager, best(cases.COMPILED), lstm, ours / lstm, None if eager is None else eager / ours]
    sizes = (threads, case.steps, case.hidden_size, case.precision, case.mode)
    return LINE.format(*sizes, *map(cell, shown))
