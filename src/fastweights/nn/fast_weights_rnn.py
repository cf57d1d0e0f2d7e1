"""Fast weights that attend to the recent past: Ba et al. 2016, equations 1 to 5."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fastweights.checks import check_between, check_choice, check_finite, check_normalized, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import (
    Recurrent,
    RecurrentCell,
    RecurrentLayer,
    RecurrentState,
    describe_value,
    run_without_autocast,
    warn_of_overflow,
)
from fastweights.ops.associative import (
    FORMS,
    IMPLEMENTATIONS,
    Constants,
    associative,
    associative_with_memory,
    final_memory,
)
from fastweights.ops.autocast import without_autocast
from fastweights.ops.lengths import take_last

# A learnt rate is a power of e whose exponent is this many times a parameter. In a step Adam moves every parameter by
# about its learning rate, of 0.001 for example, and the best rates of two tasks are a thousand times apart.
_EXPONENT = 20.0
_LEAST_FADING = 1e-3  # a matrix that does not fade begins as one that fades in a thousand steps


class _Unformed:
    """A fast matrix that nobody has asked for yet: H^2 numbers an example, most often never wanted.

    `form(*sources)` computes it later; the source tensors must not change in place before that.
    """

    def __init__(self, form: Callable[..., Tensor], *sources: Tensor | None) -> None:
        self.form: Callable[..., Tensor] | None = form
        # Neither a tensor of inference mode nor one of a compiled graph counts its changes in place: it is copied, and
        # only the others are watched. Dynamo cannot trace the questions about inference mode.
        compiling = torch.compiler.is_compiling()
        self.sources = [
            None if tensor is None else tensor.clone() if compiling or tensor.is_inference() else tensor
            for tensor in sources
        ]
        self.watched = [
            (tensor, tensor._version)
            for tensor in self.sources
            if tensor is not None and not compiling and not tensor.is_inference()
        ]
        self.grad = torch.is_grad_enabled()
        self.inference = not compiling and torch.is_inference_mode_enabled()
        self.formed: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.form is not None:
            if any(tensor._version != version for tensor, version in self.watched):
                raise RuntimeError(
                    "state.memory is formed when it is first asked for, from the layer's outputs and the state that it "
                    "began with, and one of them has been changed in place since: ask for it before, or change a copy"
                )
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
                self.formed = self.form(*self.sources)
            self.form, self.sources, self.watched = None, [], []  # frees the tensors that it was computed from
        assert self.formed is not None
        return self.formed

    def __repr__(self) -> str:
        return "formed when it is read" if self.formed is None else describe_value(self.formed)


class _Pair(NamedTuple):
    hidden: Tensor
    memory: Any  # a tensor, or an _Unformed


class FastWeightsState(RecurrentState, _Pair):
    """The state that a fast-weights layer hands from one piece of a sequence to the next.

    `memory` is the fast matrix A(t-1): everything before `hidden`, which the next step writes before it reads.
    With several layers both have a leading layer axis; for an unbatched sequence both lack the batch axis.
    A named pair of tensors: `hidden, memory = state`. The memory that a layer returns is formed from its outputs when
    it is first asked for; a RuntimeError says so if they have been changed in place before. `torch.save` keeps a state,
    and `torch.load` reads it wherever `fastweights.nn` is imported.

    Attributes:
        hidden: [B,H].

    Examples:
        >>> import torch
        >>> from fastweights.nn import FastWeightsState
        >>> state = FastWeightsState(hidden=torch.zeros(2, 5), memory=torch.zeros(2, 5, 5))
        >>> state.detach().memory.shape
        torch.Size([2, 5, 5])
    """

    # Names, indices and iteration lead through this property, or a caller would meet the memory before it is formed.
    @property
    def memory(self) -> Tensor:
        """The fast matrix, [B,H,H]."""
        memory = tuple.__getitem__(self, 1)
        return memory.tensor() if isinstance(memory, _Unformed) else memory

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.hidden, self.memory))

    def __getitem__(self, index: Any) -> Any:
        return (self.hidden, self.memory)[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return FastWeightsState, (self.hidden, self.memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "FastWeightsState":
        memory = tuple.__getitem__(self, 1)
        unformed = isinstance(memory, _Unformed)
        return FastWeightsState(
            function(self.hidden), _Unformed(lambda: function(memory.tensor())) if unformed else function(memory)
        )


class _FastWeights(Recurrent[FastWeightsState]):
    """A stack of layers and its recurrence. A cell has one layer; `FastWeightsRNN` adds others above it."""

    _state_type = FastWeightsState

    # The arguments of the cell. The layer writes them out again: a user reads its signature in an editor.
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        decay: float = 0.95,
        rate: float | None = None,
        inner_steps: int = 1,
        nonlinearity: str = "relu",
        layer_norm: bool = True,
        normalize_initial: bool = False,
        hold_input: bool = True,
        identity_scale: float | None = None,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size)
        if layer_norm:
            check_normalized(hidden_size=hidden_size)
        check_between(0, 1, decay=decay)
        check_choice(IMPLEMENTATIONS, impl=impl)
        if identity_scale is not None:
            check_finite(identity_scale=identity_scale)
        first = 0.5 * max(1 - decay, _LEAST_FADING) / hidden_size
        self.constants = Constants(
            decay,
            first if rate is None else rate,
            inner_steps,
            nonlinearity,
            normalize_initial,
            hold_input=hold_input,
        )
        self.rate = rate
        self.input_size, self.hidden_size = input_size, hidden_size
        self.layer_norm, self.identity_scale = layer_norm, identity_scale
        self.impl, self.form = impl, "auto"
        self.num_layers, self.dropout = 1, 0.0
        self._add_layer("", input_size, device, dtype)

    def _suffixes(self) -> list[str]:
        return ["" if layer == 0 else f"_l{layer}" for layer in range(self.num_layers)]

    def _add_layer(self, suffix: str, input_size: int, device: Any, dtype: Any) -> None:
        size = self.hidden_size
        shapes = {"weight_ih": (size, input_size), "weight_hh": (size, size), "bias": (size,)}
        for name, shape in shapes.items():
            self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        log_rate = nn.Parameter(torch.empty((), device=device, dtype=dtype)) if self.rate is None else None
        self.register_parameter("log_rate" + suffix, log_rate)
        norm = nn.LayerNorm(size, device=device, dtype=dtype) if self.layer_norm else None
        self.register_module("norm" + suffix, norm)
        self._reset_layer(suffix)

    def _reset_layer(self, suffix: str) -> None:
        bound = 1 / math.sqrt(self.hidden_size)  # fan-out: the number of outgoing weights (appendix A.1)
        nn.init.uniform_(getattr(self, "weight_ih" + suffix), -bound, bound)
        scale = self.identity_scale
        if scale is None:
            # Normalised hidden states are some sqrt(H / 2) long: W h is as long at every width from 16 on.
            scale = min(1 / math.sqrt(self.hidden_size), 0.25)
        with torch.no_grad():
            nn.init.eye_(getattr(self, "weight_hh" + suffix)).mul_(scale)
        nn.init.zeros_(getattr(self, "bias" + suffix))
        if self.rate is None:
            nn.init.zeros_(getattr(self, "log_rate" + suffix))
        if self.layer_norm:
            getattr(self, "norm" + suffix).reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all: `weight_hh` a multiple of the identity, `weight_ih` uniform by its fan-out, `bias` zero."""
        for suffix in self._suffixes():
            self._reset_layer(suffix)

    def rates(self) -> list[float]:
        """Return the rate with which each layer writes now, from the lowest: what it has learnt, or what was given.

        Examples:
            >>> from fastweights import nn
            >>> nn.FastWeightsRNN(10, 20, num_layers=2, rate=0.5).rates()
            [0.5, 0.5]
            >>> [round(rate, 6) for rate in nn.FastWeightsRNN(10, 20).rates()]  # before training: 0.025 / 20
            [0.00125]
        """
        first = self.constants.rate
        log_rates = [getattr(self, "log_rate" + suffix, None) for suffix in self._suffixes()]
        return [first * (1 if each is None else math.exp(_EXPONENT * float(each.detach()))) for each in log_rates]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        *_, errors = arguments
        if self.rate is None and prefix + "weight_hh" in state_dict and prefix + "log_rate" not in state_dict:
            errors.append(
                f"{prefix}weight_hh comes without {prefix}log_rate, from a layer whose rate is a number, which a "
                "state_dict does not hold: give that number to this layer; by default it was rate=0.5"
            )
        if self.rate is not None and prefix + "log_rate" in state_dict:
            errors.append(
                f"{prefix}log_rate is of a layer that learns its rate, and this one has rate={self.rate}: make it with "
                "rate=None"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A layer that was pickled before rates were learnt has none of its own.
        super().__setstate__({"rate": state["constants"].rate} | state)  # type: ignore[no-untyped-call]

    @property
    def _dtype(self) -> torch.dtype:
        return cast("Tensor", self.weight_hh).dtype

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        leading = batch if self.num_layers == 1 else (self.num_layers, *batch)
        return {"hidden": (*leading, self.hidden_size), "memory": (*leading, self.hidden_size, self.hidden_size)}

    def _run(
        self,
        x: Tensor,
        state: FastWeightsState | None,
        lengths: Tensor | None,
        starts: Tensor | None,
        **controls: Tensor,
    ) -> tuple[Tensor, FastWeightsState]:
        if "strengths" in controls:
            controls["strengths"] = controls["strengths"].to(self._dtype)
        steps = {"lengths": lengths, "starts": starts, **controls}
        y, end = self._run_stack(x, state, steps)
        if not self.layer_norm and self.constants.nonlinearity == "relu":
            warn_of_overflow(self, x, end.hidden, "give layer_norm=True, or a smaller rate or decay")
        return y, end

    def _run_stack(
        self, x: Tensor, state: FastWeightsState | None, steps: dict[str, Tensor | None]
    ) -> tuple[Tensor, FastWeightsState]:
        if self.num_layers == 1:
            return self._run_layer("", x, state, steps)
        y, ends = x, []
        states: list[FastWeightsState | None] = [None] * self.num_layers
        if state is not None:
            states = [FastWeightsState(*pair) for pair in zip(state.hidden, state.memory, strict=True)]
        for suffix, before in zip(self._suffixes(), states, strict=True):
            if suffix and self.dropout > 0:
                y = F.dropout(y, self.dropout, self.training)
            y, end = self._run_layer(suffix, y, before, steps)
            ends.append(end)

        def stack_memories() -> Tensor:
            return torch.stack([end.memory for end in ends])

        memory = stack_memories() if torch.compiler.is_exporting() else _Unformed(stack_memories)
        return y, FastWeightsState(torch.stack([end.hidden for end in ends]), memory)

    def _run_layer(
        self, suffix: str, x: Tensor, state: FastWeightsState | None, steps: dict[str, Tensor | None]
    ) -> tuple[Tensor, FastWeightsState]:
        weight_hh = getattr(self, "weight_hh" + suffix)
        drive = F.linear(x, getattr(self, "weight_ih" + suffix), getattr(self, "bias" + suffix))
        norm, log_rate = getattr(self, "norm" + suffix), getattr(self, "log_rate" + suffix, None)
        return run_without_autocast(self._recur, (drive,), weight_hh.dtype, weight_hh, log_rate, norm, state, steps)

    def _recur(
        self,
        drive: Tensor,
        weight_hh: Tensor,
        log_rate: Tensor | None,
        norm: nn.LayerNorm | None,
        state: FastWeightsState | None,
        steps: dict[str, Tensor | None],  # lengths, starts, and other inputs of the operation for each step
    ) -> tuple[Tensor, FastWeightsState]:
        if log_rate is not None:  # the operation's own rate is a number: a learnt rate comes with the strengths
            learnt, given = (_EXPONENT * log_rate).exp(), steps.get("strengths")
            steps = steps | {"strengths": learnt.expand(drive.shape[:2]) if given is None else learnt * given}
        if state is None:
            hidden, memory = drive.new_zeros(drive.shape[1:]), None
        else:
            hidden = _leave_inference(state.hidden.to(drive.dtype))
            memory = _leave_inference(state.memory.to(drive.dtype))
        options: dict[str, Any] = {
            "norm_weight": norm.weight if norm is not None else None,
            "norm_bias": norm.bias if norm is not None else None,
            **steps,
            "constants": self.constants,
            "impl": self.impl,
            "form": self.form,
        }
        final: Tensor | _Unformed
        if _memory_is_wanted_now(drive, memory):
            outputs, final = associative_with_memory(drive, weight_hh, hidden, memory, **options)
        else:
            outputs = associative(drive, weight_hh, hidden, memory, **options)
            final = self._form_memory_later(outputs, hidden, memory, steps)
        return outputs, FastWeightsState(take_last(outputs, steps["lengths"], hidden), final)

    def _form_memory_later(
        self, outputs: Tensor, hidden: Tensor, memory: Tensor | None, steps: dict[str, Tensor | None]
    ) -> _Unformed:
        constants, device = self.constants, outputs.device.type

        # Dynamo cannot give a function with annotations of typing to who called a compiled graph.
        def form(outputs, hidden, memory, lengths, starts, strengths):  # type: ignore[no-untyped-def]
            with without_autocast(device):
                written = {"starts": starts, "strengths": strengths}
                return final_memory(outputs, hidden, memory, lengths, constants, **written)

        return _Unformed(form, outputs, hidden, memory, steps["lengths"], steps["starts"], steps.get("strengths"))

    def extra_repr(self) -> str:
        return describe(
            vars(self.constants) | vars(self),
            ["input_size", "hidden_size"],
            ["decay", "rate"],
            inner_steps=1,
            nonlinearity="relu",
            layer_norm=True,
            normalize_initial=False,
            hold_input=True,
            impl="auto",
            form="auto",
            num_layers=1,
            dropout=0.0,
            batch_first=False,
        )


def _leave_inference(tensor: Tensor) -> Tensor:
    """Return a tensor that the present mode takes: outside of inference mode a copy of one that was made in it."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # Dynamo cannot trace the next question
        return tensor
    return tensor.clone() if tensor.is_inference() else tensor


def _memory_is_wanted_now(drive: Tensor, memory: Tensor | None) -> bool:
    """Return whether the fast matrix is formed with the outputs, not when it is first asked for."""
    # A single step is part of a loop, whose next step reads the memory. In inference mode a stream would have to copy
    # its memory to be able to form the next one later. An exported graph returns tensors alone.
    if drive.shape[0] == 1 or torch.compiler.is_exporting():
        return True
    return memory is not None and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


class FastWeightsRNN(_FastWeights, RecurrentLayer[FastWeightsState]):
    """A recurrent layer whose fast weights hold the recent past, used like `torch.nn.LSTM` (Ba et al. 2016, eq 1 to 5).

    Every step decays the fast matrix A, writes the last hidden state into it, A(t) = decay A(t-1) + rate h(t) h(t)^T,
    and lets the new state settle for `inner_steps` under it: h_{s+1} = f(LN(W h(t) + C x(t+1) + b + A(t) h_s)).

    By default the rate is learnt, one number for each layer: 0.5 (1 - decay) / H exp(20 log_rate), and `log_rate` is 0
    before training. What is read, A(t) h_s, is the longer the more units there are, the larger the rate is, and the
    more steps the matrix holds, some 1 / (1 - decay). So it begins shorter than what comes in at every width, length
    and decay, and training makes the memory strong where that soon helps. Where it helps late, such as pairs to recall
    after some thirty steps, training may let the memory fade first, and `rate=0.5 / hidden_size` is quicker and surer.
    The paper's rate is 0.5, for 20 to 100 units and 11 steps, and does not change.

    The recurrence is one operation of a graph under `torch.compile`, and the fast matrix is formed outside of it, when
    it is read: compiled alone, the layer takes about as long as it is.

    Parameters of layer 0: `weight_ih` [H,D], `weight_hh` [H,H], `bias` [H], `log_rate` [] where the rate is learnt,
    `norm.weight` [H], `norm.bias` [H]; of layer l: the same names with `_l1`, `_l2`, ...

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of hidden units.
        num_layers: the number of layers on top of one another.
        decay: what is left of the fast matrix after a step, 0 to 1.
        rate: how strongly a hidden state is written, not negative, the same for good; None learns it. 0.5 is the
            paper's.
        inner_steps: S, reads of the memory in one step.
        nonlinearity: "relu" or "tanh".
        layer_norm: normalise what is summed in every inner step (eq 5). Without it a state of "relu" may grow until it
            is not finite; one warning says so, on a processor.
        normalize_initial: normalise in front of h_0 too, with the same gain and bias.
        hold_input: add W h(t) + C x(t+1) + b in every inner step. False adds h_s itself in its place, so that the state
            settles under A + I: the paper's method 2 (appendix B). It has no kernel and is slower.
        identity_scale: `weight_hh` starts as this multiple of the identity; None is 1 / sqrt(H), at most 0.25.
        dropout: the probability of dropout on the outputs of every layer but the last.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        impl: "auto", "reference", "cpu" or "triton".
        form: "attention" (over the stored hidden states), "matrix" (the fast matrix is formed), or "auto", the faster.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size, constant, `impl` or `form` is out of range.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.FastWeightsRNN(input_size=10, hidden_size=20)
        >>> y, state = layer(torch.randn(7, 3, 10))          # x [T,B,D]
        >>> y.shape, state.hidden.shape, state.memory.shape  # [T,B,H], [B,H], [B,H,H]
        (torch.Size([7, 3, 20]), torch.Size([3, 20]), torch.Size([3, 20, 20]))
        >>> y, state = layer(torch.randn(5, 3, 10), state)   # continues where the first piece ended
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        decay: float = 0.95,
        rate: float | None = None,
        inner_steps: int = 1,
        nonlinearity: str = "relu",
        layer_norm: bool = True,
        normalize_initial: bool = False,
        hold_input: bool = True,
        identity_scale: float | None = None,
        dropout: float = 0.0,
        batch_first: bool = False,
        impl: str = "auto",
        form: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            decay=decay,
            rate=rate,
            inner_steps=inner_steps,
            nonlinearity=nonlinearity,
            layer_norm=layer_norm,
            normalize_initial=normalize_initial,
            hold_input=hold_input,
            identity_scale=identity_scale,
            impl=impl,
            device=device,
            dtype=dtype,
        )
        check_sizes(num_layers=num_layers)
        check_between(0, 1, dropout=dropout)
        check_choice(FORMS, form=form)
        if dropout > 0 and num_layers == 1:
            words = f"dropout={dropout} acts between layers and does nothing with num_layers=1"
            warnings.warn(words, stacklevel=3)  # of the caller of the constructor that notes the arguments
        self.num_layers, self.dropout, self.batch_first, self.form = num_layers, dropout, batch_first, form
        self._batch_axis = int(num_layers > 1)
        for suffix in self._suffixes()[1:]:
            self._add_layer(suffix, hidden_size, device, dtype)

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: FastWeightsState | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        strengths: Tensor | None = None,
        clears: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, FastWeightsState]:
        """Run over whole sequences.

        With `strengths` and `clears` the layer is told when to store, as the multi-level network of Ba et al. 2016,
        section 4.2. Step t writes h(t-1), the first step `state.hidden`, and strengths[t] scales that
        write. Every layer of a stack has the same.

        Args:
            x: [T,B,D], [B,T,D] with `batch_first`, [T,D] unbatched, or a PackedSequence.
            state: where an earlier piece ended, taken in the dtype of the weights; None starts from zeros.
            lengths: valid steps of each sequence, [B] integers from 0 to T; a sequence of 0 steps keeps its state.
            starts: the steps before which another sequence begins, bool [T,B], [B,T] with `batch_first`, [T] unbatched:
                the state is zeros there, and no gradient goes further back. None is nowhere.
            strengths: what the rate is multiplied by in each step's write, in the form of `starts`, taken in the dtype
                of the weights: 0 stores nothing. None is ones.
            clears: the steps that forget the hidden state once it is written, bool in the form of `starts`: they see it
                in the fast matrix alone. None is nowhere.

        Returns:
            The hidden states in the form of x, zero past each length, and the state after each last valid step.

        Raises:
            ValueError: x, state, lengths, starts, strengths or clears do not fit the layer or one another.
            TypeError: x is no tensor or of another dtype than the weights; state is another layer's; lengths are not an
                integer tensor, or come with a PackedSequence, which has its own; starts or clears are not a tensor of
                bool, or strengths not one of floating point.

        Examples:
            >>> import torch
            >>> from fastweights import nn
            >>> stores = torch.tensor([0.0, 1, 0, 0, 0, 1]).unsqueeze(1).expand(-1, 3)  # [T,B]
            >>> y, state = nn.FastWeightsRNN(10, 20)(torch.randn(6, 3, 10), strengths=stores, clears=stores > 0)
            >>> torch.linalg.matrix_rank(state.memory).tolist()                       # two states were stored
            [2, 2, 2]
        """
        return self._run_sequences(x, state, lengths, starts=starts, strengths=strengths, clears=clears)


class FastWeightsRNNCell(_FastWeights, RecurrentCell[FastWeightsState]):
    """One step of `FastWeightsRNN`, with parameters of the same names (Ba et al. 2016, eq 1 to 5).

    The arguments are those of `FastWeightsRNN`, but for `form`: a single step forms the fast matrix. A `state_dict` of
    a one-layer `FastWeightsRNN` loads into the cell.

    Raises:
        ValueError: a size, constant or `impl` is out of range.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> cell = nn.FastWeightsRNNCell(input_size=10, hidden_size=20)
        >>> state = None
        >>> for x in torch.randn(7, 3, 10):  # x [B,D]
        ...     y, state = cell(x, state)
        >>> y.shape, state.memory.shape      # [B,H], [B,H,H]
        (torch.Size([3, 20]), torch.Size([3, 20, 20]))
    """
