import json
import math
import os
import re
import shutil
import threading
import traceback
import warnings
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fastweights import memory
from fastweights.errors import MemoryFileError
from fastweights.memory.classifier import _file as _classifier_file
from fastweights.memory.classifier import _new_classes, _separation, _statistics

SIZE, OLD = 6, ("ant", "bee", "cat", "dog")
CENTERS = 4 * torch.eye(SIZE)  # of the old classes, and of two more


def draw(row, count, seed=0):
    return CENTERS[row] + 0.7 * torch.randn(count, SIZE, generator=torch.Generator().manual_seed(100 * row + seed))


def old_examples(count=20, seed=0):
    return torch.cat([draw(row, count, seed) for row in range(4)]), [name for name in OLD for _ in range(count)]


def network():
    """A body that leaves inputs as they are, and a head that answers the old classes."""
    head = torch.nn.Linear(SIZE, 4)
    with torch.no_grad():
        head.weight.copy_(CENTERS[:4] / 2)
        head.bias.fill_(-4.0)
    return torch.nn.Identity(), head


def fitted(head=True, unknown_rate=0.05, **options):
    body, layer = network()
    classifier = memory.AdaptiveClassifier(body, layer if head else None, classes=OLD, **options)
    classifier.fit(*old_examples(), unknown_rate=unknown_rate)
    return classifier


@pytest.mark.parametrize("head", [True, False])
def test_a_new_class_is_learnt_by_name_and_the_old_ones_stay(head):
    classifier = fitted(head)
    test, names = old_examples(50, seed=1)
    before = classifier.predict(test)
    assert sum(map(str.__eq__, before.names, names)) >= 196
    assert before.unknown.float().mean() <= 0.1
    strangers = classifier.predict(draw(4, 50, seed=1))
    assert strangers.unknown.float().mean() >= 0.9
    classifier.add_examples(draw(4, 5), ["emu"] * 5)
    assert classifier.classes == (*OLD, "emu")
    assert sum(map(str.__eq__, classifier.predict(test).names, names)) >= 194
    learnt = classifier.predict(draw(4, 50, seed=1))
    assert learnt.names.count("emu") >= 45
    assert learnt.unknown.float().mean() <= 0.2
    total = learnt.probabilities.sum(1) + learnt.unknown_probability
    assert total.tolist() == pytest.approx([1.0] * 50, abs=1e-5)
    assert [learnt.classes[best] for best in learnt.probabilities.argmax(1)] == learnt.names


def test_the_answer_is_that_of_a_loop_over_the_equations(monkeypatch):
    """One Gaussian at a time, with the covariances themselves; one regression by another method; then the odds."""
    monkeypatch.setattr(_separation, "STEPS", 3000)  # to the end, where any method ends
    classifier = fitted()
    five, queries = draw(4, 5), torch.cat([draw(row, 3, seed=2) for row in range(6)])
    classifier.add_examples(five, "emu")
    answers = classifier.predict(queries)
    found, new = classifier._fitted.statistics, classifier._view().new
    rates, densities, scale = found.rates, found.whole.densities, found.whole.scale
    rotation, spread = densities.rotation.numpy(), densities.spread.numpy()

    def point(x):
        away = found.whole.space.axes.T.double().numpy() @ (x - found.whole.space.center).double().numpy()
        length = math.sqrt(sum(away**2))
        return np.append(away / length, math.log1p(length / float(found.whole.space.distance)))

    # In these coordinates of a point y, examples have the covariance `within`, and class means `between`.
    inverse = np.linalg.inv(rotation)
    within, between = inverse.T @ inverse, inverse.T @ np.diag(spread) @ inverse

    def log_density(y, examples):
        n = len(examples)
        gain = n * between @ np.linalg.inv(n * between + within)
        mean = densities.origin.numpy() + (gain @ (np.mean(examples, 0) - densities.origin.numpy()) if n else 0)
        covariance = within + between - gain @ between
        away = y - mean
        return -0.5 * (away @ np.linalg.inv(covariance) @ away + np.linalg.slogdet(covariance)[1])

    # The regression: all kept examples against the five, by torch's own minimiser.
    inputs, names = old_examples()
    taught = np.stack([point(x) for x in five])
    features = torch.tensor(np.concatenate([[point(x) for x in inputs], taught])) / scale
    features = torch.cat([features, torch.full((len(features), 1), 0.2)], 1)
    sign = torch.tensor([-1.0] * 80 + [1.0] * 5).double()
    weights = torch.tensor([0.9 / 80] * 80 + [0.1 / 5] * 5).double()
    row = torch.zeros(SIZE + 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([row], max_iter=1000, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = (weights * F.softplus(-sign * (features @ row))).sum() + 0.5e-4 * row.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    found_row = row.detach().numpy()
    groups = [[point(x) for x, name in zip(inputs, names, strict=True) if name == one] for one in OLD]
    for index, query in enumerate(queries):
        y, logits = point(query), (network()[1](query).double() * rates.logit).detach().numpy()
        old = np.array([rates.density * log_density(y, group) for group in groups])
        known = np.log(np.exp(old - old.max()).sum()) + old.max()
        best, second = sorted(logits)[:-3:-1]
        lead = min(best - second, rates.certainty)
        regression = np.append(y / scale.numpy(), 0.2) @ found_row
        odds = rates.odds * (rates.density * log_density(y, taught) + regression - known - 0.5 * lead)
        response = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        softmax = logits - response
        parts = [rates.density * log_density(y, []) - known, -min(response, rates.response), -lead]
        strangeness = sum((np.array(parts) - rates.expected) / rates.deviations)
        doubt = rates.slope * (strangeness - rates.threshold) + rates.offset
        directly = rates.odds * (rates.density * (log_density(y, []) - log_density(y, taught)) - regression)
        lacks = rates.through_old * (doubt - rates.offset - odds) + (1 - rates.through_old) * directly
        score = rates.offset - np.logaddexp(rates.offset - doubt, float(new.familiarity[0]) - lacks) + new.shift
        unknown = 1 / (1 + math.exp(-score))
        scores = np.append(softmax, odds - new.evidence)
        expected = (1 - unknown) * np.exp(scores) / np.exp(scores).sum()
        assert answers.probabilities[index].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        assert float(answers.unknown_probability[index]) == pytest.approx(unknown, abs=1e-4)
        assert float(answers.unknown_score[index]) == pytest.approx(score, abs=1e-2)
        assert bool(answers.unknown[index]) == (score > rates.offset)


def draw_classes(classes, count, size, seed=0, spread=0.7):
    """Return examples of classes whose means are random, in as many features as one likes."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * F.normalize(torch.randn(classes, size, generator=torch.Generator().manual_seed(1)), dim=1)
    noise = spread * torch.randn(classes, count, size, generator=generator) * (16 / size) ** 0.5
    return (means[:, None] + noise).flatten(0, 1), [f"class {row}" for row in range(classes) for _ in range(count)]


def fit_classes(size, known=10, count=25, **options):
    """Return a classifier of the first ten of twelve classes, without an output layer, and the report."""
    x, names = draw_classes(12, count, size)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(known)])
    return classifier, classifier.fit(x[: known * count], names[: known * count], **options)


@pytest.mark.parametrize("size", [16, 160, 1600])
def test_what_is_asked_is_delivered_at_every_number_of_features(size):
    """Before folds the last two learnt nothing and called nothing unknown, without a word."""
    classifier, report = fit_classes(size)
    test, names = draw_classes(12, 60, size, seed=2)
    before = classifier.predict(test[:600])
    assert before.unknown.float().mean() == pytest.approx(0.05, abs=0.03)
    assert classifier.predict(test[600:]).unknown.float().mean() >= 0.5
    right = sum(map(str.__eq__, before.names, names[:600]))
    assert right >= 0.97 * 600
    assert report.right >= 0.97
    assert report.unknown == pytest.approx(0.05, abs=0.03)
    for shots, least in ((1, 0.6), (5, 0.85)):
        new = draw_classes(12, shots, size, seed=3)[0][10 * shots : 11 * shots]
        classifier.add_examples(new, "class 10", tag="new")
        answers = classifier.predict(test[:660])
        assert right - sum(map(str.__eq__, answers.names[:600], names[:600])) <= 0.015 * 600
        assert answers.names[600:].count("class 10") >= least * 60
        assert answers.unknown[600:].float().mean() <= 0.15
        classifier.undo("new")


def test_an_old_example_is_asked_about_a_new_class_that_was_learnt_without_its_fold():
    """Seen by what was learnt with them, old examples are far from a new class, and it would be answered too easily."""
    x, _ = old_examples()
    found, _ = _statistics.fit_statistics(x, torch.arange(4).repeat_interleave(20), None, 0.05, 0.01)

    def weigh(features):
        view = _new_classes.view_old(found._replace(kept=found.kept._replace(features=features)), range(4), {})
        return _new_classes.learn_classes(view, [draw(4, 5)], [torch.zeros(5, 0)])[0].odds

    changed = found.kept.features.clone()
    changed[7] = draw(4, 1)
    before, after = weigh(found.kept.features), weigh(changed)
    fold = _statistics.fold_of(len(changed))
    beside = (fold == fold[7]) & (torch.arange(len(changed)) != 7)
    torch.testing.assert_close(after[beside], before[beside], rtol=1e-9, atol=1e-9)
    assert (after - before)[fold != fold[7]].abs().mean() > 0.1  # the others are asked about what it was taught


@pytest.mark.parametrize(("shots", "least"), [(1, 0.2), (5, 0.3)])
def test_learning_classes_leaves_what_nobody_has_learnt_unknown(shots, least):
    """Each class takes what resembles it: the threshold falls until 5 % of what is known is unknown again."""
    x, names = draw_classes(30, 25, 48, spread=1.2)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(10)])
    classifier.fit(x[:250], names[:250])
    for row in range(10, 20):
        classifier.add_examples(x[25 * row : 25 * row + shots], f"class {row}")
    test, _ = draw_classes(30, 60, 48, seed=2, spread=1.2)
    old, learnt, foreign = (classifier.predict(each).unknown.float().mean() for each in test.split(600))
    assert old <= 0.08
    assert learnt <= 0.12
    assert foreign >= least  # none, and 6 %, where the threshold stays


@pytest.mark.parametrize("scale", [0.02, 1.0, 20.0])
def test_probabilities_are_those_of_right_answers_however_timid_the_output_layer_is(scale):
    x, names = draw_classes(8, 40, 32, spread=0.6)
    head = torch.nn.Linear(32, 8)
    with torch.no_grad():  # the best there is
        means = x.view(8, 40, 32).mean(1)
        head.weight.copy_(means * scale)
        head.bias.copy_(-means.square().sum(1) / 2 * scale)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), head, classes=[f"class {row}" for row in range(8)])
    classifier.fit(x, names)
    test, names = draw_classes(8, 100, 32, seed=2, spread=0.6)
    answers = classifier.predict(test)
    right = sum(map(str.__eq__, answers.names, names)) / len(names)
    among = answers.probabilities / (1 - answers.unknown_probability[:, None])
    assert right >= 0.97
    assert float(among.amax(1).mean()) == pytest.approx(right, abs=0.03)


def test_more_old_answers_may_be_lost_for_more_of_the_new():
    test, _ = draw_classes(12, 100, 32, seed=2, spread=1.3)
    counts = []
    for old_loss in (0.005, 0.02, 0.1):
        x, names = draw_classes(12, 40, 32, spread=1.3)
        classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(10)])
        report = classifier.fit(x[:400], names[:400], old_loss=old_loss)
        assert report.old_loss == old_loss
        assert all(lost <= old_loss + 0.02 for lost in report.lost)
        classifier.add_examples(x[400:410], "class 10")
        answers = classifier.predict(test[:1100])
        counts.append(answers.names[1000:].count("class 10"))
        assert answers.names[:1000].count("class 10") <= 1000 * (2 * old_loss + 0.015)
    assert counts[0] < counts[1] < counts[2]


def test_the_report_is_a_table_and_a_class_that_cannot_be_told_is_said():
    classifier, report = fit_classes(64)
    assert "old inputs called unknown" in str(report)
    assert "asked: 5.0 %" in str(report)
    assert (report.examples, report.classes, report.features, report.shots) == (250, 10, 64, (1, 5, 20))
    assert report.new[1] >= 0.8
    x, _ = draw_classes(12, 10, 64, seed=4)
    with pytest.warns(
        UserWarning, match=r"only \d of the 5 examples of 'nobody' .* 'class 3'. The features do not tell"
    ):
        classifier.add_examples(x[30:35], "nobody")  # of class 3
    classifier.add_examples(x[100:105], "class 10")  # nothing is said of one that is learnt
    assert classifier.predict(x[105:110]).names == ["class 10"] * 5
    noise = torch.randn(100, 30, generator=torch.Generator().manual_seed(0))
    aimless = memory.AdaptiveClassifier(torch.nn.Identity(), classes=["a", "b", "c", "d"])
    with pytest.warns(UserWarning, match="of a class learnt from a few examples only"):
        aimless.fit(noise, ["a", "b", "c", "d"] * 25)


def test_odd_features_and_counts_are_learnt_or_refused():
    alone = memory.AdaptiveClassifier(torch.nn.Identity(), classes=["a", "b", "c"])
    for x, names, message in [
        (torch.zeros(30, 8), ["a", "b", "c"] * 10, "equal features"),
        (torch.full((30, 8), 3.7), ["a", "b", "c"] * 10, "equal features"),
        (torch.randn(3, 8), ["a", "b", "c"], "more examples than classes, got 3 of 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            alone.fit(x, names)
    x, names = draw_classes(5, 1000, 16)
    test, _ = draw_classes(5, 50, 16, seed=9)
    for counts in ([1, 1000, 1000, 4], [3, 5, 1, 5], [1, 1, 1, 2]):  # one example, and very many
        rows = [1000 * row + place for row, count in enumerate(counts) for place in range(count)]
        classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(4)])
        with pytest.warns(UserWarning, match=f"^{sum(count < 5 for count in counts)} classes have too few examples"):
            classifier.fit(x[rows], [names[row] for row in rows])
        assert set(classifier.predict(x[rows]).names) <= set(names)
        if counts[1] > 5:
            classifier.add_examples(x[4000:4020], "class 4")
            answers = classifier.predict(test)
            assert answers.names[50:100].count("class 1") >= 45
            assert answers.names[200:].count("class 4") >= 45
    with pytest.warns(UserWarning, match=r"unknown_rate=0\.05 of 30 examples"):
        wide, report = fit_classes(10_000, known=3, count=10)
    assert report.axes < 30
    test, names = draw_classes(12, 10, 10_000, seed=5)
    assert wide.predict(test[:30]).names == names[:30]


def test_units_of_the_features_do_not_matter():
    answers = []
    for unit in (2.0**-50, 1.0, 2.0**50):
        x, names = draw_classes(12, 25, 40)
        classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(10)])
        classifier.fit(unit * x[:250], names[:250])
        classifier.add_examples(unit * x[250:255], "class 10")
        answers.append(classifier.predict(unit * draw_classes(12, 5, 40, seed=2)[0]).probabilities)
    assert torch.allclose(answers[0], answers[1], atol=1e-3)
    assert torch.allclose(answers[2], answers[1], atol=1e-3)


class Numbers(TorchDispatchMode):
    """Count the numbers that operations make."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.count += sum(each.numel() for each in tree_leaves(made) if isinstance(each, torch.Tensor))
        return made


def test_the_work_of_fitting_grows_as_the_classes_do():
    """What is made is counted, not seconds: all examples beside all classes would be sixteen times as much."""
    counts = []
    for classes in (300, 1200):
        x, names = draw_classes(classes, 6, 16, spread=0.3)
        classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(classes)])
        with Numbers() as numbers:
            classifier.fit(x, names)
        counts.append(numbers.count)
        assert classifier.predict(x[::600]).names == names[::600]
    assert counts[1] <= 6 * counts[0]


