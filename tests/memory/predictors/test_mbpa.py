"""MbPA around a model: its answers against a loop over queries, what it keeps, and what it leaves alone."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.memory import EpisodicMemory, MbPA, attend
from fastweights.memory.predictors import mbpa
from fastweights.memory.predictors.mbpa import _same_bits
from fastweights.nn import HebbianSoftmax

INPUTS, FEATURES, CLASSES, ENTRIES = 6, 4, 5, 30


def body():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)).double()


def outputs():
    torch.manual_seed(1)
    return {
        "linear": nn.Linear(FEATURES, CLASSES).double(),
        "hebbian": HebbianSoftmax(FEATURES, CLASSES, dropout=0.5, dtype=torch.float64),
        "mlp": nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double(),
    }


def examples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def model(output=None, capacity=ENTRIES, **options):
    store = EpisodicMemory(capacity, FEATURES, dtype=torch.float64)
    told: dict[str, Any] = {"neighbours": 8, "lr": 0.3, "penalty": 0.2} | options
    found = MbPA(body(), outputs()["linear"] if output is None else output, store, **told)
    found.write(*examples(ENTRIES))
    return found


def loop(model, x):
    """Algorithm 1 with torch.optim, on the neighbours that a sort finds."""
    embed, answers = copy.deepcopy(model.embed).eval(), []
    keys, values = model.store.keys, model.store.values
    optimizers = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}
    for query in embed(x).detach():
        squares = (keys - query).square().sum(1)
        nearest = squares.argsort(stable=True)[: model.neighbours]
        weights = 1 / (model.epsilon + squares[nearest])
        weights /= weights.sum()
        output = copy.deepcopy(model.output).eval()
        start = [parameter.detach().clone() for parameter in output.parameters()]
        optimizer = optimizers[model.optimizer](output.parameters(), lr=model.lr)
        for _ in range(model.steps):
            optimizer.zero_grad()
            predicted = output(keys[nearest])
            if values.is_floating_point():
                losses = (predicted - values[nearest]).square().mean(1)
            else:
                losses = F.cross_entropy(predicted, values[nearest], reduction="none")
            far = sum((now - then).square().sum() for now, then in zip(output.parameters(), start, strict=True))
            ((weights * losses).sum() + 0.5 * model.penalty * far).backward()
            optimizer.step()
        answers.append(output(query[None])[0].detach())
    return torch.stack(answers)


@pytest.mark.parametrize("name", ["linear", "hebbian", "mlp"])
@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 5}, {"neighbours": 500}, {"neighbours": 1}, {"optimizer": "rmsprop", "steps": 3, "lr": 0.01},
     {"optimizer": "adam", "steps": 2, "lr": 0.01}, {"max_prediction_bytes": 0}],
)  # fmt: skip
@pytest.mark.parametrize("numbers", [1, 100, 2**25])
def test_is_the_loop_over_queries(monkeypatch, name, options, numbers):
    monkeypatch.setattr(mbpa, "_NUMBERS", numbers)
    monkeypatch.setattr(mbpa, "_QUERIES", min(4, numbers))
    found = model(outputs()[name], **options)
    x, _ = examples(7, seed=1)
    torch.testing.assert_close(found(x), loop(found, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("stored", [0, 2**20])
def test_the_closed_form_is_autograd(dtype, bound, steps, penalty, stored):
    """By the relative norm over the outputs, from autograd in float64 on the same numbers."""
    generator = torch.Generator().manual_seed(0)
    keys, labels = torch.randn(400, 32, generator=generator), torch.randint(0, 150, (400,), generator=generator)
    torch.manual_seed(0)
    output, queries = nn.Linear(32, 150), torch.randn(20, 32, generator=generator)
    found, exact = (
        MbPA(
            nn.Identity(),
            copy.deepcopy(output).to(dtype),
            EpisodicMemory(400, 32, dtype=dtype),
            neighbours=50,
            steps=steps,
            lr=0.15,
            penalty=penalty,
            max_prediction_bytes=stored,
        )
        for dtype in (dtype, torch.float64)
    )
    for one in (found, exact):
        one.write(keys, labels)
    expected = loop(exact, queries.double())
    assert float((found(queries).double() - expected).norm() / expected.norm()) < bound


def test_a_compiled_output_is_adapted_as_the_one_inside():
    output, x = outputs()["linear"], examples(9, seed=5)[0]
    compiled = model(torch.compile(output, backend="eager"), steps=3)
    assert torch.equal(compiled(x), model(output, steps=3)(x))


def test_the_settings_that_are_not_given():
    """Distances of a thousandth, where the kernel's epsilon counts; the other settings as the documentation says."""
    store, x = EpisodicMemory(300, FEATURES), torch.randn(300, FEATURES, generator=torch.Generator().manual_seed(0))
    default = MbPA(nn.Identity(), outputs()["linear"].float(), store)
    default.write(0.03 * x, torch.arange(300) % CLASSES)
    given: dict[str, Any] = {
        "neighbours": 256, "steps": 1, "lr": None, "penalty": 0.0, "optimizer": "sgd", "epsilon": 1e-3
    }  # fmt: skip
    assert torch.equal(default(0.03 * x[:9]), MbPA(nn.Identity(), default.output, store, **given)(0.03 * x[:9]))
    for epsilon in (1e-4, 1e-2):
        other = MbPA(nn.Identity(), default.output, store, **(given | {"epsilon": epsilon}))
        assert not torch.allclose(default(0.03 * x[:9]), other(0.03 * x[:9]), rtol=1e-4)
    near = store.search(0.03 * x[:9], 5)
    assert torch.equal(near.weights, store.search(0.03 * x[:9], 5, epsilon=1e-3).weights)


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("steps", [1, 4])
def test_regression(name, steps):
    store = EpisodicMemory(ENTRIES, FEATURES, value_shape=(CLASSES,), value_dtype=torch.float64, dtype=torch.float64)
    found = MbPA(body(), outputs()[name], store, neighbours=6, steps=steps, lr=0.2, penalty=0.1)
    x, _ = examples(ENTRIES)
    found.write(x, torch.randn(ENTRIES, CLASSES, dtype=torch.float64))
    queries, _ = examples(5, seed=1)
    torch.testing.assert_close(found(queries), loop(found, queries), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"steps": 3}, {"optimizer": "adam"}])
