"""What `fit` warns of, by what it has measured: nothing at a bound, one sentence beyond it."""

import pytest

from fastweights.memory.classifier.fit_report import FitReport, find_lacks

GOOD = FitReport(
    examples=1000,
    repeated=0,
    classes=10,
    features=8,
    axes=8,
    shrinkage=0.1,
    right=0.9,
    unknown_rate=0.05,
    unknown=0.05,
    told=0.5,
    old_loss=0.01,
    shots=(1, 5, 20),
    lost=(0.01, 0.01, 0.01),
    new=(0.2, 0.6, 0.8),
)
KEPT = 10_000  # so many that chance moves the first share by 3 sqrt(0.05 0.95 / 10,000) = 0.0065


def test_what_was_asked_and_is_met_needs_no_words():
    assert find_lacks(GOOD, KEPT, {}) == []


@pytest.mark.parametrize(
    ("within", "beyond", "words"),
    [
        ({"repeated": 111}, {"repeated": 112}, "112 of 1112 examples repeat another of their class"),
        ({"unknown": 0.066}, {"unknown": 0.067}, "6.7 % of old inputs that were left out are called unknown"),
        ({"lost": (0.022, 0.01, 0.01)}, {"lost": (0.0235, 0.01, 0.01)}, "of old answers are lost to a class learnt fr"),
        ({"new": (0.1, 0.2, 0.8)}, {"new": (0.1, 0.19, 0.8)}, "learnt from a few examples only 19 % of the inputs"),
        ({"unknown_rate": 0.003, "unknown": 0}, {"unknown_rate": 0.002, "unknown": 0}, "give fit() 1500 examples"),
    ],
)
def test_a_bound_is_kept_or_told(within, beyond, words):
    assert find_lacks(GOOD._replace(**within), KEPT, {}) == []
    (lack,) = find_lacks(GOOD._replace(**beyond), KEPT, {})
    assert words in lack


def test_classes_of_too_few_examples_are_named_up_to_five():
    few = {f"class {number}": number for number in range(5)}
    (lack,) = find_lacks(GOOD, KEPT, few)
    assert lack.startswith("5 classes have too few examples")
    assert "('class 0' 0, 'class 1' 1, 'class 2' 2, 'class 3' 3, 'class 4' 4)" in lack
    (lack,) = find_lacks(GOOD, KEPT, few | {"class 5": 5})
    assert "'class 4' 4, ...)" in lack
    assert "class 5" not in lack
