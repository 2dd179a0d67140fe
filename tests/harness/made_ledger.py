"""A ledger made up to look like a run in the middle: what `gend status` and the page read, without a daemon."""

import random
import time
from typing import Any

from gend.ledger import Control, Ledger
from gend.records import PromptSet, Run, Sampling

PARTS_A_MINUTE = 6
TOKENS_A_ROW = 2500


def made_run(prompts: int, name: str = "drafter", batch_size: int = 128) -> Run:
    """A run that exists in the ledger alone."""
    prompt_set = PromptSet(
        fingerprint=f"{abs(hash(name)):064x}"[:64], source="prompts.jsonl", read=prompts + 3, accepted=prompts,
        rejected=3, bytes=prompts * 500,
    )  # fmt: skip
    return Run(
        id=f"{name}-0123456789ab", name=name, set=prompt_set, model="made-up", sampling=Sampling(),
        batch_size=batch_size, created="2026-01-02T03:04:05.678+00:00", gend_version="0",
    )  # fmt: skip


def publish(ledger: Ledger, children: list[dict[str, Any]], workers: list[dict[str, Any]], **more: Any) -> None:
    """The views of a daemon (with `more` in it) and its workers; they last for ten minutes."""
    view = {"pid": 1, "at": time.time(), "draining": False, "children": children, **more}
    ledger.publish("gend:daemon", view, 600.0)
    for worker in workers:
        ledger.publish(f"gend:worker:{worker['name']}", worker, 600.0)


def child(name: str, state: str = "ready", seconds: float = 3600.0, **more: Any) -> dict[str, Any]:
    """A child in the daemon's view, in its state for so long."""
    number = name.rpartition("-")[2]
    gpus = [int(number)] if name.startswith("server") else []
    return {"name": name, "state": state, "since": time.time() - seconds, "gpus": gpus, "pid": 100, "restarts": 0,
            "last_error": "", **more}  # fmt: skip


def worker(number: int, rows: int, **more: Any) -> dict[str, Any]:
    """A worker's view: full, with so many rows made."""
    bad = rows // 40
    totals = {"rows": rows, "prompt_tokens": rows * 80, "completion_tokens": rows * TOKENS_A_ROW,
              "verdict:ok": rows - bad, "verdict:length": bad}  # fmt: skip
    return {"name": f"box-worker-{number}.aa", "server": number, "pid": 200 + number, "at": time.time(),
            "in_flight": 240, "limit": 240, "limited_by": "slots", "waiting": 120, "open_batches": 34,
            "totals": totals, "draining": False, "outages": {}, **more}  # fmt: skip


def fill(ledger: Ledger, *, prompts: int = 914_000, servers: int = 8, minutes: int = 300) -> Run:
    """A run that has been going for `minutes` on `servers` servers, each of which makes its rows at a steady rate."""
    now, luck = time.time(), random.Random(7)
    speeds = [1 + (number - servers / 2) / 50 for number in range(servers)]
    ledger.redis.config_set("appendfsync", "no")  # hundreds of samples, which nobody minds losing
    run = made_run(prompts)
    ledger.add_run(run, Control())
    ledger.mark_rebuilt()
    done = min(run.batches, PARTS_A_MINUTE * minutes)
    ledger.add_done(run.id, set(range(done)))
    rows = done * run.batch_size
    counts = {"rows": rows, "completion_tokens": rows * TOKENS_A_ROW, "verdict:ok": round(rows * 0.971),
              "verdict:length": round(rows * 0.022), "verdict:loop": round(rows * 0.007)}  # fmt: skip
    ledger.redis.hset(f"gend:run:{run.id}:counts", mapping=counts)
    a_second = PARTS_A_MINUTE * run.batch_size / 60
    for ago in sorted({*range(0, 3600, 10), *range(3600, minutes * 60, 60)}, reverse=True):
        made = rows - round(a_second * ago)
        each = [worker(number, max(0, round(made / servers * speeds[number]))) for number in range(servers)]
        sample = {
            "at": now - ago,
            "runs": {run.id: {"rows": made, "completion_tokens": made * TOKENS_A_ROW}},
            "servers": {
                str(view["server"]): {"in_flight": luck.randint(200, 240), "limit": 240, **view["totals"]}
                for view in each
            },
        }
        ledger.sample(sample, 60.0 if ago >= 3600 else 10.0)
    children = [child("loader"), child("page")]
    for number in range(servers):
        children += [child(f"server-{number}", seconds=minutes * 60), child(f"worker-{number}", seconds=minutes * 60)]
    publish(ledger, children, [worker(number, round(rows / servers * speeds[number])) for number in range(servers)])
    return run
