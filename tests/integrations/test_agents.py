"""Our layers inside torchrl and sb3-contrib, against the layers themselves; skipped where these are not installed."""

import doctest
import functools
import importlib
import warnings
from typing import Any

import numpy
import pytest
import torch

from fastweights.nn import IRNN, FastWeightProgrammer, FastWeightsRNN, GatedFastWeightsRNN

# These packages take many seconds to import, and are seldom installed.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYERS: dict[str, Any] = {
    "fast weights": functools.partial(FastWeightsRNN, hidden_size=5),
    "gated": functools.partial(GatedFastWeightsRNN, hidden_size=5, slow_inner_size=4),
    "programmer": functools.partial(FastWeightProgrammer, num_heads=1),  # its outputs are as many as its inputs
}


def module_of(name, *packages):
    """A module that needs these packages, whose own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in packages:
            pytest.importorskip(package)
        return importlib.import_module(f"fastweights.integrations.{name}")


@pytest.fixture
def torchrl_module():
    return module_of("torchrl", "torchrl", "tensordict")


@pytest.fixture
def recurrent_ppo():
    return module_of("sb3", "sb3_contrib")


@pytest.mark.parametrize(("name", "packages"), [("torchrl", ("torchrl", "tensordict")), ("sb3", ("sb3_contrib",))])
def test_the_examples_run(name, packages):
    assert doctest.testmod(module_of(name, *packages)).failed == 0


@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_of_torchrl_is_its_layer_in_both_modes(torchrl_module, layer):
    from tensordict import TensorDict
    from torchrl.modules import set_recurrent_mode

    torch.manual_seed(0)
    module = torchrl_module.RecurrentModule(LAYERS[layer](3).double(), "observation", "embedding", state_key="state")
    x, begins = torch.randn(2, 7, 3, dtype=torch.float64), torch.zeros(2, 7, 1, dtype=torch.bool)
    begins[:, 0] = begins[1, 4] = True
    expected, end = module.layer(x.transpose(0, 1), starts=begins.squeeze(2).T)
    expected = expected.transpose(0, 1)

    episodes = TensorDict({"observation": x, "is_init": begins}, [2, 7])
    with set_recurrent_mode(True):
        torch.testing.assert_close(module(episodes)["embedding"], expected)
    last = [episodes["next", name][:, -1] for name in module.shapes]
    torch.testing.assert_close(last, [*end])

    state: dict[str, Any] = {}
    for step in range(7):  # as an environment is played
        now = TensorDict({"observation": x[:, step], "is_init": begins[:, step], **state}, [2])
        torch.testing.assert_close(module(now)["embedding"], expected[:, step])
        state = {name: now["next", name] for name in module.shapes}


def test_a_policy_of_torchrl_plays_and_its_states_are_primed(torchrl_module):
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.envs import GymEnv, InitTracker, TransformedEnv
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor

    module = torchrl_module.RecurrentModule(FastWeightsRNN(4, 6), "observation", "embedding")
    environment = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    environment = environment.append_transform(module.make_tensordict_primer())
    head = TensorDictModule(MLP(6, 2, num_cells=[]), in_keys=["embedding"], out_keys=["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(module, head), in_keys=["logits"], distribution_class=OneHotCategorical
    )
    rollout = environment.rollout(6, policy, break_when_any_done=False)
    assert rollout["recurrent_memory"].shape == (6, 6, 6)
    assert not rollout["recurrent_memory"][0].any()
    torch.testing.assert_close(rollout["recurrent_hidden"][1:], rollout["next", "recurrent_hidden"][:-1])


@pytest.mark.parametrize("layer", ["fast weights", "gated"])
def test_recurrent_ppo_reads_whole_sequences_as_it_has_played_them(recurrent_ppo, layer):
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    from fastweights.tasks.catch_environments import CatchEnv

    games = make_vec_env(lambda: CatchEnv(5, 2), 3)
    agent = RecurrentPPO(
        recurrent_ppo.RecurrentPolicy, games, policy_kwargs={"layer": LAYERS[layer]}, n_steps=10, batch_size=30, seed=1
    )
    _, callback = agent._setup_learn(30)
    agent.collect_rollouts(games, callback, agent.rollout_buffer, 10)
    before = [parameter.clone() for parameter in agent.policy.lstm_actor.parameters()]
    (whole,) = agent.rollout_buffer.get(30)
    values, log_p, _ = agent.policy.evaluate_actions(
        whole.observations, whole.actions.long().flatten(), whole.lstm_states, whole.episode_starts
    )
    kept = whole.mask > 0
    torch.testing.assert_close(values.flatten()[kept], whole.old_values[kept])
    torch.testing.assert_close(log_p[kept], whole.old_log_prob[kept])

    agent.train()
    after = list(agent.policy.lstm_actor.parameters())
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
    observation, state = games.reset(), None
    for _ in range(3):
        actions, state = agent.predict(observation, state, episode_start=numpy.zeros(3))
        assert actions.shape == (3,)


def test_sizes_of_an_lstm_and_a_layer_that_is_made_already_are_refused(recurrent_ppo):
    from gymnasium.spaces import Box, Discrete

    spaces = Box(-1, 1, (3,)), Discrete(2)
    with pytest.raises(TypeError, match=r"n_lstm_layers: `layer` sets the sizes"):
        recurrent_ppo.RecurrentPolicy(*spaces, lambda _: 1e-3, n_lstm_layers=2)
    with pytest.raises(ValueError, match=r"equally many outputs .* got 64 for 64 and 128 for 128 features"):
        recurrent_ppo.RecurrentPolicy(*spaces, lambda _: 1e-3, layer=LAYERS["programmer"])
    with pytest.raises(TypeError, match=r"layer must be a function of the number of features, .* got a FastWeightsRNN"):
        recurrent_ppo.RecurrentPolicy(*spaces, lambda _: 1e-3, layer=FastWeightsRNN(3, 5))


@pytest.mark.parametrize(
    "layer",
    [IRNN(3, 5), FastWeightsRNN(3, 5, 2), FastWeightsRNN(3, 5, batch_first=True)],
    ids=lambda layer: str(layer).split("\n")[0],
)
def test_layers_with_states_of_another_kind_are_refused(torchrl_module, recurrent_ppo, layer):
    with pytest.raises(ValueError, match=r"layer must be a single layer of fastweights\.nn, time first, got"):
        torchrl_module.RecurrentModule(layer, "observation", "embedding")
    from gymnasium.spaces import Box, Discrete

    spaces = Box(-1, 1, (3,)), Discrete(2)
    with pytest.raises(ValueError, match=r"layer must be a single layer of fastweights\.nn, time first, got"):
        recurrent_ppo.RecurrentPolicy(*spaces, lambda _: 1e-3, layer=lambda features: layer)
