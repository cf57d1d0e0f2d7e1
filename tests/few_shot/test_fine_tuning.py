"""Plain fine-tuning, against its steps as loops over examples."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastweights import few_shot
from fastweights.tasks.episodes import Episodes, EpisodeSampler
from tests.few_shot.tasks import CLASSES, WIDTH, Encoder, array, assert_close, draw


def by_hand(keys, labels, steps, lr, decay):
    weight, bias = np.zeros((WIDTH, CLASSES)), np.zeros(CLASSES)
    for _ in range(steps):
        of_weight, of_bias = decay * weight, np.zeros(CLASSES)
        for key, label in zip(keys, labels, strict=True):
            x = key / np.linalg.norm(key)
            chances = np.exp(x @ weight + bias)
            error = chances / chances.sum()
            error[label] -= 1
            of_weight = of_weight + np.outer(x, error) / len(keys)
            of_bias = of_bias + error / len(keys)
        weight, bias = weight - lr * of_weight, bias - lr * of_bias
    return weight, bias


def test_the_steps_of_every_task():
    head, tasks = few_shot.FineTuningHead(CLASSES, steps=7, lr=0.5, weight_decay=0.1), draw()
    memory = head.describe(tasks.keys, tasks.labels)
    logits = head.predict(tasks.queries, memory)
    for task in range(3):
        weight, bias = by_hand(array(tasks.keys[task]), array(tasks.labels[task]), 7, 0.5, 0.1)
        assert_close(memory.weight[task], weight)
        assert_close(memory.bias[task, 0], bias)
        for x, mine in zip(array(tasks.queries[task]), logits[task], strict=True):
            assert_close(mine, x / np.linalg.norm(x) @ weight + bias)


def test_the_usual_steps_come_near_the_least_loss_at_any_scale():
    torch.manual_seed(0)
    for scale in (1e-3, 1.0, 1e4):
        keys, labels = scale * torch.randn(2, 5, 64, dtype=torch.float64), torch.arange(5).expand(2, 5)
        losses = []
        for steps in (100, 4000):
            head = few_shot.FineTuningHead(5, steps=steps)
            memory = head.describe(keys, labels)
            penalty = 0.0005 * float(memory.weight.square().sum()) / 2
            losses.append(float(F.cross_entropy(head.predict(keys, memory).flatten(0, 1), labels.flatten())) + penalty)
            if steps == 100:
                assert (head.predict(keys, memory).argmax(-1) == labels).all()
        assert losses[1] < losses[0] < 0.2 < math.log(5)


def test_the_encoder_is_frozen_and_no_precision_is_lost():
    head, tasks = few_shot.FineTuningHead(CLASSES), draw(dtype=torch.float32)
    memory = head.describe(tasks.keys.requires_grad_(), tasks.labels)
    assert not memory.weight.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        again = head.describe(tasks.keys, tasks.labels)
    assert torch.equal(again.weight, memory.weight)


def sampled(examples=60, classes=10) -> Episodes:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(examples) % classes
    vectors = torch.randn(examples, WIDTH, dtype=torch.float64, generator=generator)
    return EpisodeSampler(vectors, labels, ways=3, shots=1, queries=2).draw(4, generator, pool=5)


def test_the_loss_is_of_each_example_once_against_its_class_in_the_data_set():
    episodes = sampled()
    network = few_shot.FineTuning(Encoder(), 10, 3).double()
    class_of: dict[int, int] = {}
    for task in range(4):
        for index, labels in ((episodes.description, episodes.labels), (episodes.queries, episodes.targets)):
            for example, label in zip(index[task].tolist(), labels[task].tolist(), strict=True):
                known = class_of.setdefault(example, int(episodes.classes[task, label]))
                assert known == int(episodes.classes[task, label])
    assert len(class_of) == len(episodes.examples) < 4 * 9  # tasks share examples
    losses = []
    for example, label in class_of.items():
        logits = network.classifier(network.encoder(episodes.examples[example]))
        losses.append(-logits.log_softmax(0)[label])
    loss = network.loss(episodes)
    assert_close(loss, torch.stack(losses).mean())
    extra = episodes._replace(examples=torch.cat([episodes.examples, torch.ones(3, WIDTH, dtype=torch.float64)]))
    assert_close(network.loss(extra), loss)  # those that no task has
    loss.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in network.parameters())


def test_what_it_learns_of_some_classes_helps_with_others():
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(20, 2, generator=generator).repeat_interleave(10, 0)
    noise = 3 * torch.randn(200, 2, generator=generator)  # of two coordinates that tell nothing
    examples = torch.cat([signal + 0.05 * torch.randn(200, 2, generator=generator), noise], 1)
    labels = torch.arange(20).repeat_interleave(10)
    train = EpisodeSampler(examples[:100], labels[:100], ways=3, shots=1, queries=5)
    test = EpisodeSampler(examples[100:], labels[100:] - 10, ways=3, shots=1, queries=5).draw(50, generator)
    torch.manual_seed(0)
    network = few_shot.FineTuning(Encoder(16, torch.float32), 10, 3)
    optimizer, accuracies = torch.optim.Adam(network.parameters(), 0.02), []
    for update in range(151):
        if update in (0, 150):
            logits = network(test.examples, test.description, test.labels, test.queries)
            accuracies.append(float((logits.argmax(-1) == test.targets).float().mean()))
        loss = network.loss(train.draw(8, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert accuracies[0] < 0.6
    assert accuracies[1] > 0.75


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"classes": 0}, "classes must be an integer of at least 1, got 0"),
        ({"num_classes": 1.0}, "num_classes must be an integer of at least 1, got 1.0"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"lr": math.inf}, "lr must be positive and finite, got inf"),
        ({"weight_decay": -1}, "weight_decay must be finite and not negative, got -1"),
        ({"encoder": torch.nn.Linear(2, 2)}, "Linear must give the width of its features in `features`, got None"),
    ],
)
def test_refuses_settings_that_do_not_fit(options, match):
    with pytest.raises(ValueError, match=match):
        few_shot.FineTuning(**{"encoder": Encoder(), "classes": 10, "num_classes": CLASSES} | options)


def test_refuses_classes_that_the_classifier_has_not():
    with pytest.raises(ValueError, match="classes must lie between 0 and 7, those of the classifier; got 1 to 9"):
        few_shot.FineTuning(Encoder(), 8, 3).double().loss(sampled())


def test_fitted_in_single_precision_at_least():
    tasks, head = draw(dtype=torch.bfloat16), few_shot.FineTuningHead(CLASSES)
    layers = head.describe(tasks.keys, tasks.labels)
    exact = head.describe(tasks.keys.float(), tasks.labels)
    assert torch.equal(layers.weight, exact.weight)
    assert torch.equal(head.predict(tasks.queries, layers), head.predict(tasks.queries.float(), exact))
