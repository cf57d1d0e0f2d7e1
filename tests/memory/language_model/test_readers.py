"""Predictors of a user's own: against a loop in NumPy, in every method, and what of them is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from fastweights import memory
from fastweights.errors import MemoryFileError
from tests.memory.language_models import CLASSES, make_model

SHARES = (0.6, 0.4)


class Unigram:
    """A token is as likely as it was often, in the memory and in the text at hand; every one was there once before."""

    def recall(self, store, h, log_model, past):
        stored = torch.bincount(store.values, minlength=log_model.shape[1])
        seen = (past.ages > 0).to(log_model.dtype)
        counts = 1 + stored + torch.zeros_like(log_model).scatter_add_(1, past.labels.expand(seen.shape), seen)
        return (counts / counts.sum(1, keepdim=True)).log()


class Answering:
    """What is computed from the model's own prediction and nothing else."""

    def __init__(self, answer):
        self.answer = answer

    def recall(self, store, h, log_model, past):
        return self.answer(log_model)


def text(count, seed=1, rows=1):
    """Texts in which three tokens are frequent."""
    generator = torch.Generator().manual_seed(seed)
    rare = torch.randint(3, CLASSES, (rows, count), generator=generator)
    return rare.where(torch.rand(rows, count, generator=generator) < 0.3, rare % 3 + 5)


def adapt(model=None, weights=SHARES, readers=None, **given) -> Any:
    readers = {"unigram": Unigram()} if readers is None else readers
    return memory.AdaptiveLanguageModel(model or make_model(), readers=readers, weights=weights, **given)


def with_all_four(weights=(0.3, 0.1, 0.1, 0.1, 0.1, 0.3)) -> Any:
    model = make_model()
    four = memory.AdaptiveLanguageModel(model)
    return adapt(model, weights, cache=four.cache, mbpa=four.mbpa, knn=four.knn, ngram=four.ngram)


def count(before, words):
    """log p of a text's tokens after the first, by how often each was there before it."""
    seen, scores = np.ones(CLASSES) + np.bincount(before, minlength=CLASSES), []
    for word in words[1:]:
        scores.append(np.log(seen[word] / seen.sum()))
        seen[word] += 1
    return np.array(scores)


@pytest.mark.parametrize("make", [adapt, with_all_four])
def test_scores_are_those_of_a_loop_and_their_mixture(make):
    lm = make()
    assert lm.names[-1] == "unigram"
    assert f"unigram {lm.weights[-1]:.3f}" in repr(lm)
    assert len(lm.store) == 0
    assert lm.store.capacity == 100_000
    first, second = text(300), text(70, 2)
    before: list[int] = []
    for words in (first, second):
        expected = count(before, words[0].tolist())
        each = lm.score_each(words, remember=False, context=40)
        np.testing.assert_allclose(each["unigram"][0].numpy(), expected, atol=1e-5)
        others = sum(w * p.double().exp().numpy()[0] for w, p in zip(lm.weights.tolist(), each.values(), strict=True))
        mixed = lm.score(words, context=40)
        np.testing.assert_allclose(mixed[0].numpy(), np.log(others), atol=1e-5)
        before += words[0, 1:].tolist()
    assert lm.store.values.tolist() == before


def test_rows_with_padding_see_their_own_past_alone():
    lm = adapt()
    rows, mask = text(20, 3, rows=2), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :6] = 0
    found = lm.score_each(rows, mask)["unigram"]
    np.testing.assert_allclose(found[0].numpy(), count([], rows[0].tolist()), atol=1e-5)
    np.testing.assert_allclose(found[1, 6:].numpy(), count([], rows[1, 6:].tolist()), atol=1e-5)
    assert len(lm.store) == 19 + 13


