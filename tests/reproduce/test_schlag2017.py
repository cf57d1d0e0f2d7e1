import dataclasses

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import RunError
from fastweights.report.blocks import Paragraph, Table
from fastweights.reproduce.schlag2017.associative_retrieval import (
    EXPERIMENT,
    PRESETS,
    TITLES,
    ModelName,
    Settings,
    check,
    draw_splits,
    evaluate,
    make_model,
    run,
    schedule,
)
from fastweights.tasks import gated_retrieval as task
from fastweights.training import evaluate_streams

from .helpers import TINY as EVERY
from .helpers import files_of, records, result, settings_in

ALL: tuple[ModelName, ...] = ("attention", "lstm", "hyper-lstm", "gated")
TINY: Settings = EVERY[EXPERIMENT].settings
TINY_WORDS = [
    word
    for field in dataclasses.fields(TINY)
    if (value := getattr(TINY, field.name)) != getattr(Settings(), field.name)
    for word in (f"--{field.name.replace('_', '-')}", str(value))
]


@pytest.mark.parametrize(
    ("model", "count"), [("attention", 100_140), ("lstm", 1_487_640), ("hyper-lstm", 3_848_538), ("gated", 46_234)]
)
def test_the_models_have_the_papers_numbers_of_parameters(model, count):
    """The paper's HyperNetwork has 3,848,215, of a configuration that it does not give."""
    network = make_model(model, Settings())
    assert sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad) == count


@pytest.mark.parametrize(
    ("model", "count"), [("attention", 49_920), ("lstm", 48_140), ("hyper-lstm", 49_744), ("gated", 46_234)]
)
def test_the_equal_preset_gives_every_model_as_many_parameters_and_steps(model, count):
    settings = PRESETS["equal"]
    network = make_model(model, settings)
    assert sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad) == count
    plan = schedule(settings, model)
    assert (plan.epochs, plan.batch_size) == (4, 64)
    assert set(settings.models) == set(ALL)


def test_the_place_of_the_layer_norm_and_the_optimizer_reach_the_training():
    settings = dataclasses.replace(TINY, layer_norm="both", optimizer="adam")
    assert make_model("gated", settings).core.layer_norm == "both"
    assert schedule(settings, "gated").optimizer == "adam"


def test_every_model_has_its_own_learning_rate_and_clipping(tmp_path):
    settings = dataclasses.replace(TINY, models=("lstm", "gated"), lstm_learning_rate=0.01, lstm_clip_norm=2.0)
    run(settings, tmp_path)
    own = {name: settings_in(tmp_path / f"{name}-seed1") for name in ("lstm-8", "gated-6")}
    assert [(each["learning_rate"], each["clip_norm"]) for each in own.values()] == [(0.01, 2.0), (1e-3, 0.1)]
    assert [schedule(settings, model).learning_rate for model in ("lstm", "gated")] == [0.01, 1e-3]


def test_the_lstm_has_one_bias_a_gate():
    core = make_model("lstm", TINY).core
    assert (core.get_parameter("bias_hh_l0") == 0).all()
    assert not core.get_parameter("bias_hh_l0").requires_grad


@pytest.mark.parametrize("model", ALL)
def test_a_model_goes_on_where_its_state_was(model):
    torch.manual_seed(0)
    network = make_model(model, TINY).double()
    inputs = torch.randint(15, (9, 3))
    whole, last = network(inputs)
    first, state = network(inputs[:4])
    second, state = network(inputs[4:], tuple(state))
    torch.testing.assert_close(torch.cat((first, second)), whole)
    for found, expected in zip(state, last, strict=True):
        assert found.shape[0] == 3
        torch.testing.assert_close(found, expected)


def test_a_run_writes_the_table_and_both_curves(tmp_path):
    settings = dataclasses.replace(TINY, models=ALL)
    run(settings, tmp_path)
    table = result(tmp_path)
    metrics = ["test partial accuracy", "test total accuracy", "test partial bits", "test total bits"]
    assert list(dict.fromkeys(row["metric"] for row in table["rows"])) == metrics
    assert len(table["rows"]) == 16
    folders: dict[ModelName, str] = {
        "attention": "attention-8",
        "lstm": "lstm-8",
        "hyper-lstm": "hyper-lstm-8",
        "gated": "gated-6",
    }
    titles = {TITLES[model]: f"{folder}-seed1" for model, folder in folders.items()}
    for row in table["rows"]:
        last = records(tmp_path / titles[row["model"]])[-1]
        assert row["ours"] == [last[row["metric"].replace(" ", "_")]]
        assert row["paper"] is None  # the paper has no such sizes
    assert table["rows"][0]["floor"] == task.floor().accuracy
    assert table["rows"][4]["floor"] == pytest.approx(0.99036, abs=1e-5)
    assert [curve["key"] for curve in table["curves"]] == ["validation_partial_accuracy", "validation_partial_bits"]
    own = settings_in(tmp_path / "gated-6-seed1")
    assert own["epochs"] == 2
    assert own["slow_inner_size"] == 7
    assert "lstm_hidden_size" not in own
    assert settings_in(tmp_path / "lstm-8-seed1")["epochs"] == 1


