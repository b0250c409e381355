"""Units of text: what readers of sources hand to the tokenizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PIECE_CHARS = 1 << 16
"""No more than so much of a document is tokenized in one go; pieces end at a line's end where there is one."""
UNIT_CHARS = 1 << 19
"""A unit is done when it has so many: about a second's work of one core."""
UNIT_ROWS = 64
"""A unit of rows is done when it has so many, whatever is in them."""


OPTIONS = ("--column", "--split", "--skip-bad-rows")
"""Of `potluck data build`, that mend what errors tell of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read of rows: the column with the text; of a data set of the hub also the split and, where it has several, the subset."""

    column: str = "text"
    split: str = "train"
    subset: str = ""
    skip_bad_rows: bool = False
    """Rows that cannot be read are left out and counted, instead of an error."""
    options: tuple[str, ...] = OPTIONS
    """Those of OPTIONS that the command has which reads, so that its errors name no others."""
    instead: str = ""
    """How `{}`, an option that it has not, is to be given, if it can be."""

    def option(self, name: str) -> str:
        """How an error names an option, or several; empty where what it does cannot be had."""
        return name if name.split(",")[0] in self.options else self.instead.format(name)


@dataclass(slots=True)
class Unit:
    """Some pieces of text (UTF-8), and for each whether its document ends with it. An empty document is one empty piece."""

    pieces: list[bytes] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    state: Any = None
    """From where to go on behind this unit; None where that cannot be said, in the middle of rows."""
    begins: bool = True
    """Whether the first piece begins a document."""
    file: str = ""
    """What the text is of: a file, or a whole source that is not read file by file."""
    left_out: int = 0
    """Rows that could not be read. Each counts as an empty document, so that the others keep their numbers."""
    first_left_out: str = ""
    """Why the first of them could not."""


def cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends."""
    end = start + PIECE_CHARS
    return len(text) if len(text) <= end else text.rfind("\n", start, end) + 1 or end


def add(unit: Unit, text: str) -> int:
    """Adds a whole document; its characters. Raises UnicodeEncodeError."""
    start = 0
    while True:
        end = cut(text, start)
        unit.pieces.append(text[start:end].encode())
        unit.ends.append(end == len(text))
        start = end
        if unit.ends[-1]:
            return len(text)
