import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastweights import _parser, cli
from fastweights.few_shot import FewShotClassifier

EXPERIMENT = "ba2016/associative-retrieval"
TINY = ["--models", "lstm", "fast-weights", "--hidden-sizes", "6", "--train-examples", "200"]
TINY += ["--validation-examples", "50", "--test-examples", "50", "--epochs", "1", "--embedding-size", "5"]

pytestmark = pytest.mark.usefixtures("threads")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs the command line in a folder of its own: exit status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        try:
            status: object = cli.main([str(word) for word in words])
        except SystemExit as stop:  # --help and --version
            status = stop.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required: COMMAND; see `fastweights --help`"),
        (
            ("lsit",),
            "argument COMMAND: invalid choice: 'lsit'; did you mean list? choose from list, reproduce, sweep, ",
        ),
        (("zzz",), "argument COMMAND: invalid choice: 'zzz'; choose from list, reproduce, sweep, "),
        (("--verison",), "unknown argument --verison; did you mean --version? see `fastweights --help`"),
        (("--verison", "list"), "unknown argument --verison; did you mean --version? see `fastweights --help`"),
        (("-v",), "unknown argument -v; see `fastweights --help`"),
        (("--version", "x"), "--version takes nothing behind it, got x; see `fastweights --help`"),
        (("data", "list", "x"), "`data list` shows all data sets and takes no name, got x"),
        (("list", "--all"), "unknown argument --all; see `fastweights list --help`"),
        (("reproduce",), "name an experiment, such as ba2016/associative-retrieval; `fastweights list` shows all"),
        (("reproduce", "ba2016/retrieval"), "did you mean ba2016/associative-retrieval? `fastweights list` shows all"),
        (("reproduce", "../../etc/passwd"), "there is no experiment '../../etc/passwd'"),
        (("reproduce", EXPERIMENT, "--preset", "fast"), "there is no preset 'fast'; choose from quick, paper"),
        (
            ("reproduce", EXPERIMENT, "--preset", "ppaer"),
            "preset 'ppaer'; did you mean paper? choose from quick, paper",
        ),
        (
            ("reproduce", EXPERIMENT, "--learning-rat", "1"),
            "argument --learning-rat; did you mean --learning-rate? see",
        ),
        (("reproduce", EXPERIMENT, "--lr", "1"), "unknown argument --lr; did you mean --learning-rate? see `fastw"),
        (("reproduce", EXPERIMENT, "--lr=1"), "unknown argument --lr=1; did you mean --learning-rate? see `fastw"),
        (("reproduce", EXPERIMENT, "--zzz", "1"), "unknown argument --zzz; see `fastweights reproduce"),
        (("reproduce", EXPERIMENT, "5"), "unknown argument 5; see `fastweights reproduce"),
        (("reproduce", EXPERIMENT, "--prset", "paper"), "unknown argument --prset; did you mean --preset? see"),
        (("reproduce", "popgym/memory-tasks", "--lr", "1"), "argument --lr; did you mean --gru-learning-rate? see"),
        (
            ("reproduce", "popgym/memory-tasks", "--environments", "RepeatPreviousEasi"),
            "argument '--environments'; did you mean RepeatPreviousEasy? choose from RepeatFirstEasy, Repeat",
        ),
        (("sweep", EXPERIMENT, "--sampler", "gird"), "invalid choice: 'gird'; did you mean grid? choose from tpe, "),
        (("bench", "gated", "--treads", "2"), "argument --treads; did you mean --threads? see `fastweights bench"),
        (("data", "gt"), "argument action: invalid choice: 'gt'; did you mean get? choose from list, get, check; see"),
        (("adapt", "nowhere", "--text", "nowhere"), "--text nowhere: cannot be read: No such file or directory"),
        (
            ("adapt", "nowhere", "--memory", "nowhere", "--prompt", "a"),
            "--memory nowhere holds no memory of a language",
        ),
        (("classify", "nowhere", "--described", "nowhere"), "--described nowhere is not a folder: give one that has"),
        (
            ("share", "nowhere", "--output", "nowhere", "--licence", "mit"),
            "no folder nowhere: give RUN/MEMBER, of",
        ),
        (("reproduce", EXPERIMENT, "--epochs", "x"), "Error parsing --epochs: invalid literal for int()"),
        (
            ("reproduce", EXPERIMENT, "--models", "gru"),
            "invalid choice 'gru' for argument '--models'; choose from irnn",
        ),
        (("reproduce", EXPERIMENT, "--models", "LSTM"), "argument '--models'; did you mean lstm? choose from irnn"),
        (("reproduce", EXPERIMENT, "--decay", "-1"), "these settings cannot run: decay must lie between 0 and 1"),
        (
            ("reproduce", EXPERIMENT, "--hidden-sizes", "0"),
            "these settings cannot run: hidden_sizes must be an integer of at least 1, got 0",
        ),
        (
            ("reproduce", EXPERIMENT, "--seeds", "1", "1"),
            "these settings cannot run: seeds has 1 twice: give each value once",
        ),
        (("reproduce", "--seeds", "1", "2", EXPERIMENT), "the experiment comes first: fastweights reproduce PAPER/EXP"),
        (("bench", "associative", "--threads", "99999"), "'99999' is not a whole number from 1 to 256"),
        (("report", "nowhere"), "nowhere holds no result.json; give the folder that `fastweights reproduce` printed"),
        (("show", "gatd"), "invalid choice: 'gatd'; did you mean gated? choose from gated, attention; see"),
        (
            ("show", "gated", "nowhere"),
            "nowhere holds no result.json; give the folder that `fastweights reproduce` printed",
        ),
        (("report", "a", "b", "--output", "c"), "--output takes the page of one run"),
        (("reproduce", "munkhdalai2018/timing", "--workers", "2"), "measures times: leave --workers out"),
        (
            ("reproduce", "schlag2017/associative-retrieval", "--evaluate-only", "--output", "nowhere"),
            "--output nowhere is no folder of a run; leave it out for the published weights",
        ),
        (("reproduce", EXPERIMENT, "--output", ""), "argument --output: the name is empty; give a file or a folder"),
        (("sweep", EXPERIMENT, "--search", "rate=0.1:1", "--output="), "argument --output: the name is empty"),
        (("reproduce", "rae2018/rare-classes", "--data-dir", ""), "--data-dir is empty: give a value, or leave it out"),
        (("reproduce", "rae2018/rare-classes", "--data-dir="), "--data-dir is empty: give a value, or leave it out"),
        (("report", ""), "argument RUN: the name is empty; give a file or a folder, such as . for this one"),
        (("data", "check", "--data-dir", ""), "argument --data-dir: the name is empty"),
        (("bench", "lstm"), "invalid choice: 'lstm'"),
        (("bench", "associative", "--output", "/"), "--output / is a folder; give the name of a CSV file in it"),
        (
            ("sweep", EXPERIMENT, "--search", "rate=0.1:1", "--rate", "0.5"),
            "rate is searched, and --rate fixes it: leave out one of the two",
        ),
        (("bench", "associative", "--threads", "none"), "'none' is not a whole number from 1 to 256"),
        (("classify", "a.png"), "the following arguments are required: --described; see `fastweights classify --help`"),
        (
            ("classify", "a.png", "--described", "nowhere"),
            "nowhere is not a folder: give one that has a folder of images",
        ),
        (("data", "get"), "name the data sets to get; `fastweights data list` shows all"),
        (
            ("data", "list", "--data-dir", "nowhere"),
            "there is no folder nowhere to look for data sets in: give --data-dir",
        ),
        (
            ("reproduce", "rae2018/omniglot-curriculum", "--data-dir", "nowhere"),
            "there is no folder nowhere to look for data sets in: give --data-dir the folder that holds them",
        ),
        (("reproduce", "rae2018/rare-classes", "--data-dir", "nowhere"), "there is no folder nowhere to look for"),
        (("data", "check", "mnits", "--data-dir", "."), "mnist"),
        (("data", "get", "ptb", "--data-dir", "."), "data set ptb"),
        (("data", "check", "mnist", "--data-dir", "."), "4 files are missing or differ from their checksums"),
    ],
)
def test_a_users_mistake_is_one_line_with_the_mend(run, words, message, monkeypatch):
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)  # who has Penn Treebank there would be given it
    status, _, errors = run(*words)
    assert status == 1
    assert errors.count("\n") == 1
    assert errors.startswith("fastweights: error: ")
    assert message in errors


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_mistyped_setting_is_one_line_on_every_terminal(encoding):
    done = subprocess.run(
        [sys.executable, "-m", "fastweights", "reproduce", EXPERIMENT, "--learning-rat", "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 1
    assert done.stderr == (
        "fastweights: error: unknown argument --learning-rat; did you mean --learning-rate? "
        f"see `fastweights reproduce {EXPERIMENT} --help`\n"
    )


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (("--help",), ["A first table in minutes", "reproduce", "report", "show", "bench", "env", "data", "list"]),
        (("--version",), ["fastweights 0."]),
        (("reproduce", "--help"), ["The same command goes on where it stopped", "--preset", EXPERIMENT, "--fresh"]),
        (
            ("reproduce", EXPERIMENT, "--help"),
            ["--learning-rate", "Learning rate of Adam", "--preset NAME", "default: 0.001", "--fresh"],
        ),
        (("reproduce", EXPERIMENT, "--preset", "paper", "--help"), ["default: 20 50 100"]),
        (("data", "--help"), ["FASTWEIGHTS_DATA"]),
        (("bench", "--help"), ["--rounds"]),
        (("show", "--help"), ["fastweights show gated", "--text", "--example", "an example of your own"]),
    ],
)
def test_help_teaches(run, words, phrases):
    status, output, errors = run(*words)
    assert status == 0
    assert errors == ""
    for phrase in phrases:
        assert phrase in output


