"""The picture of a search."""

import itertools

import pytest

from fastweights.sweep import TrialRow, figure
from tests.sweep.helpers import plan

RANGES = ["0.0001:0.01:log", "0.0001:0.002:log", "1e-8:1:log", "0.02:0.4:log", "0.13:0.15:log", "0:8"]


@pytest.mark.parametrize("values", RANGES)
def test_the_labels_of_an_axis_stand_side_by_side(fake, tmp_path, values):
    asked = plan(tmp_path, f"x={values}", "steps=1:100000:log", "kind=smooth,rough")  # the narrowest panels
    params = {"kind": "rough", "steps": 100_000, "x": asked.space["x"].ends[1]}
    drawn = figure(asked, [TrialRow(0, "finished", 1.0, None, params, None, None)])
    drawn.draw_without_rendering()
    for axes in drawn.axes:
        low, high = axes.get_xlim()
        labels = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = [label.get_window_extent() for label in labels]
        assert len(boxes) >= 2
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
