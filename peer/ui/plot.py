"""A line chart in text: two by four dots to a character cell in Braille, one character to a cell in plain ASCII."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text

Point = tuple[float, float]
SKY, ORANGE = "#2E93D0", "#C07A00"
"""Colour-blind readers tell them apart; both can be read on black and on white."""
LINE, MARK, AXIS = SKY, f"bold {ORANGE}", "bright_black"

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LABEL = 6


def shows_marks(line: Sequence[Point], marks: Sequence[Point], width: int) -> bool:
    """Whether a chart of this width has space for all the marks beside each other."""
    return bool(marks) and (not line or len(marks) <= (width - _LABEL - 2) // 3)


def chart(
    line: Sequence[Point],
    marks: Sequence[Point],
    width: int,
    height: int,
    *,
    ascii_only: bool = False,
    x_label: str = "",
) -> list[Text]:
    """`height` lines of `width` characters: `line` joined up, `marks` on top of it, labelled axes.

    Points are (x, y), sorted by x. Where a column has several points of `line`, it shows their mean.
    """
    plot_width, plot_height = width - _LABEL - 2, height - 2
    line, marks = ([point for point in some if all(abs(value) < 1e15 for value in point)] for some in (line, marks))
    points = [*line, *marks]
    if not points or plot_width < 4 or plot_height < 1:
        return [Text("waiting for the first step" if not points and n == height // 2 else "") for n in range(height)]
    left, right = math.floor(min(x for x, _ in points)), math.ceil(max(x for x, _ in points))
    low, high = min(y for _, y in points), max(y for _, y in points)
    right = right if right > left else left + 1
    if high - low < 1e-3:
        low, high = low - 0.05, high + 0.05
    across, down = (1, 1) if ascii_only else (2, 4)

    def column(x: float, columns: int) -> int:
        return min(columns - 1, int((x - left) / (right - left) * columns))

    def row(y: float, rows: int) -> int:
        return min(rows - 1, max(0, int((high - y) / (high - low) * rows)))

    cells: dict[tuple[int, int], int] = {}
    for dot_x, dot_y in _joined(line, lambda x: column(x, plot_width * across), lambda y: row(y, plot_height * down)):
        cell = (dot_y // down, dot_x // across)
        cells[cell] = cells.get(cell, 0) | (1 if ascii_only else _DOTS[dot_y % 4][dot_x % 2])
    marked = {(row(y, plot_height), column(x, plot_width)) for x, y in marks}
    if not shows_marks(line, marks, width):
        marked = set()
    ticks = {0: high, plot_height - 1: low}
    if plot_height >= 5:
        ticks[plot_height // 2] = high - (high - low) * (plot_height // 2 + 0.5) / plot_height
    out = []
    for y in range(plot_height):
        text = Text(_tick(ticks[y]) if y in ticks else " " * (_LABEL + 1), style=AXIS)
        text.append(("+" if ascii_only else "┤") if y in ticks else ("|" if ascii_only else "│"), style=AXIS)
        for x in range(plot_width):
            if (y, x) in marked:
                text.append("o" if ascii_only else "●", style=MARK)
            elif (y, x) in cells:
                text.append("*" if ascii_only else chr(0x2800 + cells[y, x]), style=LINE)
            else:
                text.append(" ")
        out.append(text)
    corner, dash = ("+", "-") if ascii_only else ("└", "─")
    out.append(Text(" " * (_LABEL + 1) + corner + dash * plot_width, style=AXIS))
    start, end = str(left), str(right)
    middle = x_label.center(max(0, plot_width - len(start) - len(end)))
    out.append(Text(" " * (_LABEL + 2) + start + middle[: plot_width - len(start) - len(end)] + end, style=AXIS))
    return out


def _tick(value: float) -> str:
    """A number at the axis, as wide as the others."""
    shown = f"{value:{_LABEL}.2f}"
    return (shown if len(shown) <= _LABEL else f"{value:{_LABEL}.0e}") + " "


def _joined(
    line: Sequence[Point], column: Callable[[float], int], row: Callable[[float], int]
) -> list[tuple[int, int]]:
    """The dots of the polyline through the mean of each dot column."""
    sums: dict[int, list[float]] = {}
    for x, y in line:
        sums.setdefault(column(x), []).append(y)
    dots: list[tuple[int, int]] = []
    for x in sorted(sums):
        y = row(sum(sums[x]) / len(sums[x]))
        if dots:
            x0, y0 = dots[-1]
            steps = max(abs(x - x0), abs(y - y0))
            dots += [(x0 + (x - x0) * i // steps, y0 + (y - y0) * i // steps) for i in range(1, steps)]
        dots.append((x, y))
    return dots
