"""Peers that reports of lies exclude from chains, and what false reports cost (protocol/round/accusations.py)."""

from __future__ import annotations

from typing import Any

from protocol.planning import planner
from protocol.planning.partition import Candidate
from protocol.round.accusations import FIRST_ROUNDS, LIES, MOST_ROUNDS, REMEMBERED_PAIRS, Accusation, Accusations
from protocol.round.leader_events import Gone, Lead, Propose, Received, Send
from protocol.wire.plan import ReplicaSpec
from protocol.wire.session import ChainFailure, ChainReconfig
from tests.support import leader as leading
from tests.support import tiny
from tests.support.chain_repair import Driver, reconfig

SAW = LIES + "gradients do not fit their text"


def chain(*peers: str) -> ReplicaSpec:
    return tiny.replica(0, *peers)


def hear(
    known: Accusations,
    accuser: str,
    accused: str,
    *,
    round: int = 1,
    reason: str = SAW,
    generation: int = 0,
    **of: Any,
) -> list[Accusation]:
    """The report of `accuser`, a neighbour of `accused` unless `chains` says otherwise."""
    failure = ChainFailure(round=round, replica=0, generation=generation, peer=accused, reason=reason)
    known.begin(round, lambda _: of.get("chains", [chain(accuser, accused)]))
    return known.report(accuser, failure)


def heard(*pairs: tuple[str, str]) -> Accusations:
    known = Accusations()
    for accuser, accused in pairs:
        hear(known, accuser, accused)
    return known


# --- the rule


def test_a_liar_is_out_when_a_second_neighbour_names_it() -> None:
    known = Accusations()
    assert hear(known, "a", "liar") == [Accusation("a", "liar", SAW, ())]
    assert hear(known, "a", "liar") == [], "the same again is no news"
    assert known.out == frozenset()
    assert hear(known, "b", "liar") == [Accusation("b", "liar", SAW, ("liar",))]


def test_who_accuses_falsely_costs_each_one_neighbour_and_is_out_itself() -> None:
    known = heard(("liar", "a"), ("liar", "b"), ("liar", "c"))
    assert known.out == {"liar"}
    marked = known.marked([Candidate(peer=p, memory_bytes=1, up_bps=1) for p in ("a", "liar", "x")])
    assert [(c.peer, c.apart, c.alone, c.presence) for c in marked] == [
        ("a", ("liar",), False, 0.5), ("liar", ("a", "b", "c"), True, 1.0), ("x", (), False, 1.0)
    ]  # fmt: skip


def test_two_who_accuse_one_together_are_out_before_they_have_thrown_out_three() -> None:
    known, lost = Accusations(), []
    for victim in ("a", "b", "c"):
        for liar in ("liar-1", "liar-2"):
            hear(known, liar, victim)
        lost.append(sorted(known.out))
    assert lost[0] == ["a"]
    assert lost[2] == ["liar-1", "liar-2"], "and whom they accused is back"


def test_an_honest_one_beside_two_liars_comes_back_when_others_name_them() -> None:
    known = heard(("honest", "liar-1"), ("honest", "liar-2"))
    assert known.out == {"honest"}, "so far it might have been lying about both"
    hear(known, "a", "liar-1")
    hear(known, "b", "liar-1")
    hear(known, "a", "liar-2")
    hear(known, "b", "liar-2")
    assert known.out == {"liar-1", "liar-2"}


def test_only_neighbours_are_believed_and_only_of_lies() -> None:
    known = Accusations()
    assert hear(known, "a", "c", chains=[chain("a", "b", "c"), None]) == []
    assert hear(known, "x", "a", chains=[chain("a", "b", "c")]) == []
    assert hear(known, "a", "a", chains=[chain("a", "b", "c")]) == []
    assert hear(known, "a", "b", reason="left the chain") == []
    assert hear(known, "a", "c", chains=[chain("a", "b", "c"), chain("a", "c", "d")]) != [], "as the chain is now"


def test_who_is_said_to_be_lost_again_and_is_heard_of_quarrels_with_who_says_it() -> None:
    known, gone = Accusations(), "gave no sign of life"
    assert hear(known, "a", "b", reason=gone) == []
    assert known.heard("b") == [], "the first time in a round its connection may have failed"
    assert hear(known, "a", "b", reason=gone, generation=1) == []
    assert known.heard("c") == []
    assert known.quarrelling == set(), "it may be lost"
    assert known.heard("b") == [Accusation("a", "b", gone, ())]
    assert known.quarrelling == {"a", "b"}
    assert known.heard("b") == []
    hear(known, "a", "c", round=2, reason=gone, generation=1)
    assert known.heard("c") == [Accusation("a", "c", gone, ("a",))]
    hear(known, "d", "e", round=2, reason=gone, generation=1)
    known.begin(3, lambda _: ())
    assert known.heard("e") == [], "it is heard of in another round"
    assert known.quarrelling == set()


