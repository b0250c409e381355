"""A model card of the Hugging Face hub for a run's model, with a picture of its losses.

Names and texts of peers and manifests are untrusted. The card's metadata and the picture have only numbers and words of
ours; in the card's text every mark of Markdown and HTML in a foreign text is escaped.
"""

from __future__ import annotations

import json
import math
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peer.ui.contributors import contributors
from peer.ui.run_view import HeldOutLosses
from peer.ui.state import Point, thinned
from peer.ui.text import Names, clean, number, typed
from protocol.identity import short_peer
from protocol.ledger.credits import Credits
from protocol.run import layout
from protocol.run.manifest import Manifest
from protocol.wire.commit import Commit
from protocol.wire.decree import CLOSE, OPEN

CARD, PICTURE = "README.md", "loss.svg"
UNKNOWN = "unknown"
"""The hub's word for a licence that nobody has told."""
MOST_CONTRIBUTORS = 50
MOST_POINTS = 400


class History:
    """What a run's log tells about the model after a round (None: the last one)."""

    def __init__(self, manifest: Manifest, until: int | None = None) -> None:
        self.credits = Credits(manifest.model.n_layers)
        self.losses: list[Point] = []
        """(round, nats per token)."""
        self.held_out = HeldOutLosses()
        self.began = self.ended = 0.0
        """Times of the first and the last commit, Unix seconds on the nodes' clocks."""
        self.names = Names()
        """Of the peers that are present; the log has none."""
        self.is_open = manifest.admission.is_open
        """Whether everybody may take part, by the newest decree."""
        self._until = until

    def add(self, commit: Commit) -> None:
        """The next commit of the log."""
        if commit.decree is not None and commit.decree.decree.action in (OPEN, CLOSE):
            self.is_open = commit.decree.decree.action == OPEN
        self.held_out.add([x for x in commit.evaluations if self._until is None or x.round <= self._until])
        if self._until is not None and commit.round > self._until:
            return
        self.credits.add(commit)
        self.began, self.ended = self.began or commit.time, commit.time
        if commit.loss is not None and math.isfinite(commit.loss):
            self.losses.append((float(commit.round), commit.loss))


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card says of a model."""

    manifest: Manifest
    round: int
    state: str
    """The digest of the state."""
    is_checked: bool
    """Whether the log gives that digest."""
    address: str
    """The run's line, for others to verify the model; empty if there is none to publish."""
    licence: str
    history: History | None
    """None if the log was not read."""

    def files(self) -> dict[str, bytes]:
        """The card and its picture, by name."""
        shown = self.picture()
        text = "\n".join((*self._metadata(), "", *self._lines(bool(shown)))) + "\n"
        return {CARD: text.encode()} | ({PICTURE: shown.encode()} if shown else {})

    def _metadata(self) -> Iterator[str]:
        kind = "qwen3" if self.manifest.model.use_qk_norm else "llama"
        yield "---"
        yield f"license: {json.dumps(self.licence)}"
        yield "library_name: transformers"
        yield "pipeline_tag: text-generation"
        yield "tags:"
        yield from (f"- {tag}" for tag in ("potluck", "distributed-training", "base-model", kind))
        yield "---"

    def _lines(self, with_picture: bool) -> Iterator[str]:
        name = escaped(self.manifest.name) or "A model of Potluck"
        yield from (f"# {name}", "")
        begun = "was pre-trained from scratch"
        if first := self.manifest.initial_digests:
            begun = f"went on from weights (state `{layout.state_digest(self.manifest.model, first)}`)"
        yield (
            f"A language model that {begun} with Potluck: over the internet, by machines that do not trust each other."
            " **It is a base model**: it continues a text. It was not trained to follow"
            " instructions, to be right, or to refuse anything, and it repeats what its text says."
        )
        yield ""
        yield from self._figures()
        yield from (
            "",
            "## Use it",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
        )
        yield 'model, tokenizer = (kind.from_pretrained(".") for kind in (AutoModelForCausalLM, AutoTokenizer))'
        yield 'ids = tokenizer("We the people", return_tensors="pt").input_ids'
        yield "print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))"
        yield "```"
        yield ""
        yield "`.` is this folder, or the name of its repository. The weights are in fp32."
        yield from ("", "## The text", "", *self._data())
        if with_picture:
            yield from ("", "## Loss", "", f"![Loss and bits per byte by round]({PICTURE})", "")
            yield "Training loss is measured before each round's update; held-out text is trained on by nobody."
        if self.history is not None:
            yield from ("", "## Who trained it", "", *_contributors(self.history))
        yield from ("", "## Verify it", "", *self._verifying())

    def _figures(self) -> Iterator[str]:
        spec, history = self.manifest.model, self.history
        kind = "Qwen3" if spec.use_qk_norm else "Llama"
        yield from ("| | |", "|---|---|")
        yield f"| parameters | {layout.total_parameters(spec):,} |"
        yield (
            f"| architecture | {kind}: {number(spec.n_layers, 'block')} of width {spec.d_model:,},"
            f" {number(spec.n_heads, 'head')}, {spec.vocab_size:,} token ids |"
        )
        yield f"| trained on sequences of | {self.manifest.train.sequence:,} tokens |"
        yield f"| rounds | {self.round:,} |"
        if history is None:
            yield "| tokens, losses, contributors | unknown: the card was made without the run's log |"
        else:
            yield f"| tokens | {history.credits.tokens:,} |"
            yield f"| trained | {_day(history.began)} to {_day(history.ended)} |"
            if history.losses:
                yield f"| training loss | {history.losses[-1][1]:.4f} nats per token in round {self.round:,} |"
            if (measured := history.held_out.newest) is not None:
                yield (
                    f"| on held-out text | {measured.loss:.4f} nats per token, {measured.bits_per_byte:.4f} bits per"
                    f" byte after round {measured.round:,} |"
                )
        yield f"| licence | {self.licence} |"

    def _data(self) -> Iterator[str]:
        yield "- what it was made of: unknown; the run names its text by a digest alone"
        yield "- licence of the text: unknown"
        yield f"- the corpus's digest: `{self.manifest.data.corpus}`"
        for mirror in self.manifest.data.mirrors:
            yield f"- a mirror: {escaped(mirror)}"

    def _verifying(self) -> Iterator[str]:
        run, line = self.manifest.run_id, self.address or "ADDRESS"
        yield f"- run id: `{run}`"
        by = "as the log gives it" if self.is_checked else "as a peer's checkpoint has it; no log has confirmed it"
        yield f"- state after round {self.round:,}: `{self.state}`, {by}"
        begins = "those weights" if self.manifest.initial_state else "its seed"
        yield from (
            "",
            f"The log of a run reproduces its model from {begins}. This checks every round, computes the model a second"
            " time, and ends with the state's digest if the run has had no round since:",
            "",
            f"    {typed('potluck', 'log', 'verify', line)}",
            "",
            "And this writes the same `model.safetensors`, byte for byte:",
            "",
            f"    {typed('potluck', 'export', line, '--round', str(self.round), '--out', 'again')}",
        )
        if not self.address:
            yield from ("", "`ADDRESS` is the line with which one joins the run; its operators publish it.")

    # --- the picture

    def picture(self) -> str:
        """An SVG of the losses; empty if none is known."""
        if self.history is None:
            return ""
        held_out = [m for m in self.history.held_out.found.values() if math.isfinite(m.loss)]
        charts = [
            (
                "loss, nats per token",
                [
                    ("training", "#2563eb", thinned(self.history.losses, MOST_POINTS)),
                    ("held-out", "#c2410c", thinned([(float(m.round), m.loss) for m in held_out], MOST_POINTS)),
                ],
            ),
            (
                "bits per byte, held-out text",
                [("held-out", "#c2410c", thinned([(float(m.round), m.bits_per_byte) for m in held_out], MOST_POINTS))],
            ),
        ]
        drawn = [(title, [one for one in lines if one[2]]) for title, lines in charts]
        return _svg([(title, lines) for title, lines in drawn if lines])


