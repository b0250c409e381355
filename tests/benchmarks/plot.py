"""Scatter plots as SVG: bytes on a logarithmic axis, one panel over the other, each mark with a label that covers no
other. The picture needs no font and no file from elsewhere, and has a light and a dark form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 460
"""Of a panel."""
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 54, 44
LETTER, LINE, RADIUS = 6.2, 13.0, 4.5
"""Width of a label's letters, at most, its height, and a mark's size."""
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
STYLE = """
.paper { fill: #ffffff } text { font: 11px system-ui, sans-serif; fill: #24292f } .title { font-size: 14px }
.grid { stroke: #d8dee4 } .lead { stroke: #8c959f; stroke-width: 0.7 }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .lead { stroke: #6e7681 } }
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point. size_bytes: x. group: names its colour."""

    label: str
    size_bytes: float
    loss: float
    group: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot. loss: what the axis of losses says."""

    title: str
    loss: str
    marks: Sequence[Mark]


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def svg(panels: Sequence[Panel], colours: Mapping[str, str]) -> str:
    """The panels, the first on top. colours: of the groups, readable on white and on black."""
    height = HEIGHT * len(panels)
    drawn = "".join(_panel(panel, number * HEIGHT, colours) for number, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f'<style>{STYLE}</style>\n<rect class="paper" width="{WIDTH}" height="{height}"/>\n{drawn}</svg>\n'
    )


def _panel(panel: Panel, top: float, colours: Mapping[str, str]) -> str:
    out = [_text(LEFT, top + 20, panel.title, "title")]
    at = float(LEFT)
    for group in dict.fromkeys(mark.group for mark in panel.marks):
        out += [_dot(at + 5, top + 36, colours[group]), _text(at + 14, top + 40, group)]
        at += 26 + LETTER * len(group)
    if not panel.marks:
        return "".join([*out, _text(LEFT, top + HEIGHT / 2, "no rows yet")])
    low, high = (f(math.log10(mark.size_bytes) for mark in panel.marks) for f in (min, max))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    least, most, step = _ticks([mark.loss for mark in panel.marks])
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(size_bytes: float) -> float:
        return LEFT + inner_w * (math.log10(size_bytes) - low) / (high - low)

    def y(loss: float) -> float:
        return top + TOP + inner_h * (most - loss) / (most - least)

    bottom = top + HEIGHT - BOTTOM
    for power in range(low, high + 1):
        name = f"{10 ** (power % 3)} {UNITS[power // 3]}"
        out += [_line(x(10.0**power), top + TOP, x(10.0**power), bottom, "grid")]
        out += [_text(x(10.0**power), bottom + 16, name, anchor="end" if power == high else "middle")]
    for number in range(round((most - least) / step) + 1):
        loss = least + number * step
        out += [
            _line(LEFT, y(loss), WIDTH - RIGHT, y(loss), "grid"),
            _text(LEFT - 6, y(loss) + 4, f"{loss:.3g}", anchor="end"),
        ]
    out += [
        _text(LEFT, bottom + 34, f"{panel.loss}; bytes that a replica sends in the whole training, mean over replicas")
    ]
    points = [(mark, x(mark.size_bytes), y(mark.loss)) for mark in panel.marks]
    frame = (LEFT + 2.0, top + TOP, WIDTH - RIGHT - 2.0, bottom - 2.0)
    out += _labels(points, frame)
    out += [_dot(px, py, colours[mark.group]) for mark, px, py in points]
    return "".join(out)


def places(points: Sequence[tuple[Mark, float, float]], frame: Box) -> list[Box | None]:
    """Boxes of the labels of marks at (x, y): the nearest free ones, within the frame. None: there is no room."""
    taken = [(px - RADIUS, py - RADIUS, px + RADIUS, py + RADIUS) for _, px, py in points]
    found: list[Box | None] = [None] * len(points)
    for number in sorted(range(len(points)), key=lambda n: (points[n][2], points[n][1])):
        mark, px, py = points[number]
        width = LETTER * len(mark.label)
        for distance, up, side in itertools.product(range(60), (1, -1), (1, -1)):
            gap = RADIUS + (4 if distance < 2 else 18)
            left, middle = px + gap if side > 0 else px - gap - width, py + up * distance * LINE / 2
            box = (left, middle - LINE / 2, left + width, middle + LINE / 2)
            if _within(box, frame) and not any(overlap(box, other) for other in taken):
                found[number] = box
                taken.append(box)
                break
    return found


def _labels(points: Sequence[tuple[Mark, float, float]], frame: Box) -> list[str]:
    """The labels that have a place, each with a line to its mark where that is not beside it."""
    out = []
    for (mark, px, py), box in zip(points, places(points, frame), strict=True):
        if box is None:
            continue
        middle = (box[1] + box[3]) / 2
        if abs(middle - py) > LINE / 2 + 1:
            out.append(_line(px, py, box[0] - 2 if box[0] > px else box[2] + 2, middle, "lead"))
        out.append(_text(box[0], middle + 4, mark.label))
    return out


def _within(a: Box, b: Box) -> bool:
    return a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _ticks(values: Sequence[float]) -> tuple[float, float, float]:
    """The ends of an axis that has these values, and the distance of its ticks: a few."""
    low, high = min(values), max(values)
    span = max(high - low, 1e-3)
    step = next(s for s in (a * 10.0**b for b in range(-4, 6) for a in (1, 2, 5)) if span / s <= 8)
    return math.floor(low / step - 0.2) * step, math.ceil(high / step + 0.2) * step, step


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    ends = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{named}{ends} x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>\n'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>\n'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{colour}"/>\n'
