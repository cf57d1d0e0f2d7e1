"""The estimator of scikit-learn, by scikit-learn's own checks and beside the classifier behind it; skipped without."""

import copy
import doctest
import importlib
import pickle
import warnings

import numpy
import pytest
import torch

from fastweights import memory

sklearn = pytest.importorskip("sklearn")

# What it imports warns, and fit() says so where classes have few examples.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("fastweights.integrations.sklearn")


@pytest.fixture(scope="module")
def digits():
    """Two writers' digits: 0 to 6 to fit, and all to ask."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[:600][y[:600] < 7], y[:600][y[:600] < 7], x[600:], y[600:]


def blobs(classes=4, count=12, width=5):
    generator = numpy.random.default_rng(0)
    y = numpy.arange(classes).repeat(count)
    return 6 * numpy.eye(classes, width)[y] + generator.normal(size=(len(y), width)), y


def test_the_examples_run(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.slow
def test_scikit_learns_own_checks_pass(module):
    from sklearn.utils.estimator_checks import check_estimator

    results = check_estimator(module.AdaptiveClassifier(), on_skip=None, on_fail=None)
    wrong = {each["check_name"]: each["exception"] for each in results if each["status"] not in ("passed", "skipped")}
    assert wrong == {}
    # Without its own setting SCIPY_ARRAY_API, scikit-learn leaves out the arrays of other libraries.
    assert {each["check_name"] for each in results if each["status"] == "skipped"} <= {"check_array_api_input"}
    assert len(results) > 40


def test_it_answers_as_the_classifier_behind_it(module, digits):
    x, y, asked, _ = digits
    ours = module.AdaptiveClassifier(unknown_rate=0.1, old_loss=0.02, batch_size=100).fit(x, y)
    plain = memory.AdaptiveClassifier(torch.nn.Identity(), classes=[str(digit) for digit in range(7)])
    report = plain.fit(torch.from_numpy(x).float(), [str(digit) for digit in y], unknown_rate=0.1, old_loss=0.02)
    assert str(ours.report_) == str(report)
    answers = plain.predict(torch.from_numpy(asked).float())
    assert ours.predict(asked).tolist() == list(map(int, answers.names))
    assert ours.predict_unknown(asked).tolist() == answers.unknown.tolist()
    expected = answers.probabilities.double() / answers.unknown_score.double().neg().sigmoid()[:, None]
    numpy.testing.assert_allclose(ours.predict_proba(asked), expected, rtol=1e-4, atol=1e-6)
    # So far away that the unknown has all of the probability, and further.
    far = numpy.concatenate([asked[:50] * scale for scale in (1, 3, 10, 1e5)])
    chances = ours.predict_proba(far)
    numpy.testing.assert_allclose(chances.sum(1), 1)
    assert (chances.argmax(1) == ours.predict(far)).all()


def test_a_label_that_is_new_is_learnt_from_a_few_examples_and_its_column_is_sorted_in(module, digits):
    from sklearn.datasets import load_digits

    x, y, asked, right = digits
    all_x, all_y = load_digits(return_X_y=True)
    ours = module.AdaptiveClassifier().fit(x[y > 0], y[y > 0])
    assert ours.predict_unknown(asked[right == 0]).mean() > 0.5
    before = ours.score(asked[(right > 0) & (right < 7)], right[(right > 0) & (right < 7)])
    zeros = all_x[:600][all_y[:600] == 0][:5]
    assert ours.partial_fit(zeros, [0] * 5) is ours
    assert ours.classes_.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert ours.adaptive_.classes == ("1", "2", "3", "4", "5", "6", "0")
    assert (ours.predict(asked[right == 0]) == 0).mean() > 0.9
    chances = ours.predict_proba(asked)
    assert (ours.classes_[chances.argmax(1)] == ours.predict(asked)).all()
    assert ours.predict_unknown(asked[right == 0]).mean() < 0.3
    assert ours.score(asked[(right > 0) & (right < 7)], right[(right > 0) & (right < 7)]) > before - 0.03
    ours.adaptive_.forget("0")
    assert ours.classes_.tolist() == [1, 2, 3, 4, 5, 6]
    assert ours.predict_proba(asked).shape == (len(asked), 6)


def test_frames_lists_and_labels_of_every_kind_are_taken(module):
    pandas = pytest.importorskip("pandas")
    x, y = blobs()
    expected = module.AdaptiveClassifier().fit(x, y).predict_proba(x)
    names = numpy.array(["ant", "bee", "cat", "dog"])[y]
    for inputs in (x.tolist(), x.astype("float32"), pandas.DataFrame(x, columns=list("abcde"))):
        for labels in (
            y.tolist(),
            y.astype(float),
            names,
            names.astype(object),
            pandas.Series(names, index=range(100, 148)),
            pandas.Series(pandas.Categorical(names)),
            y > 1,
        ):
            ours = module.AdaptiveClassifier().fit(inputs, labels)
            assert (ours.predict(inputs) == numpy.asarray(labels)).all()
            if len(ours.classes_) == 4:
                numpy.testing.assert_allclose(ours.predict_proba(inputs), expected, atol=1e-5)
    frame = pandas.DataFrame(x, columns=list("abcde"))
    ours = module.AdaptiveClassifier().fit(frame, names).partial_fit(frame[:5] - 20, ["eel"] * 5)
    assert ours.classes_.tolist() == ["ant", "bee", "cat", "dog", "eel"]
    assert ours.feature_names_in_.tolist() == list("abcde")
    assert ours.predict(frame[:5] - 20).tolist() == ["eel"] * 5
    # An integer is the label of the float that it equals.
    ours = module.AdaptiveClassifier().fit(x, y.astype(float)).partial_fit(x[:2] - 20, [0, 9])
    assert ours.classes_.tolist() == [0, 1, 2, 3, 9]


def test_clones_pipelines_searches_copies_and_pickles(module):
    from sklearn.base import clone
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = blobs(count=30)
    foreign = numpy.full((20, 5), -5) + numpy.random.default_rng(1).normal(size=(20, 5))
    ours = clone(module.AdaptiveClassifier(unknown_rate=0.2))
    assert ours.get_params()["unknown_rate"] == 0.2
    assert set(ours.get_params()) == {"body", "head", "unknown_rate", "old_loss", "capacity", "batch_size"}

    def told(estimator, x, y):
        asked = numpy.concatenate([estimator.predict_unknown(x), estimator.predict_unknown(foreign)])
        return balanced_accuracy_score(numpy.arange(len(asked)) >= len(x), asked)

    search = GridSearchCV(module.AdaptiveClassifier(), {"unknown_rate": [0.02, 0.5, 0.9]}, scoring=told, cv=3)
    search.fit(x, y)
    assert search.best_params_ == {"unknown_rate": 0.02}
    assert search.cv_results_["mean_test_score"].tolist() == sorted(search.cv_results_["mean_test_score"])[::-1]
    pipeline = make_pipeline(StandardScaler(), module.AdaptiveClassifier()).set_params(adaptiveclassifier__capacity=7)
    assert cross_val_score(pipeline, 1e6 * x, y, cv=3).min() > 0.9
    pipeline.fit(x, y)
    for some in (foreign[:5], foreign[5:9]):
        pipeline[-1].partial_fit(pipeline[:-1].transform(some), [9] * len(some))
    assert len(pipeline[-1].adaptive_) == 7
    for again in (pickle.loads(pickle.dumps(pipeline)), copy.deepcopy(pipeline)):
        numpy.testing.assert_array_equal(again.predict_proba(foreign), pipeline.predict_proba(foreign))


class Lengths(torch.nn.Module):
    """Counts letters of texts, or of pictures' names."""

    def forward(self, texts):
        assert isinstance(texts, list)
        return torch.tensor([[text.count("a"), text.count("b")] for text in texts]).float()


