"""The compiled C++ kernels: find and load the library, choose a kernel for a call, pass it pointers."""

import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops.exporting import is_exporting_onnx

NAME = "libfastweights.dll" if sys.platform == "win32" else "libfastweights.so"
INTERFACE = 31  # the number that csrc/library.cpp gives
_LARGE = 4 << 20  # bytes, as in csrc/pages.hpp
IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")


class NumberError(ValueError):
    """A kernel met a number that is out of range; its caller knows which input it came from, and names it."""


def load(folders: list[Path]) -> tuple[ctypes.CDLL | None, str]:
    """Return the library of the first folder that has one and its instruction set, or None and the reason."""
    path = next((folder / NAME for folder in folders if (folder / NAME).exists()), None)
    if path is None:
        return None, (
            f"{NAME} was not built: the package was installed without a C++ compiler, or runs uninstalled; "
            "install g++ and then fastweights again"
        )
    try:
        library = ctypes.CDLL(str(path))
        interface = library.fastweights_interface()
    except (OSError, AttributeError) as error:
        return None, f"{path} could not be loaded: {error}"
    if interface != INTERFACE:
        return None, f"{path} has interface {interface}, this package needs {INTERFACE}; install fastweights again"
    library.fastweights_instruction_set.restype = ctypes.c_char_p
    return library, library.fastweights_instruction_set().decode()


def count_register_bytes(instruction_set: str) -> int:
    """Return how many bytes a vector register has in the kernels for an instruction set."""
    return {"x86-64-v4": 64, "x86-64-v3": 32}.get(instruction_set, 16)


_PACKAGE = Path(__file__).parent.parent
# An editable install keeps the built library in site-packages, away from the sources.
LIBRARY, STATUS = load([_PACKAGE, Path(sysconfig.get_path("platlib")) / _PACKAGE.name])
MISSING = STATUS if LIBRARY is None else None
REGISTER_BYTES = count_register_bytes(STATUS)


def choose(like: Tensor, impl: str, without_triton: Callable[[], str | None], without_kernel: str | None = None) -> str:
    """Return the implementation that a call gets: "cpu", "triton" or "reference".

    `without_triton` says why the Triton kernel cannot take the call, or None when it can. `without_kernel` is why no
    kernel can.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "reference" or is_exporting_onnx():
        return "reference"
    wanted = impl if impl != "auto" else "cpu" if like.device.type == "cpu" else "triton"
    reason = without_kernel or (unavailable(like) if wanted == "cpu" else without_triton())
    if reason is None:
        return wanted
    if impl != "auto":
        raise KernelError(f"impl={impl!r} was asked for, but {reason}")
    return "reference"


def unavailable(
    like: Tensor, names: str = "float32 and float64", dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64)
) -> str | None:
    """Return why the C++ kernels cannot take tensors like this one, or None when they can."""
    if like.device.type != "cpu":
        return f"the cpu kernel needs tensors on the cpu, got {like.device}"
    if like.dtype not in dtypes:
        return f"the cpu kernel takes {names}, got {like.dtype}"
    return MISSING


def require(like: Tensor) -> None:
    """Refuse a call whose tensors the C++ kernels cannot take."""
    reason = unavailable(like)
    if reason is not None:
        raise KernelError(reason)


def check_tensors(
    tensors: Sequence[Tensor | None], shapes: Mapping[str, Sequence[int]], like: Tensor, like_name: str
) -> None:
    """Refuse a tensor of another shape than its own in `shapes`, or of another dtype or device than `like`.

    The names and shapes are in the order of the tensors, of which some may be None.
    """
    dtype, device = like.dtype, like.device
    for tensor, (name, shape) in zip(tensors, shapes.items(), strict=True):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.device != device:
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, {like_name} is {dtype} on {device}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def lay_out(
    tensors: Sequence[Tensor | None], shapes: Mapping[str, Sequence[int]], like: Tensor, like_name: str
) -> list[Any]:
    """Return the tensors contiguous and without a lazy negation, once `check_tensors` has passed them."""
    check_tensors(tensors, shapes, like, like_name)
    return [None if tensor is None else make_contiguous(tensor) for tensor in tensors]


def make_contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor contiguous and without a lazy negation: itself where it is so."""
    # To ask takes less than to do nothing, and a streamed step does so for every tensor.
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    tensor = tensor.resolve_neg()
    if tensor.dim() != 3 or not tensor.mT.is_contiguous() or not _leaves_cache(tensor):
        return tensor.contiguous()
    turned = tensor.new_empty(tensor.shape)
    for index in range(len(tensor)):
        turned[index].copy_(tensor[index])
    return turned


