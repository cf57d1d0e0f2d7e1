"""The `fastweights` command: it parses, calls one function and prints."""

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fastweights import _parser, processes
from fastweights._allocator import keep_freed_memory
from fastweights.errors import FastWeightsError, FolderError, TrainingError, did_you_mean

# Options of `bench` that not all timings have, and the reason.
_OF_SOME_TIMINGS = {
    "precisions": ("--precision", "times float32 alone"),
    "modes": ("--mode", "has a single mode"),
    "steps": ("--steps", "has no steps"),
    "compile": ("--compile", "compiles nothing"),
    "classes": ("--classes", "has no choice of classes"),
    "models": ("--models", "times no models of transformers"),
    "rules": ("--rules", "has no choice of rules"),
    "hidden_sizes": ("--hidden-sizes", "has no choice of sizes"),
    "batch": ("--batch", "has no batch"),
    "memory": ("--memory", "measures no memory"),
}
_LIST_WIDTH = 80
_OF_A_PLAN = ("preset", "sampler", "trials", "storage", "direction", "sampler_seed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0, 1 for a user's mistake, 130 when interrupted.

    Examples:
        >>> from fastweights.cli import main
        >>> main(["reproduce", "ba2016/associative-retrieval", "--preset", "huge"])
        1
    """
    # Before torch loads: its idle OpenMP threads must sleep, or two processes on a busy machine slow each other down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may not be one that the terminal can show
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        options, rest = _parser.parse(words)
        options.rest, options.words = rest, words
        _COMMANDS[options.command](options)
        sys.stdout.flush()
        return 0
    except FastWeightsError as error:
        print(f"fastweights: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fastweights: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk under the output, or a file or folder that cannot be looked at
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        what = "write the output" if error.filename is None else f"use {error.filename}"
        print(f"fastweights: error: cannot {what}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        # torch has a RuntimeError for it, in these words on a processor and on a GPU.
        if not isinstance(error, MemoryError) and not re.search("can't allocate memory|out of memory", str(error)):
            raise
        print("fastweights: error: there is not enough memory: ask for less at once", file=sys.stderr)
        return 1


def _list(options: argparse.Namespace) -> None:
    from fastweights.reproduce import experiments
    from fastweights.tasks.datasets import DATASETS

    print(f"{'experiment':36}quick  data\n")
    for name, experiment in experiments().items():
        data = "none" if experiment.data is None else f"{experiment.data}, {DATASETS[experiment.data].megabytes} MB"
        print(f"{name:36}{experiment.quick_minutes:2} min  {data}")
        print(textwrap.indent(textwrap.fill(experiment.summary, _LIST_WIDTH - 4), "    "))
    print("\nquick: the time of this preset on two cores. `fastweights data list` shows which")
    print("data sets are here, and which can be downloaded.")


def _reproduce(options: argparse.Namespace) -> None:
    wants_help = any(argument in ("-h", "--help") for argument in options.rest)
    if options.experiment is None:
        if wants_help:
            print(_reproduce_help())
            return
        raise FastWeightsError("name an experiment, such as ba2016/associative-retrieval; `fastweights list` shows all")
    from fastweights import report, reproduce

    if "/" not in options.experiment and any(word in reproduce.experiments() for word in options.rest):
        raise FastWeightsError("the experiment comes first: fastweights reproduce PAPER/EXPERIMENT --option VALUE ...")
    module = reproduce.load(options.experiment)
    settings = _settings(module, options)
    if processes.rank() > 0:
        logging.getLogger().setLevel(logging.WARNING)  # the main process tells how far all are
    folder = options.output or Path("runs", *options.experiment.split("/"), options.preset)
    if getattr(settings, "evaluate_only", False):
        if options.fresh:
            raise FastWeightsError("--fresh starts a run over and --evaluate-only trains nothing: give one of them")
        if options.output is not None and not options.output.is_dir():
            raise FastWeightsError(
                f"--output {options.output} is no folder of a run; leave it out for the published weights"
            )
        processes.refuse_several("--evaluate-only")
        report.print_blocks(module.evaluate(settings, folder))
        return
    keep_freed_memory()
    try:
        module.run(settings, folder, preset=options.preset, fresh=options.fresh, workers=options.workers)
    except (FolderError, TrainingError) as error:
        raise type(error)(f"{error} (--output chooses the folder, --fresh starts over)") from error
    if processes.rank() == 0:
        _show(folder, report.write_page(folder))


def _reproduce_help() -> str:
    from fastweights.reproduce import experiments

    names = "\n".join(f"  {name}" for name in experiments())
    return f"{_parser.reproduce_help()}\nexperiments:\n{names}"


def _settings(module: ModuleType, options: argparse.Namespace) -> Any:
    import tyro

    if options.preset not in module.PRESETS:
        hint = did_you_mean(options.preset, module.PRESETS)
        raise FastWeightsError(f"there is no preset {options.preset!r}; {hint}choose from {', '.join(module.PRESETS)}")
    for before, word in zip(["", *options.rest], options.rest, strict=False):
        if not word or word.endswith("="):  # tyro takes an empty path for the current folder
            raise FastWeightsError(f"{word.removesuffix('=') or before} is empty: give a value, or leave it out")
    presets = ", ".join(module.PRESETS)
    description = (
        f"{module.__doc__}\n--preset NAME: the settings to start from: {presets} (this help shows {options.preset}).\n"
        "--output FOLDER: where the run is written.\n--fresh: start over instead of resuming.\n"
        "--workers N: processes, each of which trains a model or seed of its own."
    )
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                module.Settings,
                prog=f"fastweights reproduce {options.experiment}",
                description=description,
                default=module.PRESETS[options.preset],
                args=options.rest,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(module.Settings)]
        known += ["--preset", "--output", "--fresh", "--workers"]
        raise FastWeightsError(_one_line(errors.getvalue(), options.experiment, known)) from None


def _one_line(box: str, experiment: str, known: Sequence[str]) -> str:
    """Return tyro's error in one line: the complaint of its box, and what was probably meant.

    Args:
        box: what tyro has printed.
        experiment: its name.
        known: all options.
    """
    sections: list[list[str]] = [[]]
    for line in (line.strip("│ ") for line in box.splitlines()):
        if line.startswith(("╭", "╰")) or (line and set(line) <= {"─", "-"}):
            sections.append([])
        elif line:
            sections[-1].append(line)
    # A plain terminal has no upper edge with the title in it: there the title is the text before the first rule.
    words = " ".join(next(section for section in sections[1:] if section)).rstrip(".")
    if words.startswith("Unrecognized options: "):  # it takes their values for options too
        typed = words.partition(": ")[2].split(", ")
        first = next((word for word in typed if word.startswith("-")), typed[0])
        words = f"unknown argument {first}{_parser.hint_at(first, known)}"
    elif wrong := re.fullmatch(r"(invalid choice '(.*)' for argument '.*')\. Expected one of \((.*)\)", words):
        complaint, typed_choice, choices = wrong.groups()
        right = choices.replace("'", "").strip(",").split(", ")
        words = f"{complaint}; {did_you_mean(typed_choice, right)}choose from {', '.join(right)}"
    return _parser.with_help(words, f"fastweights reproduce {experiment}")


def _sweep(options: argparse.Namespace) -> None:
    from rich.console import Console

    from fastweights import sweep

    processes.refuse_several("fastweights sweep")
    plan = _plan(options)
    keep_freed_memory()
    rows = sweep.run(plan, workers=options.workers, words=[*options.words, "--workers", "1"])
    Console().print(sweep.console_table(plan, rows))
    print(f"the best again: {sweep.command(plan, rows)}")
    print(f"trials: {plan.output / 'sweep.json'}\nfigure: {plan.output / 'sweep.svg'}")


def _plan(options: argparse.Namespace) -> Any:
    from fastweights import reproduce, sweep

    module = reproduce.load(options.experiment)
    space = sweep.parse(module.Settings, options.search)
    for name in space:
        spelt = {f"--{prefix}{name}".replace("_", "-") for prefix in ("", "no-")}
        if fixed := next((word for word in options.rest if word.partition("=")[0].replace("_", "-") in spelt), None):
            raise FastWeightsError(f"{name} is searched, and {fixed} fixes it: leave out one of the two")
    return sweep.Plan(
        experiment=options.experiment,
        settings=_settings(module, options),
        space=space,
        output=options.output or Path("runs", "sweeps", *options.experiment.split("/"), options.preset),
        metric=options.metric or sweep.metrics_of(options.experiment)[0],
        **{name: getattr(options, name) for name in _OF_A_PLAN},
    )


def _report(options: argparse.Namespace) -> None:
    from fastweights import report

    if options.output is not None and len(options.runs) > 1:
        raise FastWeightsError("--output takes the page of one run; give one RUN, or leave --output out")
    for folder in options.runs:
        _show(folder, report.write_page(folder, options.output))


def _show(folder: Path, page: Path) -> None:
    from rich.console import Console

    from fastweights import report
    from fastweights.runs import load_run

    run = load_run(folder)
    if blocks := report.pivot_blocks(run):
        report.print_blocks(blocks)
        if remarks := report.remarks(run):
            print(remarks)
    else:
        console = Console()
        console.print(report.console_table(run, console.width))
    print(f"page: {page}\nfigure: {page.with_name(report.first_figure(run))}")


def _show_example(options: argparse.Namespace) -> None:
    from fastweights.commands import show

    draw = show.show_attention if options.what == "attention" else show.show_gated
    draw(options.run, options.output, example=options.example, text=options.text)


def _share(options: argparse.Namespace) -> None:
    from fastweights.commands.share import share

    share(options.member, options.output, licence=options.licence, limits=options.limits, hub=options.hub)


def _classify(options: argparse.Namespace) -> None:
    from fastweights.commands.classify import classify

    classify(options.described, options.images, options.weights, resize=options.resize)


def _adapt(options: argparse.Namespace) -> None:
    if (options.text is None) == (options.memory is None) or (options.memory is None) != (options.prompt is None):
        raise FastWeightsError(
            "give --text FOLDER to adapt to texts, or --memory FOLDER and --prompt TEXT to continue one; see "
            "`fastweights adapt --help`"
        )
    from fastweights.commands import adapt

    if options.memory is not None:
        copy_after = options.copy_after or None
        print(adapt.continue_text(options.model, options.memory, options.prompt, options.tokens, copy_after))
    else:
        adapt.adapt(
            options.model,
            options.text,
            suffixes=options.suffix,
            context=options.context,
            dynamic=options.dynamic,
            save=options.save,
            output=options.output,
        )


def _bench(options: argparse.Namespace) -> None:
    from dataclasses import fields, replace
    from importlib import import_module

    from fastweights.bench import run as bench

    what = options.what.replace("-", "_")
    subject = import_module(f"fastweights.bench.{what}")
    names = {field.name for field in fields(subject.QUICK)}
    for name, (option, reason) in _OF_SOME_TIMINGS.items():
        if getattr(options, name) is not None and name not in names:
            raise FastWeightsError(f"`bench {options.what}` {reason}; leave out {option}")
    output = Path("benchmarks", f"{what}.csv") if options.output is None else options.output
    if output.is_dir() or not output.name:
        raise FastWeightsError(f"--output {output} is a folder; give the name of a CSV file in it")
    values = {name: getattr(options, name, None) for name in names}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    narrowed: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    keep_freed_memory()  # or a rival's time would depend on the memory that the one before it gave back
    bench.run(subject, replace(subject.FULL if options.full else subject.QUICK, **narrowed), output)


def _env(options: argparse.Namespace) -> None:
    from fastweights.runs import describe_environment

    for name, value in describe_environment().items():
        lines = [f"{key}: {text}" for key, text in value.items()] if isinstance(value, dict) else [str(value)]
        print(f"{name + ':':14}" + f"\n{'':14}".join(lines))


def _data(options: argparse.Namespace) -> None:
    from fastweights.tasks import datasets

    if options.action == "list":
        if options.names:
            raise FastWeightsError(f"`data list` shows all data sets and takes no name, got {options.names[0]}")
        for row in datasets.status(options.data_dir):
            place = row.path or ("`fastweights data get`" if row.downloadable else "not here")
            print(f"{row.name:14}{row.title} ({row.licence}, {datasets.DATASETS[row.name].megabytes} MB): {place}")
        return
    if options.action == "get":
        if not options.names:
            raise FastWeightsError("name the data sets to get; `fastweights data list` shows all")
        for name in options.names:
            print(f"{name}: {datasets.get(name, options.data_dir, verify=True, make_folder=True)}")
        return
    here = options.data_dir and options.data_dir.expanduser()
    rows = [] if options.names else datasets.status(options.data_dir)
    names = options.names or [row.name for row in rows if row.path and here in (None, row.path.parent)]
    wrong = 0
    for name in names:
        for result in datasets.check(name, options.data_dir):
            wrong += not result.ok
            print(f"{result.path}: " + ("ok" if result.ok else f"{result.found}; expected {result.expected}"))
    if wrong:
        raise FastWeightsError(f"{wrong} files are missing or differ from their checksums")
    if not names:
        print(f"no data set is {f'in {here}' if here else 'here'}; `fastweights data list` shows what there is to get")


_COMMANDS = {
    "list": _list,
    "reproduce": _reproduce,
    "sweep": _sweep,
    "report": _report,
    "show": _show_example,
    "share": _share,
    "classify": _classify,
    "adapt": _adapt,
    "bench": _bench,
    "env": _env,
    "data": _data,
}

if __name__ == "__main__":
    sys.exit(main())
