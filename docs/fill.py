"""Put what runs and timings wrote into the pages: no number in the documentation is typed by hand.

python docs/fill.py
"""

import contextlib
import csv
import io
import itertools
import json
import re
import string
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from fastweights import cli
from fastweights.bench import associative, cache, delta, delta_rnn, gated, gated_models, hebbian_softmax, language, mbpa
from fastweights.bench.published import (
    NOTHING,
    Column,
    Row,
    best,
    group,
    last_measured,
    markdown,
    measured,
    place,
    places_of,
    read,
    show,
    show_ratio,
)
from fastweights.bench.published import table as bench_table
from fastweights.report import markdown_table, pivot_blocks, write_page
from fastweights.report.blocks import Table, to_markdown
from fastweights.report.content import by_distance
from fastweights.report.figures import COLOURS, INK, svg
from fastweights.report.pivot import interval_key
from fastweights.report.table import mean_and_spread, table_rows
from fastweights.reproduce.guides import around_an_encoder
from fastweights.reproduce.guides.around_an_encoder import SetName
from fastweights.reproduce.rae2018 import rare_classes
from fastweights.reproduce.rae2018.omniglot_curriculum import TITLES
from fastweights.reproduce.recall import language as language_of_layers
from fastweights.reproduce.recall._bench import choose
from fastweights.reproduce.sprechmann2018 import incremental_classes
from fastweights.runs import Member, Run, load_run, metric_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
BENCHMARKS = ROOT / "benchmarks"
# With figures in their sentences.
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "guides").glob("*.md"),
    *(ROOT / "docs" / "papers").glob("*.md"),
    *RESULTS.glob("*/notes.md"),
]
EVERY_ITEM = ROOT / "docs" / "every-item.md"
CLASSIFY = "fastweights classify --described docs/guides/drawings/described docs/guides/drawings/asked --resize"
CUDNN = "torch.nn.LSTM"  # on a GPU
COST = ROOT / "docs" / "figures" / "associative_cost.svg"
HIDDEN_SIZE, STEPS = 100, 19  # what each panel of that figure holds fixed, or the nearest that was measured
# Colour and line style both tell the curves apart. "Eager" is the better of the two forms.
CURVES = (
    ("fastweights", associative.OURS, COLOURS[0], "-"),
    ("torch.nn.LSTM", associative.LSTM, COLOURS[1], "--"),
    ("better eager form", associative.EAGER, COLOURS[2], ":"),
)


def table(folder: Path) -> str:
    """Return the table of a published run, as Markdown."""
    return markdown_table(load_run(folder)).strip() + "\n"


def distances(folder: Path) -> str:
    """Return the scores by distance of a published run, as Markdown."""
    return "".join(f"{to_markdown(block)}\n\n" for block in by_distance(load_run(folder).members))


def accuracies(folder: Path) -> str:
    """Return the accuracy of the heads by how many drawings a class had, as Markdown."""
    run = load_run(folder)
    counts = rare_classes.count_drawings(run.members[0].settings["classes"])
    rows = {(row.metric, row.model): [100 - error for error in row.ours] for row in run.rows}
    lines = ["| drawings to learn from | classes | softmax | Hebbian Softmax | gain |", "|---|--:|--:|--:|--:|"]
    buckets = [(least, most, f"test {rare_classes.span(least, most)}") for least, most in rare_classes.BUCKETS]
    for least, most, name in [*buckets, (1, rare_classes.MOST, "test")]:
        plain, hebbian = (rows[f"{name} error, %", title] for title in TITLES.values())
        gains = [ours - theirs for ours, theirs in zip(hebbian, plain, strict=True)]
        classes = int(((counts >= least) & (counts <= most)).sum())
        label = "all" if name == "test" else rare_classes.span(least, most).split(" drawing")[0]
        cells = [mean_and_spread(values, 1) for values in (plain, hebbian, gains)]
        lines.append(f"| {label} | {classes} | {' | '.join(cells)} |")
    losses = [
        f"{title} {mean_and_spread([member.result['test_loss'] for member in run.members if member.model == title], 2)}"
        for title in TITLES.values()
    ]
    words = (
        f"Per cent of the test's drawings, {rare_classes.TEST} of each class, that are recognised: the mean over "
        f"{len(gains)} seeds ± their sample standard deviation. Gain: of the same seed. Cross entropy over the whole "
        f"test, in nats: {', '.join(losses)}."
    )
    return "\n".join([*lines, "", words, ""])


def matrix(folder: Path) -> str:
    """Return the table of a published run as the paper sets it, as Markdown."""
    run = load_run(folder)
    return incremental(run) or "".join(f"{to_markdown(block)}\n\n" for block in pivot_blocks(run))


