"""Nothing flickers: what a refresh of the monitor writes to its terminal and changes in its page."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.docs.browser import NAMES, Browser
from tests.docs.pictures import READY, made_up, served
from tests.support import crowd
from tests.support.watched import MadeUp
from tests.support.watching import DEADLINE, Watching, watching

REFRESHES = 6
HOME, SHOWN = "\x1b[H", "\x1b[?25h"
BEGIN = "\x1b[?1049h\x1b[H\x1b[?25l"
"""Another screen, and no cursor on it."""
STYLE = re.compile(r"\x1b\[[\d;]*m")
BYTES_A_CELL = 6
"""Of a refresh, at most, styles and signs of several bytes included."""
SMALL, LARGE = 5, 500
SIZES = ((80, 24), (120, 40), (200, 60))
"""Columns and lines."""


def refreshes(drawn: str) -> Iterator[str]:
    """What was written for each refresh after the first: from where the cursor goes home to the next time."""
    yield from drawn.split(HOME)[2:-1]  # the last one may not be whole


def repainted(refresh: str, width: int, height: int) -> None:
    """Every cell of the screen is written once, from the first to the last; nothing is cleared, nothing scrolls."""
    plain = STYLE.sub("", refresh)
    assert "\x1b" not in plain, f"it writes {plain[plain.index(chr(27)) :][:12]!r}"
    lines = plain.split("\n")
    assert len(lines) == height, "a line more would scroll, a line less would stay as it was"
    assert [cell_len(line.rstrip("\r")) for line in lines] == [width] * height
    assert len(refresh.encode()) <= BYTES_A_CELL * width * height


@pytest.mark.slow
def test_a_terminal_is_painted_over_in_place(tmp_path: Path) -> None:
    for (width, height), drawn in asyncio.run(drawn_while_news_come(tmp_path)).items():
        _, begun, drawn = drawn.partition(BEGIN)
        assert begun, "it has a screen of its own, without a cursor"
        assert SHOWN not in drawn
        found = list(refreshes(drawn))
        assert len(found) >= REFRESHES
        for refresh in found:
            repainted(refresh, width, height)
        assert len(set(found)) > 1, "something was shown"


async def drawn_while_news_come(folder: Path) -> dict[tuple[int, int], str]:
    """What real monitors of a real node write, by the sizes of their terminals."""
    async with crowd.node(crowd.Signing(SMALL), folder / "node") as node:
        node.decide(3)
        loop = asyncio.get_running_loop()

        def watch() -> dict[tuple[int, int], str]:
            with contextlib.ExitStack() as stack:
                monitors = {(w, h): stack.enter_context(watching(node.line, width=w, height=h)) for w, h in SIZES}
                for step in range(1, 2 * REFRESHES + 1):
                    before = {size: one.drawn.count(HOME.encode()) for size, one in monitors.items()}
                    loop.call_soon_threadsafe(node.hear, 1 + step % 4)
                    loop.call_soon_threadsafe(node.decide)
                    for size, one in monitors.items():
                        until(one, lambda w, least=before[size]: w.drawn.count(HOME.encode()) > least)
                return {size: one.drawn.decode() for size, one in monitors.items()}

        return await asyncio.to_thread(watch)


def until(watched: Watching, wanted: Callable[[Watching], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not wanted(watched):
        assert time.monotonic() < end, "nothing new is drawn"
        time.sleep(0.05)  # a terminal has no other sign of news


WATCH = """
    window.changes = { added: [], removed: [], other: 0, jumps: 0 };
    new MutationObserver((all) => {
        for (const one of all) {
            for (const kind of ["added", "removed"])
                for (const node of one[kind + "Nodes"])
                    if (node instanceof Element) changes[kind].push(node.nodeName);
            if (one.type !== "childList" && !one.target.parentElement?.closest(".age")) changes.other += 1;
        }
    }).observe(document.body, { childList: true, subtree: true, attributes: true, characterData: true });
    new PerformanceObserver((all) => {
        for (const one of all.getEntries()) changes.jumps += one.value;
    }).observe({ type: "layout-shift" });
    window.answers = 0;
    const ask = fetch;
    window.fetch = async (...how) => {
        const reply = await ask(...how);
        setTimeout(() => { answers += 1; }, 300);
        return reply;
    };
"""


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="needs Chromium")
@pytest.mark.parametrize("phone", [False, True])
def test_a_page_changes_what_is_news_and_nothing_else(phone: bool) -> None:
    screen = made_up(LARGE)
    made, newest = MadeUp(LARGE), screen.view.losses[-1][0]
    with served(screen) as url, Browser() as browser:
        page = browser.open(url, *((390, 844) if phone else (1280, 900)), dark=False, ready=READY)
        page.does(WATCH)
        page.until("answers >= 2")
        still = page.says("changes")
        assert (still["added"], still["removed"], still["other"], still["jumps"]) == ([], [], 0, 0)

        for step in (1, 2, 3, 4):  # of a round more than the page knows
            for event in made.steps(newest + 1, step):
                screen.take(event)
        screen.take(made.commit(newest + 1))
        page.until(f"document.querySelector('#rounds tbody td').textContent === '{newest + 1}'")
        page.until("answers >= 5")
        after = page.says("changes")
        assert after["other"] > 100, after
        assert after["removed"] == [], after
        assert len(after["added"]) < 40, after
        assert after["jumps"] < 0.02, "nothing moves that one is reading"
        page.close()
        assert browser.faults == []
