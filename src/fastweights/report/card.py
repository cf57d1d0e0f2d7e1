"""The model card of a trained network: what its run measured, how it is trained again, and what it does not do."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastweights.errors import RunError
from fastweights.hub import escape
from fastweights.report import table
from fastweights.report.blocks import Block, Command, Heading, Paragraph, Table, to_markdown
from fastweights.runs import load_run

if TYPE_CHECKING:
    from fastweights.pretrained import Pretrained

NOTES = "notes.md"  # lies beside a published run: its differences from the paper, and why


def model_card(
    model: "Pretrained",
    run: str | os.PathLike[str],
    member: str,
    *,
    licence: str | None = None,
    limits: str = "",
) -> str:
    """Return the model card of a network, as Markdown, from the run that trained it.

    It has the model's settings, the paper's numbers beside ours, the command that trains it again, the settings and
    the machine of its training, what differs from the paper, the licence, and the limits.

    Args:
        model: the trained network.
        run: the run's folder, as it was trained or as it was published.
        member: the name of the network's own folder, such as "ptb-512-seed1".
        licence: of the weights, an identifier such as "apache-2.0" or words; None leaves it out.
        limits: what the model is not good for, in Markdown; what differs from the paper is taken from the run's
            `notes.md`.

    Raises:
        RunError: the folder holds no run, or no finished member of that name.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights import nn, report
        >>> from fastweights.runs import RunFolder, Score, write_result
        >>> run, layer = pathlib.Path(tempfile.mkdtemp()), nn.IRNN(3, 4)
        >>> with RunFolder(run / "irnn-seed1", {"model": "IRNN", "seed": 1}) as member:
        ...     member.append({"kind": "result", "test_error": 2.5})
        >>> score, command = Score("test error, %", {("IRNN", None): 1.85}, 90.0), "python mine.py"
        >>> models = [("IRNN", None)]
        >>> write_result(run, experiment="mine", preset="quick", command=command, requested=models, scores=[score])
        >>> card = report.model_card(layer, run, "irnn-seed1", licence="apache-2.0", limits="English alone.")
        >>> print(card[card.index("| IRNN") :].partition("\\n")[0])
        | IRNN | - | test error, % | 1.85 | 2.50 (1 seed) | - | 90.00 |
        >>> layer.save_pretrained(run / "shared", card=card)
    """
    from fastweights.pretrained import write_model_card  # needs torch, and the other reports do not

    whole = load_run(run)
    found = {each.name: each for each in whole.members if each.result is not None}
    if member not in found:
        raise RunError(f"{run} has no finished member {member!r}; finished are {', '.join(found) or 'none yet'}")
    trained = found[member]
    ours = [row for row in whole.rows if row.hidden_size == trained.hidden_size and row.model.startswith(trained.model)]
    shown = replace(whole, rows=ours)
    environment = {name: value for name, value in trained.environment.items() if isinstance(value, str | int)}
    blocks: list[Block] = [
        Heading("Results"),
        Paragraph(f"This is the member {member} of a run of {whole.experiment} with the preset {whole.preset}."),
        table.block(shown),
        Paragraph(table.note(shown)),
        Heading("Train it again"),
        Command(whole.command or f"fastweights reproduce {whole.experiment} --preset {whole.preset}"),
        Heading("Training"),
        *(
            Table(title, (title, "value"), [(name, str(value)) for name, value in values.items()])
            for title, values in (("setting", trained.settings), ("environment", environment))
        ),
    ]
    parts = [to_markdown(block) for block in blocks]
    notes = Path(run, NOTES)
    if notes.exists():
        parts.append(f"## What differs from the paper\n\n{notes.read_text(encoding='utf-8').strip()}")
    changes = escape(table.remarks(whole))
    parts.append("## Limits\n\n" + "\n\n".join(filter(None, [changes, limits or "None are noted beside the above."])))
    return write_model_card(model, "\n\n".join(parts), licence=licence)