@pytest.mark.parametrize("name", sorted(_parser.COMMANDS))
def test_help_tells_the_defaults_that_are_taken(name):
    parser = argparse.ArgumentParser()
    _parser.COMMANDS[name].add_options(parser)
    for action in parser._actions:
        if action.help and action.default not in (None, False, argparse.SUPPRESS):
            told = re.search(r"\(default: (.+?)\)|(\w+) \(default\)", action.help)
            value = action.default if isinstance(action.default, list | tuple) else [action.default]
            assert (told[1] or told[2] if told else "") == " ".join(map(str, value)), action.help


def test_list_and_env(run):
    status, output, _ = run("list")
    assert status == 0
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split(maxsplit=3) for line in lines if "/" in line.partition(" ")[0]]
    assert tuple(name for name, *_ in rows) == (
        EXPERIMENT,
        "ba2016/catch",
        "ba2016/facial-expression",
        "ba2016/mnist-glimpses",
        "guides/adapt-language-model",
        "guides/around-an-encoder",
        "guides/digits",
        "guides/few-shot-classifier",
        "guides/learn-a-class",
        "guides/learn-by-name",
        "guides/learning-rate",
        "guides/rates",
        "guides/regression",
        "guides/when-an-lstm-is-better",
        "munkhdalai2018/ablation",
        "munkhdalai2018/mini-imagenet",
        "munkhdalai2018/omniglot",
        "munkhdalai2018/penn-treebank",
        "munkhdalai2018/timing",
        "popgym/memory-tasks",
        "rae2018/language",
        "rae2018/omniglot-curriculum",
        "rae2018/rare-classes",
        "recall/gauntlet",
        "recall/language",
        "recall/mqar",
        "recall/state-tracking",
        "schlag2017/associative-retrieval",
        "sprechmann2018/incremental-classes",
        "sprechmann2018/language",
        "sprechmann2018/permuted-mnist",
    )
    assert rows[0] == [EXPERIMENT, "3", "min", "none"]
    assert rows[-1] == ["sprechmann2018/permuted-mnist", "1", "min", "mnist, 11 MB"]
    words = " ".join(output.split())
    assert "Associative retrieval, table and figure 3 of Ba et al. 2016: IRNN, LSTM, Associative LSTM, fast" in words
    status, output, _ = run("env")
    assert status == 0
    for name in ("fastweights:", "torch:", "processor:", "cpu: ", "triton: "):
        assert name in output


