"""The members of a run: trained one after another, or side by side by several processes."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastweights._allocator import keep_freed_memory
from fastweights.errors import BusyError, FastWeightsError
from fastweights.runs import Progress, Record, RunFolder

Key = tuple[Any, ...]  # the model, or a row that has it as `model`, ..., and at the end the seed


class Members(NamedTuple):
    """The members of a run, how one of them is trained, and the table of all."""

    folders: Mapping[Any, RunFolder]  # by key
    train: Callable[..., None]  # called with the key's elements, the open folder and a receiver of progress
    table: Callable[[], Record]  # called for the arguments of `write_result` that follow the settings
    skip_finished: bool = False  # a finished member is left as it is, and needs no checkpoint
    alone: bool = False  # members measure times in one go: they have the machine to themselves, and need no checkpoint

    def has_finished(self, member: RunFolder) -> bool:
        """Return whether a member is left as it is."""
        return self.skip_finished and member.read_result() is not None


@contextlib.contextmanager
def set_threads(count: int) -> Iterator[None]:
    """Compute with so many threads, and afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_member(members: Members, key: Key, progress: Progress) -> None:
    """Train a member, or go on where a killed process was; random numbers are afterwards as they were."""
    with members.folders[key] as member, torch.random.fork_rng():
        torch.manual_seed(key[-1])
        members.train(*key, member, progress)


def train_free(members: Members, keys: Iterable[Key], progress: Progress) -> Iterator[Key]:
    """Train each member that has not finished and that no other process trains, and yield its key."""
    for key in keys:
        if members.folders[key].read_result() is not None:
            continue
        try:
            train_member(members, key, progress)
        except BusyError:
            continue
        yield key


@contextlib.contextmanager
def working_beside(name: str, settings: Any, folder: Path, count: int, progress: Progress) -> Iterator[None]:
    """Let so many processes train members while the block runs, and wait for them at its end; an error stops them.

    They begin with the last member, and leave out those that another process trains.

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
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(name, settings, folder, sender), daemon=True)
            worker.start()
            sender.close()  # the worker has the only one, which closes when it ends, in whatever way
            listener = threading.Thread(target=_show, args=(receiver, progress.beside()), daemon=True)
            listener.start()
            workers.append((worker, listener))
        yield
        for worker, _ in workers:
            worker.join()
    finally:
        for worker, listener in workers:
            worker.kill()  # one that has ended feels nothing; of another, what it has not saved is trained again
            worker.join()
            listener.join()


def _show(calls: Connection, progress: Progress) -> None:
    with calls, contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = calls.recv()
            getattr(progress, method)(*arguments)


class _Sent(Progress):
    """A receiver of progress that sends each call to the main process."""

    def __init__(self, calls: Connection) -> None:
        self.calls = calls

    def start(self, title: str, total: int, done: int) -> None:
        self.calls.send(("start", (title, total, done)))

    def update(self, step: int, loss: float) -> None:
        self.calls.send(("update", (step, loss)))

    def note(self, text: str) -> None:
        self.calls.send(("note", (text,)))


def _work(name: str, settings: Any, folder: Path, calls: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process is interrupted too, and ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    # What goes wrong here goes wrong in the main process too, when it comes to the member; there it is told.
    with set_threads(settings.threads), contextlib.suppress(FastWeightsError):
        members: Members = importlib.import_module(name).prepare(settings, folder)
        for _ in train_free(members, reversed(list(members.folders)), _Sent(calls)):
            pass


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
