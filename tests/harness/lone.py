"""A box without a daemon: the ledger, a store, one fake server, and workers that are forked from the test process.

A fork has everything imported already, so a worker costs a fraction of a second instead of seconds, and a wrapper
around one of the product's own functions can end it at any step. The product has no hooks for this.
"""

import contextlib
import functools
import glob
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gend.cli
from gend import loader, sets
from gend.config import Settings, load_settings
from gend.engine import Server
from gend.ledger import Ledger
from gend.prompts import ReadOptions
from gend.records import PART_NAME, Run
from gend.rq_worker import RQWorker
from gend.spool import Spool, checked_row
from gend.store import FolderStore, open_store
from harness.daemon import toml
from harness.fake_server import digest, last_user_text
from harness.processes import wait_until
from harness.reader import Parts, read_prompts, read_request_log

Wrapper = Callable[[], None]

STEPS: dict[str, tuple[Any, str]] = {
    "take": (RQWorker, "take"),
    "claim": (Ledger, "claim"),
    "look": (FolderStore, "get"),
    "read": (sets, "read_prompts"),
    "recover": (Spool, "rows"),
    "generate": (Server, "chat"),
    "append": (Spool, "append"),
    "part": (Spool, "part"),
    "put": (FolderStore, "put"),
    "mark": (Ledger, "mark_done"),
    "drop": (Spool, "delete"),
    "report": (RQWorker, "finished"),
}
"""The steps of worker.py's docstring, and the function that each of them calls."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(place: Any, name: str, *, before: Callable[[], Any] = lambda: None, after: Callable[[], Any] = lambda: None,
         nth: int = 1) -> None:  # fmt: skip
    """Call `before` or `after` around the nth call of place.name, in this process."""
    inner, lock, calls = getattr(place, name), threading.Lock(), iter(range(1, 1 << 62))

    def is_it() -> bool:
        with lock:
            return next(calls) == nth

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        mine = is_it()
        if mine:
            before()
        result = inner(*args, **kwargs)
        if mine:
            after()
        return result

    @functools.wraps(inner)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        mine = is_it()
        if mine:
            before()
        result = await inner(*args, **kwargs)
        if mine:
            after()
        return result

    setattr(place, name, call_async if name == "chat" else call)


def kill_at(step: str, when: str, nth: int = 1) -> Wrapper:
    """A worker wrapped in this ends by SIGKILL before or after it does a step for the nth time."""
    place, name = STEPS[step]
    return lambda: wrap(place, name, nth=nth, **{when: die})


class LoneWorker:
    """One forked worker process."""

    def __init__(self, pid: int, ready: int, log: Path) -> None:
        self.pid, self.ready, self.log = pid, ready, log
        self.status: int | None = None

    def wait(self, seconds: float = 60) -> int:
        """What it ended with; negative: the signal."""

        def ended() -> bool:
            if self.status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.status = os.waitstatus_to_exitcode(status)
                    os.close(self.ready)
            return self.status is not None

        wait_until(ended, f"worker {self.pid} ends", seconds=seconds, failed=lambda: self.log.read_text()[-4000:])
        assert self.status is not None
        return self.status

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


class Lone:
    """The box. Its folder must be short; `server_url` and `redis` are running servers."""

    def __init__(self, folder: Path, server_url: str, redis: str, *, store: str = "", endpoint: str = "",
                 config: dict[str, dict[str, Any]] | None = None) -> None:  # fmt: skip
        self.folder, self.server_url = folder, server_url
        self.work = folder / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.store_folder = folder / "store"
        settings: dict[str, dict[str, Any]] = {
            "model": {"path": "fake"},
            "servers": {"count": 1},
            "store": {"url": store or f"file://{self.store_folder}", "endpoint": endpoint, "patience_seconds": 1.0},
            "redis": {"url": redis},
            "work": {"folder": str(self.work), "batch_size": 8, "lease_seconds": 1.0, "drain_seconds": 1.0},
        }
        for name, table in (config or {}).items():
            settings[name] = {**settings.get(name, {}), **table}
        self.config = folder / "config.toml"
        self.config.write_text(toml(settings))
        self.settings: Settings = load_settings(self.config)
        self.store = open_store(self.settings.store)
        self.ledger = Ledger(redis)
        self.workers: list[LoneWorker] = []

    def register(self, source: Path, name: str = "lone") -> Run:
        """A prompt set and its run, as `gend enqueue` does it."""
        prompt_set = loader.read_set(self.work, [str(source)], ReadOptions())
        done = loader.register(self.settings, self.ledger, self.store, prompt_set, name, "normal")
        self.ledger.mark_rebuilt()
        return self.ledger.runs()[done.run]

    def start(self, *wrappers: Wrapper, number: int = 0) -> LoneWorker:
        """Fork a worker, wrapped in `wrappers`."""
        arguments = ["worker", "--number", str(number), "--url", self.server_url]
        worker = self._fork(f"worker-{len(self.workers)}", arguments, wrappers)
        os.write(worker.ready, b"ready\n")  # what the supervisor says once the server is
        self.workers.append(worker)
        return worker

    def _fork(self, name: str, arguments: list[str], wrappers: tuple[Wrapper, ...] = ()) -> LoneWorker:
        read, write = os.pipe()
        log = self.folder / f"{name}.log"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _leave_nothing_open(read, log)
                for wrapper in wrappers:
                    wrapper()
                gend.cli.main.main(["--config", str(self.config), *arguments])
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(read)
        return LoneWorker(pid, write, log)

    @contextlib.contextmanager
    def supplied(self) -> Iterator[None]:
        """The loader beside the block: a process too, since a fork of a process with busy threads may hang."""
        loading = self._fork(f"loader-{time.time_ns():x}", ["loader"])
        try:
            yield
        finally:
            loading.end()

    def finish(self, run: Run, *wrappers: Wrapper, seconds: float = 60) -> None:
        """A worker and a loader until the run is done, then an orderly end of the worker."""
        with self.supplied():
            worker = self.start(*wrappers)
            self.wait_up(worker)
            self.wait_done(run, seconds)
            worker.signal(signal.SIGTERM)
            code = worker.wait()
            assert code == 0, f"the worker ended with {code}\n{worker.log.read_text()[-4000:]}"

    def wait_up(self, worker: LoneWorker) -> None:
        wait_until(
            lambda: worker.pid in [view["pid"] for view in self.ledger.workers()],
            f"worker {worker.pid} says how it stands", failed=self.logs,
        )  # fmt: skip

    def rows_made(self, worker: LoneWorker) -> int:
        """How many rows a worker says it has made."""
        return sum(view["totals"].get("rows", 0) for view in self.ledger.workers() if view["pid"] == worker.pid)

    def wait_done(self, run: Run, seconds: float = 60) -> None:
        wait_until(
            lambda: len(self.ledger.done(run.id)) == run.batches, f"run {run.id} is done", seconds=seconds,
            failed=self.logs,
        )  # fmt: skip

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"---- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def kept(self, run: Run) -> set[str]:
        return kept_ids(self.work, self.store_folder, run.id)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


def _leave_nothing_open(stdin: int, log: Path) -> None:
    """In a forked worker: only its own stdin and log. A proxy's connection that stays open here is never cut.

    What was open becomes /dev/null rather than closed, so that objects which still hold its number do no harm.
    """
    os.dup2(stdin, 0)
    out, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDWR)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != nothing:
            with contextlib.suppress(OSError):  # the listing's own
                os.dup2(nothing, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1), open(2, "w", 1)  # noqa: SIM115


def kept_ids(work: Path, store: Path, run: str) -> set[str]:
    """Ids of all rows that are whole in the spool or in a part: none of them may be made again."""
    lines: list[bytes] = []
    # The spool first: rows move from there into parts.
    # Not Path.glob, which fails when a folder goes while it looks.
    for rows in map(Path, glob.glob(f"{work}/spool/{run}/*/*.rows")):
        with contextlib.suppress(FileNotFoundError):
            lines += [row for line in rows.read_bytes().split(b"\n") if (row := checked_row(line))]
    for part in (store / "runs" / run / "parts").glob("*.jsonl"):
        if PART_NAME.match(part.name):
            lines += part.read_bytes().splitlines()
    return {json.loads(line)["id"] for line in lines}


def started_since(log: Path, source: Path, since: float) -> set[str]:
    """Ids of prompts that were sent to a fake server after the moment `since` (time.time())."""
    by_sha = {digest(last_user_text(messages)): id for id, messages in read_prompts(source).items()}
    events = read_request_log(log)
    return {by_sha[e["sha"]] for e in events if e["event"] == "started" and e["time"] > since and e["sha"] in by_sha}


def done_without_part(ledger: Ledger, store: Parts, run: Run) -> set[int]:
    """Batches that the ledger calls done and that have no complete part: empty at every moment."""
    names = {name.rpartition("/")[2]: name for name in store.names() if f"/{run.id}/parts/" in f"/{name}"}
    wrong = set()
    for number in ledger.done(run.id):
        name = names.get(f"{number:08d}.jsonl")
        if name is None or len(store.read(name).splitlines()) != run.batch(number).count:
            wrong.add(number)
    return wrong
