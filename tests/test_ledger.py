"""The ledger against a real Valkey: claims, leases, marks, and hints for what is missing."""

import threading
from pathlib import Path

import pytest
from harness.processes import wait_until
from harness.services import Ports, Valkey
from rq import Queue
from rq.serializers import JSONSerializer

from gend.errors import LedgerUnavailable, SettingsError
from gend.ledger import Control, Ledger, Offer, queue_name
from gend.records import PromptSet, Run, Sampling


@pytest.fixture
def ledger(valkey: Valkey) -> Ledger:
    return Ledger(valkey.url)


def add(ledger: Ledger, accepted: int = 20) -> Run:
    """A run of batches of 8, the last of which is short."""
    prompt_set = PromptSet(
        fingerprint="f" * 64, source="x.jsonl", read=accepted, accepted=accepted, rejected=0, bytes=1
    )
    run = Run(
        id="r-0123456789ab", name="r", set=prompt_set, model="m", sampling=Sampling(), batch_size=8, gend_version="0",
        created="2026-01-01",
    )  # fmt: skip
    ledger.add_run(run, Control())
    return run


def test_of_all_who_claim_a_batch_at_once_one_has_it(ledger: Ledger, valkey: Valkey) -> None:
    run, answers, together = add(ledger), [], threading.Barrier(8)

    def claim(number: int) -> None:
        mine = Ledger(valkey.url)
        together.wait()
        answers.append(mine.claim(run.id, 0, f"w{number}", 60))

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["claimed", *["leased"] * 7]
    assert ledger.leased(run.id) == {0}


def test_a_lease_that_has_ended_is_anybodys_and_its_old_holder_learns_that(ledger: Ledger) -> None:
    run = add(ledger)
    assert ledger.claim(run.id, 0, "old", 0.05) == "claimed"
    wait_until(lambda: ledger.claim(run.id, 0, "new", 60) == "claimed", "the lease ends")
    assert ledger.renew({(run.id, 0): "old"}, 60) == [(run.id, 0)]
    ledger.give_back(run.id, 0, "old")
    assert ledger.leased(run.id) == {0}, "nobody gives back what is another's"
    assert ledger.renew({(run.id, 0): "new"}, 60) == []


def test_a_late_holder_keeps_what_nobody_else_wanted(ledger: Ledger) -> None:
    """Also after Redis was emptied: the work goes on, and the lease is written down again."""
    run = add(ledger)
    ledger.claim(run.id, 0, "w", 0.01)
    wait_until(lambda: not ledger.leased(run.id), "the lease ends")
    assert ledger.renew({(run.id, 0): "w"}, 60) == []
    ledger.redis.flushall()
    assert ledger.renew({(run.id, 0): "w"}, 60) == []
    assert ledger.leased(run.id) == {0}


def test_a_batch_is_done_once_and_counted_once(ledger: Ledger) -> None:
    run = add(ledger)
    ledger.claim(run.id, 0, "w", 60)
    assert ledger.mark_done(run.id, 0, {"rows": 8, "verdict:ok": 7})
    assert not ledger.mark_done(run.id, 0, {"rows": 8, "verdict:ok": 7})
    assert ledger.claim(run.id, 0, "v", 60) == "done"
    assert ledger.renew({(run.id, 0): "w"}, 60) == [(run.id, 0)]
    [progress] = ledger.progress()
    assert progress.counts == {"rows": 8, "verdict:ok": 7}
    assert (progress.done_batches, progress.leased_batches, ledger.leased(run.id)) == (1, 0, set())


def test_rows_of_a_short_last_batch_are_counted_right_whenever_it_is_done(ledger: Ledger) -> None:
    run = add(ledger, accepted=20)
    rows = []
    for batch in (2, 0, 1):
        ledger.mark_done(run.id, batch, {})
        [progress] = ledger.progress()
        rows.append((progress.done_rows, progress.finished))
    assert rows == [(4, False), (12, False), (20, True)]


def test_a_dead_workers_batches_are_free_at_once_and_nobody_elses(ledger: Ledger) -> None:
    run = add(ledger)
    for batch, claim in enumerate(("box-worker-1.a.0", "box-worker-1.a.1", "box-worker-10.b.0")):
        ledger.claim(run.id, batch, claim, 60)
    for name in ("box-worker-1.a", "box-worker-10.b"):
        ledger.publish(
            f"gend:worker:{name}", {"name": name}, 3600
        )  # as it would look were the clock set back by an hour
    assert ledger.release_owner("box-worker-1.") == 2
    assert ledger.leased(run.id) == {2}
    assert [view["name"] for view in ledger.workers()] == ["box-worker-10.b"]


def waiting(ledger: Ledger, run: Run) -> list[int]:
    queue = Queue(queue_name(run.id), connection=ledger.raw, serializer=JSONSerializer)
    return [job.args[1] for job in queue.jobs]


