import dataclasses
import functools
import inspect
import itertools
import math
from typing import Any

import gymnasium
import numpy
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from fastweights import nn as layers
from fastweights.errors import RunError, TrainingError, WeightsError
from fastweights.nn import FastWeightsRNN, FastWeightsRNNCell
from fastweights.nn.state_parts import takes_starts
from fastweights.runs import load_checkpoint, save_checkpoint
from fastweights.tasks.catch_environments import CatchVectorEnv
from fastweights.training import ActorCritic, ActorCriticSchedule, RunFolder, Schedule, play, train_actor_critic
from fastweights.training._actions import actions_of

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
        reward = float(numpy.sum(numpy.asarray(action) - 5) * before[0] + self.np_random.normal())
        ends = self.step_number == self.length
        cut = not ends and self.step_number == 6
        if self.log is not None:
            self.log.append((before, action, reward, ends, cut, self.seen))
        return self.seen, reward, ends, cut, {}


def make_policy(environments, core=None, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ActorCritic(environments, FastWeightsRNN(8, 6) if core is None else core())


def walks(count=3, mode=AutoresetMode.NEXT_STEP, logs=None, **spaces):
    logs = logs or [None] * count
    return SyncVectorEnv([functools.partial(Walk, log, **spaces) for log in logs], autoreset_mode=mode)


def weigh(space, logits, action):
    """The log probability of an action and the entropy, by torch's own distributions."""
    if isinstance(space, Box):
        means, log_deviations = logits.chunk(2)
        parts = torch.distributions.Normal(means, log_deviations.exp())
        return parts.log_prob(torch.as_tensor(action.flatten())).sum(), parts.entropy().sum()
    starts, counts = (space.start, space.nvec) if isinstance(space, MultiDiscrete) else ([space.start], [space.n])
    log_p, entropy = torch.zeros(()), torch.zeros(())
    for some, chosen in zip(logits.split(list(counts)), numpy.atleast_1d(action) - starts, strict=True):
        part = torch.distributions.Categorical(logits=some)
        log_p, entropy = log_p + part.log_prob(torch.tensor(chosen)), entropy + part.entropy()
    return log_p, entropy


def loss_of(policy, logs, schedule, space):
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
                log_p, entropy = weigh(space, logits[t, 0], action)
                advantage = ours - values[t, 0]
                terms.append(-log_p * advantage.item() + schedule.value * advantage**2 - schedule.entropy * entropy)
    return torch.stack(terms).mean()


ACTIONS = {
    "a choice": Discrete(3, start=5),
    "choices": MultiDiscrete([2, 3], start=[5, 4]),
    "numbers": Box(-numpy.inf, numpy.inf, (2,)),
}


@pytest.mark.parametrize(
    ("mode", "core", "actions"),
    [
        *itertools.product(
            (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP), (None, lambda: nn.LSTM(8, 6)), ("a choice",)
        ),
        (AutoresetMode.NEXT_STEP, lambda: layers.FastWeightProgrammer(8, 2), "choices"),
        (AutoresetMode.SAME_STEP, lambda: layers.FastWeightProgrammer(8, 2, convolution=0), "numbers"),
    ],
)
def test_an_update_is_a_step_of_adam_on_the_loss_of_each_episode_alone(tmp_path, mode, core, actions):
    logs: list[list[Any]] = [[] for _ in range(4)]
    schedule = ActorCriticSchedule(
        epochs=1, batch_size=4, learning_rate=0.01, updates=1, steps=30, discount=0.9, entropy=0.1, value=0.3,
        clip_norm=math.inf, episodes=1,
    )  # fmt: skip
    environments = walks(mode=mode, logs=logs, actions=ACTIONS[actions])
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

    loss = loss_of(plain, stop.logged, schedule, ACTIONS[actions])
    assert stop.loss == pytest.approx(loss.item(), rel=1e-4)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(dict(policy.named_parameters()), dict(plain.named_parameters()), rtol=1e-3, atol=2e-4)


class Steady(gymnasium.Env):
    """A reward of 1 for each of two steps; then the episode is cut short, or ends."""

    observation_space, action_space = Box(-1, 1, (1,)), Discrete(1)

    def __init__(self, cut):
        self.cut = cut

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return numpy.zeros(1, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        done = self.steps == 2
        return numpy.zeros(1, numpy.float32), 1.0, done and not self.cut, done and self.cut, {}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(("cut", "returns"), [(True, (3.25, 4.5)), (False, (1.5, 1.0))])
def test_an_episode_that_is_cut_short_ends_with_a_value_and_one_that_ends_with_none(tmp_path, mode, cut, returns):
    """With a value of 7 everywhere and a discount of one half: 1 + 7/2 = 4.5 and 1 + 4.5/2 = 3.25; or 1 and 1 + 1/2."""
    environments = SyncVectorEnv([functools.partial(Steady, cut)], autoreset_mode=mode)
    policy = make_policy(environments)
    with torch.no_grad():
        policy.value.weight.zero_()
        policy.value.bias.fill_(7.0)
    schedule = ActorCriticSchedule(
        epochs=1, batch_size=1, learning_rate=0.01, updates=1, steps=2, discount=0.5, value=1.0, episodes=1
    )

    class Stop(StopAt):
        def update(self, step, loss):
            self.loss = loss
            super().update(step, loss)

    stop = Stop(1)
    with RunFolder(tmp_path, {}) as folder, pytest.raises(StoppedError):
        train_actor_critic(policy, environments, schedule, folder, seed=1, progress=stop)
    # Of a single action log p and the entropy are 0.
    assert stop.loss == pytest.approx(sum((ours - 7) ** 2 for ours in returns) / 2)


CORES = {
    "FastWeightsRNN": None,
    "GatedFastWeightsRNN": lambda: layers.GatedFastWeightsRNN(8, 6, slow_inner_size=5),
    "DeltaFastWeightsRNN": lambda: layers.DeltaFastWeightsRNN(8, 6, 2),
    "FastWeightProgrammer": lambda: layers.FastWeightProgrammer(8, 2),
    "AssociativeLSTM": lambda: layers.AssociativeLSTM(8, 6),
    "HyperLSTM": lambda: layers.HyperLSTM(8, 6, hyper_hidden_size=4, hyper_embedding_size=2),
    "IRNN": lambda: layers.IRNN(8, 6),
    "LSTM": lambda: nn.LSTM(8, 6, 2),
    "GRU": lambda: nn.GRU(8, 6),
}


def test_every_recurrent_layer_is_tried_as_a_core():
    """A layer that joins the library joins CORES."""
    recurrent = {
        name
        for name in layers.__all__
        if isinstance(kind := getattr(layers, name), type)
        and issubclass(kind, nn.Module)
        and {"starts", "lengths"} <= set(inspect.signature(kind.forward).parameters)
        and not issubclass(kind, layers.LSTMLanguageModel)  # of words
    }
    assert recurrent == set(CORES) - {"LSTM", "GRU"}
    for name in recurrent:
        core = (CORES[name] or (lambda: FastWeightsRNN(8, 6)))()
        assert type(core).__name__ == name
        assert takes_starts(core)


@pytest.mark.parametrize(
    ("core", "mode"),
    [(core, AutoresetMode.SAME_STEP) for core in CORES] + [("FastWeightsRNN", AutoresetMode.NEXT_STEP)],
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
        ({"actions": MultiBinary(3)}, r"actions must be a choice \(Discrete\), several .* numbers \(Box\), got MultiB"),
        ({"actions": Box(0, 9, (2,), numpy.int64)}, r"actions must be .* floating numbers \(Box\), got Box"),
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
        train_actor_critic(make_policy(lake), lake, SCHEDULE, folder, seed=1)


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


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("core", CORES)
def test_a_policy_is_saved_and_plays_on_as_it_did(tmp_path, core, actions):
    environments = walks(actions=ACTIONS[actions])
    policy = make_policy(environments, CORES[core])
    policy.save_pretrained(tmp_path)
    again = ActorCritic.from_pretrained(tmp_path)
    assert again.environments == policy.environments
    assert type(again.core) is type(policy.core)
    observations = torch.randn(5, 3, 2)
    for ours, theirs in zip(again(observations)[:2], policy(observations)[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    played = []
    for one in (policy, again):
        torch.manual_seed(3)
        played.append(play(one, environments, 4, seed=1))
    assert played[0].returns.tolist() == played[1].returns.tolist()


@pytest.mark.parametrize(
    ("observations", "highest"),
    [(Box(0, 255, (2, 4, 3), numpy.uint8), 255), (Box(-9, 9, (3,), numpy.int64), 1), (Discrete(5, start=2), 1)],
)
def test_a_saved_policy_reads_observations_as_before(tmp_path, observations, highest):
    environments = walks(observations=observations)
    policy = make_policy(environments)
    assert policy.scale == pytest.approx(1 / highest)
    policy.save_pretrained(tmp_path)
    seen = torch.from_numpy(numpy.stack([[observations.sample() for _ in range(2)] for _ in range(3)]))
    again = ActorCritic.from_pretrained(tmp_path)
    torch.testing.assert_close(again(seen)[0], policy(seen)[0], rtol=0, atol=0)


def test_a_core_of_another_kind_is_not_saved_in_silence(tmp_path):
    class Own(nn.GRU):
        """A user's, which nobody can build again."""

    with pytest.raises(WeightsError, match=r"core of this ActorCritic is a Own.* or an LSTM, GRU or RNN of torch\.nn"):
        ActorCritic(walks(), Own(8, 6)).save_pretrained(tmp_path)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_what_is_played_is_what_the_environments_gave(mode):
    logs: list[list[Any]] = [[] for _ in range(3)]
    environments = walks(mode=mode, logs=logs)
    policy = make_policy(environments).train()
    played = play(policy, environments, 11, seed=5)
    assert policy.training
    ended: list[list[tuple[float, int]]] = []
    for log in logs:
        cuts = [0, *(place + 1 for place, step in enumerate(log) if step[3] or step[4])]
        ended.append([(sum(step[2] for step in log[a:b]), b - a) for a, b in itertools.pairwise(cuts)])
    expected = sorted(episode for episodes, count in zip(ended, (4, 4, 3), strict=True) for episode in episodes[:count])
    assert len(played.returns) == len(played.lengths) == 11
    ours = sorted(zip(played.returns.tolist(), played.lengths.tolist(), strict=True))
    assert [length for _, length in ours] == [length for _, length in expected]
    assert [total for total, _ in ours] == pytest.approx([total for total, _ in expected])
    assert 1 <= min(played.lengths) <= max(played.lengths) <= 6


def test_the_likeliest_actions_are_the_same_every_time():
    for actions in ACTIONS.values():
        environments = walks(actions=actions)
        policy = make_policy(environments)
        one, two = (play(policy, environments, 6, likeliest=True, seed=2).returns.tolist() for _ in range(2))
        assert one == two
        torch.manual_seed(0)
        assert play(policy, environments, 6, seed=2).returns.tolist() != one


def test_environments_that_a_policy_was_not_made_for_are_refused(tmp_path):
    policy = make_policy(walks())
    other = walks(actions=Discrete(4))
    message = r"policy was made for .*'choices': \[3\].* the environments have .*'choices': \[4\]"
    with pytest.raises(ValueError, match=message):
        play(policy, other, 2)
    with RunFolder(tmp_path, {}) as folder, pytest.raises(ValueError, match=message):
        train_actor_critic(policy, other, SCHEDULE, folder, seed=1)
    with pytest.raises(ValueError, match="episodes must be an integer of at least 1, got 0"):
        play(policy, walks(), 0)
    with pytest.raises(TypeError, match="must be a vector environment"):
        play(policy, Walk(), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("space", "drawn", "taken"),
    [
        (Box(numpy.array([[-2, 0]]), numpy.array([[2, 10]]), dtype=numpy.float64), [0.5, -0.5], [[1, 2.5]]),
        (Box(numpy.array([[-2, 0]]), numpy.array([[2, 10]]), dtype=numpy.float64), [9, -9], [[2, 0]]),
        (Box(-3, numpy.inf, (2,)), [0.5, -9], [0.5, -3]),
        (Box(-3, 1, (2,)), [math.nan, 1], [-1, 1]),
        (Box(-1e38, 1e38, ()), [1], 1e38),
        (MultiDiscrete(numpy.array([[3, 2]]), start=numpy.array([[1, -1]])), [2, 1], [[3, 0]]),
    ],
)
def test_actions_reach_the_environments_in_their_own_units_and_bounds(space, drawn, taken):
    kind = actions_of(space)
    actions = torch.tensor([drawn] * 2)
    found = kind.as_environments_want(actions.long() if isinstance(space, MultiDiscrete) else actions.float())
    numpy.testing.assert_allclose(found, numpy.array([taken] * 2), rtol=1e-6)
    assert space.contains(numpy.asarray(found[0]))


class Echo(gymnasium.Env):
    """What was seen at first is to be said in the second step: the reward is less the further away it is."""

    def __init__(self, actions):
        self.observation_space, self.action_space = Box(-1, 1, (2,)), actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.said, self.steps = self.np_random.choice([-1.0, 1.0], 2), 0
        return self.said.astype(numpy.float32), {}

    def step(self, action):
        self.steps += 1
        right = self.said if isinstance(self.action_space, Box) else (self.said > 0)
        reward = -float(numpy.abs(right - action).mean()) if self.steps == 2 else 0.0
        return numpy.zeros(2, numpy.float32), reward, self.steps == 2, False, {}


@pytest.mark.parametrize("actions", [MultiDiscrete([2, 2]), Box(-2, 2, (2,))], ids=["choices", "numbers"])
def test_an_agent_learns_to_remember_with_choices_and_with_numbers(tmp_path, actions):
    environments = SyncVectorEnv([functools.partial(Echo, actions)] * 32, autoreset_mode=AutoresetMode.SAME_STEP)
    torch.manual_seed(0)
    policy = ActorCritic(environments, layers.FastWeightProgrammer(16, 2))
    before = play(policy, environments, 64, likeliest=True, seed=1).returns.mean()
    schedule = ActorCriticSchedule(epochs=1, batch_size=32, learning_rate=0.01, updates=150, steps=4, episodes=32)
    with RunFolder(tmp_path, {}) as folder:
        train_actor_critic(policy, environments, schedule, folder, seed=1)
    after = play(policy, environments, 64, likeliest=True, seed=1).returns.mean()
    assert before < -0.4
    assert after > -0.2
