"""MAML (Finn et al. 2017, algorithm 2), against its steps by hand."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import few_shot
from tests.few_shot.tasks import CLASSES, WIDTH, Encoder, assert_close, draw, indexed

LR = 0.3


def build(**options) -> few_shot.MAML:
    torch.manual_seed(1)
    return few_shot.MAML(Encoder(), CLASSES, hidden_size=6, **({"lr": LR} | options)).double()


def network_of(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Encoder, hidden layer, softmax layer, from their weights and biases."""
    features = (x @ weights[0].T + weights[1]).tanh()
    z = features @ weights[2].T + weights[3]
    return torch.where(z > 0, z, 0.2 * z) @ weights[4].T + weights[5]


def by_hand(weights: Sequence[Tensor], tasks, steps: int, second_order: bool) -> Tensor:
    logits = []
    for keys, labels, queries in zip(*tasks, strict=True):
        adapted = list(weights)
        for _ in range(steps):
            chances = network_of(adapted, keys).softmax(-1)
            loss = -torch.stack([p[label].log() for p, label in zip(chances, labels, strict=True)]).mean()
            gradients = torch.autograd.grad(loss, adapted, create_graph=second_order)
            adapted = [weight - LR * gradient for weight, gradient in zip(adapted, gradients, strict=True)]
        logits.append(network_of(adapted, queries))
    return torch.stack(logits)


@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_algorithm_2(steps, second_order):
    network, tasks = build(steps=steps, second_order=second_order), draw()
    targets = torch.arange(15) % CLASSES
    weights = list(network.parameters())
    mine, expected = network(*indexed(tasks)), by_hand(weights, tasks, steps, second_order)
    assert_close(mine, expected)
    found = torch.autograd.grad(F.cross_entropy(mine.flatten(0, 1), targets), weights)
    reference = torch.autograd.grad(F.cross_entropy(expected.flatten(0, 1), targets), weights)
    for name, own, theirs in zip(dict(network.named_parameters()), found, reference, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-11, msg=name)


def test_first_and_second_order_differ_in_their_gradients_alone():
    tasks, logits, gradients = draw(), [], []
    for second_order in (True, False):
        network = build(second_order=second_order)
        logits.append(network(*indexed(tasks)))
        gradients.append(torch.autograd.grad(logits[-1].square().sum(), list(network.parameters()))[2])
    assert_close(logits[0], logits[1])
    assert not torch.allclose(gradients[0], gradients[1])


@pytest.mark.parametrize("second_order", [True, False])
def test_what_flows_into_the_described_examples(second_order):
    network, tasks = build(second_order=second_order), draw()
    keys = tasks.keys.requires_grad_()
    network(*indexed(tasks._replace(keys=keys))).square().sum().backward()
    assert keys.grad is not None
    assert bool(keys.grad.any()) == second_order


def test_evaluation_may_take_more_steps():
    network, tasks = build(steps=1, test_steps=4), draw()
    weights = list(network.parameters())
    assert_close(network(*indexed(tasks)), by_hand(weights, tasks, 1, True))
    expected = by_hand(weights, tasks, 4, True)
    assert_close(network.eval()(*indexed(tasks)), expected)
    with torch.no_grad():
        assert_close(network(*indexed(tasks)), expected)


def test_a_step_takes_a_class_as_far_whatever_their_number():
    assert few_shot.MAML(Encoder(), 5).lr == pytest.approx(0.1)
    moved = []
    for classes in (5, 50):
        torch.manual_seed(0)
        network = few_shot.MAML(Encoder(features=64, dtype=torch.float32), classes)
        before = dict(network.named_parameters())["network.softmax.weight"].detach()
        keys, labels = torch.randn(1, classes, WIDTH), torch.arange(classes)[None]
        after = network.describe(keys, labels)["softmax.weight"][0].detach()
        moved.append(float((after - before).norm(dim=1).mean()))
    assert 0.5 < moved[1] / moved[0] < 2


def test_the_shared_weights_stay_and_those_of_each_task_are_stacked():
    network, tasks = build(), draw()
    before = {name: weight.clone() for name, weight in network.network.named_parameters()}
    memory = network.describe(tasks.keys, tasks.labels)
    assert {name: stacked.shape for name, stacked in memory.items()} == {n: (3, *w.shape) for n, w in before.items()}
    assert all(stacked.requires_grad for stacked in memory.values())
    for name, weight in network.network.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None
    with torch.no_grad():
        assert_close(network.describe(tasks.keys, tasks.labels)["softmax.bias"], memory["softmax.bias"])


def test_weights_that_are_not_trained_are_adapted_all_the_same():
    network, tasks = build(), draw()
    expected = network(*indexed(tasks))
    network.requires_grad_(False)
    assert_close(network(*indexed(tasks)), expected)