def test_hints_are_made_for_what_is_neither_done_leased_nor_waiting(ledger: Ledger) -> None:
    run = add(ledger, accepted=80)
    ledger.mark_done(run.id, 0, {})
    ledger.claim(run.id, 1, "w", 60)
    assert ledger.stock(run, 4) == 4
    assert waiting(ledger, run) == [2, 3, 4, 5]
    assert ledger.stock(run, 4) == 0, "there are enough"
    assert ledger.stock(run, 100) == 4
    assert sorted(waiting(ledger, run)) == list(range(2, 10))
    ledger.forget_queue(run.id)
    assert waiting(ledger, run) == []
    assert not list(ledger.redis.scan_iter("rq:job:*")), "a queue that is forgotten keeps no jobs"


def test_a_listing_of_the_store_corrects_what_is_done(ledger: Ledger) -> None:
    run = add(ledger)
    ledger.claim(run.id, 2, "w", 60)
    ledger.add_done(run.id, {0, 2})
    ledger.forget_done(run.id, {0, 1})
    assert (ledger.done(run.id), ledger.leased(run.id)) == ({2}, set())
    ledger.add_done(run.id, set())
    ledger.forget_done(run.id, set())


def test_the_same_run_twice_is_left_as_it_is(ledger: Ledger) -> None:
    run = add(ledger)
    ledger.set_control(run.id, Control(state="paused", priority="high"))
    assert not ledger.add_run(run, Control())
    assert ledger.controls() == {run.id: Control(state="paused", priority="high")}


def test_a_redis_that_was_emptied_or_started_anew_must_be_brought_to_agree(ledger: Ledger, valkey: Valkey) -> None:
    assert not ledger.rebuilt()
    ledger.mark_rebuilt()
    assert ledger.rebuilt()
    ledger.redis.flushall()
    assert not ledger.rebuilt()
    ledger.mark_rebuilt()
    valkey.kill()
    valkey.start()
    assert not ledger.rebuilt(), "it may have come back with old data"


def test_an_offer_is_taken_once_and_only_while_its_batch_is_its_owners(ledger: Ledger) -> None:
    run = add(ledger)
    ledger.claim(run.id, 0, "a.0", 60)
    offers = [Offer(run.id, 0, index, "a.0") for index in range(3)]
    ledger.offer("box", [*offers, Offer(run.id, 1, 0, "somebody.9")])
    ledger.publish("gend:worker:b", {}, 60)
    assert ledger.take_offers("box", 2, "b") == offers[:2]
    assert set(ledger.take_offers("box", 9, "b")) == set(offers), "what it has, with what it was told before"
    assert ledger.take_offers("other box", 9, "b") == []
    assert ledger.open_offers("box", offers) == set(offers)
    ledger.close_offers("box", offers[:1])
    assert ledger.open_offers("box", offers) == set(offers[1:])
    ledger.unpublish("gend:worker:b")
    assert ledger.open_offers("box", offers) == set(), "who has taken them is gone"


def test_memory_does_not_grow_with_the_text(ledger: Ledger) -> None:
    """914,000 prompts are 7,141 batches of 128: sets of small numbers, whatever the prompts are."""
    run = add(ledger, accepted=8 * 7141)
    ledger.add_done(run.id, set(range(7141)))
    [progress] = ledger.progress()
    assert progress.finished
    assert ledger.redis.memory_usage(f"gend:run:{run.id}:done") < 500_000


@pytest.mark.parametrize("wrong", [":bad@", ""], ids=["wrong password", "no password"])
def test_a_password_is_a_matter_of_settings(wrong: str, folder: Path, marker: str, ports: Ports) -> None:
    with Valkey(folder / "valkey", marker, port=ports.block(1)) as server:
        Ledger(server.url).check()
        with pytest.raises(SettingsError, match=r"^redis\.url: user or password are missing or wrong"):
            Ledger(f"redis://{wrong}127.0.0.1:{server.port}/0").check()


def test_a_redis_that_throws_keys_away_is_refused(folder: Path, marker: str) -> None:
    settings = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with (
        Valkey(folder / "valkey", marker, settings=settings) as server,
        pytest.raises(SettingsError, match="redis-cli CONFIG SET maxmemory-policy noeviction"),
    ):
        Ledger(server.url).check()


def test_a_redis_that_is_away_or_full_is_unavailable(ledger: Ledger, valkey: Valkey) -> None:
    run = add(ledger)
    ledger.redis.config_set("maxmemory", "1")
    with pytest.raises(LedgerUnavailable, match="Redis refuses"):
        ledger.claim(run.id, 0, "w", 60)
    assert "Redis refuses" in ledger.refuses_writes()
    valkey.kill()
    with pytest.raises(LedgerUnavailable, match="Redis does not answer"):
        ledger.claim(run.id, 0, "w", 60)
