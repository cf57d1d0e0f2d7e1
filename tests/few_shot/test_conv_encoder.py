"""The convolutional encoder: the paper's sizes and operations, images of any light, and where its filters start."""

import numpy as np
import pytest
import torch
from torch import nn as torch_nn
from torch.nn import functional as F

from fastweights import few_shot


def images(count, channels=1, size=28, seed=0):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("channels", "filters", "size", "features"), [(1, 64, 28, 64), (3, 32, 84, 288)])
def test_features_are_as_many_as_the_papers(channels, filters, size, features):
    encoder = few_shot.ConvEncoder(channels, filters, size=size)
    assert encoder.features == features
    assert encoder(images(2, channels, size)).shape == (2, features)


def test_a_block_is_a_convolution_a_leaky_relu_and_the_maximum_of_two_by_two():
    torch.manual_seed(0)
    encoder = few_shot.ConvEncoder(2, 3, size=5, blocks=1).double()
    torch_nn.init.normal_(encoder.convolutions[0].bias)
    weight, bias = (parameter.detach().numpy() for parameter in encoder.convolutions[0].parameters())
    x = images(1, 2, 5).double()
    padded = np.pad(x[0].numpy(), ((0, 0), (1, 1), (1, 1)))
    z = np.empty((3, 5, 5))
    for unit in range(3):
        for row in range(5):
            for column in range(5):
                z[unit, row, column] = bias[unit] + (weight[unit] * padded[:, row : row + 3, column : column + 3]).sum()
    active = np.where(z > 0, z, 0.2 * z)
    expected = [active[:, row : row + 2, column : column + 2].max((1, 2)) for row in (0, 2, 4) for column in (0, 2, 4)]
    np.testing.assert_allclose(encoder(x)[0].view(3, 9).detach().numpy(), np.stack(expected, axis=1), atol=1e-12)


def test_a_standardised_image_has_no_light_of_its_own():
    torch.manual_seed(0)
    encoder = few_shot.ConvEncoder(3, 8, size=20, standardise=True)
    seen = images(4, 3, 20)
    dark = 0.5 * seen + 0.1
    assert torch.allclose(encoder(dark), encoder(seen), rtol=0.05, atol=0.02)
    assert not torch.allclose(
        few_shot.ConvEncoder(3, 8, size=20)(dark), few_shot.ConvEncoder(3, 8, size=20)(seen), rtol=0.05
    )
    assert torch.allclose(encoder(torch.full((1, 3, 20, 20), 0.7)), encoder(torch.zeros(1, 3, 20, 20)), atol=1e-3)


def test_a_share_of_the_features_is_left_out_in_training_and_none_in_evaluation():
    torch.manual_seed(0)
    encoder, shown = few_shot.ConvEncoder(1, 64, size=28, dropout=0.25), images(200, 1, 28)
    whole = encoder.eval()(shown)
    kept = encoder.train()(shown)
    assert float((kept == 0).double().mean()) == pytest.approx(0.25, abs=0.02)
    assert torch.allclose(kept[kept != 0], whole[kept != 0] / 0.75)
    with pytest.raises(ValueError, match=r"dropout must be at least 0 and less than 1, got 1\.0"):
        few_shot.ConvEncoder(1, 64, size=28, dropout=1.0)


def test_evaluation_gives_an_image_and_its_mirror_image_the_same_where_training_mirrors():
    torch.manual_seed(0)
    images = torch.rand(3, 1, 9, 9)
    encoder = few_shot.ConvEncoder(1, 4, size=9, mirrored=True)
    assert not torch.allclose(encoder(images), encoder(images.flip(-1)))
    of_training = encoder(images), encoder(images.flip(-1))
    encoder.eval()
    torch.testing.assert_close(encoder(images), sum(of_training) / 2)
    torch.testing.assert_close(encoder(images.flip(-1)), encoder(images))