@pytest.mark.parametrize("make", [adapt, with_all_four])
def test_the_distribution_is_one_is_certified_and_is_what_is_generated(make):
    lm = make()
    lm.write(text(40)[0])
    rows = text(24, 2, rows=2)
    distribution = lm.distribution(rows, context=10)
    torch.testing.assert_close(distribution.exp().sum(-1), torch.ones(2, 23))
    scores = lm.score(rows, remember=False, context=10)
    torch.testing.assert_close(distribution.gather(2, rows[:, 1:, None])[..., 0], scores)
    assert memory.certify(lm, rows).passed
    prompts, mask = text(9, 3, rows=2), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    options = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 2}
    continued = lm.generate(prompts, attention_mask=mask, **options)
    for row in (continued[:1], continued[1:, 4:]):
        assert torch.equal(lm.distribution(row)[0, -6:].argmax(1), row[0, -6:])
    assert lm.generate(prompts, num_beams=3, copy_after=2, **options).shape == (2, 15)


def test_a_reader_that_looks_ahead_gets_no_certificate():
    class Peeking(Unigram):
        def recall(self, store, h, log_model, past):
            return super().recall(store, h, log_model, past._replace(ages=torch.ones_like(past.ages)))

    certificate = memory.certify(adapt(readers={"unigram": Peeking()}), text(30))
    assert not certificate.passed
    assert any("future" in check.name and not check.passed for check in certificate.checks)


def test_fit_weighs_it_with_the_others():
    lm, validation = with_all_four(None), text(400, 4)
    weights = lm.fit(validation, context=50)
    each = lm.score_each(validation, remember=False, context=50)
    expected = (memory.fit_weights([p[0] for p in each.values()]) * 399 + 1) / (399 + 6)
    torch.testing.assert_close(weights, expected, atol=2e-3, rtol=0)
    assert weights[-1] > 0.2
    assert list(lm.settings) == ["theta", "rate", "bandwidth", "growth", "prior"]
    assert adapt().settings == {}
    wrong = Answering(lambda log_model: torch.full_like(log_model, -math.inf).index_fill(1, torch.tensor([0]), 0.0))
    assert float(adapt(weights=None, readers={"wrong": wrong}).fit(validation)[1]) == pytest.approx(1 / 401)


def test_what_is_undone_is_unseen():
    lm, ids = adapt(), text(30)
    before = lm.score(ids, remember=False)
    lm.write(text(50, 2)[0], tag="book")
    assert not torch.equal(lm.score(ids, remember=False), before)
    lm.undo("book")
    assert torch.equal(lm.score(ids, tag="scored"), before)
    lm.undo("scored")
    assert torch.equal(lm.score(ids, remember=False), before)


def test_many_classes_are_read_some_positions_at_a_time(monkeypatch):
    asked: list[int] = []

    class Counting(Unigram):
        def recall(self, store, h, log_model, past):
            asked.append(len(h))
            return super().recall(store, h, log_model, past)

    lm, ids = adapt(readers={"unigram": Counting()}), text(60)
    expected = lm.score(ids, remember=False)
    monkeypatch.setattr("fastweights.memory.language_model._components.PROBABILITIES", 7 * CLASSES)
    torch.testing.assert_close(lm.score(ids, remember=False), expected)
    assert asked == [59, *[7] * 8, 3]


def test_its_name_is_saved_and_it_is_given_again(tmp_path):
    other = Answering(lambda log_model: log_model)
    readers: Any = {"unigram": Unigram(), "other": other}
    lm = adapt(weights=(0.5, 0.3, 0.2), readers=readers, cache=None)
    lm.write(text(40)[0])
    expected = lm.score(text(20, 2), remember=False)
    lm.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "language_model.json").read_text())["readers"] == ["unigram", "other"]
    assert 'readers={"unigram": ..., "other": ...})' in (tmp_path / "README.md").read_text()
    load, model = memory.AdaptiveLanguageModel.from_pretrained, make_model()
    found = load(model, tmp_path, readers={"other": other, "unigram": Unigram()})  # in another order
    assert found.names == ["model", "unigram", "other"]
    assert torch.equal(found.score(text(20, 2), remember=False), expected)
    given: Any
    for given, got in (
        (None, "no readers"),
        ({"unigram": Unigram()}, "the readers 'unigram'"),
        (readers | {"third": other}, "the readers 'unigram', 'other', 'third'"),
    ):
        for read in (load, memory.AdaptiveLanguageModel.open):
            with pytest.raises(
                MemoryFileError, match=rf"with the readers 'unigram', 'other', got {got}: give"
            ) as error:
                read(model, tmp_path, readers=given)
            assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="recall"):
        load(model, tmp_path, readers=readers | {"other": 3})
    with memory.AdaptiveLanguageModel.open(model, tmp_path, readers=readers) as opened:
        assert torch.equal(opened.score(text(20, 2)), expected)
    facts = json.loads((tmp_path / "language_model.json").read_text())
    (tmp_path / "language_model.json").write_text(json.dumps(facts | {"readers": 3}))
    with pytest.raises(MemoryFileError, match="damaged"):
        load(model, tmp_path, readers=readers)


