"""Elastic weight consolidation against the sum of its tasks' penalties, a closed form, and a loop over examples."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastweights.training import ElasticWeightConsolidation, ewc

INPUTS, CLASSES, EXAMPLES = 5, 4, 40


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).to(dtype)


def inputs(seed=0, dtype=torch.float64):
    return torch.randn(EXAMPLES, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def move(model, seed, by=1.0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += by * torch.randn(weight.shape, dtype=torch.float64, generator=generator).to(weight.dtype)


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def fisher_by_loop(model, x, seed):
    """Of each weight: the mean of the squares of each example's gradient, its label drawn from the predictions."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        labels = torch.multinomial(model(x).softmax(1), 1, generator=drawn(seed)).squeeze(1)
    found = [torch.zeros_like(weight) for weight in model.parameters()]
    for one, label in zip(x, labels, strict=True):
        model.zero_grad()
        F.cross_entropy(model(one[None]), label[None]).backward()
        for total, weight in zip(found, model.parameters(), strict=True):
            total += weight.grad.square() / len(x)
    return found


def naive(penalties, model):
    """One quadratic penalty a task, as the paper has it: (fisher, where the weights were) of each."""
    return 0.5 * sum(
        (fisher * (weight - before).square()).sum()
        for task in penalties
        for fisher, before, weight in zip(*task, model.parameters(), strict=True)
    )


def gradients(value, model):
    return torch.autograd.grad(value, list(model.parameters()))


@pytest.mark.parametrize("numbers", [1, 500, 2**20])
def test_is_the_sum_of_one_penalty_a_task(monkeypatch, numbers):
    monkeypatch.setattr(ewc, "_NUMBERS", numbers)
    model = mlp()
    consolidation, penalties = ElasticWeightConsolidation(model), []
    for task in range(6):
        move(model, task)
        x = inputs(task)
        # In one block the labels are drawn as the loop draws them; of several blocks each is drawn on its own.
        if numbers == 2**20:
            consolidation.consolidate(x, generator=drawn(task))
            penalties.append(
                (fisher_by_loop(model, x, task), [weight.detach().clone() for weight in model.parameters()])
            )
            at_once = naive(penalties, model)
            torch.testing.assert_close(consolidation.penalty(), at_once, rtol=1e-10, atol=1e-12)
        else:
            before = {name: value.clone() for name, value in consolidation.state_dict()["fisher"].items()}
            consolidation.consolidate(x, generator=drawn(task))
            fisher = [value - before[name] for name, value in consolidation.state_dict()["fisher"].items()]
            penalties.append((fisher, [weight.detach().clone() for weight in model.parameters()]))
    assert consolidation.tasks == 6
    for seed in (10, 11):
        move(model, seed)
        found, expected = consolidation.penalty(), naive(penalties, model)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        for one, other in zip(gradients(found, model), gradients(expected, model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_nothing_cancels_far_from_the_origin():
    """In single precision sums of F theta^2 would leave nothing of a small move of large weights."""
    model = nn.Linear(INPUTS, CLASSES, bias=False)
    with torch.no_grad():
        model.weight.fill_(1000.0)  # logits all alike
    consolidation, penalties = ElasticWeightConsolidation(model), []
    for task in range(4):
        x = inputs(task, torch.float32)
        consolidation.consolidate(x, generator=drawn(task))
        penalties.append((fisher_by_loop(model, x, task), [model.weight.detach().clone()]))
        move(model, task, by=0.01)
    double = copy.deepcopy(model).double()
    expected = naive([([f.double() for f in fisher], [w.double() for w in at]) for fisher, at in penalties], double)
    assert abs(consolidation.penalty().item() / expected.item() - 1) < 1e-2


def test_the_fisher_of_softmax_regression_has_a_closed_form():
    """Over many drawn labels F of the weight of class c and input i is the mean of x_i^2 p_c (1 - p_c)."""
    torch.manual_seed(0)
    model = nn.Linear(INPUTS, CLASSES, dtype=torch.float64)
    x = inputs()
    consolidation = ElasticWeightConsolidation(model)
    consolidation.consolidate(x.repeat(5000, 1), generator=drawn(0))
    p = model(x).softmax(1).detach()
    expected = torch.einsum("nc,ni->ci", p * (1 - p), x.square()) / len(x)
    fisher = consolidation.state_dict()["fisher"]
    torch.testing.assert_close(fisher["weight"], expected, rtol=0.02, atol=0)
    torch.testing.assert_close(fisher["bias"], (p * (1 - p)).mean(0), rtol=0.02, atol=0)


def test_the_square_is_of_each_example_not_of_their_mean():
    model = mlp()
    consolidation = ElasticWeightConsolidation(model)
    consolidation.consolidate(inputs(), generator=drawn(3))
    for found, expected in zip(
        consolidation.state_dict()["fisher"].values(), fisher_by_loop(model, inputs(), 3), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_before_any_task_there_is_no_penalty():
    model = mlp()
    penalty = ElasticWeightConsolidation(model).penalty()
    assert penalty.shape == ()
    assert penalty.item() == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients(penalty, model))


def test_weights_that_are_fixed_are_left_out():
    model = mlp()
    model[0].requires_grad_(False)
    consolidation = ElasticWeightConsolidation(model)
    consolidation.consolidate(inputs())
    assert sorted(consolidation.state_dict()["fisher"]) == ["2.bias", "2.weight", "3.bias", "3.weight"]


def test_the_model_is_left_as_it_was():
    model = mlp().train()
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    ElasticWeightConsolidation(model).consolidate(inputs())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model] == [True, True, False, True]
    assert all(weight.grad is None for weight in model.parameters())


def test_the_labels_are_the_generators():
    found = []
    for seed in (1, 1, 2):
        model = mlp()
        consolidation = ElasticWeightConsolidation(model)
        consolidation.consolidate(inputs(), generator=drawn(seed))
        move(model, 5)
        found.append(consolidation.penalty().item())
    assert found[0] == found[1] != found[2]


def test_goes_on_from_its_state(tmp_path):
    model = mlp()
    one = ElasticWeightConsolidation(model)
    one.consolidate(inputs(), generator=drawn(0))
    move(model, 3)
    one.consolidate(inputs(2), generator=drawn(2))  # from two tasks on the least of the penalty is not zero
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other = ElasticWeightConsolidation(model)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.penalty().item() == one.penalty().item()
    for consolidation in (one, other):
        move(model, 1)
        consolidation.consolidate(inputs(1), generator=drawn(1))
        move(model, 1, by=-1.0)
    move(model, 2)
    assert one.penalty().item() == pytest.approx(other.penalty().item(), rel=1e-12)
    assert other.tasks == 3


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(0, INPUTS, dtype=torch.float64), r"at least one, got \[0, 5\]"),
        (torch.full((3, INPUTS), float("nan"), dtype=torch.float64), "the inputs hold NaN or infinity"),
    ],
)
def test_inputs_that_cannot_be_are_refused(x, message):
    consolidation = ElasticWeightConsolidation(mlp())
    with pytest.raises(ValueError, match=message):
        consolidation.consolidate(x)
    assert consolidation.tasks == 0
    assert consolidation.penalty().detach().item() == 0


