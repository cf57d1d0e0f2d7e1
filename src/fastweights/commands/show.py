"""`fastweights show`: a picture of what a trained network attends to, plays or remembers."""

from pathlib import Path

from fastweights.errors import FastWeightsError
from fastweights.reproduce.ba2016 import catch, show_catch
from fastweights.reproduce.ba2016 import show as attention
from fastweights.reproduce.schlag2017 import show as gated
from fastweights.runs import load_run


def show_attention(run: Path | None, output: Path | None, *, example: int | None, text: str | None) -> None:
    """Draw the attention of a fast-weights network of Ba et al. to its past, or an episode of Catch.

    Raises:
        FastWeightsError: `text` is given, or the run has no such network or example.
    """
    if text is not None:
        raise FastWeightsError("--text is for `show gated`; --example chooses one of the test")
    if run is not None and load_run(run).experiment == catch.EXPERIMENT:
        print(f"figure: {show_catch.show_episode(run, output, example=example or 1)}")
        return
    seen = attention.show(run, output, example=example or 1)
    print(f"example: {seen.example}\nanswer: {seen.answer}\nfigure: {seen.figure}")


def show_gated(run: Path | None, output: Path | None, *, example: int | None, text: str | None) -> None:
    """Draw the fast weights of the gated network of Schlag and Schmidhuber as it reads an example or a text.

    Raises:
        FastWeightsError: the run has no such network or example, or the text is not one of its task.
    """
    picture = gated.show(run, output, text=text, example=example)
    print(f"weights: {picture.weights}\nexample: {picture.example}\nanswer: {picture.answer}\nfigure: {picture.figure}")