def parts() -> dict[Path, str]:
    """Return the files of the published runs that a page includes, each with its content."""
    pages = "".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
    writers = {
        "table.md": table,
        "distances.md": distances,
        "accuracies.md": accuracies,
        "matrix.md": matrix,
        "searches.md": searches,
        "layers.md": layers,
        "models.md": models,
        "columns.md": columns,
        "one.md": partial(learnt_around, kind=around_an_encoder.ONE),
        "many.md": partial(learnt_around, kind=around_an_encoder.ALL),
        "unknown.md": untaught_around,
        "unknown-learnt.md": unknown_around,
    }
    of_runs = {
        folder / name: write(folder)
        for folder in sorted(path.parent for path in RESULTS.glob("*/result.json"))
        for name, write in writers.items()
        if f'--8<-- "results/{folder.name}/{name}' in pages
    }
    tried = {path.with_suffix(".md"): trials(path) for path in sorted(RESULTS.glob("*/trials.csv"))}
    return of_runs | tried | {RESULTS / "minutes.md": minutes()}


def minutes() -> str:
    """Return how long the runs of each model of each published experiment took, all seeds together."""
    lines = ["| run | model | runs | minutes |", "|---|---|--:|--:|"]
    for folder in sorted(path.parent for path in RESULTS.glob("*/members.jsonl")):
        taken: dict[str, list[float]] = {}
        for member in load_run(folder).members:
            told = [row["seconds"] for row in (*member.epochs, member.result or {}) if row.get("seconds") is not None]
            taken.setdefault(member.model, []).append(max(told, default=0.0))
        taken["all of them"] = list(itertools.chain.from_iterable(taken.values()))
        for model, seconds in taken.items():
            decimals = 1 if sum(seconds) < 600 else 0
            lines.append(f"| {folder.name} | {model} | {len(seconds)} | {sum(seconds) / 60:.{decimals}f} |")
    return "\n".join([*lines, ""])


