"""A stage's screen: lies, honest drift, spikes, jitter, and a real chain with a lying member."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from peer.chain import quantize, screening
from peer.chain.frames import BACKWARD, FORWARD, NeighbourLost
from peer.chain.link import HEAD_START_S, LIVENESS
from peer.chain.neighbours import BoundarySpec, Neighbours, Statistics
from peer.chain.screening import LEAST_TOKENS, LEAST_WIDTH, MOST, NEW_FRAMES, NEW_ROUNDS, Place, Screen, Screens
from peer.training.trainer import StageTrainer
from protocol.errors import LocalError
from protocol.round.accusations import LIES
from protocol.run.manifest import TrainSpec
from tests.support.chains import SPEC, Wired, make_chain, read_of, steps_of, worker

VOCABULARY, ROWS, LENGTH, WIDTH, ROUND = 500, 2, 64, 24, 40


class Honest:
    """Frames as an honest stage sends them: a vector of each token, a common one, and noise; all drift."""

    def __init__(self, kind: int, seed: int = 0) -> None:
        self.kind, self.draw = kind, np.random.default_rng(seed)
        self.table = self.draw.standard_normal((VOCABULARY, WIDTH))
        self.common = self.draw.standard_normal(WIDTH)
        self.size = 0.01

    def ids(self) -> np.ndarray:
        """Common tokens are common."""
        return np.minimum(self.draw.zipf(1.3, (ROWS, LENGTH + 1)) - 1, VOCABULARY - 1)

    def frame(self, ids: np.ndarray, drift: float = 0.02) -> Tensor:
        self.table += drift * self.draw.standard_normal(self.table.shape)
        self.size *= float(np.exp(drift * self.draw.standard_normal()))
        of = ids[:, :-1] if self.kind == FORWARD else ids[:, 1:]
        noise = self.draw.standard_normal((*of.shape, WIDTH))
        return torch.tensor(self.size * (self.table[of] + self.common + noise), dtype=torch.float32)


class Boundary:
    """A screen and its sender."""

    def __init__(self, kind: int, wire: str = "int4", seed: int = 0) -> None:
        self.honest, self.wire = Honest(kind, seed), wire
        self.screen = Screens(seed).of(kind, "block.1", WIDTH, wire)
        self.round, self.hops, self.earlier = 0, 0, list[Tensor]()

    def play(self, frames: int = ROUND, lie: Callable[[Tensor], Tensor] | None = None, **drift: float) -> str | None:
        """A round of one neighbour: what is said of it, if anything."""
        self.round += 1
        self.screen.begin("neighbour", self.round, self.hops)
        for _ in range(frames):
            ids = self.honest.ids()
            x = self.honest.frame(ids, **drift)
            self.earlier.append(x)
            sent = x if lie is None else lie(x)
            came = quantize.decode(quantize.encode(sent, self.wire), sent.shape, self.wire, sent.device)
            said = self.screen.judge(self.screen.sample(came), ids)
            if said is not None:
                return said
        return None

    def see(self, factor: float = 1.0, own: float = 0.0) -> str | None:
        """What is said of one more frame, which is `factor` times an honest one."""
        ids = self.honest.ids()
        return self.screen.judge(self.screen.sample(factor * self.honest.frame(ids)), ids, own)

    def learn(self) -> None:
        for _ in range(NEW_ROUNDS + 1):
            assert self.play() is None


LIARS: dict[str, tuple[Callable[[Boundary, Tensor], Tensor], str]] = {
    "noise": (lambda at, x: torch.from_numpy(at.honest.draw.standard_normal(x.shape)).float() * 0.02, "do not fit"),
    "zeros": (lambda at, x: 0 * x, "are zero"),
    "x4": (lambda at, x: 4 * x, "times as large"),
    "x0.25": (lambda at, x: 0.25 * x, "times as large"),
    "flipped": (lambda at, x: -x, "contradict"),
    "replayed": (lambda at, x: at.earlier[-6], "do not fit"),
}


@pytest.mark.parametrize(("kind", "wire"), [(FORWARD, "int4"), (BACKWARD, "sym2"), (FORWARD, "bf16")])
@pytest.mark.parametrize("lie", LIARS)
def test_lies_are_found_in_a_few_frames(lie: str, kind: int, wire: str) -> None:
    at = Boundary(kind, wire)
    at.learn()
    made, reason = LIARS[lie]
    said = at.play(frames=12, lie=lambda x: made(at, x))
    assert said.startswith("activations" if kind == FORWARD else "gradients")
    assert reason in said


@pytest.mark.parametrize(("kind", "wire"), [(FORWARD, "int4"), (BACKWARD, "sym2"), (FORWARD, "bf16")])
def test_honest_drift_is_believed(kind: int, wire: str) -> None:
    at = Boundary(kind, wire, seed=3)
    assert [at.play(drift=0.05) for _ in range(12)] == [None] * 12


@pytest.mark.parametrize(("every", "believed"), [(5, True), (2, False)])
def test_a_frame_now_and_then_that_is_strange_is_no_lie(every: int, believed: bool) -> None:
    at = Boundary(BACKWARD)
    at.learn()
    count = itertools.count()
    assert (at.play(frames=200, lie=lambda x: -3 * x if next(count) % every == 0 else x) is None) == believed


def test_lies_do_not_widen_the_limits_that_they_are_judged_by() -> None:
    at = Boundary(BACKWARD)
    at.learn()
    at.hops = screening.hops(BACKWARD, 0, 4)
    assert at.play(frames=16, lie=lambda x: 2.8 * x) is not None, "the most patient stage finds it, too"


def test_sizes_may_change_with_the_learning_rate_and_not_without() -> None:
    for rate, believed in ((1e-2, True), (1e-3, False)):
        at = Boundary(BACKWARD)
        at.screen.follow(1e-3)
        at.learn()
        at.screen.follow(rate)
        assert (at.play(lie=lambda x: 3.7 * x) is None) == believed
    assert at.play(lie=lambda x: -x) is not None, "later lies are found as before"


def test_a_slow_change_is_followed_and_lies_after_it_are_found() -> None:
    at = Boundary(FORWARD)
    at.learn()
    for _ in range(4):
        at.honest.size *= 1.5
        assert at.play() is None
    assert at.play(lie=lambda x: 4 * x) is not None


def test_what_was_refused_does_not_enter_the_reference() -> None:
    at = Boundary(FORWARD)
    at.learn()
    assert at.play(lie=lambda x: -x) is not None
    assert at.play() is None, "honest values are still what is usual"
    assert at.play(lie=lambda x: -x) is not None


def test_the_first_rounds_are_free() -> None:
    at = Boundary(FORWARD)
    for _ in range(NEW_ROUNDS):
        assert at.play(lie=lambda x: -x) is None
    assert at.play(lie=lambda x: x) is not None, "what was learned is the other sign"


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
@pytest.mark.parametrize("away", [1, 10])
def test_a_cut_to_which_a_chain_comes_back_is_learned_anew_in_one_round(away: int, kind: int) -> None:
    """What it sends has changed as it does early in training: 3.4 times as large, and other means."""
    at = Boundary(kind)
    at.learn()
    at.round += away
    at.honest.size *= 3.4
    at.honest.table = at.honest.draw.standard_normal(at.honest.table.shape)
    assert [at.play() for _ in range(3)] == [None] * 3
    assert at.play(lie=lambda x: 4 * x) is not None
    assert at.play(lie=lambda x: -x) is not None


class Learning:
    """Frames of a stage that learns as quickly as early in training: within a round of `frames` sizes grow by `growth`
    (in nats), at its end they fall back to what the outer step took over, a `kept` part. Gradients are the smaller the
    larger activations are."""

    def __init__(self, kind: int, growth: float, kept: float, frames: int) -> None:
        self.at, self.growth, self.kept, self.frames, self.base = Boundary(kind), growth, kept, frames, 0.0

    def play(self, lie: float = 1.0, since: int = 0) -> str | None:
        at = self.at
        at.round += 1
        at.screen.begin("neighbour", at.round, 0)
        for n in range(self.frames):
            ids = at.honest.ids()
            grown = math.exp(self.base + self.growth * n / self.frames)
            x = (
                at.honest.frame(ids)
                * (grown if at.screen.kind == FORWARD else 1 / grown)
                * (lie if n >= since else 1.0)
            )
            said = at.screen.judge(at.screen.sample(x), ids, math.log(grown))
            if said is not None:
                return said
        self.base += self.kept * self.growth
        return None


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("growth", "kept", "frames"), [(4.0, 0.05, 100), (2.0, 0.5, 40), (-2.0, 0.5, 40), (0.05, 1.0, 1), (1.5, 0.0, 32)]
)
def test_what_learning_does_to_sizes_is_no_lie_and_lies_on_top_of_it_are_found(
    growth: float, kept: float, frames: int, kind: int
) -> None:
    """The reference followed sizes within rounds, and took what an outer step takes back for a lie."""
    stage = Learning(kind, growth, kept, frames)
    rounds = max(8, 2 * NEW_FRAMES // frames)
    assert [stage.play() for _ in range(rounds)] == [None] * rounds
    stage.growth /= 4
    assert [stage.play() for _ in range(4)] == [None] * 4
    said = [stage.play(lie=0.25, since=frames // 3) for _ in range(1 if frames > 16 else 12)]
    assert any(one is not None and "times as large" in one for one in said)


def test_a_gradient_is_as_much_smaller_as_activations_became_larger() -> None:
    """Nothing says so but the size of what this stage sent: the same gradients without it are strange."""
    for own, believed in ((math.log(4), True), (0.0, False)):
        at = Boundary(BACKWARD)
        at.learn()
        said = None
        for _ in range(ROUND):
            said = said or at.see(1 / 4, own)
        assert (said is None) == believed


def test_whoever_comes_after_a_liar_is_not_accused_for_what_the_liar_taught() -> None:
    at = Boundary(FORWARD)
    at.learn()
    assert at.play(lie=lambda x: -x) is not None
    at.screen.begin("another", at.round, 0)
    assert [at.see(-1) for _ in range(50)] == [None] * 50
    at.screen.begin("another", at.round + 1, 0)
    assert at.see() is None, "the reference is new"


def test_the_stage_beside_the_liar_is_the_first_to_accuse() -> None:
    """In the order in which values pass the stages, each is more patient than the one before."""
    order = [(FORWARD, 1), (FORWARD, 2), (FORWARD, 3), (BACKWARD, 2), (BACKWARD, 1), (BACKWARD, 0)]
    patience = []
    for kind, position in order:
        at = Boundary(kind)
        at.learn()
        at.screen.begin("neighbour", at.round, screening.hops(kind, position, 4))
        patience.append(next(n for n in itertools.count(1) if at.see(-1) is not None))
    assert patience == sorted(set(patience))


def test_too_few_values_are_not_screened() -> None:
    draw = np.random.default_rng(0)
    assert Screen(FORWARD, LEAST_WIDTH - 1, draw).sample(torch.ones(1, 200, LEAST_WIDTH - 1)) is None
    assert Screen(FORWARD, LEAST_WIDTH, draw).sample(torch.ones(1, LEAST_TOKENS - 1, LEAST_WIDTH)) is None
    found = Screen(FORWARD, LEAST_WIDTH, draw).sample(torch.ones(1, LEAST_TOKENS, LEAST_WIDTH))
    assert found.shape == (LEAST_TOKENS, LEAST_WIDTH)


def test_what_is_sampled_differs_from_stage_to_stage() -> None:
    x = torch.arange(4096 * 64, dtype=torch.float32).reshape(1, 4096, 64)
    samples = [Screens().of(FORWARD, "head", 64, "int4").sample(x) for _ in range(2)]
    assert not np.array_equal(*samples)


def test_references_are_bounded_in_number_and_belong_to_a_cut_a_width_and_a_format() -> None:
    screens = Screens(0)
    first = screens.of(FORWARD, "block.1", 32, "int4")
    assert screens.of(FORWARD, "block.1", 32, "int4") is first
    others = [
        screens.of(BACKWARD, "block.1", 32, "int4"),
        screens.of(FORWARD, "block.2", 32, "int4"),
        screens.of(FORWARD, "block.1", 16, "int4"),
        screens.of(FORWARD, "block.1", 32, "bf16"),
    ]
    assert len({id(first), *map(id, others)}) == 5
    for i in range(MOST):
        screens.of(FORWARD, f"block.{i + 10}", 32, "int4")
    assert screens.of(FORWARD, "block.1", 32, "int4") is not first


def test_after_a_spike_one_round_is_free_and_what_it_has_is_usual() -> None:
    at = Boundary(FORWARD)
    at.learn()
    at.screen.follow(1.0)
    assert [at.play(lie=lambda x: 3.7 * x) for _ in range(2)] == [None, None]
    assert at.play(lie=lambda x: x) is not None


# --- a real chain

TRAIN = TrainSpec(inner_steps=2, micro_batches=16, rows=8, sequence=12, lr=1e-3, warmup_steps=2, total_steps=40)
CUTS = (2, 3, 4)


class Liar(StageTrainer):
    """Sends the negative of its activations, or of its gradients, once `lies` says so."""

    lies = ""

    def forward(self, *arguments: object, **options: object) -> Tensor:
        sent = super().forward(*arguments, **options)  # type: ignore[arg-type]
        return -sent if self.lies == "forward" else sent

    def backward(self, *arguments: object) -> Tensor | None:
        sent = super().backward(*arguments)  # type: ignore[arg-type]
        return -sent if self.lies == "backward" and sent is not None else sent


async def round_of(
    trainers: list[StageTrainer], screens: list[Screens], round: int, said: dict[int, float] | None = None
) -> list[BaseException | None]:
    """One round of a chain with jitter; how each stage's part ended. `said`: reports of lost neighbours."""
    now, told = asyncio.get_running_loop().time, {} if said is None else said
    async with Wired(len(trainers), random.Random(round)) as wired:
        tasks = [
            asyncio.create_task(
                steps_of(
                    trainer,
                    worker(i),
                    first_step=2 * round - 1,
                    steps=2,
                    previous=wired.previous[i],
                    following=wired.following[i],
                    wires=("int4", "sym2"),
                    read=read_of(SPEC, TRAIN),
                    place=Place(screens[i], round, i, len(trainers)),
                    on_lost=lambda _, i=i: told.setdefault(i, now()),
                )
            )
            for i, trainer in enumerate(trainers)
        ]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    return [end if isinstance(end, BaseException) else None for end in ended]


