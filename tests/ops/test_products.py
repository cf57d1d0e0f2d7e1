"""Products by whichever library, against those of float64."""

import pytest
import torch

from fastweights.ops import products
from fastweights.ops.products import RepeatedProduct, multiply


@pytest.fixture(params=[True, False], ids=["Intel", "others"], autouse=True)
def processor(request, monkeypatch):
    monkeypatch.setattr(products, "_is_intel", lambda: request.param)


def assert_product(found, x, weight, bias=0.0):
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_one_product(rows, turned):
    x, bias = torch.randn(96, rows).T if turned else torch.randn(rows, 96), torch.randn(130)
    weight = torch.randn(96, 130).T if turned else torch.randn(130, 96)
    assert_product(multiply(x, weight), x, weight)
    assert_product(multiply(x, weight, bias), x, weight, bias.double())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "times"), [(1, 400), (4, 64), (20, 35), (20, 2)])
def test_many_products_with_one_matrix(rows, times, turned):
    weight = torch.randn(96, 130).T if turned else torch.randn(130, 96)
    multiply_again = RepeatedProduct(weight, rows, times)
    for x in (torch.randn(rows, 96), torch.randn(rows, 2 * 96)[:, ::2]):
        assert_product(multiply_again(x), x, weight)


def test_half_precision_is_left_to_torch():
    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(5, 16, dtype=torch.bfloat16)
    assert multiply(x, weight).equal(torch.nn.functional.linear(x, weight))
    assert RepeatedProduct(weight, 8, 100)(x).equal(torch.nn.functional.linear(x, weight))


def test_autocast_does_not_round_one_product():
    x, weight = torch.randn(8, 96), torch.randn(130, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = multiply(x, weight)
    assert found.dtype == torch.float32
    assert_product(found, x, weight)
