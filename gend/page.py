"""The page: what `gend status` says and more, in a browser, with /metrics for Prometheus. A child of the supervisor.

It listens on 127.0.0.1 only and can only be read. What it shows is cached, so any number of viewers costs the same.
A web site that the viewer has open elsewhere gets nothing: the Host must be this machine's own name for itself (or its
DNS could be bent to 127.0.0.1), and no header allows another origin to read an answer. Rows hold HTML and scripts: the
page's own script writes them as text, and the policy below would not run them anyway.

Notices are sent from here too (see notices.py). Nothing here may disturb the run: what fails is a warning in status.
"""

import asyncio
import contextlib
import importlib.resources
import itertools
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from gend import metrics
from gend.config import Settings
from gend.errors import GendError, LedgerUnavailable
from gend.ledger import HISTORY_SAMPLES, Control, Ledger
from gend.notices import Teller
from gend.row_samples import RowSamples
from gend.status import GAP_SECONDS, Sample, Status, growth, read_status
from gend.store import Store

log = logging.getLogger("gend.page")

LOOK_SECONDS = 1.0
ROWS_SECONDS = 2.0
BIND_AGAIN_SECONDS = 30.0
HISTORY_CACHE_SECONDS = 5.0
POINTS = 240
SHORTEST_SECONDS = 30.0  # of one point: less shows the luck of single rows
EVENTS_SHOWN = 200
LAST_NOTICE_SECONDS = 10.0

OWN_NAMES = ("127.0.0.1", "localhost", "::1")
"""Hosts that a request may name, with any port: an SSH forward may have another one."""

