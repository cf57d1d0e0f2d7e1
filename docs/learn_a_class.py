"""Run the guide to MbPA for a character of each alphabet new to its classifier.

python docs/learn_a_class.py, then python docs/fill.py
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fastweights import memory
from fastweights.evaluation import compare
from fastweights.runs import describe_environment

DOCS = Path(__file__).parent
GUIDE = DOCS / "guides" / "adapt-to-each-query.md"
RESULT = DOCS / "results" / "learn-a-class" / "characters.json"


def trained_further(names: dict[str, Any]) -> torch.nn.Module:
    """Return the rival without a memory: the widened layer, trained on the same examples as the classifier."""
    torch.manual_seed(1)
    layer = memory.widen_output(names["head"])
    keys, targets = names["store"].keys, names["store"].values
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.001)
    for _ in range(20):
        for batch in torch.randperm(len(targets)).split(32):
            loss = F.cross_entropy(layer(keys[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.nn.Sequential(names["body"], layer)


def rivals(names: dict[str, Any]) -> dict[str, Any]:
    """Return the other ways to answer from the same five drawings, by their titles in the table."""
    model, body, store = names["model"], names["body"], names["store"]
    alone = memory.MbPA(
        body,
        names["wide"],
        memory.EpisodicMemory(10, 64),
        neighbours=model.neighbours,
        steps=model.steps,
    )
    alone.write(names["five_x"], names["five_y"])
    return {
        "MbPA, the five alone in memory": alone,
        "nearest neighbour alone": lambda x: memory.attend(store.search(body(x), 1), names["classes"] + 1).log(),
        "last layer trained further": trained_further(names),
    }


def measured(names: dict[str, Any], learn: str) -> dict[str, Any]:
    """Learn the character in `names` with the code of the guide, and measure every way to answer."""
    exec(learn, names)
    found, split = names["found"], (names["all_x"], names["all_y"])
    scores = {"the classifier": found.before, "MbPA": found.after}
    for title, rival in rivals(names).items():
        scores[title] = compare(names["classifier"], rival, split, [names["classes"]]).after
    parts = {
        title: {part: one._asdict() for part, one in zip(("old", "new", "all"), each, strict=False)}
        | {"milliseconds": each.milliseconds, "milliseconds_alone": each.milliseconds_alone}
        for title, each in scores.items()
    }
    settings = {name: names[name] for name in ("neighbours", "steps")}
    return {"character": names["data"].names[names["character"]], "settings": settings, "scores": parts}


def main() -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code[0], names)
    data = names["data"]
    unseen = data.alphabet[data.background :].unique().tolist()
    characters = []
    for alphabet in unseen:
        names["character"] = int((data.alphabet == alphabet).nonzero()[0])
        characters.append(measured(names, "\n".join(code[2:6])))
        print(characters[-1]["character"], characters[-1]["scores"]["MbPA"]["new"]["accuracy"], flush=True)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": describe_environment(), "examples": len(names["y"]), "characters": characters}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
