"""RQ is transport: it may deliver late, twice or never, and strangers may put anything into it.

The ledger decides what is done and who works on what, so none of this loses a row, makes one twice, or ends a worker.
"""

import json
import pickle
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.lone import Lone, LoneWorker
from harness.processes import wait_until
from harness.reader import FolderParts, assert_whole, times_finished, write_prompts
from harness.services import FakeServer, Ports, Valkey
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer, PickleSerializer

from gend import sets
from gend.ledger import JOB_FUNCTION, Ledger, queue_name
from gend.records import Run
from gend.rq_worker import RQWorker

ROWS = 40


@pytest.fixture
def server(folder: Path, marker: str, ports: Ports) -> Iterator[FakeServer]:
    with FakeServer(folder / "fake", marker, ports.block(1), "--speed", "50") as fake:
        yield fake


@pytest.fixture
def lone(folder: Path, server: FakeServer, valkey: Valkey) -> Iterator[Lone]:
    box = Lone(folder / "box", server.url, valkey.url)
    yield box
    box.end()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", ROWS)


def queue_of(lone: Lone, run: str) -> Queue:
    return Queue(queue_name(run), connection=lone.ledger.raw, serializer=JSONSerializer)


def hint(lone: Lone, run: str, number: Any) -> Job:
    return queue_of(lone, run).enqueue(JOB_FUNCTION, run, number, job_id=f"{run}-{number}-{time.time_ns():x}")


def end(worker: LoneWorker) -> str:
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log.read_text()
    return worker.log.read_text()


def assert_made_once(lone: Lone, server: FakeServer, source: Path, run: Run) -> None:
    assert_whole(FolderParts(lone.store_folder), source, run.id)
    assert set(times_finished(server.request_log, source).values()) == {1}


def test_each_job_delivered_twice_and_some_never(lone: Lone, server: FakeServer, source: Path) -> None:
    """Before the worker starts the queue holds every batch but two twice: the loader hints at the other two again."""
    run = lone.register(source)
    lone.ledger.forget_queue(run.id)
    for number in [2, 3, 4, 4, 3, 2]:
        hint(lone, run.id, number)
    lone.finish(run)
    assert_made_once(lone, server, source, run)


def test_two_loaders_at_once(lone: Lone, server: FakeServer, source: Path) -> None:
    """An old one that is slow to die beside a new one: both hint at what is missing, and nothing is doubled."""
    run = lone.register(source)
    with lone.supplied(), lone.supplied():
        lone.finish(run)
    assert_made_once(lone, server, source, run)


def test_a_flushed_queue_is_filled_again(lone: Lone, server: FakeServer, source: Path) -> None:
    run = lone.register(source)
    lone.ledger.raw.delete(queue_of(lone, run.id).key)
    lone.finish(run)
    assert_made_once(lone, server, source, run)


def test_stale_jobs_cost_nothing(lone: Lone, server: FakeServer, source: Path) -> None:
    """500 late deliveries of batches that are done, of a finished run, of batches that do not exist."""
    run = lone.register(source)
    lone.finish(run)
    jobs = [hint(lone, run.id, number % run.batches) for number in range(60)]
    for number in [10**9, -1, run.batches]:
        hint(lone, run.id, number)
    for _ in range(37):
        hint(lone, "run-that-was-removed", 0)
    queue = queue_of(lone, run.id)
    lone.ledger.raw.rpush(queue.key, *[job.id for job in jobs for _ in range(8)])  # each of them again and again
    assert queue.count > 500
    parts = {path: path.stat() for path in lone.store_folder.rglob("*.jsonl")}
    worker = lone.start()
    wait_until(lambda: queue_of(lone, run.id).count == 0, "the queue is empty", failed=lone.logs)
    end(worker)
    assert {path: path.stat() for path in lone.store_folder.rglob("*.jsonl")} == parts
    assert_made_once(lone, server, source, run)


def test_stale_jobs_do_not_keep_new_ones_out(lone: Lone, server: FakeServer, source: Path) -> None:
    """A queue full of hints at what is done does not count as a stock of work."""
    run = lone.register(source)
    lone.ledger.forget_queue(run.id)
    lone.ledger.add_done(run.id, {0, 1})
    for _ in range(250):
        hint(lone, run.id, 0)
        hint(lone, run.id, 1)
    assert lone.ledger.stock(run, 64) == 3


