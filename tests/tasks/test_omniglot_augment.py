"""Omniglot: how images are turned and shifted, against what others say of the same moves."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from fastweights.tasks import omniglot


def images(count: int, size: int = 28) -> torch.Tensor:
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 7, 28])
@pytest.mark.parametrize("turns", [-1, 0, 1, 2, 3])
def test_quarter_turns_are_those_of_rot90(turns: int, size: int) -> None:
    before, still = images(3, size), torch.zeros(3, dtype=torch.float64)
    after = omniglot._move(before, omniglot._turn(still + turns * math.pi / 2), still, still)
    torch.testing.assert_close(after, torch.rot90(before, turns, (2, 3)), atol=1e-12, rtol=0)


def test_whole_shifts_move_pixels_and_leave_paper() -> None:
    shifts = [(0, 0), (2, 0), (0, 3), (-1, 0), (0, -4), (5, -2), (28, 0)]
    before = images(len(shifts))
    down, right = torch.tensor(shifts, dtype=torch.float64).unbind(1)
    after = omniglot._move(before, omniglot._turn(torch.zeros_like(down)), down, right)
    expected = torch.zeros_like(before)
    for index, (rows, columns) in enumerate(shifts):
        for row in range(28):
            for column in range(28):
                if 0 <= row - rows < 28 and 0 <= column - columns < 28:
                    expected[index, 0, row, column] = before[index, 0, row - rows, column - columns]
    torch.testing.assert_close(after, expected, atol=1e-12, rtol=0)


def test_an_image_is_turned_first_and_then_shifted() -> None:
    before = images(1)
    angle, down, right = torch.tensor([[math.pi / 2], [2.0], [-3.0]], dtype=torch.float64)
    after = omniglot._move(before, omniglot._turn(angle), down, right)
    expected = torch.zeros_like(before)
    expected[:, :, 2:, :-3] = torch.rot90(before, 1, (2, 3))[:, :, :-2, 3:]
    torch.testing.assert_close(after, expected, atol=1e-12, rtol=0)


def test_any_angle_is_that_of_pillow() -> None:
    """Its bilinear rotation about the middle is the same function; it mixes in no paper at the edge, which is empty."""
    before = torch.zeros(4, 1, 28, 28)
    before[:, :, 8:20, 8:20] = images(4)[:, :, 8:20, 8:20].float()
    degrees = torch.tensor([-30.0, -7.0, 12.5, 45.0])
    after = omniglot._move(before, omniglot._turn(degrees.deg2rad()), torch.zeros(4), torch.zeros(4))
    for index, angle in enumerate(degrees.tolist()):
        turned = Image.fromarray(before[index, 0].numpy()).rotate(angle, Image.Resampling.BILINEAR)
        np.testing.assert_allclose(after[index, 0].numpy(), np.asarray(turned), atol=1e-4)


def test_nothing_asked_for_changes_nothing() -> None:
    before = images(16).float()
    after = omniglot.augment(before, generator=torch.Generator(), degrees=0, shift=0)
    torch.testing.assert_close(after, before, atol=2e-5, rtol=0)


def test_the_same_generator_gives_the_same_images() -> None:
    before = images(8).float()
    kept = before.clone()
    one, two, other = (omniglot.augment(before, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, kept)
    assert one.dtype == torch.float32
    assert omniglot.augment(before.double(), generator=torch.Generator()).dtype == torch.float64


def dot(images: torch.Tensor) -> torch.Tensor:
    """How far a single dot lies below and to the right of the middle [2,B]."""
    places = torch.arange(images.shape[-1], dtype=images.dtype) - images.shape[-1] // 2
    return torch.stack([(images.sum(dim) * places).sum((1, 2)) for dim in (3, 2)]) / images.sum((1, 2, 3))


@pytest.mark.parametrize(
    ("settings", "degrees", "shift"),
    [({}, 30.0, 2.0), ({"degrees": 45.0, "shift": 3.0}, 45.0, 3.0)],
    ids=["as the paper", "given"],
)
def test_angles_and_shifts_are_uniform_within_the_bounds(
    settings: dict[str, float], degrees: float, shift: float
) -> None:
    middle, right = torch.zeros(2, 4000, 1, 41, 41, dtype=torch.float64)
    middle[:, :, 20, 20] = right[:, :, 20, 32] = 1
    (down, across), (moved_down, moved_right) = (
        dot(omniglot.augment(images, generator=torch.Generator().manual_seed(0), **settings))
        for images in (middle, right)
    )
    angle = torch.atan2(down - moved_down, moved_right - across).rad2deg()
    assert angle.abs().max() <= degrees + 1
    for drawn, limit in ((angle, degrees), (down, shift), (across, shift)):
        ranks = torch.linspace(-limit, limit, len(drawn), dtype=drawn.dtype)
        assert (drawn.sort().values - ranks).abs().max() < 0.06 * limit  # Kolmogorov and Smirnov's, far past chance
    assert torch.corrcoef(torch.stack([angle, down, across])).sub(torch.eye(3)).abs().max() < 0.06


@pytest.mark.parametrize(
    ("shape", "dtype", "settings", "message"),
    [
        ((28, 28), torch.float32, {}, r"images must be \[B, 1, size, size\] and not empty, got \[28, 28\]"),
        ((2, 3, 28, 28), torch.float32, {}, "images must be"),
        ((2, 1, 28, 27), torch.float32, {}, "images must be"),
        ((0, 1, 28, 28), torch.float32, {}, "images must be"),
        ((2, 1, 28, 28), torch.uint8, {}, r"float32 or float64 .*got torch.uint8"),
        ((2, 1, 28, 28), torch.float32, {"degrees": -1.0}, r"degrees must be finite and not negative, got -1.0"),
        ((2, 1, 28, 28), torch.float32, {"shift": math.nan}, r"shift must be finite and not negative, got nan"),
    ],
)
def test_what_cannot_be_moved(
    shape: tuple[int, ...], dtype: torch.dtype, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        omniglot.augment(torch.zeros(shape, dtype=dtype), generator=torch.Generator(), **settings)


@pytest.mark.gpu
def test_the_same_on_the_gpu() -> None:
    before = images(64).float()
    expected = omniglot.augment(before, generator=torch.Generator().manual_seed(1))
    after = omniglot.augment(before.cuda(), generator=torch.Generator().manual_seed(1))
    assert after.is_cuda
    torch.testing.assert_close(after.cpu(), expected, atol=1e-4, rtol=0)


def test_distortions_stay_within_their_limits_and_leave_some_images_alone():
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(4000, 1, 29, 29)
    images[:, :, 14, 14] = 1  # a dot in the middle moves by the shift alone
    distorted = omniglot.distort(images, generator=generator)
    assert 0.5**7 / 2 < float((distorted == images).flatten(1).all(1).float().mean()) < 0.5
    places = torch.arange(29.0) - 14
    weight = distorted.sum((1, 2, 3)).clamp(min=1e-9)
    down = (distorted.sum((1, 3)) * places).sum(1) / weight
    assert float(down.abs().max()) < 2.3
    assert float((down.abs() < 0.3).float().mean()) > 0.5  # left out half of the time


def test_a_distortion_is_the_affine_map_that_it_says():
    images = torch.rand(50, 1, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws = torch.rand(2, 7, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    limits = torch.tensor([math.pi / 18, 0.3, 0.3, 0.2, 0.2, 2, 2], dtype=torch.float64)
    expected = []
    for image, chance, draw in zip(images, draws[0].T, draws[1].T, strict=True):
        angle, slant_x, slant_y, wide, high, down, right = torch.where(chance < 0.5, 2 * draw - 1, 0.0) * limits
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        slant = torch.tensor([[1, slant_x], [slant_y, 1]])
        stretch = torch.diag(torch.stack([1 + wide, 1 + high]))
        matrix = turn.double() @ slant.double() @ stretch
        shifted = torch.stack([right, down]) * 2 / 12
        whole = torch.cat([matrix, -(matrix @ shifted).unsqueeze(1)], dim=1)
        grid = torch.nn.functional.affine_grid(whole.unsqueeze(0), [1, 1, 12, 12], align_corners=False)
        expected.append(torch.nn.functional.grid_sample(image.unsqueeze(0), grid, align_corners=False)[0])
    found = omniglot.distort(images, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(found, torch.stack(expected), atol=1e-6)


def test_what_cannot_be_distorted_is_refused():
    with pytest.raises(ValueError, match=r"images must be \[B, 1, size, size\] and not empty, got \[3, 28, 28\]"):
        omniglot.distort(torch.zeros(3, 28, 28), generator=torch.Generator())
    with pytest.raises(ValueError, match="images must be float32 or float64"):
        omniglot.distort(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), generator=torch.Generator())
