"""Language models with memories: every number of the table is fitted on validation and scored once on the test."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from matplotlib.patches import Rectangle

from fastweights.cli import main
from fastweights.errors import HubError, RunError, TrainingError, WeightsError
from fastweights.evaluation import perplexity, score_text
from fastweights.memory import NeuralCache, StreamMbPA, mix
from fastweights.nn import LSTMLanguageModel
from fastweights.report import write_page
from fastweights.report.blocks import Paragraph, Table
from fastweights.report.figures import bars, passages
from fastweights.reproduce import _language
from fastweights.reproduce._experiment import settings_of
from fastweights.reproduce._language import make_model
from fastweights.reproduce.sprechmann2018.language import (
    EXPERIMENT,
    PRESETS,
    Settings,
    check,
    evaluate,
    run,
)
from fastweights.reproduce.trained import load_member
from fastweights.runs import load_checkpoint, load_run
from fastweights.tasks import text

from .helpers import TINY as EVERY
from .helpers import files_of, made_up_text, make_up, records, result, settings_in

TINY: Settings = EVERY[EXPERIMENT].settings
PLAIN = dataclasses.replace(TINY, rivals=(), epochs=1)
MEMBER = "ptb-6-seed1"

pytestmark = pytest.mark.usefixtures("made_up")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a run of all rows, which is only read."""
    folder = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        make_up(patch)
        run(TINY, folder)
    return folder


def trained_model(folder):
    model = make_model(20, settings_in(folder / MEMBER))
    state = load_checkpoint(folder / MEMBER / "checkpoint.pt")
    assert state is not None
    model.load_state_dict(state["best"])
    return model


@pytest.mark.parametrize(("model", "size", "count"), [("ptb", 10_000, 9_997_280), ("wikitext-2", 33_278, 24_027_989)])
def test_the_models_have_the_papers_numbers_of_parameters(model, size, count):
    network = make_model(size, settings_of(PRESETS["paper"], model))
    assert sum(parameter.numel() for parameter in network.parameters()) == count


def test_a_row_for_each_memory_on_validation_and_test(whole):
    rows = result(whole)["rows"]
    last = records(whole / MEMBER)[-1]
    names = ("LSTM", "LSTM + cache", "LSTM + MbPA", "LSTM + cache + MbPA", "LSTM, dynamic evaluation", "LSTM + kNN-LM")
    assert [(row["model"], row["metric"]) for row in rows] == [
        (f"Penn Treebank, {name}", f"{split} perplexity") for split in ("validation", "test") for name in names
    ]
    keys = ("", "cache_", "mbpa_", "cache_mbpa_", "dynamic_", "knn_")
    assert [row["ours"] for row in rows] == [
        [last[f"{split}_{key}perplexity"]] for split in ("validation", "test") for key in keys
    ]
    assert [row["paper"] for row in rows[6:]] == [59.6, 55.3, 54.3, 54.4, None, None]
    corpus = made_up_text("ptb")
    share = corpus.vocabulary.counts / corpus.vocabulary.counts.sum()
    assert rows[-1]["floor"] == pytest.approx(float(2 ** -share[corpus.test[1:].long()].log2().mean()), rel=1e-5)


def test_the_numbers_are_those_of_the_mixture_that_was_fitted_on_validation(whole):
    last, corpus = records(whole / MEMBER)[-1], made_up_text("ptb")
    fitted = last["fitted"]["LSTM + cache"]
    weights = [fitted["weight of LSTM"], fitted["weight of cache"]]
    assert 0.01 < weights[1] < 0.99
    found = {}
    for split in ("validation", "test"):
        memories = {f"{theta}": NeuralCache(50, 20, theta) for theta in TINY.thetas}
        scores = score_text(trained_model(whole), getattr(corpus, split), memories, by_state=list(memories))
        found[split] = perplexity(mix([scores["model"], scores[str(fitted["theta"])]], weights))
        assert last[f"{split}_cache_perplexity"] == pytest.approx(found[split], rel=1e-4)
        assert last[f"{split}_perplexity"] == pytest.approx(perplexity(scores["model"]), rel=1e-4)
    assert last["validation_cache_perplexity"] < last["validation_perplexity"]
    assert last["validation_cache_mbpa_perplexity"] <= last["validation_cache_perplexity"] * (1 + 1e-6)


