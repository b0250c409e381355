"""Parts that unit tests of messages share with others."""

from __future__ import annotations

import dataclasses

from protocol.ledger.part_lists import share_of
from protocol.wire.commit import Commit, Contribution, Diverged, LeftOut, Part
from protocol.wire.decree import Board, Invitation, Joined, Operator
from protocol.wire.plan import Plan, ReplicaSpec, Seat, StageSpec, Work

PART = Part(shard="embed", digest="a" * 64, size=10, norm=1.5)
CHAIN = ReplicaSpec(number=1, stages=(StageSpec(peer="b", first=0, last=1), StageSpec(peer="c", first=1, last=4)))


FULL = ReplicaSpec(
    stages=(StageSpec(peer="a", first=0, last=4),),
    work=Work(slot=3, steps=4, micro_batches=2),
    following=Work(slot=30, steps=5),
)


FORMING = ReplicaSpec(number=-1, stages=(StageSpec(peer="e", first=0, last=4),))
PLAN = Plan(
    round=3,
    next_number=2,
    next_slot=40,
    replicas=(FULL, CHAIN),
    forming=(FORMING,),
    forming_since=(2,),
    spares=("d",),
    seats=(Seat(number=5, work=Work(slot=50, steps=5)),),
)


BOARD = Board(
    operators=(Operator(peer="o", places=("/ip4/1.2.3.4/tcp/1",)), Operator(peer="p"), Operator(peer="q")), quorum=4
)


JOINED = Joined(
    invitation=Invitation(run="r" * 64, key="k", expires=9, count=2, reason="friends"),
    operator="o",
    signature=b"s",
    peer="p",
    proof=b"t",
)


COMMIT = Commit(
    run="r",
    round=2,
    parent="p",
    time=1.5,
    contributions=(
        Contribution(replica=0, tokens=30, steps=3, loss=2.5, shares=(share_of("a", (PART,)),)),
        Contribution(
            replica=1,
            tokens=10,
            steps=1,
            loss=None,
            shares=(
                share_of("b", (dataclasses.replace(PART, digest="b" * 64),)),
                share_of("c", (dataclasses.replace(PART, shard="head"),)),
            ),
        ),
    ),
    left_out=(LeftOut(replica=2, reason="late"),),
    diverged=(Diverged(peer="c", shard="head"),),
    digests={"embed": "d" * 64},
    plan=PLAN,
    joined=(JOINED,),
    board=BOARD,
)
