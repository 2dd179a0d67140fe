"""Everything together, and everything gone in the middle: a second `gend up` finishes what the first one began."""

import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.daemon import Daemon
from harness.processes import end_all, wait_until
from harness.reader import FolderParts, Parts, S3Parts, assert_whole, times_finished, write_prompts
from harness.services import BUCKET, SeaweedFS

PROMPTS, SLOTS = 160, 4
HALT, HALTED = "(stop here)", (100, 110, 120)  # fewer than a server's slots, so that the others flow
FLAGS = ("--speed", "50", "--max-running-requests", str(SLOTS))


def prompts(daemon: Daemon) -> Path:
    return write_prompts(daemon.folder / "prompts.jsonl", PROMPTS, containing=dict.fromkeys(HALTED, HALT))


def parts_of(store: Parts, run: str) -> dict[str, bytes]:
    whole = [name for name in store.names() if f"runs/{run}/parts/" in name and name.endswith(".jsonl")]
    return {name: store.read(name) for name in whole}


def run_into_the_middle(daemon: Daemon, store: Parts, run: str) -> dict[str, bytes]:
    """Start the daemon and wait until some parts are in the store; gives them. Some prompts get no reply."""
    daemon.mode("hang", containing=HALT)
    daemon.start()
    wait_until(lambda: len(parts_of(store, run)) >= 3, "three parts are in the store", failed=daemon.logs)
    return parts_of(store, run)


def kill_everything(daemon: Daemon) -> None:
    """The power goes: supervisor, servers, workers, loader and Valkey at once."""
    for process in (everything := daemon.all_processes()):
        process.send_signal(signal.SIGKILL)
    assert len(everything) >= 7, everything
    daemon.wait()
    end_all(daemon.all_processes)
    daemon.mode("ok")


def assert_little_was_made_twice(daemon: Daemon, source: Path) -> None:
    """Rows that were finished before the kill are not made again, but for those whose reply was on its way."""
    times = Counter(times_finished(daemon.request_log, source).values())
    # A server may be killed after a reply was out and before it wrote that down.
    assert PROMPTS - 2 <= sum(times.values()) <= PROMPTS
    assert set(times) <= {1, 2}
    assert times[2] <= 2 * 2 * (SLOTS + 2), "more than were in flight at two servers"


def test_everything_is_killed_in_the_middle_and_goes_on(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(servers=2, server_flags=FLAGS)
    source, store = prompts(daemon), FolderParts(daemon.store)
    run = daemon.enqueue(source)
    before = run_into_the_middle(daemon, store, run)
    kill_everything(daemon)

    daemon.run_until_idle()
    assert_whole(store, source, run)
    assert daemon.cli("verify", run).returncode == 0
    assert daemon.survivors() == []
    after = parts_of(store, run)
    assert {name: after[name] for name in before} == before, "parts stay as they are"
    assert_little_was_made_twice(daemon, source)
    [shown] = daemon.status()["runs"]
    assert (shown["state"], shown["rows_done"], shown["verdicts"]) == ("finished", PROMPTS, {"ok": PROMPTS})


def test_the_box_is_lost_in_the_middle_and_another_goes_on_from_s3(
    make_daemon: Callable[..., Daemon], seaweed: SeaweedFS, prefix: str
) -> None:
    """Nothing outlives a rented box but the store; the store itself is killed too, and comes back."""

    def box(name: str) -> Daemon:
        return make_daemon(
            name=name,
            servers=2,
            store=f"s3://{BUCKET}/{prefix}",
            endpoint=seaweed.endpoint,
            config={"store": {"region": "us-east-1"}},
            environment=seaweed.variables(),
            server_flags=FLAGS,
        )

    first, store = box("first"), S3Parts(seaweed.client(), BUCKET, prefix)
    source = prompts(first)
    run = first.enqueue(source)
    before = run_into_the_middle(first, store, run)
    kill_everything(first)
    seaweed.kill()
    shutil.rmtree(first.work)
    seaweed.start()

    second = box("second")
    second.run_until_idle()
    assert_whole(store, source, run)
    assert second.cli("verify", run).returncode == 0
    assert second.survivors() == []
    after = parts_of(store, run)
    assert {name: after[name] for name in before} == before, "parts stay as they are"
    made = times_finished(second.request_log, source)
    assert len(made) <= PROMPTS - sum(body.count(b"\n") for body in before.values()), "only what was missing"
    again = second.cli("enqueue", source, "--name", "test").stdout
    assert "nothing was added" in again


@pytest.mark.parametrize("in_flight", [0, 1])
def test_few_prompts_and_few_slots_are_no_dead_end(make_daemon: Callable[..., Daemon], in_flight: int) -> None:
    """More servers than slots are needed, and prompts on offer: each offer finds somebody with room for it."""
    daemon = make_daemon(servers=2, server_flags=FLAGS, config={"work": {"in_flight": in_flight, "batch_size": 7}})
    source = write_prompts(daemon.folder / "few.jsonl", 7)
    run = daemon.enqueue(source)
    daemon.run_until_idle(seconds=60)
    assert_whole(FolderParts(daemon.store), source, run)