@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize(
    ("build", "examples"),
    [
        (lambda: few_shot.ConvEncoder(1, 4, size=8, blocks=2), torch.rand(8, 1, 8, 8)),
        (lambda: few_shot.SentenceEncoder(9, embedding_size=4, hidden_size=5), torch.randint(1, 9, (8, 6)).tril(5)),
    ],
    ids=["images", "sentences"],
)
def test_it_adapts_the_other_encoders_too(build, examples, second_order):
    torch.manual_seed(0)
    network = few_shot.MAML(build(), 2, hidden_size=6, second_order=second_order)
    described, asked = torch.arange(4).view(1, 4), torch.arange(4, 8).view(1, 4)
    logits = network(examples, described, torch.tensor([[0, 1, 0, 1]]), asked)
    logits.square().sum().backward()
    weights = dict(network.named_parameters())
    assert all(weight.grad is not None and weight.grad.any() for weight in weights.values())
    unadapted = network.network(examples[4:])
    assert not torch.allclose(logits[0], unadapted)


def test_second_order_gradients_in_float64():
    network, tasks = build(steps=2), draw(tasks=1, described=3, asked=2)

    def run(weight):
        weights = dict(network.named_parameters()) | {"network.encoder.layer.weight": weight}
        return torch.func.functional_call(network, weights, indexed(tasks))

    assert torch.autograd.gradcheck(run, (dict(network.named_parameters())["network.encoder.layer.weight"],))


def test_a_network_that_adapts_learns_what_cannot_be_known_beforehand():
    """Tasks whose labels are of chance: without the description no network is better than chance."""
    network = few_shot.MAML(Encoder(dtype=torch.float32), 2, hidden_size=16, lr=LR)
    optimizer, generator = torch.optim.Adam(network.parameters(), 0.01), torch.Generator().manual_seed(0)
    centres, swapped = torch.randn(2, WIDTH, generator=generator) * 2, torch.tensor([[0, 1], [1, 0]])
    for _ in range(60):
        labels = swapped[torch.randint(2, (4,), generator=generator)]
        keys, queries = (centres + 0.3 * torch.randn(4, 2, WIDTH, generator=generator) for _ in range(2))
        logits = network.predict(queries, network.describe(keys, labels))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (logits.argmax(-1) == labels).all()
    assert float(loss.detach()) < 0.1


class Normalised(torch.nn.Module):
    features = 8

    def __init__(self, **options):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.BatchNorm1d(8, **options))

    def forward(self, examples: Tensor) -> Tensor:
        normalised: Tensor = self.layers(examples)
        return normalised


def test_batch_normalisation_has_the_statistics_of_its_batch_or_is_refused():
    with pytest.raises(ValueError, match=r"BatchNorm1d 'layers.1'.*: build it with track_running_stats=False"):
        few_shot.MAML(Normalised(), CLASSES)
    tasks, network = draw(dtype=torch.float32), few_shot.MAML(Normalised(track_running_stats=False), CLASSES)
    network(*indexed(tasks)).sum().backward()
    with torch.no_grad():
        assert_close(network.eval()(*indexed(tasks)), network.train()(*indexed(tasks)), 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_classes": 0}, "num_classes must be an integer of at least 1, got 0"),
        ({"hidden_size": 2.5}, "hidden_size must be an integer of at least 1, got 2.5"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"test_steps": 0}, "test_steps must be an integer of at least 1, got 0"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"lr": math.nan}, "lr must be positive and finite, got nan"),
        ({"encoder": torch.nn.Linear(2, 2)}, "Linear must give the width of its features in `features`, got None"),
    ],
)
def test_refuses_settings_that_do_not_fit(options, match):
    with pytest.raises(ValueError, match=match):
        few_shot.MAML(**{"encoder": Encoder(), "num_classes": CLASSES} | options)


def test_refuses_tasks_that_do_not_fit():
    network, tasks = few_shot.MAML(Encoder().float(), CLASSES, hidden_size=5), draw(dtype=torch.float32)
    examples, description, labels, queries = indexed(tasks)
    for given in ((description, labels, queries[1:]), (description[:0], labels[:0], queries[:0])):
        with pytest.raises(ValueError, match="queries must have the same number of tasks, at least 1; got"):
            network(examples, *given)
    memory = network.describe(tasks.keys, tasks.labels)
    for asked in (tasks.queries[1:], torch.cat([tasks.queries, tasks.queries])):
        with pytest.raises(ValueError, match=f"examples must have the 3 tasks described, got {len(asked)}"):
            network.predict(asked, memory)