def test_inputs_out_of_all_proportion_are_unknown():
    """The network is surer of them than of anything that it has learnt."""
    classifier = fitted()
    inputs, _ = old_examples(50, seed=1)
    assert classifier.predict(inputs).unknown.float().mean() <= 0.1
    assert classifier.predict(100 * inputs).unknown.float().mean() >= 0.9


def test_what_is_left_for_the_classes_is_theirs_in_proportion_however_little_it_is():
    answers = fitted(head=False).predict(torch.cat([size * draw(4, 20, seed=1) for size in (2, 3, 4, 8)]))
    some = answers.unknown_score < 80  # beyond it float32 has few digits left
    assert (answers.unknown_score[some] > 50).any()
    left = answers.probabilities[some].double().sum(1)
    torch.testing.assert_close(left, answers.unknown_score[some].double().neg().sigmoid(), rtol=1e-3, atol=0)


def test_the_order_of_the_examples_does_not_matter():
    inputs, names = old_examples()
    new = torch.cat([draw(4, 5), draw(5, 5)])
    new_names = ["emu"] * 5 + ["fox"] * 5
    answers = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        old_order, new_order = torch.randperm(80, generator=generator), torch.randperm(10, generator=generator)
        body, head = network()
        classifier = memory.AdaptiveClassifier(body, head, classes=OLD)
        classifier.fit(inputs[old_order], [names[i] for i in old_order])
        for i in new_order.tolist():  # one at a time
            classifier.add_examples(new[i : i + 1], [new_names[i]])
        answers.append(classifier.predict(torch.cat([draw(row, 9, seed=3) for row in range(6)])))
    for other in answers[1:]:
        assert other.names == answers[0].names
        assert other.classes == answers[0].classes
        assert torch.allclose(other.probabilities, answers[0].probabilities, atol=1e-6)
        assert torch.allclose(other.unknown_score, answers[0].unknown_score, atol=1e-4)
        assert torch.equal(other.unknown, answers[0].unknown)


def test_examples_of_an_old_class_move_the_place_where_it_is_expected():
    classifier = fitted(head=False)
    moved = CENTERS[0] + torch.tensor([0.0, 0, 0, 0, 0, 5.0])
    before = classifier.predict(moved[None])
    classifier.add_examples(moved + 0.3 * torch.randn(60, SIZE, generator=torch.Generator().manual_seed(5)), "ant")
    assert classifier.classes == OLD
    assert float(classifier.predict(moved[None]).unknown_score) < float(before.unknown_score)


def test_a_tag_is_undone_and_kept():
    classifier = fitted()
    queries = torch.cat([draw(row, 5, seed=4) for row in range(6)])
    before = classifier.predict(queries)
    classifier.add_examples(draw(4, 5), "emu", tag="today")
    classifier.add_examples(draw(5, 5), "fox", tag="later")
    assert classifier.tags == ("today", "later")
    assert len(classifier) == 10
    classifier.undo("today")
    assert classifier.classes == (*OLD, "fox")
    classifier.undo("later")
    after = classifier.predict(queries)
    assert after.names == before.names
    assert torch.equal(after.probabilities, before.probabilities)
    classifier.add_examples(draw(4, 5), "emu", tag="today")
    classifier.keep("today")
    with pytest.raises(ValueError, match="today"):
        classifier.undo("today")


def test_a_class_that_was_taken_back_is_warned_of_again_without_an_answer_between():
    classifier = fitted()
    beside = draw(0, 8, seed=7)  # of an old class: most will not be answered as the new one
    for _ in range(3):
        with pytest.warns(UserWarning, match="would be answered as it if each was left out"):
            classifier.add_examples(beside, "emu", tag="try")
        classifier.undo("try")
    with pytest.warns(UserWarning, match="would be answered as it if each was left out"):
        classifier.add_examples(beside, "emu")
    classifier.forget("emu")
    with pytest.warns(UserWarning, match="would be answered as it if each was left out"):
        classifier.add_examples(beside, "emu")


def test_a_class_half_of_whose_examples_would_be_answered_as_it_is_not_warned_of():
    """Each example is answered by what the others have taught."""
    own, of_ant = draw(4, 2), draw(0, 3, seed=7)
    examples = torch.cat([own, of_ant[:2]])
    answers = []
    for index in range(4):
        classifier = fitted()
        classifier.add_examples(torch.cat([examples[:index], examples[index + 1 :]]), "emu")
        answers += classifier.predict(examples[index : index + 1]).names
    assert answers == ["emu", "emu", "ant", "ant"]
    fitted().add_examples(examples, "emu")  # a warning would be an error
    with pytest.warns(UserWarning, match="^only 0 of the 4 examples of 'emu' would be answered as it"):
        fitted().add_examples(torch.cat([own[:1], of_ant]), "emu")


