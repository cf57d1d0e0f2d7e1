import dataclasses
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.errors import RunError
from fastweights.report import remarks
from fastweights.reproduce import command, load
from fastweights.reproduce._experiment import except_for, only, settings_of
from fastweights.reproduce.ba2016.associative_retrieval import (
    PRESETS,
    RetrievalModel,
    Settings,
    check,
    draw_splits,
    run,
)
from fastweights.runs import load_run
from fastweights.tasks import associative_retrieval as task

from .helpers import TINY as EVERY
from .helpers import files_of, records, result, settings_in

TINY: Settings = EVERY["ba2016/associative-retrieval"].settings


def test_a_run_writes_the_table_and_a_folder_for_each_model_size_and_seed(tmp_path):
    run(dataclasses.replace(TINY, seeds=(3, 5)), tmp_path)
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {f"{model}-8-seed{seed}" for model in ("irnn", "lstm", "fast-weights") for seed in (3, 5)}
    table = result(tmp_path)
    assert table["floor_log_likelihood"] == -task.floor(4).cross_entropy
    assert [(row["model"], row["hidden_size"]) for row in table["rows"]] == [
        ("Fast weights", 8),
        ("LSTM", 8),
        ("IRNN", 8),
    ]
    for row, model in zip(table["rows"], ("fast-weights", "lstm", "irnn"), strict=True):
        assert row["ours"] == [records(tmp_path / f"{model}-8-seed{seed}")[-1]["test_error"] for seed in (3, 5)]
        assert row["metric"] == "test error, %"
        assert row["floor"] == task.floor(4).error
        assert row["paper"] is None  # the paper has no 8 units


def test_method_2_reaches_the_layer():
    for held in (True, False):
        core: Any = RetrievalModel("fast-weights", 8, dataclasses.replace(TINY, hold_input=held)).core
        assert core.constants.hold_input == held


def test_the_papers_numbers_stand_beside_its_sizes(tmp_path):
    run(dataclasses.replace(TINY, hidden_sizes=(20,), epochs=1), tmp_path / "four")
    assert [row["paper"] for row in result(tmp_path / "four")["rows"]] == [1.81, 60.81, 62.11]
    run(dataclasses.replace(TINY, hidden_sizes=(20,), epochs=1, pairs=8), tmp_path / "eight")
    assert [row["paper"] for row in result(tmp_path / "eight")["rows"]] == [None, None, None]
    assert result(tmp_path / "eight")["rows"][0]["floor"] == pytest.approx(70.0, abs=0.01)


def test_each_split_has_its_own_sequences():
    drawn = task.splits((300, 50, 60), 4, seed=0)
    splits = draw_splits(TINY)
    for name, expected in zip(("train", "validation", "test"), drawn, strict=True):
        assert torch.equal(splits[name][0], expected.inputs)
        assert torch.equal(splits[name][1], expected.targets)


def test_seeds_models_and_sizes_can_be_added_later(tmp_path):
    run(dataclasses.replace(TINY, models=("lstm",)), tmp_path)
    first = records(tmp_path / "lstm-8-seed1")
    run(dataclasses.replace(TINY, models=("lstm",), seeds=(2,), hidden_sizes=(8, 9)), tmp_path)
    assert records(tmp_path / "lstm-8-seed1") == first
    rows = result(tmp_path)["rows"]
    assert [(row["hidden_size"], len(row["ours"])) for row in rows] == [(8, 2), (9, 1)]


