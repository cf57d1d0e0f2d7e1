"""The bench of whole models: parity decides, models without the rule are refused, and both rivals run in each mode."""

import functools
import sys

import pytest
import torch
import transformers

from fastweights.bench import gated_models
from fastweights.bench.gated_models import (
    ALONE,
    COLUMNS,
    FUNCTIONS,
    MADE,
    MODES,
    OURS,
    THEIRS,
    WIDE,
    ModelCase,
    ModelSelection,
)
from fastweights.bench.run import timing_columns
from fastweights.errors import FastWeightsError
from fastweights.ops.delta import gated_delta_rule
from tests.memory.language_models import make_model

from .helpers import make_row


@pytest.fixture(autouse=True)
def empty_cache():
    gated_models.load.cache_clear()
    yield
    gated_models.load.cache_clear()


# A wider model takes three times as long and runs the same code.
@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.slow) if model.endswith(WIDE) else model for model in MADE]
)
@pytest.mark.parametrize("mode", MODES)
def test_both_run_every_mode_and_agree(model, mode):
    case = ModelCase(model, 70, mode)
    gated_models.require_parity(case)
    calls, skipped = gated_models.rivals(case, ModelSelection())
    alone = mode == "training" and "minimax" not in model  # whose rule is in no function of its own
    assert list(calls) == [OURS, THEIRS, *(ALONE.values() if alone else ())]
    assert not skipped
    for call in calls.values():
        call()
    assert all(each.grad is None for each in gated_models.load(model).parameters())


@pytest.mark.parametrize("name", ["kimi_linear", "mamba2"])
def test_the_rule_alone_is_every_layer_of_the_pass_and_done_by_who_is_timed(name, monkeypatch):
    model = gated_models.load(name)
    calls = gated_models.record_rule(model, torch.arange(3, 40)[None])
    rule = {"kimi_linear": "chunk_kimi_delta_attention", "mamba2": "mamba2_chunk_scan"}[name]
    assert [call.name for call in calls] == [rule] * (4 if name == "mamba2" else 3)
    seen = []
    module = sys.modules[calls[0].module]
    function = getattr(module, rule)

    def theirs(*arguments, **options):
        seen.append(options)
        return function(*arguments, **options)

    functools.update_wrapper(theirs, function)
    monkeypatch.setattr(module, rule, theirs)
    case = ModelCase(name, 37)
    gated_models.prepare_rule(case, OURS)()
    assert not seen
    gated_models.prepare_rule(case, THEIRS)()
    assert len(seen) == len(calls)
    assert getattr(module, rule) is theirs


def test_a_scan_that_would_take_hours_is_left_out_with_the_reason():
    case = ModelCase("mamba", 257)
    calls, skipped = gated_models.rivals(case, ModelSelection())
    assert list(calls) == [OURS, ALONE[OURS]]
    assert skipped[THEIRS] == "takes minutes at more than 256 steps: it grows with their square"
    columns = timing_columns(gated_models)
    row = make_row(columns, THEIRS, 1.0, model="mamba", steps=257, mode="training")
    rows = [
        row | {"milliseconds": "", "skipped": skipped[THEIRS]},
        make_row(columns, OURS, 7.0, model="mamba", steps=257, mode="training"),
    ]
    assert "| mamba |" in (told := gated_models.models_table(rows))
    assert "transformers at model=mamba, T=257: takes minutes" in told
    assert "\n**AVX2**\n" in told
    wide = make_row(columns, OURS, 3.0, model="mamba", steps=257, mode="training", tokens=64)
    told = gated_models.models_table([*rows, wide | {"kernel": "in use (x86-64-v4)"}])
    first, _, second = told.partition("**AVX2**")
    assert "**AVX-512**" in first
    assert "| 257 | - | 3 |" in first
    assert "Threads: 1; tokens decoded: 64." in first
    assert "| 257 | - | 7 |" in second


