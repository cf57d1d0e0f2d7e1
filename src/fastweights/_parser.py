"""The options of the `fastweights` command."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from fastweights import __version__
from fastweights.errors import FastWeightsError, did_you_mean, find_nearest

DESCRIPTION = """\
Fast weights and memory for PyTorch: reproduce the papers' tables, time the kernels, look after the data.

A first table in minutes:
  fastweights reproduce ba2016/associative-retrieval
"""

REPRODUCE = """\
Train the models behind a paper's table and print it: the paper's score, ours, and the floor, which is the score of a
model that ignores the question.

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
gated: draw the fast matrices of gated fast weights (Schlag & Schmidhuber 2017) while a trained network reads one
example: the change at each step, the keys that it could answer then, and where in the matrices the value lies that is
asked for.

attention: draw how much each step of fast weights (Ba et al. 2016) attends to every earlier one in one example.
For a run of ba2016/catch, the figure is a GIF of an episode, with the attention beside it.
"""

SHOW_EXAMPLES = """\
examples:
  fastweights show gated
  fastweights show gated runs/schlag2017/associative-retrieval/quick --example 12
  fastweights show gated --text "S(ab,c),S(dgf,e),S(ab,h),Q(ab)h." --output mine.svg
  fastweights show attention runs/ba2016/mnist-glimpses/quick --example 3
  fastweights show attention runs/ba2016/catch/quick
"""

CLASSIFY = """\
Tell images apart from a few examples of each class, with a trained few-shot network: one line an image, with its file,
its class and the probability of that class, separated by tabs.

The published network knows handwritten characters, up to 30 classes of them: ink on even paper.
"""

CLASSIFY_EXAMPLES = """\
examples:
  fastweights classify --described characters/ scan1.png scan2.png --resize
  fastweights classify --described characters/ scans/ --weights mine
"""


ADAPT = """\
Adapt a language model to your texts by memories of what it reads, its weights untouched: perplexity with and without,
by position, the settings that were fitted, and a certificate that the scores are honest. Or continue a text with a
memory that was saved. Needs transformers: pip install '.[hf]'.

MODEL is a local folder, a .gguf file, or a name on the hub, where there is a network.
"""

ADAPT_EXAMPLES = """\
examples:
  fastweights adapt models/SmolLM2-135M --text books/ --save books.memory
  fastweights adapt models/SmolLM2-135M --memory books.memory --prompt "Down the rabbit hole"
  fastweights adapt SmolLM2-135M.Q4_1.gguf --text notes.txt --context 256
"""


SHARE = """\
Save the trained network of a run as a model that `from_pretrained` loads: weights, settings, and a card with the
paper's numbers beside ours, the command, the licence and the limits. --hub uploads it as well.
"""

SHARE_EXAMPLES = """\
examples:
  fastweights share runs/sprechmann2018/language/quick/ptb-512-seed1 --output models/ptb --licence cc-by-4.0
  fastweights share runs/munkhdalai2018/omniglot/quick/hebbian-seed1 --output models/omniglot --hub me/omniglot
