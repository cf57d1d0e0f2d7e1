"""Laws of every experiment: found, described, refused, resumed, and tested on examples that it has not learnt from."""

import dataclasses
import importlib.util
import os
import re
import typing

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import RunError
from fastweights.report import console_table
from fastweights.reproduce import command, experiments, load
from fastweights.reproduce.munkhdalai2018._episodes import TITLES
from fastweights.runs import RunFolder, load_run
from fastweights.tasks import omniglot
from fastweights.tasks.datasets import DATASETS

from .helpers import TINY, TRAINED, KilledError, files_of, kill_before, members_of, records, result

pytestmark = pytest.mark.usefixtures("made_up")


NEEDED = {"popgym/memory-tasks": "popgym", "guides/digits": "sklearn"}


def where_it_runs(name):
    """An experiment as a parameter, left out where what it needs is not installed."""
    package = NEEDED.get(name)
    missing = package is not None and importlib.util.find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"needs {package}"))


every = pytest.mark.parametrize("name", [where_it_runs(name) for name in TINY])
every_trained = pytest.mark.parametrize("name", [where_it_runs(name) for name in TRAINED])


def test_all_are_tested():
    assert list(experiments()) == sorted(TINY)


@every
def test_the_command_finds_it_and_its_presets_can_run(name):
    module = TINY[name].module
    assert load(name) is module
    about = experiments()[name]
    assert about.summary == (module.__doc__ or "").partition("\n")[0]
    assert (about.quick_minutes, about.data) == (module.QUICK_MINUTES, module.DATA)
    # Only an experiment with a data set has a setting for its folder.
    assert (about.data in DATASETS) == hasattr(TINY[name].settings, "data_dir")
    for preset, settings in module.PRESETS.items():
        module.check(settings)
        assert command(name, preset, settings, settings).endswith(name if preset == "quick" else preset)


@every
def test_help_says_of_every_setting_what_it_is_and_whom_it_is_for(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["reproduce", name, "--help"])
    words = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    settings = TINY[name].module.Settings
    models = typing.get_args(typing.get_args(typing.get_type_hints(settings)["models"])[0])
    for field in dataclasses.fields(settings):
        _, _, text = words.partition(f" --{field.name.replace('_', '-')}")
        text, default, _ = text.partition(" (default: ")
        assert default
        assert re.search(r"[A-Z0-9$][^{}]+\.$", text), text
        assert not re.search(r"([A-Z]{3}|\}|\]|:|--no-\S+) (What|Of|On|In|To|That|Whether|How|Where|Which) ", text), (
            text
        )
        told = field.metadata.get("only", ()) + field.metadata.get("except_for", ())
        assert set(told) <= set(models)
        assert (f"{', '.join(told)}: " in text) or not told


