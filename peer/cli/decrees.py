"""`potluck run` and `potluck invite`: operators' decisions about a run that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.log import credits_of, log_of
from peer.cli.options import coroutine, group, with_options
from peer.log import reader
from peer.net import keyfile, node_calls
from peer.net.address import parse, peers_of
from peer.net.base import BadAddress, Closed, Timeout, Transport, Unreachable
from peer.net.blobs import BlobStore
from peer.net.node_calls import CALL_SECONDS
from peer.node import open_run
from peer.node.open_run import KEY, here, node_folder, parse_run
from peer.ui.lines import decreed
from peer.ui.text import clean, meant, number, typed
from protocol import identity
from protocol.errors import LocalError, RemoteError, UsageError
from protocol.identity import Identity
from protocol.ledger import access, schedule
from protocol.planning import budget
from protocol.run import layout
from protocol.run.card import LONGEST_TEXT, Card
from protocol.run.manifest import Manifest, why_no_quorum
from protocol.run.short_line import short_line
from protocol.wire import decree as wire
from protocol.wire.bounds import LEAST_SHARE, LONGEST_PLACE, MAX_PROBATION, MAX_SESSIONS
from protocol.wire.decree import LONGEST_NOTE, MOST_GUESTS, Board, Decree, Motion, Motions, Operator, Schedule
from protocol.wire.encoding import seal

ASK_SECONDS = 1.0
SILENT_SECONDS = 180.0
"""Patience with one's own node while it does not answer: it may restart meanwhile."""
EXPIRY_SECONDS = {"m": 60, "h": 3600, "d": 86400}
LONGEST_EXPIRY_DAYS = 366

app = group()

_RUN = typer.Argument(metavar="RUN", help="A manifest file, a node's folder, or the line that a bootstrap node prints.")
Run = Annotated[str, _RUN]
OwnRun = Annotated[str | None, _RUN]
"""Default: the run of the node in --dir."""
Peer = Annotated[
    str,
    typer.Argument(
        metavar="PEER",
        help="The peer as screens show it, such as Ada·p8kZ, or its id, or the id's last characters; or an"
        " invitation's.",
    ),
]
Dir = Annotated[Path, typer.Option("--dir", help="Your bootstrap node's folder.", show_default=True)]
Reason = Annotated[str, typer.Option(help="Why, for everybody to read in the log.")]

FOLDER = Path("potluck-bootstrap")


@app.command(epilog="Example: potluck run ban my-run.toml p8kZq3Rt --reason 'sends noise'")
@coroutine
async def ban(run: Run, peer: Peer, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Keep a peer out: no node opens a session with it, and no plan has it. Or end an invitation."""
    await _decree(run, dir, wire.BAN, reason, peer)


@app.command(epilog="Example: potluck run admit my-run.toml p8kZq3Rt")
@coroutine
async def admit(run: Run, peer: Peer, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Let a peer in: one that was banned, or into a run that is closed."""
    await _decree(run, dir, wire.ADMIT, reason, peer)


@app.command(name="open", epilog="Example: potluck run open my-run.toml")
@coroutine
async def open_(run: OwnRun = None, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Let everybody in who is not banned."""
    await _decree(run, dir, wire.OPEN, reason)


@app.command(epilog="Example: potluck run close my-run.toml")
@coroutine
async def close(run: OwnRun = None, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Let only peers take part that the manifest lists or an operator admits."""
    await _decree(run, dir, wire.CLOSE, reason)


@app.command(epilog="Example: potluck run appoint my-run.toml /ip4/198.51.100.7/tcp/4001/p2p/12D3KooWExample")
@coroutine
async def appoint(
    run: Run,
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS", help="The address of each new operator's node, with its key, as that node prints it."
        ),
    ],
    reason: Reason = "",
    dir: Dir = FOLDER,
) -> None:
    """Appoint more operators, or change operators' addresses. Which of them decide rounds changes only by run quorum,
    or when one is silent for long."""
    await _decree(run, dir, wire.APPOINT, reason, operators=_operators(nodes))


@app.command(epilog="Example: potluck run dismiss my-run.toml p8kZq3Rt")
@coroutine
async def dismiss(
    run: Run,
    operator: Annotated[str, typer.Argument(metavar="OPERATOR", help="The operator's id, or its last characters.")],
    reason: Reason = "",
    dir: Dir = FOLDER,
) -> None:
    """Dismiss an operator. Another one takes its place among those that decide; its node ends."""
    await _decree(run, dir, wire.DISMISS, reason, operator)


