"""Machines of a local network that hold a model together: real processes, over the loopback interface."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from peer.training.several_devices import Patience
from peer.training.sharded import RankLost, ShardedTrainer
from peer.training.site import MAGIC, Gathering, Site, connect
from protocol.errors import LocalError, UsageError
from tests.support import potluck
from tests.support.chains import SPEC, TRAIN, random_theta
from tests.support.devices import DEADLINE, alone, assert_near, inner_step

RUN, OTHER = "ab" * 32, "cd" * 32
SECRET = "ef" * 16
PEER = "12D3KooWCPPWGMfAu9KZLRja98CHbFTJJVb8H9xPiDu9WtQSAMUU"
PATIENT = Patience(start=DEADLINE, stuck=DEADLINE)

Start = Callable[..., potluck.Popen]


@pytest.fixture
def site() -> Site:
    return Site("127.0.0.1", potluck.free_port(), SECRET, 0, 2)


@pytest.fixture
def gathering(site: Site) -> Iterator[Gathering]:
    found = Gathering(site, RUN)
    yield found
    found.close()


@pytest.fixture
def start(site: Site, tmp_path: Path) -> Iterator[Start]:
    """Another machine of the site, as its user starts it."""
    begun: list[potluck.Popen] = []

    def one(run: str = RUN) -> potluck.Popen:
        line = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}#{run}"
        command = [
            *("join", line, "--dir", tmp_path, "--device", "cpu"),
            *("--threads", "1", "--memory", "1GB", "--site", f"{site.address}/{SECRET}", "--rank", "1/2"),
        ]
        begun.append(potluck.Popen(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield one
    for process in begun:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE)


def test_two_machines_give_the_update_of_one_and_a_lost_one_comes_back(
    gathering: Gathering, start: Start, tmp_path: Path
) -> None:
    """Its training process is killed in an inner step: the round's work ends. It connects again by itself."""
    other = start()
    (member,) = gathering.wait(DEADLINE)
    assert (member.device, member.memory_bytes) == ("cpu", 10**9)

    def trainer() -> ShardedTrainer:
        return ShardedTrainer(SPEC, TRAIN, ("cpu", "cpu"), 1, tmp_path, PATIENT, gathering)

    one, sharded = alone(), trainer()
    for made in (one, sharded):
        made.begin_round(random_theta())
        for number in (1, 2):
            inner_step(made, number)
    assert_near(sharded, one, 1e-3)
    processes = [psutil.Process(), *psutil.Process(other.pid).children(recursive=True)]
    heard = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert heard == {"127.0.0.1"}, "nothing listens at another address than that which was typed"

    (child,) = (p for p in processes if "peer.training.helper" in p.cmdline())
    with pytest.raises(RankLost) as ended:
        inner_step(sharded, 3, lambda micro: os.kill(child.pid, signal.SIGKILL) if micro == 1 else None)
    expected = "devices: cpu at 127.0.0.1, number 2 of 2 that hold the model together, closed its connection; "
    assert str(ended.value).startswith(expected)
    assert str(ended.value).endswith("or start it there again with --rank 1/2")
    again = trainer()
    again.begin_round(random_theta())
    inner_step(again, 1)
    again.close()


def refused(gathering: Gathering, **changes: Any) -> str:
    """The line for a machine of such a site."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(connect, dataclasses.replace(gathering.site, **changes), RUN, "cpu", 1)
        while not coming.done():
            with pytest.raises(LocalError, match="rank 1/2 has not come; start it on its machine"):
                gathering.wait(0.0)
        with pytest.raises(UsageError) as error:
            coming.result()
    return str(error.value)


def test_a_machine_with_another_run_is_refused_with_one_line(gathering: Gathering, start: Start) -> None:
    other = start(OTHER)
    while other.poll() is None:
        with pytest.raises(LocalError, match="rank 1/2 has not come; start it on its machine"):
            gathering.wait(0.5)
    assert other.returncode == 2
    assert other.stderr is not None
    said = "it has the run cdcdcdcdcdcd, the peer has abababababab; give the same RUN on all machines"
    assert other.stderr.read() == f"potluck: --site {gathering.site.address}: {said}\n"


def test_a_machine_with_another_secret_or_rank_is_refused(gathering: Gathering) -> None:
    """And a stranger gets nothing but a random number, and keeps nobody out."""
    site = gathering.site
    assert "the secret is another; " in refused(gathering, secret="0" * 32, rank=1)
    assert "it is rank 2/3, the site has 2; " in refused(gathering, rank=2, ranks=3)
    assert "it is rank 0/2, the site has 2; " in refused(gathering, rank=0)
    with socket.create_connection((site.host, site.port)) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.sendall(bytes(34))  # an empty message, and a mac
        coming = pool.submit(connect, dataclasses.replace(site, rank=1), RUN, "cpu", 1)
        (member,) = gathering.wait(DEADLINE)
        assert member.memory_bytes == 1
        coming.result().close()
        heard = b"".join(iter(lambda: stranger.recv(1 << 16), b""))
        assert heard.startswith(MAGIC)
        assert len(heard) == len(MAGIC) + 32


@pytest.mark.parametrize(
    ("site", "rank", "said"),
    [
        ("192.168.1.5:7100", None, "--site and --rank go together"),
        (None, "0/2", "--site and --rank go together"),
        ("0.0.0.0:7100", "0/2", "not an address of one network"),
        ("[::]:7100", "0/2", "not an address of one network"),
        ("home:7100", "0/2", "not an address of one network"),
        ("192.168.1.5", "0/2", "not an address of one network"),
        ("192.168.1.5:0", "0/2", "not an address of one network"),
        ("8.8.8.8:7100", "0/2", "an address of the internet"),
        ("192.168.1.5:7100", "2/2", "not K/N"),
        ("192.168.1.5:7100", "0/1", "not K/N"),
        ("192.168.1.5:7100", "0/65", "not K/N"),
        ("192.168.1.5:7100", "first", "not K/N"),
        ("192.168.1.5:7100", "1/2", "the secret of the site is missing"),
    ],
)
def test_places_that_make_no_sense_are_refused(site: str | None, rank: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        Site.parse(site, rank)
    assert ";" in str(refused.value), "no remedy"


def test_places_are_read() -> None:
    assert Site.parse(None, None) is None
    assert Site.parse("192.168.1.5:7100", "0/2") == Site("192.168.1.5", 7100, "", 0, 2)
    found = Site.parse("[fd00::5]:7100/abc", "3/4")
    assert found == Site("fd00::5", 7100, "abc", 3, 4)
    assert found is not None
    assert found.address == "[fd00::5]:7100"


def test_an_address_that_is_not_here_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot listen there"):
        Gathering(Site("192.0.2.7", 7100, SECRET, 0, 2), RUN)
    with pytest.raises(OSError, match="refused"):
        connect(Site("127.0.0.1", potluck.free_port(), SECRET, 1, 2), RUN, "cpu", 1)