def trials(path: Path) -> str:
    """Return a line for each trial of a file that `publish.py --trials` wrote: the settings that differ, the scores."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [name for name in rows[0] if name.endswith(("_error", "_return"))]
    scores = {"epoch": "best epoch"}
    scores |= {name: name.replace("_", " ") + ", %" * name.endswith("_error") for name in found}
    scores |= {"training_loss": "training loss at the end"}
    told = [
        name
        for name in rows[0]
        if name not in {*scores, "seconds", "commit"}
        and (name in ("model", "epochs", "seed", "changed") or len({row[name] for row in rows if row[name]}) > 1)
    ]
    words = {"": "-", "None": "learnt", "True": "yes", "False": "no"}
    heads = ["trial", *(name.replace("_", " ") for name in told), *scores.values()]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---|' * len(told)}{'--:|' * len(scores)}"]
    for number, row in enumerate(rows):
        cells = [string.ascii_lowercase[number], *(words.get(row[name], row[name]) for name in told)]
        loss = f"{float(row['training_loss']):.3f}"
        cells += [row["epoch"], *(f"{float(row[name]):.2f}" for name in found), loss]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def models(folder: Path) -> str:
    """Return the scores of a published run, a row for each model and a column for each metric, as Markdown.

    Metrics such as "recall: digits wrong, %" stand in a table of their own for each task.
    """
    run = load_run(folder)
    sizes = {row.hidden_size for row in run.rows if row.ours}
    blocks = []
    for task in dict.fromkeys(row.metric.rpartition(": ")[0] for row in run.rows):
        rows = [row for row in run.rows if row.metric.rpartition(": ")[0] == task and row.ours]
        heads = list(dict.fromkeys(row.metric.rpartition(": ")[2] for row in rows))
        cells: dict[tuple[str, ...], dict[str, str]] = {}
        floors = {}
        for row in rows:
            head = row.metric.rpartition(": ")[2]
            decimals = 1 if head.endswith("%") else 3 if head.endswith("nats") else 4 if "squared" in head else 2
            label = (row.model, str(row.hidden_size)) if len(sizes) > 1 else (row.model,)
            cells.setdefault(label, {})[head] = mean_and_spread(row.ours, decimals)
            if row.floor is not None:
                floors[head] = f"{row.floor:.{decimals}f}"
        if floors:
            cells["floor", *[""] * (len(sizes) > 1)] = floors
        names = ("model", "hidden units")[: 1 + (len(sizes) > 1)]
        lines = [(*label, *(by_head.get(head, "-") for head in heads)) for label, by_head in cells.items()]
        blocks += [f"**{task}**"] * bool(task) + [
            to_markdown(Table(task, (*names, *heads), lines, (*names[1:], *heads)))
        ]
    seeds = {len(row.ours) for row in run.rows} - {0}
    words = f"The mean over {max(seeds)} seeds ± their sample standard deviation" if max(seeds) > 1 else "One seed"
    blocks.append(f"{words}{', or one seed' if min(seeds) < max(seeds) else ''}.")
    return "".join(f"{block}\n\n" for block in blocks)


def columns(folder: Path) -> str:
    """Return the scores of a published run, a row for each metric and size and a column for each model, as Markdown."""
    run = load_run(folder)
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row, shown in zip(run.rows, table_rows(run), strict=True):
        if row.ours:
            seeds = f"{shown.ours.partition(' seed')[0]})"
            cells.setdefault((row.metric, shown.hidden_units, shown.floor), {})[row.model] = seeds
    heads = list(dict.fromkeys(row.model for row in run.rows))
    lines = [
        (metric, units, *(of_row.get(head, NOTHING) for head in heads), floor)
        for (metric, units, floor), of_row in cells.items()
    ]
    header = ("metric", "hidden units", *heads, "floor")
    words = "The mean over as many seeds as stand in parentheses ± their sample standard deviation."
    return f"{to_markdown(Table('', header, lines, header[1:]))}\n\n{words}\n"


def searches(folder: Path) -> str:
    """Return the trials of the searches beside a published run, a column for each `sweep-MODEL.json`, as Markdown."""
    losses: dict[tuple[str, ...], dict[str, str]] = {}
    models = []
    for path in sorted(folder.glob("sweep-*.json")):
        search = json.loads(path.read_text())
        prefix = path.stem.removeprefix("sweep-").replace("-", "_") + "_"
        models.append(path.stem.removeprefix("sweep-"))
        best = min(trial["value"] for trial in search["trials"] if trial["value"] is not None)
        for trial in search["trials"]:
            settings = {name.removeprefix(prefix): value for name, value in trial["params"].items()}
            shown = "not finite" if trial["value"] is None else f"{trial['value']:.4f}"
            key = tuple(f"{settings[name]:g}" for name in ("learning_rate", "clip_norm"))
            losses.setdefault(key, {})[models[-1]] = f"**{shown}**" if trial["value"] == best else shown
    lines = [f"| learning rate | clipping | {' | '.join(models)} |", f"|--:|--:|{'--:|' * len(models)}"]
    lines += [
        f"| {' | '.join(key)} | {' | '.join(row.get(model, '-') for model in models)} |"
        for key, row in sorted(losses.items(), key=lambda item: [float(value) for value in item[0]])
    ]
    return "\n".join([*lines, ""])


def layers(folder: Path) -> str:
    """Return the layers of a published run of recall, of state tracking or of language, a row each, as Markdown."""
    run = load_run(folder)
    of_text = run.experiment == language_of_layers.EXPERIMENT
    kind, digits, best = ("perplexity", 2, language_of_layers.choose) if of_text else ("accuracy", 4, choose)
    splits = [key for key in run.members[0].result or {} if key.endswith(f"test_{kind}")]
    heads = [split.removesuffix("_accuracy").replace("_", " ") for split in splits]
    lines = [
        f"| layer | learning rate | parameters | numbers in the state | {' | '.join(heads)} |",
        f"|---|--:|--:|--:|{'--:|' * len(splits)}",
    ]
    chosen = best(run.members)
    if of_text:  # the best one of each text first
        chosen = dict(sorted(chosen.items(), key=lambda item: (item[0][0].rpartition(" on ")[2], _perplexity(item[1]))))
    for (model, _), seeds in chosen.items():
        results = [seed.result or {} for seed in seeds]
        sizes = [f"{results[0][name]:,}" if results[0][name] else "-" for name in ("parameters", "state_size")]
        scores = [mean_and_spread([result[split] for result in results], digits) for split in splits]
        rate = f"{seeds[0].settings['learning_rate']:g}"
        lines.append(f"| {' | '.join([model, rate, *sizes, *scores])} |")
    floors = {
        row.metric.partition(",")[0].removesuffix(" accuracy"): f"{row.floor:.{digits}f}"
        for row in run.rows
        if row.floor is not None
    }
    cells = [floors[head] for head in heads]
    return "\n".join([*lines, f"| *a model that ignores its input* | | | | {' | '.join(cells)} |", ""])


def _perplexity(seeds: list[Member]) -> float:
    return mean((seed.result or {})["test_perplexity"] for seed in seeds)


def incremental(run: Run) -> str:
    """Return table 1 of Sprechmann et al. 2018, as Markdown; empty for other experiments."""
    if run.experiment != incremental_classes.EXPERIMENT:
        return ""
    if any(row.paper is not None for row in run.rows):
        return beside_the_paper(run)
    cells: dict[tuple[str, str], list[str]] = {}
    heads: list[str] = []
    for row in run.rows:
        subset, _, measured = row.metric.removesuffix(", %").partition(", ")
        cells.setdefault((subset, row.model), []).append(mean_and_spread(row.ours, 1) if row.ours else "-")
        heads += [measured] if measured not in heads else []
    lines = [f"| classes | method | {' | '.join(heads)} |", f"|---|---|{'--:|' * len(heads)}"]
    lines += [f"| {subset} | {model} | {' | '.join(texts)} |" for (subset, model), texts in cells.items()]
    return "\n".join([*lines, "", f"Per cent; {over_splits(run)}.", ""])


def over_splits(run: Run) -> str:
    """Return what the numbers of a run of incremental classes are the mean of."""
    splits = max(len(row.ours) for row in run.rows)
    mean = f"the mean over {splits} splits of the classes ± their sample standard deviation"
    return mean if splits > 1 else "one split of the classes"


def beside_the_paper(run: Run) -> str:
    """Return table 1 of Sprechmann et al. 2018 by how many images of each class were shown, ours and the paper's."""
    passes, images = incremental_classes.REPORTED, incremental_classes.images_shown(run.members[0])
    heads = [f"ours, {images * mark:.0f}" for mark in passes]
    heads += [f"paper, {incremental_classes.PAPER_IMAGES * mark:,.0f}" for mark in passes]
    ours = {(row.model, row.metric): row.ours for row in run.rows}
    blocks = []
    for kind, name in enumerate(("top-1", "area under the curve")):
        blocks += [f"**{name}, images of each class shown so far**", ""]
        blocks += [f"| classes | method | {' | '.join(heads)} |", f"|---|---|{'--:|' * len(heads)}"]
        for (subset, model), paper in incremental_classes.PAPER.items():
            title = incremental_classes.TITLES[model]
            found = [ours[title, f"{subset}, {name} after {mark:g} epochs, %"] for mark in passes]
            cells = [*(mean_and_spread(values, 1) for values in found), *(f"{number:.1f}" for number in paper[kind])]
            blocks.append(f"| {subset} | {title} | {' | '.join(cells)} |")
        blocks.append("")
    words = (
        f"Per cent; ours: {over_splits(run)}, on mini-ImageNet; the paper: ImageNet. As many images are shown in "
        f"{', '.join(f'{mark:g}' for mark in passes[:-1])} and {passes[-1]:g} passes."
    )
    return "\n".join([*blocks, words, ""])


