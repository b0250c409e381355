"""The processor time of a message is bounded by its size, on every channel (tests/fuzz/channels.py).

    python -m tests.fuzz.test_costs    (prints the table)

Of each kind the dearest messages within a channel's bounds are tried: every list at its longest with the smallest
entries, unknown fields full of small values, kinds that have no place there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack
import pytest

from protocol.ledger import history
from tests.fuzz.channels import CHANNELS, SLACK, Channel, M, dearest, seconds, strangers, turn
from tests.support import tiny


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
        return Row(channel.name, kind, what, len(raw), cost, channel.taken(len(raw)))

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
