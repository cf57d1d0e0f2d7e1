"""The layers of `fastweights.nn` inside the recurrent PPO of sb3-contrib (`pip install sb3-contrib`)."""

from collections.abc import Callable
from typing import Any

import torch
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn import FastWeightsRNN
from fastweights.nn.state_parts import parts_of

Halves = tuple[Tensor, Tensor]


class RecurrentPolicy(RecurrentActorCriticPolicy):  # type: ignore[misc]
    """A policy for `sb3_contrib.RecurrentPPO` with a layer of `fastweights.nn` in place of its LSTM.

    Actor and critic have a layer each, as its own policy has, and all other arguments are its own. The states of all
    steps of a rollout are stored: with fast weights `hidden_size` squared numbers a step and environment.

    Args:
        layer: called with the number of features, returns the recurrent layer, time first and of a single layer.

    Raises:
        TypeError: `layer` is no such function, or sizes of an LSTM are given beside it.
        ValueError: the layer's state is not that of a single layer of `fastweights.nn`, it is batch first, or it has as
            many outputs as features, as `FastWeightProgrammer` has.

    Examples:
        >>> import functools
        >>> from sb3_contrib import RecurrentPPO
        >>> from fastweights.nn import FastWeightsRNN
        >>> from fastweights.tasks.catch_environments import CatchEnv
        >>> from fastweights.integrations.sb3 import RecurrentPolicy
        >>> settings = {"layer": functools.partial(FastWeightsRNN, hidden_size=32)}
        >>> agent = RecurrentPPO(RecurrentPolicy, CatchEnv(8, 2), policy_kwargs=settings, n_steps=64, batch_size=64)
        >>> agent = agent.learn(128)
        >>> observation, _ = CatchEnv(8, 2).reset(seed=1)
        >>> action, state = agent.predict(observation)
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        lr_schedule: Any,
        *args: Any,
        layer: Callable[[int], nn.Module] = lambda features: FastWeightsRNN(features, 64),
        **options: Any,
    ) -> None:
        if isinstance(layer, nn.Module) or not callable(layer):
            right = "such as functools.partial(FastWeightsRNN, hidden_size=64)"
            raise TypeError(
                f"layer must be a function of the number of features, {right}, got a {type(layer).__name__}"
            )
        if given := sorted({"lstm_hidden_size", "n_lstm_layers", "lstm_kwargs"} & options.keys()):
            raise TypeError(f"remove {', '.join(given)}: `layer` sets the sizes")
        size, other = (
            getattr(layer(features), "hidden_size", 1) for features in (64, 128)
        )  # _Halved refuses one without
        if size != other:
            raise ValueError(
                "layer must have equally many outputs whatever the number of features, which are not known so early, "
                f"got {size} for 64 and {other} for 128 features"
            )
        super().__init__(observation_space, action_space, lr_schedule, *args, lstm_hidden_size=size, **options)
        self.lstm_actor = _Halved(layer(self.features_dim))
        if self.enable_critic_lstm:
            self.lstm_critic = _Halved(layer(self.features_dim))
        self.lstm_hidden_state_shape = (1, 1, self.lstm_actor.hidden_size)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: Halves, episode_starts: Tensor, lstm: "_Halved"
    ) -> tuple[Tensor, Halves]:
        sequences = lstm_states[0].shape[1]
        x = features.reshape(sequences, -1, lstm.input_size).transpose(0, 1)
        starts = episode_starts.reshape(sequences, -1).t().bool()
        y, halves = lstm(x, lstm_states, starts)
        return y.transpose(0, 1).flatten(0, 1), halves


class _Halved(nn.Module):
    """A layer whose state is two tensors [1,B,S/2], as an LSTM's: sb3-contrib stores no other."""

    num_layers = 1

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.input_size = layer, int(layer.input_size)  # type: ignore[arg-type]
        self.state_type, shapes = parts_of(layer)
        self.shapes = list(shapes.values())
        self.sizes = [shape.numel() for shape in self.shapes]
        self.hidden_size = -(-sum(self.sizes) // 2)  # size of half a state

    def forward(self, x: Tensor, halves: Halves, starts: Tensor) -> tuple[Tensor, Halves]:
        parts = torch.cat(halves, 2)[0, :, : sum(self.sizes)].split_with_sizes(self.sizes, 1)
        state = self.state_type(*(part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)))
        y, state = self.layer(x, state, starts=starts)
        flat = torch.cat([part.flatten(1) for part in state], 1)
        flat = F.pad(flat, (0, 2 * self.hidden_size - flat.shape[1])).unsqueeze(0)
        first, second = flat.chunk(2, 2)
        return y, (first.contiguous(), second.contiguous())
