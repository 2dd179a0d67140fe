"""How everything stands: servers, runs, rates, time and dollars, from the ledger alone; no daemon needed.

Rates come from the history that the loader keeps (a sample every 10 s) and from the workers' own totals now. Only
pairs of samples that lie close together count, so that hours with the daemon down do not thin a rate out.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gend.config import Settings
from gend.ledger import Ledger, Progress

SHOWN_SECONDS = 300.0
"""What is shown as a rate is over so long: several times the length of one reply."""

RECENT_SECONDS = 600.0
"""The time left and the idle share are taken over so long."""

LONG_SECONDS = 3600.0
"""What is long enough for parts, which come in one by one, to make a steady rate."""

GAP_SECONDS = 90.0
"""Samples further apart than this have something else between them: the daemon was down, or Redis away."""

LATE_SECONDS = 60.0
"""A view of the history older than this, with the daemon up, means that nobody keeps it any more."""

BAD_SHARE = 0.05
"""A run with more rows than this that are neither `ok` nor `length` is a warning."""

IDLE_SHARE = 0.1
"""Servers that were ready and idle for more than this, with prompts waiting, are a warning."""

Sample = dict[str, Any]


class ServerStatus(msgspec.Struct, kw_only=True):
    """One server and its worker. `since` is unix seconds; rates are over the last five minutes.

    `in_flight` of `limit` requests are at the server, `waiting` more prompts are at hand; `limited_by` is why it is
    not more: slots, kv, prompts, errors, fixed, trial. Rows and tokens count from its worker's start. `idle_share`
    is over the last ten minutes: 0 is full all the time. `note` is what was changed for it after crashes. What NVML
    does not say is null.
    """

    number: int
    state: str
    since: float
    gpus: list[int]
    in_flight: int = 0
    limit: int = 0
    waiting: int = 0
    limited_by: str = ""
    open_batches: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    idle_share: float | None = None
    restarts: int = 0
    last_error: str = ""
    note: str = ""
    worker_state: str = ""
    worker_error: str = ""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    celsius: int | None = None


class RunStatus(msgspec.Struct, kw_only=True):
    """One run. `state` is active, paused, cancelled or finished; `reason` says why it is paused, and `examples` shows
    three rows where an alarm did it.

    `rows_done` counts rows whose part is in the store; verdicts, tokens and rates (over the last hour) are of those.
    `active_seconds` is how long the daemon was up with this run active, null where it never was since Redis was last
    empty. The time left is null where nothing tells it.
    """

    id: str
    name: str
    state: str
    priority: str
    prompts: int
    rejected: int
    batches: int
    batches_done: int
    batches_leased: int
    rows_done: int
    verdicts: dict[str, int]
    completion_tokens: int
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    eta_seconds: float | None = None
    active_seconds: float | None = None
    reason: str = ""
    examples: list[str] = []


class Estimate(msgspec.Struct, kw_only=True):
    """Seconds until all active runs are finished: as the last ten minutes went, and the range that all rates span."""

    seconds: float
    low_seconds: float
    high_seconds: float


class Cost(msgspec.Struct, kw_only=True):
    """Dollars for the box. `spent` is for the time that the daemon was up; what is to come follows the estimate.

    `per_million_tokens` is at the present rate, `per_million_tokens_so_far` over everything. Null: not known yet.
    """

    dollars_per_hour: float
    spent: float
    to_go: float | None = None
    to_go_low: float | None = None
    to_go_high: float | None = None
    per_million_tokens: float | None = None
    per_million_tokens_so_far: float | None = None


class StoreStatus(msgspec.Struct, kw_only=True):
    """The store, and the spool before it. `last_part_at` is when a part last arrived there, in unix seconds."""

    url: str
    last_part_at: float | None = None
    spool_batches: int = 0
    spool_bytes: int = 0


class RedisStatus(msgspec.Struct, kw_only=True):
    """Redis. `own`: gend's own Valkey; `rebuilt`: the ledger agrees with the store since Redis was last empty."""

    own: bool
    rebuilt: bool
    answer_seconds: float
    memory_bytes: int


class Outage(msgspec.Struct, kw_only=True):
    """Something outside that is away: store, redis or disk. `waiting` workers say so; `since` is unix seconds."""

    what: str
    since: float
    why: str
    waiting: int = 1


