"""Notices: a webhook and a command are told when a run is finished or paused by an alarm, when a server is blocked and
when the store is down. Each is told once, also across restarts, and what comes and goes is told once an hour at most.

What was told is in the ledger. A hook that fails is tried again, with growing pauses, for as long as the matter holds.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from gend.config import Notices
from gend.ledger import Ledger
from gend.status import RunStatus, Status, clock, dollars

log = logging.getLogger("gend.notices")
T = TypeVar("T")

LASTING_SECONDS = 30.0
"""A server or store that is back sooner is nobody's business at night."""

QUIET_SECONDS = 3600.0
"""What comes and goes is told again only after it was away for so long."""

REFRESH_SECONDS = 60.0
HOOK_SECONDS = 15.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 300.0


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What a hook gets as JSON. `kind` is finished, paused, blocked or store; `content` is `text` again, since some
    chats read the one and some the other."""

    kind: str
    text: str
    content: str
    at: float
    host: str


def matters(status: Status) -> dict[str, tuple[str, str]]:
    """What is worth a notice now: key -> kind and text. Pure.

    A run that was never active under this ledger is old news: it was finished when its parts were found in the store.
    """
    found = {}
    for run in status.runs:
        if run.state == "finished" and run.active_seconds is not None:
            found[f"finished:{run.id}"] = ("finished", _finished(run, status))
        elif run.state == "paused" and run.reason.startswith("alarm"):
            found[f"paused:{run.id}"] = ("paused", f"{run.id} is paused: {run.reason}")
    for server in status.servers:
        if server.state in ("blocked", "backoff") and status.at - server.since > LASTING_SECONDS:
            text = f"server {server.number} is blocked since {clock(server.since, status.at)}: {server.last_error}"
            found[f"blocked:{server.number}"] = ("blocked", text)
    for outage in status.outages:
        if outage.what == "store" and status.at - outage.since > LASTING_SECONDS:
            found["store"] = ("store", f"the store is down since {clock(outage.since, status.at)}: {outage.why}")
    return found


def _finished(run: RunStatus, status: Status) -> str:
    rows = sum(run.verdicts.values())
    shares = sorted(run.verdicts.items(), key=lambda item: -item[1])
    words = [f"{word} {count / rows:.1%}" for word, count in shares] if rows else []
    spent = f"; {dollars(status.cost.spent)} so far" if status.cost else ""
    return f"{run.id} is finished: {run.prompts:,} rows, {', '.join(words)}{spent}"


class Teller:
    """Tells what has not been told."""

    def __init__(self, hooks: Notices, ledger: Ledger, in_thread: Callable[..., "asyncio.Future[Any]"]):
        """`in_thread(call, *args)` runs a call of the ledger beside the loop."""
        self._hooks, self._ledger, self._in_thread = hooks, ledger, in_thread
        self._told: dict[str, float] | None = None
        self._delivered: set[tuple[str, str]] = set()  # key and hook, where another hook failed
        self._pause = FIRST_PAUSE_SECONDS
        self._next_try = 0.0

    async def look(self, status: Status, last: bool = False) -> None:
        """Tell what is new in `status`; with `last` at once, even after a failure. Raises LedgerUnavailable."""
        if self._told is None:
            self._told = await self._in_thread(self._ledger.told)
        now, holds = time.time(), matters(status)
        told = {}
        for key, (kind, text) in holds.items():
            if key not in self._told:
                if (last or now >= self._next_try) and await self._tell(key, kind, text):
                    told[key] = now
            elif now - self._told[key] > REFRESH_SECONDS:
                told[key] = now
        gone = [key for key, at in self._told.items() if key not in holds and now - at > QUIET_SECONDS]
        if told or gone:
            await self._in_thread(self._ledger.set_told, told, gone)
            self._told = {key: at for key, at in {**self._told, **told}.items() if key not in gone}

    async def _tell(self, key: str, kind: str, text: str) -> bool:
        host = os.uname().nodename
        text = f"gend on {host}: {text}"
        notice = msgspec.json.encode(Notice(kind=kind, text=text, content=text, at=round(time.time(), 1), host=host))
        hooks = {"webhook": self._post, "command": self._run}
        for name, hook in hooks.items():
            if getattr(self._hooks, name) and (key, name) not in self._delivered:
                try:
                    await hook(notice)
                except (OSError, aiohttp.ClientError, TimeoutError, _HookFailed) as error:
                    self._next_try = time.time() + self._pause
                    log.warning("notice %s: the %s failed: %s; again in %.0f s", key, name, _why(error), self._pause)
                    self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
                    return False
                self._delivered.add((key, name))
        self._pause = FIRST_PAUSE_SECONDS
        self._delivered -= {(key, name) for name in hooks}
        if self._hooks.webhook or self._hooks.command:
            log.info("told: %s", text)
        if kind == "finished":  # the other matters are events already
            await self._in_thread(self._ledger.event, "run", text.partition(": ")[2])
        return True

    async def _post(self, notice: bytes) -> None:
        timeout = aiohttp.ClientTimeout(total=HOOK_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.post(
                self._hooks.webhook, data=notice, headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as answer,
        ):
            if answer.status >= 300:
                raise _HookFailed(f"{urlsplit(self._hooks.webhook).hostname} answers {answer.status}")

    async def _run(self, notice: bytes) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._hooks.command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            await asyncio.wait_for(process.communicate(notice), HOOK_SECONDS)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            raise _HookFailed(f"it ended with {process.returncode}")


class _HookFailed(Exception):
    """A hook answered that it did not take the notice."""


def _why(error: Exception) -> str:
    """What went wrong, without the URL: whoever has it may post."""
    if isinstance(error, _HookFailed):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no answer within {HOOK_SECONDS:.0f} s"
    why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
    return f"{type(error).__name__} {why}".strip()