def test_env_of_an_installed_copy_has_no_commit(run, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *words, **how: (_ for _ in ()).throw(OSError("there is no git")))
    status, output, _ = run("env")
    assert status == 0
    assert "fastweights:" in output
    assert "commit" not in output
    assert "None" not in output


def test_env_says_why_a_kernel_is_not_in_use(run, monkeypatch):
    monkeypatch.setattr("fastweights.ops._native.MISSING", "it was not built")
    assert "cpu: not in use: it was not built" in run("env")[1]


def test_reproduce_and_report(run, tmp_path):
    status, output, _ = run("reproduce", EXPERIMENT, *TINY)
    folder = tmp_path / "runs" / "ba2016" / "associative-retrieval" / "quick"
    assert status == 0
    assert "Fast weights" in output
    assert "page: runs/ba2016/associative-retrieval/quick/index.html" in output
    assert "figure: runs/ba2016/associative-retrieval/quick/learning_curves.svg" in output
    rows = json.loads((folder / "result.json").read_text())["rows"]
    assert [len(row["ours"]) for row in rows] == [1, 1]
    page = (folder / "index.html").read_text()
    assert " ".join(["fastweights reproduce", EXPERIMENT, *TINY[:5]]) in page
    status, again, _ = run("report", folder, "--output", "elsewhere")
    assert status == 0
    assert again.replace("elsewhere", str(folder.relative_to(tmp_path))) == output
    assert (tmp_path / "elsewhere" / "index.html").read_text() == page
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [
        "index.html",
        "learning_curves.svg",
        "report.md",
    ]