def test_quarrels_end_and_their_number_is_bounded() -> None:
    known = heard(("a", "liar"), ("b", "liar"))
    known.begin(1 + FIRST_ROUNDS, lambda _: ())
    assert known.out == {"liar"}
    now = 2 + FIRST_ROUNDS
    known.begin(now, lambda _: ())
    assert known.out == frozenset()
    assert hear(known, "a", "liar", round=now) != [], "it is news again"
    for i in range(REMEMBERED_PAIRS + 5):
        hear(known, f"x{i}", f"y{i}", round=now)
    assert hear(known, "a", "liar", round=now) != [], "the oldest was forgotten"


def test_a_report_that_was_missed_counts_when_it_is_repeated_in_a_later_round() -> None:
    """Else honest nodes plan by different accusations, and take each other's plans for unfair."""
    known = Accusations()
    for round in range(1, 3 + FIRST_ROUNDS):
        known.begin(round, lambda _, round=round: [chain("a", "b", "c") if round <= 2 else chain("a", "c")])  # type: ignore[misc]
    late = [ChainFailure(round=n, replica=0, generation=0, peer="b", reason=SAW) for n in (1, 2, 3)]
    far = ChainFailure(round=2**64 - 1, replica=2**32 - 1, generation=0, peer="b", reason=SAW)
    assert known.report("a", far) == []
    assert known.report("a", late[0]) == [], "it would be over"
    assert known.report("a", late[2]) == [], "they were not neighbours then"
    assert known.report("a", late[1]) == [Accusation("a", "b", SAW, ())]
    known.begin(3 + FIRST_ROUNDS, lambda _: ())
    assert known.marked([Candidate(peer="b", memory_bytes=1, up_bps=1)])[0].apart == (), "it began when it was seen"


def test_what_was_forgotten_does_not_count_again_when_it_is_repeated() -> None:
    known = Accusations()
    known.begin(1, lambda _: ())
    assert not known.forget()
    assert hear(known, "a", "b") != [], "where nothing was forgotten it counts"
    assert known.forget()
    late = ChainFailure(round=1, replica=0, generation=0, peer="b", reason=SAW)
    assert known.report("a", late) == []
    assert hear(known, "a", "b", round=2) != [], "of a later round it does"


def test_a_quarrel_of_the_same_two_lasts_twice_as_long_as_the_one_before() -> None:
    """A mistaken one ends soon, and honest neighbours are neighbours again; a liar is hardly ever tried again."""
    known, round, lasted = Accusations(), 1, []
    for _ in range(9):
        began = round
        hear(known, "a", "b", round=round)
        hear(known, "c", "b", round=round)
        while known.out:
            round += 1
            known.begin(round, lambda _: ())
        lasted.append(round - began - 1)
    assert lasted == [min(MOST_ROUNDS, FIRST_ROUNDS * 2**n) for n in range(9)]


def test_who_has_more_quarrels_gives_way() -> None:
    known = heard(("liar", "a"))
    assert known.loser("liar", "a") == "a"
    hear(known, "liar", "spare")
    assert known.loser("liar", "spare") == "liar"
    assert known.loser("spare", "liar") == "liar"


def test_a_spare_takes_no_place_beside_whom_it_quarrels_with() -> None:
    known = heard(("b", "spare"), ("x", "out"), ("y", "out"))
    assert known.may_take("spare", "d", chain("a", "b", "c", "d"))
    assert not known.may_take("spare", "c", chain("a", "b", "c", "d"))
    assert not known.may_take("spare", "a", chain("a", "b", "c", "d"))
    assert not known.may_take("out", "d", chain("a", "b", "c", "d"))


# --- the leader


def accused(driver: Driver, by: str, who: str, generation: int = 0) -> list[Any]:
    return driver.failure(by, who, generation, reason=SAW)


def test_the_accused_is_replaced_and_the_operator_told() -> None:
    driver = Driver("f")
    effects = accused(driver, "e", "d")
    assert effects[0] == Accusation("e", "d", SAW, ())
    found = reconfig(effects[1:])
    assert (found.peers, found.generation) == (("c", "f", "e"), 1)
    assert "gradients do not fit their text" in found.reason
    (again,) = accused(driver, "e", "d")
    assert isinstance(again, Send)
    assert again.message == found, "a report that is out of date is answered, and no news"


def test_without_a_spare_the_chain_does_not_go_on_with_a_liar() -> None:
    driver = Driver()
    found = reconfig(accused(driver, "e", "d")[1:])
    assert found.peers == ()
    assert found.reason.endswith("no spare is ready")


