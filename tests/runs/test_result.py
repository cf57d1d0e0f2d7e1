"""The table of a run and its members: written, published, read, and named where they are damaged."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastweights.errors import RunError
from fastweights.runs import Row, Score, load_run, publish, write_result
from tests.fake_runs import SCORES, WriteRun, write_member

ONE = [("LSTM", 50, 1.85, [2.31])]


def test_reads_rows_and_members(run_folder: Path) -> None:
    run = load_run(run_folder)
    assert (run.folder, run.experiment, run.preset) == (run_folder, "ba2016/associative-retrieval", "quick")
    assert run.rows[3] == Row("LSTM", 50, "test error, %", (2.31, 1.44, 1.98), 1.85, 61.7)
    assert run.floor_log_likelihood == -1.43
    assert run.models == ["IRNN", "LSTM", "fast weights"]
    assert [(member.model, member.hidden_size, member.seed) for member in run.members] == [
        (model, size, seed) for model, size, _, _ in SCORES for seed in (1, 2, 3)
    ]
    member = run.members[-1]
    assert member.name == "fast-weights-50-seed3"
    assert member.settings["batch_size"] == 128
    assert member.environment["torch"] == "2.13.0"
    assert [record["epoch"] for record in member.epochs] == list(range(1, 13))
    assert member.result is not None
    assert member.result["test_error"] == 0.18


def test_scores_stand_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    for seed in (10, 2, 1):
        write_member(tmp_path, "LSTM", 50, seed, float(seed))
    score = Score("test error, %", {}, None)
    write_result(tmp_path, experiment="a", preset="b", command="c", requested=[("LSTM", 50)], scores=[score])
    run = load_run(tmp_path)
    assert run.rows[0].ours == (1.0, 2.0, 10.0)
    assert [member.seed for member in run.members] == [1, 2, 10]


def test_the_changes_of_a_member_that_is_trained_again_are_the_new_ones(tmp_path: Path) -> None:
    first, second = "lstm-50-seed1", "lstm-50-seed2"
    for seed in (1, 2):
        write_member(tmp_path, "LSTM", 50, seed, 2.0)

    def write(changes: dict[str, dict[str, list[float]]]) -> object:
        requested = [("LSTM", 50)]
        write_result(tmp_path, experiment="a", preset="b", command="c", requested=requested, changes=changes)
        return load_run(tmp_path).changes

    write({first: {"decay": [0.95, 0.9]}, second: {"decay": [0.95, 0.9]}})
    assert write({first: {"decay": [0.8, 0.9]}}) == {first: {"decay": [0.8, 0.9]}, second: {"decay": [0.95, 0.9]}}
    assert write({first: {}}) == {second: {"decay": [0.95, 0.9]}}  # as the preset has it


@pytest.mark.parametrize("changes", [[1], {"lstm-50-seed1": 3}, {"lstm-50-seed1": [1]}])
def test_changes_of_another_kind_are_refused(write_run: WriteRun, changes: object) -> None:
    with pytest.raises(RunError, match="is not a result that a run wrote"):
        load_run(write_run(ONE, changes=changes))


def test_a_line_cut_by_a_kill_is_ignored(write_run: WriteRun) -> None:
    folder = write_run(ONE)
    path = folder / "lstm-50-seed1" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in (b"", b"{", lines[5][:-20], lines[5][:-2]):
        path.write_bytes(b"".join(lines[:5]) + cut)
        (member,) = load_run(folder).members
        assert [record["epoch"] for record in member.epochs] == [1, 2, 3, 4, 5]
        assert member.result is None


@pytest.mark.parametrize("broken", [b'{"kind": "epo\n', b"12\n"])
def test_a_broken_line_elsewhere_is_named(write_run: WriteRun, broken: bytes) -> None:
    folder = write_run(ONE)
    path = folder / "lstm-50-seed1" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], broken, *lines[3:]]))
    with pytest.raises(RunError) as caught:
        load_run(folder)
    assert f"{path}, line 3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_epoch_without_its_number_is_named(write_run: WriteRun) -> None:
    folder = write_run(ONE)
    path = folder / "lstm-50-seed1" / "metrics.jsonl"
    path.write_text('{"kind": "epoch"}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: .*lstm-50-seed1 .* without 'epoch'"):
        load_run(folder)


@pytest.mark.parametrize("text", ['{"model": "é"}'.encode("latin-1"), '{"kind": "epoch"}\n'.encode("utf-16")])
def test_metrics_in_another_encoding_are_named_and_not_dropped(write_run: WriteRun, text: bytes) -> None:
    folder = write_run(ONE)
    path = folder / "lstm-50-seed1" / "metrics.jsonl"
    path.write_bytes(text)
    with pytest.raises(RunError, match="line 1 holds bytes that training never writes") as caught:
        load_run(folder)
    assert str(path) in str(caught.value)


def test_an_epoch_repeated_after_a_kill_counts_once(write_run: WriteRun) -> None:
    folder = write_run(ONE)
    path = folder / "lstm-50-seed1" / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps({"kind": "epoch", "epoch": e, "test_loss": x}) + "\n" for e, x in [(1, 3.0), (2, 2.0), (2, 2.5)]
        )
    )
    (member,) = load_run(folder).members
    assert [(record["epoch"], record["test_loss"]) for record in member.epochs] == [(1, 3.0), (2, 2.5)]


def test_a_member_that_has_only_begun(write_run: WriteRun) -> None:
    folder = write_run([])
    member = write_member(folder, "LSTM", 50, 1, 2.0)
    (member / "metrics.jsonl").unlink()
    (member / "environment.json").unlink()
    (folder / "not-a-member").mkdir()
    (begun,) = load_run(folder).members
    assert (begun.environment, begun.epochs, begun.result) == ({}, [], None)


def test_a_folder_without_result(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        load_run(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no result.json; give the folder that `fastweights reproduce` printed"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ('{"experiment": "a",', "not valid JSON"),
        ("[]", "must hold an object"),
        ('{"experiment": "a", "preset": "b"}', "'rows'"),
        ('{"experiment": "a", "preset": "b", "rows": [7]}', "is not a result that a run wrote"),
        ('{"experiment": "a", "preset": "b", "rows": [{"model": "m", "metric": "e"}]}', "'ours'"),
        ('{"experiment": "a", "preset": "b", "rows": [], "curves": [{"key": "e"}]}', "'label'"),
    ],
)
def test_a_damaged_result_is_named_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(RunError) as caught:
        load_run(tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "result.json") in message
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["settings.json", "environment.json"])
def test_a_damaged_member_is_named(write_run: WriteRun, name: str) -> None:
    folder = write_run(ONE)
    path = folder / "lstm-50-seed1" / name
    path.write_bytes(b"{\xff")
    with pytest.raises(RunError, match=r"is not valid JSON") as caught:
        load_run(folder)
    assert str(path) in str(caught.value)


def test_a_published_run_reads_as_the_run_itself(run_folder: Path, tmp_path: Path) -> None:
    before, target = load_run(run_folder), tmp_path / "published"
    publish(run_folder, target)
    assert {path.name for path in target.iterdir()} == {"result.json", "members.jsonl"}
    assert replace(load_run(target), folder=run_folder) == before
    publish(target, target / "again")
    for name in ("result.json", "members.jsonl"):
        assert (target / name).read_bytes() == (target / "again" / name).read_bytes()
    # A member that is trained again in a published folder counts in place of the published one.
    write_member(target, "LSTM", 50, 2, 7.5)
    trained = {member.name: member.result for member in load_run(target).members}
    assert len(trained) == 18
    assert (trained["lstm-50-seed2"] or {})["test_error"] == 7.5


@pytest.mark.parametrize(("line", "says"), [("{", "not valid JSON"), ('{"name": "a"}', "must have the name, settings")])
def test_a_damaged_line_of_the_members_is_named(run_folder: Path, tmp_path: Path, line: str, says: str) -> None:
    publish(run_folder, tmp_path)
    path = tmp_path / "members.jsonl"
    path.write_text(path.read_text() + line)
    with pytest.raises(RunError, match=rf"members\.jsonl, line 19 .*{says}"):
        load_run(tmp_path)


def test_a_run_is_not_published_over_a_file(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="cannot publish in"):
        publish(run_folder, tmp_path / "file")


def test_import_is_light() -> None:
    code = "import sys, fastweights.report, fastweights.runs; print(sorted({'torch', 'matplotlib', 'rich', 'numpy'} & sys.modules.keys()))"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