def test_changed_settings_and_fresh(run, tmp_path):
    assert run("reproduce", EXPERIMENT, *TINY, "--output", "mine")[0] == 0
    status, _, errors = run("reproduce", EXPERIMENT, *TINY, "--output", "mine", "--learning-rate", "0.1")
    assert status == 1
    assert "learning_rate was 0.001, now 0.1" in errors
    assert "--output chooses the folder, --fresh starts over" in errors
    assert run("reproduce", EXPERIMENT, *TINY, "--output", "mine", "--learning-rate", "0.1", "--fresh")[0] == 0


def test_a_damaged_checkpoint_is_one_line_and_nothing_is_lost(run, tmp_path):
    assert run("reproduce", EXPERIMENT, *TINY, "--output", "mine")[0] == 0
    checkpoint = tmp_path / "mine" / "lstm-6-seed1" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*.*") if path.is_file()}
    status, _, errors = run("reproduce", EXPERIMENT, *TINY, "--output", "mine")
    assert status == 1
    assert errors.count("\n") == 1
    assert "checkpoint.pt is damaged" in errors
    after = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*.*") if path.is_file()}
    assert {path: data for path, data in after.items() if path.name != "environment.json"} == {
        path: data for path, data in before.items() if path.name != "environment.json"
    }


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_an_output_that_cannot_be_a_folder_is_one_line(run, tmp_path, output):
    (tmp_path / "file").write_text("mine")
    status, _, errors = run("reproduce", EXPERIMENT, *TINY, "--output", output)
    assert status == 1
    assert errors.count("\n") == 1
    assert "cannot write" in errors
    assert (tmp_path / "file").read_text() == "mine"


DRAWINGS = Path(__file__).parents[1] / "docs" / "guides" / "drawings"


