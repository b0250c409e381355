"""Whether what a neighbour sends can be what it should: activations and gradients of this text, by an honest stage.

After SENTINEL: exponential means of what was accepted, and what lies too far from them is suspicious. Of each frame [T tokens, W values] a
sample y [N, D] is looked at, of tokens and values that only this stage knows. Two figures of it are compared with those before:

    size        of activations    log rms(y)              suspicious further than SIZE, or 3 times its spread, from what is usual
                of gradients      log rms(y) + log rms(a)     the same; a: the activations that this stage sent for the micro-batch
    agreement   the cosine of c and R, over all of y      suspicious below FIT of its mean, and 3 times its spread below, where that is INFORMATIVE

c is y less its mean over the tokens. R has for each token the mean of what came at tokens of its *class* before, less its mean over the
tokens. The class is the token's id modulo CLASSES; of a gradient, the id of the token that follows, which it was to predict. So noise and
replays do not fit the text (agreement about 0), values of the other sign contradict it (below 0), and zeros and scaled values have the
wrong size. No history of frames is needed to find a replay.

Sizes change by factors while a model learns, and a screen must not take that for a lie (docs/adr/0060-what-sizes-are-usual.md):

- With the normalization before each block, the loss hardly changes where activations at a cut grow by a factor, so gradients there shrink by that factor.
  Their product stays, so that is what a gradient's size is compared by; this stage knows its own part of it.
- Within a round sizes drift with the steps, and the usual size follows. At a round's beginning all stages go back to the state of the
  run, of which an outer step has taken over something between nothing and all of the round before. So anything is usual between the size of
  the first frames of the round before and that of its last ones; with each frame, the interval shrinks towards what comes.
- A stage's texts may be so different that sizes are, too; the spread of what was accepted says so. It counts as MOST_SPREAD at most.

One suspicious frame says nothing: a rare text brings some. It adds 1 to a score, any other takes HONEST away; at ALARM + HOP x hops the
neighbour is accused. The score goes on in the next round, which may have one frame. What an honest stage makes of false
values is strange too, so the stage beside the liar has to be the first to accuse: `hops` counts the stages that values
have passed, forward and back, on their way from the chain's beginning. A suspicious frame enters nothing, least of all
the spread: lies would widen the limits by which they are judged.

A reference belongs to a cut of the model, a width and a number format, and goes on from round to round, whoever the neighbour is:
all honest stages before a cut compute the same function. Its first NEW_ROUNDS rounds are free, and its first NEW_FRAMES frames.

What is usual is learned anew, and one whole round is free, in two cases. Where the learning rate rises at once, honest stages change at once
too (`follow`). And where no frames came in the round before, because the cut was elsewhere, the model has changed unseen: early in training
sizes double within two rounds.

A reference may have been learned from a liar. So when the neighbour that comes after an accused one seems to lie at once, nobody is accused,
and the reference is begun anew.

Frames with fewer than LEAST_WIDTH values a token or LEAST_TOKENS tokens say too little, and are not screened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peer.chain.frames import FORWARD

LEAST_WIDTH = 16
LEAST_TOKENS = 64
NEW_ROUNDS = 3
NEW_FRAMES = 48
TOKENS, VALUES, CLASSES = 128, 32, 128
"""N, D, and classes of tokens."""
SIZE = 0.9
FIT = 0.4
INFORMATIVE = 0.12
SPREADS = 3.0
MOST_SPREAD = 0.6
"""Of sizes; larger ones count as this."""
ALARM = 7.0
HOP = 1.5
HONEST = 0.34
FIRST, LEVEL_MEMORY, MEMORY, CLASS_MEMORY = 4, 6, 12, 24
"""Frames: the first of a round; memory of the usual size; of the agreement and the spreads; of the classes' means."""
STALE = 0.1
"""What the means of the classes weigh where they are learned anew,"""
RISE = 2.0
"""and how many times the learning rate of the step before one is that rises at once."""
CLEARED = 64
"""Accepted frames, after which it is no more in question whether the reference or the last accused was wrong."""
MOST = 16
"""References that are remembered; the one that began first is forgotten first."""
_TINY = 1e-30

Sample = NDArray[np.float32]
Ids = NDArray[np.integer]


class Figures(NamedTuple):
    """Of one frame's sample: log rms of it; see the module."""

    log_rms: float
    agreement: float


