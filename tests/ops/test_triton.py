"""Whether Triton kernels can be used, and why not."""

import pytest
import torch

from fastweights.ops import _triton


def test_says_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = torch.zeros(1, 1, 1)
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        assert _triton.unavailable(drive) == "the triton kernel needs tensors on a GPU, got cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.5.1")
    assert _triton._find() == "the triton kernel needs Triton 3.6 or newer, got 3.5.1"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton is not installed" in str(_triton._find())
