"""Run folders as training leaves them, for the tests of what reads them."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# (model, hidden size, the paper's error, our test error of each seed)
SCORES: list[tuple[str, int, float, list[float]]] = [
    ("IRNN", 20, 62.11, [62.4, 61.9, 63.05]),
    ("IRNN", 50, 60.23, [60.9, 60.1, 60.75]),
    ("LSTM", 20, 60.81, [61.2, 60.4, 60.77]),
    ("LSTM", 50, 1.85, [2.31, 1.44, 1.98]),
    ("fast weights", 20, 1.81, [1.7, 2.25, 1.93]),
    ("fast weights", 50, 0.0, [0.12, 0.09, 0.18]),
]
FLOOR = 61.7
FLOOR_LOG_LIKELIHOOD = -1.43
LEARNING_RATES = {"IRNN": 1e-4, "LSTM": 1e-3, "fast weights": 1e-3}
ENVIRONMENT = {
    "fastweights": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0",
    "device": "cpu",
    "threads": 2,
    "git_commit": "4f2a9c1",
    "kernels": "cpu",
}

WriteRun = Callable[..., Path]


def member_name(model: str, hidden_size: int, seed: int) -> str:
    return f"{model.lower().replace(' ', '-')}-{hidden_size}-seed{seed}"


def write_member(folder: Path, model: str, hidden_size: int, seed: int, error: float, epochs: int = 12) -> Path:
    """A finished member whose best epoch is the last but one."""
    member = folder / member_name(model, hidden_size, seed)
    member.mkdir(parents=True)
    settings = {
        "model": model,
        "hidden_size": hidden_size,
        "seed": seed,
        "learning_rate": LEARNING_RATES.get(model, 1e-3),
        "batch_size": 128,
        "max_grad_norm": 5.0,
        "layer_norm": True,
    }
    (member / "settings.json").write_text(json.dumps(settings))
    (member / "environment.json").write_text(json.dumps(ENVIRONMENT))
    with (member / "metrics.jsonl").open("w") as file:
        for epoch in range(1, epochs + 1):
            fall = math.exp(-epoch / (1.5 + seed / 2))
            loss = 0.03 * error + (1.9 - 0.02 * error) * fall
            record = {
                "kind": "epoch",
                "epoch": epoch,
                "step": 782 * epoch,
                "seconds": 8.0 * epoch + seed,
                "train_loss": loss * 0.98,
                "validation_loss": loss * 1.01,
                "validation_error": error + (90 - error) * fall,
                "test_loss": loss,
                "test_error": error + (91 - error) * fall,
            }
            file.write(json.dumps(record) + "\n")
        result = {
            "kind": "result",
            "epoch": epochs - 1,
            "validation_error": error * 1.1,
            "test_error": error,
            "test_loss": 0.03 * error,
            "parameters": 21000 + 17 * hidden_size,
            "seconds": 8.0 * (epochs - 1) + seed,
        }
        file.write(json.dumps(result) + "\n")
    return member


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run's folder: one row and, for each score, one member of the scores given."""

    def write(scores: Sequence[tuple[str, int, float, list[float]]] = SCORES, **extra: Any) -> Path:
        folder = tmp_path / "runs" / "ba2016" / "associative-retrieval" / "quick"
        rows = []
        for model, hidden_size, paper, errors in scores:
            row = {"model": model, "hidden_size": hidden_size, "metric": "test error, %", "ours": errors}
            rows.append({**row, "paper": paper, "floor": FLOOR})
            for seed, error in enumerate(errors, start=1):
                write_member(folder, model, hidden_size, seed, error)
        folder.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"experiment": "ba2016/associative-retrieval", "preset": "quick", "rows": rows}
        result |= {"floor_log_likelihood": FLOOR_LOG_LIKELIHOOD, **extra}
        (folder / "result.json").write_text(json.dumps(result))
        return folder

    return write


@pytest.fixture
def run_folder(write_run: WriteRun) -> Path:
    """A run of three models, two sizes and three seeds, all finished."""
    return write_run()
