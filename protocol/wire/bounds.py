"""Field types of messages with their bounds, which decoding checks (protocol/wire/schema.py).

Every field of a message has one of these, or is a digest or bool (tests/fuzz/messages.py makes messages at and beyond
all of them). So no sum over a message is infinite, and no foreign text is long.
"""

from __future__ import annotations

import math
from typing import Annotated

from protocol.wire.schema import AtMost, Cut, Within

MAX_LOSS = 1e6
"""Nats per token. A guessing model has ln(vocabulary), 17 at most; a diverged one reports this."""
MAX_BITS_PER_BYTE = 2e6
"""Of held-out text: a token has a byte, more or less."""
MAX_GAIN = 1e3
"""Nats per token that an update can be said to change the loss by; larger gains are reported as this."""
MAX_NORM = 1e50
"""Of an update; all values of fp32, squared and added up, have less."""
MAX_BALLOT = 2**53
LEAST_SCALE = 2.0**-20
MAX_SHARDS = 515
"""Of a model: its blocks (protocol/run/layout.py), the embedding, the head and `anchor`."""
MAX_TIME = 2.0**34
"""Unix seconds, in the year 2514: every clock and calendar can show it."""

MAX_ROUNDS = 10**9
"""Of a run: even rounds of a second would take thirty years."""
MAX_STEPS = 10**15
"""Of the learning rate's schedule."""
MAX_PROBATION = 1000
MAX_SESSIONS = 65_536
LEAST_SHARE = 0.001

Count = Annotated[int, Within(0, 2**53)]
"""Of what is counted one by one: steps, tokens, replicas, serial numbers."""
Number = Annotated[int, Within(-1, 2**53)]
"""A replica's; -1 before it has one."""
Size = Annotated[int, Within(0, 2**63)]
"""Bytes; what may be fetched follows from the model (protocol/ledger/part_lists.py)."""
Round = Annotated[int, Within(0, 2**31 - 2)]
"""The round of a run: fits where a blob's round is kept (peer/net/blobs/store.py)."""
Rounds = Annotated[int, Within(0, MAX_ROUNDS)]
"""How many a run has."""
Steps = Annotated[int, Within(0, MAX_STEPS)]
"""Inner steps of the learning rate's schedule."""
Since = Annotated[int, Within(-1, 2**53)]
"""Where a reader stands; -1: at the beginning."""
Ballot = Annotated[int, Within(-1, MAX_BALLOT)]
"""Of the quorum's votes; -1: none."""
Slot = Annotated[int, Within(0, 2**62)]
"""A place in the run's text; no run comes so far."""
Block = Annotated[int, Within(0, 4096)]
"""A number of the model's blocks, or the one after the last."""
Rate = Annotated[int, Within(0, 10**13)]
Memory = Annotated[int, Within(0, 2**50)]
Seconds = Annotated[float, Within(0.0, 2.0**31)]
Port = Annotated[int, Within(1, 65535)]
Loss = Annotated[float, Within(0.0, MAX_LOSS)]
Gain = Annotated[float, Within(-MAX_GAIN, MAX_GAIN)]
BitsPerByte = Annotated[float, Within(0.0, MAX_BITS_PER_BYTE)]
Norm = Annotated[float, Within(0.0, MAX_NORM)]
NormOfAll = Annotated[float, Within(0.0, 100 * MAX_NORM)]
"""Of all parts of a share: the root of the sum of so many squares."""
Scale = Annotated[float, Within(LEAST_SCALE, 1.0)]
"""What an update is multiplied by before it enters the mean."""
Probation = Annotated[int, Within(0, MAX_PROBATION)]
Sessions = Annotated[int, Within(0, MAX_SESSIONS)]
"""From one range of addresses, at a time; 0: all."""
PartOfAll = Annotated[float, Within(LEAST_SHARE, 1.0)]
"""Of a round's weight, or of what is planned."""
Time = Annotated[float, Within(0.0, MAX_TIME)]
Magnitude = Annotated[float, Within(0.0, 1e39)]
"""Of values in fp32."""
Offset = Annotated[float, Within(-1e4, 1e4)]
"""Milliseconds along an axis (protocol/wire/announcement.py)."""
PeerId = Annotated[str, AtMost(64)]
RunId = Annotated[str, AtMost(64)]
Shard = Annotated[str, AtMost(16)]
Address = Annotated[str, AtMost(512)]
LONGEST_PLACE = 128
Place = Annotated[str, AtMost(LONGEST_PLACE)]
"""An address that stays in the log."""
QuorumSize = Annotated[int, Within(1, 7)]
Word = Annotated[str, AtMost(48)]
"""One word of what somebody says of itself."""
Name = Annotated[str, AtMost(64)]
"""What a peer wants to be called; screens show less of it (peer/ui/text.py)."""
Reason = Annotated[str, Cut(400)]
Signature = Annotated[bytes, AtMost(64)]
Sealed = Annotated[bytes, AtMost(4096)]
"""A sealed announcement: as long as a record of the DHT may be."""


def reportable_loss(loss: float | None) -> float | None:
    """Returns a loss within the bounds of a message: a model that has diverged can still be reported."""
    return None if loss is None or math.isnan(loss) else min(max(loss, 0.0), MAX_LOSS)


def reportable_gain(gain: float) -> float | None:
    """A gain as it may be told; None where it is no number."""
    return None if math.isnan(gain) else min(max(gain, -MAX_GAIN), MAX_GAIN)


LEAST_COMPARED = 5
"""Contributions of a round that can be compared with each other (protocol/round/judging.py)."""
