"""The numbers of the table."""

import io
import json
import math
from pathlib import Path

import pytest
import rich.console

from fastweights.report import console_table, markdown_table, remarks, table_rows
from fastweights.runs import RunFolder, load_run, write_result
from tests.fake_runs import WriteRun, write_member


def test_mean_and_sample_standard_deviation(run_folder: Path) -> None:
    rows = {(row.model, row.hidden_units): row for row in table_rows(load_run(run_folder))}
    # (2.31 + 1.44 + 1.98) / 3 = 1.91; squared deviations 0.16 + 0.2209 + 0.0049, over 2, and the root of it.
    assert rows["LSTM", "50"].ours == "1.91 ± 0.44 (3 seeds)"
    assert round(math.sqrt((0.4**2 + 0.47**2 + 0.07**2) / 2), 2) == 0.44
    assert rows["fast weights", "50"].ours == "0.13 ± 0.05 (3 seeds)"
    assert rows["LSTM", "50"][:4] == ("LSTM", "50", "test error, %", "1.85")
    assert rows["LSTM", "50"].floor == "61.70"


def test_one_seed_and_none(write_run: WriteRun) -> None:
    one, none = table_rows(load_run(write_run([("LSTM", 50, 1.85, [2.314]), ("IRNN", 50, 60.23, [])])))
    assert one.ours == "2.31 (1 seed)"
    assert (none.paper, none.ours, none.best_on_validation, none.floor) == ("60.23", "-", "-", "61.70")


def test_absent_numbers_are_dashes(tmp_path: Path) -> None:
    row: dict[str, object] = {
        "model": "ConvNet",
        "hidden_size": None,
        "metric": "test error, %",
        "ours": [],
        "paper": None,
    }
    (tmp_path / "result.json").write_text(json.dumps({"experiment": "a", "preset": "b", "rows": [row]}))
    assert table_rows(load_run(tmp_path)) == [("ConvNet", "-", "test error, %", "-", "-", "-", "-")]


def set_result(folder: Path, seed: int, **values: float) -> None:
    path = folder / f"fast-weights-50-seed{seed}" / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps({**json.loads(last), **values})]) + "\n")


@pytest.mark.parametrize(
    ("errors", "losses", "expected"),
    [
        ((0.3, 0.2, 0.1), (0.0, 0.0, 0.0), "0.18"),  # The best on validation is not the best on test.
        ((0.0, 0.0, 0.0), (0.3, 0.1, 0.2), "0.09"),  # Equal errors: the lower loss.
        ((0.0, 0.0, 0.0), (0.1, 0.1, 0.1), "0.12"),  # Equal losses too: the first seed.
    ],
)
def test_best_seed_is_chosen_on_validation(
    write_run: WriteRun, errors: tuple[float, ...], losses: tuple[float, ...], expected: str
) -> None:
    folder = write_run([("fast weights", 50, 0.0, [0.12, 0.09, 0.18])])
    for seed, (error, loss) in enumerate(zip(errors, losses, strict=True), start=1):
        set_result(folder, seed, validation_error=error, validation_loss=loss)
    (row,) = table_rows(load_run(folder))
    assert row.best_on_validation == expected


def test_another_model_of_the_same_score_chooses_no_seed(write_run: WriteRun) -> None:
    """The IRNN is best on validation of all, and as good on test as the seed that was not chosen."""
    folder = write_run([("fast weights", 50, 0.0, [0.2, 0.1]), ("IRNN", 50, 60.23, [0.2])])
    for seed, error in ((1, 2.0), (2, 1.0)):
        set_result(folder, seed, validation_error=error)
    assert [row.best_on_validation for row in table_rows(load_run(folder))] == ["0.10", "0.20"]


