"""Names of strangers on every screen: from signed announcements of real peers, through a real node."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peer.ui.text import LONGEST_NAME, harmless_name
from protocol.wire import encoding
from protocol.wire.announcement import Announcement
from tests.docs.browser import NAMES, Browser
from tests.docs.pictures import READY
from tests.support import crowd
from tests.support.watching import DEADLINE, Watching, watching

SAID = (
    "\x1b[2J\x1b]0;owned\x07\x1b[31mred",
    "\u202eadmin\u202c\u200f\u2066gpj",
    "\x9b31mC1\x90\x9d",
    "<img src=x onerror=alert(1)>",
    'a"}\nb\r\n# HELP c\\',
    "[bold red]loud[/]",
    "x" * 64,
    "\u2028\u2029\u00ad\ufeff\x00",
)
"""By peers of the same run; the last one leaves nothing that can be shown."""
MOST = "y" * 10_000
VIEWS = {
    "2": "replicas and chains: ",
    "3": "rounds: the newest ",
    "4": "credits: ",
    "5": "every round has one result",
    "6": "you have no peer",
}
"""A word of each of the monitor's views, by its key."""
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What no text of a screen may have, but for its lines and tabs."""


@dataclass(frozen=True)
class Hostile(crowd.Signing):
    """A made-up run whose peers have these names."""

    def name_of(self, index: int) -> str:
        return SAID[index]


def spoil(node: crowd.Node) -> None:
    """A round leaves out a replica, and a peer announces a name of 10 kB, which no node takes."""
    node.decide(8)
    node.hear(2)
    who = next(iter(node.made.keys.values()))
    about = Announcement(run=node.made.manifest.run_id, peer=who.peer_id, serial=2**40, name=MOST)
    assert node.heard.add(who.peer_id, encoding.seal(who, about)) is None


def said(*words: object) -> str:
    """What a command prints, by a process of its own."""
    command = [sys.executable, "-m", "peer.cli", *map(str, words)]
    env = os.environ | {"COLUMNS": "160", "LINES": "50", "PYTHONUTF8": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=env, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def harmless(text: str) -> str:
    assert (found := STEERS.search(text)) is None, text[max(0, found.start() - 80) : found.end() + 80]
    assert "x" * (LONGEST_NAME + 1) not in text
    return text


def of_data(found: Any) -> None:
    """All that is written in plain data is harmless."""
    if isinstance(found, str):
        harmless(found)
    elif isinstance(found, dict | list):
        for one in (*found, *found.values()) if isinstance(found, dict) else found:
            of_data(one)


def shown(made: Hostile) -> set[str]:
    """How those are called of whose names something is left."""
    return {f"{name}·{peer[-4:]}" for peer, text in zip(made.ids, SAID, strict=True) if (name := harmless_name(text))}


def of_all(watched: Watching, names: set[str]) -> str:
    """The state of the page as soon as the monitor has heard of all who are called so."""
    end = time.monotonic() + DEADLINE
    while True:
        page = watched.get("state.json").decode()
        heard = {peer["name"] for peer in json.loads(page)["peers"]}
        if names <= heard:
            return page
        assert time.monotonic() < end, heard
        time.sleep(0.2)  # a page has no other sign of news


def test_names_reach_every_screen_as_harmless_text(tmp_path: Path) -> None:
    made = Hostile(len(SAID))
    names = shown(made)
    assert len(names) == len(SAID) - 1
    with crowd.living(tmp_path / "node", spoil, made=made) as line:
        credits = harmless(said("log", "credits", line))
        assert all(name in credits for name in names)
        for row in said("log", "credits", line, "--json").splitlines():
            of_data(json.loads(row))
        assert "left out" in harmless(said("log", "show", line))
        harmless(said("plan", line))
        state = json.loads(said("monitor", line, "--once", "--json"))
        of_data(state)
        assert {p["name"] for p in state["peers"]} >= set(names)
        assert any(name in harmless(said("monitor", line, "--once")) for name in names)
        with watching(line, "--metrics", "0", width=160, height=50, keys=True) as watched:
            page = of_all(watched, names)
            harmless(page)
            of_data(json.loads(page))
            for row in watched.get("metrics").decode().splitlines():
                assert re.fullmatch(r'# (HELP|TYPE) \w+ [ -~]+|\w+\{(\w+="\w*",?)+\} \S+', row), row
            for key, sign in VIEWS.items():
                watched.press(key.encode(), sign.encode())
            drawn = watched.drawn.decode()
            assert any(name in drawn for name in names)
            for text in (
                "\x1b]",
                "\x07",
                "\x1b[2J\x1b",
                "\x9b",
                "\x90",
                "\u202e",
                "\u2066",
                "\u200f",
                "\ufeff",
                "\r\n# HELP",
            ):
                assert text not in drawn, repr(text)


@pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="needs Chromium")
def test_a_browser_runs_nothing_of_a_name(tmp_path: Path) -> None:
    made = Hostile(len(SAID))
    with (
        crowd.living(tmp_path / "node", spoil, made=made) as line,
        watching(line) as watched,
        Browser() as browser,
    ):
        page = browser.open(watched.url, 1280, 2000, dark=False, ready=READY)
        page.until(f"document.body.innerText.includes('{harmless_name(SAID[0])}·')")
        text = str(page.says("document.body.innerText"))
        assert STEERS.search(text) is None
        assert all(name in text for name in shown(made))
        assert page.says("document.querySelectorAll('img:not(#code), [onerror]').length") == 0
        page.close()
        assert browser.faults == []