def test_no_more_is_taken_than_is_wanted(folder: Path, marker: str, ports: Ports, valkey: Valkey) -> None:
    """Also where a claim takes long to settle: whoever holds everything leaves the others single prompts to ask for."""

    def slow_disk() -> None:
        inner = sets.read_prompts

        def read_prompts(*args: Any) -> Any:
            time.sleep(0.1)
            return inner(*args)

        sets.read_prompts = read_prompts

    with FakeServer(folder / "slow", marker, ports.block(1), "--speed", "0.5") as server:
        lone = Lone(folder / "box", server.url, valkey.url, config={"work": {"in_flight": 12, "batch_size": 8}})
        try:
            lone.register(write_prompts(folder / "many.jsonl", 400))
            worker = lone.start(slow_disk)

            def view() -> dict[str, Any]:
                return next((each for each in lone.ledger.workers() if each["pid"] == worker.pid), {})

            wait_until(lambda: view().get("in_flight") == 12, "the server is full", failed=lone.logs)
            time.sleep(1.5)  # a view is a second old
            assert 2 <= view()["open_batches"] <= 5, view()
        finally:
            lone.end()


def test_a_run_that_is_stuck_keeps_no_other_out(lone: Lone, source: Path, tmp_path: Path) -> None:
    """Its prompts are damaged on this box: it waits until they are removed and fetched again."""
    stuck = lone.register(write_prompts(tmp_path / "stuck.jsonl", ROWS, containing={0: "stuck"}), "stuck")
    prompts = sets.set_folder(lone.work, stuck.set.fingerprint) / "prompts.jsonl"
    prompts.write_bytes(b"#" * prompts.stat().st_size)
    other = lone.register(source, "other")
    with lone.supplied():
        lone.start()
        lone.wait_done(other)
    assert lone.ledger.done(stuck.id) == set()


def test_batches_whose_worker_is_gone_come_first(lone: Lone, source: Path) -> None:
    run = lone.register(source)
    lone.ledger.forget_queue(run.id)
    assert lone.ledger.claim(run.id, 3, "dead.0", 15.0) == "claimed"
    assert lone.ledger.claim(run.id, 1, "lives.0", 15.0) == "claimed"
    assert lone.ledger.stock(run, 64) == 3
    assert lone.ledger.release_owner("dead.") == 1
    assert lone.ledger.stock(run, 64) == 1
    assert [job.args[1] for job in queue_of(lone, run.id).jobs] == [3, 0, 2, 4]
    assert lone.ledger.stock(run, 64) == 0, "one hint in front is enough"


def test_a_hint_deep_in_the_queue_is_no_hint_for_a_batch_whose_worker_is_gone(lone: Lone, tmp_path: Path) -> None:
    run = lone.register(write_prompts(tmp_path / "many.jsonl", 40 * 8))
    lone.ledger.claim(run.id, 39, "dead.0", 15.0)
    lone.ledger.release_owner("dead.")
    assert lone.ledger.stock(run, 64) == 1
    assert [job.args[1] for job in queue_of(lone, run.id).jobs] == [39, *range(40)]


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return eval, (f"open({str(self.mark)!r}, 'w').close()",)


