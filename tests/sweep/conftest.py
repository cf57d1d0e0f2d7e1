import pytest
import sqlalchemy

from fastweights import reproduce
from fastweights.sweep import search
from tests.sweep import fake_experiment


@pytest.fixture(autouse=True)
def _threads(threads):
    """Leave torch's number of threads as it was."""


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(reproduce, "load", lambda name: fake_experiment.MODULE)
    monkeypatch.setattr(search, "POLL_SECONDS", 0.02)
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", careless)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", careless)


def careless(connection, record):
    connection.execute("PRAGMA synchronous=OFF")  # twenty waits for the disk a trial are most of a test
