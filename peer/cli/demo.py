"""`potluck demo`: a whole swarm on this machine."""

from __future__ import annotations

import typer

from peer.cli import running
from peer.cli.options import with_options
from peer.demo import swarm
from peer.demo.recipe import DemoOptions


def _start(options: DemoOptions, context: typer.Context) -> None:
    running.run(swarm.run(options, context.obj.main), interrupted=1)


command = with_options(DemoOptions, _start)
