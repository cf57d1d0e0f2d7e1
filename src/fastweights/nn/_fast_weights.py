"""What the fast-weights layer and its cell share: the state, the parameters of a layer and one layer's run."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn._sequences import check_state_shapes
from fastweights.nn._state import FastWeightsState, Unformed
from fastweights.ops.associative import (
    FORMS,
    IMPLEMENTATIONS,
    Constants,
    associative,
    associative_with_memory,
    final_memory,
)
from fastweights.ops.autocast import autocast_is_on, without_autocast


class FastWeights(nn.Module):
    """Parameters and one layer's run, shared by the layer and the cell."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        constants: Constants,
        *,
        layer_norm: bool,
        identity_scale: float,
        impl: str,
        form: str = "auto",
    ) -> None:
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        if not math.isfinite(identity_scale):
            raise ValueError(f"identity_scale must be finite, got {identity_scale}")
        self.constants = constants
        self.input_size, self.hidden_size = input_size, hidden_size
        self.layer_norm, self.identity_scale = layer_norm, identity_scale
        self.impl, self.form = impl, form

    def _add_layer(self, suffix: str, input_size: int, device: Any, dtype: Any) -> None:
        size = self.hidden_size
        shapes = {"weight_ih": (size, input_size), "weight_hh": (size, size), "bias": (size,)}
        for name, shape in shapes.items():
            self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        norm = nn.LayerNorm(size, device=device, dtype=dtype) if self.layer_norm else None
        self.register_module("norm" + suffix, norm)

    def _reset_layer(self, suffix: str) -> None:
        bound = 1 / math.sqrt(self.hidden_size)  # fan-out: the number of outgoing weights (appendix A.1)
        nn.init.uniform_(getattr(self, "weight_ih" + suffix), -bound, bound)
        with torch.no_grad():
            nn.init.eye_(getattr(self, "weight_hh" + suffix)).mul_(self.identity_scale)
        nn.init.zeros_(getattr(self, "bias" + suffix))
        if self.layer_norm:
            getattr(self, "norm" + suffix).reset_parameters()

    def _run_layer(
        self, suffix: str, x: Tensor, state: FastWeightsState | None, lengths: Tensor | None
    ) -> tuple[Tensor, FastWeightsState]:
        weight_hh = getattr(self, "weight_hh" + suffix)
        drive = F.linear(x, getattr(self, "weight_ih" + suffix), getattr(self, "bias" + suffix))
        device = x.device.type
        if not autocast_is_on(device):
            return self._recur(suffix, drive, state, lengths)
        # The products over time run in the autocast dtype; the recurrence and its state keep the weights' own.
        with without_autocast(device):
            outputs, state = self._recur(suffix, drive.to(weight_hh.dtype), state, lengths)
        return outputs.to(drive.dtype), state

    def _recur(
        self, suffix: str, drive: Tensor, state: FastWeightsState | None, lengths: Tensor | None
    ) -> tuple[Tensor, FastWeightsState]:
        norm = getattr(self, "norm" + suffix)
        if state is None:
            hidden, memory = drive.new_zeros(drive.shape[1:]), None
        else:
            hidden, memory = state.hidden.to(drive.dtype), state.memory.to(drive.dtype)
        arguments: dict[str, Any] = {
            "norm_weight": norm.weight if norm is not None else None,
            "norm_bias": norm.bias if norm is not None else None,
            "lengths": lengths,
            "constants": self.constants,
            "impl": self.impl,
            "form": self.form,
        }
        inputs = (drive, getattr(self, "weight_hh" + suffix), hidden, memory)
        # A single step is part of a loop, whose next step wants the memory, and a compiled graph takes no promise.
        # Inference mode does not count the changes that would break one: there a copy of the outputs is kept, and a
        # stream, whose memory would have to be copied too, goes on at once.
        compiling = torch.compiler.is_compiling()
        inference = not compiling and torch.is_inference_mode_enabled()  # Dynamo cannot trace the question
        at_once = drive.shape[0] == 1 or compiling or (inference and memory is not None)
        final: Any
        if at_once:
            outputs, final = associative_with_memory(*inputs, **arguments)
        else:
            outputs = associative(*inputs, **arguments)
            constants = self.constants
            kept = outputs.clone() if inference else outputs

            def form() -> Tensor:
                with without_autocast(drive.device.type):
                    return final_memory(kept, hidden, memory, lengths, constants)

            final = Unformed(form, *(() if inference else (outputs, hidden, memory, lengths)))
        last = outputs[-1].clone()
        if lengths is not None:
            index = (lengths - 1).clamp(min=0).view(1, -1, 1).expand(1, -1, self.hidden_size)
            last = torch.where((lengths > 0).unsqueeze(1), outputs.gather(0, index).squeeze(0), hidden)
        return outputs, FastWeightsState(last, final)

    def _describe(self) -> str:
        c = self.constants
        parts = [f"{self.input_size}, {self.hidden_size}, decay={c.decay}, rate={c.rate}"]
        parts += [f"inner_steps={c.inner_steps}"] * (c.inner_steps != 1)
        parts += [f"nonlinearity={c.nonlinearity!r}"] * (c.nonlinearity != "relu")
        parts += ["layer_norm=False"] * (not self.layer_norm)
        parts += ["normalize_initial=True"] * c.normalize_initial
        parts += [f"impl={self.impl!r}"] * (self.impl != "auto")
        parts += [f"form={self.form!r}"] * (self.form != "auto")
        return ", ".join(parts)


def check_state(state: FastWeightsState, leading: tuple[int, ...], size: int) -> FastWeightsState:
    state = FastWeightsState(*state)  # a plain pair is welcome
    check_state_shapes(state, hidden=(*leading, size), memory=(*leading, size, size))
    return state
