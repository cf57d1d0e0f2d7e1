"""Put a finished network of a run into the package, where `--evaluate-only` and `fastweights show` find it.

python docs/weights.py RUN/MODEL-SIZE-seedN
"""

import sys
from pathlib import Path

from fastweights.reproduce import load
from fastweights.reproduce._weights import publish_weights
from fastweights.runs import load_checkpoint, load_run


def main(folder: Path) -> None:
    run = load_run(folder.parent)
    member = next(member for member in run.members if member.name == folder.name)
    state = load_checkpoint(folder / "checkpoint.pt")
    if state is None or member.result is None:
        raise SystemExit(f"{folder} has not finished")
    model = member.name.removesuffix(f"-{member.hidden_size}-seed{member.seed}")
    about = {"seed": member.seed, "steps": member.result["steps"], "commit": member.environment["commit"]}
    pack = getattr(load(run.experiment), "pack_weights", dict)  # a large model's are stored in fewer bits
    print(publish_weights(run.experiment, model, pack(state["best"]), {**about, "settings": member.settings}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
