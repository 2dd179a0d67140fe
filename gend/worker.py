"""A worker keeps one server full. How a batch lives, from the hint to the mark:

    take      RQ says which batch to try. It may lie: late, twice, never.
    claim     The ledger gives the lease, or says that the batch is done or somebody else's.
    look      A part in the store means that it is done, whatever the ledger has forgotten.
    read      The batch's prompts, from the prompt set on this box.
    recover   The rows that earlier claims left in the spool.
    generate  What is missing; each row goes into the spool when it is there.
    put       One part with exactly one row for each prompt, written whole.
    mark      The batch is done: the last step that matters, in one line (`mark_done`).
    drop      The lease went with the mark; the spool is deleted.

A kill between any two steps costs what is after it and nothing before: the next owner begins at `claim` and finds the
part, or the rows. Two owners at once are harmless: each writes a spool file of its own, both parts hold one row for
each prompt, the store keeps one, and the mark can be set twice. While Redis, the store or the disk is away, the step
waits, everything else goes on, and no row's attempts are used up.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from gend import sets
from gend.config import Settings
from gend.engine import Server, connect
from gend.errors import (
    DiskUnavailable,
    Draining,
    GendError,
    LeaseLost,
    LedgerUnavailable,
    PromptRefused,
    ServerFault,
    ServerUnavailable,
    SettingsError,
    Unavailable,
)
from gend.ledger import PRIORITIES, Control, Ledger, queue_name
from gend.records import Batch, Prompt, Reply, Row, Run, Usage, part_key, row_seed
from gend.rq_worker import Delivery, RQWorker
from gend.slots import Slots
from gend.spool import Spool
from gend.store import Store, open_store
from gend.verdict import ABORT, ERROR, REFUSED, judge

log = logging.getLogger("gend.worker")
T = TypeVar("T")

SERVER_GONE = os.EX_TEMPFAIL
"""Exit code: the server is gone, everything was given back; start me again when it is ready."""

LIMIT_UNKNOWN = 16  # in flight, for a server that does not say how many it can run
BLAMES = 3  # faults of one prompt, each while other prompts completed, until its row is an error


class Held:
    """A batch in hand."""

    def __init__(self, run: Run, batch: Batch, claim: str, task: "asyncio.Task[None]"):
        self.run, self.batch, self.claim, self.task = run, batch, claim, task
        self.spool: Spool | None = None
        self.lost = False


class Worker:
    """One server kept full, across batches and runs."""

    def __init__(self, settings: Settings, number: int, server: Server, name: str):
        self.settings, self.number, self.server, self.name = settings, number, server, name
        self.slots = Slots()
        self.held: dict[tuple[str, int], Held] = {}
        self.runs: dict[str, Run] = {}
        self.controls: dict[str, Control] = {}
        self.draining = asyncio.Event()
        self.server_gone = self.broken = False
        self.outages: dict[str, tuple[float, str]] = {}  # what is away -> since when, and why
        self.totals: Counter[str] = Counter()
        self.ledger: Ledger
        self.rq: RQWorker
        self.store: Store
        self._claims = itertools.count()
        self._batches: set[asyncio.Task[None]] = set()
        # One thread for Redis: RQ's objects are not made for several, and a loop must never wait for a socket.
        self._redis_thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._disk_threads = ThreadPoolExecutor(2, thread_name_prefix="disk")
        self._store_threads = ThreadPoolExecutor(8, thread_name_prefix="store")

    # -- the life of a batch -------------------------------------------------------------------------------------

    async def run_batch(self, run: Run, number: int) -> None:
        """One batch, from the claim to the mark. What it cannot finish it gives back."""
        batch, claim = run.batch(number), f"{self.name}.{next(self._claims)}"
        task = asyncio.current_task()
        assert task is not None
        if await self._redis(self.ledger.claim, run.id, number, claim, self.settings.work.lease_seconds) != "claimed":
            return
        held = self.held[run.id, number] = Held(run, batch, claim, task)
        try:
            await self._finish_batch(run, batch, held)
        except BaseException as error:
            for reason in _leaves(error):
                if isinstance(reason, ServerUnavailable):
                    self._server_is_gone(reason)
                elif not isinstance(reason, asyncio.CancelledError | Draining | LeaseLost):
                    raise
            log.info("batch %s: given back, %s", batch, "lease lost" if held.lost else "its rows stay in the spool")
            if not held.lost:
                with contextlib.suppress(LedgerUnavailable):  # the lease ends by itself
                    await self._redis(self.ledger.give_back, run.id, number, claim)
        finally:
            del self.held[run.id, number]
            if held.spool:
                held.spool.close()

    async def _finish_batch(self, run: Run, batch: Batch, held: Held) -> None:
        key = part_key(run.id, batch.number)
        spool = held.spool = Spool(self.settings.folder, batch, held.claim)
        part = await self._patiently("store", self._store_threads, self.store.get, key)
        if part is None:
            prompts = await self._patiently(
                "disk", self._disk_threads, sets.read_prompts, self.settings.folder, run.set.fingerprint,
                batch.first, batch.count,
            )  # fmt: skip
            there = await self._patiently("disk", self._disk_threads, spool.rows)
            async with asyncio.TaskGroup() as rows:
                for prompt in prompts:
                    if prompt.id not in there:
                        rows.create_task(self._make_row(run, batch, prompt, spool))
            part = await self._patiently("disk", self._disk_threads, spool.part, [prompt.id for prompt in prompts])
            await self._patiently("store", self._store_threads, self.store.put, key, part)
        counts = await self._in_thread(self._disk_threads, counts_of, part)
        await self._patiently("redis", self._redis_thread, self.ledger.mark_done, run.id, batch.number, counts)
        await self._in_thread(self._disk_threads, spool.delete)

    async def _make_row(self, run: Run, batch: Batch, prompt: Prompt, spool: Spool) -> None:
        """One prompt to one row in the spool."""
        row = await self._generate(run, batch, prompt)
        self.totals["rows"] += 1
        self.totals["prompt_tokens"] += row.usage.prompt_tokens
        self.totals["completion_tokens"] += row.usage.completion_tokens
        self.totals[f"verdict:{row.verdict}"] += 1
        line = msgspec.json.encode(row)
        try:
            spool.append(line)  # into the page cache: a matter of microseconds, and any kill leaves it there
        except DiskUnavailable:
            await self._patiently("disk", self._disk_threads, spool.append, line)

    async def _generate(self, run: Run, batch: Batch, prompt: Prompt) -> Row:
        rank = PRIORITIES.index(self.controls.get(run.id, Control()).priority)
        attempts = blames = 0
        pause = 0.5
        while True:
            again = attempts + blames > 0
            async with self.slots.slot(rank, run.id, first=again):
                seed = row_seed(run.sampling.seed, prompt.id, attempts)
                completed, started = self.server.completed, time.monotonic()
                row = Row(
                    id=prompt.id, run=run.id, batch=batch.number, messages=prompt.messages, tools=prompt.tools,
                    verdict=ERROR, attempts=attempts + 1, seed=seed, server=str(self.number),
                )  # fmt: skip
                try:
                    reply = await self._converse(run, prompt, row, seed)
                except PromptRefused as error:
                    row.verdict, row.error = REFUSED, str(error)
                    return row
                except ServerFault as error:
                    fault = str(error)
                else:
                    row.seconds = round(time.monotonic() - started, 3)
                    row.verdict = judge(reply, run.sampling)
                    if row.verdict != ABORT:
                        return row
                    fault = "the server aborted the request"
            # The machinery failed, and a row fails only for its own sake: so it is blamed only when others completed
            # on this server in the meantime.
            if self.server.completed > completed:
                blames += 1
            if blames >= BLAMES:
                row.verdict, row.error = ERROR, fault
                return row
            await asyncio.sleep(pause)
            pause = min(pause * 2, 30.0)

    async def _converse(self, run: Run, prompt: Prompt, row: Row, seed: int) -> Reply:
        """Ask the prompt, then each follow-up with the replies so far as context; fills the row."""
        messages = list(prompt.messages)
        reply = await self.server.chat(messages, prompt.tools, run.sampling, seed)
        usage = reply.usage
        for follow_up in prompt.follow_ups:
            turn = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning_content}
            messages += [{name: value for name, value in turn.items() if value is not None}, follow_up]
            reply = await self.server.chat(messages, prompt.tools, run.sampling, seed)
            usage = Usage(*(a + b for a, b in zip(_tokens(usage), _tokens(reply.usage), strict=True)))
        row.messages, row.usage = messages, usage
        row.content, row.reasoning_content = reply.content, reply.reasoning_content
        row.tool_calls, row.finish_reason = reply.tool_calls, reply.finish_reason
        return reply

    # -- which batch next ----------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Take the next batch whenever fewer prompts wait than may become wanted at once."""
        while not self.draining.is_set():
            self.slots.changed.clear()
            delivery = None
            if queues := self._wanted():
                try:
                    delivery = await self._redis(self.rq.take, queues)
                except LedgerUnavailable as error:
                    self._away("redis", error)
            if delivery is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.slots.changed.wait(), 0.2)
                continue
            self._back("redis")
            batch = asyncio.create_task(self._deliver(delivery))
            self._batches.add(batch)
            batch.add_done_callback(self._batch_ended)
            # The claim must be settled before we can tell whether more is wanted.
            await asyncio.sleep(0.01)

    def _wanted(self) -> list[str]:
        """The queues to take from, best first: by priority, then the run of which we hold least."""
        if len(self._batches) >= self._open_batches():
            return []
        held = Counter(run for run, _ in self.held)
        controls = {run: self.controls.get(run, Control()) for run in self.runs}
        ranked = sorted(
            (PRIORITIES.index(control.priority), held[run], run)
            for run, control in controls.items()
            if control.state == "active"
        )
        return [queue_name(run) for rank, _, run in ranked if self.slots.waiting(rank) < self._read_ahead()]

    def _read_ahead(self) -> int:
        return max(self.slots.limit // 2, 4) if self.slots.limit else 0

    def _open_batches(self) -> int:
        """Bound on batches in hand. The longest reply of a batch takes some 7 times the mean, so that about
        7 x limit / batch_size batches are open in the steady state; twice that leaves room for slow uploads."""
        bound = self.settings.work.open_batches
        return bound or 8 + 14 * -(-self.slots.limit // self.settings.work.batch_size)

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            try:
                run, number = delivery.args
            except ValueError as error:
                log.warning("%s: dropped", error)
                return
            if run in self.runs and number < self.runs[run].batches and (run, number) not in self.held:
                await self.run_batch(self.runs[run], number)
        except LedgerUnavailable as error:
            self._away("redis", error)
        finally:
            with contextlib.suppress(LedgerUnavailable):  # RQ clears up after jobs that never reported back
                await self._redis(self.rq.finished, delivery)

    def _batch_ended(self, task: "asyncio.Task[None]") -> None:
        self._batches.discard(task)
        if not task.cancelled() and (error := task.exception()):
            # A fault of ours: it would come again with the next batch. End, so that the supervisor's pause between
            # starts grows and status shows it, rather than generate rows that cannot be kept all night.
            log.critical("a batch failed in a way that nobody expected: ending", exc_info=error)
            self.broken = True
            self.draining.set()

    # -- what goes on beside -------------------------------------------------------------------------------------

    async def _look_at_runs(self) -> None:
        """Keep runs and what people decided about them fresh; stop what is not to be done any more."""
        while True:
            try:
                runs, controls = await self._redis(self.ledger.runs), await self._redis(self.ledger.controls)
            except LedgerUnavailable as error:
                self._away("redis", error)
            else:
                self._back("redis")
                self.runs = {
                    name: run for name, run in runs.items()
                    if name in self.runs or sets.present(self.settings.folder, run.set.fingerprint)
                }  # fmt: skip
                self.controls = controls
                for held in list(self.held.values()):
                    state = controls.get(held.run.id, Control()).state
                    if state != "active":
                        self.slots.close(held.run.id)
                    if state == "cancelled":
                        held.task.cancel()
            await asyncio.sleep(1.0)

    async def _keep_leases(self) -> None:
        """Renew the leases of all batches in hand; drop what somebody else has by now."""
        lease_seconds = self.settings.work.lease_seconds
        while True:
            held = {key: value.claim for key, value in self.held.items()}
            try:
                for key in await self._redis(self.ledger.renew, held, lease_seconds) if held else ():
                    if key in self.held and self.held[key].claim == held[key]:
                        self.held[key].lost = True
                        self.held[key].task.cancel()
                await self._redis(self.rq.beat)
            except LedgerUnavailable as error:
                self._away("redis", error)
            await asyncio.sleep(lease_seconds / 5)

    async def _publish(self) -> None:
        """Say how it stands, for `gend status`."""
        while True:
            with contextlib.suppress(LedgerUnavailable):
                await self._redis(self.ledger.publish, f"gend:worker:{self.name}", self.view(), 10.0)
            await asyncio.sleep(1.0)

    def view(self) -> dict[str, Any]:
        """What `gend status` shows of this worker."""
        return {
            "name": self.name, "server": self.number, "pid": os.getpid(), "at": time.time(),
            "in_flight": self.slots.in_flight, "limit": self.slots.limit,
            "waiting": self.slots.waiting(len(PRIORITIES)), "open_batches": len(self.held),
            "totals": dict(self.totals), "draining": self.draining.is_set(),
            "outages": {what: {"since": since, "why": why} for what, (since, why) in self.outages.items()},
        }  # fmt: skip

    async def _follow_load(self) -> None:
        """Let as many requests be in flight as the server can run, and a few more for it to find at once."""
        while True:
            fixed = self.settings.work.in_flight
            load = await self.server.load()
            most = fixed or load.max_running or LIMIT_UNKNOWN
            limit = fixed or most + max(2, most // 32)
            if limit != self.slots.limit:
                self.slots.set_limit(limit)
            await asyncio.sleep(1.0)

    async def _sync_spool(self) -> None:
        """Make finished rows survive a power cut, all open batches together, twice a second."""
        while True:
            await asyncio.sleep(0.5)
            for held in list(self.held.values()):
                if held.spool:
                    await self._patiently("disk", self._disk_threads, held.spool.sync)

    # -- beginning and end ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Work until told to stop or until the server is gone; gives the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.draining.set)
        await self._patiently("redis", self._redis_thread, self.rq.open)
        async with asyncio.TaskGroup() as beside:
            looks = (self._look_at_runs, self._keep_leases, self._publish, self._follow_load, self._sync_spool)
            side = [beside.create_task(work()) for work in (*looks, self._feed)]
            await self.draining.wait()
            await self._drain()
            for task in side:
                task.cancel()
        with contextlib.suppress(LedgerUnavailable):
            await self._redis(self.rq.close)
            await self._redis(self.ledger.redis.delete, f"gend:worker:{self.name}")
        return SERVER_GONE if self.server_gone else 1 if self.broken else 0

    async def _drain(self) -> None:
        """Send nothing new, let what is in flight end for a while, give back the rest."""
        self.slots.close()
        if self._batches and not self.server_gone and not self.broken:
            await asyncio.wait(self._batches, timeout=self.settings.work.drain_seconds)
        for task in self._batches:
            task.cancel()
        if self._batches:
            await asyncio.wait(self._batches)

    def _server_is_gone(self, error: ServerUnavailable) -> None:
        if not self.server_gone:
            log.warning("server %d: %s; giving back %d batches", self.number, error, len(self.held))
        self.server_gone = True
        self.draining.set()

    # -- threads and patience ------------------------------------------------------------------------------------

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)

    async def _redis(self, call: Callable[..., T], *args: Any) -> T:
        return await self._in_thread(self._redis_thread, call, *args)

    async def _patiently(self, what: str, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        """Do it, however long `what` is away: whoever has something to lose waits here."""
        pause = 0.5
        while True:
            try:
                result = await self._in_thread(pool, call, *args)
            except (Unavailable, SettingsError) as error:  # while we run, wrong credentials are an outage too
                self._away(what, error)
            else:
                self._back(what)
                return result
            await asyncio.sleep(pause)
            pause = min(pause * 2, 10.0)

    def _away(self, what: str, error: GendError) -> None:
        if what not in self.outages:
            log.warning("%s is away, waiting for it: %s", what, error)
            self.outages[what] = (time.time(), str(error))

    def _back(self, what: str) -> None:
        if what in self.outages:
            log.info("%s is back after %.0f s", what, time.time() - self.outages.pop(what)[0])


def counts_of(part: bytes) -> dict[str, int]:
    """Rows, tokens, and rows by verdict of a part: what is added to the run's counts when it is marked done."""
    counts: Counter[str] = Counter()
    for line in part.splitlines():
        row = _decode_brief(line)
        counts["rows"] += 1
        counts[f"verdict:{row.verdict}"] += 1
        for name, tokens in msgspec.structs.asdict(row.usage).items():
            counts[name] += tokens
    return dict(counts)


class _Brief(msgspec.Struct):
    verdict: str
    usage: Usage


_decode_brief = msgspec.json.Decoder(_Brief).decode


def _tokens(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def work(settings: Settings, redis_url: str, number: int, url: str, name: str) -> int:
    """The worker process: its whole life. Gives the exit code."""
    async with connect(url, settings.model.path, settings.work.request_seconds) as server:
        worker = Worker(settings, number, server, name)
        worker.ledger = Ledger(redis_url)
        worker.rq = RQWorker(worker.ledger.raw, name)
        worker.store = open_store(settings.store)
        return await worker.run()
