"""Redis and the store away, emptied, full, slow or strange: gend waits, keeps what it has, says so, and goes on.

A worker and a loader on real servers behind proxies that misbehave. No outage uses up a row's attempts, makes a kept
row a second time, or marks a batch done that has no part.
"""

import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import zstandard
from harness.daemon import Daemon
from harness.lone import Lone, LoneWorker, Wrapper, done_without_part, started_since, wrap
from harness.processes import wait_until
from harness.proxy import S3Fault, S3Proxy, TcpProxy, expired_token, internal_error, slow_down
from harness.reader import FolderParts, Parts, S3Parts, assert_whole, times_finished, write_prompts
from harness.services import BUCKET, Authority, FakeServer, Ports, SeaweedFS, Valkey
from redis.backoff import NoBackoff
from redis.retry import Retry

from gend import loader
from gend import valkey as own_valkey
from gend.ledger import Ledger
from gend.records import Run, counts_of, part_key
from gend.status import read_status
from gend.store import S3Store

ROWS = 48


@pytest.fixture
def server(folder: Path, marker: str, ports: Ports) -> Iterator[FakeServer]:
    """A fake server that makes some 20 rows a second."""
    with FakeServer(folder / "fake", marker, ports.block(1), "--speed", "4", "--max-running-requests", "6") as fake:
        yield fake


@pytest.fixture
def make_lone(folder: Path, server: FakeServer) -> Iterator[Callable[..., Lone]]:
    made: list[Lone] = []

    def make(redis: str, name: str = "box", **options: Any) -> Lone:
        made.append(Lone(folder / name, server.url, redis, **options))
        return made[-1]

    yield make
    for box in made:
        box.end()


@contextlib.contextmanager
def working(lone: Lone, run: Run, *wrappers: Wrapper) -> Iterator[LoneWorker]:
    """A worker and a loader that have made some rows; after the block they finish the run and end in good order."""
    with lone.supplied():
        worker = lone.start(*wrappers)
        wait_until(lambda: lone.rows_made(worker) > 5, "some rows are made", failed=lone.logs)
        yield worker
        lone.wait_done(run)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log.read_text()


def impatient() -> None:
    """A wrapper: silence of Redis is noticed after 0.3 s instead of 5."""
    Ledger.__init__.__defaults__ = (0.3,)


def away(lone: Lone) -> set[str]:
    """What `gend status` says to be away."""
    return {outage.what for outage in read_status(lone.ledger, lone.settings).outages}


def assert_nothing_came_of_it(store: Parts, server: FakeServer, source: Path, run: Run) -> None:
    """Every row is there, of the first attempt, and no prompt was answered twice."""
    seen = assert_whole(store, source, run.id)
    assert {row["attempts"] for row in seen.rows.values()} == {1}
    assert set(times_finished(server.request_log, source).values()) == {1}


# ---- Redis


@pytest.fixture
def redis_server(folder: Path, marker: str, ports: Ports) -> Iterator[Valkey]:
    with Valkey(folder / "redis", marker, port=ports.block(1)) as running:
        yield running


@pytest.fixture
def redis_proxy(redis_server: Valkey, ports: Ports) -> Iterator[TcpProxy]:
    with TcpProxy(("127.0.0.1", redis_server.port), ports.block(1)) as proxy:
        yield proxy


@pytest.mark.parametrize("how", ["refuse", "blackhole", "cut"])
def test_redis_away_in_the_middle_of_batches(
    how: str,
    make_lone: Callable[..., Lone],
    server: FakeServer,
    redis_server: Valkey,
    redis_proxy: TcpProxy,
    tmp_path: Path,
) -> None:
    lone = make_lone(redis_server.url_at(redis_proxy.port))
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = lone.register(source)
    behind = Ledger(redis_server.url)
    with working(lone, run, impatient) as worker:
        if how == "cut":
            for towards in ("up", "down") * 3:
                redis_proxy.set("cut", after=200, towards=towards)
                wait_until(lambda: redis_proxy.after == 0, "a connection was cut")
        else:
            redis_proxy.set(how)
            wait_until(lambda: "redis is away" in worker.log.read_text(), "the worker says so")
            wait_until(lambda: not behind.leased(run.id), "all leases have ended")
            parts = FolderParts(lone.store_folder)
            assert not done_without_part(behind, parts, run)
        redis_proxy.set("pass")
    assert_nothing_came_of_it(FolderParts(lone.store_folder), server, source, run)
    assert lone.ledger.progress()[0].counts["rows"] == ROWS


