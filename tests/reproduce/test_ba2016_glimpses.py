"""The glimpse networks of Ba et al. 2016, and the faces that they are trained on."""

import dataclasses

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from fastweights.reproduce.ba2016 import facial_expression, mnist_glimpses
from fastweights.reproduce.ba2016.glimpses import GlimpseModel, PatchConvNet, make_network

from .helpers import TINY, result, settings_in

IMAGES = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "own"),
    [
        ("irnn", 50 * 100 + 50 * 50 + 2 * 50),
        ("lstm", 4 * (50 * 100 + 50 * 50 + 2 * 50)),
        ("fast-weights", 50 * 100 + 50 * 50 + 50 + 2 * 50),
    ],
)
def test_the_recurrent_models_read_each_patch_and_answer_after_the_last(model, own):
    network = make_network(model, 28, 10, 50, mnist_glimpses.Settings(), layers=3)
    around = 49 * 100 + 100 + 50 * 100 + 100 + 100 * 10 + 10
    assert sum(parameter.numel() for parameter in network.parameters()) == around + own
    before = network(IMAGES)
    assert before.shape == (5, 10)
    other = IMAGES.clone()
    other[0, :7, :7] = 255 - other[0, :7, :7]  # the first fine patch
    assert (network(other) != before).any(1).tolist() == [True, False, False, False, False]


def test_the_fast_weights_are_told_when_to_store():
    def network(**changes):
        torch.manual_seed(0)
        return GlimpseModel("fast-weights", 28, 10, 8, dataclasses.replace(mnist_glimpses.Settings(), **changes))

    marked = network()
    told = marked.control(torch.zeros(24, 3, 100))
    # What a coarse glimpse left is written as the next step begins, which then finds an empty hidden state.
    begun = [t for t in range(1, 24) if told["strengths"][t, 2]]  # before the first step there is nothing to store
    assert begun == [1, 6, 7, 12, 13, 18, 19]
    assert told["clears"].tolist() == (told["strengths"] > 0).tolist()
    assert not network(clear=False).control(torch.zeros(24, 3, 100))["clears"].any()
    assert network(stores="every").control(torch.zeros(24, 3, 100))["strengths"].min() == 1
    answers = [network(**changes)(IMAGES) for changes in ({}, {"clear": False}, {"stores": "every"}, {"rate": 0.0})]
    assert len({tuple(answer.flatten().tolist()) for answer in answers}) == 4


@pytest.mark.parametrize("layers", [2, 3])
def test_the_convnet_is_one_of_convolutions(layers):
    torch.manual_seed(0)
    network = make_network("convnet", 28, 10, 6, mnist_glimpses.Settings(), layers=layers)
    assert isinstance(network, PatchConvNet)
    pixels = IMAGES.unsqueeze(1).float() / 255
    first, *_, last = (layer for layer in network.layers if isinstance(layer, torch.nn.Linear))
    patches = first.weight.view(6, 1, 7, 7)
    fine = F.relu(F.conv2d(pixels, patches, first.bias, stride=7))  # [5,6,4,4]
    coarse = F.relu(F.conv2d(F.avg_pool2d(pixels, 2), patches, first.bias, stride=7))  # [5,6,2,2]
    # A quadrant's patches, as the sequence has them: the coarse one, then the fine ones row by row.
    by_quadrant = fine.view(5, 6, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(5, 4, 4, 6)
    h = torch.cat([coarse.flatten(2).transpose(1, 2).unsqueeze(2), by_quadrant], 2)  # [5,4,5,6]
    if layers == 3:
        h = F.relu(network.layers[1](h.flatten(2)))
    expected = network.readout(F.relu(last(h.flatten(1))))
    torch.testing.assert_close(network(IMAGES), expected, rtol=1e-4, atol=1e-5)


def test_the_papers_numbers_stand_beside_multi_pie_alone(tmp_path, made_up):
    root = tmp_path / "multi-pie"
    root.mkdir()
    for person in range(1, 43):
        Image.new("L", (48, 48), 5 * person).save(root / f"{person:03}_0{1 + person % 2}_02_051_07.png")
    tiny = dataclasses.replace(TINY["ba2016/facial-expression"].settings, hidden_sizes=(200,), epochs=1)
    tiny = dataclasses.replace(tiny, models=("convnet", "fast-weights"))
    facial_expression.run(dataclasses.replace(tiny, multi_pie=root), tmp_path / "pie")
    assert [row["paper"] for row in result(tmp_path / "pie")["rows"]] == [pytest.approx(11.77), pytest.approx(13.66)]
    assert settings_in(tmp_path / "pie" / "convnet-200-seed1")["multi_pie"] == str(root)
    facial_expression.run(tiny, tmp_path / "fer")
    assert [row["paper"] for row in result(tmp_path / "fer")["rows"]] == [None, None]
    assert [row["floor"] for row in result(tmp_path / "fer")["rows"]] == [pytest.approx(200 / 3)] * 2