def by_images(run: Run) -> "Figure":
    """Draw top-1 against the images of each class shown so far, of a run of incremental classes and of the paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 3.6), layout="constrained", facecolor="white")
    images, titles = incremental_classes.images_shown(run.members[0]), incremental_classes.TITLES
    for axes, (subset, key) in zip(figure.subplots(1, 2), incremental_classes.SUBSETS.items(), strict=True):
        for colour, (model, title) in zip(COLOURS, titles.items(), strict=False):
            curves = [dict(curve) for curve in incremental_classes.read_curves(run.members, title, key)]
            means = {mark * images: mean(curve[mark] for curve in curves) for mark in curves[0] if mark > 0}
            axes.plot(list(means), list(means.values()), "-", color=colour, linewidth=2, label=title)
            paper = incremental_classes.PAPER[subset, model][0]
            shown = [mark * incremental_classes.PAPER_IMAGES for mark in incremental_classes.REPORTED]
            axes.plot(shown, paper, ":", color=colour, marker="o", markersize=4, label=f"{title}, paper")
        axes.set_xscale("log")
        axes.set_ylim(0, 80)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(colors=INK, which="both")
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        axes.set_xlabel("images of each class shown", color=INK)
        axes.set_title(f"{subset} classes: top-1, %", fontsize=11, color=INK)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=8)
    return figure


def pictures() -> dict[Path, str]:
    """Return the figures of published runs that their own page does not have, each with its file."""
    folder = RESULTS / "sprechmann2018-incremental-classes"
    return {folder / "images.svg": svg(by_images(load_run(folder)))}


def scores_around(folder: Path) -> dict[str, Callable[[str, str], str]]:
    """Return for each set of a published run around encoders what gives the mean of a score, as the tables have it."""
    found: dict[tuple[str, str], list[Any]] = {}
    for member in load_run(folder).members:
        if member.result is not None:
            found.setdefault((member.settings["task"], member.model), []).append(member.result)

    def give(name: SetName) -> Callable[[str, str], str]:
        def show_mean(model: str, what: str) -> str:
            key = metric_key(around_an_encoder.metric(name, what))
            values = [result[key] for result in found.get((name, model), []) if key in result]
            return f"{mean(values):.1f}".replace("-0.0", "0.0") if values else "-"

        return show_mean

    return {name: give(name) for name in around_an_encoder.SETS if any(task == name for task, _ in found)}


AROUND = around_an_encoder.TITLES
LOSING = {"adaptive-classifier-0.05": "old_loss=0.05: lost", "class-means": "class means: lost"}
LOSING |= {"logistic-regression": "logistic regression: lost"}


def learnt_around(folder: Path, kind: str) -> str:
    """Return the table of one new class alone, or of all new classes together, around each encoder."""
    models = {"adaptive-classifier": "lost"} | LOSING
    if kind == around_an_encoder.ONE:
        del models["adaptive-classifier-0.05"]
    titles = [title for lost in models.values() for title in (lost, "new")]
    titles += ["learnt called unknown", "calibration error"]
    lines = [f"| set, features | examples | {' | '.join(titles)} |", f"|---{'|--:' * (len(titles) + 1)}|"]
    for name, scores in scores_around(folder).items():
        for shots in around_an_encoder.SHOTS:
            of_models = [(model, what) for model in models for what in ("lost", "new right")]
            ours = [("adaptive-classifier", what) for what in ("new unknown", "calibration error")]
            cells = [
                scores(AROUND[model], around_an_encoder.describe(kind, shots, what)) for model, what in of_models + ours
            ]
            count = "" if kind == around_an_encoder.ONE else f", {new_classes(name)} new"
            lines.append(f"| {around_an_encoder.SETS[name]}{count} | {shots} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def new_classes(name: str) -> int:
    """Return how many classes of a set are learnt together."""
    return around_an_encoder.CUTS[name]["new"] if name in around_an_encoder.CUTS else len(around_an_encoder.FIVE)


def untaught_around(folder: Path) -> str:
    """Return what is called unknown around each encoder before a class is learnt."""
    keys = {
        "old right": ("adaptive-classifier", "old right"),
        "of old called unknown": ("adaptive-classifier", "old unknown"),
        "of nobody's classes": ("adaptive-classifier", "strangers unknown"),
        "area under the curve": ("adaptive-classifier", "area under the curve"),
        "of the head alone": ("head", "area under the curve"),
    }
    lines = [f"| set, features | {' | '.join(keys)} |", f"|---{'|--:' * len(keys)}|"]
    for name, scores in scores_around(folder).items():
        cells = [scores(AROUND[model], what) for model, what in keys.values()]
        lines.append(f"| {around_an_encoder.SETS[name]} | {' | '.join(cells)} |")
    words = (
        "Per cent, before a new class is learnt; 5 % was asked of old inputs. Area under the curve: how often an input "
        "of a class nobody learnt is taken for stranger than one of an old class; of the head alone: by the "
        "log-sum-exp of its logits."
    )
    return "\n".join([*lines, "", words, ""])


def unknown_around(folder: Path) -> str:
    """Return the table of what is called unknown once classes are learnt, of each kind of input."""
    kinds = {"old": "old unknown", "learnt": "new unknown", "foreign": "foreign unknown"}
    shots = around_an_encoder.SHOTS
    titles = [f"{count}: {kind}" if kind == "old" else kind for count in shots for kind in kinds]
    lines = [f"| set, features | learnt | {' | '.join(titles)} |", f"|---|--:{'|--:' * len(titles)}|"]
    for name, scores in scores_around(folder).items():
        for kind, count in ((around_an_encoder.ONE, 1), (around_an_encoder.ALL, new_classes(name))):
            whats = [around_an_encoder.describe(kind, each, what) for each in shots for what in kinds.values()]
            cells = [scores(AROUND["adaptive-classifier"], what) for what in whats]
            lines.append(f"| {around_an_encoder.SETS[name]} | {count} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def classified() -> str:
    """Return the lines that the command of the guide to new classes from one example prints."""
    lines = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(lines):
        if cli.main(CLASSIFY.split()[1:]):
            raise SystemExit(f"`{CLASSIFY}` failed")
    return lines.getvalue()


def timings() -> dict[Path, str]:
    """Return the figure and the tables of "How fast", by the file that each goes to."""
    tables: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
        "bench-associative/quick.md": ("associative", associative.speed_table),
        "bench-associative/table.md": ("associative", associative.grid_tables),
        "bench-associative/forms.md": ("associative_forms", forms_table),
        "bench-associative/gpu.md": ("associative_gpu", gpu_table),
        "bench-associative-memory/table.md": ("associative_memory", associative.peaks_table),
        "bench-gated/layers.md": ("gated", gated.layers_table),
        "bench-gated/models.md": ("gated", gated.models_table),
        "bench-gated/gpu.md": ("gated_gpu", gpu_table),
        "bench-gated/memory.md": ("gated_memory", gated.peaks_table),
        "bench-hebbian-softmax/steps.md": ("hebbian_softmax", hebbian_softmax.times_table),
        "bench-hebbian-softmax/memory.md": ("hebbian_softmax_memory", hebbian_softmax.peaks_table),
        "bench-mbpa/table.md": ("mbpa", mbpa.times_table),
        "bench-cache/table.md": ("cache", cache.times_table),
        "bench-language/training.md": ("language", language.training_table),
        "bench-language/scoring.md": ("language", language.scoring_table),
        "bench-delta/table.md": ("delta", delta.times_table),
        "bench-delta/memory.md": ("delta_memory", delta.peaks_table),
        "bench-delta-rnn/table.md": ("delta_rnn", delta_rnn.times_table),
        "bench-delta-rnn/memory.md": ("delta_rnn_memory", delta_rnn.peaks_table),
        "bench-delta/models.md": ("gated_models", gated_models.models_table),
        "bench-delta/exactness.md": ("model_exactness", exactness_table),
        "bench-episodic-search/table.md": ("episodic_search", search_table),
        "bench-pooling/table.md": ("pooling", images_table),
        "bench-convolution/table.md": ("convolution", images_table),
    }
    files = {RESULTS / path: write(read(BENCHMARKS / f"{name}.csv")) for path, (name, write) in tables.items()}
    return {COST: svg(cost(read(BENCHMARKS / "associative.csv"))), **files}


def cost(rows: list[Row]) -> "Figure":
    """Draw milliseconds against T and against H, from the newest rows: training, float32, one thread.

    Raises:
        ValueError: no such rows are there.
    """
    from matplotlib.figure import Figure

    rows = associative.group_by_setting(last_measured(rows)).get("training, float32, 1 thread", [])
    if not rows:
        raise ValueError("there are no timings of training in float32 on one thread to draw")
    sizes = group(rows, ("steps", "hidden_size"))
    times = {(int(steps), int(size)): measured(of_size) for (steps, size), of_size in sizes.items()}
    nearest_size = min({size for _, size in times}, key=lambda size: abs(size - HIDDEN_SIZE))
    nearest_steps = min({steps for steps, _ in times}, key=lambda steps: abs(steps - STEPS))
    figure = Figure(figsize=(6.8, 3.4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    of_steps = {steps: values for (steps, size), values in times.items() if size == nearest_size}
    of_units = {size: values for (steps, size), values in times.items() if steps == nearest_steps}
    for axes, label, title, along in (
        (left, "steps T", f"H = {nearest_size}", of_steps),
        (right, "hidden units H", f"T = {nearest_steps}", of_units),
    ):
        set_style(axes, label, title, sorted(along))
        for name, rivals, colour, line_style in CURVES:
            points = {at: value for at in along if (value := best(along[at], rivals)) is not None}
            style = {"color": colour, "linestyle": line_style, "linewidth": 2, "marker": "o", "markersize": 4}
            axes.plot(list(points), list(points.values()), label=name, **style)
    left.set_ylabel("milliseconds", color=INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=INK)
    return figure


def set_style(axes: "Axes", label: str, title: str, marks: list[int]) -> None:
    """Set both scales, their labels, and the marks on the lower one."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    # What was measured, not powers of ten: 19 is close to 24 and would lie on it.
    apart = [mark for mark, after in zip(marks, [*marks[1:], None], strict=True) if after is None or after > 1.4 * mark]
    axes.xaxis.set_major_locator(FixedLocator(apart))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(label, color=INK)
    axes.set_title(title, fontsize=11, color=INK)


