"""The command `potluck`: its subcommands, by name.

Exit codes: 0 done, 2 bad usage or input, 1 anything else. A subcommand's module is imported when it is typed;
`potluck --help` imports none.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from peer.cli import running
from peer.cli.options import Commands, group
from peer.config import make_home
from protocol.run import short_line

if TYPE_CHECKING:
    from peer.node.peer import Factories

ADDRESS = "shakespeare@203.0.113.5#4mQ8yV2kLr9TzX1bNc"
NAMED = ("join", "doctor", "monitor", "me")
"""Commands that take the name of a run in the last list of `potluck runs`."""
_NAME = re.compile(r"[a-z0-9-]+")
_ADDRESS = re.compile(rf"/p2p/\S*#|(?<!\S){short_line.PATTERN.pattern}")


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command, or a group of commands, that is imported when it is used."""

    load: Callable[[], Any]
    """Imports the command function or the group."""
    help: str
    example: str | None = None
    """Example to type; None for a group."""


SECTIONS = {
    "Take part": {
        "demo": LazyCommand(
            lambda: import_module("peer.cli.demo").command,
            "Train a small model on this machine with a whole swarm of processes: the same code as bootstrap and join.",
            "potluck demo --full 2 --chains 1 --stages 3 --out demo-run --json result.json",
        ),
        "doctor": LazyCommand(
            lambda: import_module("peer.cli.doctor").command,
            "Find out whether this machine can join, and what it would do: one finding a line, each with its remedy."
            " Exit code 0: it can.",
            f"potluck doctor {ADDRESS}",
        ),
        "join": LazyCommand(
            lambda: import_module("peer.cli.join").command,
            "Join a run and train with what this machine has, until the run is over (Ctrl-C leaves; nothing is lost).",
            f"potluck join {ADDRESS} --memory 8GB",
        ),
        "runs": LazyCommand(
            lambda: import_module("peer.cli.runs").runs,
            "Find a run: what a list of runs offers, from its web address or a file, and the line to join each one.",
            "potluck runs https://example.org/runs.jsonl",
        ),
        "service": LazyCommand(
            lambda: import_module("peer.cli.service").app,
            "Take part for weeks: the system runs a peer or a bootstrap node, and starts it again after a crash and"
            " when the machine starts.",
        ),
    },
    "Watch": {
        "monitor": LazyCommand(
            lambda: import_module("peer.cli.watch").command,
            "Watch a run: peers, roles, chains, rounds, losses and bytes. Trains nothing. On a terminal, keys switch"
            " between views.",
            f"potluck monitor {ADDRESS}",
        ),
        "me": LazyCommand(
            lambda: import_module("peer.cli.log").me,
            "See how much of a run is yours: tokens, share, rank, rounds, and what was left out and why.",
            f"potluck me {ADDRESS}",
        ),
        "log": LazyCommand(
            lambda: import_module("peer.cli.log").app,
            "Read the log of a run: from a bootstrap node's folder (only read, whether the node runs or not), or over"
            " the network.",
        ),
    },
    "Use the model": {
        "sample": LazyCommand(
            lambda: import_module("peer.cli.model").sample,
            "Let the model of a run write text, which is shown as it is made. A base model continues its prompt.",
            'potluck sample demo-run/bootstrap --prompt "Our allies" --tokens 100',
        ),
        "eval": LazyCommand(
            lambda: import_module("peer.cli.model").evaluate,
            "Measure how well the model of a run predicts given text: loss, perplexity and bits per byte.",
            "potluck eval demo-run/bootstrap text.txt more.jsonl",
        ),
        "export": LazyCommand(
            lambda: import_module("peer.cli.export").command,
            "Write the model of a run as a folder that transformers loads, with a model card. The log is checked and"
            " replayed. With --push, upload it to the Hugging Face hub.",
            "potluck export demo-run/bootstrap --out demo-model --gguf",
        ),
    },
    "Operate a run": {
        "init": LazyCommand(
            lambda: import_module("peer.cli.init").command,
            "Make a run of your own: its manifest, its text and your node's key, in one folder.",
            "potluck init my-run text/*.parquet --preset 178m",
        ),
        "data": LazyCommand(
            lambda: import_module("peer.cli.data").app,
            "Make the text of a run: a corpus of tokenized, shuffled sequences (docs/guides/data.md).",
        ),
        "bootstrap": LazyCommand(
            lambda: import_module("peer.cli.bootstrap").command,
            "Run a bootstrap node: entry point, log, matchmaker and archive of a run.",
            "potluck bootstrap my-run.toml --host 0.0.0.0 --port 31337. "
            "With four operators, the nodes of the others: potluck bootstrap my-run.toml --initial-peer ADDRESS",
        ),
        "key": LazyCommand(
            lambda: import_module("peer.cli.bootstrap").key,
            "Print the id of the node or peer in a folder, as potluck init --operator takes it; makes its key if there"
            " is none.",
            "potluck key --dir my-node",
        ),
        "invite": LazyCommand(
            lambda: import_module("peer.cli.decrees").invite,
            "Print a line with which friends join a run that is closed: as an operator, with the key of your bootstrap"
            " node.",
            "potluck invite my-run.toml --count 5 --expires 7d",
        ),
        "plan": LazyCommand(
            lambda: import_module("peer.cli.plan").plan,
            "Print the plan that the matchmaker would make, its tokens per second, and why it is so. Changes nothing.",
            "potluck plan my-peers.toml --what-if +10:8GB,20Mbps,100Mbps,5TFLOPS",
        ),
        "run": LazyCommand(
            lambda: import_module("peer.cli.decrees").app,
            "Change who may take part in a run, how long it is, its limits, and who operates it: as an operator, with"
            " the key of your bootstrap node. With several operators, enough of them type the same.",
        ),
    },
}
"""The commands under the headings of `potluck --help`."""
COMMANDS = {name: lazy for commands in SECTIONS.values() for name, lazy in commands.items()}