def test_a_worker_starts_while_redis_is_away(
    make_lone: Callable[..., Lone],
    server: FakeServer,
    redis_server: Valkey,
    redis_proxy: TcpProxy,
    tmp_path: Path,
) -> None:
    """It waits, rather than end and be started later and later."""
    lone = make_lone(redis_server.url_at(redis_proxy.port))
    source = write_prompts(tmp_path / "prompts.jsonl", 8)
    run = lone.register(source)
    redis_proxy.set("refuse")
    with lone.supplied():
        worker = lone.start(impatient)
        said = lambda: worker.log.exists() and "redis is away" in worker.log.read_text()  # noqa: E731
        wait_until(said, "the worker says so", failed=lone.logs)
        redis_proxy.set("pass")
        lone.wait_done(run)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log.read_text()


def refuse_writes(redis_server: Valkey) -> Callable[[], None]:
    redis_server.client().replicaof("127.0.0.1", "1")  # READONLY
    return lambda: redis_server.client().replicaof("NO", "ONE") and None


def no_memory(redis_server: Valkey) -> Callable[[], None]:
    redis_server.client().config_set("maxmemory", "1")  # OOM
    return lambda: redis_server.client().config_set("maxmemory", "0") and None


def no_disk(redis_server: Valkey) -> Callable[[], None]:
    """MISCONF: it could not save, and refuses writes until it can."""
    redis_server.client().config_set("stop-writes-on-bgsave-error", "yes")
    redis_server.client().config_set("save", "1 1")
    (redis_server.folder / "dump.rdb").mkdir()
    wait_until(lambda: redis_server.client().info("persistence")["rdb_last_bgsave_status"] == "err", "a save fails")

    def mend() -> None:
        (redis_server.folder / "dump.rdb").rmdir()
        redis_server.client().config_set("save", "")
        redis_server.client().config_set("stop-writes-on-bgsave-error", "no")

    return mend


@pytest.mark.parametrize("how", [refuse_writes, no_memory, no_disk])
def test_redis_refuses_writes(how: Callable[[Valkey], Callable[[], None]], make_lone: Callable[..., Lone],
                              server: FakeServer, redis_server: Valkey, tmp_path: Path) -> None:  # fmt: skip
    lone = make_lone(redis_server.url)
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = lone.register(source)
    with working(lone, run) as worker:
        mend = how(redis_server)
        said = lambda: worker.log.exists() and "redis is away" in worker.log.read_text()  # noqa: E731
        wait_until(said, "the worker says so", failed=lone.logs)
        assert away(lone) == {"redis"}
        mend()
    assert_nothing_came_of_it(FolderParts(lone.store_folder), server, source, run)


def emptied(redis_server: Valkey, old: Path) -> None:
    redis_server.client().flushall()


def restarted_empty(redis_server: Valkey, old: Path) -> None:
    redis_server.kill()
    shutil.rmtree(redis_server.folder / "appendonlydir")
    redis_server.start()


def restarted_with_old_data(redis_server: Valkey, old: Path) -> None:
    """With what it held before the run was registered."""
    redis_server.kill()
    shutil.rmtree(redis_server.folder / "appendonlydir")
    shutil.copytree(old, redis_server.folder / "appendonlydir")
    redis_server.start()


def restarted_slowly(redis_server: Valkey, old: Path) -> None:
    """It answers LOADING for a while: there is much to read, and each key takes its time."""
    with redis_server.client().pipeline() as pipe:
        for number in range(6000):
            pipe.set(f"ballast:{number}", number)
        pipe.execute()
    redis_server.kill()
    redis_server.settings["key-load-delay"] = "500"  # microseconds; it looks up every 1,024 keys
    redis_server.start(wait=False)
    wait_until(lambda: is_loading(redis_server), "it says LOADING")
    redis_server.wait()


