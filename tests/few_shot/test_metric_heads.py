"""Matching and prototypical heads, against loops over examples."""

import math

import numpy as np
import pytest
import torch

from fastweights import few_shot
from tests.few_shot.tasks import CLASSES, WIDTH, array, assert_close, draw


@pytest.mark.parametrize("scale", [1, 10])
def test_attention_by_cosine(scale):
    head, tasks = few_shot.MatchingHead(CLASSES, scale=scale), draw()
    logits = head.predict(tasks.queries, head.describe(tasks.keys, tasks.labels))
    for task in range(3):
        keys, labels = array(tasks.keys[task]), array(tasks.labels[task])
        for x, mine in zip(array(tasks.queries[task]), logits[task], strict=True):
            weights = [math.exp(scale * x @ key / math.sqrt((x @ x) * (key @ key))) for key in keys]
            chances = np.zeros(CLASSES)
            for weight, label in zip(weights, labels, strict=True):
                chances[label] += weight / sum(weights)
            assert_close(mine.exp(), chances)


@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize("times", [1, 3, 30])
def test_a_class_with_more_examples_is_not_answered_more_often(scale, times):
    generator = torch.Generator().manual_seed(0)
    centres = 0.75 * torch.randn(5, 64, generator=generator)

    def examples(*counts):
        labels = torch.arange(5).repeat_interleave(torch.tensor(counts))
        return (centres[labels] + torch.randn(len(labels), 64, generator=generator))[None], labels[None]

    head = few_shot.MatchingHead(5, scale=scale)
    memory = head.describe(*examples(5 * times, 5, 5, 5, 5))
    queries, targets = examples(20, 20, 20, 20, 20)
    answers = head.predict(queries, memory).argmax(-1)
    assert (answers == targets).float().mean() > 0.9
    assert (answers == 0).float().mean() < 0.3


def test_examples_of_one_class_twice_over_change_nothing():
    head, tasks = few_shot.MatchingHead(CLASSES), draw()
    again = tasks.labels[0] == 1
    once = head.describe(tasks.keys[:1], tasks.labels[:1])
    twice = head.describe(*(torch.cat([part[:1], part[:1, again]], 1) for part in (tasks.keys, tasks.labels)))
    assert_close(head.predict(tasks.queries[:1], twice), head.predict(tasks.queries[:1], once))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_none_are_refused(scale):
    with pytest.raises(ValueError, match=f"scale must be positive and finite, got {scale}"):
        few_shot.MatchingHead(CLASSES, scale=scale)


def test_the_nearest_mean():
    head, tasks = few_shot.PrototypeHead(CLASSES), draw(described=7)  # classes of two and of three examples
    logits = head.predict(tasks.queries, head.describe(tasks.keys, tasks.labels))
    for task in range(3):
        keys, labels = array(tasks.keys[task]), array(tasks.labels[task])
        means = np.zeros((CLASSES, WIDTH))
        for label in range(CLASSES):
            members = [key for key, own in zip(keys, labels, strict=True) if own == label]
            for key in members:
                means[label] += key / len(members)
        for x, mine in zip(array(tasks.queries[task]), logits[task], strict=True):
            assert_close(mine, [-sum((x - mean) ** 2) for mean in means])


@pytest.mark.parametrize("make", [few_shot.MatchingHead, few_shot.PrototypeHead])
def test_a_class_without_an_example_is_never_predicted(make):
    head, tasks = make(CLASSES + 1), draw()
    queries = tasks.queries.requires_grad_()
    logits = head.predict(queries, head.describe(tasks.keys, tasks.labels))
    assert (logits[..., CLASSES] < -27).all()
    assert (logits[..., :CLASSES] > -27).all()
    assert_close(logits.softmax(-1)[..., CLASSES], torch.zeros(3, 5, dtype=torch.float64))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(15, dtype=torch.long)).backward()
    assert queries.grad is not None
    assert queries.grad.isfinite().all()


