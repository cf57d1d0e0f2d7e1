"""What the tests of all training loops share."""

import json

from fastweights.training import Progress


def records(folder):
    """Read metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_seconds(folder):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records(folder)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class StoppedError(Exception):
    pass


class StopAt(Progress):
    """Ends the process's part in the run at a step, as a kill would."""

    def __init__(self, step):
        self.step = step

    def update(self, step, loss):
        if step >= self.step:
            raise StoppedError
