"""Ids to text as they come: each character as soon as all of its bytes are there."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_BAD = "\ufffd"
"""What the library writes for bytes that are not UTF-8, or not yet."""
_LONGEST = 4
"""Bytes of a character: so many tokens may share one."""
_CONTEXT = 8
"""Ids before the first one that say how it is written: some tokenizers drop a text's first space."""


class Decoder:
    """Writes the ids that come after `before`. Ids are decoded together until none of them is in the middle of a character; of what
    is not UTF-8, U+FFFD comes out."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._before = list(before[-_CONTEXT:])
        self._pending: list[int] = []
        self._written = 0

    def add(self, new: int) -> str:
        """The text that is known now and was not before `new`."""
        self._pending.append(new)
        text = self._text()
        bad = len(text) - len(text.rstrip(_BAD))
        if bad and len(self._pending) >= _LONGEST:  # only the last of them can still become a character
            bad = min(bad, _LONGEST - 1)
        return self._write(text, len(text) - bad)

    def rest(self) -> str:
        """What was held back, where no id comes any more."""
        text = self._text()
        return self._write(text, len(text))

    def _text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._pending)[len(decode(self._before)) :]

    def _write(self, text: str, end: int) -> str:
        found = text[self._written : end]
        self._written = max(self._written, end)
        if end == len(text):
            self._before, self._pending, self._written = self._pending, [], 0
        return found
