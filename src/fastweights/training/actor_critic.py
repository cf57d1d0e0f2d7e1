"""Advantage actor critic for recurrent policies: environments side by side, n-step returns, exact resume."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import processes
from fastweights.checks import check_between, check_not_negative, check_sizes
from fastweights.errors import TrainingError
from fastweights.nn import run_with_starts
from fastweights.nn.modes import evaluating
from fastweights.nn.state_parts import show, takes_starts
from fastweights.pretrained import Pretrained
from fastweights.runs import Progress, Record, RunFolder
from fastweights.training._actions import actions_of
from fastweights.training.loop import Schedule, train_epochs

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

_SPLITS = ("validation", "test", "train")  # each has episodes of its own


@dataclass(frozen=True)
class ActorCriticSchedule(Schedule):
    """The length and speed of training: `epochs` times `updates`, each on `steps` of `batch_size` environments."""

    updates: int = 100  # updates of the weights between two scores
    steps: int = 16  # n: of each environment between two updates; rewards are summed and gradients go back over them
    discount: float = 0.99  # factor of a reward for each step that it lies ahead
    entropy: float = 0.01  # weight of the policy's entropy (nats), which is to stay high
    value: float = 0.5  # weight of the squared error of the values
    episodes: int = 100  # played for each score, at least
    patience: int = 1_000_000  # a return may stand still for long before it rises: nothing ends early

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(updates=self.updates, steps=self.steps, episodes=self.episodes)
        check_between(0, 1, discount=self.discount)
        check_not_negative(entropy=self.entropy, value=self.value)


class ActorCritic(Pretrained, nn.Module):
    """A recurrent policy and its values: a layer of ReLU units, a recurrent layer, and two linear layers on that.

    Observations of unsigned integers are divided by the space's highest value, those of a `Discrete` space are one-hot.

    Actions are drawn by the logits. Of a `Discrete` space these are A numbers, one for each action; of `MultiDiscrete`
    those of each of its choices, one behind the other; of a `Box` the means of Gaussian numbers, and then the logs of
    their standard deviations, in units of the bounds, -1 to 1, where there are any. The deviations are parameters
    (`log_deviations`, 0 at the start), whatever is seen. What is drawn beyond a bound is clipped to it.

    Shapes: observations [T,B,...] and starts [T,B] -> logits [T,B,A], values [T,B], and the recurrent layer's state.

    Args:
        environments: the vector environment of gymnasium to be played; its spaces alone are looked at, and kept.
        core: a recurrent layer of `fastweights.nn`, or an LSTM, GRU or RNN of `torch.nn`, time first. Its `input_size`
            is the number of ReLU units. The first output of a `GatedFastWeightsRNN` is zero whatever it reads: with
            that core the first action of every episode ignores what is observed.

    Attributes:
        environments: what the policy knows of them, as plain values: a saved policy is built of it again.

    Raises:
        ValueError: actions, observations or the layer are of another kind; the message says which are supported.

    Examples:
        >>> import torch
        >>> from fastweights.nn import FastWeightsRNN
        >>> from fastweights.tasks.catch_environments import CatchVectorEnv
        >>> from fastweights.training import ActorCritic
        >>> environments = CatchVectorEnv(num_envs=4)
        >>> policy = ActorCritic(environments, FastWeightsRNN(32, 20))
        >>> observations, _ = environments.reset(seed=1)
        >>> logits, values, state = policy(torch.from_numpy(observations).unsqueeze(0))
        >>> logits.shape, values.shape, state.hidden.shape
        (torch.Size([1, 4, 3]), torch.Size([1, 4]), torch.Size([4, 20]))

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> policy.save_pretrained(folder)
        >>> torch.equal(ActorCritic.from_pretrained(folder).policy.weight, policy.policy.weight)
        True
    """

    def __init__(self, environments: "VectorEnv[Any, Any, Any] | Mapping[str, Any]", core: nn.Module) -> None:
        super().__init__()
        _check_core(core)
        spaces = environments if isinstance(environments, Mapping) else _describe_spaces(environments)
        self._spaces = {part: dict(spaces[part]) for part in ("observations", "actions")}
        seen, acted = self._spaces.values()
        self.first, self.kinds = int(seen.get("start", 0)), seen.get("n")
        self.scale = 1 / max(1.0, seen.get("high", 1.0))
        self.encoder = nn.Linear(self.kinds or math.prod(seen["shape"]), core.input_size)  # type: ignore[arg-type]
        self.core = core
        numbers = math.prod(acted["shape"]) if "shape" in acted else 0
        self.policy = nn.Linear(core.hidden_size, numbers or sum(acted["choices"]))  # type: ignore[arg-type]
        self.value = nn.Linear(core.hidden_size, 1)  # type: ignore[arg-type]
        self.log_deviations = nn.Parameter(torch.zeros(numbers)) if numbers else None

    @property
    def environments(self) -> dict[str, Any]:
        return self._spaces

    def forward(
        self, observations: Tensor, state: Any = None, *, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        if self.kinds is None:
            inputs = observations.reshape(*observations.shape[:2], -1).to(self.encoder.weight.dtype) * self.scale
        else:
            inputs = F.one_hot(observations - self.first, self.kinds).to(self.encoder.weight.dtype)
        x = F.relu(self.encoder(inputs))
        if isinstance(self.core, nn.RNNBase):
            y, state = run_with_starts(self.core, x, state, starts=starts)
        else:
            y, state = self.core(x, state, starts=starts)
        logits = self.policy(y)
        if self.log_deviations is not None:
            logits = torch.cat((logits, self.log_deviations.expand_as(logits)), 2)
        return logits, self.value(y).squeeze(2), state


def _describe_spaces(environments: "VectorEnv[Any, Any, Any]") -> dict[str, dict[str, Any]]:
    """Return what a policy must know of the spaces of environments, as plain values."""
    check_environments(environments)
    seen: Any = environments.single_observation_space
    acted: Any = environments.single_action_space
    observations: dict[str, Any]
    if hasattr(seen, "n"):
        observations = {"n": int(seen.n), "start": int(seen.start)}
    else:
        observations = {"shape": list(seen.shape)}
        if numpy.issubdtype(seen.dtype, numpy.unsignedinteger):
            observations["high"] = float(seen.high.max())
    if hasattr(acted, "n"):
        return {"observations": observations, "actions": {"choices": [int(acted.n)]}}
    many = hasattr(acted, "nvec")
    actions = {"choices": acted.nvec.flatten().tolist()} if many else {"shape": list(acted.shape)}
    return {"observations": observations, "actions": actions}


def train_actor_critic(
    policy: nn.Module,
    environments: "VectorEnv[Any, Any, Any]",
    schedule: ActorCriticSchedule,
    folder: RunFolder,
    *,
    seed: int,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train a recurrent policy by synchronous advantage actor critic; resume where a killed process was.

    All environments take n steps with actions drawn from the policy. Then the policy reads these steps again in one
    pass, the states of episodes that begin on the way being zeros, and takes one step of Adam on

        mean of  -log p(a) (R - V) + value (R - V)^2 - entropy H

    where R is the n-step return, r(t) + discount r(t+1) + ... + discount^k V, that ends with the value V of the
    last observation, or without one where the episode has ended (Mnih et al. 2016; no gradient goes through R, and in
    the first term none through V). The weights of the three terms are for returns of about 1: scale the rewards so
    (`gymnasium.wrappers.vector.TransformReward`). Catch was learnt with rewards of 0.1 and 1, and not with 0.01 or 10,
    where the entropy or the values decide the step. Recurrent states go on from update to update. An episode that is
    cut short (`truncated`) ends with the value of its last observation, and not as if nothing came after it.

    After every `updates` the environments are reset: the policy plays `episodes` of validation, which begin the same
    every time, with actions drawn as in training, and then begins new episodes of training. A run that was killed takes
    the actions since then again and goes on with the bits of an unbroken one, if the environments are functions of
    their seeds.

    Under `torchrun` each of n processes plays `batch_size` / n of the games: give it so many environments. Each resets
    them with a seed of its own and draws its own actions, so that another number of processes plays other games. It may
    resume a run too; the episodes under way then restart.

    Args:
        policy: a module with `policy(observations, state, starts=starts)` -> logits [T,B,A], values [T,B] and state,
            such as `ActorCritic`, which says what the logits are; without dropout; left with the weights that were best
            on validation.
        environments: a vector environment of gymnasium, `schedule.batch_size` at once (of several processes in each its
            part), which restarts by itself. Actions are a choice (`Discrete`), several (`MultiDiscrete`) or an array of
            floating numbers (`Box`), observations an array of numbers (`Box`) or a choice (`Discrete`).
        schedule: how long and how fast.
        folder: an open `RunFolder`; a finished run is not trained again.
        seed: the seed of the actions and of the environments. The weights of `policy` are the caller's.

    Returns:
        The last record of `metrics.jsonl`: `test_return`, the mean return of an episode of the test; `validation_loss`,
        the best mean return of validation, negated; `frames`, the steps of all environments together; parameters,
        seconds. The records of the epochs have `validation_return`, and `train_return` of the episodes that ended.

    Raises:
        TrainingError: observations, rewards or the loss are not finite.
        RunError: the folder cannot be used.
        ValueError: the environments are of another kind or number, or cannot be divided evenly between the processes;
            the message says what is supported. Or the policy was made for others, or returns tensors of other shapes.

    Examples:
        >>> import pathlib, tempfile, torch
        >>> from fastweights.nn import FastWeightsRNN
        >>> from fastweights.tasks.catch_environments import CatchVectorEnv
        >>> from fastweights.training import ActorCritic, ActorCriticSchedule, RunFolder, train_actor_critic
        >>> environments = CatchVectorEnv(64, size=4, visible=1)
        >>> policy = ActorCritic(environments, FastWeightsRNN(32, 32))
        >>> schedule = ActorCriticSchedule(epochs=1, batch_size=64, learning_rate=0.01, updates=100, steps=3)
        >>> with RunFolder(pathlib.Path(tempfile.mkdtemp()) / "run", {}) as folder:
        ...     result = train_actor_critic(policy, environments, schedule, folder, seed=1)
        >>> result["test_return"] > 0.5, result["frames"]
        (True, 19200)
    """
    if not isinstance(schedule, ActorCriticSchedule):
        raise TypeError(f"schedule must be an ActorCriticSchedule, got {schedule!r}")
    _check_policy(policy, environments)
    processes.check_divisible(batch_size=schedule.batch_size)
    if environments.num_envs * processes.count() != schedule.batch_size:
        needed, of = schedule.batch_size // processes.count(), "(batch_size)"
        if processes.count() > 1:
            of = f"in each of {processes.count()} processes (batch_size {schedule.batch_size})"
        raise ValueError(f"there must be {needed} environments {of}, got {environments.num_envs}")
    return train_epochs(
        _Player(policy, environments, schedule, seed, title),
        schedule,
        folder,
        steps_per_epoch=schedule.updates,
        seed=seed,
        identity={"environments": _describe(environments)},
        shared=True,
        title=title,
        progress=progress,
    )


