"""The forward pass of all recurrent layers, and of their cells.

A layer gives its own recurrence, `_run`, over a padded batch, and the shapes of its state. What stands around it is
here once: sequences that are padded, batch first, unbatched or packed, with or without lengths, where they restart,
and the check of the state.
"""

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastweights.nn._scan import scan_steps
from fastweights.ops.autocast import autocast_is_on, without_autocast
from fastweights.ops.exporting import is_exporting_onnx
from fastweights.ops.plain import is_plain
from fastweights.pretrained import Pretrained


class RecurrentState(tuple[Any, ...]):
    """The state of a recurrent layer: the part that is the same of all, beside a NamedTuple of tensors."""

    __slots__ = ()
    _fields: Any  # the fields of the NamedTuple

    def detach(self) -> Self:
        """Return the same state, cut from the graph: for truncated backpropagation through time."""
        return self._map(Tensor.detach)

    def to(self, *args: Any, **options: Any) -> Self:
        """Return the same state on another device or in another dtype: the arguments of `torch.Tensor.to`."""
        return type(self)(*(tensor.to(*args, **options) for tensor in self))

    def __repr__(self) -> str:
        values = zip(self._fields, tuple.__iter__(self), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={describe_value(value)}' for name, value in values)})"

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to each tensor."""
        return type(self)(*map(function, self))


def describe_value(value: object) -> str:
    """Describe what a state holds without its numbers, of which a batch of matrices has thousands."""
    if not isinstance(value, Tensor):
        return repr(value)
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"


State = TypeVar("State", bound=RecurrentState)


class Recurrent(Pretrained, nn.Module, ABC, Generic[State]):
    """A recurrence with parameters: its subclasses run over sequences (a layer) or texts, or take one step (a cell)."""

    input_size: int
    _state_type: type[State]
    _batch_axis = 0  # the batch axis of a state's tensors

    @property
    @abstractmethod
    def _dtype(self) -> torch.dtype:
        """The dtype of the weights."""

    @abstractmethod
    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a state; `batch` is (B,), or () without a batch axis."""

    @abstractmethod
    def _run(
        self, x: Tensor, state: State | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, State]:
        """Run over x [T,B,D] -> outputs [T,B,H], zero past each length, and the state after each last valid step.

        The state of a sequence is zeros before a step that `starts` [T,B] marks; none is marked past a length. A layer
        whose own `forward` has more controls of the steps takes them by name, [T,B].
        """

    def _check_dtype(self, x: Tensor) -> None:
        """Refuse inputs of another dtype than the weights', where autocast does not choose it.

        Raises:
            TypeError: x has another dtype.
        """
        if x.dtype != self._dtype and not autocast_is_on(x.device.type, self._dtype):
            raise TypeError(f"x must have the dtype of the weights, {self._dtype}, got {x.dtype}: x.to({self._dtype})")

    def _check_state(self, state: State, batch: tuple[int, ...]) -> State:
        """Check a state that a caller gives, and return it with a batch axis.

        Raises:
            ValueError: one of its tensors has another shape.
            TypeError: it is no such state, or one of its parts is not a tensor.
        """
        shapes = self._state_shapes(batch)
        another = isinstance(state, RecurrentState) and not isinstance(state, self._state_type)
        if another or not isinstance(state, tuple | list) or len(state) != len(shapes):
            parts = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            count = f" of {len(state)}" if isinstance(state, tuple | list) else ""
            raise TypeError(
                f"state must be a {self._state_type.__name__} for this x, {parts}, got a {type(state).__name__}{count}"
            )
        state = self._state_type(*state)  # a plain tuple is welcome
        for name, shape in shapes.items():
            tensor = getattr(state, name)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"state.{name} must be a tensor of shape {shape}, got {tensor!r}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"state.{name} must have shape {shape} for this x, got {tuple(tensor.shape)}")
        return state if batch else state._map(lambda tensor: tensor.unsqueeze(self._batch_axis))

    def _drop_batch(self, state: State) -> State:
        """Return the state of a single sequence without its batch axis."""
        return state._map(lambda tensor: tensor.squeeze(self._batch_axis))


# What torch's recurrent layers have and not all of ours, with what to do in its place.
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "num_layers": "make several, and give the outputs of one to the next as its x",
        "dropout": "put a torch.nn.Dropout between two layers, or behind one",
        "bidirectional": "make a second one, run it over the reversed sequence, flip its outputs back and join the two",
        "proj_size": "put a torch.nn.Linear behind it",
        "bias": "leave it out, which biases there are is fixed",
    }
)