def search_table(rows: list[Row]) -> str:
    """Return milliseconds of exact search, beside the faster way of FAISS's flat index."""
    rows = last_measured(rows)
    ours, flat = "fastweights", tuple({row["rival"]: None for row in rows if row["rival"] != "fastweights"})
    columns = [
        ("threads", "threads"),
        ("queries", "queries"),
        ("fastweights", show(ours)),
        ("FAISS, flat", show(*flat)),
    ]
    last = rows[-1]
    what = f"the {last['neighbours']} nearest of {int(last['entries']):,} keys of {last['key_size']} numbers, float32"
    title = f"Milliseconds for {what}, the median; FAISS {last['faiss']}; {place(last)}."
    return f"{title}\n\n{bench_table(rows, [*columns, ('ours / FAISS', show_ratio(ours, flat))])}"


ERRORS = {  # of whole models: the column of a difference, and of the weight whose it is
    "logits": ("logits",),
    "gradient": ("gradient",),
    "the worst of one weight": ("worst", "worst_weight"),
    "transformers' worst": ("worst_transformers", "worst_weight_transformers"),
    "checkpoints": ("checkpointed",),
    "`torch.compile`": ("compiled",),
    "logits in decoding": ("logits_of_tokens",),
}


def exactness_table(rows: list[Row]) -> str:
    """Return how far whole models are from transformers' own, with our kernels; the newest row of each counts."""
    lines = []
    newest = list({row["model"]: row for row in rows}.values())
    for row in newest:
        tokens = ", ".join(row[kind] for kind in ("greedy", "without_cache", "beams"))
        lines.append([row["model"], *(show_error(row, *columns) for columns in ERRORS.values()), tokens])
    kinds = f"equal tokens of {rows[-1]['tokens']}: greedy, without the cache, beams"
    return f"{markdown(['model', *ERRORS, kinds], lines)}\n{places_of(newest, 'model')}.\n"


