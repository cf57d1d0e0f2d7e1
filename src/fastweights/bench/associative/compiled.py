"""What torch.compile makes of the reference, each tried in a process of its own first."""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from fastweights.bench.alone import trials
from fastweights.bench.associative import cases
from fastweights.bench.associative.cases import Case
from fastweights.bench.associative.problem import Forward, Problem


def compiled(problem: Problem, limit: float) -> tuple[dict[str, Forward], dict[str, str]]:
    """The rivals that can be compiled for this number of threads, and why the others cannot."""
    torch._dynamo.reset()  # or the sizes of earlier cases would count as dynamic
    how = {"case": asdict(problem.case), "threads": torch.get_num_threads()}
    told = {rival: how | {"rival": rival} for rival in cases.COMPILED}
    found, skipped = trials("fastweights.bench.associative.compiled", told, limit)
    return {rival: forward(problem, rival) for rival in found}, skipped


def forward(problem: Problem, rival: str) -> Forward:
    """A compiled rival; its first call compiles it."""

    def compile(function: Any) -> Any:
        return torch.compile(function, dynamic=False)

    if rival == cases.COMPILED_STEP:
        return problem.stepwise(compile(problem.matrix_step))
    form = cases.ATTENTION if rival == cases.COMPILED_ATTENTION else cases.MATRIX
    made: Forward = compile(problem.forwards()[form])
    return made


def main(told: str) -> None:
    """Compile one rival, and run it once."""
    given = json.loads(told)
    torch.set_num_threads(given["threads"])  # the compiler writes it into the code
    problem = Problem(Case(**given["case"]))
    problem.timed(forward(problem, given["rival"]))()


if __name__ == "__main__":
    main(sys.argv[1])
