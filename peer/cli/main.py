"""The command `potluck`: what a person types, and one line for whatever goes wrong.

Exit codes: 0 done, 2 bad usage or input, 1 anything else. Heavy imports happen inside the commands, so that `--help` is fast.
Long because typer reads each command's options from a function's parameters.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from peer.cli import commands, data, decrees, doctor, export, init, invite, log, running, sample, service, watch
from peer.cli import eval as evaluation
from peer.cli import plan as planning
from peer.cli.commands import Devices
from peer.cli.listing import Commands
from peer.cli.options import Announce, Dir, Host, Json, LogFile, Port, check_pasted
from peer.config import make_home
from peer.net import keyfile
from peer.node.open_run import KEY, Door, here

if TYPE_CHECKING:
    from peer.node.peer import Factories

T = TypeVar("T")
DEMO_RANK = "64"
"""Of the demo's recipe: values per token at a chain's boundaries."""

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Potluck: strangers pre-train a language model together, each bringing what they have.",
)

app.command(
    help="Make a run of your own: its manifest, its text and your node's key, in one folder.",
    epilog="Example: potluck init my-run text/*.parquet --preset 178m",
)(init.init)
app.command(
    help="Find out whether this machine can join, and what it would do: one finding a line, each with its remedy. Exit code 0: it can.",
    epilog="Example: potluck doctor /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...#9f86d0...",
)(doctor.doctor)
app.command(
    help="Write the model of a run as a folder that transformers loads. What is written is what the log gives, checked commit by commit.",
    epilog="Example: potluck export demo-run/bootstrap --out demo-model",
)(export.export)
app.command(
    help="Let the model of a run write text, which is shown as it is made. A base model goes on with what it is given.",
    epilog='Example: potluck sample demo-run/bootstrap --prompt "Our allies" --tokens 100',
)(sample.sample)
app.command(
    "eval",
    help="Find out how well the model of a run foretells given text: loss, perplexity and bits per byte.",
    epilog="Example: potluck eval demo-run/bootstrap text.txt more.jsonl",
)(evaluation.evaluate)
app.command(
    epilog="Example: potluck invite my-run.toml --count 5 --expires 7d",
)(invite.invite)
app.add_typer(log.app, name="log")
app.add_typer(decrees.app, name="run")
app.add_typer(data.app, name="data")
app.add_typer(service.app, name="service")


@app.callback()
def before_any_command(context: typer.Context) -> None:
    if context.invoked_subcommand not in (
        "data",
        "eval",
    ):  # a build whose source is on a hub, and tasks, may read from it
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _given(reads: Callable[..., T], work: Callable[[T, typer.Context], None]) -> Callable[..., None]:
    """A command with the options of `reads`, which does `work` with what they amount to."""

    @functools.wraps(reads)
    def command(**given: Any) -> None:
        work(reads(**given), given["context"])

    return command


def hosting(
    context: typer.Context,
    manifest: Annotated[
        Path, typer.Argument(metavar="MANIFEST", help="The run's manifest, a TOML file (docs/guides/manifest.md).")
    ],
    dir: Dir = Path("potluck-bootstrap"),
    host: Host = "0.0.0.0",
    port: Port = 31337,
    announce: Announce = None,
    initial_peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Address of another bootstrap node of this run, as it prints it; may be repeated."
        ),
    ] = None,
    relay_limit: Annotated[
        str,
        typer.Option(help="Most that is passed on between peers who cannot reach each other, in all; 0: nothing."),
    ] = "100Mbps",
    corpus: Annotated[
        Path | None, typer.Option(help="Folder with the run's corpus (potluck data build), to serve it.")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Follow the log beside the node; believe nobody else.")
    ] = False,
    log_file: LogFile = None,
    json: Json = False,
) -> commands.NodeOptions:
    """What is typed behind `potluck bootstrap`, and behind `potluck service install-node`.

    Long because typer reads a command's options from its function's parameters.
    """
    return commands.NodeOptions(
        manifest=manifest,
        folder=dir,
        door=Door(host=host, port=port, announce=tuple(announce or ())),
        initial_peers=tuple(initial_peer or ()),
        relay_limit=relay_limit,
        corpus=corpus,
        audit=audit,
        log=log_file,
        json=json,
    )


app.command(
    "bootstrap",
    help="Run a bootstrap node: entry point, log, matchmaker and archive of a run.",
    epilog="Example: potluck bootstrap my-run.toml --host 0.0.0.0 --port 31337. "
    "With four operators, the nodes of the others: potluck bootstrap my-run.toml --initial-peer ADDRESS",
)(_given(hosting, lambda options, context: running.run(commands.bootstrap(options), log=options.log)))


@app.command(epilog="Example: potluck key --dir my-node")
def key(dir: Dir = Path("potluck-bootstrap")) -> None:
    """Print the name of the node or peer in a folder, such as the first operator needs it; makes its key if there is none."""

    async def work() -> None:
        print(keyfile.load_or_create(dir / KEY).peer_id, flush=True)

    running.run(work())


def joining(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A manifest file, or the one-line address that a bootstrap node prints."),
    ],
    dir: Dir = Path("potluck-peer"),
    host: Host = "0.0.0.0",
    port: Port = 0,
    announce: Announce = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    devices: Devices = None,
    memory: Annotated[str, typer.Option(help='Memory to offer, such as "8GB"; auto: most of what is free.')] = "auto",
    up: Annotated[str | None, typer.Option(help='Uplink to announce, such as "20Mbps" (default: measured).')] = None,
    down: Annotated[
        str | None, typer.Option(help='Downlink to announce, such as "100Mbps" (default: measured).')
    ] = None,
    up_limit: Annotated[
        str | None,
        typer.Option(
            help='Most uplink that chains and serving others may take, such as "18Mbps" (default: nine tenths of what was'
            " measured; no limit with --up)."
        ),
    ] = None,
    store_limit: Annotated[str, typer.Option(help="Disk for payloads that are kept for others.")] = "4GB",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for training.")] = max(1, (os.cpu_count() or 2) // 2),
    trace: Annotated[
        Path | None,
        typer.Option(help="Record what this machine computes and waits for in this file, for ui.perfetto.dev."),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder with the run's corpus, if it is on this machine (default: it is fetched)."),
    ] = None,
    data_limit: Annotated[str, typer.Option(help="Disk for text that was fetched.")] = "2GB",
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO",
            help="Train at these hours of this machine's clock only, such as 22-7 or 22:30-7:15.",
            show_default=False,
        ),
    ] = None,
    pause_when_busy: Annotated[
        bool,
        typer.Option(
            "--pause-when-busy",
            help="Leave while other programs use most of the processors, or the GPU, and come back.",
        ),
    ] = False,
    name: Annotated[
        str,
        typer.Option(
            help="What screens call this machine, for everybody to see. Others may take the same; the id tells them apart.",
            show_default=False,
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what this machine would do in the run, and leave before it trains.")
    ] = False,
    log_file: LogFile = None,
    json: Json = False,
) -> commands.JoinOptions:
    """What is typed behind `potluck join`, and behind `potluck service install`.

    Long because typer reads a command's options from its function's parameters.
    """
    return commands.JoinOptions(
        run=run,
        folder=dir,
        door=Door(host=host, port=port, announce=tuple(announce or ())),
        device=device,
        devices=devices,
        memory=memory,
        up=up,
        down=down,
        up_limit=up_limit,
        store_limit=store_limit,
        threads=threads,
        trace=trace,
        corpus=corpus,
        data_limit=data_limit,
        hours=hours,
        pause_when_busy=pause_when_busy,
        name=name,
        dry_run=dry_run,
        log=log_file,
        json=json,
    )


app.command(
    "join",
    help="Join a run and train with what this machine has, until the run is over (Ctrl-C leaves; nothing is lost).",
    epilog="Example: potluck join /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...#9f86d0... --memory 8GB",
)(_given(joining, lambda options, context: running.run(commands.join(options, context.obj), log=options.log)))
service.app.command(
    "install",
    help="Join a run for weeks: the system starts `potluck join` with these options now, again after crashes, and when it starts itself.",
    epilog="Example: potluck service install /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...#9f86d0... --memory 8GB",
)(_given(joining, lambda options, context: service.install(options, service.retyped(context))))
service.app.command(
    "install-node",
    help="Run a bootstrap node for weeks: the system starts `potluck bootstrap` with these options, as it does a peer.",
    epilog="Example: potluck service install-node my-run/run.toml --dir my-run/node --corpus my-run/corpus",
)(_given(hosting, lambda options, context: service.install_node(options, service.retyped(context))))


@app.command(epilog="Example: potluck monitor /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...#9f86d0...")
def monitor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A manifest file, or the one-line address that a bootstrap node prints (default: the run of the peer or node in this"
            " folder).",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the state as a line of JSON at every change; with --once, one line."),
    ] = False,
    web: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Serve a page with charts to browsers (default: of this machine only)."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="[HOST:]PORT", help="Serve the main figures to Prometheus, under /metrics.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show a recorded run: a file of events, or a bootstrap node's log; RUN is its manifest.",
        ),
    ] = None,
    dir: Annotated[
        Path, typer.Option("--dir", help="Your peer's folder, if you have one: for the view of yourself.")
    ] = Path("potluck-peer"),
) -> None:
    """Watch a run: peers, roles, chains, rounds, losses and bytes. Trains nothing. On a terminal, keys switch between views."""

    with running.reporting():
        text = here(dir) if run is None else run
    options = watch.WatchOptions(run=text, once=once, json=json, web=web, metrics=metrics, replay=replay, dir=dir)
    running.run(watch.monitor(options))


@app.command(epilog="Example: potluck me /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...#9f86d0...")
def me(where: log.Log = None, dir: Dir = Path("potluck-peer")) -> None:
    """See how much of a run is yours: tokens, share, rank, rounds, and what was left out and why."""

    running.run(log.me(where, dir))


@app.command(epilog="Example: potluck plan my-peers.toml --what-if +10:8GB,20Mbps,100Mbps,5TFLOPS")
def plan(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FILE",
            help="A run, as for monitor; or a TOML file with a list of peers (docs/guides/plan.md).",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help="Peers that come, +N:MEMORY,UP,DOWN,SPEED, or one that leaves, -PEER; may be repeated.",
        ),
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Print Figures 2 and 3 of the main paper from the same cost model.")
    ] = False,
) -> None:
    """Print the plan that the matchmaker would make, its tokens per second, and why it is so. Changes nothing."""

    running.run(planning.plan(run, what_if or (), figures, lambda line: print(line, flush=True)))


@app.command(
    help="Train a small model on this machine with a whole swarm of processes: the same code as bootstrap and join.",
    epilog="Example: potluck demo --full 2 --chains 1 --stages 3 --out demo-run --json result.json",
)
def demo(
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds to train (default: the demo's recipe).")] = None,
    full: Annotated[int, typer.Option(min=0, help="Full replicas.")] = 2,
    chains: Annotated[int, typer.Option(min=0, help="Pipeline chains of weak peers.")] = 1,
    stages: Annotated[int, typer.Option(min=2, max=16, help="Members of each chain.")] = 3,
    spares: Annotated[int, typer.Option(min=0, help="Weak peers more than the chains need.")] = 0,
    rank: Annotated[
        str,
        typer.Option(help="Values per token at chain boundaries; 0 = whole; a list gives one for each chain."),
    ] = DEMO_RANK,
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
        await swarm.run(options, main)

    running.run(work(), interrupted=1)


def main(arguments: Sequence[str] | None = None, factories: Factories | None = None) -> None:
    """Entry point of the command. `arguments`: what is typed after `potluck` (default: what was). `factories`: what
    `potluck join` makes a peer's parts with (default: the usual)."""
    if arguments is None and isinstance(sys.stdout, io.TextIOWrapper):  # else the output is somebody else's
        # for names of files that are no text, and terminals that show less
        sys.stdout.reconfigure(errors="backslashreplace")
    with running.reporting():
        make_home()
        check_pasted(sys.argv[1:] if arguments is None else arguments)
    app(arguments, prog_name="potluck", obj=factories)
