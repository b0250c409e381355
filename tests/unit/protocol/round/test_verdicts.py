"""Verdicts that are renewed where something happened are those of judging everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.round.offers import Examined, ReplicaStates
from protocol.wire.commit import Contribution
from protocol.wire.plan import Plan, ReplicaSpec
from tests.support.tiny import contribution, replica

PLAN = Plan(round=1, replicas=(replica(5, "a"), replica(3, "b", "c"), replica(9, "d", "e", "f"), replica(7, "g", "b")))
OTHER = PLAN.replaced(replica(3, "x", "c"))
PEERS = "abcdefgx"


def judged(plan: Plan | None, world: dict[str, str]) -> dict[int, Contribution | str | None]:
    """All of them; `world`: what each peer has done."""
    out: dict[int, Contribution | str | None] = {}
    for r in plan.replicas if plan else ():
        states = [world.get(p, "") for p in r.peers]
        done = contribution(r.number) if set(states) == {"offered"} else None
        out[r.number] = "failed" if "failed" in states else done
    return out


@given(
    st.lists(
        st.tuples(st.sampled_from(PEERS), st.sampled_from(["", "offered", "failed"]), st.sampled_from([0, 0, 0, 1, 2])),
        max_size=40,
    )
)
def test_renewed_verdicts_are_those_of_judging_all(steps: list[tuple[str, str, int]]) -> None:
    verdicts, world, plan = ReplicaStates(), dict[str, str](), PLAN
    asked: list[int] = []
    known: dict[int, Contribution | str | None] | None = None
    anew = 0
    for peer, state, change in steps:
        world[peer] = state
        verdicts.touch([peer])
        before = plan
        plan = OTHER if change == 1 else plan
        wanted = judged(plan, world)
        anew += change == 2
        asked.clear()

        def judge(r: ReplicaSpec, wanted: dict[int, Contribution | str | None] = wanted) -> Contribution | str | None:
            asked.append(r.number)
            return wanted[r.number]

        first = not verdicts.complete and not verdicts.failed and not verdicts.pending
        news = verdicts.renew(Examined(plan, all_anew=anew), judge, 1.0)
        assert news == (change == 2 or plan is not before or wanted != known)
        known = wanted
        if not first and change == 0 and plan is before:
            assert set(asked) == {r.number for r in plan.replicas if peer in r.peers}, "nobody else is judged again"
        found = {**verdicts.complete, **verdicts.failed, **dict.fromkeys(verdicts.pending)}
        assert found == wanted
        order = [r.number for r in plan.replicas]
        assert [c.replica for c in verdicts.contributions()] == [n for n in order if n in verdicts.complete]
        assert {x.replica for x in verdicts.left_out(3.0)} == set(order) - set(verdicts.complete)


def test_who_diverges_or_does_no_more_is_judged_again_and_keeps_the_time_when_it_was_complete() -> None:
    verdicts, wrong = ReplicaStates(), {"b"}

    def judge(r: ReplicaSpec) -> Contribution | str | None:
        return "wrong" if wrong.intersection(r.peers) else contribution(r.number)

    verdicts.renew(Examined(PLAN, frozenset(wrong)), judge, 3.0)
    assert (verdicts.since, sorted(verdicts.failed)) == ({5: 3.0, 9: 3.0}, [3, 7])
    wrong = {"a"}
    assert verdicts.renew(Examined(PLAN, frozenset(wrong)), judge, 4.0)
    assert (verdicts.since, sorted(verdicts.failed)) == ({5: 3.0, 9: 3.0, 3: 4.0, 7: 4.0}, [5])
