"""The options of the `fastweights` command."""

import argparse
from collections.abc import Callable
from pathlib import Path
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


SHOW = """\
Draw the fast matrices of gated fast weights (Schlag & Schmidhuber 2017) while a trained network reads one example: what
is written at each step, which keys it could answer then, and where in the matrices the value lies that is asked for.
"""

SHOW_EXAMPLES = """\
examples:
  fastweights show gated
  fastweights show gated runs/schlag2017/associative-retrieval/quick --example 12
  fastweights show gated --text "S(ab,c),S(dgf,e),S(ab,h),Q(ab)h." --output mine.svg
"""

CLASSIFY = """\
Tell images apart from a few examples of each class, with a trained few-shot network: one line an image, with its file,
its class and the probability of that class, parted by tabs.

The published network is of handwritten characters, up to 30 classes of them: dark ink on light paper.
"""

CLASSIFY_EXAMPLES = """\
examples:
  fastweights classify --described characters/ scan1.png scan2.png --resize
  fastweights classify --described characters/ scans/ --weights mine.safetensors
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, as every error of a user's
        raise FastWeightsError(f"{message}; see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """Every command and its options; `reproduce` and `sweep` leave the experiment's own to the experiment."""
    whole = _Parser(prog="fastweights", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole.add_argument("--version", action="version", version=f"fastweights {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str, **more: Any) -> argparse.ArgumentParser:
        formatter = argparse.RawDescriptionHelpFormatter
        description = more.pop("description", summary)
        return commands.add_parser(name, help=summary, description=description, formatter_class=formatter, **more)

    command("list", "show the experiments that can be reproduced")

    reproduce = command(
        "reproduce",
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

    report = command("report", "print the table of finished or running runs, and write their pages")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that `reproduce` wrote")
    report.add_argument("--output", type=Path, metavar="FOLDER", help="where to write the page of a single run")

    show = command("show", "draw what a trained network holds while it reads", description=SHOW, epilog=SHOW_EXAMPLES)
    show.add_argument("what", choices=["gated"], help="the network")
    run = "a folder that `reproduce` wrote (default: the experiment's own, else the weights of the package)"
    show.add_argument("run", nargs="?", type=Path, metavar="RUN", help=run)
    show.add_argument("--output", type=Path, metavar="FILE.svg", help="default: fast_matrices.svg in RUN")
    show.add_argument("--text", metavar="TEXT", help="an example of your own; of several queries the last is drawn")
    show.add_argument(
        "--example", type=_size, metavar="N", help="the N-th query of the test stream (default: one of a few tokens)"
    )

    classify = command(
        "classify", "tell images apart from a few examples of each", description=CLASSIFY, epilog=CLASSIFY_EXAMPLES
    )
    classify.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="a file, or a folder of files")
    described = "a folder that has a folder of example images for each class, named as the class is"
    classify.add_argument("--described", type=Path, required=True, metavar="FOLDER", help=described)
    weights = "a classifier of the package, or a .safetensors file (default: omniglot)"
    classify.add_argument("--weights", default="omniglot", metavar="NAME|FILE", help=weights)
    resize = (
        "bring images of another size to the network's, by the mean over areas, and colours to grey if it takes grey"
    )
    classify.add_argument("--resize", action="store_true", help=resize)

    bench = command("bench", "time layers and memories against plain PyTorch, torch.compile and torch.nn")
    _add_bench(bench)

    command("env", "show versions, processor, and which kernels are in use")

    data = command("data", "list, download or check data sets")
    data.add_argument("action", choices=["list", "get", "check"])
    data.add_argument(
        "names", nargs="*", metavar="NAME", help="data sets; `check` without a name checks all that are here"
    )
    data.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="default: $FASTWEIGHTS_DATA, then the user's cache"
    )
    return whole


def _add_bench(bench: argparse.ArgumentParser) -> None:
    both = argparse.BooleanOptionalAction
    bench.add_argument(
        "what", choices=["associative", "gated", "hebbian-softmax", "mbpa", "cache"], help="what to time"
    )
    bench.add_argument("--full", action="store_true", help="the whole grid: hours; other options narrow it")
    bench.add_argument("--threads", type=_few, nargs="+", help="thread counts (default: 1 2)")
    bench.add_argument("--rounds", type=_few, help="timings of each; the median counts (default: 30; mbpa, cache: 15)")
    bench.add_argument("--batch", type=_size, help="B (default: 128; gated: 256; hebbian-softmax: 1024)")
    steps = "T (default: 11 19; --full: 11 19 24 200 2000; gated: 32; --full: 32 128; mbpa: 1 5; --full: 1 5 20)"
    bench.add_argument("--steps", type=_size, nargs="+", help=steps)
    sizes = "H (default: 50 100; --full: 20 50 100 200; gated: 40; --full: 20 40 80; hebbian-softmax: 256; 256 1024)"
    bench.add_argument("--hidden-sizes", type=_size, nargs="+", help=sizes)
    bench.add_argument(
        "--precision",
        dest="precisions",
        choices=["float32", "bfloat16"],
        nargs="+",
        metavar="NAME",
        help="float32 (default), bfloat16 (autocast), or both; associative only",
    )
    bench.add_argument(
        "--mode",
        dest="modes",
        choices=["training", "inference"],
        nargs="+",
        metavar="NAME",
        help="training (default), inference, or both; associative and gated only",
    )
    classes = "V of hebbian-softmax (default: 1000 33278; --full: 1000 33278 267735)"
    bench.add_argument("--classes", type=_many, nargs="+", help=classes)
    compiled = "torch.compile too: a minute or more for each case, associative up to T = 24 (default: gated only)"
    bench.add_argument("--compile", action=both, help=compiled)
    bench.add_argument("--memory", action=both, help="peak memory too, to a CSV beside the other")
    bench.add_argument("--output", type=Path, help="CSV to append to (default: benchmarks/WHAT.csv)")


def _whole(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return number


_few = _whole(256)  # threads, rounds, workers
_size = _whole(100_000)  # steps, units
_many = _whole(100_000_000)  # classes
