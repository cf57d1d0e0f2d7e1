"""The published runs: the command beside each trains its members today with the settings that they had."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fastweights import _parser, cli, reproduce
from fastweights.reproduce._experiment import settings_of

RUNS = Path(__file__).parents[2] / "docs" / "results"
DRAWN = {"learning_rate", "entropy", "decay", "rate", "irnn_identity_scale"}
# Settings that the command does not tell of each member.
OWN = {
    "ba2016-catch-settings": DRAWN,
    "ba2016-catch-settings-24": DRAWN,
    "munkhdalai2018-omniglot": {"ways", "training_ways", "half"},
    "munkhdalai2018-penn-treebank": {"half"},
    "rae2018-language": {"gamma", "limit"},
    # Several commands into one folder, as their pages have them.
    "rae2018-objectives": {"objective"},
    "rae2018-objectives-layer-norm": {"objective"},
    "rae2018-weights": {"gamma", "limit", "counting"},
    "recall-ablations": {"layer"},
    "recall-ablations-quick": {"layer"},
    "recall-gauntlet": {"layer"},
    "recall-gauntlet-few-units": {"layer"},
    "recall-language": {"layer"},
    "recall-language-no-convolution": {"layer"},
    # Published before fast weights learnt their rate by default.
    "recall-state-tracking": {"rate"},
    "recall-state-tracking-S3": {"rate"},
    "recall-state-tracking-S5": {"rate"},
}


def differences(trained: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of a member that are others now; it may have one value of several."""
    pairs = {name: (value, now[name]) for name, value in trained.items() if name in now}
    return {name: pair for name, pair in pairs.items() if pair[0] not in (pair[1], *_several(pair[1]))}


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RUNS.glob("*/members.jsonl")))
def test_the_command_of_a_run_gives_the_settings_of_its_members(name):
    command = json.loads((RUNS / name / "result.json").read_text())["command"]
    options, words = _parser.parse(shlex.split(command)[1:])
    options.rest = words
    settings = cli._settings(reproduce.load(options.experiment), options)
    records = [json.loads(json.dumps(settings_of(settings, model))) for model in getattr(settings, "models", ("",))]
    for line in (RUNS / name / "members.jsonl").read_text().splitlines():
        trained = json.loads(line)["settings"]
        # A member has its model's title: its record is the one with the same settings.
        others = [(len(now.keys() ^ trained.keys()), differences(trained, now)) for now in records]
        _, found = min(others, key=lambda each: (each[0], len(each[1])))
        assert found.keys() <= OWN.get(name, set()), found