def test_a_trained_model_is_shared_with_a_card_that_has_its_numbers(whole, tmp_path, capsys):
    words = ["share", str(whole / MEMBER), "--output", str(tmp_path / "model"), "--licence", "cc-by-4.0"]
    assert main([*words, "--limits", "It knows 20 words."]) == 0
    assert capsys.readouterr().out == f"model: {tmp_path / 'model'}\n"
    model = LSTMLanguageModel.from_pretrained(tmp_path / "model")
    trained = trained_model(whole)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name])
    card = (tmp_path / "model" / "README.md").read_text()
    ours = records(whole / MEMBER)[-1]["test_cache_perplexity"]
    assert f"| Penn Treebank, LSTM + cache | 6 | test perplexity | 55.30 | {ours:.2f} (1 seed) |" in card
    assert "license: cc-by-4.0" in card
    assert load_run(whole).command in card
    assert "## Limits" in card
    assert "It knows 20 words." in card
    assert main(["share", str(whole / "ptb-7-seed1"), "--output", str(tmp_path / "other")]) == 1
    assert "ptb-7-seed1: give RUN/MEMBER, of a RUN that `fastweights reproduce` printed" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_model_that_is_shared_is_uploaded_with_the_same_card(whole, tmp_path, capsys, monkeypatch):
    uploaded = []

    def push_to_hub(model, name, *, card):
        uploaded.append((type(model), name, card))
        return "its address"

    monkeypatch.setattr(LSTMLanguageModel, "push_to_hub", push_to_hub)
    assert main(["share", str(whole / MEMBER), "--output", str(tmp_path / "model"), "--hub", "me/ptb"]) == 0
    assert capsys.readouterr().out == f"model: {tmp_path / 'model'}\nuploaded: its address\n"
    assert uploaded == [(LSTMLanguageModel, "me/ptb", (tmp_path / "model" / "README.md").read_text())]


