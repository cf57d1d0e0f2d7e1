import pytest
import torch

from .helpers import make_up


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def made_up(monkeypatch):
    return make_up(monkeypatch)
