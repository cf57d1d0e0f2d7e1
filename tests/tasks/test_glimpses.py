"""The glimpses of an image: every patch where it should be."""

import numpy as np
import pytest
import torch

from fastweights.tasks import glimpses


@pytest.mark.parametrize("side", [4, 28, 48])
def test_the_patches_are_those_that_a_loop_cuts_out(side: int) -> None:
    image = np.random.default_rng(0).random((side, side))
    half, quarter = side // 2, side // 4
    expected = []
    for top in (0, half):
        for left in (0, half):
            coarse = np.empty((quarter, quarter))
            for row in range(quarter):
                for column in range(quarter):
                    y, x = top + 2 * row, left + 2 * column
                    coarse[row, column] = image[y : y + 2, x : x + 2].mean()
            visit = [coarse]
            for down in (0, quarter):
                for right in (0, quarter):
                    y, x = top + down, left + right
                    visit.append(image[y : y + quarter, x : x + quarter])
            expected += [*visit, coarse]
    images = torch.from_numpy(np.stack([image[::-1].copy(), image]))  # its batch does not matter
    taken = glimpses.take_glimpses(images)
    assert taken.shape == (2, glimpses.GLIMPSES, quarter**2)
    np.testing.assert_allclose(taken[1], np.stack(expected).reshape(24, -1), rtol=1e-14)


def test_bytes_are_brought_to_one() -> None:
    images = torch.full((2, 8, 8), 255, dtype=torch.uint8)
    assert torch.equal(glimpses.take_glimpses(images), torch.ones(2, 24, 4))


@pytest.mark.parametrize("shape", [(8, 8), (2, 8, 12), (2, 6, 6), (2, 0, 0), (1, 1, 8, 8)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[B,S,S\] with S a multiple of 4, got shape \(" + str(shape)[1:-1]):
        glimpses.take_glimpses(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])  # of which nobody knows the largest value
def test_images_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"must be floating point or torch\.uint8 of 0 to 255, got {dtype}"):
        glimpses.take_glimpses(torch.ones(2, 8, 8, dtype=dtype))


def test_the_coarse_glimpses_are_stored() -> None:
    taken = glimpses.take_glimpses(torch.rand(1, 8, 8))[0]
    coarse = [bool((patch == taken).all(1).sum() == 2) for patch in taken]  # they are shown twice
    assert glimpses.mark_stores().tolist() == coarse