def test_examples_that_are_given_several_times_count_once():
    x, names = old_examples(40)
    once = memory.AdaptiveClassifier(*network(), classes=OLD)
    often = memory.AdaptiveClassifier(*network(), classes=OLD)
    expected = once.fit(x, names)
    again = x * (1 + 1e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))  # as batches round
    with pytest.warns(UserWarning, match="320 of 480 examples repeat another of their class"):
        report = often.fit(torch.cat([x, x, again]), names * 3)
    assert (report.examples, report.repeated) == (160, 320)
    assert report._replace(repeated=0) == expected
    new_inputs = old_examples(200, seed=9)[0]
    assert torch.equal(often.predict(new_inputs).probabilities, once.predict(new_inputs).probabilities)
    with pytest.raises(ValueError, match="more different examples than classes, got 4 of 4 classes: of the 12"):
        often.fit(x[::40].repeat(3, 1), names[::40] * 3)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: torch.cat([x, 1e6 * (x[:, :1] > 0)], 1), id="a-wide-column"),
        pytest.param(lambda x: torch.cat([1e6 * x[:1], x[1:]]), id="an-outlier"),
        pytest.param(lambda x: x + 1000, id="an-offset"),
        pytest.param(lambda x: x.relu() * (x > 1), id="many-zeros"),
    ],
)
def test_examples_are_equal_up_to_rounding_of_each_feature(change):
    generator = torch.Generator().manual_seed(0)
    names = [str(number % 5) for number in range(500)]
    x = 3 * torch.randn(5, 20, generator=generator).repeat(100, 1) + torch.randn(500, 20, generator=generator)
    x = change(x)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=list("01234"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an outlier spoils rates
        assert classifier.fit(x, names)[:2] == (500, 0)
        again = (x * (1 + 1e-7 * torch.randn(x.shape, generator=generator).double())).float()
        assert classifier.fit(torch.cat([x, again]), names * 2)[:2] == (500, 500)


def test_copies_that_differ_by_rounding_are_one_example_and_features_that_hardly_vary_are_many():
    generator = torch.Generator().manual_seed(0)
    once = torch.randn(64, generator=generator) + 0.3 * torch.randn(50, 64, generator=generator)
    features = torch.cat([once, once + 1])
    names = ["a"] * 50 + ["b"] * 50
    for noise in (0.0, 1e-7, 1e-6, 3e-6):
        copies = features.repeat(4, 1)
        copies = copies * (1 + noise * torch.randn(copies.shape, generator=generator))
        with pytest.warns(UserWarning, match="300 of 400 examples repeat another of their class"):
            report = memory.AdaptiveClassifier(torch.nn.Identity(), classes=["a", "b"]).fit(copies, names * 4)
        assert (report.examples, report.repeated) == (100, 300), noise
    for offset in (1e3, 1e5):
        report = memory.AdaptiveClassifier(torch.nn.Identity(), classes=["a", "b"]).fit(features + offset, names)
        assert (report.examples, report.repeated) == (100, 0), offset


def draw_about(means, counts, spread, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = [
        mean + spread * torch.randn(count, len(mean), generator=generator)
        for mean, count in zip(means, counts, strict=True)
    ]
    return torch.cat(parts), [f"c{row}" for row, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(
    ("features", "classes", "spread", "least"), [(4, 5, 0.4, 0.8), (2, 3, 0.15, 0.8), (8, 2, 0.5, 0.8)]
)
def test_a_new_class_in_few_features_is_learnt(features, classes, spread, least):
    """Where the regression, which serves many features, tells worse than densities."""
    shares = []
    for seed in range(3):
        means = torch.randn(classes + 1, features, generator=torch.Generator().manual_seed(seed))
        classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"c{row}" for row in range(classes)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of these classes overlap
            classifier.fit(*draw_about(means[:-1], [100] * classes, spread))
            classifier.add_examples(draw_about(means[-1:], [20], spread, 1)[0], "new")
        shares.append(classifier.predict(draw_about(means[-1:], [300], spread, 2)[0]).names.count("new") / 300)
    assert sum(shares) / 3 >= least, shares


@pytest.mark.parametrize("counts", [(5000, 1, 1), (5000, 5000, 1), (5000, 20)])
@pytest.mark.parametrize("features", [16, 384])
def test_a_large_class_beside_tiny_ones_is_called_unknown_as_often_as_was_asked(features, counts):
    means = torch.randn(len(counts), features, generator=torch.Generator().manual_seed(7))
    spread = 0.3 if features == 16 else 1.0
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"c{row}" for row in range(len(counts))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said that there are too few
        classifier.fit(*draw_about(means, counts, spread))
    unknown = classifier.predict(draw_about(means[:1], [1000], spread, 3)[0]).unknown
    assert 0.01 <= unknown.float().mean() <= 0.1


def test_few_old_classes_beside_many_new_ones_are_called_unknown_no_more_often():
    means = 3 * torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=["c0", "c1"])
    classifier.fit(*draw_about(means[:2], [60, 60], 1.0))
    test = draw_about(means[:2], [500, 500], 1.0, 1)[0]
    before = classifier.predict(test).unknown.float().mean()
    for row in range(2, 10):
        classifier.add_examples(draw_about(means[row : row + 1], [20], 1.0, row)[0], f"new {row}")
    assert classifier.predict(test).unknown.float().mean() <= before + 0.03


@pytest.mark.parametrize("shots", [1, 5])
@pytest.mark.parametrize(("classes", "size"), [(2, 64), (3, 16), (3, 64), (3, 384), (6, 384), (21, 384)])
def test_beside_few_old_classes_a_new_one_leaves_strangers_unknown(classes, size, shots):
    """Classes far apart in all directions: of 3 with 384 features a new one once took every stranger, too."""
    means = 20 * F.normalize(torch.randn(classes + 5, size, generator=torch.Generator().manual_seed(0)), dim=1)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"c{row}" for row in range(classes)])
    classifier.fit(*draw_about(means[:classes], [60] * classes, 1.0))
    classifier.add_examples(draw_about(means[classes : classes + 1], [shots], 1.0, 1)[0], "new")
    strangers = draw_about(means[classes + 1 :], [50] * 4, 1.0, 2)[0]
    assert classifier.predict(strangers).unknown.float().mean() >= 0.8
    assert classifier.predict(draw_about(means[:classes], [100] * classes, 1.0, 3)[0]).unknown.float().mean() <= 0.15
    own = classifier.predict(draw_about(means[classes : classes + 1], [100], 1.0, 4)[0])
    assert own.names.count("new") >= 95
    assert own.unknown.float().mean() <= 0.6


@pytest.mark.parametrize("size", [1e-40, 1e19])
def test_features_beyond_float32_are_refused_in_words(size):
    examples, names = old_examples()
    with pytest.raises(ValueError, match=r"the largest of the features is .*: let the body scale them to about 1"):
        memory.AdaptiveClassifier(torch.nn.Identity(), classes=OLD).fit(examples * size, names)


def test_a_huge_constant_feature_is_no_reason_to_refuse_the_others():
    examples, names = old_examples()
    wide = torch.cat([examples, torch.full((len(examples), 1), 1e9)], 1)
    assert memory.AdaptiveClassifier(torch.nn.Identity(), classes=OLD).fit(wide, names).right >= 0.95