def show_error(row: Row, error: str, weight: str | None = None) -> str:
    """Return a table's cell: a difference, and the end of the name of the weight whose it is."""
    name = f" `{'.'.join(row[weight].split('.')[-2:])}`" if weight else ""
    return f"{float(row[error]):.1e}{name}"


def images_table(rows: list[Row]) -> str:
    """Return milliseconds of a kernel of images, beside torch's."""
    rows = last_measured(rows)
    for row in rows:
        row["shape"] = f"{row['images']} x {row.get('inputs', row['channels'])} x {row['size']} x {row['size']}"
    columns = [("dtype", "dtype"), ("mode", "mode"), ("images", "shape")]
    columns += [(rival, show(rival)) for rival in ("fastweights", "torch")]
    shown = bench_table(rows, [*columns, ("ours / torch", show_ratio("fastweights", "torch"))], words=None)
    return f"Milliseconds, the median; one thread; {place(rows[-1])}.\n\n{shown}"


def gpu_table(rows: list[Row]) -> str:
    """Return milliseconds of Triton kernels on a GPU, beside cuDNN's LSTM and, where it was timed, plain PyTorch."""
    last, units = rows[-1], ""
    for row in rows:
        units = row["units"] = units if row["rival"] == CUDNN else row["hidden_size"]
    rivals = list(dict.fromkeys(row["rival"] for row in rows))
    ours = tuple(rival for rival in rivals if rival in ("attention", "matrix", "triton"))
    columns: list[Column] = [("B", "batch"), ("T", "steps"), ("H", "units"), ("pass", "direction")]
    columns += [(rival, show(rival)) for rival in rivals] + [("ours / LSTM", show_ratio(ours, CUDNN))]
    if "seconds_for_5000_steps" in last:
        columns.append(("seconds of ours for 5,000 steps", lambda row, _: row["seconds_for_5000_steps"] or NOTHING))
    title = f"Milliseconds, the median; float32; {last['device']}, PyTorch {last['torch']}, {last['date']}."
    return f"{title}\n\n{bench_table(rows, columns, words=None)}"