def test_classify_tells_the_images_of_files_and_folders(run, tmp_path):
    described, asked = DRAWINGS / "described", DRAWINGS / "asked"
    status, output, _ = run("classify", "--described", described, asked, asked / "xi-2.png", "--resize")
    lines = [line.split("\t") for line in output.splitlines()]
    assert status == 0
    assert [line[0] for line in lines] == [*map(str, sorted(asked.iterdir())), str(asked / "xi-2.png")]
    assert sum(Path(path).name.startswith(label) for path, label, _ in lines) >= 8
    assert all(0.2 <= float(probability) <= 1 for _, _, probability in lines)
    FewShotClassifier.load("omniglot").save("mine")
    again = run("classify", "--described", described, asked / "xi-2.png", "--resize", "--weights", "mine")
    assert again[1].splitlines() == output.splitlines()[-1:]


def test_classify_keeps_a_line_an_image_whatever_its_name(run, tmp_path):
    for name in ("a\tb.png", "line\nbreak.png"):
        (tmp_path / "asked").mkdir(exist_ok=True)
        shutil.copy(DRAWINGS / "asked" / "xi-2.png", tmp_path / "asked" / name)
    (tmp_path / "asked" / "scan.tiff").touch()
    (tmp_path / "asked" / "within").mkdir()
    status, output, errors = run("classify", "--described", DRAWINGS / "described", "asked", "--resize")
    assert status == 0
    assert [line.split("\t")[0] for line in output.splitlines()] == ["asked/a\\tb.png", "asked/line\\nbreak.png"]
    assert errors.startswith("fastweights: left out: 2 files and folders, such as asked/scan.tiff: of a ")
    shutil.copytree(DRAWINGS / "described", tmp_path / "described")
    (tmp_path / "described" / "xi").rename(tmp_path / "described" / "x\ti\n")
    _, output, _ = run("classify", "--described", "described", "asked/a\tb.png", "--resize")
    assert output.split("\t")[:2] == ["asked/a\\tb.png", "x\\ti\\n"]


def test_classify_goes_on_past_images_that_cannot_be_read_and_lists_them(run, tmp_path):
    shutil.copytree(DRAWINGS, tmp_path / "mine")
    (tmp_path / "mine" / "described" / "notes.txt").touch()
    bad = [tmp_path / "mine" / "described" / "xi" / "0.png", tmp_path / "mine" / "asked" / "aaa.png"]
    for path in bad:
        path.write_bytes(b"no image")
    status, output, errors = run("classify", "--described", "mine/described", "mine/asked", "nowhere.png", "--resize")
    assert status == 1
    assert len(output.splitlines()) == 10
    left_out, refused = errors.splitlines()
    assert left_out == "fastweights: left out: 1 beside the folders of classes, such as mine/described/notes.txt"
    assert refused.startswith("fastweights: error: left out: 3 images cannot be read: mine/described/xi/0.png cannot")
    assert "aaa.png cannot be read as an image" in refused
    assert "nowhere.png cannot be read as an image: [Errno 2] No such file or directory" in refused


