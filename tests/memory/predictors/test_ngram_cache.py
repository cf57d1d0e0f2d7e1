"""The cache of n-grams: against a loop over the stream, in parts of it, and what it refuses."""

import math
from typing import Any

import pytest
import torch

from fastweights import memory
from fastweights.memory.predictors import ngram_cache
from fastweights.memory.predictors.past import Past, count_ages

CLASSES = 6
WORDS = torch.randint(4, (300,), generator=torch.Generator().manual_seed(0))


def make(order=8, growth=3.0, prior=0.7, capacity=1000):
    store = memory.EpisodicMemory(capacity, 1)
    return memory.NGramCache(store, CLASSES, order=order, growth=growth, prior=prior)


def loop(words, order, growth, prior):
    """log p of each word by what followed on the same words before, position after position."""
    scores = []
    for t, word in enumerate(words):
        right, total = prior / CLASSES, prior
        for i in range(1, t):
            n = 0
            while n < order and n < i and words[i - 1 - n] == words[t - 1 - n]:
                n += 1
            if n:
                total += growth**n
                right += growth**n * (words[i] == word)
        scores.append(math.log(right / total))
    return torch.tensor(scores)


def keys_of(words):
    return torch.zeros(len(words), 1)


@pytest.mark.parametrize("order", [1, 2, 8, 400])
@pytest.mark.parametrize("block", [1, 7, 256])
def test_scores_are_the_loop_over_the_stream_whatever_the_parts(order, block, monkeypatch):
    monkeypatch.setattr(ngram_cache, "_MOST", block)
    growth = 1.01 if order == 400 else 3.0
    words = WORDS[:60] if block == 1 else WORDS
    expected = loop(words.tolist(), order, growth, 0.7)
    cache = make(order, growth)
    found = torch.cat([cache.log_prob(keys_of(part), part) for part in words.tensor_split([1, 30, 31])])
    torch.testing.assert_close(found, expected)
    assert torch.equal(cache.store.values, words)
    cache.clear()
    torch.testing.assert_close(cache.log_prob(keys_of(words), words), expected)


@pytest.mark.parametrize("pairs", [1, 2**23])
def test_all_classes_have_what_the_targets_have_and_add_up_to_one(pairs, monkeypatch):
    monkeypatch.setattr(ngram_cache, "_PAIRS", pairs)
    cache = make(order=4)
    cache.store.write(keys_of(WORDS[:100]), WORDS[:100])
    text, targets = WORDS[100:160], WORDS[120:160]
    past = Past(keys_of(text), text, count_ages(20, 40, text))
    model = torch.randn(40, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(1)
    p = cache.recall(model, past)
    torch.testing.assert_close(p.exp().sum(1), torch.ones(40, dtype=torch.float64))
    scores = cache.share(cache.count(past, targets), model.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(scores, p.gather(1, targets[:, None])[:, 0])
    # The text goes on after what is stored, as the stream itself did.
    uniform = torch.full((40, CLASSES), -math.log(CLASSES), dtype=torch.float64)
    expected = loop(WORDS[:160].tolist(), 4, 3.0, 0.7)[120:]
    torch.testing.assert_close(cache.recall(uniform, past).gather(1, targets[:, None])[:, 0], expected.double())


def test_where_nothing_matches_the_model_alone_speaks():
    cache = make()
    cache.store.write(keys_of(WORDS[:50]), WORDS[:50])  # of four words
    past = Past(torch.zeros(1, 1), torch.tensor([5]), torch.ones(1, 1, dtype=torch.int64))
    model = torch.randn(1, CLASSES).log_softmax(1)
    torch.testing.assert_close(cache.recall(model, past).float(), model)
    nothing = Past(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.int64))
    torch.testing.assert_close(make().recall(model, nothing).float(), model)


def test_a_full_memory_goes_on_with_what_it_has():
    words, cache = WORDS[:80], make(capacity=20)
    for word in words.split(1):
        score = cache.log_prob(keys_of(word), word)
    torch.testing.assert_close(score, loop(words[-21:].tolist(), 8, 3.0, 0.7)[-1:])


def test_a_line_that_comes_again_is_known_at_any_size():
    for size in (30, 300, 3000):
        words = torch.randint(50_000, (size,), generator=torch.Generator().manual_seed(size))
        cache = memory.NGramCache(memory.EpisodicMemory(2 * size, 1), 50_000)
        cache.log_prob(keys_of(words), words)
        again = cache.log_prob(keys_of(words), words)
        assert float(again[8:].exp().min()) > 0.99


def test_bad_input_is_refused_and_changes_nothing():
    store = memory.EpisodicMemory(10, 1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"order": 0}, "order must be an integer of at least 1, got 0"),
        ({"growth": 0.0}, "growth must be positive"),
        ({"growth": 8.0, "order": 333}, r"growth \*\* order must be at most 1e300, got 8 \*\* 333"),
        ({"prior": -1.0}, "prior must be positive"),
        ({"num_classes": 0}, "num_classes"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            memory.NGramCache(store, **{"num_classes": CLASSES, **options})
    with pytest.raises(ValueError, match="the memory's values must be class indices"):
        memory.NGramCache(memory.EpisodicMemory(10, 1, value_shape=(2,)), CLASSES)
    cache = make()
    cache.log_prob(keys_of(WORDS[:9]), WORDS[:9])
    for h, targets, message in (
        (keys_of(WORDS), WORDS[:-1], "targets"),
        (torch.zeros(3, 2), WORDS[:3], "log_prob takes activations"),
        (torch.zeros(1, 1), WORDS[:1] + 6, "class"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.log_prob(h, targets)
    assert len(cache.store) == 9
