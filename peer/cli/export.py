"""`potluck export`: the model of a run, as a folder for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.log import Log
from peer.cli.trained import Checkpoints, Choice, Round, replayed
from peer.net.disk import Disk
from peer.ui.text import clean
from protocol.errors import UsageError
from protocol.run import layout


def export(
    *,
    where: Log = None,
    out: Annotated[Path, typer.Option(help="Folder for the model; must not exist yet.")],
    round: Round = None,
    checkpoint: Checkpoints = None,
) -> None:
    """`potluck export`."""
    with running.reporting():
        choice = Choice.typed(where, round, checkpoint)
    running.run(_export(choice, out), interrupted=1)


async def _export(choice: Choice, out: Path) -> None:
    from peer.log import export as exports

    if out.exists():
        raise UsageError(f"--out {out}: is there already; choose another folder")
    found = await replayed(choice)
    exports.write(found.manifest, found.state, found.tokenizer, out, Disk())
    digest = layout.state_digest(found.manifest.model, found.state.digests)
    by = (
        "as the log gives it" if found.is_checked else "as the checkpoint has it: no later round says what it should be"
    )
    print(
        f"{out}: the model of {clean(found.manifest.name)} after round {found.state.round}, state {digest[:12]}…, {by}"
    )
    print(f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})", flush=True)
