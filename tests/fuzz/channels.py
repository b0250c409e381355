"""The channels on which others reach a node or a peer: what their messages may be, and what a message costs.

    python -m tests.fuzz.campaign --channels --inputs 10000000 --keep FILE    (`make fuzz-channels`)

Each message goes to the functions that a handler gives it to, without a socket. The unit of cost is a turn
(peer/net/guests.py): TURN_MESSAGES heartbeats, decoded in the same run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
import types
import typing
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgpack

from bootstrap import calls as node_calls
from bootstrap.sessions import (
    MAX_ASKED_BYTES,
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    SAID_BY_OPERATORS,
    SAID_BY_PEERS,
    Operators,
    most_values,
)
from peer.net import reach
from peer.net.base import decode_in_turn
from peer.net.guests import PASSED_TURN_BYTES, TURN_BYTES, Guests
from peer.node import moments
from peer.node.sessions import SAID_BY_NODES
from peer.state import handover, payloads
from protocol import identity
from protocol.errors import RemoteError
from protocol.ledger import part_lists
from protocol.quorum.paxos import Quorum
from protocol.round.member import Member
from protocol.wire import calls, encoding
from protocol.wire.announcement import Announcement, Dialled, DialMe, Lookup, RosterRequest
from protocol.wire.calls import Handover, HandoverAnswer, MomentsAnswer, MomentsRequest, PipeHello, States
from protocol.wire.commit import DOMAIN, Record
from protocol.wire.decree import Motion
from protocol.wire.encoding import RecordHead
from protocol.wire.framing import MAX_MESSAGE, MAX_VALUES, FrameError
from protocol.wire.schema import AtMost, Cut, Digest, SchemaError, Within, packed
from protocol.wire.session import Heartbeat, Hello, LogRequest
from tests.fuzz.messages import Maker, fields, parts
from tests.fuzz.mutate import change_msgpack
from tests.fuzz.targets import KEY, Target
from tests.support import tiny

TURN_MESSAGES = 25
"""A third of a millisecond on a slow core, as a turn is."""
SLACK = 2.0
"""The most turns of processor time for one turn that is taken."""
M = tiny.manifest()


@dataclass(frozen=True)
class Channel:
    """limit: bytes of a message; read: what the receiver does with it; kinds: those that have a place there; paid: the
    turns that the newest message took besides those for its bytes"""

    name: str
    limit: int
    read: Callable[[bytes], object]
    kinds: tuple[type, ...]
    turn_bytes: float = TURN_BYTES
    paid: Callable[[], float] = lambda: 0.0

    def taken(self, size: int) -> float:
        """The turns that the newest message, of `size` bytes, took."""
        return 1 + size / self.turn_bytes + self.paid()


def _messages(name: str, limit: int, *kinds: type, values: int = MAX_VALUES) -> Channel:
    return Channel(name, limit, lambda raw: encoding.decode(raw, "p", *kinds, values=values), kinds)


def _call(name: str, limit: int, kind: type) -> Channel:
    return Channel(name, limit, lambda raw: calls.read(kind, raw, "p", "call"), (kind,))


def sealed(body: bytes) -> bytes:
    """An envelope around it, signed by a stranger."""
    raw: bytes = msgpack.packb({"p": KEY.peer_id, "b": body, "s": KEY.sign(DOMAIN + body)})
    return raw


class Paying:
    """A stream from which one message comes, and the turns that it takes. The guest is `remote`."""

    def __init__(self, remote: str) -> None:
        self.remote = remote
        self.raw = b""
        self.paid = 0.0

    async def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        return self.raw

    async def take_turns(self, amount: float) -> None:
        self.paid += amount

    def runs(self, raw: bytes, work: Callable[[Any], Coroutine[Any, Any, object]]) -> object:
        """What `work(self)` returns, which never waits."""
        self.raw, self.paid = raw, 0.0
        try:
            work(self).send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("it waits")


FOUR = tiny.manifest(operators=tuple(o.peer_id for o in tiny.OPERATORS[:4]), quorum=4)


def _office(leads: bool) -> Channel:
    """The operators' stream of a node of four, in the hands of the one that leads, or of another one."""
    own, liar = tiny.OPERATORS[1], tiny.OPERATORS[0 if leads else 3]
    quorum = Quorum(FOUR, own.peer_id, (), None, (), own.sign, identity.verify, 0.0)
    transport = SimpleNamespace(peer_id=own.peer_id, guests=Guests())
    archive = SimpleNamespace(manifest=FOUR, named=set())
    operators = Operators(None, transport, archive, (), quorum, None, None)  # type: ignore[arg-type]
    stream, name = Paying(liar.peer_id), "that leads" if leads else "that does not lead"

    def read(raw: bytes) -> object:
        return stream.runs(raw, operators.read_message)

    kinds = (*SAID_BY_OPERATORS, Record)
    return Channel(
        f"the stream of an operator {name}", MAX_MESSAGE, read, kinds, PASSED_TURN_BYTES, lambda: stream.paid
    )