def test_a_run_says_what_it_changed_of_its_preset_and_for_which_models(tmp_path):
    quick = dataclasses.replace(TINY, models=("lstm",), hidden_sizes=(20,), threads=2, decay=0.95)
    run(quick, tmp_path, preset="quick")
    shared = {"train_examples 300 (100000)", "epochs 2 (30)", "embedding_size 6 (100)", "readout_size 7 (100)"}
    words = remarks(load_run(tmp_path))
    assert shared <= set(re.split(r"[,:.] ", words))
    assert words.startswith("Changed from the preset quick: train_examples")
    assert words.endswith("These rows are not the preset's comparison with the paper.")
    assert "decay" not in words  # the LSTM has none
    assert "threads" not in words
    assert "hidden_sizes" not in words

    # Rows that an earlier command left there keep their changes, and a model may have some of its own.
    run(dataclasses.replace(quick, models=("fast-weights",)), tmp_path, preset="quick")
    words = remarks(load_run(tmp_path))
    assert shared <= set(re.split(r"[,:;.] ", words))
    assert "; for Fast weights decay 0.95 (0.9). These rows are not" in words


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt"])
def test_a_damaged_member_is_refused_while_the_table_still_has_its_score(tmp_path, name):
    run(dataclasses.replace(TINY, models=("lstm",)), tmp_path)
    path = tmp_path / "lstm-8-seed1" / name
    path.write_bytes(path.read_bytes()[:-30])
    before = files_of(tmp_path)
    with pytest.raises(RunError, match=f"lstm-8-seed1/{name}"):
        run(dataclasses.replace(TINY, models=("irnn", "lstm")), tmp_path)
    assert files_of(tmp_path) == before


def test_a_run_of_the_preset_says_nothing_of_changes(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "quick", TINY)
    run(dataclasses.replace(TINY, seeds=(4,), models=("lstm",), hidden_sizes=(9,)), tmp_path)
    assert "changes" not in result(tmp_path)
    assert remarks(load_run(tmp_path)) == ""


def test_settings_of_fast_weights_do_not_concern_the_lstm(tmp_path):
    run(dataclasses.replace(TINY, models=("lstm", "fast-weights")), tmp_path)
    before = files_of(tmp_path)
    changed = dataclasses.replace(TINY, decay=0.8)
    with pytest.raises(
        RunError, match=r"fast-weights-8-seed1 holds a run with other settings: decay was 0\.9, now 0\.8"
    ):
        run(changed, tmp_path)
    assert files_of(tmp_path) == before
    run(dataclasses.replace(changed, models=("lstm",)), tmp_path)


