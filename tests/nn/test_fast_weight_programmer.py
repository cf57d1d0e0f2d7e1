"""The layer against its equations in NumPy; what it obeys as every recurrent layer does is in test_laws.py."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastweights import nn
from fastweights.nn.short_convolution import ShortConvolution
from tests.ops.parity import needs_kernel

RULES = ("sum", "decay", "delta", "gated_delta", "kda", "gated_delta_2", "rwkv7")
HEADS, K, V, W = 3, 4, 2, 4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def map_features(x, name):
    if name == "silu":
        return silu(x) / np.linalg.norm(silu(x))
    if name == "elu":
        features = np.where(x > 0, x + 1, np.exp(x))
    else:
        r = np.maximum(np.concatenate([x, -x]), 0)
        features = np.array([r[i] * r[i - 1] for i in range(len(r))])
    return features / (features.sum() + 1e-6)


def run_in_numpy(layer, x, rule, feature_map, *, gated=True, strongest=1.0):
    """One sequence [T,E], from zeros: the outputs [T,E] and the memory [H,F,V]."""
    weights = {name: tensor.detach().numpy() for name, tensor in layer.named_parameters()}

    def linear(name, y):
        return weights[f"{name}.weight"] @ y + weights[f"{name}.bias"]

    features = 2 * K if feature_map == "dpfp" else K
    memory, outputs, mixed = np.zeros((HEADS, features, V)), [], [np.zeros(HEADS * (2 * K + V))] * (W - 1)
    for now in x:
        mixed.append(linear("in_proj", now))
        row = mixed[-1]
        if "convolution.weight" in weights:
            taps = weights["convolution.weight"]
            row = weights["convolution.bias"] + sum(taps[:, i] * mixed[i - W] for i in range(W))
        q, k, v = (part.reshape(HEADS, -1) for part in np.split(row, [HEADS * K, 2 * HEADS * K]))
        read = []
        for head in range(HEADS):
            query, key, value = map_features(q[head], feature_map), map_features(k[head], feature_map), silu(v[head])
            before = memory[head].copy()
            if rule not in ("sum", "delta"):  # of each head, or of each row of its memory
                memory[head] *= sigmoid(linear("decay", now)).reshape(HEADS, -1)[head][:, None]
            if rule in ("gated_delta_2", "rwkv7"):
                rate = strongest * sigmoid(linear("rate", now)).reshape(HEADS, -1)[head]
            if rule == "gated_delta_2":
                value = sigmoid(linear("write", now)).reshape(HEADS, -1)[head] * value - memory[head].T @ (rate * key)
            elif rule == "rwkv7":
                removed = weights["removal"][head] * key
                removed /= np.linalg.norm(removed)
                memory[head] -= np.outer(rate * removed, before.T @ removed)
                key = key * (1 + weights["replacement"][head] * (rate - 1))
            elif rule in ("delta", "gated_delta", "kda"):
                value = strongest * sigmoid(linear("rate", now)[head]) * (value - memory[head].T @ key)
            memory[head] += np.outer(key, value)
            o = memory[head].T @ query / np.sqrt(features)
            read.append(o / np.sqrt(np.mean(o**2) + 1e-6) * weights["norm.weight"])
        y = np.concatenate(read)
        outputs.append(linear("out_proj", y * silu(linear("gate", now)) if gated else y))
    return np.stack(outputs), memory


def make_layer(**options):
    torch.manual_seed(0)
    layer = nn.FastWeightProgrammer(5, HEADS, key_size=K, value_size=V, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("feature_map", ["silu", "elu", "dpfp"])
def test_the_layer_is_its_equations(rule, feature_map):
    layer, x = make_layer(rule=rule, feature_map=feature_map), torch.randn(9, 2, 5, dtype=torch.float64)
    y, state = layer(x)
    for index in range(2):
        expected, memory = run_in_numpy(layer, x[:, index].numpy(), rule, feature_map)
        np.testing.assert_allclose(y[:, index].detach(), expected, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(state.memory[index].detach(), memory, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_the_layer_is_its_equations_without_convolution_and_gate(rule):
    layer, x = make_layer(rule=rule, convolution=0, output_gate=False), torch.randn(9, 5, dtype=torch.float64)
    y, state = layer(x)
    expected, memory = run_in_numpy(layer, x.numpy(), rule, "silu", gated=False)
    np.testing.assert_allclose(y.detach(), expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(state.memory.detach(), memory, rtol=1e-11, atol=1e-12)
    assert state.convolution.shape == (0, HEADS * (2 * K + V))


@pytest.mark.parametrize("rule", ["delta", "gated_delta_2"])
def test_negative_eigenvalues_double_what_is_written(rule):
    layer, x = make_layer(rule=rule, negative_eigenvalues=True), torch.randn(9, 5, dtype=torch.float64)
    expected, _ = run_in_numpy(layer, x.numpy(), rule, "silu", strongest=2.0)
    np.testing.assert_allclose(layer(x)[0].detach(), expected, rtol=1e-11, atol=1e-12)


def test_a_layer_has_the_parameters_of_its_rule_alone():
    parts = {
        rule: {name.partition(".")[0] for name in nn.FastWeightProgrammer(4, 2, rule=rule).state_dict()}
        for rule in RULES
    }
    common = {"in_proj", "convolution", "gate", "norm", "out_proj"}
    assert parts == {
        "sum": common,
        "decay": common | {"decay"},
        "delta": common | {"rate"},
        "gated_delta": common | {"decay", "rate"},
        "kda": common | {"decay", "rate"},
        "gated_delta_2": common | {"decay", "rate", "write"},
        "rwkv7": common | {"decay", "rate", "removal", "replacement"},
    }
    bare = nn.FastWeightProgrammer(4, 2, rule="sum", convolution=0, output_gate=False)
    assert {name.partition(".")[0] for name in bare.state_dict()} == {"in_proj", "norm", "out_proj"}


@pytest.mark.parametrize(("rule", "decays"), [("gated_delta", 2), ("gated_delta_2", 6), ("rwkv7", 6)])
def test_it_starts_anew_as_it_started(rule, decays):
    torch.manual_seed(0)
    layer = nn.FastWeightProgrammer(6, 2, rule=rule)
    for parameter in layer.parameters():
        parameter.data.fill_(9.0)
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    other = nn.FastWeightProgrammer(6, 2, rule=rule)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True))
    assert layer.decay is not None
    assert torch.equal(layer.decay.bias, torch.full((decays,), 4.0))


def test_gradients_of_gradients():
    layer = nn.FastWeightProgrammer(3, 1, key_size=2, value_size=2, dtype=torch.float64)
    x = torch.randn(3, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x, fast_mode=True)


def test_the_convolution_is_that_of_torch():
    convolution, x = ShortConvolution(6, 4, dtype=torch.float64), torch.randn(2, 9, 6, dtype=torch.float64)
    padded = F.pad(x.transpose(1, 2), (3, 0))
    expected = F.conv1d(padded, convolution.weight.unsqueeze(1), convolution.bias, groups=6).transpose(1, 2)
    y, last = convolution(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(last, x[:, 6:])


@pytest.mark.parametrize("impl", ["auto", "reference", pytest.param("cpu", marks=needs_kernel)])
@pytest.mark.parametrize("batch", [1, 3, 3000])  # 3,000: past what a product and a sum are used for
def test_a_step_of_a_convolution_is_that_of_the_whole_and_its_state_is_its_own(batch, impl):
    convolution, x = ShortConvolution(6, 4), torch.randn(batch, 5, 6)
    whole, _ = convolution(x, impl="reference")
    _, last = convolution(x[:, :4])
    y, last = convolution(x[:, 4:], last, impl=impl)
    torch.testing.assert_close(y, whole[:, 4:])
    assert torch.equal(last, x[:, 2:])
    assert last.untyped_storage().nbytes() == 4 * last.numel()  # nothing older is kept alive
    last.zero_()
    y.sum().backward()
    torch.testing.assert_close(convolution.weight.grad, x[:, 1:].sum(0).t(), rtol=1e-4, atol=1e-4)


def test_a_step_of_a_convolution_keeps_the_dtype_of_x():
    convolution, x = ShortConvolution(6, 4).bfloat16(), torch.randn(2, 5, 6).bfloat16()
    _, last = convolution(x[:, :4])
    y, last = convolution(x[:, 4:], last)
    assert y.dtype == last.dtype == torch.bfloat16
    torch.testing.assert_close(y, convolution(x)[0][:, 4:])
    single = ShortConvolution(6, 4)
    assert single(x[:, 4:].float(), last.double())[0].dtype == torch.float32


def test_the_convolution_takes_inputs_of_its_own_shapes_alone():
    convolution, x = ShortConvolution(6, 3), torch.randn(2, 5, 6)
    for wrong in (torch.randn(2, 5, 7), torch.randn(5, 6)):
        with pytest.raises(ValueError, match=r"x must be \[B,T,C\] with C = features = 6, got shape"):
            convolution(wrong)
    for last in (torch.zeros(2, 3, 6), torch.zeros(1, 2, 6)):  # the first gave a step too many
        with pytest.raises(ValueError, match=r"last must have shape \(2, 2, 6\) for this x, got"):
            convolution(x, last)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "hebb"}, "rule must be one of sum, decay, delta, gated_delta, kda, gated_delta_2, rwkv7, got 'hebb'"),
        ({"feature_map": "relu"}, "feature_map must be one of silu, elu, dpfp, got 'relu'"),
        ({"impl": "triton", "rule": "rwkv7"}, "impl='triton' has no kernel of rule='rwkv7': use 'auto'"),
        ({"impl": "cuda"}, "impl must be one of auto, reference, cpu, triton, got 'cuda'"),
        ({"num_heads": 3}, "num_heads must divide embed_dim where no key_size .* got 3 heads of 8 features"),
        ({"num_heads": 3, "key_size": 4}, "num_heads must divide embed_dim"),
        ({"num_heads": 8}, "key_size and value_size must be at least 2, got 1 and 1 with 8 heads of 8 features"),
        ({"key_size": 1, "value_size": 4}, "must be at least 2, got 1 and 4 .* is 1 or -1 whatever is read"),
        ({"key_size": 4, "value_size": 1}, "must be at least 2, got 4 and 1"),
        ({"convolution": -1}, "convolution must be an integer of at least 0, got -1"),
        (
            {"rule": "sum", "negative_eigenvalues": True},
            "needs the rule delta, gated_delta, kda, gated_delta_2, got rule='sum'",
        ),
        ({"rule": "rwkv7", "negative_eigenvalues": True}, "does not go with rule='rwkv7', which has"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nn.FastWeightProgrammer(**{"embed_dim": 8, "num_heads": 2, **options})


def test_the_state_of_other_sizes_is_refused():
    x, layer = torch.zeros(2, 1, 8), nn.FastWeightProgrammer(8, 2)
    state = nn.FastWeightProgrammer(8, 4)(x)[1]
    with pytest.raises(
        ValueError, match=r"state\.memory must have shape \(1, 2, 4, 4\) for this x, got \(1, 4, 2, 2\)"
    ):
        layer(x, state)


def test_the_repr_names_what_is_not_the_default():
    layer = nn.FastWeightProgrammer(8, 2, key_size=3, feature_map="elu", convolution=2)
    assert "FastWeightProgrammer(\n  8, 2, rule='gated_delta', key_size=3, feature_map='elu'\n" in repr(layer)
    assert "ShortConvolution(20, steps=2)" in repr(layer)  # 2 heads of 2 * 3 + 4
