"""Put the table and the members of a run into docs/results; then `python docs/fill.py` writes its pages there.

python docs/publish.py RUN NAME
python docs/publish.py --trials NAME RUN...     # a line for each member of small runs that decided something
python docs/publish.py --trials NAME "RUN=layer norm before" ...    # the same, with what was changed in the code
"""

import csv
import sys
from pathlib import Path
from typing import Any

from fastweights.reproduce import load
from fastweights.reproduce._experiment import settings_of
from fastweights.runs import load_run, publish

RESULTS = Path(__file__).parent / "results"
SIZES = ("hidden_sizes", "embedding_sizes", "learning_rates")  # lists of a run, of which a member has one


def write_trials(path: Path, runs: list[str]) -> None:
    """Write a line for each finished member of the runs: its settings, and its errors or returns.

    A setting that a run did not know yet has its default, which is as it was before. What stands behind "=" is told of
    each member of the run.
    """
    lines: list[dict[str, Any]] = []
    for folder, _, changed in (run.partition("=") for run in runs):
        run = load_run(Path(folder))
        module = load(run.experiment)
        names = {title: name for name, title in module.TITLES.items()}
        for member in run.members:
            if member.result is None:
                continue
            model = names[member.model.partition(", learning rate")[0]]
            defaults = settings_of(module.Settings(), model, without=SIZES)
            settings = {name: str(member.settings.get(name, value)) for name, value in defaults.items()}
            names_of_rows = ("environment", "model", "hidden_size", "seed")
            own = {name: member.settings[name] for name in names_of_rows if name in member.settings}
            errors = [name for name in member.result if name.endswith("_error")]
            scores = {name: member.result[name] for name in ("epoch", *errors)}
            if "test_return" in member.result:
                scores["validation_return"] = max(epoch["validation_return"] for epoch in member.epochs)
                scores["test_return"] = member.result["test_return"]
            scores["seconds"] = member.result["seconds"]
            last = {"training_loss": member.epochs[-1]["train_loss"], "commit": member.environment.get("commit", "")}
            code = {"changed": changed} if changed else {}
            lines.append({"experiment": run.experiment, **own, **code, **settings, **scores, **last})
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--trials":
        write_trials(RESULTS / sys.argv[2] / "trials.csv", sys.argv[3:])
    else:
        publish(Path(sys.argv[1]), RESULTS / sys.argv[2])
