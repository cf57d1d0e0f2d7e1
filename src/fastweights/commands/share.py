"""`fastweights share`: a trained member as a folder that anybody can load, with its model card."""

from pathlib import Path

from fastweights import report
from fastweights.reproduce.trained import load_member


def share(member: Path, output: Path, *, licence: str, limits: str, hub: str | None) -> None:
    """Write a member's model and its card into a folder, and upload them where the hub's name is given.

    Raises:
        FastWeightsError: the member cannot be read, or the folder not written.
    """
    model, place = load_member(member), member.absolute()
    card = report.model_card(model, place.parent, place.name, licence=licence, limits=limits)
    model.save_pretrained(output, card=card)
    print(f"model: {output}")
    if hub is not None:
        print(f"uploaded: {model.push_to_hub(hub, card=card)}")
