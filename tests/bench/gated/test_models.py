import pytest
import torch

from fastweights.bench.gated import cases
from fastweights.bench.gated.cases import Case
from fastweights.bench.gated.models import models, training_step


def test_the_models_are_about_as_large_as_one_another():
    whole = models()
    assert sorted(whole) == sorted(cases.MODELS) == sorted(cases.PAPER_MINUTES)
    assert whole[cases.OURS].size == 46_234  # the paper's
    assert all(45_000 < model.size < 51_000 for model in whole.values())


@pytest.mark.parametrize("name", cases.MODELS)
def test_a_step_trains_and_carries_the_state_on(name):
    model = models()[name]
    given = []
    model.register_forward_pre_hook(lambda _, arguments: given.append(arguments[1]))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = training_step(model, Case(4, batch=3))
    for _ in range(3):
        step()
    assert given[0] is None
    leaves = [given[2].hidden, given[2].memory] if name == cases.ATTENTION else list(given[2])
    assert not any(leaf.requires_grad for leaf in leaves)
    assert any(leaf.abs().sum() > 0 for leaf in leaves)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)
