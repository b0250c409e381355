"""Options that bootstrap nodes and peers have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
