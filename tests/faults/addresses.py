"""Prints the addresses that a peer announces: `python -m tests.faults.addresses ADDRESS PEER`."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from peer.node.open_run import Door, manifest_of, parse_run, start_transport
from peer.ui.monitor import Monitor


async def main(line: str, peer: str) -> None:
    run = parse_run(line)
    with tempfile.TemporaryDirectory() as name:
        transport = await start_transport(Path(name), Door(host="127.0.0.1"), run.run_id, sparing=True)
        try:
            monitor = Monitor(await manifest_of(run, transport), transport, bootstrap=run.bootstrap)
            await monitor.poll(lambda event: None)
            print(json.dumps(monitor.peers[peer].addresses))
        finally:
            await transport.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
