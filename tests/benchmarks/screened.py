"""A chain of real stages in one process, with encoded, decoded and screened frames (peer/chain/neighbours.py).

A `Setup` has the chain and its training. After each round the update goes through the outer step with its codec, as in
a run of one replica, and all stages begin the next round from the result.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.chain import quantize
from peer.chain.frames import BACKWARD, FORWARD
from peer.chain.screening import Place, Screen, Screens, log_rms
from peer.demo.recipe import SEQUENCE, demo_corpus
from peer.state.outer_optimizer import Outer
from peer.training.optimizer import Pace
from peer.training.trainer import StageTrainer
from protocol.codec.formats import Codec
from protocol.run import corpus, init, layout
from protocol.run.layout import ModelSpec
from protocol.run.manifest import TrainSpec
from tests.support.chains import split_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A chain and its training.

    residual_width: values per token at a boundary; 0 for all.
    forward, backward: number formats.
    vocabulary: token ids are taken modulo this.
    inner_steps: of a round, at most.
    sequence: tokens of a row, at most SEQUENCE.
    topk: entries of an update that are sent, of every 4096.
    """

    stages: int = 4
    layers: int = 4
    width: int = 64
    vocabulary: int = 4096
    residual_width: int = 16
    forward: str = "int8"
    backward: str = "int4"
    optimizer: str = "adamw"
    lr: float = 2e-3
    warmup_steps: int = 20
    inner_steps: int = 8
    micro_batches: int = 4
    rows: int = 1
    sequence: int = SEQUENCE
    topk: int = 256
    rounds: int = 50

    @property
    def boundary(self) -> int:
        """Values per token at a boundary."""
        return self.residual_width or self.width


Send = Callable[[int, int, int, Tensor], Tensor]
"""Changes a frame before it is sent: (kind, sender, micro-batch of the round, tensor) to tensor."""
Said = Callable[[int, int, str], None]
"""Hears of an accusation: (accuser, accused, reason)."""


def honest(kind: int, sender: int, micro: int, x: Tensor) -> Tensor:
    """Sends a frame as it is."""
    return x


