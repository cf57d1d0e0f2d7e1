"""The two top layers of Munkhdalai & Trischler 2018, against loops over examples."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastweights import few_shot
from tests.few_shot.tasks import CLASSES, WIDTH, array, assert_close, draw, hebbian, leaky, mapped

HIDDEN = 7
PLACES = [
    pytest.param(hidden, softmax, id=f"{hidden}-{softmax}")
    for hidden in ("slow", "both", "fast")
    for softmax in ("slow", "both", "fast")
    if (hidden, softmax) != ("slow", "slow")
]
GRADIENT_PLACES = [("both", "slow"), ("slow", "both"), ("both", "both")]


def build(**options) -> Any:
    torch.manual_seed(1)
    head = few_shot.FastWeightsHead(WIDTH, CLASSES, hidden_size=HIDDEN, **options).double()
    for name, weight in head.named_parameters():
        if name in ("hidden.bias", "softmax.bias"):
            torch.nn.init.normal_(weight)  # zeros would hide it
    return head


def hidden_units(head, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
    h = np.zeros(HIDDEN)
    if getattr(head.hidden, "weight", None) is not None:
        h = h + leaky(array(head.hidden.weight) @ x + array(head.hidden.bias))
    return h if memory is None else h + leaky(memory.T @ x)


def logits_of(head, h: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
    logits = np.zeros(CLASSES)
    if getattr(head.softmax, "weight", None) is not None:
        logits = logits + array(head.softmax.weight) @ h + array(head.softmax.bias)
    return logits if memory is None else logits + memory.T @ h


def check(head, tasks, task, memory, expected_hidden, expected_softmax):
    """The memory of a task, and what is predicted with it."""
    for found, expected in ((memory.hidden, expected_hidden), (memory.softmax, expected_softmax)):
        assert (found is None) == (expected is None)
        if found is not None:
            mine = array(found[task])
            if found is memory.hidden and head.rule == "hebbian":
                mine = mine @ array(head.hidden.projection).T
            assert_close(mine, expected)
    logits = head.predict(tasks.queries, memory)[task]
    for x, mine in zip(array(tasks.queries[task]), logits, strict=True):
        assert_close(mine, logits_of(head, hidden_units(head, x, expected_hidden), expected_softmax))


@pytest.mark.parametrize(("hidden", "softmax"), PLACES)
def test_every_place_of_hebbian_fast_weights(hidden, softmax):
    head, tasks = build(hidden=hidden, softmax=softmax), draw()
    memory = head.describe(tasks.keys, tasks.labels)
    for task in range(3):
        keys, labels = array(tasks.keys[task]), array(tasks.labels[task])
        below = None if hidden == "slow" else hebbian(keys, labels, array(head.hidden.projection))
        seen = (
            below if hidden == "fast" else None
        )  # the slow path where there is one: fast weights are read in prediction
        activations = np.stack([hidden_units(head, key, seen) for key in keys])
        above = None if softmax == "slow" else hebbian(activations, labels, np.eye(CLASSES))
        check(head, tasks, task, memory, below, above)


def summed_gradient(weight, loss_of, inputs, labels) -> np.ndarray:
    """sum_i dL_i / dW [out,in], an example at a time by autograd."""
    total = torch.zeros_like(weight)
    for x, label in zip(inputs, labels, strict=True):
        total += torch.autograd.grad(F.cross_entropy(loss_of(x)[None], label[None]), weight)[0]
    return array(total)


@pytest.mark.parametrize(("hidden", "softmax"), GRADIENT_PLACES)
def test_every_place_of_fast_weights_from_gradients(hidden, softmax):
    head, tasks = build(rule="gradient", hidden=hidden, softmax=softmax), draw()
    memory = head.describe(tasks.keys, tasks.labels)
    w, b, v, c = head.hidden.weight, head.hidden.bias, head.softmax.weight, head.softmax.bias

    def slow(x):
        return v @ F.leaky_relu(w @ x + b, 0.2) + c

    for task in range(3):
        keys, labels = tasks.keys[task], tasks.labels[task]
        below = above = None
        if hidden == "both":
            below = mapped(head.hidden.mapping, summed_gradient(w, slow, keys, labels).T)
        if softmax == "both":
            activations = torch.stack([torch.as_tensor(hidden_units(head, array(key), None)) for key in keys])
            above = mapped(head.softmax.mapping, summed_gradient(v, lambda h: v @ h + c, activations, labels).T)
        check(head, tasks, task, memory, below, above)


@pytest.mark.parametrize("second_order", [False, True])
def test_what_the_gradient_rule_learns_from(second_order):
    """To first order the error gradients are constants: the description teaches g alone."""
    head, tasks = build(rule="gradient", second_order=second_order), draw()
    keys = tasks.keys.requires_grad_()
    memory = head.describe(keys, tasks.labels).hidden
    learns = torch.autograd.grad(memory.square().sum(), [keys, *head.parameters()], allow_unused=True)
    names = ["keys", *(name for name, _ in head.named_parameters())]
    reached = {name for name, gradient in zip(names, learns, strict=True) if gradient is not None}
    of_mapping = {name for name in names if name.startswith("hidden.mapping")}
    slow = {"keys", "hidden.weight", "hidden.bias", "softmax.weight", "softmax.bias"}
    assert reached == of_mapping | (slow if second_order else set())
    if second_order:
        assert torch.autograd.gradcheck(lambda keys: head.describe(keys, tasks.labels).hidden, (keys,))


@pytest.mark.parametrize(("hidden", "softmax"), PLACES)
def test_stop_gradient_keeps_the_loss_from_the_description(hidden, softmax):
    tasks = draw()
    for stop in (False, True):
        head = build(hidden=hidden, softmax=softmax, stop_gradient=stop)
        keys, queries = tasks.keys.clone().requires_grad_(), tasks.queries.clone().requires_grad_()
        head.predict(queries, head.describe(keys, tasks.labels)).square().sum().backward()
        assert (keys.grad is None) == stop
        assert queries.grad is not None


def test_label_noise_is_of_the_hidden_layer_in_training():
    head, tasks = build(softmax="both", label_noise=0.01), draw()
    first, second = head.describe(tasks.keys, tasks.labels), head.describe(tasks.keys, tasks.labels)
    assert not torch.equal(first.hidden, second.hidden)
    head.eval()
    first, second = head.describe(tasks.keys, tasks.labels), head.describe(tasks.keys, tasks.labels)
    assert_close(first.hidden, second.hidden, 0)
    assert_close(first.softmax, second.softmax, 0)


def test_the_weights_of_all_layers_are_drawn_and_saved():
    head, tasks = build(softmax="both"), draw()
    memory = head.describe(tasks.keys, tasks.labels)
    expected = head.predict(tasks.queries, memory)
    saved = copy.deepcopy(head.state_dict())
    assert {"hidden.projection", "hidden.weight", "softmax.weight"} <= set(saved)
    head.reset_parameters()
    assert not any(torch.equal(value, saved[name]) for name, value in head.state_dict().items() if "bias" not in name)
    head.load_state_dict(saved)
    assert_close(head.predict(tasks.queries, head.describe(tasks.keys, tasks.labels)), expected, 0)
    torch.manual_seed(0)
    # He et al. 2015: a variance of 2 over the inputs.
    large: Any = few_shot.FastWeightsHead(500, 5, hidden_size=400, inverse_start=False)
    assert float(large.hidden.weight.detach().std()) == pytest.approx((2 / 500) ** 0.5, rel=0.02)
    assert float(large.softmax.weight.detach().std()) == pytest.approx((2 / 400) ** 0.5, rel=0.05)
    assert not large.softmax.bias.any()


@pytest.mark.parametrize(("softmax", "rule"), [("slow", "hebbian"), ("both", "hebbian"), ("slow", "gradient")])
def test_the_softmax_layer_starts_as_the_projection_where_there_is_one(softmax, rule):
    head: Any = few_shot.FastWeightsHead(64, 5, hidden_size=288, softmax=softmax, rule=rule)
    if rule == "gradient":
        assert float(head.softmax.weight.detach().std()) == pytest.approx((2 / 288) ** 0.5, rel=0.1)
        return
    assert torch.equal(head.softmax.weight, head.hidden.projection.T)
    # Nearly its inverse: the product is a third of the identity.
    product = 3 * head.softmax.weight.detach() @ head.hidden.projection
    assert_close(product.diagonal(), torch.ones(5), 0.2)
    assert float((product - torch.diag(product.diagonal())).abs().max()) < 0.25


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hidden": "none"}, "hidden must be one of slow, both, fast, got 'none'"),
        ({"softmax": None}, "softmax must be one of slow, both, fast, got None"),
        ({"rule": "gradient", "hidden": "fast"}, "set hidden and softmax to 'both' or 'slow'"),
        ({"hidden": "slow"}, "neither layer has fast weights: set hidden or softmax to 'both' or 'fast'"),
        ({"rule": "delta"}, "rule must be one of hebbian, gradient, got 'delta'"),
    ],
)
def test_refuses_settings_that_do_not_fit(options, match):
    with pytest.raises(ValueError, match=match):
        few_shot.FastWeightsHead(WIDTH, CLASSES, **options)


@pytest.mark.parametrize("options", [{}, {"hidden": "slow", "softmax": "both"}, {"rule": "gradient"}])
def test_refuses_features_that_do_not_fit(options):
    head, tasks = build(**options), draw()
    memory = head.describe(tasks.keys, tasks.labels)
    with pytest.raises(ValueError, match=r"features must be \[tasks,n,4\], got \[3, 6, 3\]"):
        head.describe(tasks.keys[..., 1:], tasks.labels)
    for features in (tasks.queries[..., 1:], tasks.queries[1:], tasks.queries[0]):
        with pytest.raises(ValueError, match=r"features must be \[3,m,4\], of the tasks described; got"):
            head.predict(features, memory)
    with pytest.raises(ValueError, match=r"features must be floating point, got torch.int64"):
        head.describe(tasks.keys.long(), tasks.labels)


def test_refuses_what_another_head_remembers():
    head, tasks = build(), draw()
    other = build(hidden="slow", softmax="both")
    with pytest.raises(ValueError, match="memory must be that of a head with fast weights in the same layers"):
        head.predict(tasks.queries, other.describe(tasks.keys, tasks.labels))
    heads = [few_shot.MatchingHead(CLASSES), few_shot.PrototypeHead(CLASSES), few_shot.FineTuningHead(CLASSES), head]
    for asked, described in zip(heads, [head, *heads[:3]], strict=True):
        memory = described.describe(tasks.keys, tasks.labels)
        with pytest.raises(
            ValueError, match=f"memory must be the .* that describe returned, got a {type(memory).__name__}"
        ):
            asked.predict(tasks.queries, memory)


@pytest.mark.parametrize("options", [{}, {"hidden": "slow", "softmax": "both"}, {"rule": "gradient"}])
def test_refuses_labels_that_do_not_fit(options):
    head, tasks = build(**options), draw()
    with pytest.raises(ValueError, match=r"labels must lie between 0 and 2, the 3 classes .* got 1 to 3"):
        head.describe(tasks.keys, tasks.labels + 1)
    with pytest.raises(ValueError, match=r"labels must be \[3, 6\] int64, one a key; got \[3, 6\] torch.float64"):
        head.describe(tasks.keys, tasks.labels.double())
