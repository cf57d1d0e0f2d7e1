"""A layer of the user's own: loaded from a file, put behind the interface of the others, and checked in a few steps."""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.checks import is_integer
from fastweights.errors import RunError, did_you_mean, one_line
from fastweights.nn.modes import evaluating
from fastweights.reproduce.recall.frame import STD_OUT, Recurrence, linear

_FORM = "FILE.py:CLASS, such as my_layer.py:MyLayer"
_BATCH = 3
_TRIED = 64  # steps at once, each in a row of its own: a batch as in training
_TOLERANCE = 1e-4  # of the largest output, for float32: another order of sums changes the last bits
_LEAKED_AFTER, _LEARNT_BY = 3, 1e-2  # steps of Adam, and their learning rate, after which nothing may leak either


class OwnLayer(NamedTuple):
    """A class of the user's own."""

    title: str
    """FILE.py:CLASS, the name of its rows."""
    name: str
    """The part of its members' folders that names it."""
    source: str
    """A fingerprint of the file: after a change it is another layer."""
    make: Callable[[int], nn.Module]
    """Makes the layer with so many features and units."""


def load_layer(path_and_class: str) -> OwnLayer:
    """Load a layer's class, or a function that makes it, from `FILE.py:CLASS`.

    Raises:
        RunError: there is no such file or class, or the file cannot be run.
    """
    where, _, name = path_and_class.rpartition(":")
    path = Path(where)
    if not where or not name or path.suffix != ".py":
        raise RunError(f"--layer takes {_FORM}, got {path_and_class!r}; --models has the library's own")
    if not path.is_file():
        raise RunError(f"--layer {path_and_class}: there is no file {where}; give {_FORM}")
    try:
        source = path.read_bytes()
        module = _run_file(path.absolute(), source)
    except (Exception, SystemExit) as error:  # whatever somebody else's file raises
        raise RunError(f"--layer {path_and_class}: running {where} raised {_told(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        classes = [
            key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, nn.Module)
        ]
        hint = did_you_mean(name, classes) or f"its layers are {', '.join(classes)}; " * bool(classes)
        raise RunError(f"--layer {path_and_class}: {where} has no class {name}; {hint}give {_FORM}")
    title = f"{path.name}:{name}"
    fingerprint = hashlib.sha256(source).hexdigest()[:16]
    return OwnLayer(title, f"{path.stem}.{name}", fingerprint, lambda size: _make(found, size, title))


@functools.lru_cache  # a run comes here several times, and a file may register what can be registered once
def _run_file(path: Path, source: bytes) -> ModuleType:
    module = ModuleType(f"fastweights_own_layer_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where a dataclass looks for the module that it is in
    sys.path.insert(0, str(path.parent))  # as for a script: it may import what lies beside it
    try:
        exec(compile(source, path, "exec"), vars(module))
    finally:
        sys.path.remove(str(path.parent))
    return module


def _make(found: Callable[..., Any], size: int, title: str) -> nn.Module:
    """Return the layer.

    Raises:
        ValueError: it cannot have this size, or what was made is no layer.
    """
    options = {"batch_first": True} if _takes_batch_first(found) else {}
    call = f"{title.rpartition(':')[2]}({size}, {size})"
    try:
        layer = found(size, size, **options)
    except (Exception, SystemExit) as error:  # whatever somebody else's constructor raises
        raise ValueError(f"{title}: {call} raised {_told(error)}; it must take (input_size, hidden_size)") from error
    if not isinstance(layer, nn.Module):
        raise ValueError(f"{title}: {call} must be a torch.nn.Module, got {type(layer).__name__}")
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        raise ValueError(f"{title}: {call} has no parameters to train; give it some as torch.nn.Parameter")
    if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in layer.parameters()):
        raise ValueError(f"{title}: {call} has parameters without a size; make them in the constructor, not when run")
    return layer


def _takes_batch_first(found: Callable[..., Any]) -> bool:
    """Return whether a layer reads steps first unless it is told, as torch's recurrent ones do."""
    if inspect.isclass(found) and issubclass(found, nn.RNNBase) and found.__init__.__module__ == nn.RNNBase.__module__:
        return True  # torch's own constructors take it among **kwargs
    try:
        return "batch_first" in inspect.signature(found).parameters
    except (TypeError, ValueError):  # of some callables there is none
        return False


class _Adapted(nn.Module):
    """The user's layer, whatever it returns beside its outputs: x [B,T,D] -> y [B,T,H] and the state, if any."""

    def __init__(self, own: OwnLayer, size: int) -> None:
        super().__init__()
        self.layer, self.title, self.size = own.make(size), own.title, size

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        returned = self.layer(x)
        y, *state = returned if isinstance(returned, tuple) and returned else (returned,)
        if not isinstance(y, Tensor):
            raise RunError(
                f"{self.title} must return y, or a tuple that begins with y, a tensor; got {type(y).__name__}"
            )
        right = (*x.shape[:2], self.size)
        if y.shape != right:
            raise RunError(
                f"{self.title} must return y [B,T,H] of shape {right} for x [B,T,D] of shape {tuple(x.shape)}; got "
                f"{tuple(y.shape)}"
            )
        if not y.is_floating_point():
            raise RunError(f"{self.title} must return floating-point numbers, got {y.dtype}")
        return y.to(x.dtype), state


