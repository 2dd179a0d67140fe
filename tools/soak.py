#!/usr/bin/env python
"""A soak: a real daemon with a real Redis and a real S3 server, and random kills and cuts until the run is done.

    .venv/bin/python tools/soak.py                            # 2,000 rows, 4 servers, 200 faults: 8 minutes
    .venv/bin/python tools/soak.py --rows 200 --faults 15     # a short one
    .venv/bin/python tools/soak.py --seed 7 --only kill_worker,redis_emptied

The seed is printed, and with it the order of the faults is the same again (what they meet is not: time is real).
At the end a reader that shares no code with gend counts the rows. Exit code 0: nothing lost, doubled or torn, and no
row's attempts used up.
"""

import argparse
import contextlib
import heapq
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import redis

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness.daemon import Daemon
from harness.lone import kept_ids
from harness.proxy import S3Fault, S3Proxy, TcpProxy, expired_token, internal_error, slow_down
from harness.reader import S3Parts, read_parts, times_finished, write_prompts
from harness.services import BUCKET, Ports, SeaweedFS, Valkey, write_whole

LEASE_SECONDS = 3.0
PREFIX = "soak"


class Soak:
    """The services, the daemon, and what can go wrong with them. Each fault returns what ends it, or None."""

    def __init__(self, folder: Path, ports: Ports, rows: int, servers: int, seed: int) -> None:
        self.random, self.rows = random.Random(seed), rows
        marker = f"soak-{os.getpid()}"
        self.valkey = Valkey(folder / "valkey", marker, port=ports.block(1))
        self.seaweed = SeaweedFS(folder / "seaweed", marker, ports.block(5))
        self.redis_proxy = TcpProxy(("127.0.0.1", self.valkey.port), ports.block(1))
        self.s3 = S3Proxy(self.seaweed.endpoint, ports.block(1), keys=self.seaweed.keys)
        self.old_redis = folder / "old-redis"
        self.daemon = Daemon(
            folder / "box",
            ports,
            servers=servers,
            store=f"s3://{BUCKET}/{PREFIX}",
            endpoint=self.s3.endpoint,
            redis=self.valkey.url_at(self.redis_proxy.port),
            config={
                "work": {"batch_size": 20, "lease_seconds": LEASE_SECONDS, "drain_seconds": 3.0},
                "store": {"patience_seconds": 3.0},
            },
            server_flags=("--max-running-requests", "8"),
            environment=self.seaweed.variables(),
        )
        self.source = write_prompts(folder / "prompts.jsonl", rows)
        self.store = S3Parts(self.seaweed.client(), BUCKET, PREFIX)
        self.run = ""
        self.server_faults: dict[str, Any] = {}
        self.speed = 1.0

    # -- faults

    def kill_worker(self) -> None:
        self._kill(list(self.daemon.workers().values()))

    def kill_server(self) -> None:
        self._kill(list(self.daemon.servers().values()))

    def kill_loader(self) -> None:
        self._kill([loader] if (loader := self.daemon.loader()) else [])

    def kill_supervisor(self) -> None:
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            self.daemon.kill(self.daemon.supervisor)

    def kill_all(self) -> None:
        self.kill_supervisor()
        for process in self.daemon.all_processes():
            self.daemon.kill(process)

    def terminate(self) -> Callable[[], None]:
        """SIGTERM twice, as an impatient person does it, and killed if that is not enough."""
        for _ in range(2):
            self.daemon.process.terminate()  # type: ignore[union-attr]
        return self.kill_supervisor

    def stop_worker(self) -> Callable[[], None] | None:
        """Stopped for longer than its lease."""
        workers = list(self.daemon.workers().values())
        if not workers:
            return None
        worker = self.random.choice(workers)
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGSTOP)

        def go_on() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGCONT)

        return go_on

    def box_lost(self) -> None:
        """A new box with an empty disk and an empty Redis."""
        self.kill_all()
        shutil.rmtree(self.daemon.work)
        self.daemon.work.mkdir()
        self.redis_emptied()

    def disk_full(self) -> Callable[[], None]:
        """No file of a worker may grow beyond a few kB, which a process sees as it sees a full disk."""
        limited = list(self.daemon.workers().values())
        for worker in limited:
            _limit_files(worker, 4096)
        return lambda: [_limit_files(worker, resource.RLIM_INFINITY) for worker in limited] and None

    def spool_removed(self) -> None:
        shutil.rmtree(self.daemon.work / "spool", ignore_errors=True)

    def redis_killed(self) -> Callable[[], None]:
        self.valkey.kill()
        return self._start_redis

    def redis_emptied(self) -> None:
        self.valkey.kill()
        shutil.rmtree(self.valkey.folder / "appendonlydir", ignore_errors=True)
        self.valkey.start()

    def redis_old_data(self) -> None:
        """Every second time what Redis holds is put by; the other times it comes back with that."""
        self.valkey.kill()
        data = self.valkey.folder / "appendonlydir"
        if self.old_redis.exists():
            shutil.rmtree(data, ignore_errors=True)
            self.old_redis.rename(data)
        elif data.exists():
            shutil.copytree(data, self.old_redis)
        self.valkey.start()

    def redis_flushed(self) -> None:
        with self._redis() as client:
            client.flushall()

    def redis_full(self) -> Callable[[], None]:
        return self._configured("maxmemory", "1", "0")

    def redis_read_only(self) -> Callable[[], None]:
        with self._redis() as client:
            client.replicaof("127.0.0.1", 1)

        def master_again() -> None:
            with self._redis() as client:
                client.replicaof("NO", "ONE")

        return master_again

    def redis_away(self) -> Callable[[], None]:
        self.redis_proxy.set(self.random.choice(["refuse", "reset", "blackhole"]))
        return lambda: self.redis_proxy.set("pass")

    def redis_cut(self) -> None:
        """One answer, or one request, is cut in the middle."""
        self.redis_proxy.set("cut", after=self.random.randrange(1, 2000), towards=self.random.choice(["up", "down"]))

    def queue_flushed(self) -> None:
        with self._redis() as client:
            client.delete(f"rq:queue:gend-{self.run}")

    def stale_jobs(self) -> None:
        """RQ delivers a hundred jobs again, and a stranger's."""
        with self._redis() as client:
            keys = list(client.scan_iter(f"rq:job:{self.run}-*"))
            names = [self.random.choice(keys).removeprefix("rq:job:") for _ in range(100)] if keys else []
            client.rpush(f"rq:queue:gend-{self.run}", *names, "nobody-knows-me", f"{self.run}-0-1")

    def store_killed(self) -> Callable[[], None]:
        self.seaweed.kill()
        return self._start_store

    def store_cut(self) -> Callable[[], None]:
        return self._s3(S3Fault("cut_put", {"PutObject"}))

    def store_answers_lost(self) -> Callable[[], None]:
        return self._s3(S3Fault("lose_answer"))

    def store_answers_cut(self) -> Callable[[], None]:
        return self._s3(S3Fault("cut_answer"))

    def store_slow_down(self) -> Callable[[], None]:
        return self._s3(slow_down())

    def store_errors(self) -> Callable[[], None]:
        return self._s3(internal_error())

    def store_credentials_expired(self) -> Callable[[], None]:
        return self._s3(expired_token())

    def store_overwrites(self) -> Callable[[], None]:
        return self._s3(S3Fault("ignore_if_none_match"))

    def server_resets(self) -> Callable[[], None]:
        return self._server_fault("reset", share=0.5)

    def server_aborts(self) -> Callable[[], None]:
        return self._server_fault("abort", share=0.5)

    def server_errors(self) -> Callable[[], None]:
        return self._server_fault("http", status=503)

    def server_loading(self) -> Callable[[], None]:
        return self._server_fault("loading")

    # -- how

    def _kill(self, processes: list[psutil.Process]) -> None:
        if processes:
            self.daemon.kill(self.random.choice(processes))

    @contextlib.contextmanager
    def _redis(self) -> Any:
        """Redis as it is behind the proxy; nothing happens where it is away altogether."""
        client = self.valkey.client(socket_timeout=5)
        with contextlib.suppress(redis.RedisError):
            yield client
        client.close()

    def _start_redis(self) -> None:
        if self.valkey.process is None:
            self.valkey.start()

    def _start_store(self) -> None:
        if self.seaweed.process is None:
            self.seaweed.start(wait=False)

    def _configured(self, name: str, value: str, after: str) -> Callable[[], None]:
        def configure(to: str) -> None:
            with self._redis() as client:
                client.config_set(name, to)

        configure(value)
        return lambda: configure(after)

    def _s3(self, fault: S3Fault) -> Callable[[], None]:
        self.s3.set(*self.s3.faults, fault)
        return lambda: self.s3.set(*(other for other in self.s3.faults if other is not fault))

    def _server_fault(self, mode: str, **more: Any) -> Callable[[], None]:
        self.server_faults[mode] = {"mode": mode, **more}

        def over() -> None:
            self.server_faults.pop(mode, None)
            self._write_modes()

        self._write_modes()
        return over

    def _write_modes(self) -> None:
        modes = [{"mode": "slow", "speed": self.speed}, *self.server_faults.values()]
        write_whole(self.daemon.modes / "all.json", json.dumps(modes))

    # -- the soak

    def keep_pace(self, share_of_faults: float) -> float:
        """Slow servers while there are more rows than faults, fast ones while there are fewer. Gives rows' share."""
        share = len(kept_ids(self.daemon.work, Path("/nonexistent"), self.run)) / self.rows + self._share_in_store()
        speed = 0.2 if share > share_of_faults else 2.0
        if speed != self.speed:
            self.speed = speed
            self._write_modes()
        return share

    def _share_in_store(self) -> float:
        with contextlib.suppress(Exception):  # it may be down: then the last share holds
            self._in_store = 20 * sum("/parts/" in name for name in self.store.names()) / self.rows
        return self._in_store

    _in_store = 0.0

    def go(self, faults: int, only: list[str], order: random.Random) -> Counter[str]:
        """Make all faults; gives how often each of them was made."""
        self.run = self.daemon.enqueue(self.source, "soak")
        self.speed = 0.0
        self.keep_pace(0.0)
        made: Counter[str] = Counter()
        cures: list[tuple[float, int, Callable[[], None]]] = []
        numbers, started = itertools.count(), time.monotonic()
        self.daemon.start()
        next_fault = time.monotonic() + 3.0
        while True:
            now = time.monotonic()
            if self.daemon.process is None or self.daemon.process.poll() is not None:
                self.daemon.start()  # as systemd does
            while cures and cures[0][0] <= now:
                heapq.heappop(cures)[2]()
            if sum(made.values()) < faults and now >= next_fault:
                share = self.keep_pace(sum(made.values()) / faults)
                name, lasts = order.choice(only), order.uniform(0.5, 5.0)
                cure = getattr(self, name)()
                made[name] += 1
                if cure:
                    lasts += LEASE_SECONDS if name == "stop_worker" else 0.0
                    heapq.heappush(cures, (now + lasts, next(numbers), cure))
                how_long = f" for {lasts:.1f} s" if cure else ""
                print(f"{now - started:6.1f} s  fault {sum(made.values()):3}  {share:4.0%} of rows  {name}{how_long}",
                      flush=True)  # fmt: skip
                next_fault = time.monotonic() + order.uniform(0.3, 4.0)
            if sum(made.values()) >= faults and not cures:
                break
            time.sleep(0.05)
        print(f"{time.monotonic() - started:6.1f} s  no more faults: the rest of the run", flush=True)
        self.server_faults, self.speed = {}, 20.0
        self._write_modes()
        self._start_redis()
        self._start_store()
        self.redis_proxy.set("pass")
        return made

    def finish(self, seconds: float) -> None:
        """Until the daemon, which nobody helps but by starting it when it has ended, says that the run is finished."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.daemon.process is None or self.daemon.process.poll() is not None:
                self.daemon.start()
            status = self.daemon.cli("status", "--json", code=None)
            runs = json.loads(status.stdout)["runs"] if status.returncode == 0 else []
            if [run["state"] for run in runs] == ["finished"]:
                self.daemon.stop(60)
                return
            time.sleep(1.0)
        raise AssertionError(f"the run is not finished {seconds:.0f} s after the last fault\n{self.daemon.logs()}")

    def count(self) -> list[str]:
        """What is wrong, in words; empty when nothing is."""
        seen = read_parts(self.store, self.source, self.run)
        wrong = seen.problems().splitlines()
        attempts = Counter(row["attempts"] for row in seen.rows.values())
        if set(attempts) - {1}:
            wrong.append(f"attempts used up: {dict(attempts)}")
        if set(seen.verdicts) != {"ok"}:
            wrong.append(f"verdicts: {dict(seen.verdicts)}")
        (status,) = (run for run in self.daemon.status()["runs"] if run["id"] == self.run)
        if (status["rows_done"], status["verdicts"]) != (self.rows, {"ok": self.rows}):
            wrong.append(f"status says {status['rows_done']} rows, {status['verdicts']}")
        verify = self.daemon.cli("verify", self.run, code=None)
        if verify.returncode:
            wrong.append(f"gend verify ended with {verify.returncode}: {verify.stdout} {verify.stderr}")
        logs = [*self.daemon.folder.glob("*.log"), *(self.daemon.work / "logs").glob("[!s]*.log")]
        wrong += [
            f"a traceback in {log}" for log in logs if "\nTraceback" in without_ignored(log.read_text(errors="replace"))
        ]
        times = Counter(times_finished(self.daemon.request_log, self.source).values())
        print(f"{len(seen.rows)} rows in {len(seen.parts)} parts; prompts by how often they were generated: "
              f"{dict(sorted(times.items()))}")  # fmt: skip
        return wrong

    def __enter__(self) -> "Soak":
        for service in (self.valkey, self.seaweed, self.redis_proxy, self.s3):
            service.__enter__()  # type: ignore[attr-defined]
        return self

    def __exit__(self, *error: object) -> None:
        self.daemon.close()
        for service in (self.s3, self.redis_proxy, self.seaweed, self.valkey):
            service.__exit__(*error)  # type: ignore[attr-defined]


def without_ignored(log: str) -> str:
    """A log without the exceptions that Python could not raise where a signal came: no fault of the product's."""
    return "\n" + re.sub(r"^Exception ignored in.*\nTraceback", "", log, flags=re.MULTILINE)