class Chain:
    """The stages and their peers' screens.

    seed: of the text, the model and the screens' samples.
    said: called with each accusation. It may raise; otherwise the frame is used.
    cuts: the first block of each stage but the first.
    closest: the largest `Screen.suspicion` of any neighbour; 1 if one was accused.
    """

    def __init__(self, setup: Setup, seed: int, said: Said) -> None:
        self.setup, self.said, self.seed = setup, said, seed
        self.key = f"screened/{seed}".encode().ljust(32, b"/")
        self.spec = ModelSpec(
            vocab_size=setup.vocabulary, d_model=setup.width, n_layers=setup.layers, n_heads=4, d_ff=2 * setup.width,
            context=SEQUENCE, residual_width=setup.residual_width,
        )  # fmt: skip
        self.train = TrainSpec(
            inner_steps=setup.inner_steps, micro_batches=setup.micro_batches, rows=setup.rows, sequence=setup.sequence,
            lr=setup.lr, warmup_steps=setup.warmup_steps, total_steps=setup.rounds * setup.inner_steps,
            optimizer=setup.optimizer,
        )  # fmt: skip
        self.outer = Outer(self.spec, Codec(topk=setup.topk), 0.95, 1.0)
        for shard in layout.shard_names(self.spec):
            self.outer.theta[shard] = list(init.initial_shard(self.spec, self.key, shard))
        self.peers = [Screens(1000 * seed + i) for i in range(setup.stages)]
        self.stages: list[StageTrainer] = []
        self.screens: dict[tuple[int, int], Screen] = {}
        self.cuts: tuple[int, ...] = ()
        self._own = dict[int, float]()
        self.closest = 0.0
        self.corpus, self._moments = demo_corpus(), dict[str, NDArray[np.generic]]()
        step = setup.layers // setup.stages
        self.cut(tuple(step * i for i in range(1, setup.stages)))

    def cut(self, cuts: tuple[int, ...]) -> None:
        """Begins the stages at these blocks, from the next round on."""
        for stage in self.stages:
            self._moments.update(stage.optimizer_state())
        self.cuts = cuts
        stages = split_shards([cut + 1 for cut in cuts], self.spec)
        self.stages = [StageTrainer(self.spec, self.train, shards) for shards in stages]
        for stage in self.stages:
            stage.load_optimizer(self._moments)

    def state(self) -> object:
        """Returns a copy of the state that a round changes."""
        return copy.deepcopy((self.stages, self.peers, self.outer.theta, self.outer.feedback))

    def restore(self, state: object) -> None:
        """Restores a state that `state` returned."""
        self.stages, self.peers, self.outer.theta, self.outer.feedback = copy.deepcopy(state)  # type: ignore[misc]

    def play(self, round: int, steps: int, send: Send = honest, screened: bool = True, spike: int = -1) -> float:
        """Trains a round of `steps` inner steps, and returns the loss.

        round: counted from 1.
        spike: the step whose learning rate is ten times as high; -1: none.
        """
        pace = Pace((round - 1) * self.setup.inner_steps, steps, self.setup.micro_batches)
        for stage in self.stages:
            stage.begin_round(self.outer.theta, pace)
        self.screens = dict(self._screens(round)) if screened else {}
        losses = list[float]()
        for step, ids in enumerate(self._text(round, steps)):
            for micro, part in enumerate(ids.reshape(self.setup.micro_batches, self.setup.rows, -1)):
                losses.append(self._micro_batch(step * self.setup.micro_batches + micro, part, send))
            norm = math.sqrt(sum(value for stage in self.stages for _, value in stage.grad_sumsq()))
            for stage in self.stages:
                usual = stage.train
                if step == spike:
                    stage.train = dataclasses.replace(usual, lr=10 * usual.lr)
                stage.step(pace.before + step + 1, norm)
                rate = pace.rate(stage.train, pace.before + step + 1)
                stage.train = usual
            for screen in self.screens.values():
                screen.follow(rate)
        self._apply()
        return sum(losses) / len(losses)

    def _screens(self, round: int) -> Iterator[tuple[tuple[int, int], Screen]]:
        last = len(self.stages) - 1
        for i, stage in enumerate(self.stages):
            place = Place(self.peers[i], round, i, len(self.stages))
            for kind, there, wire, other in (
                (FORWARD, i > 0, self.setup.forward, i - 1), (BACKWARD, i < last, self.setup.backward, i + 1),
            ):  # fmt: skip
                if there:
                    shard = stage.own[0] if kind == FORWARD else stage.own[-1]
                    yield (i, kind), place.of(kind, f"stage {other}", shard, self.setup.boundary, wire)

    def _text(self, round: int, steps: int) -> Iterator[Tensor]:
        rows = self.setup.micro_batches * self.setup.rows
        for step in range(steps):
            at = corpus.slots(round * self.setup.inner_steps * rows, step, rows)
            ids = torch.tensor(self.corpus.slots(self.key, at).astype(np.int64)) % self.setup.vocabulary
            yield ids[:, : self.setup.sequence + 1]

    def _apply(self) -> None:
        for stage in self.stages:
            for shard in stage.shards:
                self.outer.accumulate(shard, stage.displacement(shard))
                payload, _ = self.outer.encode(shard)
                self.outer.apply(shard, [(1.0, payload)])

    def _micro_batch(self, micro: int, ids: Tensor, send: Send) -> float:
        at = micro % self.setup.micro_batches
        x: Tensor | None = None
        for i, stage in enumerate(self.stages):
            x = stage.forward(at, ids, x)
            if i < len(self.stages) - 1:
                x = self._cross(FORWARD, i, i + 1, send(FORWARD, i, micro, x), ids)
        assert x is not None
        gradient: Tensor | None = None
        for i in reversed(range(len(self.stages))):
            gradient = self.stages[i].backward(at, gradient)
            if i and gradient is not None:
                gradient = self._cross(BACKWARD, i, i - 1, send(BACKWARD, i, micro, gradient), ids)
        return float(x)

    def _cross(self, kind: int, sender: int, by: int, x: Tensor, ids: Tensor) -> Tensor:
        wire, screen = self.setup.backward if kind == BACKWARD else self.setup.forward, self.screens.get((by, kind))
        came = quantize.decode(quantize.encode(x, wire), x.shape, wire, x.device)
        if (back := self.screens.get((sender, BACKWARD))) is not None and kind == FORWARD:
            self._own[sender] = log_rms(back.sample(x))
        own = self._own.get(by, 0.0) if kind == BACKWARD else 0.0
        why = None if screen is None else screen.judge(screen.sample(came), ids.numpy(), own)
        if screen is not None:
            self.closest = max(self.closest, 1.0 if why is not None else screen.suspicion)
        if why is not None:
            self.said(by, sender, why)
        return came
