"""Dynamic evaluation against the paper's equations written as a loop over copies of the weights."""

import copy
import re
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from fastweights.evaluation import choose_learning_rate, evaluate_dynamically, measure_gradients, score_text
from fastweights.memory import AdaptiveLanguageModel
from fastweights.training import Progress
from tests.memory.language_models import ARCHITECTURES, CLASSES, make_model
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


class Costs(Progress):
    def __init__(self):
        self.costs = []

    def update(self, step, loss):
        self.costs.append(loss)


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


def test_the_weights_come_back_after_an_error_and_frozen_ones_never_move(monkeypatch):
    model, tokens = LanguageModel(), text(60)
    model.lstm.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    evaluate_dynamically(model, tokens, learning_rate=0.5)
    encode, calls = model.encode, []

    def fail_at_the_end(*inputs):
        calls.append(inputs)
        if len(calls) > 8:
            raise MemoryError
        return encode(*inputs)

    monkeypatch.setattr(model, "encode", fail_at_the_end)
    with pytest.raises(MemoryError):
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


def test_progress_tells_the_mean_of_what_was_scored():
    told = Costs()
    scores = evaluate_dynamically(LanguageModel(), text(83), learning_rate=0.3, segment=5, progress=told)
    ends = [*range(5, 82, 5), 82]
    assert told.costs == pytest.approx([-float(scores[:end].mean()) for end in ends], rel=1e-5)


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


def test_the_rate_that_scores_a_text_best_is_chosen_and_one_that_diverges_is_the_worst():
    model, tokens = LanguageModel(), text(83)
    rates = (1e6, 0.3, 0.001)
    scores = [float(evaluate_dynamically(model, tokens, learning_rate=rate).mean()) for rate in rates[1:]]
    assert choose_learning_rate(model, tokens, rates) == rates[1 + scores.index(max(scores))]
    with pytest.raises(ValueError, match="rates is empty"):
        choose_learning_rate(model, tokens, ())


# Models of transformers


def words(count):
    return torch.randint(3, CLASSES, (count,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("bos_token_id", [None, 0])
@pytest.mark.parametrize(("context", "segment"), [(16, 16), (16, 5), (2, 1)])
def test_weights_that_stay_score_as_the_model_does(name, bos_token_id, context, segment):
    model, tokens = make_model(name), words(36)
    plain = AdaptiveLanguageModel(model, bos_token_id=bos_token_id).score_plain(tokens[None], context=context)[0]
    options: dict[str, Any] = {"context": context, "segment": segment, "bos_token_id": bos_token_id}
    torch.testing.assert_close(evaluate_dynamically(model, tokens, learning_rate=0.0, **options), plain)


@pytest.mark.parametrize("segment", [5, 16])
def test_a_model_of_transformers_follows_as_a_loop_over_copies_does(segment):
    model, tokens, scores = make_model(), words(70), []
    before = copy.deepcopy(model.state_dict())
    followed = copy.deepcopy(model)
    for window in range(0, len(tokens) - 1, 16):
        past = None
        last = min(window + 16, len(tokens) - 1)
        for start in range(window, last, segment):
            stop = min(start + segment, last)
            found = followed(input_ids=tokens[None, start:stop], past_key_values=past, use_cache=True)
            losses = F.cross_entropy(found.logits[0], tokens[start + 1 : stop + 1], reduction="none")
            scores.append(-losses.detach())
            followed.zero_grad()
            losses.mean().backward()
            past = transformers.DynamicCache()
            for number, layer in enumerate(found.past_key_values.layers):
                past.update(layer.keys.detach(), layer.values.detach(), number)
            with torch.no_grad():
                for each in followed.parameters():
                    each -= 0.5 * each.grad
    got = evaluate_dynamically(model, tokens, learning_rate=0.5, segment=segment, context=16)
    torch.testing.assert_close(got, torch.cat(scores), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gemma2", "mamba", "rwkv"])
def test_a_text_that_comes_again_is_told_better(name):
    model, tokens = make_model(name), words(8).repeat(10)
    options: dict[str, Any] = {"segment": 4, "context": 8}
    rate = choose_learning_rate(model, tokens, (0.1, 1.0), **options)
    plain, follows = (evaluate_dynamically(model, tokens, learning_rate=each, **options) for each in (0.0, rate))
    assert float(follows[-30:].mean()) > float(plain[-30:].mean()) + 0.5
    statistics = measure_gradients(model, tokens.repeat(2), streams=4, **options)
    scaled = evaluate_dynamically(model, tokens, statistics, learning_rate=0.01, epsilon=1e-3, **options)
    assert float(scaled[-30:].mean()) > float(plain[-30:].mean()) + 0.1


def test_rates_are_compared_with_the_windows_that_will_be_used():
    model, tokens, tried = make_model(), words(70), Costs()
    options: dict[str, Any] = {"segment": 5, "context": 16, "bos_token_id": 0}
    choose_learning_rate(model, tokens, (0.1, 0.5), progress=tried, **options)
    scores = (evaluate_dynamically(model, tokens, learning_rate=rate, **options) for rate in (0.1, 0.5))
    assert tried.costs == pytest.approx([-float(each.mean()) for each in scores], rel=1e-6)


def test_gradients_are_those_of_windows_that_begin_with_the_token_that_is_given():
    model, tokens, squares = make_model().eval(), words(61), []
    for first in range(0, 60, 15):
        read = torch.cat([torch.tensor([0]), tokens[first : first + 15]])
        losses = F.cross_entropy(model(input_ids=read[None]).logits[0, 1:], tokens[first + 1 : first + 16])
        squares.append([gradient.square() for gradient in torch.autograd.grad(losses, list(model.parameters()))])
    found = measure_gradients(model, tokens, streams=1, segment=15, context=16, bos_token_id=0)
    for each, expected in zip(found.values(), zip(*squares, strict=True), strict=True):
        torch.testing.assert_close(each, torch.stack(expected).mean(0).sqrt(), rtol=1e-4, atol=1e-6)


def test_a_context_is_at_most_what_the_model_can_read():
    model, tokens = make_model(), words(70)
    most, more, none = (evaluate_dynamically(model, tokens, learning_rate=0.1, context=c) for c in (64, 100, None))
    assert torch.equal(most, more)
    assert torch.equal(most, none)


def test_parameters_that_want_no_gradient_stay_while_the_others_follow():
    model, tokens = make_model(), words(12).repeat(6)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no weight of the model requires a gradient: model\.requires_grad_\(True\)"):
        evaluate_dynamically(model, tokens, learning_rate=1.0)
    model.lm_head.requires_grad_(True)
    assert measure_gradients(model, tokens, streams=2).keys() == {"lm_head.weight"}


def test_what_a_model_of_transformers_cannot_do_is_said():
    model, tokens = make_model(), words(70)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (model, {"context": 0}, "context must be an integer of at least 1, got 0"),
        (model, {"context": 1, "bos_token_id": 0}, "context must have room for bos_token_id and another token, got 1"),
        (model, {"bos_token_id": 61}, "bos_token_id must be one of 61 tokens, got 61"),
        (LanguageModel(), {"context": 10}, "context and bos_token_id are for a causal language model of transformers"),
        (make_model().bfloat16(), {}, r"weight is torch.bfloat16, too coarse.*: give model.float\(\)"),
        (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=30, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=1)
            ),
            {},
            "T5ForConditionalGeneration is an encoder-decoder: give a causal language model",
        ),
    ]
    for each, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            evaluate_dynamically(each, tokens, learning_rate=0.1, **options)
