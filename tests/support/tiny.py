"""A run so small that its numbers fit on a page, for tests of the pure core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from protocol.codec import blob_hash
from protocol.identity import Identity
from protocol.ledger import part_lists
from protocol.planning import memory, partition
from protocol.planning.budget import Budget
from protocol.round import leader_events
from protocol.round.judging import JudgingJob, Verdict
from protocol.round.leader import Leader
from protocol.run.layout import ModelSpec
from protocol.run.manifest import DataSpec, Manifest, TimingSpec, TokenizerSpec, TrainSpec
from protocol.wire.commit import Commit, Contribution, Record, Share, body_of
from protocol.wire.plan import ReplicaSpec, StageSpec

OPERATORS = tuple(Identity(bytes([0, i] * 16)) for i in range(7))
OPERATOR = OPERATORS[0]
LAYERS = 4


def manifest(**changes: Any) -> Manifest:
    """Four layers of width 8; deadlines of a minute. `changes` replace top-level fields."""
    values: dict[str, Any] = {
        "name": "tiny",
        "seed": 1,
        "rounds": 5,
        "start_peers": 2,
        "operators": (OPERATOR.peer_id,),
        "model": ModelSpec(vocab_size=16, d_model=8, n_layers=LAYERS, n_heads=2, d_ff=16, context=8),
        "tokenizer": TokenizerSpec(digest="0" * 64),
        "train": TrainSpec(
            inner_steps=4, micro_batches=2, rows=1, sequence=8, lr=1e-3, warmup_steps=0, total_steps=100
        ),
        "data": DataSpec(corpus="0" * 64),
        "timing": TimingSpec(round_deadline=60.0, heartbeat=3.0, gone_after=12.0),
    }
    return Manifest(**{**values, **changes})


def replica(number: int, *peers: str, **changes: Any) -> ReplicaSpec:
    """A full replica, or a chain with as even ranges as there are."""
    edges = [LAYERS * i // len(peers) for i in range(len(peers) + 1)]
    stages = (StageSpec(peer=p, first=a, last=b) for p, a, b in zip(peers, edges, edges[1:], strict=False))
    return ReplicaSpec(number=number, stages=tuple(stages), **changes)


def contribution(number: int, *peers: str, **changes: Any) -> Contribution:
    """Of these makers; each has a payload of one byte."""
    shares = tuple(Share(peer=p, root="0" * 64, size=1, norm=1.0, listed=1) for p in peers)
    return Contribution(**{"replica": number, "tokens": 64, "steps": 4, "loss": None, "shares": shares, **changes})


def commit(of: Manifest | None = None, before: Commit | None = None, **changes: Any) -> Commit:
    """The one after `before`, by the first operator; it brings nothing but `changes`."""
    of = of or manifest()
    values: dict[str, Any] = {
        "run": of.run_id,
        "round": 0 if before is None else before.round + 1,
        "parent": of.run_id if before is None else before.digest,
        "time": 0.0,
        **dict.fromkeys(("contributions", "left_out", "diverged"), ()),
        "digests": {},
        "plan": None,
        "leader": of.operators[0],
        "members": of.first_members,
    }
    return Commit(**{**values, **changes})


def record(commit: Commit, *voters: Identity, ballot: int = 0) -> Record:
    """A record with the votes of `voters` (default: OPERATOR's)."""
    body = body_of(commit, ballot)
    votes = {voter.peer_id: voter.sign(body) for voter in voters or (OPERATOR,)}
    return Record(commit=commit, ballot=ballot, votes=votes)


def full_memory(m: Manifest) -> int:
    """Bytes that a full replica needs."""
    return memory.stage_memory(m, 0, m.model.n_layers)


def third_memory(m: Manifest) -> int:
    """The least memory of which three peers make a chain; two of them do not."""
    low, high = 0, full_memory(m)
    while high - low > 1:
        middle = (low + high) // 2
        if partition.split(m, rooms([middle] * 3)) is None:
            low = middle
        else:
            high = middle
    assert partition.split(m, rooms([high] * 2)) is None
    return high


def rooms(memory: Iterable[int]) -> list[Budget]:
    """Processors with these bytes of memory."""
    return [Budget(size) for size in memory]


def digest(text: str) -> str:
    """A blob's name, of a blob that says `text`."""
    return blob_hash.name_of(text.encode())


def all_count(case: JudgingJob) -> list[Verdict]:
    """A verdict: whole, and everybody."""
    return [Verdict(1.0)] * len(case.contributions)


def handle(
    leader: Leader, event: leader_events.Event, now: float, judge: Callable[[JudgingJob], list[Verdict]] = all_count
) -> list[leader_events.Effect]:
    """The machine's effects upon an event; plans are made at once, and offers judged at once."""
    effects: list[leader_events.Effect] = []
    for effect in leader.handle(event, now):
        if isinstance(effect, leader_events.MakePlan):
            answer = leader_events.Planned(effect.question, effect.question.answer())
            effects += handle(leader, answer, now, judge)
        elif isinstance(effect, leader_events.Judge):
            verdict = leader_events.JudgingDone(effect.case, tuple(judge(effect.case)))
            effects += handle(leader, verdict, now, judge)
        else:
            effects.append(effect)
    return effects


def names(effect: object) -> tuple[str, ...]:
    """What the leader's machine waits for after this effect: the name of a payload, or of a list of parts."""
    match effect:
        case leader_events.Fetch(_, part):
            return (part.digest,)
        case leader_events.StoreList(parts):
            return (part_lists.root_of(parts),)
    return ()
