"""The `fastweights` command: it parses, calls one function and prints."""

import argparse
import contextlib
import difflib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fastweights import __version__
from fastweights.errors import FastWeightsError

DESCRIPTION = """\
Fast weights and memory for PyTorch: reproduce the papers' tables, time the kernels, look after the data.

A first table in minutes:
  fastweights reproduce ba2016/associative-retrieval
"""

REPRODUCE = """\
Train the models behind a paper's table and print it: paper | ours | floor.

Killed, or out of time? The same command goes on where it stopped. `fastweights reproduce EXPERIMENT --help` lists the
experiment's own settings, each of which is an option.
"""

EXAMPLES = """\
examples:
  fastweights reproduce ba2016/associative-retrieval
  fastweights reproduce ba2016/associative-retrieval --seeds 1 2 3 --hidden-sizes 20 50 --output runs/mine
  fastweights reproduce ba2016/associative-retrieval --preset paper
"""

SWEEP = """\
Search an experiment's settings: train it once for each trial and show which settings have the lowest validation error.

Killed, or out of time? The same command goes on where it stopped. Given in several terminals, or on several machines,
it shares the trials. All other options are the experiment's own, as `fastweights reproduce EXPERIMENT --help` lists.
"""

SWEEP_EXAMPLES = """\
examples:
  fastweights sweep ba2016/associative-retrieval --search learning_rate=1e-4:1e-2:log inner_steps=1:3 --trials 30
  fastweights sweep ba2016/associative-retrieval --search decay=0.8,0.9,0.95 --sampler grid --models fast-weights
"""