def _node() -> Channel:
    """A peer's session, in the hands of a node."""
    member, stream = Member(FOUR, "me"), Paying(tiny.OPERATORS[3].peer_id)

    async def receive(stream: Any) -> object:
        said = encoding.head(await stream.recv(MAX_MESSAGE), stream.remote, *SAID_BY_NODES)
        if isinstance(said, RecordHead) and not member.is_news(said):
            return said
        return await decode_in_turn(stream, said)

    def read(raw: bytes) -> object:
        return stream.runs(raw, receive)

    kinds = (*SAID_BY_NODES, Record)
    return Channel("a session, from the node", MAX_MESSAGE, read, kinds, PASSED_TURN_BYTES, lambda: stream.paid)


CHANNELS = (
    _office(leads=False),
    _office(leads=True),
    _node(),
    Channel("announcements", 4096, lambda raw: encoding.unseal(sealed(raw)), (Announcement,)),
    _messages("a session's Hello", MAX_HELLO_BYTES, Hello),
    _messages("a session", MAX_MESSAGE_BYTES + 2 * part_lists.longest(M), *SAID_BY_PEERS, values=most_values(M)),
    _messages("the operators' stream, backwards", MAX_ASKED_BYTES, LogRequest),
    _messages("calls for the log", node_calls.MAX_REQUEST_BYTES, LogRequest),
    _messages("calls for the roster", node_calls.MAX_REQUEST_BYTES, Lookup, RosterRequest),
    _messages("calls for decrees", node_calls.MAX_REQUEST_BYTES, Motion),
    _messages("dial-back, calls", reach.MAX_REQUEST, DialMe),
    _messages("dial-back, answers", reach.MOST_ANSWERED, Dialled),
    _call("hand-over, calls", handover.REQUEST_BYTES, Handover),
    _call("hand-over, answers", handover.ANSWER_BYTES, HandoverAnswer),
    _call("moments, calls", moments.REQUEST_BYTES, MomentsRequest),
    _call("moments, answers", moments.ANSWER_BYTES, MomentsAnswer),
    _call("pipes", 256, PipeHello),
    _call("states, answers", payloads.ANSWER_BYTES, States),
)


def smallest(hint: Any) -> Any:
    """The plain data of a type that takes the fewest bytes."""
    base, marks = parts(hint)
    origin = typing.get_origin(base)
    if base == Digest:
        return bytes(32)
    if origin in (types.UnionType, typing.Union):
        return None
    if origin in (tuple, dict):
        return [] if origin is tuple else {}
    if dataclasses.is_dataclass(base):
        return {name: smallest(inner) for name, inner in fields(base).items()}
    within = next((mark for mark in marks if isinstance(mark, Within)), None)
    return base() if within is None else int(max(within.least, min(1, within.most)))


