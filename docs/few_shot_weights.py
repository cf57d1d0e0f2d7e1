"""Put a finished network of a few-shot run into the package, where `fastweights.FewShotClassifier.load` finds it.

python docs/few_shot_weights.py RUN/hebbian-seed1, then python docs/few_shot_classifier.py

RUN is a folder of `fastweights reproduce munkhdalai2018/omniglot`; its member has to have finished. What is published
is its best on validation, to be computed in float32 on any processor, also where it was trained with --half.
"""

import sys
from dataclasses import fields
from pathlib import Path

from fastweights.few_shot import FewShotClassifier
from fastweights.files import WEIGHTS
from fastweights.reproduce.munkhdalai2018 import omniglot as experiment
from fastweights.reproduce.munkhdalai2018._episodes import TITLES, TasksRow
from fastweights.runs import load_checkpoint, load_run

LICENCE = "Apache-2.0 (the drawings it was trained on: MIT)"


def main(folder: Path, target: Path = WEIGHTS / "omniglot.safetensors") -> None:
    run = load_run(folder.parent)
    if run.experiment != experiment.EXPERIMENT:
        raise SystemExit(f"{folder.parent} is a run of {run.experiment}, not of {experiment.EXPERIMENT}")
    member = next((member for member in run.members if member.name == folder.name), None)
    state = load_checkpoint(folder / "checkpoint.pt")
    if member is None or state is None or member.result is None:
        raise SystemExit(f"{folder} has not finished")
    own = member.settings
    kept = {field.name: own[field.name] for field in fields(experiment.Settings) if field.name in own}
    titles = {title: model for model, title in TITLES.items()}
    settings = experiment.Settings(**{**kept, "half": False, "ways": tuple(own["ways"]), "shots": tuple(own["shots"])})
    row = TasksRow(titles[own["model"]], own["training_ways"], own["training_shots"])
    network = experiment.network(settings, row, {})
    network.load_state_dict(state["best"])
    words = (
        f"Omniglot (Lake et al. 2015), the classes to learn from of omniglot.few_shot_split(by={settings.by!r}), "
        f"{own['training_ways']}-way {own['training_shots']}-shot, {member.result['tasks']:,} tasks, "
        f"seed {own['seed']}, commit {member.environment['commit']}"
    )
    FewShotClassifier(network, shots=own["training_shots"], ink=True, trained_on=words, licence=LICENCE).save(target)  # type: ignore[arg-type]
    print(target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
