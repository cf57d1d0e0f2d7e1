"""The processes that train one model together, as torchrun starts them: the first is the main one, which alone writes.

All of them make the same calls in the same order. A process by itself is the main one, and exchanges nothing.
"""

import atexit
import datetime
import functools
import io
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastweights.errors import RunError, one_line

if TYPE_CHECKING:  # a report reads runs without torch
    from torch import Tensor, nn

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# The others wait while the main process scores, which may take longer than torch's half an hour.
_TIMEOUT = datetime.timedelta(days=1)
_FAREWELL = 0.5  # seconds
_alone = False  # true while the others wait for the main process


def count() -> int:
    """Return how many processes train together: those that torchrun started, or that the caller has joined, or one."""
    from torch import distributed

    if _alone or not distributed.is_available():
        return 1
    if not distributed.is_initialized():
        if not distributed.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
            return 1
        _join()
    return distributed.get_world_size()


def rank() -> int:
    """Return the number of this process, from 0, the main one."""
    from torch import distributed

    return distributed.get_rank() if count() > 1 else 0


def refuse_several(what: str) -> None:
    """Refuse several processes where each would do the same by itself.

    Raises:
        RunError: there are several.
    """
    if count() > 1:
        raise RunError(f"{what} runs in one process, got {count()}: start it without torchrun")


def check_divisible(**sizes: int) -> None:
    """Refuse sizes that cannot be divided evenly between the processes.

    Raises:
        ValueError: there is a remainder.
    """
    for name, size in sizes.items():
        if size % count():
            raise ValueError(f"{name} must be a multiple of the number of processes, {count()}, got {size}")


def check_enough(**sizes: int) -> None:
    """Refuse sizes of which some process would have no share.

    Raises:
        RunError: one is less than the number of processes.
    """
    for name, size in sizes.items():
        if size < count():
            raise RunError(f"{name} must be at least the number of processes, {count()}, got {size}: start fewer")


def share(value: _Result) -> _Result:
    """Return the main process's value, in every process; its tensors arrive on the CPU."""
    if count() == 1:
        return value
    from torch import distributed

    sent = [_encode(value) if rank() == 0 else b""]
    exchange(distributed.broadcast_object_list, sent, src=0)
    return value if rank() == 0 else _decode(sent[0])


def collect(value: _Result) -> list[_Result]:
    """Return the values of all processes, in their order; their tensors arrive on the CPU."""
    if count() == 1:
        return [value]
    from torch import distributed

    parts = [b""] * count()
    exchange(distributed.all_gather_object, parts, _encode(value))
    return [_decode(part) for part in parts]


def on_main(function: Callable[[], _Result]) -> _Result:
    """Call a function in the main process alone; all processes return what it returned, or raise what it raised.

    Examples:
        >>> from fastweights import processes
        >>> processes.on_main(lambda: sum(range(4)))  # computed once, whatever the number of processes
        6
    """
    global _alone
    if count() == 1:
        return function()
    results: list[_Result] = []
    error: Exception | None = None
    if rank() == 0:
        _alone = True
        try:
            results = [function()]
        except Exception as raised:
            error = raised
        finally:
            _alone = False
    results, error = share((results, error))
    if error is not None:
        raise error
    return results[0]


def in_main(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function one that all processes call and the main one runs: see `on_main`."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return on_main(functools.partial(function, *args, **kwargs))

    return call


def share_tensors(tensors: Iterable["Tensor"]) -> None:
    """Write the main process's numbers into the tensors of all."""
    from torch import distributed

    if count() > 1:
        for tensor in tensors:
            exchange(distributed.broadcast, tensor.detach(), src=0)


def add_gradients(loss: "Tensor", parameters: Iterable["nn.Parameter"]) -> "Tensor":
    """Add up the gradients of all processes, in place and in single precision at least; return the sum of the losses.

    Where the loss is each process's share of that of a batch, these are the gradients and the loss of the whole.
    """
    if count() == 1:
        return loss
    import torch

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    numbers = torch.cat([loss.detach().reshape(1), *(gradient.reshape(-1) for gradient in gradients)])
    numbers = add(numbers.to(torch.promote_types(numbers.dtype, torch.float32)))  # one exchange for all tensors
    sums = torch.split(numbers[1:], [gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
    return numbers[0].clone()


def add(numbers: "Tensor") -> "Tensor":
    """Return the sum of the tensors of all processes; they are of one shape."""
    from torch import distributed

    if count() == 1:
        return numbers
    total = numbers.clone()
    exchange(distributed.all_reduce, total)
    return total


def own_rows(size: int) -> slice:
    """Return this process's rows of a batch of so many, which is parted between all as evenly as can be.

    Examples:
        >>> from fastweights import processes
        >>> processes.own_rows(10)  # one process has all
        slice(0, 10, None)
    """
    return slice(size * rank() // count(), size * (rank() + 1) // count())


def own_share(size: int) -> tuple[slice, float]:
    """Return this process's rows of a batch of so many, at least one for each process, and their weight in its mean.

    Examples:
        >>> import torch
        >>> from fastweights import processes
        >>> batch = torch.randn(10, 3)
        >>> rows, weight = processes.own_share(len(batch))
        >>> loss = weight * batch[rows].mean()  # the losses of all processes add up to the mean over the batch
        >>> rows, weight  # one process has all
        (slice(0, 10, None), 1.0)
    """
    rows = own_rows(size)
    return rows, (rows.stop - rows.start) / size


def own_part(whole: "Tensor", dim: int) -> "Tensor":
    """Return this process's part of a tensor whose dimension `dim` is parted between all."""
    rows = own_rows(whole.shape[dim])
    return whole.narrow(dim, rows.start, rows.stop - rows.start)


def gather(part: "Tensor", dim: int) -> "Tensor":
    """Return the tensor of which every process holds a part, all of one size."""
    if count() == 1:
        return part
    import torch
    from torch import distributed

    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(count())]
    exchange(distributed.all_gather, parts, part.contiguous())
    return torch.cat(parts, dim)


def exchange(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Call a function of torch.distributed.

    Raises:
        RunError: another process has ended, or cannot be reached.
    """
    from torch import distributed

    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        # Without the line of torch's source in front, and the advice behind.
        reason = re.sub(r"^\[\S+\] ", "", one_line(error)).partition(". ")[0]
        raise RunError(
            f"process {distributed.get_rank()} of {distributed.get_world_size()} has lost another one ({reason}); the "
            "same command goes on from the last checkpoint"
        ) from error


def _encode(value: object) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(sent: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False)


def _join() -> None:
    import torch
    from torch import distributed

    gpu = int(os.environ["LOCAL_RANK"])
    if gpu < torch.cuda.device_count():
        torch.cuda.set_device(gpu)  # "cuda" is another one in each process
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_TIMEOUT)
    # Gloo's threads free the tensors of the last exchange, and take Python's lock for it: a process in which they
    # are late, and Python has ended, is aborted.
    atexit.register(time.sleep, _FAREWELL)
