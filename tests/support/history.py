"""Parts that unit tests of history share with others."""

from __future__ import annotations

from protocol.ledger.history import History, read
from protocol.round.member import Member
from protocol.round.member_events import LogCame, Send
from protocol.wire import encoding
from protocol.wire.commit import Commit, Record
from protocol.wire.session import LogRequest
from tests.support import tiny

KEYS = tiny.OPERATORS[:4]
A, B, C, D = NAMES = tuple(key.peer_id for key in KEYS)
FOUR = tiny.manifest(operators=NAMES, quorum=4)


def commit(before: Commit | None, time: float = 0.0, **changes: object) -> Commit:
    """The next one."""
    kept = {"members": before.members, "decrees": before.decrees} if before else {}
    return tiny.commit(FOUR, before, time=time, **{**kept, **changes})


def by(one: Commit, *keys: int) -> Record:
    return tiny.record(one, *(KEYS[key] for key in keys or (0, 1, 2)))


def gap_in_the_log() -> Member:
    """A member that is told a later part of the log than it asked for."""
    member, log = Member(FOUR, "me"), long_log(4)
    history = History(FOUR)
    for one in log[:2]:
        history.learn(by(one))
    raws = [encoding.encode_record(by(one)) for one in log[2:]]
    asked = member.handle(LogCame(tuple(read(FOUR, history.tip, raws, A))), 0.0)
    assert asked == [Send(LogRequest(after=-1))]
    return member


def long_log(rounds: int, **changes: object) -> list[Commit]:
    log = [commit(None)]
    while len(log) < rounds:
        log.append(commit(log[-1], float(len(log)), **changes))
    return log
