"""`potluck run`: what operators change while a run goes on.

Long because typer reads the options of each of its commands from a function's parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running
from peer.cli.options import group
from peer.log import reader
from peer.net import keyfile, node_calls
from peer.net.address import parse, peers_of
from peer.net.base import BadAddress, Closed, Timeout, Transport, Unreachable
from peer.net.blobs import BlobStore
from peer.net.node_calls import CALL_SECONDS
from peer.node.open_run import KEY, Door, here, manifest_of, node_folder, parse_run, start_transport
from peer.ui import log_text
from peer.ui.names import meant
from peer.ui.text import clean, schedule_of
from protocol import identity
from protocol.errors import LocalError, RemoteError, UsageError
from protocol.identity import Identity, short_peer
from protocol.ledger import schedule
from protocol.run.manifest import Manifest, why_no_quorum
from protocol.wire.bounds import LEAST_SHARE, LONGEST_PLACE, MAX_PROBATION, MAX_SESSIONS
from protocol.wire.decree import (
    ADMIT,
    APPOINT,
    BAN,
    CLOSE,
    DISMISS,
    LONGEST_REASON,
    MAX_APPOINTED,
    MAX_PLACES,
    OPEN,
    QUORUM,
    SET,
    Decree,
    Motion,
    Motions,
    Operator,
    Schedule,
)
from protocol.wire.encoding import seal

ASK_SECONDS = 1.0
SILENT_SECONDS = 180.0
"""That one's own node may be silent while its operator waits: it may be started again meanwhile."""

app = group()

_RUN = typer.Argument(
    metavar="RUN",
    help="A manifest file, a node's folder, or the one-line address that a bootstrap node prints.",
    show_default=False,
)
Run = Annotated[str, _RUN]
OwnRun = Annotated[str | None, _RUN]
"""Where it is missing, that of the node in --dir is meant."""
Peer = Annotated[
    str,
    typer.Argument(
        metavar="PEER",
        help="The peer as screens show it, such as Ada·p8kZ, or its id, or the id's last characters; or an invitation's.",
        show_default=False,
    ),
]
Dir = Annotated[Path, typer.Option("--dir", help="Your bootstrap node's folder.", show_default=True)]
Reason = Annotated[str, typer.Option(help="Why, for everybody to read in the log.")]

FOLDER = Path("potluck-bootstrap")


