"""Homes whose address can be changed: a network namespace each, behind one router; needs root and Linux (iproute2)."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from tests.support.lab import Place


class Homes:
    """Homes that are up. `places`: the address of each, for tests/faults/processes.py; processes listen on all."""

    def __init__(self, name: str, homes: Sequence[str]) -> None:
        self._name = name
        self._subnets = {home: number for number, home in enumerate(homes)}
        self._moves = len(homes)
        self.places: dict[str, Place] = {
            home: ("0.0.0.0", ["ip", "netns", "exec", self._space(home)]) for home in homes
        }

    def address(self, home: str) -> str:
        """Where it is now."""
        return f"10.89.{self._subnets[home]}.2"

    def up(self) -> None:
        """Makes them."""
        router = f"{self._name}-router"
        _ip("netns", "add", router)
        _ip("netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for home, number in self._subnets.items():
            space = self._space(home)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{number}", "netns", router)
            _ip("-n", router, "link", "set", f"to{number}", "up")
            _ip("-n", space, "link", "set", "eth0", "up")
            self._plug(home, f"to{number}")

    def move(self, home: str) -> str:
        """Replaces its address by one of another network, as when a laptop goes from one Wi-Fi to another: what is sent
        to the old one is lost without a word. The new one."""
        router, before, door = f"{self._name}-router", self._subnets[home], self._door(home)
        _ip("-n", self._space(home), "addr", "del", f"10.89.{before}.2/24", "dev", "eth0")
        _ip("-n", router, "addr", "del", f"10.89.{before}.1/24", "dev", door)
        _ip("-n", router, "route", "add", "blackhole", f"10.89.{before}.0/24")
        self._subnets[home], self._moves = self._moves, self._moves + 1
        self._plug(home, door)
        return self.address(home)

    def shut(self, home: str) -> None:
        """From now on its router lets no connection in, and has what the home sends come from an address of its own, as
        most routers of homes do. Skips the test where this machine has no nftables."""
        door = self._door(home)
        rules = f"""
            table ip home {{
                chain forward {{
                    type filter hook forward priority 0;
                    oifname "{door}" ct state established,related accept
                    oifname "{door}" drop
                }}
                chain postrouting {{
                    type nat hook postrouting priority 100;
                    ip saddr {self.address(home)} masquerade
                }}
            }}
        """
        try:
            command = ["ip", "netns", "exec", f"{self._name}-router", "nft", "-f", "-"]
            subprocess.run(command, input=rules, capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"nftables: {' '.join(error.stderr.split())[:120]}; a router that lets nobody in needs them")

    def unplug(self, home: str) -> None:
        """Its line is dead until it is plugged in again."""
        _ip("-n", f"{self._name}-router", "link", "set", self._door(home), "down")

    def plug_in(self, home: str) -> None:
        """Its line lives again."""
        _ip("-n", f"{self._name}-router", "link", "set", self._door(home), "up")

    def down(self) -> None:
        """Removes them; their processes have ended."""
        for space in (f"{self._name}-router", *(self._space(home) for home in self._subnets)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _plug(self, home: str, door: str) -> None:
        router, subnet = f"{self._name}-router", self._subnets[home]
        _ip("-n", router, "addr", "add", f"10.89.{subnet}.1/24", "dev", door)
        _ip("-n", self._space(home), "addr", "add", f"10.89.{subnet}.2/24", "dev", "eth0")
        _ip("-n", self._space(home), "route", "add", "default", "via", f"10.89.{subnet}.1")

    def _door(self, home: str) -> str:
        return f"to{list(self._subnets).index(home)}"

    def _space(self, home: str) -> str:
        return f"{self._name}-{home}"


@contextlib.contextmanager
def homes(*names: str) -> Iterator[Homes]:
    """Up while the block lasts. Skips the test where this machine does not let us make namespaces."""
    made = Homes(f"potluck{os.getpid()}", names)
    try:
        try:
            made.up()
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"network namespaces: {' '.join(said.split())[:120]}; they need root and iproute2")
        yield made
    finally:
        made.down()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