class RecurrentLayer(Recurrent[State]):
    """A recurrence over whole sequences."""

    _absent = ABSENT
    batch_first: bool

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: State | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, State]:
        """Run over whole sequences.

        Args:
            x: [T,B,D], [B,T,D] with `batch_first`, [T,D] unbatched, or a PackedSequence.
            state: where an earlier piece ended, taken in the dtype of the weights; None starts from zeros.
            lengths: valid steps of each sequence, [B] integers from 0 to T; a sequence of 0 steps keeps its state.
            starts: the steps before which another sequence begins, bool [T,B], [B,T] with `batch_first`, [T] unbatched:
                the state is zeros there, and no gradient goes further back. None is nowhere.

        Returns:
            The hidden states in the form of x, zero past each length, and the state after each last valid step.

        Raises:
            ValueError: x, state, lengths or starts do not fit the layer or one another.
            TypeError: x is no tensor or of another dtype than the weights; state is another layer's; lengths are not an
                integer tensor, or come with a PackedSequence, which has its own; starts are not a tensor of bool.
        """
        return self._run_sequences(x, state, lengths, starts=starts)

    @final
    def _run_sequences(
        self, x: Tensor | PackedSequence, state: State | None, lengths: Tensor | None, **controls: Tensor | None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Check and arrange what `forward` was given, `_run` over it, and return the outputs in the form of x."""
        check_kind(x)
        self._check_dtype(x if isinstance(x, Tensor) else x.data)
        sequences = arrange(x, lengths, controls, self.input_size, self.batch_first)
        if state is not None:
            state = self._check_state(state, () if sequences.unbatched else (sequences.x.shape[1],))
        run: Callable[..., tuple[Tensor, State]] = self._run_as_scan if is_exporting_onnx() else self._run
        y, end = run(sequences.x, state, sequences.lengths, **{"starts": None, **sequences.controls})
        return sequences.restore(y), self._drop_batch(end) if sequences.unbatched else end

    def _run_as_scan(
        self, x: Tensor, state: State | None, lengths: Tensor | None, **controls: Tensor | None
    ) -> tuple[Tensor, State]:
        """Run a step at a time in one node of a graph: streaming gives the same as the whole."""
        steps, batch = x.shape[:2]
        if state is None:
            shapes = self._state_shapes((batch,)).values()
            state = self._state_type(*(x.new_zeros(shape, dtype=self._dtype) for shape in shapes))
        of_steps = {name: control for name, control in controls.items() if control is not None}
        if lengths is not None:
            of_steps["lengths"] = mask_of(lengths, steps).to(torch.int64)  # each sequence has one step, or none
        run: Callable[..., tuple[Tensor, State]] = self._run

        def step(inputs: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, State]:
            now, *controls_now = inputs
            given = dict(zip(of_steps, controls_now, strict=True))
            own, anew = given.pop("lengths", None), given.pop("starts", None)
            if anew is not None:  # here, once for all: the references look back for starts as ONNX cannot
                flags = anew.reshape(*[1] * self._batch_axis, -1)
                before = [_clear(flags, tensor) for tensor in before]
            others = {name: control.unsqueeze(0) for name, control in given.items()}
            y, after = run(now.unsqueeze(0), self._state_type(*before), own, starts=None, **others)
            return y[0], after

        y, end = scan_steps(self, step, list(state), [x, *of_steps.values()])
        return y, self._state_type(*end)


# A look takes a hundredth of a short pass, and more of a cell's step: after the first calls not every one is looked at.
# What overflows does it again, and few sequences have a multiple of seven steps.
_FIRST_CALLS, _EVERY = 64, 7


def warn_of_overflow(layer: nn.Module, x: Tensor, hidden: Tensor, instead: str) -> None:
    """Warn once for a layer whose last hidden state is not finite, though its inputs and weights are.

    Args:
        layer: what may overflow.
        x: what it has read, [T,B,D].
        hidden: its last hidden state: what is not finite stays so to the end.
        instead: what to do in its place.
    """
    # On a GPU the look would wait for the device.
    if hidden.device.type != "cpu" or not is_plain((hidden,)):
        return
    notes = layer.__dict__  # nn.Module's own way to set an attribute takes as long as the look
    calls = notes["_looked_for_overflow"] = notes.get("_looked_for_overflow", 0) + 1
    if notes.get("_told_of_overflow") or (calls > _FIRST_CALLS and calls % _EVERY):
        return
    # A sixth of the time of torch.isfinite(hidden).all().
    if math.isfinite(hidden.detach().sum().item()):
        return
    given = (x, *layer.parameters())
    if bool(hidden.isfinite().all()) or not all(bool(tensor.isfinite().all()) for tensor in given):
        return  # the sum alone overflowed, or the layer is not to blame
    notes["_told_of_overflow"] = True
    warnings.warn(
        f"the state of this {type(layer).__name__} grew until it was not finite: {instead}. This warning comes once",
        stacklevel=_count_frames_to_the_user(),
    )


def _count_frames_to_the_user() -> int:
    """Return the `stacklevel` with which the caller's warning is of the first line that is neither ours nor torch's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "fastweights",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    return level


def check_kind(x: Any) -> None:
    """Refuse what is no tensor or PackedSequence with a TypeError."""
    if not isinstance(x, Tensor | PackedSequence):
        raise TypeError(f"x must be a tensor or a PackedSequence, got a {type(x).__name__}: torch.as_tensor(x)")


class RecurrentCell(Recurrent[State]):
    """One step of a recurrence, for loops that the caller writes."""

    _absent = MappingProxyType({**ABSENT, "batch_first": "a cell takes one step, x [B,D]"})

    @final  # type: ignore[misc]  # nn.Module declares it as an attribute
    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Take one step: x [B,D] or [D], and the state before it -> the new hidden state [B,H] or [H], and the state.

        Raises:
            ValueError: x or state do not fit the cell or one another.
            TypeError: x is no tensor or of another dtype than the weights, or state is another cell's.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got a {type(x).__name__}: torch.as_tensor(x)")
        self._check_dtype(x)
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(f"x must be [B,D] or [D] with D = {self.input_size}, got shape {tuple(x.shape)}")
        unbatched = x.dim() == 1
        if state is not None:
            state = self._check_state(state, tuple(x.shape[:-1]))
        y, end = self._run(x.unsqueeze(0).unsqueeze(0) if unbatched else x.unsqueeze(0), state, None, None)
        return (y[0, 0], self._drop_batch(end)) if unbatched else (y[0], end)


def run_without_autocast(
    recurrence: Callable[..., tuple[Tensor, State]], drives: tuple[Tensor, ...], dtype: torch.dtype, *others: Any
) -> tuple[Tensor, State]:
    """Call recurrence(*drives, *others) with autocast off and, where it was on, the drives in the weights' dtype.

    The drives are the products of a layer's inputs over all steps: these run in the autocast dtype, and the outputs
    have it too; the recurrence and its state keep the weights' own.
    """
    device = drives[0].device.type
    if not autocast_is_on(device):
        return recurrence(*drives, *others)
    with without_autocast(device):
        y, state = recurrence(*(drive.to(dtype) for drive in drives), *others)
    return y.to(drives[0].dtype), state


def run_steps(
    step: Callable[[Any, Any], tuple[Tensor, ...]],
    drives: Iterable[Any],
    state: tuple[Tensor, ...],
    valid: Tensor | None,
    starts: Tensor | None,
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Take one step after another: step(drive, state) gives the next state, whose first tensor is the output.

    `valid` [T,...] says which sequences a step belongs to, in a shape that meets the state's; the others keep theirs.
    `starts`, in the same shape, says whose state is zeros before it.
    """
    outputs = []
    for index, drive in enumerate(drives):
        if starts is not None:
            state = tuple(tensor.masked_fill(starts[index], 0) for tensor in state)
        new = step(drive, state)
        if valid is not None:
            pairs = zip(new, state, strict=True)
            new = tuple(torch.where(valid[index], after, before) for after, before in pairs)
        state = new
        outputs.append(state[0])
    return outputs, state


def _clear(flags: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with zeros where the flags of its first axes say so."""
    return tensor.masked_fill(flags.reshape(*flags.shape, *[1] * (tensor.dim() - flags.dim())), 0)


def mask_of(lengths: Tensor, steps: int) -> Tensor:
    """Return which steps are within the lengths [B]: [T,B] of bool."""
    return torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths


class Sequences(NamedTuple):
    """A batch in the one form that the recurrences work on."""

    x: Tensor  # [T,B,D]
    lengths: Tensor | None  # [B] int64
    controls: dict[str, Tensor]  # [T,B], `starts` and others, as far as given
    unbatched: bool
    restore: Callable[[Tensor], Tensor | PackedSequence]  # outputs [T,B,H] -> the form in which x came


def arrange(
    x: Tensor | PackedSequence,
    lengths: Tensor | None,
    controls: Mapping[str, Tensor | None],
    input_size: int,
    batch_first: bool,
) -> Sequences:
    """Check x, lengths and controls and bring x to [T,B,D], controls to [T,B]."""
    if isinstance(x, PackedSequence):
        if lengths is not None:
            raise TypeError("a PackedSequence has its own lengths: leave out lengths=")
        return _arrange_packed(x, controls, input_size, batch_first)
    if x.dim() not in (2, 3) or x.shape[-1] != input_size:
        layout = "[B,T,D] or [T,D]" if batch_first else "[T,B,D] or [T,D]"
        raise ValueError(f"x must be {layout} with D = input_size = {input_size}, got shape {tuple(x.shape)}")
    unbatched = x.dim() == 2
    time_major = x.unsqueeze(1) if unbatched else x.transpose(0, 1) if batch_first else x
    if time_major.shape[0] == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} has no time steps: give at least one")
    if lengths is not None:
        lengths = check_lengths(lengths, time_major, unbatched=unbatched)
        # Whatever the padding holds, NaN too, must not reach the gradient of a weight through a product with zero.
        valid = mask_of(lengths, time_major.shape[0]).unsqueeze(2)
        time_major = torch.where(valid, time_major, torch.zeros_like(time_major))
    arranged = arrange_controls(controls, time_major, lengths, unbatched=unbatched, batch_first=batch_first)

    def restore(y: Tensor) -> Tensor:
        return y.squeeze(1) if unbatched else y.transpose(0, 1) if batch_first else y

    return Sequences(time_major, lengths, arranged, unbatched, restore)


def _arrange_packed(
    x: PackedSequence, controls: Mapping[str, Tensor | None], input_size: int, batch_first: bool
) -> Sequences:
    if x.data.shape[-1] != input_size:
        raise ValueError(
            f"x must be packed from sequences with D = input_size = {input_size}, got data of shape "
            f"{tuple(x.data.shape)}"
        )
    padded, lengths = pad_packed_sequence(x)

    def restore(y: Tensor) -> PackedSequence:
        ordered, order = y, lengths
        if x.sorted_indices is not None:
            ordered, order = y.index_select(1, x.sorted_indices), lengths[x.sorted_indices.cpu()]
        packed = pack_padded_sequence(ordered, order, enforce_sorted=True)
        return PackedSequence(packed.data, packed.batch_sizes, x.sorted_indices, x.unsorted_indices)

    lengths = lengths.to(padded.device)
    arranged = arrange_controls(controls, padded, lengths, unbatched=False, batch_first=batch_first)
    return Sequences(padded, lengths, arranged, False, restore)


def arrange_controls(
    controls: Mapping[str, Tensor | None],
    x: Tensor,
    lengths: Tensor | None,
    *,
    unbatched: bool,
    batch_first: bool,
) -> dict[str, Tensor]:
    """Check the controls of the steps of x [T,B,D] and bring each to [T,B], zero or False past a length.

    `strengths` are numbers, `starts` and others are marks; those that are None are left out.

    Raises:
        TypeError: one is not a tensor of bool, or of floating point.
        ValueError: one has another shape.
    """
    steps, batch = x.shape[:2]
    shape: tuple[int, ...]
    layout, shape = ("[B,T]", (batch, steps)) if batch_first else ("[T,B]", (steps, batch))
    if unbatched:
        layout, shape = "[T]", (steps,)
    arranged = {}
    for name, control in controls.items():
        if control is None:
            continue
        kind, cast = ("floating point", "float") if name == "strengths" else ("bool", "bool")
        if not isinstance(control, Tensor):
            got = type(control).__name__
            raise TypeError(f"{name} must be a tensor of {kind}, got a {got}: torch.as_tensor({name})")
        if not (control.is_floating_point() if kind == "floating point" else control.dtype == torch.bool):
            right = "torch.bool" if kind == "bool" else kind
            raise TypeError(f"{name} must be {right}, got {control.dtype}: {name}.{cast}()")
        if tuple(control.shape) != shape:
            raise ValueError(f"{name} must be {layout} of the steps of x, {shape}, got shape {tuple(control.shape)}")
        control = control.unsqueeze(1) if unbatched else control.t() if batch_first else control
        control = control.to(x.device)
        valid = None if lengths is None else mask_of(lengths, steps)
        if valid is not None:
            marks = control.dtype == torch.bool
            control = control & valid if marks else torch.where(valid, control, torch.zeros_like(control))
        arranged[name] = control
    return arranged


def check_lengths(lengths: Tensor, x: Tensor, *, unbatched: bool) -> Tensor:
    """Check the lengths of the steps of x [T,B,...] and return them as int64 [B] on its device.

    Raises:
        TypeError: they are not a tensor of integers.
        ValueError: they have another shape, or one is not between 0 and T.
    """
    if not isinstance(lengths, Tensor):
        raise TypeError(
            f"lengths must be a tensor of integers, got a {type(lengths).__name__}: torch.tensor({lengths})"
        )
    steps, batch = x.shape[:2]
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    if unbatched and lengths.dim() == 0:
        lengths = lengths.unsqueeze(0)
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must have one entry for each of the {batch} sequences, got {tuple(lengths.shape)}")
    # On a GPU the look at the values would wait for the device, and in a compiled graph it would break the graph.
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and batch > 0:
        low, high = (int(bound) for bound in torch.aminmax(lengths))
        if low < 0 or high > steps:
            raise ValueError(f"lengths must lie between 0 and the {steps} steps of x, got {low} to {high}")
    return lengths.to(device=x.device, dtype=torch.int64)
