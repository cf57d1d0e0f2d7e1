"""The page of a run and what is written beside it."""

import errno
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fastweights.errors import RunError
from fastweights.report import write_page
from fastweights.report.blocks import Table
from fastweights.report.content import by_distance
from fastweights.runs import Lines, Member, write_result
from tests.fake_runs import WriteRun, write_member

VOID = {"wbr", "meta", "br", "hr", "img", "link", "input"}
FILES = {"index.html", "report.md", "learning_curves.svg"}


class Page(HTMLParser):
    """The tags, tables and text of a page; refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_page_says_what_the_run_did(run_folder: Path) -> None:
    page = read(write_page(run_folder))
    assert ["LSTM", "50", "test error, %", "1.85", "1.91 ± 0.44 (3 seeds)", "1.44", "61.70"] in page.cells
    assert "fastweights reproduce ba2016/associative-retrieval --preset quick" in page.text
    assert "Floor: the score of a model that ignores its input." in page.text
    assert "Every run has finished." in page.text
    # Seconds are those of the whole training (8 an epoch and the seed's number), not those up to the best epoch.
    assert ["LSTM", "50", "21,850", "98.0 ± 1.0", "11, 11, 11", "3 of 3"] in page.cells
    assert ["batch_size", "128"] in page.cells
    assert ["layer_norm", "true"] in page.cells
    assert ["torch", "2.13.0"] in page.cells
    assert ["git_commit", "4f2a9c1"] in page.cells
    assert ["model", "hidden_size", "learning_rate", "seed"] in page.cells
    assert ["IRNN", "20", "0.0001", "1, 2, 3"] in page.cells
    assert [tag for tag, _ in page.tags].count("svg") == 1


def test_the_lines_of_a_run_are_drawn_on_its_page(tmp_path: Path) -> None:
    panel = Lines("Best rates", "accuracy", "numbers in the state", {"LSTM": [(64, 0.5)]}, floor=0.25)
    write_result(
        tmp_path, experiment="recall/mqar", preset="quick", command="python mine.py", requested=[], lines=[panel]
    )
    page = read(write_page(tmp_path))
    assert "Best rates: accuracy against numbers in the state. The dashed line is a model that ignores" in page.text
    assert (tmp_path / "lines.svg").exists()
    assert "](lines.svg)" in (tmp_path / "report.md").read_text()


def test_a_changed_run_says_so_under_its_title(write_run: WriteRun) -> None:
    path = write_page(write_run(changes={"lstm-50-seed1": {"decay": [0.95, 0.9]}}))
    page = read(path)
    told = "Changed from the preset quick: for LSTM decay 0.95 (0.9). The rows of LSTM are not the preset's"
    assert told in page.text[: page.text.index("Results")]
    assert told in path.with_name("report.md").read_text(encoding="utf-8")


def test_page_needs_nothing_else(run_folder: Path) -> None:
    path = write_page(run_folder)
    page, text = read(path), path.read_text(encoding="utf-8")
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "data", "action") and tag != "a":
                assert (value or "").startswith("#"), (tag, name, value)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert not re.search("#1f2328", text.split("</style>", 1)[1]), "the figure must take the reader's text colour"


def test_every_table_scrolls_in_its_own_container(run_folder: Path) -> None:
    text = write_page(run_folder).read_text(encoding="utf-8")
    assert text.count("<table>") > 3
    assert len(re.findall(r'<div class="scroll"[^>]*>\n<table>', text)) == text.count("<table>")


def test_long_names_break_between_their_words_and_kernels_are_words(write_run: WriteRun) -> None:
    folder = write_run([("LSTM", 50, 1.85, [2.31])])
    path = folder / "lstm-50-seed1" / "environment.json"
    kernels = {"cpu": "in use (x86-64-v4)", "triton": "not in use: there is no GPU"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kernels": kernels}))
    text = write_page(folder).read_text(encoding="utf-8")
    assert "<h1>ba2016/<wbr>associative-retrieval</h1>" in text
    assert "max_<wbr>grad_<wbr>norm" in text
    assert ["kernels", "cpu: in use (x86-64-v4); triton: not in use: there is no GPU"] in Page(text).cells
    assert "<span>2.31</span> <span>(1 seed)</span>" in text  # two lines on a narrow screen


def test_hostile_strings_are_only_text(write_run: WriteRun) -> None:
    hostile = '<script>alert("1")</script>'
    folder = write_run([("LSTM", 50, 1.85, [2.31])], experiment=hostile, preset="--x; rm '$HOME'")
    result = json.loads((folder / "result.json").read_text())
    result["rows"][0].update(model=hostile, metric="</td><img src=x onerror=alert(1)>")
    (folder / "result.json").write_text(json.dumps(result))
    member = folder / "lstm-50-seed1"
    settings = json.loads((member / "settings.json").read_text())
    settings |= {"model": hostile, "</style><b>": "<b>", "lone": "\ud800"}
    (member / "settings.json").write_text(json.dumps(settings))
    (member / "environment.json").write_text(json.dumps({"torch": "<iframe src=http://example.org>"}))
    path = write_page(folder)
    page = read(path)
    assert not {"script", "img", "b", "iframe"} & {tag for tag, _ in page.tags}
    assert [hostile, "50", "</td><img src=x onerror=alert(1)>", "1.85", "2.31 (1 seed)", "-", "61.70"] in page.cells
    assert """--preset '--x; rm '"'"'$HOME'"'"''""" in page.text
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    prose = re.sub(r"(?ms)^```sh\n.*?^```$", "", markdown)
    assert "<" not in prose
    assert "&lt;script&gt;" in prose


def test_markdown_links_the_figure(run_folder: Path) -> None:
    write_page(run_folder)
    text = (run_folder / "report.md").read_text(encoding="utf-8")
    assert "](learning_curves.svg)" in text
    assert "```sh\nfastweights reproduce ba2016/associative-retrieval --preset quick\n```" in text
    assert "| LSTM | 50 | test error, % | 1.85 | 1.91 ± 0.44 (3 seeds) | 1.44 | 61.70 |" in text
    assert "| LSTM | 50 | 21,850 | 98.0 ± 1.0 | 11, 11, 11 | 3 of 3 |" in text
    assert "| torch | 2.13.0 |" in text
    assert (run_folder / "learning_curves.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_same_run_gives_the_same_bytes(run_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert write_page(run_folder, tmp_path / name / "page") == tmp_path / name / "page" / "index.html"
    one, two = tmp_path / "one" / "page", tmp_path / "two" / "page"
    assert {path.name for path in one.iterdir()} == FILES
    for name in FILES:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert not FILES & {path.name for path in run_folder.iterdir()}


def test_unfinished_members_are_listed(write_run: WriteRun) -> None:
    folder = write_run([("IRNN", 50, 60.23, [60.9])])
    path = write_member(folder, "LSTM", 50, 1, 2.0) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + lines[7][:30])
    (write_member(folder, "LSTM", 50, 2, 2.0) / "metrics.jsonl").unlink()
    page = read(write_page(folder))
    error = json.loads(lines[6])["validation_error"]
    assert ["lstm-50-seed1", "7", "57.0", f"{error:.2f}"] in page.cells
    assert ["lstm-50-seed2", "0", "-", "-"] in page.cells
    assert ["LSTM", "50", "-", "-", "-", "0 of 2"] in page.cells


def test_accuracy_by_distance_has_a_column_for_every_span_in_whatever_order_members_come() -> None:
    bins = [[1, 16, 0.9, 100], [17, 32, 0.75, 50]]
    far = Member("far", {"model": "LSTM", "seed": 1}, {}, [], {"test_by_distance": bins})
    near = Member("near", {"model": "IRNN", "seed": 2}, {}, [], {"test_by_distance": bins[:1]})
    lines = [("LSTM (seed 1)", "0.900", "0.750"), ("IRNN (seed 2)", "0.900", "-")]
    for members, rows in (([far, near], lines), ([near, far], lines[::-1])):
        _, table = by_distance([*members, Member("unfinished", {"model": "LSTM"}, {}, [], None)])
        assert isinstance(table, Table)
        assert table.header == ("model", "1 to 16", "17 to 32")
        assert table.rows == rows
    assert by_distance([]) == []


def test_a_run_that_has_only_begun(write_run: WriteRun) -> None:
    page = read(write_page(write_run([])))
    assert "No model has finished yet." in page.text
    assert "No run has begun yet." in page.text
    assert "svg" not in {tag for tag, _ in page.tags}


def test_environments_that_differ_name_their_members(write_run: WriteRun) -> None:
    folder = write_run([("LSTM", 50, 1.85, [2.31, 1.44, 1.98])])
    path = folder / "lstm-50-seed3" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cuda"}))
    page = read(write_page(folder))
    assert ["device", "members"] in page.cells
    assert ["cpu", "lstm-50-seed1, lstm-50-seed2"] in page.cells
    assert ["cuda", "lstm-50-seed3"] in page.cells
    assert ["threads", "2"] in page.cells
    assert ["device", "cpu"] not in page.cells


def test_an_output_below_a_file_is_refused(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "page"
    with pytest.raises(RunError) as caught:
        write_page(run_folder, output)
    assert str(caught.value) == f"cannot write the report into {output}: {os.strerror(errno.ENOTDIR)}"


def test_a_full_disk_leaves_the_old_page_whole(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_page(run_folder).read_bytes()
    result = json.loads((run_folder / "result.json").read_text())
    (run_folder / "result.json").write_text(json.dumps(result | {"preset": "paper"}))
    names = {path.name for path in run_folder.iterdir()}
    calls = []

    def refuse(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(RunError, match=os.strerror(errno.ENOSPC)) as caught:
            write_page(run_folder)
    assert str(run_folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (run_folder / "index.html").read_bytes() == before
    assert {path.name for path in run_folder.iterdir()} == names
    assert write_page(run_folder).read_bytes() != before