def test_evaluation_is_as_blurred_as_shifts_by_parts_of_a_pixel_are_on_average(monkeypatch):
    torch.manual_seed(0)
    encoder = few_shot.ConvEncoder(1, 4, size=9, interpolated=True).double()
    seen: list[torch.Tensor] = []
    scaled = encoder._scale

    def noted(images):
        seen.append(scaled(images))
        return seen[-1]

    monkeypatch.setattr(encoder, "_scale", noted)
    dot = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    dot[..., 4, 4] = 1
    for shown in (dot, torch.ones_like(dot)):
        encoder.train()(shown)
        encoder.eval()(shown)
    assert torch.equal(seen[0], dot)
    assert torch.allclose(seen[3], seen[2])  # one colour stays, to the edges
    places = torch.arange(9.0, dtype=torch.float64) - 4
    parts = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    expected = float((parts * (1 - parts)).mean())
    for dim in (2, 3):
        along = seen[1].sum(dim)[0, 0]
        assert float(along.sum()) == pytest.approx(1)
        assert float((along * places**2).sum()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("standardise", [False, True])
def test_filters_start_at_mean_0_and_variance_1_of_what_they_are_shown(standardise):
    torch.manual_seed(0)
    encoder, shown = few_shot.ConvEncoder(3, 8, size=20, standardise=standardise), images(40, 3, 20)
    drawn = [convolution.weight.clone() for convolution in encoder.convolutions]
    encoder.initialise_from(shown)
    found = encoder._scale(shown)
    for convolution in encoder.convolutions:
        pooled = F.max_pool2d(convolution(found), 2, ceil_mode=True)
        spread, mean = torch.std_mean(pooled, (0, 2, 3), correction=0)
        assert torch.allclose(mean, torch.zeros(8), atol=1e-4)
        assert torch.allclose(spread, torch.ones(8), atol=1e-4)
        found = F.leaky_relu(pooled, 0.2)
    torch.testing.assert_close(encoder(shown), found.flatten(1))
    for before, layer in zip(drawn, encoder.convolutions, strict=True):
        alike = F.cosine_similarity(before.flatten(1), layer.weight.flatten(1))
        assert torch.allclose(alike, torch.ones(8))  # scaled alone
        assert layer.weight.requires_grad
        assert layer.weight.grad is None


def test_a_filter_that_tells_no_image_from_another_is_left_alone():
    torch.manual_seed(0)
    encoder = few_shot.ConvEncoder(1, 4, size=8, blocks=2)
    with torch.no_grad():
        encoder.convolutions[0].weight[1] = 0
        encoder.convolutions[0].bias[1] = 3
    encoder.initialise_from(images(9, 1, 8))
    assert torch.equal(encoder.convolutions[0].weight[1], torch.zeros(1, 3, 3))
    assert encoder.convolutions[0].bias[1].item() == 3
    blank = few_shot.ConvEncoder(1, 4, size=1, blocks=1)
    before = [parameter.clone() for parameter in blank.parameters()]
    blank.initialise_from(torch.full((5, 1, 1, 1), 0.3))
    assert all(torch.equal(one, two) for one, two in zip(before, blank.parameters(), strict=True))


def test_it_starts_from_images_alone():
    encoder = few_shot.ConvEncoder(1, 4, size=8)
    with pytest.raises(ValueError, match=r"there must be images to start from, got \[0, 1, 8, 8\]"):
        encoder.initialise_from(torch.zeros(0, 1, 8, 8))
    with pytest.raises(ValueError, match=r"images must be \[N,1,8,8\], got \[2, 3, 8, 8\]"):
        encoder.initialise_from(torch.zeros(2, 3, 8, 8))
    broken = images(9, 1, 8)
    broken[3, 0, 1, 2] = torch.nan
    with pytest.raises(ValueError, match="images to start from must be finite, got NaN or infinity"):
        encoder.initialise_from(broken)


def test_compiled_without_a_graph_break_it_learns_the_same():
    torch.manual_seed(0)
    # So many take the kernels where nothing is compiled; in float64 no two pixels are as good as equal.
    encoder, shown = few_shot.ConvEncoder(1, 64, size=28).double(), images(20).double()
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    gradients = []
    for call in (encoder, compiled):
        features = call(shown)
        gradients.append((features, *torch.autograd.grad(features.square().sum(), [*encoder.parameters()])))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "build", [lambda: few_shot.ConvEncoder(1, 4, size=16), lambda: few_shot.ResidualEncoder(1, size=16)]
)
def test_images_of_any_dtype_are_computed_in_that_of_the_weights(build, weights, dtype):
    torch.manual_seed(0)
    encoder = build().to(weights).eval()
    shown = (255 * images(3, 1, 16)).round()
    given = shown.to(dtype) if dtype == torch.uint8 else (shown / 255).to(dtype)
    found = encoder(given)
    assert found.dtype == weights
    torch.testing.assert_close(found, encoder((shown / 255).to(weights)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "build",
    [lambda **o: few_shot.ConvEncoder(1, 4, size=16, **o), lambda **o: few_shot.ResidualEncoder(1, size=16, **o)],
)
def test_the_callers_autocast_stays_on(build):
    torch.manual_seed(0)
    ours, theirs, shown = build(), build(half=True), images(3, 1, 16)
    theirs.load_state_dict(ours.state_dict())
    single = ours.eval()(shown)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(shown)
    assert not torch.equal(found, single)
    assert torch.equal(found.float(), theirs.eval()(shown).float())