class Played(NamedTuple):
    """Episodes that a policy has played, in the order in which they ended."""

    returns: Tensor  # [episodes] float64, the sum of each one's rewards
    lengths: Tensor  # [episodes] int64, how many actions each had


def play(
    policy: nn.Module,
    environments: "VectorEnv[Any, Any, Any]",
    episodes: int,
    *,
    likeliest: bool = False,
    seed: int | None = None,
) -> Played:
    """Play episodes with a trained policy, which is read in evaluation mode and not changed.

    Each environment plays its share of the episodes, equal but for one, so that short ones do not count more often.

    Args:
        policy: as `train_actor_critic` takes it.
        environments: as `train_actor_critic` takes them, any number of them.
        episodes: how many.
        likeliest: take the likeliest action in place of one that is drawn, of a `Box` the mean.
        seed: the seed of the environments; None is another one every time. Actions are drawn by torch's own generator.

    Raises:
        TrainingError: an observation or a reward is not finite.
        ValueError: the environments are of another kind, or not those that the policy was made for.

    Examples:
        >>> import torch
        >>> from fastweights.nn import FastWeightsRNN
        >>> from fastweights.tasks.catch_environments import CatchVectorEnv
        >>> from fastweights.training import ActorCritic, play
        >>> environments = CatchVectorEnv(4, size=6, visible=2)
        >>> played = play(ActorCritic(environments, FastWeightsRNN(32, 20)), environments, 10, seed=1)
        >>> played.returns.shape, played.lengths.tolist()
        (torch.Size([10]), [5, 5, 5, 5, 5, 5, 5, 5, 5, 5])
    """
    check_sizes(episodes=episodes)
    _check_policy(policy, environments)
    device = next((parameter.device for parameter in policy.parameters()), torch.device("cpu"))
    share, more = divmod(episodes, environments.num_envs)
    quotas = [share + (index < more) for index in range(environments.num_envs)]
    ended = _play_episodes(policy, _Play(environments, device, "playing"), seed, quotas, likeliest)
    return Played(
        torch.tensor([episode.total for episode in ended], dtype=torch.float64),
        torch.tensor([episode.length for episode in ended]),
    )


