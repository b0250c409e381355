"""The held-out loss: measuring peers, places in a commit, and readers (protocol/ledger/run_state.py)."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from peer import events
from peer.events import Event
from peer.node.evaluating import SAMPLE_IDS, Evaluator
from peer.ui.lines import describe
from peer.ui.metrics import exposition
from peer.ui.run_view import HeldOutLosses, RunView
from peer.ui.state import state
from protocol.errors import UsageError
from protocol.identity import Identity, short_peer
from protocol.ledger import claims, run_state
from protocol.ledger.claims import Claims
from protocol.ledger.run_state import EVALUATORS, Due
from protocol.round import fairness
from protocol.round.leader_events import Received
from protocol.run import layout
from protocol.run.corpus import CorpusIndex
from protocol.run.manifest import EvaluationSpec, TokenizerSpec
from protocol.wire.bounds import MAX_BITS_PER_BYTE
from protocol.wire.claims import Evaluation
from protocol.wire.commit import MAX_EVALUATIONS, Commit
from protocol.wire.encoding import Message
from protocol.wire.plan import Plan
from protocol.wire.schema import SchemaError, build
from tests.support import tiny
from tests.support.leader import Driver
from tests.support.rules import due as open_for
from tests.support.rules import of_claims
from tests.support.texts import NoText
from tests.support.tiny import replica
from tests.support.watched import decided

KEYS = tuple(Identity(bytes([7, i] * 16)) for i in range(8))
NAMES = tuple(key.peer_id for key in KEYS)
RUN = tiny.manifest(rounds=100, evaluation=EvaluationSpec(every=2, sequences=4))


def commit(round: int, plan: Plan | None, *said: Evaluation) -> Commit:
    return tiny.commit(RUN, round=round, plan=plan, evaluations=said)


def planned(round: int, count: int = 8) -> Commit:
    return commit(round, Plan(round=round + 1, replicas=tuple(replica(i, NAMES[i]) for i in reversed(range(count)))))


def says(who: Identity, due: Due, **changes: Any) -> Evaluation:
    plain = Evaluation(peer="", round=due.round, sequences=1, loss=2.0, bits_per_byte=1.0, signature=b"")
    return claims.signed(who, due.of, dataclasses.replace(plain, **changes))


def test_every_so_many_rounds_three_full_replicas_measure_by_turns() -> None:
    assert [run_state.evaluation_is_due(RUN, planned(r)) for r in range(5)] == [True, False, True, False, True]
    assert not run_state.evaluation_is_due(RUN, commit(2, None)), "nothing follows that could say what was found"
    never = tiny.manifest(evaluation=EvaluationSpec(every=0))
    assert not run_state.evaluation_is_due(never, planned(0))
    turns = [run_state.evaluators(RUN, planned(r)) for r in (0, 2, 4)]
    assert turns == [NAMES[0:3], NAMES[3:6], (NAMES[6], NAMES[7], NAMES[0])]
    assert run_state.evaluators(RUN, planned(4, count=2)) == (NAMES[0], NAMES[1])
    assert len(turns[0]) == EVALUATORS
    chains = Plan(round=1, replicas=(replica(0, NAMES[0], NAMES[1]), replica(1, NAMES[2])))
    assert run_state.evaluators(RUN, commit(0, chains)) == (NAMES[2],)
    assert run_state.evaluators(RUN, commit(0, dataclasses.replace(chains, replicas=chains.replicas[:1]))) == ()


def test_what_is_measured_costs_a_fiftieth() -> None:
    assert (RUN.train.inner_steps, RUN.train.step_rows) == (4, 2)
    assert RUN.evaluated_sequences == 1, "2 rounds train on 16 sequences"
    often = dataclasses.replace(RUN, evaluation=EvaluationSpec(every=50, sequences=1000))
    assert often.evaluated_sequences == 24
    assert dataclasses.replace(often, evaluation=EvaluationSpec(every=50, sequences=5)).evaluated_sequences == 5
    with pytest.raises(SchemaError, match="every: must be in 0"):
        build(EvaluationSpec, {"every": -1})
    with pytest.raises(SchemaError, match="sequences: must be in 1"):
        build(EvaluationSpec, {"sequences": 0})


DUE = Due(RUN).after(planned(0))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (says(KEYS[0], DUE, round=1), "measures the state of round 1, which is not due"),
        (says(KEYS[5], DUE), f"is of {short_peer(NAMES[5])}, whose turn it is not"),
        (says(KEYS[0], DUE, sequences=0), "measures on 0 sequences"),
        (says(KEYS[0], DUE, sequences=2), "measures on 2 sequences"),
        (dataclasses.replace(says(KEYS[0], DUE), loss=1.0), f"is not signed by {short_peer(NAMES[0])}"),
        (dataclasses.replace(says(KEYS[5], DUE), peer=NAMES[0]), f"is not signed by {short_peer(NAMES[0])}"),
        (says(KEYS[0], dataclasses.replace(DUE, of="f" * 64)), f"is not signed by {short_peer(NAMES[0])}"),
    ],
)
def test_what_has_no_place(said: Evaluation, why: str) -> None:
    assert DUE.why_not(said) == why
    assert (of_claims(DUE, commit(1, None, said))) == [f"has an evaluation that {why}"]
    heard = Claims()
    heard.add(open_for(DUE), said)
    assert heard.next(open_for(DUE), Evaluation) == ()


def test_each_measures_a_state_once_and_a_later_one_again() -> None:
    said = says(KEYS[0], DUE)
    assert DUE.why_not(said) is None
    assert DUE.why_not(says(tiny.OPERATOR, DUE)) is None, "an operator may always"
    twice = of_claims(DUE, commit(1, None, said, said))
    assert twice == [f"has an evaluation that is told by {short_peer(NAMES[0])} for the second time"]
    then = DUE.after(commit(1, None, said))
    assert then.why_not(said) == f"is told by {short_peer(NAMES[0])} for the second time"
    later = then.after(planned(2))
    assert (later.round, later.by, later.known) == (2, NAMES[3:6], frozenset())
    assert of_claims(Due(RUN), commit(0, None, said)), "nothing is due before the first plan"


def test_a_commit_has_few_and_the_rest_follow() -> None:
    keys = [*tiny.OPERATORS[:3], *KEYS[:3]]
    run = dataclasses.replace(RUN, operators=tuple(k.peer_id for k in tiny.OPERATORS[:3]))
    due, heard = Due(run).after(planned(0)), Claims()
    for key in keys:
        heard.add(open_for(due), says(key, due))
        heard.add(open_for(due), says(key, due, loss=9.0))
    first = heard.next(open_for(due), Evaluation)
    assert len(first) == MAX_EVALUATIONS < len(keys)
    assert {x.loss for x in first} == {2.0}, "who has said something does not take it back"
    due = due.after(commit(1, None, *first))
    rest = heard.next(open_for(due), Evaluation)
    assert sorted(x.peer for x in (*first, *rest)) == sorted(k.peer_id for k in keys)
    heard.forget(open_for(due.after(planned(2))))
    assert heard.next(open_for(due), Evaluation) == ()


# --- the leader and the voters


def opened() -> Driver:
    """Two full replicas train round 1, and the state before it is to be measured."""
    driver = Driver(dict.fromkeys(NAMES[:2], tiny.full_memory(RUN)), RUN)
    driver.decide(driver.ready(*NAMES[:2]))
    driver.attest(*NAMES[:2])
    return driver


def test_the_next_commit_says_what_was_measured_and_voters_look() -> None:
    driver, other = opened(), opened()
    due = driver.leader.state.due
    assert set(due.by) == set(NAMES[:2])
    said = says(KEYS[0], due)
    driver.do(Received(NAMES[1], said))  # in another peer's session
    driver.do(Received(NAMES[3], says(KEYS[3], due)))  # a stranger's
    driver.do(Received(NAMES[1], says(KEYS[1], due, round=1)))
    driver.do(Received(NAMES[0], said))
    found = driver.decide(driver.offered(*NAMES[:2]))
    assert found.evaluations == (said,)
    other.offered(*NAMES[:2])
    sight = fairness.view_of(other.leader, found.time, 0.0, True)
    assert fairness.lie_in(sight, found) is None
    false = dataclasses.replace(found, evaluations=(dataclasses.replace(said, loss=0.1),))
    lie = fairness.lie_in(sight, false)
    assert lie.reason == f"has an evaluation that is not signed by {short_peer(NAMES[0])}"
    driver.attest(*NAMES[:2])
    driver.do(Received(NAMES[0], said))
    driver.do(Received(NAMES[1], says(KEYS[1], due)))
    assert driver.decide(driver.offered(*NAMES[:2])).evaluations == (says(KEYS[1], due),), "a late one follows"
    driver.attest(*NAMES[:2])
    driver.do(Received(NAMES[1], says(KEYS[1], due)))
    assert driver.decide(driver.offered(*NAMES[:2])).evaluations == (), "another state is due"


# --- who measures


class Text(NoText):
    """Three held-out sequences, of which two and a half bytes are a token."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    @property
    def index(self) -> CorpusIndex:
        return CorpusIndex(
            tokenizer="0" * 64, vocab_size=16, seed=0, sequence=8, sequences=1, chunks=bytes(32), held_out="0" * 64,
            held_out_sequences=3, documents=2, tokens=30, text_bytes=70, held_out_tokens=20, held_out_bytes=50,
        )  # fmt: skip

    async def held_out(self, limit: int) -> np.ndarray:
        if self.fails:
            raise UsageError("text: gone")
        return np.ones((min(3, limit), 9), np.int64)


