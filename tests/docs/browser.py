"""A headless Chromium that takes pictures, spoken to over its debugging pipe: only the pictures of the documents need it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
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
        command = [self._path, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                   f"--user-data-dir={self._folder.name}"]  # fmt: skip
        # It reads its third descriptor and writes to its fourth one.
        pipes = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(
            ["sh", "-c", pipes, "sh", *command],
            pass_fds=(to_browser, from_browser),
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
        """Takes `url` in a window of `width` x `height` pixels, once the JavaScript `ready` is true; `whole`: with what is below the window.
        What is wider than the window is a fault, as is what the page logs as an error."""
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        session = self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._do(f"{domain}.enable", session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._do("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", session, features=[scheme])
        self._do("Page.navigate", session, url=url)
        waiting = WAITING.replace("SECONDS", str(SECONDS)).replace("READY", ready)
        found = self._do("Runtime.evaluate", session, expression=waiting, awaitPromise=True)["result"]
        if found.get("value", 0) > width or "value" not in found:
            self.faults.append(f"{to.name}: {found.get('value', 'not ready')} pixels wide, the window has {width}")
        more: dict[str, Any] = {}
        if whole:
            all_of_it = self._do("Page.getLayoutMetrics", session)["cssContentSize"]
            more = {"captureBeyondViewport": True, "clip": {**all_of_it, "scale": 1}}
        shot = self._do("Page.captureScreenshot", session, format="png", **more)
        to.write_bytes(base64.b64decode(shot["data"]))
        self._do("Target.closeTarget", targetId=target)

    def _do(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
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
