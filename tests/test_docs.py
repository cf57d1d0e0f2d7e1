"""The README and the guides say what is true: their code runs, their commands exist, their numbers come from files."""

import csv
import dataclasses
import functools
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import markdown
import numpy
import pytest
import torch
from markdown.extensions import toc
from torch.distributed import run as distributed_run

from fastweights import _parser, cli, nn, reproduce
from fastweights.errors import FastWeightsError
from fastweights.evaluation import compare
from fastweights.ops import delta
from fastweights.ops.short_convolution import short_convolution
from fastweights.reproduce import load
from fastweights.reproduce.rae2018 import rare_classes
from fastweights.reproduce.rae2018.omniglot_curriculum import ConvNet
from fastweights.runs import Member, Row, Run
from fastweights.tasks import mnist, omniglot
from fastweights.tasks.omniglot import Omniglot
from tests.memory.language_models import make_model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def script(name):
    """A script of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fill():
    return script("fill")


LEARN_A_CLASS = ROOT / "docs" / "guides" / "learn-a-class-from-five-examples.md"
ADAPT_TO_EACH_QUERY = ROOT / "docs" / "guides" / "adapt-to-each-query.md"
BIND_NEW_CLASSES = ROOT / "docs" / "guides" / "bind-new-classes-from-one-example.md"
ADAPT_A_LANGUAGE_MODEL = ROOT / "docs" / "guides" / "adapt-a-language-model.md"
WITH_DATA = {LEARN_A_CLASS, ADAPT_TO_EACH_QUERY, ADAPT_A_LANGUAGE_MODEL}  # have tests of their own
PROGRAMS = [page for page in PAGES if page not in WITH_DATA and blocks(page, "python")]


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec("\n".join(blocks(page, "python")), {})  # the blocks of a page follow on one another


COMMANDS = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]


def launched(command):
    """Return what a launcher of several processes starts, after a look at the launcher's own options."""
    if command[0] == "srun":
        return command[command.index("torchrun") :]
    if command[0] == "torchrun":
        arguments = distributed_run.get_args_parser().parse_args(command[1:])
        return [arguments.training_script, *arguments.training_script_args]
    launch = pytest.importorskip("accelerate.commands.launch")
    arguments = launch.launch_command_parser().parse_args(command[2:])
    return [arguments.training_script, *arguments.training_script_args]


@pytest.mark.parametrize("line", sorted({line.split("#")[0].strip() for line in COMMANDS}))
def test_every_command_exists(line):
    words = [word for part in line.split("&&") for word in [shlex.split(part)] if word]
    for command in words:
        for launcher in ("srun", "torchrun", "accelerate"):
            if command[0] == launcher:
                command = launched(command)
        if command[0] == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(command[1:]) <= set(targets)
        elif command[0] == "fastweights":
            options, rest = _parser.parse(command[1:])
            if options.command == "reproduce":
                options.rest = [word for word in rest if word != "--help"]
                settings = cli._settings(load(options.experiment), options)
                assert settings in load(options.experiment).PRESETS.values() or options.rest
            elif options.command == "sweep":
                options.rest = rest
                assert cli._plan(options).total
            else:
                assert rest == []
        else:
            assert command[0] in {"git", "cd", "pip", "train.py"}


def test_a_command_that_does_not_exist_would_be_found():
    with pytest.raises(FastWeightsError):
        _parser.parse(["reprodcue"])