def test_jobs_of_strangers(lone: Lone, server: FakeServer, source: Path, tmp_path: Path) -> None:
    """Pickles, garbage, callbacks, other functions: nothing is unpickled, imported or called, and the run goes on."""
    run = lone.register(source)
    mark, queue = tmp_path / "unpickled", queue_of(lone, run.id)
    assert pickle.loads(pickle.dumps(Trap(mark))) is None and mark.exists(), "the trap works"
    mark.unlink()
    pickled = Queue(queue.name, connection=lone.ledger.raw, serializer=PickleSerializer)
    pickled.enqueue("os.getcwd", Trap(mark))
    raw = lone.ledger.raw
    wrong: dict[str, dict[str, Any]] = {
        "raw-pickle": {"data": zlib.compress(pickle.dumps(Trap(mark)))},
        "no-data": {"origin": queue.name},
        "not-zlib": {"data": b"\x00\xff"},
        "not-a-call": {"data": zlib.compress(b'{"a": 1}')},
        "other-args": {"data": zlib.compress(json.dumps([JOB_FUNCTION, None, [run.id, True], {}]).encode())},
        "bad-date": {"data": zlib.compress(b'["f", null, ["x", 1], {}]'), "created_at": "yesterday", "timeout": "soon"},
        "bad-status": {"data": zlib.compress(b'["f", null, ["x", 1], {}]'), "status": "pondering"},
        "callback": {
            "data": zlib.compress(json.dumps([JOB_FUNCTION, None, [run.id, 0], {}]).encode()),
            "success_callback_name": "os.abort",
            "failure_callback_name": "os.abort",
            "webhooks": '[{"url": "http://127.0.0.1:1/", "job_status": "finished"}]',
        },
    }
    for name, fields in wrong.items():
        raw.hset(f"rq:job:{name}", mapping={"origin": queue.name, **fields})
        raw.lpush(queue.key, name)
    raw.lpush(queue.key, "nobody-knows-me", "", "\udcff".encode("utf-8", "surrogateescape"), f"{run.id}-x-y")
    with lone.supplied():
        worker = lone.start()
        lone.wait_done(run)
        wait_until(lambda: queue.count == 0, "the queue is empty", failed=lone.logs)
        log = end(worker)
    assert not mark.exists()
    assert "dropped" in log and "Traceback" not in log
    assert_made_once(lone, server, source, run)


def test_what_is_left_of_dead_workers_is_cleared(lone: Lone, server: FakeServer, source: Path) -> None:
    """Their jobs, half delivered and with callbacks, are cleared by RQ's own upkeep without a call to anything."""
    run = lone.register(source)
    dead, queue = lone.start(), queue_of(lone, run.id)
    server.mode("hang_all")
    wait_until(lambda: queue.started_job_registry.count, "jobs are started", failed=lone.logs)
    dead.end()
    for job in list(queue.started_job_registry.get_job_ids(cleanup=False)):
        lone.ledger.raw.hset(f"rq:job:{job}", "failure_callback_name", "os.abort")
    for member in lone.ledger.raw.zrange(queue.started_job_registry.key, 0, -1):
        lone.ledger.raw.zadd(queue.started_job_registry.key, {member: 1})
    lone.ledger.raw.lpush(queue.intermediate_queue_key, "half-delivered")
    tidy = RQWorker(lone.ledger.raw, "tidy")
    tidy.open()
    tidy.take([queue.name])
    tidy.last_cleaned_at = None
    tidy.beat()
    assert queue.started_job_registry.get_job_ids(cleanup=False) in ([], [tidy.executions.popitem()[1].job_id])


def test_no_job_has_a_time_limit_and_none_holds_a_prompt(lone: Lone, source: Path) -> None:
    """RQ's own time limit is an Exception like others, and a job's payload stays in Redis for anybody to read."""
    run = lone.register(source)
    jobs = queue_of(lone, run.id).jobs
    assert [job.args for job in jobs] == [[run.id, number] for number in range(run.batches)]
    assert {job.timeout for job in jobs} == {-1}
    assert not [key for key in lone.ledger.raw.scan_iter("rq:job:*") if b"boat" in lone.ledger.raw.hget(key, "data")]


def test_a_lease_keeps_others_out_until_it_ends(valkey: Valkey) -> None:
    ledger = Ledger(valkey.url)
    assert ledger.claim("run", 0, "a.0", 1.0) == "claimed"
    assert ledger.claim("run", 0, "b.0", 1.0) == "leased"
    ledger.give_back("run", 0, "b.0")
    assert ledger.claim("run", 0, "b.0", 1.0) == "leased", "only what is ours can be given back"
    wait_until(lambda: ledger.claim("run", 0, "b.0", 60.0) == "claimed", "the lease ends")
    assert ledger.renew({("run", 0): "a.0"}, 60.0) == [("run", 0)]
    assert ledger.renew({("run", 0): "b.0"}, 60.0) == []
    assert ledger.mark_done("run", 0, {"rows": 8}) and not ledger.mark_done("run", 0, {"rows": 8})
    assert ledger.claim("run", 0, "c.0", 1.0) == "done"
    assert ledger.renew({("run", 0): "b.0"}, 60.0) == [("run", 0)]
