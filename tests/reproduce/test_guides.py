"""What the experiments of the guides say."""

import dataclasses
import functools

from fastweights.reproduce.guides import when_an_lstm_is_better as compared


def test_the_papers_rate_does_not_learn_the_sum_and_the_layer_norm_is_not_to_blame():
    adding = compared.TASKS["adding"]._replace(draw=functools.partial(compared.draw_sums, steps=6))
    settings = dataclasses.replace(compared.Settings(), scored=(100,))

    def error(model):
        return compared.train(adding, lambda features: compared.make_layer(model, features, 64), 1, settings)[100]

    assert error("papers-rate") > 0.8 * adding.floor
    assert max(map(error, ("fast-weights", "rate-per-unit", "no-rate"))) < 0.5 * adding.floor