def is_loading(redis_server: Valkey) -> bool:
    with contextlib.closing(redis_server.client(retry=Retry(NoBackoff(), 0))) as client:
        try:
            client.ping()
        except redis.BusyLoadingError:
            return True
        except redis.ConnectionError:
            return False
    raise AssertionError("it was loaded before anybody could ask")


@pytest.mark.parametrize("how", [emptied, restarted_empty, restarted_with_old_data, restarted_slowly])
def test_redis_forgets(how: Callable[[Valkey, Path], None], make_lone: Callable[..., Lone], server: FakeServer,
                       redis_server: Valkey, tmp_path: Path) -> None:  # fmt: skip
    shutil.copytree(redis_server.folder / "appendonlydir", tmp_path / "old")
    lone = make_lone(redis_server.url)
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = lone.register(source)
    with working(lone, run):
        wait_until(lambda: lone.ledger.done(run.id), "a batch is done", failed=lone.logs)
        how(redis_server, tmp_path / "old")
    assert_nothing_came_of_it(FolderParts(lone.store_folder), server, source, run)
    wait_counted(lone, run)


def test_somebody_deletes_from_redis_what_is_not_his(
    make_lone: Callable[..., Lone], server: FakeServer, valkey: Valkey, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All keys but the one that says that the ledger agrees with the store, as an eviction might do it."""
    monkeypatch.setattr(loader, "AGREE_SECONDS", 1.0)
    lone = make_lone(valkey.url)
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = lone.register(source)
    with working(lone, run):
        wait_until(lambda: lone.ledger.done(run.id), "a batch is done", failed=lone.logs)
        keys = set(lone.ledger.redis.scan_iter("*")) - {"gend:epoch"}
        lone.ledger.redis.delete(*keys)
    assert_nothing_came_of_it(FolderParts(lone.store_folder), server, source, run)
    wait_counted(lone, run)


def wait_counted(lone: Lone, run: Run) -> None:
    """The counts come back with the ledger: the loader reads the parts that a listing has found."""
    with lone.supplied():
        counted = lambda: [progress.counts.get("verdict:ok") for progress in lone.ledger.progress()] == [ROWS]  # noqa: E731
        wait_until(counted, "all rows are counted", failed=lone.logs)


def test_a_redis_that_throws_keys_away_is_refused(
    folder: Path, marker: str, make_daemon: Callable[..., Daemon]
) -> None:
    settings = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}
    with Valkey(folder / "redis", marker, settings=settings) as evicting:
        refused = make_daemon(servers=1, redis=evicting.url).cli("up", code=2).stderr
    assert "maxmemory-policy noeviction" in refused


# ---- gend's own Valkey


def files_of(home: Path, pattern: str) -> Path:
    (found,) = (home / "valkey" / "appendonlydir").glob(pattern)
    return found


def zero(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(200))


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "zeros at the end": lambda home: zero(files_of(home, "*.incr.aof")),
    "an empty manifest": lambda home: files_of(home, "*.manifest").write_bytes(b""),
    "a file missing": lambda home: files_of(home, "*.incr.aof").unlink(),
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_an_own_valkey_whose_files_a_power_cut_spoiled(how: str, folder: Path) -> None:
    """It starts empty, and the loader brings it to agree with the store; a torn end alone costs nothing else."""
    with own_valkey.hold(folder) as url:
        Ledger(url).mark_rebuilt()
        os.kill(own_valkey.pid(folder) or 0, signal.SIGKILL)
    UNREADABLE[how](folder)
    with own_valkey.hold(folder) as url:
        assert not Ledger(url).rebuilt()
        assert len(list((folder / "valkey").glob("appendonlydir.unreadable-*"))) == 1


def test_an_own_valkey_that_says_nothing_is_not_doubled(folder: Path) -> None:
    with own_valkey.hold(folder) as url, ThreadPoolExecutor() as pool:
        number = own_valkey.pid(folder) or 0
        os.kill(number, signal.SIGSTOP)
        reviving = pool.submit(own_valkey.revive, folder)
        with pytest.raises(TimeoutError):
            reviving.result(3.0)  # it asks for two seconds before it takes an answer for none
        os.kill(number, signal.SIGCONT)
        reviving.result(30.0)
        assert own_valkey.pid(folder) == number
        Ledger(url).mark_rebuilt()


# ---- the store


@pytest.fixture
def s3(seaweed: SeaweedFS, ports: Ports, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    for name, value in {**seaweed.variables(), "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    with S3Proxy(seaweed.endpoint, ports.block(1), keys=seaweed.keys) as proxy:
        yield proxy


@pytest.fixture
def on_s3(make_lone: Callable[..., Lone], valkey: Valkey, seaweed: SeaweedFS, s3: S3Proxy, prefix: str) -> Lone:
    """A box with its store behind the proxy."""
    return make_lone(valkey.url, store=f"s3://{BUCKET}/{prefix}", endpoint=s3.endpoint)


@pytest.fixture
def parts(seaweed: SeaweedFS, prefix: str) -> S3Parts:
    """The parts of that box, read around the proxy."""
    return S3Parts(seaweed.client(), BUCKET, prefix)


FAULTS = {
    "expired credentials": expired_token(),
    "wrong credentials": S3Fault("status", status=403, code="InvalidAccessKeyId"),
    "puts cut": S3Fault("cut_put", {"PutObject"}),
}


def test_the_store_is_away(
    on_s3: Lone, parts: Parts, server: FakeServer, s3: S3Proxy, seaweed: SeaweedFS, tmp_path: Path
) -> None:
    """For one reason after the other, each until status says so; at last the S3 server is killed."""
    source = write_prompts(tmp_path / "prompts.jsonl", 6 * ROWS)
    run = on_s3.register(source)
    server.mode("slow", speed=1.0)  # there must be rows left for all of it
    with working(on_s3, run):
        for why, fault in FAULTS.items():
            s3.set(fault)
            wait_until(lambda: "store" in away(on_s3), f"status says so: {why}", failed=on_s3.logs)
            s3.set()
            wait_until(lambda: not away(on_s3), f"status says that it is back: {why}", failed=on_s3.logs)
        seaweed.kill()
        wait_until(lambda: "store" in away(on_s3), "status says that nothing answers", failed=on_s3.logs)
        seaweed.start()
        server.mode("ok")
    assert_nothing_came_of_it(parts, server, source, run)


def test_answers_of_the_store_are_lost(
    on_s3: Lone, parts: Parts, server: FakeServer, s3: S3Proxy, tmp_path: Path
) -> None:
    """It does what it was asked for, and the answer never comes: the second put finds the first one's part."""
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = on_s3.register(source)
    s3.set(S3Fault("lose_answer", {"PutObject"}, key="/parts/", times=4))
    with working(on_s3, run):
        pass
    assert_nothing_came_of_it(parts, server, source, run)


def test_a_strict_store_over_tls(
    make_lone: Callable[..., Lone],
    parts: Parts,
    prefix: str,
    server: FakeServer,
    valkey: Valkey,
    s3: S3Proxy,
    authority: Authority,
    ports: Ports,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It refuses aws-chunked bodies, does not know If-None-Match, and the connection breaks in the middle of a put."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    with S3Proxy(s3.behind, ports.block(1), tls=authority.context(), keys=s3.keys) as strict:
        broken = S3Fault("cut_put", {"PutObject"}, key="/parts/", times=2)
        strict.set(S3Fault("refuse_aws_chunked"), broken, S3Fault("ignore_if_none_match"))
        lone = make_lone(valkey.url, store=f"s3://{BUCKET}/{prefix}", endpoint=strict.endpoint)
        lone.store.check()
        source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
        run = lone.register(source)
        with working(lone, run):
            pass
        assert (strict.answers["PutObject", 501], strict.answers["PutObject", 0]) == (0, 2)
    assert_nothing_came_of_it(parts, server, source, run)


def test_what_strangers_put_under_the_prefix(make_lone: Callable[..., Lone], server: FakeServer, valkey: Valkey,
                                             tmp_path: Path) -> None:  # fmt: skip
    """In the place of parts: nothing, half a part, another run's part, noise. Beside them: folders, runs, files."""
    lone = make_lone(valkey.url)
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = lone.register(source)
    lone.finish(run)
    store, good = lone.store, [lone.store.get(part_key(run.id, number)) or b"" for number in range(run.batches)]
    wrong = [b"", good[1][:-20], good[1].replace(run.id.encode(), b"another-run"), b"\x00\xff noise\n", good[5]]
    for number, body in enumerate(wrong):
        store.replace(part_key(run.id, number), body)
    for name in ("00000000.jsonl.bak", "99999999.jsonl", "0.jsonl", "notes/00000001.jsonl"):
        store.replace(f"runs/{run.id}/parts/{name}", b"{}\n")
    store.replace("runs/stranger/readme.txt", b"hello")
    store.replace("runs/broken/run.json", b"{")
    store.replace("runs/copied/run.json", store.get(f"runs/{run.id}/run.json") or b"")
    store.replace(f"runs/{run.id}/control.json", b"not json")
    lone.ledger.redis.flushall()
    lone.finish(run)
    assert all(counts_of(store.get(part_key(run.id, n)) or b"", run.batch(n)) for n in range(run.batches))
    assert store.get(part_key(run.id, 5)) == good[5], "what was good is left alone"
    assert list(lone.ledger.runs()) == [run.id]


# ---- two faults at once


def emptied_too(lone: Lone, run: Run, worker: LoneWorker, redis_server: Valkey) -> Callable[[], object]:
    redis_server.client().flushall()
    return lambda: None


def killed_too(lone: Lone, run: Run, worker: LoneWorker, redis_server: Valkey) -> Callable[[], object]:
    redis_server.kill()
    return redis_server.start


def disk_full_too(lone: Lone, run: Run, worker: LoneWorker, redis_server: Valkey) -> Callable[[], object]:
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    return lambda: resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, unlimited)


def spool_removed_too(lone: Lone, run: Run, worker: LoneWorker, redis_server: Valkey) -> Callable[[], object]:
    shutil.rmtree(lone.work / "spool")
    return lambda: None


def another_owner_too(lone: Lone, run: Run, worker: LoneWorker, redis_server: Valkey) -> Callable[[], object]:
    """The worker is stopped with its parts on their way, and another takes its batches over."""
    worker.signal(signal.SIGSTOP)
    wait_until(lambda: not lone.ledger.leased(run.id), "its leases end")
    lone.start(number=1)
    wait_until(lambda: lone.ledger.leased(run.id), "the other one has batches", failed=lone.logs)
    return lambda: worker.signal(signal.SIGCONT)


@pytest.mark.parametrize("other", [emptied_too, killed_too, disk_full_too, spool_removed_too, another_owner_too])
def test_the_store_is_away_and_that_is_not_all(
    other: Callable[[Lone, Run, LoneWorker, Valkey], Callable[[], object]],
    make_lone: Callable[..., Lone],
    parts: Parts,
    prefix: str,
    server: FakeServer,
    redis_server: Valkey,
    s3: S3Proxy,
    tmp_path: Path,
) -> None:
    """While parts wait for a store that fails in the middle of puts, the next thing goes wrong."""
    lone = make_lone(redis_server.url, store=f"s3://{BUCKET}/{prefix}", endpoint=s3.endpoint)
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = lone.register(source)
    s3.set(S3Fault("cut_put", {"PutObject"}), internal_error())
    with working(lone, run) as worker:
        wait_until(lambda: "store is away" in worker.log.read_text(), "parts wait for the store")
        kept, now = lone.kept(run), time.time()
        mend = other(lone, run, worker, redis_server)
        time.sleep(1.5)  # long enough for leases to end
        mend()
        s3.set()
    seen = assert_whole(parts, source, run.id)
    assert {row["attempts"] for row in seen.rows.values()} == {1}
    assert kept and not kept & started_since(server.request_log, source, now)
    wait_counted(lone, run)


@pytest.mark.parametrize("store", ["knows If-None-Match", "ignores If-None-Match"])
def test_a_worker_stopped_in_the_middle_of_a_put(
    store: str, on_s3: Lone, parts: Parts, server: FakeServer, s3: S3Proxy, tmp_path: Path
) -> None:
    """It goes on when others have finished the run long since: a part that is there stays, or is replaced whole."""
    if store == "ignores If-None-Match":
        s3.set(S3Fault("ignore_if_none_match"))
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = on_s3.register(source)
    with on_s3.supplied():
        late = on_s3.start(lambda: wrap(S3Store, "_put", before=stop_here, nth=2))
        wait_until(lambda: stopped(late), "it is in the middle of a put", failed=on_s3.logs)
    on_s3.finish(run)
    before = s3.answers["PutObject", 200]
    late.signal(signal.SIGCONT)
    if store == "ignores If-None-Match":  # an end does not wait for a put
        wait_until(lambda: s3.answers["PutObject", 200] > before, "the late put", failed=on_s3.logs)
    late.signal(signal.SIGTERM)
    assert late.wait() == 0, late.log.read_text()
    replaced = s3.answers["PutObject", 200] - before
    assert (replaced > 0) == (store == "ignores If-None-Match")
    assert_whole(parts, source, run.id)
    wait_counted(on_s3, run)


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(worker: LoneWorker) -> bool:
    return psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize("store", ["knows If-None-Match", "ignores If-None-Match"])
def test_two_boxes_with_one_store(
    store: str, on_s3: Lone, make_lone: Callable[..., Lone], parts: S3Parts, prefix: str, s3: S3Proxy,
    redis_server: Valkey, tmp_path: Path,
) -> None:  # fmt: skip
    """The old box comes back beside the new one, each with a Redis of its own: it is paid twice, and that is all."""
    if store == "ignores If-None-Match":
        s3.set(S3Fault("ignore_if_none_match"))
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    other = make_lone(redis_server.url, "other", store=f"s3://{BUCKET}/{prefix}", endpoint=s3.endpoint)
    run = on_s3.register(source)
    assert other.register(source).id == run.id
    with on_s3.supplied(), other.supplied():
        workers = [box.start() for box in (on_s3, other)]
        for box, worker in zip((on_s3, other), workers, strict=True):
            box.wait_done(run)
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0, worker.log.read_text()
    assert any(count > 1 for key, count in s3.puts.items() if "/parts/" in key), "they did meet"
    assert_whole(parts, source, run.id)
    for box in (on_s3, other):
        wait_counted(box, run)


def test_told_to_stop_while_everything_is_away(
    make_lone: Callable[..., Lone],
    parts: Parts,
    prefix: str,
    server: FakeServer,
    redis_server: Valkey,
    redis_proxy: TcpProxy,
    s3: S3Proxy,
    tmp_path: Path,
) -> None:
    """Twice, with Redis and the store silent: the worker ends by itself, and what it had is there for the next."""
    redis = redis_server.url_at(redis_proxy.port)
    lone = make_lone(redis, store=f"s3://{BUCKET}/{prefix}", endpoint=s3.endpoint)
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = lone.register(source)
    s3.set(S3Fault("blackhole", {"PutObject"}, key="/parts/"))
    with lone.supplied():
        worker = lone.start(impatient)
        wait_until(lambda: any("/parts/" in key for key in s3.puts), "a part is on its way", failed=lone.logs)
        redis_proxy.set("blackhole")
        for _ in range(2):
            worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log.read_text()
        redis_proxy.set("pass")
    s3.set()
    kept, now = lone.kept(run), time.time()
    lone.finish(run)
    assert_whole(parts, source, run.id)
    assert kept and not kept & started_since(server.request_log, source, now)


# ---- as long as the real ones


@pytest.mark.slow
@pytest.mark.parametrize(("what", "minutes"), [("redis", 3), ("store", 5), ("store slow", 2)])
def test_a_long_outage(
    what: str,
    minutes: float,
    make_daemon: Callable[..., Daemon],
    redis_server: Valkey,
    redis_proxy: TcpProxy,
    seaweed: SeaweedFS,
    s3: S3Proxy,
    parts: Parts,
    prefix: str,
    tmp_path: Path,
) -> None:
    """A whole daemon, in the middle of batches: it goes on by itself, and nothing came of it."""
    daemon = make_daemon(
        servers=2,
        redis=redis_server.url_at(redis_proxy.port),
        store=f"s3://{BUCKET}/{prefix}",
        endpoint=s3.endpoint,
        environment=seaweed.variables(),
        server_flags=("--speed", "1", "--max-running-requests", "6"),
    )
    source = write_prompts(tmp_path / "prompts.jsonl", 400)
    run = daemon.enqueue(source)
    daemon.start()
    wait_until(lambda: len(parts.names()) > 6, "some parts are there", failed=daemon.logs)
    if what == "redis":
        redis_proxy.set("refuse")
    else:
        s3.set(slow_down() if what == "store slow" else S3Fault("cut_put"), S3Fault("status", status=500))
    time.sleep(60 * minutes)
    redis_proxy.set("pass")
    s3.set()
    wait_until(lambda: daemon.status()["runs"][0]["state"] == "finished", "the run ends", every=0.5, failed=daemon.logs)
    assert daemon.stop() == 0
    seen = assert_whole(parts, source, run)
    assert {row["attempts"] for row in seen.rows.values()} == {1}
    assert set(times_finished(daemon.request_log, source).values()) == {1}


# ---- the box


def test_the_box_is_lost(
    on_s3: Lone, make_lone: Callable[..., Lone], parts: S3Parts, prefix: str, server: FakeServer, s3: S3Proxy,
    valkey: Valkey, tmp_path: Path,
) -> None:  # fmt: skip
    """An empty disk, an empty Redis, the same settings: the new box finds run, prompts and parts in the store."""
    source = write_prompts(tmp_path / "prompts.jsonl", ROWS)
    run = on_s3.register(source)
    with on_s3.supplied():
        worker = on_s3.start()
        wait_until(lambda: len(on_s3.ledger.done(run.id)) > 1, "batches are done", failed=on_s3.logs)
        worker.end()
    shutil.rmtree(on_s3.work)
    valkey.client().flushall()
    there, now = {name: parts.read(name) for name in parts.names() if "/parts/" in name}, time.time()
    new = make_lone(valkey.url, "new", store=f"s3://{BUCKET}/{prefix}", endpoint=s3.endpoint)
    new.finish(run)
    assert_whole(parts, source, run.id)
    assert {name: parts.read(name) for name in there} == there
    assert len(started_since(server.request_log, source, now)) == ROWS - 8 * len(there)


def cut(piece: Path) -> None:
    piece.write_bytes(piece.read_bytes()[:-20])


def take_from(piece: Path) -> None:
    kept = zstandard.decompress(piece.read_bytes()).splitlines(keepends=True)[:-1]
    piece.write_bytes(zstandard.compress(b"".join(kept)))


def double(piece: Path) -> None:
    shutil.copy(piece, piece.with_name("prompts-00001.jsonl.zst"))


@pytest.mark.parametrize("damage", [cut, take_from, double, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_damaged_prompt_set_is_named_and_mended_by_enqueueing_again(
    damage: Callable[[Path], None], folder: Path, valkey: Valkey, make_lone: Callable[..., Lone],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(loader, "DAMAGED_SECONDS", 0.5)
    source = folder / "prompts.jsonl"
    write_prompts(source, 16)
    first = make_lone(valkey.url, "first")
    run = first.register(source)
    [piece] = first.store_folder.glob("sets/*/prompts-*")
    whole = piece.read_bytes()
    damage(piece)

    second = make_lone(valkey.url, "second", store=f"file://{first.store_folder}")
    with second.supplied():
        worker = second.start()
        wait_until(
            lambda: read_status(second.ledger, second.settings).outages, "the damage is seen", failed=second.logs
        )
        [outage] = read_status(second.ledger, second.settings).outages
        assert outage.what == f"prompt set {run.set.fingerprint[:12]}"
        assert "in the store is damaged" in outage.why and outage.why.endswith("enqueue the file again to mend it")
        assert list((second.work / "sets").glob("[!.]*")) == [], "half a set has got a name"
        assert first.register(source) == run
        assert [path.read_bytes() for path in piece.parent.glob("prompts-*")] == [whole]
        second.wait_done(run)
        wait_until(lambda: not read_status(second.ledger, second.settings).outages, "it is said to be over")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert_whole(FolderParts(first.store_folder), source, run.id)
