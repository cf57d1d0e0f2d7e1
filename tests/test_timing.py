import math

import pytest

from fastweights.timing import medians, plan


@pytest.fixture
def rival(monkeypatch):
    """Makes rivals that take the seconds they are told to, one after another, and note their turns."""
    now = [0.0]
    monkeypatch.setattr("fastweights.timing.time.perf_counter", lambda: now[0])

    def make(order, name, seconds):
        def call():
            order.append(name)
            now[0] += seconds[order.count(name) - 1]

        return call

    return make


def test_medians_of_rivals_that_take_turns(rival):
    order: list[str] = []
    warm = [9.0] * 3
    rivals = {"a": rival(order, "a", [*warm, 1, 5, 2]), "b": rival(order, "b", [*warm, 4, 4, 4])}
    times = medians(rivals, rounds=3)
    assert {name: timing.milliseconds for name, timing in times.items()} == pytest.approx({"a": 2000, "b": 4000})
    assert {timing.rounds for timing in times.values()} == {3}
    assert order == ["a"] * 3 + ["b"] * 3 + ["a", "b"] * 3


def test_a_slow_rival_gets_fewer_rounds_spread_over_those_of_the_others(rival):
    order: list[str] = []
    times = medians(
        {"slow": rival(order, "slow", [5.0] * 9), "fast": rival(order, "fast", [0.125] * 99)}, rounds=12, budget=21.5
    )
    assert (times["slow"].rounds, times["fast"].rounds) == (4, 12)
    assert order[:4] == ["slow"] + ["fast"] * 3  # one warm-up told
    assert order[4:] == ["fast", "fast", "slow", "fast"] * 4


def test_another_clock_may_measure():
    calls: list[str] = []
    seconds = iter([9.0, 9.0, 9.0, 1.0, 5.0, 2.0])

    def measure(call):
        call()
        return next(seconds)

    times = medians({"a": lambda: calls.append("a")}, 3, measure=measure)
    assert (times["a"], len(calls)) == ((2000, 3), 6)


@pytest.mark.parametrize(
    ("seconds", "rounds", "budget", "planned"),
    [
        ({"a": 1.0}, 30, math.inf, {"a": 30}),
        ({"a": 10.0, "b": 0.1}, 30, 1.0, {"a": 3, "b": 5}),  # at least three, whatever the budget
        ({"a": 10.0}, 2, 1.0, {"a": 2}),  # but no more than were asked for
        ({"a": 0.0, "b": 1.0}, 5, 4.0, {"a": 5, "b": 4}),
    ],
)
def test_rounds_fit_a_budget(seconds, rounds, budget, planned):
    assert plan(seconds, rounds, budget) == planned
