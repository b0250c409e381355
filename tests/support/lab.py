"""Emulated links for benchmarks and faults: one network namespace per peer, by the lab's script (`--netlab
PATH/netlab.sh`, root). Tests find the script by the environment's POTLUCK_NETLAB."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CONGESTION_CONTROL = "cubic"
"""Congestion control of home machines; some hosts' kernels default to bbr and allow namespaces no other."""


SCRIPT = "POTLUCK_NETLAB"
"""Names the lab's script."""

Place = tuple[str, list[str]]
"""A peer's address, and what a command begins with that is to run where it lives."""


@dataclass(frozen=True, slots=True)
class Lab:
    """One that is up."""

    script: Path
    name: str
    places: dict[str, Place]

    def control(self, word: str, peer: str, values: str = "") -> None:
        """`set` (rate, loss, ..: see the script), `cut` or `heal` a peer's link."""
        command = f"{word} {_home(peer)} {values}"
        subprocess.run([self.script, "ctl", self.name, command], check=True, stdout=subprocess.DEVNULL)


def missing() -> str:
    """Why there can be no lab here, or nothing."""
    script = os.environ.get(SCRIPT)
    if not script:
        return f"{SCRIPT} is not set: emulated links need the lab's script, netlab.sh"
    if not Path(script).is_file():
        return f"{SCRIPT}: {script} is no file"
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        return "emulated links need root and /dev/net/tun"
    return ""


@contextlib.contextmanager
def lab(script: Path, links: Mapping[str, str], *, idle_restart: bool = True) -> Iterator[Lab]:
    """`links`: of each peer UP/DOWN:RTT, in Mb/s and in ms to the core, which is half of the way to another peer.
    `idle_restart`: whether TCP's window shrinks while a connection rests, as is Linux's default."""
    name = f"lab{os.getpid() % 10**6}"
    specs = [f"{_home(peer)}:{link}" for peer, link in links.items()]
    subprocess.run([script, "up", name, *specs], check=True, stdout=subprocess.DEVNULL)
    try:
        places: dict[str, Place] = {}
        for peer in links:
            prefix = ["ip", "netns", "exec", f"nl-{name}-{_home(peer)}"]
            used = _said([*prefix, "cat", "/proc/sys/net/ipv4/tcp_congestion_control"])
            if used != CONGESTION_CONTROL:
                raise SystemExit(
                    f"netlab: TCP uses {used} there, not {CONGESTION_CONTROL}; as root: "
                    f'sysctl -w net.ipv4.tcp_allowed_congestion_control="reno {CONGESTION_CONTROL}"'
                )
            subprocess.run(
                [*prefix, "sysctl", "-qw", f"net.ipv4.tcp_slow_start_after_idle={idle_restart:d}"], check=True
            )
            places[peer] = _said([script, "ip", name, _home(peer)]), prefix
        yield Lab(script, name, places)
    finally:
        subprocess.run([script, "down", name], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def beside(there: Lab, home: str) -> Iterator[list[str]]:
    """The beginning of a command on a second machine behind the router of `home`, in the same local network."""
    first = f"nl-{there.name}-{_home(home)}"
    second, router = f"{first}-2", f"{first}-r"
    commands = [
        f"ip netns add {second}",
        f"ip -n {second} link set lo up",
        f"ip -n {router} link add br0 type bridge",
        f"ip -n {router} addr del 192.168.1.1/24 dev lan0",
        f"ip -n {router} link set lan0 master br0",
        f"ip -n {router} addr add 192.168.1.1/24 dev br0",
        f"ip -n {router} link set br0 up",
        f"ip -n {router} link add lan1 type veth peer name eth0 netns {second}",
        f"ip -n {router} link set lan1 master br0 up",
        f"ip -n {second} addr add 192.168.1.3/24 dev eth0",
        f"ip -n {second} link set eth0 up",
        f"ip -n {second} route add default via 192.168.1.1",
        f"ip netns exec {second} sysctl -qw net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}",
        f"ip netns exec {router} nft add rule ip fw c_forward iifname br0 accept",
        f"ip netns exec {router} nft add rule ip fw c_input iifname br0 accept",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
        yield ["ip", "netns", "exec", second]
    finally:
        subprocess.run(["ip", "netns", "del", second], check=False, stderr=subprocess.DEVNULL)


def _home(peer: str) -> str:
    """The script's name for it."""
    return peer.replace("-", "")


def _said(command: list[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
