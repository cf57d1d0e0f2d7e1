"""A short run of each training loop, to be shared by several processes, and figures of how far two runs are apart."""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from fastweights import few_shot, processes
from fastweights.errors import FastWeightsError
from fastweights.few_shot import FineTuning
from fastweights.nn import FastWeightsRNN, HebbianSoftmax
from fastweights.tasks.catch_environments import CatchVectorEnv
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.training import (
    ActorCritic,
    ActorCriticSchedule,
    CurriculumSchedule,
    EpisodeSchedule,
    Progress,
    RunFolder,
    Schedule,
    StreamSchedule,
    train,
    train_actor_critic,
    train_curriculum,
    train_episodes,
    train_streams,
)

BATCH = 12  # which two and three processes divide
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(310, 6, generator=GENERATOR)  # of which the last batch is of ten
Y = (X[:, :3].argmax(1) + 3 * (X[:, 3] > 0)).long()
STREAM = torch.randint(5, (130, BATCH), generator=GENERATOR)
CLASSES = torch.randn(12, 1, 6, generator=GENERATOR) + 0.3 * torch.randn(12, 8, 6, generator=GENERATOR)


class Trace(Progress):
    """The mean loss since the epoch began, after each step; at a step it may end the process."""

    def __init__(self, dies_at=None):
        self.losses, self.dies_at = [], dies_at

    def update(self, step, loss):
        self.losses.append(loss)
        if step == self.dies_at and processes.rank() == processes.count() - 1:
            os.kill(os.getpid(), 9)


class Classifier(nn.Module):
    """Layers, which may draw and normalise, and a softmax that may be Hebbian."""

    def __init__(self, classes, hebbian, draws):
        super().__init__()
        drawn = [nn.BatchNorm1d(16), nn.Dropout(0.3)] if draws else []
        self.body = nn.Sequential(nn.Linear(6, 16), *drawn, nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
        self.head = HebbianSoftmax(8, classes, gamma=0.1, limit=20 if hebbian else 0, dropout=0.2 * draws)

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def loss(self, inputs, targets):
        return self.head.loss(self.body(inputs), targets)


class Reader(nn.Module):
    """Reads streams with recurrent layers of torch's own, which may drop out."""

    def __init__(self, draws):
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        # Which forget: fast weights let rounding grow a thousandfold within some steps.
        self.core = nn.GRU(6, 8, num_layers=2, dropout=0.2 * draws)
        self.output = nn.Linear(8, 5)

    def forward(self, inputs, state=None):
        y, last = self.core(self.embedding(inputs), None if state is None else state[0].transpose(0, 1).contiguous())
        return self.output(y), (last.transpose(0, 1),)


def supervised(folder, hebbian=False, draws=False, **about):
    model = Classifier(6, hebbian, draws)
    splits = dict.fromkeys(("train", "validation", "test"), (X.to(torch.get_default_dtype()), Y))
    schedule = Schedule(epochs=2, batch_size=BATCH, learning_rate=0.01, **CHECKPOINTS)
    return model, train(model, splits, schedule, folder, loss=model.loss, **about)


def streams(folder, draws=False, **about):
    model = Reader(draws)
    targets = torch.cat((STREAM[:1] * 0, STREAM[:-1]))
    splits = dict.fromkeys(("train", "validation", "test"), (STREAM, targets, torch.ones_like(STREAM)))
    schedule = StreamSchedule(epochs=2, batch_size=BATCH, segment=5, reset=0.1, learning_rate=0.01, **CHECKPOINTS)
    return model, train_streams(model, splits, schedule, folder, **about)


def curriculum(folder, hebbian=True, draws=False, **about):
    model = Classifier(12, hebbian, draws)
    classes = CLASSES.to(torch.get_default_dtype())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003)
    model.head.attach(optimizer)
    schedule = CurriculumSchedule(
        epochs=5, batch_size=11, test_every=10, first_classes=3, added_classes=2, last_classes=12, threshold=0.2,
        learning_rate=0.003, **CHECKPOINTS,
    )  # fmt: skip

    def augment(inputs, generator):
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)

    return model, train_curriculum(model, optimizer, classes, classes, schedule, folder, augment=augment, **about)


