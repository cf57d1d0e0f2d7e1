"""The glimpse networks of Ba et al. 2016, and the faces that they are trained on."""

import dataclasses

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from fastweights.errors import RunError
from fastweights.reproduce.ba2016 import facial_expression, mnist_glimpses
from fastweights.reproduce.ba2016.glimpses import GlimpseModel, PatchConvNet, make_network
from fastweights.runs import load_checkpoint

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


def test_a_glimpse_that_integrates_may_have_weights_of_its_own():
    torch.manual_seed(0)
    settings = dataclasses.replace(mnist_glimpses.Settings(), own_integration=True)
    network = GlimpseModel("fast-weights", 28, 10, 8, settings)
    plain = GlimpseModel("fast-weights", 28, 10, 8, mnist_glimpses.Settings())
    plain.load_state_dict({name: each for name, each in network.state_dict().items() if "integration" not in name})
    assert not torch.allclose(network(IMAGES), plain(IMAGES), atol=1e-3)
    assert network.integration is not None
    network.integration.load_state_dict(network.core.state_dict())
    torch.testing.assert_close(network(IMAGES), plain(IMAGES))
    assert GlimpseModel("lstm", 28, 10, 8, settings).integration is None


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


def best_weights(member):
    checkpoint = load_checkpoint(member / "checkpoint.pt")
    assert checkpoint is not None
    return checkpoint["best"]


NAMES = ("irnn", "lstm", "convnet", "fast-weights", "linear")


@pytest.mark.parametrize("model", NAMES)
def test_standardised_images_have_no_brightness_and_no_contrast(model):
    torch.manual_seed(0)
    network = make_network(model, 28, 10, 6, mnist_glimpses.Settings(standardize=True), layers=3)
    pixels = IMAGES.float() / 255
    torch.testing.assert_close(network(0.3 * pixels + 0.2), network(pixels), rtol=1e-3, atol=1e-4)
    torch.manual_seed(0)
    plain = make_network(model, 28, 10, 6, mnist_glimpses.Settings(), layers=3)
    assert not torch.allclose(plain(0.3 * pixels + 0.2), plain(pixels), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", NAMES)
def test_all_models_drop_alike_and_in_training_alone(model):
    torch.manual_seed(0)
    network = make_network(model, 28, 10, 6, mnist_glimpses.Settings(dropout=0.5), layers=3)
    dropped = [module for module in network.modules() if isinstance(module, torch.nn.Dropout)]
    calls = []
    for module in dropped:
        module.register_forward_hook(lambda _, inputs, output: calls.append(inputs[0].dim()))
    first, second = network(IMAGES), network(IMAGES)
    if model == "linear":  # has nothing between the pixels and the softmax
        assert not dropped
        assert torch.equal(first, second)
        return
    assert not torch.equal(first, second)
    assert len(calls) == 4
    assert calls[1] == 2  # what the softmax reads; before it, what encodes the glimpses
    assert calls[0] > 2
    network.eval()
    assert torch.equal(network(IMAGES), network(IMAGES))


def test_a_linear_map_is_one_row_whatever_the_sizes(tmp_path, made_up):
    tiny = dataclasses.replace(TINY["ba2016/mnist-glimpses"].settings, models=("linear", "irnn"), hidden_sizes=(4, 5))
    mnist_glimpses.run(tiny, tmp_path)
    rows = [(row["model"], row["hidden_size"]) for row in result(tmp_path)["rows"]]
    assert rows == [("Linear map", None), ("IRNN", 4), ("IRNN", 5)]
    assert "dropout" not in settings_in(tmp_path / "linear-seed1")
    assert settings_in(tmp_path / "irnn-4-seed1")["dropout"] == 0


def test_weights_decay_where_that_is_asked_for(tmp_path, made_up):
    tiny = dataclasses.replace(TINY["ba2016/mnist-glimpses"].settings, models=("linear",), epochs=1, annealing="none")
    lengths = []
    for decay in (0.0, 100.0):
        folder = tmp_path / str(decay)
        mnist_glimpses.run(dataclasses.replace(tiny, weight_decay=decay), folder)
        lengths.append(best_weights(folder / "linear-seed1")["readout.weight"].norm())
    assert lengths[1] < 0.7 * lengths[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 1.0}, "dropout must be a probability less than 1, got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay times learning_rate must be at least 0 and less than 1, got -0.1 times"),
        ({"weight_decay": 300.0}, "weight_decay times learning_rate must be at least 0 and less than 1, got 300.0"),
    ],
)
def test_what_cannot_regularise_is_refused(changes, message):
    with pytest.raises(RunError, match=message):
        mnist_glimpses.check(dataclasses.replace(mnist_glimpses.Settings(), **changes))


def test_fast_weights_may_learn_their_rate(tmp_path, made_up):
    tiny = dataclasses.replace(TINY["ba2016/mnist-glimpses"].settings, models=("fast-weights",), rate=None)
    mnist_glimpses.run(tiny, tmp_path)
    assert settings_in(tmp_path / "fast-weights-8-seed1")["rate"] is None
    assert "core.log_rate" in best_weights(tmp_path / "fast-weights-8-seed1")


@pytest.mark.parametrize("model", ["irnn", "lstm", "fast-weights"])
def test_a_network_that_is_told_places_tells_equal_glimpses_apart(model):
    torch.manual_seed(0)
    plain = make_network(model, 28, 10, 6, mnist_glimpses.Settings(), layers=3)
    torch.manual_seed(0)
    told = make_network(model, 28, 10, 6, mnist_glimpses.Settings(places=True), layers=3)
    assert torch.equal(told(IMAGES), plain(IMAGES))  # at the start nothing is told
    assert isinstance(told, GlimpseModel)
    assert told.places is not None
    F.cross_entropy(told(IMAGES), torch.arange(5)).backward()
    assert told.places.grad is not None
    assert (told.places.grad.abs().sum((1, 2)) > 0).all()  # of every glimpse
    blank = torch.full((1, 28, 28), 128, dtype=torch.uint8)  # all glimpses alike
    seen = []
    told.core.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        told.places.normal_(generator=torch.Generator().manual_seed(0))
        told(blank)
    assert len({tuple(step.flatten().tolist()) for step in seen[0]}) == 24
    convnet = make_network("convnet", 28, 10, 6, mnist_glimpses.Settings(places=True), layers=3)
    assert not hasattr(convnet, "places")  # its layers are of places
