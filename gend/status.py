"""`gend status`: everything at a glance, from the ledger alone; no daemon needed."""

import time
from typing import Any

import msgspec

from gend.config import Settings
from gend.ledger import Ledger, Progress

RATE_WINDOW_SAMPLES = 30
"""Samples (10 s apart) over which rates are taken: five minutes, several times the length of one reply."""


class ServerStatus(msgspec.Struct, kw_only=True):
    """One server and its worker. Rates are per second over the window; `since` in seconds since the epoch."""

    number: int
    state: str
    since: float
    gpus: list[int]
    in_flight: int = 0
    limit: int = 0
    open_batches: int = 0
    rows: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    restarts: int = 0
    last_error: str = ""


class RunStatus(msgspec.Struct, kw_only=True):
    """One run. `rows_done` counts rows whose part is in the store; `rows_made` also those that still collect."""

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
    reason: str = ""


class Status(msgspec.Struct, kw_only=True):
    """The schema of `gend status --json`; `schema` is raised when a field changes its meaning."""

    schema: int = 1
    at: float
    daemon: bool
    draining: bool
    servers: list[ServerStatus]
    runs: list[RunStatus]
    rows_per_second: float
    tokens_per_second: float
    eta_seconds: float | None
    outages: dict[str, str]
    store: str


def read_status(ledger: Ledger, settings: Settings) -> Status:
    """Ask the ledger how everything stands. Raises LedgerUnavailable."""
    now = time.time()
    daemon = ledger.daemon()
    workers = {worker["server"]: worker for worker in ledger.workers()}
    history = ledger.history(RATE_WINDOW_SAMPLES)
    servers = _servers(daemon, workers, history, now)
    runs = [_run(progress, history, now) for progress in ledger.progress()]
    rows_rate = sum(server.rows_per_second for server in servers)
    left = sum(run.prompts - run.rows_done for run in runs if run.state == "active")
    outages = {}
    for view in (ledger.loader(), *workers.values()):
        for what, outage in view["outages"].items():
            outages[what] = f"since {time.strftime('%H:%M:%S', time.localtime(outage['since']))}: {outage['why']}"
    return Status(
        at=now,
        daemon=daemon is not None,
        draining=bool(daemon and daemon["draining"]),
        servers=servers,
        runs=runs,
        rows_per_second=rows_rate,
        tokens_per_second=sum(server.tokens_per_second for server in servers),
        eta_seconds=left / rows_rate if rows_rate > 0 else None,
        outages=outages,
        store=settings.store.url,
    )


def _servers(
    daemon: dict[str, Any] | None, workers: dict[int, dict[str, Any]], history: list[dict[str, Any]], now: float
) -> list[ServerStatus]:
    servers = []
    for child in (daemon or {}).get("children", ()):
        kind, _, number = child["name"].rpartition("-")
        if kind != "server":
            continue
        worker = workers.get(int(number), {})
        totals = worker.get("totals", {})
        server = ServerStatus(
            number=int(number),
            state=child["state"],
            since=child["since"],
            gpus=child["gpus"],
            in_flight=worker.get("in_flight", 0),
            limit=worker.get("limit", 0),
            open_batches=worker.get("open_batches", 0),
            rows=totals.get("rows", 0),
            restarts=child["restarts"],
            last_error=child["last_error"],
        )
        past = [sample for sample in history if number in sample["servers"]]
        # A worker that was started anew counts from zero: samples from before it are not comparable.
        past = [sample for sample in past if sample["servers"][number].get("rows", 0) <= server.rows]
        if past and (seconds := now - past[-1]["at"]) > 0.5:
            then = past[-1]["servers"][number]
            server.rows_per_second = (server.rows - then.get("rows", 0)) / seconds
            tokens = totals.get("completion_tokens", 0) - then.get("completion_tokens", 0)
            server.tokens_per_second = max(0.0, tokens / seconds)
        servers.append(server)
    return servers