def test_predictions_that_are_not_finite_are_refused():
    model = mlp()
    consolidation = ElasticWeightConsolidation(model)
    with torch.no_grad():
        model[2].weight.fill_(1e200)
        model[3].weight.fill_(1e200)
    with pytest.raises(ValueError, match="predictions hold NaN or infinity; nothing was changed"):
        consolidation.consolidate(inputs())
    assert consolidation.tasks == 0


def test_a_model_of_another_shape_is_refused():
    model = mlp()
    consolidation = ElasticWeightConsolidation(model)
    consolidation.consolidate(inputs())
    model[3] = nn.Linear(6, CLASSES + 1, dtype=torch.float64)
    for call in (consolidation.penalty, lambda: consolidation.consolidate(inputs())):
        with pytest.raises(ValueError, match=r"'3.weight': \[5, 6\].*and had .*'3.weight': \[4, 6\]"):
            call()
    with pytest.raises(
        ValueError, match=r"the state's fisher does not belong to a model with the weights \{'weight': \[4, 5\]"
    ):
        ElasticWeightConsolidation(nn.Linear(5, 4)).load_state_dict(consolidation.state_dict())


def test_one_logit_is_refused_as_a_softmax_and_protects_the_task_as_a_bernoulli():
    model = nn.Linear(5, 1)
    with pytest.raises(
        ValueError, match=r'gives one logit, \[40,1\].*output="bernoulli" for two.*"gaussian" for a num'
    ):
        ElasticWeightConsolidation(model).consolidate(inputs().float())
    consolidation = ElasticWeightConsolidation(model, output="bernoulli")
    consolidation.consolidate(inputs().float())
    p = model(inputs().float()).sigmoid().detach()
    with torch.no_grad():
        model.bias.add_(1)
    # The Bernoulli's Fisher information of the bias is p (1 - p); what is predicted is drawn.
    assert consolidation.penalty().detach().item() == pytest.approx(0.5 * float((p * (1 - p)).mean()), rel=0.2)


