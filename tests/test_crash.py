"""Kills: of a worker before and after each step of the batch order, of each process of a daemon, of the power.

What must hold: a batch that is done has its part; at the end every prompt has one row; a row that was kept when the
kill came (in the spool or in a part) is never made again; and no kill uses up a row's attempts.
"""

import functools
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.daemon import Daemon
from harness.lone import STEPS, Lone, LoneWorker, die, done_without_part, kept_ids, kill_at, started_since, wrap
from harness.processes import wait_until
from harness.reader import FolderParts, Seen, assert_whole, times_finished, write_prompts
from harness.services import FakeServer, Ports, Valkey
from rq import Queue
from rq.serializers import JSONSerializer

from gend import processes
from gend.ledger import JOB_FUNCTION, Ledger, queue_name
from gend.records import Run
from gend.spool import Spool


@pytest.fixture
def server(folder: Path, marker: str, ports: Ports) -> Iterator[FakeServer]:
    """A fake server that answers within some 10 to 50 ms."""
    with FakeServer(folder / "fake", marker, ports.block(1), "--speed", "50") as fake:
        yield fake


@pytest.fixture
def lone(folder: Path, server: FakeServer, valkey: Valkey) -> Iterator[Lone]:
    """A box without a daemon."""
    box = Lone(folder / "box", server.url, valkey.url)
    yield box
    box.end()


def assert_no_attempt_was_used_up(seen: Seen) -> None:
    assert {row["attempts"] for row in seen.rows.values()} == {1}


def finish_and_check(lone: Lone, server: FakeServer, source: Path, run: Run) -> Seen:
    """What must hold after any kill: now, and after another worker has finished the run."""
    store = FolderParts(lone.store_folder)
    assert not done_without_part(lone.ledger, store, run)
    kept, now = lone.kept(run), time.time()
    lone.ledger.release_owner("")  # what the supervisor does for a worker that is dead
    lone.finish(run)
    seen = assert_whole(store, source, run.id)
    assert_no_attempt_was_used_up(seen)
    assert not kept & started_since(server.request_log, source, now)
    counts = lone.ledger.progress()[0].counts
    assert (counts["rows"], counts["verdict:ok"]) == (run.set.accepted, run.set.accepted)
    assert not list((lone.work / "spool").glob("*/*/*")), "the spool of a batch that is done is deleted"
    return seen


# ---- one test for each step of the batch order

# After one step is before the next, but for the last one.
KILLS = [*((step, "before") for step in STEPS), ("report", "after")]