def check_environments(environments: "VectorEnv[Any, Any, Any]") -> None:
    """Refuse environments that an actor critic cannot be trained on.

    Raises:
        ValueError: the actions are neither choices nor arrays of floating numbers, the observations neither arrays of
            numbers nor a choice, or the environments do not restart by themselves.
        TypeError: it is no vector environment of gymnasium.
    """
    from gymnasium.spaces import Box, Discrete, MultiDiscrete  # here, because all but this trains without gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv

    if not isinstance(environments, VectorEnv):
        raise TypeError(f"environments must be a vector environment (gymnasium.make_vec), got {environments!r}")
    actions, observations = environments.single_action_space, environments.single_observation_space
    floating = isinstance(actions, Box) and numpy.issubdtype(actions.dtype, numpy.floating) and 0 not in actions.shape
    if not (isinstance(actions, Discrete | MultiDiscrete) or floating):
        raise ValueError(
            "the actions must be a choice (Discrete), several (MultiDiscrete) or an array of floating numbers (Box), "
            f"got {actions}"
        )
    if not isinstance(observations, Box | Discrete):
        raise ValueError(
            f"the observations must be arrays of numbers (Box) or a number (Discrete), got {observations}: "
            "gymnasium.wrappers.FlattenObservation makes one array of many a space"
        )
    if _mode_of(environments) not in (AutoresetMode.NEXT_STEP.value, AutoresetMode.SAME_STEP.value):
        raise ValueError(
            "the environments must restart by themselves, in AutoresetMode.NEXT_STEP or SAME_STEP, got "
            f"{environments.metadata.get('autoreset_mode')}"
        )


