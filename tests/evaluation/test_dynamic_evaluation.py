"""Dynamic evaluation against the paper's equations written as a loop over copies of the weights."""

import copy
import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fastweights.evaluation import evaluate_dynamically, measure_gradients, score_text
from tests.training.language_model import LanguageModel, text


def run(model, tokens, state=None):
    h, state = model.encode(tokens[:-1], state)
    losses = F.cross_entropy(model.head(h).flatten(0, 1), tokens[1:].flatten(), reduction="none")
    return losses, tuple(each.detach() for each in state)


def follow(model, tokens, statistics, learning_rate, decay, segment, epsilon):
    """Section 4 of Krause et al. 2018."""
    model, first, state, scores = copy.deepcopy(model).eval(), copy.deepcopy(model), None, []
    size = None if statistics is None else sum(float(each.mean()) for each in statistics.values()) / len(statistics)
    for start in range(0, len(tokens) - 1, segment):
        losses, state = run(model, tokens[start : start + segment + 1].unsqueeze(1), state)
        scores.append(-losses.detach())
        model.zero_grad()
        losses.mean().backward()
        for (name, each), before in zip(model.named_parameters(), first.parameters(), strict=True):
            way_back = before.data - each.data
            if statistics is None:
                each.data += decay * way_back - learning_rate * each.grad
            else:
                share = (decay * statistics[name] / size).clamp(max=1)
                each.data += share * way_back - learning_rate * each.grad / (statistics[name] + epsilon)
    return torch.cat(scores)


@pytest.mark.parametrize("segment", [1, 5, 64])
@pytest.mark.parametrize("decay", [0.0, 0.1, 1.5])
@pytest.mark.parametrize("form", ["sgd", "rms"])
def test_the_weights_follow_the_equations(segment, decay, form):
    model, tokens = LanguageModel(), text(83)
    if form == "sgd":
        decay = min(decay, 1.0)
    statistics = measure_gradients(model, text(400, seed=1), streams=10) if form == "rms" else None
    told: dict[str, Any] = {
        "learning_rate": 0.3 if form == "sgd" else 0.01,
        "decay": decay,
        "segment": segment,
        "epsilon": 1e-3,
    }
    before = copy.deepcopy(model.state_dict())
    scores = evaluate_dynamically(model, tokens, statistics, **told)
    torch.testing.assert_close(scores, follow(model, tokens, statistics, **told), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model.training
    assert all(each.grad is None for each in model.parameters())


def test_gradient_statistics_are_those_of_a_loop():
    model, tokens = LanguageModel().eval(), text(205)
    streams, state = tokens[:200].view(10, 20).t(), None
    squares = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for start in range(0, 19, 5):
        losses, state = run(model, streams[start : start + 6], state)
        model.zero_grad()
        losses.mean().backward()
        for name, each in model.named_parameters():
            assert each.grad is not None
            squares[name] += each.grad.square() / 4
    measured = measure_gradients(model, tokens, streams=10)
    for name, square in squares.items():
        torch.testing.assert_close(measured[name], square.sqrt())
    first = measure_gradients(model, tokens, streams=10, most=1)
    short = measure_gradients(model, streams[:6].t().flatten(), streams=10)
    torch.testing.assert_close(first["head.bias"], short["head.bias"])


def test_a_segment_is_scored_before_the_weights_move():
    model, tokens = LanguageModel(), text(60)
    plain = score_text(model, tokens)["model"]
    scores = evaluate_dynamically(model, tokens, learning_rate=0.5, segment=20)
    torch.testing.assert_close(scores[:20], plain[:20])
    assert float((scores[20:] - plain[20:]).abs().min()) > 0
    still = evaluate_dynamically(model, tokens, learning_rate=0.0, segment=20)
    torch.testing.assert_close(still, plain)


def test_the_weights_come_back_after_an_error_and_frozen_ones_never_move():
    model, tokens = LanguageModel(), text(60)
    model.lstm.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    evaluate_dynamically(model, tokens, learning_rate=0.5)
    tokens[50] = 1000  # of another vocabulary
    with pytest.raises(IndexError):
        evaluate_dynamically(model, tokens, learning_rate=0.5)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("form", ["sgd", "rms"])
def test_weights_that_are_carried_off_are_told_of(form):
    model, tokens = LanguageModel(), text(83)
    statistics = measure_gradients(model, text(400, seed=1), streams=10) if form == "rms" else None
    evaluate_dynamically(model, tokens, statistics, learning_rate=0.01, epsilon=1e-3)  # tells nothing
    remedy = "Take a smaller learning_rate than 1e+06"
    remedy += ", a greater epsilon, or statistics of more of the training text" if form == "rms" else ""
    with pytest.warns(UserWarning, match=re.escape(remedy) + "$"):
        scores = evaluate_dynamically(model, tokens, statistics, learning_rate=1e6)
    assert scores[:5].mean() > -10  # what was scored before the first step is as it was


def test_bad_input_is_refused():
    model, tokens = LanguageModel(), text(60)
    statistics = measure_gradients(model, tokens, streams=3)
    wrong: list[tuple[Any, Any, str]] = [
        (None, {"learning_rate": -1.0}, "learning_rate must be finite and not negative, got -1.0"),
        (None, {"learning_rate": 1.0, "segment": 0}, "segment must be an integer of at least 1, got 0"),
        (None, {"learning_rate": 1.0, "epsilon": 0.0}, "epsilon must be positive and finite, got 0.0"),
        ({"head.bias": statistics["head.bias"]}, {"learning_rate": 1.0}, "statistics must come from this model"),
    ]
    for statistic, options, match in wrong:
        with pytest.raises(ValueError, match=match):
            evaluate_dynamically(model, tokens, statistic, **options)
    with pytest.raises(ValueError, match="40 streams need at least 80 tokens, got 60: give fewer streams"):
        measure_gradients(model, tokens, streams=40)
    with pytest.raises(ValueError, match=r"most \(None for all\) must be an integer of at least 1, got 0"):
        measure_gradients(model, tokens, streams=3, most=0)