def test_the_model_is_left_as_it_was(options):
    found = model(**options)
    found.embed.train()
    found.output.train()
    list(found.embed)[1].eval()  # a normalisation that its owner has frozen
    parts = (found.embed, found.output)
    before = [{name: value.clone() for name, value in part.state_dict().items()} for part in parts]
    modes = [[module.training for module in part.modules()] for part in parts]
    x, y = examples(9, seed=1)
    first = found(x)
    found.write(x, y)
    assert not torch.equal(found(x), first)
    for part, state, training in zip(parts, before, modes, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())
        assert [module.training for module in part.modules()] == training
        assert all(parameter.grad is None for parameter in part.parameters())


@pytest.mark.parametrize("options", [{}, {"steps": 3}, {"optimizer": "rmsprop"}])
def test_a_query_never_sees_what_is_written_after_it(options):
    found = model(capacity=100, **options)
    x, y = examples(20, seed=1)
    answers = []
    for index in range(20):
        answers.append(found(x[index : index + 1]))
        alone = model(capacity=100, **options)
        alone.write(x[:index], y[:index])
        torch.testing.assert_close(answers[-1], alone(x[index : index + 1]), rtol=1e-9, atol=1e-9)
        found.write(x[index : index + 1], y[index : index + 1])


def test_rows_that_no_entry_has_yet_say_nothing():
    """In a mode of torch in which memory that nothing was written to is NaN: anything may be there."""
    torch.use_deterministic_algorithms(True)
    try:
        found = model(capacity=100)
        queries, _ = examples(6, seed=2)
        torch.testing.assert_close(found(queries), loop(found, queries), rtol=1e-9, atol=1e-9)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_kept_of_the_outputs_follows_the_memory():
    """Through overwriting, undoing, removing and clearing, in a ring that is full."""
    found = model(capacity=40)
    x, y = examples(60, seed=1)
    queries, _ = examples(6, seed=2)

    def check():
        torch.testing.assert_close(found(queries), loop(found, queries), rtol=1e-9, atol=1e-9)

    check()
    found.write(x[:25], y[:25], tag="new")
    check()
    found.store.undo("new")
    check()
    found.store.remove([0, 7, 29])
    check()
    for index in range(30):
        found.write(x[index : index + 1], y[index : index + 1])
    check()
    found.store.remove_class(2)
    check()
    found.store.clear()
    found.write(x[:3], y[:3])
    check()