class Model:
    """Says what it is told to say."""

    def __init__(self, loss: float) -> None:
        self._loss = loss

    def __call__(self, windows: np.ndarray) -> float:
        return self._loss * windows[:, 1:].size

    def goes_on(self, ids: Sequence[int], count: int) -> list[int]:
        assert (ids, count) == ([1] * 9, SAMPLE_IDS)
        return [2] * count


TOKENIZER = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0")).to_str().encode()


async def tokenizer() -> bytes:
    """The run's."""
    return TOKENIZER


def measured(
    key: Identity,
    newest: Commit,
    *,
    text: Text | None = None,
    loss: float = 2.0,
    fetch: Any = tokenizer,
    raw: bytes = TOKENIZER,
    **more: Any,
) -> list[Any]:
    """What a peer tells, and emits, when this commit is the newest."""
    told: list[Message | events.Body] = []
    spec = TokenizerSpec(digest=hashlib.sha256(raw).hexdigest())
    run = dataclasses.replace(RUN, evaluation=EvaluationSpec(every=2, sequences=4), train=TRAIN, tokenizer=spec)
    theta = {shard: [np.zeros(1, np.float32)] for shard in layout.shard_names(run.model)}

    async def work() -> None:
        workers: list[ThreadPoolExecutor] = []

        def worker() -> ThreadPoolExecutor:
            workers.append(ThreadPoolExecutor(1))
            return workers[-1]

        evaluator = Evaluator(
            run, key, text or Text(), told.append, told.append,
            load=lambda spec, theta: Model(loss), tokenizer=fetch, worker=worker, **{"has_room": True, **more},
        )  # fmt: skip
        evaluator.follow(newest, theta)
        task = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        assert evaluator.reads == bool(task)
        await asyncio.gather(*task)
        assert not evaluator.reads
        assert len(workers) == len(task)
        for one in workers:
            with pytest.raises(RuntimeError, match="after shutdown"):  # else its helpers would hold up training
                one.submit(print)
        evaluator.follow(planned(1), theta)  # told again, until a commit has it
        said = [x for x in told if isinstance(x, Evaluation)][:1]
        evaluator.follow(commit(1, None, *said), theta)
        await evaluator.aclose()

    asyncio.run(work())
    return told