def dearest(channel: Channel, kind: type) -> Iterator[tuple[str, bytes]]:
    """(what it is, message) of this kind, as dear as they get within the channel's bytes."""
    name = kind.__name__.lower()
    small = {**({"t": name} if name in encoding.TYPES else {}), **smallest(kind)}
    rows = kind is States
    for name, hint in fields(kind).items():
        base, marks = parts(hint)
        origin = typing.get_origin(base)
        count = next((mark.count for mark in marks if isinstance(mark, AtMost | Cut)), 0)
        if origin is tuple:
            entry = _entry(typing.get_args(base)[0])
            most = min(count, channel.limit // len(msgpack.packb(entry)))
            while most > 0:
                raw = msgpack.packb([entry] * most if rows else {**small, name: [entry] * most})
                if len(raw) <= channel.limit:
                    yield f"{name}: {most} entries", raw
                    break
                most -= 1 + most // 50
        elif origin is dict:
            value = _entry(typing.get_args(base)[1])
            most = min(count, channel.limit // (len(msgpack.packb(value)) + 3))
            yield f"{name}: {most} entries", msgpack.packb({**small, name: {f"{i:x}"[:16]: value for i in range(most)}})
        elif base in (str, bytes) and count:
            room = max(1, min(count, channel.limit - 200))
            yield f"{name}: {room} long", msgpack.packb({**small, name: ("x" if base is str else b"x") * room})
    room = channel.limit - len(msgpack.packb(small)) - 8
    if room > 0 and not rows:
        yield "an unknown field of small values", msgpack.packb({**small, "~": [0] * room})
        spare = encoding.SPARE.size - 100
        yield "an unknown field of as many as it may have", msgpack.packb({**small, "~": [0] * min(room, spare)})
        yield "many unknown fields", msgpack.packb({**small, **{f"~{i}": [0] * (room // 70 - 6) for i in range(50)}})


def _entry(hint: Any) -> Any:
    """The smallest one, as a list of values where it is a row."""
    found = smallest(hint)
    base, _ = parts(hint)
    if dataclasses.is_dataclass(base):
        return [_entry(inner) for inner in fields(base).values()]
    return found


def strangers(limit: int) -> Iterator[tuple[str, bytes]]:
    """Messages that have no place on any channel of strangers: a plan of as many values as fit."""
    yield "an accept", msgpack.packb({"t": "accept", "round": 0, "ballot": 0, "commit": [0] * (limit - 60)})
    yield "nothing known", msgpack.packb({"t": "x", "a": [0] * (limit - 20)})
    yield "nested lists", msgpack.packb({"t": "x"})[:-1] + b"\x91" * (limit - 20) + b"\x00"


def seconds(read: Callable[[], object], times: int = 7) -> float:
    """Processor seconds of what may be refused, at best."""
    best = float("inf")
    for _ in range(times):
        began = time.process_time()
        with contextlib.suppress(RemoteError):
            read()
        best = min(best, time.process_time() - began)
    return best


def turn() -> float:
    """Processor seconds of a turn."""
    beat = encoding.encode(Heartbeat(phase="x", round=1))
    return seconds(lambda: [encoding.decode(beat, "p") for _ in range(TURN_MESSAGES)], 20)


# --- the campaign

LONGEST_SEED = 1 << 16
SEEDS = 6
"""Messages of each kind that are changed."""


def _packed(kind: type, made: Any) -> bytes:
    name = kind.__name__.lower()
    if kind is Record:
        made = {"c": made["commit"], "n": made["ballot"], "v": made["votes"]}
    raw: bytes = msgpack.packb({"t": name, **made} if name in encoding.TYPES else made)
    return raw


def _seeds(channel: Channel) -> list[bytes]:
    """Messages that have a place on a channel, and the dearest."""
    maker, found = Maker(random.Random(channel.name)), list[bytes]()
    for kind in channel.kinds:
        if kind is not States:
            found += [_packed(kind, maker.make(kind)) for _ in range(SEEDS)]
        if channel.limit <= LONGEST_SEED:
            found += [raw for _, raw in dearest(channel, kind)]
    head = tiny.commit(FOUR)
    found += [encoding.encode_record(tiny.record(head, *tiny.OPERATORS[:3]))]
    many = {**packed(head), "left_out": [[0, ""]] * 2000, "diverged": [["", ""]] * 2000}
    found += [msgpack.packb({"t": "accept", "round": 0, "ballot": 0, "commit": many})]
    found += [msgpack.packb({"t": "promise", "round": 0, "ballot": 0, "commit": many})]
    return [raw for raw in found if len(raw) <= min(channel.limit, LONGEST_SEED)]


def target(channel: Channel, unit: float) -> Target:
    """A channel as a target of the campaign. unit: processor seconds of a turn"""

    def run(raw: bytes) -> object:
        if len(raw) > channel.limit:
            raise FrameError(f"frame: {len(raw)} bytes; at most {channel.limit} are allowed")
        return type(channel.read(raw))

    refuses = (RemoteError, FrameError, SchemaError)
    return Target(
        channel.name,
        run,
        refuses,
        _seeds(channel),
        change_msgpack,
        4 if channel.turn_bytes == PASSED_TURN_BYTES else 1,
        lambda size: SLACK * unit * channel.taken(size),
    )