def test_examples_that_are_equal_by_steps_are_one_group():
    """The first and the third equal the second up to rounding, but not each other: once this had no end."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        features = (torch.rand(1, 4, generator=generator) + 1) * (1 + 6e-6 * torch.randn(3, 4, generator=generator))
        assert len(_statistics.find_distinct(torch.cat([features, -features]), torch.zeros(6, dtype=torch.int64))) <= 6


def test_features_of_few_values_are_no_repeated_examples():
    generator = torch.Generator().manual_seed(0)
    chances = torch.tensor([[0.95] * 3 + [0.1] * 3, [0.1] * 3 + [0.95] * 3, [0.9, 0.1] * 3])
    labels = torch.randint(3, (1600,), generator=generator)
    x, names = torch.bernoulli(chances[labels], generator=generator), [str(label) for label in labels.tolist()]
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=list("012"))
    report = classifier.fit(x[:600], names[:600])
    answer = classifier.predict(x[600:])
    right = sum(a == b for a, b in zip(answer.names, names[600:], strict=True)) / 1000
    assert (report.examples, report.repeated) == (600, 0)
    assert right > 0.88
    assert report.right == pytest.approx(right, abs=0.03)
    assert 0.02 < answer.unknown.double().mean() < 0.09


@pytest.mark.parametrize("factor", [10, 100, -30])
def test_an_example_that_lies_far_off_does_not_make_everything_known(factor):
    x, names = draw_classes(11, 25, 64)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(10)])
    classifier.fit(x[:250], names[:250])
    examples = x[250:255].clone()
    examples[0] *= factor
    classifier.add_examples(examples, "class 10")
    test, names = draw_classes(11, 50, 64, seed=9)
    answer = classifier.predict(test)
    assert answer.names[500:].count("class 10") >= 48
    assert 0.02 < answer.unknown[:500].double().mean() < 0.09
    foreign = 8 * torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    assert classifier.predict(foreign).unknown.double().mean() > 0.9


@pytest.mark.parametrize("factor", [1000, -1e6])
def test_fit_names_an_example_that_lies_far_from_all_others(factor):
    x, names = draw_classes(10, 25, 64)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[f"class {row}" for row in range(10)])
    x = torch.cat([x[:1], x])  # one that is there twice counts once, and others are numbered as they were given
    x[60] *= factor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        classifier.fit(x, [names[0], *names])
    said = str(caught[0].message)
    assert re.match(r"example 60, of 'class 2', lies [\d,]+ times as far from its class as most", said)


@pytest.mark.parametrize(
    ("count", "far", "factor"), [(4, 1, 1000), (4, 2, 30), (5, 2, 100), (8, 2, 1000), (20, 6, 1000), (200, 1, 1000)]
)
def test_several_examples_that_lie_far_off_do_not_make_everything_known(count, far, factor):
    generator = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(11, 128, generator=generator)
    x = centers.repeat_interleave(50, 0) + torch.randn(550, 128, generator=generator)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[str(label) for label in range(10)])
    classifier.fit(x[:500], [str(label) for label in range(10) for _ in range(50)])
    examples = x[500 : 500 + count].clone()
    examples[:far] *= factor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said that not all examples are answered
        classifier.add_examples(examples, "new")
    for scale in (3, 9):
        strangers = scale * torch.randn(100, 128, generator=generator)
        assert classifier.predict(strangers).unknown.double().mean() > 0.9


@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_fit_does_not_warn_of_a_wide_class_nor_of_one_of_two(spread):
    generator = torch.Generator().manual_seed(0)
    x = 100 * torch.randn(6, 64, generator=generator).repeat_interleave(25, 0)
    noise = torch.randn(150, 64, generator=generator)
    noise[:25] *= spread
    labels = torch.arange(6).repeat_interleave(25)
    labels[-2:], x[-1] = 6, 1e4  # which of the two is wrong cannot be told
    assert _statistics.find_farthest(x + noise, labels)[1] < 5


@pytest.mark.parametrize("count", [5, 50])
@pytest.mark.parametrize("headed", [False, True])
def test_a_class_that_lies_far_from_the_others_is_known_once_it_is_learnt(headed, count):
    generator = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(11, 128, generator=generator)
    centers[10] *= 3
    head = torch.nn.Linear(128, 10)
    head.weight.data, head.bias.data = centers[:10].clone(), -centers[:10].square().sum(1) / 2

    def draw(label, number):
        return centers[label] + torch.randn(number, 128, generator=generator)

    old = [str(label) for label in range(10)]
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), head if headed else None, classes=old)
    classifier.fit(torch.cat([draw(label, 50) for label in range(10)]), [name for name in old for _ in range(50)])
    classifier.add_examples(draw(10, count), "new")
    answer = classifier.predict(draw(10, 200))
    assert answer.names.count("new") > 195
    assert answer.unknown.double().mean() < 0.1
    strangers = 9 * torch.randn(200, 128, generator=generator)
    assert classifier.predict(strangers).unknown.double().mean() > 0.9


def test_fit_says_that_a_rate_of_too_few_examples_cannot_be_measured():
    x, names = old_examples(10)
    classifier = memory.AdaptiveClassifier(*network(), classes=OLD)
    with pytest.warns(UserWarning, match=r"unknown_rate=0\.05 of 40 examples .* give fit\(\) 60 examples at least"):
        classifier.fit(x, names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classifier.fit(x, names, unknown_rate=0.1)
        classifier.fit(x, names, unknown_rate=0.0)


def test_a_feature_that_was_constant_before_a_new_class_counts_by_how_far_it_varies():
    generator = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(6, 80, generator=generator)

    def examples(labels, value):
        x = centers[labels] + 3 * torch.randn(len(labels), 80, generator=generator)
        constant = torch.zeros(len(labels), 120)
        constant[:, 70] = value
        return torch.cat([x, constant], 1)

    labels = torch.arange(200) % 5
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), classes=list("01234"))
    report = classifier.fit(examples(labels, 0), [str(label) for label in labels.tolist()])
    assert report.axes < 80
    classifier.add_examples(examples(torch.full((5,), 5), 1), "new")
    assert classifier.predict(examples(torch.full((200,), 5), 1)).names.count("new") > 190
    for value in (0, 1e-4, 1e-2):
        assert classifier.predict(examples(labels, value)).names.count("new") < 6


def test_names_and_inputs_of_other_types_are_refused_in_words():
    classifier = fitted()
    with pytest.raises(ValueError, match="got a list, which are its inputs: give it tensors"):
        classifier.add_examples(["one", "two"], "emu")
    x, names = old_examples()
    many: list[Any] = [7, set(names), dict.fromkeys(names)]
    for wrong in many:
        with pytest.raises(ValueError, match="names must be a list of strings, got"):
            classifier.fit(x, wrong)
    others: list[Any] = [None, 7]
    for wrong in others:
        with pytest.raises(ValueError, match=f"names must be a list of strings, got {wrong}"):
            classifier.add_examples(x[:2], wrong)
        with pytest.raises(ValueError, match=f"classes must be a list of strings, got {wrong}"):
            memory.AdaptiveClassifier(BODY, classes=wrong)
        with pytest.raises(ValueError, match=r"inputs must be all inputs at once, .* got (None|7)"):
            classifier.fit(wrong, names)
    single: list[Any] = [7, ["emu"], None, torch.tensor(3), b"emu"]
    for wrong in single:
        with pytest.raises(ValueError, match=r"names\[1\] must be a string, got"):
            classifier.add_examples(x[:2], ["emu", wrong])
    with pytest.raises(ValueError, match=r"got torch\.complex64"):
        classifier.fit(x.to(torch.complex64), names)
    for head in (torch.nn.Linear(SIZE + 1, 4), torch.nn.Linear(SIZE, 4).double()):
        with pytest.raises(ValueError, match=r"head cannot take the features \[B,6\] of torch.float32"):
            memory.AdaptiveClassifier(BODY, head, classes=OLD).fit(x, names)


def test_names_of_every_ordered_kind_are_taken_as_strings():
    x, names = old_examples()
    classifier = memory.AdaptiveClassifier(BODY, HEAD, classes=np.array(OLD))
    classifier.fit(x, (name for name in names))
    classifier.fit(x, np.array(names))
    classifier.add_examples(draw(4, 5), np.array(["emu"] * 5))
    assert classifier.classes == (*OLD, "emu")
    assert {type(name) for name in classifier.classes} == {str}


def test_a_class_is_learnt_where_no_axis_of_the_old_examples_has_it():
    # Ten old classes of 25 examples carry 66 axes of 100 features; the new class differs outside them.
    draws = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(100, 100, generator=draws))[0]
    spread = torch.arange(1.0, 101).rsqrt()

    def encode(row, count):
        x = torch.randn(count, 100, generator=draws)
        x[:, 89 + row] += 6
        return spread * x @ turn

    old = [f"class {row}" for row in range(10)]
    head = torch.nn.Linear(100, 10)
    with torch.no_grad():
        head.weight.copy_((torch.eye(100)[89:99] / spread[89:99, None]) @ turn)
        head.bias.fill_(0.0)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), head, classes=old)
    classifier.fit(torch.cat([encode(row, 25) for row in range(10)]), [name for name in old for _ in range(25)])
    held_out = torch.cat([encode(row, 50) for row in range(10)])
    before = classifier.predict(held_out).names
    classifier.add_examples(encode(10, 20), "new")
    answers = classifier.predict(encode(10, 300))
    assert answers.names.count("new") >= 285  # 164 before regressions saw what lies outside
    after = classifier.predict(held_out).names
    assert sum(name != was for name, was in zip(after, before, strict=True)) <= 10


def test_a_full_memory_takes_from_the_classes_with_the_most_examples():
    classifier = fitted(capacity=40)
    classifier.add_examples(draw(4, 5), "emu")
    for turn in range(12):
        classifier.add_examples(draw(turn % 3, 20, seed=turn), OLD[turn % 3])
    assert len(classifier) == 40
    assert "emu" in classifier.classes
    assert classifier.predict(draw(4, 20, seed=1)).names.count("emu") >= 18
    assert classifier.forget("emu") == 5  # none of them was lost
    held = [classifier.forget(name) for name in OLD[:3]]
    assert sum(held) == 35
    assert max(held) - min(held) <= 1


def test_no_new_class_loses_its_last_example():
    classifier = fitted(capacity=6)
    with pytest.raises(ValueError, match="7 examples do not fit into capacity=6"):
        classifier.add_examples(draw(4, 7), "emu")
    classifier.add_examples(draw(0, 1), "ant")
    classifier.add_examples(draw(4, 6), [f"new {number}" for number in range(6)])
    assert len(classifier.classes) == 10  # the old class gave way, for which there are statistics
    with pytest.raises(ValueError, match=r"7 new classes each: forget\(\) some"):
        classifier.add_examples(draw(5, 1), "fox")
    assert len(classifier) == 6
    classifier.forget("new 3")
    classifier.add_examples(draw(5, 1), "fox", tag="t")
    classifier.undo("t")
    assert len(classifier) == 5


def test_the_order_does_not_matter_where_the_memory_is_full():
    examples, names = draw(4, 60), ["emu"] * 5 + ["fox"] * 50 + ["gnu"] * 5
    kept = []
    for order in (range(60), reversed(range(60))):
        classifier = fitted(capacity=20)
        for row in order:
            classifier.add_examples(examples[row : row + 1], names[row])
        kept.append([classifier.forget(name) for name in ("emu", "fox", "gnu")])
    assert kept == [[5, 10, 5]] * 2


def test_changes_give_the_answers_of_a_classifier_that_is_made_anew(tmp_path):
    """Sums are carried from one change to the next: they must be those of the examples that are there."""
    classifier, queries = fitted(), torch.cat([draw(row, 5, seed=4) for row in range(6)])
    changes = [
        lambda: classifier.add_examples(draw(4, 5), "emu"),
        lambda: classifier.add_examples(draw(5, 3), "fox", tag="t"),
        lambda: classifier.add_examples(draw(0, 4), "ant", tag="u"),
        lambda: classifier.add_examples(draw(4, 2, seed=1), "emu", tag="t"),
        lambda: classifier.undo("t"),
        lambda: classifier.forget("bee"),
        lambda: classifier.fit(*old_examples(30, seed=2)),
        lambda: classifier.add_examples(draw(1, 2), "bee"),
        lambda: classifier.forget("emu"),
    ]
    for number, change in enumerate(changes):
        change()
        classifier.save(tmp_path / str(number))
        anew = memory.AdaptiveClassifier.load(tmp_path / str(number), *network())
        answers, expected = classifier.predict(queries), anew.predict(queries)
        assert answers.classes == expected.classes
        assert torch.allclose(answers.probabilities, expected.probabilities, atol=1e-6)
        assert torch.allclose(answers.unknown_score, expected.unknown_score, atol=1e-4)


def test_classes_are_forgotten_old_and_new_ones():
    classifier = fitted()
    classifier.add_examples(draw(4, 5), "emu", tag="t")
    assert classifier.forget("emu") == 5
    assert classifier.classes == OLD
    assert classifier.forget("ant") == 0
    answers = classifier.predict(draw(0, 20, seed=5))
    assert "ant" not in answers.classes
    assert set(answers.names) <= {"bee", "cat", "dog"}
    classifier.add_examples(draw(0, 5), "ant")  # as a new class
    assert classifier.classes == ("bee", "cat", "dog", "ant")
    assert classifier.predict(draw(0, 20, seed=5)).names.count("ant") >= 15
    classifier.forget("bee")
    classifier.forget("cat")
    with pytest.raises(ValueError, match="'dog' is the last class"):
        classifier.forget("dog")
    with pytest.raises(ValueError, match="no class 'bee'"):
        classifier.forget("bee")


@pytest.mark.parametrize("head", [True, False])
def test_the_last_class_is_known_though_no_answer_of_the_network_leads(head):
    classifier = fitted(head)
    for name in OLD[:-1]:
        classifier.forget(name)
    assert classifier.predict(draw(3, 200, seed=5)).unknown.float().mean() <= 0.1
    assert classifier.predict(draw(0, 200, seed=5)).unknown.float().mean() >= 0.9


def test_an_example_with_a_wrong_name_is_removed_by_its_number():
    classifier = fitted()
    classifier.add_examples(torch.cat([draw(4, 5), draw(1, 1, seed=3)]), "emu", tag="today")
    classifier.add_examples(draw(5, 5), "fox")
    examples = classifier.examples()
    assert [(one.number, one.name) for one in examples] == [
        *((number, "emu") for number in range(6)),
        *((number, "fox") for number in range(6, 11)),
    ]
    assert torch.equal(examples[5].features, draw(1, 1, seed=3)[0])
    classifier.remove(5)
    right = fitted()
    right.add_examples(draw(4, 5), "emu")
    right.add_examples(draw(5, 5), "fox")
    queries, _ = old_examples(20, seed=1)
    assert torch.equal(classifier.predict(queries).probabilities, right.predict(queries).probabilities)
    for number in (5, 11, -1, None, "5"):
        with pytest.raises(ValueError, match=rf"there is no example {number!r}: examples\(\) has the 10 that are kept"):
            classifier.remove(cast(Any, number))
    with pytest.raises(ValueError, match=r"^remove\(\) takes .* number, got an Example of 'fox': remove\(7\)$"):
        classifier.remove(cast(Any, examples[7]))
    classifier.undo("today")  # of what is left
    assert [one.number for one in classifier.examples()] == [6, 7, 8, 9, 10]
    for one in classifier.examples():
        classifier.remove(one.number)
    assert classifier.classes == OLD
    assert classifier.examples() == []


def test_a_class_is_renamed_and_joined_with_another():
    classifier, plain = fitted(), fitted()
    classifier.add_examples(draw(4, 3), "emu", tag="one")
    classifier.add_examples(draw(4, 2, seed=1), "rhea", tag="two")
    classifier.add_examples(draw(1, 2, seed=1), "wasp")
    plain.add_examples(torch.cat([draw(4, 3), draw(4, 2, seed=1)]), "nandu")
    plain.add_examples(draw(1, 2, seed=1), "bee")
    classifier.rename("emu", "nandu")
    assert classifier.classes == (*OLD, "nandu", "rhea", "wasp")
    classifier.rename("rhea", "nandu")  # the two become one
    classifier.rename("wasp", "bee")  # of the network: examples move the place where it is expected
    assert classifier.classes == plain.classes == (*OLD, "nandu")
    queries, _ = old_examples(20, seed=1)
    assert torch.equal(classifier.predict(queries).probabilities, plain.predict(queries).probabilities)
    assert [(one.number, one.name) for one in classifier.examples()] == [
        *((number, "nandu") for number in range(5)), (5, "bee"), (6, "bee")
    ]  # fmt: skip
    classifier.undo("two")
    assert [one.number for one in classifier.examples()] == [0, 1, 2, 5, 6]
    classifier.undo("one")
    assert classifier.classes == OLD
    classifier.rename("bee", "bee")
    assert classifier.classes == OLD


def test_a_class_of_the_network_is_renamed_with_its_examples():
    classifier, plain = fitted(), fitted()
    for one in (classifier, plain):
        one.add_examples(draw(1, 3, seed=1), "bee", tag="t")
        one.add_examples(draw(4, 5), "emu")
    classifier.rename("bee", "wasp")
    queries, names = old_examples(20, seed=1)
    before, after = plain.predict(queries), classifier.predict(queries)
    assert after.classes == ("ant", "wasp", "cat", "dog", "emu")
    assert torch.equal(after.probabilities, before.probabilities)
    assert [one.name for one in classifier.examples()] == ["wasp"] * 3 + ["emu"] * 5
    classifier.add_examples(draw(1, 1, seed=2), "wasp")
    plain.add_examples(draw(1, 1, seed=2), "bee")
    assert torch.equal(classifier.predict(queries).probabilities, plain.predict(queries).probabilities)
    classifier.add_examples(draw(5, 5), "bee")  # the name is free
    assert classifier.classes == ("ant", "wasp", "cat", "dog", "bee", "emu")
    classifier.forget("bee")
    with pytest.raises(ValueError, match=r"names\[20\] is 'bee', which is no class of the network"):
        classifier.fit(queries, names)
    classifier.fit(queries, ["wasp" if name == "bee" else name for name in names])
    plain.fit(queries, names)
    assert torch.equal(classifier.predict(queries).probabilities, plain.predict(queries).probabilities)
    # A learnt class becomes the examples of a class of the network that takes its name.
    classifier.rename("wasp", "emu")
    assert classifier.classes == ("ant", "emu", "cat", "dog")
    assert {one.name for one in classifier.examples()} == {"emu"}

    for old, new, message in (
        ("emu", "ant", "'ant' is a class of the network: two of its outputs cannot have one name"),
        ("bee", "wren", r"there is no class 'bee' to rename; the classes are 'ant', 'emu', 'cat', 'dog'"),
        ("ant", "", r"a class has a name of 1 to 128 bytes of UTF-8, got ''"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier.rename(old, new)
    classifier.forget("cat")
    with pytest.raises(ValueError, match="'cat' is a class of the network that was forgotten: two of its outputs"):
        classifier.rename("dog", "cat")
    classifier.forget("emu")
    assert classifier.classes == ("ant", "dog")


def test_a_name_that_is_nearly_another_is_asked_about():
    classifier = fitted()
    classifier.add_examples(draw(4, 1), "heron")
    for name in ("Heron", "heron ", "herron", "hern", "hreon", "haron"):
        with pytest.warns(
            UserWarning, match=rf"'{name}' is a new class, and there is 'heron' already.* rename\('{name}'"
        ):
            classifier.add_examples(draw(4, 1), name, tag="typo")
        classifier.undo("typo")
    for name in ("hero 2", "bat", "ants", "digit 1", "digit 2", "herd"):
        classifier.add_examples(draw(4, 1), name)
    with pytest.warns(UserWarning, match="'grey swan' is a new class, and there is 'gray swan' already"):
        classifier.add_examples(draw(4, 2), ["gray swan", "grey swan"])
    classifier.add_examples(draw(4, 1), "grey swan")  # once is enough


def test_a_reader_follows_removals_and_names_and_reopening_finds_them(tmp_path):
    fitted().save(tmp_path)
    reader = memory.AdaptiveClassifier.load(tmp_path, *network())
    queries, _ = old_examples(10, seed=1)
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(4, 5), "emu", tag="t")
        writer.add_examples(draw(1, 3, seed=1), "bee")
        assert reader.refresh()
        reader.predict(queries)
        for change in (
            lambda: writer.remove(2),
            lambda: writer.rename("emu", "rhea"),
            lambda: writer.rename("bee", "wasp"),
            lambda: writer.rename("rhea", "wasp"),
            lambda: writer.add_examples(draw(5, 2), "bee"),
            lambda: writer.undo("t"),
        ):
            change()
            assert reader.refresh()
            assert reader.classes == writer.classes
            assert torch.equal(reader.predict(queries).probabilities, writer.predict(queries).probabilities)
            reopened = memory.AdaptiveClassifier.load(tmp_path, *network())
            for one in (reader, reopened):
                assert [each[:2] for each in one.examples()] == [each[:2] for each in writer.examples()]
            assert torch.equal(reopened.predict(queries).probabilities, writer.predict(queries).probabilities)
            assert not reader.refresh()
    assert reader.classes == ("ant", "wasp", "cat", "dog", "bee")
    for change in (lambda: writer.remove(5), lambda: writer.rename("ant", "wren"), lambda: writer.rename("bee", "owl")):
        with pytest.raises(MemoryFileError, match="is closed"):
            change()


@pytest.mark.parametrize("moment", ["before", "between", "before the end"])
def test_a_class_of_the_network_is_renamed_wholly_or_not_wherever_the_writer_is_killed(tmp_path, monkeypatch, moment):
    fitted().save(tmp_path)
    queries, _ = old_examples(10, seed=1)
    reader = memory.AdaptiveClassifier.load(tmp_path, *network())
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(1, 3, seed=1), "bee")
        expected = writer.predict(queries).probabilities
        assert reader.refresh()
        reader.predict(queries)
        with monkeypatch.context() as patch:
            if moment == "between":
                patch.setattr(memory.EpisodicMemory, "rename_class", lambda *given: pytest.fail("killed"))
            else:
                replace, calls = os.replace, iter((moment == "before", True))
                patch.setattr(os, "replace", lambda *paths: pytest.fail("killed") if next(calls) else replace(*paths))
            with pytest.raises(pytest.fail.Exception):
                writer.rename("bee", "wasp")
    name = "bee" if moment == "before" else "wasp"
    assert reader.refresh() is (moment != "before")
    for one in (reader, memory.AdaptiveClassifier.load(tmp_path, *network())):
        assert one.classes == ("ant", name, "cat", "dog")
        assert [each.name for each in one.examples()] == [name] * 3
        assert torch.equal(one.predict(queries).probabilities, expected)
    shutil.copytree(tmp_path, tmp_path / "copy")
    with memory.AdaptiveClassifier.open(tmp_path / "copy", *network()) as writer:
        writer.forget(name)
        assert name not in writer.classes
        assert len(writer) == 0
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(5, 2), "gnu")
        if moment != "before":
            writer.add_examples(draw(5, 2), "bee")  # the name is free, and no example of the other class has it
            assert [each.name for each in writer.examples()] == ["wasp"] * 3 + ["gnu"] * 2 + ["bee"] * 2


def test_a_disk_that_refuses_a_new_name_leaves_the_old_one_or_has_the_new_one(tmp_path, monkeypatch):
    fitted().save(tmp_path)
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(1, 3, seed=1), "bee")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full := lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(MemoryFileError, match=r"cannot write .*nothing was changed"):
                writer.rename("bee", "wasp")
            assert writer.classes == OLD
            with pytest.raises(MemoryFileError, match="cannot write"):
                writer.rename("bee", "wasp")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            writer.rename("bee", "wasp")  # in the file alone
            assert writer.classes == ("ant", "wasp", "cat", "dog")
            with pytest.raises(MemoryFileError, match="cannot write"):
                writer.add_examples(draw(1, 1), "wasp")
        assert [one.name for one in writer.examples()] == ["wasp"] * 3
        writer.add_examples(draw(1, 1), "wasp")
    loaded = memory.AdaptiveClassifier.load(tmp_path, *network())
    assert [one.name for one in loaded.examples()] == ["wasp"] * 4


def test_no_more_than_some_examples_of_old_classes_are_kept(tmp_path):
    sizes = []
    for count in (600, 1000):
        body, head = network()
        classifier = memory.AdaptiveClassifier(body, head, classes=OLD)
        classifier.fit(*old_examples(count))
        classifier.save(tmp_path / str(count))
        sizes.append((tmp_path / str(count) / "classifier.safetensors").stat().st_size)
        assert len(classifier) == 0
    assert abs(sizes[0] - sizes[1]) < 100


def test_the_network_stays_as_it_is_and_is_read_in_evaluation_mode():
    body = torch.nn.Sequential(torch.nn.BatchNorm1d(SIZE), torch.nn.Dropout(0.9))
    classifier = memory.AdaptiveClassifier(body, classes=OLD)
    before = {name: tensor.clone() for name, tensor in body.state_dict().items()}
    classifier.fit(*old_examples())
    classifier.add_examples(draw(4, 5), "emu")
    first, second = (classifier.predict(draw(4, 5)).probabilities for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in body.state_dict().items())
    assert body.training


@pytest.mark.parametrize("read", [lambda batch: batch.input_values, lambda batch: batch.to("cpu")["input_values"]])
def test_batches_of_a_tokenizer_stay_what_they_are(read):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Body(torch.nn.Module):
        def forward(self, batch):
            return 2 * read(batch)

    x, names = draw_classes(3, 20, 6, spread=0.1)
    batch = transformers.BatchEncoding({"input_values": x, "attention_mask": torch.ones(60, 6)})
    classifier = memory.AdaptiveClassifier(Body(), classes=["class 0", "class 1", "class 2"])
    classifier.fit(batch, names, batch_size=7)
    assert classifier.predict(batch).names == names


def test_inputs_may_be_any_batch_that_the_body_takes():
    class Lengths(torch.nn.Module):
        def forward(self, texts):
            return torch.tensor([[float(len(text)), float(text.count("a"))] for text in texts])

    classifier = memory.AdaptiveClassifier(Lengths(), classes=["short", "long"])
    short, long = ["a", "b", "cc", "aab", "ab"], ["aaaaaaaaaa", "bbbbbbbbba", "cccccccca", "bbbbbbbbb", "abbbbbbbba"]
    classifier.fit(short + long, ["short"] * 5 + ["long"] * 5, unknown_rate=0.3, batch_size=4)
    assert classifier.predict(["ab", "bbbbbbbbbb"]).names == ["short", "long"]


def test_inputs_may_be_a_dict_of_what_can_be_sliced():
    class Sum(torch.nn.Module):
        def forward(self, inputs):
            return inputs["one"] + inputs["two"]

    x, names = old_examples()
    classifier = memory.AdaptiveClassifier(Sum(), network()[1], classes=OLD)
    classifier.fit({"one": x / 4, "two": 3 * x / 4}, names, batch_size=7)
    classifier.add_examples({"one": draw(4, 5), "two": torch.zeros(5, SIZE)}, "emu")
    assert classifier.predict({"one": x[:3], "two": torch.zeros(3, SIZE)}).names == ["ant"] * 3
    with pytest.raises(ValueError, match="equally many under each name"):
        classifier.fit({"one": x, "two": x[1:]}, names)


class Words(torch.nn.Module):
    """Counts letters of texts, which must come as a list."""

    def forward(self, texts):
        assert isinstance(texts, list)
        return torch.tensor([[float(text.count(letter)) for letter in "abcdef"] for text in texts])


class Rows(Dataset[Any]):
    """Inputs with labels, or without, in pairs as they are given."""

    def __init__(self, inputs, labels=None):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        return self.inputs[number] if self.labels is None else (self.inputs[number], self.labels[number])


class Stream(IterableDataset[Any]):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[number] for number in range(len(self.rows)))


class Scale(torch.nn.Module):
    """A body with weights that makes the same bits of an input in every batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1, SIZE))

    def forward(self, inputs):
        assert inputs.dtype == self.weight.dtype
        return inputs * self.weight


