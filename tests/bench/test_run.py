"""What is the same of all benches: rows, columns, parity before timing, options, refusals."""

import math
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from fastweights import cli
from fastweights.bench import associative, cache, delta, delta_rnn, gated, hebbian_softmax, language, mbpa
from fastweights.bench.parity import choose_examples
from fastweights.bench.published import read
from fastweights.bench.rules import GATED
from fastweights.bench.run import append_csv, check_csv, list_memory_rivals, memory_columns, run, timing_columns
from fastweights.errors import FastWeightsError
from fastweights.memory import MbPA, NeuralCache
from fastweights.nn import DeltaFastWeightsRNN, FastWeightsRNN, GatedFastWeightsRNN, HebbianSoftmax

PUBLISHED = Path(__file__).parents[2] / "benchmarks"
SIZES: dict[str, Any] = {"classes": 20, "key_size": 6, "neighbours": 5, "entries": 30, "batch": 8}


class TinyMbPA(mbpa.MbPASelection):
    def cases(self):
        return [mbpa.MbPACase(1, **SIZES), mbpa.MbPACase(3, "mlp", "rmsprop", **SIZES)]


class TinyCache(cache.CacheSelection):
    def cases(self):
        return [cache.CacheCase(30, classes=50, hidden_size=8), cache.CacheCase(20, classes=50, hidden_size=8)]


class TinyLanguage(language.LanguageSelection):
    def cases(self):
        tiny: dict[str, Any] = {"classes": 50, "embedding_size": 6, "hidden_size": 8}
        return [
            language.LanguageCase("training", batch=3, steps=4, **tiny),
            language.LanguageCase("scoring", window=20, neighbours=5, scored=64, **tiny),
        ]


class Subject(NamedTuple):
    """A bench at a tiny size: two cases, each on one thread and on two, in two rounds."""

    name: str
    module: ModuleType
    tiny: Any
    sizes: dict[str, list[str]]  # the column that tells the cases apart, what stands there, for each case
    rivals: list[tuple[str, ...]]  # of each case
    same: dict[str, str]  # columns that are the same in all rows
    lines: int  # that are printed, without headings
    ratio: str  # a heading
    wrong: tuple[type, str, str] | None  # a class and a method of it, which errs in the second case; what is said then
    error: float = 1e-4  # that is red


