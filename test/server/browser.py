"""A headless Chromium driven over the WebDriver protocol with nothing but HTTP."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1060,1000"
).split()
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of element references, fixed by the protocol


def why_not() -> str | None:
    """Reason why no browser test can run here, or None."""
    for program in ("chromedriver", "chromium"):
        if shutil.which(program) is None:
            return f"needs {program} on the PATH (Debian: apt-get install chromium chromium-driver)"
    return None


class Browser:
    """One browser window; a context manager. ``profile`` is an empty directory."""

    def __init__(self, profile: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        options = {"binary": shutil.which("chromium"), "args": [*ARGUMENTS, f"--user-data-dir={profile}"]}
        capabilities = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._wait_for_driver()
        self._session = f"/session/{self._post('/session', capabilities)['sessionId']}"

    def _wait_for_driver(self) -> None:
        for _ in range(200):
            try:
                if self._client.get("/status").json()["value"]["ready"]:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError("chromedriver did not start")

    def _post(self, path: str, body: dict):
        answer = self._client.post(path, json=body)
        if answer.is_error:
            raise RuntimeError(answer.text)
        return answer.json()["value"]

    def open(self, url: str) -> None:
        """Load a page."""
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str):
        """Result of a function body in the page."""
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """Click an element as a user does (it must be visible)."""
        found = self._post(f"{self._session}/element", {"using": "css selector", "value": selector})
        self._post(f"{self._session}/element/{found[_ELEMENT]}/click", {})

    def wait_for(self, script: str, timeout_s: float = 20.0):
        """First truthy result of a function body."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if result := self.run(script):
                return result
            time.sleep(0.05)
        raise TimeoutError(f"never true: {script}; the page shows {self.run('return document.body.innerText')!r}")

    def screenshot(self, path: Path) -> None:
        """PNG of the window."""
        path.write_bytes(base64.b64decode(self._client.get(f"{self._session}/screenshot").json()["value"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.delete(self._session)
        self._driver.terminate()
        self._driver.wait(10)
        self._client.close()