class Frame:
    """Numbers whose rows have names that slices go by, as those of pandas before 3 do."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, names):
        return Frame(self.array[::-1][names])


def fit_scaled(inputs, names, body, **options):
    classifier = memory.AdaptiveClassifier(body, classes=OLD, **options)
    classifier.fit(inputs, names, batch_size=7)
    return classifier


def check_equal(ours, expected):
    assert ours.names == expected.names
    torch.testing.assert_close(ours.probabilities, expected.probabilities, rtol=1e-4, atol=1e-5)


def test_arrays_frames_and_lists_reach_the_body_as_one_tensor_in_its_dtype():
    x, names = old_examples()
    body = Scale()
    plain = fit_scaled(x, names, body)
    plain.add_examples(draw(4, 5), "emu")
    expected, array = plain.predict(x), x.double().numpy()
    fixed = array.copy()
    fixed.setflags(write=False)
    kinds = [array, fixed, array.astype(">f8"), array[::-1][::-1], array.tolist(), tuple(map(tuple, array.tolist()))]
    kinds += [list(x), list(array), array.astype(object), list(x.double()), Frame(array)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs in kinds:
            ours = fit_scaled(inputs, names, body)
            ours.add_examples(draw(4, 5).numpy(), "emu")
            check_equal(ours.predict(inputs), expected)
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(array, index=[0.5 * row for row in range(len(array))])
        for inputs in (frame, frame.convert_dtypes()):
            check_equal(fit_scaled(inputs, names, body).predict(inputs), fit_scaled(x, names, body).predict(x))
    if np.dtype("g").itemsize > 8:  # it is float64 elsewhere
        with pytest.raises(ValueError, match="inputs are an array of float128, which no tensor has"):
            plain.predict(array.astype("g"))


def test_a_tensor_and_what_is_no_number_reach_the_body_as_they_are():
    seen = []

    class Body(torch.nn.Identity):
        def forward(self, inputs):
            seen.append(inputs)
            return torch.zeros(len(inputs), SIZE)

    classifier = fitted()
    classifier._network.body = Body()
    ragged = [torch.ones(2), torch.ones(3)]
    for inputs in (
        draw(0, 3),
        draw(0, 3).double(),
        ["ab", "c"],
        ragged,
        [[1, 2], [3]],
        [("a", 1.0)],
        {"x": draw(0, 2)},
    ):
        classifier.predict(inputs)
        assert seen[-1] is inputs
    classifier.predict(np.array(["ab", "c"]))
    assert seen[-1] == ["ab", "c"]


def test_a_data_set_and_its_loader_are_taken_with_their_labels_or_without():
    x, names = old_examples()
    body = Scale()
    expected = fit_scaled(x, names, body).predict(x)
    places, array = torch.arange(4).repeat_interleave(20), x.double().numpy()
    labelled = TensorDataset(x, places)
    pairs = [labelled, Rows(array, names), Rows(x, places.tolist()), Stream(Rows(list(x), names))]
    pairs += [Rows(x, places.numpy()), Rows([{"x": one} for one in x], names)]
    for rows in pairs:
        taken = torch.nn.Sequential(body)
        if isinstance(rows[0][0] if isinstance(rows, Rows) else None, dict):
            taken.register_forward_pre_hook(lambda _, given: (given[0]["x"],))
        for inputs in (rows, DataLoader(rows, batch_size=7), DataLoader(rows, batch_size=2)):
            check_equal(fit_scaled(inputs, None, taken).predict(inputs), expected)  # labels are ignored
            check_equal(fit_scaled(inputs, names, taken).predict(inputs), expected)
    mixed = DataLoader(labelled, batch_size=7, shuffle=True)
    check_equal(fit_scaled(mixed, None, body).predict(x), expected)
    for bare in (TensorDataset(x), Rows(x), DataLoader(Rows(x), batch_size=2), DataLoader(TensorDataset(x))):
        ours = fit_scaled(bare, names, body)
        check_equal(ours.predict(bare), expected)
        with pytest.raises(ValueError, match=r"fit\(\) needs names: the \w+ has inputs without labels"):
            ours.fit(bare)
    for wrong, message in [
        (x, r"fit\(\) needs the names of the inputs: only a Dataset or a DataLoader has labels"),
        (TensorDataset(x, places + 1), "label 60 is 4, which is no position among 4 classes, 0 to 3"),
        (TensorDataset(x, places.float()), r"label 0 must be a name or a position among classes, got 0\.0"),
        (TensorDataset(x, torch.eye(4)[places]), "label 0 must be a name or a position"),
        (TensorDataset(x, places, places), "pairs of an input and its label; got a tuple of 3"),
        (TensorDataset(x[:0], places[:0]), "there are no inputs in the TensorDataset"),
        (Rows(x, ["gnu"] * 80), r"names\[0\] is 'gnu', which is no class"),
    ]:
        with pytest.raises(ValueError, match=message):
            memory.AdaptiveClassifier(body, classes=OLD).fit(wrong)
    ours = fit_scaled(x, names, body)
    for inputs, given in ((mixed, names), (mixed, names[:20])):
        for change in (ours.fit, ours.add_examples):
            with pytest.raises(ValueError, match="the DataLoader in another each time: make it with shuffle=False"):
                change(inputs, given)
    with pytest.raises(ValueError, match="79 names and 80 inputs"):
        ours.fit(labelled, names[:-1])
    with pytest.raises(ValueError, match=r"label 0 is 1, which may be the class '1' or position 1 among classes, '2'"):
        memory.AdaptiveClassifier(body, classes=["1", "2"]).fit(TensorDataset(x[:40], 1 + places[:40]))
    check_equal(ours.predict(x), expected)


def test_pictures_become_tensors_by_a_transform(tmp_path):
    x, names = old_examples()
    pictures = [Image.fromarray((20 * one.reshape(2, 3).numpy() + 60).clip(0, 255).astype("uint8")) for one in x]
    body = torch.nn.Sequential(torch.nn.Flatten(), Scale())

    def transform(picture):
        return torch.from_numpy(np.asarray(picture) / 60)  # float64, as such a line makes it

    stacked = torch.stack([transform(one) for one in pictures]).float()
    expected = fit_scaled(stacked, names, body).predict(stacked)
    ours = fit_scaled(pictures, names, body, transform=transform)
    kinds: list[Any] = [pictures, stacked, np.stack([np.asarray(one) for one in pictures]), Rows(pictures, names)]
    for inputs in kinds:
        check_equal(ours.predict(inputs), expected)
    lists = DataLoader(Rows(pictures, names), batch_size=7, collate_fn=lambda pairs: tuple(zip(*pairs, strict=True)))
    for labelled in (Rows(pictures, names), lists):
        check_equal(fit_scaled(labelled, None, body, transform=transform).predict(labelled), expected)
    ours.save(tmp_path)
    check_equal(memory.AdaptiveClassifier.load(tmp_path, body, transform=transform).predict(pictures), expected)
    with pytest.raises(ValueError, match=r"body cannot take a list of Image: .* give a tensor, or transform="):
        fit_scaled(pictures, names, body)
    with pytest.raises(ValueError, match=r"must be a list of items for transform, .* got <PIL"):
        ours.predict(pictures[0])
    with pytest.raises(ValueError, match="there are no inputs"):
        ours.predict([])
    with pytest.raises(ValueError, match=r"tensors of one shape, got \[2, 3\] of item 0 and \[4, 6\] of item 1"):
        ours.predict([pictures[0], pictures[1].resize((6, 4))])
    for wrong, message in (
        (np.asarray, "must return a tensor, got ndarray of item 0"),
        (7, "as a function does, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_scaled(pictures, names, body, transform=cast(Any, wrong))


def test_labels_of_every_kind_are_names_or_refused_in_a_line():
    x, names = old_examples()
    pandas = pytest.importorskip("pandas")
    expected = fitted().predict(x)
    kinds: list[Any] = [pandas.Series(names, index=range(5, 85)), pandas.Categorical(names), pandas.Index(names)]
    kinds += [pandas.Series(pandas.Categorical(names)), pandas.Series(names, dtype="string"), np.array(names, object)]
    for given in kinds:
        classifier = memory.AdaptiveClassifier(*network(), classes=OLD)
        classifier.fit(x, given)
        check_equal(classifier.predict(x), expected)
        classifier.add_examples(x[:80], given)
    numbers = torch.arange(80)
    for wrong in (numbers, numbers.tolist(), numbers.numpy(), pandas.Series(numbers), np.array(names)[:, None]):
        for change in (classifier.fit, classifier.add_examples):
            with pytest.raises(ValueError, match=r"^names\[0\] must be a string, got .*$"):
                change(x, wrong)


def test_a_single_text_is_not_taken_letter_by_letter():
    texts = ["a" * count + "f" for count in range(2, 12)] + ["b" * count + "f" for count in range(2, 12)]
    classifier = memory.AdaptiveClassifier(Words(), classes=["a", "b"])
    classifier.fit(texts, ["a"] * 10 + ["b"] * 10, unknown_rate=0.3)
    for text in ("aba", b"aba", np.str_("aba")):
        for ask in (
            classifier.predict,
            lambda one: classifier.add_examples(one, "c"),
            lambda one: classifier.fit(one, ["a", "a", "b"]),
        ):
            with pytest.raises(ValueError, match=r"must be a list of texts, got the single text .*'aba'"):
                ask(text)
    with pytest.raises(ValueError, match=r"inputs\['text'\] must be a list of texts, got the single text 'aba'"):
        classifier.predict({"text": "aba"})
    assert len(classifier) == 0
    assert classifier.predict(["aaaa"]).names == ["a"]


@pytest.mark.parametrize("head", [True, False])
def test_a_forgotten_class_needs_no_examples(head, tmp_path):
    classifier = fitted(head)
    classifier.forget("bee")
    x, names = old_examples()
    others = torch.tensor([name != "bee" for name in names])
    classifier.fit(x[others], [name for name in names if name != "bee"])
    test, right = draw(2, 20, seed=1), ["cat"] * 20
    assert classifier.predict(test).names == right
    classifier.add_examples(draw(1, 5), "bee")
    assert classifier.predict(draw(1, 20, seed=1)).names.count("bee") >= 15
    classifier.save(tmp_path)
    body, layer = network()
    loaded = memory.AdaptiveClassifier.load(tmp_path, body, layer if head else None)
    assert loaded.predict(test).names == right
    classifier.forget("ant")
    classifier.forget("cat")
    with pytest.raises(ValueError, match=r"examples of two classes at least.*got only 'dog'"):
        classifier.fit(x[60:], names[60:])
    classifier.fit(x, names)  # forgotten ones may be given too


BODY, HEAD = network()
BAD_CLASSES = [["a"], ["a", "a"], "ab", ["a", ""], ["a", "b\0"], ["a", "ä" * 65], ["a", 3], ["a", "\ud800"], {"a", "b"}]


@pytest.mark.parametrize("classes", BAD_CLASSES)
def test_bad_classes_are_refused(classes):
    with pytest.raises(ValueError, match="class"):
        memory.AdaptiveClassifier(BODY, HEAD, classes=classes)


def test_bad_input_is_refused_and_changes_nothing():
    classifier = fitted()
    classifier.add_examples(draw(4, 5), "emu")
    before = classifier.predict(draw(4, 5)).probabilities
    x, names = old_examples()
    broken = x.clone()
    broken[3, 2] = math.nan
    for give, message in [
        (lambda: classifier.fit(x, names[:-1]), "79 names and 80 inputs"),
        (lambda: classifier.fit(x, ["gnu", *names[1:]]), r"names\[0\] is 'gnu'"),
        (lambda: classifier.fit(x[:60], names[:60]), "none of 'dog'"),
        (lambda: classifier.fit(x[::20], names[::20]), "more examples than classes"),
        (lambda: classifier.fit(broken, names), "not finite for input 3"),
        (lambda: classifier.fit(x, names, unknown_rate=2.0), "unknown_rate"),
        (lambda: classifier.fit(CENTERS[:4].repeat_interleave(20, 0), names), "equal features"),
        (lambda: memory.AdaptiveClassifier(cast(Any, torch.sin), classes=OLD), "body must be a torch.nn.Module"),
        (lambda: memory.AdaptiveClassifier(BODY, cast(Any, len), classes=OLD), "head must be a torch.nn.Module"),
        (lambda: classifier.add_examples(x[:2], ["a", "b", "c"]), "3 names, 2 examples"),
        (lambda: classifier.add_examples(x[:2], ["a", ""]), "1 to 128 bytes"),
        (lambda: classifier.add_examples(x[:2, :3], "a"), r"features \[B,6\]"),
        (lambda: classifier.add_examples(broken, "a"), "not finite for input 3"),
        (lambda: classifier.add_examples(x[:2], "a", tag=3), "tag"),
        (lambda: classifier.predict(x[0]), r"features \[B,6\], got \[6\]"),
        (lambda: classifier.undo("nothing"), "open tags: none"),
    ]:
        with pytest.raises(ValueError, match=message):
            give()
    assert torch.equal(classifier.predict(draw(4, 5)).probabilities, before)
    narrow = memory.AdaptiveClassifier(BODY, torch.nn.Linear(SIZE, 3), classes=OLD)
    with pytest.raises(ValueError, match=r"logits \[B,4\].*got \[80, 3\]"):
        narrow.fit(x, names)
    with pytest.raises(ValueError, match="not fitted: call fit"):
        narrow.predict(x)
    with pytest.raises(ValueError, match="not fitted"):
        narrow.add_examples(x, "a")


# On the disk


def test_a_saved_classifier_answers_the_same_and_only_with_its_network(tmp_path):
    classifier = fitted()
    classifier.add_examples(draw(4, 5), "emu", tag="t")
    classifier.forget("bee")
    classifier.save(tmp_path / "saved")
    queries = torch.cat([draw(row, 5, seed=6) for row in range(6)])
    expected = classifier.predict(queries)
    loaded = memory.AdaptiveClassifier.load(tmp_path / "saved", *network())
    answers = loaded.predict(queries)
    assert answers.names == expected.names
    assert answers.classes == expected.classes
    assert torch.equal(answers.probabilities, expected.probabilities)
    loaded.undo("t")
    assert "emu" not in loaded.classes
    body, head = network()
    head.bias.data[0] += 1
    with pytest.raises(MemoryFileError, match="another network"):
        memory.AdaptiveClassifier.load(tmp_path / "saved", body, head)
    with pytest.raises(MemoryFileError, match="another network"):
        memory.AdaptiveClassifier.open(tmp_path / "saved", body)
    other = memory.AdaptiveClassifier(body, head, classes=OLD)
    other.fit(*old_examples())
    with pytest.raises(MemoryFileError, match="another network"):
        other.save(tmp_path / "saved")
    classifier.save(tmp_path / "saved")  # of the same network


def test_a_classifier_without_a_head_is_saved_too(tmp_path):
    classifier = fitted(head=False)
    classifier.save(tmp_path)
    loaded = memory.AdaptiveClassifier.load(tmp_path, network()[0])
    assert torch.equal(loaded.predict(draw(0, 5)).probabilities, classifier.predict(draw(0, 5)).probabilities)


def test_a_reader_follows_its_writer(tmp_path):
    fitted().save(tmp_path)
    reader = memory.AdaptiveClassifier.load(tmp_path, *network())
    queries = draw(4, 20, seed=7)
    assert not reader.refresh()
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(4, 5), "emu", tag="t")
        assert reader.refresh()
        assert reader.predict(queries).names == writer.predict(queries).names
        assert "emu" in reader.classes
        writer.undo("t")
        assert reader.refresh()
        assert "emu" not in reader.classes
        writer.forget("ant")
        assert reader.refresh()
        assert reader.classes == ("bee", "cat", "dog")
        x, names = old_examples(15, seed=1)
        writer.fit(x, names)
        assert reader.refresh()
        assert torch.equal(reader.predict(queries).probabilities, writer.predict(queries).probabilities)
        assert not reader.refresh()
        assert not writer.refresh()
        with pytest.raises(MemoryFileError, match="being written by"):
            memory.AdaptiveClassifier.open(tmp_path, *network())
    for change in (
        lambda: writer.fit(*old_examples()),
        lambda: writer.add_examples(x, "emu"),
        lambda: writer.forget("bee"),
    ):
        with pytest.raises(MemoryFileError, match="is closed"):
            change()
    reopened = memory.AdaptiveClassifier.load(tmp_path, *network())
    assert reopened.classes == ("bee", "cat", "dog")
    reader.forget("bee")  # stays here
    assert memory.AdaptiveClassifier.load(tmp_path, *network()).classes == ("bee", "cat", "dog")
    with pytest.raises(ValueError, match=r"refresh\(\) is for a classifier that load\(\)"):
        reader.refresh()


@pytest.mark.parametrize(
    "change",
    [
        lambda reader: reader.add_examples(draw(5, 5), "fox"),
        lambda reader: reader.remove(0),
        lambda reader: reader.undo("today"),
        lambda reader: reader.forget("emu"),
        lambda reader: reader.forget("bee"),
    ],
)
def test_a_reader_that_was_changed_does_not_follow_and_is_told_so(tmp_path, change):
    """Whether it was changed in its examples or in the classes of the network."""
    classifier = fitted()
    classifier.add_examples(draw(4, 5), "emu", tag="today")
    classifier.save(tmp_path)
    reader = memory.AdaptiveClassifier.load(tmp_path, *network())
    assert not reader.refresh()
    change(reader)
    with pytest.raises(ValueError, match=r"^refresh\(\) is for a classifier that load\(\) has read"):
        reader.refresh()


def test_a_file_of_the_format_before_answers_by_the_axes_alone(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from fastweights.memory.store.disk import checksum

    x, names = old_examples(5)
    wide = torch.cat([x, 0.1 * torch.randn(len(x), 40, generator=torch.Generator().manual_seed(0))], 1)
    classifier = memory.AdaptiveClassifier(torch.nn.Identity(), None, classes=OLD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classifier.fit(wide, names)
    classifier.save(tmp_path)
    file = tmp_path / "classifier.safetensors"
    tensors = load_file(file)
    outside = tensors.pop("space.outside").shape[2]
    assert outside > 0
    tensors["scale"] = tensors["scale"][:, :-outside].contiguous()
    with safe_open(file, "pt") as whole:
        facts = json.loads(whole.metadata()["classifier"])
    del facts["crc32"]
    facts["crc32"] = checksum(facts, tensors)
    before = {"format": "fastweights adaptive classifier 2", "classifier": json.dumps(facts)}
    save_file(tensors, file, before)
    loaded = memory.AdaptiveClassifier.load(tmp_path, torch.nn.Identity(), None)
    assert torch.equal(loaded.predict(wide).probabilities, classifier.predict(wide).probabilities)
    loaded.add_examples(wide[:3] + 3, "emu")
    assert loaded.predict(wide[:3] + 3).names == ["emu"] * 3


def test_what_is_no_saved_classifier_is_refused(tmp_path):
    for read in (memory.AdaptiveClassifier.load, memory.AdaptiveClassifier.open):
        with pytest.raises(MemoryFileError, match="no saved classifier"):
            read(tmp_path / "nothing", *network())
    assert not (tmp_path / "nothing").exists()
    fitted().save(tmp_path)
    file = tmp_path / "classifier.safetensors"
    whole = file.read_bytes()
    reader = memory.AdaptiveClassifier.load(tmp_path, *network())
    for damaged in (b"", whole[:100], whole[:-8], b"x" * len(whole), whole.replace(b"classifier 3", b"classifier 9")):
        file.write_bytes(damaged)
        with pytest.raises(MemoryFileError, match=r"damaged|another version"):
            memory.AdaptiveClassifier.load(tmp_path, *network())
        with pytest.raises(MemoryFileError, match=r"damaged|another version"):
            reader.refresh()
        assert reader.predict(draw(0, 3)).names == ["ant"] * 3


def linear_network():
    torch.manual_seed(0)
    return torch.nn.Linear(SIZE, SIZE), network()[1]


def test_a_network_that_was_changed_is_refused_until_the_weights_are_back(tmp_path):
    body, head = linear_network()
    classifier = memory.AdaptiveClassifier(body, head, classes=OLD)
    classifier.fit(*old_examples())
    classifier.save(tmp_path / "before")
    classifier.add_examples(draw(4, 5), "emu")
    weight = body.weight.detach().clone()
    with torch.no_grad():
        body.weight.mul_(-1)
    for change in (
        lambda: classifier.add_examples(draw(4, 5), "emu"),
        lambda: classifier.save(tmp_path / "after"),
        lambda: classifier.fit(*old_examples()),
    ):
        with pytest.raises(ValueError, match=r"other weights.*Put the weights back, or make a new"):
            change()
    assert len(classifier) == 5
    assert not (tmp_path / "after").exists()
    body.load_state_dict({"weight": weight, "bias": body.bias})
    classifier.add_examples(draw(4, 5), "emu")
    body.weight.data.mul_(2)  # which leaves no trace but the weights
    for change in (lambda: classifier.add_examples(draw(4, 5), "emu"), lambda: classifier.save(tmp_path / "after")):
        with pytest.raises(ValueError, match="other weights"):
            change()
    classifier.forget("emu")
    classifier.fit(*old_examples())  # nothing is kept of the old network
    classifier.save(tmp_path / "after")
    memory.AdaptiveClassifier.load(tmp_path / "after", body, head)
    with pytest.raises(MemoryFileError, match="another network"):
        classifier.save(tmp_path / "before")


def test_a_network_that_differs_in_its_last_weight_is_another(tmp_path):
    body = torch.nn.Linear(SIZE, 20)
    classifier = memory.AdaptiveClassifier(body, classes=OLD)
    classifier.fit(*old_examples())
    classifier.save(tmp_path)
    with torch.no_grad():
        body.weight[-1, -1] += 1
    with pytest.raises(MemoryFileError, match="another network"):
        memory.AdaptiveClassifier.load(tmp_path, body)
    with pytest.raises(MemoryFileError, match="another network"):
        memory.AdaptiveClassifier.open(tmp_path, body)
    with pytest.raises(ValueError, match="other weights"):
        classifier.add_examples(draw(4, 5), "emu")


def test_what_a_writer_saves_belongs_to_the_network_that_was_fitted(tmp_path):
    body, head = linear_network()
    classifier = memory.AdaptiveClassifier(body, head, classes=OLD)
    classifier.fit(*old_examples())
    classifier.save(tmp_path)
    weight = body.weight.detach().clone()
    with memory.AdaptiveClassifier.open(tmp_path, body, head) as writer:
        body.weight.data.zero_()
        writer.forget("ant")
    with pytest.raises(MemoryFileError, match="another network"):
        memory.AdaptiveClassifier.load(tmp_path, body, head)
    body.weight.data.copy_(weight)
    assert memory.AdaptiveClassifier.load(tmp_path, body, head).classes == ("bee", "cat", "dog")


def test_a_compiled_network_is_the_same_network(tmp_path):
    fitted().save(tmp_path)
    compiled = [cast(torch.nn.Module, torch.compile(part, backend="eager")) for part in network()]
    assert memory.AdaptiveClassifier.load(tmp_path, *compiled).classes == OLD


def test_a_refresh_that_failed_is_made_up_for(tmp_path):
    fitted().save(tmp_path / "saved")
    reader = memory.AdaptiveClassifier.load(tmp_path / "saved", *network())
    assert reader.classes == OLD
    with memory.AdaptiveClassifier.open(tmp_path / "saved", *network()) as writer:
        writer.add_examples(draw(4, 5), "emu")
    (tmp_path / "saved" / "classifier.safetensors").rename(tmp_path / "aside")
    with pytest.raises(MemoryFileError, match=r"there is no classifier\.safetensors"):
        reader.refresh()
    assert reader.classes == OLD
    (tmp_path / "aside").rename(tmp_path / "saved" / "classifier.safetensors")
    assert reader.refresh()
    assert "emu" in reader.classes


def test_a_disk_that_is_full_leaves_the_saved_classifier_as_it_was(tmp_path, full_disk):
    fitted().save(tmp_path)
    before = {file.name for file in tmp_path.iterdir()}
    queries, other = draw(4, 5), fitted(unknown_rate=0.5)
    other.add_examples(draw(5, 5), "fox")
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(0, 5), "ant")
        expected = writer.predict(queries).probabilities
        full_disk(1500)  # bytes: room for a change in the log, not for the classifier
        with pytest.raises(MemoryFileError, match=r"cannot write .*nothing was changed"):
            writer.forget("ant")
        assert torch.equal(writer.predict(queries).probabilities, expected)
    with pytest.raises(MemoryFileError, match=r"cannot write .*what was saved before is whole"):
        other.save(tmp_path)
    loaded = memory.AdaptiveClassifier.load(tmp_path, *network())
    assert loaded.classes == OLD
    assert torch.equal(loaded.predict(queries).probabilities, expected)
    assert {file.name for file in tmp_path.iterdir()} == before


def test_the_examples_of_a_forgotten_class_never_look_like_a_new_class(tmp_path, monkeypatch):
    """The memory refuses, or the writer is killed after the memory was changed and before the classifier was."""
    fitted().save(tmp_path)
    reader = memory.AdaptiveClassifier.load(tmp_path, *network())
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(0, 5), "ant")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *paths: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception):
                writer.forget("ant")
        assert reader.refresh()
        assert reader.classes == OLD
        writer.add_examples(draw(0, 5), "ant")
        with monkeypatch.context() as patch:
            patch.setattr(memory.EpisodicMemory, "remove_class", lambda *given: pytest.fail("the disk refuses"))
            with pytest.raises(pytest.fail.Exception):
                writer.forget("ant")
        assert len(writer) == 5
        assert reader.refresh()
        assert reader.classes == writer.classes == OLD


def test_a_class_that_is_forgotten_while_a_classifier_is_loaded_never_looks_like_a_new_one(tmp_path, monkeypatch):
    fitted().save(tmp_path)
    load = memory.EpisodicMemory.load
    with memory.AdaptiveClassifier.open(tmp_path, *network()) as writer:
        writer.add_examples(draw(0, 5), "ant")
        writer.add_examples(draw(4, 5), "emu")

        def load_before_a_change(*given, **options):
            store = load(*given, **options)
            writer.forget("ant")
            return store

        monkeypatch.setattr(memory.EpisodicMemory, "load", load_before_a_change)
        reader = memory.AdaptiveClassifier.load(tmp_path, *network())
    assert reader.classes == ("bee", "cat", "dog", "emu")
    assert len(reader) == 5


def test_every_byte_of_the_file_counts(tmp_path):
    classifier = fitted()
    classifier.save(tmp_path)
    file = tmp_path / "classifier.safetensors"
    whole = file.read_bytes()
    for place in range(0, len(whole), 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        with pytest.raises(MemoryFileError, match=r"damaged|another version"):
            memory.AdaptiveClassifier.load(tmp_path, *network())
    known = classifier._fitted
    models = [known.statistics.whole, *known.statistics.folds]
    whole, *folds = [
        model._replace(densities=model.densities._replace(counts=model.densities.counts[:2])) for model in models
    ]
    labels, scale = known.statistics.kept.labels + 1, models[0].scale * math.nan
    for wrong in (
        known._replace(classes=(*OLD, "eel")),
        known._replace(forgotten=frozenset(OLD)),
        known._replace(statistics=known.statistics._replace(whole=models[0]._replace(scale=scale))),
        known._replace(statistics=known.statistics._replace(whole=whole, folds=folds)),
        known._replace(statistics=known.statistics._replace(kept=known.statistics.kept._replace(labels=labels))),
    ):
        file.write_bytes(_classifier_file.encode(wrong))
        with pytest.raises(MemoryFileError, match=r"damaged.*good copy"):
            memory.AdaptiveClassifier.load(tmp_path, *network())


def test_a_memory_that_is_missing_or_of_something_else_is_told(tmp_path):
    fitted().save(tmp_path)
    (tmp_path / "memory.safetensors").unlink()
    for read in (memory.AdaptiveClassifier.load, memory.AdaptiveClassifier.open):
        with pytest.raises(MemoryFileError, match=r"there is no memory.safetensors.*good copy"):
            read(tmp_path, *network())
    (tmp_path / "memory.log").unlink()
    memory.EpisodicMemory(10, 4).save(tmp_path)
    for read in (memory.AdaptiveClassifier.load, memory.AdaptiveClassifier.open):
        with pytest.raises(MemoryFileError, match="not that of its classifier"):
            read(tmp_path, *network())


# At once


@pytest.mark.parametrize("seconds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_threads_ask_while_one_writes(seconds):
    """The writer learns two classes together or not at all: nobody may see one of them alone."""
    classifier = fitted()
    queries = torch.cat([draw(4, 4, seed=8), draw(5, 4, seed=8), draw(0, 4, seed=8)])
    new, names = torch.cat([draw(4, 5), draw(5, 5)]), ["emu"] * 5 + ["fox"] * 5
    expected: dict[tuple[str, ...], torch.Tensor] = {OLD: classifier.predict(queries).probabilities}
    classifier.add_examples(new, names, tag="t")
    expected[*OLD, "emu", "fox"] = classifier.predict(queries).probabilities
    classifier.undo("t")
    over, errors, asked = threading.Event(), [], []

    def write():
        while not over.is_set():
            classifier.add_examples(new, names, tag="t")
            classifier.undo("t")
            over.wait(0.005)  # so that it is asked in between too

    def ask():
        while not over.is_set():
            answers = classifier.predict(queries)
            assert F.l1_loss(answers.probabilities, expected[answers.classes]) < 1e-6
            asked.append(len(answers.classes))

    def run(work):
        try:
            work()
        except BaseException:
            errors.append(traceback.format_exc())
            over.set()

    threads = [threading.Thread(target=run, args=(work,)) for work in (write, ask, ask, ask, ask)]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert set(asked) == {4, 6}


@pytest.mark.gpu
def test_around_an_encoder_on_a_gpu_the_answers_are_the_same(tmp_path):
    body, head = (part.to("cuda") for part in network())
    classifier = memory.AdaptiveClassifier(body, head, classes=OLD)
    inputs, names = old_examples()
    classifier.fit(inputs.cuda(), names)
    expected, queries = fitted(), torch.cat([draw(row, 20, seed=1) for row in range(6)])
    for each, given in ((classifier, draw(4, 5).cuda()), (expected, draw(4, 5))):
        each.add_examples(given, ["emu"] * 5)
    classifier.save(tmp_path)
    again = memory.AdaptiveClassifier.load(tmp_path, body, head)
    for mine in (classifier, again):
        answers = mine.predict(queries.cuda())
        assert answers.names == expected.predict(queries).names
        torch.testing.assert_close(
            answers.probabilities.cpu(), expected.predict(queries).probabilities, rtol=1e-3, atol=1e-4
        )
