"""Errors, whose text is one line: `<thing>: <reason>; <remedy>`. Remote errors name the peer to blame."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def shown(text: object) -> str:
    """Returns the beginning of foreign text in printable ASCII on one line."""
    return ascii(str(text)[:400])[1:-1][:400]


def first_line(error: BaseException, limit: int = 160) -> str:
    """The first line of an error of a library, or its type where it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:limit]


_SHORT = 12
"""Characters of a digest that a message shows."""
_AROUND = 4
"""Characters before the first that differs, and from there on, where two digests begin alike."""


def apart(one: str, other: str) -> tuple[str, str]:
    """Two digests that a message sets against each other, each short, and such that a reader sees where they differ."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    first, second = (_short(text, at) for text in (one, other))
    return first, second


def _short(text: str, at: int) -> str:
    """Its beginning; and the part about character `at`, if that lies behind the beginning."""
    if at < _SHORT:
        return f"{text[:_SHORT]}…" if len(text) > _SHORT else text
    start, end = max(_SHORT, at - _AROUND), at + _AROUND
    return text[:_SHORT] + ("…" if start > _SHORT else "") + text[start:end] + ("…" if end < len(text) else "")


class PotluckError(Exception):
    """Root of every error that Potluck raises on purpose."""

    exit_code = 1


class LocalError(PotluckError):
    """Our own fault, or the machine's: a full disk, a daemon that died, a damaged file."""


class UsageError(LocalError):
    """Bad usage or bad input; the user can put it right. Commands end with exit code 2."""

    exit_code = 2


@contextlib.contextmanager
def os_errors(thing: str, remedy: str) -> Iterator[None]:
    """Raises UsageError, `<thing>: <reason>; <remedy>`, in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{thing}: {error.strerror}; {remedy}") from None


class BannedError(LocalError):
    """The operators have banned this peer from the run. `potluck join` ends with exit code 3."""

    exit_code = 3


class ClosedError(LocalError):
    """The run is closed, and this peer is not admitted. `potluck join` ends with exit code 4."""

    exit_code = 4


FINAL = (UsageError.exit_code, BannedError.exit_code, ClosedError.exit_code)
"""Exit codes of commands that would end the same way if they were started again as they are."""


class RemoteError(PotluckError):
    """Another peer is to blame; `peer` is its id."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(message)
        self.peer = peer
