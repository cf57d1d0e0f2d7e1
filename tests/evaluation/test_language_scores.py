"""Scores of a text in one pass against the model and each memory on its own."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastweights.evaluation import (
    FrequencyBucket,
    by_frequency,
    evaluate_dynamically,
    evaluate_language_model,
    measure_gradients,
    perplexity,
    score_text,
)
from fastweights.memory import EpisodicMemory, NeuralCache, NGramCache, StreamMbPA, UnboundedCache, fit_weights, mix
from fastweights.nn import HebbianSoftmax, LSTMLanguageModel
from fastweights.training import Progress
from tests.training.language_model import FEATURES, WORDS, LanguageModel, text


def memories(model):
    return {
        "cache": NeuralCache(30, WORDS),
        "sharper": NeuralCache(30, WORDS, theta=3.0),
        "unbounded": UnboundedCache(EpisodicMemory(1000, FEATURES), WORDS, neighbours=8),
        "MbPA": StreamMbPA(model.head, 30, neighbours=8),
        "another's": StreamMbPA(nn.Linear(FEATURES, WORDS), 30),
    }


@pytest.mark.parametrize("segment", [1, 7, 1024])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_every_score_is_that_of_the_model_and_each_memory_alone(segment, dtype):
    model = LanguageModel()
    tokens = text(100, dtype=dtype)
    used = memories(model)
    scores = score_text(model, tokens, used, segment=segment)
    assert list(scores) == ["model", *used]
    assert model.training
    with torch.no_grad():
        h = model.eval().encode(tokens.long()[:-1].unsqueeze(1))[0][:, 0]
        targets = tokens.long()[1:]
        expected = model.head(h).log_softmax(1).gather(1, targets.unsqueeze(1))[:, 0]
    torch.testing.assert_close(scores["model"], expected)
    torch.testing.assert_close(score_text(model, tokens, segment=segment)["model"], expected)
    torch.manual_seed(0)
    for name, each in used.items():
        each = StreamMbPA(each.output, 30) if name == "another's" else memories(model)[name]
        # The states are those of pieces, and so rounded otherwise: log p is off by that times what MbPA makes of it.
        torch.testing.assert_close(scores[name], each.log_prob(h, targets), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [6, 9])  # with a projection and without
def test_a_cache_by_state_is_given_the_last_layer(size):
    torch.manual_seed(0)
    model, tokens = LSTMLanguageModel(WORDS, 6, size, num_layers=2, output_dropout=0.5), text(100)
    caches = {name: NeuralCache(30, WORDS, theta=3.0) for name in ("state", "input")}
    used: dict[str, Any] = {**caches, "MbPA": StreamMbPA(model.head, 30, neighbours=8)}
    scores = score_text(model, tokens, used, by_state=["state"], segment=23)
    with torch.no_grad():
        states, end = model.eval().read(tokens[:-1].unsqueeze(1))
        h, same = model.encode(tokens[:-1].unsqueeze(1))
        torch.testing.assert_close(end, same)
        torch.testing.assert_close(states[-1], end.hidden[-1])
        torch.testing.assert_close(h, model.project(states))
    assert states.shape == (99, 1, size)
    for name, keys in {"state": states, "input": h}.items():
        expected = NeuralCache(30, WORDS, theta=3.0).log_prob(keys[:, 0], tokens[1:])
        torch.testing.assert_close(scores[name], expected, rtol=1e-5, atol=1e-4)
    plain = score_text(model, tokens, {"MbPA": StreamMbPA(model.head, 30, neighbours=8)})
    torch.testing.assert_close(scores["MbPA"], plain["MbPA"], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scores["model"], plain["model"])


def test_memories_go_on_from_one_text_to_the_next_and_the_model_does_not():
    model, tokens = LanguageModel().eval(), text(60)
    used, known = memories(model), memories(model)
    known["another's"] = StreamMbPA(used["another's"].output, 30)
    first, second = score_text(model, tokens, used), score_text(model, tokens, used)
    assert torch.equal(first["model"], second["model"])
    with torch.no_grad():
        h, targets = model.encode(tokens[:-1].unsqueeze(1))[0][:, 0], tokens[1:]
    for name, each in known.items():
        expected = each.log_prob(torch.cat([h, h]), torch.cat([targets, targets]))
        torch.testing.assert_close(torch.cat([first[name], second[name]]), expected)


def test_a_model_of_half_precision_is_scored_in_single_precision():
    model, tokens = LanguageModel().bfloat16().eval(), text(100)
    with torch.no_grad():
        logits = model.head(model.encode(tokens[:-1].unsqueeze(1))[0])[:, 0]
    expected = logits.double().log_softmax(1).gather(1, tokens[1:].unsqueeze(1))[:, 0]
    torch.testing.assert_close(score_text(model, tokens)["model"], expected.float())
    assert evaluate_language_model(model, tokens) == pytest.approx(-float(expected.mean()), rel=1e-6)


def test_a_hebbian_softmax_is_scored_without_dropout():
    model, tokens = LanguageModel(), text(60)
    model.head = head = HebbianSoftmax(FEATURES, WORDS, dropout=0.9)
    scores = score_text(model, tokens, {"MbPA": StreamMbPA(head, 30, lr=0.0)})
    torch.testing.assert_close(scores["MbPA"], scores["model"])
    torch.testing.assert_close(score_text(model, tokens)["model"], scores["model"])


def test_a_mixture_fitted_from_one_pass_is_no_worse_than_its_parts():
    model, tokens = LanguageModel(), torch.arange(400) % 9
    scores = list(score_text(model, tokens, memories(model)).values())
    mixed = perplexity(mix(scores, fit_weights(scores)))
    assert mixed < min(perplexity(each.clamp(min=-50)) for each in scores)


class Steps(Progress):
    def __init__(self):
        self.steps = []

    def start(self, title, total, done):
        self.total = total

    def update(self, step, loss):
        self.steps.append((step, loss))


def test_progress_is_a_step_for_each_segment():
    progress = Steps()
    scores = score_text(LanguageModel(), text(100), segment=40, progress=progress)["model"]
    assert progress.total == 3
    assert [step for step, _ in progress.steps] == [1, 2, 3]
    assert progress.steps[-1][1] == pytest.approx(-float(scores.mean()))


@pytest.mark.parametrize(
    ("tokens", "options", "match"),
    [
        (text(1), {}, r"one text \[N\] of two integers or more, got \[1\]"),
        (text(8).view(4, 2), {}, r"got \[4, 2\]"),
        (text(8).float(), {}, "torch.float32"),
        (text(8), {"segment": 0}, "segment must be an integer of at least 1, got 0"),
        (text(8), {"memories": {"model": NeuralCache(3, WORDS)}}, "give the memory another name"),
        (text(8), {"by_state": ["cache"]}, r"by_state names 'cache', which is none of the memories \(none\)"),
        (
            text(8),
            {"memories": {"m": StreamMbPA(nn.Linear(FEATURES, WORDS), 3)}, "by_state": ["m"]},
            "by_state names 'm', a StreamMbPA: it adapts the softmax, and takes its input",
        ),
        (
            text(8),
            {"memories": {"cache": NeuralCache(3, WORDS)}, "by_state": ["cache"]},
            r"by_state needs a model with `read` and `project`, like nn\.LSTMLanguageModel; got LanguageModel",
        ),
    ],
)
def test_bad_input_is_refused(tokens, options, match):
    with pytest.raises(ValueError, match=match):
        score_text(LanguageModel(), tokens, **options)
    with pytest.raises(ValueError, match=r"`head`, like nn\.LSTMLanguageModel; got Linear"):
        score_text(nn.Linear(2, 3), text(8))


def test_perplexity_of_chance():
    assert perplexity(torch.full((7,), -math.log(50))) == pytest.approx(50)
    with pytest.raises(ValueError, match=r"at least one token, \[N\], got \[0\]"):
        perplexity(torch.empty(0))


def frequencies(count=500):
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([0, 1, 99, 100, 999, 1000, 9999, 10_000, 70_000])
    return -torch.rand(count, generator=generator), torch.randint(0, 9, (count,), generator=generator), counts


@pytest.mark.parametrize("edges", [(100, 1_000, 10_000), (2,), (), (50, 100)])
def test_buckets_are_those_of_a_loop(edges):
    log_prob, targets, counts = frequencies()
    buckets = by_frequency(log_prob, targets.int(), counts, edges)
    limits = [0, 1, *edges, math.inf]
    assert len(buckets) == len(limits) - 1
    assert sum(bucket.tokens for bucket in buckets) == len(targets)
    for bucket, least, end in zip(buckets, limits[:-1], limits[1:], strict=True):
        chosen = [float(p) for p, word in zip(log_prob, targets, strict=True) if least <= counts[word] < end]
        assert bucket.least == least
        assert bucket.most == (None if end == math.inf else end - 1)
        assert bucket.tokens == len(chosen)
        assert bucket.perplexity == pytest.approx(np.exp(-np.mean(chosen)))


def test_words_never_seen_in_training_stand_alone_and_are_named():
    log_prob, targets, counts = frequencies()
    names = [bucket.name for bucket in by_frequency(log_prob, targets, counts)]
    assert names == ["never seen", "1 to 99", "100 to 999", "1,000 to 9,999", "10,000 and more"]
    seen = targets > 0
    assert [bucket.name for bucket in by_frequency(log_prob[seen], targets[seen], counts)] == names[1:]
    rare = targets == 1
    buckets = by_frequency(log_prob[rare], targets[rare], counts)
    assert [bucket.tokens for bucket in buckets] == [int(rare.sum()), 0, 0, 0]
    assert math.isnan(buckets[-1].perplexity)


def test_equal_buckets_have_about_as_many_tokens_each():
    counts = torch.arange(1, 101)
    targets = torch.randint(0, 100, (10_000,), generator=torch.Generator().manual_seed(0))
    buckets = by_frequency(-torch.ones(10_000), targets, counts, edges=5)
    assert len(buckets) == 5
    assert all(abs(bucket.tokens - 2000) <= 200 for bucket in buckets)
    assert sum(bucket.tokens for bucket in buckets) == 10_000
    for word in (0, 6):  # as frequent as each other: no bucket is without a token
        assert len(by_frequency(-torch.ones(3), torch.full((3,), word), counts, edges=5)) == 1
    never = torch.cat([targets + 1, torch.zeros(10_000, dtype=torch.long)])  # words that stand alone move no edge
    with_others = by_frequency(-torch.ones(20_000), never, torch.cat([torch.zeros(1).long(), counts]), edges=5)
    assert with_others == (FrequencyBucket(0, 0, 10_000, buckets[0].perplexity), *buckets)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"edges": (100, 10)}, r"ascending integers of at least 2, got \(100, 10\)"),
        ({"edges": (1, 10)}, "at least 2"),
        ({"edges": 0}, "edges must be an integer of at least 1, got 0"),
        ({"targets": torch.full((500,), 9)}, "targets must be 0 to 8, got 9 to 9"),
        ({"targets": torch.zeros(3).long()}, r"got \[500\], \[3\] and \[9\]"),
    ],
)
def test_wrong_buckets_are_refused(options, match):
    log_prob, targets, counts = frequencies()
    with pytest.raises(ValueError, match=match):
        by_frequency(**{"log_prob": log_prob, "targets": targets, "counts": counts} | options)


class Unigram:
    """The smallest predictor: shares of the words so far."""

    def __init__(self):
        self.clear()

    def log_prob(self, h, targets):
        scores = []
        for word in targets.tolist():
            scores.append(math.log(self.counts[word] / self.counts.sum()))
            self.counts[word] += 1
        return torch.tensor(scores)

    def clear(self):
        self.counts = np.ones(WORDS)

    @property
    def nbytes(self):
        return self.counts.nbytes


def test_a_predictor_of_a_users_own_is_scored_beside_the_others():
    tokens, unigram = text(100), Unigram()
    scores = score_text(LanguageModel(), tokens, {"unigram": unigram, "cache": NeuralCache(30, WORDS)})
    words = tokens[1:].tolist()
    expected = [(words[:at].count(word) + 1) / (at + WORDS) for at, word in enumerate(words)]
    assert scores["unigram"].exp().tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["cache", "unbounded", "MbPA"])
def test_predictors_say_what_they_hold_and_forget_it(name):
    model, tokens = LanguageModel(), text(60)
    predictor = memories(model)[name]
    first = score_text(model, tokens, {name: predictor})[name]
    assert predictor.nbytes > 0
    assert not torch.equal(score_text(model, tokens, {name: predictor})[name], first)
    predictor.clear()
    assert torch.equal(score_text(model, tokens, {name: predictor})[name], first)


def test_a_text_of_lists_or_numpy_is_read_and_words_of_another_vocabulary_are_refused():
    model, tokens = LanguageModel(), text(60)
    expected = score_text(model, tokens)["model"]
    for given in (tokens.tolist(), tokens.numpy(), tokens.int()):
        assert torch.equal(score_text(model, given)["model"], expected)
        assert evaluate_language_model(model, given) == pytest.approx(-float(expected.mean()), rel=1e-5)
        follows = evaluate_dynamically(model, given, learning_rate=0.0)
        torch.testing.assert_close(follows, expected)
    calls: dict[str, Any] = {
        "score": functools.partial(score_text, model),
        "evaluate": functools.partial(evaluate_language_model, model),
        "follow": functools.partial(evaluate_dynamically, model, learning_rate=0.1),
        "measure": functools.partial(measure_gradients, model, streams=2),
    }
    for place in (0, 30, 59):
        foreign = tokens.clone()
        foreign[place] = WORDS
        for call in calls.values():
            with pytest.raises(ValueError, match=f"the text has the token {WORDS}, and the model's are 0 to"):
                call(foreign)


def test_a_memory_of_another_vocabulary_is_refused_before_anything_is_read():
    model, tokens = LanguageModel(), text(60)
    store = EpisodicMemory(100, FEATURES)
    for size in (WORDS - 1, WORDS + 1, 10 * WORDS):
        for wrong in (
            NeuralCache(100, size),
            NGramCache(store, size),
            UnboundedCache(store, size),
            StreamMbPA(nn.Linear(FEATURES, size), 100),
        ):
            kept = NeuralCache(100, WORDS)
            message = f"the memory 'mine' has {size} classes, and the model predicts {WORDS} words"
            with pytest.raises(ValueError, match=message):
                score_text(model, tokens, {"kept": kept, "mine": wrong})
            assert not len(kept)
    assert not len(store)
