"""The loader registers runs, and keeps the workers supplied.

Registering, in this order, so that a run is there whole or not at all: the prompt set on this box, the set in the
store, the run in the store, the run in the ledger. Each step may be done again; a set or run that is there already is
left as it is. Beside the daemon, `keep_supplied` brings the ledger to agree with the store, fetches prompt sets that
this box does not have, and sees that RQ always holds some jobs for what is missing.

In the store:

    sets/FINGERPRINT/prompts-00000.jsonl.zst ...    the accepted prompts, in pieces
    sets/FINGERPRINT/rejects.jsonl                  the lines that were not accepted
    sets/FINGERPRINT/set.json                       the PromptSet; written last
    runs/RUN/run.json                               the Run
    runs/RUN/control.json                           what people, or an alarm, decided about it: state, priority, alarm
    runs/RUN/engines/ID.json                        what made the rows that name it (provenance.py)
    runs/RUN/parts/00000042.jsonl                   one part a batch
"""

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zstandard

import gend
from gend import sets
from gend.chat_tokens import TokenBudget
from gend.config import Settings
from gend.errors import LedgerUnavailable, NotSound, SettingsError, StoreUnavailable, Unavailable
from gend.ledger import Control, Ledger, Priority
from gend.model_files import find_model
from gend.prompts import ReadOptions, Rejection, read_prompts
from gend.records import PromptSet, Run, Verdicts, counts_of, part_key, run_id, run_identity
from gend.runs import listed_parts, stored_run
from gend.spool import remove, spooled
from gend.store import Store
from gend.verdict import AlarmLimits

log = logging.getLogger("gend.loader")

PIECE_BYTES = 64 << 20
JOBS_AHEAD = 64  # jobs that wait in a run's RQ queue: enough for a second of the fastest servers, and small
SAMPLE_SECONDS = 10.0
AGREE_SECONDS = 600.0  # a new look at the store so often: it mends what somebody has deleted, here or there
DAMAGED_SECONDS = 30.0  # until a prompt set that was damaged in the store is fetched again: it may be 1 GB


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """What `gend enqueue` reports. `new` is False when the same run was there already.

    That one keeps the verdicts and the alarm that it has: `verdicts_kept` and `alarm_kept` are those that differ from
    what was asked for now, as KEY=VALUE of what it has.
    """

    run: str
    new: bool
    prompts: int
    rejected: int
    read: int
    batches: int
    rejects_file: str
    fingerprint: str
    verdicts_kept: list[str] = []
    alarm_kept: list[str] = []


def read_set(
    folder: Path,
    sources: Sequence[str],
    options: ReadOptions,
    open_remote: Callable[[str], BinaryIO] | None = None,
    progress: Callable[[int], None] | None = None,
    budget: TokenBudget | None = None,
) -> PromptSet:
    """Check a prompt file and keep what is accepted on this box. Raises PromptError (strict), SettingsError.

    Without a `budget` no prompt is too long here: the server refuses those that are.
    """
    too_long = (budget.excess,) if budget else ()
    with sets.SetWriter(folder, " ".join(sources)) as writer:
        for line in read_prompts(list(sources), options, open_remote, *too_long):
            if isinstance(line, Rejection):
                writer.reject(msgspec.json.encode(line) + b"\n")
            else:
                writer.accept(line)
            if progress and (writer.accepted + writer.rejected) % 1000 == 0:
                progress(writer.accepted + writer.rejected)
        if not writer.accepted:
            first = writer.first_reject()
            raise SettingsError(
                f"{' '.join(sources)}: no prompt was accepted ({writer.rejected} lines rejected"
                f"{', the first: ' + first if first else ''}); nothing was registered"
            )
        return writer.finish()


def token_budget(settings: Settings) -> TokenBudget:
    """What tells prompts that are too long. Raises SettingsError with the reason why it cannot be told on this box."""
    model = settings.model.path
    folder = find_model(model, {**os.environ, **settings.servers.environment})
    if folder is None:
        raise SettingsError(f"{model} is not on this box")
    flags = {name.lstrip("-").replace("_", "-"): value for name, value in settings.servers.flags.items()}
    context = flags.get("context-length") or settings.model.context_length
    return TokenBudget(folder, int(str(context)), settings.sampling.thinking)