def test_a_body_takes_arrays_integers_texts_and_tensors_with_the_head_that_it_was_trained_with(module):
    pandas = pytest.importorskip("pandas")
    x, y = blobs(count=30)
    torch.manual_seed(0)
    body, head = torch.nn.Linear(5, 8).double(), torch.nn.Linear(8, 4).double()
    plain = memory.AdaptiveClassifier(body, head, classes=list("0123"))
    plain.fit(torch.from_numpy(x), [str(label) for label in y])
    expected = plain.predict(torch.from_numpy(x))
    for inputs in (x, x.tolist(), torch.from_numpy(x), list(torch.from_numpy(x)), pandas.DataFrame(x)):
        ours = module.AdaptiveClassifier(body, head, batch_size=50).fit(inputs, y)
        assert ours.predict_unknown(inputs).tolist() == expected.unknown.tolist()
        assert ours.predict(inputs).tolist() == list(map(int, expected.names))

    ids = numpy.arange(4).repeat(30)[:, None] + numpy.zeros((1, 3), int)
    ours = module.AdaptiveClassifier(torch.nn.EmbeddingBag(5, 8)).fit(ids + (numpy.arange(120)[:, None] % 2), y // 2)
    assert ours.predict(ids[:1]).tolist() == [0]

    texts = [letter * (count % 7) + "c" * 9 for count in range(60) for letter in "ab"]
    labels = ["a", "b"] * 60
    for some in (texts, tuple(texts), numpy.array(texts), pandas.Series(texts)):
        ours = module.AdaptiveClassifier(Lengths()).fit(list(some) if isinstance(some, tuple) else some, labels)
        assert ours.predict(["aaaa", "bbbbbb"]).tolist() == ["a", "b"]


@pytest.mark.parametrize("unit", ["D", "s", "ns"])
def test_dates_are_labels_that_later_ones_join(module, unit):
    x, y = blobs()
    days = numpy.datetime64("2020-01-01", unit) + y * numpy.timedelta64(1, "D")
    ours = module.AdaptiveClassifier().fit(x, days)
    assert (ours.predict(x) == days).all()
    assert ours.score(x, days) == 1
    later = numpy.datetime64("2019-01-01", unit)
    ours.partial_fit(x[:5] - 20, numpy.full(5, later))
    assert (ours.predict(x[:5] - 20) == later).all()
    assert ours.classes_.tolist() == numpy.unique([*days, later]).tolist()
    for wrong in ([7], ["2020-01-01"]):
        with pytest.raises(ValueError, match=r"labels of the kind of those of fit\(\), such as .*2020-01-01"):
            ours.partial_fit(x[:1], wrong)


def test_what_cannot_be_is_refused_in_words(module):
    from sklearn.exceptions import NotFittedError

    x, y = blobs()
    ours = module.AdaptiveClassifier()
    for call in (ours.predict, ours.predict_proba, ours.predict_unknown):
        with pytest.raises(NotFittedError):
            call(x)
    with pytest.raises(ValueError, match=r"two classes at least, got one class: 0"):
        ours.fit(x[:5], y[:5])
    with pytest.raises(ValueError, match=r"unknown_rate must lie between 0 and 1, got 7"):
        module.AdaptiveClassifier(unknown_rate=7).fit(x, y)
    with pytest.raises(ValueError, match=r"batch_size must be an integer of at least 1, got 0"):
        module.AdaptiveClassifier(batch_size=0).fit(x, y)
    for wrong in (lambda inputs: inputs, "resnet"):
        with pytest.raises(ValueError, match=r"body must be a torch\.nn\.Module, got .*: wrap a function in one"):
            module.AdaptiveClassifier(wrong).fit(x, y)
    with pytest.raises(ValueError, match=r"must be a list of texts, got the single text 'aba'"):
        module.AdaptiveClassifier(Lengths()).fit("aba", [0, 1, 1])
    ours.partial_fit(x, y, classes=range(4))
    chances = ours.predict_proba(x)
    with pytest.raises(ValueError, match=r"y has labels that are not among classes: \[7\]"):
        ours.partial_fit(x[:1], [7], classes=range(4))
    with pytest.raises(ValueError, match=r"labels of the kind of those of fit\(\), such as 0, got 'new'"):
        ours.partial_fit(x[:1], ["new"])
    with pytest.raises(ValueError, match=r"Found input variables with inconsistent numbers of samples"):
        ours.partial_fit(x[:3], [8])
    with pytest.raises(ValueError, match=r"contains NaN"):
        ours.partial_fit(numpy.full((1, 5), numpy.nan), [8])
    with pytest.raises(ValueError, match=r"features"):
        ours.partial_fit(x[:1, :3], [8])
    numpy.testing.assert_array_equal(ours.predict_proba(x), chances)
    with pytest.raises(ValueError, match=r"X has no inputs"):
        module.AdaptiveClassifier(torch.nn.Identity()).fit(x, y).predict(x[:0])
    ours.adaptive_.add_examples(torch.full((1, 5), 99.0), "far")
    with pytest.raises(ValueError, match=r"adaptive_ has learnt 'far' without partial_fit\(\)"):
        ours.predict(x)
