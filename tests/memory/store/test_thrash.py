"""One writer and four readers at once, as threads and as processes: no wrong answer, and nothing lost."""

import mmap
import os
import random
import shutil
import signal
import struct
import threading
import time
import traceback

import pytest
import torch

from fastweights import memory
from fastweights.memory.store import _writer

LENGTHS = [2, pytest.param(10, marks=pytest.mark.slow)]  # seconds
CLASSES = 20
MANY = 10_000_000  # from here on are values under a tag


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process must not need the threads of its parent
    yield
    torch.set_num_threads(threads)


# Threads


def examples_of_every_class():
    """Keys that lie 10 apart for every class, so that a key and an answer both tell the class."""
    classes = torch.randperm(CLASSES)
    return torch.stack([10.0 * classes, torch.rand(CLASSES)], 1), classes


def write_threads(store, over):
    """Write, remove and undo; an example of every class is always there."""
    while not over.is_set():
        store.write(*examples_of_every_class())
        store.write(*examples_of_every_class(), tag="t")
        old = len(store) - 2 * CLASSES
        if old > 0:
            store.remove(torch.randint(old, (3,)))
        store.undo("t")


def search_threads(store, over):
    while not over.is_set():
        queries, _ = examples_of_every_class()
        found = store.search(queries, 5)
        assert torch.equal(found.values, (found.keys[..., 0] / 10).round().long())
        with store.lock:
            assert torch.equal(store.values, (store.keys[:, 0] / 10).round().long())
            assert len(store.numbers) == len(store)


def answer_threads(model, over):
    while not over.is_set():
        queries, classes = examples_of_every_class()
        assert torch.equal(model(queries).argmax(1), classes)


@pytest.mark.parametrize("seconds", LENGTHS)
def test_threads_write_and_ask_at_once(seconds):
    store = memory.EpisodicMemory(3 * CLASSES + 7, 2)
    store.write(*examples_of_every_class())
    output = torch.nn.Linear(2, CLASSES)
    for parameter in output.parameters():
        torch.nn.init.zeros_(parameter)
    model = memory.MbPA(torch.nn.Dropout(), output, store, neighbours=1)
    over, errors = threading.Event(), []

    def run(work, *arguments):
        try:
            work(*arguments, over)
        except BaseException:
            errors.append(traceback.format_exc())
            over.set()

    work = [(write_threads, store), *[(search_threads, store)] * 2, *[(answer_threads, model)] * 2]
    threads = [threading.Thread(target=run, args=one) for one in work]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert model.embed.training
    assert model.output.training


# Processes


def key_of(values):
    return torch.stack([values, values % 97, values % 31], 1).float()


def write_until_killed(path, acknowledged):
    """Write one number after another, and between them some under a tag; tell each when its write has returned."""
    _writer.SMALLEST_LOG = 3000  # folded every few changes
    with memory.EpisodicMemory.open(path, 50, 3) as store:
        number = newest(store.values) + 1
        while True:
            for tag in store.tags:
                store.undo(tag)
            one = torch.tensor([number])
            store.write(key_of(one), one)
            acknowledged[:8] = struct.pack("<q", number)
            if number % 3 == 0:  # overwrites the oldest for a while
                some = torch.arange(MANY + number, MANY + number + 20)
                store.write(key_of(some), some, tag="t")
            elif number % 7 == 0 and len(store) > 40:  # the oldest, and no other while those are to come back
                store.remove([0])
            number += 1


def newest(values):
    return max(values[values < MANY].tolist(), default=-1)


def read_until(end, path, acknowledged, within):
    reader = memory.EpisodicMemory.load(path)
    seconds: list[float] = []
    while time.monotonic() < end or not seconds:
        before = time.monotonic()
        (told,) = struct.unpack("<q", acknowledged[:8])
        reader.refresh()
        keys, values = reader.keys, reader.values
        assert torch.equal(keys, key_of(values)), "a key has another one's value"
        numbers = values[values < MANY].tolist()
        assert newest(values) >= told, f"{told} was acknowledged, and {newest(values)} is the last"
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "one is missing"
        seconds.append(time.monotonic() - before)
        time.sleep(0.01)
    assert sorted(seconds)[int(0.99 * len(seconds))] < within  # a busy machine may stop a process for a while


def start_process(work, *arguments):
    """Fork a process, and return its number; its exit status is 0 if `work` returns."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# A reader is current when `refresh` returns; `within` is the seconds that it and an answer may take.
@pytest.mark.parametrize(("seconds", "within"), [(2, 20), pytest.param(10, 1, marks=pytest.mark.slow)])
def test_readers_follow_a_writer_that_is_killed_again_and_again(tmp_path, seconds, within):
    path, acknowledged, source = tmp_path / "store", mmap.mmap(-1, 8), random.Random(0)
    acknowledged[:8] = struct.pack("<q", -1)
    end, kills = time.monotonic() + seconds, 0
    writer = start_process(write_until_killed, path, acknowledged)
    while struct.unpack("<q", acknowledged[:8]) < (0,):
        time.sleep(0.01)
    readers = [start_process(read_until, end, path, acknowledged, within) for _ in range(4)]
    # A busy machine may need longer to be killed twice and to write three numbers.
    while time.monotonic() < end or kills < 2 or struct.unpack("<q", acknowledged[:8]) <= (2,):
        time.sleep(0.3 * source.random())
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        writer, kills = start_process(write_until_killed, path, acknowledged), kills + 1
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert [os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) for reader in readers] == [0] * 4
    (told,) = struct.unpack("<q", acknowledged[:8])
    assert newest(memory.EpisodicMemory.load(path).values) >= told


def replace_until_killed(folders, path):
    while True:
        for folder in folders:
            shutil.copy(folder / "memory.safetensors", path / "part")
            os.replace(path / "part", path / "memory.safetensors")


def test_a_memory_that_is_replaced_while_it_is_read_is_the_old_or_the_new_one(tmp_path):
    folders = [tmp_path / name for name in ("old", "new", "read")]
    for number, folder in enumerate(folders):
        store = memory.EpisodicMemory(50, 3)
        store.write(torch.full((50, 3), float(number)), torch.full((50,), number))
        store.save(folder)
    writer, end = start_process(replace_until_killed, folders[:2], folders[2]), time.monotonic() + 1
    try:
        while time.monotonic() < end:
            store = memory.EpisodicMemory.load(folders[2])
            assert torch.equal(store.keys, store.values.float().unsqueeze(1).expand(-1, 3))
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
