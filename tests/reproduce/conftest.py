import pytest

from .helpers import make_up


@pytest.fixture(autouse=True)
def _threads(threads):
    """Leave torch's number of threads as it was."""


@pytest.fixture
def made_up(request, monkeypatch):
    """Small data in the place of all data sets, but for the tests of the real ones."""
    return [] if request.node.get_closest_marker("data") else make_up(monkeypatch)