@pytest.mark.parametrize(("liar", "lies", "accuser"), [(1, "forward", 2), (2, "backward", 1)])
def test_a_chain_names_the_one_that_lies_and_only_it(liar: int, lies: str, accuser: int) -> None:
    trainers = make_chain(CUTS, 16, TRAIN, kind=Liar)
    screens = [Screens(i) for i in range(len(trainers))]
    for round in range(1, NEW_ROUNDS + 3):
        assert asyncio.run(round_of(trainers, screens, round)) == [None] * len(trainers)
    trainers[liar].lies = lies
    said = dict[int, float]()
    ended = asyncio.run(round_of(trainers, screens, NEW_ROUNDS + 3, said))
    named = {i: end for i, end in enumerate(ended) if isinstance(end, NeighbourLost) and end.reason.startswith(LIES)}
    assert list(named) == [accuser]
    assert named[accuser].peer == f"P{liar}"
    assert liar in said
    assert all(at - said[accuser] > 0.9 * HEAD_START_S for i, at in said.items() if i != accuser), "it is heard first"


def test_a_stage_that_cannot_send_what_it_made_of_lies_names_the_liar() -> None:
    crossing = BoundarySpec(
        form=torch.float32,
        shape=(1, 4, 16), wires={FORWARD: "int4", BACKWARD: "int4"}, micro_batches=1, most_depth=1, most_bytes=64,
        device=torch.device("cpu"),
    )  # fmt: skip
    huge = torch.full(crossing.shape, 2 * quantize.LIMIT)

    async def send(doubt: str | None) -> BaseException:
        screen = Screens(0).of(FORWARD, "head", 16, "int4")
        screen.begin("liar", 1, 0)
        screen.doubt = doubt
        async with Wired(2) as wired:

            async def fails() -> None:
                async with asyncio.TaskGroup() as group:
                    near = Neighbours(crossing, codec, Statistics(), 1)
                    near.screens[FORWARD] = screen
                    near.send(near.connect(wired.following[0], group, 1.0, LIVENESS), BACKWARD, 1, 0, huge)

            with ThreadPoolExecutor(1) as codec, pytest.raises(BaseExceptionGroup) as failed:
                await fails()
        (error,) = failed.value.exceptions
        return error

    error = asyncio.run(send("activations are zero"))
    assert isinstance(error, NeighbourLost)
    assert (error.peer, error.reason.split(",")[0]) == ("liar", f"{LIES}activations are zero")
    assert isinstance(asyncio.run(send(None)), LocalError), "its own fault, as far as it knows"
