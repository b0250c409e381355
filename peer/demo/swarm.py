"""`potluck demo`: a whole swarm on this machine, and an audit of what it did.

Starts one bootstrap node and every peer as a process of its own (the same commands that strangers use, on loopback), reads
their events, and shows them. At the end an auditor replays the log from θ(0): the validation losses, the text sample and the
digests that it prints come from that replay, not from what the peers say. `--in-memory` runs the same bootstrap node and the same
daemons in this process over the in-memory transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from rich.console import Console

from peer.demo.in_memory import run_in_memory
from peer.demo.processes import Command, run_processes
from peer.demo.recipe import DemoOptions, check, identity_of, make_manifest, make_peers
from peer.demo.report import Tally, audit, summary
from peer.demo.text import SEQUENCE, demo_corpus
from peer.events import Event
from peer.net.disk import disk_error
from peer.ui import screen as tui
from protocol.errors import LocalError, UsageError
from protocol.run import manifest as manifests
from protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from peer.node.peer import Factories


async def run(
    options: DemoOptions,
    command: Command,
    manifest: Manifest | None = None,
    factories: Mapping[str, Factories] | None = None,
) -> None:
    """Everything, from an empty folder to the summary. `command`: what the processes of the swarm run, which is `potluck`.
    `manifest`: the run (default: the demo's recipe). `factories`: see run_in_memory, which alone takes them. Raises
    PotluckError."""
    out = options.out
    if manifest is None:
        check(options)
    if out.exists():
        raise UsageError(f"--out {out}: exists already; remove it or choose another folder")
    corpus = await asyncio.to_thread(demo_corpus, SEQUENCE, lambda line: print(line, flush=True))
    if manifest is None:
        manifest = make_manifest(options, corpus.digest)
    peers = make_peers(manifest, options)
    try:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.touch()
        for name in ("bootstrap", *(p.name for p in peers)):
            (out / name).mkdir(parents=True)
        (out / "run.toml").write_text(manifests.to_toml(manifest))
        (out / "bootstrap" / "identity.key").write_bytes(identity_of(options.seed, "bootstrap").libp2p_bytes())
        for peer in peers:
            (out / peer.name / "identity.key").write_bytes(peer.identity.libp2p_bytes())
    except OSError as error:
        raise disk_error(out, error) from None
    tally = Tally(manifest, {p.identity.peer_id: p.name for p in peers})
    began = time.monotonic()
    names = {**tally.names, manifest.operators[0]: "bootstrap"}
    console = None if options.screen else Console(force_terminal=False)
    with tui.Screen(manifest, names, console) as screen:

        def feed(event: Event) -> None:
            tally.feed(event)
            screen.feed(event)

        swarm = (
            run_in_memory(options, manifest, peers, corpus.folder, feed, factories or {})
            if options.in_memory
            else run_processes(options, command, peers, corpus.folder, feed)
        )
        async with contextlib.aclosing(swarm) as events:
            async for _ in events:
                if tally.finished:
                    break
    seconds = time.monotonic() - began
    print("the model is computed again from the log, to check what everybody said", flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        result = await asyncio.get_running_loop().run_in_executor(pool, audit, options, manifest, tally, seconds)
    print(summary(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["same_bits"]:
        first = result["diverged"][0] if result["diverged"] else {"peer": "a peer", "shard": "a shard", "round": "?"}
        raise LocalError(
            f"same_bits: {first['peer']} had other bits in {first['shard']} after round {first['round']}; see {out}"
        )
