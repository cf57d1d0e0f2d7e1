import pytest
import torch

from .helpers import make_up


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def made_up(request, monkeypatch):
    """Small data in the place of all data sets, but for the tests of the real ones."""
    return [] if request.node.get_closest_marker("data") else make_up(monkeypatch)