class Status(msgspec.Struct, kw_only=True):
    """The schema of `gend status --json`. `schema` is raised when a field goes or changes its meaning, not when one
    is added. `headline` says it all in words, `warnings` what is wrong, the worst first. `page` is the page's URL on
    the box, null where there is none."""

    schema: int = 1
    at: float
    headline: str = ""
    warnings: list[str] = []
    daemon: bool
    draining: bool
    servers: list[ServerStatus]
    runs: list[RunStatus]
    rows_per_second: float
    tokens_per_second: float
    estimate: Estimate | None
    cost: Cost | None
    store: StoreStatus
    redis: RedisStatus
    outages: list[Outage]
    page: str | None = None


# -- reading ---------------------------------------------------------------------------------------------------------


def read_status(ledger: Ledger, settings: Settings) -> Status:
    """Ask the ledger how everything stands. Raises LedgerUnavailable."""
    asked = time.perf_counter()
    rebuilt = ledger.rebuilt()
    redis = RedisStatus(
        own=not settings.redis.url,
        rebuilt=rebuilt,
        answer_seconds=round(time.perf_counter() - asked, 6),
        memory_bytes=ledger.about()["used_memory"],
    )
    now = time.time()
    daemon = ledger.daemon()
    workers = {worker["server"]: worker for worker in ledger.workers()}
    up = ledger.up_seconds()
    progress = ledger.progress()
    history = ledger.history(60)  # ten minutes
    minutes = ledger.long_history(60)
    page = ledger.view("gend:page") or {}
    late = now - (history[0]["at"] if history else 0.0) > LATE_SECONDS
    if daemon is not None:
        live = _live(progress, workers, now)
        history.insert(0, live)
        minutes.insert(0, live)
    servers = _servers(daemon, workers, history)
    runs = [_run(one, minutes, up) for one in progress]
    status = Status(
        at=now,
        daemon=daemon is not None,
        draining=bool(daemon and daemon["draining"]),
        servers=servers,
        runs=runs,
        rows_per_second=_all_servers(history, SHOWN_SECONDS, "rows"),
        tokens_per_second=_all_servers(history, SHOWN_SECONDS, "completion_tokens"),
        estimate=_estimate(runs, history) if daemon else None,
        cost=None,
        store=StoreStatus(url=settings.store.url, last_part_at=ledger.last_part()),
        redis=redis,
        outages=_outages([ledger.loader(), *workers.values()]),
        page=f"http://127.0.0.1:{page['port']}" if page.get("port") and not page["trouble"] else None,
    )
    if why := ledger.refuses_writes():
        # The last that it took is the last that we know of it.
        since = max((one["at"] for one in (*workers.values(), *history) if one["at"] < now), default=now)
        status.outages = [one for one in status.outages if one.what != "redis"]
        status.outages.append(Outage(what="redis", since=since, why=why))
    status.store.spool_batches, status.store.spool_bytes = spool_size(settings.folder)
    status.cost = _cost(status, settings.cost.dollars_per_hour, up.get("daemon", 0.0))
    status.warnings = list(_warnings(status, daemon, page, late))
    status.headline = _headline(status)
    return status


def _live(progress: list[Progress], workers: dict[int, dict[str, Any]], now: float) -> Sample:
    """Now, as a sample of the history."""
    return {
        "at": now,
        "runs": {
            one.run.id: {"rows": one.counts.get("rows", 0), "completion_tokens": one.counts.get("completion_tokens", 0)}
            for one in progress
            if not one.finished and one.control.state == "active"
        },
        "servers": {
            str(number): {"in_flight": worker["in_flight"], "limit": worker["limit"], **worker["totals"]}
            for number, worker in workers.items()
        },
    }


