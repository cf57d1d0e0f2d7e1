"""A plugin of pytest that has kernels called in another process, under an emulator or another system.

What a test compares, and with what, stays as it is: with `FASTWEIGHTS_ELSEWHERE="COMMAND..."` in the environment and
`-p tests.wheels.elsewhere`, every call of the C++ kernels goes through `caller.cpp`, which COMMAND starts.
"""

import ctypes
import os
import shlex
import struct
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fastweights.ops import _native

from ..ops import parity

_NUMBER, _ADDRESS, _STRUCTURE = range(3)


def pytest_configure(config: pytest.Config) -> None:
    parity.DRAWS = 8  # before the tests are imported: in an emulator 32 would take an hour
    replace_library(shlex.split(os.environ["FASTWEIGHTS_ELSEWHERE"]))


def pytest_report_header(config: pytest.Config) -> str:
    return f"kernels: {_native.STATUS}, called in {os.environ['FASTWEIGHTS_ELSEWHERE']}"


def replace_library(command: Sequence[str]) -> None:
    """Have every call of a kernel answered by the caller that the command starts."""
    library = Library(command)
    _native.LIBRARY, _native.STATUS, _native.MISSING = library, library.level, None  # type: ignore[assignment]
    _native.REGISTER_BYTES = _native.count_register_bytes(library.level)
    own = torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        address, storage = own(tensor), tensor.untyped_storage()
        library.memory[address] = storage.data_ptr(), storage.nbytes()
        return address

    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign, assignment]


class Library:
    """The entry points of a library that another process has loaded, with the memory that it is sent."""

    def __init__(self, command: Sequence[str]) -> None:
        self.memory: dict[int, tuple[int, int]] = {}  # of an address: where its storage begins, and its bytes
        self.lock = threading.Lock()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.level = self.receive(self.receive_word()).decode()

    def __getattr__(self, name: str) -> Any:
        return partial(self.call, name)

    def receive(self, size: int) -> bytes:
        assert self.process.stdout is not None
        found = self.process.stdout.read(size)
        if len(found) < size:
            raise RuntimeError(f"the caller ended with {self.process.wait()}")
        return found

    def receive_word(self) -> int:
        return int.from_bytes(self.receive(8), "little", signed=True)

    def call(self, name: str, *arguments: Any) -> int:
        regions: dict[int, int] = {}
        packed = [self.pack(argument, regions) for argument in arguments]
        request = [_pack_words(len(name)), name.encode(), _pack_words(len(regions))]
        for start, size in regions.items():
            request += [_pack_words(start, size), ctypes.string_at(start, size)]
        request += [_pack_words(len(packed)), *packed]
        with self.lock:
            assert self.process.stdin is not None
            self.process.stdin.write(b"".join(request))
            self.process.stdin.flush()
            code = self.receive_word()
            for start, size in regions.items():
                ctypes.memmove(start, self.receive(size), size)
        return code

    def pack(self, argument: Any, regions: dict[int, int]) -> bytes:
        """Return an argument as the caller reads it; the memory that it points into joins the regions."""
        if isinstance(argument, int):
            return _pack_words(_NUMBER, argument)
        if isinstance(argument, ctypes.c_int64):
            return _pack_words(_NUMBER, argument.value)
        if isinstance(argument, ctypes.c_void_p) or argument is None:
            address = None if argument is None else argument.value
            return _pack_words(_ADDRESS, self.find_region(address, regions))
        structure = argument._obj  # of ctypes.byref
        pointers = [name for name, kind in structure._fields_ if kind is ctypes.c_void_p]
        places = [getattr(type(structure), name).offset for name in pointers]
        for name in pointers:
            self.find_region(getattr(structure, name), regions)
        content = bytes(structure)
        return _pack_words(_STRUCTURE, len(content)) + content + _pack_words(len(places), *places)

    def find_region(self, address: int | None, regions: dict[int, int]) -> int:
        if not address:
            return 0
        start, size = self.memory[address]
        regions[start] = size
        return address


def _pack_words(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}q", *words)
