import resource

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


@pytest.fixture
def full_disk():
    """Limits the size of a file, as a full disk would: `full_disk(bytes)`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
