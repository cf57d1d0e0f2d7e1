import csv
from typing import Any

import pytest
import torch

from fastweights.bench import associative
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(associative, "STEPS", (4,))
    monkeypatch.setattr(associative, "HIDDEN_SIZES", (6, 9))
    monkeypatch.setattr(associative, "BATCH", 5)


def test_every_rival_is_timed_at_every_size(tmp_path, capsys):
    before = torch.get_num_threads()
    associative.run(tmp_path / "a.csv", threads=[1, 2], rounds=2)
    assert torch.get_num_threads() == before
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["threads"], row["hidden_size"], row["rival"]) for row in rows} == {
        (threads, size, rival)
        for threads in ("1", "2")
        for size in ("6", "9")
        for rival in ("fastweights", "eager attention form", "eager matrix form", "torch.nn.LSTM")
    }
    for row in rows:
        lstm = next(
            other
            for other in rows
            if other["rival"] == "torch.nn.LSTM"
            and (other["threads"], other["hidden_size"]) == (row["threads"], row["hidden_size"])
        )
        ratio = float(row["milliseconds"]) / float(lstm["milliseconds"])
        assert float(row["ratio_to_lstm"]) == pytest.approx(ratio, rel=1e-2)
        assert row["processor"]
    assert "ours/LSTM" in capsys.readouterr().out


def test_nothing_is_timed_or_written_while_parity_is_red(tmp_path, monkeypatch, capsys):
    exact: Any = FastWeightsRNN.forward

    def wrong(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" else y * 1.0001), state

    monkeypatch.setattr(FastWeightsRNN, "forward", wrong)
    with pytest.raises(FastWeightsError, match="parity is red, so nothing is timed: the outputs at T=4, H=6 differ"):
        associative.run(tmp_path / "a.csv", threads=[1], rounds=1)
    assert not (tmp_path / "a.csv").exists()
    assert capsys.readouterr().out == ""
