"""The trained networks of a run as models that can be saved and shared."""

import os
from pathlib import Path

from fastweights.errors import RunError
from fastweights.pretrained import Pretrained
from fastweights.reproduce import experiments, load
from fastweights.runs import load_checkpoint, load_run


def load_member(folder: str | os.PathLike[str]) -> Pretrained:
    """Load the network of a finished member, the best on validation, from its checkpoint.

    Args:
        folder: RUN/MEMBER, as `fastweights reproduce` has written it.

    Raises:
        RunError: the folder holds no finished member, or one of an experiment whose networks cannot be shared.
    """
    given, folder = folder, Path(folder).absolute()
    if not folder.is_dir():
        raise RunError(f"there is no folder {given}: give RUN/MEMBER, of a RUN that `fastweights reproduce` printed")
    run = load_run(folder.parent)
    module = load(run.experiment) if run.experiment in experiments() else None
    if module is None or not hasattr(module, "build_trained"):
        raise RunError(f"the networks of {run.experiment} are not models of the library, and cannot be shared")
    member = next((each for each in run.members if each.name == folder.name), None)
    state = load_checkpoint(folder / "checkpoint.pt")
    if member is None or member.result is None or state is None or not state.get("best"):
        raise RunError(f"{folder} has no finished member with its weights")
    model: Pretrained = module.build_trained(member, state["best"])
    facts = member.settings | member.environment | member.result
    model.about = {name: facts[name] for name in ("seed", "steps", "commit", "vocabulary") if name in facts}
    return model