def episodes(folder, network="hebbian", pool=None, draws=False, **about):
    layers = [nn.Linear(6, 10), *([nn.BatchNorm1d(10), nn.Dropout(0.3)] if draws else [])]
    if network == "maml":  # whose statistics are of one task; the gradient of a bias would be rounding alone
        layers = [nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10, track_running_stats=False)]
    encoder: Any = nn.Sequential(*layers, nn.LeakyReLU())
    encoder.features = 10
    model: nn.Module
    if network == "hebbian":
        head = few_shot.FastWeightsHead(10, num_classes=3, hidden_size=7, label_noise=0.5 * draws)
        model = few_shot.FewShotNetwork(encoder, head)
    elif network == "maml":
        model = few_shot.MAML(encoder, 3, hidden_size=5)
    else:
        model = FineTuning(encoder, classes=12, num_classes=3)
    examples = CLASSES.to(torch.get_default_dtype()).flatten(0, 1)
    sampler = EpisodeSampler(examples, torch.arange(12).repeat_interleave(8), ways=3, shots=1, queries=2)
    schedule = EpisodeSchedule(
        tasks=250, tasks_per_step=5, pool=pool, validate_every=125, validation_tasks=20, test_tasks=20, averaging=0.9,
        learning_rate=0.003, **CHECKPOINTS,
    )  # fmt: skip

    def augment(examples, generator):
        return examples + 0.1 * torch.randn(examples.shape, generator=generator)

    samplers = dict.fromkeys(("train", "validation", "test"), sampler)
    return model, train_episodes(model, samplers, schedule, folder, augment=augment, **about)


def actor_critic(folder, core="fast-weights", **about):
    games = CatchVectorEnv(BATCH // processes.count(), size=4, visible=2)
    layer = nn.LSTM(8, 9, num_layers=2) if core == "lstm" else FastWeightsRNN(8, 9)
    model = ActorCritic(games, layer)
    schedule = ActorCriticSchedule(
        epochs=2, batch_size=BATCH, updates=25, steps=4, episodes=30, learning_rate=0.003, **CHECKPOINTS
    )
    return model, train_actor_critic(model, games, schedule, folder, **about)


CHECKPOINTS: Any = {"checkpoint_seconds": 0}
RUNS: dict[str, Any] = {  # which draw nothing but data: any number of processes gives the numbers of one
    "supervised": supervised,
    "supervised, Hebbian": functools.partial(supervised, hebbian=True),
    "streams": streams,
    "curriculum": functools.partial(curriculum, hebbian=False),
    "curriculum, Hebbian": curriculum,
    "episodes": episodes,
    "episodes of a pool": functools.partial(episodes, pool=4),
    "episodes, MAML": functools.partial(episodes, network="maml"),
    "episodes, fine-tuning": functools.partial(episodes, network="fine-tuning"),
}
DRAWN: dict[str, Any] = {  # which draw, or normalise by the batch: each process by itself
    "supervised, drawn": functools.partial(supervised, draws=True, hebbian=True),
    "streams, drawn": functools.partial(streams, draws=True),
    "curriculum, drawn": functools.partial(curriculum, draws=True),
    "episodes, drawn": functools.partial(episodes, draws=True),
    "episodes, fine-tuning, drawn": functools.partial(episodes, network="fine-tuning", draws=True),
    "actor critic": actor_critic,
    "actor critic, LSTM": functools.partial(actor_critic, core="lstm"),
}
LOOPS = ("supervised, Hebbian", "streams", "curriculum, Hebbian", "episodes", "actor critic")


def run(name, path, *, dies_at=None, progress=None):
    """Train for some 50 steps; return the mean losses after each, the weights and the result."""
    torch.manual_seed(processes.rank())  # of weights of each process's own: the main one's count
    trace = progress or Trace(dies_at)
    with RunFolder(path, {"seed": 1}) as folder:
        model, result = (RUNS | DRAWN)[name](folder, seed=1, progress=trace)
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    return {"losses": getattr(trace, "losses", None), "weights": weights, "result": result}


def differences(found, expected):
    """Return the largest differences of losses, weights and scores of two runs."""
    scores = [key for key in expected["result"] if key.endswith(("_loss", "_error", "_return"))]
    weights = expected["weights"].items()
    return {
        "losses": max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True)),
        "weights": max(float(numpy.abs(found["weights"][key] - value).max()) for key, value in weights),
        "scores": max(abs(found["result"][key] - expected["result"][key]) for key in scores),
    }


if __name__ == "__main__":
    try:
        run(sys.argv[1], Path(sys.argv[2]), dies_at=int(sys.argv[3]) if len(sys.argv) > 3 else None)
    except FastWeightsError as error:
        sys.exit(f"error: {error}")