@pytest.mark.parametrize(("step", "when"), KILLS)
def test_a_worker_killed_at_a_step(step: str, when: str, lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", 24)
    run = lone.register(source)
    nth = 12 if step in ("generate", "append") else 2  # some rows, or a batch, are there already
    assert lone.start(kill_at(step, when, nth)).wait() == -signal.SIGKILL
    finish_and_check(lone, server, source, run)


def test_a_worker_killed_while_the_part_gets_its_name(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", 24)
    run = lone.register(source)
    worker = lone.start(lambda: wrap(os, "link", before=die, nth=2))
    assert worker.wait() == -signal.SIGKILL
    finish_and_check(lone, server, source, run)


def test_a_worker_killed_in_the_middle_of_a_row(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", 24)
    run = lone.register(source)

    def write_half(descriptor: int, data: bytes, offset: int) -> None:
        os.write(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_APPEND), data[: len(data) // 2])
        die()

    def wrapper() -> None:
        real, rows = os.pwrite, iter(range(12))
        os.pwrite = lambda *args: real(*args) if next(rows, None) is not None else write_half(*args)  # type: ignore

    assert lone.start(wrapper).wait() == -signal.SIGKILL
    assert len(lone.kept(run)) == 12
    finish_and_check(lone, server, source, run)


# ---- two owners of one batch


def test_two_workers_on_one_batch(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    """Leases that keep nobody out: both workers make every batch, and nothing is doubled by it."""
    source = write_prompts(tmp_path / "prompts.jsonl", 24)
    run = lone.register(source)

    def everybody_may() -> None:
        Ledger.claim = lambda *args: "claimed"  # type: ignore[assignment]
        Ledger.renew = lambda *args: []  # type: ignore[assignment]

    workers = [lone.start(everybody_may, number=number) for number in range(2)]
    for worker in workers:
        lone.wait_up(worker)
    for number in range(run.batches):  # each of them gets a hint for each batch, and a few for nothing
        for _ in range(3):
            Queue(queue_name(run.id), connection=lone.ledger.raw, serializer=JSONSerializer).enqueue(
                JOB_FUNCTION, run.id, number
            )
    lone.wait_done(run)
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log.read_text()
    finish_and_check(lone, server, source, run)


def test_a_late_owner_does_no_harm(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    """Stopped for longer than its lease; it wakes up in the middle of its successor's work, or long after."""
    server.mode("hang", containing="HANG")
    source = write_prompts(tmp_path / "prompts.jsonl", 32, containing=dict.fromkeys(range(12, 32), "HANG"))
    run = lone.register(source)
    with lone.supplied():
        late = lone.start()
        wait_until(lambda: len(lone.kept(run)) == 12, "12 rows are kept", failed=lone.logs)
        late.signal(signal.SIGSTOP)
        wait_until(lambda: not lone.ledger.leased(run.id), "its leases end")
        kept, now = lone.kept(run), time.time()
        waking = functools.partial(wake_and_wait, late, lone, run)
        next_one = lone.start(lambda: wrap(Spool, "part", before=waking), number=1)
        wait_until(lambda: lone.ledger.leased(run.id), "the next worker has batches", failed=lone.logs)
        server.mode("ok")
        lone.wait_done(run)
        for worker in (late, next_one):
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0, worker.log.read_text()
    assert not kept & started_since(server.request_log, source, now)
    finish_and_check(lone, server, source, run)


def wake_and_wait(late: LoneWorker, lone: Lone, run: Run) -> None:
    """Called in the successor, which has all rows of a batch: the late owner now finishes that batch first."""
    late.signal(signal.SIGCONT)
    wait_until(lambda: lone.ledger.done(run.id), "the late owner has finished a batch")


# ---- the power


def test_the_power_fails(lone: Lone, server: FakeServer, valkey: Valkey, tmp_path: Path,
                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Nothing but what was fsynced is left: files are cut back to it, and names that no synced folder held are gone.

    What the kernel was asked to keep is written down; the test then throws the rest away. Of four batches with five
    rows each two were synced, and Redis comes back as it was before the first batch.
    """
    slow = {number: "HANG" for number in range(32) if number % 8 > 4}
    source, journal = write_prompts(tmp_path / "prompts.jsonl", 32, containing=slow), tmp_path / "kept"
    write_down_syncs(journal, monkeypatch.setattr)
    run = lone.register(source)
    valkey.kill()
    shutil.copytree(valkey.folder, tmp_path / "old", ignore=lambda *_: ["s"])
    valkey.start()
    server.mode("hang", containing="HANG")

    def slow_disk() -> None:
        write_down_syncs(journal, setattr)
        real = Spool.sync
        Spool.sync = lambda spool: real(spool) if int(spool.home.name) < 2 else None  # type: ignore

    worker = lone.start(slow_disk)
    wait_until(lambda: len(lone.kept(run)) == 20, "20 rows are kept", failed=lone.logs)
    wait_until(lambda: synced_bytes(journal, lone.work / "spool"), "five rows of each of two batches are synced")
    worker.end()
    valkey.kill()
    cut_the_power(lone.folder, journal)
    shutil.rmtree(valkey.folder)
    shutil.copytree(tmp_path / "old", valkey.folder)
    valkey.start()
    server.mode("ok")
    assert len(lone.kept(run)) == 10
    finish_and_check(lone, server, source, run)


def synced_bytes(journal: Path, spool: Path) -> bool:
    """Whether all that lies in the spools of batches 0 and 1 was synced."""
    kept = {number: what for number, what, _ in map(json.loads, journal.read_text().splitlines())}
    files = [path.stat() for path in spool.glob("*/0000000[01]/*.rows")]
    return len(files) == 2 and all(kept.get(file.st_ino) == file.st_size for file in files)


def write_down_syncs(journal: Path, set_attribute: Callable[[Any, str, Any], None]) -> None:
    """After each fsync or fdatasync in this process: which file with how many bytes, which folder with which names."""

    def noting(sync: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            sync(descriptor)
            path, is_folder = os.readlink(f"/proc/self/fd/{descriptor}"), stat.S_ISDIR(os.fstat(descriptor).st_mode)
            what = os.listdir(descriptor) if is_folder else os.fstat(descriptor).st_size
            with open(journal, "a") as out:
                out.write(json.dumps([os.fstat(descriptor).st_ino, what, path]) + "\n")

        return call

    for name in ("fsync", "fdatasync"):
        set_attribute(os, name, noting(getattr(os, name)))


def cut_the_power(box: Path, journal: Path) -> None:
    """Leave below `box` what the journal says was kept. The two folders that the harness made are taken as kept."""
    kept = {number: what for number, what, _ in map(json.loads, journal.read_text().splitlines())}

    def cut(folder: Path) -> None:
        names = kept.get(folder.stat().st_ino, [])
        for path in list(folder.iterdir()):
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                cut(path)
            else:
                os.truncate(path, kept.get(path.stat().st_ino, 0))

    for folder in (box / "work", box / "store"):
        cut(folder)


# ---- a daemon, and its processes one after the other

MODEST = ("--speed", "2", "--max-running-requests", "8")
"""Servers that make some 30 rows a second each, so that there is something to interrupt."""


def test_each_process_of_a_daemon_is_killed(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(servers=2, server_flags=MODEST)
    source = write_prompts(tmp_path / "prompts.jsonl", 500)
    run, store = daemon.enqueue(source), FolderParts(daemon.store)
    daemon.start().wait_for_processes(workers=2, servers=2)
    kept_at: list[tuple[set[str], float]] = []

    def rows_come() -> None:
        before = len(kept_ids(daemon.work, daemon.store, run))
        wait_until(lambda: len(kept_ids(daemon.work, daemon.store, run)) > before, "rows come", failed=daemon.logs)

    def remember() -> None:
        kept_at.append((kept_ids(daemon.work, daemon.store, run), time.time()))

    rows_come()
    for find in (lambda: daemon.workers()[0], lambda: daemon.servers()[1], daemon.valkey, daemon.loader):
        victim = find()
        assert victim is not None
        daemon.kill(victim)
        remember()
        rows_come()
    daemon.kill(daemon.supervisor)
    remember()
    daemon.start().wait_for_processes(workers=2, servers=2)
    rows_come()
    for process in (daemon.supervisor, *daemon.all_processes()):
        daemon.kill(process)
    remember()
    assert not daemon.survivors()
    daemon.run_until_idle()
    assert_no_attempt_was_used_up(assert_whole(store, source, run))
    for number, (kept, moment) in enumerate(kept_at):
        assert not kept & started_since(daemon.request_log, source, moment), f"made again after kill {number}"
    (progress,) = daemon.status()["runs"]
    assert (progress["state"], progress["rows_done"], progress["verdicts"]) == ("finished", 500, {"ok": 500})
    assert not daemon.survivors()


def test_a_process_is_known_again_though_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next daemon would neither adopt a server nor end it. After a boot its pid is somebody else's."""
    process = processes.start(tmp_path, "server-0", ["sleep", "60"], os.environ)
    try:
        booted = psutil.boot_time()  # which the kernel derives from the clock: psutil's start times move with it
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 1)
        (found,) = processes.left_behind(tmp_path)
        assert found.exit_code() is None
        record = tmp_path / "processes" / "server-0.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "boot": "another"}))
        assert processes.left_behind(tmp_path) == []
        assert process.exit_code() is None, "and it is left alone"
    finally:
        process.kill()


def test_a_second_daemon_is_refused_and_two_sigterms_drain(
    make_daemon: Callable[..., Daemon], valkey: Valkey, tmp_path: Path
) -> None:
    daemon = make_daemon(servers=1, redis=valkey.url, server_flags=("--speed", "1"))
    source = write_prompts(tmp_path / "prompts.jsonl", 400)
    run = daemon.enqueue(source)
    daemon.start().wait_for_processes(workers=1, servers=1)
    wait_until(lambda: kept_ids(daemon.work, daemon.store, run), "rows come", failed=daemon.logs)
    refused = daemon.cli("up", code=2).stderr
    assert str(daemon.supervisor.pid) in refused, refused
    daemon.supervisor.terminate()
    daemon.supervisor.terminate()
    assert daemon.wait() == 0
    assert not daemon.survivors()
    assert not Ledger(valkey.url).leased(run), "its batches are free at once"
    assert set(times_finished(daemon.request_log, source)) == kept_ids(daemon.work, daemon.store, run)
