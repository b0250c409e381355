"""Which of a machine's addresses a run is joined by, and what is said of one that others cannot use."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from peer import events
from peer.events import Event
from peer.net import p2p
from peer.net.address import best_first, host_of
from peer.net.sockets import check_port, hosts
from peer.ui.lines import describe
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.run.short_line import short_line
from tests.support import tiny

PEER = Identity(bytes(32)).peer_id
RUN = tiny.manifest()
PUBLIC, PRIVATE, LOOPBACK, LINK = "8.8.8.8", "192.168.1.20", "127.0.0.1", "169.254.7.7"
PUBLIC6, PRIVATE6, LOOPBACK6, LINK6 = "2001:4860::8", "fd00::7", "::1", "fe80::7"


def whole(host: str) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/31337/p2p/{PEER}"


@pytest.mark.parametrize(
    ("listed", "best"),
    [
        ([LOOPBACK, PRIVATE, PUBLIC], PUBLIC),
        ([LOOPBACK, LOOPBACK6, PUBLIC6], PUBLIC6),
        ([LOOPBACK6, LINK6, PRIVATE6], PRIVATE6),
        ([LOOPBACK, LINK], LINK),
        ([LINK6, LOOPBACK6], LOOPBACK6),
        ([LOOPBACK6, LOOPBACK], LOOPBACK6),
    ],
)
def test_the_best_address_is_the_one_that_most_can_use(listed: list[str], best: str) -> None:
    found = best_first(map(whole, listed))
    assert found[0] == whole(best)
    assert whole(LINK6) not in found, "it means nothing without an interface"
    assert events.listening(RUN, found).address == f"{whole(best)}#{RUN.run_id}"


def test_the_address_of_a_virtual_network_comes_after_the_one_that_leads_out() -> None:
    """Such as docker0's. What leads out here is asked of the system."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            outward = probe.getsockname()[0]
    except OSError:
        pytest.skip("a network: this machine has none")
    assert best_first([whole("10.255.0.1"), whole(outward), whole("172.31.255.1")])[0] == whole(outward)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (LOOPBACK, "on this machine only"),
        (LOOPBACK6, "on this machine only"),
        (LINK, "on the same cable or Wi-Fi only"),
        (PUBLIC6, ""),
    ],
)
def test_a_line_that_works_here_only_is_said_to(host: str, told: str) -> None:
    first, *more = describe(Event(0.0, "bootstrap", events.listening(RUN, [whole(host)])), {})
    assert first.text == f"to join: potluck join {short_line(RUN.name, whole(host), RUN.run_id)}"
    assert bool(more) == bool(told)
    assert all(told in said.text for said in more)


def test_a_machine_without_any_address_is_told_so() -> None:
    (said,) = describe(Event(0.0, "bootstrap", events.listening(RUN, [])), {})
    assert said.text.startswith("nobody can join now: this machine has no address")


async def test_every_address_is_listened_on_whichever_version_of_ip_the_machine_has(tmp_path: Path) -> None:
    transport = await p2p.start(tmp_path / "key", host="0.0.0.0", validate=lambda *_: None)
    try:
        listed = {host_of(address) for address in transport.addresses}
    finally:
        await transport.aclose()
    expected = {"0.0.0.0": LOOPBACK, "::": LOOPBACK6}
    assert {expected[one] for one in hosts("0.0.0.0", 0)} <= listed


def test_a_port_that_is_taken_in_either_version_is_told() -> None:
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        if host not in hosts("0.0.0.0", 0):
            continue
        with socket.socket(family) as taken:
            if family == socket.AF_INET6:
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            taken.bind((host, 0))
            taken.listen(1)
            with pytest.raises(UsageError, match="another program listens on it"):
                check_port("0.0.0.0", taken.getsockname()[1])
