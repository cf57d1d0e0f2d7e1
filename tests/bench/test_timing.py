import csv

import pytest

from fastweights.bench.timing import append_csv, medians
from fastweights.errors import FastWeightsError


def test_medians_of_rivals_that_take_turns(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fastweights.bench.timing.time.perf_counter", lambda: now[0])
    order = []

    def rival(name, seconds):
        def call():
            order.append(name)
            now[0] += seconds[len([other for other in order if other == name]) - 1]

        return call

    warm = [9.0] * 3
    times = medians({"a": rival("a", [*warm, 1, 5, 2]), "b": rival("b", [*warm, 4, 4, 4])}, rounds=3)
    assert times == pytest.approx({"a": 2000, "b": 4000})
    assert order == ["a", "b"] * 6


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "new" / "times.csv"
    append_csv(path, [{"rival": "a, b", "milliseconds": 1.5}])
    append_csv(path, [{"rival": "c", "milliseconds": 2}, {"rival": "d", "milliseconds": 3}])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rival"], row["milliseconds"]) for row in rows] == [("a, b", "1.5"), ("c", "2"), ("d", "3")]


def test_a_file_with_other_columns_is_refused_and_kept(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("name,age\nada,36\n")
    with pytest.raises(FastWeightsError, match=r"has other columns \(name,age\); choose another --output"):
        append_csv(path, [{"rival": "a"}])
    assert path.read_text() == "name,age\nada,36\n"


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(FastWeightsError, match=r"cannot write .*: Is a directory; choose another --output"):
        append_csv(tmp_path, [{"rival": "a"}])