_OF_A_PLAN = ("preset", "sampler", "trials", "storage", "metric", "direction", "sampler_seed")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, as every error of a user's
        raise FastWeightsError(f"{message}; see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0, 1 for a user's mistake, 130 when interrupted.

    Examples:
        >>> from fastweights.cli import main
        >>> main(["reproduce", "ba2016/associative-retrieval", "--preset", "huge"])
        1
    """
    # Before torch loads: its idle OpenMP threads shall sleep, or two processes on a busy machine slow each other down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        options, rest = _parser().parse_known_args(arguments)
        if rest and options.command not in ("reproduce", "sweep"):
            raise FastWeightsError(f"unknown argument {rest[0]}; see `fastweights {options.command} --help`")
        options.rest = rest
        options.words = list(sys.argv[1:] if arguments is None else arguments)
        options.run(options)
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
    except OSError as error:  # a full disk under the output
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"fastweights: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fastweights", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"fastweights {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, summary: str, **more: Any) -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        description = more.pop("description", summary)
        added = commands.add_parser(name, help=summary, description=description, formatter_class=formatter, **more)
        added.set_defaults(run=run)
        return added

    command("list", _list, "show the experiments that can be reproduced")

    reproduce = command(
        "reproduce",
        _reproduce,
        "train the models behind a paper's table",
        description=REPRODUCE,
        epilog=EXAMPLES,
        add_help=False,
        allow_abbrev=False,  # what is left belongs to the experiment's own settings
    )
    reproduce.add_argument("experiment", nargs="?", metavar="PAPER/EXPERIMENT", help="as `fastweights list` shows it")
    reproduce.add_argument("--preset", default="quick", help="a set of settings: quick (default) or paper")
    reproduce.add_argument("--output", type=Path, metavar="FOLDER", help="default: runs/PAPER/EXPERIMENT/PRESET")
    reproduce.add_argument("--fresh", action="store_true", help="start over instead of resuming")

    sweep = command(
        "sweep",
        _sweep,
        "search an experiment's settings",
        description=SWEEP,
        epilog=SWEEP_EXAMPLES,
        allow_abbrev=False,
    )
    sweep.add_argument("experiment", metavar="PAPER/EXPERIMENT", help="as `fastweights list` shows it")
    values = "LOW:HIGH, LOW:HIGH:log or A,B,C"
    sweep.add_argument("--search", nargs="+", default=[], metavar="NAME=VALUES", help=f"for each setting: {values}")
    sweep.add_argument("--sampler", choices=["tpe", "random", "grid"], default="tpe", help="default: tpe")
    sweep.add_argument("--trials", type=int, metavar="N", help="over all workers (default: 30, or the whole grid)")
    sweep.add_argument("--workers", type=_few, default=1, metavar="N", help="processes (default: 1)")
    sweep.add_argument("--preset", default="quick", help="the settings to start from: quick (default) or paper")
    sweep.add_argument("--output", type=Path, metavar="FOLDER", help="default: runs/sweeps/PAPER/EXPERIMENT/PRESET")
    sweep.add_argument("--storage", metavar="URL", help="a database for many machines (default: a file in the output)")
    sweep.add_argument("--metric", default="validation_error", help="of the result (default: validation_error)")
    sweep.add_argument("--direction", choices=["minimize", "maximize"], default="minimize", help="default: minimize")
    sweep.add_argument("--sampler-seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")

    report = command("report", _report, "print the table of finished or running runs, and write their pages")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that `reproduce` wrote")
    report.add_argument("--output", type=Path, metavar="FOLDER", help="where to write the page of a single run")

    bench = command("bench", _bench, "time the layers against eager PyTorch, torch.compile and torch.nn")
    _add_bench(bench)

    command("env", _env, "show versions, processor, and which kernels are in use")

    data = command("data", _data, "list, download or check data sets")
    data.add_argument("action", choices=["list", "get", "check"])
    data.add_argument(
        "names", nargs="*", metavar="NAME", help="data sets; `check` without a name checks all that are here"
    )
    data.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="default: $FASTWEIGHTS_DATA, then the user's cache"
    )
    return parser


def _add_bench(bench: argparse.ArgumentParser) -> None:
    both = argparse.BooleanOptionalAction
    bench.add_argument("what", choices=["associative"], help="the recurrence to time")
    bench.add_argument("--full", action="store_true", help="the whole grid: hours; other options narrow it")
    bench.add_argument("--threads", type=_few, nargs="+", help="thread counts (default: 1 2)")
    bench.add_argument("--rounds", type=_few, help="timings of each; the median counts (default: 30)")
    bench.add_argument("--steps", type=_size, nargs="+", help="T (default: 11 19; --full: 11 19 24 200 2000)")
    bench.add_argument("--hidden-sizes", type=_size, nargs="+", help="H (default: 50 100; --full: 20 50 100 200)")
    bench.add_argument(
        "--precision",
        dest="precisions",
        choices=["float32", "bfloat16"],
        nargs="+",
        metavar="NAME",
        help="float32 (default), bfloat16 (autocast), or both",
    )
    bench.add_argument(
        "--mode",
        dest="modes",
        choices=["training", "inference"],
        nargs="+",
        metavar="NAME",
        help="training (default), inference, or both",
    )
    bench.add_argument("--compile", action=both, help="torch.compile too, up to T = 24: a minute or more for each case")
    bench.add_argument("--memory", action=both, help="peak memory too, to a CSV beside the other")
    bench.add_argument("--output", type=Path, default=Path("benchmarks/associative.csv"), help="CSV to append to")


def _whole(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return number


_few = _whole(256)  # threads, rounds, workers
_size = _whole(100_000)  # steps, units


def _list(options: argparse.Namespace) -> None:
    from fastweights.reproduce import experiments

    found = experiments()
    for name, summary in found.items():
        print(f"{name:{max(map(len, found))}}  {summary}")


def _reproduce(options: argparse.Namespace) -> None:
    wants_help = any(argument in ("-h", "--help") for argument in options.rest)
    if options.experiment is None or options.experiment in ("-h", "--help"):
        if wants_help:
            print(_reproduce_help())
            return
        raise FastWeightsError("name an experiment, such as ba2016/associative-retrieval; `fastweights list` shows all")
    from fastweights import report, reproduce

    if "/" not in options.experiment and any(word in reproduce.experiments() for word in options.rest):
        raise FastWeightsError("the experiment comes first: fastweights reproduce PAPER/EXPERIMENT --option VALUE ...")
    module = reproduce.load(options.experiment)
    settings = _settings(module, options)
    folder = options.output or Path("runs", *options.experiment.split("/"), options.preset)
    module.run(settings, folder, preset=options.preset, fresh=options.fresh)
    _show(folder, report.write_page(folder))


def _reproduce_help() -> str:
    from fastweights.reproduce import experiments

    commands = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    listed = "\n".join(f"  {name}" for name in experiments())
    text: str = commands.choices["reproduce"].format_help()
    return f"{text}\nexperiments:\n{listed}"


def _settings(module: ModuleType, options: argparse.Namespace) -> Any:
    import tyro

    if options.preset not in module.PRESETS:
        raise FastWeightsError(f"there is no preset {options.preset!r}; choose from {', '.join(module.PRESETS)}")
    presets = ", ".join(module.PRESETS)
    description = (
        f"{module.__doc__}\n--preset NAME: the settings to start from: {presets} (this help shows {options.preset}).\n"
        "--output FOLDER: where the run is written.\n--fresh: start over instead of resuming."
    )
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
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
        raise FastWeightsError(_one_line(told.getvalue(), options.experiment)) from None


def _one_line(box: str, experiment: str) -> str:
    """What tyro says in a box of several lines: the complaint, and the option that was probably meant."""
    sections: list[list[str]] = [[]]
    for line in (line.strip("│ ") for line in box.splitlines()):
        if line.startswith(("╭", "╰")) or (line and set(line) <= {"─", "-"}):
            sections.append([])
        elif line:
            sections[-1].append(line)
    # A plain terminal has no upper edge with the title in it: there the title is what comes before the first rule.
    complaint, *others = [section for section in sections[1:] if section]
    lines = [line for section in others if section[0].startswith("Perhaps you meant") for line in section[1:]]
    options = [line.split()[0] for line in lines if line.startswith("--")]
    typed = next((word for word in " ".join(complaint).split() if word.startswith("--")), "").rstrip(",")
    hints = difflib.get_close_matches(typed, options, n=1, cutoff=0.0)
    hint = f"; perhaps you meant {hints[0]}" if hints else ""
    return f"{' '.join(complaint).rstrip('.')}{hint}; see `fastweights reproduce {experiment} --help`"


def _sweep(options: argparse.Namespace) -> None:
    from rich.console import Console

    from fastweights import sweep

    plan = _plan(options)
    rows = sweep.run(plan, workers=options.workers, words=[*options.words, "--workers", "1"])
    Console().print(sweep.console_table(plan, rows))
    print(f"the best again: {sweep.command(plan, rows)}")
    print(f"trials: {plan.output / 'sweep.json'}\nfigure: {plan.output / 'sweep.svg'}")


def _plan(options: argparse.Namespace) -> Any:
    from fastweights import reproduce, sweep

    module = reproduce.load(options.experiment)
    return sweep.Plan(
        experiment=options.experiment,
        settings=_settings(module, options),
        space=sweep.parse(module.Settings, options.search),
        output=options.output or Path("runs", "sweeps", *options.experiment.split("/"), options.preset),
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

    Console().print(report.console_table(report.load_run(folder)))
    print(f"page: {page}\nfigure: {page.with_name('learning_curves.svg')}")


def _bench(options: argparse.Namespace) -> None:
    from dataclasses import fields, replace

    from fastweights.bench.associative.cases import FULL, QUICK
    from fastweights.bench.associative.run import run

    told = {field.name: getattr(options, field.name, None) for field in fields(QUICK)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    narrowed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    run(replace(FULL if options.full else QUICK, **narrowed), options.output)


def _env(options: argparse.Namespace) -> None:
    from fastweights.training import environment

    for name, value in environment().items():
        lines = [f"{key}: {text}" for key, text in value.items()] if isinstance(value, dict) else [str(value)]
        print(f"{name + ':':14}" + f"\n{'':14}".join(lines))


def _data(options: argparse.Namespace) -> None:
    from fastweights.tasks import datasets

    if options.action == "list":
        for row in datasets.status(options.data_dir):
            place = row.path or ("`fastweights data get`" if row.downloadable else "not here")
            print(f"{row.name:14}{row.title} ({row.licence}): {place}")
        return
    if options.action == "get":
        if not options.names:
            raise FastWeightsError("name the data sets to get; `fastweights data list` shows all")
        for name in options.names:
            print(f"{name}: {datasets.get(name, options.data_dir, verify=True)}")
        return
    names = options.names or [row.name for row in datasets.status(options.data_dir) if row.path]
    wrong = 0
    for name in names:
        for result in datasets.check(name, options.data_dir):
            wrong += not result.ok
            print(f"{result.path}: " + ("ok" if result.ok else f"{result.found}; expected {result.expected}"))
    if wrong:
        raise FastWeightsError(f"{wrong} files are missing or not what they should be")
    if not names:
        print("no data set is here; `fastweights data list` shows what there is to get")


if __name__ == "__main__":
    sys.exit(main())
