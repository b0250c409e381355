"""The list of commands that `potluck` and its groups print: each with a whole sentence, in the order in which somebody needs them."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

_ORDER = (
    "demo", "doctor", "join", "monitor", "me", "service", "sample", "eval", "export",
    "init", "data", "bootstrap", "key", "invite", "plan", "run", "log",
    "install", "install-node", "status", "remove",
)  # fmt: skip
"""Of those that are listed first, as most of those do who look: try it, take part, use the model; then who has a run of his own."""


class Commands(TyperGroup):
    """A group of commands. The list of what they do is wrapped, where the usual one cuts each line."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        places = {name: place for place, name in enumerate(_ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: places.get(name, len(places)))

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, _sentence(command.help or "")) for name, command in found.items() if command])


def _sentence(text: str) -> str:
    """The first one."""
    words = " ".join(text.split())
    return words.split(". ")[0].removesuffix(".") + "."
