"""A writer that is killed at random moments, again and again, in one folder."""

import os
import random
import signal
import struct
import time

import pytest
import torch

from fastweights import memory
from fastweights.memory.store import _writer

CAPACITY, CHANGES = 40, 10_000


def make(store, number):
    """The change of a number, the same in every process."""
    source = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    kind = source.random()
    if kind < 0.1 and len(store):
        store.remove(torch.tensor([source.randrange(len(store))]))
    elif kind < 0.15 and store.tags:
        store.undo(store.tags[0])
    elif kind < 0.2 and store.tags:
        store.keep(store.tags[0])
    else:
        count = source.randrange(1, 12)
        store.write(
            torch.randn(count, 4, generator=generator),
            torch.arange(number, number + count),
            tag=source.choice([None, "a", "b"]),
        )


def content(store):
    return store.keys.tolist(), store.values.tolist(), store.tags


def write_until_killed(path, first, tell):
    _writer.SMALLEST_LOG = 3000  # folded every ten changes or so
    with memory.EpisodicMemory.open(path, CAPACITY, 4) as store:
        for number in range(first, CHANGES):
            make(store, number)
            os.write(tell, struct.pack("<q", number))


def kill_again_and_again(path, kills):
    torch.set_num_threads(1)  # a forked process must not need the threads of its parent
    source = random.Random(7)
    expected = memory.EpisodicMemory(CAPACITY, 4)  # never on the disk
    done = 0
    for _ in range(kills):
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            try:
                write_until_killed(path, done, tell)
            finally:
                os._exit(1)
        os.close(tell)
        os.read(told, 8)  # one change is done
        acknowledged = done + 1
        time.sleep(source.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        while data := os.read(told, 2**16):
            acknowledged += len(data) // 8
        os.close(told)
        while done < acknowledged:
            make(expected, done)
            done += 1
        found = content(memory.EpisodicMemory.load(path))
        if found != content(expected):  # one more had reached the disk, and was not acknowledged
            make(expected, done)
            done += 1
        assert found == content(expected)
    return done


def test_five_kills(tmp_path):
    threads = torch.get_num_threads()
    try:
        done = kill_again_and_again(tmp_path / "store", 5)
    finally:
        torch.set_num_threads(threads)
    assert done >= 5


@pytest.mark.slow
def test_a_hundred_kills(tmp_path):
    threads = torch.get_num_threads()
    try:
        done = kill_again_and_again(tmp_path / "store", 100)
    finally:
        torch.set_num_threads(threads)
    assert done >= 100