class Usual:
    """What sizes are usual: between `low` and `high`, as far as their `spread` goes. `begin` says that a round begins."""

    def __init__(self) -> None:
        self.low = self.high = self.spread = self._first = 0.0
        self._frames = -1

    def begin(self) -> None:
        if self._frames > 0:
            self.low, self.high = min(self.low, self._first), max(self.high, self._first)
            self._frames = 0

    def off(self, size: float) -> float:
        """How far the size is outside; 0 within."""
        return size - min(max(size, self.low), self.high) if self._frames >= 0 else 0.0

    def is_strange(self, size: float) -> bool:
        return abs(self.off(size)) > max(SIZE, SPREADS * min(self.spread, MOST_SPREAD))

    def add(self, size: float) -> None:
        """Takes a frame into account."""
        self.spread += (min(abs(self.off(size)), 2 * SIZE) - self.spread) / MEMORY
        if self._frames < 0:
            self.low = self.high = size
        self._frames = max(self._frames, 0) + 1
        if self._frames <= FIRST:
            self._first += (size - self._first) / self._frames if self._frames > 1 else size - self._first
        pace = 1 / min(self._frames + 1, LEVEL_MEMORY)
        self.low += pace * (size - self.low)
        self.high += pace * (size - self.high)


def log_rms(sample: Sample | None) -> float:
    """Of what was sampled; 0 where nothing was."""
    return 0.0 if sample is None else math.log(math.sqrt(float(np.square(sample).mean())) + _TINY)


def hops(kind: int, position: int, stages: int) -> int:
    """Stages that have made what comes in at `position`, from 0, of a chain of so many stages, before the one that sent it."""
    return position - 1 if kind == FORWARD else 2 * stages - 3 - position