TRAIN = dataclasses.replace(RUN.train, inner_steps=25)


def test_whose_turn_it_is_measures_signs_and_tells_again_until_it_is_in_the_log() -> None:
    first, again = measured(KEYS[0], planned(0))
    assert first == again
    assert (first.round, first.sequences, first.loss) == (0, 3, 2.0)
    assert first.sample == " ".join(["w1"] * 9 + ["⇒"] + ["w2"] * SAMPLE_IDS)
    assert first.bits_per_byte == pytest.approx(2.0 / math.log(2) / 2.5)
    run = dataclasses.replace(RUN, train=TRAIN)
    assert Due(run).after(planned(0)).why_not(first) is None


def test_without_a_tokenizer_there_are_figures_alone() -> None:
    async def gone() -> bytes:
        raise UsageError("tokenizer: gone")

    async def another() -> bytes:
        return TOKENIZER + b" "

    for where in (gone, another):
        assert [x.sample for x in measured(KEYS[0], planned(0), fetch=where)] == ["", ""]


def test_a_tokenizer_that_takes_any_time_costs_a_peer_its_samples_alone() -> None:
    """Twenty doublings: 2^20 times the text, were it decoded."""
    plain = json.loads(TOKENIZER)
    step = {"type": "Replace", "pattern": {"String": "w"}, "content": "ww"}
    plain["decoder"] = {"type": "Sequence", "decoders": [step] * 40}
    raw = json.dumps(plain).encode()

    async def fetch() -> bytes:
        return raw

    before = time.process_time()
    warning, first, *_ = measured(KEYS[0], planned(0), fetch=fetch, raw=raw)
    assert time.process_time() - before < 1.0, "nothing is decoded in the peer's own process"
    assert (first.loss, first.sample) == (2.0, "")
    assert "without a sample of the model's text: tokenizer: to use it takes more time or memory" in warning.text


