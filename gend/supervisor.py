"""The daemon: servers, one worker for each, the loader, and gend's own Valkey, kept as they should be.

A loop holds wanted state against actual state at each tick. Signal handlers only set a flag; probes run beside and
leave what they found; what is due next is `planner.plan`, a pure function; nothing on the loop waits.
"""

import asyncio
import collections
import contextlib
import fcntl
import hashlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from gend import canary, gpus, processes, valkey
from gend.config import Settings
from gend.engine import Pulse, Server, connect
from gend.errors import GendError, LedgerUnavailable, PromptRefused, ServerFault, SettingsError, Unavailable
from gend.ledger import Event, Ledger
from gend.notify import Notifier
from gend.planner import Action, Child, Rules, State, Verb, plan
from gend.server_command import PORTS_PER_SERVER, Seat, argv, environment, fitting_names, seats
from gend.sglang_flags import is_sglang

log = logging.getLogger("gend.supervisor")

TICK_SECONDS = 0.1
LOG_BYTES = 64 << 20  # a child's log is cut back beyond this, once a minute
ORPHAN_LOOK_SECONDS = 2.0
FIRST_STARTS = 2  # when every server has failed this often and none was ever ready, it is the settings
CRASHES_WINDOW_SECONDS = 1800.0
MTP_CRASHES = 3  # crashes within the window after which a server goes on without speculative decoding
MTP_FLAGS = "speculative"
SMALLEST_SHARE = 0.25
CANARY_REFUSALS = 3
WATCH_SECONDS = 1.0
BLIND_PROBES = 3  # so many must fail in a row where nothing is known of the tokens: a probe waits in a full queue too
PROBE_SECONDS = 20.0  # SGLang itself calls a scheduler dead that does not answer /health for so long
GPU_LEFT_BYTES = 2 << 30  # more than this in use on a GPU before a start is somebody's


