"""The format of a run: the folders that training writes, and the files that reports and searches read.

A *run* is one execution of an experiment, a folder with `result.json`; a *member* is one model, size and seed of it, a
folder inside with `settings.json`, `environment.json`, `metrics.jsonl` and `checkpoint.pt`. A published run keeps one
`members.jsonl` in place of its members' folders. Importing this package does not import torch.
"""

from fastweights.runs.folder import (
    RunFolder,
    describe_changes,
    describe_environment,
    load_checkpoint,
    save_checkpoint,
)
from fastweights.runs.progress import Progress, show_progress
from fastweights.runs.records import Member, Record, publish, read_members
from fastweights.runs.result import Bars, Curve, Lines, Row, Run, Score, load_run, metric_key, write_result

__all__ = [
    "Bars",
    "Curve",
    "Lines",
    "Member",
    "Progress",
    "Record",
    "Row",
    "Run",
    "RunFolder",
    "Score",
    "describe_changes",
    "describe_environment",
    "load_checkpoint",
    "load_run",
    "metric_key",
    "publish",
    "read_members",
    "save_checkpoint",
    "show_progress",
    "write_result",
]
