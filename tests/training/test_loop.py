"""The laws of every training loop: exact resume, one training a folder, no NaN in a checkpoint."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from fastweights.errors import RunError, TrainingError
from fastweights.training import (
    Progress,
    RunFolder,
    train,
    train_curriculum,
    train_episodes,
    train_language_model,
    train_streams,
)
from fastweights.training import loop as training_loop

from . import test_curriculum, test_episodes, test_language, test_streams, test_supervised
from .helpers import StopAt, StoppedError, contents, records, without_seconds


class Loop(NamedTuple):
    make: Callable[[], Any]  # a fresh model
    train: Callable[..., dict[str, Any]]  # of a model, a schedule and a folder
    schedule: Any  # with a checkpoint after every step


def supervised(model, schedule, folder, **options):
    return train(model, test_supervised.make_splits(), schedule, folder, **options)


def hebbian(model, schedule, folder, **options):
    return supervised(model, schedule, folder, loss=model.loss, **options)


def momentum(model, schedule, folder, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return supervised(model, schedule, folder, optimizer=optimizer, **options)


def streams(model, schedule, folder, **options):
    return train_streams(model, test_streams.make_splits(), schedule, folder, **options)


def language(model, schedule, folder, **options):
    return train_language_model(model, test_language.make_texts(), schedule, folder, **options)


def curriculum(model, schedule, folder, **options):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=schedule.learning_rate)
    model.head.attach(optimizer)
    examples = test_curriculum.examples(9, 1), test_curriculum.examples(5, 2)
    return train_curriculum(model, optimizer, *examples, schedule, folder, augment=test_curriculum.jitter, **options)


def episodes(model, schedule, folder, **options):
    return train_episodes(model, test_episodes.samplers(), schedule, folder, **options)


def network():
    model = test_episodes.network()
    model.head.hidden.label_noise = 0.5  # drawn from torch's generator
    return model


AVERAGED = dataclasses.replace(
    test_episodes.SCHEDULE, tasks=24, validate_every=8, averaging=0.9, annealing="cosine", checkpoint_seconds=0
)
COSINE = dataclasses.replace(test_supervised.SCHEDULE, annealing="cosine")
LOOPS = {
    "supervised": Loop(test_supervised.make_model, supervised, test_supervised.SCHEDULE),
    "a head that smooths": Loop(test_supervised.Hebbian, hebbian, test_supervised.SCHEDULE),
    "momentum": Loop(test_supervised.make_model, momentum, COSINE),
    "streams": Loop(test_streams.make_model, streams, test_streams.SCHEDULE),
    "language": Loop(test_language.make_model, language, test_language.SCHEDULE),
    "curriculum": Loop(test_curriculum.Model, curriculum, test_curriculum.SCHEDULE),
    "episodes": Loop(network, episodes, AVERAGED),
}


@pytest.fixture(params=LOOPS)
def loop(request):
    return LOOPS[request.param]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stops", [[1], [7], [3, 4, 9, 11]])
def test_a_killed_run_resumes_with_the_same_bits(loop, tmp_path, threads, stops):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, broken = loop.make(), loop.make()
        steps: list[torch.Tensor] = []
        next(iter(broken.parameters())).register_hook(steps.append)
        with RunFolder(tmp_path / "whole", {}) as folder:
            expected = loop.train(whole, loop.schedule, folder, seed=3)
        for stop in stops:
            with RunFolder(tmp_path / "broken", {}) as folder, pytest.raises(StoppedError):
                loop.train(loop.make(), loop.schedule, folder, seed=3, progress=StopAt(stop))
        with RunFolder(tmp_path / "broken", {}) as folder:
            result = loop.train(broken, loop.schedule, folder, seed=3)
    finally:
        torch.set_num_threads(before)
    assert without_seconds(tmp_path / "broken") == without_seconds(tmp_path / "whole")
    assert result | {"seconds": 0} == expected | {"seconds": 0}
    assert len(steps) == result["steps"] - (stops[-1] - 1)  # no step of the last checkpoint is taken again
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, broken.state_dict()[name]), name


def test_a_finished_run_is_not_trained_again(loop, tmp_path):
    first, again = loop.make(), loop.make()
    with RunFolder(tmp_path, {}) as folder:
        expected = loop.train(first, loop.schedule, folder, seed=1)
    (tmp_path / "environment.json").write_text('{"commit": "old"}')
    before = contents(tmp_path)
    rarer = dataclasses.replace(loop.schedule, checkpoint_seconds=100.0)  # which is no other run
    with RunFolder(tmp_path, {}) as folder:
        result = loop.train(again, rarer, folder, seed=1, progress=StopAt(0))
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(expected)) == records(tmp_path)[-1]
    assert contents(tmp_path) == before
    for name, tensor in first.state_dict().items():  # and the model is the trained one
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_seed_of_numpys_is_the_same_seed(loop, tmp_path):
    results = []
    for name, seed in (("plain", 1), ("numpy", numpy.int64(1))):
        with RunFolder(tmp_path / name, {}) as folder:
            results.append(loop.train(loop.make(), loop.schedule, folder, seed=seed) | {"seconds": 0})
    assert results[0] == results[1]


def test_a_model_learns_in_training_mode_and_is_scored_in_evaluation_mode(loop, tmp_path):
    """Whatever mode it comes in."""
    modes = set()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: modes.add((torch.is_grad_enabled(), module.training))
    )
    try:
        with RunFolder(tmp_path, {}) as folder:
            loop.train(loop.make().eval(), loop.schedule, folder, seed=1)
    finally:
        handle.remove()
    assert modes == {(True, True), (False, False)}


def test_the_callers_random_numbers_are_left_alone(loop, tmp_path):
    model = loop.make()
    before = torch.get_rng_state()
    with RunFolder(tmp_path, {}) as folder:
        loop.train(model, loop.schedule, folder, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gradient_that_is_not_finite_ends_the_run_and_no_checkpoint_holds_it(loop, tmp_path):
    model = loop.make()
    steps: list[torch.Tensor] = []

    def spoil(gradient):
        steps.append(gradient)
        return gradient * (math.nan if len(steps) == 6 else 1.0)

    next(iter(model.parameters())).register_hook(spoil)
    with RunFolder(tmp_path, {}) as folder, pytest.raises(TrainingError) as caught:
        loop.train(model, loop.schedule, folder, seed=1, title="spoilt")
    message = str(caught.value)
    assert message.startswith("spoilt: the loss or its gradient became NaN or infinite in epoch ")
    assert f"by step 6; the checkpoint in {tmp_path} is from before" in message
    assert f"learning rate ({loop.schedule.learning_rate})" in message
    with RunFolder(tmp_path, {}) as folder:
        state = folder.load()
    assert state is not None
    assert state["standing"]["step"] == 5
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())


def test_a_run_trained_otherwise_is_no_answer(loop, tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        loop.train(loop.make(), loop.schedule, folder, seed=1)
    before = contents(tmp_path)
    slower = dataclasses.replace(loop.schedule, learning_rate=1e-5)
    for schedule, seed, changed in ((slower, 1, "learning_rate was .*, now 1e-05"), (loop.schedule, 2, "seed was 1")):
        with (
            RunFolder(tmp_path, {}) as folder,
            pytest.raises(RunError, match=f"trained with other settings: {changed}"),
        ):
            loop.train(loop.make(), schedule, folder, seed=seed)
    assert contents(tmp_path) == before


def test_a_run_with_other_steps_per_epoch_is_no_answer_and_an_older_version_does_not_say_them(tmp_path):
    more, fewer = test_supervised.make_splits(), test_supervised.make_splits(100)

    def go(splits):
        with RunFolder(tmp_path, {}) as folder:
            return train(test_supervised.make_model(), splits, test_supervised.SCHEDULE, folder, seed=1)

    result = go(more)
    before = contents(tmp_path)
    with pytest.raises(RunError, match="trained with other settings: steps_per_epoch was 7, now 4"):
        go(fewer)
    assert contents(tmp_path) == before
    with RunFolder(tmp_path, {}) as folder:
        state = folder.load()
        assert state is not None
        for name in ("steps_per_epoch", "keep_newest"):
            del state["training"][name]
        folder.save(state)
    assert go(more) == result


def test_seconds_are_those_of_all_epochs_and_of_all_processes(loop, tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with RunFolder(tmp_path, {}) as folder, pytest.raises(StoppedError):
        loop.train(loop.make(), loop.schedule, folder, seed=1, progress=StopAt(9))
    with RunFolder(tmp_path, {}) as folder:
        state = folder.load()
        assert state is not None
        begun = state["standing"]["seconds"]
        result = loop.train(loop.make(), loop.schedule, folder, seed=1)
    seconds = [record["seconds"] for record in records(tmp_path)]
    assert len(seconds) > 2
    assert seconds == sorted(seconds)
    assert len(set(seconds)) >= len(seconds) - 1  # the result is of the last epoch
    assert 0 < begun < result["seconds"] <= next(clock)


def test_seconds_are_those_of_training_and_of_scoring(tmp_path, monkeypatch):
    """By a clock that stands still but while the model computes."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = test_supervised.make_model()

        def forward(self, x):
            clock.now += 3 if self.training else 5
            return self.model(x)

    for stop in (10, None):
        with RunFolder(tmp_path, {}) as folder:
            try:
                result = supervised(Slow(), test_supervised.SCHEDULE, folder, seed=1, progress=stop and StopAt(stop))
            except StoppedError:
                clock.now += 1000  # between two processes
    epochs = [record for record in records(tmp_path) if record["kind"] == "epoch"]
    # Seven steps and, for the records, the validation and the test split.
    assert [record["seconds"] for record in epochs] == [(7 * 3 + 2 * 5) * record["epoch"] for record in epochs]
    assert result["seconds"] == epochs[-1]["seconds"]