FILES = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/uplot.css": ("uplot/uPlot.min.css", "text/css"),
    "/uplot.js": ("uplot/uPlot.iife.min.js", "text/javascript"),
}

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Page:
    """What the page shows, kept fresh, and the server that shows it."""

    def __init__(self, settings: Settings, ledger: Ledger, store: Store):
        self.settings, self.ledger = settings, ledger
        self.samples = RowSamples(settings.folder, store, ledger)
        self.status: Status | None = None
        self.trouble = ""  # why the ledger cannot be asked
        self.port_trouble = ""
        self._history: dict[float, tuple[float, bytes]] = {}
        # One thread for the ledger, one for the store: a slow store must not hold up notices.
        self._ledger_thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._rows_thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self.teller = Teller(settings.notices, ledger, self._ask)

    def _ask(self, call: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().run_in_executor(self._ledger_thread, call, *args)

    # -- kept fresh ----------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Look, show and tell until `stop`; then a last look, so that the end of the last run is told."""
        work = [asyncio.create_task(one) for one in (self._look(), self._look_at_rows(), self._serve())]
        ended, _ = await asyncio.wait(
            [*work, stopped := asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        for task in [*work, stopped]:
            task.cancel()
        await asyncio.gather(*work, stopped, return_exceptions=True)
        for task in ended - {stopped}:
            task.result()  # none of them ends by itself: this raises
        with contextlib.suppress(LedgerUnavailable, TimeoutError):
            async with asyncio.timeout(LAST_NOTICE_SECONDS):
                await self.teller.look(await self._ask(read_status, self.ledger, self.settings), last=True)

    async def _look(self) -> None:
        away: dict[str, float] = {}
        while True:
            try:
                self.status = await self._ask(read_status, self.ledger, self.settings)
                self.trouble = ""
                away = await self._note_outages(away, self.status)
                view = {"port": self.settings.page.port, "trouble": self.port_trouble}
                await self._ask(self.ledger.publish, "gend:page", view, 10.0)
                await self.teller.look(self.status)
            except LedgerUnavailable as error:
                if not self.trouble:
                    log.warning("%s; showing what was last known", error)
                self.trouble = str(error)
            await asyncio.sleep(LOOK_SECONDS)

    async def _note_outages(self, before: dict[str, float], status: Status) -> dict[str, float]:
        """Make events of outages that began or ended: of all workers and the loader together, so one of each."""
        now = {outage.what: outage.since for outage in status.outages if outage.what != "redis"}
        for outage in status.outages:
            if outage.what in now and outage.what not in before:
                await self._ask(self.ledger.event, outage.what, f"{outage.what} is away: {outage.why}", True)
        for what, since in before.items():
            if what not in now:
                text = f"{what} is back after {status.at - since:.0f} s"
                await self._ask(self.ledger.event, what, text)
        return now

    async def _look_at_rows(self) -> None:
        said = ""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._rows_thread, self._read_rows)
                said = ""
            except (GendError, OSError) as error:
                if not said:
                    log.warning("no new sample rows: %s", error)
                said = str(error)
            await asyncio.sleep(ROWS_SECONDS)

    def _read_rows(self) -> None:
        newest_first = list(self.ledger.runs().values())[::-1]
        controls = self.ledger.controls()
        self.samples.look(sorted(newest_first, key=lambda run: controls.get(run.id, Control()).state != "active"))

    # -- answers -------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Listen; where the port is somebody else's, say so and try again: notices do not depend on it."""
        port = self.settings.page.port
        if not port:
            await asyncio.Event().wait()
        runner = web.AppRunner(self.app(), access_log=None)
        await runner.setup()
        try:
            while True:
                try:
                    await web.TCPSite(runner, "127.0.0.1", port).start()
                except OSError as error:
                    why = f"127.0.0.1:{port} cannot be listened on: {error.strerror}; set page.port to another"
                    if not self.port_trouble:
                        log.warning("%s", why)
                    self.port_trouble = why
                    await asyncio.sleep(BIND_AGAIN_SECONDS)
                else:
                    self.port_trouble = ""
                    log.info("the page is at http://127.0.0.1:%d", port)
                    await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    def app(self) -> web.Application:
        """The web application, without a port."""
        app = web.Application(middlewares=[_guard])
        for path, (name, kind) in FILES.items():
            app.router.add_get(path, _file(name, kind))
        app.router.add_get("/api/status", self._status)
        app.router.add_get("/api/history", self._get_history)
        app.router.add_get("/api/rows", self._rows)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _status(self, request: web.Request) -> web.Response:
        if self.status is None:
            return _json({"error": self.trouble or "nothing is known yet"}, 503)
        return _json({"trouble": self.trouble, "status": self.status})

    async def _get_history(self, request: web.Request) -> web.Response:
        try:
            hours = min(72.0, max(0.1, float(request.query.get("hours", "1"))))
        except ValueError:
            return _json({"error": "hours is a number"}, 400)
        made_at, body = self._history.get(hours, (0.0, b""))
        if time.monotonic() - made_at > HISTORY_CACHE_SECONDS or not body:
            try:
                body = await self._ask(self._make_history, hours)
            except LedgerUnavailable as error:
                return _json({"error": str(error)}, 503)
            if len(self._history) > 20:  # somebody tries out numbers
                self._history.clear()
            self._history[hours] = (time.monotonic(), body)
        return web.Response(body=body, content_type="application/json")

    def _make_history(self, hours: float) -> bytes:
        recent = self.ledger.history(HISTORY_SAMPLES)
        oldest = recent[-1]["at"] if recent else 0.0
        if time.time() - oldest < hours * 3600:
            recent += [sample for sample in self.ledger.long_history() if sample["at"] < oldest]
        return msgspec.json.encode(columns(recent, time.time(), hours * 3600))

    async def _rows(self, request: web.Request) -> web.Response:
        return _json(self.samples.view(request.query.get("run", "")))

    async def _events(self, request: web.Request) -> web.Response:
        try:
            return _json(await self._ask(self.ledger.events, EVENTS_SHOWN))
        except LedgerUnavailable as error:
            return _json({"error": str(error)}, 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.status is None or self.trouble:  # old numbers would look like a run that stands still
            return web.Response(status=503, text=self.trouble or "nothing is known yet")
        body = metrics.exposition(self.status)
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


def columns(history: list[Sample], now: float, seconds: float) -> dict[str, Any]:
    """The history (newest first) as columns for charts, POINTS at most: null where nothing is known.

    `at` is the middle of each stretch of time in unix seconds; `tokens` are tokens/s by server; `verdicts` is the share
    of each verdict among the rows made in it; `idle` the share of empty slots, and of servers that were down, while
    there was a run to work on.
    """
    width = max(seconds / POINTS, SHORTEST_SECONDS)
    points = int(seconds / width)
    start = now - points * width
    numbers = sorted({number for sample in history for number in sample["servers"]}, key=int)
    time_seen = [0.0] * points
    tokens = {number: [0.0] * points for number in numbers}
    verdicts: dict[str, list[float]] = {}
    idle = [[0.0, 0.0] for _ in range(points)]
    for newer, older in itertools.pairwise(history):
        gap = newer["at"] - older["at"]
        if not 0 < gap <= GAP_SECONDS:
            continue
        first, last = ((at - start) / width for at in (older["at"], newer["at"]))
        if last <= 0:
            break
        for point in range(max(0, int(first)), min(points - 1, int(last)) + 1):
            share = (min(last, point + 1) - max(first, point)) / (
                last - first
            )  # of this time, what lies in the stretch
            time_seen[point] += share * gap
            if newer["runs"]:
                idle[point][0] += share * _idle_servers(newer["servers"].values(), len(numbers))
                idle[point][1] += share * len(numbers)
            for number, server in newer["servers"].items():
                before = older["servers"].get(number)
                tokens[number][point] += share * growth(server, before, "completion_tokens")
                for name in server:
                    if name.startswith("verdict:"):
                        counts = verdicts.setdefault(name.removeprefix("verdict:"), [0.0] * points)
                        counts[point] += share * growth(server, before, name)
    rows = [sum(shares[point] for shares in verdicts.values()) for point in range(points)]
    return {
        "at": [round(start + (point + 0.5) * width, 1) for point in range(points)],
        "tokens": {number: [_over(made[p], time_seen[p]) for p in range(points)] for number, made in tokens.items()},
        "verdicts": {word: [_over(made[p], rows[p]) for p in range(points)] for word, made in verdicts.items()},
        "idle": [_over(empty, all_slots) for empty, all_slots in idle],
        "width": width,
    }


def _idle_servers(there: Iterable[dict[str, Any]], wanted: int) -> float:
    """How many of `wanted` servers' worth of slots are empty; a server that is not there is empty."""
    return wanted - sum((min(1.0, server["in_flight"] / server["limit"]) for server in there if server["limit"]), 0.0)


def _over(amount: float, whole: float) -> float | None:
    return round(amount / whole, 4) if whole else None


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        own = urlsplit(f"//{request.headers.get('Host', '')}").hostname in OWN_NAMES
    except ValueError:
        own = False
    if not own:
        return web.Response(status=403, text="ask for it as 127.0.0.1 or localhost\n", headers=HEADERS)
    try:
        answer = await handler(request)
    except web.HTTPException as refusal:
        answer = web.Response(status=refusal.status, text=f"{refusal.reason}\n")
    answer.headers.update(HEADERS)
    return answer


def _file(name: str, kind: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    body = importlib.resources.files("gend").joinpath("page_files", name).read_bytes()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return answer


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


async def show(settings: Settings, redis_url: str, store: Store) -> None:
    """The page's process: its whole life, until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Page(settings, Ledger(redis_url, patience_seconds=2.0), store).run(stop)
