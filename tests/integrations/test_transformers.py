"""The models of transformers that have a fast-weight rule give the same with our kernel as without it."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fastweights.integrations.transformers
from fastweights.errors import KernelError
from fastweights.integrations.transformers import patch_transformers
from fastweights.ops import _native
from fastweights.ops.delta import gated_delta_rule, simple_gla
from fastweights.ops.selective_scan import selective_scan, selective_state_update

transformers = pytest.importorskip("transformers")
qwen3_next: Any = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LATENT: dict[str, Any] = {  # Kimi delta attention, and attention with latent keys
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
}
PLAIN: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 1,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MAMBA = PLAIN | {  # the names of Bamba, which others have taken over
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["mamba", "attention"],
    "n_routed_experts": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
}
ZAMBA: dict[str, Any] = {
    "layers_block_type": ["mamba", "hybrid"],
    "hybrid_layer_ids": [1],
    "num_mem_blocks": 1,
    "mamba_d_state": 8,
    "mamba_headdim": 8,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "adapter_rank": 4,
    "chunk_size": 16,
}
JAMBA: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "num_experts": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "use_mamba_kernels": False,
}
INDEXER = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
DELTA: dict[str, dict[str, Any]] = {
    "qwen3_next": SMALL,
    "qwen3_5_text": SMALL,
    "qwen3_5_moe_text": SMALL,
    "olmo_hybrid": SMALL,
    "qwen4_exp_text": SMALL | {f"indexer_{name}": size for name, size in zip(INDEXER, (2, 1, 16, 8, 4), strict=True)},
    "kimi_linear": SMALL | LATENT,
    "bailing_hybrid": SMALL | LATENT | {"layer_group_size": 2},
    "glm5_next": {
        "text_config": {name: size for name, size in (SMALL | LATENT).items() if not name.startswith("linear_key")}
        | {
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "head_dim": 0,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 8,
            "index_topk": 64,
            "index_head_dim": 8,
            "index_n_heads": 2,
        },
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    },
}
SECOND_MAMBA = {
    "mamba2": PLAIN | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "shared_intermediate_size": 16},
    "nemotron_h": PLAIN | NEMOTRON,
    "zamba2": PLAIN | ZAMBA,
}
FIRST_MAMBA = {"mamba": PLAIN | {"state_size": 8}, "falcon_mamba": PLAIN | {"state_size": 8}, "jamba": PLAIN | JAMBA}
# Of these, transformers' attention runs from one text into the next, or its layers are not told where texts begin.
NOT_PACKED = ("glm5_next", "granitemoehybrid", "mamba2", *FIRST_MAMBA)
STEADY = {  # a decay that stays
    "minimax": PLAIN | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "block_size": 16}
}
MODELS = DELTA | SECOND_MAMBA | FIRST_MAMBA | STEADY
INSTALLED = [name for name in MODELS if name in transformers.CONFIG_MAPPING]


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **MODELS[name])
    texts = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = transformers.AutoModelForCausalLM if texts else transformers.AutoModelForImageTextToText
    return kind.from_config(config).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of each call of our kernels."""
    steps: list[int] = []

    def count(rule: Any, dim: int | None) -> Any:
        def counted(first: Any, *args: Any, **options: Any) -> Any:
            steps.append(1 if dim is None else first.shape[dim])
            return rule(first, *args, **options)

        return counted

    for rule, dim in ((gated_delta_rule, 1), (simple_gla, 1), (selective_scan, 2), (selective_state_update, None)):
        monkeypatch.setattr(fastweights.integrations.transformers, rule.__name__, count(rule, dim))
    return steps