def test_a_memory_without_readers_takes_none(tmp_path):
    lm = memory.AdaptiveLanguageModel(make_model(), cache=memory.NeuralCache(20, CLASSES), weights=SHARES)
    lm.save_pretrained(tmp_path)
    assert "readers" not in (tmp_path / "language_model.json").read_text() + (tmp_path / "README.md").read_text()
    with pytest.raises(MemoryFileError, match=r"with no readers, got the readers 'unigram'"):
        memory.AdaptiveLanguageModel.from_pretrained(make_model(), tmp_path, readers={"unigram": Unigram()})


@pytest.mark.parametrize(
    ("readers", "words"),
    [
        *[({name: Unigram()}, f"a word other than model, cache, .*{name}") for name in ("model", "cache", "ngram")],
        ({"": Unigram()}, "got ''"),
        ({3: Unigram()}, "got 3"),
        ({"unigram": Unigram}, "the reader 'unigram' must be an object with a method recall"),
        ({"unigram": object()}, "the reader 'unigram' must be an object with a method recall"),
        ({"second": memory.NeuralCache(20, CLASSES)}, "the reader 'second' must be an object with a method recall"),
        ([Unigram()], "readers must be a dict from names to predictors, got list"),
    ],
)
def test_what_is_no_reader_is_refused(readers, words):
    with pytest.raises(ValueError, match=words) as error:
        adapt(readers=readers)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda log_model: log_model[:, 1:], r"got \[\d+, 60\] torch.float32 on cpu"),
        (lambda log_model: log_model[:, 0], r"got \[\d+\] torch.float32 on cpu"),
        (lambda log_model: log_model.half(), r"got \[\d+, 61\] torch.float16 on cpu"),
        (lambda log_model: log_model.long(), r"got \[\d+, 61\] torch.int64 on cpu"),
        (lambda log_model: None, "got NoneType"),
        (lambda log_model: log_model.exp(), "the sum 1, got the sum 62"),
        (lambda log_model: log_model + 0.01, "the sum 1, got the sum 1.01"),
        (lambda log_model: log_model * float("nan"), "the sum 1, got the sum nan"),
        (lambda log_model: log_model - float("inf"), "the sum 1, got the sum 0"),
    ],
)
def test_what_is_no_prediction_is_refused_and_nothing_is_remembered(answer, got):
    lm = with_all_four()
    own = Answering(lambda log_model: log_model)
    lm = adapt(lm.model, lm.weights, {"own": own}, cache=lm.cache, mbpa=lm.mbpa, knn=lm.knn, ngram=lm.ngram)
    lm.write(text(30)[0])
    ids = text(20, 2)
    before = lm.score(ids, remember=False)
    own.answer = answer
    settings = lm.settings
    for read in (lm.score, lm.score_each, lm.distribution, lm.fit, lambda ids: lm.generate(ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match=rf"the reader 'own' must return log p .*{got}") as error:
            read(ids)
        assert "\n" not in str(error.value)
    assert (len(lm.store), lm.settings) == (29, settings)
    own.answer = lambda log_model: log_model
    torch.testing.assert_close(lm.score(ids, remember=False), before)


def test_an_answer_in_double_precision_is_taken():
    lm = adapt(readers={"own": Answering(lambda log_model: log_model.double().log_softmax(1))})
    assert lm.distribution(text(9)).dtype == torch.float32
    torch.testing.assert_close(lm.score(text(9), remember=False), lm.score_plain(text(9)))
