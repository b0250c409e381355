"""Whether what a neighbour sends can be what it should: activations and gradients of this text, by an honest stage.

After SENTINEL: exponential means of what was accepted, and what lies too far from them is suspicious. Of each frame [T tokens, W values] a
sample y [N, D] is looked at, of tokens and values that only this stage knows. Two figures of it are compared with those before:

    size        log rms(y)                            suspicious further than SIZE from its mean
    agreement   the cosine of c and R, over all of y  suspicious below FIT of its mean, where that is INFORMATIVE

c is y less its mean over the tokens. R has for each token the mean of what came at tokens of its *class* before, less its mean over the
tokens. The class is the token's id modulo CLASSES; of a gradient, the id of the token that follows, which it was to predict. So noise and
replays do not fit the text (agreement about 0), values of the other sign contradict it (below 0), and zeros and scaled values have the
wrong size. No history of frames is needed to find a replay.

One suspicious frame says nothing: a rare text brings some. It adds 1 to a score, any other takes HONEST away; at ALARM + HOP x hops the
neighbour is accused. What an honest stage makes of false values is strange too, so the stage beside the liar has to be the first to
accuse: `hops` counts the stages that values have passed, forward and back, on their way from the chain's beginning (`hops`). A suspicious
frame moves the mean size little, and the others not at all. One that is refused enters nothing.

A reference belongs to a cut of the model, a width and a number format, and goes on from round to round, whoever the neighbour is:
all honest stages before a cut compute the same function. Its first NEW_ROUNDS rounds are free.

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
TOKENS, VALUES, CLASSES = 128, 32, 128
"""N, D, and classes of tokens."""
SIZE = 0.85
FIT = 0.4
INFORMATIVE = 0.12
ALARM = 5.0
HOP = 1.5
HONEST = 0.34
MEMORY = 12
"""Frames, about, that the means of size and agreement remember,"""
CLASS_MEMORY = 24
"""and the means of the classes."""
SLOWLY = 1 / 48
"""How far a suspicious frame moves the mean size, as a share of SIZE."""
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
    """Of one frame's sample; see the module."""

    size: float
    agreement: float


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
        self._size = self._agreement = self._score = 0.0
        self._frames = self._rounds = self._accepted = 0

    def begin(self, neighbour: str, round: int, hops: int) -> None:
        """From now on frames of `neighbour` come, in this round of the run."""
        if round - self._round > 1:
            self._learn_anew()
        self._rounds += round != self._round
        self.neighbour, self._round, self._score, self.doubt = neighbour, round, 0.0, None
        self._alarm_at = ALARM + HOP * hops

    def follow(self, rate: float) -> None:
        """A step was taken with this learning rate."""
        if rate > RISE * self._rate:
            self._learn_anew()
        self._rate = rate

    def _learn_anew(self) -> None:
        self._frames, self._rounds = 0, min(self._rounds, NEW_ROUNDS - 1)
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

    def judge(self, sample: Sample | None, ids: Ids) -> str | None:
        """What speaks against the neighbour, after this frame too; None where that is not enough. `ids` [B, L+1]: the token ids of the
        micro-batch."""
        if sample is None:
            return None
        of = (ids[:, :-1] if self.kind == FORWARD else ids[:, 1:]).reshape(-1)
        first, stride = self._places(len(of))
        classes = of[first::stride][:TOKENS] % CLASSES
        seen = self.figures(sample, classes)
        why = self._suspicion(seen) if self._rounds > NEW_ROUNDS else None
        self._score = self._score + 1 if why is not None else max(0.0, self._score - HONEST)
        self.doubt = why and self._say(why)
        if why is not None and self._score >= self._alarm_at:
            return self._alarm(why)
        self._add(seen, sample, classes, why is None)
        return None

    def figures(self, sample: Sample, classes: Ids) -> Figures:
        """Size and agreement of a sample [N, D] at tokens of these classes [N]."""
        size = math.log(math.sqrt(float(np.square(sample).mean())) + _TINY)
        fit = (self._sums / (self._counts + 1e-9)[:, None])[classes]
        fit -= fit.mean(0)
        centred = sample - sample.mean(0)
        norms = float(np.linalg.norm(centred)) * float(np.linalg.norm(fit))
        return Figures(size, float(np.vdot(centred, fit)) / norms if norms > _TINY else 0.0)

    def _suspicion(self, seen: Figures) -> str | None:
        off = seen.size - self._size
        if off > SIZE:
            return f"are {math.exp(min(off, 60.0)):.3g} times as large as before"
        if off < -SIZE:
            return f"are {math.exp(off):.3g} times as large as before" if off > -14 else "are zero"
        if self._agreement > INFORMATIVE and seen.agreement < FIT * self._agreement:
            return "contradict their text" if seen.agreement < -FIT * self._agreement else "do not fit their text"
        return None

    def _alarm(self, why: str) -> str | None:
        if self._accused not in ("", self.neighbour) and self._accepted < CLEARED:
            self._forget()
            self._accused = ""
            return None
        self._accused, self._accepted = self.neighbour, 0
        return self._say(why)

    def _say(self, why: str) -> str:
        return f"{'activations' if self.kind == FORWARD else 'gradients'} {why}"

    def _add(self, seen: Figures, sample: Sample, classes: Ids, good: bool) -> None:
        """Takes a frame into the reference."""
        if not good:
            self._size += SLOWLY * min(max(seen.size - self._size, -SIZE), SIZE)
            return
        self._frames += 1
        self._accepted += 1
        pace = 1 / min(self._frames, MEMORY)
        self._size += pace * (seen.size - self._size)
        self._agreement += pace * (seen.agreement - self._agreement)
        keep = np.float32(1 - 1 / CLASS_MEMORY)
        self._sums *= keep
        # not as a product of matrices: numpy's library for these would take all cores
        np.add.at(self._sums, classes, sample * np.float32(math.exp(-seen.size) if seen.size > -60 else 0.0))
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