def tensors(steps: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return query, key, value, g and beta, with two heads of values to one of keys."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, steps, 2, 8), (2, steps, 2, 8), (2, steps, 4, 6), (2, steps, 4), (2, steps, 4)]
    query, key, value, g, beta = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [query, key, value, -g.float().abs(), beta.sigmoid()]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_model_has_the_same_logits_and_gradients(name: str, calls: list[int]) -> None:
    model = make_model(name).train()
    ids = torch.randint(3, 61, (2, 70), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def train() -> list[torch.Tensor]:
        model.zero_grad()
        results = model(input_ids=ids, attention_mask=mask, labels=ids)
        results.loss.backward()
        return [results.logits, *(part.grad for part in model.parameters() if part.grad is not None)]

    expected = train()
    assert not calls
    with patch_transformers():
        patched = train()
    assert set(calls) == {70}
    torch.testing.assert_close(patched, expected, rtol=1e-4, atol=1e-4 * expected[0].abs().max().item())
    for mine, theirs in zip(patched, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm() + 1e-7


@pytest.mark.parametrize("name", INSTALLED)
def test_a_model_generates_the_same(name: str, calls: list[int]) -> None:
    model = make_model(name)
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))

    def generate() -> Any:
        options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        return model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=8, max_new_tokens=8, **options)

    expected = generate()
    with patch_transformers():
        patched = generate()
    layers = calls.count(9)
    assert calls == [*[9] * layers, *[1] * 7 * layers]
    assert torch.equal(patched.sequences, expected.sequences)
    torch.testing.assert_close(patched.logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_function_gives_the_same(rule: str, dtype: torch.dtype, normalize: bool) -> None:
    inputs = tensors(70, dtype)
    inputs[1] = inputs[1] / 4  # without normalisation longer keys would let the state grow without bound
    state = torch.randn(2, 4, 8, 6)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": normalize}
    expected = getattr(qwen3_next, rule)(*inputs, **options)
    with patch_transformers():
        patched = getattr(qwen3_next, rule)(*inputs, **options)
        assert getattr(qwen3_next, rule)(*inputs)[1] is None
    assert [tensor.dtype for tensor in patched] == [dtype, torch.float32]
    torch.testing.assert_close(patched[0], expected[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
    torch.testing.assert_close(patched[1], expected[1], rtol=1e-4, atol=1e-4)


def test_everything_is_as_it_was_afterwards() -> None:
    model = make_model("qwen3_next")
    with patch_transformers():
        pass  # what is imported only now is imported before the comparison
    modules = [module for module in list(sys.modules.values()) if RULES[0] in getattr(module, "__dict__", {})]
    classes = [sys.modules["transformers.models.minimax.modeling_minimax"].MiniMaxLightningAttention]
    owners = (*modules, *model.modules(), *classes)
    before = [dict(vars(owner)) for owner in owners]
    patch = patch_transformers(model)
    assert {"qwen3_next", "qwen3_5", "olmo_hybrid", "minimax"} <= set(patch.models)
    assert classes[0].forward is not before[-1]["forward"]
    names = [(module, name, was[name]) for module, was in zip(modules, before, strict=False) for name in RULES]
    assert all(vars(module)[name] is not original for module, name, original in names)
    with pytest.raises(RuntimeError, match="patched already: call restore"):
        patch_transformers()
    patch.restore()
    patch.restore()
    for owner, was in zip(owners, before, strict=True):
        assert vars(owner).keys() == was.keys()
        assert all(vars(owner)[name] is value for name, value in was.items())


class OlderLayer(nn.Module):
    """A layer that keeps the function as an attribute, as those of earlier versions do."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk_gated_delta_rule = qwen3_next.torch_chunk_gated_delta_rule


def test_a_layer_that_keeps_the_function_is_patched_too(calls: list[int]) -> None:
    layer, original = OlderLayer(), qwen3_next.torch_chunk_gated_delta_rule
    with patch_transformers(nn.Sequential(layer)):
        layer.chunk_gated_delta_rule(*tensors())
        meanwhile = OlderLayer()
        meanwhile.chunk_gated_delta_rule(*tensors())
    assert len(calls) == 2
    assert layer.chunk_gated_delta_rule is original
    expected = original(*tensors())[0]
    assert torch.equal(meanwhile.chunk_gated_delta_rule(*tensors())[0], expected)
    assert len(calls) == 2


def test_a_layer_made_under_an_earlier_patch_is_patched_again(calls: list[int]) -> None:
    with patch_transformers():
        layer = OlderLayer()
    layer.chunk_gated_delta_rule(*tensors())
    assert not calls
    with patch_transformers(layer):
        layer.chunk_gated_delta_rule(*tensors())
    assert len(calls) == 1
    assert layer.chunk_gated_delta_rule is qwen3_next.torch_chunk_gated_delta_rule


def test_a_layer_of_minimax_may_be_of_a_class_of_its_own_and_keeps_its_state_exact_under_autocast() -> None:
    layer: Any = make_model("minimax").model.layers[0].self_attn
    cache = sys.modules["transformers.models.minimax.modeling_minimax"].MiniMaxCache
    layer.__class__ = type("Own", (type(layer),), {})
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))

    def read(steps: int = 200) -> torch.Tensor:
        states = cache()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for _ in range(steps):
                layer(x, None, None, past_key_values=states)
        state: torch.Tensor = states.get_linear_cache(0)
        assert state.dtype == torch.float32
        return state

    expected = read()
    with patch_transformers():
        patched = read()
    torch.testing.assert_close(patched, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


def test_what_a_function_lacks_is_named_by_itself() -> None:
    with patch_transformers(), pytest.raises(TypeError, match="missing 1 required positional argument: 'beta'"):
        qwen3_next.torch_chunk_gated_delta_rule(*tensors()[:4])


def test_tensors_elsewhere_go_to_the_function_that_was_there(calls: list[int]) -> None:
    with patch_transformers():
        outputs, _ = qwen3_next.torch_chunk_gated_delta_rule(*(tensor.to("meta") for tensor in tensors()))
    assert outputs.shape == (2, 5, 4, 6)
    assert not calls


def test_options_are_taken_by_their_places_too(calls: list[int]) -> None:
    state = torch.randn(2, 4, 8, 6)
    for rule, options in zip(RULES, ((64, state, True, True), (state, True, True)), strict=True):
        expected = getattr(qwen3_next, rule)(*tensors(), *options)
        with patch_transformers():
            patched = getattr(qwen3_next, rule)(*tensors(), *options)
        torch.testing.assert_close(patched, expected, rtol=1e-4, atol=1e-4)
    assert calls == [5, 5]


@pytest.mark.parametrize("name", [name for name in INSTALLED if name not in NOT_PACKED])
@pytest.mark.parametrize("told", ["cu_seq_lens_q", "seq_idx", "both"])
def test_packed_texts_are_separate_ones(name: str, told: str) -> None:
    model = make_model(name)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 61, (length,), generator=generator) for length in (9, 2, 70)]
    collate = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=told != "seq_idx", return_seq_idx=told != "cu_seq_lens_q", return_tensors="pt"
    )
    with patch_transformers():
        separate = [model(text[None], labels=text[None]) for text in texts]
        packed = model(**collate([{"input_ids": text.tolist()} for text in texts]), use_cache=False)
        model.zero_grad()
        packed.loss.backward()
        gradients = [part.grad.clone() for part in model.parameters() if part.grad is not None]
        model.zero_grad()
        counts = torch.tensor([len(text) - 1.0 for text in texts])
        sum(result.loss * count / counts.sum() for result, count in zip(separate, counts, strict=True)).backward()
    torch.testing.assert_close(packed.logits, torch.cat([result.logits for result in separate], 1), rtol=0, atol=1e-5)
    expected = [part.grad for part in model.parameters() if part.grad is not None]
    for mine, true in zip(gradients, expected, strict=True):
        assert (mine - true).norm() <= 1e-4 * true.norm() + 1e-7


@pytest.mark.parametrize("told", ["cu_seq_lens_q", "cu_seqlens", "seq_idx"])
def test_the_decay_of_mamba2_takes_packed_sequences(told: str) -> None:
    mamba2: Any = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    generator = torch.Generator().manual_seed(0)
    x, dt = torch.randn(1, 9, 8, 4, generator=generator), torch.randn(1, 9, 8, generator=generator)
    keys, queries = torch.randn(2, 1, 9, 2, 6, generator=generator)
    rates, bias = -torch.rand(8, generator=generator), torch.randn(8, generator=generator)
    options: dict[str, Any] = {"chunk_size": 4, "D": torch.ones(8), "dt_bias": bias, "dt_softplus": True}

    def scan(start: int, end: int, **more: Any) -> Any:
        parts = (tensor[:, start:end] for tensor in (x, dt))
        return mamba2.mamba2_chunk_scan(*parts, rates, keys[:, start:end], queries[:, start:end], **options, **more)

    expected = torch.cat((scan(0, 2), scan(2, 9)), 1)
    bounds = torch.tensor([[0] * 2 + [1] * 7]) if told == "seq_idx" else torch.tensor([0, 2, 9])
    with patch_transformers():
        torch.testing.assert_close(scan(0, 9, **{told: bounds}), expected)


def test_the_convolution_of_a_cache_begins_with_the_inputs_before() -> None:
    x, weight = torch.randn(1, 6, 15), torch.randn(6, 4)
    convolve, bounds = qwen3_next.causal_conv1d_fn, torch.tensor([0, 5, 5, 12])
    expected = torch.cat((convolve(x[:, :, :8], weight)[:, :, 3:], convolve(x[:, :, 8:], weight)), 2)
    with patch_transformers():
        packed = qwen3_next.causal_conv1d_fn(x, weight, cu_seq_lens_q=bounds)
    torch.testing.assert_close(packed[:, :, 3:], expected)


@pytest.mark.parametrize("activation", [None, "silu", "swish", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_gives_the_same(activation: str | None, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(2, 70, 6), torch.randn(6, 4), torch.randn(6)
    turned, convolve = x.to(dtype).transpose(1, 2).requires_grad_(), qwen3_next.causal_conv1d_fn
    given = (turned, weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_())
    expected = convolve(*given, activation=activation)
    with patch_transformers():
        y = qwen3_next.causal_conv1d_fn(*given, activation=activation)
    loose: dict[str, Any] = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(y, expected, **loose)
    grad = torch.randn(y.shape).to(dtype)
    mine, theirs = (torch.autograd.grad(each, given, grad) for each in (y, expected))
    torch.testing.assert_close(mine[0], theirs[0], **loose)
    for ours, own in zip(mine[1:], theirs[1:], strict=True):
        assert (ours - own).float().norm() <= (0.05 if dtype == torch.bfloat16 else 1e-5) * own.float().norm()


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("held", "steps"), [(3, 1), (4, 1), (6, 1), (4, 2)])
def test_the_convolution_of_a_token_gives_the_same(
    held: int, steps: int, dtype: torch.dtype, activation: str | None
) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 6, steps), (6, 4), (6,)))
    update, state = qwen3_next.causal_conv1d_update, torch.randn(2, 6, held).to(dtype)
    states = state.clone(), state.clone()
    expected = update(x, states[0], weight, bias, activation=activation)
    with patch_transformers():
        y = qwen3_next.causal_conv1d_update(x, states[1], weight, bias, activation)
    # Processors differ in where a convolution in half precision rounds.
    loose: dict[str, Any] = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(y, expected, **loose)
    assert torch.equal(*states)


@pytest.mark.parametrize("name", [name for name in NOT_PACKED if name in INSTALLED])
@pytest.mark.parametrize("told", ["cu_seq_lens_q", "seq_idx"])
def test_a_model_that_cannot_keep_packed_texts_apart_refuses_them(name: str, told: str) -> None:
    model = make_model(name)
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {told: bounds if told == "cu_seq_lens_q" else (torch.arange(9) >= 4).int()[None]}
    with (
        patch_transformers(),
        pytest.raises(ValueError, match=r"packed sequences .* give each sequence a row of its own"),
    ):
        model(input_ids=ids, use_cache=False, **packed)


@pytest.mark.parametrize("name", [name for name in FIRST_MAMBA if name in INSTALLED])
def test_a_scan_that_is_not_told_of_packed_sequences_refuses_them(name: str) -> None:
    module = sys.modules[type(make_model(name)).__module__]
    with (
        patch_transformers(),
        pytest.raises(ValueError, match=r"packed sequences .* give each sequence a row of its own"),
    ):
        module.causal_conv1d_fn(torch.randn(1, 6, 5), torch.randn(6, 4), seq_idx=torch.tensor([[0, 0, 1, 1, 1]]))


@pytest.mark.parametrize("name", [name for name in INSTALLED if name not in NOT_PACKED])
def test_packed_texts_with_a_cache_are_refused(name: str) -> None:
    model = make_model(name)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    batch = collate([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10]}])
    with patch_transformers(), pytest.raises(ValueError, match=r"packed sequences .* need use_cache=False"):
        model(**batch)


def test_wrong_bounds_are_refused() -> None:
    model = make_model("qwen3_next")
    ids = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.cat((torch.arange(5), torch.arange(7)))[None], "use_cache": False}
    with patch_transformers():
        for wrong in ([0, 5, 11], [0, 13], [0, 7, 5, 12]):
            with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to the number of steps"):
                model(**batch, cu_seq_lens_q=torch.tensor(wrong, dtype=torch.int32))


@pytest.mark.parametrize("model", ["Qwen/Qwen3-Next-80B-A3B-Instruct", OlderLayer])
def test_what_is_no_loaded_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a loaded model, a torch\.nn\.Module, got .*(Qwen3-Next|Older)"):
        patch_transformers(model)
    assert not hasattr(qwen3_next.torch_chunk_gated_delta_rule, "_patch")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    before = qwen3_next.torch_chunk_gated_delta_rule
    with monkeypatch.context() as context:
        context.setattr(_native, "MISSING", "it was not built")
        with pytest.raises(KernelError, match="needs the C\\+\\+ kernels, but it was not built"):
            patch_transformers()
    old = ModuleType("transformers")
    old.__file__, old.__version__ = str(tmp_path / "__init__.py"), "4.40.0"  # type: ignore[attr-defined]
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "transformers", old)
        with pytest.raises(ImportError, match=r"transformers 4\.40\.0 has no model with a fast-weight rule"):
            patch_transformers()
        context.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match="needs transformers: run `pip install"):
            patch_transformers()
    assert qwen3_next.torch_chunk_gated_delta_rule is before