@app.command(epilog="Example: potluck run quorum my-run.toml 4")
@coroutine
async def quorum(
    run: Run,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="1, 4 or 7: so many operators decide each round.")],
    reason: Reason = "",
    dir: Dir = FOLDER,
) -> None:
    """Let more or fewer operators decide each round. Enough of their nodes must be running."""
    refused = why_no_quorum(number)
    if refused is not None:
        raise UsageError(refused)
    await _decree(run, dir, wire.QUORUM, reason, quorum=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOptions:
    """The options of `potluck run set`."""

    run: OwnRun = None
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds after which the run is over.")] = None
    total_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Inner steps of the learning rate's schedule (default: it still ends with the run if it did before;"
            " else as now).",
        ),
    ] = None
    probation: Annotated[
        int | None, typer.Option(min=0, max=MAX_PROBATION, help="Rounds in which a newcomer's work has no weight.")
    ] = None
    share: Annotated[
        float | None, typer.Option(min=LEAST_SHARE, max=1, help="Most of a round's weight that one peer has, 0 to 1.")
    ] = None
    range_sessions: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_SESSIONS, help="Sessions for strangers from one range of addresses; 0: all."),
    ] = None
    range_share: Annotated[
        float | None,
        typer.Option(min=LEAST_SHARE, max=1, help="Most of the plan for strangers from one range of addresses."),
    ] = None
    reason: Reason = ""
    dir: Dir = FOLDER

    def changed(self, manifest: Manifest, now: Schedule) -> Schedule:
        """The present schedule with these changes."""
        rounds = now.rounds if self.rounds is None else self.rounds
        ends = now.total_steps == now.rounds * manifest.train.inner_steps
        steps = self.total_steps or (rounds * manifest.train.inner_steps if ends else now.total_steps)
        limits = now.limits
        if given := self.limits:
            limits = dataclasses.replace(schedule.limits(manifest, now), **given)  # type: ignore[arg-type]
        return Schedule(rounds=rounds, total_steps=steps, limits=limits)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that were typed."""
        names = ("probation", "share", "range_sessions", "range_share")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


async def _set(options: SetOptions) -> None:
    if options.rounds is None and options.total_steps is None and not options.limits:
        raise UsageError("potluck run set: nothing is given; see --help, and give what is to be changed")
    await _decree(options.run, options.dir, wire.SET, options.reason, wanted=options.changed)


app.command(
    name="set",
    help="Make a run longer or shorter, change its learning rate's schedule, or what strangers may have in it. While it"
    " goes on: a run that is over stays over.",
    epilog="Example: potluck run set my-run.toml --rounds 400",
)(with_options(SetOptions, lambda options, _: running.run(_set(options), interrupted=1)))


def _operator(run: str | None, dir: Path, reason: str, longest: int) -> tuple[Path, Identity, open_run.Run]:
    """The folder of an operator's node, the operator's key, and the run. Raises UsageError.

    run: as typed; None: the run of the node in `dir`.
    longest: characters of a reason.
    """
    text = here(dir) if run is None else run
    folder, found = node_folder(text, dir), parse_run(text)
    if not (folder / KEY).is_file():
        raise UsageError(f"--dir {folder}: has no key; give the folder of your bootstrap node")
    if len(reason) > longest or not reason.isprintable():
        raise UsageError(f"--reason: may have {longest} printable characters")
    return folder, keyfile.load_or_create(folder / KEY), found


def _require_operator(peer: str, board: Board, folder: Path, manifest: Manifest) -> None:
    """Raises UsageError unless the peer is an operator by `board`."""
    if peer not in board.names:
        raise UsageError(f"--dir {folder}: {peer} is no operator of {clean(manifest.name)}")


def _operators(typed: list[str]) -> tuple[Operator, ...]:
    """The operators at these addresses; one may have several. Raises UsageError."""
    found: dict[str, list[str]] = {}
    for text in typed:
        whole = text.partition("#")[0]
        try:
            address = parse(whole)
            identity.public_key(address.peer)
        except (BadAddress, ValueError) as error:
            raise UsageError(
                f"NODE {clean(text, 80)}: {error}; give the address that the node prints, with /p2p/ and its key"
            ) from None
        found.setdefault(address.peer, []).append(whole.rpartition("/p2p/")[0])
    for peer, places in found.items():
        if len(places) > wire.MAX_PLACES or max(map(len, places)) > LONGEST_PLACE:
            most = f"{wire.MAX_PLACES} addresses of {LONGEST_PLACE} characters at most"
            raise UsageError(f"NODE {peer}: an operator has {most}; give fewer or shorter ones")
    if len(found) > wire.MAX_APPOINTED:
        raise UsageError(
            f"NODE: {len(found)} are given, {wire.MAX_APPOINTED} at most can be; give the others afterwards"
        )
    return tuple(Operator(peer=peer, places=tuple(places)) for peer, places in found.items())


async def _decree(
    run: str | None,
    dir: Path,
    action: str,
    reason: str,
    subject: str = "",
    *,
    operators: tuple[Operator, ...] = (),
    quorum: int | None = None,
    wanted: Callable[[Manifest, Schedule], Schedule] | None = None,
) -> None:
    """Signs a decree and waits until a commit has it.

    run: as typed; None: the run of the node in `dir`.
    subject: an abbreviated peer or operator.
    wanted: makes the decreed schedule from the present one.
    """
    folder, operator, found = _operator(run, dir, reason, wire.LONGEST_REASON)
    async with running.visiting(found) as (manifest, transport, temporary):
        node = found.dialled[0]
        now = await node_calls.send_motion(transport, node, Motion())
        _require_operator(operator.peer_id, now.board, folder, manifest)
        if subject:
            log = reader.Remote(transport, [node], BlobStore(temporary / "blobs"))
            subject = await _resolve(manifest, now, log, action, subject)
        decree = Decree(
            run=manifest.run_id,
            number=now.number,
            action=action,
            subject=subject,
            reason=reason,
            schedule=None if wanted is None else wanted(manifest, now.schedule),
            operators=operators,
            quorum=quorum,
        )
        await _until_decided(transport, found.bootstrap, decree, operator)


async def _resolve(manifest: Manifest, now: Motions, log: reader.Remote, action: str, text: str) -> str:
    """Resolves an operator to dismiss, else a peer or invitation in the log or present.

    Raises UsageError, RemoteError.
    """
    if action == wire.DISMISS:
        found = meant("OPERATOR", text, now.board.names)
        if found not in now.board.names:
            known = ", ".join(map(clean, now.board.names))
            raise UsageError(f"OPERATOR {found}: is no operator of the run; give one of {known}")
        return found
    said = await log.said_names(manifest.run_id)
    ids = set(said)
    async for record in reader.checked(manifest, log):
        ids.update(record.commit.plan.peers if record.commit.plan is not None else ())
        ids.update(name for joined in record.commit.joined for name in (joined.peer, joined.invitation.key))
    return meant("PEER", text, ids, said)


async def _until_decided(transport: Transport, at: Sequence[str], decree: Decree, operator: Identity) -> None:
    """Sends the signed decree to the node `at` these addresses until a commit has it.

    Raises LocalError if another decree was decided first, RemoteError.
    """
    motion, signatures = Motion(sealed=seal(operator, decree)), -1
    what = decreed(dataclasses.replace(decree, reason=""), {})
    while True:
        answer = await _patiently(transport, at, motion, what)
        if answer.number > decree.number:
            break
        if len(answer.signed) != signatures:
            signatures = len(answer.signed)
            then = "the other operators have to type the same command; this one waits for them"
            if signatures >= answer.wanted:
                then = "it comes with the next commit"
            print(f"{what}: signed by {signatures} of {answer.wanted}; {then}", flush=True)
        await asyncio.sleep(ASK_SECONDS)
    if answer.newest != decree:
        raise LocalError(f"{what}: another decree was decided first; see potluck log show, and type it again")
    print(f"{what}: decided; it is in the log, and holds from the next round on", flush=True)


async def _patiently(transport: Transport, at: Sequence[str], motion: Motion, what: str) -> Motions:
    """The node's answer; asks again for SILENT_SECONDS while there is none. Raises RemoteError, a refusal at once."""
    loop, began = asyncio.get_running_loop(), math.inf
    while True:
        try:
            return await node_calls.send_motion(transport, peers_of(at)[0], motion)
        except (Unreachable, Closed, Timeout):
            if loop.time() - began > SILENT_SECONDS:
                raise
        if math.isinf(began):
            began = loop.time()
            print(f"{what}: your node does not answer; it is asked again for {SILENT_SECONDS:g} s", flush=True)
        await asyncio.sleep(ASK_SECONDS)
        with contextlib.suppress(RemoteError):
            await transport.connect(at, timeout=CALL_SECONDS)


