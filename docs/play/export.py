"""Write the networks of the page to play with: python docs/play/export.py, as `make page` does.

Both go through torch.export to ONNX, with their fast weights as inputs: the page writes and keeps these itself.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from fastweights import FewShotClassifier
from fastweights.few_shot.images import Kind, read_pixels
from fastweights.nn import GatedFastWeightsRNN, GatedFastWeightsState
from fastweights.reproduce.schlag2017.associative_retrieval import Settings, StreamModel, load_trained
from fastweights.tasks import gated_retrieval

PLAY = Path(__file__).parent
BUILT = PLAY / "built"
DRAWINGS = PLAY.parent / "guides" / "drawings" / "described"


class Classifier(nn.Module):
    """Images [N,1,28,28] and fast weights [D,C] -> the images' keys [N,D] and the logits of their classes [N,C]."""

    def __init__(self, classifier: FewShotClassifier) -> None:
        super().__init__()
        self.network = classifier.network

    def forward(self, images: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.network.encoder(images)
        head = self.network.head
        return keys, head.softmax(head.hidden(keys[None], memory[None]))[0]


class Step(nn.Module):
    """A character [1] and the state before it, each tensor [1,...] -> logits [1,15] and the state after it."""

    def __init__(self, network: StreamModel) -> None:
        super().__init__()
        self.network = network
        assert isinstance(network.core, GatedFastWeightsRNN)
        network.core.impl = "reference"

    def forward(self, character: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        logits, after = self.network(character[None], GatedFastWeightsState(*state))
        return logits[0], *after


def export(network: nn.Module, inputs: dict[str, Tensor], outputs: list[str], name: str, **options: object) -> None:
    """Write a network to `built/NAME.onnx`."""
    torch.onnx.export(
        network.eval(),
        tuple(inputs.values()),
        BUILT / f"{name}.onnx",
        dynamo=True,
        external_data=False,
        verbose=False,
        input_names=list(inputs),
        output_names=outputs,
        **options,  # type: ignore[arg-type]
    )


def main() -> None:
    """Write both networks, and what the page needs to know of them, into `built`."""
    BUILT.mkdir(exist_ok=True)
    classifier = FewShotClassifier.load("omniglot")
    columns, size = classifier.num_classes, classifier.network.encoder.size
    images = {
        "images": torch.rand(1, 1, size, size),
        "memory": torch.zeros(classifier.network.head.in_features, columns),
    }
    export(Classifier(classifier), images, ["keys", "logits"], "classifier")

    [trained] = load_trained(Settings(), PLAY / "no run: the published weights")
    _, state = trained.network(torch.zeros(1, 1, dtype=torch.long))
    parts = {name: torch.zeros_like(part) for name, part in state._asdict().items()}
    logits = ["logits", *(f"{name}_after" for name in parts)]
    export(Step(trained.network), {"character": torch.zeros(1, dtype=torch.long), **parts}, logits, "gated")

    letters = sorted(DRAWINGS.glob("*/*.png"))
    pixels = read_pixels(letters, Kind(1, size, ink=True), resize=True)
    facts = {
        "vocabulary": gated_retrieval.VOCABULARY,
        "classes": columns,
        "letters": [
            {"name": path.parent.name, "ink": ink.flatten().tolist()} for path, ink in zip(letters, pixels, strict=True)
        ],
    }
    (BUILT / "networks.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
