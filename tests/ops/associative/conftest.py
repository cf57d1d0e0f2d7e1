"""Every test of the kernel that takes `form` runs in both."""

import pytest

from . import parity


@pytest.fixture(params=parity.FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)
