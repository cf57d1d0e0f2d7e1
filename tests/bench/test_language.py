"""The tables of the bench of language models."""

from typing import Any

from fastweights.bench import language
from fastweights.bench.language import BOTH, CACHE, LSTM
from fastweights.bench.published import Row
from tests.bench.helpers import make_row


def row(rival: str, value: float, **more: Any) -> Row:
    sizes = {"part": "scoring", "classes": 50, "embedding_size": 8, "hidden_size": 9, "window": 20, "neighbours": 5}
    return make_row(language.COLUMNS, rival, value, **sizes | more)


def test_each_processor_has_a_line_of_its_last_times():
    rows = [row(LSTM, 9, commit="old"), row(CACHE, 9, commit="old")]
    rows += [row(LSTM, 0.5), row(CACHE, 0.6), row(BOTH, 0.75)]
    rows += [row(LSTM, 0.25, processor="Astrolabe"), row(CACHE, 0.5, processor="Astrolabe")]
    title, _, _, _, abacus, astrolabe = language.scoring_table(rows).splitlines()
    assert "Abacus, PyTorch 2.13.0, commit abc, 2026-01-02; Astrolabe, PyTorch 2.13.0" in title
    assert abacus == "| Abacus | 1 | 50 | 8 | 9 | 20 | 5 | 0.500 | 0.600 | 0.750 | 1.20 | 1.50 |"
    assert astrolabe == "| Astrolabe | 1 | 50 | 8 | 9 | 20 | 5 | 0.250 | 0.500 | - | 2.00 | - |"
