"""Milliseconds a task, figure 3 of Munkhdalai & Trischler 2018: fast weights, Hebbian and gradient, beside MAML.

Section 5.3 of "Metalearning with Hebbian fast weights": 5-way 1-shot tasks of images as those of mini-ImageNet. The
models take turns in one process; what counts are the ratios.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn as torch_nn
from torch.nn import functional as F

from fastweights import few_shot
from fastweights.report import write_result
from fastweights.reproduce import _few_shot_models, command
from fastweights.reproduce._few_shot import Row, labelled
from fastweights.reproduce._few_shot_models import TITLES, RivalSettings
from fastweights.reproduce._settings import check_settings, make_ready, refused
from fastweights.tasks.episodes import Episodes, EpisodeSampler
from fastweights.tasks.mini_imagenet import PIXELS
from fastweights.timing import medians
from fastweights.training import RunFolder

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "check", "run"]

EXPERIMENT = "munkhdalai2018/timing"
SHARED = 16  # tasks of an update that share their images, and twenty classes that they are drawn from
POOL = 20


Timed = Literal["hebbian", "gradient", "matching", "prototypical", "maml", "maml-first-order"]


@dataclass(frozen=True)
class Settings:
    """What is timed: training is a whole update, inference describes a task and answers its queries."""

    models: tuple[Timed, ...] = ("hebbian", "gradient", "matching", "prototypical", "maml", "maml-first-order")
    """The bars of the figure."""
    shots: int = 1
    """Described images of a class."""
    queries: int = 15
    """Of each of the five classes."""
    filters: int = 32
    """Of every convolution."""
    hidden_size: int = 288
    """Units of the layer under the softmax layer."""
    maml_steps: int = 5
    """MAML: gradient steps on a description in training, as Finn et al. take on mini-ImageNet."""
    maml_test_steps: int = 10
    """MAML: in inference."""
    rounds: int = 15
    """In which the models take turns; the median counts."""
    half: bool = False
    """Encode in bfloat16 where that is safe."""
    seeds: tuple[int, ...] = (1,)
    """Of the weights and images, which are noise: one is enough."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where: cpu, cuda, ..."""


PRESETS = {"quick": Settings(rounds=5), "paper": Settings()}


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Time all models in turns, and write the table.

    Raises:
        RunError: settings out of range, or a folder that cannot be used.
    """
    check(settings)
    member = RunFolder(folder / "timing", {"model": "all", **vars(settings)})
    make_ready(EXPERIMENT, [member], fresh=fresh)
    torch.set_num_threads(settings.threads)
    with member, torch.random.fork_rng():
        torch.manual_seed(settings.seeds[0])
        member.note_environment()
        start = time.perf_counter()
        rows = _rows(settings)
        member.append({"kind": "result", "seconds": time.perf_counter() - start})
    write_result(
        folder,
        experiment=EXPERIMENT,
        preset=preset,
        command=command(EXPERIMENT, preset, PRESETS[preset], settings),
        requested=[],
        rows=rows,
    )


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is timed or written.

    Raises:
        RunError: a setting is out of range.
    """
    with refused():
        positive = ("shots", "queries", "filters", "hidden_size", "rounds", "maml_steps", "maml_test_steps")
        check_settings(settings, positive=positive, not_empty=("models", "seeds"))
        if len(settings.seeds) > 1:
            raise ValueError(f"seeds must be one, of weights and images that are noise; got {settings.seeds}")


def _rows(settings: Settings) -> list[dict[str, Any]]:
    """Training and inference, a task by itself as the paper's, and tasks that share their images."""
    data = labelled(torch.rand(POOL, settings.shots + settings.queries, 3, PIXELS, PIXELS))
    sampler = EpisodeSampler(data.examples, data.labels, ways=5, shots=settings.shots, queries=settings.queries)
    generator = torch.Generator().manual_seed(settings.seeds[0])
    alone = sampler.draw(1, generator).to(settings.device)
    shared = sampler.draw(SHARED, generator, pool=POOL).to(settings.device)
    networks = {model: _network(model, settings) for model in settings.models}
    sharing = {model: network for model, network in networks.items() if isinstance(network, few_shot.FewShotNetwork)}
    found: list[dict[str, Any]] = []
    together = f", {SHARED} tasks of {POOL} classes at once"
    for words, tasks, rivals in (("", alone, networks), (together, shared, sharing)):
        for name, timed in (("training", _update), ("inference", _answer)) if rivals else ():
            calls: dict[str, Callable[[], object]] = {model: timed(network, tasks) for model, network in rivals.items()}
            times = medians(calls, settings.rounds)
            each = {model: timing.milliseconds / len(tasks.labels) for model, timing in times.items()}
            found += _of(each, f"{name}{words}")
    return found


def _network(model: Timed, settings: Settings) -> torch_nn.Module:
    encoder = few_shot.ConvEncoder(3, settings.filters, size=PIXELS, half=settings.half)
    row = Row(model, 5, settings.shots, settings.seeds[0])
    rival = RivalSettings(hidden_size=settings.hidden_size, maml_steps=settings.maml_steps)
    network = _few_shot_models.network(row, encoder, rival, {}).to(settings.device)
    if isinstance(network, few_shot.MAML):
        network.test_steps = settings.maml_test_steps
    return network


def _update(network: torch_nn.Module, tasks: Episodes) -> Callable[[], None]:
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


def _answer(network: torch_nn.Module, tasks: Episodes) -> Callable[[], None]:
    network.eval()

    @torch.no_grad()
    def answer() -> None:
        network(tasks.examples, tasks.description, tasks.labels, tasks.queries).argmax(-1).cpu()

    return answer


def _of(milliseconds: dict[Any, float], what: str) -> list[dict[str, Any]]:
    """The rows of one timing: milliseconds a task, and how many times those of the first model they are."""
    first, rows = next(iter(milliseconds)), []
    for model, taken in milliseconds.items():
        named = {"model": TITLES[model], "hidden_size": None, "paper": None, "floor": None}
        rows.append(named | {"metric": f"{what}: ms a task", "ours": [taken]})
        rows.append(named | {"metric": f"{what}: times {TITLES[first]}", "ours": [taken / milliseconds[first]]})
    return rows
