"""A refused peer ends by the log and enough nodes, never on the word of one (peer/node/sessions.py)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from peer.net import compression
from peer.net.base import Clock, serve_calls
from peer.net.memory import MemoryNetwork
from peer.node.sessions import Refusals
from protocol.errors import BannedError, ClosedError, LocalError, UsageError
from protocol.ledger import access
from protocol.run.manifest import AdmissionSpec, Manifest
from protocol.wire import encoding, endpoints, framing
from protocol.wire.announcement import VERSION
from protocol.wire.commit import DOMAIN, Commit
from protocol.wire.decree import ADMIT, BAN, CLOSE, OPEN, Decree, Enacted, Joined
from protocol.wire.session import LogRequest, NotAdmitted
from tests.support import networks, tiny

KEYS = tiny.OPERATORS[:4]
NODES = tuple(key.peer_id for key in KEYS)
ME = tiny.OPERATORS[4].peer_id
FOUR = tiny.manifest(operators=NODES, quorum=4)
CLOSED = dataclasses.replace(FOUR, admission=AdmissionSpec(mode="listed"))
NO = NotAdmitted(reason="no")


def history(manifest: Manifest, *actions: str | Joined | None, time: float = 0.0) -> list[bytes]:
    """A log: a round for each decree about us, for each guest, and for nothing."""
    commits: list[Commit] = []
    for what in actions:
        before = commits[-1] if commits else None
        number, enacted = (before.decrees if before else 0), None
        if isinstance(what, str):
            subject = ME if what in (BAN, ADMIT) else ""
            decree = Decree(
                run=manifest.run_id, number=number, action=what, subject=subject, reason="noise" if what == BAN else ""
            )
            signed = {key.peer_id: key.sign(DOMAIN + encoding.encode(decree)) for key in KEYS[:3]}
            enacted = Enacted(decree=decree, signatures=signed)
        commits.append(
            tiny.commit(
                run=manifest.run_id, round=len(commits), parent=before.digest if before else manifest.run_id, time=time,
                leader=NODES[0], members=NODES,
                decrees=number + (enacted is not None), decree=enacted, idle=len(commits),
                joined=(what,) if isinstance(what, Joined) else (),
            )
        )  # fmt: skip
    return [encoding.encode_record(tiny.record(commit, *KEYS[:3])) for commit in commits]


def ends(
    manifest: Manifest,
    log: Sequence[bytes],
    words: Sequence[tuple[int, NotAdmitted | None]],
    joining: Joined | None = None,
    liar: Sequence[bytes] | None = None,
) -> LocalError | None:
    """How the peer ends after these answers of nodes; None where it goes on. `liar`: the first one's log."""

    async def work() -> LocalError | None:
        network = MemoryNetwork()
        asked = 0
        for index, name in enumerate(NODES):
            node, known = network.transport(name), liar if index == 0 and liar is not None else log

            async def page(remote: str, request: bytes, known: Sequence[bytes] = known) -> bytes:
                nonlocal asked
                asked += 1
                after = encoding.expect(LogRequest, encoding.decode(request, remote), remote).after
                return compression.pack(framing.pack_message(list(known[after + 1 : after + 3])), compression.PLAIN)

            await serve_calls(node, endpoints.LOG, page)
        clock = Clock(steady=lambda: 0.0, wall=lambda: 0.0)
        me = network.transport(ME)
        refusals = Refusals(
            manifest, networks.network(me, clock=clock, nodes=NODES), joining, "/ip4/1.2.3.4/tcp/1/p2p/x#r"
        )
        running = asyncio.create_task(refusals.run())
        for node_index, word in words:
            refusals.taken(NODES[node_index]) if word is None else refusals.refused(NODES[node_index], word)
            before = -1
            while asked != before and not running.done():  # until it has read what it reads
                before = asked
                for _ in range(200):
                    await asyncio.sleep(0)
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return None
        error = running.exception()
        assert isinstance(error, LocalError)
        return error

    return asyncio.run(asyncio.wait_for(work(), 60))


ALL = [(0, NO), (1, NO), (2, NO), (3, NO)]