def test_others_do_not_and_an_auditor_always_does() -> None:
    assert measured(KEYS[5], planned(0)) == []
    assert measured(KEYS[0], planned(1)) == []
    assert measured(KEYS[0], planned(0), has_room=False) == []
    assert len(measured(KEYS[5], planned(0), always=True)) == 2


def test_what_cannot_be_measured_is_told_of_once_and_what_is_no_number_not_at_all() -> None:
    (warned,) = measured(KEYS[0], planned(0), text=Text(fails=True))
    assert warned == events.Warning(text="held-out loss: not measured here: text: gone")
    assert measured(KEYS[0], planned(0), loss=math.nan) == []
    assert measured(KEYS[0], planned(0), loss=math.inf)[0].bits_per_byte <= MAX_BITS_PER_BYTE


# --- readers


def told(round: int, sample: str = "", **losses: float) -> tuple[Evaluation, ...]:
    return tuple(
        Evaluation(peer=peer, round=round, sequences=1, loss=loss, bits_per_byte=loss / 2, signature=b"", sample=sample)
        for peer, loss in losses.items()
    )


def with_these(evaluations: tuple[Evaluation, ...], round: int = 9) -> Event:
    return Event(1.0, "bootstrap", decided(round, plan=None, evaluations=evaluations))


def test_readers_see_the_text_that_most_tell() -> None:
    held = HeldOutLosses()
    for evaluations, seen in (
        (told(2, "once upon", a=3.0), "once upon"),
        (told(2, "buy this", b=3.0), ""),
        (told(2, "once upon", c=3.0), "once upon"),
        (told(4, "a time", a=3.0), "a time"),
    ):
        held.add(evaluations)
        assert held.newest.sample == seen
    watched = RunView(RUN)
    watched.feed(with_these(told(2, "once \x1b[2Jupon", a=3.0)))
    shown = state(watched, 2.0)
    assert shown.held_out.sample == "once  [2Jupon"


def test_readers_see_the_median_and_who_measured() -> None:
    held = HeldOutLosses()
    assert held.newest is None
    for evaluations in (told(2, a=3.0, b=1e6), told(2, c=3.5, a=9.0), told(0, a=5.0)):
        held.add(evaluations)
    assert list(held.found) == [0, 2]
    newest = held.newest
    assert (newest.loss, newest.bits_per_byte) == (3.5, 1.75), "one liar of three is not believed"
    assert [(said.peer, said.loss) for said in newest.by] == [("a", 3.0), ("b", 1e6), ("c", 3.5)]
    watched = RunView(RUN)
    watched.feed(with_these(told(0, a=5.0), 8))
    watched.feed(with_these(told(2, **{"\x1b[2J": 3.0}), 9))
    shown = state(watched, 2.0)
    assert shown.held_out_by_round == ((0, 5.0), (2, 3.0))
    assert "\x1b" not in shown.held_out.by[0].peer
    assert 'potluck_held_out_bits_per_byte{run="' in exposition(shown)
    *_, (_, text) = describe(with_these(told(2, a=3.0)), {})
    assert text == "held out: loss 3.000 after round 2, 1.500 bits per byte, as a measured it"


def test_a_long_run_keeps_a_bounded_number_of_points() -> None:
    held = HeldOutLosses()
    for round in range(9000):
        held.add(told(round, a=1.0))
    assert len(held.found) <= 4000
    assert held.newest.round == 8999