def test_what_is_kept_of_the_outputs_is_of_the_weights_as_they_are():
    found = model()
    queries, _ = examples(6, seed=2)
    found(queries)
    for change in (
        lambda: setattr(found, "steps", 2),
        lambda: setattr(found, "steps", 1),
        lambda: found.output.weight.data.mul_(1.5),  # which torch does not count as a write
        lambda: found.output.bias.detach().add_(1.0),
        lambda: found.output.load_state_dict(nn.Linear(FEATURES, CLASSES).double().state_dict()),
        lambda: setattr(found, "output", nn.Linear(FEATURES, CLASSES).double()),
    ):
        with torch.no_grad():
            change()
        torch.testing.assert_close(found(queries), loop(found, queries), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("change", ["rows", "step", "bias"])
def test_what_is_kept_of_the_outputs_is_of_every_weight(steps, change):
    """Writes that torch does not count, and that keep the sum of the weights."""
    found = model(steps=steps)
    queries, labels = torch.randn(6, FEATURES, dtype=torch.float64), torch.arange(6) % CLASSES
    found.embed = nn.Identity()
    before = found(queries)
    weight, bias = found.output.weight, found.output.bias
    if change == "rows":
        weight.data[:] = weight.data.flip(0)
    elif change == "bias":
        bias.data[:] = bias.data.flip(0)
    else:  # gradients of cross entropy sum to zero over the classes
        F.cross_entropy(found.output(queries), labels).backward()
        weight.data -= 0.5 * weight.grad
    after = found(queries)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, loop(found, queries), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("back", [False, True])
def test_what_is_kept_of_the_outputs_is_of_the_keys_as_they_are(steps, back):
    """In float16 they are other keys, and stay so when they are given in float64 again."""
    found = model(steps=steps)
    queries, _ = examples(6, seed=2)
    found(queries)
    found.store.to(dtype=torch.float16)
    if back:
        found.store.to(dtype=torch.float64)
    fresh = MbPA(found.embed, found.output, found.store, neighbours=8, lr=0.3, penalty=0.2, steps=steps)
    assert torch.equal(found(queries), fresh(queries))


@pytest.mark.parametrize("name", ["linear", "hebbian", "mlp"])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("entries", [0, ENTRIES])
def test_under_autocast_only_the_embedding_is_in_another_precision(name, steps, entries):
    store = EpisodicMemory(ENTRIES, FEATURES)
    found = MbPA(nn.Identity(), outputs()[name].float(), store, neighbours=8, steps=steps)
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(count, FEATURES, generator=generator) for count in (ENTRIES, 6))
    found.write(keys[:entries], examples(entries)[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = found(queries)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(under, found(queries))
    seen = []
    found.embed = nn.Linear(FEATURES, FEATURES)
    found.embed.register_forward_hook(lambda module, inputs, embedded: seen.append(embedded.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert found(queries).dtype == torch.float32
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("steps", [1, 5])
def test_what_begins_under_inference_mode_goes_on_outside_of_it(name, steps):
    found = model(outputs()[name], capacity=60, steps=steps)
    x, y = examples(20, seed=1)
    queries, _ = examples(6, seed=2)
    for part in (slice(0, 10), slice(10, 20)):
        with torch.inference_mode():
            under = found(queries)
        assert torch.equal(under, found(queries))
        torch.testing.assert_close(under, loop(found, queries), rtol=1e-9, atol=1e-9)
        found.write(x[part], y[part])
        torch.testing.assert_close(found(queries), loop(found, queries), rtol=1e-9, atol=1e-9)


def test_an_empty_memory_gives_the_models_own_outputs():
    store = EpisodicMemory(ENTRIES, FEATURES, dtype=torch.float64)
    found = MbPA(body(), outputs()["linear"], store)
    x, _ = examples(3)
    assert torch.equal(found(x), found.output(copy.deepcopy(found.embed).eval()(x)))
    assert found(x[:0]).shape == (0, CLASSES)


def test_hooks_on_the_output_are_not_passed_over():
    found = model()
    x, _ = examples(3, seed=1)
    plain = found(x)
    found.output.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    torch.testing.assert_close(found(x), loop(found, x), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found(x), plain)


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_the_output_of_classes_runs_once_a_step_and_before_and_after(optimizer):
    runs = []

    class Counted(nn.Sequential):
        def forward(self, input):
            runs.append(1)
            return super().forward(input)

    found = model(Counted(*outputs()["mlp"]), steps=3, optimizer=optimizer)
    found(examples(4, seed=1)[0])
    runs.clear()
    found(examples(4, seed=1)[0])
    assert len(runs) == 1 + 3 + 1  # as it is, at the neighbours before each step, and adapted


def test_single_precision_keys_and_half_precision_queries():
    store = EpisodicMemory(ENTRIES, FEATURES)
    found = MbPA(nn.Identity(), nn.Linear(FEATURES, CLASSES), store, neighbours=8, lr=0.15)
    generator = torch.Generator().manual_seed(0)
    found.write(torch.randn(ENTRIES, FEATURES, generator=generator), examples(ENTRIES)[1])
    queries = torch.randn(4, FEATURES, generator=generator)
    expected = loop(found, queries)
    torch.testing.assert_close(found(queries), expected, rtol=1e-5, atol=1e-5)
    assert found(queries.bfloat16()).dtype == torch.float32


def test_through_faiss():
    pytest.importorskip("faiss")
    found = model()
    x, _ = examples(4, seed=1)
    through = MbPA(found.embed, found.output, memory.FaissIndex(found.store), neighbours=8, lr=0.3, penalty=0.2)
    torch.testing.assert_close(through(x), found(x), rtol=1e-6, atol=1e-6)


def test_a_constant_fitted_to_the_neighbours_is_attention():
    """Equations 9 and 10 of the paper agree: the best constant logits are the weights' shares of the classes."""
    found = model().store.search(torch.randn(3, FEATURES, dtype=torch.float64), 6)
    logits = torch.zeros(3, CLASSES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-14, tolerance_change=0.0)

    def closure():
        optimizer.zero_grad()
        expanded = logits.unsqueeze(1).expand(-1, 6, -1).transpose(1, 2)
        loss = (found.weights * F.cross_entropy(expanded, found.values, reduction="none")).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(logits.softmax(1).detach(), attend(found, CLASSES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"neighbours": 0}, "neighbours must be an integer of at least 1, got 0"),
        ({"neighbours": True}, "neighbours must be an integer of at least 1, got True"),
        ({"steps": 1.5}, "steps must be an integer of at least 1, got 1.5"),
        ({"lr": float("nan")}, "lr must be finite and not negative, got nan"),
        ({"lr": "0.1"}, "lr must be finite and not negative, got '0.1'"),
        ({"penalty": -1}, "penalty must be finite and not negative, got -1"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of sgd, rmsprop, adam, got 'lbfgs'"),
        ({"epsilon": 0}, "epsilon must be positive and finite, got 0"),
    ],
)
def test_refuses_numbers_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        model(**options)


def test_refuses_what_does_not_fit():
    found = model()
    x, y = examples(3)
    with pytest.raises(ValueError, match=r"got \[3, 6\]"):
        MbPA(nn.Identity(), found.output, found.store)(x)
    bad = x.clone()
    bad[1] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        found.write(bad, y)
    assert len(found.store) == ENTRIES


@pytest.mark.parametrize("kind", ["linear", "hebbian", "mlp"])
def test_refuses_labels_that_the_output_lacks_before_the_disk(kind, tmp_path):
    with EpisodicMemory.open(tmp_path, 10, FEATURES, dtype=torch.float64) as store:
        found = MbPA(body(), outputs()[kind], store)
        x, y = examples(3)
        found.write(x, y)
        for label in (-1, CLASSES, 300):
            said = f"row 1 of y has the label {label}, and the output's classes are 0 to 4; .*widen_output"
            with pytest.raises(ValueError, match=said):
                found.write(x, torch.tensor([0, label, 1]))
            with pytest.raises(ValueError, match=said):
                found.write(x, [0, label, 1])
    assert EpisodicMemory.load(tmp_path).values.tolist() == y.tolist()


def test_refuses_targets_of_another_width_than_the_output():
    store = EpisodicMemory(10, FEATURES, value_shape=(3,), value_dtype=torch.float64, dtype=torch.float64)
    found = MbPA(body(), outputs()["mlp"], store)
    with pytest.raises(ValueError, match=r"the output gives 5 numbers, and the memory holds targets \[3\]"):
        found.write(examples(2)[0], torch.zeros(2, 3))
    assert len(store) == 0


def test_says_how_to_be_rid_of_labels_that_are_there():
    found = model(neighbours=100)
    x, _ = examples(3)
    found.store.write(found.embed(x).detach(), torch.tensor([9, 0, -1]), tag="new")
    with pytest.raises(ValueError, match=r"2 of its 30 .*such as 9.*widen_output\(\).*remove_class\(9\).*undo"):
        found(x)
    found.store.remove_class(9)
    with pytest.raises(ValueError, match=r"1 of its 29 .*remove_class\(-1\)"):
        found(x)
    found.store.undo("new")
    assert found(x).shape == (3, CLASSES)


class Outcome(nn.Module):
    """Like a model of a library that returns more than a tensor, and takes more than one."""

    def forward(self, x):
        return {"hidden": x["ids"] if isinstance(x, dict) else x}


def test_says_what_to_wrap_where_a_model_returns_no_tensor():
    x = {"ids": torch.ones(2, FEATURES)}
    bare = MbPA(Outcome(), nn.Linear(FEATURES, 3), EpisodicMemory(10, FEATURES))
    other = MbPA(nn.Identity(), Outcome(), EpisodicMemory(10, FEATURES))
    for ask in (lambda: bare(x), lambda: bare.write(x, [0, 1])):
        with pytest.raises(ValueError, match=r"embed must return a tensor, got dict: wrap it in .*Module"):
            ask()
    for ask in (lambda: other(x["ids"]), lambda: other.write(x["ids"], [0, 1])):
        with pytest.raises(ValueError, match=r"output must return a tensor, got dict: wrap it in .*Module"):
            ask()


def test_inputs_are_whatever_the_model_takes():
    class Wrapped(Outcome):
        def forward(self, x):
            return super().forward(x)["hidden"]

    found = MbPA(Wrapped(), nn.Linear(2, 3), EpisodicMemory(10, 2), lr=1.0, steps=5)
    x = {"ids": torch.tensor([[5.0, 0.0], [0.0, 5.0]])}
    found.write(x, [2, 1])
    assert found(x).argmax(1).tolist() == [2, 1]


def test_labels_that_are_no_numbers_are_told():
    with pytest.raises(ValueError, match=r"y must be numbers: list cannot become a tensor"):
        model().write(examples(2)[0], ["cat", "dog"])


def test_its_settings_are_shown_in_one_line():
    shown = repr(model(steps=3))
    assert shown.startswith("MbPA(Sequential, Linear, EpisodicMemory(30 of 30 entries")
    assert shown.endswith("neighbours=8, steps=3, lr=0.3, penalty=0.2, optimizer='sgd', epsilon=0.001)")
    assert "\n" not in shown


@pytest.mark.parametrize("entries", [0, 3])
def test_refuses_queries_that_are_not_finite(entries):
    found = MbPA(nn.Identity(), nn.Linear(2, 3), EpisodicMemory(10, 2))
    found.write(torch.randn(entries, 2), torch.zeros(entries, dtype=torch.long))
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="row 1 of queries"):
            found(torch.tensor([[0.0, 0.0], [0.0, number]]))


@pytest.mark.parametrize(
    "output", [nn.Linear(3, 5), HebbianSoftmax(3, 5), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))]
)
def test_refuses_an_output_of_another_width_than_the_keys(output):
    said = "the output takes 3 numbers, and the memory's keys have 2"
    with pytest.raises(ValueError, match=said):
        MbPA(nn.Identity(), output, EpisodicMemory(10, 2))
    found = MbPA(nn.Identity(), nn.Linear(2, 5), EpisodicMemory(10, 2))
    found.output = output
    with pytest.raises(ValueError, match=said):
        found(torch.zeros(1, 2))


