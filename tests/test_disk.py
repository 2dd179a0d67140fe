"""The disk: torn lines, a full disk, folders that somebody removed. Losing scratch costs time, never a row."""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.daemon import Daemon
from harness.lone import Lone, LoneWorker, started_since
from harness.processes import wait_until
from harness.reader import FolderParts, assert_whole, times_finished, write_prompts
from harness.services import FakeServer, Ports, Valkey

from gend import sets
from gend.errors import DiskUnavailable
from gend.records import Batch
from gend.spool import Spool

BATCH = Batch("run", 0, 0, 3)


def row(number: int, text: str = "x") -> bytes:
    return json.dumps({"id": f"p{number}", "content": text}).encode()


@pytest.fixture
def server(folder: Path, marker: str, ports: Ports) -> Iterator[FakeServer]:
    with FakeServer(folder / "fake", marker, ports.block(1), "--speed", "50") as fake:
        yield fake


@pytest.fixture
def lone(folder: Path, server: FakeServer, valkey: Valkey) -> Iterator[Lone]:
    box = Lone(folder / "box", server.url, valkey.url)
    yield box
    box.end()


# ---- the spool


def test_a_line_torn_at_any_byte_costs_that_row_alone(tmp_path: Path) -> None:
    """Cut at every byte, filled with zeros as a power cut does it, or garbled: the row before it lives."""
    whole = Spool(tmp_path, BATCH, "first")
    whole.append(row(0))
    before = (whole.home / "first.rows").stat().st_size
    whole.append(row(1, "ü € \\n 😀"))
    data = (whole.home / "first.rows").read_bytes()
    whole.close()
    for cut in range(before, len(data)):
        for tail in (b"", b"\n", bytes(len(data) - cut), bytes([data[cut] ^ 1]) + data[cut + 1 :]):
            (whole.home / "first.rows").write_bytes(data[:cut] + tail)
            kept = {"p0", "p1"} if (data[:cut] + tail).startswith(data[:-1]) and tail in (b"", b"\n") else {"p0"}
            assert set(Spool(tmp_path, BATCH, "second").rows()) == kept, (cut, tail)
    late = Spool(tmp_path, BATCH, "third")
    late.append(row(1))
    late.append(row(2))
    assert late.part(["p0", "p1", "p2"]) == b"".join(row(number) + b"\n" for number in range(3))


def test_rows_from_several_threads_do_not_meet(tmp_path: Path) -> None:
    """Rows that waited for a full disk are written by several threads when there is room again."""
    spool = Spool(tmp_path, BATCH, "claim")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: spool.append(row(number, "y" * number)), range(500)))
        list(pool.map(lambda _: spool.sync(), range(8)))
    assert len(spool.rows()) == 500


def test_a_spool_that_ended_under_a_thread_writes_nothing_more(tmp_path: Path) -> None:
    spool = Spool(tmp_path, BATCH, "claim")
    spool.append(row(0))
    spool.delete()
    with pytest.raises(DiskUnavailable, match="given back or is done"):
        spool.append(row(1))
    spool.sync()
    assert not spool.home.exists()


def test_a_full_disk_refuses_a_row_and_keeps_those_before(tmp_path: Path) -> None:
    """In a process of its own: no file may grow beyond 200 bytes there."""
    code = f"""
import resource
from pathlib import Path
from gend.errors import DiskUnavailable
from gend.records import Batch
from gend.spool import Spool
spool = Spool(Path({str(tmp_path)!r}), Batch("run", 0, 0, 3), "claim")
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
spool.append({row(0)!r})
for _ in range(2):
    try:
        spool.append({row(1, "z" * 400)!r})
    except DiskUnavailable as error:
        print(error)
spool.append({row(2)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.append({row(1, "z" * 400)!r})
print(len(spool.part(["p0", "p1", "p2"]).splitlines()))
"""
    done = subprocess.run([os.sys.executable, "-c", code], capture_output=True, text=True)  # type: ignore[attr-defined]
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("disk full") == 2 and done.stdout.endswith("\n3\n"), done.stdout


# ---- a worker, and a disk that is full or emptied


def outage(lone: Lone, what: str) -> Callable[[], bool]:
    """Whether the worker says in its view, which `gend status` shows, that this is away."""
    return lambda: any(what in view["outages"] for view in lone.ledger.workers())


