#!/usr/bin/env python
"""How fast everything is back after something died, and what a vanished box costs. Simulated servers, real services.

    .venv/bin/python tools/recovery_bench.py                  # all figures: some 10 minutes
    .venv/bin/python tools/recovery_bench.py --only up,worker

| figure  | what is measured                                                                            | bar    |
|---------|---------------------------------------------------------------------------------------------|--------|
| up      | from `gend up` to all servers full: 914,000 rows, half of them done, servers already loaded  | 5 s    |
| rebuild | the ledger from a listing of 7,200 parts: a folder, and S3 (SeaweedFS)                       | 30 s   |
| worker  | a worker is killed: until each of its batches is worked on by another process                | 15 s   |
| again   | finished rows that are made again after kills of workers and of the supervisor               | 0 rows |
| risk    | finished rows that no part holds yet, which a vanished box takes along, against README's formula |        |
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness.daemon import Daemon
from harness.lone import kept_ids, started_since
from harness.processes import wait_until
from harness.reader import FolderParts, assert_whole, write_prompts
from harness.services import BUCKET, Ports, SeaweedFS, Valkey

from gend import loader, sets
from gend.config import load_settings
from gend.ledger import Ledger
from gend.records import Row, Run, Usage, part_key
from gend.store import Store, open_store

ROWS, BATCH = 914_000, 128


def put_parts(store: Store, work: Path, run: Run, numbers: range) -> None:
    """Parts as workers would have put them, with short replies."""
    for number in numbers:
        batch = run.batch(number)
        prompts = sets.read_prompts(work, run.set.fingerprint, batch.first, batch.count)
        rows = (
            Row(id=prompt.id, run=run.id, batch=number, messages=prompt.messages, content="a reply", verdict="ok",
                finish_reason="stop", usage=Usage(20, 5, 2))
            for prompt in prompts
        )  # fmt: skip
        store.replace(part_key(run.id, number), b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def full(daemon: Daemon, servers: int, slots: int) -> bool:
    found = [daemon.stats(number) for number in range(servers)]
    return all(stats is not None and stats["running"] >= slots for stats in found)


@contextlib.contextmanager
def box(folder: Path, ports: Ports, **options: Any) -> Iterator[Daemon]:
    with Daemon(folder / f"box-{time.time_ns():x}", ports, **options) as daemon:
        yield daemon
        shutil.rmtree(daemon.folder, ignore_errors=True)


def up(folder: Path, ports: Ports) -> str:
    servers, slots = 4, 64
    flags = ("--speed", "1", "--mean-tokens", "2500", "--max-running-requests", str(slots))
    source = write_prompts(folder / "prompts.jsonl", ROWS)
    with box(folder, ports, servers=servers, server_flags=flags, config={"work": {"batch_size": BATCH}}) as daemon:
        began = time.monotonic()
        run_id = enqueue(daemon, source)
        enqueued = time.monotonic() - began
        settings = load_settings(daemon.config)
        store = open_store(settings.store)
        run = loader.stored_run(store, run_id)
        put_parts(store, daemon.work, run, range(run.batches // 2))
        daemon.start()
        wait_until(lambda: full(daemon, servers, slots), "all servers are full", seconds=120, failed=daemon.logs)
        seconds = []
        for _ in range(3):
            loaded = daemon.servers()
            for process in (daemon.supervisor, *daemon.all_processes()):
                if process not in loaded.values():
                    daemon.kill(process)
            wait_until(lambda: not any(daemon.stats(n)["running"] for n in range(servers)), "they are empty again")
            began = time.monotonic()
            daemon.start()
            wait_until(lambda: full(daemon, servers, slots), "all are full again", seconds=120, failed=daemon.logs)
            seconds.append(time.monotonic() - began)
            assert {n: p.pid for n, p in daemon.servers().items()} == {n: p.pid for n, p in loaded.items()}, "adopted"
    return f"{', '.join(f'{s:.1f}' for s in seconds)} s (enqueueing the {ROWS:,} prompts took {enqueued:.0f} s)"


def enqueue(daemon: Daemon, source: Path) -> str:
    """`gend enqueue`, which may take longer than the harness allows."""
    command = [sys.executable, "-m", "gend", "--config", daemon.config, "enqueue", source, "--name", "bench", "--json"]
    done = subprocess.run(command, env=daemon.environment, cwd=daemon.folder, stdout=subprocess.PIPE, check=True)
    return str(json.loads(done.stdout)["run"])


def rebuild(folder: Path, ports: Ports) -> str:
    parts = 7200
    source = write_prompts(folder / "small.jsonl", parts * 2)
    marker, found = f"bench-{os.getpid()}", []
    with Valkey(folder / "valkey", marker) as valkey, SeaweedFS(folder / "s3", marker, ports.block(5)) as seaweed:
        os.environ |= seaweed.variables()
        for kind, options in (("folder", {}), ("S3", {"store": f"s3://{BUCKET}/bench", "endpoint": seaweed.endpoint})):
            valkey.client().flushall()
            with box(folder, ports, redis=valkey.url, config={"work": {"batch_size": 2}}, **options) as daemon:
                settings = load_settings(daemon.config)
                store, ledger = open_store(settings.store), Ledger(valkey.url)
                prompt_set = loader.read_set(settings.folder, [str(source)], loader.ReadOptions())
                done = loader.register(settings, ledger, store, prompt_set, "bench", "normal")
                run = ledger.runs()[done.run]
                put_parts(store, settings.folder, run, range(parts))
                valkey.client().flushall()
                began = time.monotonic()
                loader.reconcile(ledger, store)
                seconds = time.monotonic() - began
                assert len(ledger.done(run.id)) == parts
                while ledger.uncounted(run.id, 1):
                    loader.count_found_parts(ledger, store, 5.0)
                counted = time.monotonic() - began - seconds
                assert ledger.progress()[0].counts["rows"] == parts * 2
                found.append(f"{kind} {seconds:.2f} s (then its rows counted beside the work: {counted:.0f} s)")
    return "; ".join(found)


def worker(folder: Path, ports: Ports) -> str:
    servers, slots = 3, 32
    flags = ("--speed", "2", "--mean-tokens", "1500", "--max-running-requests", str(slots))
    marker, seconds, held = f"bench-{os.getpid()}", [], []
    source = write_prompts(folder / "worker.jsonl", 20_000)
    with (
        Valkey(folder / "valkey", marker) as valkey,
        box(folder, ports, servers=servers, redis=valkey.url, server_flags=flags, config={"work": {"batch_size": 32}})
        as daemon,
    ):  # fmt: skip
        run = daemon.enqueue(source)
        ledger = Ledger(valkey.url)
        daemon.start()
        wait_until(lambda: full(daemon, servers, slots), "all servers are full", seconds=120, failed=daemon.logs)

        def owners() -> dict[str, str]:
            return ledger.redis.hgetall(f"gend:run:{run}:owners")

        for number in range(servers):
            victim = daemon.workers()[number]
            (name,) = [view["name"] for view in ledger.workers() if view["pid"] == victim.pid]
            its = {batch for batch, claim in owners().items() if claim.startswith(name)}
            began = time.monotonic()
            victim.kill()

            def all_taken(its: set[str] = its, name: str = name) -> bool:
                now, done = owners(), ledger.done(run)
                return all(int(b) in done or not now.get(b, name).startswith(name) for b in its)

            wait_until(all_taken, "another worker has each of them", failed=daemon.logs)
            seconds.append(time.monotonic() - began)
            held.append(len(its))
            wait_until(lambda: full(daemon, servers, slots), "all servers are full", failed=daemon.logs)
    return f"{', '.join(f'{s:.1f}' for s in seconds)} s for {', '.join(map(str, held))} batches"


def again(folder: Path, ports: Ports) -> str:
    flags = ("--speed", "4", "--max-running-requests", "16")
    source = write_prompts(folder / "again.jsonl", 3000)
    made_again, repeated, kills = 0, 0, 0
    with box(folder, ports, servers=2, server_flags=flags) as daemon:
        run = daemon.enqueue(source)
        daemon.start().wait_for_processes(workers=2, servers=2)
        moments = []
        for number in range(8):
            before = len(kept_ids(daemon.work, daemon.store, run))
            wait_until(lambda before=before: len(kept_ids(daemon.work, daemon.store, run)) > before + 60, "rows come")
            daemon.kill(daemon.supervisor if number % 4 == 3 else daemon.workers()[number % 2])
            moments.append((kept_ids(daemon.work, daemon.store, run), time.time()))
            kills += 1
            if number % 4 == 3:
                daemon.start()
            daemon.wait_for_processes(workers=2, servers=2)
        daemon.stop()
        daemon.run_until_idle()
        assert_whole(FolderParts(daemon.store), source, run)
        for kept, moment in moments:
            made_again += len(kept & started_since(daemon.request_log, source, moment))
        events = [event for event in daemon.request_log.read_text().splitlines() if '"started"' in event]
        repeated = len(events) - 3000
    return f"{made_again} rows after {kills} kills; {repeated} requests in flight were repeated (canaries among them)"


def risk(folder: Path, ports: Ports) -> str:
    found = []
    for batch, slots in ((16, 16), (64, 16), (64, 64), (128, 64)):
        flags = ("--speed", "10", "--mean-tokens", "1000", "--max-running-requests", str(slots))
        source = write_prompts(folder / f"risk-{batch}-{slots}.jsonl", 30_000)
        config = {"work": {"batch_size": batch, "in_flight": slots}}
        with box(folder, ports, servers=1, server_flags=flags, config=config) as daemon:
            run = daemon.enqueue(source)
            daemon.start()
            parts = daemon.store / "runs" / run / "parts"
            longest = math.log(min(batch, slots)) + 0.577  # of the replies of a batch, over the mean: see the README
            while len(list(parts.glob("*.jsonl"))) < 3 + 3 * longest * slots / batch:  # until then it is not steady
                time.sleep(0.1)
            samples = []
            for _ in range(45):
                time.sleep(1.0)
                samples.append(len(kept_ids(daemon.work, Path("/nowhere"), run)))
        expected = slots * (longest - 1) + batch / 2
        found.append(f"batch {batch}, {slots} in flight: {statistics.mean(samples):.0f} (most {max(samples)}), "
                     f"formula {expected:.0f}")  # fmt: skip
    return "; ".join(found)


FIGURES = {figure.__name__: figure for figure in (up, rebuild, worker, again, risk)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FIGURES))
    args = parser.parse_args()
    for name in args.only.split(","):
        folder, ports = Path(tempfile.mkdtemp(prefix="bench-")), Ports()
        try:
            print(f"{name:8} {FIGURES[name](folder, ports)}", flush=True)
        finally:
            ports.close()
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