def _servers(
    daemon: dict[str, Any] | None, workers: dict[int, dict[str, Any]], history: list[Sample]
) -> list[ServerStatus]:
    children = {child["name"]: child for child in (daemon or {}).get("children", ())}
    gpus = {gpu["index"]: gpu for gpu in (daemon or {}).get("gpus", ())}
    servers = []
    for name, child in children.items():
        kind, _, number = name.rpartition("-")
        if kind != "server":
            continue
        worker = workers.get(int(number), {})
        totals = worker.get("totals", {})
        mine = [gpus[index] for index in child["gpus"] if index in gpus]
        servers.append(
            ServerStatus(
                number=int(number),
                state=child["state"],
                since=child["since"],
                gpus=child["gpus"],
                in_flight=worker.get("in_flight", 0),
                limit=worker.get("limit", 0),
                waiting=worker.get("waiting", 0),
                limited_by=worker.get("limited_by", ""),
                open_batches=worker.get("open_batches", 0),
                rows=totals.get("rows", 0),
                prompt_tokens=totals.get("prompt_tokens", 0),
                completion_tokens=totals.get("completion_tokens", 0),
                rows_per_second=rate(history, SHOWN_SECONDS, "servers", number, "rows"),
                tokens_per_second=rate(history, SHOWN_SECONDS, "servers", number, "completion_tokens"),
                idle_share=_idle_share(history, number),
                restarts=child["restarts"],
                last_error=child["last_error"],
                note=child.get("note", ""),
                worker_state=children.get(f"worker-{number}", {}).get("state", ""),
                worker_error=children.get(f"worker-{number}", {}).get("last_error", ""),
                memory_used_bytes=sum(gpu["used_bytes"] for gpu in mine) if mine else None,
                memory_total_bytes=sum(gpu["total_bytes"] for gpu in mine) if mine else None,
                celsius=max((gpu["celsius"] for gpu in mine if gpu["celsius"] is not None), default=None),
            )
        )
    return servers


def _run(progress: Progress, minutes: list[Sample], up: dict[str, float]) -> RunStatus:
    run, counts = progress.run, progress.counts
    status = RunStatus(
        id=run.id,
        name=run.name,
        state="finished" if progress.finished else progress.control.state,
        priority=progress.control.priority,
        prompts=run.set.accepted,
        rejected=run.set.rejected,
        batches=run.batches,
        batches_done=progress.done_batches,
        batches_leased=progress.leased_batches,
        rows_done=progress.done_rows,
        verdicts={name.removeprefix("verdict:"): n for name, n in counts.items() if name.startswith("verdict:")},
        completion_tokens=counts.get("completion_tokens", 0),
        active_seconds=up.get(f"run:{run.id}"),
        reason=progress.control.reason,
        examples=progress.control.examples,
    )
    if status.state == "active":
        status.rows_per_second = rate(minutes, LONG_SECONDS, "runs", run.id, "rows")
        status.tokens_per_second = rate(minutes, LONG_SECONDS, "runs", run.id, "completion_tokens")
        if status.rows_per_second > 0:
            status.eta_seconds = (status.prompts - status.rows_done) / status.rows_per_second
    return status


def _outages(views: list[dict[str, Any]]) -> list[Outage]:
    found: dict[str, Outage] = {}
    for view in views:
        for what, outage in view["outages"].items():
            known = found.get(what)
            if known is None:
                found[what] = Outage(what=what, since=outage["since"], why=outage["why"])
            else:
                known.waiting += 1
                known.since = min(known.since, outage["since"])
    return list(found.values())


def spool_size(folder: Path) -> tuple[int, int]:
    """Batches and bytes in the spool: FOLDER/spool/RUN/BATCH/CLAIM.rows. What goes away meanwhile is not counted."""
    batches = total = 0
    for run in _entries(folder / "spool"):
        for batch in _entries(run.path):
            batches += 1
            for file in _entries(batch.path):
                try:
                    total += file.stat().st_size
                except FileNotFoundError:
                    continue
    return batches, total


