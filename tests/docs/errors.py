"""docs/errors.md, made from the classes of errors: `python -m tests.docs.errors` writes it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import bootstrap
import peer
import protocol
from protocol.errors import LocalError, PotluckError, RemoteError, UsageError

PATH = Path(__file__).parents[2] / "docs" / "errors.md"
HEAD = """# Classes of errors

<!-- made by `python -m tests.docs.errors` from the classes of errors; do not edit -->

Every error that Potluck raises on purpose is one of these. A command that one of them ends prints its text as one line,
`potluck: <thing>: <reason>; <remedy>`, and ends with the class's exit code. What to do about each line:
[guides/errors.md](guides/errors.md).
"""
PARTS: tuple[tuple[str, str, type[PotluckError]], ...] = (
    ("You can put it right", "What was typed, or what was given, is wrong. Commands end with exit code 2.", UsageError),
    ("This machine's fault", "A full disk, a program that ended, a bug. Commands end with exit code 1.", LocalError),
    (
        "Another peer is to blame",
        "Most of these end the request, and another peer is asked. Where there is no other peer, a command ends with\n"
        "exit code 1.",
        RemoteError,
    ),
    (
        "Received data cannot be read",
        "These end the stream that the data came on, or refuse the update, the commit or the record, and nothing else.",
        PotluckError,
    ),
)


def classes() -> list[type[PotluckError]]:
    """Every class of errors, in every module."""
    for package in (protocol, peer, bootstrap):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)

    def below(parent: type[PotluckError]) -> Iterator[type[PotluckError]]:
        for child in parent.__subclasses__():
            yield child
            yield from below(child)

    found = {c for c in below(PotluckError) if c.__module__.split(".")[0] in ("protocol", "peer", "bootstrap")}
    return sorted(found, key=lambda c: (c.__name__, c.__module__))


def _part(error: type[PotluckError]) -> type[PotluckError]:
    return next(kind for _, _, kind in PARTS if issubclass(error, kind))


def documentation() -> str:
    """The whole document."""
    out, every = [HEAD], classes()
    for title, about, kind in PARTS:
        out.append(f"\n## {title}\n\n{about}\n\n| class | where it is raised from | what it says |\n|---|---|---|\n")
        for error in (e for e in every if _part(e) is kind):
            said = " ".join((error.__doc__ or "").split())
            out.append(f"| `{error.__name__}` | `{error.__module__.replace('.', '/')}.py` | {said} |\n")
    return "".join(out)


if __name__ == "__main__":
    PATH.write_text(documentation(), encoding="utf-8")