def forms_table(rows: list[Row]) -> str:
    """Return the newest ratios of the attention form's time to the matrix form's, a row for each batch and size."""
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    steps = sorted({int(row["steps"]) for row in rows})
    ratios = {
        (int(row["batch"]), int(row["hidden_size"]), int(row["steps"])): float(row["attention"]) / float(row["matrix"])
        for row in rows
    }
    lines = ["| B | H | " + " | ".join(f"T={count}" for count in steps) + " |", "|--:" * (len(steps) + 2) + "|"]
    for batch, size in dict.fromkeys((batch, size) for batch, size, _ in ratios):
        cells = (f"{ratios[key]:.2f}" if (key := (batch, size, count)) in ratios else "" for count in steps)
        lines.append(f"| {batch} | {size} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{rows[-1]['processor']}, {rows[-1]['date']}, commit {rows[-1]['commit']}.", ""])


def first_table() -> str:
    """Return the README's table: the models of `make reproduce`, as it trains them and trained for longer."""
    long, quick = (load_run(RESULTS / f"ba2016-associative-retrieval{preset}") for preset in ("-paper", ""))
    heads = ["", "paper", "100 epochs", "`make reproduce`: 30 epochs"]
    lines = [f"| {' | '.join(heads)} |", "|---|--:|--:|--:|"]
    for row in quick.rows:
        longer = next(each for each in long.rows if (each.model, each.hidden_size) == (row.model, row.hidden_size))
        cells = [f"{row.paper:.2f}", mean_and_spread(longer.ours, 2), mean_and_spread(row.ours, 2)]
        lines.append(f"| {row.model} | {' | '.join(cells)} |")
    words = (
        f"Per cent of 20,000 test sequences answered wrongly, with {row.hidden_size} units: the mean over three seeds "
        f"± their sample standard deviation. A model that ignores the query has {row.floor:.2f}."
    )
    return "\n".join([*lines, "", words, ""])


class Compared(NamedTuple):
    """A number of a paper beside ours."""

    item: str
    row: str
    paper: str
    ours: str
    seeds: str
    verdict: str


def compare(item: dict[str, Any]) -> list[Compared]:
    """Return a line for each number of an item of `items.toml` that has one of ours beside it."""
    found = [
        Compared(
            item["name"],
            line["row"],
            line["paper"],
            ", ".join(find_cell(*(part.strip() for part in cell.split("@"))) for cell in line["ours"]),
            str(line.get("seeds", "")),
            line["verdict"],
        )
        for line in item.get("line", ())
    ]
    runs = [load_run(RESULTS / name) for name in item.get("runs", ())]
    rows = [(run, row) for run in runs for row in run.rows if row.metric.startswith(item["metric"])]
    # A model that has several sizes in a table is told with its size.
    sizes = {
        model: {row.hidden_size for _, row in rows if row.model == model} for model in {row.model for _, row in rows}
    }
    for run, row in rows:
        if row.paper is None or not row.ours:
            continue
        decimals = 2 if "%" in row.metric or row.paper > 1 else 4
        words = row.metric.removesuffix(", %")
        for before, now in item.get("words", {}).items():
            words = words.replace(before, now)
        words += f", {row.hidden_size} units" if len(sizes[row.model]) > 1 else ""
        ours, paper = mean_and_spread(row.ours, decimals), f"{row.paper:.{decimals}f}"
        line = Compared(item["name"], f"{row.model}: {words}", paper, ours, str(len(row.ours)), judge(run, row))
        found.append(line)
    return found


def judge(run: Run, row: Any) -> str:
    """Return whether our number is better or worse than the paper's, or equal to it as far as the run can tell."""
    key = interval_key(row.metric)
    intervals = [member.result[key] for member in run.members_of(row) if member.result and key in member.result]
    room = 2 * stdev(row.ours) if len(row.ours) > 1 else max(intervals, default=0.0)
    gain = mean(row.ours) - row.paper
    if abs(gain) <= max(room, 0.005 * (1 if row.paper > 1 else 0.01)):
        return "equal"
    less_is_better = any(word in row.metric for word in ("error", "perplexity", "bits"))
    return "better" if (gain < 0) == less_is_better else "worse"


