"""Put a finished network of a few-shot run into the package, where `fastweights.FewShotClassifier.load` finds it.

python docs/few_shot_weights.py RUN/hebbian-seed1, then python docs/few_shot_classifier.py

RUN is a folder of `fastweights reproduce munkhdalai2018/omniglot`; its member has to have finished. What is published
is its best on validation, to be computed in float32 on any processor, also where it was trained with --half.
"""

import sys
from pathlib import Path

from fastweights.few_shot import FewShotClassifier
from fastweights.files import WEIGHTS
from fastweights.reproduce.trained import load_member


def main(folder: Path, target: Path = WEIGHTS / "omniglot.safetensors") -> None:
    classifier = load_member(folder)
    if not isinstance(classifier, FewShotClassifier):
        raise SystemExit(f"{folder} is no few-shot classifier")
    classifier.save(target)
    print(target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
