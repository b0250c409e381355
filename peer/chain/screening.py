"""Screening of what neighbours send: detects activations and gradients that no honest stage computes from this text.

A sample y [N, D] of each frame [T tokens, W values] is compared with exponential means of the frames accepted before.
The sampled tokens and values are known to this stage only. Two figures:

    size        of activations    log rms(y)
                of gradients      log rms(y) + log rms(a), a: the activations sent for the same micro-batch
                suspicious        further from the usual size than SIZE, and than SPREADS times the usual deviation
    agreement                     cosine of c and R over all of y
                suspicious        below FIT of its mean, and SPREADS deviations below, where the mean is INFORMATIVE

c is y less its mean over the tokens. R holds for each token the mean of earlier values at tokens of its *class*, less
the mean over the tokens. The class is the token's id modulo CLASSES; for a gradient, the id of the next token, which
was to be predicted. Noise and replayed frames have an agreement of about 0, flipped signs one below 0, zeros and
scaled values the wrong size. Replays are found without a history of frames.

Sizes change by factors while a model learns (docs/adr/0060-what-sizes-are-usual.md):

- Blocks normalize their input. When activations at a cut grow, gradients there shrink by the same factor; the product
  stays, so a gradient is judged by it.
- Within a round sizes drift, and the usual size follows. A round begins from a state between those at which the last
  round began and ended. So at first any size between that round's first and last is usual; the interval shrinks
  with each frame.
- Texts differ, and sizes with them: the deviation of the accepted frames counts, up to MOST_SPREAD.

A single suspicious frame may be a rare text. It adds 1 to a score, any other frame takes HONEST away; a neighbour with
a score of ALARM + HOP x hops is accused. The score is kept over rounds, which may have one frame each. An honest stage
computes odd values from false ones, so the stage next to the liar must accuse first: `hops` is the number of stages
that the values have passed, forward and back. A suspicious frame changes no mean and no deviation: lies would widen
the limits by which they are judged.

A reference belongs to a cut of the model, a width and a number format. It is kept over rounds and neighbours, as all
honest stages before a cut compute the same function. Its first NEW_ROUNDS rounds and NEW_FRAMES frames are not judged.
It is learned again, with one round that is not judged, when the learning rate jumps (`follow`), and when the cut was
elsewhere in the round before: early in training sizes double within two rounds.

A reference may have been learned from a liar. If the neighbour that follows an accused one seems to lie at once, none
is accused, and the reference starts from the beginning.

Frames with fewer than LEAST_WIDTH values a token or LEAST_TOKENS tokens say too little and are not screened.
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
"""Sampled tokens N, sampled values D, and token classes."""
SIZE = 0.9
FIT = 0.4
INFORMATIVE = 0.12
SPREADS = 3.0
MOST_SPREAD = 0.6
"""Largest deviation of sizes that counts."""
ALARM = 8.0
HOP = 1.5
HONEST = 0.34
FIRST, LEVEL_MEMORY, MEMORY, CLASS_MEMORY = 4, 6, 12, 24
"""Frames: the first of a round; memory of the usual size; of the agreement and the spreads; of the classes' means."""
STALE = 0.1
"""Weight that the means of the classes keep when they are learned again."""
RISE = 2.0
"""Ratio of consecutive learning rates that is a jump."""
CLEARED = 64
"""Accepted frames after which an accusation is known to have been right, and the reference with it."""
MOST = 16
"""References that are kept; the oldest goes first."""
_TINY = 1e-30

Sample = NDArray[np.float32]
Ids = NDArray[np.integer]


class Figures(NamedTuple):
    """Figures of one sample (module docstring)."""

    log_rms: float
    agreement: float


class Usual:
    """The interval of usual sizes, `low` to `high`, and their deviation `spread`."""

    def __init__(self) -> None:
        self.low = self.high = self.spread = self._first = 0.0
        self._frames = -1

    def begin(self) -> None:
        """Begins a round."""
        if self._frames > 0:
            self.low, self.high = min(self.low, self._first), max(self.high, self._first)
            self._frames = 0

    def off(self, size: float) -> float:
        """Distance of `size` from the interval; 0 within it."""
        return size - min(max(size, self.low), self.high) if self._frames >= 0 else 0.0

    def is_strange(self, size: float) -> bool:
        return abs(self.off(size)) > max(SIZE, SPREADS * min(self.spread, MOST_SPREAD))

    def add(self, size: float) -> None:
        """Adds an accepted frame."""
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
    """log rms of a sample; 0 without one."""
    return 0.0 if sample is None else math.log(math.sqrt(float(np.square(sample).mean())) + _TINY)


def hops(kind: int, position: int, stages: int) -> int:
    """Number of stages that computed what arrives at `position` (from 0) of `stages`, less the sender."""
    return position - 1 if kind == FORWARD else 2 * stages - 3 - position


class Screen:
    """The reference for one cut and direction.

    draw: source of the sampled places
    neighbour: peer id of the present neighbour
    doubt: the suspicion about the last frame, None if there was none
    """

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
        """Begins a round of the run with this neighbour."""
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
        """Notes the learning rate of the step that was taken."""
        if rate > RISE * self._rate:
            self._learn_anew()
        self._rate = rate

    def _learn_anew(self) -> None:
        self._frames, self._rounds, self._score = 0, min(self._rounds, NEW_ROUNDS - 1), 0.0
        self._usual = Usual()
        self._sums *= np.float32(STALE)
        self._counts *= np.float32(STALE)

    def sample(self, x: Tensor) -> Sample | None:
        """The sample [N, D] of a frame's values [.., W]; None where they are too few."""
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
        """The reason to accuse the neighbour, None if there is none.

        ids: [B, L+1] token ids of the micro-batch
        own: for a gradient, log rms of the activations that this stage sent for the micro-batch
        """
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
        """Score as a share of the one that accuses the neighbour."""
        return self._score / self._alarm_at

    def figures(self, sample: Sample, classes: Ids) -> Figures:
        """Figures of a sample [N, D] at tokens of these classes [N]."""
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
        """Adds a frame to the reference."""
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
    """The place of a peer's screens in a chain of one round: `position` from 0, of `stages`."""

    screens: Screens
    round: int
    position: int
    stages: int

    def of(self, kind: int, neighbour: str, shard: str, width: int, wire: str) -> Screen:
        """The screen for frames of `neighbour`; other parameters as for `Screens.of`."""
        screen = self.screens.of(kind, shard, width, wire)
        screen.begin(neighbour, self.round, hops(kind, self.position, self.stages))
        return screen


class Screens:
    """The screens of a peer's boundaries. seed: None for samples that cannot be predicted."""

    def __init__(self, seed: int | None = None) -> None:
        self._draw = np.random.default_rng(seed)
        self._screens: dict[tuple[int, str, int, str], Screen] = {}

    def of(self, kind: int, shard: str, width: int, wire: str) -> Screen:
        """The screen for frames of this kind (peer/chain/frames.py) that arrive at `shard`.

        width: values a token
        wire: their number format
        """
        key = (kind, shard, width, wire)
        if key not in self._screens:
            if len(self._screens) >= MOST:
                del self._screens[next(iter(self._screens))]
            self._screens[key] = Screen(kind, width, self._draw)
        return self._screens[key]