def test_the_changelog_names_what_exists_and_all_experiments():
    text = (ROOT / "CHANGELOG.md").read_text().partition("### For who used a checkout")[0]
    names = re.findall(r"`((?:nn|memory|few_shot|training|evaluation|integrations|tasks|ops|report|runs)\.\w+)`", text)
    assert len(names) > 50
    for name in names:
        module, _, attribute = name.partition(".")
        package = f"fastweights.{module}"
        found = hasattr(importlib.import_module(package), attribute)
        assert found or importlib.util.find_spec(f"{package}.{attribute}"), name
    assert set(re.findall(r"`(\w+/[\w-]+)`", text)) == set(reproduce.experiments())
    extras = re.findall(r"`(\w+)`", text.partition("### Extras")[2].partition(" install ")[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras, "ci", "dev", "docs"} == set(project["optional-dependencies"])
    commands = set(re.findall(r"`fastweights (\w+)`", text))
    assert commands == set(_parser.COMMANDS)


def test_every_public_name_has_its_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: fastweights\.[\w.]*\b(\w+)$", pages, re.MULTILINE))
    shown |= {name for members in re.findall(r"members: \[(.*)\]", pages) for name in members.split(", ")}
    assert "errors" in shown  # all of them
    for name in ("few_shot", "memory", "nn", "report", "runs", "sweep", "training", "evaluation"):
        assert set(importlib.import_module(f"fastweights.{name}").__all__) <= shown, name


def test_what_is_cited_is_this_version():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    package = re.search(r'^version = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert cited is not None
    assert package is not None
    assert cited[1] == package[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_or_part_of_one_is_empty(page):
    assert page.read_text().strip()


@functools.cache
def anchors(page):
    """The names of a page's parts, as mkdocs makes them of its headings, its marks and its reference."""
    extensions = ["attr_list", "md_in_html", "pymdownx.superfences", "pymdownx.snippets", "toc"]
    snippets = {"base_path": [str(ROOT), str(ROOT / "docs")], "check_paths": True}
    converter = markdown.Markdown(
        extensions=extensions, extension_configs={"pymdownx.snippets": snippets, "toc": {"slugify": toc.slugify}}
    )
    text = page.read_text()
    of_reference = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return {*re.findall(r'\bid="([^"]+)"', converter.convert(text)), *of_reference}


def links_that_lead_nowhere(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other.resolve())):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    assert links_that_lead_nowhere(page) == []


def test_a_link_to_no_page_or_to_no_part_of_one_is_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Other\n\n```python\n# no heading\n```\n\n## The `part`, and why\n\n## Twice\n\n## Twice\n")
    right = "[a](#here) [b](other.md#the-part-and-why) [c](other.md#twice_1) [d](other.md) [e](https://a.org/#b)"
    page.write_text(f"# Here\n\n{right} [f](#there) [g](other.md#no-heading) [h](other.md#twice_2) [i](none.md)\n")
    assert links_that_lead_nowhere(page) == ["#there", "other.md#no-heading", "other.md#twice_2", "none.md"]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nexclude_docs:")[0]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    parts = {page for page in pages if page.startswith("results/") and not page.endswith("/report.md")}
    assert sorted(listed) == sorted(pages - parts)


def test_make_bench_runs_every_bench():
    lines = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert re.findall(r"fastweights bench ([\w-]+)", lines) == list(_parser._BENCHES)


def test_the_numbers_of_the_readme_are_those_of_the_published_files(fill):
    text = (ROOT / "README.md").read_text()
    assert fill.fill_readme(text) == text
    assert text.count("| Fast weights |") == 1
    typed = re.sub(
        r"<!-- table -->.*<!-- /table -->|```.*?```|<!-- \S+ -->[^<]*<!-- -->|<!--.*?-->", "", text, flags=re.DOTALL
    )
    assert re.findall(r"\d+\.\d+", typed) == ["3.11", "2.0"]  # of Python and of the licence


def test_the_numbers_in_sentences_are_those_of_the_published_files(fill):
    for page in fill.PAGES:
        text = page.read_text()
        assert fill.fill_figures(text) == text, page


def test_every_table_and_figure_stands_as_the_published_files_have_it(fill):
    text = fill.EVERY_ITEM.read_text()
    assert fill.fill_items(text) == text
    listed = tomllib.loads((ROOT / "docs" / "items.toml").read_text())["item"]
    assert {item["state"] for item in listed} == {"complete", "in part", "missing"}
    shown = {name for item in listed for name in item.get("runs", ())}
    papers = ("ba2016", "schlag2017", "rae2018", "sprechmann2018", "munkhdalai2018")
    beside = {
        path.parent.name
        for path in fill.RESULTS.glob("*/result.json")
        if path.parent.name.startswith(papers) and any(row.paper is not None for row in fill.load_run(path.parent).rows)
    }
    # Runs of other settings than those of a table are told in words.
    assert beside - shown == {
        "ba2016-associative-retrieval",
        "ba2016-lstm-fast",
        "ba2016-lstm-long",
        "ba2016-mnist-glimpses",
        "ba2016-mnist-glimpses-100",
        "ba2016-mnist-glimpses-200",
        "ba2016-searched-20",
        "ba2016-small-rate",
        "schlag2017-associative-retrieval-equal",
    }


@pytest.mark.parametrize(
    ("metric", "ours", "paper", "verdict"),
    [
        ("test error, %", (1.0, 1.2), 2.0, "better"),
        ("test error, %", (1.0, 1.2), 1.2, "equal"),
        ("test perplexity", (60.0,), 59.0, "worse"),
        ("test accuracy, %", (98.0,), 98.1, "equal"),  # its interval over the tasks is 0.2
        ("test accuracy, %", (98.0,), 98.3, "worse"),
        ("test partial accuracy", (0.97,), 0.95, "better"),
        ("test accuracy", (0.95,), 0.95, "equal"),
    ],
)
def test_a_number_is_better_or_worse_than_its_spread_allows(fill, metric, ours, paper, verdict):
    row = Row(model="A", hidden_size=5, metric=metric, ours=ours, paper=paper, floor=None)
    result = {"test_interval": 0.2} if "accuracy, %" in metric else {}
    member = Member("a-seed1", {"model": "A", "hidden_size": 5}, {}, [], result)
    run = Run(Path("."), "a/b", "quick", [row], [member])
    assert fill.judge(run, row) == verdict


def test_a_number_without_a_source_is_found(fill):
    with pytest.raises(ValueError, match="no figures or no sources: \\['a'\\]"):
        fill.fill_figures("It gives <!-- a -->1<!-- -->.")
    with pytest.raises(ValueError, match="has 0 rows with nobody"):
        fill.fill_figures("<!-- a -->1<!-- --> <!-- figures\na: regression/models.md @ nobody @ 2\n-->")


def test_the_figures_and_the_tables_of_the_timings_are_those_of_the_published_files(fill):
    # Matplotlib names a clip path after the unrounded numbers in it, whose last bits depend on the processor.
    name = re.compile(r"\bp[0-9a-f]{10}\b")
    for path, text in (fill.timings() | fill.pictures()).items():
        assert name.sub("", path.read_text()) == name.sub("", text), path


def test_the_tables_of_the_docs_are_those_of_the_published_runs(fill):
    parts = fill.parts()
    assert parts
    for path, text in parts.items():
        assert path.read_text() == text, path
    tables = {path for path in fill.RESULTS.glob("*/table.md") if (path.parent / "result.json").exists()}
    assert tables <= set(parts)  # none is kept that no page shows


RARE_CLASSES = blocks(ROOT / "docs" / "guides" / "rare-classes.md", "python")


def rare_and_all(names):
    """The accuracies of the guide's two models on classes of at most two examples, and on all."""
    rare = names["counts"][names["test_y"]] <= 2
    return [(names[model][rare].float().mean(), names[model].float().mean()) for model in ("plain", "hebbian")]


def test_the_head_of_the_guide_recognises_rare_classes_better():
    names: dict[str, Any] = {}
    exec("\n".join(RARE_CLASSES), names)
    (plain_rare, plain_all), (hebbian_rare, hebbian_all) = rare_and_all(names)
    assert hebbian_rare > plain_rare + 0.1
    assert hebbian_all > plain_all
    # From a plain model to a Hebbian head in twenty lines: of the eleven one is new and two are other ones.
    plain, hebbian = (block.splitlines() for block in RARE_CLASSES[1:3])
    assert (len(plain), len(hebbian)) == (10, 11)
    assert len(set(hebbian) - set(plain)) == 4  # with the line that names the result


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_the_lines_of_the_guide_work_on_omniglot():
    settings = dataclasses.replace(rare_classes.Settings(), classes=100)
    parts = rare_classes.split_drawings(settings)
    (x, y), (test_x, test_y) = parts["train"], parts["test"]

    def make_body():
        torch.manual_seed(1)
        return ConvNet()

    names = {"x": x, "y": y, "test_x": test_x, "test_y": test_y, "make_body": make_body}
    names |= {
        "torch": torch,
        "F": torch.nn.functional,
        "nn": nn,
        "classes": 100,
        "counts": rare_classes.count_drawings(100),
    }
    exec("\n".join(RARE_CLASSES[1:]), names)
    (plain_rare, plain_all), (hebbian_rare, hebbian_all) = rare_and_all(names)
    assert hebbian_rare > plain_rare + 0.1
    assert hebbian_all > plain_all


def made_up_drawings():
    """In the place of Omniglot's: 48 characters to train on, of which the guide takes some, and one more."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randn(49, 1, 7, 7, generator=generator).repeat_interleave(4, 2).repeat_interleave(4, 3)
    ink = shapes + 0.7 * torch.randn(49, 20, 28, 28, generator=generator)
    images = (255 * ink.sigmoid()).byte()
    return Omniglot(images, ["old", "new"], torch.arange(49) // 48, [f"character{index}" for index in range(49)], 48)


def check_that_the_class_is_learnt(names):
    """The new class is answered, the old ones as before; what the guide asserts of forgetting it has run by then."""
    before, after, _ = names["found"]
    assert before.new.accuracy == 0
    assert after.new.accuracy >= 60
    assert after.old.accuracy >= before.old.accuracy - 3
    assert (names["model"](names["all_x"]).argmax(1) == names["classes"]).sum() == 0


def made_up_digits():
    """Each digit a smooth pattern of its own, with noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.nn.functional.interpolate(torch.rand(10, 1, 4, 4, generator=generator), 28, mode="bilinear")[:, 0]

    def draw(count):
        labels = torch.arange(10).repeat(count)
        noise = torch.rand(len(labels), 28, 28, generator=generator)
        return (255 * (0.7 * patterns[labels] + 0.3 * noise)).byte(), labels

    return mnist.MNIST(*draw(120), *draw(20))


def check_that_the_digit_is_learnt(names):
    """What the guide asserts of undoing and serving has run by then."""
    count = len(names["test_y"])
    before, answers = names["before"], names["answers"]
    assert names["per_cent"](before.names[:count], names["test_y"]) >= 90
    assert names["per_cent"](answers.names[:count], names["test_y"]) >= 88
    assert names["per_cent"](answers.names[count:], names["three_y"][5:]) >= 50
    assert before.unknown[:count].float().mean() < 0.15
    assert before.unknown[count:].float().mean() > 0.3
    assert names["learner"].predict(names["pictures"]).names.count("digit 3") >= 5  # of ten, half of them unseen


def test_the_guide_learns_a_digit_by_name_and_serves_it(monkeypatch):
    monkeypatch.setattr(mnist, "load", made_up_digits)
    names: dict[str, Any] = {}
    exec("\n".join(blocks(LEARN_A_CLASS, "python")), names)
    check_that_the_digit_is_learnt(names)


@pytest.mark.data
@pytest.mark.usefixtures("mnist_root")
def test_the_guide_learns_a_digit_of_mnist_by_name():
    names: dict[str, Any] = {}
    exec("\n".join(blocks(LEARN_A_CLASS, "python")), names)
    check_that_the_digit_is_learnt(names)


def test_mbpa_learns_a_class_from_five_examples_and_forgets_it(monkeypatch):
    monkeypatch.setattr(omniglot, "load", made_up_drawings)
    names: dict[str, Any] = {}
    exec("\n".join(blocks(ADAPT_TO_EACH_QUERY, "python")), names)
    check_that_the_class_is_learnt(names)
    # Why the old classes have to be in the memory too: without them every query is pulled to the new one.
    names["store"].clear()
    names["model"].write(names["five_x"], names["five_y"])
    alone = compare(names["classifier"], names["model"], (names["all_x"], names["all_y"]), [names["classes"]]).after
    assert alone.old.accuracy < names["found"].after.old.accuracy - 10


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_mbpa_learns_a_class_of_omniglot_from_five_examples_and_forgets_it():
    names: dict[str, Any] = {}
    exec("\n".join(blocks(ADAPT_TO_EACH_QUERY, "python")), names)
    check_that_the_class_is_learnt(names)


def test_the_guide_shows_what_the_command_answers(fill):
    answers = [line.split("\t")[:2] for line in fill.classified().splitlines()]
    shown = (fill.RESULTS / "few-shot-classifier" / "classified.txt").read_text()
    assert [line.split("\t")[:2] for line in shown.splitlines()] == answers
    assert fill.CLASSIFY in BIND_NEW_CLASSES.read_text()


def test_the_picture_of_local_adaptation_shows_what_its_text_says():
    drawing = script("local_adaptation")
    shown = drawing.illustration()
    right = float(drawing.true(torch.tensor(drawing.QUERY)))
    at_query = (shown.x - drawing.QUERY).abs().argmin()
    network = float(shown.network[at_query])
    assert abs(shown.answered - right) < min(abs(shown.attended - right), abs(network - right)) / 2
    assert shown.attended > right > network
    assert drawing.svg(drawing.figure(shown)).startswith("<?xml")
    assert drawing.PATH.exists()


def test_the_screens_of_catch_show_three_frames_and_a_ball_that_is_caught():
    drawing = script("catch_screen")
    frames = drawing.play()
    assert [bool(seen.any()) for seen, _ in frames] == [True] * 3 + [False] * 13
    assert [int((seen + unseen).sum()) for seen, unseen in frames] == [3] * 15 + [2]  # the ball on the paddle
    assert not any((seen * unseen).any() for seen, unseen in frames)
    assert drawing.svg(drawing.figure(frames)).startswith("<?xml")
    assert drawing.PATH.exists()


def test_the_ablations_lack_the_part_that_their_names_say():
    made = script("delta_ablations")
    x = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(0))
    size, used = 8, {}
    lacking = ("NoStateInState", "NoKeysFromState", "NoState", "NoGates", "NoConvolution", "OneConvolution", "NoNorm")
    for name in (*lacking, "Whole"):
        layer = getattr(made, name)(5, size)
        torch.autograd.backward(layer(x).square().sum())
        weights = dict(layer.named_parameters())
        rows = next(part.grad for path, part in weights.items() if "weight_hh" in path)
        used[name] = [bool(rows[start:end].any()) for start, end in ((0, size), (size, 4 * size), (4 * size, None))]
    assert used.pop("NoStateInState") == [False, True, True]
    assert used.pop("NoKeysFromState") == [True, False, False]
    assert used.pop("NoState") == [False, False, False]
    assert used.pop("NoGates") == [True, True, False]
    assert set(map(tuple, used.values())) == {(True, True, True)}
    for name, reach in (("SmallValues", 0.25), ("LargeValues", 4)):
        rows = getattr(made, name)(5, 40).layer.weight_hh[3 * 40 : 4 * 40]
        assert 0.9 * reach < rows.abs().max() * 40**0.5 < 1.0001 * reach
    assert made.NoConvolution(5, size).layer.convolution_weight is None
    one = made.OneConvolution(5, size)
    torch.testing.assert_close(one(x), one.layer(one.inputs(x)[0])[0])
    gates = made.NoGates(5, size).layer
    drive = torch.nn.functional.linear(x, gates.weight_ih, gates.bias)
    driven = short_convolution(drive, gates.convolution_weight, gates.convolution_bias)[..., 4 * size :]
    assert torch.equal(driven, driven[:, :1].expand_as(driven))  # the same at every step

    layer = made.NoNorm(5, size)
    layer.scale = lambda sums: layer.layer.norm(sums)
    torch.testing.assert_close(layer(x), made.Whole.forward(layer, x))


def test_the_nonlinear_memories_are_their_equations():
    made = script("nonlinear_memories")
    generator = torch.Generator().manual_seed(0)
    size, x = 6, torch.randn(2, 9, 5, generator=generator)

    def unit(rows):
        return rows / numpy.linalg.norm(rows)

    for name in ("E88", "M2RNN"):
        torch.manual_seed(0)
        layer = getattr(made, name)(5, size)
        y = layer(x)
        assert y.shape == (2, 9, size)
        with torch.no_grad():
            products = torch.nn.functional.silu(layer.convolution(layer.products(x))[0]).double().numpy()
            decay = layer.decay(x).sigmoid().double().numpy()
            gate = torch.nn.functional.silu(layer.gate(x)).double().numpy()
        assert numpy.all((decay > 0.9) & (decay < 1))
        for row in range(2):
            memory = numpy.zeros((size, size))
            for step in range(9):
                q, k, v = numpy.split(products[row, step], 3)
                q, k, kept = unit(q), unit(k), decay[row, step]
                if name == "E88":
                    memory = numpy.tanh(kept * memory + numpy.outer(k, v - memory.T @ k))
                else:
                    new = numpy.tanh(memory @ layer.mix.detach().double().numpy() + numpy.outer(k, v))
                    memory = kept * memory + (1 - kept) * new
                expected = gate[row, step] * (memory.T @ q)
                numpy.testing.assert_allclose(y[row, step].detach().numpy(), expected, atol=1e-5)


def test_the_home_page_shows_what_a_fast_matrix_does():
    drawing = script("write_decay_read")
    reading = drawing.read_and_write()
    assert drawing.PATH.read_text() == drawing.svg(reading)
    # The kernels' own rule, whose state is the transpose, says the same.
    count = len(drawing.PAIRS)
    keys, values = (tensor[None, :, None] for tensor in (reading.keys, reading.values))
    decays = torch.full((1, count, 1), drawing.DECAY).log()
    _, state = delta.simple_gla(keys, keys, values, decays, output_final_state=True)
    assert state is not None
    torch.testing.assert_close(state[0, 0].T, reading.states[-1].memory)
    asked = [pair[0] for pair in drawing.PAIRS].index(drawing.QUERY)
    assert int(reading.likeness.argmax()) == asked


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "papers").glob("*.md")), ids=lambda page: page.name)
def test_a_paper_begins_with_its_figure(page):
    parts = page.read_text().split("\n\n")  # the title, the authors, the figure, its caption
    assert re.fullmatch(r"!\[.+\]\(\S+\.svg\)", parts[2])
    assert re.fullmatch(r"\*.+\*", parts[3], re.DOTALL)


