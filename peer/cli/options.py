"""What is typed: options that bootstrap nodes and peers have in common, and a line that was pasted whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from peer.ui.text import typed
from protocol.errors import UsageError

Dir = Annotated[Path, typer.Option("--dir", help="Folder for this node's key and state.", show_default=True)]
Json = Annotated[bool, typer.Option("--json", help="Print events as JSON lines (fields: docs/events.md).")]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log",
        metavar="FILE",
        help="Keep what is printed in this file, too: 10 MB, and three older ones beside it.",
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every address of this machine, IPv6, too.")]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="Where others reach this machine, if that is not where it listens, such as /ip4/203.0.113.5/tcp/40213, where a"
        " provider has another port for the one of --port; may be repeated.",
        show_default=False,
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")]

_GROUPS = ("log", "run", "data", "service")


def check_pasted(arguments: Sequence[str]) -> None:
    """Raises UsageError where a whole line, `potluck join ADDRESS`, stands where its last word belongs."""
    at = next((i for i, word in enumerate(arguments) if "/p2p/" in word and "#" in word), 0)
    begin = 2 if arguments[:1] and arguments[0] in _GROUPS else 1
    more = arguments[begin:at]
    if {"potluck", "join", "join:"}.intersection(more) and not any(word.startswith("-") for word in more):
        right = typed("potluck", *arguments[:begin], *arguments[at:])
        raise UsageError(f"RUN: other words are typed beside the address; type: {right}")
