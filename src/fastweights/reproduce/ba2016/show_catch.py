"""An episode of Catch as a moving picture: the screen, and beside it how each step attends to the earlier ones."""

import dataclasses
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from numpy.typing import NDArray

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.report.figures import INK
from fastweights.reproduce._experiment import read_settings
from fastweights.reproduce.ba2016.catch import EXPERIMENT, TITLES, Settings, make_games, make_layer
from fastweights.reproduce.ba2016.show import record_attention
from fastweights.runs import load_checkpoint, load_run
from fastweights.training import ActorCritic

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

FOLDER = Path("runs", *EXPERIMENT.split("/"), "quick")
FILE = "episode.gif"
Pixels = NDArray[Any]
_MILLISECONDS = 400  # time that each frame is shown


def show_episode(
    run: str | os.PathLike[str] | None = None, output: str | os.PathLike[str] | None = None, *, example: int = 1
) -> Path:
    """Draw an episode of Catch played by the run's best agent with fast weights, with its attention (eq 4) beside it.

    The agent takes its likeliest actions; in training and in the test they are drawn.

    Args:
        run: a folder that `fastweights reproduce ba2016/catch` wrote; None is that of its preset quick.
        output: the GIF file; None is `episode.gif` in the run's folder.
        example: the seed of the episode.

    Returns:
        The file.

    Raises:
        RunError: no run, no trained agent with fast weights, or an output that cannot be written.

    Examples:
        >>> from fastweights.reproduce.ba2016.show_catch import show_episode
        >>> show_episode("nowhere")
        Traceback (most recent call last):
            ...
        fastweights.errors.RunError: nowhere holds no result.json; give the folder that `fastweights reproduce` printed
    """
    trained = load_run(run or FOLDER)
    if trained.experiment != EXPERIMENT:
        raise RunError(f"{trained.folder} is a run of {trained.experiment}; give one of {EXPERIMENT}")
    file = trained.folder / FILE if output is None else Path(output)
    if file.suffix != ".gif":
        raise RunError(f"--output {file} is not the name of a GIF file, such as {FILE}")
    agents = [member for member in trained.members if member.model == TITLES["fast-weights"] and member.epochs]
    agents = [member for member in agents if (trained.folder / member.name / "checkpoint.pt").is_file()]
    if not agents:
        raise RunError(f"{trained.folder} holds no trained agent with fast weights: train one, at least to one score")
    best = min(agents, key=lambda member: min(record["validation_loss"] for record in member.epochs))
    settings = dataclasses.replace(read_settings(Settings, best, trained.folder), games=1)
    games = make_games(settings, "rgb_array")
    policy = ActorCritic(games, make_layer("fast-weights", settings))
    state = load_checkpoint(trained.folder / best.name / "checkpoint.pt") or {}
    try:
        policy.load_state_dict(state.get("best", {}))
    except RuntimeError as error:
        raise RunError(
            f"the weights in {trained.folder / best.name} have other sizes than its settings give"
        ) from error
    try:
        write_files({file: _draw(*_play(policy.eval(), games, example))})
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror}; choose another --output") from error
    return file


@torch.no_grad()
def _play(policy: ActorCritic, games: "VectorEnv[Any, Any, Any]", seed: int) -> tuple[list[Pixels], Pixels, float]:
    """Play an episode with the likeliest actions: its images, the attention [T,T-1] of its steps, and its return."""
    observation, _ = games.reset(seed=seed)
    render: Any = games.render
    seen, images, state, ended, total = [], [render()[0]], None, False, 0.0
    while not ended:
        seen.append(torch.from_numpy(observation).unsqueeze(0))
        logits, _, state = policy(seen[-1], state)
        observation, rewards, terminated, _, _ = games.step(logits[0].argmax(1).numpy())
        ended, total = bool(terminated[0]), total + float(rewards[0])
        if not ended:  # the next screen is another game's
            images.append(render()[0])
    attention, _ = record_attention(policy, torch.cat(seen))
    return images, attention[:, 0].numpy(), total


def _draw(images: list[Pixels], attention: Pixels, total: float) -> bytes:
    """Return the episode as a GIF: each screen, with the attention of the steps so far."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    largest, pages = float(numpy.abs(attention).max()) or 1.0, []
    for step, image in enumerate(images):
        figure = Figure(figsize=(7.2, 3.6), dpi=80, layout="constrained", facecolor="white")
        screen, axes = figure.subplots(1, 2)
        screen.imshow(image)
        screen.set_axis_off()
        outcome = f", return {total:+.0f}" if step == len(images) - 1 else ""
        screen.set_title(f"frame {step + 1}{outcome}", fontsize=9, color=INK)
        shown = numpy.where(numpy.arange(len(attention))[:, None] <= step, attention, 0.0)
        steps, states = shown.shape
        extent = (0.5, states + 0.5, steps + 0.5, 0.5)  # frames are counted from 1
        axes.imshow(shown, cmap="RdBu_r", vmin=-largest, vmax=largest, extent=extent)
        axes.set_xlabel("the state after this frame", color=INK)
        axes.set_ylabel("is read at this frame", color=INK)
        axes.tick_params(colors=INK, labelsize=8)
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        pages.append(Image.fromarray(numpy.asarray(canvas.buffer_rgba())).convert("P", palette=Image.Palette.ADAPTIVE))
    file = io.BytesIO()
    pages[0].save(file, "GIF", save_all=True, append_images=pages[1:], duration=_MILLISECONDS, loop=0)
    return file.getvalue()
