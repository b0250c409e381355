"""`potluck export`: the model of a run, as a folder for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.log import Log, log_of, room_for
from peer.log import replay
from peer.net.disk import LocalDisk
from peer.ui.text import clean
from protocol.errors import LocalError, UsageError
from protocol.run import layout
from protocol.run.manifest import Manifest


def export(
    where: Log,
    out: Annotated[Path, typer.Option(help="Folder for the model; must not exist yet.")],
    round: Annotated[
        int | None,
        typer.Option(min=0, help="The round after which it is wanted (default: the last one).", show_default=False),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            help="A peer's folder checkpoint-…, from which to go on; one of a full replica, or one of each member of a chain.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """`potluck export`."""
    running.run(_export(where, out, round, tuple(checkpoint or ())), interrupted=1)


async def _export(where: str, out: Path, round: int | None, checkpoints: tuple[Path, ...]) -> None:
    from peer.log import export as exports

    if out.exists():
        raise UsageError(f"--out {out}: is there already; choose another folder")
    async with log_of(where) as (manifest, source):
        if manifest is None:
            raise UsageError(f"log {source.name}: has no rounds yet; there is no model before the first")
        empty = room_for(manifest)
        start = _start(manifest, checkpoints) if checkpoints else None
        if start is not None and round is not None and start.round > round:
            raise UsageError(f"--checkpoint: is of round {start.round}, after --round {round}; give an older one")
        notes: list[str] = []
        done = await replay.verify(
            manifest, source.records(notes.append), source.payload, lambda problem: None, start, empty, round
        )
        head = -1 if done.head is None else done.head.round
        reached = min(head, round) if round is not None else head
        if done.problems:
            raise LocalError(
                f"log {source.name}: {clean(str(done.problems[0]), 300)}; nothing is written, see potluck log verify"
            )
        if reached < (round or 0) or (start is not None and start.round > head):
            raise UsageError(f"log {source.name}: ends at round {head}; give a --round, or a --checkpoint, that it has")
        state = replay.State(max(reached, start.round if start else 0), done.theta, done.digests)
        exports.write(manifest, state, await source.tokenizer(manifest), out, LocalDisk())
    digest = layout.state_digest(manifest.model, state.digests)
    is_checked = start is None or start.round < head
    by = "as the log gives it" if is_checked else "as the checkpoint has it: no later round says what it should be"
    print(f"{out}: the model of {clean(manifest.name)} after round {state.round}, state {digest[:12]}…, {by}")
    print(f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})", flush=True)


def _start(manifest: Manifest, checkpoints: tuple[Path, ...]) -> replay.State:
    """The shards of all of them together. Raises UsageError."""
    found = [replay.start_from(manifest, path) for path in checkpoints]
    theta = {shard: arrays for state in found for shard, arrays in state.theta.items()}
    missing = [shard for shard in layout.shard_names(manifest.model) if shard not in theta]
    if len({state.round for state in found}) > 1:
        rounds = ", ".join(str(state.round) for state in found)
        raise UsageError(f"--checkpoint: they are of rounds {rounds}; give those of one round")
    if missing:
        raise UsageError(
            f"--checkpoint: none has {', '.join(missing[:4])}; give one of each member of the chain, or of a full replica"
        )
    return replay.State(found[0].round, theta, {})