def test_progress_moves_in_epochs_of_a_few_steps(tmp_path):
    class Steps(Progress):
        def __init__(self):
            self.seen = []

        def update(self, step, loss):
            self.seen.append(step)

    schedule, progress = dataclasses.replace(test_supervised.SCHEDULE, checkpoint_seconds=1e9), Steps()
    with RunFolder(tmp_path, {}) as folder:
        train(test_supervised.make_model(), test_supervised.make_splits(), schedule, folder, seed=1, progress=progress)
    assert progress.seen == [7, 14, 21, 28]


def test_a_checkpoint_of_another_model_is_refused_and_kept(loop, tmp_path):
    with RunFolder(tmp_path, {}) as folder, pytest.raises(StoppedError):
        loop.train(loop.make(), loop.schedule, folder, seed=1, progress=StopAt(8))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("what came after the checkpoint")
    before = contents(tmp_path)
    other = loop.make()
    other.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    with (
        RunFolder(tmp_path, {}) as folder,
        pytest.raises(RunError, match=r"does not fit this model \(.*more.*start over"),
    ):
        loop.train(other, loop.schedule, folder, seed=1)
    assert contents(tmp_path) == before


def test_what_is_no_open_folder_and_no_seed_is_refused(loop, tmp_path):
    with pytest.raises(
        TypeError, match=r"folder must be an open RunFolder, got 'run': with RunFolder\(path, settings\)"
    ):
        loop.train(loop.make(), loop.schedule, "run", seed=1)
    with pytest.raises(ValueError, match=r"run is not open: with RunFolder\(path, settings\) as folder"):
        loop.train(loop.make(), loop.schedule, RunFolder(tmp_path / "run", {}), seed=1)
    with (
        RunFolder(tmp_path / "run", {}) as folder,
        pytest.raises(ValueError, match=r"seed must be an integer .*, got 1\.5"),
    ):
        loop.train(loop.make(), loop.schedule, folder, seed=1.5)
    assert [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")] == ["settings.json"]


@pytest.mark.parametrize("result", [5, {}, {"kind": "result"}])
def test_a_result_of_another_kind_is_refused(tmp_path, result):
    loop = LOOPS["supervised"]
    with RunFolder(tmp_path, {}) as folder:
        loop.train(loop.make(), loop.schedule, folder, seed=1)
        state = folder.load()
        assert state is not None
        folder.save({**state, "result": result})
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with pytest.raises(RunError, match="does not fit this model"):
            loop.train(loop.make(), loop.schedule, folder, seed=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_other_data_are_refused_and_nothing_is_changed(tmp_path):
    loop, other = LOOPS["supervised"], test_supervised.make_splits()
    other["validation"][0][3, 1] += 1
    with RunFolder(tmp_path, {}) as folder:
        loop.train(loop.make(), loop.schedule, folder, seed=1)
    before = contents(tmp_path)
    with (
        RunFolder(tmp_path, {}) as folder,
        pytest.raises(RunError, match=r"trained with other settings: data was \w+, now \w+"),
    ):
        train(loop.make(), other, loop.schedule, folder, seed=1)
    assert contents(tmp_path) == before


def test_a_run_of_a_version_that_noted_no_data_still_opens(tmp_path):
    loop = LOOPS["supervised"]
    with RunFolder(tmp_path, {}) as folder:
        result = loop.train(loop.make(), loop.schedule, folder, seed=1)
        state = folder.load()
        assert state is not None
        del state["training"]["data"]
        folder.save(state)
        assert loop.train(loop.make(), loop.schedule, folder, seed=1) == result
