"""Options that several commands share, command functions made from options, and groups of commands."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from peer.cli import running
from protocol.errors import UsageError

T = TypeVar("T")
Dir = Annotated[Path, typer.Option("--dir", help="Folder for this node's key and state.", show_default=True)]
Json = Annotated[bool, typer.Option("--json", help="Print events as JSON lines (fields: docs/events.md).")]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--log", metavar="FILE", help="Write what is printed to this file, too: 10 MB, and three older files beside it."
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every address of this machine, IPv6, too.")]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address at which others reach this machine, if it listens at another one, such as"
        " /ip4/203.0.113.5/tcp/40213 for a port that a provider forwards to the one of --port; may be repeated.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Memory = Annotated[str, typer.Option(help='Memory to offer, such as "8GB"; auto: most of what is free.')]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads for training.")]
DEFAULT_THREADS = max(1, (os.cpu_count() or 2) // 2)
Port = Annotated[int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 takes a free one.")]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Train on these GPUs of this machine together, as one peer, such as 0,1,2,3; --memory is then of each.",
    ),
]


SiteAddress = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="HOST:PORT",
        help="Hold the model together with other machines of this local network, as one peer: the address at which rank"
        " 0 listens for them. The others add the site's secret, as rank 0 prints it.",
    ),
]
Rank = Annotated[
    str | None,
    typer.Option(metavar="K/N", help="With --site: this machine's number and how many there are; 0/N is the peer."),
]


class Commands(TyperGroup):
    """A group of commands whose list is wrapped; click's truncates each line."""

    def sections(self) -> dict[str, dict[str, str]]:
        """Help text by command, under the headings of the list of commands."""
        return {"Commands": {name: command.help or "" for name, command in self.commands.items()}}

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        for heading, helps in self.sections().items():
            with formatter.section(heading):
                formatter.write_dl([(name, _first_sentence(text)) for name, text in helps.items()])


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ")[0].removesuffix(".") + "."


def group(cls: type[Commands] = Commands, help: str | None = None, completion: bool = False) -> typer.Typer:
    """An empty group of commands, with plain texts and errors. completion: whether it has options for shells' own."""
    return typer.Typer(
        cls=cls,
        add_completion=completion,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=help,
    )


def with_options(options: Callable[..., T], work: Callable[[T, typer.Context], None]) -> Callable[..., None]:
    """Returns a command with the parameters of `options`; it calls work(options(...), context).

    options: a dataclass, or a function that reads what was typed. Raises UsageError.
    """

    def command(context: typer.Context, **given: Any) -> None:
        work(options(**given), context)

    context, _ = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [context, *inspect.signature(options, eval_str=True).parameters.values()]
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    command.__doc__ = None
    return command


def require_license(name: str) -> None:
    """Raises UsageError if this cannot be the name of a licence; empty: none is given."""
    from peer.ui.text import clean
    from protocol.run.manifest import is_license

    if name and not is_license(name):
        raise UsageError(f"--license {clean(name, 64)}: not the name of a licence; write it as apache-2.0 or mit")


def coroutine(work: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Returns a command with the parameters of the coroutine function `work`. Exit code 1 after Ctrl-C."""

    @functools.wraps(work)
    def command(**given: Any) -> None:
        running.run(work(**given), interrupted=1)

    return command