_ASSOCIATIVE = (associative.OURS, associative.STARTS, associative.ATTENTION, associative.MATRIX, associative.LSTM)
_GATED = (gated.OURS, gated.STARTS, gated.EAGER, gated.LSTM)
_TIMED = (1, 2)
SUBJECTS = [
    Subject(
        "associative",
        associative,
        associative.AssociativeSelection(_TIMED, (4,), (6, 9), rounds=2, batch=5, input_size=7),
        {"hidden_size": ["6", "9"]},
        [_ASSOCIATIVE, _ASSOCIATIVE],
        {"rounds": "2", "batch": "5", "input_size": "7", "precision": "float32"},
        4,
        "ours/LSTM",
        (FastWeightsRNN, "forward", "the outputs at T=4, H=9, float32, training differ"),
    ),
    Subject(
        "gated",
        gated,
        gated.GatedSelection(_TIMED, (4,), (6, 40), rounds=2, batch=5, compile=False),
        {"part": ["layer", "layer", "model"], "hidden_size": ["6", "40", "40"]},
        [_GATED, _GATED, (*gated.MODELS,)],
        {"rounds": "2", "batch": "5", "precision": "float32"},
        4 + 8,
        "compiled/ours",
        (GatedFastWeightsRNN, "forward", "the outputs at T=4, H=40, training differ"),
    ),
    Subject(
        "hebbian-softmax",
        hebbian_softmax,
        hebbian_softmax.SoftmaxSelection(_TIMED, (9, 40), (6,), rounds=2, batch=12),
        {"classes": ["9", "40"]},
        [hebbian_softmax.RIVALS] * 2,
        {"rounds": "2", "batch": "12", "hidden_size": "6"},
        4,
        "ours/plain",
        (HebbianSoftmax, "loss", "the loss at V=40, d=6 differs"),
    ),
    Subject(
        "mbpa",
        mbpa,
        TinyMbPA(_TIMED, rounds=2),
        {"output": ["linear", "mlp"]},
        [mbpa.RIVALS, (mbpa.OURS, mbpa.LOOP, mbpa.VMAP)],
        {"rounds": "2", "queries": "8"},
        4,
        "loop/ours",
        (MbPA, "__call__", "fastweights at mlp under rmsprop, T=3, V=20, d=6 differs"),
        1e-5,
    ),
    Subject(
        "cache",
        cache,
        TinyCache(_TIMED, rounds=2),
        {"window": ["30", "20"]},
        [cache.RIVALS] * 2,
        {"rounds": "2", "classes": "50"},
        4,
        "loop/ours",
        (NeuralCache, "log_prob", "the loss at window=20, V=50, d=8 differs"),
    ),
    Subject(
        "language",
        language,
        TinyLanguage(_TIMED, rounds=2),
        {"part": ["training", "scoring"]},
        [language.RIVALS_OF["training"], language.RIVALS_OF["scoring"]],
        {"rounds": "2", "classes": "50"},
        4,
        "ours/LSTM",
        (NeuralCache, "log_prob", "log p of cache at scoring, V=50, E=6, H=8 differs"),
        2e-3,
    ),
    Subject(
        "delta",
        delta,
        delta.DeltaSelection(_TIMED, (3,), (4,), rounds=2, batch=2, rules=(GATED,)),
        {"mode": ["training", "decoding"]},
        [tuple(delta.list_rivals(delta.DeltaCase()))] * 2,
        {"rounds": "2", "batch": "2", "hidden_size": "4"},
        4,
        "transformers/ours",
        None,  # the rule is a function: in test_delta.py
    ),
    Subject(
        "delta-rnn",
        delta_rnn,
        delta_rnn.DeltaRnnSelection(_TIMED, (3,), (8,), rounds=2, batch=2),
        {"mode": ["training", "training", "step", "step"], "heads": ["1", "4", "1", "4"]},
        [delta_rnn.RIVALS] * 4,
        {"rounds": "2", "hidden_size": "8"},
        8,
        "ours/LSTM",
        (DeltaFastWeightsRNN, "forward", "the outputs at T=3, H=8, 4 heads, training differ"),
    ),
]
with_each_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
WITH_MEMORY = [subject for subject in SUBJECTS if hasattr(subject.tiny, "memory")]
with_each_that_measures_memory = pytest.mark.parametrize("subject", WITH_MEMORY, ids=lambda subject: subject.name)


def errs(module: Any) -> bool:
    """Whether a module that a rival runs is that of the second case of its subject, and no reference."""
    if isinstance(module, FastWeightsRNN | GatedFastWeightsRNN):
        return module.impl != "reference" and module.hidden_size in (9, 40)
    if isinstance(module, DeltaFastWeightsRNN):
        return module.impl != "reference" and module.num_heads == 4
    if isinstance(module, HebbianSoftmax):
        return module.num_classes == 40
    return module.steps == 3 if isinstance(module, MbPA) else module.capacity == 20


@with_each_subject
def test_every_rival_is_timed_and_a_second_run_is_appended(subject, tmp_path, capsys):
    before = torch.get_num_threads()
    path = tmp_path / "a.csv"
    run(subject.module, subject.tiny, path)
    printed = capsys.readouterr().out.splitlines()
    count = len(read(path))
    run(subject.module, replace(subject.tiny, threads=(1,)), path)
    assert torch.get_num_threads() == before
    rows = read(path)
    assert list(rows[0]) == timing_columns(subject.module)
    cases = list(zip(*subject.sizes.values(), subject.rivals, strict=True))
    expected = [(*at, threads, rival) for *at, rivals in cases for threads in "12" for rival in rivals]
    again = [(*at, "1", rival) for *at, rivals in cases for rival in rivals]
    timed = [tuple(row[name] for name in (*subject.sizes, "threads", "rival")) for row in rows]
    assert timed[:count] == expected
    assert timed[count:] == again
    ratio, base = f"ratio_to_{subject.module.BASE[0]}", subject.module.BASE[1]
    assert {row[ratio] for row in rows if row["rival"] == base} == {"1.0"}
    times = {key: float(row["milliseconds"]) for key, row in zip(expected, rows, strict=False)}
    for key, row in zip(expected, rows, strict=False):
        assert float(row[ratio]) == pytest.approx(times[key] / times[*key[:-1], base], rel=1e-2)
    assert all(row["processor"] and row["skipped"] == "" for row in rows)
    assert all(row[name] == text for row in rows for name, text in subject.same.items())
    headings = len(set(subject.sizes.get("part", "")) or "1")
    assert subject.ratio in printed[0]
    assert len(printed) == headings + subject.lines + 1
    assert printed[-1].endswith(f"appended to {path}")