def regressor(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


@pytest.mark.parametrize("outputs", [1, 3, 200])
@pytest.mark.parametrize("output", ["bernoulli", "gaussian"])
def test_the_fisher_is_of_the_loss_that_goes_with_the_output(output, outputs):
    model, x = regressor(outputs), inputs()
    with torch.no_grad():
        predicted = model(x)
        if output == "bernoulli":
            drawn_y = torch.bernoulli(predicted.sigmoid(), generator=drawn(0))
        else:
            drawn_y = predicted + torch.empty_like(predicted).normal_(generator=drawn(0))
    expected = [torch.zeros_like(weight) for weight in model.parameters()]
    for one, y in zip(x, drawn_y, strict=True):
        z = model(one)
        minus_log_p = F.binary_cross_entropy_with_logits(z, y, reduction="sum")
        if output == "gaussian":
            minus_log_p = 0.5 * F.mse_loss(z, y, reduction="sum")
        for total, gradient in zip(expected, gradients(minus_log_p, model), strict=True):
            total += gradient.square() / len(x)
    consolidation = ElasticWeightConsolidation(model, output=output)
    consolidation.consolidate(x, generator=drawn(0))
    for found, wanted in zip(consolidation.state_dict()["fisher"].values(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("outputs", [1, 3, 200])
@pytest.mark.parametrize("output", ["bernoulli", "gaussian"])
def test_the_fisher_is_the_sum_of_squared_jacobians_by_the_variance(output, outputs):
    """F_i = sum_k Var(y_k) (d z_k / d theta_i)^2: over many draws, of variance 1 or p (1 - p)."""
    model, x = regressor(outputs), inputs()
    expected = [torch.zeros_like(weight) for weight in model.parameters()]
    for one in x:
        z = model(one)
        variances = torch.ones_like(z) if output == "gaussian" else (z.sigmoid() * (1 - z.sigmoid())).detach()
        for each, variance in zip(z, variances, strict=True):
            for total, gradient in zip(
                expected, torch.autograd.grad(each, list(model.parameters()), retain_graph=True), strict=True
            ):
                total += variance * gradient.square() / len(x)
    consolidation = ElasticWeightConsolidation(model, output=output)
    consolidation.consolidate(x.repeat(300, 1), generator=drawn(0))
    for found, wanted in zip(consolidation.state_dict()["fisher"].values(), expected, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_a_number_far_from_zero_is_protected_in_single_precision():
    """A draw of 1e8 + noise would have no noise left."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.bias.fill_(1e8)
    consolidation = ElasticWeightConsolidation(model, output="gaussian")
    consolidation.consolidate(torch.zeros(4000, 1), generator=drawn(0))
    assert consolidation.state_dict()["fisher"]["bias"].item() == pytest.approx(1, rel=0.1)


def test_another_output_is_refused():
    with pytest.raises(ValueError, match="output must be one of softmax, bernoulli, gaussian, got 'gausian'; did you"):
        ElasticWeightConsolidation(mlp(), output="gausian")  # type: ignore[arg-type]
    state = ElasticWeightConsolidation(mlp(), output="gaussian").state_dict()
    other = ElasticWeightConsolidation(mlp())
    with pytest.raises(ValueError, match="the state is of output='gaussian', and this is of 'softmax'; nothing was ch"):
        other.load_state_dict(state)
    old = other.state_dict()
    del old["output"]
    other.load_state_dict(old)  # as it was written before there were other outputs


@pytest.mark.parametrize(
    "x",
    [
        inputs().numpy(),
        inputs().tolist(),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs())),
    ],
)
def test_inputs_that_are_no_tensor_are_refused(x):
    consolidation = ElasticWeightConsolidation(mlp())
    with pytest.raises(
        TypeError, match=rf"one tensor \[N,...\] .*, got a {type(x).__name__}: torch.as_tensor"
    ) as raised:
        consolidation.consolidate(x)
    assert "\n" not in str(raised.value)
    assert consolidation.tasks == 0


@pytest.mark.parametrize("wrap", [lambda z: (z, None), lambda z: {"logits": z}])
def test_a_model_that_returns_no_tensor_is_refused(wrap):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(INPUTS, CLASSES)

        def forward(self, x):
            return wrap(self.layer(x))

    with pytest.raises(TypeError, match=r"return a tensor of logits \[40,C\], got a (tuple|dict): wrap it in a module"):
        ElasticWeightConsolidation(Wrapped()).consolidate(inputs(dtype=torch.float32))


def test_a_model_without_weights_to_keep_is_refused():
    with pytest.raises(ValueError, match="no weight of the Linear requires a gradient, so the penalty would stay 0"):
        ElasticWeightConsolidation(nn.Linear(4, 3).requires_grad_(False))


def test_a_model_without_logits_is_refused():
    with pytest.raises(ValueError, match=r"the model must give logits \[40,C\], got \[40, 5, 1\]"):
        ElasticWeightConsolidation(nn.Sequential(nn.Linear(5, 5), nn.Unflatten(1, (5, 1)))).consolidate(
            inputs(dtype=torch.float32)
        )
    with pytest.raises(ValueError, match=r"must give numbers \[40,C\], got \[40\]: unsqueeze\(1\) makes it \[40,1\]"):
        ElasticWeightConsolidation(nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), output="gaussian").consolidate(
            inputs(dtype=torch.float32)
        )


def test_gradients_that_are_not_finite_are_refused():
    """The logits are finite, and the slope of a square root at zero is not."""

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(CLASSES))
            self.weight = nn.Parameter(torch.zeros(CLASSES))

        def forward(self, x):
            return x[:, :CLASSES] + self.bias + self.weight.sqrt()

    consolidation = ElasticWeightConsolidation(Steep())
    with pytest.raises(ValueError, match="squares of the gradients hold NaN or infinity in 'weight'; nothing was"):
        consolidation.consolidate(inputs(dtype=torch.float32))
    assert consolidation.tasks == 0
    assert all(bool((value == 0).all()) for value in consolidation.state_dict()["fisher"].values())


def test_weights_that_are_not_finite_are_refused():
    """A unit that never speaks does not show in the logits."""
    hidden = nn.Linear(INPUTS, 6)
    model = nn.Sequential(hidden, nn.ReLU(), nn.Linear(6, CLASSES)).double()
    consolidation = ElasticWeightConsolidation(model)
    with torch.no_grad():
        hidden.bias[0] = -float("inf")
    with pytest.raises(ValueError, match=r"the weights hold NaN or infinity in '0.bias'; nothing was changed"):
        consolidation.consolidate(inputs())
    assert consolidation.tasks == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_penalty_has_gradients_whatever_mode_it_was_made_under(mode):
    model = mlp()
    usual = ElasticWeightConsolidation(model)
    usual.consolidate(inputs(), generator=drawn(0))
    with mode():
        made = ElasticWeightConsolidation(model)
        made.consolidate(inputs(), generator=drawn(0))  # inputs of that mode too
        loaded = ElasticWeightConsolidation(model)
        loaded.load_state_dict(made.state_dict())
    move(model, 1)
    expected = gradients(usual.penalty(), model)
    for consolidation in (made, loaded):
        found = gradients(consolidation.penalty(), model)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_state_stays_as_it_was_when_tasks_follow():
    model = mlp()
    consolidation = ElasticWeightConsolidation(model)
    consolidation.consolidate(inputs(), generator=drawn(0))
    state = consolidation.state_dict()
    before = copy.deepcopy(state)
    move(model, 1)
    consolidation.consolidate(inputs(1), generator=drawn(1))
    assert_same_state(state, before)
    state["fisher"]["3.bias"].fill_(7.0)
    assert not bool((consolidation.state_dict()["fisher"]["3.bias"] == 7).any())


def assert_same_state(one, other):
    assert (one["tasks"], one["least"]) == (other["tasks"], other["least"])
    for part in ("fisher", "centre"):
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items())


def with_value(part, value):
    def change(state):
        state[part]["3.bias"][0] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("tasks"), "the state's tasks must be an integer of at least 0, got None"),
        (lambda state: state.update(tasks=-1), "the state's tasks must be an integer of at least 0, got -1"),
        (lambda state: state.update(tasks=1.5), r"the state's tasks must be an integer of at least 0, got 1\.5"),
        (lambda state: state.pop("least"), "the state's least must be finite and not negative, got None"),
        (lambda state: state.update(least=float("nan")), "the state's least must be finite and not negative, got nan"),
        (lambda state: state.pop("centre"), "the state's centre does not belong to a model with the weights"),
        (
            lambda state: state["fisher"].update({"3.bias": 1.0}),
            "the state's fisher does not belong to a model with the weights",
        ),
        (
            with_value("fisher", float("nan")),
            "numbers of the state's fisher hold NaN or infinity in '3.bias'; nothing was changed",
        ),
        (with_value("fisher", -0.5), r"the state's fisher of '3.bias' is negative, -0\.5; nothing was changed"),
        (
            with_value("centre", float("inf")),
            "numbers of the state's centre hold NaN or infinity in '3.bias'; nothing was changed",
        ),
    ],
)
def test_a_state_that_cannot_be_changes_nothing(change, message):
    model = mlp()
    one, other = ElasticWeightConsolidation(model), ElasticWeightConsolidation(model)
    one.consolidate(inputs(), generator=drawn(0))
    other.consolidate(inputs(1), generator=drawn(1))
    state, before = one.state_dict(), other.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert_same_state(other.state_dict(), before)


def test_what_is_no_state_is_refused():
    with pytest.raises(ValueError, match="load_state_dict takes what state_dict gave, got list"):
        ElasticWeightConsolidation(mlp()).load_state_dict([])  # type: ignore[arg-type]