# --- lists of runs


@app.command(epilog="Example: potluck run card my-run.toml --about 'plays in verse'")
@coroutine
async def card(
    run: OwnRun = None,
    about: Annotated[str, typer.Option(help="What the run trains, for people.")] = "",
    text: Annotated[str, typer.Option(help="On which text.")] = "",
    dir: Dir = FOLDER,
) -> None:
    """Print the run's entry for lists of runs (potluck runs), signed by your node: publish it where people look. It has
    the line to join if everybody may."""
    longest = max(map(len, (about, text)))
    folder, operator, found = _operator(run, dir, "", LONGEST_NOTE)
    if longest > LONGEST_TEXT:
        raise UsageError(f"--about, --text: {longest} characters; {LONGEST_TEXT} at most")
    if operator.peer_id not in found.dialled:
        raise UsageError(f"--dir {folder}: its node has not run yet; start it once, and give its folder")
    place = next(place for place in found.bootstrap if peers_of([place]) == (operator.peer_id,))
    async with log_of(str(folder)) as (manifest, source):
        if manifest is None:
            raise UsageError(f"log {source.name}: has no rounds yet; the first one makes a card")
        credits, now, head, _ = await credits_of(manifest, source)
    line = short_line(manifest.name, place, manifest.run_id)
    if head is None or line is None:
        raise UsageError(f"log {source.name}: has no rounds yet; the first one makes a card")
    losses = [evaluation.loss for evaluation in head.evaluations] or [head.loss or 0.0]
    made = Card(
        name=manifest.name,
        about=about,
        text=text,
        licence=manifest.license,
        parameters=layout.total_parameters(manifest.model),
        memory=sum(budget.smallest_stage(manifest)),
        open=now.access.is_open,
        round=head.round,
        rounds=schedule.last_round(manifest, head),
        tokens=credits.tokens,
        loss=float(statistics.median(losses)),
        time=int(time.time()),
        line=str(line) if now.access.is_open else "",
        run=manifest.run_id,
        operator=operator.peer_id,
    )
    print(made.signed(operator).json(), flush=True)


