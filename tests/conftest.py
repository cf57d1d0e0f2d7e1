"""For every test, before torch is imported."""

import os
from pathlib import Path

import pytest

# Idle OpenMP threads sleep instead of spinning: with fewer free cores than threads they would slow everything tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Without a GPU the Triton kernels run in Triton's interpreter, which is chosen as Triton is imported. The driver's
# device file tells, where torch.cuda would have to be imported.
if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def omniglot_root() -> str:
    """The folder that has Omniglot's, for tests that read the real drawings."""
    root = os.environ.get("FASTWEIGHTS_DATA")
    if not root or not (Path(root) / "omniglot").is_dir():
        pytest.skip("FASTWEIGHTS_DATA is not set, or has no omniglot")
    return root