class _Loaded(Mapping[str, TyperCommand | TyperGroup]):
    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        lazy, only = COMMANDS[name], group()
        found = lazy.load()
        if isinstance(found, typer.Typer):
            only.add_typer(found, name=name, help=lazy.help)
            return typer.main.get_group(only).commands[name]  # type: ignore[return-value]
        only.command(name, help=lazy.help, epilog=f"Example: {lazy.example}")(found)
        return typer.main.get_command(only)  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Potluck(Commands):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": _Loaded()})

    def sections(self) -> dict[str, dict[str, str]]:
        return {title: {name: lazy.help for name, lazy in commands.items()} for title, commands in SECTIONS.items()}

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:  # type: ignore[override]
        """As the base class, without an import of any command."""
        loaded, self.commands = self.commands, {n: TyperCommand(n, help=lazy.help) for n, lazy in COMMANDS.items()}
        try:
            return super().shell_complete(ctx, incomplete)  # type: ignore[arg-type]
        finally:
            self.commands = loaded


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as version_of

        print(f"potluck {version_of('potluck')}", flush=True)
        raise typer.Exit


app = group(
    _Potluck, "Potluck: strangers pre-train a language model together, each bringing what they have.", completion=True
)


@app.callback()
def before_any_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if context.invoked_subcommand not in ("data", "eval", "export"):  # only these may ask a hub
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def arguments_of(typed: Sequence[str]) -> list[str]:
    """What was typed, as the commands expect it: `help COMMAND` is `COMMAND --help`, and a whole line that was pasted
    in place of an address, `potluck join ADDRESS`, with or without quotes, is the address."""
    if typed[:1] == ["help"]:
        return [*typed[1:], "--help"]
    words = [word for part in typed for word in (part.split() if _ADDRESS.search(part) else [part])]
    at = next((i for i, word in enumerate(words) if _ADDRESS.search(word)), 0)
    begin = 2 if words and words[0] in COMMANDS and not COMMANDS[words[0]].example else 1
    pasted = words[begin:at]
    if {"potluck", "join", "join:"}.intersection(pasted) and not any(word.startswith("-") for word in pasted):
        return [*words[:begin], *words[at:]]
    return list(typed)


def spelled_out(words: Sequence[str]) -> list[str]:
    """The words with addresses in place of short lines and of names in the last list of runs; nodes are asked once.
    Raises UsageError, RemoteError."""
    words = list(words)
    if len(words) > 1 and words[0] in NAMED and _NAME.fullmatch(words[1]) and not os.path.exists(words[1]):
        from peer.cli.runs import line_of

        words[1] = line_of(words[1]) or words[1]
    if "--help" in words or not any(map(short_line.parse, words)):
        return words
    from peer.node import open_run

    folders = [*open_run.HERE, *(Path(word.removeprefix("--dir=")) for word in words)]
    known = [folder for folder in folders if os.path.isdir(folder)]
    found = {word: line for word in words if (line := short_line.parse(word)) is not None}
    return [running.run(open_run.spelled_out(found[word], known)) if word in found else word for word in words]


def main(arguments: Sequence[str] | None = None, factories: Factories | None = None) -> None:
    """Entry point of the program.

    arguments: the words after `potluck` (default: the process's own).
    factories: make the parts of the peer of `potluck join` (default: the usual ones).
    """
    if arguments is None and isinstance(sys.stdout, io.TextIOWrapper):
        # file names may not be text, and a terminal may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    with running.reporting():
        make_home()
        words = spelled_out(arguments_of(sys.argv[1:] if arguments is None else arguments))
        app(words, prog_name="potluck", obj=running.Program(main, factories))