def _check_policy(policy: nn.Module, environments: "VectorEnv[Any, Any, Any]") -> None:
    """Refuse environments that a policy was not made for."""
    spaces = _describe_spaces(environments)
    if isinstance(policy, ActorCritic) and policy.environments != spaces:
        raise ValueError(f"the policy was made for {policy.environments}, and the environments have {spaces}")


def _check_core(core: nn.Module) -> None:
    """Refuse what would read the environments as steps, or whose outputs are not its hidden states."""
    fits = not core.bidirectional and not core.proj_size if isinstance(core, nn.RNNBase) else takes_starts(core)
    if not fits or getattr(core, "batch_first", False):
        raise ValueError(
            "core must be a recurrent layer of fastweights.nn, or an LSTM, GRU or RNN of torch.nn, of one direction, "
            f"without proj_size and without batch_first, got {show(core)}"
        )


def _describe(environments: "VectorEnv[Any, Any, Any]") -> str:
    """Return what is known of the environments: another one decides other numbers."""
    spec = environments.spec
    spaces = f"{environments.single_observation_space}, {environments.single_action_space}"
    return spaces if spec is None else f"{spec.id} {spec.kwargs}, {spaces}"


def _mode_of(environments: "VectorEnv[Any, Any, Any]") -> Any:
    mode = environments.metadata.get("autoreset_mode")
    return getattr(mode, "value", mode)


class _Answer(NamedTuple):
    """The answer of the environments to an action each, [B]."""

    rewards: Tensor  # float32
    terminated: Tensor  # bool
    truncated: Tensor
    ignored: Tensor  # the action was: the step before had ended the episode, and this one only began the next
    last: Tensor | None  # the last observations of truncated episodes whose environments already show the next


class _Episode(NamedTuple):
    """An episode that has ended."""

    environment: int
    total: float  # of its rewards
    length: int  # number of its actions


