import re

import pytest
import torch
from torch.nn import functional as F

from fastweights import few_shot


def small(size=14, dtype=torch.float32, **options):
    """An encoder whose normalisation is not what it starts as, so that no test holds by its weights of 1 and 0."""
    torch.manual_seed(0)
    encoder = few_shot.ResidualEncoder(3, size=size, widths=(4, 5), features=6, **options).to(dtype)
    with torch.no_grad():
        for name, part in [*encoder.named_parameters(), *encoder.named_buffers()]:
            if part.dim() == 1 and "num_batches" not in name:
                part.add_(torch.rand_like(part))
    return encoder


def by_hand(encoder, x, training):
    """The equations, place by place of the text, with batch statistics or running ones."""
    for block in encoder.blocks:
        main = x
        for convolution, norm in zip(block.layers[0::3], block.layers[1::3], strict=True):
            main = F.conv2d(main, convolution.weight, padding=1)
            mean, variance = norm.running_mean, norm.running_var
            if training:
                mean, variance = main.mean((0, 2, 3)), main.var((0, 2, 3), unbiased=False)
            main = (main - mean[:, None, None]) / torch.sqrt(variance[:, None, None] + 1e-5)
            main = main * norm.weight[:, None, None] + norm.bias[:, None, None]
            main = torch.where(main > 0, main, 0.1 * main)
        x = main + F.conv2d(x, block.shortcut.weight, block.shortcut.bias)
        # The largest of each square of four, or of what there is of it at the edge.
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2), value=-torch.inf)
        x = torch.stack([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(0)
    places = F.conv2d(x, encoder.last.weight[:, :, None, None], encoder.last.bias)  # before the mean, as in the text
    mean = places.mean((2, 3))
    return torch.where(mean > 0, mean, 0.1 * mean)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [14, 11])
def test_it_is_the_network_of_the_text(size, training):
    encoder = small(size, torch.float64).train(training)
    images = torch.rand(3, 3, size, size, dtype=torch.float64)
    expected = by_hand(encoder, images, training)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-11, atol=1e-11)


def test_gradients_are_those_of_the_equations():
    encoder = small(9, torch.float64)
    images = torch.rand(3, 3, 9, 9, dtype=torch.float64)
    direction = torch.randn(3, 6, dtype=torch.float64)
    ours = torch.autograd.grad((encoder(images) * direction).sum(), list(encoder.parameters()))
    expected = torch.autograd.grad((by_hand(encoder, images, True) * direction).sum(), list(encoder.parameters()))
    for ours_of, expected_of in zip(ours, expected, strict=True):
        torch.testing.assert_close(ours_of, expected_of, rtol=1e-9, atol=1e-9)


def test_the_papers_encoder_makes_1024_features_of_84_pixels():
    encoder = few_shot.ResidualEncoder().eval()
    assert encoder.features == 1024
    sides = []
    for block in encoder.blocks:
        block.register_forward_hook(lambda _block, _images, found: sides.append(tuple(found.shape[1:])))
    with torch.no_grad():
        assert encoder(torch.rand(1, 3, 84, 84)).shape == (1, 1024)
    assert sides == [(64, 42, 42), (96, 21, 21), (128, 11, 11), (256, 6, 6)]
    assert not any(isinstance(part, torch.nn.Dropout) for part in encoder.modules())


@pytest.mark.parametrize(("channels", "size", "widths"), [(1, 28, (4, 4, 4, 4)), (3, 5, (3,)), (3, 1, (2, 3))])
def test_any_size_and_any_number_of_blocks(channels, size, widths):
    encoder = few_shot.ResidualEncoder(channels, size=size, widths=widths, features=7)
    assert encoder(torch.rand(3, channels, size, size)).shape == (3, encoder.features) == (3, 7)


def test_an_image_does_not_depend_on_the_others_in_evaluation():
    encoder, images = small().eval(), torch.rand(4, 3, 14, 14)
    together = encoder(images)
    for image, features in zip(images, together, strict=True):
        torch.testing.assert_close(encoder(image[None])[0], features)
    assert encoder(images[:0]).shape == (0, 6)


def test_bytes_are_the_same_as_numbers_of_0_to_1():
    encoder = small().eval()
    images = torch.randint(256, (4, 3, 14, 14), dtype=torch.uint8)
    assert torch.equal(encoder(images), encoder(images.float() / 255))


def test_half_computes_in_bfloat16_and_gives_what_the_images_are():
    full, half = small().eval(), small(half=True).eval()
    images = torch.rand(4, 3, 14, 14)
    assert half(images).dtype == torch.float32
    assert not torch.equal(half(images), full(images))
    torch.testing.assert_close(half(images), full(images), rtol=0.05, atol=0.05)


def test_it_is_saved_with_its_running_statistics():
    torch.manual_seed(1)
    encoder, other = small(), few_shot.ResidualEncoder(3, size=14, widths=(4, 5), features=6)
    images = torch.rand(4, 3, 14, 14)
    encoder(images)  # moves the statistics
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other.eval()(images), encoder.eval()(images))


def test_weights_start_as_he_et_al_and_biases_at_zero():
    encoder = few_shot.ResidualEncoder()
    for part in encoder.modules():
        if isinstance(part, torch.nn.Conv2d | torch.nn.Linear):
            fan_in = part.weight[0].numel()
            assert part.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.15)
            assert part.bias is None or not part.bias.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels must be an integer of at least 1, got 0"),
        ({"size": 84.0}, "size must be an integer of at least 1, got 84.0"),
        ({"features": True}, "features must be an integer of at least 1, got True"),
        ({"widths": ()}, "widths must have a number of filters for each block, at least one; got ()"),
        ({"widths": (64, -1)}, "widths[1] must be an integer of at least 1, got -1"),
    ],
)
def test_what_is_no_size_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        few_shot.ResidualEncoder(**options)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(2, 3, 14, 15), "images must be [N,3,14,14], got [2, 3, 14, 15]"),
        (torch.rand(3, 14, 14), "images must be [N,3,14,14], got [3, 14, 14]"),
        (torch.ones(2, 3, 14, 14).long(), "images must be uint8, or floating point of 0 to 1; got torch.int64"),
    ],
)
def test_other_images_are_refused_before_they_move_the_statistics(images, message):
    encoder = small()
    before = {name: part.clone() for name, part in encoder.state_dict().items()}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        encoder(images)
    assert all(torch.equal(part, before[name]) for name, part in encoder.state_dict().items())


def test_a_few_shot_network_learns_with_it():
    torch.manual_seed(0)
    encoder = few_shot.ResidualEncoder(3, size=14, widths=(4, 5), features=16)
    network = few_shot.FewShotNetwork(encoder, few_shot.FastWeightsHead(16, num_classes=2, hidden_size=8))
    images, index = torch.rand(8, 3, 14, 14), torch.arange(8).view(2, 4)
    labels = torch.tensor([0, 1]).expand(2, 2)
    loss = F.cross_entropy(network(images, index[:, :2], labels, index[:, 2:]).flatten(0, 1), labels.flatten())
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoder.parameters())