def _contributors(history: History) -> Iterator[str]:
    found = [c for c in contributors(history.credits, history.names) if c.tokens]
    yield f"{number(len(found), 'peer')} trained {history.credits.tokens:,} tokens. A name is what a peer says it is."
    yield from ("", "| | peer | id ends with | tokens | share | rounds |", "|---:|---|---|---:|---:|---:|")
    for c in found[:MOST_CONTRIBUTORS]:
        name = escaped(c.name) if c.peer in history.names else ""
        yield f"| {c.rank} | {name} | `{short_peer(c.peer)}` | {c.tokens:,} | {c.share:.1%} | {c.rounds:,} |"
    if rest := found[MOST_CONTRIBUTORS:]:
        yield from ("", f"And {number(len(rest), 'other')} with {sum(c.tokens for c in rest):,} tokens.")


def escaped(text: str) -> str:
    """Foreign text as it is to be read, in Markdown."""
    marks = {ord(mark): f"\\{mark}" for mark in string.punctuation} | {ord("<"): "&lt;", ord("&"): "&amp;"}
    return " ".join(clean(text).split()).translate(marks)


def _day(when: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(min(max(when, 0.0), 2.0**32)))


# --- SVG

_Line = tuple[str, str, Sequence[Point]]
"""Name, colour, points (x, y)."""
_WIDE, _HIGH, _LEFT, _TOP, _BOTTOM = 400, 260, 52, 36, 34
"""Of a chart, and of its margins."""


