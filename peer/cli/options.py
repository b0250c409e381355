"""What is typed: options and arguments that several commands have, and how a group lists its commands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

T = TypeVar("T")
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
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Train on these GPUs of this machine together, as one peer, such as 0,1,2,3; --memory is then of each.",
        show_default=False,
    ),
]


class Commands(TyperGroup):
    """A group of commands. The list of what they do is wrapped, where the usual one cuts each line."""

    def helps(self) -> dict[str, str]:
        """What each command says of itself."""
        return {name: command.help or "" for name, command in self.commands.items()}

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _sentence(text)) for name, text in self.helps().items()])


def _sentence(text: str) -> str:
    """The first one."""
    words = " ".join(text.split())
    return words.split(". ")[0].removesuffix(".") + "."


def group(cls: type[Commands] = Commands, help: str | None = None) -> typer.Typer:
    """An empty group of commands, with plain texts and errors."""
    return typer.Typer(
        cls=cls,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=help,
    )


def with_options(
    reads: Callable[..., T], work: Callable[[functools.partial[T], typer.Context], None]
) -> Callable[..., None]:
    """A command with the options of `reads`, which does `work` with a call that reads them."""

    @functools.wraps(reads)
    def command(**given: Any) -> None:
        work(functools.partial(reads, **given), given["context"])

    return command
