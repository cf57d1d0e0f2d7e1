"""Peak memory of one training pass of each rival, in a process of its own."""

import json
import sys
from dataclasses import asdict, replace

from fastweights.bench import memory
from fastweights.bench.gated import cases
from fastweights.bench.gated.cases import Case

RIVALS = (cases.OURS, cases.EAGER, cases.LSTM)


def peak(case: Case, rival: str, threads: int = 1) -> int | str:
    """Bytes that one pass adds at its highest to what the process held before it, or why that was not measured.

    What was held before: the libraries, warmed by a tiny pass, the modules and x. The pass makes the state that it
    begins with, and the one that it ends with.

    Examples:
        >>> from fastweights.bench.gated.cases import Case
        >>> peak(Case(10**6), "eager").startswith("needs about")
        True
    """
    told = {"case": asdict(case), "rival": rival, "threads": threads}
    return cases.too_large(rival, case) or memory.peak("fastweights.bench.gated.memory", told)


def measure(case: Case, rival: str, threads: int) -> int:
    """What `peak` gives, measured in this process."""
    import torch

    from fastweights.bench.gated.problem import Problem

    torch.set_num_threads(threads)
    problem = Problem(case)
    tiny = Problem(replace(case, steps=2, batch=2))
    tiny.timed(tiny.forwards()[rival])()
    call = problem.timed(problem.forwards()[rival])
    del tiny
    return memory.rise(call)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(measure(Case(**given["case"]), given["rival"], given["threads"]))
