"""What every timing begins and ends with."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from fastweights.bench import machine, rows
from fastweights.bench.timing import check_csv


@contextlib.contextmanager
def measuring(output: Path, columns: list[str], of_memory: list[str] | None = None) -> Iterator[rows.Row]:
    """Give the columns that say where a run is measured, and in the end the number of threads as it was.

    Raises:
        FastWeightsError: the CSV file, or with `of_memory` the one beside it, has other columns or cannot be written.
    """
    check_csv(output, columns)  # before minutes of timing
    if of_memory is not None:
        check_csv(beside(output), of_memory)
    before = torch.get_num_threads()
    try:
        yield machine.columns()
    finally:
        torch.set_num_threads(before)


def beside(output: Path) -> Path:
    """The file of peaks of memory beside that of timings.

    Examples:
        >>> beside(Path("a.csv")).name
        'a_memory.csv'
    """
    return output.with_name(f"{output.stem}_memory{output.suffix}")
