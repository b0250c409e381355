"""A headless Chromium that takes the pictures of the documents, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 30
"""For a page to be ready."""
WAITING = """new Promise((yes, no) => {
    const end = Date.now() + 1000 * SECONDS;
    (function look() {
        if (document.readyState === "complete" && (READY)) yes(document.documentElement.scrollWidth);
        else if (Date.now() > end) no("not ready");
        else setTimeout(look, 50);
    })();
})"""
"""Gives how wide the page is."""
PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(given), fcntl.F_DUPFD, 10) for given in sys.argv[1:3]]
for to, pipe in enumerate(pipes, 3):
    os.dup2(pipe, to)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A browser reads its third descriptor and writes to its fourth one; a shell can only move those below ten there."""


class Browser:
    """Use as `with`. Raises SystemExit where there is none. `faults`: what pages complained of."""

    def __init__(self) -> None:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            raise SystemExit(f"pictures: none of {', '.join(NAMES)} is there; install Chromium")
        self._path = found
        self.faults: list[str] = []
        self._number = 0
        self._said = b""

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="potluck-pictures-", ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [self._path, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", PIPES, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            env={**os.environ, "TMPDIR": self._folder.name},  # else it leaves folders of its own behind
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._folder.cleanup()

    def picture(
        self, url: str, to: Path, width: int, height: int, *, dark: bool, ready: str = "true", whole: bool = False
    ) -> None:
        """Takes `url` in a window of `width` x `height` pixels, once the JavaScript `ready` is true; `whole`: with what
        is below the window. What is wider than the window is a fault, as is what the page logs as an error."""
        page = self.open(url, width, height, dark=dark, ready=ready)
        if page.wide is None or page.wide > width:
            self.faults.append(f"{to.name}: {page.wide or 'not ready'} pixels wide, the window has {width}")
        page.picture(to, whole)
        page.close()

    def open(self, url: str, width: int, height: int, *, dark: bool, ready: str = "true") -> Page:
        """The page at `url` in a window of its own, once the JavaScript `ready` is true."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", session, features=[scheme])
        self.ask("Page.navigate", session, url=url)
        return Page(self, target, session, ready)

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """What the browser answers. Raises SystemExit where it refuses."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise SystemExit(f"pictures: {method}: {answer['error']['message']}")
                return dict(answer["result"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.faults.append(str(answer["params"]["exceptionDetails"].get("text")))
            if answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.faults.append(str(answer["params"]["entry"]["text"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._said:
            data = os.read(self._in, 1 << 20)
            if not data:
                raise SystemExit("pictures: Chromium has ended")
            self._said += data
        raw, self._said = self._said.split(b"\0", 1)
        return dict(json.loads(raw))


class Page:
    """A page in a window. `wide`: its width in pixels, None where it never got ready. Made by `Browser.open`."""

    def __init__(self, browser: Browser, target: str, session: str, ready: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        found = self._wait(ready)
        self.wide = found if isinstance(found, int) else None

    def _wait(self, ready: str) -> Any:
        waiting = WAITING.replace("SECONDS", str(SECONDS)).replace("READY", ready)
        return self._value(waiting)

    def _value(self, expression: str) -> Any:
        found = self._browser.ask(
            "Runtime.evaluate",
            self._session,
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", found["exceptionDetails"]))
        return found["result"].get("value")

    def does(self, script: str) -> None:
        """Runs it."""
        self._value(f"(() => {{ {script} }})()")

    def says(self, expression: str) -> Any:
        """Its value."""
        return self._value(expression)

    def until(self, ready: str) -> None:
        """Waits until it is true. Raises AssertionError where it never is."""
        assert isinstance(self._wait(ready), int), f"never: {ready}"

    def picture(self, to: Path, whole: bool = False) -> None:
        """Takes it, as PNG; `whole`: with what is below the window."""
        more: dict[str, Any] = {}
        if whole:
            all_of_it = self._browser.ask("Page.getLayoutMetrics", self._session)["cssContentSize"]
            more = {"captureBeyondViewport": True, "clip": {**all_of_it, "scale": 1}}
        shot = self._browser.ask("Page.captureScreenshot", self._session, format="png", **more)
        to.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)