def test_each_of_the_four_doors_has_five_lines():
    doors = (ROOT / "docs" / "index.md").read_text().partition("## Four doors")[2].partition("## Where to go")[0]
    lines = [list(filter(None, block.splitlines())) for block in re.findall(r"```\w+\n(.*?)```", doors, re.DOTALL)]
    assert [len(block) for block in lines] == [5, 5, 5, 5]


class Letters:
    """A tokenizer whose tokens are letters."""

    def get_vocab(self):
        return {chr(97 + index): index for index in range(26)}

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) - 97 for letter in text if letter.isalpha()]}

    def decode(self, ids):
        return "".join(chr(97 + index % 26) for index in ids.tolist())


def test_the_guide_to_language_models_reads_better_from_chapter_to_chapter():
    chapter = "the cat sat on the mat and the dog sat on the cat then the dog ate the mat and the cat ran off " * 2
    names: dict[str, Any] = {
        "model": make_model(),
        "tokenizer": Letters(),
        "chapters": [chapter] * 3,
        "validation": chapter * 3,
    }
    exec("\n".join(blocks(ADAPT_A_LANGUAGE_MODEL, "python")[1:]), names)  # with these in the place of the first one's
    adapted = [after for _, after in names["perplexities"]]
    assert adapted[0] > adapted[1] > adapted[2]
    assert all(after < before for before, after in names["perplexities"])


def test_trials_are_told_with_the_settings_that_they_had(fill, tmp_path):
    publish = script("publish")
    run = str(fill.RESULTS / "ba2016-mnist-glimpses")
    publish.write_trials(tmp_path / "a" / "trials.csv", [run])
    table = fill.trials(tmp_path / "a" / "trials.csv").splitlines()
    assert table[-1].startswith("| d | Fast weights | 1 | 10 |")
    # A setting of which the run did not know has its default, and a model that lacks one has nothing.
    with (tmp_path / "a" / "trials.csv").open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert (rows["Fast weights"]["dropout"], rows["Fast weights"]["rate"]) == ("0.0", "0.5")
    assert (rows["LSTM"]["dropout"], rows["LSTM"]["rate"]) == ("0.0", "")
    publish.write_trials(tmp_path / "a" / "trials.csv", [run, f"{run}=relu in place of tanh"])
    heads, _, first, *_, last = fill.trials(tmp_path / "a" / "trials.csv").splitlines()
    assert "| changed |" in heads
    assert "| - |" in first
    assert "| relu in place of tanh |" in last