class Screen:
    """The reference for one cut and direction, and the `neighbour` that is there now. `draw`: what is sampled follows from it. `doubt`: what
    was suspicious about the last frame."""

    def __init__(self, kind: int, width: int, draw: np.random.Generator) -> None:
        self.kind, self.width = kind, width
        self._values = torch.from_numpy(np.sort(draw.permutation(width)[:VALUES]))
        self._first = float(draw.random())
        self.neighbour, self._accused, self._round, self._alarm_at = "", "", 0, ALARM
        self._rate = 0.0
        self._forget()

    def _forget(self) -> None:
        values = len(self._values)
        self._sums, self._counts = np.zeros((CLASSES, values), np.float32), np.zeros(CLASSES, np.float32)
        self.doubt: str | None = None
        self._usual = Usual()
        self._agreement = self._spread = self._score = 0.0
        self._frames = self._rounds = self._accepted = self._known = 0

    def begin(self, neighbour: str, round: int, hops: int) -> None:
        """From now on frames of `neighbour` come, in this round of the run."""
        if round - self._round > 1:
            self._learn_anew()
        if round != self._round:
            self._rounds += 1
            self._usual.begin()
        if neighbour != self.neighbour:
            self._score = 0.0
        self.neighbour, self._round, self.doubt = neighbour, round, None
        self._alarm_at = ALARM + HOP * hops

    def follow(self, rate: float) -> None:
        """A step was taken with this learning rate."""
        if rate > RISE * self._rate:
            self._learn_anew()
        self._rate = rate

    def _learn_anew(self) -> None:
        self._frames, self._rounds, self._score = 0, min(self._rounds, NEW_ROUNDS - 1), 0.0
        self._usual = Usual()
        self._sums *= np.float32(STALE)
        self._counts *= np.float32(STALE)

    def sample(self, x: Tensor) -> Sample | None:
        """What is looked at of a frame's values [.., W]; None where they are too few."""
        x_TW = x.reshape(-1, x.shape[-1])
        if x_TW.shape[0] < LEAST_TOKENS or self.width < LEAST_WIDTH:
            return None
        first, stride = self._places(x_TW.shape[0])
        chosen = x_TW[first::stride][:TOKENS].index_select(1, self._values.to(x.device))
        return np.asarray(chosen.float().cpu().numpy())

    def _places(self, tokens: int) -> tuple[int, int]:
        stride = max(1, tokens // TOKENS)
        return int(self._first * stride), stride

    def judge(self, sample: Sample | None, ids: Ids, own: float = 0.0) -> str | None:
        """What speaks against the neighbour, after this frame too; None where that is not enough. `ids` [B, L+1]: the token ids of the
        micro-batch. `own`: of a gradient, log rms of the activations of the micro-batch that this stage has sent."""
        if sample is None:
            return None
        of = (ids[:, :-1] if self.kind == FORWARD else ids[:, 1:]).reshape(-1)
        first, stride = self._places(len(of))
        classes = of[first::stride][:TOKENS] % CLASSES
        seen = self.figures(sample, classes)
        size = seen.log_rms + (own if self.kind != FORWARD else 0.0)
        free = self._rounds <= NEW_ROUNDS or self._known < NEW_FRAMES
        why = None if free else self._suspicion(seen, size)
        self.doubt = why and self._say(why)
        if why is None:
            self._score = max(0.0, self._score - HONEST)
            self._usual.add(size)
            self._add(seen, sample, classes)
            return None
        self._score += 1
        return self._alarm(why) if self._score >= self._alarm_at else None

    @property
    def suspicion(self) -> float:
        """How near the neighbour is to an accusation: 0 to 1."""
        return self._score / self._alarm_at

    def figures(self, sample: Sample, classes: Ids) -> Figures:
        """Of a sample [N, D] at tokens of these classes [N]."""
        fit = (self._sums / (self._counts + 1e-9)[:, None])[classes]
        fit -= fit.mean(0)
        centred = sample - sample.mean(0)
        norms = float(np.linalg.norm(centred)) * float(np.linalg.norm(fit))
        return Figures(log_rms(sample), float(np.vdot(centred, fit)) / norms if norms > _TINY else 0.0)

    def _suspicion(self, seen: Figures, size: float) -> str | None:
        if self._usual.is_strange(size):
            off = self._usual.off(size)
            return f"are {math.exp(min(off, 60.0)):.3g} times as large as before" if off > -14 else "are zero"
        least = min(FIT * self._agreement, self._agreement - SPREADS * self._spread)
        if self._agreement > INFORMATIVE and seen.agreement < least:
            return "contradict their text" if seen.agreement < -FIT * self._agreement else "do not fit their text"
        return None

    def _alarm(self, why: str) -> str | None:
        if self._accused not in ("", self.neighbour) and self._accepted < CLEARED:
            self._forget()
            self._accused = ""
            return None
        self._accused, self._accepted, self._score = self.neighbour, 0, 0.0
        return self._say(why)

    def _say(self, why: str) -> str:
        return f"{'activations' if self.kind == FORWARD else 'gradients'} {why}"

    def _add(self, seen: Figures, sample: Sample, classes: Ids) -> None:
        """Takes a frame into the reference."""
        self._frames += 1
        self._known += 1
        self._accepted += 1
        off = seen.agreement - self._agreement
        self._agreement += off / min(self._frames, MEMORY)
        self._spread += (min(abs(off), 1.0) - self._spread) / min(self._frames, MEMORY)
        keep = np.float32(1 - 1 / CLASS_MEMORY)
        self._sums *= keep
        # not as a product of matrices: numpy's library for these would take all cores
        np.add.at(self._sums, classes, sample * np.float32(math.exp(-seen.log_rms) if seen.log_rms > -60 else 0.0))
        self._counts *= keep
        np.add.at(self._counts, classes, np.float32(1))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer's screens stand in a chain of this round of the run: at `position`, from 0, of so many stages."""

    screens: Screens
    round: int
    position: int
    stages: int

    def of(self, kind: int, neighbour: str, shard: str, width: int, wire: str) -> Screen:
        """For what comes from this neighbour; the rest as in `Screens.of`."""
        screen = self.screens.of(kind, shard, width, wire)
        screen.begin(neighbour, self.round, hops(kind, self.position, self.stages))
        return screen


class Screens:
    """Of all boundaries of a peer. `seed`: None for samples that nobody can foresee."""

    def __init__(self, seed: int | None = None) -> None:
        self._draw = np.random.default_rng(seed)
        self._screens: dict[tuple[int, str, int, str], Screen] = {}

    def of(self, kind: int, shard: str, width: int, wire: str) -> Screen:
        """For frames of this kind (peer/chain/frames.py) that come in at `shard`, with `width` values a token in this number format."""
        key = (kind, shard, width, wire)
        if key not in self._screens:
            if len(self._screens) >= MOST:
                del self._screens[next(iter(self._screens))]
            self._screens[key] = Screen(kind, width, self._draw)
        return self._screens[key]
