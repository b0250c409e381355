"""The trained model that a command works with: of a run's log, or from a folder of `potluck export`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peer.cli import own_folder
from peer.cli.log import log_of, room_for
from peer.net.disk import Disk
from peer.node.open_run import here, run_in
from peer.ui.text import clean, typed
from protocol.errors import LocalError, UsageError
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire import logfile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from peer.log import replay
    from peer.training.model import Stage

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR|RUN",
        help="A folder of a bootstrap node, of a full replica, or of potluck export; or a manifest file or one-line address, as for"
        " join (default: the peer or node in this folder).",
        show_default=False,
    ),
]
Round = Annotated[
    int | None,
    typer.Option(min=0, help="The round after which it is wanted (default: the last one).", show_default=False),
]
Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="A peer's folder checkpoint-…, from which to go on; one of a full replica, or one of each member of a chain.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was typed: the model of `where` after a round (None: the last), replayed from peers' checkpoints on, if there are any."""

    where: str
    round: int | None
    checkpoints: tuple[Path, ...]

    @classmethod
    def typed(cls, where: str | None, round: int | None, checkpoints: list[Path] | None) -> Choice:
        """Of the peer or node in this folder, where none was typed. Raises UsageError."""
        return cls(here() if where is None else where, round, tuple(checkpoints or ()))

    @property
    def exported(self) -> Path | None:
        """The folder, if it is one of `potluck export`."""
        from peer.log import export

        folder = Path(self.where)
        return folder if os.path.isfile(folder / export.CONFIG) and not (folder / logfile.LOG).is_file() else None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The state that a log gives. `is_checked`: the log says what it should be."""

    manifest: Manifest
    state: replay.State
    tokenizer: bytes
    is_checked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model to work with. `name`: its run's; `window`: the tokens of a sequence in training."""

    name: str
    round: int
    window: int
    stage: Stage
    tokenizer: Tokenizer

    def __str__(self) -> str:
        parameters = layout.total_parameters(self.stage.spec)
        device = next(self.stage.parameters()).device.type
        return f"the model of {clean(self.name)} after round {self.round}, {parameters / 1e6:,.1f}M parameters, on {device}"


async def replayed(choice: Choice) -> Replayed:
    """Checks and replays the log. Raises UsageError, LocalError, RemoteError."""
    from peer.log import replay

    round = choice.round
    _not_a_peers(Path(choice.where))
    async with log_of(choice.where) as (manifest, source):
        if manifest is None:
            raise UsageError(f"log {source.name}: has no rounds yet; there is no model before the first")
        empty = room_for(manifest.model)
        start = _start(manifest, choice.checkpoints) if choice.checkpoints else None
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
                f"log {source.name}: {clean(str(done.problems[0]), 300)}; no model is made of it, see potluck log verify"
            )
        if reached < (round or 0) or (start is not None and start.round > head):
            raise UsageError(f"log {source.name}: ends at round {head}; give a --round, or a --checkpoint, that it has")
        state = replay.State(max(reached, start.round if start else 0), done.theta, done.digests)
        return Replayed(manifest, state, await source.tokenizer(manifest), start is None or start.round < head)


async def trained(choice: Choice) -> Trained:
    """The model, ready to work. Raises UsageError, LocalError, RemoteError."""
    from peer.corpus.tokenizer import parse_tokenizer, vocabulary
    from peer.log import export
    from peer.training import inference

    if (folder := choice.exported) is not None:
        if choice.round is not None or choice.checkpoints:
            raise UsageError(f"model {folder}: is of one round; give it without --round and --checkpoint")
        there = export.read(folder, Disk(), room_for)
        name, round, window = there.name, there.round, there.sequence
        spec, theta, raw = there.spec, there.theta, there.tokenizer
    elif own_folder.checkpoints(Path(choice.where)):
        if choice.checkpoints:
            raise UsageError(f"directory {choice.where}: is a peer's; give it without --checkpoint, or RUN with it")
        own = own_folder.read(Path(choice.where), choice.round)
        name, round, window = own.manifest.name, own.state.round, own.manifest.train.sequence
        spec, theta, raw = own.manifest.model, own.state.theta, own.tokenizer
    else:
        found = await replayed(choice)
        name, round, window = found.manifest.name, found.state.round, found.manifest.train.sequence
        spec, theta, raw = found.manifest.model, found.state.theta, found.tokenizer
    tokenizer = parse_tokenizer(raw, "tokenizer")
    if vocabulary(tokenizer) > spec.vocab_size:
        raise UsageError(
            f"tokenizer: has {vocabulary(tokenizer)} ids, the model {spec.vocab_size}; give it the one that it was trained with"
        )
    return Trained(name=name, round=round, window=window, stage=inference.load(spec, theta), tokenizer=tokenizer)


def _not_a_peers(folder: Path) -> None:
    """Raises UsageError where it is one that has forgotten its run: what a model is exported from is the log."""
    if run_in(folder) is None and (found := own_folder.checkpoints(folder)):
        raise UsageError(
            f"directory {folder}: is a peer's, which has no log; give RUN, and {typed('--checkpoint', found[-1])}"
        )


def _start(manifest: Manifest, checkpoints: tuple[Path, ...]) -> replay.State:
    """The shards of all of them together. Raises UsageError."""
    from peer.log import replay

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
