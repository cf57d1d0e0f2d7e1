"""What the experiments of the guides say."""

import dataclasses
import functools

import torch

from fastweights.reproduce.guides import learning_rate
from fastweights.reproduce.guides import when_an_lstm_is_better as compared


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
