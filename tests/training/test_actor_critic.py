import dataclasses
import functools
import itertools
import math
from typing import Any

import gymnasium
import numpy
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from fastweights.errors import RunError, TrainingError
from fastweights.nn import IRNN, AssociativeLSTM, FastWeightsRNN, FastWeightsRNNCell, GatedFastWeightsRNN
from fastweights.runs import load_checkpoint, save_checkpoint
from fastweights.tasks.catch_environments import CatchVectorEnv
from fastweights.training import ActorCritic, ActorCriticSchedule, RunFolder, Schedule, train_actor_critic

from .helpers import StopAt, StoppedError, records, without_seconds

SCHEDULE = ActorCriticSchedule(
    epochs=2, batch_size=3, learning_rate=0.01, updates=4, steps=5, episodes=6, checkpoint_seconds=0
)


class Walk(gymnasium.Env):
    """Rewards that depend on the action; episodes of a length drawn again that end, or are cut short at six steps."""

    def __init__(self, log=None, observations=None, actions=None):
        self.log = log
        self.observation_space = observations or Box(-1, 1, (2,), numpy.float32)
        self.action_space = actions or Discrete(3, start=5)

    def _see(self):
        return self.np_random.uniform(-1, 1, 2).astype(numpy.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.step_number, self.seen = int(self.np_random.integers(1, 10)), 0, self._see()
        return self.seen, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.step_number += 1
        before, self.seen = self.seen, self._see()
        reward = float((action - 5) * before[0] + self.np_random.normal())
        ends = self.step_number == self.length
        cut = not ends and self.step_number == 6
        if self.log is not None:
            self.log.append((before, int(action) - 5, reward, ends, cut, self.seen))
        return self.seen, reward, ends, cut, {}


def make_policy(environments, core=None, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ActorCritic(environments, FastWeightsRNN(8, 6) if core is None else core())


def walks(count=3, mode=AutoresetMode.NEXT_STEP, logs=None, **spaces):
    logs = logs or [None] * count
    return SyncVectorEnv([functools.partial(Walk, log, **spaces) for log in logs], autoreset_mode=mode)


def loss_of(policy, logs, schedule):
    """The loss of an update, episode by episode: each read alone from its beginning, rewards summed forwards."""
    terms = []
    for log in logs:
        cuts = [0, *(place + 1 for place, step in enumerate(log) if step[3] or step[4]), len(log)]
        for begin, end in itertools.pairwise(cuts):
            episode = log[begin:end]
            if not episode:
                continue
            seen = torch.tensor(numpy.stack([step[0] for step in episode] + [episode[-1][5]])).unsqueeze(1)
            logits, values, _ = policy(seen)
            for t, (_, action, *_) in enumerate(episode):
                rewards = [step[2] for step in episode[t:]]
                after = 0.0 if episode[-1][3] else values[-1, 0].item()
                ours = sum(schedule.discount**k * reward for k, reward in enumerate([*rewards, after]))
                log_p = logits[t, 0].log_softmax(0)
                advantage = ours - values[t, 0]
                terms.append(
                    -log_p[action] * advantage.item()
                    + schedule.value * advantage**2
                    + schedule.entropy * (log_p.exp() * log_p).sum()
                )
    return torch.stack(terms).mean()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("core", [None, lambda: nn.LSTM(8, 6)])
def test_an_update_is_a_step_of_adam_on_the_loss_of_each_episode_alone(tmp_path, mode, core):
    logs: list[list[Any]] = [[] for _ in range(4)]
    schedule = ActorCriticSchedule(
        epochs=1, batch_size=4, learning_rate=0.01, updates=1, steps=30, discount=0.9, entropy=0.1, value=0.3,
        clip_norm=math.inf, episodes=1,
    )  # fmt: skip
    environments = walks(mode=mode, logs=logs)
    policy, plain = make_policy(environments, core), make_policy(environments, core)

    class Stop(StopAt):  # what is played for the scores is not to be logged
        def update(self, step, loss):
            self.logged, self.loss = [list(log) for log in logs], loss
            super().update(step, loss)

    stop = Stop(1)
    with RunFolder(tmp_path, {}) as folder, pytest.raises(StoppedError):
        train_actor_critic(policy, environments, schedule, folder, seed=1, progress=stop)
    played = [step for log in stop.logged for step in log]
    assert {(ends, cut) for *_, ends, cut, _ in played} == {(False, False), (True, False), (False, True)}
    # An action that only begins an episode is no step of it.
    ended = sum(ends or cut for *_, ends, cut, _ in played)
    assert 120 - ended <= len(played) <= 120 if mode is AutoresetMode.NEXT_STEP else len(played) == 120

    loss = loss_of(plain, stop.logged, schedule)
    assert stop.loss == pytest.approx(loss.item(), rel=1e-4)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(dict(policy.named_parameters()), dict(plain.named_parameters()), rtol=1e-3, atol=2e-4)


CORES = {
    "fast weights": None,
    "gated": lambda: GatedFastWeightsRNN(8, 6, slow_inner_size=5),
    "associative": lambda: AssociativeLSTM(8, 6),
    "irnn": lambda: IRNN(8, 6),
    "lstm": lambda: nn.LSTM(8, 6, 2),
}


@pytest.mark.parametrize(
    ("core", "mode"),
    [(core, AutoresetMode.SAME_STEP) for core in CORES] + [("fast weights", AutoresetMode.NEXT_STEP)],
)
def test_a_killed_run_goes_on_to_the_same_curve(tmp_path, core, mode):
    def train(path, progress=None):
        environments = walks(mode=mode)
        policy = make_policy(environments, CORES[core])
        with RunFolder(path, {}) as folder:
            result = train_actor_critic(policy, environments, SCHEDULE, folder, seed=1, progress=progress)
        return result, policy.state_dict()

    whole, weights = train(tmp_path / "whole")
    for step in (2, 6):  # within the first epoch, and within the second
        with pytest.raises(StoppedError):
            train(tmp_path / "broken", StopAt(step))
    checkpoint = tmp_path / "broken" / "checkpoint.pt"
    state = load_checkpoint(checkpoint)
    assert state is not None
    save_checkpoint(checkpoint, state | {"carried": state["carried"][0]})  # as earlier versions wrote it
    resumed, resumed_weights = train(tmp_path / "broken")
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}
    assert without_seconds(tmp_path / "broken") == without_seconds(tmp_path / "whole")
    torch.testing.assert_close(resumed_weights, weights, rtol=0, atol=0)


def test_the_records_say_what_was_played(tmp_path):
    environments = CatchVectorEnv(5, size=6, visible=2)
    schedule = dataclasses.replace(SCHEDULE, batch_size=5, episodes=12)
    with RunFolder(tmp_path, {}) as folder:
        result = train_actor_critic(make_policy(environments), environments, schedule, folder, seed=1)
    epochs = [record for record in records(tmp_path) if record["kind"] == "epoch"]
    assert [record["frames"] for record in epochs] == [100, 200]
    for record in epochs:
        assert -1 <= record["train_return"] <= 1
        assert record["validation_loss"] == -record["validation_return"]
        assert (record["validation_return"] * 15) % 1 == pytest.approx(0)  # 3 games in each of 5: 15 of them
    assert result["validation_loss"] == min(record["validation_loss"] for record in epochs)
    assert result["test_loss"] == -result["test_return"]
    other = CatchVectorEnv(5, size=6, visible=3)
    assert other.observation_space == environments.observation_space


@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1"])
def test_environments_of_gymnasium_are_played(tmp_path, name):
    environments = gymnasium.make_vec(name, num_envs=3)
    with RunFolder(tmp_path, {}) as folder:
        result = train_actor_critic(make_policy(environments), environments, SCHEDULE, folder, seed=1)
    assert result["test_return"] >= (1 if name == "CartPole-v1" else 0)


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        ({"actions": Box(-1, 1, (2,))}, r"actions must be discrete \(Discrete\), got Box"),
        ({"observations": Dict(a=Box(0, 1, (2,)))}, r"observations must be arrays .*\(Box\) or a number .*got Dict"),
    ],
)
def test_actions_and_observations_of_other_kinds_are_refused(tmp_path, spaces, message):
    environments = walks(**spaces)
    with pytest.raises(ValueError, match=message):
        ActorCritic(environments, nn.GRU(8, 6))
    with RunFolder(tmp_path / "run", {}) as folder, pytest.raises(ValueError, match=message):
        train_actor_critic(nn.Linear(1, 1), environments, SCHEDULE, folder, seed=1)


