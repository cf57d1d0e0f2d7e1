"""The layer of Munkhdalai & Trischler 2018, against its equations as loops over examples."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fastweights import nn
from fastweights.nn.fast_weights_linear import map_numbers
from tests.few_shot.tasks import CLASSES, WIDTH, array, assert_close, draw, hebbian, leaky, mapped

HIDDEN = 7


def build(*, outputs=HIDDEN, seed=1, **options) -> Any:
    torch.manual_seed(seed)
    layer = nn.FastWeightsLinear(WIDTH, outputs, CLASSES, dtype=torch.float64, **options)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)  # zeros would hide it
    return layer


@pytest.mark.parametrize("slope", [0.2, 0.0, 1.0])
def test_equations_2_and_4(slope):
    layer, tasks = build(negative_slope=slope), draw()
    memory = layer.write(tasks.keys, tasks.labels)
    h = layer(tasks.queries, memory)
    for task in range(3):
        expected = hebbian(array(tasks.keys[task]), array(tasks.labels[task]), array(layer.projection))
        assert_close(memory[task], expected)
        for x, mine in zip(array(tasks.queries[task]), h[task], strict=True):
            slow = leaky(array(layer.weight) @ x + array(layer.bias), slope)
            assert_close(mine, slow + leaky(expected.T @ x, slope))


@pytest.mark.parametrize("outputs", [HIDDEN, CLASSES])
def test_what_is_bound_reads_as_what_is_written(outputs):
    """R after the product with the query, or where there are as many outputs as classes, at once."""
    layer, tasks = build(outputs=outputs), draw()
    bound, written = layer.bind(tasks.keys, tasks.labels), layer.write(tasks.keys, tasks.labels)
    assert bound.shape == (3, WIDTH, CLASSES)
    assert_close(layer(tasks.queries, bound), layer(tasks.queries, written))
    if outputs == CLASSES:
        assert_close(bound, written, 0)
    noisy = build(outputs=outputs, label_noise=0.1)
    assert not torch.equal(noisy.bind(tasks.keys, tasks.labels), noisy.bind(tasks.keys, tasks.labels))


def test_the_gradient_rule_binds_nothing():
    layer, tasks = build(rule="gradient"), draw()
    with pytest.raises(ValueError, match=r"the gradient rule takes no labels: write\(keys, errors=errors\)"):
        layer.bind(tasks.keys, tasks.labels)
    with pytest.raises(ValueError, match=r"memory \[tasks,4,7\] of as many tasks; got .* and \[3, 4, 3\]"):
        layer(tasks.queries, torch.zeros(3, WIDTH, CLASSES, dtype=torch.float64))


def test_fast_weights_alone_and_slow_weights_alone():
    tasks = draw()
    fast = build(slow=False)
    memory = fast.write(tasks.keys, tasks.labels)
    assert_close(fast(tasks.queries, memory), leaky(array(tasks.queries) @ array(memory)))
    assert list(fast.parameters()) == []
    layer = build()
    slow = leaky(array(tasks.queries) @ array(layer.weight).T + array(layer.bias))
    assert_close(layer(tasks.queries), slow)
    assert_close(layer(tasks.queries[0]), slow[0])


def test_one_hot_labels_are_bound_as_they_are():
    layer, tasks = build(outputs=CLASSES, one_hot=True), draw()
    memory = layer.write(tasks.keys, tasks.labels)
    for task in range(3):
        assert_close(memory[task], hebbian(array(tasks.keys[task]), array(tasks.labels[task]), np.eye(CLASSES)))


def test_other_labels_for_the_same_classes_give_the_outputs_in_their_order():
    layer, tasks = build(outputs=CLASSES, one_hot=True, slow=False), draw()
    other = torch.tensor([2, 0, 1])
    first = layer(tasks.queries, layer.write(tasks.keys, tasks.labels))
    second = layer(tasks.queries, layer.write(tasks.keys, other[tasks.labels]))
    assert_close(second[..., other], first)


def test_equation_5():
    layer, tasks = build(rule="gradient"), draw()
    errors = torch.randn(3, 6, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    memory = layer.write(tasks.keys, errors=errors)
    for task in range(3):
        each = zip(array(tasks.keys[task]), array(errors[task]), strict=True)
        gradient = np.sum([np.outer(key, error) for key, error in each], axis=0)
        assert_close(memory[task], mapped(layer.mapping, gradient))


def test_another_task_changes_nothing_in_this_one():
    layer, tasks = build(), draw()
    memory = layer.write(tasks.keys, tasks.labels)
    keys, labels = tasks.keys.clone(), tasks.labels.clone()
    keys[0], labels[0] = math.nan, 0
    spoilt = layer.write(keys, labels)
    assert_close(spoilt[1:], memory[1:], 1e-14)
    assert spoilt[0].isnan().any()
    order = torch.tensor([2, 0, 1])
    assert_close(layer.write(tasks.keys[order], tasks.labels[order]), memory[order], 1e-14)


def test_the_order_of_the_description_is_of_no_matter():
    layer, tasks = build(), draw()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    second = layer.write(tasks.keys[:, order], tasks.labels[:, order])
    assert_close(second, layer.write(tasks.keys, tasks.labels))


def test_label_noise_is_uniform_and_of_training_alone():
    layer = nn.FastWeightsLinear(4000, CLASSES, CLASSES, one_hot=True, label_noise=0.01, dtype=torch.float64)
    keys, labels = torch.eye(4000, dtype=torch.float64)[None], torch.arange(4000)[None] % CLASSES
    exact = torch.nn.functional.one_hot(labels, CLASSES).double()
    torch.manual_seed(0)
    noise = layer.write(keys, labels) - exact  # with these keys the memory is the labels themselves
    assert noise.abs().max() <= 0.01 + 1e-12
    assert noise.abs().max() > 0.0099
    assert abs(float(noise.mean())) < 0.0003
    assert float(noise.std()) == pytest.approx(0.01 / math.sqrt(3), rel=0.02)
    assert torch.equal(layer.eval().write(keys, labels), exact)


def test_gradients_of_writing_and_reading_in_float64():
    tasks = draw(tasks=2, described=4, asked=2)
    errors = torch.randn(2, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    inputs = (tasks.keys.requires_grad_(), tasks.queries.requires_grad_())
    for options in ({}, {"slow": False}, {"outputs": CLASSES, "one_hot": True}):
        layer = build(**options)
        assert torch.autograd.gradcheck(lambda k, x: layer(x, layer.write(k, tasks.labels)), inputs)  # noqa: B023
    layer = build(rule="gradient", second_order=True)
    assert torch.autograd.gradcheck(lambda k, x, e: layer(x, layer.write(k, errors=e)), (*inputs, errors))


@pytest.mark.parametrize(
    ("options", "flows"),
    [
        ({}, True),
        ({"stop_gradient": True}, False),
        ({"rule": "gradient"}, False),
        ({"rule": "gradient", "second_order": True}, True),
        ({"rule": "gradient", "second_order": True, "stop_gradient": True}, False),
    ],
)
def test_where_gradients_flow(options, flows):
    layer, tasks = build(**options), draw()
    keys, errors = tasks.keys.requires_grad_(), torch.randn(3, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    gradient_rule = layer.rule == "gradient"
    memory = layer.write(keys, errors=errors) if gradient_rule else layer.write(keys, tasks.labels)
    layer(tasks.queries, memory).square().sum().backward()
    assert (keys.grad is not None) == flows
    assert (errors.grad is not None) == (flows and gradient_rule)
    if gradient_rule:
        learns = [weight.grad is not None for weight in layer.mapping.parameters()]
        assert learns == [not layer.stop_gradient] * 6


def test_torch_func_and_compile_agree_with_the_layer():
    layer, tasks = build(), draw()

    def run(weights, keys, labels, queries):
        memory = functional_call(_Writing(layer), {f"layer.{name}": w for name, w in weights.items()}, (keys, labels))
        return functional_call(layer, weights, (queries, memory))

    weights = dict(layer.named_parameters())
    expected = run(weights, *tasks)
    each = vmap(lambda *one: run(weights, *(part[None] for part in one))[0])(*tasks)
    assert_close(each, expected)
    found = grad(lambda weights: run(weights, *tasks).square().sum())(weights)
    reference = torch.autograd.grad(expected.square().sum(), list(weights.values()))
    for mine, theirs in zip(found.values(), reference, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("rule", ["hebbian", "gradient"])
def test_compiles_without_a_graph_break(rule):
    layer, tasks = build(rule=rule), draw()
    errors = torch.randn(3, 6, HIDDEN, dtype=torch.float64)

    def run(keys, labels, queries):
        memory = layer.write(keys, labels) if rule == "hebbian" else layer.write(keys, errors=errors)
        return layer(queries, memory)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    mine, expected = compiled(*tasks), run(*tasks)
    assert_close(mine, expected)
    assert_close(*(torch.autograd.grad(y.square().sum(), layer.weight)[0] for y in (mine, expected)))


class _Writing(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, keys, labels):
        return self.layer.write(keys, labels)


def test_autocast_comes_near_single_precision():
    layer, tasks = build().float(), draw(dtype=torch.float32)
    expected = layer(tasks.queries, layer.write(tasks.keys, tasks.labels))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(tasks.queries, layer.write(tasks.keys, tasks.labels))
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), expected, 0.05)
    found.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("rule", ["hebbian", "gradient"])
@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_fast_weights_stay_in_single_precision(rule, how):
    layer, tasks = build(rule=rule).float(), draw(dtype=torch.float32)
    keys, errors = tasks.keys.bfloat16(), torch.randn(*tasks.keys.shape[:2], layer.out_features).bfloat16()
    if how == "weights":
        layer, queries = layer.bfloat16(), tasks.queries.bfloat16()
    else:
        queries = tasks.queries
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        memory = layer.write(keys, tasks.labels) if rule == "hebbian" else layer.write(keys, errors=errors)
        found = layer(queries, memory)
    assert memory.dtype == torch.float32
    assert found.dtype == torch.bfloat16
    if rule == "hebbian":
        sums = keys.float().mT @ F.one_hot(tasks.labels, layer.num_classes).float()
        assert_close(memory, sums @ layer.projection.float().T, 1e-6)


def test_gradients_become_fast_weights_through_a_network_of_the_papers_sizes():
    mapping = build(rule="gradient").mapping
    assert mapping is not None
    assert [tuple(weight.shape) for weight in mapping.parameters() if weight.dim() > 1] == [(40, 1), (40, 40), (1, 40)]


def test_the_projection_is_drawn_once_within_bounds_and_saved():
    layer, other, tasks = build(seed=1), build(seed=2), draw()
    assert set(dict(layer.named_buffers())) == {"projection"}
    projection = nn.FastWeightsLinear(WIDTH, 400, 100).projection
    assert projection is not None
    assert projection.abs().max() <= 1 / 20
    assert projection.abs().max() > 0.99 / 20
    before = layer.write(tasks.keys, tasks.labels)
    assert not torch.equal(other.write(tasks.keys, tasks.labels), before)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(other.write(tasks.keys, tasks.labels), before)
    assert torch.equal(other(tasks.queries, before), layer(tasks.queries, before))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rule": "delta"}, "rule must be one of hebbian, gradient, got 'delta'"),
        ({"negative_slope": 1.5}, "negative_slope must lie between 0 and 1, got 1.5"),
        ({"label_noise": math.nan}, "label_noise must be finite and not negative, got nan"),
        ({"rule": "gradient", "slow": False}, "it takes slow=True, no one_hot and no label_noise"),
        (
            {"second_order": True},
            "second_order acts on the error gradients of the gradient rule; the Hebbian rule has none",
        ),
        ({"one_hot": True}, "out_features must be num_classes, got 7 and 3"),
    ],
)
def test_refuses_settings_that_do_not_fit(options, match):
    with pytest.raises(ValueError, match=match):
        nn.FastWeightsLinear(**{"in_features": WIDTH, "out_features": HIDDEN, "num_classes": CLASSES} | options)


def test_refuses_bad_input():
    layer, tasks = build(), draw()
    keys, labels, queries = tasks
    memory = layer.write(keys, labels)
    for call, match in (
        (lambda: layer.write(keys[..., 1:], labels), r"keys must be \[tasks,n,4\], got \[3, 6, 3\]"),
        (lambda: layer.write(keys[0], labels[0]), r"keys must be \[tasks,n,4\], got \[6, 4\]"),
        (lambda: layer.write(keys.long(), labels), r"keys must be floating point, got torch.int64"),
        (lambda: layer.write(keys), r"the hebbian rule binds keys to labels: write\(keys, labels\)"),
        (lambda: layer.write(keys, labels[:, 1:]), r"labels must be \[3, 6\] int64, one a key; got \[3, 5\]"),
        (lambda: layer.write(keys, labels.int()), r"labels must be \[3, 6\] int64.* got \[3, 6\] torch.int32"),
        (lambda: layer.write(keys, labels + 1), "labels must lie between 0 and 2, .* got 1 to 3"),
        (lambda: layer.write(keys, labels - 1), "labels must lie between 0 and 2, .* got -1 to 1"),
        (lambda: layer.write(keys, labels.tolist()), r"labels must be a tensor \[3, 6\] int64, one a key; got a list"),
        (lambda: layer(queries[..., 1:], memory), r"x must be \[tasks,m,4\], got \[3, 5, 3\]"),
        (
            lambda: layer(queries[1:], memory),
            r"memory \[tasks,4,7\] or \[tasks,4,3\] of as many tasks; got \[2, 5, 4\] and \[3, 4, 7\]",
        ),
        (lambda: layer(queries[1:], layer.bind(keys, labels)), r"of as many tasks; got \[2, 5, 4\] and \[3, 4, 3\]"),
        (lambda: layer(queries[0], memory), r"x must be \[tasks,m,4\] .* got \[5, 4\] and \[3, 4, 7\]"),
        (lambda: build(slow=False)(queries), "no slow weights: give it the memory that write returned"),
        (lambda: build(rule="gradient").write(keys, labels), r"maps error gradients: write\(keys, errors=errors\)"),
        (lambda: build(rule="gradient").write(keys, errors=keys), r"errors must be \[3, 6, 7\], got \[3, 6, 4\]"),
        (
            lambda: build(rule="gradient").write(keys, errors=torch.ones(3, 6, HIDDEN, dtype=torch.long)),
            r"errors must be floating point, got torch.int64",
        ),
        (lambda: layer(queries.long(), memory), r"x must be floating point, got torch.int64"),
        (lambda: layer(queries[0, 0, 0]), r"x must be \[tasks,m,4\], got \[\]"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


# The map of the gradient rule, piece by piece: the same numbers and gradients as the network itself.


def network(units=40, seed=0, dtype=torch.float64, spread=1.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = torch.nn.Sequential(
            torch.nn.Linear(1, units),
            torch.nn.LeakyReLU(0.2),
            torch.nn.Linear(units, units),
            torch.nn.LeakyReLU(0.2),
            torch.nn.Linear(units, 1),
        ).to(dtype)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=spread)
    return made


def itself(made, x):
    return made(x.unsqueeze(-1)).squeeze(-1)


def numbers(count=4000, spread=3.0, dtype=torch.float64):
    return spread * torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(values, made, x):
    asked = [x, *made.parameters()]
    return torch.autograd.grad(values.sin().sum(), asked)


@pytest.mark.parametrize("units", [1, 3, 40])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_and_all_gradients_are_those_of_the_network(units, seed):
    made, x = network(units, seed), numbers().requires_grad_()
    ours, theirs = map_numbers(made, x), itself(made, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for one, other in zip(gradients(ours, made, x), gradients(theirs, made, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_single_precision_is_about_as_near_to_the_truth_as_the_network(spread):
    exact, x = network(), numbers(spread=spread)
    single = network(dtype=torch.float32)
    truth = itself(exact, x)
    ours, theirs = (found.double() - truth for found in (map_numbers(single, x.float()), itself(single, x.float())))
    assert float(ours.detach().norm()) <= max(3 * float(theirs.detach().norm()), 1e-6 * float(truth.detach().norm()))


def test_as_it_starts_with_no_bias_all_pieces_meet_at_zero():
    made = network()
    for place in (0, 2, 4):
        torch.nn.init.zeros_(made[place].bias)
    x = torch.cat([numbers(), torch.zeros(3, dtype=torch.float64)])
    torch.testing.assert_close(map_numbers(made, x), itself(made, x), rtol=1e-11, atol=1e-11)


def test_units_without_a_weight_and_numbers_at_a_kink():
    made = network(4)
    with torch.no_grad():
        made[0].weight[1] = 0
        made[2].weight[2] = 0
    kinks = (-made[0].bias / made[0].weight[:, 0])[[0, 2, 3]].detach()
    x = torch.cat([numbers(), kinks])
    torch.testing.assert_close(map_numbers(made, x), itself(made, x), rtol=1e-9, atol=1e-9)


def test_any_shape_and_nan_stays_nan():
    made = network(3)
    x = torch.tensor([[[0.5, torch.nan]], [[torch.inf, -2.0]]], dtype=torch.float64)
    found = map_numbers(made, x)
    assert found.shape == (2, 1, 2)
    assert found.isnan().tolist() == [[[False, True]], [[False, False]]]


def test_gradients_check():
    made = network(3)
    parameters = dict(made.named_parameters())
    x = numbers(7).requires_grad_()

    def call(x, *weights):
        named = dict(zip(parameters, weights, strict=True))
        return torch.func.functional_call(_Evaluated(made), {f"made.{name}": value for name, value in named.items()}, x)

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))


class _Evaluated(torch.nn.Module):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return map_numbers(self.made, x)