def test_each_model_has_its_newest_measurement():
    columns = timing_columns(gated_models)

    def row(model: str, milliseconds: float, commit: str) -> dict[str, str]:
        return make_row(columns, OURS, milliseconds, model=model, steps=9, mode="training") | {"commit": commit}

    told = gated_models.models_table(
        [row("mamba", 8.0, "old"), row("qwen3_next", 5.0, "old"), row("mamba", 7.0, "new")]
    )
    lines = [line.split(" | ")[0:5:2] for line in told.splitlines() if line.startswith("| ") and "model" not in line]
    assert [line[0] for line in lines] == ["| qwen3_next", "| mamba"]
    assert "| 9 | - | 7 |" in told
    assert "| 9 | - | 8 |" not in told
    assert "commit old, 2026-01-02 (qwen3_next); " in told
    assert "commit new, 2026-01-02 (mamba)." in told


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    right = gated_delta_rule

    def wrong(*tensors, **options):
        outputs, state = right(*tensors, **options)
        return outputs * 1.01, state

    monkeypatch.setattr("fastweights.integrations.transformers.gated_delta_rule", wrong)
    with pytest.raises(FastWeightsError, match=r"parity is red.*the logits of qwen3_5_text differ by"):
        gated_models.require_parity(ModelCase(steps=40))


def test_your_own_model_is_loaded_and_one_without_the_rule_is_refused(tmp_path):
    config = transformers.AutoConfig.for_model(**MADE["qwen3_next"])
    for name, model in {
        "gated": transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16),
        "llama": make_model(),
    }.items():
        model.save_pretrained(tmp_path / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer()).save_pretrained(tmp_path / name)
    case = ModelCase(str(tmp_path / "gated"), 20)
    gated_models.require_parity(case)
    assert gated_models.load(case.model).dtype == torch.bfloat16
    with pytest.raises(FastWeightsError, match="is a LlamaForCausalLM, which has no rule of ours: our kernels chang"):
        gated_models.require_parity(ModelCase(str(tmp_path / "llama"), 20))
    with pytest.raises(FastWeightsError, match="nothing-here"):
        gated_models.require_parity(ModelCase(str(tmp_path / "nothing-here"), 20))


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("kimi_linaer", "there is no folder kimi_linaer", "kimi_linear"),
        ("tiiuae/falcon-mamba-7b", "there is no folder tiiuae/falcon-mamba-7b, the hub cannot be asked", None),
        ("kimi_linaer", "language models need transformers", None),
        ("llama", "there is no folder llama", None),
    ],
)
def test_a_mistyped_name_of_a_made_up_model_is_asked_about(monkeypatch, name, error, hint):
    def fail(_name):
        raise FastWeightsError(error)

    monkeypatch.setattr(gated_models, "load_language_model", fail)
    told = f"{error}; did you mean {hint}, which is made up?" if hint else error
    with pytest.raises(FastWeightsError) as caught:
        gated_models.load(name)
    assert f"{caught.value}" == told


def _tokenizer():
    import tokenizers

    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_table_names_the_function_that_the_layers_call(name):
    calls = gated_models.record_rule(gated_models.load(name), torch.arange(3, 9)[None])
    assert {call.name for call in calls} == {FUNCTIONS[name]}


def test_the_table_has_a_line_for_each_model_and_length():
    columns = timing_columns(gated_models)
    took = {"training": (100.0, 135.0, 9.0, 54.0), "inference": (10.0, 12.0), "decoding": (10.0, 15.0)}
    rows = [
        make_row(columns, rival, value, model="qwen3_next", batch=1, steps=1 if mode == "decoding" else 2048, mode=mode)
        for mode, times in took.items()
        for rival, value in zip((OURS, THEIRS, *ALONE.values()), times, strict=False)
    ]
    *_, line, _, beneath = gated_models.models_table(rows).splitlines()
    assert beneath == "Threads: 1; tokens decoded: 1."
    assert line == (
        "| qwen3_next | `torch_chunk_gated_delta_rule` | 2048 | 135 | 100 | 1.35 times | 40 % | 9 % | 1.20 times "
        "| 1.50 times |"
    )
    assert set(COLUMNS) <= set(columns)
