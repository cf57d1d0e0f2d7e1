import pytest
import torch

from tests.memory.store.saved import opened, rows


@pytest.fixture
def path(tmp_path):
    """A saved memory with a log of three records."""
    with opened(tmp_path / "store") as store:
        for number in range(3):
            store.write(rows(number), torch.tensor([number]), tag="t")
    return tmp_path / "store"