def test_a_worker_waits_for_room_on_the_disk(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", 40)
    run = lone.register(source)
    no_room = (2048, resource.RLIM_INFINITY)
    with lone.supplied():
        worker = lone.start(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, no_room))
        wait_until(outage(lone, "disk"), "the worker says that the disk is full", failed=lone.logs)
        wait_until(lambda: server.stats()["in_flight"] == 0, "what was asked for is answered")
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        lone.wait_done(run)
        wait_until(lambda: not outage(lone, "disk")(), "the worker says that the disk is back", failed=lone.logs)
        end(worker)
    seen = assert_whole(FolderParts(lone.store_folder), source, run.id)
    assert {found["attempts"] for found in seen.rows.values()} == {1}
    assert set(times_finished(server.request_log, source).values()) == {1}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_daemon_on_a_real_full_disk(make_daemon: Callable[..., Daemon], valkey: Valkey, tmp_path: Path) -> None:
    """The work folder on 700 kB: Redis elsewhere, the spool and the logs get what is there."""
    daemon = make_daemon(servers=1, redis=valkey.url, server_flags=("--speed", "50", "--mean-tokens", "400"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", daemon.work], check=True)
    try:
        source = write_prompts(tmp_path / "prompts.jsonl", 600)
        run = daemon.enqueue(source)
        filler = daemon.work / "filler"
        daemon.start().wait_for_processes(workers=1)
        wait_until(lambda: (daemon.work / "spool").exists(), "rows come", failed=daemon.logs)
        fill(filler)
        wait_until(lambda: "disk" in daemon.status()["outages"], "status says that the disk is full", every=0.5)
        filler.unlink()
        wait_until(lambda: daemon.status()["runs"][0]["state"] == "finished", "the run ends", every=0.5)
        daemon.stop()
        assert_whole(FolderParts(daemon.store), source, run)
    finally:
        daemon.close()
        subprocess.run(["umount", "-l", daemon.work], check=True)


def test_a_daemon_that_can_write_nothing_starts_later_what_has_died(
    make_daemon: Callable[..., Daemon], valkey: Valkey, tmp_path: Path
) -> None:
    """A worker is killed while no file of the supervisor's may grow: the others go on, and so does it in the end."""
    daemon = make_daemon(servers=2, redis=valkey.url, server_flags=("--speed", "2", "--max-running-requests", "4"))
    source = write_prompts(tmp_path / "prompts.jsonl", 200)
    run = daemon.enqueue(source)
    daemon.start().wait_for_processes(workers=2, servers=2)
    wait_until(
        lambda: all(child["state"] == "ready" for child in daemon.status()["servers"]), "all are ready", every=0.3
    )
    servers = {number: process.pid for number, process in daemon.servers().items()}
    resource.prlimit(daemon.supervisor.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    daemon.kill(daemon.workers()[0])

    said = lambda: "make room" in daemon.status()["servers"][0]["worker_error"]  # noqa: E731
    wait_until(said, "status says why", every=0.3, failed=daemon.logs)
    resource.prlimit(daemon.supervisor.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(lambda: daemon.status()["runs"][0]["state"] == "finished", "the run ends", every=0.5)
    assert {number: process.pid for number, process in daemon.servers().items()} == servers
    daemon.stop()
    assert_whole(FolderParts(daemon.store), source, run)
    assert not daemon.survivors()


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in itertools.repeat(4096):
            try:
                file.write(bytes(size))
            except OSError:
                return


def test_folders_that_somebody_removed(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    """The spool with rows of an earlier worker and of this one, then the prompt set: fetched and made again."""
    slow = {number: "HANG" for number in range(32) if number % 8 == 7}
    source = write_prompts(tmp_path / "prompts.jsonl", 32, containing=slow)
    run = lone.register(source)
    server.mode("hang", containing="HANG")
    with lone.supplied():
        first = lone.start()
        wait_until(lambda: len(lone.kept(run)) == 28, "all but the last row of each batch", failed=lone.logs)
        end(first)
        second = lone.start()
        wait_until(lambda: server.stats()["in_flight"] == 4, "the last ones are asked for", failed=lone.logs)
        shutil.rmtree(lone.work / "spool")
        shutil.rmtree(lone.work / "sets")
        server.mode("ok")
        lone.wait_done(run)
        end(second)
    assert_whole(FolderParts(lone.store_folder), source, run.id)
    assert sets.present(lone.work, run.set.fingerprint)


def end(worker: LoneWorker) -> None:
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log.read_text()


def test_rows_survive_a_stop_of_the_machine_that_took_its_time(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    """An orderly end gives the batches back with their rows: the next worker asks only for what is missing."""
    slow = {number: "HANG" for number in range(32) if number % 8 == 7}
    source = write_prompts(tmp_path / "prompts.jsonl", 32, containing=slow)
    run = lone.register(source)
    server.mode("hang", containing="HANG")
    with lone.supplied():
        first = lone.start()
        wait_until(lambda: len(lone.kept(run)) == 28, "all but the last row of each batch", failed=lone.logs)
        end(first)
        assert not lone.ledger.leased(run.id)
    kept = lone.kept(run)
    moment = max(event["time"] for event in events(server))
    server.mode("ok")
    lone.finish(run)
    assert_whole(FolderParts(lone.store_folder), source, run.id)
    assert started_since(server.request_log, source, moment).isdisjoint(kept)


def events(server: FakeServer) -> list[dict[str, float]]:
    return [json.loads(line) for line in server.request_log.read_text().splitlines()]