class OwnMixer(Recurrence):
    """A mixer of the user's layer: x [B,T,E] -> y [B,T,E]."""

    layer: _Adapted

    def __init__(self, own: OwnLayer, embedding_size: int) -> None:
        super().__init__(
            _Adapted(own, embedding_size), linear(embedding_size, embedding_size, std=STD_OUT), embedding_size
        )

    def state_size(self, steps: int) -> int | None:
        """Return the layer's own `state_size`, or the numbers of what it returns after y; None: it has neither."""
        said = getattr(self.layer.layer, "state_size", None)
        if is_integer(said):
            return int(said)
        with torch.no_grad():
            tensors = list(_tensors(self.layer(next(self.out.parameters()).new_zeros(1, 1, self.embedding_size))[1]))
        return sum(tensor.numel() for tensor in tensors) if tensors else None


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from _tensors(part)


def check_layer(own: OwnLayer, size: int, steps: int, device: str, *, bfloat16: bool = False) -> None:
    """Refuse a layer that no bench can compare: see the errors.

    It is looked at as it starts and again after a few steps of training, because gates may start closed.

    Args:
        own: the layer.
        size: features and units.
        steps: the longest sequence that it will meet.
        device: to compute on.
        bfloat16: it is to be trained with products in bfloat16, and is looked at with them.

    Raises:
        RunError: it fails on random inputs, returns another shape, no floating-point numbers or numbers that are not
            finite, remembers an earlier call, mixes the rows of a batch, lets a later input change an earlier output,
            or cannot be trained.
        ValueError: it cannot be made.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = _Adapted(own, size).to(device)
        if not bfloat16:
            return _examine(layer, steps, device)
        try:
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                _examine(layer, steps, device)
        except RunError as error:
            raise RunError(f"{error} (with products in bfloat16; --no-bfloat16 leaves them out)") from error


def _examine(mixer: _Adapted, steps: int, device: str) -> None:
    for count in dict.fromkeys((1, steps)):
        x = torch.randn(_BATCH, count, mixer.size, device=device)
        for mode in (evaluating, _training):
            with _failures(mixer.title, x), mode(mixer), torch.no_grad():
                _look(mixer, x, "")
    x = torch.randn(_BATCH, min(steps, 32), mixer.size, device=device)
    optimizer = torch.optim.Adam(mixer.parameters(), lr=_LEARNT_BY)
    with _failures(mixer.title, x), _training(mixer):
        for _ in range(_LEAKED_AFTER):
            optimizer.zero_grad()
            y, _ = mixer(x)
            if not y.requires_grad:
                raise RunError(f"{mixer.title}: no gradient reaches its parameters; leave out detach() and no_grad()")
            (y - torch.randn_like(y)).square().mean().backward()
            for name, parameter in mixer.layer.named_parameters():
                if parameter.grad is not None and not parameter.grad.isfinite().all():
                    raise RunError(f"{mixer.title}: the gradient of {name} is not finite at random inputs")
            optimizer.step()
    with _failures(mixer.title, x), evaluating(mixer), torch.no_grad():
        _look(mixer, x, f" after {_LEAKED_AFTER} steps of training")


@contextmanager
def _failures(title: str, x: Tensor) -> Iterator[None]:
    """Tell in one line what somebody else's layer raises."""
    try:
        yield
    except RunError:
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{title}: running it on x of shape {tuple(x.shape)} raised {_told(error)}") from error


def _told(error: BaseException) -> str:
    words = one_line(error)
    kind = type(error).__name__
    return words if words.startswith(kind) else f"{kind}: {words}"


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    with evaluating(module):  # which brings every part's mode back
        module.train()
        yield


def _look(mixer: _Adapted, x: Tensor, when: str) -> None:
    """Compare what is returned for x with what is returned for others."""
    title = mixer.title

    def call(inputs: Tensor) -> Tensor:
        with torch.random.fork_rng():  # or the inputs drawn next would be those drawn before
            torch.manual_seed(1)  # of dropout
            y: Tensor = mixer(inputs)[0]
        return y.double()

    y = call(x)
    if not y.isfinite().all():
        raise RunError(f"{title} returns numbers that are not finite (NaN or infinite) for random inputs{when}")
    # The layer's own outputs may be of half precision, which another order of sums changes by more.
    returned = mixer.layer(x)
    kind = (returned[0] if isinstance(returned, tuple) else returned).dtype
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
    tolerance = max(_TOLERANCE, 4 * torch.finfo(kind).eps) * y.abs().max().clamp(min=1e-6)

    def differs(ours: Tensor, theirs: Tensor) -> bool:
        return not bool((ours - theirs).abs().max() <= tolerance)  # as NaN is not

    if differs(call(x), y):
        raise RunError(
            f"{title} returns another y for the same x{when}; it must keep nothing from one call to the next"
        )
    for row in range(len(x)):
        others = x.clone()
        others[row] = torch.randn_like(x[row])
        same = torch.arange(len(x)) != row
        if differs(call(others)[same], y[same]):
            raise RunError(
                f"{title} mixes the rows of a batch{when}: another x in row {row} changes y in other rows; x is "
                "[B,T,D], the batch first"
            )
    # Rows are apart, so that each may try another step; of the same x they differ by dropout.
    places = torch.arange(x.shape[1], device=x.device)
    for start in range(1, x.shape[1], _TRIED):
        steps = places[start : start + _TRIED]
        before = places < steps.unsqueeze(1)
        first = x[:1].expand(len(steps), -1, -1).contiguous()
        with _failures(title, first):
            change = call(torch.where(before.unsqueeze(2), first, torch.randn_like(first))) - call(first)
        leaks = ~(change.abs().amax(2).where(before, 0).amax(1) <= tolerance)  # NaN is one
        if leaks.any():
            step = int(steps[leaks][0])
            raise RunError(
                f"{title} is not causal{when}: another x from step {step} on changes y before it; y at a step may "
                "depend on x up to that step"
            )