def _leaves_cache(turned: Tensor) -> bool:
    """Return whether torch is several times as slow with a batch of transposed matrices as with one at a time.

    A batch is read column by column. Many rows that are a page apart, or so far that they share few sets of a cache,
    are then fetched again for every column; one matrix is read in blocks, on one thread.
    """
    apart = turned.shape[1] * turned.element_size()  # bytes
    return turned.shape[2] >= 1000 and (apart >= 4000 or apart % 1024 == 0)


def check_lengths(lengths: Tensor | None, batch: int, device: torch.device) -> None:
    """Refuse lengths that are not int64 [B] on the device."""
    if lengths is None:
        return
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape {(batch,)}, got {tuple(lengths.shape)}")
    if lengths.dtype != torch.int64 or lengths.device != device:
        raise TypeError(f"lengths must be int64 on {device}, got {lengths.dtype} on {lengths.device}")


def check_flags(
    flags: Mapping[str, Tensor | None], steps: int, batch: int, device: torch.device
) -> list[Tensor | None]:
    """Return flags of steps, by name, contiguous; refuse those that are not bool [T,B] on the device."""
    for name, tensor in flags.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.bool or tensor.device != device:
            raise TypeError(f"{name} must be torch.bool on {device}, got {tensor.dtype} on {tensor.device}")
        if tensor.shape != (steps, batch):
            raise ValueError(f"{name} must have shape {(steps, batch)}, got {tuple(tensor.shape)}")
    return [None if tensor is None else tensor.contiguous() for tensor in flags.values()]


def lay_out_lengths(lengths: Tensor | None, batch: int, steps: int | None, device: torch.device) -> Tensor | None:
    """Return the lengths as a kernel takes them, and refuse one that is not between 0 and `steps`.

    A C++ kernel would read out of bounds. A Triton kernel, with `steps` None, takes one as 0 or T: to refuse it would
    wait for the GPU.
    """
    check_lengths(lengths, batch, device)
    if lengths is None:
        return None
    if steps is not None and batch > 0:
        low, high = (int(bound) for bound in torch.aminmax(lengths))
        if low < 0 or high > steps:
            raise ValueError(f"lengths must lie between 0 and {steps}, got {low} to {high}")
    return lengths.contiguous()


def in_large_pages(tensor: Tensor) -> Tensor:
    """Return an empty tensor for a kernel to fill, itself: a large one in large pages, where the system gives them.

    Most often torch takes the memory of a large tensor fresh from the system, and its first use then costs a fault for
    every 4 KiB. NumPy asks for large pages as well, from the same size on.
    """
    if tensor.nbytes >= _LARGE and tensor.device.type == "cpu" and LIBRARY is not None:
        LIBRARY.fastweights_prefer_large_pages(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes))
    return tensor


def define_pointers(*names: str) -> type[ctypes.Structure]:
    """Return a structure of C that holds pointers by these names."""
    return type("Pointers", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_void_p) for name in names]})


def point(structure: type[ctypes.Structure], *tensors: Tensor | None) -> ctypes.Structure:
    """Return such a structure with the tensors' addresses; they must outlive the call."""
    return structure(*[None if tensor is None else tensor.data_ptr() for tensor in tensors])


@functools.cache  # to make the name takes a tenth of a streamed step's time
def _find_entry(library: Any, kernel: str, entry: str, dtype: torch.dtype) -> Callable[..., int]:
    function: Callable[..., int] = getattr(library, f"fastweights_{kernel}_{entry}_{str(dtype).removeprefix('torch.')}")
    return function


def call(kernel: str, entry: str, name: str, like: Tensor, *arguments: Any) -> None:
    """Call an entry point of a kernel for the dtype of `like`, which an error calls by its name."""
    plain = [ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else argument for argument in arguments]
    code = _find_entry(LIBRARY, kernel, entry, like.dtype)(*plain)
    if code == 0:
        return
    what = f"{name} of shape {tuple(like.shape)}"
    if code == 1:  # codes as in csrc/guarded.hpp
        raise MemoryError(f"the {kernel} kernel ran out of memory for {what}")
    if code == 2:
        raise KernelError(
            f"the {kernel} kernel could not start {torch.get_num_threads()} threads; after "
            "torch.set_num_threads(1) it starts none"
        )
    if code == 5:
        raise NumberError(f"the {kernel} kernel got a number out of range with {what}")
    if code == 4:
        raise IndexError(f"the {kernel} kernel got an index out of range with {what}")
    raise KernelError(f"the {kernel} kernel failed for {what}")
