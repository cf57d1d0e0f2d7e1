import dataclasses
import json
import shutil

import numpy
import pytest
import torch
from matplotlib.figure import Figure

from fastweights.cli import main
from fastweights.reproduce.schlag2017 import show as command
from fastweights.reproduce.schlag2017.associative_retrieval import Settings, TrainedNetwork, make_model, run
from fastweights.reproduce.schlag2017.show import answer_chances, read_example, show, split_tokens
from fastweights.tasks import gated_retrieval as task

TINY = Settings(
    train_queries=100,
    validation_queries=20,
    test_queries=30,
    epochs=1,
    batch_size=10,
    hidden_size=6,
    slow_inner_size=7,
    embedding_size=5,
    checkpoint_seconds=0,
)
TEXT = "S(ab,c),S(dgf,e),S(ab,h),Q(ab)h."
EARLIER = "S(hf,h),S(cc,d),Q(cc)d."


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    before = torch.get_num_threads()
    run(dataclasses.replace(TINY, seeds=(1, 2)), folder)
    torch.set_num_threads(before)
    return folder


@pytest.fixture
def folder(trained_once, tmp_path, monkeypatch):
    """A run of its own, seen from a folder that holds nothing else."""
    shutil.copytree(trained_once, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def undrawn(monkeypatch):
    """What is chosen, without the time that the picture takes."""
    monkeypatch.setattr(command, "draw_fast_matrices", lambda example: Figure())


@pytest.fixture
def network():
    torch.manual_seed(0)
    return make_model("gated", TINY).double()


def indices(characters):
    return torch.tensor([task.VOCABULARY.index(character) for character in characters]).unsqueeze(1)


def test_the_trajectory_is_that_of_the_whole_stream(network):
    found = read_example(network, EARLIER, TEXT, "")
    assert found.tokens == ("Q(cc)d.", *split_tokens(TEXT))
    assert found.before == 1
    for step in (0, 7, 20, found.at_query):
        read = EARLIER[:-7] + "".join(found.tokens)[:step]
        with torch.no_grad():
            logits, state = network(indices(read + ")"))
            _, state = network(indices(read))
        torch.testing.assert_close(torch.from_numpy(found.fast_1[step]), state[2][0])
        torch.testing.assert_close(torch.from_numpy(found.fast_2[step]), state[3][0])
    torch.testing.assert_close(torch.from_numpy(found.answer), logits[-1, 0].softmax(0)[:8])


def test_from_zeros_without_an_earlier_stream(network):
    found = read_example(network, "", TEXT, "")
    assert found.before == 0
    assert found.fast_1.shape == (len(TEXT) + 1, 6, 12)
    assert found.fast_2.shape == (len(TEXT) + 1, 6, 7)
    assert not found.fast_1[0].any()
    assert not found.fast_2[0].any()


def test_the_trace_is_what_the_value_changes(network):
    found = read_example(network, EARLIER, TEXT, "")
    stored = found.starts[found.asked] + 5  # S(ab,h): where h is read
    # The eight networks read the same until then, but a library may round their rows of one product differently.
    assert numpy.abs(found.trace_1[: stored + 1]).max() < 1e-14
    assert numpy.abs(found.trace_1[stored + 1]).max() > 1e-6
    with torch.no_grad():
        others = [network(indices(EARLIER + TEXT[:22] + value + TEXT[23:]))[1][2][0] for value in "abcdefg"]
    expected = torch.from_numpy(found.fast_1[-1]) - torch.stack(others).mean(0)
    torch.testing.assert_close(torch.from_numpy(found.trace_1[-1]), expected)


def test_recall_is_what_would_be_answered_and_leaves_the_states_alone(network):
    with torch.no_grad():
        states = [
            type(state)(*(part[0] for part in state))
            for state in (network(indices(EARLIER))[1], network(indices(TEXT))[1])
        ]
    before = [[part.clone() for part in state] for state in states]
    found = answer_chances(network, states, split_tokens(TEXT)[:2])
    for column, read in enumerate((EARLIER, TEXT)):
        for row, query in enumerate(("Q(ab)", "Q(dgf)")):
            with torch.no_grad():
                chances = network(indices(read + query))[0][-1, 0].softmax(0)
            torch.testing.assert_close(found[row, column], chances["abcdefgh".index("ce"[row])])
    for state, kept in zip(states, before, strict=True):
        assert all(torch.equal(part, copy) for part, copy in zip(state, kept, strict=True))


def test_the_command_draws_and_says_what(folder, capsys):
    assert main(["show", "gated", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["weights", "example", "answer", "figure"]
    assert lines[3] == f"figure: {folder / 'fast_matrices.svg'}"
    first = (folder / "fast_matrices.svg").read_bytes()
    assert first.startswith(b"<?xml")
    assert main(["show", "gated", str(folder), "--output", "again.svg"]) == 0
    assert (folder.parent / "again.svg").read_bytes() == first


def test_the_default_folder_is_the_experiments_own(folder, capsys, tmp_path):
    own = tmp_path / "runs" / "schlag2017" / "associative-retrieval" / "quick"
    own.parent.mkdir(parents=True)
    folder.rename(own)
    assert main(["show", "gated", "--text", TEXT]) == 0
    output = capsys.readouterr().out
    assert f"example: {TEXT}\n" in output
    assert "figure: runs/schlag2017/associative-retrieval/quick/fast_matrices.svg" in output


@pytest.mark.usefixtures("undrawn")
def test_the_best_seed_on_validation_is_shown(folder):
    for seed, error in ((1, 50.0), (2, 40.0)):
        record = {"kind": "epoch", "epoch": 1, "step": 1, "validation_error": error}
        (folder / f"gated-6-seed{seed}" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert "gated-6-seed2" in show(folder).weights
    (folder / "gated-6-seed2" / "checkpoint.pt").unlink()
    assert "gated-6-seed1" in show(folder).weights


@pytest.mark.usefixtures("undrawn")
def test_an_example_is_a_query_of_the_test_stream(folder):
    stream = task.splits((TINY.train_queries, TINY.validation_queries, TINY.test_queries), seed=0)[2]
    queries = [query + "." for query in task.text(stream.inputs).split(".")[:-1]]
    for number in (1, 30):
        assert show(folder, example=number).example == queries[number - 1]


@pytest.mark.usefixtures("undrawn")
def test_of_a_text_with_several_queries_the_last_is_drawn(folder):
    assert show(folder, text=EARLIER + TEXT).example == TEXT


@pytest.mark.usefixtures("undrawn")
def test_the_weights_of_the_package(folder, monkeypatch):
    network = make_model("gated", Settings())
    monkeypatch.setattr(
        command,
        "load_trained",
        lambda settings, folder: [TrainedNetwork("gated", None, "the published weights: seed 1", network)],
    )
    assert str(show(text=TEXT).figure) == "fast_matrices.svg"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "nowhere holds no result.json; give the folder that `fastweights reproduce` printed"),
        (("run", "--text", "S(ab,c),Q(xb)c."), "--text 'S(ab,c),Q(xb)c.': expected `S(key,value),` or `Q(key)value.`"),
        (("run", "--text", "S(ab,c),Q(ab)d."), "expected the answer 'c', the value last stored under 'ab'"),
        (("run", "--text", ""), "--text '': expected a query, got no characters"),
        (("run", "--text", TEXT, "--example", "3"), "--text and --example both choose the example: give one of them"),
        (("run", "--example", "31"), "--example must be the number of one of the 30 test queries, got 31"),
        (("run", "--example", "0"), "'0' is not a whole number from 1"),
        (("run", "--output", "."), "--output . is not the name of an SVG file, such as fast_matrices.svg"),
        (("run", "--output", "a.png"), "--output a.png is not the name of an SVG file"),
        (("run", "--output", "file/a.svg"), "cannot write file/a.svg: "),
        (("other",), "other is a run of ba2016/associative-retrieval; give one of schlag2017/associative-retrieval"),
        (("empty",), "empty holds no trained gated fast weights: train them with `fastweights reproduce schlag2017/"),
    ],
)
def test_a_users_mistake_is_one_line_and_nothing_is_written(folder, capsys, words, message):
    (folder.parent / "file").write_text("mine")
    for name, experiment in (("other", "ba2016/associative-retrieval"), ("empty", "schlag2017/associative-retrieval")):
        (folder.parent / name).mkdir()
        result = {"experiment": experiment, "preset": "quick", "rows": []}
        (folder.parent / name / "result.json").write_text(json.dumps(result))
    assert main(["show", "gated", *words]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    assert not list(folder.parent.rglob("*.svg*"))


def test_damaged_settings_and_checkpoints_are_one_line(folder, capsys):
    for seed in (1, 2):
        path = folder / f"gated-6-seed{seed}" / "settings.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"slow_inner_size": "wide"}))
    assert main(["show", "gated", str(folder)]) == 1
    assert "slow_inner_size is 'wide'; it must be of type int" in capsys.readouterr().err
    for seed in (1, 2):
        path = folder / f"gated-6-seed{seed}" / "settings.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"slow_inner_size": 8}))
    assert main(["show", "gated", str(folder)]) == 1
    assert "have other sizes than these settings give" in capsys.readouterr().err
    for seed in (1, 2):
        (folder / f"gated-6-seed{seed}" / "checkpoint.pt").write_bytes(b"no checkpoint")
    assert main(["show", "gated", str(folder)]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "checkpoint.pt is damaged" in errors