def test_classify_finds_the_home_that_the_shell_leaves_alone(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    shutil.copytree(DRAWINGS, tmp_path / "my drawings")
    words = ["classify", "--resize", "--described=~/my drawings/described", "~/my drawings/asked"]
    status, output, errors = run(*words, "~/my drawings/asked/xi-2.png")
    assert (status, errors) == (0, "")
    assert len(output.splitlines()) == 11
    for unknown in (("--described=~nobody-of-that-name", "x.png"), (words[2], "~nobody-of-that-name")):
        status, _, errors = run("classify", "--resize", *unknown)
        assert status == 1
        assert "~nobody-of-that-name " in errors


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path):
    shutil.copy(DRAWINGS / "asked" / "xi-2.png", tmp_path / "é.png")
    command = [sys.executable, "-m", "fastweights", "classify", "--described", str(DRAWINGS / "described"), "--resize"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "é.png"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert done.stdout.startswith(rb"\xe9.png" + b"\t")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "1.png has 105 x 105 pixels, the network takes 28 x 28: give resize=True (--resize)"),
        (("--resize", "--weights", "greek"), "there is no classifier 'greek': give omniglot, a folder, or owner/name"),
        (("--resize", "--weights", "./nowhere"), "there is no folder nowhere"),
        (("--resize", "--", "empty"), "empty has no image: its files should end in .bmp"),
        (("--resize", "--described", "one"), "one has a folder of images for 1 class: at least two are needed"),
        (("--resize", "--described", "lacking"), "lacking/b has no image: its files should end in .bmp"),
        (("--resize", "--described", "many"), "the network takes at most"),
    ],
)
def test_classify_says_what_is_wrong(run, tmp_path, words, message):
    drawing = DRAWINGS / "described" / "xi" / "1.png"
    for folder in ("empty", "one/a", "lacking/a", "lacking/b", *(f"many/{number}" for number in range(101))):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("one/a", "lacking/a", *(f"many/{number}" for number in range(101))):
        shutil.copy(drawing, tmp_path / folder)
    status, output, errors = run("classify", "--described", DRAWINGS / "described", *words, drawing)
    assert (status, output) == (1, "")
    assert errors.count("\n") == 1
    assert errors.startswith("fastweights: error: ")
    assert message in errors


def test_data_list_and_check(run, tmp_path):
    status, output, _ = run("data", "list", "--data-dir", ".")
    assert status == 0
    assert len(output.splitlines()) == 11
    status, output, errors = run("data", "check", "ptb", "--data-dir", tmp_path)
    assert status == 1
    assert output.count("missing") == 3
    assert "3 files are missing" in errors


def test_omp_threads_sleep_unless_the_user_wants_otherwise(run, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    run("list")
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    run("list")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_an_interrupt_says_how_to_go_on(run, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "list", interrupt)
    status, _, errors = run("list")
    assert status == 130
    assert errors == "fastweights: interrupted; the same command goes on from the last checkpoint\n"


LIGHT = """
import sys
import fastweights
from fastweights import cli
assert cli.main(["list"]) == 0
heavy = {"torch", "numpy", "matplotlib", "rich", "tyro", "pooch"} & set(sys.modules)
assert not heavy, heavy
assert fastweights.nn.FastWeightsRNN and "torch" in sys.modules
assert "torch._dynamo" not in sys.modules  # the compiler, which takes as long to load as the rest of torch
assert fastweights.training.train_actor_critic and "gymnasium" not in sys.modules
assert {"nn", "FewShotClassifier"} <= set(dir(fastweights))
try:
    fastweights.nothing
except AttributeError as error:
    print(error)
"""


def test_the_package_loads_nothing_heavy_until_it_is_used():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "module 'fastweights' has no attribute 'nothing'"


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m fastweights reproduce {EXPERIMENT} --help | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("usage: fastweights reproduce")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["list", "env"])
def test_a_full_disk_under_the_output_is_one_line(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastweights", command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "fastweights: error: cannot write the output: No space left on device\n"


def test_a_file_that_cannot_be_looked_at_is_named(capsys):
    name = "a" * 300
    assert cli.main(["classify", "--described", "docs/guides/drawings/described", name]) == 1
    assert capsys.readouterr().err == f"fastweights: error: cannot use {name}: File name too long\n"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), "there is not enough memory"),
        (lambda: torch.empty(2) @ torch.empty(3), None),
    ],
    ids=["too little memory", "our own mistake"],
)
def test_too_little_memory_is_one_line_and_a_mistake_of_ours_is_not(raised, told, monkeypatch, capsys):
    monkeypatch.setitem(cli._COMMANDS, "env", lambda options: raised())
    if told is None:
        with pytest.raises(RuntimeError, match=r"inconsistent tensor size|size mismatch"):
            cli.main(["env"])
        return
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err.startswith(f"fastweights: error: {told}")