def items() -> str:
    """Return the tables of the page of every table and figure: for each paper its items, then number by number."""
    listed = tomllib.loads((ROOT / "docs" / "items.toml").read_text())["item"]
    states, verdicts = ("complete", "in part", "missing"), ("better", "equal", "worse")
    compared = {item["paper"] + item["name"]: compare(item) for item in listed}
    lines = [f"| paper | items | {' | '.join(states)} | numbers | {' | '.join(verdicts)} |", f"|---|{'--:|' * 8}"]
    blocks = []
    for paper in dict.fromkeys(item["paper"] for item in listed):
        own = [item for item in listed if item["paper"] == paper]
        pairs = [pair for item in own for pair in compared[paper + item["name"]]]
        counts = [sum(item["state"] == state for item in own) for state in states]
        scores = [sum(pair.verdict == verdict for pair in pairs) for verdict in verdicts]
        lines.append(f"| {paper} | {len(own)} | {' | '.join(map(str, [*counts, len(pairs), *scores]))} |")
        blocks += [f"## {paper}", "", "| item | state | numbers | what decided it, or is open |", "|---|---|---|---|"]
        for item in own:
            of_item = [pair.verdict for pair in compared[paper + item["name"]]]
            told = ", ".join(f"{of_item.count(verdict)} {verdict}" for verdict in verdicts if verdict in of_item)
            command = item.get("command") if "command" in item else load_run(RESULTS / item["runs"][0]).command
            named = f"{item['name']}<br>`{command}`" if command else item["name"]
            blocks.append(f"| {named} | {item['state']} | {told or '-'} | {item['decided']} |")
        blocks += ["", "| number | paper | ours | seeds | |", "|---|--:|--:|--:|---|"] if pairs else [""]
        for pair in pairs:
            row = f"{pair.item.partition(':')[0]}, {pair.row}"
            blocks.append(f"| {' | '.join([row, pair.paper, pair.ours, pair.seeds, pair.verdict])} |")
        blocks += [""] * bool(pairs)
    return "\n".join([*lines, "", *blocks])


def fill_items(text: str) -> str:
    """Return the page of every table and figure with its tables between its marks."""
    mark = re.compile("(<!-- items -->\n).*?(<!-- /items -->)", re.DOTALL)
    return mark.sub(lambda match: f"{match[1]}\n{items()}\n{match[2]}", text)


def fill_readme(text: str) -> str:
    """Return the README with the first table between its marks, and the figures in its sentences."""
    mark = re.compile("(<!-- table -->\n).*?(<!-- /table -->)", re.DOTALL)
    return fill_figures(mark.sub(lambda match: f"{match[1]}\n{first_table()}\n{match[2]}", text))


# A figure in a sentence stands between <!-- name --> and <!-- -->; a comment of the page says for each name where it
# comes from: the file in `results`, what tells the row, and the column, with @ between them.
SOURCES = re.compile(r"<!-- figures\n(.*?)-->", re.DOTALL)
FIGURE = re.compile(r"(<!-- (\S+) -->)[^<]*(<!-- -->)")


def fill_figures(text: str) -> str:
    """Return a page with the figures in its sentences as the files that it names have them.

    Raises:
        ValueError: a figure without a source, a source without a figure, or one that is not one cell of its file.
    """
    lines = "".join(SOURCES.findall(text)).splitlines()
    sources = {name: source.split("@") for name, _, source in (line.partition(":") for line in lines)}
    names = {name for _, name, _ in FIGURE.findall(text)}
    if names != set(sources):
        raise ValueError(f"no figures or no sources: {sorted(names ^ set(sources))}")
    figures = {name: find_cell(*(part.strip() for part in source)) for name, source in sources.items()}
    return FIGURE.sub(lambda match: f"{match[1]}{figures[match[2]]}{match[3]}", text)


def find_cell(path: str, row: str, column: str) -> str:
    """Return the number that the cell of a table of `results` begins with.

    `row` has some of the row's cells, one as often as it stands there, of the heads, and the line above the table, as
    many as tell it from other rows; `column` is a head, or a number from 1 up.
    """
    wanted, found = Counter(cell.strip() for cell in row.split(" & ")), []
    title, head = "", list[str]()
    for line in (RESULTS / path).read_text().splitlines():
        if not line.startswith("|"):
            title, head = line.strip("*") or title, []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        head = head or cells
        if cells is not head and wanted <= Counter([title, *head, *cells]):
            found.append(cells[int(column) - 1 if column.isdigit() else head.index(column)])
    if len(found) != 1:
        raise ValueError(f"{path} has {len(found)} rows with {row}, not one")
    return found[0].split()[0]


def main() -> None:
    for folder in sorted(path.parent for path in RESULTS.glob("*/result.json")):
        write_page(folder)
    for path, text in parts().items():
        path.write_text(text)
    (RESULTS / "few-shot-classifier" / "classified.txt").write_text(classified())
    for path, text in (timings() | pictures()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for page in PAGES:
        page.write_text(fill_figures(page.read_text()))
    EVERY_ITEM.write_text(fill_items(EVERY_ITEM.read_text()))
    readme = ROOT / "README.md"
    readme.write_text(fill_readme(readme.read_text()))


if __name__ == "__main__":
    main()