def test_refuses_a_store_that_is_no_memory():
    with pytest.raises(ValueError, match="store must be an EpisodicMemory or a FaissIndex, got 'x'"):
        MbPA(nn.Identity(), nn.Linear(2, 3), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("neighbours", [5, 50])
@pytest.mark.parametrize("change", [None, "hook", "shared"])
def test_a_large_first_layer_is_adapted_like_any_other(neighbours, change):
    torch.manual_seed(0)
    output = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, CLASSES)).double()
    if change == "hook":
        output[0].register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    if change == "shared":
        output.insert(2, nn.Linear(40, 40).double())
        output[2].weight = output[0].weight
    store = EpisodicMemory(60, 40, dtype=torch.float64)
    found = MbPA(nn.Identity(), output, store, neighbours=neighbours, steps=3, lr=0.15)
    found.write(torch.randn(60, 40, dtype=torch.float64), torch.arange(60) % CLASSES)
    queries = torch.randn(5, 40, dtype=torch.float64)
    torch.testing.assert_close(found(queries), loop(found, queries), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("size", [6, 7])
def test_weights_are_compared_wherever_they_lie_in_their_storage(offset, size):
    weight = torch.randn(size + offset)[offset:]  # as where all parameters are views of one tensor
    copy = weight.clone()
    assert _same_bits(weight, copy)
    weight[-1] += 1
    assert not _same_bits(weight, copy)
    assert not _same_bits(weight, copy[:-1])