def _svg(charts: Sequence[tuple[str, Sequence[_Line]]]) -> str:
    """Charts beside each other; empty without one."""
    if not charts:
        return ""
    wide = _WIDE * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {_HIGH}" width="{wide}" height="{_HIGH}"'
        ' font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{wide}" height="{_HIGH}" fill="#fff"/>',
    ]
    for place, (title, lines) in enumerate(charts):
        parts += [f'<g transform="translate({_WIDE * place} 0)">', *_chart(title, lines), "</g>"]
    return "\n".join((*parts, "</svg>")) + "\n"


def _chart(title: str, lines: Sequence[_Line]) -> Iterator[str]:
    xs, ys = ([point[axis] for _, _, points in lines for point in points] for axis in (0, 1))
    across, up = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    right, bottom = _WIDE - 14, _HIGH - _BOTTOM

    def x(value: float) -> float:
        return round(_LEFT + (value - across[0]) / (across[-1] - across[0]) * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(bottom - (value - up[0]) / (up[-1] - up[0]) * (bottom - _TOP), 1)

    yield f'<text x="{_LEFT}" y="16" font-weight="bold">{title}</text>'
    for tick in up:
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y(tick)}" y2="{y(tick)}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>'
    for tick in across:
        yield f'<text x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{right}" y="{_HIGH - 4}" text-anchor="end">round</text>'
    for place, (name, colour, points) in enumerate(lines):
        path = " ".join(f"{x(a)},{y(b)}" for a, b in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if len(points) <= MOST_POINTS // 10:
            yield from (f'<circle cx="{x(a)}" cy="{y(b)}" r="2" fill="{colour}"/>' for a, b in points)
        yield f'<text x="{right - 70 * place}" y="16" text-anchor="end" fill="{colour}">{name}</text>'


def _ticks(least: float, most: float) -> list[float]:
    """Three to seven round numbers, in order, within which both lie."""
    if most - least < 1e-9 * max(1.0, abs(most)):
        least, most = least - 0.5, most + 0.5
    rough = (most - least) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first, last = math.floor(least / step), math.ceil(most / step)
    return [round(n * step, 10) for n in range(first, last + 1)]
