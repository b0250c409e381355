"""Messages on the wire: round trips, strictness at the edge, seals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import LocalError
from protocol.identity import Identity
from protocol.ledger.part_lists import root_of, share_of
from protocol.wire import encoding, framing
from protocol.wire.announcement import Announcement, ChainReport, Dialled, DialMe, Lookup, Means, Roster, RosterRequest
from protocol.wire.ballot import Accept, Pledge, Prepare, Promise, Reject, Vote
from protocol.wire.claims import Evaluation, Mark, Score
from protocol.wire.commit import DOMAIN, Aggregate, Commit, Record, is_decided
from protocol.wire.decree import Decree, Enacted, Limits, Motion, Motions, Schedule
from protocol.wire.encoding import (
    Message,
    MessageError,
    decode,
    decode_any,
    decode_record,
    encode,
    encode_record,
    expect,
    seal,
    unseal,
    unseal_announcement,
)
from protocol.wire.plan import Work
from protocol.wire.schema import plain
from protocol.wire.session import (
    Aggregated,
    Announced,
    Attest,
    ChainFailure,
    ChainReconfig,
    Finished,
    Heartbeat,
    Hello,
    Leave,
    LogRequest,
    NotAdmitted,
    Offer,
    Offered,
    TakeSeat,
    TimeUp,
    Withdraw,
)
from tests.support import tiny
from tests.support.messages import BOARD, CHAIN, COMMIT, FORMING, FULL, JOINED, PART, PLAN

ME, OTHER = Identity(b"m" * 32), Identity(b"o" * 32)
SCHEDULE = Schedule(
    rounds=9, total_steps=450, limits=Limits(probation=4, share=0.5, range_sessions=6, range_share=0.25)
)
DECREE = Decree(run="r" * 64, number=1, action="ban", subject="p", reason="noise")
SCORE = Score(peer="p", round=1, marks=(Mark(replica=0, assigned=-0.5, other=0.25),), signature=b"s")
EVALUATION = Evaluation(peer="p", round=1, sequences=8, loss=2.5, bits_per_byte=1.25, signature=b"s", sample="a ⇒ b")
AGGREGATE = Aggregate(shard="embed", digest="0" * 64, size=9)
LISTS = ((PART,), (dataclasses.replace(PART, digest="b" * 64),), (dataclasses.replace(PART, shard="head"),))
REPORT = ChainReport(
    seconds=0.9, busy_s=0.5, wait_forward_s=0.1, wait_backward_s=0.1, forward_link_s=0.2, backward_link_s=0.0,
    forward_bytes=70, backward_bytes=0, depth=8, queued=2, gradients=Means(rms=0.5, largest=2.0, sampled=1, frames=8,
    refused=0),
)  # fmt: skip
SAMPLES: list[Message] = [
    Announcement(run="r", peer="p", addresses=("/ip4/1.2.3.4/tcp/1",), loss=1.0, chain=REPORT, name="Ada"),
    Offer(round=1, replica=0, parts=(PART,), tokens=64, steps=4, loss=None),
    Offered(round=1, shares=(share_of("p", (PART,)),)),
    Withdraw(round=1, reason="no"),
    Leave(),
    Attest(round=1, digests={"embed": "0" * 64, "block.0": "1" * 64}),
    Heartbeat(phase="training", round=1, step=2, loss=3.0),
    Hello(run="r", version=1),
    Hello(run="r", version=1, joining=JOINED),
    LogRequest(after=-1),
    Finished(round=3),
    Prepare(round=2, ballot=4),
    Promise(round=2),
    Promise(round=2, ballot=4, accepted=1, commit=COMMIT),
    Promise(round=2, ballot=4, accepted=1, commit=COMMIT, pledged="d" * 64, pledges={"p": b"s"}),
    Accept(round=2, ballot=4, commit=dataclasses.replace(COMMIT, plan=None)),
    Accept(round=2, ballot=4, commit=dataclasses.replace(COMMIT, plan=None), certified=4, pledges={"p": b"s"}),
    Vote(round=2, ballot=4, digest=COMMIT.digest, signature=b"s"),
    Reject(round=2, ballot=4, promised=5),
    Pledge(round=2, ballot=4, digest="e" * 64, signature=b"s"),
    ChainFailure(round=1, replica=0, generation=2, peer="p", reason="silent"),
    ChainReconfig(round=1, replica=0, generation=3, peers=("a", "b"), steps=0, reason="p is lost"),
    Announced(sealed=b"s"),
    Lookup(peers=("p",), sample=3),
    RosterRequest(position=-1),
    DialMe(ports=(4001, 40213)),
    Dialled(host="203.0.113.9", ports=(4001,)),
    Roster(announcements=(b"a", b"b"), gone=("p",), position=2, more=True, anew=True),
    Aggregated(round=1, aggregates=(AGGREGATE,)),
    DECREE,
    Motion(sealed=b"s"),
    Motions(number=1, wanted=2, schedule=SCHEDULE, board=BOARD, signed=("p",), newest=DECREE),
    Decree(run="r" * 64, number=2, action="appoint", operators=BOARD.operators[:1]),
    Decree(run="r" * 64, number=3, action="dismiss", subject="p"),
    Decree(run="r" * 64, number=4, action="quorum", quorum=4),
    NotAdmitted(reason="it is banned"),
    EVALUATION,
    SCORE,
    NotAdmitted(reason="it is invited", waits=True),
    TimeUp(round=2),
    TakeSeat(round=2, replica=4, seconds=12.5),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_round_trip_gives_the_same_message(message: Message) -> None:
    assert decode(encode(message), "p") == message
    assert unseal(seal(ME, message)) == (ME.peer_id, message)


def test_a_record_comes_back_and_a_changed_one_does_not() -> None:
    record = tiny.record(COMMIT, ME, OTHER, ballot=3)
    raw = encode_record(record)
    assert decode_record(raw, "p") == decode_any(raw, "p") == record
    assert decode_any(encode(SAMPLES[0]), "p") == SAMPLES[0]
    for changed in (
        dataclasses.replace(record, ballot=4),
        dataclasses.replace(record, commit=dataclasses.replace(COMMIT, time=2.0)),
        dataclasses.replace(record, votes={ME.peer_id: record.votes[OTHER.peer_id]}),
    ):
        with pytest.raises(MessageError, match="it was dropped"):
            decode_record(encode_record(changed), "p")
    many = {**framing.unpack_message(raw), "v": {f"{i}": b"" for i in range(17)}}
    with pytest.raises(MessageError, match="votes: has 17 entries; at most 16; it was dropped"):
        decode_record(framing.pack_message(many), "p")


def test_a_record_that_nobody_could_read_is_not_made() -> None:
    for commit in (
        dataclasses.replace(COMMIT, members=("m",) * 70_000),
        dataclasses.replace(
            COMMIT, digests={f"{i}": "d" * 64 for i in range(65_000)}, members=("m",) * 65_000, time=math.inf
        ),
        dataclasses.replace(COMMIT, leader="l" * framing.MAX_MESSAGE),
    ):
        with pytest.raises(LocalError, match=r"nobody could read .*; it was not written, tell the operator"):
            encode_record(Record(commit=commit, ballot=0, votes={}))


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_never_gives_another_record(position: int, bit: int) -> None:
    record = tiny.record(COMMIT, ME)
    raw = bytearray(encode_record(record))
    raw[position % len(raw)] ^= 1 << bit
    try:
        found = decode_record(bytes(raw), "p")
    except MessageError:
        return
    assert found.commit == record.commit
    assert set(found.votes.items()) <= set(record.votes.items())


def test_votes_are_counted_among_the_members() -> None:
    record = tiny.record(COMMIT, *tiny.OPERATORS[:3])
    members = [o.peer_id for o in tiny.OPERATORS]
    assert is_decided(record, tuple(members[:4]))
    assert not is_decided(record, tuple(members[1:5]))
    assert not is_decided(record, tuple(members))


def test_every_type_has_a_sample() -> None:
    assert {type(m) for m in SAMPLES} == set(encoding.TYPES.values())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_unknown_fields_are_ignored_and_missing_ones_refused(message: Message) -> None:
    data = framing.unpack_message(encode(message))
    assert decode(framing.pack_message({**data, "newer": [1, {"x": 2}]}), "p") == message
    required = [
        f.name for f in dataclasses.fields(message)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    for name in required:
        with pytest.raises(MessageError, match=f"{name}: missing field; it was dropped"):
            decode(framing.pack_message({k: v for k, v in data.items() if k != name}), "p")


@pytest.mark.parametrize(
    "data",
    [
        None, 3, [], "offer", {}, {"t": "nonsense"}, {"t": 3}, {"t": ["offer"]}, {"t": {}}, {"t": "ask", "after": "1"},
        {"t": "attest", "round": 1, "digests": {"a\nb\x1b[2J": 3}},
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_on_one_line_that_names_the_peer(data: Any) -> None:
    with pytest.raises(MessageError) as caught:
        decode(framing.pack_message(data), "12D3KooWabcdefgh")
    assert caught.value.peer == "12D3KooWabcdefgh"
    assert str(caught.value).startswith("message from abcdefgh: ")
    assert str(caught.value).isprintable()


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_seal_never_passes_for_its_signer(position: int, flip: int) -> None:
    raw = bytearray(seal(ME, SAMPLES[1]))
    raw[position % len(raw)] ^= flip
    with pytest.raises(MessageError):
        unseal(bytes(raw))


def test_a_seal_of_somebody_else_is_refused() -> None:
    data = framing.unpack_message(seal(ME, LogRequest(after=0)))
    with pytest.raises(MessageError, match="the signature is wrong"):
        unseal(framing.pack_message({**data, "p": OTHER.peer_id}))
    with pytest.raises(MessageError, match="the signature is wrong"):
        unseal(framing.pack_message({**data, "b": encode(LogRequest(after=1))}))


@pytest.mark.parametrize(
    "change", [{"p": 1}, {"p": "x\ny"}, {"b": "text"}, {"s": None}, {"s": b""}, {"p": "12D3KooWx"}]
)
def test_broken_envelopes_are_refused(change: dict[str, Any]) -> None:
    data = framing.unpack_message(seal(ME, LogRequest(after=0)))
    with pytest.raises(MessageError) as caught:
        unseal(framing.pack_message({**data, **change}))
    assert str(caught.value).isprintable()


def test_only_a_peer_itself_announces_itself_and_for_this_run() -> None:
    good = Announcement(run="r", peer=ME.peer_id)
    assert unseal_announcement(seal(ME, good), ME.peer_id, "r") == good
    assert unseal_announcement(seal(ME, good), ME.peer_id, "other run") is None
    assert unseal_announcement(seal(ME, good), OTHER.peer_id, "r") is None
    assert unseal_announcement(seal(OTHER, good), OTHER.peer_id, "r") is None
    assert unseal_announcement(seal(ME, LogRequest(after=0)), ME.peer_id, "r") is None
    assert unseal_announcement(b"junk", ME.peer_id, "r") is None


def test_reports_of_a_chain_are_small_whatever_they_say() -> None:
    means = Means(rms=1e39, largest=1e-300, sampled=2**53, frames=2**53, refused=2**53)
    largest = ChainReport(
        seconds=1e9, busy_s=1e9, wait_forward_s=1e9, wait_backward_s=1e9, forward_link_s=1e9, backward_link_s=1e9,
        forward_bytes=2**63, backward_bytes=2**63, depth=2**53, queued=2**53, activations=means, gradients=means,
    )  # fmt: skip
    announced = Announcement(run="r", peer=ME.peer_id, chain=largest)
    assert unseal_announcement(seal(ME, announced), ME.peer_id, "r") == announced
    with_none = seal(ME, dataclasses.replace(announced, chain=None))
    assert len(seal(ME, announced)) - len(with_none) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": -1.0},
        {"busy_s": math.inf},
        {"depth": "four"},
        {"queued": -1},
        {"activations": [1.0]},
        {"activations": [1.0, -1.0, 1, 1, 1]},
        {"gradients": [1.0, math.nan, 1, 1, 1]},
    ],
)
def test_impossible_reports_of_a_chain_are_refused(change: dict[str, Any]) -> None:
    good = plain(Announcement(run="r", peer=ME.peer_id, chain=REPORT))
    for chain, taken in ((good["chain"], True), (good["chain"] | change, False)):
        body = framing.pack_message({"t": "announcement", **good, "chain": chain})
        raw = framing.pack_message({"p": ME.peer_id, "b": body, "s": ME.sign(DOMAIN + body)})
        assert (unseal_announcement(raw, ME.peer_id, "r") is not None) == taken


def test_equal_messages_have_equal_bytes_whatever_the_order_of_their_maps() -> None:
    assert encode(Attest(round=1, digests={"a": "x", "b": "y"})) == encode(
        Attest(round=1, digests={"b": "y", "a": "x"})
    )


def test_the_digest_of_a_commit_covers_every_field() -> None:
    changes: dict[str, Any] = {
        "run": "x", "round": 3, "parent": "q", "time": 2.0, "contributions": (), "left_out": (), "diverged": (),
        "digests": {}, "plan": None, "leader": "x", "members": ("x",), "decrees": 2,
        "decree": Enacted(decree=DECREE, signatures={}), "evaluations": (EVALUATION,), "scores": (SCORE,), "joined": (),
        "schedule": SCHEDULE, "board": None, "idle": 1, "aggregates": (AGGREGATE,),
    }  # fmt: skip
    assert set(changes) == {f.name for f in dataclasses.fields(Commit)}
    digests = {dataclasses.replace(COMMIT, **{k: v}).digest for k, v in changes.items()}
    assert len(digests | {COMMIT.digest}) == len(changes) + 1


def test_payloads_have_weights_by_tokens_in_commit_order() -> None:
    lists = {root_of(parts): parts for parts in LISTS}
    embed = COMMIT.payloads("embed", lists)
    assert [(w, p.digest[0], peer) for w, p, peer in embed] == [(0.75, "a", "a"), (0.25, "b", "b")]
    assert [(w, peer) for w, _, peer in COMMIT.payloads("head", lists)] == [(0.25, "c")]
    assert COMMIT.payloads("block.0", lists) == ()
    assert dataclasses.replace(COMMIT, contributions=()).payloads("embed", {}) == ()


def test_a_commit_includes_exactly_the_parts_of_an_offer() -> None:
    assert COMMIT.includes("a", root_of((PART,)))
    assert not COMMIT.includes("b", root_of((PART,)))
    assert not COMMIT.includes("a", root_of((dataclasses.replace(PART, norm=2.0),)))
    assert not COMMIT.includes("a", root_of(()))


def test_a_plan_knows_the_replica_of_a_peer() -> None:
    plan = dataclasses.replace(PLAN, replicas=(dataclasses.replace(CHAIN, number=7), FULL))
    assert [plan.replica_of(p) for p in "abcdex"] == [0, 7, 7, None, None, None]
    assert [plan.replica(n).peers for n in (0, 7)] == [("a",), ("b", "c")]
    assert plan.find(1) is None
    with pytest.raises(KeyError):
        plan.replica(1)


def test_a_plan_knows_what_a_peer_trains_and_what_it_holds() -> None:
    assert (PLAN.stage_of("c"), PLAN.held_by("c")) == (CHAIN.stages[1], (CHAIN.stages[1],))
    assert (PLAN.stage_of("e"), PLAN.held_by("e")) == (None, (FORMING.stages[0],))
    assert (PLAN.stage_of("d"), PLAN.held_by("d")) == (None, ())


def test_a_replica_is_replaced_under_its_number() -> None:
    moved = dataclasses.replace(FULL, number=1)
    assert PLAN.replaced(moved).replicas == (FULL, moved)
    assert not FULL.is_like(CHAIN)
    assert FULL.is_like(dataclasses.replace(FULL, number=9, work=Work(), following=None))
    assert not FULL.is_like(dataclasses.replace(FULL, stages=CHAIN.stages))


@pytest.mark.parametrize("change", [{"slot": -1}, {"steps": 0}, {"micro_batches": 0}])
def test_nobody_is_given_nothing_to_do(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Work(**change)


def test_expect() -> None:
    assert expect(LogRequest, LogRequest(after=1), "peer") == LogRequest(after=1)
    with pytest.raises(MessageError, match="expected LogRequest, got Heartbeat"):
        expect(LogRequest, SAMPLES[6], "peer")


def test_what_a_stranger_wrote_is_shown_short_and_printable() -> None:
    for key in ("a\nb", "\x1b[2J", "k" * 1_000_000):
        raw = framing.pack_message({"t": "attest", "round": 1, "digests": {key: 1}})
        with pytest.raises(MessageError) as caught:
            decode(raw, Identity(b"l" * 32).peer_id)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
