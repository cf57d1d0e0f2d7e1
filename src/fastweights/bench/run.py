"""Run a bench: check parity, time the rivals in turns, append rows to a CSV file, print them, then measure peak memory.

A subject of a bench is a module of this folder. It declares

    QUICK, FULL                     the two selections that the command has: the cases that a run times, and how; a case
                                    is one size, with a name for messages
    BASE                            the name of the ratio's column, and the rival that the ratio is to
    COLUMNS                         what its rows say of a case: "rival", and attributes of the case; a method is given
                                    the rival
    UNIT                            what the times are, in words
    require_parity(case)            raises FastWeightsError where a rival disagrees
    rivals(case, selection)         the calls that take turns, and why the other rivals cannot be timed
    lines(case)                     the lines that are printed: heading, width, and what stands there

and may declare

    PER                             the column that says how many a call does, where a time is that of one
    MEMORY_COLUMNS, MEMORY_RIVALS   as COLUMNS, of the file of peaks, and the rivals that are measured; then
                                    a selection has `memory` and `memory_cases()`
    list_rivals(case)               in place of MEMORY_RIVALS, where cases have different ones
    explain_absence(case, rival)    why a rival is not run, where that is not for its memory alone
    count_kept_bytes(case, rival)   what a rival keeps in memory: where that is too much, its peak is not measured
    prepare_pass(case, rival)       the call whose peak is measured
"""

import csv
import datetime
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastweights.bench.process import measure_peak
from fastweights.bench.published import Cell
from fastweights.errors import FastWeightsError
from fastweights.timing import Timing, medians

MACHINE = ["date", "commit", "processor", "torch", "kernel"]

Row = dict[str, Any]
Line = Sequence[tuple[str, int, str | Cell]]  # heading, width, and an attribute of the case ("threads" too) or a cell


def run(subject: ModuleType, selection: Any, output: Path) -> None:
    """Check parity, time every case, append its rows to a CSV file, print them; then measure peak memory where asked.

    Raises:
        FastWeightsError: parity is red anywhere (then nothing is timed), or a file has other columns or cannot be
            written.
    """
    wants_memory = getattr(selection, "memory", False)
    beside = output.with_name(f"{output.stem}_memory{output.suffix}")
    check_csv(output, timing_columns(subject))  # before minutes of timing
    if wants_memory:
        check_csv(beside, memory_columns(subject))
    threads = torch.get_num_threads()
    try:
        where = machine_columns()
        for case in selection.cases():  # all of them first: red after an hour of timing would be late
            subject.require_parity(case)
        _time(subject, selection, where, output)
        batch = f", B={selection.batch}" if hasattr(selection, "batch") else ""
        print(f"{subject.UNIT}, median{batch}; appended to {output}")
        if wants_memory:
            _measure_memory(subject, selection, where, beside)
    finally:
        torch.set_num_threads(threads)


def _time(subject: ModuleType, selection: Any, where: Row, output: Path) -> None:
    last: list[str] = []
    ratio, base = f"ratio_to_{subject.BASE[0]}", subject.BASE[1]
    for case in selection.cases():
        for threads in selection.threads:
            torch.set_num_threads(threads)
            calls, skipped = subject.rivals(case, selection)
            times = medians(calls, selection.rounds, selection.budget) if calls else {}
            if per := getattr(subject, "PER", None):
                times = {name: Timing(ms / getattr(case, per)(name), rounds) for name, (ms, rounds) in times.items()}
            taken = {name: timing.milliseconds for name, timing in times.items()}
            for line in subject.lines(case):
                headings = [heading for heading, _, _ in line]
                shown = [*_format(line, headings)] if headings != last else []
                print("\n".join([*shown, *_format(line, _cells(line, threads, case, taken))]), flush=True)
                last = headings
            cells: dict[str, Row] = {
                name: {"milliseconds": _round(ms), ratio: _round(ms / taken[base]), "rounds": rounds, "skipped": ""}
                for name, (ms, rounds) in times.items()
            }
            for name, reason in skipped.items():
                cells[name] = {"milliseconds": "", ratio: "", "rounds": 0, "skipped": reason}
            rows = [where | _describe(subject.COLUMNS, threads, case, name) | row for name, row in cells.items()]
            append_csv(output, rows)  # last, so that the rows are printed even if the file cannot be written


def _measure_memory(subject: ModuleType, selection: Any, where: Row, output: Path) -> None:
    threads = min(selection.threads)
    for case in selection.memory_cases():
        rows = []
        for rival in list_memory_rivals(subject, case):
            peak = explain_no_peak(subject, case, rival) or measure_peak(case, rival, threads)
            told = (round(peak / 2**20, 1), "") if isinstance(peak, int) else ("", peak)
            row = _describe(subject.MEMORY_COLUMNS, threads, case, rival)
            rows.append(where | row | dict(zip(("mebibytes", "skipped"), told, strict=True)))
        append_csv(output, rows)
        shown = (f"{row['rival']} {row['skipped'] or row['mebibytes']}" for row in rows)
        print(f"peak memory in MiB, {case}: {', '.join(shown)}", flush=True)
    print(f"appended to {output}")