def test_rows_of_one_model_and_size_have_their_own_best_seeds(tmp_path: Path) -> None:
    """An agent of the same size is trained in several environments, and a row may be of a part of the test."""
    rows = []
    for place, name in enumerate(("easy", "hard")):
        for seed in (1, 2):
            score = float(10 * place + seed)
            metrics = {"kind": "result", "test_return": score, "validation_loss": score}
            settings = {"model": "GRU", "hidden_size": 5, "seed": seed, "environment": name}
            with RunFolder(tmp_path / f"{name}-seed{seed}", settings) as member:
                member.append(metrics)
        about = {"model": "GRU", "hidden_size": 5, "metric": f"test return, {name}", "floor": 0.0}
        rows.append(about | {"ours": [10.0 * place + 1, 10.0 * place + 2], "settings": {"environment": name}})
    part = {"model": "GRU", "hidden_size": 5, "metric": "test return, first steps", "ours": [0.5], "floor": 0.0}
    write_result(tmp_path, experiment="a", preset="b", command="c", requested=[], rows=[*rows, part])
    assert [row.best_on_validation for row in table_rows(load_run(tmp_path))] == ["1.00", "11.00", "-"]


def test_markdown(run_folder: Path) -> None:
    lines = markdown_table(load_run(run_folder)).splitlines()
    assert lines[0] == "| model | hidden units | metric | paper | ours | best seed on validation | floor |"
    assert lines[5] == "| LSTM | 50 | test error, % | 1.85 | 1.91 ± 0.44 (3 seeds) | 1.44 | 61.70 |"
    assert "Floor: the score of a model that ignores its input." in lines[-1]


def test_markdown_escapes_what_would_be_markup(write_run: WriteRun) -> None:
    text = markdown_table(load_run(write_run([("a|b <script> *c* [d](e)", 50, 1.0, [])])))
    row = text.splitlines()[2]
    assert row.startswith(r"| a\|b &lt;script&gt; \*c\* \[d\](e) | 50 |")


CHANGED = {"lstm-50-seed1": {"decay": [0.95, 0.9], "[b]odd[/b]": [[1, 2], None]}}


def test_the_table_says_which_settings_are_not_the_presets(write_run: WriteRun) -> None:
    run = load_run(write_run([("LSTM", 50, 1.85, [2.3]), ("IRNN", 50, 60.23, [60.1])], changes=CHANGED))
    told = (
        "Changed from the preset quick: for LSTM decay 0.95 (0.9), [b]odd[/b] 1 2 (None). "
        "The rows of LSTM are not the preset's comparison with the paper."
    )
    assert remarks(run) == told
    assert "decay 0.95 (0.9)" in markdown_table(run).splitlines()[-1]
    written = io.StringIO()
    rich.console.Console(file=written, width=80).print(console_table(run))
    assert told in " ".join(written.getvalue().split())
    assert "preset quick" in written.getvalue().splitlines()[0]


@pytest.mark.parametrize("cut", [1, 40, 400])  # the end of the line, a part of it, and more lines than one
def test_a_lost_result_is_named(write_run: WriteRun, cut: int) -> None:
    folder = write_run([("LSTM", 50, 1.85, [2.3, 2.4]), ("IRNN", 50, 60.23, [60.1])])
    write_member(folder, "LSTM", 20, 1, 2.0)  # has no row yet
    path = folder / "lstm-50-seed2" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    told = remarks(load_run(folder))
    assert told.count("lost") == (cut > 1)
    assert (cut == 1) or told.startswith("lstm-50-seed2 has lost its result: its metrics.jsonl was cut, and what is")


def test_a_member_that_is_still_trained_has_lost_nothing(write_run: WriteRun) -> None:
    folder = write_run([("LSTM", 50, 1.85, [2.3, 2.4])])
    path = write_member(folder, "LSTM", 50, 3, 2.0) / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert remarks(load_run(folder)) == ""


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_console(write_run: WriteRun, width: int) -> None:
    run = load_run(write_run([("[red]fast[/red]", 50, 0.0, [0.12, 0.09, 0.18]), ("LSTM", 50, 1.85, [])]))
    written = io.StringIO()
    rich.console.Console(file=written, width=width).print(console_table(run, width))
    text = written.getvalue()
    assert "…" not in text
    for cell in ("[red]fast[/red]", "LSTM", "1.85", "61.70"):
        assert cell in text
    for words in ("0.13 ± 0.05 (3 seeds)", "Floor: the score of a model that ignores its input."):
        assert words in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
