"""Invitations: what lets a stranger into a closed run, and what does not (protocol/ledger/access.py)."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from bootstrap.sessions import TOO_MANY, WAITS, AdmissionControl
from peer.cli import log
from peer.cli.decrees import seconds_in
from peer.net.base import Clock
from peer.node.open_run import parse_run
from peer.ui import monitor
from peer.ui.lines import Lines
from protocol.errors import LocalError, UsageError
from protocol.ledger import access, capacity, history
from protocol.ledger.access import ASKED_SECONDS, MAX_WAITING, Access, PendingInvitations
from protocol.round import fairness
from protocol.round.leader import Leader
from protocol.round.leader_events import DecreeSigned, Gone, JoinRequest, Lead, Propose
from protocol.run.manifest import AdmissionSpec
from protocol.wire import bounds, encoding, framing
from protocol.wire.commit import Commit, Record
from protocol.wire.decree import ADMIT, BAN, LONGEST_NOTE, MAX_JOINED, OPEN, Invitation, Joined
from protocol.wire.schema import build, packed
from protocol.wire.session import Hello, NotAdmitted
from tests.fuzz.messages import Maker
from tests.support import leader as leading
from tests.support import tiny
from tests.support.access import decree, signed
from tests.support.invitations import ANOTHER, CLOSED, EXPIRES, FRIENDS, OPERATOR, OUTSIDER, ticket
from tests.support.rules import of_access


def commit_of(
    *joined: Joined, head: Commit | None = None, time: float = 5.0, wish: Any = None, decrees: int = 0
) -> Commit:
    return tiny.commit(CLOSED, head, time=time, decrees=decrees, decree=wish, joined=joined)


def unlawful(*joined: Joined, time: float = 5.0) -> str | None:
    commit = commit_of(*joined, time=time)
    record = Record(commit=commit, ballot=0, votes=dict.fromkeys(CLOSED.first_members, b""))
    said = access.why_unlawful(CLOSED, None, commit)
    assert history.why_not_next(CLOSED, None, record) == said, "every reader of the log looks at it"
    return said


def told_by_verify(*commits: Commit) -> list[str]:
    """What voters and `log verify` say of the commits of a log."""
    known, found = access.of(CLOSED), list[str]()
    for commit in commits:
        found += of_access(CLOSED, known, commit)
        known = known.after(commit.decree, commit.joined)
    assert known == access.of(CLOSED, commits)
    return found


# --- the invitation itself


def test_a_line_brings_it_and_what_it_shows_lets_one_peer_in() -> None:
    made = ticket(reason="for Ada's friends")
    line = f"/ip4/127.0.0.1/tcp/4001/p2p/{OPERATOR.peer_id}#{CLOSED.run_id}#{made.text()}"
    found = parse_run(line)
    assert found.ticket == made
    assert found.bootstrap == (f"/ip4/127.0.0.1/tcp/4001/p2p/{OPERATOR.peer_id}",)
    assert made.seed.hex() not in repr(made)
    assert repr(made.seed) not in repr(made)
    assert unlawful(made.joined(FRIENDS[0])) is None
    assert len(made.text()) < 300
    longest = ticket(reason="\U0010ffff" * LONGEST_NOTE, count=1000)
    assert access.read_ticket(longest.text(), CLOSED.run_id) == longest


@pytest.mark.parametrize(
    "change", [lambda t: t[:-9], lambda t: t + "AAAA", lambda t: "!" + t, lambda t: t * 9, lambda t: "AA"]
)
def test_a_line_that_was_cut_is_refused_in_one_line(change: Any) -> None:
    line = f"/ip4/127.0.0.1/tcp/4001/p2p/{OPERATOR.peer_id}#{CLOSED.run_id}#"
    with pytest.raises(UsageError, match="the invitation after the run id is cut off or changed") as caught:
        parse_run(line + change(ticket().text()))
    assert "\n" not in str(caught.value)


def forged(made: Joined, **changes: Any) -> Joined:
    return dataclasses.replace(made, invitation=dataclasses.replace(made.invitation, **changes))


def test_only_what_an_operator_signed_for_this_run_lets_in_and_only_whom_it_names() -> None:
    made = ticket().joined(FRIENDS[0])
    name = f"lets in {FRIENDS[0][-8:]}, and "
    assert unlawful(forged(made, count=3)) == name + "its invitation is not what the operator signed"
    assert unlawful(forged(made, expires=EXPIRES + 1)) == name + "its invitation is not what the operator signed"
    assert unlawful(forged(made, reason="x")) == name + "its invitation is not what the operator signed"
    assert unlawful(forged(made, key=FRIENDS[1])) == name + "its invitation is not what the operator signed"
    assert unlawful(dataclasses.replace(made, operator=ANOTHER.peer_id)) == (
        name + "its invitation is not what the operator signed"
    )
    own = ticket(operator=OUTSIDER).joined(FRIENDS[0])
    assert unlawful(own) == name + "its invitation is of nobody who operates the run"
    elsewhere = ticket(run="f" * 64).joined(FRIENDS[0])
    assert unlawful(elsewhere) == name + "its invitation is of another run"
    assert unlawful(forged(elsewhere, run=CLOSED.run_id)) == name + "its invitation is not what the operator signed"
    overheard = dataclasses.replace(made, peer=FRIENDS[1])
    assert unlawful(overheard) == f"lets in {FRIENDS[1][-8:]}, and it does not hold the key of its invitation"
    assert unlawful(made, overheard) is not None, "each of them is looked at"


def test_it_holds_up_to_its_last_second_by_the_commit_s_own_time() -> None:
    made = ticket().joined(FRIENDS[0])
    assert unlawful(made, time=EXPIRES) is None
    assert unlawful(made, time=EXPIRES + 0.5) == f"lets in {FRIENDS[0][-8:]}, and its invitation has expired"
    waited = commit_of(made, forged(ticket(seed=51).joined(FRIENDS[1]), expires=EXPIRES + 9))
    late = access.dated(waited, EXPIRES + 1.0)
    assert (late.time, [joined.peer for joined in late.joined]) == (EXPIRES + 1.0, [FRIENDS[1]])


# --- what the log says


def test_it_is_counted_from_the_log_across_rounds_and_operators() -> None:
    made, more = ticket(count=2), ticket(count=1, operator=ANOTHER, seed=51)
    first = commit_of(made.joined(FRIENDS[0]))
    second = commit_of(made.joined(FRIENDS[1]), more.joined(FRIENDS[2]), head=first)
    assert told_by_verify(first, second) == []
    known = access.of(CLOSED, (first, second))
    assert [known.why_not(peer) is None for peer in FRIENDS[:4]] == [True, True, True, False]
    third = commit_of(made.joined(FRIENDS[3]), head=second)
    assert told_by_verify(first, second, third) == [
        f"lets in {FRIENDS[3][-8:]}, and its invitation is used up, by 2 of 2"
    ]
    at_once = commit_of(*(made.joined(peer) for peer in FRIENDS[:3]))
    assert told_by_verify(at_once) == [f"lets in {FRIENDS[2][-8:]}, and its invitation is used up, by 2 of 2"]


def test_nobody_comes_in_twice_or_without_need() -> None:
    made = ticket().joined(FRIENDS[0])
    again = f"lets in {FRIENDS[0][-8:]}, and it may take part already"
    assert told_by_verify(commit_of(made, made)) == [again]
    first = commit_of(made)
    assert told_by_verify(first, commit_of(made, head=first)) == [again]
    opened = signed(decree(OPEN, manifest=CLOSED), OPERATOR, ANOTHER)
    assert told_by_verify(commit_of(made, wish=opened, decrees=1)) == [again]


def after(*wishes: Any, joined: tuple[Joined, ...] = ()) -> Access:
    found = access.of(CLOSED).after(None, joined)
    for number, wish in enumerate(wishes):
        found = found.after(signed(decree(*wish, number=number, manifest=CLOSED)))
    return found


def test_a_ban_of_the_peer_of_the_invitation_or_of_its_operator_ends_it() -> None:
    made = ticket().joined(FRIENDS[0])
    assert after().why_not_join(made) is None
    assert after((BAN, FRIENDS[0])).why_not_join(made) == "it is banned"
    assert after((BAN, made.invitation.key)).why_not_join(made) == "its invitation was ended"
    assert after((BAN, OPERATOR.peer_id)).why_not_join(made) == "its invitation was ended"
    assert after((BAN, made.invitation.key), (ADMIT, made.invitation.key)).why_not_join(made) is None
    inside = after((BAN, made.invitation.key), joined=(made,))
    assert inside.why_not(FRIENDS[0]) is None, "who is in stays"
    thrown_out = after((BAN, FRIENDS[0]), joined=(made,))
    assert thrown_out.why_not(FRIENDS[0]) == thrown_out.why_not_join(made) == "it is banned"
    enacted = signed(decree(BAN, made.invitation.key, manifest=CLOSED), OPERATOR, ANOTHER)
    ended = commit_of(made, wish=enacted, decrees=1)
    assert told_by_verify(ended) == [f"lets in {FRIENDS[0][-8:]}, and its invitation was ended"], "in the same commit"


def test_whoever_reads_the_log_is_told() -> None:
    made = ticket(reason="friends\x1b[2J").joined(FRIENDS[0])
    record = Record(commit=commit_of(made), ballot=0, votes={})
    (event,) = monitor.round_events(record)
    line = Lines().of(event)[-1]
    assert line.endswith(f"{FRIENDS[0][-8:]} takes part, invited by operator {OPERATOR.peer_id[-8:]}: friends [2J")
    shown = [line for line in log.round_lines(record, None, 5) if "invited" in line]
    assert len(shown) == 1
    assert FRIENDS[0][-8:] in shown[0]


# --- how long it is


def test_the_longest_have_their_place_in_every_commit_and_hello() -> None:
    longest = Joined(
        invitation=Invitation(
            run="f" * 64, key="k" * 64, expires=2**53, count=1000, reason="\U0010ffff" * LONGEST_NOTE
        ),
        operator="o" * 64, signature=bytes(64), peer="p" * 64, proof=bytes(64),
    )  # fmt: skip
    with_them, without = (len(framing.pack_message(packed(commit_of(*many)))) for many in ((longest,) * MAX_JOINED, ()))
    assert with_them - without <= capacity.cost(capacity.longest(Joined)).times(MAX_JOINED).size
    hello = encoding.encode(Hello(run="f" * 64, version=2**53, joining=longest))
    assert len(hello) <= 2048
    with pytest.raises(LocalError, match="nobody could read"):
        encoding.encode_record(Record(commit=commit_of(*(longest,) * (MAX_JOINED + 1)), ballot=0, votes={}))


# --- who waits


def test_those_who_wait_come_in_turn_and_nobody_fills_the_queue() -> None:
    guests, known = PendingInvitations(), access.of(CLOSED)
    made = ticket(count=2)
    for peer in FRIENDS[:3]:
        guests.add(made.joined(peer), 0.0)
    assert [joined.peer for joined in guests.next(known, 0.0)] == FRIENDS[:2], "no more of one than it lets in"
    assert guests.has_place(made.joined(FRIENDS[0]), 1.0)
    assert not guests.has_place(made.joined(FRIENDS[3]), 1.0)
    inside = known.after(None, (made.joined(FRIENDS[0]),))
    assert [joined.peer for joined in guests.next(inside, 1.0)] == [FRIENDS[1]]
    assert guests.next(known, ASKED_SECONDS + 1) == (), "who asks no more is not there any more"
    assert guests.has_place(made.joined(FRIENDS[3]), ASKED_SECONDS + 1)


def test_a_commit_lets_in_so_many_and_so_many_wait_at_most() -> None:
    guests, known, made = PendingInvitations(), access.of(CLOSED), ticket(count=1000).joined("")
    crowd = [dataclasses.replace(made, peer=f"p{i}") for i in range(MAX_WAITING + 5)]
    for joined in crowd:
        guests.add(joined, 0.0)
    taken: list[str] = []
    while news := guests.next(known, 0.0):
        assert len(news) <= MAX_JOINED
        taken += [joined.peer for joined in news]
        known = known.after(None, news)
    assert taken == [joined.peer for joined in crowd[:MAX_WAITING]]


def test_the_door_says_in_one_line_what_is_the_matter() -> None:
    heard: list[JoinRequest] = []
    leader = Leader(CLOSED, (), (), 0.0)
    clock = Clock(steady=lambda: 0.0, wall=lambda: float(EXPIRES))

    async def hand_in(event: JoinRequest) -> None:
        heard.append(event)
        leader.handle(event, 0.0)

    admission, made = AdmissionControl(leader, hand_in, clock), ticket(count=1)

    def said(peer: str, joining: Joined | None) -> NotAdmitted | None:
        return asyncio.run(admission.welcome(peer, joining))

    shown = made.joined(FRIENDS[0])
    assert said(FRIENDS[0], None) == NotAdmitted(reason="the run is closed, and it is not admitted")
    assert said(FRIENDS[1], shown) == NotAdmitted(reason="its invitation was shown by another peer")
    assert said(FRIENDS[0], forged(shown, count=9)) == NotAdmitted(
        reason="its invitation is not what the operator signed"
    )
    assert heard == []
    assert said(FRIENDS[0], shown) == NotAdmitted(reason=WAITS, waits=True)
    assert heard == [JoinRequest(shown)]
    assert said(FRIENDS[1], made.joined(FRIENDS[1])) == NotAdmitted(reason=TOO_MANY, waits=True)
    late = AdmissionControl(leader, hand_in, dataclasses.replace(clock, wall=lambda: EXPIRES + 1.0))
    assert asyncio.run(late.welcome(FRIENDS[0], shown)) == NotAdmitted(reason="its invitation has expired")
    joined = dataclasses.replace(leader.standing, access=leader.access.after(None, (shown,)))
    leader.state = dataclasses.replace(leader.state, standing=joined)
    assert said(FRIENDS[0], shown) is None
    assert said(FRIENDS[1], made.joined(FRIENDS[1])) == NotAdmitted(reason="its invitation is used up, by 1 of 1")


# --- the leader and voters


class Driver(leading.Driver):
    """A leader of a closed run, and time goes on."""

    def __init__(self, start_peers: int = 1) -> None:
        manifest = tiny.manifest(rounds=5, start_peers=start_peers, admission=AdmissionSpec(mode="listed"))
        super().__init__(dict.fromkeys(FRIENDS, leading.FULL), manifest)
        self.ticket = ticket(run=manifest.run_id, operator=tiny.OPERATOR, count=2)

    def knock(self, peer: str) -> list[Any]:
        return self.do(JoinRequest(self.ticket.joined(peer)))


def test_a_stranger_comes_into_a_run_in_which_nobody_is_and_is_planned() -> None:
    driver, friend = Driver(), FRIENDS[0]
    commit = driver.decide(driver.knock(friend))
    assert (commit.round, commit.plan, [j.peer for j in commit.joined]) == (0, None, [friend])
    assert driver.leader.access.why_not(friend) is None
    driver.ready(friend)
    commit = driver.decide(driver.attest(friend))
    assert commit.plan.peers == {friend}
    assert commit.joined == ()


def test_the_first_plan_waits_for_so_many_as_it_shall_whoever_comes_in_before() -> None:
    driver = Driver(start_peers=2)
    driver.decide(driver.knock(FRIENDS[0]))
    driver.ready(FRIENDS[0])
    driver.attest(FRIENDS[0])
    assert [e for e in driver.at(3 * leading.GONE) if isinstance(e, Propose)] == []
    assert not fairness.is_due(driver.leader, driver.now)
    commit = driver.decide(driver.knock(FRIENDS[1]))
    assert [j.peer for j in commit.joined] == [FRIENDS[1]]
    driver.ready(FRIENDS[1])
    assert not fairness.is_due(driver.leader, driver.now)
    commit = driver.decide(driver.attest(*FRIENDS[:2]))
    assert commit.plan.peers == set(FRIENDS[:2])


def test_a_decree_is_enacted_before_the_first_plan() -> None:
    driver = Driver()
    wish = decree(ADMIT, FRIENDS[0], manifest=driver.manifest)
    (signature,) = signed(wish, tiny.OPERATOR).signatures.values()
    commit = driver.decide(driver.do(DecreeSigned(tiny.OPERATOR.peer_id, wish, signature)))
    assert (commit.round, commit.plan, commit.decrees) == (0, None, 1)
    assert driver.leader.access.why_not(FRIENDS[0]) is None


def test_a_node_that_leads_later_knows_who_asked_it() -> None:
    driver = Driver()
    driver.do(Lead(False))
    assert driver.knock(FRIENDS[0]) == []
    commit = driver.decide(driver.do(Lead(True)))
    assert [j.peer for j in commit.joined] == [FRIENDS[0]]


def test_a_leader_that_ends_rounds_for_newcomers_alone_is_doubted_where_it_is_too_soon() -> None:
    driver = Driver()
    driver.decide(driver.knock(FRIENDS[0]))
    driver.ready(FRIENDS[0])
    driver.decide(driver.attest(FRIENDS[0]))
    driver.do(Gone(FRIENDS[0]))
    driver.knock(FRIENDS[1])
    (proposal,) = [e for e in driver.at(leading.GONE) if isinstance(e, Propose)]
    assert proposal.commit.joined
    early, later = (
        fairness.view_of(driver.leader, proposal.commit.time, waited, True) for waited in (1.0, leading.GONE)
    )
    assert fairness.doubt_in(later, proposal.commit) is None
    found = fairness.doubt_in(early, proposal.commit)
    assert found.reason == "ends a round for newcomers alone, before anybody could bring work"


def test_nothing_that_strangers_make_up_lets_anybody_in_or_is_kept() -> None:
    heard: list[JoinRequest] = []

    async def hand_in(event: JoinRequest) -> None:
        heard.append(event)

    clock = Clock(steady=lambda: 0.0, wall=lambda: 0.0)
    admission = AdmissionControl(Leader(CLOSED, (), (), 0.0), hand_in, clock)
    rng, good = random.Random(1), ticket().joined(FRIENDS[0])
    known = {
        bounds.PeerId: lambda r: r.choice((good.peer, good.operator, good.invitation.key)),
        bounds.RunId: lambda r: CLOSED.run_id,
        bounds.Signature: lambda r: r.choice((good.signature, good.proof)),
    }
    maker = Maker(rng, known)
    for _ in range(3000):
        made = build(Joined, maker.make(Joined))
        if made != good:
            refusal = asyncio.run(admission.welcome(FRIENDS[0], made))
            assert not refusal.waits
    assert heard == []


# --- what is typed


@pytest.mark.parametrize(("typed", "seconds"), [("30m", 1800), ("12h", 43200), ("7d", 604800), ("366d", 366 * 86400)])
def test_how_long_it_holds_is_typed_shortly(typed: str, seconds: int) -> None:
    assert seconds_in(typed) == seconds


@pytest.mark.parametrize("typed", ["", "7", "d", "0d", "367d", "-1d", "1w", "1.5h", "7d\n", "9999999d", "\u0667d"])
def test_other_spans_are_refused_in_one_line(typed: str) -> None:
    with pytest.raises(UsageError, match=r"--expires .*: not a time; write it as 30m, 12h or 7d") as caught:
        seconds_in(typed)
    assert str(caught.value).isprintable()
