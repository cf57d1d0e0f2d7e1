"""What the experiments of the guides say."""

import dataclasses
import functools

import pytest
import torch
from PIL import Image, ImageDraw

from fastweights.evaluation import evaluate_dynamically, perplexity
from fastweights.few_shot import FewShotClassifier
from fastweights.reproduce.guides import adapt_language_model, learn_a_class, learn_by_name, learning_rate, rates
from fastweights.reproduce.guides import few_shot_classifier as few_shot
from fastweights.reproduce.guides import when_an_lstm_is_better as compared

from .helpers import made_up_model


def test_the_papers_rate_does_not_learn_the_sum_and_the_layer_norm_is_not_to_blame():
    adding = compared.TASKS["adding"]._replace(draw=functools.partial(compared.draw_sums, steps=6))
    settings = dataclasses.replace(compared.Settings(), scored=(100,))

    def error(model):
        return compared.train(adding, lambda features: compared.make_layer(model, features, 64), 1, settings)[100]

    assert error("papers-rate") > 0.8 * adding.floor
    assert max(map(error, ("fast-weights", "rate-per-unit", "no-rate"))) < 0.5 * adding.floor


def test_mbpas_own_rate_mends_the_curve_at_any_width_and_a_number_is_right_at_one():
    settings = dataclasses.replace(learning_rate.Settings(), curve_epochs=20)
    best = []
    for features in (8, 80):
        torch.manual_seed(0)
        with torch.no_grad():
            problem = learning_rate.make_bump(features, settings)
            (alone,), (default,) = (learning_rate.measure_model(model, problem) for model in ("alone", "default"))
            score, power = learning_rate.measure_model("searched", problem)
            _, too_large = learning_rate.measure_model("paper", problem)
        assert default < 0.1 * alone
        assert default < 1.5 * score
        assert too_large
        best.append(power)
    assert best[1] < best[0] - 0.5


def test_memories_tell_a_text_that_comes_again_and_dynamic_evaluation_begins_with_the_model():
    model, tokenizer = made_up_model()
    model.requires_grad_(False)
    text = torch.randint(3, 29, (12,), generator=torch.Generator().manual_seed(0)).repeat(6)
    reading = adapt_language_model.read_text(model, tokenizer, text, text, 16)
    alone, _ = adapt_language_model.score_mixture(reading, ())
    together, fitted = adapt_language_model.score_mixture(reading, ("cache", "mbpa", "knn", "ngram"))
    assert alone == pytest.approx(perplexity(reading.test["model"]))
    assert together < 0.5 * alone
    assert sum(value for name, value in fitted.items() if name.startswith("weight")) == pytest.approx(1)
    settings = dataclasses.replace(adapt_language_model.Settings(), segment=8)
    last = adapt_language_model.LastLayer(model.get_output_embeddings(), reading.test_states)
    for value in (
        perplexity(evaluate_dynamically(last, text, learning_rate=0.0, segment=8)),
        adapt_language_model.follow_all_weights(model, 16, text, 0.0, settings),
    ):
        assert value == pytest.approx(alone, rel=1e-5)
    assert not any(each.requires_grad for each in model.parameters())


class Characters:
    """A tokenizer of characters."""

    def __call__(self, text, verbose=True):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids):
        return "".join(chr(int(each)) for each in ids)


def test_lines_that_were_read_are_asked_for_by_their_first_halves():
    text = adapt_language_model.draw_log(1)
    assert text == adapt_language_model.draw_log(1) != adapt_language_model.draw_log(2)
    lines = adapt_language_model.choose_lines(text)
    assert len(set(lines)) == 20
    assert set(lines) < set(text.split("\n"))
    assert adapt_language_model.choose_lines("first\n" + "a" * 40 + "\nshort\n" + "a" * 40 + "\nlast") == ["a" * 40]

    def recall(prompt, *, max_new_tokens, **options):
        asked = Characters().decode(prompt[0])
        rest = text.partition(asked)[2][:max_new_tokens]
        return torch.tensor([Characters()(asked + rest)["input_ids"]])

    def forget(prompt, **options):
        return torch.cat([prompt, torch.full((1, 30), ord("0"))], 1)

    for line in lines:
        assert adapt_language_model.continue_line(recall, Characters(), line) == line
        assert (
            adapt_language_model.continue_line(forget, Characters(), line).partition("req")[0]
            == line.partition("req")[0]
        )
        assert adapt_language_model.continue_line(forget, Characters(), line) != line


def test_the_cost_of_memories_is_told_beside_the_model():
    model, _ = made_up_model()
    settings = dataclasses.replace(adapt_language_model.Settings(), stored=50, rounds=1)
    ids = torch.randint(3, 29, (600,), generator=torch.Generator().manual_seed(0))
    alone, together = (adapt_language_model.measure_cost(model, ids, name, 1, settings) for name in ("alone", "all"))
    assert alone["cost:_milliseconds_of_a_token_scored"] > 0
    assert alone["cost:_time_of_a_token_generated"] == 1
    assert set(together) == {"cost:_time_of_a_token_scored", "cost:_time_of_a_token_generated"}


