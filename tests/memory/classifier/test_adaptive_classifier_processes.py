"""A classifier that is served: one writer, killed again and again, and four readers, as processes."""

import mmap
import os
import random
import signal
import struct
import time

import pytest
import torch

from fastweights import memory
from tests.memory.store.test_thrash import start_process

OLD = ("above", "below")


def network():
    return torch.nn.Identity()


def place(number, count=1):
    """Examples of a new class: on a spiral around the old ones, far from those just before and after it.

    A circle comes back to a class that a killed writer had no time to forget.
    """
    angle, length = torch.tensor(2.4 * number), 20 + number / 10
    return length * torch.stack([angle.cos(), angle.sin(), torch.tensor(0.0)]) + 0.01 * torch.randn(count, 3)


def write_until_killed(path, acknowledged):
    """Learn class after class, and between them some under a tag; tell each when its method has returned."""
    with memory.AdaptiveClassifier.open(path, network()) as classifier:
        for tag in classifier.tags:
            classifier.undo(tag)
        number = newest(classifier.classes) + 1
        while True:
            classifier.add_examples(place(number, 3), f"class {number}")
            acknowledged[:8] = struct.pack("<q", number)
            classifier.add_examples(place(number + 0.5, 3), "undone", tag="t")
            classifier.undo("t")
            if number >= 5:
                classifier.forget(f"class {number - 5}")
            number += 1


def newest(classes):
    return max((int(name.removeprefix("class ")) for name in classes if name.startswith("class")), default=-1)


def read_until(end, path, acknowledged, within):
    reader = memory.AdaptiveClassifier.load(path, network())
    seconds: list[float] = []
    while time.monotonic() < end or not seconds:
        before = time.monotonic()
        (told,) = struct.unpack("<q", acknowledged[:8])
        reader.refresh()
        last = newest(reader.classes)
        assert last >= told, f"{told} was acknowledged, and {last} is the last"
        known = [one for one in range(last - 4, last + 1) if one >= 0]  # none of which is forgotten yet
        answers = reader.predict(torch.cat([place(one) for one in known]))
        assert answers.names == [f"class {one}" for one in known]
        seconds.append(time.monotonic() - before)
        time.sleep(0.01)
    assert sorted(seconds)[int(0.99 * len(seconds))] < within  # a busy machine may stop a process for a while


# A reader is current when `refresh` returns; `within` is the seconds that it and an answer may take.
@pytest.mark.parametrize(("seconds", "within"), [(2, 20), pytest.param(10, 1, marks=pytest.mark.slow)])
def test_readers_follow_a_writer_that_is_killed_again_and_again(tmp_path, seconds, within):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process must not need the threads of its parent
    path, acknowledged, source = tmp_path / "saved", mmap.mmap(-1, 8), random.Random(0)
    acknowledged[:8] = struct.pack("<q", -1)
    classifier = memory.AdaptiveClassifier(network(), classes=OLD)
    examples = torch.tensor([0.0, 0, 5]) + torch.randn(50, 3)
    classifier.fit(torch.cat([examples, -examples]), ["above"] * 50 + ["below"] * 50)
    classifier.save(path)
    end, kills = time.monotonic() + seconds, 0
    writer = start_process(write_until_killed, path, acknowledged)
    while struct.unpack("<q", acknowledged[:8]) < (0,):
        time.sleep(0.01)
    readers = [start_process(read_until, end, path, acknowledged, within) for _ in range(4)]
    # A busy machine may need longer to be killed twice and to learn three classes.
    while time.monotonic() < end or kills < 2 or struct.unpack("<q", acknowledged[:8]) <= (2,):
        time.sleep(0.05 + 0.3 * source.random())
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        writer, kills = start_process(write_until_killed, path, acknowledged), kills + 1
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    torch.set_num_threads(threads)
    assert [os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) for reader in readers] == [0] * 4
    (told,) = struct.unpack("<q", acknowledged[:8])
    assert newest(memory.AdaptiveClassifier.load(path, network()).classes) >= told
