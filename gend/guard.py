"""A worker's guard: is its server sane, which prompt killed it, and are the rows any good? Part of the worker's flow.

- Canaries (canary.py): a batch's part is put only when a canary asked after its last row came back right. Rows made
  since the last right one are dropped and made again, and the server with them.
  A canary waits in the server's queue like any prompt: while requests that get no answer fill all of its slots, no
  part is put, until the supervisor has ended that server.
- Suspects (blame.py): the prompts that were in flight when a server died are tried again in smaller company. Those are
  the prompts in flight at the first failure that no sign of life came after: a dying server resets its connections a
  moment before its port is closed, and whoever takes their slots meanwhile has done nothing.
- The alarm (verdict.py): when too many rows are bad, the run is paused, before a night of them is made.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from gend import canary
from gend.blame import AT_A_SERVER, IN_THE_LANE, Suspicion, accuse
from gend.engine import Server
from gend.errors import Draining, LedgerUnavailable, PromptRefused, ServerFault, ServerUnavailable
from gend.ledger import Control, Ledger
from gend.records import Reply, Row, Run
from gend.slots import RETRY, Slots
from gend.verdict import EMPTY, JUNK, LOOP, Alarm, AlarmLimits

log = logging.getLogger("gend.worker")
T = TypeVar("T")

CANARY_SECONDS = 120.0
"""A canary at least so often, also while no batch waits for one."""

LANE_SECONDS = 10.0

EXAMPLE_CHARS = 40
"""Of a row that an alarm was raised over, `gend status` shows the beginning and the end, so much of each."""


class Guard:
    """What one worker watches. `redis(call, *args)` runs a call of the ledger in the worker's Redis thread."""

    def __init__(
        self,
        name: str,
        server: Server,
        slots: Slots,
        ledger: Ledger,
        redis: Callable[..., Any],
        draining: asyncio.Event,
    ):
        self._name, self._server, self._slots = name, server, slots
        self._ledger, self._redis, self._draining = ledger, redis, draining
        self.suspects: dict[str, Suspicion] = {}
        self.wrong = ""  # why the server is not sane, once it is not
        self._knows: bool | None = None  # whether the model can answer canaries at all; None: not asked yet
        self._wanted = asyncio.Event()
        self._wanted.set()  # one at once: a server that is wrong from its start makes no rows to be dropped
        self._begun = self._good = 0
        self._asked: asyncio.Task[bool] | None = None
        self._news = asyncio.Event()
        self._out: set[str] = set()
        self._failed_with: set[str] = set()  # who was in flight at the first failure since the last sign of life
        self._crashed_with: set[str] | None = None
        self._accusing = asyncio.Lock()
        self._few, self._lane = asyncio.Semaphore(AT_A_SERVER), asyncio.Semaphore(IN_THE_LANE)
        self._in_lane = 0
        self._alarms: dict[str, Alarm] = {}

    # -- is the server sane --------------------------------------------------------------------------------------

    async def vouch(self) -> None:
        """Wait for the answer to a canary that is asked after this call.

        Raises Draining if the server is not sane, ServerUnavailable if it is gone.
        """
        needed = self._begun + 1
        while self._knows is not False and self._good < needed:
            if self.wrong:
                raise Draining("the server is not sane")
            if self._crashed_with is not None:
                raise ServerUnavailable("the server is gone")
            self._wanted.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)

    async def ask_canaries(self, vouch_up_to_now: Callable[[], Callable[[bool], Any]]) -> None:
        """Ask a canary whenever somebody waits for one, until one is wrong; of a busy server at most one a second.

        `vouch_up_to_now()` is called before each is asked and remembers where the rows end; what it gives is called
        with whether the answer was right. Raises ServerUnavailable.
        """
        while not self.wrong:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), CANARY_SECONDS)
            self._wanted.clear()
            self._begun += 1
            ticket, verdict = self._begun, vouch_up_to_now()
            try:
                right = await self._right(ticket)
            except ServerFault:
                await asyncio.sleep(1.0)
                continue
            await verdict(right)
            if right:
                self._good = ticket
            self._news.set()
            self._news = asyncio.Event()
            # At the end of a run parts, and rows made for others, wait for nothing but this.
            busy = 2 * self._slots.in_flight > self._slots.limit
            await asyncio.sleep(1.0 if busy else 0.1)

    async def answers(self) -> bool:
        """Whether the server, which has just failed somebody, answers anything at all; all who ask at once share it.

        Raises ServerUnavailable.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._answers())
        return await asyncio.shield(self._asked)

    async def _answers(self) -> bool:
        try:
            await self._ask(0)
        except PromptRefused:
            return True
        except ServerFault:
            return False
        except ServerUnavailable:
            self.crashed()  # its port was still open a moment ago, when it reset the request that failed
            raise
        return True

    async def _right(self, ticket: int) -> bool:
        try:
            said = await self._ask(ticket)
            if not canary.knows(said) and self._knows:
                said = await self._ask(ticket + 1)  # one wrong word may be chance
        except PromptRefused:
            self._knows = False
            return True
        right = canary.knows(said)
        if not self._knows:
            with contextlib.suppress(LedgerUnavailable):
                # What another server with this model knew, perhaps since we asked last, this one must know too.
                self._knows = await self._redis(self._ledger.model_knows, self._server.model, right)
        if right or not self._knows:
            return True
        self.wrong = f"wrong canary: it says {(said.content or '')[:60]!r} where Paris is right"
        return False

    async def _ask(self, seed: int) -> Reply:
        return await self._server.chat(canary.MESSAGES, None, canary.PLAIN, seed)

    # -- who killed the server -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def place(self, key: str, rank: int, run: str) -> AsyncIterator[None]:
        """A slot; for a suspect one in small company, or alone. Raises Draining, Withdrawn."""
        stage = self.suspects[key].stage if key in self.suspects else 0
        async with contextlib.AsyncExitStack() as stack:
            if stage == 1:
                await stack.enter_async_context(self._few)
            if stage >= 2:
                await stack.enter_async_context(self._lane)
                await self._enter_lane()
                stack.callback(self._leave_lane)
            rank = RETRY if stage else rank  # it was sent before, and its batch waits for it
            await stack.enter_async_context(self._slots.alone() if stage >= 3 else self._slots.slot(rank, run))
            self._out.add(key)
            yield

    def poison(self, key: str) -> str:
        """Why this prompt is not sent any more, or empty."""
        suspicion = self.suspects.get(key)
        return f"a server died {suspicion.alone} times with it alone" if suspicion and suspicion.poison else ""

    def failed(self) -> None:
        """A request failed: if the server is dying, it is one of those in flight now that it dies of."""
        self._failed_with = self._failed_with or set(self._out)

    def lives(self, key: str) -> None:
        """The server has answered this prompt, or something else after it: it does not die of it."""
        self._out.discard(key)
        self._failed_with = set()

    def crashed(self) -> None:
        """The server is gone: remember who was in flight at the first sign of it."""
        if self._crashed_with is None:
            self._crashed_with = self._failed_with or set(self._out)

    async def ended(self, key: str, well: bool) -> None:
        """A prompt is at its end, here: with `well` it has a row, and is no suspect any more."""
        self._out.discard(key)
        if well and key in self.suspects:
            del self.suspects[key]
            with contextlib.suppress(LedgerUnavailable):  # then it is tried in small company once more
                await self._redis(self._ledger.change_suspects, {}, [key])

    async def accuse(self) -> None:
        """Write down who was in flight when the server died: once, and before anybody can claim their batches."""
        async with self._accusing:
            if self._crashed_with:
                with contextlib.suppress(LedgerUnavailable):
                    known = await self._redis(self._ledger.suspects)
                    accused, cleared = accuse(self._crashed_with, known)
                    await self._redis(self._ledger.change_suspects, accused, cleared)
                    log.warning("the server died with %d in flight: %d suspects", len(self._crashed_with), len(accused))
                self._crashed_with = set()

    async def look_at_suspects(self) -> None:
        """Learn who is a suspect: once a second, and after each claim. Raises LedgerUnavailable."""
        self.suspects = await self._redis(self._ledger.suspects)

    async def keep_lane(self) -> None:
        """Keep the lane while a suspect is in it. Raises LedgerUnavailable."""
        if self._in_lane:
            await self._redis(self._ledger.enter_lane, self._name, LANE_SECONDS)

    async def _enter_lane(self) -> None:
        while True:
            with contextlib.suppress(LedgerUnavailable):
                if await self._redis(self._ledger.enter_lane, self._name, LANE_SECONDS):
                    self._in_lane += 1
                    return
            if self._draining.is_set():
                raise Draining("nothing new is sent")
            await asyncio.sleep(0.2)

    def _leave_lane(self) -> None:
        self._in_lane -= 1  # the lane is free LANE_SECONDS later, or stays ours for the next suspect

    # -- are the rows any good -----------------------------------------------------------------------------------

    def watch(self, limits: Mapping[str, AlarmLimits]) -> None:
        """The limits of all runs that are active: once a second. After a pause, or with other limits, a run's alarm
        begins anew."""
        before = self._alarms
        self._alarms = {
            run: before[run] if run in before and before[run].limits == its else Alarm(its)
            for run, its in limits.items()
        }

    def alarm(self, run: Run, row: Row) -> tuple[str, list[str]]:
        """Count a row of a run; why the run should not go on like this, or empty, and three rows that show it."""
        alarm = self._alarms.get(run.id)
        if alarm is None or alarm.limits.action == "off" or (row.verdict == LOOP and row.finish_reason != "length"):
            return "", []  # a loop that ended by itself is an odd reply, not a broken one
        if row.verdict in (JUNK, EMPTY):
            self._wanted.set()
        text = f"{row.reasoning_content or ''}{row.content or ''}"
        said = text or row.error or ""
        if len(said) > 2 * EXAMPLE_CHARS:
            said = f"{said[:EXAMPLE_CHARS]} ... {said[-EXAMPLE_CHARS:]}"
        # As Python writes it, so that no terminal obeys what a model has said.
        alarm.add(row.verdict, text, f"{row.id} {row.verdict}: {said!r}")
        why = alarm.verdict(self._slots.in_flight)
        if why:
            self._alarms[run.id] = Alarm(alarm.limits)  # after a warning it begins anew
        return why or "", alarm.examples


def paused_by_alarm(before: Control, why: str, examples: list[str]) -> Control:
    """What an alarm makes of a run: paused, with what is in flight dropped."""
    return msgspec.structs.replace(before, state="paused", reason=why, drop=True, examples=examples)
