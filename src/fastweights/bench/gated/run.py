"""`fastweights bench gated`: times every case of a selection and appends to a CSV file, case by case."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from fastweights.bench import machine, rows
from fastweights.bench.gated import cases, memory
from fastweights.bench.gated.cases import Case, Selection
from fastweights.bench.gated.models import Model, models, training_step
from fastweights.bench.gated.parity import require_parity, require_parity_of_models
from fastweights.bench.gated.problem import Problem
from fastweights.bench.gated.rivals import rivals
from fastweights.bench.measuring import beside, measuring
from fastweights.bench.published import best, number
from fastweights.bench.timing import Timing, append_csv, medians

CASE = ["threads", "batch", "steps", "input_size", "hidden_size", "precision", "mode", "part", "rival"]
SIZES = ["units", "parameters"]
COLUMNS = [*machine.COLUMNS, *CASE, *SIZES, *rows.timing_columns("lstm")]
MEMORY_COLUMNS = [*machine.COLUMNS, *CASE, *SIZES, *rows.MEMORY]
RATIOS = ("ours/LSTM", "eager/ours", "compiled/ours")
HEADINGS = ("threads", "T", "H", "mode", "ours", "eager", "compiled", "LSTM", *RATIOS)
LINE = "{:>7} {:>5} {:>4} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10} {:>13}"
MODEL_HEADINGS = ("threads", "T", "model", "parameters", "ms a step", "of LSTM's", "paper")
MODEL_LINE = "{:>7} {:>5} {:>13} {:>10} {:>9} {:>9} {:>9}"


def run(selection: Selection, output: Path) -> None:
    """Check parity, time every case, append its rows to a CSV file, print them; then measure memory where asked.

    Raises:
        FastWeightsError: a layer and its reference disagree anywhere (then nothing is timed), or a file has other
            columns or cannot be written.
    """
    with measuring(output, COLUMNS, MEMORY_COLUMNS if selection.memory else None) as where:
        for case in selection.cases():  # all of them first: red after minutes of timing would be late
            require_parity(Problem(case))
        for case in selection.models():
            require_parity_of_models(case)
        _time_layers(selection, where, output)
        _time_models(selection, where, output)
        print(f"milliseconds, median, B={selection.batch}; appended to {output}")
        if selection.memory:
            _measure_memory(selection, where, beside(output))


def _time_layers(selection: Selection, where: rows.Row, output: Path) -> None:
    heading = LINE.format(*HEADINGS) + "\n"
    for case in selection.cases():
        problem = Problem(case)
        for count in selection.threads:
            torch.set_num_threads(count)
            calls, skipped = rivals(problem, selection)
            times = medians(calls, selection.rounds, selection.budget)
            print(f"{heading}{_line(count, case, times)}", flush=True)  # first: seen even where it cannot be kept
            heading = ""
            of = functools.partial(_layer_row, where, count, case)
            append_csv(output, rows.timings(of, times, skipped, cases.LSTM))


def _time_models(selection: Selection, where: rows.Row, output: Path) -> None:
    heading = MODEL_LINE.format(*MODEL_HEADINGS) + "\n"
    for case in selection.models():
        for count in selection.threads:
            torch.set_num_threads(count)
            whole = models()
            calls = {name: training_step(model, case) for name, model in whole.items()}
            times = medians(calls, selection.rounds, selection.budget)
            for name in cases.MODELS:
                print(f"{heading}{_model_line(count, case, name, whole[name].size, times)}", flush=True)
                heading = ""
            of = functools.partial(_model_row, where, count, case, whole)
            append_csv(output, rows.timings(of, times, {}, cases.LSTM))


def _measure_memory(selection: Selection, where: rows.Row, output: Path) -> None:
    for case in selection.memory_cases():
        threads = min(selection.threads)
        measured = {rival: memory.peak(case, rival, threads) for rival in memory.RIVALS}
        rows.append_peaks(output, case, functools.partial(_layer_row, where, threads, case), measured)
    print(f"appended to {output}")


def _row(where: rows.Row, threads: int, case: Case, part: str, rival: str, units: int, parameters: int) -> rows.Row:
    return where | {
        "threads": threads,
        "batch": case.batch,
        "steps": case.steps,
        "input_size": case.input_size,
        "hidden_size": case.hidden_size,
        "precision": "float32",
        "mode": case.mode,
        "part": part,
        "rival": rival,
        "units": units,
        "parameters": parameters,
    }


def _layer_row(where: rows.Row, threads: int, case: Case, rival: str) -> rows.Row:
    size = case.lstm_size
    lstm = size, 4 * size * (size + case.input_size + 2)  # torch gives each gate two biases
    units, parameters = lstm if rival == cases.LSTM else (case.hidden_size, case.parameters)
    return _row(where, threads, case, "layer", rival, units, parameters)


def _model_row(where: rows.Row, threads: int, case: Case, whole: Mapping[str, Model], rival: str) -> rows.Row:
    return _row(where, threads, case, "model", rival, whole[rival].units, whole[rival].size)


def _line(threads: int, case: Case, times: Mapping[str, Timing]) -> str:
    taken = {name: timing.milliseconds for name, timing in times.items()}
    ours, lstm = taken[cases.OURS], taken[cases.LSTM]
    eager, compiled = taken.get(cases.EAGER), best(taken, cases.COMPILED)
    ratios = (None if other is None else other / ours for other in (eager, compiled))
    shown = (ours, eager, compiled, lstm, ours / lstm, *ratios)
    return LINE.format(threads, case.steps, case.hidden_size, case.mode, *map(number, shown))


def _model_line(threads: int, case: Case, name: str, parameters: int, times: Mapping[str, Timing]) -> str:
    taken, lstm = times[name].milliseconds, times[cases.LSTM].milliseconds
    paper = cases.PAPER_MINUTES[name] / cases.PAPER_MINUTES[cases.LSTM]
    shown = number(taken), number(taken / lstm), number(paper, digits=1)
    return MODEL_LINE.format(threads, case.steps, name, f"{parameters:,}", *shown)