def test_a_peer_that_is_banned_ends_with_the_reason_its_id_and_a_code_of_its_own() -> None:
    error = ends(FOUR, history(FOUR, None, BAN, None), ALL)
    assert isinstance(error, BannedError)
    assert error.exit_code == 3
    assert str(error) == (
        f"run tiny: peer {ME}: it is banned: noise; ask an operator, who lets it in again with: "
        f"potluck run admit /ip4/1.2.3.4/tcp/1/p2p/x#r {ME}"
    )


@pytest.mark.parametrize(
    "log", [history(CLOSED), history(CLOSED, None), history(CLOSED, OPEN, CLOSE), history(CLOSED, ADMIT, BAN, CLOSE)]
)
def test_a_stranger_in_a_closed_run_ends_with_what_to_send_to_an_operator(log: list[bytes]) -> None:
    error = ends(CLOSED, log, ALL[1:])
    assert error is not None
    assert f"potluck run admit /ip4/1.2.3.4/tcp/1/p2p/x#r {ME}" in str(error)
    if "banned" not in str(error):
        assert isinstance(error, ClosedError)
        assert error.exit_code == 4
        assert "potluck invite" in str(error)


@pytest.mark.parametrize(
    "words",
    [
        [(0, NO), (3, NO)],
        [(0, NO), (3, NO), (0, NO), (3, NO)],
        [(0, NO), (3, NO), (1, None)],
        [(0, NO), (3, NO), (1, NotAdmitted(reason="wait", waits=True))],
        [(0, NO), (3, NO), (1, NotAdmitted(reason="version", version=VERSION + 1))],
    ],
)
def test_fewer_nodes_than_decide_end_nobody_even_if_the_log_says_the_same(words: list[Any]) -> None:
    assert ends(FOUR, history(FOUR, BAN), words) is None


@pytest.mark.parametrize("actions", [(None,), (BAN, ADMIT), (CLOSE, ADMIT, None)])
def test_what_all_nodes_say_ends_nobody_whom_the_log_lets_in(actions: tuple[str | None, ...]) -> None:
    """They have not heard yet of what was decreed."""
    assert ends(FOUR, history(FOUR, *actions), ALL) is None


def test_a_log_that_nobody_decided_is_not_believed() -> None:
    false = [raw[:-1] + bytes([raw[-1] ^ 1]) for raw in history(FOUR, BAN)]
    assert ends(FOUR, history(FOUR, None), ALL, liar=false) is None
    assert isinstance(ends(FOUR, history(FOUR, BAN), ALL, liar=false), BannedError), "another node is asked"


def test_who_is_refused_again_after_it_was_let_in_ends_then() -> None:
    words = [(0, NO), (0, None), (1, NO), (1, None), (0, NO), (2, NO), (3, NO)]
    assert isinstance(ends(FOUR, history(FOUR, BAN), words), BannedError)


@pytest.mark.parametrize(
    ("expires", "used", "said"),
    [
        (10**9, 1, "its invitation is used up, by 1 of 1"),
        (5, 0, "its invitation has expired"),
        (10**9, 0, "no"),
    ],
)
def test_an_invitation_that_does_not_hold_any_more_is_named(expires: int, used: int, said: str) -> None:
    """It has expired by the time of the log, whatever this machine's clock says."""
    made = access.issue(KEYS[0], b"i" * 32, CLOSED.run_id, expires=expires, count=1, reason="")
    guest = made.joined(tiny.OPERATORS[5].peer_id)
    log = history(CLOSED, *(guest,) * used, None, time=10.0)
    error = ends(CLOSED, log, ALL, made.joined(ME))
    assert isinstance(error, ClosedError)
    assert f"peer {ME}: {said}; send this id" in str(error)


def test_another_version_of_the_protocol_ends_it_when_enough_nodes_have_it() -> None:
    word = NotAdmitted(reason="version", version=VERSION + 1)
    assert ends(FOUR, history(FOUR), [(0, word), (1, word)]) is None
    error = ends(FOUR, history(FOUR), [(0, word), (1, word), (2, word)])
    assert isinstance(error, UsageError)
    assert f"speak version {VERSION + 1} of the protocol, this is {VERSION}; install" in str(error)
    assert str(error).endswith("(newer than this)")