def _limit_files(process: psutil.Process, size: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


FAULTS = [name for name, value in vars(Soak).items() if callable(value) and not name.startswith("_")]
FAULTS = FAULTS[: FAULTS.index("keep_pace")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--only", default=",".join(FAULTS), help="faults to choose from")
    parser.add_argument("--finish-seconds", type=float, default=600, help="from the last fault to the end, at most")
    parser.add_argument("--keep", action="store_true", help="leave the folder for a look at the logs")
    args = parser.parse_args()
    only = args.only.split(",")
    assert not set(only) - set(FAULTS), f"known faults: {', '.join(FAULTS)}"
    print(f"seed {args.seed}: {args.rows} rows, {args.servers} servers, {args.faults} faults of {len(only)} kinds")
    folder, ports = Path(tempfile.mkdtemp(prefix="soak-")), Ports()
    started = time.monotonic()
    wrong = ["it did not come to its end"]
    try:
        with Soak(folder, ports, args.rows, args.servers, args.seed) as soak:
            made = soak.go(args.faults, only, random.Random(args.seed))
            soak.finish(args.finish_seconds)
            wrong = soak.count()
            print(f"faults: {dict(made.most_common())}")
            if wrong:
                print(soak.daemon.logs())
    finally:
        result = "; ".join(wrong) or "nothing lost, doubled or torn"
        print(f"{time.monotonic() - started:.0f} s, seed {args.seed}: {result}")
        ports.close()
        if args.keep or wrong:
            print(f"see {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
