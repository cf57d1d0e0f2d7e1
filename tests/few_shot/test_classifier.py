"""The classifier: what it answers, what does not matter to it, and what it refuses."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

import fastweights
from fastweights import few_shot
from fastweights.errors import ExamplesError, FastWeightsError, WeightsError
from fastweights.few_shot import FewShotClassifier
from fastweights.tasks import image_folder, omniglot
from tests.few_shot.conftest import DRAWINGS, network


def described_drawings(classifier):
    by_class = image_folder.files(DRAWINGS / "described")
    paths = [path for found in by_class.values() for path in found]
    classifier.describe(paths, [path.parent.name for path in paths], resize=True)


def test_the_published_classifier_tells_characters_that_it_never_saw():
    classifier = fastweights.FewShotClassifier.load("omniglot")
    assert classifier.ink
    assert classifier.shots == 1
    assert "Omniglot" in classifier.trained_on
    assert "MIT" in classifier.licence
    described_drawings(classifier)
    asked = image_folder.images_in(DRAWINGS / "asked")
    found = classifier.predict(asked, resize=True)
    right = [label == path.name.partition("-")[0] for label, path in zip(found.labels, asked, strict=True)]
    assert sum(right) >= 8
    assert classifier.classes == ["eta", "gamma", "phi", "theta", "xi"]
    assert found.probabilities.shape == (10, 5)
    assert torch.allclose(found.probabilities.sum(1), torch.ones(10))


def test_a_published_name_takes_the_arguments_of_a_download_alone():
    FewShotClassifier.from_pretrained("omniglot", local_files_only=True)
    with pytest.raises(TypeError, match="revisoin"):
        FewShotClassifier.from_pretrained("omniglot", revisoin="main")


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_the_published_classifier_on_held_out_tasks():
    data = omniglot.load()
    images = data.images[omniglot.few_shot_split(data).test]
    classifier = FewShotClassifier.load("omniglot")
    generator = torch.Generator().manual_seed(3)
    right = []
    for _ in range(200):
        classes = torch.randperm(len(images), generator=generator)[:5]
        drawings = torch.stack([images[index, torch.randperm(20, generator=generator)[:4]] for index in classes])
        classifier.describe(drawings[:, :1].flatten(0, 1)[:, None], range(5))
        answers = classifier.predict(drawings[:, 1:].flatten(0, 1)[:, None]).labels
        right.append((torch.tensor(answers) == torch.arange(5).repeat_interleave(3)).double().mean())
    assert torch.stack(right).mean() > 0.98


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_a_file_of_the_archive_becomes_what_was_trained_on(small):
    from fastweights.few_shot.images import read_pixels

    data = omniglot.load()
    index = data.names.index("Greek/character07")
    given = read_pixels([DRAWINGS / "described" / "eta" / "1.png"], small.kind, resize=True)
    assert torch.equal(given[0, 0], data.images[index, 0])


@pytest.mark.parametrize(
    "labels", [["b", "a", "c"], [1, 0, 2], [7, 3, 900], torch.tensor([2, 0, 1]), np.array([0, 1, 2]), range(3)]
)
def test_answers_are_in_the_users_own_labels(small, images, labels):
    small.describe(images[:3], labels)
    found = small.predict(images[3:])
    own = labels.tolist() if isinstance(labels, torch.Tensor | np.ndarray) else list(labels)
    assert small.classes == sorted(own)
    assert set(found.labels) <= set(own)
    assert [small.classes[column] for column in found.probabilities.argmax(1)] == found.labels
    assert found.probabilities.shape == (7, 3)
    assert torch.allclose(found.probabilities.sum(1), torch.ones(7))


@pytest.mark.parametrize("names", [["b", "a", "c"], [7, 3, 5]])
def test_columns_of_pandas_are_labels(small, images, names):
    pandas = pytest.importorskip("pandas")
    for labels in (pandas.Series(names, index=[5, 6, 7]), pandas.Categorical(names), pandas.Index(names)):
        small.describe(images[:3], labels)
        assert small.classes == sorted(names)


def test_the_answer_is_the_networks(small, images):
    small.describe(images[:3], [0, 1, 2])
    with torch.no_grad():
        memory = small.network.describe(images[None, :3], torch.arange(3)[None])
        logits = small.network.predict(images[None, 3:], memory)[0]
    assert torch.allclose(small.predict(images[3:]).probabilities, logits[:, :3].softmax(1))


def test_neither_order_nor_company_matters(small, images):
    labels = ["x", "y", "x", "z", "y", "x"]
    small.describe(images[:6], labels)
    before = small.predict(images)
    order = [4, 0, 5, 3, 2, 1]
    small.describe(images[order], [labels[index] for index in order])
    after = small.predict(images)
    assert torch.allclose(after.probabilities, before.probabilities, atol=1e-6)
    assert torch.allclose(small.predict(images[3:4]).probabilities, before.probabilities[3:4], atol=1e-6)


def test_describing_again_starts_over(small, images):
    small.describe(images[:2], ["a", "b"])
    small.describe(images[2:5], ["c", "d", "e"])
    again = FewShotClassifier(small.network, shots=1, ink=True)
    again.describe(images[2:5], ["c", "d", "e"])
    assert small.classes == ["c", "d", "e"]
    assert torch.equal(small.predict(images).probabilities, again.predict(images).probabilities)


@pytest.mark.parametrize(("shots", "counts"), [(1, (1, 1)), (1, (5, 1)), (1, (2, 2)), (4, (3, 1))])
def test_all_classes_count_alike_as_the_mean_of_as_many_as_in_training(images, shots, counts):
    classifier = FewShotClassifier(network(), shots=shots)
    labels = torch.arange(2).repeat_interleave(torch.tensor(counts))
    classifier.describe(images[: sum(counts)], labels)
    with torch.no_grad():
        features = classifier.network.features(images)
        weights = shots / torch.tensor(counts)[labels]
        weighed = features[: sum(counts)] * weights[:, None]  # M is linear in the keys
        memory = classifier.network.head.describe(weighed[None], labels[None])
        logits = classifier.network.head.predict(features[None], memory)
    expected = logits[0, :, :2].softmax(1)
    assert torch.allclose(classifier.predict(images).probabilities, expected, atol=1e-6)


def test_a_class_with_more_examples_does_not_outshout_the_others():
    classifier = FewShotClassifier.load("omniglot")
    drawn = image_folder.images_in(DRAWINGS / "asked")
    one, many = drawn[::2], [drawn[1]] * 9  # nine more of the first class
    labels = [path.name.partition("-")[0] for path in [*one, *many]]
    classifier.describe([*one, *many], labels, resize=True)
    asked = drawn[3::2]
    found = classifier.predict(asked, resize=True).labels
    assert sum(label == path.name.partition("-")[0] for label, path in zip(found, asked, strict=True)) >= 3


@pytest.mark.parametrize(("shots", "counts"), [(1, (3, 3)), (5, (3, 3)), (2, (1, 3)), (1, (2, 2, 3))])
def test_matching_compares_with_the_examples_or_with_every_class_mean(images, shots, counts):
    head = few_shot.MatchingHead(5, scale=10.0)
    classifier = FewShotClassifier(few_shot.FewShotNetwork(few_shot.ConvEncoder(1, 16, size=28), head), shots=shots)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    classifier.describe(images[: len(labels)], labels)
    with torch.no_grad():
        features = classifier.network.features(images)
    described = features[: len(labels)]
    if len(set(counts)) > 1:
        described = torch.stack([described[labels == label].mean(0) for label in range(len(counts))])
        labels = torch.arange(len(counts))
    weights = (10 * F.cosine_similarity(features[:, None], described, dim=-1)).softmax(-1)
    expected = weights @ F.one_hot(labels).float()
    assert torch.allclose(classifier.predict(images).probabilities, expected, atol=1e-5)


@pytest.mark.parametrize("width", [2, 36])
def test_thin_strokes_on_large_scans_are_told_apart_as_broad_ones(tmp_path, width):
    generator = np.random.default_rng(0)
    characters = generator.random((10, 2, 3, 2))  # of ten classes two strokes, each through three points
    classifier = FewShotClassifier.load("omniglot")
    paths = []
    for copy in range(2):
        for label, strokes in enumerate(150 + 700 * (characters + generator.normal(0, 0.02, characters.shape))):
            scan = Image.new("L", (1000, 1000), "white")
            for stroke in strokes:
                ImageDraw.Draw(scan).line([tuple(point) for point in stroke], fill="black", width=width)
            paths.append(tmp_path / f"{copy}-{label}.png")
            scan.save(paths[-1])
    classifier.describe(paths[:10], range(10), resize=True)
    right = [label == asked for asked, label in enumerate(classifier.predict(paths[10:], resize=True).labels)]
    assert sum(right) >= 9


@pytest.mark.parametrize(
    "head", [few_shot.PrototypeHead(5), few_shot.MatchingHead(5), few_shot.FastWeightsHead(16, 5, rule="gradient")]
)
def test_other_heads_serve_too(images, head):
    classifier = FewShotClassifier(few_shot.FewShotNetwork(few_shot.ConvEncoder(1, 16, size=28), head), shots=2)
    classifier.describe(images[:5], ["a", "a", "b", "b", "b"])
    assert torch.allclose(classifier.predict(images).probabilities.sum(1), torch.ones(10))


def test_uint8_and_arrays_are_the_same_images(small, images):
    whole = (255 * images).byte()
    small.describe(whole[:3], range(3))
    expected = small.predict(whole.float() / 255).probabilities
    for same in (whole, whole.numpy(), whole.double().numpy() / 255):
        assert torch.allclose(small.predict(same).probabilities, expected, atol=1e-5)
    swapped = (images * 255).byte().float().numpy() / 255
    assert torch.allclose(small.predict(swapped.astype(">f4")).probabilities, expected, atol=1e-5)
    read_only = whole.numpy()[::-1]
    read_only.flags.writeable = False
    assert torch.allclose(small.predict(read_only).probabilities, expected.flip(0), atol=1e-5)


def test_the_network_is_left_in_its_mode_and_learns_nothing(small, images):
    small.network.train()
    small.describe(images[:2].requires_grad_(), ["a", "b"])
    assert small.network.training
    assert not small.predict(images).probabilities.requires_grad


def test_to_moves_what_was_described(small, images):
    small.describe(images[:2], ["a", "b"])
    before = small.predict(images).probabilities
    assert small.to("cpu") is small
    assert torch.equal(small.predict(images).probabilities, before)
    assert all(tensor is None or tensor.is_meta for tensor in small.to("meta")._memory)


@pytest.mark.parametrize("head", [few_shot.PrototypeHead(5), few_shot.MatchingHead(5)])
def test_to_another_dtype_leaves_labels_what_they_are(images, head):
    classifier = FewShotClassifier(few_shot.FewShotNetwork(few_shot.ConvEncoder(1, 16, size=28), head), shots=1)
    classifier.describe(images[:2], ["a", "b"])
    before = classifier.predict(images).probabilities
    after = classifier.to(torch.float64).predict(images).probabilities
    assert after.dtype == torch.float64
    assert torch.allclose(after.float(), before, atol=1e-6)


def test_a_network_that_answers_no_numbers_gives_no_classes(small, images):
    small.describe(images[:2], ["a", "b"])
    with torch.no_grad():
        small.network.head.softmax.weight[0, 0] = torch.nan
    with pytest.raises(WeightsError, match="the network returned NaN or infinity: check its weights"):
        small.predict(images)
    with torch.no_grad():
        small.network.encoder.convolutions[0].bias[0] = torch.inf
    with pytest.raises(WeightsError, match="the network returned NaN or infinity: check its weights"):
        small.describe(images[:3], ["c", "d", "e"])
    assert small.classes == ["a", "b"]


@pytest.mark.gpu
def test_the_answers_on_a_gpu_are_the_same(small, images):
    small.describe(images[:3], range(3))
    before = small.predict(images).probabilities
    small.to("cuda")
    assert torch.allclose(small.predict(images).probabilities.cpu(), before, atol=1e-4)
    small.describe(images[:3], range(3))
    assert torch.allclose(small.predict(images.cuda()).probabilities.cpu(), before, atol=1e-4)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([-1, 0, 1], "labels must be integers of 0 and up, got -1"),
        (["a", "a", "a"], "at least 2 classes must be described, got 'a' alone"),
        (["a", "b"], "one label for each image, got 2 labels and 3 images"),
        (["a", 1, 2], "labels must be strings, or integers of 0 and up; got int, str"),
        ([0.0, 1.0, 2.0], "labels must be strings, or integers of 0 and up; got float"),
        ([True, False, True], "got bool"),
        ([[0], [1], [2]], "got list"),
        ("abc", "labels must be a list of strings, or of integers of 0 and up; got 'abc'"),
        (None, "got None"),
    ],
)
def test_labels_that_are_refused_change_nothing(small, images, labels, message):
    small.describe(images[:2], ["x", "y"])
    before = small.predict(images).probabilities
    with pytest.raises(ExamplesError, match=message.replace("[", r"\[")) as error:
        small.describe(images[3:6], labels)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, FastWeightsError)
    assert small.classes == ["x", "y"]
    assert torch.equal(small.predict(images).probabilities, before)


def test_more_classes_than_columns_and_nothing_described(small, images):
    with pytest.raises(ExamplesError, match="takes at most 5 classes, got 6"):
        small.describe(images[:6], range(6))
    with pytest.raises(ExamplesError, match=r"no class has been described: call describe\(images, labels\) first"):
        small.predict(images)


def test_what_a_classifier_is_made_of():
    for wrong in (torch.nn.Linear(2, 2), few_shot.FewShotNetwork(torch.nn.Flatten(), few_shot.PrototypeHead(5))):
        with pytest.raises(
            ValueError, match=r"FewShotClassifier needs a FewShotNetwork whose encoder is one of ConvEncoder"
        ):
            FewShotClassifier(wrong, shots=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shots must be an integer of at least 1, got 0"):
        FewShotClassifier(network(), shots=0)
    unfit = few_shot.FewShotNetwork(few_shot.ConvEncoder(1, 8, size=28), few_shot.FastWeightsHead(16, 5))
    with pytest.raises(ValueError, match="the head must take the 8 features of the encoder, got in_features=16"):
        FewShotClassifier(unfit, shots=1)


def test_it_says_what_it_is(small, images):
    assert repr(small) == "FewShotClassifier(images [1,28,28], up to 5 classes; nothing described)"
    small.describe(images[:2], ["a", "b"])
    assert repr(small).endswith("described: a, b)")