# --- invitations


@coroutine
async def invite(
    run: OwnRun = None,
    expires: Annotated[str, typer.Option(help="How long it holds, such as 30m, 12h or 7d.")] = "7d",
    count: Annotated[int, typer.Option(help=f"How many peers may come in by it, at most {MOST_GUESTS}.")] = 5,
    reason: Annotated[str, typer.Option(help="For whom or what it is, for everybody to read in the log.")] = "",
    dir: Dir = FOLDER,
) -> None:
    folder, operator, found = _operator(run, dir, reason, LONGEST_NOTE)
    seconds = seconds_in(expires)
    if not 1 <= count <= MOST_GUESTS:
        raise UsageError(f"--count {count}: must be from 1 to {MOST_GUESTS}")
    if found.manifest is None or operator.peer_id not in found.manifest.operators:
        async with running.visiting(found) as (manifest, transport, _):
            now = await node_calls.ask_operators(transport, found.dialled[0])
        _require_operator(operator.peer_id, now.board, folder, manifest)
    until = int(time.time()) + seconds
    ticket = access.issue(operator, os.urandom(32), found.run_id, expires=until, count=count, reason=reason)
    place, key = f"{found.bootstrap[0]}#{found.run_id}", ticket.invitation.key
    print(f"{place}#{ticket.text()}", flush=True)
    end = typed("potluck", "run", "ban", place, key, *(() if folder == FOLDER else ("--dir", folder)))
    day = datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%d %H:%M")
    print(f"valid for {number(count, 'peer')} until {day} UTC; to end it: {end}", file=sys.stderr, flush=True)


def seconds_in(text: str) -> int:
    """The seconds in `30m`, `12h` or `7d`. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    seconds = int(found[1]) * EXPIRY_SECONDS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_EXPIRY_DAYS * EXPIRY_SECONDS["d"]:
        raise UsageError(
            f"--expires {clean(text, 20)}: not a time; write it as 30m, 12h or 7d, at most {LONGEST_EXPIRY_DAYS}d"
        )
    return seconds