def test_the_streams_are_cut_for_training_and_left_long_for_scores():
    cut = draw_splits(Settings())
    assert cut["train"].inputs.shape[1] == 256
    assert 5.7e6 < cut["train"].inputs.numel() < 5.8e6
    assert cut["test"].inputs.shape[1] == 50
    assert 2.85e5 < cut["test"].inputs.numel() < 2.9e5


def test_evaluate_only_shows_what_the_run_measured_and_writes_nothing(tmp_path, capsys):
    words = ["reproduce", EXPERIMENT, *TINY_WORDS, "--output", str(tmp_path / "run")]
    assert main(words) == 0
    capsys.readouterr()
    before = files_of(tmp_path / "run")
    assert main([*words, "--evaluate-only"]) == 0
    shown = capsys.readouterr().out
    assert files_of(tmp_path / "run") == before
    last = records(tmp_path / "run" / "gated-6-seed1")[-1]
    lines = {line.split("  ")[0].strip(): line.split() for line in shown.splitlines()}
    for metric in ("test partial accuracy", "test total accuracy", "test partial bits", "test total bits"):
        assert lines[metric][-2] == f"{last[metric.replace(' ', '_')]:.4f}"
    assert f"Gated fast weights, 6 units: the best pass of {tmp_path / 'run' / 'gated-6-seed1'}" in shown
    assert f"{last['test_by_distance'][0][2]:.3f}" in lines["partial accuracy"]
    assert main([*words, "--evaluate-only", "--epochs", "9"]) == 1  # another run's
    assert "epochs was 2, now 9" in capsys.readouterr().err


def test_the_published_weights_answer_better_than_the_papers(tmp_path):
    origin, table, _ = evaluate(Settings(), tmp_path)
    assert isinstance(origin, Paragraph)
    assert isinstance(table, Table)
    assert origin.text.startswith("Gated fast weights, 40 units: the published weights: seed ")
    metric, paper, ours, floor = table.rows[0]
    assert (metric, paper, floor) == ("test partial accuracy", "0.9522", "0.4458")
    assert 0.9522 < float(ours) < 1


def test_evaluate_only_names_the_models_that_have_no_weights(tmp_path):
    *_, last = evaluate(dataclasses.replace(Settings(), models=("lstm", "gated")), tmp_path)
    assert last == Paragraph(f"LSTM: no weights in {tmp_path}, and none with the package: train first")
    assert len(_) == 3


def test_evaluate_only_trains_nothing(tmp_path, capsys):
    with pytest.raises(RunError, match="evaluate_only trains nothing"):
        run(dataclasses.replace(TINY, evaluate_only=True), tmp_path / "run")
    assert main(["reproduce", EXPERIMENT, "--evaluate-only", "--fresh", "--output", str(tmp_path / "run")]) == 1
    assert "--evaluate-only trains nothing: give one of them" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data_seed", [0, 1, 2])
def test_few_queries_still_have_answers(tmp_path, data_seed):
    settings = dataclasses.replace(TINY, validation_queries=1, test_queries=2, epochs=1, data_seed=data_seed)
    run(settings, tmp_path)
    assert records(tmp_path / "gated-6-seed1")[-1]["kind"] == "result"


def test_evaluate_only_without_weights_says_so(tmp_path, capsys):
    assert main(["reproduce", EXPERIMENT, "--models", "lstm", "--evaluate-only", "--output", str(tmp_path)]) == 1
    assert "holds no weights of LSTM, and the package has none either: train first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_published_weights_are_what_was_published_whatever_the_settings_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.pretrained._PUBLISHED", (tmp_path,))
    torch.manual_seed(0)
    network = make_model("gated", TINY)
    network.about = {"seed": 3, "steps": 2000, "commit": "abc"}
    network.save_pretrained(tmp_path / "schlag2017-gated")
    origin, table, _ = evaluate(dataclasses.replace(TINY, hidden_size=5), tmp_path / "run")
    assert isinstance(table, Table)
    assert origin == Paragraph("Gated fast weights, 6 units: the published weights: seed 3, 2,000 steps, commit abc")
    scores = evaluate_streams(network, draw_splits(TINY)["test"])
    assert table.rows[0][2] == f"{scores.partial_accuracy:.4f}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"train_queries": 0}, "train_queries must be an integer of at least 1, got 0"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"segment": 0}, "segment must be an integer of at least 1, got 0"),
        ({"reset": -0.1}, "reset must lie between 0 and 1, got -0.1"),
        ({"attention_decay": 1.5, "models": ("attention",)}, "decay"),
        ({"batch_size": 100_000}, "batch_size must be at most"),
    ],
)
def test_settings_that_cannot_run_are_refused(setting, words):
    with pytest.raises(RunError, match=words):
        check(dataclasses.replace(TINY, **setting))


def test_settings_of_another_model_do_not_matter(tmp_path):
    run(TINY, tmp_path)
    before = records(tmp_path / "gated-6-seed1")
    with pytest.raises(RunError, match="slow_inner_size was 7, now 9"):
        run(dataclasses.replace(TINY, slow_inner_size=9), tmp_path)
    run(dataclasses.replace(TINY, lstm_epochs=9, threads=2), tmp_path)
    assert records(tmp_path / "gated-6-seed1") == before
