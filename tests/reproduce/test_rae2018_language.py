"""Language models with a plain and a Hebbian softmax: tables 1 and 2 have what the models score on the text."""

import dataclasses

import pytest
import torch

from fastweights.errors import RunError
from fastweights.evaluation import by_frequency, perplexity, score_text
from fastweights.nn import HebbianSoftmax
from fastweights.report import write_page
from fastweights.reproduce._experiment import settings_of
from fastweights.reproduce._language import make_model, schedule
from fastweights.reproduce.rae2018.language import (
    EXPERIMENT,
    PRESETS,
    Settings,
    check,
    load_corpora,
    run,
    table,
)
from fastweights.runs import load_checkpoint, load_run
from fastweights.tasks.text.gutenberg import PAPER_TEST, PAPER_VALIDATION

from .helpers import TINY as EVERY
from .helpers import made_up_text, make_up, records, result, settings_in

TINY: Settings = EVERY[EXPERIMENT].settings
PLAIN, HEBBIAN = "ptb-softmax-6-seed1", "ptb-hebbian-0.1-100-l2-6-seed1"

pytestmark = pytest.mark.usefixtures("made_up")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a run of both models, which is only read."""
    folder = tmp_path_factory.mktemp("language")
    with pytest.MonkeyPatch.context() as patch:
        make_up(patch)
        run(TINY, folder)
    return folder


def load_best(folder):
    state = load_checkpoint(folder / "checkpoint.pt")
    assert state is not None
    return state["best"]


def test_the_tables_have_the_scores_of_the_trained_models_by_memory_and_by_frequency(whole):
    rows = {(row["model"], row["metric"]): row["ours"] for row in result(whole)["rows"]}
    corpus = made_up_text("ptb")
    for member, title in ((PLAIN, "LSTM{}, Penn Treebank"), (HEBBIAN, "LSTM + Hebbian{}, Penn Treebank")):
        title += " (gamma = 0.1, T = 100)" if member == HEBBIAN else ""
        model = make_model(20, settings_in(whole / member))
        model.load_state_dict(load_best(whole / member))
        log_p = score_text(model, corpus.test)["model"]
        last = records(whole / member)[-1]
        assert rows[title.format(""), "test perplexity"] == pytest.approx([perplexity(log_p)], rel=1e-4)
        assert rows[title.format(" + cache"), "test perplexity"] == [last["test_cache_perplexity"]]
        assert rows[title.format(" + cache + MbPA"), "validation perplexity"] == [
            last["validation_cache_mbpa_perplexity"]
        ]
        buckets = by_frequency(log_p, corpus.test[1:], corpus.vocabulary.counts, (100, 1000, 10_000))
        for bucket in buckets:
            ours = rows[title.format(""), f"test perplexity, words seen {bucket.name} times"]
            assert ours == (pytest.approx([bucket.perplexity], rel=1e-4) if bucket.tokens else [])
    assert len(rows) == 2 * (3 + 3 + len(buckets))


def test_the_hebbian_softmax_remembers_and_the_plain_one_does_not(whole):
    assert load_best(whole / HEBBIAN)["head.counts"].sum() >= 4 * ((600 // 4) - 1)
    assert "head.counts" not in load_best(whole / PLAIN)


def test_the_figure_shows_both_models_by_frequency(whole):
    (panel,) = load_run(whole).bars
    assert list(panel.series) == ["LSTM", "LSTM + Hebbian (gamma = 0.1, T = 100)"]
    last = records(whole / PLAIN)[-1]["test_by_frequency"]
    assert panel.groups == last["occurrences in training"]
    assert panel.series["LSTM"] == pytest.approx(last["LSTM"])
    write_page(whole, whole / "page")
    assert "![Bars](bars.svg)" in (whole / "page" / "report.md").read_text()
    assert (whole / "page" / "bars.svg").is_file()


def test_another_way_to_smooth_is_another_row_beside_the_first(whole, tmp_path):
    folder = tmp_path / "run"
    short = dataclasses.replace(TINY, epochs=1, thetas=(), local_rates=())
    run(short, folder)
    another = dataclasses.replace(short, models=("hebbian",))
    run(dataclasses.replace(another, counting="running_mean"), folder)
    run(dataclasses.replace(another, epochs=2, plain_epochs=1), folder)
    models = list(dict.fromkeys(row["model"] for row in result(folder)["rows"]))
    assert models == [
        "LSTM, Penn Treebank",
        "LSTM + Hebbian, Penn Treebank (gamma = 0.1, T = 100, last pass plain)",
        "LSTM + Hebbian, Penn Treebank (gamma = 0.1, T = 100)",
        "LSTM + Hebbian, Penn Treebank (gamma = 0.1, T = 100, running_mean)",
    ]


def test_the_paper_s_model_is_made_as_the_paper_says():
    paper = PRESETS["paper"]
    model = make_model(10, settings_of(paper, "hebbian") | {"embedding_size": 8, "hidden_size": 8})
    assert isinstance(model.head, HebbianSoftmax)
    assert (model.head.gamma, model.head.limit, model.layer_norm, model.projection) == (0.25, 500, True, None)
    assert model.head.weight is model.embedding.weight
    plain = make_model(10, settings_of(paper, "softmax") | {"embedding_size": 8, "hidden_size": 8})
    assert isinstance(plain.head, torch.nn.Linear)


def test_a_batch_of_more_pieces_than_the_text_has_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(RunError, match=r"of 600 tokens cannot be cut into 400 streams .*: give 300 at most"):
        run(dataclasses.replace(TINY, batch_size=400), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gigaword_is_not_looked_for(tmp_path):
    with pytest.raises(RunError, match="GigaWord is licensed and is not searched for: give the folder of its files"):
        run(dataclasses.replace(TINY, texts=("gigaword",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_folder_of_books_is_read_for_gutenberg_alone(tmp_path):
    for book in (*PAPER_VALIDATION, *PAPER_TEST, 11, 12):
        (tmp_path / f"pg{book}.txt").write_text("The cat sat. The cat was a cat.\n" * 20)
    corpus = load_corpora(dataclasses.replace(TINY, texts=("gutenberg",), books=tmp_path))["gutenberg"]
    assert (len(corpus.validation), len(corpus.test)) == (12 * 20 * 12, 13 * 20 * 12)
    with pytest.raises(
        RunError,
        match=r"--books .* is only for the text gutenberg, which is not among the texts",
    ):
        run(dataclasses.replace(TINY, books=tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_books_and_news_stand_beside_the_paper_s_perplexity_of_all_words():
    """Table 2 has it in its last column, for the test text and without memories."""
    asked = dataclasses.replace(PRESETS["paper"], texts=("gutenberg", "gigaword"))
    papers = {
        (row["model"].partition(" (")[0], row["metric"]): row["paper"]
        for row in table(asked, [])["rows"]
        if not row["metric"].endswith("times") and row["paper"] is not None
    }
    assert papers == {
        ("LSTM, Gutenberg", "test perplexity"): 47.9,
        ("LSTM + Hebbian, Gutenberg", "test perplexity"): 45.5,
        ("LSTM, GigaWord", "test perplexity"): 53.5,
        ("LSTM + Hebbian, GigaWord", "test perplexity"): 43.7,
    }


def test_the_learning_rate_falls_or_stays():
    rate = TINY.learning_rate
    assert schedule(TINY, "softmax").learning_rate_at(0.5) == pytest.approx(rate / 2)
    assert schedule(dataclasses.replace(TINY, annealing="none"), "softmax").learning_rate_at(0.5) == rate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ()}, "texts is empty"),
        ({"gamma": 1.5}, "gamma must lie between 0 and 1, got 1.5"),
        ({"limit": -1}, "limit must not be negative, got -1"),
        ({"thetas": (0.0,)}, "thetas must be"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"sampled": -1}, "sampled must be an integer of at least 0, got -1"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(RunError, match=message):
        check(dataclasses.replace(TINY, **change))
