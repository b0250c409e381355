"""Names on the wire: protocols of streams and calls, keys of the DHT."""

from __future__ import annotations

SESSION = "potluck/session/1"
"""Stream, peer to bootstrap node: Hello first, then messages both ways, and records to the peer."""

LOG = "potluck/log/1"
"""Call: LogRequest -> msgpack list of records after that round, oldest first, as many as fit in LOG_REPLY bytes."""

QUORUM = "potluck/quorum/1"
"""Stream, one way, between operators' nodes: votes, signs of life, records."""

BLOB = "potluck/blob/1"
"""Stream: a blob's ranges, or what has a name; see peer/net/blobs/serving.py."""

STATES = "potluck/states/1"
"""Call: nothing -> States (protocol/wire/calls.py), which the called peer serves as blobs."""

HANDOVER = "potluck/handover/1"
"""Call between peers: Handover -> HandoverAnswer (protocol/wire/calls.py)."""

MOMENTS = "potluck/moments/1"
"""Call between peers: MomentsRequest -> MomentsAnswer; the blob is that of peer/training/moments.py."""

PIPE = "potluck/pipe/1"
"""Stream between neighbouring stages of a chain, forward and backward."""

PING = "potluck/ping/1"
"""Stream: empty frames, each answered with the place of who is called; see peer/net/latency.py."""

BANDWIDTH = "potluck/bandwidth/1"
"""Stream, peer to bootstrap node: bytes both ways, as many as the peer asks for; see peer/net/bandwidth.py."""

DIAL_BACK = "potluck/dial-back/1"
"""Call: DialMe -> Dialled (protocol/wire/announcement.py)."""

ROSTER = "potluck/roster/1"
"""Call to a bootstrap node: Lookup or RosterRequest -> Roster of at most ROSTER_REPLY bytes."""

RELAY = "potluck/relay/1"
"""Stream to a relay: the peer that is meant, then what is passed on to it (protocol/wire/relaying.py)."""

RELAYED = "potluck/relayed/1"
"""Stream from a relay: what somebody else sends through it."""

DECREES = "potluck/decrees/1"
"""Call to a bootstrap node: Motion -> Motions (protocol/wire/decree.py)."""

LOG_REPLY = 1024 * 1024
ROSTER_REPLY = 512 * 1024
MANIFEST_NAME = "manifest"
TOKENIZER_NAME = "tokenizer"
CORPUS_NAME = "corpus"
"""What a bootstrap node serves by name: the run's manifest, the file of the run's tokenizer, and the index of its
corpus, if it serves that."""
MAX_TOKENIZER = 64 * 1024 * 1024


def announcements_key(run: str) -> str:
    """The DHT key of a run's announcements; subkeys are peer ids, values sealed Announcements."""
    return f"potluck/1/{run}/peers"
