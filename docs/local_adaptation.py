"""Draw the effect of local adaptation, after figure 2 of Sprechmann et al. 2018: docs/figures/local_adaptation.svg.

python docs/local_adaptation.py
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fastweights import memory
from fastweights.report.figures import COLOURS, INK, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATH = Path(__file__).parent / "figures" / "local_adaptation.svg"
QUERY = 0.5
NETWORK, FITTED, QUERIED, ATTENDED, FOUND = COLOURS[3], COLOURS[2], COLOURS[0], COLOURS[4], "#CC3311"


class Illustration(NamedTuple):
    """The curves and points of the figure; every tensor is [n]."""

    x: Tensor  # where the curves are drawn
    truth: Tensor
    network: Tensor
    fitted: Tensor  # the network with the parameters adapted to the query, everywhere
    stored: tuple[Tensor, Tensor]  # the memory's points
    found: tuple[Tensor, Tensor]  # those near the query
    attended: float  # the answers to the query
    answered: float


def learnt(x: Tensor) -> Tensor:
    """Return the curve that the network was trained on."""
    return 0.6 * torch.sin(1.2 * x)


def true(x: Tensor) -> Tensor:
    """Return the curve as it is now, with a bump."""
    return learnt(x) + 1.1 * torch.exp(-(((x - 1.1) / 0.55) ** 2))


def illustration() -> Illustration:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(1, 40), nn.Tanh()), nn.Linear(40, 1)
    network = nn.Sequential(body, head)
    inputs = torch.linspace(-2.5, 2.5, 100)[:, None]
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(500):
        loss = (network(inputs) - learnt(inputs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # More points to the right of the query than to its left.
    points = torch.tensor([-2.2, -1.7, -1.1, -0.6, -0.1, 0.2, 0.7, 0.78, 0.86, 0.94, 1.02, 1.4, 1.7, 2.1, 2.4])
    options = {"neighbours": 6, "steps": 300, "lr": 0.05}
    store = memory.EpisodicMemory(100, 40, value_shape=(1,), value_dtype=torch.float32)
    model = memory.MbPA(body, head, store, **options)
    model.write(points[:, None], true(points)[:, None])
    query = torch.tensor([[QUERY]])
    with torch.no_grad():
        found = store.search(body(query), options["neighbours"])

    # The same steps by hand, because the picture shows the adapted network not at the query alone.
    fitted = copy.deepcopy(head)
    descent = torch.optim.SGD(fitted.parameters(), lr=options["lr"])
    for _ in range(options["steps"]):
        errors = (fitted(found.keys[0]) - found.values[0]).square().mean(1)
        descent.zero_grad()
        (found.weights[0] * errors).sum().backward()
        descent.step()
    x = torch.linspace(-2.5, 2.5, 300)
    with torch.no_grad():
        torch.testing.assert_close(fitted(body(query)), model(query), rtol=1e-3, atol=1e-4)
        near = points[found.indices[0]]
        return Illustration(
            x,
            true(x),
            network(x[:, None])[:, 0],
            fitted(body(x[:, None]))[:, 0],
            (points, true(points)),
            (near, true(near)),
            float((found.weights[0] * found.values[0, :, 0]).sum()),
            float(model(query)),
        )


def figure(shown: Illustration) -> "Figure":
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7.2, 3.6), layout="constrained", facecolor="white")
    axes = picture.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="input", ylabel="target", xlim=(-2.5, 2.5), ylim=(-1.0, 2.1), yticks=[-1, 0, 1], xticks=[-2, 0, 2])
    axes.plot(shown.x, shown.truth, color=INK, alpha=0.35, linestyle=":", linewidth=1.4)
    axes.plot(shown.x, shown.network, color=NETWORK, linewidth=2)
    near = (shown.x >= shown.found[0].min() - 0.35) & (shown.x <= shown.found[0].max() + 0.35)
    axes.plot(shown.x[near], shown.fitted[near], color=FITTED, linewidth=2.4)
    axes.plot(shown.x[near], torch.full_like(shown.x[near], shown.attended), color=ATTENDED, linewidth=2.4)
    axes.plot(*shown.stored, "o", color="none", markeredgecolor=INK, markersize=5)
    axes.plot(*shown.found, "o", color=FOUND, markersize=6)
    axes.axvline(QUERY, color=QUERIED, linewidth=1.2, linestyle="--")
    axes.plot([QUERY] * 2, [shown.attended, shown.answered], "o", color="white", markeredgecolor=QUERIED, markersize=7)
    labels = [
        ((-2.4, 1.9), "the query", QUERIED),
        ((-2.4, 1.65), "what the memory holds near it", FOUND),
        ((-2.4, 1.4), "attention: their weighted mean", ATTENDED),
        ((-2.4, 1.15), "the network as it was trained", NETWORK),
        ((-2.4, 0.9), "MbPA: the network fitted to them", FITTED),
    ]
    for place, words, colour in labels:
        axes.text(*place, words, color=colour, weight="bold")
    return picture


if __name__ == "__main__":
    PATH.write_text(svg(figure(illustration())))