@pytest.mark.parametrize(
    "core",
    [
        nn.LSTM(8, 6, batch_first=True),
        FastWeightsRNN(8, 6, batch_first=True),
        nn.GRU(8, 6, bidirectional=True),
        nn.LSTM(8, 6, proj_size=3),
        FastWeightsRNNCell(8, 6),
        nn.Linear(8, 6),
    ],
    ids=lambda core: str(core).split("\n")[0],
)
def test_layers_that_would_read_something_else_are_refused(core):
    """A layer that is batch first would take the environments for steps, and train."""
    with pytest.raises(
        ValueError, match=r"core must be a recurrent layer .* and without batch_first, got .*8"
    ) as refusal:
        ActorCritic(walks(), core)
    assert "\n" not in str(refusal.value)


def test_other_environments_are_refused_before_they_are_played(tmp_path):
    environments = walks()
    policy = make_policy(environments)
    with RunFolder(tmp_path / "run", {}) as folder:
        with pytest.raises(TypeError, match=r"must be a vector environment \(gymnasium.make_vec\), got <.*Walk"):
            train_actor_critic(policy, Walk(), SCHEDULE, folder, seed=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"there must be 3 environments \(batch_size\), got 2"):
            train_actor_critic(policy, walks(2), SCHEDULE, folder, seed=1)
        with pytest.raises(ValueError, match=r"must restart by themselves, .* got AutoresetMode.DISABLED"):
            train_actor_critic(policy, walks(mode=AutoresetMode.DISABLED), SCHEDULE, folder, seed=1)
        with pytest.raises(TypeError, match="schedule must be an ActorCriticSchedule"):
            train_actor_critic(policy, environments, Schedule(epochs=1), folder, seed=1)  # type: ignore[arg-type]
        assert not (tmp_path / "run" / "checkpoint.pt").exists()
        train_actor_critic(policy, environments, SCHEDULE, folder, seed=1)
    lake = gymnasium.make_vec("FrozenLake-v1", num_envs=3)
    with RunFolder(tmp_path / "run", {}) as folder, pytest.raises(RunError, match="environments was Box"):
        train_actor_critic(policy, lake, SCHEDULE, folder, seed=1)


