"""A network daemon on a terminal: Ctrl-C goes to all of the terminal's foreground group, and who leaves needs its daemon until all is sent."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.docs import typed

SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
from peer.net import keyfile
from peer.net.daemon import Daemon
from peer.net.sockets import socket_base

async def main():
    pressed, key = asyncio.Event(), Path(sys.argv[1]) / "identity.key"
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, pressed.set)
    keyfile.load_or_create(key)
    daemon = await Daemon.start(key, "127.0.0.1", 0, socket_base(), 60.0)
    daemon.watch(lambda: None)
    print("hit" if os.getpgid(daemon.pid) == os.tcgetpgrp(0) else "spared", flush=True)
    await pressed.wait()
    print(len(await daemon.within(daemon.addresses(), 30.0)), "addresses", flush=True)
    await daemon.aclose()

asyncio.run(main())
"""


def test_ctrl_c_is_not_for_the_network_daemon(tmp_path: Path) -> None:
    shell = typed.Shell.of(tmp_path / "user", {})
    script = tmp_path / "daemon.py"
    script.write_text(SCRIPT)
    ended = shell.type(f"{shlex.quote(sys.executable)} {script} {tmp_path}", tmp_path, sign="hit|spared")
    assert (ended.code, ended.said.splitlines()[0]) == (0, "spared"), ended
    assert "1 addresses" in ended.said, ended
    assert "ended unexpectedly" not in ended.said, ended
