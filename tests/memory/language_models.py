"""Causal language models of many architectures, tiny and with random weights."""

from typing import Any

import torch
import transformers

CLASSES = 61
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_SMALL: dict[str, Any] = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
} | _TOKENS
_STATES: dict[str, Any] = {"vocab_size": CLASSES, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4} | _TOKENS


def _config(name: str, classes: int = CLASSES) -> Any:
    auto = transformers.AutoConfig.for_model
    if name in ("llama", "qwen2", "mistral", "phi", "granite", "gemma2", "cohere", "gpt_neox", "olmo2"):
        more: dict[str, dict[str, Any]] = {
            "granite": {"logits_scaling": 3.0},
            "gemma2": {"final_logit_softcapping": 0.5, "sliding_window": 8, "query_pre_attn_scalar": 8},
            "cohere": {"logit_scale": 2.0},
            "qwen2": {"tie_word_embeddings": True},
        }
        return auto(name, **_SMALL | {"vocab_size": classes} | more.get(name, {}))
    if name == "gpt2":
        return auto(name, vocab_size=CLASSES, n_embd=16, n_layer=2, n_head=2, n_positions=64, **_TOKENS)
    if name == "opt":
        small = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        return auto(name, vocab_size=CLASSES, word_embed_proj_dim=8, max_position_embeddings=64, **small, **_TOKENS)
    if name == "bloom":
        return auto(name, vocab_size=CLASSES, hidden_size=16, n_layer=2, n_head=2, **_TOKENS)
    if name == "rwkv":
        return auto(name, vocab_size=CLASSES, hidden_size=16, num_hidden_layers=2, context_length=64, **_TOKENS)
    return auto(name, **_STATES)  # mamba


# Tied and untied heads, one with a bias (phi), scaled and capped logits (granite, cohere, gemma2), and no attention.
ARCHITECTURES = (
    "llama", "gpt2", "qwen2", "phi", "granite", "gemma2", "cohere", "gpt_neox", "opt", "bloom", "mamba", "rwkv",
)  # fmt: skip


def make_model(
    name: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = CLASSES
) -> Any:
    """Return a model whose predictions are sharp enough that neighbours differ; `vocab_size` is of a Llama."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_config(name, vocab_size)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model
