"""The line that people say: what it holds, and what is none."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.identity import Identity
from protocol.run import short_line
from protocol.run.short_line import ShortLine

NODE = Identity(bytes(32)).peer_id
RUN = "9f86d081" * 8


@given(
    name=st.text(max_size=60),
    host=st.ip_addresses(v=4),
    port=st.integers(1, 65535),
    seed=st.binary(min_size=32, max_size=32),
)
def test_a_line_has_at_most_sixty_characters_and_is_read_as_it_was_written(
    name: str, host: ipaddress.IPv4Address, port: int, seed: bytes
) -> None:
    node = Identity(seed).peer_id
    line = short_line.short_line(name, f"/ip4/{host}/tcp/{port}/p2p/{node}", RUN)
    assert line is not None
    assert len(str(line)) <= 60
    assert short_line.parse(str(line)) == line
    assert line.dial == f"/ip4/{host}/tcp/{port}"
    assert line.code == short_line.code_of(node, RUN)


@pytest.mark.parametrize(
    ("address", "start", "dial"),
    [
        (f"/ip4/203.0.113.5/tcp/31337/p2p/{NODE}", "my-run@203.0.113.5#", "/ip4/203.0.113.5/tcp/31337"),
        (f"/ip6/2001:db8::1/tcp/4001/p2p/{NODE}", "my-run@[2001:db8::1]:4001#", "/ip6/2001:db8::1/tcp/4001"),
        (f"/dns4/node.example.org/tcp/31337/p2p/{NODE}", "my-run@node.example.org#", "/dns/node.example.org/tcp/31337"),
    ],
)
def test_hosts_of_every_kind(address: str, start: str, dial: str) -> None:
    line = short_line.short_line("My run!", address, RUN)
    assert line is not None
    assert str(line).startswith(start)
    assert line.dial == dial
    assert short_line.parse(str(line)) == line


def test_a_relayed_address_has_no_short_line() -> None:
    relayed = f"/ip4/203.0.113.5/tcp/4001/p2p/{NODE}/p2p-circuit/p2p/{Identity(b'x' * 32).peer_id}"
    assert short_line.short_line("run", relayed, RUN) is None


def test_the_code_is_of_the_node_and_of_the_run() -> None:
    code = short_line.code_of(NODE, RUN)
    assert code != short_line.code_of(Identity(b"x" * 32).peer_id, RUN)
    assert code != short_line.code_of(NODE, "0" * 64)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run@203.0.113.5",
        "run@203.0.113.5#",
        "run@203.0.113.5#4mQ8yV",
        "run@203.0.113.5:#4mQ8yV2kLr9TzX1bNc",
        "run@#4mQ8yV2kLr9TzX1bNc",
        "@203.0.113.5#4mQ8yV2kLr9TzX1bNc",
        "run@203.0.113.5#4mQ8yV2kLr9TzX1bN0",
        "run@203.0.113.5#4mQ8yV2kLr9TzX1bNcc",
        "a-name-that-is-longer@203.0.113.5#4mQ8yV2kLr9TzX1bNc",
        "run@203.0.113.5#4mQ8yV2kLr9TzX1bNc\n",
        "me@example.org",
        f"/ip4/203.0.113.5/tcp/31337/p2p/{NODE}#{RUN}",
    ],
)
def test_what_is_no_short_line(text: str) -> None:
    assert short_line.parse(text) is None


def test_the_usual_port_is_left_out() -> None:
    assert str(ShortLine("run", "203.0.113.5", 31337, "4mQ8yV2kLr9TzX1bNc")) == "run@203.0.113.5#4mQ8yV2kLr9TzX1bNc"