def register(
    settings: Settings,
    ledger: Ledger,
    store: Store,
    prompt_set: PromptSet,
    name: str,
    priority: Priority,
    round_of: str | None = None,
    round: int = 0,
) -> Registered:
    """Make a run of a prompt set, with the settings' sampling, verdicts and alarm, and enqueue what is missing.

    Raises StoreUnavailable, LedgerUnavailable.
    """
    identity = run_identity(prompt_set.fingerprint, settings.model.path, settings.sampling)
    known = next((run for run in ledger.runs().values() if run.id.endswith(f"-{identity}")), None)
    # The store knows it even where Redis was emptied: under a second name all its rows would be made twice.
    there = None if known else next((run for run in store.folders("runs/") if run.endswith(f"-{identity}")), None)
    run = known or Run(
        id=there or run_id(name, identity),
        name=name,
        set=prompt_set,
        model=settings.model.path,
        sampling=settings.sampling,
        batch_size=settings.work.batch_size,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        gend_version=gend.__version__,
        verdicts=settings.verdicts,
        round_of=round_of,
        round=round,
    )
    upload_set(settings.folder, store, prompt_set)
    if not store.put(f"runs/{run.id}/run.json", msgspec.json.encode(run)):
        run = stored_run(store, run.id)  # an earlier one: its batch size and all it was made with stand
    control = Control(priority=priority, alarm=settings.alarm)
    if not store.put(f"runs/{run.id}/control.json", msgspec.json.encode(control)):
        control = stored_control(store, run)
    new = ledger.add_run(run, control)
    if new:
        ledger.add_done(run.id, parts_in_store(store, run))
        ledger.stock(run, JOBS_AHEAD)
    alarm = ledger.controls().get(run.id, control).alarm or settings.alarm
    return Registered(
        run=run.id,
        new=new,
        prompts=run.set.accepted,
        rejected=prompt_set.rejected,
        read=prompt_set.read,
        batches=run.batches,
        rejects_file=str(sets.set_folder(settings.folder, prompt_set.fingerprint) / "rejects.jsonl"),
        fingerprint=prompt_set.fingerprint,
        verdicts_kept=differences("verdicts", settings.verdicts, run.verdicts),
        alarm_kept=differences("alarm", settings.alarm, alarm),
    )


def differences(section: str, asked: Verdicts | AlarmLimits, there: Verdicts | AlarmLimits) -> list[str]:
    """What the run that is there has otherwise than it was asked for, as KEY=VALUE of what it has."""
    wanted, has = msgspec.structs.asdict(asked), msgspec.structs.asdict(there)
    return [f"{section}.{key}={msgspec.json.encode(has[key]).decode()}" for key in wanted if wanted[key] != has[key]]


def control(ledger: Ledger, store: Store, run: str, changed: Control) -> None:
    """Record what a person decided about a run: in the store first, so that it outlives Redis."""
    store.replace(f"runs/{run}/control.json", msgspec.json.encode(changed))
    ledger.set_control(run, changed)


# -- prompt sets in the store ------------------------------------------------------------------------------------


def upload_set(folder: Path, store: Store, prompt_set: PromptSet) -> None:
    """Copy a prompt set from this box to the store; `set.json` comes last and makes it whole.

    What is there is read and compared, so that enqueueing a file again mends a set that was damaged in the store.
    """
    home = f"sets/{prompt_set.fingerprint}"
    there = dict(store.list(f"{home}/"))
    compressor = zstandard.ZstdCompressor(level=1)
    for number, piece in enumerate(sets.pieces(folder, prompt_set.fingerprint, PIECE_BYTES)):
        key, body = f"{home}/prompts-{number:05d}.jsonl.zst", compressor.compress(piece)
        if there.pop(key, None) != len(body) or store.get(key) != body:
            store.replace(key, body)
    for key in there:
        if key.startswith(f"{home}/prompts-"):  # beyond the last piece, where it would be read as one
            store.delete(key)
    if not {f"{home}/set.json", f"{home}/rejects.jsonl"} <= there.keys():
        rejects = sets.set_folder(folder, prompt_set.fingerprint) / "rejects.jsonl"
        store.replace(f"{home}/rejects.jsonl", rejects.read_bytes())
        store.replace(f"{home}/set.json", msgspec.json.encode(prompt_set))


