"""The daemon: servers, one worker for each, the loader, and gend's own Valkey, kept as they should be.

A loop holds wanted state against actual state at each tick. Signal handlers only set a flag; probes run beside and
leave what they found; what is due next is `planner.plan`, a pure function; nothing on the loop waits.
"""

import asyncio
import collections
import contextlib
import fcntl
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gend import processes, valkey
from gend.config import Settings
from gend.engine import connect
from gend.errors import GendError, LedgerUnavailable, PromptRefused, ServerFault, SettingsError, Unavailable
from gend.ledger import Event, Ledger
from gend.notify import Notifier
from gend.planner import Action, Child, Rules, State, Verb, plan
from gend.records import Sampling
from gend.server_command import PORTS_PER_SERVER, Seat, argv, environment, seats

log = logging.getLogger("gend.supervisor")

TICK_SECONDS = 0.1
LOG_BYTES = 64 << 20  # a child's log is cut back beyond this, once a minute
ORPHAN_LOOK_SECONDS = 2.0
FIRST_STARTS = 2  # when every server has failed this often and none was ever ready, it is the settings
CANARY = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


class Supervisor:
    """The children and what is known of them."""

    def __init__(self, settings: Settings, config: Path, redis_url: str, places: list[Seat], until_idle: bool):
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
        self.outage = ""
        self.outage_since = 0.0
        self.happened: collections.deque[Event] = collections.deque(maxlen=100)  # not in the ledger yet
        self.running: dict[str, processes.Process] = {}
        self.probes: dict[str, asyncio.Task[None]] = {}
        self.children = {child.name: child for child in self._cast()}

    def _cast(self) -> Iterator[Child]:
        servers = self.settings.servers
        yield Child(name="loader", stop_seconds=10.0)
        for name, seat in self.seats.items():
            yield Child(name=name, load_seconds=servers.load_seconds, stop_seconds=servers.stop_seconds)
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
        beside = [asyncio.create_task(self._publish()), asyncio.create_task(self._keep_house())]
        if os.getpid() == 1:
            beside.append(asyncio.create_task(self._bury_orphans()))
        try:
            while True:
                self._observe()
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
                self._start(child)
            case Verb.READY:
                child.ever_ready = True
                self._enter(child, State.READY)
                if child.needs:
                    self.running[child.name].say(b"ready\n")
            case Verb.STOP:
                self._enter(child, State.STOPPING, action.reason)
                self.running[child.name].terminate()
            case Verb.KILL:
                child.last_error = child.trouble or action.reason
                child.failures += bool(child.trouble) or child.state == State.STARTING
                self._enter(child, State.STOPPING, action.reason, logging.WARNING)
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
            process = processes.start(
                self.folder, child.name, argv(self.settings, seat), environment(self.settings, seat), seat.port
            )
        else:
            command = [sys.executable, "-m", "gend", "--config", str(self.config)]
            if child.needs:
                command += ["worker", "--number", number, "--url", self.seats[child.needs].url]
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
        healthy = child.state == State.READY and time.monotonic() - child.since > self.rules.healthy_seconds
        if action.verb == Verb.FAILED:
            child.failures = 1 if healthy else child.failures + 1
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
        if bad or (state == State.READY and not child.needs) or (state == State.STOPPING and child.trouble):
            text = f"{child.name.replace('-', ' ')}: {state}{f' ({why})' if why else ''}"
            self._note(child.name.partition("-")[0], text, bad or state == State.STOPPING)

    def _note(self, kind: str, text: str, bad: bool = False) -> None:
        self.happened.append(Event(at=time.time(), kind=kind, text=text, bad=bad))

    def _remains(self, child: Child) -> str:
        """What of an earlier process is still in the way of this server, in words; empty when the place is clean."""
        seat = self.seats[child.name]
        for port in range(seat.port, seat.port + PORTS_PER_SERVER):
            if not processes.port_free(port):
                return f"port {port} is held by {processes.port_holder(port)}"
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
            if seat and child and process.exit_code() is None and process.identity.argv == argv(self.settings, seat):
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
        """Ready is when a real generation came back, not when a port opens."""
        url = self.seats[child.name].url
        sampling = Sampling(max_tokens=16, thinking=self.settings.sampling.thinking)
        async with connect(url, self.settings.model.path, self.settings.servers.load_seconds) as server:
            while True:
                try:
                    await server.chat(CANARY, None, sampling, seed=1)
                except PromptRefused as error:
                    child.last_error = f"refuses a plain prompt: {error}"
                except (ServerFault, Unavailable):
                    pass  # refused connections while it loads are no failures; the deadline is the planner's
                else:
                    child.answers = True
                    self.news.set()
                    return
                await asyncio.sleep(0.2)

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
            self.idle = self.ledger.rebuilt() and all(
                run.finished or run.control.state != "active" for run in self.ledger.progress()
            )

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
                }
                for child in self.children.values()
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

    async def _keep_house(self) -> None:
        """Cut back logs that grew too large, once a minute."""
        while True:
            await asyncio.sleep(60.0)
            for name in [*self.children, "daemon"]:
                await asyncio.to_thread(cut_log, processes.log_path(self.folder, name), LOG_BYTES)


def cut_log(path: Path, most_bytes: int) -> None:
    """Keep the last half of a log that is too large in PATH.1 and begin anew; its writer appends, and goes on."""
    try:
        if path.stat().st_size <= most_bytes:
            return
        with open(path, "rb") as log_file:
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


async def supervise(settings: Settings, config: Path, redis_url: str, until_idle: bool, gpus: int) -> int:
    """`gend up`: gives the exit code. Raises SettingsError, Unavailable."""
    places = seats(settings, gpus)
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
    return await Supervisor(settings, config, redis_url, places, until_idle).run()
