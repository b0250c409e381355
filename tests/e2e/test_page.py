"""The page of a run invites: what a browser shows of a line to join, and on the smallest phone."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from urllib.parse import parse_qs

import pytest
from rich.console import Console

from peer import events
from peer.ui import web
from peer.ui.monitor_screen import MonitorScreen
from protocol.run.manifest import AdmissionSpec
from protocol.wire.claims import Evaluation
from tests.docs.browser import NAMES, Browser
from tests.docs.pictures import READY, served
from tests.support.watched import MadeUp

pytestmark = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="needs Chromium")
PHONE, DESK = (360, 740), (1440, 900)
LINE = "/ip4/203.0.113.5/tcp/31330/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN#" + "a1" * 32
LETTERS = "x" * 400


def screen(rounds: int, *, closed: bool = False, line: str = LINE) -> MonitorScreen:
    """What a monitor knows of a run whose model writes a word without end."""
    made = MadeUp(5)
    manifest = dataclasses.replace(
        made.manifest, license="cc-by-4.0", admission=AdmissionSpec(mode="listed" if closed else "open")
    )
    found = MonitorScreen(manifest, Console(file=io.StringIO()), news_age=lambda: 0.0, join_line=lambda: line)
    for event in made.all(rounds):
        if isinstance(event.body, events.Commit) and event.body.round == 5:
            said = Evaluation(
                peer=made.ids[0], round=4, sequences=1, loss=7.0, bits_per_byte=2.0, signature=b"", sample=LETTERS
            )
            event = dataclasses.replace(event, body=dataclasses.replace(event.body, evaluations=(said,)))
        found.take(event)
    return found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("window", [PHONE, DESK])
def test_who_sees_a_run_can_take_part(window: tuple[int, int], dark: bool) -> None:
    with served(screen(20)) as url, Browser() as browser:
        page = browser.open(url, *window, dark=dark, ready=READY)
        assert page.wide == window[0], "nothing is wider than the window"
        assert page.says("document.querySelector('#samples div').textContent") == LETTERS
        assert page.says("document.querySelector('#join code').textContent") == f"potluck join {LINE}"
        commands = page.says("[...document.querySelectorAll('#model code')].map((x) => x.textContent)")
        assert commands == [f'potluck sample {LINE} --prompt "Once upon a time"', f"potluck export {LINE} --out model"]
        assert page.says("code.naturalWidth") > 0
        page.does("document.addEventListener('copy', () => { window.taken = document.activeElement.value; })")
        page.does("document.querySelector('#join button').click()")
        assert page.says("window.taken") == f"potluck join {LINE}"
        assert page.says("document.querySelector('#join button').textContent") == "copied"
        assert "ago" in page.says("document.querySelector('#cards .age').textContent")
        assert page.says("document.getElementById('trains').textContent").endswith("; licence: cc-by-4.0.")
        page.close()
        assert browser.faults == []


def test_a_closed_run_says_how_one_is_invited_and_gives_no_address() -> None:
    with served(screen(20, closed=True)) as url, Browser() as browser:
        page = browser.open(url, *PHONE, dark=False, ready=READY)
        assert "invite" in page.says("document.getElementById('join').textContent")
        assert "203.0.113.5" not in page.says("document.body.textContent")
        assert page.says("document.getElementById('code').hidden")
        page.close()
        assert browser.faults == []


@pytest.mark.parametrize("window", [PHONE, DESK])
def test_a_visitor_has_a_text_continued_where_the_operator_allows_it(window: tuple[int, int]) -> None:
    """What is typed and what comes back is shown as text, never as markup."""
    said = [{"written": f" <b>goes</b> on {LETTERS}"}, {"refused": "It rests for 3 s; try again then."}]
    asked: list[str] = []

    def sample(query: str) -> web.Answer:
        asked.extend(parse_qs(query)["text"])
        return web.answer("application/json", json.dumps(said[len(asked) - 1]), status=200 if len(asked) == 1 else 503)

    with served(screen(20), sample) as url, Browser() as browser:
        page = browser.open(url, *window, dark=False, ready=READY)
        for text, shown in ("a <i>b</i> & c", f"a <i>b</i> & c{said[0]['written']}"), ("d", said[1]["refused"]):
            page.does(f"document.getElementById('beginning').value = {json.dumps(text)}; go.click()")
            page.until("!go.disabled")
            assert page.says("continued.textContent") == shown
            assert page.says("document.documentElement.scrollWidth") <= window[0]
        assert asked == ["a <i>b</i> & c", "d"]
        page.close()
        # a browser logs each answer of 503 as an error
        assert [fault for fault in browser.faults if "503" not in fault] == []
    with served(screen(20)) as url, Browser() as browser:
        page = browser.open(url, *window, dark=False, ready=READY)
        assert page.says("document.getElementById('try').hidden")
        page.close()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("verse@127.0.0.1:4001#4mQ8yV2kLr9TzX1bNc", "This line works on the operator's machine only."),
        ("verse@[::1]#4mQ8yV2kLr9TzX1bNc", "This line works on the operator's machine only."),
        ("verse@203.0.113.5#4mQ8yV2kLr9TzX1bNc", "Any computer helps"),
    ],
)
def test_a_line_of_one_machine_says_so(line: str, told: str) -> None:
    with served(screen(20, line=line)) as url, Browser() as browser:
        page = browser.open(url, *PHONE, dark=False, ready=READY)
        assert told in page.says("document.getElementById('join').textContent")
        page.close()
