"""Peak memory of one training step of each rival, in a process of its own."""

import json
import sys
from dataclasses import asdict, replace

from fastweights.bench import memory
from fastweights.bench.hebbian_softmax import cases
from fastweights.bench.hebbian_softmax.cases import Case

RIVALS = (cases.OURS, cases.PLAIN)


def peak(case: Case, rival: str, threads: int = 1) -> int | str:
    """Bytes that one step adds at its highest to what the process held before it, or why that was not measured.

    What was held before: the libraries, warmed by a tiny step, the batches, and the weights with their counters.

    Examples:
        >>> from fastweights.bench.hebbian_softmax.cases import Case
        >>> peak(Case(10**9), "fastweights").startswith("needs about")
        True
    """
    told = {"case": asdict(case), "rival": rival, "threads": threads}
    return case.too_large or memory.peak("fastweights.bench.hebbian_softmax.memory", told)


def measure(case: Case, rival: str, threads: int) -> int:
    """What `peak` gives, measured in this process."""
    import torch

    from fastweights.bench.hebbian_softmax.problem import Problem, TrainingStep
    from fastweights.nn.hebbian_softmax import loss

    torch.set_num_threads(threads)
    call = TrainingStep(Problem(case), rival)
    for bound in (0, loss.LARGEST_LOGITS):  # a loss of many logits loads more of torch
        loss.LARGEST_LOGITS = bound
        TrainingStep(Problem(replace(case, classes=2, batch=2)), rival)()
    return memory.rise(call)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(measure(Case(**given["case"]), given["rival"], given["threads"]))