def test_who_accuses_a_second_time_in_a_round_gives_way_itself() -> None:
    driver = Driver("f", "g")
    driver.follow(reconfig(accused(driver, "c", "d")[1:]))
    effects = accused(driver, "c", "f", 1)
    assert effects[0] == Accusation("c", "f", SAW, ("c",))
    assert reconfig(effects[1:]).peers == ("g", "f", "e")


def test_a_later_report_of_another_neighbour_counts_though_the_accused_is_gone() -> None:
    driver = Driver("f")
    accused(driver, "e", "d")
    assert accused(driver, "c", "d")[0] == Accusation("c", "d", SAW, ("d",))


def test_a_liar_that_was_quicker_to_name_its_neighbour_loses_its_place_too() -> None:
    driver = Driver("f", "g")
    driver.follow(reconfig(driver.failure("d", "e")))
    effects = accused(driver, "e", "d")
    assert reconfig(effects[1:]).peers == ("c", "g", "f")


def test_the_strike_of_a_chain_that_ends_by_a_quarrel_is_of_the_two_and_of_nobody_else() -> None:
    driver = Driver()
    driver.follow(reconfig(driver.failure("c", "d")))
    ended = reconfig(driver.failure("c", "d", 1))
    assert ended.peers == ()
    assert driver.do(Received("d", ended)) == [Accusation("c", "d", "gave no sign of life", ())]
    commit = driver.decide(asked_for(driver.at(leading.GONE)))
    rests = driver.leader.promises.rests
    assert [peer for peer in "cde" if rests(peer, commit.round + 1, broken=1.5)] == ["c", "d"]


def test_a_node_that_does_not_lead_knows_it_when_it_does() -> None:
    driver = Driver("f")
    driver.do(Lead(False))
    assert accused(driver, "e", "d") == [Accusation("e", "d", SAW, ())]
    driver.do(Lead(True))
    assert isinstance(accused(driver, "e", "d")[0].message, ChainReconfig), "the report is repeated"
    assert driver.leader.accusations.loser("d", "x") == "d"


def test_a_report_of_another_round_says_nothing() -> None:
    driver = Driver("f")
    assert driver.failure("e", "d", round=7, reason=SAW) == []
    assert driver.leader.accusations.out == frozenset()


def test_who_is_out_is_in_no_chain_of_the_next_plan() -> None:
    driver = Driver("f", "g")
    first = reconfig(accused(driver, "e", "d")[1:])
    driver.follow(first)
    accused(driver, "c", "d")
    commit = driver.decide(driver.offered_by(first, *first.peers))
    assert all("d" not in r.peers for r in commit.plan.replicas)
    driver.attest(*driver.memory, shards=("embed",))


def asked_for(effects: list[Any]) -> list[Any]:
    """Proposals; the news of the chain are left aside."""
    return [e for e in effects if not isinstance(e, Send)]


def quarrelling() -> Driver:
    """A chain of three members, all of them needed, cannot go on: d is out."""
    driver = Driver()
    ended = reconfig(accused(driver, "e", "d")[1:])
    driver.do(*(Received(peer, ended) for peer in driver.memory))
    assert accused(driver, "c", "d", 1)[0] == Accusation("c", "d", SAW, ("d",))
    return driver


def test_a_run_that_cannot_go_on_with_its_quarrels_forgets_them() -> None:
    driver = quarrelling()
    commit = driver.decide(asked_for(driver.at(leading.GONE)))
    assert [len(r.peers) for r in commit.plan.replicas] == [3]
    assert driver.leader.accusations.out == frozenset()


def test_quarrels_are_forgotten_in_vain_where_others_are_lacking() -> None:
    driver = quarrelling()
    driver.do(Gone("c"))
    assert asked_for(driver.at(leading.GONE)) == []
    assert asked_for(driver.at(2 * leading.GONE)) == []
    (proposal,) = asked_for(driver.ready("c"))
    assert isinstance(proposal, Propose), "whoever was lacking is back"


# --- the planner


def candidates(*, alone: str = "", memory: int = leading.THIRD) -> list[Candidate]:
    return [Candidate(peer=p, memory_bytes=memory, up_bps=10**7, alone=p == alone) for p in ("a", "b", "c", "d")]


def test_who_is_alone_is_in_no_chain_new_or_kept_but_may_be_a_full_replica() -> None:
    manifest = leading.M
    before = planner.make_plan(manifest, candidates(), round=1, previous=None)
    (kept,) = before.replicas
    outcast = kept.peers[1]
    for previous in (None, before):
        after = planner.make_plan(manifest, candidates(alone=outcast), round=2, previous=previous)
        assert [r.is_chain for r in after.replicas] == [True]
        assert outcast not in after.replicas[0].peers
        assert after.spares == (outcast,)
    strong = planner.make_plan(manifest, candidates(alone="b", memory=leading.FULL), round=1, previous=None)
    assert ("b",) in [r.peers for r in strong.replicas]