@pytest.mark.parametrize("columns", [CLASSES, 10 * CLASSES])
def test_distances_are_exact_far_from_zero_whatever_the_columns(columns):
    tasks = draw(dtype=torch.float32)
    exact = few_shot.PrototypeHead(CLASSES)
    expected = exact.predict(tasks.queries, exact.describe(tasks.keys, tasks.labels))
    head = few_shot.PrototypeHead(columns)
    found = head.predict(tasks.queries + 4096, head.describe(tasks.keys + 4096, tasks.labels))
    # Features that large are themselves rounded to 5e-4.
    torch.testing.assert_close(found[..., :CLASSES], expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("make", [few_shot.MatchingHead, few_shot.PrototypeHead])
def test_gradients_in_float64(make):
    head, tasks = make(CLASSES), draw(tasks=2, described=4, asked=2)
    inputs = (tasks.keys.requires_grad_(), tasks.queries.requires_grad_())
    assert torch.autograd.gradcheck(lambda k, x: head.predict(x, head.describe(k, tasks.labels)), inputs)


@pytest.mark.parametrize("make", [few_shot.MatchingHead, few_shot.PrototypeHead])
def test_features_of_zeros_are_no_harm(make):
    head, tasks = make(CLASSES), draw()
    keys = torch.zeros_like(tasks.keys).requires_grad_()
    logits = head.predict(tasks.queries * 0, head.describe(keys, tasks.labels))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert keys.grad is not None
    assert keys.grad.isfinite().all()


@pytest.mark.parametrize("make", [few_shot.MatchingHead, few_shot.PrototypeHead])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(make, dtype):
    head, tasks = make(CLASSES + 1), draw()
    keys, queries = (each.to(dtype).requires_grad_() for each in (tasks.keys, tasks.queries))
    logits = head.predict(queries, head.describe(keys, tasks.labels))
    expected = head.predict(queries.double(), head.describe(keys.double(), tasks.labels))
    assert torch.allclose(logits[..., :CLASSES].double(), expected[..., :CLASSES], rtol=1e-2, atol=1e-2)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(15, dtype=torch.long)).backward()
    assert keys.grad is not None
    assert keys.grad.isfinite().all()
    with torch.autocast("cpu", dtype):
        again = head.predict(queries, head.describe(keys, tasks.labels))
    assert again.dtype == torch.float32
    assert torch.allclose(again, logits, rtol=1e-2, atol=1e-2)


def test_prototypes_far_from_zero_are_told_apart():
    head, tasks = few_shot.PrototypeHead(CLASSES), draw()
    near = head.predict(tasks.queries, head.describe(tasks.keys, tasks.labels))
    far = head.predict(tasks.queries.float() + 1000, head.describe(tasks.keys.float() + 1000, tasks.labels))
    assert torch.allclose(far.double(), near, atol=1e-2)


@pytest.mark.parametrize("make", [few_shot.MatchingHead, few_shot.PrototypeHead, few_shot.FineTuningHead])
def test_refuses_features_that_do_not_fit(make):
    head, tasks = make(CLASSES), draw()
    memory = head.describe(tasks.keys, tasks.labels)
    for queries in (tasks.queries[:1], tasks.queries[..., 1:], tasks.queries[0]):
        with pytest.raises(
            ValueError, match=rf"features must be \[3,m,4\], of the tasks .* got \{list(queries.shape)}"
        ):
            head.predict(queries, memory)
    with pytest.raises(ValueError, match=r"features must be \[tasks,n,D\], got \[6, 4\]"):
        head.describe(tasks.keys[0], tasks.labels[0])


@pytest.mark.parametrize("make", [few_shot.MatchingHead, few_shot.PrototypeHead])
def test_refuses_labels_that_do_not_fit(make):
    with pytest.raises(ValueError, match=r"num_classes must be .* got 0"):
        make(0)
    head, tasks = make(CLASSES), draw()
    with pytest.raises(ValueError, match=r"labels must lie between 0 and 2, the 3 classes .* got 1 to 3"):
        head.describe(tasks.keys, tasks.labels + 1)
    with pytest.raises(ValueError, match=r"labels must be \[3, 6\] int64, one a key; got \[3, 5\]"):
        head.describe(tasks.keys, tasks.labels[:, 1:])