def test_a_policy_with_values_of_another_shape_is_refused(tmp_path):
    """With as many steps as environments they would be summed with the rewards, to something else."""

    class Policy(ActorCritic):
        def forward(self, observations, state=None, *, starts=None):
            logits, values, state = super().forward(observations, state, starts=starts)
            return logits, values.unsqueeze(2), state

    environments = walks()
    schedule = dataclasses.replace(SCHEDULE, steps=3)
    message = r"logits \[T,B,A\] and values \[T,B\], here \(1, 3, 3\) and \(1, 3\), got \(1, 3, 3\) and \(1, 3, 1\)"
    with RunFolder(tmp_path, {}) as folder, pytest.raises(ValueError, match=message):
        train_actor_critic(Policy(environments, nn.GRU(8, 6)), environments, schedule, folder, seed=1)


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_not_finite_is_refused(tmp_path, what):
    class Broken(Walk):
        def step(self, action):
            seen, reward, *others = super().step(action)
            if self.step_number == 3:
                if what == "reward":
                    reward = math.inf
                else:
                    seen = seen * math.nan
            return seen, reward, *others

    environments = SyncVectorEnv([Broken] * 3)
    with RunFolder(tmp_path, {}) as folder, pytest.raises(TrainingError, match=f"{what} that (is|holds) NaN"):
        train_actor_critic(make_policy(environments), environments, SCHEDULE, folder, seed=1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"updates": 0}, "updates must be an integer of at least 1, got 0"),
        ({"discount": 1.5}, r"discount must lie between 0 and 1, got 1\.5"),
        ({"entropy": -0.1}, r"entropy must be finite and not negative, got -0\.1"),
    ],
)
def test_a_schedule_out_of_range_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        ActorCriticSchedule(epochs=1, **setting)