def test_a_rate_that_is_a_number_drowns_what_was_read_before_and_the_learnt_one_does_not():
    settings = dataclasses.replace(rates.Settings(), effort=0.5)
    right = {model: rates.repeat_previous(model, 16, 1, settings)[0][0] for model in ("learnt", "paper")}
    assert right["paper"] < 30
    assert right["learnt"] > 50


def test_what_is_read_is_short_beside_the_drive_at_any_width_by_default_alone():
    def most(model, units):
        (least, most), _ = rates.measure_readings(model, units, 0, rates.Settings())
        assert least <= most
        return most

    for units in (16, 160):
        assert most("learnt", units) < 0.1
        assert most("paper", units) > 100


@pytest.mark.parametrize(("name", "passes"), [("mnist", 2), ("fer2013", 3), ("fer2013-standardised", 3)])
@pytest.mark.parametrize("effort", [1.0, 0.5])
def test_glimpses_are_learnt_in_as_many_passes_as_the_guide_says(monkeypatch, name, passes, effort):
    trained = []

    def train(network, splits, schedule, folder, **options):
        trained.append(schedule.epochs)
        return {"test_error": 1.0}

    images = torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(rates, "train", train)
    monkeypatch.setattr(rates, "load_images", lambda name: ({"train": images}, 10))
    assert rates.look(name, "learnt", 8, 1, dataclasses.replace(rates.Settings(), effort=effort))[0] == [1.0]
    assert trained == [round(effort * passes)]


def test_layers_are_compared_at_equal_numbers_of_parameters():
    for model in rates.TITLES:
        layer, units = rates.make_equal(model, 32, 64)
        assert rates.count_parameters(layer) == pytest.approx(64 * (32 + 64 + 3), rel=0.02)
        assert (units == 64) == (model in ("learnt", "paper", "per-unit"))


def strokes(classes, per_class, generator):
    """Drawings [classes,per_class,28,28] of some points that a line joins, by a hand that shakes."""
    points = 4 + 20 * torch.rand(classes, 1, 5, 2, generator=generator)
    points = points + torch.randn(classes, per_class, 5, 2, generator=generator)

    def draw(line):
        image = Image.new("L", (28, 28))
        ImageDraw.Draw(image).line(line.flatten().tolist(), fill=255, width=2)
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(28, 28)

    return torch.stack([draw(line) for line in points.flatten(0, 1)]).view(classes, per_class, 28, 28)


def test_in_a_plain_sum_a_class_of_many_examples_wins_too_often():
    generator = torch.Generator().manual_seed(0)
    images = strokes(12, 20, generator)
    tasks = [few_shot.draw_task(images, (10, 1, 1, 1, 1), 5, generator) for _ in range(4)]

    def answers(model):
        found = few_shot.MODELS[model](FewShotClassifier.load("omniglot"))
        for task in tasks:
            found.describe(task.described, task.labels)
            yield found.predict(task.queries).argmax(1)

    right = torch.cat([task.targets for task in tasks])
    with torch.no_grad():
        evened, summed = (torch.cat(list(answers(model))) for model in ("evened", "summed"))
    assert (evened == right).float().mean() > 0.8
    assert (summed == 0).float().mean() > 0.5  # where a fifth is of that class


def make_classes(classes, features, scale):
    """A head that tells Gaussian classes apart, and a function that draws examples of them and of one more."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes + 1, features, generator=generator)
    head = torch.nn.Linear(features, classes).requires_grad_(False)
    head.weight.copy_(means[:classes] * scale)
    head.bias.copy_(-means[:classes].square().sum(1) * scale / 2)

    def draw(count, *which):
        labels = torch.tensor(which or range(classes)).repeat_interleave(count)
        return means[labels] + torch.randn(len(labels), features, generator=generator), labels

    return head, draw


def test_with_the_new_examples_alone_in_the_memory_mbpa_loses_old_answers():
    head, draw = make_classes(20, 64, 1 / 15)
    known = learn_a_class.Known(torch.nn.Identity(), head, draw(12), draw(3), draw(20))
    given, asked = draw(5, 20), draw(40, 20)
    character = learn_a_class.choose(known, given, asked)

    def right(model):
        with torch.no_grad():
            answer = learn_a_class.METHODS[model](known, character, learn_a_class.Settings())
            return [float((answer(x).argmax(1) == y).float().mean()) for x, y in (known.test, asked)]

    (alone, none), (old, new), (pulled, _) = map(right, ("alone", "mbpa", "mbpa-of-the-new"))
    assert none == 0
    assert new > 0.5
    assert old > alone - 0.05
    assert pulled < old - 0.05


def test_old_examples_crowd_a_new_class_out_of_mbpas_neighbours():
    head, draw = make_classes(5, 16, 1)
    asked = draw(50, 5)[0]
    case = learn_by_name.Case(head, draw(1000), draw(20), draw(5, 5)[0], asked, asked)
    settings = learn_by_name.Settings(draws=1, slow_draws=1)

    def right(model):
        with torch.no_grad():
            return learn_by_name.measure_rival(learn_by_name.RIVALS[model], case, settings)[1]

    assert right("mbpa-12") > right("mbpa-all") + 20
    assert right("means") > right("mbpa-12")  # which tell the class from all examples