@pytest.mark.parametrize(
    "subject", [subject for subject in SUBJECTS if subject.wrong], ids=lambda subject: subject.name
)
@pytest.mark.parametrize("is_nan", [False, True])
def test_nothing_is_printed_or_written_while_parity_is_red(subject, is_nan, tmp_path, monkeypatch, capsys):
    kind, method, message = subject.wrong
    exact: Any = getattr(kind, method)

    def wrong(self, *arguments, **options):
        result = exact(self, *arguments, **options)
        factor = 1 + (math.nan if is_nan else subject.error) if errs(self) else 1.0
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    monkeypatch.setattr(kind, method, wrong)
    # The first case is green: it is not timed before the second is looked at.
    with pytest.raises(FastWeightsError, match=f"parity is red, so nothing is timed: {message}"):
        run(subject.module, subject.tiny, tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    assert capsys.readouterr().out == ""


@with_each_subject
def test_other_columns_are_refused_before_anything_is_timed(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(subject.module, "require_parity", lambda case: pytest.fail("looked at"))
    path = tmp_path / "a.csv"
    for header in ("name,age\n", ",".join(timing_columns(subject.module)[:-1]) + "\n"):
        path.write_text(header)
        with pytest.raises(FastWeightsError, match="has other columns"):
            run(subject.module, subject.tiny, path)
        assert path.read_text() == header


@with_each_that_measures_memory
def test_other_columns_of_peaks_are_refused_too(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(subject.module, "require_parity", lambda case: pytest.fail("looked at"))
    (tmp_path / "b_memory.csv").write_text("name,age\n")
    with pytest.raises(FastWeightsError, match=r"b_memory\.csv has other columns"):
        run(subject.module, replace(subject.tiny, memory=True), tmp_path / "b.csv")


@with_each_that_measures_memory
def test_memory_goes_to_a_file_beside_the_timings(subject, tmp_path, monkeypatch, capsys):
    only = replace(subject.tiny, threads=(2, 1), rounds=1, memory=True)
    rivals = list_memory_rivals(subject.module, only.memory_cases()[0])
    peaks = dict(zip(rivals, (2**10, "needs about 9 GiB", 2**19, 2**20), strict=False))
    monkeypatch.setattr("fastweights.bench.run.measure_peak", lambda case, rival, threads: peaks[rival])
    run(subject.module, only, tmp_path / "a.csv")
    rows = read(tmp_path / "a_memory.csv")
    assert list(rows[0]) == memory_columns(subject.module)
    cells = [("0.0", ""), ("", "needs about 9 GiB"), ("0.5", ""), ("1.0", "")][: len(peaks)]
    assert [(row["rival"], row["mebibytes"], row["skipped"]) for row in rows] == [
        (rival, *cell) for rival, cell in zip(peaks, cells, strict=True)
    ] * len(only.memory_cases())
    assert {row["threads"] for row in rows} == {"1"}
    shown = f"{only.memory_cases()[0]}: fastweights 0.0, {rivals[1]} needs about 9 GiB"
    assert f"peak memory in MiB, {shown}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("subject", "skipped"),
    [
        (SUBJECTS[0], associative.EAGER),
        (SUBJECTS[1], (gated.EAGER,)),
        (SUBJECTS[2], hebbian_softmax.RIVALS),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_does_not_fit_is_left_out_with_the_reason(subject, skipped, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fastweights.bench.run.machine_memory", lambda: 1000)
    monkeypatch.setattr("fastweights.bench.run.measure_peak", lambda *_: 2**20)
    run(subject.module, replace(subject.tiny, threads=(1,), rounds=1, memory=True), tmp_path / "a.csv")
    reason = "needs about 0 GiB, more than half of the machine's 0"
    rows = read(tmp_path / "a.csv")
    ratio = f"ratio_to_{subject.module.BASE[0]}"
    for row in rows:
        left_out = row["rival"] in skipped
        assert row["skipped"] == (reason if left_out else "")
        assert ((row["milliseconds"], row[ratio], row["rounds"]) == ("", "", "0")) is left_out
    assert {row["rival"] for row in rows} >= set(skipped)
    peaks = read(tmp_path / "a_memory.csv")
    assert {row["rival"] for row in peaks if row["skipped"] == reason} == set(skipped) & {row["rival"] for row in peaks}


FILES = [(subject, subject.name.replace("-", "_"), timing_columns) for subject in SUBJECTS]
FILES += [(subject, f"{subject.name.replace('-', '_')}_memory", memory_columns) for subject in WITH_MEMORY]


@pytest.mark.parametrize(("subject", "name", "columns"), FILES, ids=[name for _, name, _ in FILES])
def test_the_published_files_have_the_columns_that_are_written(subject, name, columns):
    module = subject.module
    rivals = {*getattr(module, "RIVALS", ()), *getattr(module, "COMPILED", ()), *getattr(module, "MODELS", ())}
    rivals |= {*getattr(module, "MEMORY_RIVALS", ()), getattr(module, "STARTS", "")}
    for row in read(PUBLISHED / f"{name}.csv"):
        assert list(row) == columns(module)
        assert row["rival"] in rivals
        assert row.get("mode", "training") in getattr(module, "MODES", ("training",))
        assert row.get("precision", "float32") in associative.PRECISIONS
        assert row.get("part", "layer") in (*gated.PARTS, *language.RIVALS_OF)


@with_each_subject
def test_every_case_that_is_timed_by_default_is_published(subject):
    rows = read(PUBLISHED / f"{subject.name.replace('-', '_')}.csv")
    cases = subject.module.QUICK.cases()
    columns = [column for column in subject.module.COLUMNS if isinstance(getattr(cases[0], column, None), int | str)]
    published = {tuple(row[column] for column in columns) for row in rows}
    assert {tuple(str(getattr(case, column)) for column in columns) for case in cases} <= published


def select(monkeypatch, name, words):
    """What the command line asks to be run, and where to."""
    asked: list[Any] = []
    monkeypatch.setattr("fastweights.bench.run.run", lambda *arguments: asked.extend(arguments))
    assert cli.main(["bench", name, *words.split()]) == 0
    return asked


_TWO_MODES = ("training", "inference")


@pytest.mark.parametrize(
    ("name", "words", "chosen"),
    [
        (
            "associative",
            "--threads 1 --rounds 7 --steps 5 2000 --hidden-sizes 20 --precision bfloat16 --mode training inference "
            "--compile --memory --batch 3",
            associative.AssociativeSelection(
                (1,), (5, 2000), (20,), ("bfloat16",), _TWO_MODES, rounds=7, compile=True, memory=True, batch=3
            ),
        ),
        (
            "associative",
            "--full --no-compile --no-memory --steps 11",
            replace(associative.FULL, compile=False, memory=False, steps=(11,)),
        ),
        (
            "gated",
            "--threads 1 --rounds 7 --steps 5 9 --hidden-sizes 20 --batch 3 --mode training inference --no-compile "
            "--memory",
            gated.GatedSelection((1,), (5, 9), (20,), _TWO_MODES, rounds=7, compile=False, memory=True, batch=3),
        ),
        (
            "hebbian-softmax",
            "--threads 1 --rounds 7 --classes 5 300000 --hidden-sizes 20 --batch 3 --memory",
            hebbian_softmax.SoftmaxSelection((1,), (5, 300_000), (20,), rounds=7, memory=True, batch=3),
        ),
        (
            "delta",
            "--threads 1 --rounds 7 --steps 5 9 --hidden-sizes 20 --batch 3 --mode inference --memory",
            delta.DeltaSelection((1,), (5, 9), (20,), ("inference",), rounds=7, memory=True, batch=3),
        ),
        (
            "delta-rnn",
            "--threads 1 --rounds 7 --steps 5 9 --hidden-sizes 20 --batch 3 --mode inference --memory",
            delta_rnn.DeltaRnnSelection((1,), (5, 9), (20,), ("inference",), rounds=7, memory=True, batch=3),
        ),
        ("mbpa", "--threads 1 --steps 2 7 --rounds 4", mbpa.MbPASelection((1,), (2, 7), 4)),
        ("cache", "--threads 1 --rounds 4", cache.CacheSelection((1,), rounds=4)),
    ],
)
def test_options_choose_what_is_timed(monkeypatch, name, words, chosen):
    module, selection, path = select(monkeypatch, name, f"{words} --output b.csv")
    assert (module.__name__, selection) == (f"fastweights.bench.{name.replace('-', '_')}", chosen)
    assert os.fspath(path) == "b.csv"


@with_each_subject
def test_the_default_is_quick(monkeypatch, subject):
    path = Path("benchmarks", f"{subject.name.replace('-', '_')}.csv")
    assert select(monkeypatch, subject.name, "") == [subject.module, subject.module.QUICK, path]
    assert select(monkeypatch, subject.name, "--full") == [subject.module, subject.module.FULL, path]


def test_help_tells_what_each_bench_takes_where_an_option_is_left_out(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    told = capsys.readouterr().out
    for default in (
        "(default: 1 2)",
        "(default: associative, gated, hebbian-softmax 30; delta, delta-rnn, gated-models, mbpa, cache, language 15)",
        "associative 11 19, with --full 11 19 24 200 2000; gated 32, with --full 32 128; "
        "delta 512, with --full 512 4096; delta-rnn 256, with --full 256 2000; gated-models 2048, with --full 512; "
        "mbpa 1 5, with --full 1 5 20)",
        "(default: hebbian-softmax 1000 33278, with --full 1000 33278 267735)",
        "(default: associative no, with --full yes; gated yes)",
    ):
        assert default in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gated --precision bfloat16", "`bench gated` times float32 alone; leave out --precision"),
        ("gated --steps 0", "'0' is not a whole number from 1 to 100000"),
        ("gated --batch many", "'many' is not a whole number from 1 to 100000"),
        ("gated --mode sleep", "invalid choice: 'sleep'"),
        ("gated --output /", "--output / is a folder; give the name of a CSV file in it"),
        ("gated --inner-sizes 3", "unknown argument --inner-sizes"),
        ("hebbian-softmax --precision bfloat16", "`bench hebbian-softmax` times float32 alone; leave out --precision"),
        ("hebbian-softmax --mode inference", "`bench hebbian-softmax` has a single mode; leave out --mode"),
        ("hebbian-softmax --steps 3", "`bench hebbian-softmax` has no steps; leave out --steps"),
        ("hebbian-softmax --no-compile", "`bench hebbian-softmax` compiles nothing; leave out --compile"),
        ("hebbian-softmax --classes 0", "'0' is not a whole number from 1 to 100000000"),
        ("mbpa --mode inference", "`bench mbpa` has a single mode; leave out --mode"),
        ("mbpa --classes 3", "`bench mbpa` has no choice of classes; leave out --classes"),
        ("mbpa --hidden-sizes 3", "`bench mbpa` has no choice of sizes; leave out --hidden-sizes"),
        ("mbpa --batch 3", "`bench mbpa` has no batch; leave out --batch"),
        ("mbpa --memory", "`bench mbpa` measures no memory; leave out --memory"),
        ("cache --steps 3", "`bench cache` has no steps; leave out --steps"),
    ],
)
def test_a_users_mistake_is_one_line(capsys, words, message):
    assert cli.main(["bench", *words.split()]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "new" / "times.csv"
    append_csv(path, [{"rival": "a, b", "milliseconds": 1.5}])
    append_csv(path, [{"rival": "c", "milliseconds": 2}, {"rival": "d", "milliseconds": 3}])
    assert [tuple(row.values()) for row in read(path)] == [("a, b", "1.5"), ("c", "2"), ("d", "3")]


def test_a_file_with_other_columns_is_refused_and_kept(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("name,age\nada,36\n")
    with pytest.raises(FastWeightsError, match=r"has other columns \(name,age\); choose another --output"):
        append_csv(path, [{"rival": "a"}])
    assert path.read_text() == "name,age\nada,36\n"


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FastWeightsError, match=r"cannot write .*file/times\.csv: File exists; choose another --output"):
        append_csv(tmp_path / "file" / "times.csv", [{"rival": "a"}])


def test_a_look_at_the_file_leaves_what_is_there(tmp_path):
    empty, link = tmp_path / "empty.csv", tmp_path / "link.csv"
    empty.touch()
    link.symlink_to(tmp_path / "target.csv")
    for path in (empty, link, tmp_path / "new.csv"):
        assert not check_csv(path, ["rival"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.csv", "link.csv"]
    append_csv(link, [{"rival": "a"}])
    assert (tmp_path / "target.csv").read_text() == "rival\na\n"


def test_what_is_no_regular_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FastWeightsError, match=f"{path} is not a regular file; choose another --output"):
            check_csv(path, ["rival"])
    assert (tmp_path / "pipe").is_fifo()


def test_parity_is_asked_of_as_many_examples_as_fit_in_float64(monkeypatch):
    assert choose_examples(5, 100).tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr("fastweights.bench.parity.MOST_BYTES", 1)
    assert choose_examples(5, 100).tolist() == [0, 4]
