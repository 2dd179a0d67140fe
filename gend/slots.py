"""Slots: how many requests may be in flight at one server, and whose turn is next.

Prompts of all open batches wait in one place, by rank (0 is the highest priority), then fairly between runs, then in
the order of their batches: this is what keeps a server full across batches, with no barrier between them.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable

from gend.errors import Draining, GendError, Withdrawn

RETRY = -1
"""The rank of a prompt that was sent before: ahead of all others, since its batch waits for it."""


class Slots:
    """A limit with a fair, ranked waiting room. Use from one asyncio loop."""

    def __init__(self) -> None:
        self.limit = 0
        self.in_flight = 0
        self.closed = False
        self.changed = asyncio.Event()  # something was taken or given back: look again whether more is wanted
        self._held_back = False
        self._left = asyncio.Event()
        self._one_alone = asyncio.Lock()
        self._rooms: dict[int, dict[str, deque[asyncio.Future[None]]]] = {}

    @contextlib.asynccontextmanager
    async def slot(self, rank: int, run: str) -> AsyncIterator[None]:
        """Hold a slot for the block. Raises Draining, and for ranks from 0 on Withdrawn."""
        await self._enter(rank, run)
        try:
            yield
        finally:
            self.in_flight -= 1
            self._left.set()
            self._admit()
            self.changed.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the only slot for the block: wait until nothing is in flight, and let nothing else in meanwhile."""
        async with self._one_alone:
            if self.closed:
                raise Draining("nothing new is sent")
            self._held_back = True
            try:
                while self.in_flight:
                    self._left.clear()
                    await self._left.wait()
                    if self.closed:
                        raise Draining("nothing new is sent")
                self.in_flight += 1
                try:
                    yield
                finally:
                    self.in_flight -= 1
            finally:
                self._held_back = False
                self._admit()
                self.changed.set()

    def waiting(self, rank: int | None = None) -> int:
        """How many prompts wait for a slot: all, or those of this rank or a higher priority."""
        queues = (q for r, runs in self._rooms.items() if rank is None or r <= rank for q in runs.values())
        return sum(not future.done() for queue in queues for future in queue)  # one who gave up waits no more

    def set_limit(self, limit: int) -> None:
        """Let this many be in flight; when it shrinks, those in flight go on to their end."""
        self.limit = limit
        self._admit()
        self.changed.set()

    def close(self, run: str | None = None) -> None:
        """Send away all who wait (of one run, or of all for good): they raise Draining. Those in flight go on."""
        self.closed = self.closed or run is None
        self._send_away(Draining, "nothing new is sent", self._rooms, run)
        self._left.set()

    def withdraw(self) -> None:
        """Send away all who wait but retries, so that any server of this box can take them: they raise Withdrawn."""
        self._send_away(Withdrawn, "offered to all", [rank for rank in self._rooms if rank != RETRY], None)

    def _send_away(self, error: type[GendError], why: str, ranks: Iterable[int], run: str | None) -> None:
        for runs in (self._rooms[rank] for rank in ranks):
            for name in list(runs) if run is None else [run]:
                for future in runs.pop(name, ()):
                    if not future.done():
                        future.set_exception(error(why))  # one each: a shared one drags the tracebacks of all along
        self.changed.set()

    async def _enter(self, rank: int, run: str) -> None:
        if self.closed:
            raise Draining("nothing new is sent")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._rooms.setdefault(rank, {}).setdefault(run, deque())
        queue.append(future)
        self._admit()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:  # admitted just now
                self.in_flight -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        while self.in_flight < self.limit and not self._held_back:
            future = self._next()
            if future is None:
                return
            self.in_flight += 1
            future.set_result(None)

    def _next(self) -> asyncio.Future[None] | None:
        for rank in sorted(self._rooms):
            runs = self._rooms[rank]
            for run in list(runs):
                queue = runs.pop(run)
                while queue:
                    future = queue.popleft()
                    if not future.done():
                        if queue:
                            runs[run] = queue  # to the end: the next slot is another run's
                        return future
        return None