def test_the_settings_of_a_model_are_those_of_all_and_its_own():
    @dataclasses.dataclass(frozen=True)
    class Own:
        models: tuple[str, ...] = ("a", "b")
        seeds: tuple[int, ...] = (1,)
        steps: int = 5
        sizes: tuple[int, ...] = (2,)
        rate: float = only("a", 0.5, "Strength.")
        a_steps: int = only("a", 9, "Steps.", recorded_as="steps")
        share: float = except_for(("b",), 0.1, "Share.")
        units: int = except_for(("b",), 7, "Units.", null=True)
        threads: int = 1

    first, second = (settings_of(Own(), model, without=("sizes",)) for model in "ab")
    assert list(first.items()) == [("steps", 9), ("rate", 0.5), ("share", 0.1), ("units", 7)]
    assert list(second.items()) == [("steps", 5), ("units", None)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": -0.5}, r"decay must lie between 0 and 1, got -0\.5"),
        ({"rate": -1.0}, r"rate must be finite and not negative, got -1\.0"),
        ({"pairs": 27}, "pairs must lie between 1 and 26"),
        ({"hidden_sizes": (0,)}, "hidden_sizes must be an integer of at least 1, got 0"),
        ({"hidden_sizes": ()}, "hidden_sizes is empty"),
        ({"train_examples": 0}, "train_examples must be an integer of at least 1, got 0"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"associative_lstm_epochs": 0}, "associative_lstm_epochs must be an integer of at least 1, got 0"),
        ({"data_seed": -1}, "data_seed must be an integer of at least 0, got -1"),
        ({"data_seed": 10**25}, "data_seed must be at most 2,147,483,647"),
        ({"batch_size": 10**20}, "batch_size must be at most 2,147,483,647"),
        ({"train_examples": 10**14}, "train_examples must be at most 2,147,483,647"),
        ({"learning_rate": float("inf")}, "learning_rate must be positive and finite, got inf"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(RunError, match=message):
        check(dataclasses.replace(TINY, **change))


@pytest.mark.parametrize(
    ("model", "recurrent"), [("irnn", 7600), ("lstm", 30400), ("associative-lstm", 79275), ("fast-weights", 7650)]
)
def test_the_models_have_the_papers_layers(model, recurrent):
    network = RetrievalModel(model, 50, Settings())
    embedding, readout = 37 * 100, 50 * 100 + 100 + 100 * 10 + 10
    assert sum(parameter.numel() for parameter in network.parameters()) == embedding + recurrent + readout
    inputs = task.sample(3, generator=torch.Generator()).inputs
    assert network(inputs).shape == (3, 10)


def test_the_associative_lstm_has_its_own_number_of_epochs(tmp_path):
    own = dataclasses.replace(TINY, models=("lstm", "associative-lstm"), epochs=3, associative_lstm_epochs=1)
    run(own, tmp_path)
    for model, epochs in (("lstm", 3), ("associative-lstm", 1)):
        folder = tmp_path / f"{model}-8-seed1"
        assert settings_in(folder)["epochs"] == epochs
        assert records(folder)[-2]["epoch"] == epochs


def test_the_command_on_the_page_gives_the_same_settings():
    from fastweights._parser import parse
    from fastweights.cli import _settings

    settings = dataclasses.replace(PRESETS["paper"], seeds=(4, 5), layer_norm=False, learning_rate=0.003)
    words = command("ba2016/associative-retrieval", "paper", PRESETS["paper"], settings).split()
    options, options_rest = parse(words[1:])
    options.rest = options_rest
    assert _settings(load(options.experiment), options) == settings


def start(folder: Path, threads: int) -> subprocess.Popen[bytes]:
    options = "--models fast-weights --hidden-sizes 20 --train-examples 3000 --validation-examples 200 --epochs 10"
    options += " --test-examples 200 --patience 10 --checkpoint-seconds 0.02"
    words = ["reproduce", "ba2016/associative-retrieval", "--output", str(folder), "--threads", str(threads)]
    words += options.split()
    return subprocess.Popen(
        [sys.executable, "-m", "fastweights", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[bytes]) -> str:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    return errors.decode()


def kill_in_training(folder: Path, threads: int, seconds: float) -> bool:
    """Start or resume the run and kill it so long after it began to train; False if it had nothing more to train."""
    process = start(folder, threads)
    assert process.stderr is not None
    for line in process.stderr:
        if b"steps" in line or b"resumes" in line:
            break
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    metrics = folder / "fast-weights-20-seed1" / "metrics.jsonl"
    return process.returncode == -signal.SIGKILL and not (metrics.exists() and '"result"' in metrics.read_text())


def resumes_exactly(tmp_path: Path, threads: int, kills: int, seed: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole, threads))
    training = records(whole / "fast-weights-20-seed1", keep_seconds=True)[-1]["seconds"]
    chance = random.Random(seed)
    checkpoint = broken / "fast-weights-20-seed1" / "checkpoint.pt"
    killed = 0
    while killed < kills or not checkpoint.exists():  # kills may all have come before there was one
        if kill_in_training(broken, threads, chance.uniform(0, training / kills)):
            killed += 1
        else:  # a noisy machine let it end: that was no kill, so begin again and be quicker
            shutil.rmtree(broken)
            killed, training = 0, training / 2
    assert "resumes at step" in finish(start(broken, threads))
    assert records(broken / "fast-weights-20-seed1") == records(whole / "fast-weights-20-seed1")
    assert result(broken) == result(whole)
    best = [
        torch.load(folder / "fast-weights-20-seed1" / "checkpoint.pt", weights_only=True)["best"]
        for folder in (whole, broken)
    ]
    assert best[0].keys() == best[1].keys()
    for name, tensor in best[0].items():
        assert torch.equal(tensor, best[1][name])


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_numbers(tmp_path):
    resumes_exactly(tmp_path, threads=2, kills=3, seed=1)