def fetch_set(folder: Path, store: Store, prompt_set: PromptSet) -> None:
    """Bring a prompt set from the store to this box, unless it is here. Raises NotSound if it is damaged there."""
    if sets.present(folder, prompt_set.fingerprint):
        return
    log.info("prompt set %s: fetching %d prompts from the store", prompt_set.fingerprint[:12], prompt_set.accepted)
    with sets.SetWriter(folder, prompt_set.source) as writer:
        for number in range(1 << 30):
            piece = store.get(f"sets/{prompt_set.fingerprint}/prompts-{number:05d}.jsonl.zst")
            if piece is None:
                break
            try:
                lines = zstandard.ZstdDecompressor().decompress(piece).splitlines(keepends=True)
            except zstandard.ZstdError as error:
                raise NotSound(
                    f"prompt set {prompt_set.fingerprint[:12]} in the store is damaged: piece {number}: {error}; "
                    "enqueue the file again to mend it"
                ) from error
            for line in lines:
                writer.accept(line)
        for line in (store.get(f"sets/{prompt_set.fingerprint}/rejects.jsonl") or b"").splitlines(keepends=True):
            writer.reject(line)
        if writer.fingerprint != prompt_set.fingerprint:
            raise NotSound(
                f"prompt set {prompt_set.fingerprint[:12]} in the store is damaged: it holds {writer.accepted} of "
                f"{prompt_set.accepted} prompts; enqueue the file again to mend it"
            )
        writer.finish()


# -- what the store knows of runs --------------------------------------------------------------------------------


def parts_in_store(store: Store, run: Run) -> set[int]:
    """The batches of a run that have a part in the store; names that are not ours are not counted."""
    parts, _ = listed_parts(store, run)
    return {number for number, size in parts.items() if size}


def stored_control(store: Store, run: Run) -> Control:
    """What people decided about a run, as the store has it; the default where it has nothing that can be read."""
    raw = store.get(f"runs/{run.id}/control.json")
    try:
        return msgspec.json.decode(raw, type=Control) if raw else Control()
    except msgspec.DecodeError as error:
        log.warning("run %s: its control.json in the store cannot be read (%s): taken as active", run.id, error)
        return Control()


def reconcile(ledger: Ledger, store: Store) -> None:
    """Make the ledger agree with the store: every run there, and exactly the batches done that have a part."""
    for name in store.folders("runs/"):
        try:
            run = stored_run(store, name)
        except NotSound as error:
            log.warning("%s; left alone", error)
            continue
        ledger.add_run(run, stored_control(store, run))
        before = ledger.done(run.id)
        parts = parts_in_store(store, run)
        if stale := before - parts:
            log.warning("run %s: %d batches were marked done and have no part: made again", run.id, len(stale))
            ledger.forget_done(run.id, stale)
        if parts - before:
            log.info("run %s: %d parts found in the store", run.id, len(parts - before))
            ledger.add_done(run.id, parts)
    ledger.mark_rebuilt()


# -- beside the daemon -------------------------------------------------------------------------------------------


