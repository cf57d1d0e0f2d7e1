"""`fastweights bench gated-models`: whole models with layers of fast weights, with our kernels and as they are."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.bench.parity import allowed_error, distance, parity_error
from fastweights.bench.problems import Calls
from fastweights.bench.published import (
    NOTHING,
    Cell,
    Row,
    group,
    last_of_each,
    left_out,
    markdown,
    measured,
    places,
    show,
    show_ratio,
)
from fastweights.bench.run import Line
from fastweights.errors import FastWeightsError, find_nearest
from fastweights.integrations.transformers import patch_transformers
from fastweights.memory.language_model.loading import load_language_model

OURS, THEIRS = "fastweights", "transformers"
ALONE = {rival: f"rule alone, {rival}" for rival in (OURS, THEIRS)}  # the rule of a training pass, without the rest
DECODING = "decoding"
MODES = ("training", "inference", DECODING)  # forward plus backward; forward alone; one token after another
TOKENS = 64  # tokens decoded in a call
PROMPT = 16
PARITY_STEPS = 256
SCANS, LONGEST_SCAN = ("mamba", "falcon_mamba", "jamba", "zamba"), 256  # models with the scan of Mamba, and steps

BASE = ("fastweights", OURS)
COLUMNS = ["model", "batch", "steps", "mode", "rival", "tokens"]
UNIT = "milliseconds of a pass, or of a decoded token"
PER = "tokens"

# Models of four layers, one of them of attention, with random weights.
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
LATENT = {  # Kimi delta attention, and attention with latent keys
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 128,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
}
PLAIN = {name: SIZES[name] for name in SIZES if not name.startswith(("linear", "layer_types", "head_dim"))}
MAMBA = PLAIN | {  # the names of Bamba, which others have taken over
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
}
NEMOTRON = PLAIN | {
    "layers_block_type": ["mamba"] * 3 + ["attention"],
    "head_dim": 128,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "ssm_state_size": 128,
}
ZAMBA = PLAIN | {
    "layers_block_type": ["mamba"] * 3 + ["hybrid"],
    "hybrid_layer_ids": [3],
    "num_mem_blocks": 1,
    "mamba_d_state": 128,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "n_mamba_heads": 16,
}
JAMBA = PLAIN | {"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 3, "use_mamba_kernels": False}
HYBRID = {"layer_types": ["mamba"] * 3 + ["attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
GLM = {name: size for name, size in (SIZES | LATENT).items() if not name.startswith(("linear_key", "linear_value"))} | {
    "model_type": "glm5_next_text",
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
    "indexer_types": ["full"] * 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "head_dim": 0,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 0,
    "qk_nope_head_dim": 128,
    "index_topk": 64,
    "index_head_dim": 64,
    "index_n_heads": 4,
}
PICTURES = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "projection_intermediate_size": 64}
DELTA_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SIZES,
    "qwen3_next": SIZES | EXPERTS,
    "olmo_hybrid": SIZES,
    "kimi_linear": SIZES | LATENT,
    "bailing_hybrid": SIZES | LATENT | {"layer_group_size": 4, "n_group": 1, "topk_group": 1},
    "glm5_next": {"text_config": GLM, "vision_config": PICTURES},  # which gets texts alone
}
MAMBA_MODELS: dict[str, dict[str, Any]] = {
    "mamba2": PLAIN | {"state_size": 128, "num_heads": 16, "head_dim": 64, "n_groups": 1},
    "bamba": MAMBA | {"attn_layer_indices": [3]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 1024},
    "granitemoehybrid": MAMBA | HYBRID,
    "nemotron_h": NEMOTRON,
    "zamba2": ZAMBA,
    "mamba": PLAIN,
    "falcon_mamba": PLAIN,
    "jamba": JAMBA,
}
NARROW = DELTA_MODELS | MAMBA_MODELS | {"minimax": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}}
FUNCTIONS = {  # the function of a model's rule, in its module of transformers; that of MiniMax is part of its layer
    model: function
    for function, models in {
        "torch_chunk_gated_delta_rule": ("qwen3_5_text", "qwen3_next", "olmo_hybrid"),
        "chunk_kimi_delta_attention": ("kimi_linear", "bailing_hybrid", "glm5_next"),
        "mamba2_chunk_scan": ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
        "mamba_selective_scan": ("mamba", "falcon_mamba", "jamba"),
    }.items()
    for model in models
}
WIDENED = (  # the sizes that a model twice as wide has twice as large; its heads are as wide as before
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_ssm"),
    *("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "num_heads"),
    *("linear_num_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
)


def widen(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model with 1,024 hidden units in place of 512."""
    if "text_config" in sizes:
        return sizes | {"text_config": widen(sizes["text_config"])}
    return {name: 2 * size if name in WIDENED else size for name, size in sizes.items()}


