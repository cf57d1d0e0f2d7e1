"""Milliseconds a task, figure 3 of Munkhdalai & Trischler 2018: fast weights, Hebbian and gradient, beside MAML.

Section 5.3 of "Metalearning with Hebbian fast weights": 5-way 1-shot tasks of images as those of mini-ImageNet. The
models take turns in one process; what counts are the ratios.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn as torch_nn
from torch.nn import functional as F

from fastweights import few_shot
from fastweights.processes import refuse_several
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.munkhdalai2018._episodes import (
    MAMLS,
    TITLES,
    RivalSettings,
    TasksRow,
    label_classes,
    make_rival,
)
from fastweights.runs import Progress, Record, RunFolder
from fastweights.tasks.episodes import Episodes, EpisodeSampler
from fastweights.tasks.mini_imagenet import PIXELS
from fastweights.timing import medians

EXPERIMENT = "munkhdalai2018/timing"
QUICK_MINUTES = 1  # docs/results/munkhdalai2018-timing: a third of its rounds
DATA = None
SHARED = 16  # tasks of an update that share their images
POOL = 20  # classes that these tasks are drawn from

TimedModel = Literal["hebbian", "gradient", "matching", "prototypical", "maml", "maml-first-order"]


@dataclass(frozen=True)
class Settings:
    """Time training, which is a whole update, and inference, which describes a task and answers its queries."""

    models: tuple[TimedModel, ...] = ("hebbian", "gradient", "matching", "prototypical", "maml", "maml-first-order")
    """Models to time, each a bar of the figure."""
    shots: int = 1
    """Described images of a class."""
    queries: int = 15
    """Queries of each of the five classes."""
    filters: int = 32
    """Filters of every convolution."""
    hidden_size: int = 288
    """Units of the layer under the softmax layer."""
    maml_steps: int = only(MAMLS, 5, "Gradient steps on a description in training, as in Finn et al. on mini-ImageNet.")
    maml_test_steps: int = only(MAMLS, 10, "Gradient steps on a description in inference.")
    rounds: int = 15
    """Rounds in which the models take turns; the median counts."""
    half: bool = False
    """Encode in bfloat16 where that is safe."""
    seeds: tuple[int, ...] = (1,)
    """Seed of the weights and images; the images are noise, so one seed is enough."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, ..."""


PRESETS = {"quick": Settings(rounds=5), "paper": Settings()}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the one member of a run, which times all models in turns."""
    refuse_several(EXPERIMENT)
    rows: list[Record] = []

    def time_models(models: tuple[TimedModel, ...], seed: int, member: RunFolder, progress: Progress) -> None:
        member.note_environment()
        start = time.perf_counter()
        rows.extend(measure(settings))
        member.append({"kind": "result", "seconds": time.perf_counter() - start})

    member = RunFolder(folder / "timing", {"model": "all", **vars(settings)})
    folders = {(settings.models, settings.seeds[0]): member}
    return Members(folders, time_models, lambda: {"requested": [], "rows": rows}, alone=True)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    sizes = ("shots", "queries", "filters", "hidden_size", "rounds", "maml_steps", "maml_test_steps")
    check_settings(settings, sizes=sizes)
    if len(settings.seeds) > 1:
        raise ValueError(f"seeds must be a single seed, because weights and images are noise; got {settings.seeds}")


def measure(settings: Settings) -> list[Record]:
    """Time training and inference, of a task by itself as in the paper, and of tasks that share their images."""
    data = label_classes(torch.rand(POOL, settings.shots + settings.queries, 3, PIXELS, PIXELS))
    sampler = EpisodeSampler(data.examples, data.labels, ways=5, shots=settings.shots, queries=settings.queries)
    generator = torch.Generator().manual_seed(settings.seeds[0])
    alone = sampler.draw(1, generator).to(settings.device)
    shared = sampler.draw(SHARED, generator, pool=POOL).to(settings.device)
    networks = {model: _make_network(model, settings) for model in settings.models}
    sharing = {model: network for model, network in networks.items() if isinstance(network, few_shot.FewShotNetwork)}
    rows: list[Record] = []
    together = f", {SHARED} tasks of {POOL} classes at once"
    for words, tasks, rivals in (("", alone, networks), (together, shared, sharing)):
        for name, timed in (("training", _make_update), ("inference", _make_answer)) if rivals else ():
            calls: dict[str, Callable[[], object]] = {model: timed(network, tasks) for model, network in rivals.items()}
            times = medians(calls, settings.rounds)
            each = {model: timing.milliseconds / len(tasks.labels) for model, timing in times.items()}
            rows += _describe(each, f"{name}{words}")
    return rows


def _make_network(model: TimedModel, settings: Settings) -> torch_nn.Module:
    encoder = few_shot.ConvEncoder(3, settings.filters, size=PIXELS, half=settings.half)
    row = TasksRow(model, 5, settings.shots)
    rival = RivalSettings(hidden_size=settings.hidden_size, maml_steps=settings.maml_steps)
    network = make_rival(rival, row, encoder, {}).to(settings.device)
    if isinstance(network, few_shot.MAML):
        network.test_steps = settings.maml_test_steps
    return network


def _make_update(network: torch_nn.Module, tasks: Episodes) -> Callable[[], None]:
    network.train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)

    def update() -> None:
        logits = network(tasks.examples, tasks.description, tasks.labels, tasks.queries)
        loss = F.cross_entropy(logits.flatten(0, 1), tasks.targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()  # a time ends when the numbers are there

    return update


def _make_answer(network: torch_nn.Module, tasks: Episodes) -> Callable[[], None]:
    network.eval()

    @torch.no_grad()
    def answer() -> None:
        network(tasks.examples, tasks.description, tasks.labels, tasks.queries).argmax(-1).cpu()

    return answer


def _describe(milliseconds: dict[str, float], phase: str) -> list[Record]:
    """Return the rows of one timing: milliseconds a task, and the ratio to those of the first model."""
    first, rows = next(iter(milliseconds)), []
    for model, taken in milliseconds.items():
        named = {"model": TITLES[model], "hidden_size": None, "paper": None, "floor": None}
        rows.append(named | {"metric": f"{phase}: ms a task", "ours": [taken]})
        rows.append(named | {"metric": f"{phase}: times {TITLES[first]}", "ours": [taken / milliseconds[first]]})
    return rows
