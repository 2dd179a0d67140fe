"""Headless Chromium, driven over its DevTools protocol: Debian's browser and aiohttp are all that it takes."""

import asyncio
import base64
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any, Self

import aiohttp

from harness import processes
from harness.processes import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


class Browser:
    """One tab. `complaints` collects what its console says: errors, warnings, exceptions, refused resources."""

    def __init__(self, folder: Path, marker: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.marker = folder, marker
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Self:
        profile = self.folder / "profile"
        quiet = ("gpu", "dev-shm-usage", "background-networking", "component-update", "extensions", "sync")
        flags = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in quiet)]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        environment = processes.environment(self.marker, HOME=str(self.folder), TZ=os.environ.get("TZ", "UTC"))
        self.process = processes.start([CHROMIUM, *flags], self.folder, "chromium", env=environment)
        log = self.folder / "chromium.log"
        active = profile / "DevToolsActivePort"

        def started() -> str:
            assert self.process.poll() is None, f"chromium ended\n{log.read_text()[-2000:]}"
            return active.read_text() if active.exists() and "\n" in active.read_text() else ""

        port = (await asyncio.to_thread(wait_until, started, "chromium has started")).split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
            url = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
        self._socket = await self._session.ws_connect(url, max_msg_size=1 << 26)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._reader.cancel()
        await self._session.close()
        processes.end_all(lambda: processes.marked(self.marker, self.folder))
        self.process.wait(30)

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._waiting.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in (
                "error",
                "warning",
                "assert",
            ):
                self.complaints.append(str(said["params"]["args"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(said["params"]["entry"]))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; gives its result. Raises AssertionError where the browser refuses it."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, 30)
        assert "error" not in said, f"{method}: {said['error']}"
        return dict(said["result"])

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. Raises AssertionError where it throws."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true; gives its value."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not (value := await self.evaluate(expression)):
            if asyncio.get_running_loop().time() > deadline:
                shown = await self.evaluate("document.body.innerText")
                raise AssertionError(f"waited in vain for {expression}\n{self.complaints}\n{shown}")
            await asyncio.sleep(0.1)
        return value

    async def look(self, width: int, height: int, dark: bool = False) -> None:
        """Be a screen of this size, in light or dark."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path, whole: bool = True) -> None:
        """The page as a PNG file."""
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))
