"""Names that moved, under which this release still finds them."""

import importlib

import pytest

from fastweights import evaluation, nn, runs, training
from fastweights.integrations import transformers


@pytest.mark.parametrize("name", evaluation.__all__)
def test_training_finds_what_evaluation_has_now(name):
    assert getattr(training, name) is getattr(evaluation, name)


def test_modules_are_found_under_their_old_names():
    for name in ("comparison", "dynamic_evaluation", "language_scores"):
        assert importlib.import_module(f"fastweights.training.{name}").__name__ == f"fastweights.evaluation.{name}"
    assert importlib.import_module("fastweights.training.progress").show_progress is runs.show_progress
    assert nn.patch_transformers is transformers.patch_transformers
    assert nn.transformers is transformers


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("gutenberg", "PAPER_TEST PAPER_VALIDATION Splits load read_books"),
        ("dated_news", "GIGAWORD_SPLITS REUTERS_SPLITS Article load_gigaword load_reuters read_reuters"),
    ],
)
def test_books_and_news_are_found_under_their_old_names(module, names):
    old, new = (importlib.import_module(f"fastweights.{package}.{module}") for package in ("tasks", "tasks.text"))
    for name in names.split():
        assert getattr(old, name) is getattr(new, name)


@pytest.mark.parametrize("package", [nn, training])
def test_another_name_is_missing(package):
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