def keep_supplied(settings: Settings, ledger: Ledger, store: Store, stopped: Callable[[float], bool]) -> None:
    """Until `stopped(seconds)`, which waits that long and says whether to end, keep the workers supplied."""
    agreed = said = False
    sampled = away_since = 0.0
    looked = time.monotonic()
    damaged: dict[str, Damaged] = {}
    while True:
        try:
            if not agreed or not ledger.rebuilt() or time.monotonic() - looked > AGREE_SECONDS:
                looked = time.monotonic()  # also where it fails: one that agreed is good enough for that long
                reconcile(ledger, store)
                agreed = True
            supply(settings, ledger, store, damaged)
            count_found_parts(ledger, store)
            if time.monotonic() - sampled > SAMPLE_SECONDS:
                now = time.monotonic()
                ledger.sample(sample(ledger), now - sampled if sampled else 0.0)
                sampled = now
                clear_spool(settings.folder, ledger)
            if damaged or said:
                ledger.publish("gend:loader", {"outages": _outages(damaged)}, 60.0)
            said, away_since = bool(damaged), 0.0
        except (StoreUnavailable, LedgerUnavailable, SettingsError) as error:
            log.warning("%s; trying again", error)
            away_since = away_since or time.time()
            with contextlib.suppress(LedgerUnavailable):
                if not isinstance(error, LedgerUnavailable):
                    outage = {"since": away_since, "why": str(error)}
                    ledger.publish("gend:loader", {"outages": {"store": outage, **_outages(damaged)}}, 60.0)
                    said = True
                if ledger.rebuilt():  # an agreed ledger is good enough to work from while the store is away
                    supply(settings, ledger, store, damaged)
            if stopped(2.0):
                return
        if stopped(0.5):
            return


class Damaged(msgspec.Struct, frozen=True):
    """A prompt set that the store does not have whole: since when it is known, why, and when it is fetched again."""

    since: float
    why: str
    again: float


def supply(settings: Settings, ledger: Ledger, store: Store, damaged: dict[str, Damaged]) -> None:
    """See that each active run has its prompts here and jobs in its queue. `damaged`, by fingerprint, is kept up."""
    known, now = damaged.copy(), time.monotonic()
    damaged.clear()
    for progress in ledger.progress():
        run = progress.run
        if progress.control.state != "active" or progress.finished:
            ledger.forget_queue(run.id)
            continue
        before = known.get(run.set.fingerprint)
        if before and before.again > now and not sets.present(settings.folder, run.set.fingerprint):
            damaged[run.set.fingerprint] = before
            continue
        try:
            fetch_set(settings.folder, store, run.set)
        except NotSound as error:
            log.warning("run %s waits: %s", run.id, error)
            since = before.since if before else time.time()
            damaged[run.set.fingerprint] = Damaged(since, str(error), now + DAMAGED_SECONDS)
        except Unavailable as error:
            log.warning("run %s waits: %s", run.id, error)
        else:
            ledger.stock(run, JOBS_AHEAD)


def _outages(damaged: dict[str, Damaged]) -> dict[str, Any]:
    return {f"prompt set {name[:12]}": {"since": one.since, "why": one.why} for name, one in damaged.items()}


def count_found_parts(ledger: Ledger, store: Store, seconds: float = 0.5) -> None:
    """Count the rows of parts that a listing has found, for at most so long; what is no part is made again."""
    deadline = time.monotonic() + seconds
    for run in ledger.runs().values():
        for number in ledger.uncounted(run.id, 100):
            part = store.get(part_key(run.id, number))
            counts = counts_of(part, run.batch(number)) if part is not None else None
            if counts is not None:
                ledger.mark_done(run.id, number, counts)
            else:
                log.warning("run %s: %s in the store is not its part: made again", run.id, part_key(run.id, number))
                ledger.forget_done(run.id, {number})
            if time.monotonic() > deadline:
                return


def clear_spool(folder: Path, ledger: Ledger) -> None:
    """Remove rows of batches that are done: a worker that was killed after the mark has left them."""
    for run, numbers in spooled(folder).items():
        for number in numbers & ledger.done(run):
            remove(folder, run, number)


def sample(ledger: Ledger) -> dict[str, Any]:
    """Totals now, for rates over time: by active run, of done batches; by server, since its worker began."""
    return {
        "at": round(time.time(), 1),
        "runs": {
            progress.run.id: {name: progress.counts.get(name, 0) for name in ("rows", "completion_tokens")}
            for progress in ledger.progress()
            if not progress.finished and progress.control.state == "active"
        },
        "servers": {
            worker["server"]: {"in_flight": worker["in_flight"], "limit": worker["limit"], **worker["totals"]}
            for worker in ledger.workers()
        },
    }