WIDE = "-1024"
MADE = {
    f"{name}{suffix}": {"model_type": name} | change(sizes)
    for suffix, change in (("", dict), (WIDE, widen))
    for name, sizes in NARROW.items()
}


@dataclass(frozen=True)
class ModelCase:
    """A whole model in one mode."""

    model: str = "qwen3_5_text"
    steps: int = 2048
    mode: str = "training"
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.model}, T={self.steps}, {self.mode}"

    def tokens(self, rival: str) -> int:
        """Return by how much a call's time is divided."""
        return TOKENS if self.mode == DECODING else 1


@dataclass(frozen=True)
class ModelSelection:
    """The cases that a run of the command times: passes at every length, and decoding, of every model."""

    threads: tuple[int, ...] = (1, 2)
    models: tuple[str, ...] = ("qwen3_5_text",)
    steps: tuple[int, ...] = (2048,)
    modes: tuple[str, ...] = MODES[:2]
    rounds: int = 15
    batch: int = 1
    budget: float = 60.0  # seconds that the rounds of one case may take, of both rivals together

    def cases(self) -> list[ModelCase]:
        passes = itertools.product(self.models, self.steps, self.modes)
        decoding = (ModelCase(model, 1, DECODING, self.batch) for model in self.models)
        return [*(ModelCase(*each, self.batch) for each in passes), *decoding]


QUICK = ModelSelection()
FULL = ModelSelection(models=tuple(NARROW), steps=(512,))


@functools.lru_cache(maxsize=1)  # a large model is loaded once for all of its cases
def load(name: str) -> Any:
    """Return a model of transformers: one that is made up, or that of a folder or a name on the hub, in its precision.

    Raises:
        FastWeightsError: there is no such model, or transformers is not installed.
    """
    if name in MADE and not Path(name).exists():
        try:
            from transformers import (
                MODEL_FOR_CAUSAL_LM_MAPPING,
                AutoConfig,
                AutoModelForCausalLM,
                AutoModelForImageTextToText,
            )
        except ImportError as error:
            raise FastWeightsError("bench gated-models needs transformers: run `pip install '.[hf]'`") from error
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = AutoConfig.for_model(**MADE[name])
            kind = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
            return kind.from_config(config).eval()
    try:
        model, _ = load_language_model(name)
    except FastWeightsError as error:
        near = find_nearest(name, MADE, cutoff=0.75)
        if not near or "/" in name or not f"{error}".startswith("there is no folder"):
            raise
        raise FastWeightsError(f"{error}; did you mean {near[0]}, which is made up?") from error
    return model


def draw_text(model: Any, case: ModelCase, steps: int) -> Tensor:
    """Return a text of tokens of a model [batch,steps]."""
    generator = torch.Generator().manual_seed(steps)
    most = model.config.get_text_config().vocab_size
    return torch.randint(3, most, (case.batch, steps), generator=generator)


