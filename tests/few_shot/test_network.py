"""What every few-shot network must obey, and the encoder under a head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import few_shot
from tests.few_shot.tasks import CLASSES, WIDTH, Encoder, assert_close, draw, indexed


def fast_weights(**options) -> few_shot.FewShotNetwork:
    return few_shot.FewShotNetwork(Encoder(), few_shot.FastWeightsHead(WIDTH, CLASSES, hidden_size=6, **options))


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "hebbian": fast_weights,
    "gradient": lambda: fast_weights(rule="gradient"),
    "softmax": lambda: fast_weights(hidden="slow", softmax="fast"),
    "matching": lambda: few_shot.FewShotNetwork(Encoder(), few_shot.MatchingHead(CLASSES)),
    "prototypes": lambda: few_shot.FewShotNetwork(Encoder(), few_shot.PrototypeHead(CLASSES)),
    "maml": lambda: few_shot.MAML(Encoder(), CLASSES, hidden_size=6, steps=2, lr=0.1),
    "fine-tuning": lambda: few_shot.FineTuning(Encoder(), 9, CLASSES, steps=20),
}
each = pytest.mark.parametrize("name", NETWORKS)


def build(name: str) -> Any:
    torch.manual_seed(1)
    return NETWORKS[name]().double()


@each
def test_the_call_is_to_describe_and_to_predict(name):
    network, tasks = build(name), draw()
    assert network.num_classes == CLASSES
    logits = network(*indexed(tasks))
    assert logits.shape == (3, 5, CLASSES)
    assert_close(network.predict(tasks.queries, network.describe(tasks.keys, tasks.labels)), logits)


@each
def test_without_gradients_the_numbers_are_the_same(name):
    network, tasks = build(name).eval(), draw()
    logits = network(*indexed(tasks))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(network(*indexed(tasks)), logits)
            memory = network.describe(tasks.keys, tasks.labels)
            assert not any(part.requires_grad for part in leaves(memory))
            assert_close(network.predict(tasks.queries, memory), logits)


@each
def test_tasks_and_queries_do_not_see_one_another(name):
    network, tasks = build(name), draw()
    logits = network(*indexed(tasks))
    order = torch.tensor([2, 0, 1])
    assert_close(network(*indexed(draw()._replace(**{k: v[order] for k, v in tasks._asdict().items()}))), logits[order])
    keys, labels, queries = (part.clone() for part in tasks)
    keys[0], labels[0], queries[0] = 100 * torch.randn(6, WIDTH, dtype=torch.float64), 0, 1
    queries[1, 3:] = 1
    changed = network.predict(queries, network.describe(keys, labels))
    assert_close(changed[2], logits[2])
    assert_close(changed[1, :3], logits[1, :3])
    assert not torch.allclose(changed[0], logits[0])


@each
def test_the_order_of_the_description_is_of_no_matter(name):
    network, tasks = build(name), draw()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(2))
    shuffled = tasks._replace(keys=tasks.keys[:, order], labels=tasks.labels[:, order])
    assert_close(network(*indexed(shuffled)), network(*indexed(tasks)))


@pytest.mark.parametrize("name", ["softmax", "matching", "prototypes", "fine-tuning"])
def test_no_label_is_preferred_before_a_task_is_described(name):
    """Where nothing is learnt of the labels themselves, to name the classes otherwise is to order the logits so."""
    network, tasks = build(name), draw()
    other = torch.tensor([2, 0, 1])
    renamed = network(*indexed(tasks._replace(labels=other[tasks.labels])))
    assert_close(renamed[..., other], network(*indexed(tasks)))


@each
def test_an_example_that_tasks_share_counts_in_each(name):
    network, tasks = build(name), draw()
    examples, description, labels, queries = indexed(tasks)
    description, queries = description[:1].expand(3, -1), queries[:1].expand(3, -1)
    alone = network(examples, description[:1], labels[:1], queries[:1])
    together = network(examples, description, labels[:1].expand(3, -1), queries)
    assert_close(together, alone.expand_as(together))


@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"fine-tuning"}))  # which has a loss of its own
def test_every_weight_that_is_trained_learns(name):
    network, tasks = build(name), draw()
    targets = torch.arange(15) % CLASSES
    torch.nn.functional.cross_entropy(network(*indexed(tasks)).flatten(0, 1), targets).backward()
    for key, weight in network.named_parameters():
        assert weight.grad is not None, key
        assert weight.grad.isfinite().all(), key
        assert weight.grad.any(), key


@each
def test_a_saved_network_predicts_the_same(name):
    network, tasks = build(name), draw()
    torch.manual_seed(7)
    other = NETWORKS[name]().double()
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(*indexed(tasks)), network(*indexed(tasks)))


@each
def test_refuses_labels_that_do_not_fit(name):
    network, tasks = build(name), draw()
    wrong = tasks._replace(labels=tasks.labels + 1)
    for call in (lambda: network(*indexed(wrong)), lambda: network.describe(wrong.keys, wrong.labels)):
        with pytest.raises(ValueError, match=r"labels must lie between 0 and 2, the 3 classes .* got 1 to 3"):
            call()


@pytest.mark.parametrize("gradients", [True, False])
def test_refuses_queries_of_other_tasks(gradients):
    network = build("hebbian")
    examples, description, labels, queries = indexed(draw())
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(ValueError, match=r"queries must have the same number of tasks, .*; got 3, 3 and 2"),
    ):
        network(examples, description, labels, queries[1:])


def test_refuses_examples_of_no_tasks():
    with pytest.raises(ValueError, match=r"examples must be \[tasks,n,\.\.\.\], got \[4\]"):
        build("hebbian").describe(torch.zeros(4), torch.zeros(4, dtype=torch.long))


def test_each_example_is_encoded_once_and_many_in_parts():
    class Counting(Encoder):
        seen: list[int] = []  # noqa: RUF012

        def forward(self, examples: Tensor) -> Tensor:
            self.seen.append(len(examples))
            return super().forward(examples)

    network = few_shot.FewShotNetwork(Counting(), few_shot.PrototypeHead(CLASSES))
    examples, index = torch.randn(2345, WIDTH, dtype=torch.float64), torch.arange(12).view(2, 6)
    labels = torch.arange(6).expand(2, 6) % CLASSES
    whole = network(examples, index, labels, index)
    assert Counting.seen == [2345]
    with torch.no_grad():
        assert_close(network(examples, index, labels, index), whole)
    assert Counting.seen[1:] == [1000, 1000, 345]


@pytest.mark.parametrize("name", ["hebbian", "maml"])
def test_images_of_bytes_and_bfloat16_where_that_is_asked_for(name):
    def make(half):
        torch.manual_seed(0)
        encoder = few_shot.ConvEncoder(1, 8, size=10, blocks=2, half=half)
        if name == "maml":
            return few_shot.MAML(encoder, CLASSES, hidden_size=6, lr=0.1)
        return few_shot.FewShotNetwork(encoder, few_shot.FastWeightsHead(encoder.features, CLASSES, hidden_size=6))

    images = torch.randint(0, 256, (12, 1, 10, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    index, labels = torch.arange(12)[None], torch.arange(6)[None] % CLASSES
    whole = make(False)(images, index[:, :6], labels, index[:, 6:])
    assert_close(make(False)(images / 255, index[:, :6], labels, index[:, 6:]), whole, 1e-4)
    half = make(True)(images, index[:, :6], labels, index[:, 6:])
    assert half.dtype == torch.float32
    assert_close(half, whole, 0.1)
    half.sum().backward()


def leaves(memory) -> list[Tensor]:
    if isinstance(memory, Tensor):
        return [memory]
    parts = memory.values() if isinstance(memory, dict) else memory or ()
    return [leaf for part in parts for leaf in leaves(part)]
