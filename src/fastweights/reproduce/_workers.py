"""Processes that train members of a run beside the main one, each a member that nobody else trains in."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastweights._allocator import keep_freed_memory
from fastweights.errors import FastWeightsError
from fastweights.reproduce._experiment import Members, set_threads, train_free
from fastweights.runs import Progress

_Calls = Any  # a multiprocessing.SimpleQueue of a worker's calls of its receiver of progress, None at the end


@contextlib.contextmanager
def working_beside(name: str, settings: Any, folder: Path, count: int, progress: Progress) -> Iterator[None]:
    """Let so many processes train members while the block runs, and wait for them at its end; an error stops them.

    Args:
        name: of the module of the experiment.
        settings: of the experiment.
        folder: of the run.
        count: the number of processes.
        progress: shows theirs too.
    """
    context = multiprocessing.get_context("spawn")
    workers = []
    try:
        for _ in range(count):
            calls = context.SimpleQueue()
            worker = context.Process(target=_work, args=(name, settings, folder, calls), daemon=True)
            worker.start()
            listener = threading.Thread(target=_show, args=(calls, progress.beside()), daemon=True)
            listener.start()
            workers.append((worker, calls, listener))
        yield
        for worker, _, _ in workers:
            worker.join()
    finally:
        for worker, calls, listener in workers:
            worker.kill()  # one that has ended feels nothing; of another, what it has not saved is trained again
            worker.join()
            calls.put(None)
            listener.join()


def _show(calls: _Calls, progress: Progress) -> None:
    for method, arguments in iter(calls.get, None):
        getattr(progress, method)(*arguments)


class _Sent(Progress):
    """A receiver of progress that sends each call to the main process."""

    def __init__(self, calls: _Calls) -> None:
        self.calls = calls

    def start(self, title: str, total: int, done: int) -> None:
        self.calls.put(("start", (title, total, done)))

    def update(self, step: int, loss: float) -> None:
        self.calls.put(("update", (step, loss)))

    def note(self, text: str) -> None:
        self.calls.put(("note", (text,)))


def _work(name: str, settings: Any, folder: Path, calls: _Calls) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process is interrupted too, and ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    members: Members = importlib.import_module(name).prepare(settings, folder)
    # What goes wrong here goes wrong in the main process too, when it comes to the member; there it is told.
    with set_threads(settings.threads), contextlib.suppress(FastWeightsError):
        for _ in train_free(members, reversed(list(members.folders)), _Sent(calls)):
            pass


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