def computing(rival: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the models of transformers compute as a rival does."""
    return patch_transformers() if rival == OURS else contextlib.nullcontext()


class RuleCall(NamedTuple):
    """A call of a rule's function: what one layer gave it in a pass."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def train(self) -> None:
        """Run the function that has this name now, forward and backward."""
        outputs = getattr(sys.modules[self.module], self.name)(*self.arguments, **self.options)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        inputs = [each for each in (*self.arguments, *self.options.values()) if isinstance(each, Tensor)]
        leaves = [each for each in inputs if each.requires_grad]
        torch.autograd.grad(first, leaves, torch.ones_like(first))


def record_rule(model: Any, ids: Tensor) -> list[RuleCall]:
    """Return what each layer with a rule gave its function in a training pass; the tensors are leaves."""
    calls: list[RuleCall] = []

    def keep(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    def record(module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*arguments: Any, **options: Any) -> Any:
            kept = tuple(map(keep, arguments)), {name: keep(value) for name, value in options.items()}
            calls.append(RuleCall(module, name, *kept))
            return function(*arguments, **options)

        return recorded

    with patch_transformers() as patch:
        ours = [(module, name, getattr(sys.modules[module], name)) for module, name in patch.rules]
        try:
            for module, name, function in ours:
                setattr(sys.modules[module], name, record(module, name, function))
            model(input_ids=ids, labels=ids, use_cache=False)
        finally:
            for module, name, function in ours:
                setattr(sys.modules[module], name, function)
    return calls


def prepare(case: ModelCase, rival: str) -> Callable[[], None]:
    """Return a pass of a rival, or its decoding of some tokens after a prompt."""
    model = load(case.model)
    ids = draw_text(model, case, PROMPT if case.mode == DECODING else case.steps)

    def decode() -> None:
        with computing(rival):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )

    def infer() -> None:
        with computing(rival), torch.inference_mode():
            model(input_ids=ids, use_cache=False)

    def train() -> None:
        with computing(rival):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return {"training": train, "inference": infer, DECODING: decode}[case.mode]


def prepare_rule(case: ModelCase, rival: str) -> Callable[[], None]:
    """Return the rule of every layer of a training pass, forward and backward, without the rest of the model."""
    model = load(case.model)
    calls = record_rule(model, draw_text(model, case, case.steps))

    def train() -> None:
        with computing(rival):
            for call in calls:
                call.train()

    return train


def rivals(case: ModelCase, selection: ModelSelection) -> tuple[Calls, dict[str, str]]:
    """Return the calls of both, of a training pass also those of the rule alone, and why transformers' is left out."""
    if case.mode != "training":
        return {rival: prepare(case, rival) for rival in ALONE}, {}
    skipped: dict[str, str] = {}
    if case.steps > LONGEST_SCAN and load(case.model).config.get_text_config().model_type in SCANS:
        reason = f"takes minutes at more than {LONGEST_SCAN} steps: it grows with their square"
        skipped = {THEIRS: reason, ALONE[THEIRS]: reason}
    timed = [rival for rival in ALONE if rival not in skipped]
    calls: Calls = {rival: prepare(case, rival) for rival in timed}
    model = load(case.model)
    if record_rule(model, draw_text(model, case, PROMPT)):  # a layer may have its rule in no function of its own
        calls |= {ALONE[rival]: prepare_rule(case, rival) for rival in timed}
    return calls, skipped


def require_parity(case: ModelCase) -> None:
    """Raise FastWeightsError where the logits of the two differ by more than rounding, or our kernel is not called.

    They are compared in single precision: in half precision one rounding changes an expert, and with it the logits.

    The gradients of the rule are compared with float64 by `bench delta`; transformers' own are less exact.
    """
    model = load(case.model)
    ids = draw_text(model, case, min(max(case.steps, PROMPT), PARITY_STEPS))
    logits = {}
    with _in_single_precision(model):
        for rival in (OURS, THEIRS):
            with computing(rival), torch.inference_mode():
                logits[rival] = model(input_ids=ids, use_cache=False).logits
    error = distance(logits[OURS], logits[THEIRS].double())
    if not error <= allowed_error(0):  # a NaN is red
        raise parity_error(f"the logits of {case.model} differ by {error:.1e}")
    if not _has_rule(model):
        raise FastWeightsError(
            f"{case.model} is a {type(model).__name__}, which has no rule of ours: our kernels change nothing there"
        )


@contextlib.contextmanager
def _in_single_precision(model: Any) -> Iterator[None]:
    """Let a model compute in single precision, and give it its own numbers back."""
    own = [(part, part.data) for part in (*model.parameters(), *model.buffers()) if part.is_floating_point()]
    for part, data in own:
        part.data = data.float()
    try:
        yield
    finally:
        for part, data in own:
            part.data = data


def _has_rule(model: Any) -> bool:
    with patch_transformers() as patch:
        return any(type(model).__module__.split(".")[-1] == f"modeling_{name}" for name in patch.models)


def lines(case: ModelCase) -> list[Line]:
    """Return the line that is printed for a case."""
    sizes = ("threads", 7, "threads"), ("model", 14, "model"), ("T", 5, "steps"), ("mode", 9, "mode")
    times = ("transformers", 12, show(THEIRS)), ("ours", 9, show(OURS))
    shares = ("rule before", 11, show_share(THEIRS)), ("rule now", 8, show_share(OURS))
    return [[*sizes, *times, ("transformers/ours", 17, show_ratio(THEIRS, OURS)), *shares]]


def show_share(rival: str) -> Cell:
    """Return a table's cell: how much of a training pass the rule takes, as a percentage."""
    alone = ALONE[rival]

    def cell(_: Mapping[str, Any], values: Mapping[str, float]) -> str:
        return f"{100 * values[alone] / values[rival]:.0f} %" if {alone, rival} <= values.keys() else NOTHING

    return cell


def models_table(rows: list[Row]) -> str:
    """Return a table for each set of instructions, with a line for each model and length: times, and what is faster."""
    levels = last_of_each(rows, "model", tuple(MADE))
    title = (
        "Milliseconds, the median, in float32; batch 1, models of four layers with 512 hidden units, or 1,024. "
        f"{places(levels, 'model')}."
    )
    return "\n".join([title, *(f"\n**{name}**\n\n{_models_table(of_level)}" for name, of_level in levels.items())])


def _models_table(rows: list[Row]) -> str:
    lines = []
    passes = [row for row in rows if row["mode"] != DECODING]
    for (model, steps), of_case in group(passes, ("model", "steps"), words=None).items():
        times = {mode: measured(row for row in of_case if row["mode"] == mode) for mode in MODES}
        times[DECODING] = measured(row for row in rows if row["model"] == model and row["mode"] == DECODING)
        cells = [cell(of_case[0], times[mode]) for mode, cell in CELLS.values()]
        function = FUNCTIONS.get(model.removesuffix(WIDE))
        lines.append([model, f"`{function}`" if function else NOTHING, steps, *cells])
    tokens = max(int(row["tokens"] or 1) for row in rows)
    skipped = f"\nThreads: {rows[-1]['threads']}; tokens decoded: {tokens}.\n"
    skipped += left_out(rows, {"model": "model", "T": "steps"})
    return f"{markdown(['model', 'function of transformers', 'T', *CELLS], lines)}{skipped}"


CELLS = {  # of what pass, and the cell
    "training, transformers": ("training", show(THEIRS, digits=0)),
    "with our kernels": ("training", show(OURS, digits=0)),
    "training": ("training", show_ratio(THEIRS, OURS, 2, " times")),
    "the rule's share before": ("training", show_share(THEIRS)),
    "its share now": ("training", show_share(OURS)),
    "forward alone": ("inference", show_ratio(THEIRS, OURS, 2, " times")),
    "decoding": (DECODING, show_ratio(THEIRS, OURS, 2, " times")),
}