def _run(progress: Progress, history: list[dict[str, Any]], now: float) -> RunStatus:
    run, counts = progress.run, progress.counts
    whole = progress.done_batches * run.batch_size
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
        rows_done=min(whole, run.set.accepted),
        verdicts={name.removeprefix("verdict:"): n for name, n in counts.items() if name.startswith("verdict:")},
        completion_tokens=counts.get("completion_tokens", 0),
        reason=progress.control.reason,
    )
    past = [sample for sample in history if run.id in sample["runs"]]
    if past and not progress.finished and (seconds := now - past[-1]["at"]) > 0.5:
        then = past[-1]["runs"][run.id]
        status.rows_per_second = max(0.0, (counts.get("rows", 0) - then["rows"]) / seconds)
        status.tokens_per_second = max(0.0, (status.completion_tokens - then["completion_tokens"]) / seconds)
        if status.rows_per_second > 0:
            status.eta_seconds = (status.prompts - status.rows_done) / status.rows_per_second
    return status


def duration(seconds: float | None) -> str:
    """Seconds as a person reads them: `41 s`, `12 min`, `3 h 20 min`, `1 d 4 h`."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 100:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def headline(status: Status) -> str:
    """The state in words, for the first line."""
    active = [run for run in status.runs if run.state == "active"]
    if not status.daemon:
        waiting = f", {len(active)} runs wait: start it with `gend up`" if active else ""
        return f"daemon is down{waiting}"
    ready = sum(server.state == "ready" for server in status.servers)
    what = "draining" if status.draining else "running" if active else "idle: every run is finished"
    eta = f", done in about {duration(status.eta_seconds)}" if active and status.eta_seconds else ""
    return f"{what}, {ready} of {len(status.servers)} servers ready{eta}"


def render(status: Status, width: int | None = None, colour: bool | None = None) -> str:
    """The status as text; colours only where the output is a terminal (or `colour` says so)."""
    import io
    import sys

    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty() if colour is None else colour
    out = io.StringIO()
    console = Console(file=out, width=width or (None if terminal else 100), force_terminal=terminal, highlight=False)
    console.print(headline(status), style="bold")
    for what, why in status.outages.items():
        console.print(f"! {what} is away {why}", style="red", markup=False)
    for server in status.servers:
        if server.state in ("blocked", "backoff") and server.last_error:
            console.print(f"! server {server.number}: {server.last_error}", style="yellow", markup=False)
    if status.servers:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("server")
        table.add_column("gpu")
        table.add_column("state")
        for name in ("for", "in flight", "rows", "rows/s", "tokens/s", "restarts"):
            table.add_column(name, justify="right")
        for s in status.servers:
            table.add_row(
                str(s.number), ",".join(map(str, s.gpus)) or "-", s.state, duration(status.at - s.since),
                f"{s.in_flight}/{s.limit}", f"{s.rows:,}", f"{s.rows_per_second:.2f}", f"{s.tokens_per_second:,.0f}",
                str(s.restarts),
            )  # fmt: skip
        console.print(table)
    if status.runs:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("run", overflow="fold")
        table.add_column("state")
        for name in ("done", "of", "%", "rows/s", "tokens/s", "left"):
            table.add_column(name, justify="right")
        table.add_column("verdicts", overflow="fold")
        for r in status.runs:
            share = 100 * r.rows_done / r.prompts
            verdicts = " ".join(f"{name} {count:,}" for name, count in sorted(r.verdicts.items(), key=lambda v: -v[1]))
            table.add_row(
                r.id, r.state, f"{r.rows_done:,}", f"{r.prompts:,}", f"{share:.0f}", f"{r.rows_per_second:.2f}",
                f"{r.tokens_per_second:,.0f}", duration(r.eta_seconds) if r.state == "active" else "-", verdicts,
            )  # fmt: skip
        console.print(table)
        rejected = sum(run.rejected for run in status.runs)
        if rejected:
            console.print(f"{rejected:,} input lines were rejected; see rejects.jsonl beside their prompt set")
    else:
        console.print("no run yet: gend enqueue FILE")
    console.print(f"store {status.store}", style="dim", markup=False)
    return out.getvalue()