"""


_BENCHES = (
    "associative",
    "gated",
    "delta",
    "delta-rnn",
    "gated-models",
    "hebbian-softmax",
    "mbpa",
    "cache",
    "language",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, like every error that a user causes
        if wrong := re.fullmatch(r"(.* invalid choice: '(.*)') \(choose from (.*)\)", message):
            complaint, typed, choices = wrong.groups()
            known = choices.replace("'", "").split(", ")
            message = f"{complaint}; {did_you_mean(typed, known)}choose from {', '.join(known)}"
        raise FastWeightsError(with_help(message, self.prog))


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command line, and the words left over: the experiment's of `reproduce` and `sweep`."""
    whole = _Parser(prog="fastweights", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole.add_argument("--version", action="version", version=f"fastweights {__version__}")
    _check_first(whole, words)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        command = _command(name, commands.add_parser)
        if name in words[:1]:
            COMMANDS[name].add_options(command)
            chosen = command
    options, rest = whole.parse_known_args(words)
    if rest and options.command not in ("reproduce", "sweep"):
        known = re.findall(r"(?<![\w-])--[\w-]+", chosen.format_usage())
        chosen.error(f"unknown argument {rest[0]}{hint_at(rest[0], known)}")
    return options, rest


def _check_first(whole: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse an option in the place of a command that is neither help nor the version, or the version of something."""
    first, *others = words or [""]
    if not first.startswith("-") or first == "-h":
        return
    meant = [option for option in ("--help", "--version") if option.startswith(first) and len(first) > 2]
    if not meant:
        whole.error(f"unknown argument {first}{hint_at(first, ['--help', '--version'])}")
    if meant == ["--version"] and others:
        whole.error(f"--version takes nothing behind it, got {others[0]}")


def with_help(complaint: str, command: str) -> str:
    """Return an error that says which help to see."""
    return f"{complaint}{'' if complaint.endswith('?') else ';'} see `{command} --help`"


def hint_at(typed: str, options: Iterable[str]) -> str:
    """Return for an error which option a mistyped one may have been.

    Examples:
        >>> from fastweights._parser import hint_at
        >>> hint_at("--lerning-rate", ["--learning-rate", "--decay"]), hint_at("--lr", ["--gru-learning-rate"])
        ('; did you mean --learning-rate?', '; did you mean --gru-learning-rate?')
    """
    word = typed.partition("=")[0].replace("_", "-").strip("-")
    names = {option.removeprefix("--"): option for option in options}
    close = find_nearest(word, names)
    return f"; did you mean {names[close[0]]}?" if close else ""


def reproduce_help() -> str:
    """Return the help of `fastweights reproduce` without an experiment."""
    parser = _command("reproduce", lambda name, help, **how: _Parser(prog=f"fastweights {name}", **how))
    _add_reproduce(parser)
    return parser.format_help()


def _command(name: str, make: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    command = COMMANDS[name]
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": command.examples}
    how["description"] = command.description or command.summary
    # What is left belongs to the experiment's own settings, and so does --help of `reproduce`.
    how |= {"add_help": name != "reproduce", "allow_abbrev": name not in ("reproduce", "sweep")}
    return make(name, help=command.summary, **how)


def _add_nothing(command: argparse.ArgumentParser) -> None:
    pass


def _add_reproduce(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "experiment",
        nargs="?",
        metavar="PAPER/EXPERIMENT",
        help="the name of an experiment, as `fastweights list` prints it",
    )
    command.add_argument("--preset", default="quick", help="the set of settings to run: quick (default) or paper")
    command.add_argument(
        "--output", type=_path, metavar="FOLDER", help="the run's folder (default: runs/PAPER/EXPERIMENT/PRESET)"
    )
    command.add_argument("--fresh", action="store_true", help="start over instead of resuming")
    workers = "the number of processes, each of which trains a model or seed of its own (default: 1)"
    command.add_argument("--workers", type=_few, default=1, metavar="N", help=workers)


def _add_sweep(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "experiment", metavar="PAPER/EXPERIMENT", help="the name of an experiment, as `fastweights list` prints it"
    )
    values = "the values of each setting: LOW:HIGH, LOW:HIGH:log or A,B,C"
    command.add_argument("--search", nargs="+", default=[], metavar="NAME=VALUES", help=values)
    sampler = "how values are chosen: tpe learns from the trials so far, grid takes all in turn (default: tpe)"
    command.add_argument("--sampler", choices=["tpe", "random", "grid"], default="tpe", help=sampler)
    trials = "the number of trials of all workers (default: 30, or the whole grid)"
    command.add_argument("--trials", type=int, metavar="N", help=trials)
    command.add_argument("--workers", type=_few, default=1, metavar="N", help="the number of processes (default: 1)")
    command.add_argument("--preset", default="quick", help="the settings to start from: quick (default) or paper")
    command.add_argument("--output", type=_path, metavar="FOLDER", help="default: runs/sweeps/PAPER/EXPERIMENT/PRESET")
    storage = "a database that many machines share (default: study.db in the output)"
    command.add_argument("--storage", metavar="URL", help=storage)
    metric = (
        "the score that decides, a key of the result (default: validation_error; of language models validation_loss)"
    )
    command.add_argument("--metric", metavar="NAME", help=metric)
    direction = "whether a low or a high score is good (default: minimize)"
    command.add_argument("--direction", choices=["minimize", "maximize"], default="minimize", help=direction)
    command.add_argument("--sampler-seed", type=int, default=0, metavar="N", help="the seed of the choice (default: 0)")


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="a folder that `reproduce` wrote")
    command.add_argument("--output", type=_path, metavar="FOLDER", help="the folder of the page, for a single run")


def _add_show(command: argparse.ArgumentParser) -> None:
    what = "gated: gated fast weights; attention: those of Ba et al."
    command.add_argument("what", choices=["gated", "attention"], help=what)
    run = "a folder that `reproduce` wrote (default: the experiment's own; gated: else the weights of the package)"
    command.add_argument("run", nargs="?", type=_path, metavar="RUN", help=run)
    command.add_argument(
        "--output",
        type=_path,
        metavar="FILE.svg",
        help="the figure (default: fast_matrices.svg, attention.svg or, of Catch, episode.gif in RUN)",
    )
    text = "gated: an example of your own; its last query is drawn"
    command.add_argument("--text", metavar="TEXT", help=text)
    example = "the number of a test example (default: the first; gated: a short one that the network answers correctly)"
    command.add_argument("--example", type=_size, metavar="N", help=example)


def _add_share(command: argparse.ArgumentParser) -> None:
    command.add_argument("member", type=_path, metavar="RUN/MEMBER", help="a finished member of a run")
    command.add_argument(
        "--output", type=_path, required=True, metavar="FOLDER", help="the folder to save the model in"
    )
    licence = "the licence of the weights: an identifier such as apache-2.0, or words"
    command.add_argument("--licence", metavar="TEXT", help=licence)
    limits = "what the model is not good for; differences from the paper are taken from the run"
    command.add_argument("--limits", default="", metavar="TEXT", help=limits)
    command.add_argument(
        "--hub", metavar="OWNER/NAME", help="upload the model to this name on the hub; needs huggingface_hub"
    )


def _add_classify(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "images", nargs="+", type=_path, metavar="IMAGE", help="an image file, or a folder of image files"
    )
    described = "a folder that has a folder of example images for each class, named after the class"
    command.add_argument("--described", type=_path, required=True, metavar="FOLDER", help=described)
    weights = "a classifier of the package, a folder, or a name on a hub (default: omniglot)"
    command.add_argument("--weights", default="omniglot", metavar="NAME|FOLDER", help=weights)
    resize = "resize images to the network's input size, and convert colours to grey if it takes grey"
    command.add_argument("--resize", action="store_true", help=resize)


def _add_adapt(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, or a name on the hub")
    text = "a file, or a folder of text files, read in the order of their names; hidden ones are left out"
    command.add_argument("--text", type=_path, metavar="FOLDER", help=text)
    suffix = "the endings of the files that are read of a folder, such as .py .log (default: .txt .md)"
    command.add_argument("--suffix", nargs="+", default=(".txt", ".md"), metavar="SUFFIX", help=suffix)
    context = "the tokens that the model reads at once (default: 512)"
    command.add_argument("--context", type=_size, default=512, metavar="N", help=context)
    dynamic = "run dynamic evaluation too, in which all weights follow the text: it takes many times longer"
    command.add_argument("--dynamic", action="store_true", help=dynamic)
    command.add_argument(
        "--save", type=_path, metavar="FOLDER", help="the folder to write the memory and its settings to"
    )
    command.add_argument(
        "--output", type=_path, metavar="FOLDER", help="the folder of the page (default: runs/adapt/MODEL)"
    )
    command.add_argument("--memory", type=_path, metavar="FOLDER", help="a memory that --save wrote, for --prompt")
    command.add_argument("--prompt", metavar="TEXT", help="the beginning of a text to continue, with --memory")
    copy = (
        "with --memory: where this many of the last tokens or more, 64 at most, were read together before, copy what "
        "followed the longest match; 0 copies nothing (default: 8)"
    )
    command.add_argument("--copy-after", type=_copied, default=8, metavar="N", help=copy)
    tokens = "the tokens of the continuation (default: 64)"
    command.add_argument("--tokens", type=_size, default=64, metavar="N", help=tokens)


def _add_data(command: argparse.ArgumentParser) -> None:
    action = "list: where each set is; get: download; check: compare the files with their checksums"
    command.add_argument("action", choices=["list", "get", "check"], help=action)
    names = "a data set; `check` without a name checks all that are present"
    command.add_argument("names", nargs="*", metavar="NAME", help=names)
    place = (
        "the folder of data sets; `check` then looks nowhere else (default: $FASTWEIGHTS_DATA, then the user's cache)"
    )
    command.add_argument("--data-dir", type=_path, metavar="FOLDER", help=place)


def _add_bench(bench: argparse.ArgumentParser) -> None:
    from importlib import import_module  # here, because the benches import torch

    benches = {name: import_module(f"fastweights.bench.{name.replace('-', '_')}") for name in _BENCHES}

    def add(option: str, text: str, **how: Any) -> None:
        field = how.get("dest", option.removeprefix("--").replace("-", "_"))
        bench.add_argument(option, help=f"{text} ({_tell_defaults(benches, field)})", **how)

    bench.add_argument("what", choices=_BENCHES, help="what to time")
    bench.add_argument("--full", action="store_true", help="the whole grid, which takes hours; other options narrow it")
    add("--threads", "numbers of threads to compute with, in turn", type=_few, nargs="+", metavar="N")
    add("--rounds", "rounds in which the rivals take turns; the median counts", type=_few, metavar="N")
    add("--batch", "examples in a batch", type=_size, metavar="N")
    steps = "time steps of a sequence; mbpa: steps of local adaptation"
    add("--steps", steps, type=_size, nargs="+", metavar="N")
    sizes = "hidden units; hebbian-softmax: input features of the layer"
    add("--hidden-sizes", sizes, type=_size, nargs="+", metavar="N")
    precision = "float32, bfloat16 (autocast), or both"
    add("--precision", precision, dest="precisions", choices=["float32", "bfloat16"], nargs="+", metavar="NAME")
    mode = "training (forward and backward), inference, or both"
    add("--mode", mode, dest="modes", choices=["training", "inference"], nargs="+", metavar="NAME")
    add("--classes", "classes of the layer", type=_many, nargs="+", metavar="N")
    models = "models of transformers: made up, by its type (and -1024: wider), or yours, a folder or a name on the hub"
    add("--models", models, nargs="+", metavar="MODEL")
    rules = f"rules to time, in quotes where there is a space: {', '.join(benches['delta'].RULES)}"
    add("--rules", rules, choices=list(benches["delta"].RULES), nargs="+", metavar="RULE")
    most = benches["associative"].MOST_COMPILED_STEPS
    compiled = f"time torch.compile too, a minute or more for each case; associative: at most {most} steps"
    add("--compile", compiled, action=argparse.BooleanOptionalAction)
    add(
        "--memory",
        "measure peak memory too, in a second CSV file beside the first",
        action=argparse.BooleanOptionalAction,
    )
    output = "the CSV file to append to (default: benchmarks/WHAT.csv)"
    bench.add_argument("--output", type=_path, metavar="FILE.csv", help=output)


def _tell_defaults(benches: Mapping[str, ModuleType], field: str) -> str:
    """Return in words what the benches that have a field take where its option is left out."""
    told: dict[str, list[str]] = {}
    for name, bench in benches.items():
        if hasattr(bench.QUICK, field):
            quick, full = (_tell(getattr(selection, field)) for selection in (bench.QUICK, bench.FULL))
            told.setdefault(quick if quick == full else f"{quick}, with --full {full}", []).append(name)
    if list(told.values()) == [list(benches)]:
        return f"default: {next(iter(told))}"
    return "default: " + "; ".join(f"{', '.join(names)} {values}" for values, names in told.items())


def _tell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give a file or a folder, such as . for this one")
    return Path(text)


def _whole(most: int, least: int = 1) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


_few = _whole(256)  # threads, rounds, workers
_size = _whole(100_000)  # steps, units
_many = _whole(100_000_000)  # classes
_copied = _whole(64, least=0)  # tokens


class _Command(NamedTuple):
    """A command: its line in the help, the function that adds its options, and the longer texts of its own help."""

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None] = _add_nothing
    description: str | None = None
    examples: str | None = None


COMMANDS = {
    "list": _Command("show the experiments that can be reproduced"),
    "reproduce": _Command("train the models behind a paper's table", _add_reproduce, REPRODUCE, EXAMPLES),
    "sweep": _Command("search an experiment's settings", _add_sweep, SWEEP, SWEEP_EXAMPLES),
    "report": _Command("print the table of finished or running runs, and write their pages", _add_report),
    "show": _Command("draw what a trained network holds while it reads", _add_show, SHOW, SHOW_EXAMPLES),
    "share": _Command("save the trained network of a run, with its model card", _add_share, SHARE, SHARE_EXAMPLES),
    "classify": _Command("tell images apart from a few examples of each", _add_classify, CLASSIFY, CLASSIFY_EXAMPLES),
    "adapt": _Command("adapt a language model to your texts", _add_adapt, ADAPT, ADAPT_EXAMPLES),
    "bench": _Command("time layers and memories against plain PyTorch, torch.compile and torch.nn", _add_bench),
    "env": _Command("show versions, processor, and which kernels are in use"),
    "data": _Command("list, download or check data sets", _add_data),
}