@app.command(epilog="Example: potluck run ban my-run.toml p8kZq3Rt --reason 'sends noise'")
def ban(run: Run, peer: Peer, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Keep a peer out: no node opens a session with it, and no plan has it. Or end an invitation."""
    running.run(_decree(run, BAN, peer, reason, dir), interrupted=1)


@app.command(epilog="Example: potluck run admit my-run.toml p8kZq3Rt")
def admit(run: Run, peer: Peer, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Let a peer in: one that was banned, or into a run that is closed."""
    running.run(_decree(run, ADMIT, peer, reason, dir), interrupted=1)


@app.command(name="open", epilog="Example: potluck run open my-run.toml")
def open_(run: OwnRun = None, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Let everybody in who is not banned."""
    _decree_own(run, OPEN, reason, dir)


@app.command(epilog="Example: potluck run close my-run.toml")
def close(run: OwnRun = None, reason: Reason = "", dir: Dir = FOLDER) -> None:
    """Let only those take part whom the manifest lists, or who were admitted."""
    _decree_own(run, CLOSE, reason, dir)


@app.command(
    epilog="Example: potluck run appoint my-run.toml /ip4/198.51.100.7/tcp/4001/p2p/12D3KooWExample",
)
def appoint(
    run: Run,
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS",
            help="The address of each new operator's node, with its key, as that node prints it.",
            show_default=False,
        ),
    ],
    reason: Reason = "",
    dir: Dir = FOLDER,
) -> None:
    """Make others operators too, or give operators other addresses. Who decides changes only with run quorum, or where one is silent for long."""
    with running.reporting():
        named = _operators(nodes)
    running.run(_decree(run, APPOINT, "", reason, dir, operators=named), interrupted=1)


@app.command(epilog="Example: potluck run dismiss my-run.toml p8kZq3Rt")
def dismiss(
    run: Run,
    operator: Annotated[
        str, typer.Argument(metavar="OPERATOR", help="The operator's id, or its last characters.", show_default=False)
    ],
    reason: Reason = "",
    dir: Dir = FOLDER,
) -> None:
    """End that somebody is an operator. Another one takes the place among those who decide; its node ends."""
    running.run(_decree(run, DISMISS, operator, reason, dir), interrupted=1)


@app.command(epilog="Example: potluck run quorum my-run.toml 4")
def quorum(
    run: Run,
    number: Annotated[
        int,
        typer.Argument(metavar="NUMBER", help="1, 4 or 7: so many operators decide each round.", show_default=False),
    ],
    reason: Reason = "",
    dir: Dir = FOLDER,
) -> None:
    """Have more operators decide, or fewer. Enough of them must give signs of life."""
    with running.reporting():
        refused = why_no_quorum(number)
        if refused is not None:
            raise UsageError(refused)
    running.run(_decree(run, QUORUM, "", reason, dir, quorum=number), interrupted=1)


@app.command(
    name="set",
    help="Make a run longer or shorter, change its learning rate's schedule, or what strangers may have in it. While it goes on: a run that"
    " is over stays over.",
    epilog="Example: potluck run set my-run.toml --rounds 400",
)
def set_(
    run: OwnRun = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="The run is over after so many.", show_default=False)
    ] = None,
    total_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Inner steps of the learning rate's schedule. Without it: as many more or fewer as --rounds has, where the schedule ended with the"
            " run; else as now.",
            show_default=False,
        ),
    ] = None,
    probation: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_PROBATION, help="Rounds in which a newcomer's work has no weight.", show_default=False
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(min=LEAST_SHARE, max=1, help="Of a round's weight, for one peer.", show_default=False),
    ] = None,
    range_sessions: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SESSIONS,
            help="Sessions for strangers from one range of addresses; 0: all.",
            show_default=False,
        ),
    ] = None,
    range_share: Annotated[
        float | None,
        typer.Option(min=LEAST_SHARE, max=1, help="Of the plan, for strangers from one range.", show_default=False),
    ] = None,
    reason: Reason = "",
    dir: Dir = FOLDER,
) -> None:
    """`potluck run set`.

    Long because typer reads a command's options from its function's parameters.
    """
    limits = {"probation": probation, "share": share, "range_sessions": range_sessions, "range_share": range_share}
    given = {name: value for name, value in limits.items() if value is not None}
    with running.reporting():
        if rounds is None and total_steps is None and not given:
            raise UsageError("potluck run set: nothing is given; see --help, and give what is to be changed")

    def wanted(manifest: Manifest, now: Schedule) -> Schedule:
        found = now.rounds if rounds is None else rounds
        ends = now.total_steps == now.rounds * manifest.train.inner_steps
        steps = total_steps or (found * manifest.train.inner_steps if ends else now.total_steps)
        changed = dataclasses.replace(schedule.limits(manifest, now), **given) if given else now.limits  # type: ignore[arg-type]
        return Schedule(rounds=found, total_steps=steps, limits=changed)

    _decree_own(run, SET, reason, dir, wanted)


def _decree_own(
    run: str | None, action: str, reason: str, dir: Path, wanted: Callable[[Manifest, Schedule], Schedule] | None = None
) -> None:
    """Carries out what is about the whole run, of the node in `dir` where none is named."""
    with running.reporting():
        text = here(dir) if run is None else run
    running.run(_decree(text, action, "", reason, dir, wanted), interrupted=1)


def own_key(folder: Path) -> Identity:
    """The key in an operator's folder. Raises UsageError."""
    if not (folder / KEY).is_file():
        raise UsageError(f"--dir {folder}: has no key; give the folder of your bootstrap node")
    return keyfile.load_or_create(folder / KEY)


def _operators(typed: list[str]) -> tuple[Operator, ...]:
    """Who is meant by these addresses; the same operator may have several. Raises UsageError."""
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
        if len(places) > MAX_PLACES or max(map(len, places)) > LONGEST_PLACE:
            most = f"{MAX_PLACES} addresses of {LONGEST_PLACE} characters at most"
            raise UsageError(f"NODE {peer}: an operator has {most}; give fewer or shorter ones")
    if len(found) > MAX_APPOINTED:
        raise UsageError(f"NODE: {len(found)} are given, {MAX_APPOINTED} at most can be; give the others afterwards")
    return tuple(Operator(peer=peer, places=tuple(places)) for peer, places in found.items())


async def _decree(
    text: str,
    action: str,
    subject: str,
    reason: str,
    folder: Path,
    wanted: Callable[[Manifest, Schedule], Schedule] | None = None,
    *,
    operators: tuple[Operator, ...] = (),
    quorum: int | None = None,
) -> None:
    """Long because these are a decree's fields: (text, folder) say where it goes."""
    folder = node_folder(text, folder)
    operator = own_key(folder)
    if len(reason) > LONGEST_REASON or not reason.isprintable():
        raise UsageError(f"--reason: may have {LONGEST_REASON} printable characters")
    run = parse_run(text)
    with tempfile.TemporaryDirectory(prefix="potluck-run-") as name:
        transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id)
        try:
            manifest = await manifest_of(run, transport)
            node = run.dialled[0]
            now = await node_calls.send_motion(transport, node, Motion())
            if operator.peer_id not in now.board.names:
                raise UsageError(f"--dir {folder}: {operator.peer_id} is no operator of {clean(manifest.name)}")
            if action == DISMISS:
                subject = _named(now, subject)
            elif subject:
                log = reader.Remote(transport, [node], BlobStore(Path(name) / "blobs"))
                subject = await _whole(manifest, log, subject)
            lasts = None if wanted is None else wanted(manifest, now.schedule)
            decree = Decree(
                run=manifest.run_id,
                number=now.number,
                action=action,
                subject=subject,
                reason=reason,
                schedule=lasts,
                operators=operators,
                quorum=quorum,
            )
            await _until_decided(transport, run.bootstrap, decree, operator)
        finally:
            await transport.aclose()


async def _whole(manifest: Manifest, log: reader.Remote, text: str) -> str:
    """The peer id that is meant: a whole one, or the end of one that is in the log or there now. Raises UsageError, RemoteError."""
    said = await log.said_names(manifest.run_id)
    found = set(said)
    async for record in log_text.believed(manifest, log, lambda note: None):
        found.update(record.commit.plan.peers if record.commit.plan is not None else ())
        found.update(name for joined in record.commit.joined for name in (joined.peer, joined.invitation.key))
    return meant("PEER", text, found, said)


def _named(now: Motions, text: str) -> str:
    """The operator who is meant. Raises UsageError."""
    found = meant("OPERATOR", text, now.board.names)
    if found not in now.board.names:
        raise UsageError(
            f"OPERATOR {found}: is no operator of the run; give one of {', '.join(map(clean, now.board.names))}"
        )
    return found


async def _until_decided(transport: Transport, at: Sequence[str], decree: Decree, operator: Identity) -> None:
    """Signs it and sends it to the node `at` these addresses until a commit has it. Raises LocalError where another decree came first,
    RemoteError."""
    motion = Motion(sealed=seal(operator, decree))
    what, told = f"{decree.action}{f' {short_peer(decree.subject)}' if decree.subject else ''}", -1
    if decree.operators:
        what = f"appoint {', '.join(short_peer(one.peer) for one in decree.operators)}"
    if decree.quorum is not None:
        what = f"quorum {decree.quorum}"
    if decree.schedule is not None:
        what = f"set {schedule_of(decree.schedule)}"
    while True:
        answer = await _patiently(transport, at, motion, what)
        if answer.number > decree.number:
            break
        if len(answer.signed) != told:
            told = len(answer.signed)
            then = (
                "it comes with the next commit"
                if told >= answer.wanted
                else "the other operators have to type the same; this waits for them"
            )
            print(f"{what}: signed by {told} of {answer.wanted}; {then}", flush=True)
        await asyncio.sleep(ASK_SECONDS)
    if answer.newest != decree:
        raise LocalError(f"{what}: another decree was decided first; see potluck log show, and type it again")
    print(f"{what}: decided; it is in the log, and holds from the next round on", flush=True)


async def _patiently(transport: Transport, at: Sequence[str], motion: Motion, what: str) -> Motions:
    """What the node answers; while it is silent, which is said once, it is asked again. Raises RemoteError: what it refuses, it refuses."""
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
