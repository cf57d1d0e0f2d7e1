"""The registry of data sets: where they are found, and what is checked."""

import dataclasses
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastweights.errors import DataError
from fastweights.tasks import _archives, datasets

from .small_sets import FREE_SET, PLAIN_SET, Server, names_in, put_plain

pytestmark = pytest.mark.usefixtures("places", "registry")


def test_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argument, variable, cache = tmp_path / "argument", tmp_path / "variable", tmp_path / "cache" / "fastweights"
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(variable))
    argument.mkdir()
    variable.mkdir()
    in_cache = put_plain(cache)
    assert datasets.locate(PLAIN_SET, argument) == in_cache
    in_variable = put_plain(variable)
    assert datasets.locate(PLAIN_SET, argument) == in_variable
    in_argument = put_plain(argument)
    assert datasets.locate(PLAIN_SET, argument) == in_argument
    assert datasets.locate(PLAIN_SET, str(argument)) == in_argument
    assert datasets.locate(PLAIN_SET) == in_variable
    monkeypatch.setenv("FASTWEIGHTS_DATA", "")
    assert datasets.locate(PLAIN_SET) == in_cache


def test_a_check_of_one_folder_looks_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_plain(tmp_path / "variable")
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "variable"))
    (tmp_path / "argument").mkdir()
    results = datasets.check(PLAIN_SET, tmp_path / "argument")
    assert [(result.path.parent.parent, result.found) for result in results] == [(tmp_path / "argument", "missing")] * 2
    assert all(result.ok for result in datasets.check(PLAIN_SET))


@pytest.mark.parametrize(
    "call",
    [datasets.locate, datasets.get, datasets.check, lambda _: datasets.status()],
    ids=["locate", "get", "check", "status"],
)
@pytest.mark.parametrize("mistyped", ["nowhere", "file"])
def test_a_variable_that_names_no_folder_is_refused(
    call: Callable[[str], object], mistyped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_plain(tmp_path / "cache" / "fastweights")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / mistyped))
    with pytest.raises(DataError, match=f"^FASTWEIGHTS_DATA is {tmp_path / mistyped}, and there is no such folder"):
        call(PLAIN_SET)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("FASTWEIGHTS_DATA", "~/data")
    folder = put_plain(tmp_path / "data")
    assert datasets.locate(PLAIN_SET) == folder


@pytest.mark.parametrize("call", [datasets.locate, datasets.get, datasets.check, lambda _, root: datasets.status(root)])
@pytest.mark.parametrize("mistyped", ["nowhere", "file"])
def test_a_folder_that_is_not_there_is_refused_first(
    call: Callable[[str, Path], object], mistyped: str, tmp_path: Path, server: Server
) -> None:
    """Also where another place has the set, or a download would have made the folder."""
    datasets.get(FREE_SET)
    server.asked.clear()
    (tmp_path / "file").write_bytes(b"")
    before = names_in(tmp_path)
    with pytest.raises(DataError, match=f"^there is no folder {tmp_path / mistyped} to look for data sets in: "):
        call(FREE_SET, tmp_path / mistyped)
    assert names_in(tmp_path) == before
    assert server.asked == []


def test_a_half_present_set_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_plain(tmp_path / "half", names=("train.txt",))
    whole = put_plain(tmp_path / "whole")
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "whole"))
    assert datasets.locate(PLAIN_SET, tmp_path / "half") == whole


def test_a_half_present_set_alone_is_missing_what_it_lacks(tmp_path: Path) -> None:
    folder = put_plain(tmp_path, names=("train.txt",))
    with pytest.raises(DataError) as caught:
        datasets.locate(PLAIN_SET, tmp_path)
    assert f"put test.txt into {folder} " in str(caught.value)
    results = datasets.check(PLAIN_SET, tmp_path)
    assert [(result.path.name, result.ok) for result in results] == [("train.txt", True), ("test.txt", False)]
    assert results[1].found == "missing"