class Supervisor:
    """The children and what is known of them."""

    def __init__(
        self,
        settings: Settings,
        config: Path,
        redis_url: str,
        places: list[Seat],
        names: Mapping[str, str],
        until_idle: bool,
    ):
        """`names`: what the installed SGLang calls flags that have another name there."""
        self.flag_names = names
        self.crashes: dict[str, list[float]] = {}  # server -> when it died of itself
        self.without_mtp: set[str] = set()  # servers that crashed too often with it, for as long as we run
        self.notes: dict[str, str] = {}  # server -> what was changed for it, for status
        self.gpus: list[gpus.Gpu] = []
        self.settings, self.config, self.redis_url = settings, config, redis_url
        self.folder, self.until_idle = settings.folder, until_idle
        self.seats = {f"server-{seat.number}": seat for seat in places}
        self.rules = Rules()
        self.ledger = Ledger(redis_url, patience_seconds=2.0)
        self._ledger_thread = ThreadPoolExecutor(1)  # one alone: what was said last is what stands
        self.news = asyncio.Event()  # something was found out: look before the next tick
        self.notifier = Notifier()
        self.draining = False
        self.idle = False
        self._met: set[str] = set()  # runs that the ledger has known since we are up
        self.outage = ""
        self.outage_since = 0.0
        self.happened: collections.deque[Event] = collections.deque(maxlen=100)  # not in the ledger yet
        # Where no server was ever ready with this command and model, the first one compiles kernels for minutes: eight
        # at once would take the CPU from each other, and have locked each other out of the cache (flashinfer#4062).
        self._warm = self.folder / "warm" / warm_name(settings)
        if not (settings.servers.warm_first and is_sglang(settings.servers.command)):
            self._touch_warm()
        self.running: dict[str, processes.Process] = {}
        self.probes: dict[str, asyncio.Task[None]] = {}
        self.children = {child.name: child for child in self._cast()}

    def _cast(self) -> Iterator[Child]:
        servers = self.settings.servers
        yield Child(name="loader", stop_seconds=10.0)
        if self.settings.page.port or self.settings.notices.webhook or self.settings.notices.command:
            yield Child(name="page", stop_seconds=15.0)  # time for a last notice
        for name, seat in self.seats.items():
            yield Child(
                name=name,
                load_seconds=servers.load_seconds,
                stop_seconds=servers.stop_seconds,
                waits_for_start_of=None if seat.number == 0 or self._warm.exists() else "server-0",
            )
            yield Child(
                name=f"worker-{seat.number}",
                needs=name,
                load_seconds=math.inf,  # it waits for its server, which has a deadline of its own
                stop_seconds=self.settings.work.drain_seconds + 10.0,
            )

    # -- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Keep everything up until told to stop (or, with `until_idle`, until every run is finished)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, signal.Signals(number).name)
        self._note("daemon", f"daemon is up, pid {os.getpid()}, {len(self.seats)} servers")
        self._meet_what_is_left()
        beside = [asyncio.create_task(work()) for work in (self._publish, self._keep_house, self._look_at_gpus)]
        if os.getpid() == 1:
            beside.append(asyncio.create_task(self._bury_orphans()))
        try:
            while True:
                self._observe()
                for task in beside:
                    if task.done():
                        task.result()  # a fault of ours: end, rather than go on without what it did
                for action in plan(self.children.values(), time.monotonic(), self.rules, self.draining):
                    self._do(action)
                self.notifier.tell(self._summary(), self.draining)
                if self.until_idle and self.idle and not self.draining:
                    log.info("every run is finished: stopping")
                    self._note("daemon", "every run is finished: stopping")
                    self.draining = True
                if self.draining and not self.running:
                    return 0
                self._give_up_if_nothing_ever_starts()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.news.wait(), TICK_SECONDS)
                self.news.clear()
        finally:
            for task in [*beside, *self.probes.values()]:
                task.cancel()
            for process in self.running.values():
                process.kill()
                process.forget()
            with contextlib.suppress(LedgerUnavailable):  # then it expires by itself
                await loop.run_in_executor(self._ledger_thread, self.ledger.unpublish, "gend:daemon")

    def _touch_warm(self) -> None:
        with contextlib.suppress(OSError):  # the next daemon starts one server before the others, once more
            self._warm.parent.mkdir(parents=True, exist_ok=True)
            self._warm.touch()

    def _asked_to_stop(self, name: str) -> None:
        log.info("%s: draining; rows in flight have %.0f s to end", name, self.settings.work.drain_seconds)
        self._note("daemon", f"{name}: draining")
        self.draining = True

    def _observe(self) -> None:
        for name, process in self.running.items():
            self.children[name].exit_code = process.exit_code()

    def _do(self, action: Action) -> None:
        child = self.children[action.child]
        match action.verb:
            case Verb.START:
                try:
                    self._start(child)
                except Unavailable as error:  # the disk is full, say: what runs goes on, and this is tried again
                    child.last_error = str(error)
                    self._count_failure(child)
                    self._enter(child, State.BACKOFF, child.last_error, logging.WARNING)
            case Verb.READY:
                child.ever_ready = True
                self._enter(child, State.READY)
                if child.needs:
                    self.running[child.name].say(b"ready\n")
                elif child.name in self.seats:
                    self._touch_warm()
                    self.probes[child.name] = asyncio.create_task(self._watch(child))
            case Verb.STOP:
                self._enter(child, State.STOPPING, action.reason)
                self.running[child.name].terminate()
            case Verb.KILL:
                child.last_error = child.trouble or action.reason
                if child.trouble or child.state == State.STARTING:
                    self._count_failure(child)
                self._enter(child, State.STOPPING, action.reason, logging.WARNING)
                self._count_crash(child)
                self.running[child.name].kill()
            case Verb.FAILED | Verb.GONE:
                self._ended(child, action)
            case Verb.RETRY:
                self._enter(child, State.DOWN)
            case Verb.LOOK:
                self._enter(child, State.BLOCKED if self._remains(child) else State.DOWN)

    def _start(self, child: Child) -> None:
        number = child.name.rpartition("-")[2]
        if seat := self.seats.get(child.name):
            if remains := self._remains(child):
                child.last_error = remains
                self._enter(child, State.BLOCKED, remains, logging.ERROR)
                return
            command = self._server_argv(seat)
            process = processes.start(self.folder, child.name, command, environment(self.settings, seat), seat.port)
            self._stay_near(process, seat)
        else:
            command = [sys.executable, "-m", "gend", "--config", str(self.config)]
            if child.needs:
                command += ["worker", "--number", number, "--url", self.seats[child.needs].url]
                command += ["--share", f"{self._share(child.needs):.2f}", "--peers", str(len(self.seats))]
            else:
                command += [child.name]  # loader, page
            process = processes.start(self.folder, child.name, command, os.environ, talk=bool(child.needs))
        self.running[child.name] = process
        child.starts += 1
        child.exit_code, child.answers, child.trouble, child.asked_to_stop = None, False, "", False
        self._enter(child, State.STARTING, f"pid {process.pid}")
        if child.name in self.seats:
            self.probes[child.name] = asyncio.create_task(self._wait_until_it_answers(child))
        else:
            child.answers = True  # the ledger shows what a worker does; that it lives is enough here

    def _ended(self, child: Child, action: Action) -> None:
        process = self.running.pop(child.name)
        process.kill()  # whatever of its session survived it
        process.forget()
        if probe := self.probes.pop(child.name, None):
            probe.cancel()
        if child.needs:
            self._release(child)
        if child.needs and child.exit_code == os.EX_PROTOCOL:
            self.children[child.needs].trouble = "its worker saw a wrong canary"
        if action.verb == Verb.FAILED:
            self._count_crash(child)
            self._count_failure(child)
            tail = processes.log_tail(self.folder, child.name, 1)
            child.last_error = f"{action.reason}{': ' + tail[0][:200] if tail else ''}"
            if child.needs and process_ended_from_outside(child.exit_code):
                child.failures = 1  # its batches wait, and the next start is as likely to go well as the first
            self._enter(child, State.BACKOFF, child.last_error, logging.WARNING)
        elif child.trouble or child.failures:
            self._enter(child, State.BACKOFF)
        else:
            self._enter(child, State.DOWN)

    def _enter(self, child: Child, state: State, why: str = "", level: int = logging.INFO) -> None:
        if child.state != state:
            log.log(level, "%s: %s -> %s%s", child.name, child.state, state, f" ({why})" if why else "")
            self._tell_what_happened(child, state, why)
        child.state, child.since = state, time.monotonic()

    def _tell_what_happened(self, child: Child, state: State, why: str) -> None:
        bad = state in (State.BACKOFF, State.BLOCKED) and bool(why)
        if bad or (state == State.READY and child.name in self.seats) or (state == State.STOPPING and child.trouble):
            text = f"{child.name.replace('-', ' ')}: {state}{f' ({why})' if why else ''}"
            self._note(child.name.partition("-")[0], text, bad or state == State.STOPPING)

    def _note(self, kind: str, text: str, bad: bool = False) -> None:
        self.happened.append(Event(at=time.time(), kind=kind, text=text, bad=bad))

    # -- a server that keeps dying -------------------------------------------------------------------------------

    def _count_failure(self, child: Child) -> None:
        """One more in a row, unless it did well for long enough before."""
        healthy = child.state == State.READY and time.monotonic() - child.since > self.rules.healthy_seconds
        child.failures = 1 if healthy else child.failures + 1

    def _count_crash(self, child: Child) -> None:
        if child.name in self.seats and child.ever_ready:
            now = time.monotonic()
            recent = [at for at in self.crashes.get(child.name, []) if now - at < CRASHES_WINDOW_SECONDS]
            self.crashes[child.name] = [*recent, now]
            if len(recent) + 1 >= MTP_CRASHES and any(MTP_FLAGS in flag for flag in self.settings.servers.flags):
                self.without_mtp.add(child.name)
            self._take_note(child.name)

    def _take_note(self, server: str) -> None:
        share, notes = self._share(server), []
        if share < 1:
            notes.append(f"{share:.0%} of its slots after {len(self.crashes[server])} crashes")
        if server in self.without_mtp:
            notes.append("speculative decoding off")
        self.notes[server] = ", ".join(notes)

    def _forgive(self, server: str) -> None:
        """Crashes of long ago count no more: all of its slots are used again."""
        share, now = self._share(server), time.monotonic()
        self.crashes[server] = [at for at in self.crashes[server] if now - at < CRASHES_WINDOW_SECONDS]
        self._take_note(server)
        worker = self.running.get(server.replace("server", "worker"))
        if worker and self._share(server) != share:
            worker.say(f"share {self._share(server):.2f}\n".encode())

    def _share(self, server: str) -> float:
        """Of what a server can run, how much is used: three quarters of it for each crash after the first."""
        return max(SMALLEST_SHARE, 0.75 ** max(0, len(self.crashes.get(server, [])) - 1))

    def _server_argv(self, seat: Seat) -> list[str]:
        dropped = MTP_FLAGS if f"server-{seat.number}" in self.without_mtp else ""
        return argv(self.settings, seat, self.flag_names, dropped)

    def _stay_near(self, process: processes.Process, seat: Seat) -> None:
        """Keep a server on the CPUs of its GPU's NUMA node, where the box has several."""
        if seat.gpus and (near := gpus.processors(seat.gpus[0])):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, near)

    def _remains(self, child: Child) -> str:
        """What of an earlier process is still in the way of this server, in words; empty when the place is clean."""
        seat = self.seats[child.name]
        for port in range(seat.port, seat.port + PORTS_PER_SERVER):
            if not processes.port_free(port):
                return f"port {port} is held by {processes.port_holder(port)}"
        ours = {member.pid for process in self.running.values() for member in process.members()}
        for gpu in self.gpus:
            if gpu.index in seat.gpus and gpu.used_bytes > GPU_LEFT_BYTES:
                holders = [processes.describe(pid) for pid in gpu.pids if pid not in ours]
                who = ", ".join(holders) or "a process that cannot be seen from here"
                return f"GPU {gpu.index}: {gpu.used_bytes / 2**30:.0f} GiB are held by {who}"
        return ""

    def _release(self, worker: Child) -> None:
        """A worker that is dead holds nothing: its batches are free at once, not when their leases end."""

        def release() -> None:
            with contextlib.suppress(LedgerUnavailable):  # then the leases end by themselves
                self.ledger.release_owner(f"{processes.box_name(self.folder)}-{worker.name}.")

        asyncio.get_running_loop().run_in_executor(None, release)

    def _give_up_if_nothing_ever_starts(self) -> None:
        servers = [self.children[name] for name in self.seats]
        if all(child.state == State.BLOCKED and not child.starts for child in servers):
            raise SettingsError(
                f"no server can start: {servers[0].last_error}; stop that process, or change servers.base_port"
            )
        if not any(child.ever_ready for child in servers) and all(child.failures >= FIRST_STARTS for child in servers):
            child = servers[0]
            tail = "\n".join(f"    {line}" for line in processes.log_tail(self.folder, child.name))
            raise Unavailable(
                f"no server ever started; {child.name} {child.last_error}\n{tail}\n"
                f"See {processes.log_path(self.folder, child.name)}; check model.path, servers.command, servers.flags."
            )

    # -- what an earlier daemon left -----------------------------------------------------------------------------

    def _meet_what_is_left(self) -> None:
        """Adopt the servers that an earlier, killed daemon left and that are what we would start; end the rest."""
        for process in processes.left_behind(self.folder):
            name = process.identity.name
            seat, child = self.seats.get(name), self.children.get(name)
            if seat and child and process.exit_code() is None and process.identity.argv == self._server_argv(seat):
                log.info("%s: adopted, pid %d of an earlier daemon", name, process.pid)
                self.running[name] = process
                self._enter(child, State.STARTING, "adopted")
                self.probes[name] = asyncio.create_task(self._wait_until_it_answers(child))
            else:
                log.info("%s: ending pid %d, left by an earlier daemon", name, process.pid)
                process.kill()
                process.forget()
        with contextlib.suppress(LedgerUnavailable):
            self.ledger.release_owner(f"{processes.box_name(self.folder)}-worker-")

    # -- beside the loop -----------------------------------------------------------------------------------------

    async def _wait_until_it_answers(self, child: Child) -> None:
        """Ready is when a real generation came back as expected, not when a port opens."""
        url, refusals = self.seats[child.name].url, 0
        async with connect(url, self.settings.model.path, self.settings.servers.load_seconds) as server:
            while True:
                try:
                    await server.chat(canary.MESSAGES, None, canary.PLAIN, seed=1)
                    fault = ""
                    if self.settings.sampling.thinking:
                        fault = canary.split_fault(await server.chat(canary.MESSAGES, None, canary.THINKING, seed=1))
                except PromptRefused as error:
                    fault = f"refuses a plain prompt: {error}"
                except (ServerFault, Unavailable):
                    await asyncio.sleep(0.2)
                    continue  # refused connections while it loads are no failures; the deadline is the planner's
                refusals += bool(fault)
                if not fault:
                    child.answers = True
                    self.news.set()
                    return
                child.last_error = fault
                if refusals >= CANARY_REFUSALS:
                    child.trouble = fault
                    return
                await asyncio.sleep(1.0)

    async def _watch(self, child: Child) -> None:
        """Alive means that tokens move, or else that a probe is answered: nobody is ended who does either."""
        stall_seconds, moved = self.settings.servers.stall_seconds, time.monotonic()
        last: Pulse | None = None
        failed = 0
        parts = await asyncio.to_thread(self.running[child.name].vital_parts)
        probe_seconds = min(PROBE_SECONDS, stall_seconds)
        async with connect(self.seats[child.name].url, self.settings.model.path, probe_seconds) as server:
            while not child.trouble:
                await asyncio.sleep(WATCH_SECONDS)
                if gone := [part for part in parts if processes.ended(part)]:
                    child.trouble = f"its process {gone[0].pid} died"  # the leader needs 8 s more to notice
                    break
                pulse = await server.pulse()
                if pulse is not None and (last is None or pulse.tokens != last.tokens):
                    moved = time.monotonic()
                last = pulse or last
                stalled = time.monotonic() - moved
                if stalled > stall_seconds:  # or idle, which a scheduler that hangs goes on saying for ever
                    failed = 0 if await self._probe(server) or await self._made_tokens(server, last) else failed + 1
                    if not failed:
                        moved = time.monotonic()
                    elif failed >= (BLIND_PROBES if last is None else 1):
                        await self._dump(child)
                        child.trouble = f"no token for {time.monotonic() - moved:.0f} s, and a probe failed"
        self.news.set()

    async def _made_tokens(self, server: Server, before: Pulse | None) -> bool:
        """Whether a server that was too busy to answer a probe was at work meanwhile."""
        pulse = await server.pulse()
        return before is not None and pulse is not None and pulse.tokens != before.tokens

    async def _probe(self, server: Server) -> bool:
        try:
            await server.chat(canary.MESSAGES, None, canary.PLAIN, seed=1)
        except PromptRefused:
            return True
        except (ServerFault, Unavailable):
            return False
        return True

    async def _dump(self, child: Child) -> None:
        """Keep what a hanging server can tell: its log's tail, and its stacks where py-spy is there."""
        dump = self.folder / "logs" / f"{child.name}.hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        process = self.running[child.name]
        try:
            await asyncio.to_thread(processes.dump, process, processes.log_tail(self.folder, child.name, 200), dump)
        except OSError as error:  # it is ended all the same
            log.warning("%s hangs: what could be seen of it could not be kept: %s", child.name, error)
        else:
            log.warning("%s hangs: what could be seen of it is in %s", child.name, dump)

    async def _publish(self) -> None:
        """Once a second: what `gend status` shows of the daemon, and whether everything is finished."""
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._ledger_thread, self._publish_once)
                if self.outage:
                    seconds = time.time() - self.outage_since
                    self._note("redis", f"Redis was away for {seconds:.0f} s: {self.outage}", bad=True)
                self.outage = ""
            except LedgerUnavailable as error:
                if not self.outage:
                    self.outage_since = time.time()
                    log.warning("%s; the workers keep what they have and go on", error)
                self.outage = str(error)
                if not self.settings.redis.url:
                    with contextlib.suppress(GendError):
                        await asyncio.to_thread(valkey.revive, self.folder)
            await asyncio.sleep(0.5)

    def _publish_once(self) -> None:
        self.ledger.publish("gend:daemon", self.view(), 10.0)
        while self.happened:
            event = self.happened[0]
            self.ledger.event(event.kind, event.text, event.bad, event.at)
            self.happened.popleft()
        if self.until_idle:
            runs = {run.run.id: run.finished or run.control.state != "active" for run in self.ledger.progress()}
            forgotten = self._met - runs.keys()  # somebody deleted them: they come back from the store
            self._met |= runs.keys()
            # Asked after: a Redis that was emptied in between knows of no run at all.
            self.idle = all(runs.values()) and not forgotten and self.ledger.rebuilt()

    def view(self) -> dict[str, Any]:
        """What `gend status` shows of the daemon."""
        now, wall = time.monotonic(), time.time()
        return {
            "pid": os.getpid(), "at": wall, "draining": self.draining,
            "children": [
                {
                    "name": child.name, "state": child.state, "since": wall - (now - child.since),
                    "gpus": list(self.seats[child.name].gpus) if child.name in self.seats else [],
                    "pid": self.running[child.name].pid if child.name in self.running else None,
                    "restarts": max(0, child.starts - 1), "last_error": child.last_error,
                    "note": self.notes.get(child.name, ""),
                }
                for child in self.children.values()
            ],
            "gpus": [
                {name: getattr(gpu, name) for name in ("index", "used_bytes", "total_bytes", "celsius")}
                for gpu in self.gpus
            ],
        }  # fmt: skip

    def _summary(self) -> str:
        """One line for `systemctl status`."""
        counts = collections.Counter(self.children[name].state for name in self.seats)
        servers = ", ".join(f"{count} {state}" for state, count in counts.items())
        return f"{'draining; ' if self.draining else ''}servers: {servers}{'; ' + self.outage if self.outage else ''}"

    async def _bury_orphans(self) -> None:
        """As a container's first process, wait for the dead that it has inherited."""
        dead: set[processes.Dead] = set()
        while True:
            await asyncio.sleep(ORPHAN_LOOK_SECONDS)
            dead = await asyncio.to_thread(processes.bury, dead)

    async def _look_at_gpus(self) -> None:
        """Know who holds the GPUs: a start has to wait until the last server's memory is free."""
        while any(seat.gpus for seat in self.seats.values()):
            with contextlib.suppress(Unavailable):
                driver = await asyncio.to_thread(gpus.read_driver)
                self.gpus = driver.gpus if driver else []
            await asyncio.sleep(1.0)

    async def _keep_house(self) -> None:
        """Once a minute: forgive old crashes, cut back logs that grew too large."""
        while True:
            await asyncio.sleep(60.0)
            for server in self.crashes:
                self._forgive(server)
            for name in [*self.children, "daemon"]:
                await asyncio.to_thread(cut_log, processes.log_path(self.folder, name), LOG_BYTES)