@every
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ()}, "models is empty: give at least one value"),
        ({"seeds": (2, 1, 1)}, "seeds has 1 twice: give each value once"),
        ({"seeds": (-1,)}, "seeds must be an integer of at least 0, got -1"),
        ({"seeds": (10**25,)}, "seeds must be at most 2,147,483,647"),
        ({"threads": 0}, "threads must be an integer of at least 1, got 0"),
        ({"threads": 1000}, "threads must be at most 256, got 1000"),
        ({"device": "abacus"}, "abacus"),
        ({"device": "meta"}, "meta"),
    ],
)
def test_settings_that_cannot_run_are_refused_in_a_line_before_the_folder_is_made(name, tmp_path, change, message):
    tiny = TINY[name]
    if not hasattr(tiny.settings, next(iter(change))):
        pytest.skip("it has no such setting")
    with pytest.raises(RunError, match=message) as refusal:
        tiny.module.run(dataclasses.replace(tiny.settings, **change), tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_an_error_without_words_is_told_by_its_name(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(torch, "ones", refuse)
    tiny = TINY["ba2016/associative-retrieval"]
    with pytest.raises(RunError, match="these settings cannot run: RuntimeError"):
        tiny.module.check(tiny.settings)


def test_a_damaged_result_is_written_anew_and_what_was_never_finished_is_cleared(tmp_path):
    tiny = TINY["munkhdalai2018/timing"]
    (tmp_path / "result.json").write_text("[]")
    parts = [tmp_path / f".result.json.{name}.part" for name in ("killed", "written-now")]
    for part in parts:
        part.touch()
    os.utime(parts[0], (0, 0))
    tiny.module.run(tiny.settings, tmp_path)
    assert result(tmp_path)["experiment"] == "munkhdalai2018/timing"
    assert [part.exists() for part in parts] == [False, True]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of each experiment's whole run, made when it is first asked for."""
    folders: dict[str, typing.Any] = {}

    def run(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name.replace("/", "-"))
            TINY[name].module.run(TINY[name].settings, str(folders[name]))
        return folders[name]

    return run


@every
def test_a_run_writes_a_row_for_each_model_and_a_page(name, whole):
    folder, tiny = whole(name), TINY[name]
    table = result(folder)
    assert (table["experiment"], table["preset"]) == (name, "quick")
    titles = TITLES if name.startswith("munkhdalai2018") else tiny.module.TITLES
    for title in (getattr(tiny.module, "TITLES", titles)[model] for model in tiny.settings.models):
        assert any(row["model"].startswith(title) for row in table["rows"]) or not table["rows"]
    assert console_table(load_run(folder)).row_count == len(table["rows"])
    assert main(["report", str(folder), "--output", str(folder / "page")]) == 0
    assert (folder / "page" / "report.md").exists()


@every_trained
def test_a_finished_run_is_left_as_it_is_and_other_settings_are_refused(name, whole):
    folder, tiny = whole(name), TINY[name]
    before = {member: (member / "metrics.jsonl").stat().st_mtime_ns for member in members_of(folder)}
    threads = torch.get_num_threads()
    tiny.module.run(dataclasses.replace(tiny.settings, threads=2, seeds=tiny.settings.seeds), folder)
    assert torch.get_num_threads() == threads
    assert {member: (member / "metrics.jsonl").stat().st_mtime_ns for member in members_of(folder)} == before
    files = files_of(folder)
    (setting,) = tiny.matters
    with pytest.raises(RunError, match=f"holds a run with other settings: {setting} was .*, now "):
        tiny.module.run(dataclasses.replace(tiny.settings, **tiny.matters), folder)
    assert files_of(folder) == files


@every_trained
def test_a_killed_run_goes_on_to_the_same_numbers(name, whole, tmp_path, monkeypatch):
    tiny = TINY[name]
    with monkeypatch.context() as patch:
        # A member of a guide has no checkpoint: it is measured in one go.
        kill_before("record" if name.startswith("guides/") else "checkpoint", 2, patch)
        with pytest.raises(KilledError):
            tiny.module.run(tiny.settings, tmp_path)
    tiny.module.run(tiny.settings, tmp_path)
    expected = {member.relative_to(whole(name)): records(member) for member in members_of(whole(name))}
    assert {member.relative_to(tmp_path): records(member) for member in members_of(tmp_path)} == expected
    rows = [[row for row in result(run)["rows"] if "milli" not in row["metric"]] for run in (tmp_path, whole(name))]
    assert rows[0] == rows[1]


def test_fresh_removes_nothing_while_a_member_is_in_use_nor_beside_another_experiment(tmp_path):
    name, other = "ba2016/associative-retrieval", "rae2018/rare-classes"
    tiny = TINY[name]
    settings = dataclasses.replace(tiny.settings, models=("lstm",), seeds=(1, 2))
    tiny.module.run(settings, tmp_path)
    before = {path: content for path, content in files_of(tmp_path).items() if path.name != ".lock"}
    last = tmp_path / "lstm-8-seed2"
    with RunFolder(last, load_run(tmp_path).members[1].settings), pytest.raises(RunError, match="another process is"):
        tiny.module.run(settings, tmp_path, fresh=True)
    with pytest.raises(RunError, match=f"holds runs of {name}, not of {other}: give another --output"):
        TINY[other].module.run(TINY[other].settings, tmp_path, fresh=True)
    assert {path: content for path, content in files_of(tmp_path).items() if path.name != ".lock"} == before
    tiny.module.run(dataclasses.replace(settings, learning_rate=0.01), tmp_path, fresh=True)
    assert {member.settings["learning_rate"] for member in load_run(tmp_path).members} == {0.01}


def _splits(name):
    """The examples of each split, as bytes; of streams every 40 characters in a row."""
    module, settings = TINY[name].module, TINY[name].settings
    if name == "ba2016/associative-retrieval":
        settings = dataclasses.replace(settings, train_examples=1000, validation_examples=300, test_examples=300)
        yield {split: inputs for split, (inputs, _) in module.draw_splits(settings).items()}
    elif name == "ba2016/mnist-glimpses":
        yield {split: images for split, (images, _) in module.load_splits(settings).items()}
    elif name == "ba2016/facial-expression":
        yield {split: module.load_faces(settings).part(split)[0] for split in ("train", "validation", "test")}
    elif name == "schlag2017/associative-retrieval":
        streams = module.draw_splits(settings)
        yield {split: stream.inputs.T.unfold(1, 40, 1).flatten(0, 1) for split, stream in streams.items()}
    elif name == "recall/gauntlet":
        for cell in module.CELLS:
            splits = module.draw_problem(cell, dataclasses.replace(settings, train_examples=500)).splits
            yield {split: inputs for split, (inputs, _) in splits.items()}
    elif name in ("recall/mqar", "recall/state-tracking"):
        splits = module.draw_splits(dataclasses.replace(TINY[name].module.Settings(), train_examples=500))
        yield {split: splits[split][0] for split in ("train", "validation", "test")}
    elif name == "rae2018/omniglot-curriculum":
        data = module.split_drawings(module.omniglot.load(), 1)
        yield {split: images.flatten(0, 1) for split, images in zip(("train", "test"), data, strict=True)}
    elif name == "rae2018/rare-classes":
        parts = module.split_drawings(settings)
        yield {split: parts[split][0] for split in ("train", "validation", "test")}
        yield {split: images for split, (images, _) in parts.items() if split.startswith("test_")}
    elif name == "sprechmann2018/permuted-mnist":
        settings = dataclasses.replace(settings, queries=40)
        for task in range(3):
            permuted = {split: dataclasses.replace(settings, split=split) for split in ("test", "validation")}
            tasks = {split: module.PermutedTasks(module.mnist.load(), own, 1) for split, own in permuted.items()}
            held_out = {split: own.held_out(task)[0] for split, own in tasks.items()}
            yield held_out | {"train": tasks["test"].training(task)[0]}
    elif name == "sprechmann2018/incremental-classes":
        data = module.load_images(settings)
        yield {split: data.images[data.part == index] for index, split in enumerate(module.PARTS)}
    elif name == "guides/adapt-language-model":
        _, tokenizer = module.load_model()
        ids = module.encode_text(tokenizer, module.READERS["wikitext"](None), settings)
        yield {split: part.unfold(0, 10, 1) for split, part in zip(("validation", "test"), ids, strict=True)}
    elif name == "guides/learning-rate":
        splits = module.split_digits(module.mnist.load(), settings)
        yield {split: images for split, (images, _) in zip(("train", "given", "test"), splits, strict=True)}
    elif name == "guides/few-shot-classifier":
        images = omniglot.load().images
        task = module.draw_task(images, (1, 2, 3, 4, 5), settings.queries, torch.Generator().manual_seed(1))
        yield {"described": task.described, "queries": task.queries}
    elif name == "guides/learn-a-class":
        data = omniglot.load()
        known = module.train_classifier(data, settings)
        given, asked = module.split_character(data, 1, known.new, settings)
        parts = {part: getattr(known, part)[0] for part in ("train", "validation", "test")}
        yield parts | {"given": given[0], "asked": asked[0]}
    elif name == "guides/around-an-encoder":
        for case in module.leave_digits_out(module.NETWORKS["mnist-64"], 1, settings):
            pools, tests = (torch.cat(parts) for parts in zip(*case.new, strict=True))
            yield {"fit": case.fit[0], "test": case.test[0], "to learn": pools, "to test": tests}
    elif name == "guides/learn-by-name":
        case = module.leave_out_digit(module.load("mnist", None), 1, settings)
        yield {"train": case.train[0], "test": case.test[0], "new": case.new, "new_test": case.new_test}
    elif name == "guides/digits":
        yield {split: torch.as_tensor(x) for split, (x, _) in zip(("train", "test"), module.load(), strict=True)}
    elif name == "guides/regression":
        split = module.make_split(module.load_patients(), 1, settings)
        yield {part: getattr(split, part)[0] for part in ("train", "given", "old", "new")}
    elif name.endswith("/language"):
        corpus = module.load_corpora(settings)["ptb"]
        yield {split: getattr(corpus, split).unfold(0, 20, 1) for split in ("train", "validation", "test")}
    else:
        load = module.load
        yield {split: part.examples[torch.arange(len(part.labels))] for split, part in load(settings).items()}


# A game of Catch is one of a few: what an agent is tested on it may have played before, as everybody's does. POPGym
# shuffles a deck for each episode, and the actions decide what is seen of it. "When an LSTM is better" and "rates" draw
# sequences at every step.
DRAWN = ("ba2016/catch", "popgym/memory-tasks", "guides/when-an-lstm-is-better", "guides/rates")


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in DRAWN])
def test_no_two_splits_share_an_example(name):
    for examples in _splits(name):
        seen = {split: {example.numpy().tobytes() for example in part} for split, part in examples.items()}
        assert all(seen.values())
        assert len(set.union(*seen.values())) == sum(map(len, seen.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [where_it_runs(name) for name in TRAINED if name != "guides/digits"])  # on processors
def test_a_run_computes_on_a_gpu(name, tmp_path):
    tiny = TINY[name]
    tiny.module.run(dataclasses.replace(tiny.settings, device="cuda"), tmp_path)
    assert all(records(member) for member in members_of(tmp_path))
