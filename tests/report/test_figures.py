"""The data of the learning curves."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from matplotlib.lines import Line2D

from fastweights.report import learning_curves
from fastweights.report.figures import lines, svg
from fastweights.runs import Curve, Lines, Member, Run, load_run
from tests.fake_runs import WriteRun


def losses(folder: Path, name: str) -> list[float]:
    records = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [record["test_loss"] for record in records if record["kind"] == "epoch"]


def points(line: Line2D) -> dict[str, list[float]]:
    return {"x": numpy.asarray(line.get_xdata()).tolist(), "y": numpy.asarray(line.get_ydata()).tolist()}


def cut(folder: Path, name: str, epochs: int) -> None:
    path = folder / name / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:epochs]))


def test_curves_are_minus_the_test_loss(run_folder: Path) -> None:
    figure = learning_curves(load_run(run_folder))
    assert [axes.get_title() for axes in figure.axes] == ["20 hidden units", "50 hidden units"]
    assert figure.axes[0].get_ylabel() == "test log likelihood (nats)"
    assert figure.axes[0].get_xlabel() == "epochs"
    lines = figure.axes[1].lines
    names = [f"fast-weights-50-seed{seed}" for seed in (1, 2, 3)]
    *seeds, mean = lines[8:12]
    for name, line in zip(names, seeds, strict=True):
        assert points(line)["x"] == list(range(1, 13))
        assert points(line)["y"] == [-loss for loss in losses(run_folder, name)]
        assert line.get_color() == mean.get_color()
        assert line.get_linewidth() < mean.get_linewidth()
    expected = [-sum(point) / 3 for point in zip(*(losses(run_folder, name) for name in names), strict=True)]
    assert points(mean)["y"] == pytest.approx(expected, rel=1e-12)
    assert mean.get_label() == "fast weights"
    floor = lines[12]
    assert (points(floor)["y"], floor.get_linestyle()) == ([-1.43, -1.43], "--")


def test_one_colour_a_model_in_every_panel(run_folder: Path) -> None:
    figure = learning_curves(load_run(run_folder))
    colours = [
        {line.get_label(): line.get_color() for line in axes.lines if line.get_linewidth() > 2} for axes in figure.axes
    ]
    assert colours[0] == colours[1]
    assert len(set(colours[0].values())) == 3
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["IRNN", "LSTM", "fast weights", "floor: ignores its input"]


def test_the_mean_ends_with_the_shortest_seed(write_run: WriteRun) -> None:
    folder = write_run([("LSTM", 50, 1.85, [2.31, 1.44])])
    cut(folder, "lstm-50-seed2", 4)
    longer, shorter, mean = learning_curves(load_run(folder)).axes[0].lines[:3]
    assert [len(points(line)["x"]) for line in (longer, shorter, mean)] == [12, 4, 4]
    first = -(losses(folder, "lstm-50-seed1")[0] + losses(folder, "lstm-50-seed2")[0]) / 2
    assert points(mean)["y"][0] == pytest.approx(first)


def test_a_seed_without_an_epoch_does_not_take_the_mean_away(write_run: WriteRun) -> None:
    folder = write_run([("LSTM", 50, 1.85, [2.31, 1.44])])
    cut(folder, "lstm-50-seed2", 0)
    mean, _ = learning_curves(load_run(folder)).axes[0].lines
    assert points(mean)["y"] == [-loss for loss in losses(folder, "lstm-50-seed1")]


def test_no_floor_without_its_log_likelihood(write_run: WriteRun) -> None:
    figure = learning_curves(load_run(write_run([("LSTM", 50, 1.85, [2.31])], floor_log_likelihood=None)))
    assert len(figure.axes[0].lines) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["LSTM"]


def test_nothing_to_draw_yet(write_run: WriteRun) -> None:
    figure = learning_curves(load_run(write_run([])))
    assert not figure.axes
    assert svg(figure).startswith("<?xml")


def test_panels_go_on_in_the_next_row(write_run: WriteRun) -> None:
    figure = learning_curves(load_run(write_run([("LSTM", size, 1.0, [2.0]) for size in (10, 20, 50, 100)])))
    assert [axes.get_title().split()[0] for axes in figure.axes] == ["10", "20", "50", "100"]
    # The panels with none below them name the axis.
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "epochs", "epochs", "epochs"]


@pytest.mark.parametrize("model", ["_hidden", "$a_{$ $", "<script>alert(1)</script>"])
def test_any_name_can_stand_in_the_legend(write_run: WriteRun, model: str) -> None:
    folder = write_run([("LSTM", 50, 1.0, [2.0, 3.0])])
    for path in folder.glob("*/settings.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    figure = learning_curves(load_run(folder))
    assert model in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "<script" not in svg(figure)


def test_a_long_name_makes_the_figure_wider(write_run: WriteRun) -> None:
    folder = write_run([("LSTM", 50, 1.0, [2.0, 3.0])])
    for path in folder.glob("*/settings.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "a layer with a long name " * 4}))
    figure = learning_curves(load_run(folder))
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_svg_is_the_same_every_time_and_bears_no_date(run_folder: Path) -> None:
    first, second = (svg(learning_curves(load_run(run_folder))) for _ in range(2))
    assert first == second
    assert "<metadata" not in first
    assert "date" not in first


def test_no_global_figures_and_no_window(run_folder: Path) -> None:
    code = (
        "import sys; from fastweights.report import write_page; write_page(sys.argv[1]);"
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(run_folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False False\n"


def test_a_band_of_two_deviations_stands_for_the_seeds(tmp_path: Path) -> None:
    members = []
    for seed, scores in ((1, (1.0, 2.0, 30.0)), (2, (3.0, 2.0, 50.0)), (3, (2.0, 2.0, 40.0))):
        epochs = [{"epoch": step, "step": step, "classes": score} for step, score in enumerate(scores, start=1)]
        epochs[1] |= {"level": 7, "level_steps": 10.0 * seed}
        members.append(Member(f"a-seed{seed}", {"model": "a", "seed": seed}, {}, epochs, result=None))
    curves = (Curve("classes", "shown", spread=True), Curve("level_steps", "taken", against="level", spread=True))
    left, right = learning_curves(Run(tmp_path, "x/y", "quick", [], members, curves=curves)).axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("steps", "classes of the level")
    assert [points(line)["y"] for line in left.lines] == [[2.0, 2.0, 40.0]]
    assert points(right.lines[0]) == {"x": [7], "y": [20.0]}
    (band,) = left.collections
    outline = numpy.asarray(band.get_paths()[0].vertices)
    for step, middle, deviations in ((1, 2, 2), (2, 2, 0), (3, 40, 20)):
        heights = outline[outline[:, 0] == step, 1]
        assert (heights.min(), heights.max()) == pytest.approx((middle - deviations, middle + deviations))
    assert left.get_ylim()[0] <= 0
    pair = learning_curves(Run(tmp_path, "x/y", "quick", [], members[:2], curves=curves)).axes[0]
    assert not pair.collections  # two have no spread to speak of
    assert len(pair.lines) == 3


def test_the_best_seeds_alone_and_scores_below_zero(tmp_path: Path) -> None:
    members = []
    for seed, loss in enumerate((0.5, -0.9, 0.7, -0.8), start=1):
        epochs = [{"epoch": 1, "frames": 100, "validation_return": -loss}]
        result = {"validation_loss": loss} if seed < 4 else None  # the last one has not finished
        members.append(Member(f"a-seed{seed}", {"model": "a", "seed": seed}, {}, epochs, result))
    everybody = Curve("validation_return", "mean return", against="frames", spread=True)
    best = dataclasses.replace(everybody, best=2, spread=False)
    run = Run(tmp_path, "x/y", "quick", [], members, curves=(everybody, best))
    left, right = learning_curves(run).axes
    assert points(left.lines[0])["y"] == [pytest.approx(0.125)]
    assert left.get_ylim()[0] < -0.7  # the band is not cut where scores may be below zero
    assert sorted(points(line)["y"][0] for line in right.lines) == [-0.5, 0.2, 0.9]  # two seeds and their mean
    assert right.get_xlabel() == "frames"


def test_a_curve_may_have_points_within_an_epoch() -> None:
    epochs = [{"epoch": index, "passes": passes, "right": 10 * passes} for index, passes in enumerate((0.0, 0.1, 1.5))]
    member = Member("parametric-seed1", {"model": "Parametric"}, {}, epochs, result=None)
    curves = (Curve("right", "right, %", against="passes"),)
    (axes,) = learning_curves(Run(Path("."), "a/b", "quick", [], [member], curves=curves)).axes
    assert points(axes.lines[0]) == {"x": [0.0, 0.1, 1.5], "y": [0.0, 1.0, 15.0]}
    assert axes.get_xlabel() == "passes over all classes"


def test_lines_have_one_style_a_series_in_every_panel_and_one_legend() -> None:
    """As the accuracy of many models against the sizes of their states, and against learning rates."""
    names = [f"model {number}" for number in range(26)]  # more than there are colours and line styles
    first = Lines("best", "accuracy", "state", {name: [(64, 0.5), (128, 0.9)] for name in names}, log=True, floor=0.25)
    second = Lines("64 features", "accuracy", "rate", {names[3]: [(0.1, 0.4)]})
    figure = lines(Run(Path("."), "recall/mqar", "quick", [], [], lines=(first, second)))
    assert figure is not None
    left, right = figure.axes
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    assert [axes.get_title() for axes in figure.axes] == ["best", "64 features"]
    *curves, floor = left.lines
    assert points(curves[3]) == {"x": [64, 128], "y": [0.5, 0.9]}
    assert points(floor)["y"] == [0.25, 0.25]
    assert (right.lines[0].get_color(), right.lines[0].get_linestyle()) == (
        curves[3].get_color(),
        curves[3].get_linestyle(),
    )
    for shape in (Line2D.get_linestyle, Line2D.get_marker):  # a line of one point has its marker alone
        assert len({(curve.get_color(), shape(curve)) for curve in curves[:24]}) == 24
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert lines(Run(Path("."), "recall/mqar", "quick", [], [])) is None


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ((0.001, 0.008), ["0.001", "0.002", "0.005"]),
        ((60.0, 540.0), ["100", "200", "500"]),
        ((3.0, 5.0), ["3", "4", "5"]),
        ((100.0, 30_000.0), ["$\\mathdefault{10^{2}}$", "$\\mathdefault{10^{3}}$", "$\\mathdefault{10^{4}}$"]),
    ],
)
def test_a_short_logarithmic_axis_has_a_few_plain_numbers(x: tuple[float, float], expected: list[str]) -> None:
    panel = Lines("best", "accuracy", "state", {"LSTM": [(each, 0.5) for each in x]}, log=True)
    figure = lines(Run(Path("."), "recall/mqar", "quick", [], [], lines=(panel,)))
    assert figure is not None
    svg(figure)
    (axis,) = (axes.xaxis for axes in figure.axes)
    least, most = axis.get_view_interval()
    ticks = axis.get_major_ticks() + axis.get_minor_ticks()
    named = {tick.get_loc(): tick.label1.get_text() for tick in ticks if least <= tick.get_loc() <= most}
    assert [named[place] for place in sorted(named) if named[place]] == expected