class _Play:
    """Environments and the episodes under way: what is seen now, and who begins an episode with it."""

    def __init__(self, environments: "VectorEnv[Any, Any, Any]", device: torch.device, title: str) -> None:
        self.environments, self.device, self.title = environments, device, title
        self.same_step = _mode_of(environments) == "SameStep"
        self.actions = actions_of(environments.single_action_space)

    def reset(self, seed: int | None) -> None:
        self.seen = self._as_tensor(self.environments.reset(seed=seed)[0])
        self.starts = torch.ones(self.environments.num_envs, dtype=torch.bool, device=self.device)
        self.ended = torch.zeros_like(self.starts)
        self.sums = numpy.zeros(self.environments.num_envs)  # sums of rewards, in the episodes under way
        self.lengths = numpy.zeros(self.environments.num_envs, dtype=numpy.int64)
        self.episodes: list[_Episode] = []  # those that have ended

    def step(self, actions: Tensor) -> _Answer:
        """Take an action in each environment."""
        taken = self.actions.as_environments_want(actions)
        seen, rewards, terminated, truncated, info = self.environments.step(taken)
        self.seen = self._as_tensor(seen)
        if not numpy.isfinite(rewards).all():
            raise TrainingError(f"{self.title}: the environments gave a reward that is NaN or infinite")
        ended, ignored = terminated | truncated, torch.zeros_like(self.ended) if self.same_step else self.ended
        self.sums += rewards
        self.lengths += ~ignored.cpu().numpy()
        for index in ended.nonzero()[0].tolist():
            self.episodes.append(_Episode(index, float(self.sums[index]), int(self.lengths[index])))
            self.sums[index], self.lengths[index] = 0.0, 0
        last = None
        if self.same_step and truncated.any():
            last = self.seen.clone()
            for index in truncated.nonzero()[0].tolist():
                last[index] = self._as_tensor(info["final_obs"][index])
        self.ended = torch.from_numpy(ended).to(self.device)
        self.starts = self.ended if self.same_step else ignored
        rewards, terminated, truncated = (
            torch.from_numpy(part).to(self.device) for part in (rewards.astype("float32"), terminated, truncated)
        )
        return _Answer(rewards, terminated, truncated, ignored, last)

    def _as_tensor(self, observations: Any) -> Tensor:
        tensor = torch.tensor(observations, device=self.device)  # a copy: environments may write into their own again
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise TrainingError(f"{self.title}: the environments showed an observation that holds NaN or infinity")
        return tensor


