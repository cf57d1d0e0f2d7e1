"""The definition of the block beside a loop over pixels in NumPy."""

import numpy as np
import pytest
import torch

from fastweights.ops.conv_block import conv_leaky_max_pool, leaky_max_pool


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3), (1, 1)])
def test_the_block_is_a_loop_over_pixels(height: int, width: int) -> None:
    random = np.random.default_rng(0)
    images, weight, bias = (random.standard_normal(shape) for shape in ((2, 3, height, width), (4, 3, 3, 3), (4,)))
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    sums = np.zeros((2, 4, height, width))
    for row in range(height):
        for column in range(width):
            window = padded[:, :, row : row + 3, column : column + 3]
            sums[:, :, row, column] = np.einsum("nihw,cihw->nc", window, weight) + bias
    pooled = np.zeros((2, 4, -(-height // 2), -(-width // 2)))
    for row in range(pooled.shape[2]):
        for column in range(pooled.shape[3]):
            most = sums[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].max((2, 3))
            pooled[:, :, row, column] = np.where(most > 0, most, 0.3 * most)
    given, taps, first = (torch.from_numpy(each) for each in (images, weight, bias))
    found = conv_leaky_max_pool(given, taps, first, 0.3, impl="reference")
    np.testing.assert_allclose(found.numpy(), pooled, atol=1e-12)
    found = leaky_max_pool(torch.from_numpy(sums), 0.3, impl="reference")
    np.testing.assert_allclose(found.numpy(), pooled, atol=1e-12)
