"""A worker keeps one server full. How a batch lives, from the hint to the mark:

    take      RQ says which batch to try. It may lie: late, twice, never.
    claim     The ledger gives the lease, or says that the batch is done or somebody else's.
    look      A part in the store means that it is done, whatever the ledger has forgotten. If the store is away: later.
    read      The batch's prompts, from the prompt set on this box.
    recover   The rows that earlier claims left in the spool.
    generate  What is missing (generator.py: how a row lives); each row goes into the spool when it is there.
    vouch     A canary asked after the last row came back right: the server was sane when it made them.
    put       One part with exactly one row for each prompt, written whole.
    mark      The batch is done: the last step that matters, in one line (`mark_done`).
    drop      The lease went with the mark; the spool is deleted.

A kill between any two steps costs what is after it and nothing before: the next owner begins at `claim` and finds the
part, or the rows. Two owners at once are harmless: each writes a spool file of its own, both parts hold one row for
each prompt, the store keeps one, and the mark can be set twice. While Redis, the store or the disk is away, the step
waits, everything else goes on, and no row's attempts are used up.

When nothing is left to claim, the prompts that still wait are offered to all servers of the box (`_share`), so that
each free slot takes the next one whosever it is. Their rows come back through the spool.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from gend import sets
from gend.concurrency import Pilot, queue_wanted
from gend.config import Settings
from gend.engine import Server, connect
from gend.errors import (
    DiskUnavailable,
    Draining,
    GendError,
    LeaseLost,
    LedgerUnavailable,
    ServerUnavailable,
    SettingsError,
    Unavailable,
    Withdrawn,
)
from gend.generator import Generator
from gend.guard import Guard, paused_by_alarm
from gend.ledger import PRIORITIES, Control, Ledger, Offer, queue_name
from gend.provenance import describe, keep, named, publish
from gend.records import Batch, Prompt, Run, counts_of, part_key
from gend.rq_worker import Delivery, RQWorker
from gend.slots import Slots
from gend.spool import Spool
from gend.store import Store, open_store
from gend.verdict import AlarmLimits

log = logging.getLogger("gend.worker")
T = TypeVar("T")

READY, SHARE = b"ready\n", b"share "
"""What the supervisor writes to our stdin: the server is ready; this much of what it can run is to be used."""

PEERS_SECONDS = 10.0
"""Until then a new worker takes the others for there, whether they have said so or not."""

SERVER_WRONG = os.EX_PROTOCOL
"""Exit code: the server answers nonsense; its rows since the last right canary were dropped."""

SERVER_GONE = os.EX_TEMPFAIL
"""Exit code: the server is gone, everything was given back; start me again when it is ready."""

COLLECT_SECONDS = 5.0
"""So often the spool is looked at though no offer was closed: a taker may have lost Redis after its row was there."""

SETTLE_SECONDS = 1.0  # a claim is waited for so long, before the next batch is taken

LAST_CANARY_SECONDS = 5.0  # a batch that is given back waits so long for a canary; it is within the drain's reserve


class Held:
    """A batch in hand."""

    def __init__(self, run: Run, batch: Batch, claim: str, task: "asyncio.Task[None]", begun: asyncio.Event):
        self.run, self.batch, self.claim, self.task = run, batch, claim, task
        self.begun = begun  # its prompts wait for slots, or are further
        self.spool: Spool | None = None
        self.lost = False
        self.vouched = 0  # bytes of the spool up to which the server is known to have been sane
        self.elsewhere: dict[Offer, tuple[str, asyncio.Future[bool]]] = {}  # offered -> its prompt's id, whether made


class Worker:
    """One server kept full, across batches and runs."""

    def __init__(
        self,
        settings: Settings,
        number: int,
        server: Server,
        ledger: Ledger,
        store: Store,
        box: str,
        name: str,
        share: float = 1.0,
        peers: int = 1,
    ):
        """`box` is shared by all workers of this box, which share its spool; `name` is new at each start. `share` of
        what the server can run is used: less than 1 after crashes that nobody is to blame for. `peers`: workers that
        this box shall have, this one too."""
        self.ledger, self.store, self.rq = ledger, store, RQWorker(ledger.raw, name)
        self.box = box
        self.settings, self.number, self.server, self.name = settings, number, server, name
        self.slots = Slots()
        self.held: dict[tuple[str, int], Held] = {}
        self.runs: dict[str, Run] = {}
        self.controls: dict[str, Control] = {}
        self.draining = asyncio.Event()
        self.server_gone = self.broken = False
        self.outages: dict[str, tuple[float, str]] = {}  # what is away -> since when, and why
        self._waiting: Counter[str] = Counter()  # what is away -> how many wait for it
        self.totals: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._pilot = Pilot(fixed=settings.work.in_flight, share=share)
        self._published: set[tuple[str, str]] = set()  # (run, engine) that the store has
        self._peers, self._started, self._looked = peers, self._loop.time(), asyncio.Event()
        self._rows_per_second = 0.0
        self._fair_share = sys.maxsize  # prompts that each worker may have out, so that a small run is on all servers
        self._to_offer: list[tuple[Held, Offer, str, asyncio.Future[bool]]] = []
        self._helping: set[Offer] = set()
        self._claims = itertools.count()
        self._batches: set[asyncio.Task[None]] = set()
        # One thread for Redis: RQ's objects are not made for several, and a loop must never wait for a socket.
        self._redis_thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._disk_threads = ThreadPoolExecutor(2, thread_name_prefix="disk")
        self._store_threads = ThreadPoolExecutor(8, thread_name_prefix="store")
        self.guard = Guard(name, server, self.slots, ledger, self._redis, self.draining)
        self.generator = Generator(str(number), server, self.guard, settings.work.token_ids)

    # -- the life of a batch -------------------------------------------------------------------------------------

    async def run_batch(self, run: Run, number: int, begun: asyncio.Event) -> None:
        """One batch, from the claim to the mark. What it cannot finish it gives back."""
        batch, claim = run.batch(number), f"{self.name}.{next(self._claims)}"
        task = asyncio.current_task()
        assert task is not None
        if await self._redis(self.ledger.claim, run.id, number, claim, self.settings.work.lease_seconds) != "claimed":
            return
        held = self.held[run.id, number] = Held(run, batch, claim, task, begun)
        try:
            with contextlib.suppress(LedgerUnavailable):
                await self.guard.look_at_suspects()
            await self._finish_batch(run, batch, held)
        except BaseException as error:
            for reason in _leaves(error):
                if isinstance(reason, ServerUnavailable):
                    self._server_is_gone(reason)
                elif not isinstance(reason, asyncio.CancelledError | Draining | LeaseLost):
                    raise
            await self.guard.accuse()
            await self._leave_only_sane_rows(held)
            del self.held[run.id, number]  # its lease is not renewed from here on
            log.info("batch %s: given back, %s", batch, "lease lost" if held.lost else "its rows stay in the spool")
            if not held.lost:
                await self._tidy(self.ledger.give_back, run.id, number, claim)  # else the lease ends by itself
        finally:
            self.held.pop((run.id, number), None)
            if held.spool:
                await self._in_thread(self._disk_threads, held.spool.close)

    async def _finish_batch(self, run: Run, batch: Batch, held: Held) -> None:
        key = part_key(run.id, batch.number)
        spool = held.spool = Spool(self.settings.folder, batch, held.claim)
        counts, looked = None, False
        while counts is None:
            part = await self._look(key, patient=looked)
            looked = True
            if part is None:
                part = await self._make_part(run, batch, held, spool)
                if part is not None:
                    await self._say_what_made_it(run, part)
                if part is None or not await self._patiently("store", self._store_threads, self.store.put, key, part):
                    continue  # somebody was faster, and may have cleared the spool: look at what is there
            elif await self._counts(part, batch) is None:
                log.warning("batch %s: %s in the store is not its part: made anew and replaced", batch, key)
                part = await self._make_part(run, batch, held, spool)
                if part is None:
                    continue
                await self._say_what_made_it(run, part)
                await self._patiently("store", self._store_threads, self.store.replace, key, part)
            counts = await self._counts(part, batch)
        await self._patiently("redis", self._redis_thread, self.ledger.mark_done, run.id, batch.number, counts)
        await self._in_thread(self._disk_threads, spool.delete)

    async def _say_what_made_it(self, run: Run, part: bytes) -> None:
        """Before a part: the engines that its rows name, also those of other workers whose rows the spool had."""
        new = {(run.id, engine) for engine in named(part)} - self._published
        await self._patiently(
            "store", self._store_threads, publish, self.settings.folder, self.store, run.id, [name for _, name in new]
        )
        self._published |= new

    async def _look(self, key: str, patient: bool) -> bytes | None:
        """The part of a batch, if it is there. Only who is `patient` waits for a store that is away: no GPU need idle,
        since a ledger that once agreed with the store knows what is missing, and what it has missed costs time alone.
        """
        if not patient:
            with contextlib.suppress(LedgerUnavailable):
                if "store" not in self.outages:
                    try:
                        return await self._in_thread(self._store_threads, self.store.get, key)
                    except (Unavailable, SettingsError) as error:
                        self._away("store", error)
                if await self._redis(self.ledger.rebuilt):
                    return None
        return await self._patiently("store", self._store_threads, self.store.get, key)

    async def _counts(self, part: bytes, batch: Batch) -> dict[str, int] | None:
        return await self._in_thread(self._disk_threads, counts_of, part, batch)

    async def _make_part(self, run: Run, batch: Batch, held: Held, spool: Spool) -> bytes | None:
        """All rows of the batch, those that the spool does not have made now; None where rows were removed meanwhile.

        Raises Draining, ServerUnavailable.
        """
        prompts = await self._patiently(
            "disk", self._disk_threads, sets.read_prompts, self.settings.folder, run.set.fingerprint,
            batch.first, batch.count,
        )  # fmt: skip
        there = await self._patiently("disk", self._disk_threads, spool.rows)
        async with asyncio.TaskGroup() as rows:
            tasks = [
                rows.create_task(self._see_to_row(run, batch, index, prompt, held, spool))
                for index, prompt in enumerate(prompts)
                if prompt.id not in there
            ]
            held.begun.set()
        if not all(task.result() for task in tasks):
            raise Draining(f"batch {batch}: some of its rows were not begun")
        if tasks:
            await self.guard.vouch()
        return await self._patiently("disk", self._disk_threads, spool.part, [prompt.id for prompt in prompts])

    async def _see_to_row(self, run: Run, batch: Batch, index: int, prompt: Prompt, held: Held, spool: Spool) -> bool:
        """One prompt to one row in the spool, made here or by whoever takes the offer; False: draining, not begun."""
        while True:
            try:
                await self._make_row(run, batch, prompt, spool)
                return True
            except Draining:
                return False  # the batch's rows that are in flight may end all the same
            except Withdrawn:
                offer, made = Offer(run.id, batch.number, index, held.claim), self._loop.create_future()
                self._to_offer.append((held, offer, prompt.id, made))
                try:
                    if await made:
                        return True
                finally:
                    held.elsewhere.pop(offer, None)

    async def _make_row(self, run: Run, batch: Batch, prompt: Prompt, spool: Spool, vouch: bool = False) -> None:
        """One prompt to one row in the spool. `vouch`: only once a canary has shown that the server is sane."""
        row = await self.generator.row(run, batch, prompt, self._rank(run.id))
        if vouch:
            await self.guard.vouch()
        if self.guard.wrong:
            raise Draining("the server is not sane")  # what it made is cut back: nothing may come after that
        self.totals["rows"] += 1
        self.totals["prompt_tokens"] += row.usage.prompt_tokens
        self.totals["completion_tokens"] += row.usage.completion_tokens
        self.totals[f"verdict:{row.verdict}"] += 1
        line = msgspec.json.encode(row)
        try:
            spool.append(line)  # into the page cache: a matter of microseconds, and any kill leaves it there
        except DiskUnavailable:
            await self._patiently("disk", self._disk_threads, spool.append, line)
        why, examples = self.guard.alarm(run, row)
        if why:
            await self._alarm(run, why, examples)

    # -- which batch next ----------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Take the next batch whenever fewer prompts wait than may become wanted at once."""
        await self._ready.wait()
        engine = describe(self.settings, self.number, await self.server.info())
        await self._patiently("disk", self._disk_threads, keep, self.settings.folder, engine)
        self.generator.engine = engine.id
        await self._looked.wait()
        while not self.draining.is_set():
            self.slots.changed.clear()
            delivery = None
            if queues := self._wanted():
                try:
                    delivery = await self._redis(self.rq.take, queues)
                except LedgerUnavailable as error:
                    self._away("redis", error)
            if delivery is None:
                with contextlib.suppress(LedgerUnavailable):
                    await self._share()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.slots.changed.wait(), 0.1)
                continue
            begun = asyncio.Event()
            batch = asyncio.create_task(self._deliver(delivery, begun))
            self._batches.add(batch)
            batch.add_done_callback(self._batch_ended)
            batch.add_done_callback(lambda _, begun=begun: begun.set())  # type: ignore[misc]
            # Until its prompts wait here nobody can tell whether more is wanted; but what is stuck (a run whose
            # prompts are damaged on this box, a store that is away) must not keep the others out.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(begun.wait(), SETTLE_SECONDS)

    def _wanted(self) -> list[str]:
        """The queues to take from, best first: by priority, then the run of which we hold least."""
        if len(self._batches) >= self._open_batches():
            return []
        held = Counter(run for run, _ in self.held)
        ranked = sorted((self._rank(run), held[run], run) for run in self._active())
        return [queue_name(run) for rank, _, run in ranked if self.slots.waiting(rank) < self._read_ahead()]

    def _active(self) -> list[str]:
        return [run for run in self.runs if self.controls.get(run, Control()).state == "active"]

    def _rank(self, run: str) -> int:
        return PRIORITIES.index(self.controls.get(run, Control()).priority)

    def _read_ahead(self) -> int:
        """Prompts that should wait here: what is sent in two seconds, in which a batch is surely claimed and read."""
        return max(4, min(self.slots.limit // 2, round(2 * self._rows_per_second))) if self.slots.limit else 0

    def _open_batches(self) -> int:
        """Bound on batches in hand. The longest reply of a batch takes some 7 times the mean, so that about
        7 x limit / batch_size batches are open in the steady state; twice that leaves room for slow uploads."""
        bound = self.settings.work.open_batches
        return bound or 8 + 14 * -(-self.slots.limit // self.settings.work.batch_size)

    async def _deliver(self, delivery: Delivery, begun: asyncio.Event) -> None:
        try:
            run, number = delivery.args
            if run in self.runs and number < self.runs[run].batches and (run, number) not in self.held:
                await self.run_batch(self.runs[run], number, begun)
        except LedgerUnavailable as error:
            self._away("redis", error)
        finally:
            await self._tidy(self.rq.finished, delivery)  # else RQ clears up after jobs that never reported back

    # -- the end: any free slot of the box takes the next prompt --------------------------------------------------

    async def _share(self) -> None:
        """When nothing is left to claim, offer what waits here, and take offers for the slots that are free."""
        if self.slots.waiting() and await self._redis(
            self.ledger.all_taken, [self.runs[run] for run in self._active()]
        ):
            self.slots.withdraw()
            await asyncio.sleep(0)  # lets them say what they are
        offered, self._to_offer = self._to_offer, []
        try:
            await self._redis(self.ledger.offer, self.box, [offer for _, offer, _, _ in offered])
        except LedgerUnavailable:
            for *_, made in offered:
                _settle(made, False)  # then they are made here
            raise
        for held, offer, prompt, made in offered:
            held.elsewhere[offer] = prompt, made
        # The server's own small queue is for the steady state: here it would keep a prompt from another's free slot.
        # But one prompt can always be taken: offers that nobody has room for would wait for ever.
        room = max(1, min(self._pilot.limit - queue_wanted(self._pilot.limit), self._fair_share))
        free = room - self.slots.in_flight - self.slots.waiting()
        if free > 0 and not self.slots.closed:
            for offer in await self._redis(self.ledger.take_offers, self.box, free, self.name):
                if offer in self._helping:
                    continue
                held_here = self.held.get((offer.run, offer.batch))
                if held_here and held_here.claim == offer.claim:  # our own: it is made here
                    if offer in held_here.elsewhere:
                        _settle(held_here.elsewhere[offer][1], False)
                    await self._redis(self.ledger.close_offers, self.box, [offer])
                else:
                    self._helping.add(offer)
                    helping = asyncio.create_task(self._help(offer))
                    self._batches.add(helping)
                    helping.add_done_callback(self._batch_ended)

    async def _help(self, offer: Offer) -> None:
        """Make one row of a batch that another worker of this box holds; it collects the row from the spool."""
        made = False
        try:
            run = self.runs[offer.run]
            batch = run.batch(offer.batch)
            prompts = await self._in_thread(
                self._disk_threads, sets.read_prompts, self.settings.folder, run.set.fingerprint,
                batch.first + offer.index, 1,
            )  # fmt: skip
            spool = Spool(self.settings.folder, batch, f"{self.name}.{next(self._claims)}")
            try:
                await self._make_row(run, batch, prompts[0], spool, vouch=True)
                made = True
            finally:
                spool.close(sync=False)  # its part is put within seconds, which no power cut undoes
        except ServerUnavailable as error:
            self._server_is_gone(error)
        except (KeyError, Withdrawn, Draining, DiskUnavailable, asyncio.CancelledError):
            pass  # not to be made here after all: closing the offer sends it back to its owner
        await self.guard.accuse()
        try:
            await self._redis(self.ledger.close_offers, self.box, [offer])
        except LedgerUnavailable:  # it stays ours: its owner finds the row, or we take it up again
            if made:
                return
        self._helping.discard(offer)

    async def _collect(self) -> None:
        """Find the rows that others made for our batches; take back what nobody has any more."""
        looked = 0.0
        while True:
            await asyncio.sleep(0.3)
            away = [(held, dict(held.elsewhere)) for held in self.held.values() if held.elsewhere]
            if not away:
                continue
            try:
                offered = [offer for _, offers in away for offer in offers]
                opened = await self._redis(self.ledger.open_offers, self.box, offered)
            except LedgerUnavailable:
                continue
            now = self._loop.time()
            every = now - looked > COLLECT_SECONDS
            looked = now if every else looked
            for held, offers in away:
                assert held.spool is not None
                if not every and all(offer in opened for offer in offers):
                    continue
                # After the look at the ledger: a taker appends its row first and closes the offer then.
                there = await self._patiently("disk", self._disk_threads, held.spool.rows)
                for offer, (prompt, made) in offers.items():
                    if prompt in there:
                        _settle(made, True)
                    elif offer not in opened:
                        _settle(made, False)

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
        """Keep runs, suspects and what was decided about runs fresh; stop what is not to be done any more."""
        while True:
            try:
                await self.guard.look_at_suspects()
                runs, controls = await self._redis(self.ledger.runs), await self._redis(self.ledger.controls)
            except LedgerUnavailable as error:
                self._away("redis", error)
            else:
                self.runs = {
                    name: run for name, run in runs.items()
                    if name in self.runs or sets.present(self.settings.folder, run.set.fingerprint)
                }  # fmt: skip
                self.controls = controls
                self.guard.watch({run: self._alarm_of(run) for run in self._active()})
                self._stop_what_is_stopped()
                with contextlib.suppress(LedgerUnavailable):
                    # At the start the others have not said yet that they are there.
                    others = self._peers if self._loop.time() - self._started < PEERS_SECONDS else 1
                    self._fair_share = await self._redis(self.ledger.fair_share, self.runs, others)
                    self._set_limit()
                    self._looked.set()
            await asyncio.sleep(1.0)

    def _stop_what_is_stopped(self) -> None:
        for held in list(self.held.values()):
            control = self.controls.get(held.run.id, Control())
            if control.state != "active":
                self.slots.close(held.run.id)
                if control.drop:
                    held.task.cancel()

    def _alarm_of(self, run: str) -> AlarmLimits:
        return self.controls.get(run, Control()).alarm or self.settings.alarm

    async def _alarm(self, run: Run, why: str, examples: list[str]) -> None:
        """Too many rows of this run are bad: pause it, or only say so."""
        log.error("run %s, server %d: %s", run.id, self.number, why)
        with contextlib.suppress(LedgerUnavailable):
            await self._redis(self.ledger.event, "alarm", f"run {run.id}, server {self.number}: {why}", True)
        if self._alarm_of(run.id).action == "pause" and run.id in self._active():
            before, why = self.controls.get(run.id, Control()), f"alarm, server {self.number}: {why}"
            paused = paused_by_alarm(before, why, examples)
            # A task of its own: what is in flight is dropped now, and this row with it.
            recording = asyncio.create_task(self._record(run.id, paused))
            self._batches.add(recording)
            recording.add_done_callback(self._batch_ended)
            self._stop_by_alarm(run.id, paused)

    def _stop_by_alarm(self, run: str, paused: Control) -> None:
        self.controls[run] = paused
        self._stop_what_is_stopped()

    async def _record(self, run: str, paused: Control) -> None:
        """Let everybody know, and the store keep, that an alarm has paused a run."""
        await self._patiently("redis", self._redis_thread, self.ledger.set_control, run, paused)
        self._stop_by_alarm(run, paused)  # once more: the ledger may have been read before that
        key, body = f"runs/{run}/control.json", msgspec.json.encode(paused)
        await self._patiently("store", self._store_threads, self.store.replace, key, body)

    async def _ask_canaries(self) -> None:
        """Ask the guard's canaries; when one is wrong, drop the rows since the last right one, and end."""
        await self._ready.wait()
        try:
            await self.guard.ask_canaries(self._vouch_up_to_now)
        except ServerUnavailable as error:
            self._server_is_gone(error)
        else:
            log.error("server %d: %s; its last rows are made again", self.number, self.guard.wrong)
            self.draining.set()

    def _vouch_up_to_now(self) -> Callable[[bool], Awaitable[None]]:
        ends = {held: held.spool.end for held in self.held.values() if held.spool}

        async def answered(right: bool) -> None:
            for held in list(self.held.values()):
                if right:
                    held.vouched = ends.get(held, held.vouched)
                elif held.spool:  # in this step of the loop: nobody can append, or give the batch back, before it
                    held.spool.cut_back(held.vouched)

        return answered

    async def _leave_only_sane_rows(self, held: Held) -> None:
        """Before a batch is given back: a server may lie since the last canary. Rows of one that died are kept."""
        if held.spool and held.spool.end > held.vouched:
            try:
                await asyncio.wait_for(self.guard.vouch(), LAST_CANARY_SECONDS)
            except ServerUnavailable:
                return
            except (TimeoutError, Draining):
                held.spool.cut_back(held.vouched)

    async def _keep_leases(self) -> None:
        """Renew the leases of all batches in hand; drop what somebody else has by now."""
        lease_seconds = self.settings.work.lease_seconds
        while True:
            try:
                for key, claim in await self._redis(self._renew):
                    if key in self.held and self.held[key].claim == claim:
                        self.held[key].lost = True
                        self.held[key].task.cancel()
                await self._redis(self.rq.beat)
                await self.guard.keep_lane()
            except LedgerUnavailable as error:
                self._away("redis", error)
                await asyncio.sleep(0.2)  # the leases may have ended: be the first when Redis is back
            else:
                await asyncio.sleep(lease_seconds / 5)

    def _renew(self) -> list[tuple[tuple[str, int], str]]:
        """In the thread that also gives batches back, lest one be taken again that was just given back."""
        held = {key: value.claim for key, value in self.held.copy().items()}
        lost = self.ledger.renew(held, self.settings.work.lease_seconds) if held else []
        return [(key, held[key]) for key in lost]

    async def _publish(self) -> None:
        """Say how it stands, for `gend status`; and whether Redis takes what is written, which others wait for."""
        while True:
            try:
                await self._redis(self.ledger.publish, f"gend:worker:{self.name}", self.view(), 10.0)
            except LedgerUnavailable as error:
                self._away("redis", error)
            else:
                self._back("redis")
            await asyncio.sleep(1.0)

    def view(self) -> dict[str, Any]:
        """What `gend status` shows of this worker."""
        return {
            "name": self.name, "server": self.number, "pid": os.getpid(), "at": time.time(),
            "in_flight": self.slots.in_flight, "limit": self.slots.limit,
            "limited_by": self._pilot.limited_by, "waiting": self.slots.waiting(), "open_batches": len(self.held),
            "totals": dict(self.totals), "draining": self.draining.is_set(),
            "outages": {what: {"since": since, "why": why} for what, (since, why) in self.outages.items()},
        }  # fmt: skip

    async def _follow_load(self) -> None:
        """Let as many requests be in flight as the server can run, and a few more for it to find at once."""
        tokens = faults = rows = 0
        looked = self._loop.time()
        while True:
            load = await self.server.load()
            now, ended = self._loop.time(), self.totals["rows"]
            fresh = (ended - rows) / max(now - looked, 0.1)
            self._rows_per_second = max(fresh, 0.8 * self._rows_per_second)  # quick to rise, slow to fall
            rows, looked = ended, now
            made, failed = self.totals["completion_tokens"] - tokens, self.generator.faults - faults
            tokens, faults = tokens + made, faults + failed
            self._pilot.step(load, self.slots.in_flight, made, failed)
            self._set_limit()
            await asyncio.sleep(1.0 if self._ready.is_set() else 0.1)

    def _set_limit(self) -> None:
        if (limit := min(self._pilot.limit, self._fair_share)) != self.slots.limit:
            self.slots.set_limit(limit)

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
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.draining.set)
        await self._patiently("redis", self._redis_thread, self.rq.open)
        async with asyncio.TaskGroup() as beside:
            looks = (self._look_at_runs, self._keep_leases, self._publish, self._follow_load, self._sync_spool)
            more = (self._feed, self._collect, self._listen, self._ask_canaries)
            side = [beside.create_task(work()) for work in (*looks, *more)]
            await self.draining.wait()
            await self._drain()
            for task in side:
                task.cancel()
        if "redis" not in self.outages:
            await self.guard.accuse()  # a batch that the drain cancelled in the middle of it has not done so
        await self._tidy(self.rq.close)
        await self._tidy(self.ledger.unpublish, f"gend:worker:{self.name}")
        return SERVER_GONE if self.server_gone else SERVER_WRONG if self.guard.wrong else 1 if self.broken else 0

    async def _listen(self) -> None:
        """The supervisor says `ready` on our stdin when the server is; the end of stdin means that it is gone."""
        reader = asyncio.StreamReader()
        await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            if line == READY:
                self._ready.set()
            elif line.startswith(SHARE):
                self._pilot.share = float(line.removeprefix(SHARE))
        self.draining.set()

    async def _drain(self) -> None:
        """Send nothing new, let what is in flight end for a while, give back the rest."""
        self.slots.close()
        deadline = self._loop.time() + self.settings.work.drain_seconds
        while self._batches and not (self.server_gone or self.broken or self.guard.wrong):
            # We may have been asked to stop because the server is gone, and find that out only now.
            await asyncio.wait(self._batches, timeout=0.1)
            if self._loop.time() > deadline:
                break
        for task in self._batches:
            task.cancel()
        if self._batches:
            await asyncio.wait(self._batches)

    def _server_is_gone(self, error: ServerUnavailable) -> None:
        if not self.server_gone:
            log.warning("server %d: %s; giving back %d batches", self.number, error, len(self.held))
        self.server_gone = True
        self.guard.crashed()
        self.draining.set()

    # -- threads and patience ------------------------------------------------------------------------------------

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(pool, call, *args)

    async def _redis(self, call: Callable[..., T], *args: Any) -> T:
        return await self._in_thread(self._redis_thread, call, *args)

    async def _tidy(self, call: Callable[..., object], *args: Any) -> None:
        """Tell Redis what it finds out by itself in the end. Who is to stop does not wait for a Redis that is away."""
        if not (self.draining.is_set() and "redis" in self.outages):
            try:
                await self._redis(call, *args)
            except LedgerUnavailable as error:
                self._away("redis", error)

    async def _patiently(self, what: str, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        """Do it, however long `what` is away: whoever has something to lose waits here."""
        pause, waits, there = 0.5, 0, False
        try:
            while True:
                try:
                    result = await self._in_thread(pool, call, *args)
                    there = True
                    return result
                except (Unavailable, SettingsError) as error:  # while we run, wrong credentials are an outage too
                    self._waiting[what] += 1 - waits
                    waits = 1
                    self._away(what, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 10.0)
        finally:
            self._waiting[what] -= waits
            if waits or there:
                self._back(what)

    def _away(self, what: str, error: GendError) -> None:
        if what not in self.outages:
            log.warning("%s is away, waiting for it: %s", what, error)
            self.outages[what] = (time.time(), str(error))

    def _back(self, what: str) -> None:
        if what in self.outages and not self._waiting[what]:
            log.info("%s is back after %.0f s", what, time.time() - self.outages.pop(what)[0])


def _settle(future: "asyncio.Future[bool]", made: bool) -> None:
    if not future.done():
        future.set_result(made)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def work(
    settings: Settings, redis_url: str, number: int, url: str, box: str, name: str, share: float, peers: int
) -> int:
    """The worker process: its whole life. Gives the exit code."""
    ledger = Ledger(redis_url)
    store = open_store(settings.store)
    async with connect(url, settings.model.path, settings.work.request_seconds) as server:
        return await Worker(settings, number, server, ledger, store, box, name, share, peers).run()