class _Player:
    """A policy and its environments: n steps in each, then one update on them."""

    complete = False

    def __init__(
        self,
        policy: nn.Module,
        environments: "VectorEnv[Any, Any, Any]",
        schedule: ActorCriticSchedule,
        seed: int,
        title: str,
    ) -> None:
        self.model = self.scored = policy
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(trained, lr=schedule.learning_rate)
        self.schedule, self.seed, self.device = schedule, seed, trained[0].device
        self.play = _Play(environments, self.device, title)
        self._forget()

    def _forget(self) -> None:
        """Leave the episodes under way."""
        self.taken: list[Tensor] = []  # actions since the environments were reset
        self.state: Any = None  # state of the policy
        self.plays = False  # the environments stand where these actions have led

    @property
    def carried(self) -> Any:
        """The actions and the state of each process, which alone knows where the games lie in its policy's state."""
        return processes.collect({"actions": torch.stack(self.taken) if self.taken else None, "state": self.state})

    @carried.setter
    def carried(self, carried: Any) -> None:
        self._forget()
        parts = carried if isinstance(carried, list) else [carried]  # earlier versions had one, of all games
        if len(parts) != processes.count():
            return  # other processes have other games, and restart them
        own = parts[processes.rank()]
        if own["actions"] is not None:
            self.taken, self.state = list(own["actions"]), _move(own["state"], self.device)

    def loss(self, epoch: int, index: int) -> Tensor:
        if index == 0:
            self._forget()
        if not self.plays:
            self.play.reset(self._seed("train", epoch))
            for actions in self.taken:
                self.play.step(actions)
            self.plays = True
        state, seen, starts, drawn, answers, cut = self.state, [], [], [], [], []
        with torch.no_grad():
            for _ in range(self.schedule.steps):
                seen.append(self.play.seen)
                starts.append(self.play.starts)
                drawn.append(self._act())
                answer = self.play.step(drawn[-1])
                answers.append(answer)
                cut.append(torch.zeros_like(answer.rewards) if answer.last is None else self._value(answer.last))
        self.taken += [actions.cpu() for actions in drawn]
        seen.append(self.play.seen)
        starts.append(self.play.starts)
        logits, values, _ = self.model(torch.stack(seen), state, starts=torch.stack(starts))
        returns, following = [], values[-1].detach()
        for step in reversed(range(self.schedule.steps)):
            rewards, terminated, truncated, ignored, last = answers[step]
            following = following if last is None else torch.where(truncated, cut[step], following)
            following = rewards + self.schedule.discount * following.masked_fill(terminated, 0)
            # A step that only begins an episode has no return; the one before it is followed by what it saw.
            following = torch.where(ignored, values[step].detach(), following)
            returns.append(following)
        counted = torch.stack([~answer.ignored for answer in answers])
        advantages = torch.stack(returns[::-1]) - values[:-1]
        chosen, entropy = self.play.actions.weigh(logits[:-1], torch.stack(drawn))
        losses = self.schedule.value * advantages**2 - chosen * advantages.detach() - self.schedule.entropy * entropy
        loss: Tensor = losses[counted].sum() / processes.add(counted.sum())
        return loss

    def score(self, step: int) -> tuple[Record, str]:
        trained = [episode.total for episode in self.play.episodes]
        total, ended = processes.add(torch.tensor([numpy.sum(trained), len(trained)], dtype=torch.float64)).tolist()
        record = self._play_episodes("validation")
        record |= {"frames": step * self.schedule.steps * self.schedule.batch_size}
        if ended:
            record["train_return"] = total / ended
        return record, f"{record['frames']:,} frames: mean return {record['validation_return']:.3f}"

    def test(self, step: int) -> Record:
        return self._play_episodes("test") | {"frames": step * self.schedule.steps * self.schedule.batch_size}

    def _play_episodes(self, split: str) -> Record:
        """Play as many episodes in each environment as make up those asked for: the mean return, and it negated."""
        self._forget()
        each = math.ceil(self.schedule.episodes / self.schedule.batch_size)
        quotas = [each] * self.play.environments.num_envs
        total = sum(episode.total for episode in _play_episodes(self.model, self.play, self._seed(split, 0), quotas))
        mean = processes.add(torch.tensor(total, dtype=torch.float64)).item() / (each * self.schedule.batch_size)
        return {f"{split}_return": mean, f"{split}_loss": -mean}

    def _act(self) -> Tensor:
        """Draw actions from the policy for what is seen now; its state goes on."""
        actions, self.state = _act(self.model, self.play, self.state)
        return actions

    def _value(self, last: Tensor) -> Tensor:
        values: Tensor = self.model(last.unsqueeze(0), self.state)[1]
        return values[0]

    def _seed(self, split: str, epoch: int) -> int:
        words = [self.seed, _SPLITS.index(split), epoch]
        first = processes.own_rows(self.schedule.batch_size).start
        # Game i of a vector environment is seeded with so much more than the first.
        return int(numpy.random.default_rng(words).integers(2**31)) + int(first)


def _act(policy: nn.Module, play: _Play, state: Any, likeliest: bool = False) -> tuple[Tensor, Any]:
    """Return an action of a policy in each environment, for what is seen now, and its next state."""
    logits, values, state = policy(play.seen.unsqueeze(0), state, starts=play.starts.unsqueeze(0))
    # Values [T,B,1] would be summed with rewards [B] to something else, without an error where T is B.
    right = 1, play.environments.num_envs, play.actions.size
    if (logits.shape, values.shape) != (right, right[:2]):
        raise ValueError(
            f"the policy must return logits [T,B,A] and values [T,B], here {right} and {right[:2]}, got "
            f"{tuple(logits.shape)} and {tuple(values.shape)}"
        )
    return play.actions.draw(logits[0], likeliest), state


def _play_episodes(
    policy: nn.Module, play: _Play, seed: int | None, quotas: Sequence[int], likeliest: bool = False
) -> list[_Episode]:
    """Play so many episodes in each environment, and return them in the order in which they end.

    The first to end anywhere would be too many short ones.
    """
    play.reset(seed)
    state, missing, counted, known = None, numpy.array(quotas), [], 0
    with evaluating(policy), torch.no_grad():
        while missing.max() > 0:
            actions, state = _act(policy, play, state, likeliest)
            play.step(actions)
            for episode in play.episodes[known:]:
                if missing[episode.environment] > 0:
                    counted.append(episode)
                missing[episode.environment] -= 1
            known = len(play.episodes)
    return counted


def _move(state: Any, device: torch.device) -> Any:
    if hasattr(state, "to"):
        return state.to(device)
    return state if state is None else tuple(tensor.to(device) for tensor in state)