def warm_name(settings: Settings) -> str:
    """A name that changes when kernels would be compiled anew."""
    what = [settings.servers.command, settings.model.path, sorted(settings.servers.flags)]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]


def cut_log(path: Path, most_bytes: int) -> None:
    """Keep the last half of a log that is too large in PATH.1 and begin anew; its writer appends, and goes on.

    On a full disk nothing is kept: to begin anew makes room.
    """
    try:
        if path.stat().st_size <= most_bytes:
            return
        with open(path, "rb") as log_file, contextlib.suppress(OSError):
            log_file.seek(-(most_bytes // 2), os.SEEK_END)
            path.with_suffix(".log.1").write_bytes(log_file.read())
        os.truncate(path, 0)
    except FileNotFoundError:
        return


def process_ended_from_outside(exit_code: int | None) -> bool:
    """Whether a worker ended because of something else: a signal, or its server that went away (EX_TEMPFAIL)."""
    return exit_code is not None and (exit_code < 0 or exit_code == os.EX_TEMPFAIL)


@contextlib.contextmanager
def only_daemon(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises SettingsError naming the pid of the daemon that has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "daemon.lock", "a+")  # noqa: SIM115 - just below
    except OSError as error:
        raise SettingsError(f"work.folder: {folder} cannot be used: {error.strerror}; choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SettingsError(
                f"a gend daemon runs already with folder {folder}: pid {lock.read().strip() or 'unknown'}; "
                "stop it first, or give this one another work.folder"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        yield


async def supervise(settings: Settings, config: Path, redis_url: str, until_idle: bool, visible: int) -> int:
    """`gend up`: gives the exit code. Raises SettingsError, Unavailable."""
    places = seats(settings, visible)
    ledger = Ledger(redis_url, patience_seconds=2.0)
    # Then systemd starts us again, and a person at a terminal has an answer.
    deadline = time.monotonic() + settings.redis.patience_seconds
    while True:
        try:
            ledger.check()
            break
        except LedgerUnavailable as error:
            if time.monotonic() > deadline:
                raise
            log.warning("%s; waiting up to %.0f s for it", error, deadline - time.monotonic())
            await asyncio.sleep(2.0)
    names = await asyncio.to_thread(fitting_names, settings, places[0])
    return await Supervisor(settings, config, redis_url, places, names, until_idle).run()
