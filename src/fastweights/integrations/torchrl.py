"""The layers of `fastweights.nn` inside torchrl (`pip install torchrl`), used like its `LSTMModule`."""

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import recurrent_mode

from fastweights.nn.state_parts import parts_of


class RecurrentModule(TensorDictModuleBase):  # type: ignore[misc]
    """A recurrent layer of `fastweights.nn` as a module of torchrl: `is_init` says where its sequences restart.

    As with `torchrl.modules.LSTMModule`, a TensorDict [...] is a single step, and within `set_recurrent_mode(True)` the
    last axis of a TensorDict [...,T] is time: the state of its first step is read, that after its last step written.
    Each part of the state has a key of its own, named by `state_key`.

    Args:
        layer: the layer, time first and of a single layer.
        in_key: the key that is read, [...,D].
        out_key: the key that is written, [...,H].
        state_key: what the keys of the state begin with: `recurrent_hidden`, `recurrent_memory`.

    Raises:
        ValueError: the layer's state is not that of a single layer of `fastweights.nn`, or it is batch first.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import set_recurrent_mode
        >>> from fastweights.nn import FastWeightsRNN
        >>> from fastweights.integrations.torchrl import RecurrentModule
        >>> module = RecurrentModule(FastWeightsRNN(3, 5), "observation", "embedding")
        >>> begins = torch.zeros(2, 7, 1, dtype=torch.bool)
        >>> episodes = TensorDict({"observation": torch.randn(2, 7, 3), "is_init": begins}, [2, 7])
        >>> with set_recurrent_mode(True):
        ...     embedding = module(episodes)["embedding"]
        >>> embedding.shape, module(episodes[:, 0])["next", "recurrent_memory"].shape
        (torch.Size([2, 7, 5]), torch.Size([2, 5, 5]))
    """

    def __init__(self, layer: nn.Module, in_key: Any, out_key: Any, *, state_key: str = "recurrent") -> None:
        super().__init__()
        self.layer = layer
        self.state_type, shapes = parts_of(layer)
        self.shapes = {f"{state_key}_{name}": shape for name, shape in shapes.items()}
        self.in_keys = [in_key, *self.shapes, "is_init"]
        self.out_keys = [out_key, *(("next", name) for name in self.shapes)]

    def make_tensordict_primer(self) -> Any:
        """Return the transform that gives an environment the keys of the state, zeros at first."""
        return TensorDictPrimer(
            {name: Unbounded(shape=shape) for name, shape in self.shapes.items()}, expand_specs=True
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the outputs and the next state into a TensorDict, [...] or [...,T] in recurrent mode."""
        shape = tensordict.shape
        steps = shape[-1] if recurrent_mode() else 1
        x = tensordict[self.in_keys[0]].reshape(-1, steps, self.layer.input_size).transpose(0, 1)
        starts = tensordict["is_init"].reshape(-1, steps).t()
        parts = [tensordict.get(name, None) for name in self.shapes]
        state = None
        if all(part is not None for part in parts):
            flat = zip(parts, self.shapes.values(), strict=True)
            state = self.state_type(*(part.reshape(-1, steps, *own)[:, 0] for part, own in flat))
        y, state = self.layer(x, state, starts=starts)
        tensordict.set(self.out_keys[0], y.transpose(0, 1).reshape(*shape, -1))
        for name, part in zip(self.shapes, state, strict=True):
            # All steps have the key; where no sequence begins it holds zeros, as with LSTMModule.
            every = part.unsqueeze(1)
            if steps > 1:
                every = torch.cat((every.new_zeros(1).expand(len(part), steps - 1, *part.shape[1:]), every), 1)
            tensordict.set(("next", name), every.reshape(*shape, *part.shape[1:]))
        return tensordict
