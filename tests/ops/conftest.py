"""Every test that takes `device` runs in Triton's interpreter and, marked `gpu`, on a GPU."""

import pytest

from .triton_here import skip_unless_available


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    skip_unless_available(request.param)
    return str(request.param)