@pytest.mark.parametrize("find", [datasets.locate, datasets.get])
def test_missing_says_all_that_is_needed(find: Callable[[str, Path], Path], tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find(PLAIN_SET, tmp_path)
    message = str(caught.value)
    assert message == (
        "data set tiny-text (Tiny text; licence: no open licence) is missing: get it from https://example.org/text and "
        f"put train.txt, test.txt into {tmp_path / PLAIN_SET} (one word a line); another place can be named with "
        "--data-dir or FASTWEIGHTS_DATA"
    )
    assert not (tmp_path / PLAIN_SET).exists()


def test_missing_names_the_command_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing: run `fastweights data get tiny-digits`, or get it from https://"):
        datasets.locate(FREE_SET, tmp_path)


@pytest.mark.parametrize("call", [datasets.locate, datasets.get, datasets.check])
def test_an_unknown_name_gets_the_close_ones_and_the_list(call: Callable[[str], object]) -> None:
    with pytest.raises(DataError) as caught:
        call("wikitext2")
    message = str(caught.value)
    assert message.startswith("unknown data set 'wikitext2': did you mean wikitext-2 or wikitext-103? the data sets ")
    assert message.endswith(", wikitext-2")
    with pytest.raises(DataError, match=r"^unknown data set 'zzz': the data sets are banking77"):
        call("zzz")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="no folder is closed to this user")
def test_a_folder_that_may_not_be_entered_has_no_data(tmp_path: Path) -> None:
    put_plain(tmp_path).chmod(0)
    try:
        with pytest.raises(DataError, match="is missing"):
            datasets.locate(PLAIN_SET, tmp_path)
    finally:
        (tmp_path / PLAIN_SET).chmod(stat.S_IRWXU)


def test_status_has_a_row_for_every_set(tmp_path: Path) -> None:
    folder = put_plain(tmp_path)
    rows = {row.name: row for row in datasets.status(tmp_path)}
    assert set(rows) == set(datasets.DATASETS)
    assert rows[PLAIN_SET] == datasets.DataStatus(PLAIN_SET, "Tiny text", "no open licence", folder, False)
    assert rows["mnist"] == datasets.DataStatus("mnist", "MNIST handwritten digits", "free to use", None, True)


def test_the_registry_holds_every_set() -> None:
    real = {name: each for name, each in datasets.DATASETS.items() if name not in (PLAIN_SET, FREE_SET)}
    free = ["banking77", "clinc150", "mnist", "omniglot"]
    names = [
        "banking77",
        "clinc150",
        "fer2013",
        "gutenberg",
        "mini-imagenet",
        "mnist",
        "omniglot",
        "ptb",
        "reuters21578",
    ]
    assert sorted(real) == [*names, "wikitext-103", "wikitext-2"]
    assert sorted(name for name, each in real.items() if each.downloadable) == free
    for name, each in real.items():
        assert each.name == name
        for file in each.files:
            assert len(file.sha256) == (0 if name == "wikitext-103" else 64)
            assert file.url is None or (file.url.startswith("https://") and file.url.endswith("/" + file.name))


def test_files_whose_content_is_not_known_only_have_to_be_there(tmp_path: Path) -> None:
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    for split in ("train", "valid"):
        (folder / f"wiki.{split}.tokens").write_text("= Robert =")
    assert [(check.ok, check.found) for check in datasets.check("wikitext-103", tmp_path)] == [
        *[(True, "10 bytes, not looked into")] * 2,
        (False, "missing"),
    ]


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, fastweights.tasks.datasets; print({'torch', 'pooch', 'PIL', 'numpy'} & set(sys.modules))"
    source = Path(_archives.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "set()"


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        datasets.DATASETS["mnist"].name = "other"  # type: ignore[misc]


@pytest.mark.data
@pytest.mark.parametrize("name", [name for name in datasets.DATASETS if name not in (PLAIN_SET, FREE_SET)])
def test_the_real_files_have_the_right_content(name: str) -> None:
    root = os.environ.get("FASTWEIGHTS_DATA")
    if not root:
        pytest.skip("FASTWEIGHTS_DATA is not set")
    if not (Path(root) / name).is_dir():
        pytest.skip(f"FASTWEIGHTS_DATA has no {name}")
    assert [(result.path.name, result.found) for result in datasets.check(name, root)] == [
        (file.name, file.expected) for file in datasets.DATASETS[name].files
    ]
