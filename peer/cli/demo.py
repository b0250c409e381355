"""`potluck demo`: a whole swarm on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peer.cli import running

RANK = "64"
"""Of the demo's recipe: values per token at a chain's boundaries."""


def demo(
    context: typer.Context,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to train (default: the demo's recipe).")] = None,
    full: Annotated[int, typer.Option(min=0, help="Full replicas.")] = 2,
    chains: Annotated[int, typer.Option(min=0, help="Pipeline chains of weak peers.")] = 1,
    stages: Annotated[int, typer.Option(min=2, max=16, help="Members of each chain.")] = 3,
    spares: Annotated[int, typer.Option(min=0, help="Weak peers more than the chains need.")] = 0,
    rank: Annotated[
        str,
        typer.Option(help="Values per token at chain boundaries; 0 = whole; a list gives one for each chain."),
    ] = RANK,
    inner_steps: Annotated[int | None, typer.Option(min=1, help="Inner steps per round, H.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, the data order and the demo's keys.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo writes; must not exist yet.")] = Path(
        "demo-run"
    ),
    json: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    screen: Annotated[bool, typer.Option("--screen/--no-screen", help="Live screen, or plain lines.")] = True,
    in_memory: Annotated[
        bool,
        typer.Option("--in-memory", help="The same run in one process, without hivemind (for comparison)."),
    ] = False,
) -> None:
    """`potluck demo`.

    Long because typer reads a command's options from its function's parameters.
    """

    from peer.demo import recipe, swarm

    async def work() -> None:
        options = recipe.DemoOptions(
            rounds=rounds,
            full=full,
            chains=chains,
            stages=stages,
            spares=spares,
            rank=recipe.parse_rank(rank),
            inner_steps=inner_steps,
            seed=seed,
            device=device,
            out=out,
            json=json,
            screen=screen,
            in_memory=in_memory,
        )
        await swarm.run(options, context.obj.main)

    running.run(work(), interrupted=1)
