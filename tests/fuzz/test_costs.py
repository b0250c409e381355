"""The processor time of a message is bounded by its size, on every channel.

    python -m tests.fuzz.test_costs    (prints the table)

Of each kind the dearest messages within a channel's bounds are tried: every list at its longest with the smallest
entries, unknown fields full of small values, kinds that have no place there. The unit is a turn (peer/net/guests.py):
TURN_MESSAGES heartbeats, decoded in the same run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from bootstrap import calls as node_calls
from bootstrap.sessions import MAX_ASKED_BYTES, MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, SAID_BY_PEERS, most_values
from peer.net import reach
from peer.net.guests import TURN_BYTES
from peer.node import moments
from peer.state import handover, payloads
from protocol.errors import RemoteError
from protocol.ledger import history, part_lists
from protocol.wire import calls, encoding
from protocol.wire.announcement import Dialled, DialMe, Lookup, RosterRequest
from protocol.wire.calls import Handover, HandoverAnswer, MomentsAnswer, MomentsRequest, PipeHello, States
from protocol.wire.decree import Motion
from protocol.wire.framing import MAX_VALUES
from protocol.wire.schema import AtMost, Cut, Digest, Within
from protocol.wire.session import Heartbeat, Hello, LogRequest
from tests.fuzz.messages import fields, parts
from tests.support import tiny

TURN_MESSAGES = 25
"""A third of a millisecond on a slow core, as a turn is."""
SLACK = 2.0
"""The most turns of processor time for one turn that is taken."""
M = tiny.manifest()


@dataclass(frozen=True)
class Channel:
    """limit: bytes of a message; read: what the receiver does with it; kinds: those that have a place there"""

    name: str
    limit: int
    read: Callable[[bytes], object]
    kinds: tuple[type, ...]
    turn_bytes: float = TURN_BYTES


def _messages(name: str, limit: int, *kinds: type, values: int = MAX_VALUES) -> Channel:
    return Channel(name, limit, lambda raw: encoding.decode(raw, "p", *kinds, values=values), kinds)


def _call(name: str, limit: int, kind: type) -> Channel:
    return Channel(name, limit, lambda raw: calls.read(kind, raw, "p", "call"), (kind,))


CHANNELS = (
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


@dataclass(frozen=True)
class Row:
    """The dearest message of a kind. turns: of processor time; taken: those that it takes"""

    channel: str
    kind: str
    what: str
    size: int
    turns: float
    taken: float


def rows(channel: Channel) -> Iterator[Row]:
    unit = turn()

    def row(kind: str, what: str, raw: bytes) -> Row:
        cost = seconds(lambda: channel.read(raw)) / unit
        return Row(channel.name, kind, what, len(raw), cost, 1 + len(raw) / channel.turn_bytes)

    for kind in channel.kinds:
        tried = [row(kind.__name__, what, raw) for what, raw in dearest(channel, kind) if len(raw) <= channel.limit]
        if tried:
            yield max(tried, key=lambda row: row.turns / row.taken)
    yield from (row("another", what, raw) for what, raw in strangers(channel.limit))


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_no_message_costs_more_than_the_turns_that_it_takes(channel: Channel) -> None:
    for row in rows(channel):
        assert row.turns <= SLACK * row.taken, row


def test_a_record_that_cannot_be_next_costs_no_decoding() -> None:
    """One of 316,000 values whose head fits and whose votes nobody gave is refused before they are decoded."""
    head = tiny.commit(M)
    said = {**msgpack.unpackb(msgpack.packb(dataclasses.asdict(head))), "contributions": [[0] * 15] * 19_700}
    votes = {tiny.OPERATOR.peer_id: bytes(64)}
    forged = msgpack.packb({"c": {key: said[key] for key in sorted(said)}, "n": 0, "v": votes})
    too_few = msgpack.packb({"c": said, "n": 0, "v": {}})
    later = msgpack.packb({"c": {**said, "round": 7}, "n": 0, "v": votes})
    whole = seconds(lambda: msgpack.unpackb(forged))
    for raw in (forged, too_few, later):
        with pytest.raises(history.BadCommit):
            history.follow(M, None, raw)

        def read(raw: bytes = raw) -> None:
            with contextlib.suppress(history.BadCommit):
                history.follow(M, None, raw)

        assert seconds(read) < 2 * whole, "more than a decoder in C needs for it"


if __name__ == "__main__":
    print(f"{'channel':34} {'kind':16} {'dearest':44} {'bytes':>7} {'turns':>7} {'taken':>7}")
    for each in CHANNELS:
        for found in rows(each):
            print(
                f"{found.channel:34} {found.kind:16} {found.what:44} {found.size:7}"
                f" {found.turns:7.2f} {found.taken:7.2f}"
            )