def list_memory_rivals(subject: ModuleType, case: Any) -> Sequence[str]:
    """Return the rivals whose peak is measured in a case."""
    rivals: Sequence[str] = subject.list_rivals(case) if hasattr(subject, "list_rivals") else subject.MEMORY_RIVALS
    return rivals


def explain_no_peak(subject: ModuleType, case: Any, rival: str) -> str | None:
    """Return why a peak is not measured: as a subject says it, or because there is too little memory."""
    if hasattr(subject, "explain_absence"):
        return subject.explain_absence(case, rival)  # type: ignore[no-any-return]
    return explain_lack_of_memory(subject.count_kept_bytes(case, rival))


def timing_columns(subject: ModuleType) -> list[str]:
    """Return the columns of a subject's CSV file."""
    return [*MACHINE, "threads", *subject.COLUMNS, "milliseconds", f"ratio_to_{subject.BASE[0]}", "rounds", "skipped"]


def memory_columns(subject: ModuleType) -> list[str]:
    """Return the columns of the CSV file of peaks that stands beside."""
    return [*MACHINE, "threads", *subject.MEMORY_COLUMNS, "mebibytes", "skipped"]


def _describe(columns: Sequence[str], threads: int, case: Any, rival: str) -> Row:
    values = {name: rival if name == "rival" else getattr(case, name) for name in columns}
    return {"threads": threads} | {name: value(rival) if callable(value) else value for name, value in values.items()}


def _cells(line: Line, threads: int, case: Any, taken: Mapping[str, float]) -> list[str]:
    row = {"threads": threads}
    return [
        str(row[cell] if cell in row else getattr(case, cell)) if isinstance(cell, str) else cell(row, taken)
        for _, _, cell in line
    ]


def _format(line: Line, cells: Sequence[str]) -> list[str]:
    return [" ".join(f"{cell:>{width}}" for (_, width, _), cell in zip(line, cells, strict=True))]


def _round(value: float) -> float:
    """Round to four decimals, and to four digits what is less than one."""
    return round(value, 4) if value >= 1 else float(f"{value:.4g}")


def machine_columns() -> Row:
    """Return the columns of machine and date, taken once a run, so that a run over midnight has one date."""
    from fastweights.runs import describe_environment

    here = describe_environment()
    return {
        "date": today(),
        "commit": here.get("commit"),
        "processor": here["processor"],
        "torch": here["torch"],
        "kernel": here["kernels"]["cpu"],
    }


def today() -> str:
    """Return the date of a measurement, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def check_csv(path: Path, columns: list[str]) -> bool:
    """Return whether the file has a header yet; call it before the timing too, to refuse a wrong file early.

    Raises:
        FastWeightsError: the file has other columns, is no regular file, or cannot be read or written.
    """
    try:
        is_new = not path.exists()
        if not is_new and not path.is_file():
            raise FastWeightsError(f"{path} is not a regular file; choose another --output")
        header = [] if is_new else path.read_text().splitlines()[:1]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if is_new:
            path.resolve().unlink()  # nothing to keep yet; a link to nowhere stays
    except UnicodeDecodeError:
        raise FastWeightsError(f"{path} is not a CSV file of `fastweights bench`; choose another --output") from None
    except OSError as error:
        raise FastWeightsError(f"cannot write {path}: {error.strerror}; choose another --output") from error
    if header and header[0].split(",") != columns:
        raise FastWeightsError(f"{path} has other columns ({header[0]}); choose another --output")
    return bool(header)


def append_csv(path: Path, rows: list[Row]) -> None:
    """Append rows to a CSV file with a header, which is written where the file is new.

    Raises:
        FastWeightsError: the file has other columns, or cannot be written; it is left as it is.
    """
    columns = list(rows[0])
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if not check_csv(path, columns):
        writer.writeheader()
    writer.writerows(rows)
    try:
        with path.open("a") as file:
            file.write(text.getvalue())
    except OSError as error:
        raise FastWeightsError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def explain_lack_of_memory(needed: int, memory: int | None = None) -> str | None:
    """Return why a rival that needs so many bytes is not run: half of the machine's memory is less; None where it fits.

    Examples:
        >>> explain_lack_of_memory(3 * 2**30, memory=4 * 2**30)
        "needs about 3 GiB, more than half of the machine's 4"
    """
    memory = machine_memory() if memory is None else memory
    if needed <= memory / 2:
        return None
    return f"needs about {needed / 2**30:.0f} GiB, more than half of the machine's {memory / 2**30:.0f}"


def machine_memory() -> int:
    """Return the bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
