"""The bench of the delta family: what it compares before it times, and its table."""

from typing import Any

import pytest
import torch

from fastweights.bench import delta
from fastweights.bench.delta import EAGER, LAYER, OURS, TRANSFORMERS, DeltaCase, DeltaProblem, require_parity
from fastweights.bench.process import can_measure_peak, measure_peak
from fastweights.bench.rules import GATED, KIMI, MAMBA, MAMBA2, RULES, RWKV7
from fastweights.errors import FastWeightsError
from tests.bench.helpers import make_row

SMALL = DeltaCase(70, hidden_size=4, batch=2, heads=3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", delta.MODES)
def test_all_rivals_agree_at_every_step(mode, rule):
    require_parity(DeltaCase(1 if mode == delta.DECODING else 70, mode, hidden_size=4, batch=2, heads=3, rule=rule))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("factor", [1.0001, torch.nan])
def test_a_rule_that_errs_is_not_timed(index, factor, monkeypatch):
    find_rule = delta.find_rule

    def find_wrong(case: DeltaCase, rival: str) -> Any:
        rule = find_rule(case, rival)

        def wrong(*inputs):
            results = list(rule(*inputs))
            results[index] = results[index] * factor
            return tuple(results)

        return wrong if rival == OURS else rule

    monkeypatch.setattr(delta, "find_rule", find_wrong)
    what = ("the outputs", "the last state")[index]
    with pytest.raises(
        FastWeightsError,
        match=f"nothing is timed: {what} of fastweights at gated delta, T=70, state=3 x 4 x 4, training",
    ):
        require_parity(SMALL)


def test_a_pass_leaves_the_problem_as_it_was():
    problem = DeltaProblem(SMALL)
    before = [tensor.clone() for tensor in problem.inputs]
    for rival in (OURS, LAYER, EAGER):
        problem.call(rival)()
    for tensor, kept in zip(problem.inputs, before, strict=True):
        assert torch.equal(tensor, kept)
        assert tensor.grad is None


def test_plain_pytorch_is_left_out_where_it_takes_minutes_or_too_much_memory():
    assert delta.explain_absence(DeltaCase(512), OURS) is None
    assert delta.explain_absence(DeltaCase(4096), EAGER) == "takes minutes at more than 512 steps"
    kimi = DeltaCase(4096, rule=KIMI)
    assert delta.explain_absence(kimi, TRANSFORMERS) == "takes minutes at more than 512 steps"
    assert delta.explain_absence(kimi, OURS) is None
    assert delta.count_kept_bytes(DeltaCase(512), EAGER) == 3 * 4 * 16 * 128**2 * 512
    assert delta.count_kept_bytes(DeltaCase(512, rule=MAMBA2), TRANSFORMERS) == 4 * 9 * 256 * 512 * 64


def test_a_rule_has_the_rivals_that_know_it():
    assert TRANSFORMERS not in delta.list_rivals(DeltaCase(rule=RWKV7))
    assert LAYER in delta.list_rivals(DeltaCase(rule=RWKV7))
    assert LAYER not in delta.list_rivals(DeltaCase(rule=MAMBA2))


def row(rival: str, value: float | None, **more: Any) -> dict[str, str]:
    sizes = {
        "rule": GATED,
        "batch": 1,
        "steps": 4096,
        "heads": 16,
        "hidden_size": 128,
        "mode": "training",
        "tokens": 1,
    }
    return make_row(delta.COLUMNS, rival, value, **sizes | more)


def test_times_are_a_table():
    token = {"steps": 1, "mode": "decoding", "tokens": 20}
    rows = [row(OURS, 0.2, **token), row(TRANSFORMERS, 1, **token)]
    rows += [row(OURS, 500), row(LAYER, 800), row(TRANSFORMERS, 4000), row(EAGER, None, skipped="is slow")]
    wide = {"kernel": "in use (x86-64-v4)", "processor": "Slide rule", "commit": "before"}
    rows = [row(OURS, 100, **wide), row(TRANSFORMERS, 1000, **wide), *rows]
    text = delta.times_table(rows)
    where = "AVX-512: Slide rule, PyTorch 2.13.0, commit before, 2026-01-02; AVX2: Abacus, "
    assert f"batch 1. {where}" in text
    assert text.splitlines()[4:] == [
        "| gated delta | training | 1 | 4096 | 128 | 16 x 128 x 128 | AVX-512 | 100.0 | - | - | 1,000 | 10.0 times |",
        "| gated delta | training | 1 | 4096 | 128 | 16 x 128 x 128 | AVX2 | 500.0 | 800.0 | - | 4,000 | 8.0 times |",
        "| gated delta | decoding | 1 | 1 | 128 | 16 x 128 x 128 | AVX2 | 0.200 | - | - | 1.000 | 5.0 times |",
        "",
        "Not measured: eager at rule=gated delta, T=4096, features=128: is slow.",
    ]


def test_each_rule_has_its_newest_measurement():
    rows = [row(OURS, 100), row(OURS, 7, rule=KIMI), row(OURS, 90, commit="later")]
    text = delta.times_table(rows)
    assert "commit later, 2026-01-02 (gated delta); Abacus, " in text
    assert "| gated delta | training | 1 | 4096 | 128 | 16 x 128 x 128 | AVX2 | 90.0 | " in text
    assert "| Kimi delta | training | 1 | 4096 | 128 | 16 x 128 x 128 | AVX2 | 7.0 | " in text


def test_peaks_are_a_table():
    rows = [row(OURS, 200), row(EAGER, None, skipped="is slow")]
    for each in rows:
        each["mebibytes"] = each.pop("milliseconds")
    assert (
        delta.peaks_table(rows).splitlines()[4]
        == "| gated delta | 4096 | 128 | 16 x 128 x 128 | 200 | 130 | - | - | - |"
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_measure_peak(), reason="this system does not tell its peak of memory")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [4096, 32768])
def test_training_keeps_the_states_before_chunks_alone(steps, rule):
    # The Mambas have larger states, and Mamba's softplus and gate are PyTorch's own.
    mebibytes = 256 if steps == 4096 else 2048 if rule in (MAMBA2, MAMBA) else 1024
    case = DeltaCase(steps, rule=rule)
    peak = measure_peak(case, OURS, 2)
    assert isinstance(peak, int), peak
    assert peak - delta.count_result_bytes(case) < mebibytes * 2**20