def test_figure_8_has_the_gain_of_mbpa_by_frequency(whole):
    parts = records(whole / MEMBER)[-1]["test_by_frequency"]
    assert sum(parts["words of the test"]) == 169
    least = [int(name.split(" ")[0].replace(",", "")) for name in parts["occurrences in training"]]
    assert least == sorted(least, reverse=True)
    figure = bars(load_run(whole))
    assert figure is not None
    (axes,) = figure.axes
    heights = [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert heights == pytest.approx(
        [
            100 * (1 - both / cache)
            for both, cache in zip(parts["LSTM + cache + MbPA"], parts["LSTM + cache"], strict=True)
        ]
    )
    assert [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()] == parts["occurrences in training"]
    write_page(whole)
    page = (whole / "report.md").read_text()
    assert "(bars.svg)" in page
    assert "Chosen and fitted on validation:" in page


def test_the_passage_shows_what_the_memories_add_to_each_word(whole):
    corpus, passage = made_up_text("ptb"), records(whole / MEMBER)[-1]["passage"]
    words = corpus.vocabulary.decode(corpus.test[1:])
    start = next(at for at in range(len(words)) if words[at : at + 120] == passage["words"])
    assert len(passage["bits"]) == 120
    fitted = records(whole / MEMBER)[-1]["fitted"]["LSTM + cache + MbPA"]
    model = trained_model(whole)
    memories: dict[str, Any] = {
        "cache": NeuralCache(50, 20, fitted["theta"]),
        "MbPA": StreamMbPA(model.head, 50, neighbours=fitted["neighbours"], lr=fitted["learning rate"], half=True),
    }
    scores = score_text(model, corpus.test, memories, by_state=["cache"])
    weights = [fitted[f"weight of {name}"] for name in ("LSTM", "cache", "MbPA")]
    gain = (mix([scores[name] for name in ("model", "cache", "MbPA")], weights) - scores["model"]) / math.log(2)
    assert passage["bits"] == pytest.approx(gain[start : start + 120].tolist(), abs=2e-3)
    figure = passages(load_run(whole))
    assert figure is not None
    drawn = [text.get_text() for text in figure.texts]
    assert drawn == ["Penn Treebank, LSTM", *passage["words"]]


def test_a_trained_model_is_scored_again_with_other_settings_and_not_trained_again(tmp_path):
    run(PLAIN, tmp_path)
    first = records(tmp_path / MEMBER, keep_seconds=True)
    run(dataclasses.replace(PLAIN, memory_size=5), tmp_path)
    second = records(tmp_path / MEMBER, keep_seconds=True)
    assert second[:-1] == first
    assert second[-1]["seconds"] == first[-1]["seconds"]
    assert second[-1]["test_perplexity"] == first[-1]["test_perplexity"]
    assert second[-1]["test_cache_perplexity"] != first[-1]["test_cache_perplexity"]
    assert settings_in(tmp_path / MEMBER)["memory_size"] == 5
    assert result(tmp_path)["rows"][5]["ours"] == [second[-1]["test_cache_perplexity"]]
    run(dataclasses.replace(PLAIN, memory_size=5), tmp_path)
    assert records(tmp_path / MEMBER, keep_seconds=True) == second


def test_of_the_memories_that_take_room_one_is_held_at_a_time(tmp_path, monkeypatch):
    passes = []

    def score(model, tokens, memories, **options):
        passes.append([type(each) for each in memories.values()])
        return score_text(model, tokens, memories, **options)

    monkeypatch.setattr(_language, "score_text", score)
    run(dataclasses.replace(PLAIN, thetas=(0.1, 0.2), neighbours=(4, 8), local_rates=(0.1, 0.2, 0.3)), tmp_path)
    assert passes[:7] == [[NeuralCache] * 2, *[[StreamMbPA]] * 6]
    assert passes[7:] == [[NeuralCache, StreamMbPA]] * 2  # validation and test


def test_dynamic_evaluation_does_not_choose_what_runs_away_and_says_so_where_all_do(tmp_path):
    dynamic = dataclasses.replace(PLAIN, rivals=("dynamic",), dynamic_rates=(1e9, 1e-4))
    run(dynamic, tmp_path)
    fitted = records(tmp_path / MEMBER)[-1]["fitted"]["LSTM, dynamic evaluation"]
    assert fitted == {"learning rate": 1e-4, "decay": 2e-3}
    before = (tmp_path / MEMBER / "metrics.jsonl").read_bytes()
    with pytest.raises(TrainingError, match=r"learning rate 1000000000\.0 and .*: give smaller --dynamic-rates"):
        run(dataclasses.replace(dynamic, dynamic_rates=(1e9,)), tmp_path)
    assert (tmp_path / MEMBER / "metrics.jsonl").read_bytes() == before


def test_the_rows_of_a_text_stay_when_another_is_asked_for(tmp_path):
    run(PLAIN, tmp_path)
    other: dict[str, Any] = {
        "wikitext_epochs": 1,
        "wikitext_sampled": 0,
        "wikitext_embedding_size": 6,
        "wikitext_hidden_size": 6,
    }
    run(dataclasses.replace(PLAIN, models=("wikitext-2",), **other), tmp_path)
    rows = result(tmp_path)["rows"]
    assert all(row["ours"] for row in rows)
    papers = {row["model"]: row["paper"] for row in rows if row["metric"] == "test perplexity"}
    assert papers["Penn Treebank, LSTM + cache"] == 55.3
    assert papers["WikiText-2, LSTM + cache"] == 51.3


def test_evaluate_only_shows_what_the_run_measured_and_writes_nothing(tmp_path, capsys):
    words = [
        word
        for field in dataclasses.fields(PLAIN)
        if (value := getattr(PLAIN, field.name)) != getattr(Settings(), field.name)
        for word in (
            f"--{field.name.replace('_', '-')}",
            *map(str, value if isinstance(value, tuple) else (value,)),
        )
    ]
    command = ["reproduce", EXPERIMENT, *words, "--output", str(tmp_path / "run")]
    assert main(command) == 0
    capsys.readouterr()
    before = files_of(tmp_path / "run")
    assert main([*command, "--evaluate-only"]) == 0
    assert files_of(tmp_path / "run") == before
    shown = capsys.readouterr().out
    last = records(tmp_path / "run" / MEMBER)[-1]
    assert f"Penn Treebank, LSTM of 6 units: the best pass of {tmp_path / 'run' / MEMBER}" in shown
    for key in ("", "cache_", "mbpa_", "cache_mbpa_"):
        assert f"{last[f'test_{key}perplexity']:.2f}" in shown
    assert main([*command, "--evaluate-only", "--epochs", "9"]) == 1  # another run's
    assert "epochs was 1, now 9" in capsys.readouterr().err


def publish(run, monkeypatch):
    """Put a run's model where published ones are looked for, in half precision, and return its folder."""
    monkeypatch.setattr("fastweights.pretrained._PUBLISHED", (run / "models",))
    model = load_member(run / MEMBER)
    assert isinstance(model, LSTMLanguageModel)
    model.half().save_pretrained(run / "models" / "sprechmann2018-ptb")
    return run / "models" / "sprechmann2018-ptb"


def test_the_published_weights_answer_whatever_the_settings_sizes(tmp_path, monkeypatch):
    run(PLAIN, tmp_path)
    path = publish(tmp_path, monkeypatch)
    steps, commit = (LSTMLanguageModel.from_pretrained(path).about[fact] for fact in ("steps", "commit"))
    last = records(tmp_path / MEMBER)[-1]
    other = dataclasses.replace(PLAIN, hidden_size=9)
    for settings, name in ((other, "sprechmann2018-ptb"), (dataclasses.replace(other, weights=str(path)), path)):
        origin, table, *_ = evaluate(settings, tmp_path)
        facts = f"seed 1, steps {steps}, commit {commit}"
        assert origin == Paragraph(f"Penn Treebank, LSTM of 6 units: the weights of {name} ({facts})")
        assert isinstance(table, Table)
        found = dict(zip([(row[0], row[1]) for row in table.rows], [float(row[3]) for row in table.rows], strict=True))
        assert found["Penn Treebank, LSTM", "test perplexity"] == pytest.approx(last["test_perplexity"], rel=0.01)


def test_weights_that_are_named_take_the_place_of_the_runs(tmp_path):
    run(PLAIN, tmp_path)
    make_model(20, settings_in(tmp_path / MEMBER)).save_pretrained(
        tmp_path / "mine"
    )  # nothing is known of its training
    named = dataclasses.replace(PLAIN, weights=str(tmp_path / "mine"))
    origin, *_ = evaluate(named, tmp_path)
    assert origin == Paragraph(f"Penn Treebank, LSTM of 6 units: the weights of {tmp_path / 'mine'}")
    with pytest.raises(RunError, match="mine is one model's: give --models the one text that it knows"):
        evaluate(dataclasses.replace(named, models=("ptb", "wikitext-2")), tmp_path)
    with pytest.raises(HubError, match="there is no folder"):
        evaluate(dataclasses.replace(PLAIN, weights="./nowhere"), tmp_path)
    with pytest.raises(WeightsError, match=r"holds no model, it has no config.json"):
        evaluate(dataclasses.replace(PLAIN, weights=str(tmp_path)), tmp_path)
    with pytest.raises(RunError, match="--weights names a model that is trained already: give --evaluate-only too"):
        run(named, tmp_path)


def test_a_text_with_other_words_is_refused(tmp_path, monkeypatch):
    run(PLAIN, tmp_path)
    publish(tmp_path, monkeypatch)
    make_model(19, settings_in(tmp_path / MEMBER)).save_pretrained(tmp_path / "fewer")
    with pytest.raises(RunError, match=r"fewer know other words \(19\) than this text \(20\): give the text that they"):
        evaluate(dataclasses.replace(PLAIN, weights=str(tmp_path / "fewer")), tmp_path)
    corpus = made_up_text("ptb")
    words = text.Vocabulary(["another", *corpus.vocabulary.words[1:]], corpus.vocabulary.counts)
    monkeypatch.setattr(text, "load", lambda name, data_dir=None: dataclasses.replace(corpus, vocabulary=words))
    with pytest.raises(RunError, match="holds a run with other settings: vocabulary was"):
        run(PLAIN, tmp_path)
    with pytest.raises(RunError, match="holds a run with other settings: vocabulary was"):
        evaluate(PLAIN, tmp_path)
    with pytest.raises(RunError, match=r"the weights of sprechmann2018-ptb .* know other words \(20\) than this text"):
        evaluate(PLAIN, tmp_path / "nothing")


def test_evaluate_only_trains_nothing_and_says_so_without_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.pretrained._PUBLISHED", ())
    with pytest.raises(RunError, match="evaluate_only trains nothing"):
        run(dataclasses.replace(TINY, evaluate_only=True), tmp_path / "run")
    with pytest.raises(RunError, match=r"Penn Treebank: no weights in .*: train first, .* or give --weights FOLDER"):
        evaluate(TINY, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_published_models_are_those_of_the_published_run(pytestconfig):
    models = pytestconfig.rootpath / "models"
    ours = {
        member.name: member
        for member in load_run(pytestconfig.rootpath / "docs/results/sprechmann2018-language").members
    }
    for name in PRESETS["small"].models:
        model = LSTMLanguageModel.from_pretrained(models / f"sprechmann2018-{name}")
        member = ours[f"{name}-512-seed1"]
        assert model.about["vocabulary"] == member.settings["vocabulary"]
        assert model.about["commit"] == member.environment["commit"]
        assert (model.hidden_size, model.embedding_size) == (512, member.settings["embedding_size"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"memory_size": 0}, "memory_size must be an integer of at least 1, got 0"),
        ({"dynamic_rates": ()}, "dynamic_rates is empty"),
        ({"thetas": (-1.0,)}, "thetas must be"),
        ({"local_rates": (0.1, 0.1)}, "local_rates has 0.1 twice"),
        ({"dynamic_decays": (-1.0,)}, "dynamic_decays must"),
        ({"searched": 0}, "searched must be an integer of at least 1, got 0"),
        ({"output_dropout": 1.0}, "output_dropout must be a probability"),
        ({"sampled": -1}, "sampled must be an integer of at least 0"),
    ],
)
def test_settings_that_cannot_run_are_refused(setting, words):
    with pytest.raises(RunError, match=words):
        check(dataclasses.replace(TINY, **setting))


def test_a_batch_of_more_pieces_than_the_text_has_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(RunError, match=r"of 600 tokens cannot be cut into 400 streams .*: give 300 at most"):
        run(dataclasses.replace(PLAIN, batch_size=400), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["ptb", "wikitext-2"])
def test_settings_of_another_text_do_not_matter(model):
    own = settings_of(Settings(), model)
    assert not any(name.startswith("wikitext") for name in own)
    assert {"hidden_size", "embedding_size", "epochs", "sampled"} <= own.keys()
    changed = dataclasses.replace(Settings(), wikitext_hidden_size=7, wikitext_sampled=1)
    assert (settings_of(changed, model) == own) == (model == "ptb")
