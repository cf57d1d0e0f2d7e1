"""Figure 5, right, of Sprechmann et al. 2018: a query that MbPA alone names rightly, among its neighbours."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.memory import attend
from fastweights.report.figures import COLOURS
from fastweights.reproduce._incremental_data import PARTS, Images, renumbered
from fastweights.reproduce._incremental_stream import Stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 20  # neighbours, in two rows


def write_picture(path: Path, stream: Stream, data: Images) -> None:
    """Draw the query of a new class whose answer MbPA improves most, out of those that the other methods get wrong.

    Nothing is drawn where there is no such query.

    Args:
        path: of a PNG file.
        stream: of MbPA, as far as it has come.
        data: what the stream was made of.

    Raises:
        RunError: the disk refuses.
    """
    from matplotlib.figure import Figure

    answers, query = _chosen(stream)
    if query is None:
        return
    inputs, labels = stream.parts["test"]
    names = [data.names[index] for index in renumbered(data, stream.seed)]
    found = stream.store.search(inputs[query : query + 1], min(_SHOWN, stream.method.neighbours))
    # An embedding that stands in the memory is that of an image that was shown.
    places = torch.cdist(found.keys[0], stream.parts["train"][0], compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    pixels = {part: data.images[data.part == PARTS.index(part)] for part in ("train", "test")}
    figure = Figure(figsize=(9, 4), facecolor="white", layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    above, below = halves
    name = names[int(labels[query])]
    image, axes = above.subplots(1, 2, width_ratios=(1, 2))
    _draw(image, pixels["test"][query], f"to be named: {name}", 9)
    axes.barh(list(answers), [float(answer[query, labels[query]]) for answer in answers.values()], color=COLOURS[0])
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"probability of {name}")
    cells = below.subplots(2, _SHOWN // 2).flat
    for place, value, cell in zip(places.tolist(), found.values[0].tolist(), cells, strict=False):
        _draw(cell, pixels["train"][place], names[value], 6)
    for cell in cells:  # with fewer neighbours
        cell.axis("off")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    try:
        write_files({path: buffer.getvalue()})
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; choose another --output") from error


@torch.no_grad()
def _chosen(stream: Stream) -> tuple[dict[str, Tensor], int | None]:
    """The answers of each method to the test's images, and the image to show."""
    inputs, labels = stream.parts["test"]
    own = stream.head(inputs).softmax(1)
    remembered = attend(stream.store.search(inputs, stream.method.neighbours), stream.classes).to(own.dtype)
    share = stream.method.mixing
    answers = {"MbPA": stream.log_probs(inputs).exp(), "mixture": share * own + (1 - share) * remembered, "model": own}
    right = {name: answer.argmax(1) == labels for name, answer in answers.items()}
    gain = (answers["MbPA"] - own).gather(1, labels.unsqueeze(1)).squeeze(1)
    gain[~right["MbPA"] | right["model"] | right["mixture"] | (labels < stream.old)] = -1
    query = int(gain.argmax())
    return answers, query if gain[query] > 0 else None


def _draw(axes: "Axes", image: Tensor, title: str, size: int) -> None:
    axes.imshow(image.permute(1, 2, 0).numpy())
    axes.set_title(title, fontsize=size, parse_math=False)
    axes.axis("off")
