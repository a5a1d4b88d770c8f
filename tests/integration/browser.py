"""A headless Chromium, driven over its DevTools protocol: what a page shows, in the browser that people have."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

DEADLINE_S = 200.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


def program() -> str | None:
    """Where Chromium is, if it is."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Page:
    """One tab. Everything that goes wrong in it is noted in `troubles`: errors of scripts, what a policy has blocked, failed requests."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.troubles: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Has the browser do that, and returns its answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        end = time.monotonic() + DEADLINE_S
        while True:
            said = json.loads(self._socket.recv(timeout=max(0.1, end - time.monotonic())))
            if said.get("id") == number:
                assert "error" not in said, f"{method}: {said['error']}"
                return said["result"]
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        what, about = said.get("method"), said.get("params", {})
        if what == "Runtime.exceptionThrown":
            self.troubles.append(about["exceptionDetails"].get("exception", {}).get("description") or about["exceptionDetails"]["text"])
        elif what == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.troubles.append(about["entry"]["text"])

    def open(self, url: str) -> None:
        self.do("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """Its value, as JSON has it."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Until that is true in the page."""
        end = time.monotonic() + DEADLINE_S
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise AssertionError(f"not true within {DEADLINE_S} s: {condition}; the page says {self.text('body')!r}; {self.troubles}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """That is to be seen there."""
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    def rows(self, table: str) -> list[list[str]]:
        """What the body of a table says, cell by cell, hidden columns too."""
        cells = "[...r.cells].map(c => c.innerText.trim().replace(/\\s+/g, ' '))"
        return self.js(f"[...document.getElementById({json.dumps(table)}).tBodies[0].rows].map(r => {cells})")

    def looks(self, width: int, height: int, dark: bool = False) -> None:
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """One with a profile of its own, which ends with the block."""
    with tempfile.TemporaryDirectory(prefix="mooncake_ray_browser", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program() or "chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_address(process, Path(profile) / "DevToolsActivePort"), max_size=None, proxy=None, ping_interval=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def _address(process: subprocess.Popen[bytes], file: Path) -> str:
    """Of the first tab's socket."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the browser ended: {process.returncode}"
        if file.exists() and (lines := file.read_text().splitlines()):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{lines[0]}/json/list", timeout=DEADLINE_S) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        time.sleep(0.02)
    raise AssertionError(f"the browser did not say within {DEADLINE_S} s where it can be reached")