def _entries(folder: Path | str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


# -- rates -----------------------------------------------------------------------------------------------------------


def rate(history: Sequence[Sample], seconds: float, kind: str, name: str, field: str) -> float:
    """How much `field` of one server or run (`kind` is servers or runs) grew a second; 0 where nothing tells."""
    grown = time_seen = 0.0
    for newer, older in _pairs(history, seconds):
        now = newer[kind].get(name)
        if now is not None and (kind == "servers" or name in older[kind]):
            time_seen += newer["at"] - older["at"]
            grown += growth(now, older[kind].get(name), field)
    return grown / time_seen if time_seen > 0.5 else 0.0


def growth(now: dict[str, Any], then: dict[str, Any] | None, field: str) -> float:
    """What was added between two samples; a worker that was started anew counts from zero."""
    before = then.get(field, 0) if then else 0
    after = now.get(field, 0)
    return float(after - before if after >= before else after)


def _all_servers(history: Sequence[Sample], seconds: float, field: str) -> float:
    """How much all servers together made a second, over the time in which any of them had work."""
    grown = time_seen = 0.0
    for newer, older in _pairs(history, seconds):
        added = sum(growth(now, older["servers"].get(name), field) for name, now in newer["servers"].items())
        if added or any(now["in_flight"] for now in newer["servers"].values()):
            time_seen += newer["at"] - older["at"]
            grown += added
    return grown / time_seen if time_seen > 0.5 else 0.0


def _pairs(history: Sequence[Sample], seconds: float) -> Iterator[tuple[Sample, Sample]]:
    """Neighbours in the history (newest first) that are close together and not older than `seconds`."""
    for newer, older in itertools.pairwise(history):
        if history[0]["at"] - older["at"] > seconds + 10:
            return
        if newer["at"] - older["at"] <= GAP_SECONDS:
            yield newer, older


def _idle_share(history: Sequence[Sample], number: str) -> float | None:
    """Which share of a server's slots was empty in the last ten minutes, while there was any run to work on."""
    shares = []
    for sample in history:
        if history[0]["at"] - sample["at"] > RECENT_SECONDS:
            break
        if sample["runs"]:
            server = sample["servers"].get(number)
            full = min(1.0, server["in_flight"] / server["limit"]) if server and server["limit"] else 0.0
            shares.append(1.0 - full)
    return round(sum(shares) / len(shares), 3) if shares else None


def _estimate(runs: list[RunStatus], history: list[Sample]) -> Estimate | None:
    """How long everything active takes: as the servers made rows in the last ten minutes, as parts came in the last
    hour, and as they came since each run began. Early on, parts lag behind rows; later, all three agree."""
    active = [run for run in runs if run.state == "active"]
    left = sum(run.prompts - run.rows_done for run in active)
    rates = [_all_servers(history, RECENT_SECONDS, "rows"), sum(run.rows_per_second for run in active)]
    if len(active) == 1 and (seconds := active[0].active_seconds):
        rates.append(sum(active[0].verdicts.values()) / seconds)
    known = [one for one in rates if one > 0]
    if not known or not left:
        return None
    return Estimate(
        seconds=round(left / known[0], 1),
        low_seconds=round(left / max(known), 1),
        high_seconds=round(left / min(known), 1),
    )


def _cost(status: Status, dollars_per_hour: float, up_seconds: float) -> Cost | None:
    if not dollars_per_hour:
        return None
    a_second = dollars_per_hour / 3600
    tokens = sum(run.completion_tokens for run in status.runs)
    cost = Cost(dollars_per_hour=dollars_per_hour, spent=round(up_seconds * a_second, 2))
    if estimate := status.estimate:
        cost.to_go = round(estimate.seconds * a_second, 2)
        cost.to_go_low = round(estimate.low_seconds * a_second, 2)
        cost.to_go_high = round(estimate.high_seconds * a_second, 2)
    if status.tokens_per_second > 0:
        cost.per_million_tokens = round(a_second / status.tokens_per_second * 1e6, 4)
    if tokens:
        cost.per_million_tokens_so_far = round(cost.spent / tokens * 1e6, 4)
    return cost


# -- in words --------------------------------------------------------------------------------------------------------


def _headline(status: Status) -> str:
    active = [run for run in status.runs if run.state == "active"]
    if not status.daemon:
        waiting = f", {_count(len(active), 'run')} {'waits' if len(active) == 1 else 'wait'}" if active else ""
        return f"daemon is down{waiting}: start it with `gend up`" if active else "daemon is down"
    ready = sum(server.state == "ready" for server in status.servers)
    servers = f"{ready} of {_count(len(status.servers), 'server')}"
    if status.draining:
        return f"draining, {servers}"
    if not active:
        paused = sum(run.state == "paused" for run in status.runs)
        what = f"{_count(paused, 'run')} paused" if paused else "every run is finished" if status.runs else "no run yet"
        return f"idle: {what}, {servers}"
    words = [f"running, {servers}" if ready else f"starting, {servers}"]
    if status.estimate:
        words.append(f"done {when(status.at + status.estimate.seconds, status.at)}")
    if (cost := status.cost) and cost.to_go is not None:
        words.append(f"{dollars(cost.spent)} of about {dollars(cost.spent + cost.to_go)}")
    elif cost:
        words.append(f"{dollars(cost.spent)} so far")
    return ", ".join(words)


def _warnings(status: Status, daemon: dict[str, Any] | None, page: dict[str, Any], late: bool) -> Iterator[str]:
    """What is wrong, the worst first."""
    for outage in status.outages:
        yield f"{outage.what} is away since {clock(outage.since, status.at)}: {outage.why}"
    for run in status.runs:
        if run.state == "paused":
            look = f"look with `gend rows {run.id}`, then " if run.examples else ""
            more = ", with --set alarm.KEY=SHARE to allow more" if run.examples else ""
            yield f"{run.id} is paused: {run.reason or 'no reason given'}; {look}`gend resume {run.id}`{more}"
    for server in status.servers:
        since = clock(server.since, status.at)
        if server.state in ("blocked", "backoff", "stopping") and server.last_error:
            yield f"server {server.number} {server.state} since {since}: {server.last_error}"
        elif server.state == "ready" and server.worker_state in ("blocked", "backoff"):
            why = f" ({server.worker_error})" if server.worker_error else ""
            yield f"server {server.number} has no worker{why}: see `gend logs worker-{server.number}`"
    for child in (daemon or {}).get("children", ()):
        if child["name"] in ("loader", "page") and child["state"] in ("blocked", "backoff") and child["last_error"]:
            yield f"the {child['name']} fails: {child['last_error']}"
    loader = next((child for child in (daemon or {}).get("children", ()) if child["name"] == "loader"), None)
    if late and loader and loader["state"] == "ready" and status.at - loader["since"] > LATE_SECONDS:
        yield "nobody samples the rates: see `gend logs loader`"
    # Without a daemon gend's own Valkey is started anew for each command: then this says nothing.
    if not status.redis.rebuilt and (status.daemon or (status.runs and not status.redis.own)):
        by_whom = "" if status.daemon else " by `gend up`"
        yield f"Redis was empty or started anew: the ledger is brought to agree with the store{by_whom}"
    for run in status.runs:
        rows = sum(run.verdicts.values())
        bad = rows - run.verdicts.get("ok", 0) - run.verdicts.get("length", 0)
        if rows >= 50 and bad / rows > BAD_SHARE:
            yield f"{run.id}: {bad / rows:.1%} of its rows are bad; look at them with `gend rows {run.id}`"
    waits = any(run.batches_done + run.batches_leased < run.batches for run in status.runs if run.state == "active")
    idle = [
        server
        for server in status.servers
        if server.state == "ready"
        and status.at - server.since > RECENT_SECONDS
        and (server.idle_share or 0) > IDLE_SHARE
    ]
    if waits and idle:
        share = sum(server.idle_share or 0 for server in idle) / len(idle)
        numbers = ", ".join(str(server.number) for server in idle)
        yield f"{'server' if len(idle) == 1 else 'servers'} {numbers}: {share:.0%} idle in the last 10 minutes"
    if page.get("trouble"):
        yield f"page: {page['trouble']}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Seconds as a person reads them: `41 s`, `12 min`, `3 h 20 min`, `1 d 4 h`."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 100:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def when(moment: float, now: float) -> str:
    """A time to come: `04:10` today, `Tue 04:10` within a week, else the date."""
    then, today = time.localtime(moment), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%a %H:%M" if moment - now < 6 * 86400 else "%d %b", then)


def clock(moment: float, now: float) -> str:
    """A time gone by and how long ago: `03:12 (4 min)`."""
    then = time.localtime(moment)
    return f"{time.strftime('%H:%M' if now - moment < 86400 else '%a %H:%M', then)} ({duration(now - moment)})"


def dollars(amount: float) -> str:
    """`$0.42`, `$612`, `$1,480`."""
    return f"${amount:,.2f}" if amount < 10 else f"${amount:,.0f}"
