"""Runs as the store holds them: the prompts of a run, its parts, its rounds, and which of several has the best row.

Shared by the flows that read parts back (verify, export, retry). Nothing here asks the ledger.
"""

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import zstandard

from gend.errors import NotSound
from gend.hash_table import HashTable, hash64
from gend.records import PART_NAME, Batch, Row, Run, part_key
from gend.store import Store
from gend.verdict import ERROR, VERDICTS, badness

READERS = 4
"""So many parts are fetched at once: a store answers slowly, and a thread that waits costs nothing."""

READ_AHEAD_BYTES = 32 << 20
"""Parts that were fetched and not used yet take no more than this, or one part if that is larger."""

# -- what there is -----------------------------------------------------------------------------------------------


def stored_run(store: Store, run: str) -> Run:
    """The run as it was registered. Raises NotSound if there is none, or it cannot be read."""
    raw = store.get(f"runs/{run}/run.json")
    if raw is None:
        raise NotSound(f"run {run}: the store {store.url} has no such run")
    try:
        found = msgspec.json.decode(raw, type=Run)
    except msgspec.DecodeError as error:
        raise NotSound(f"run {run}: runs/{run}/run.json in the store cannot be read: {error}") from error
    if found.id != run:
        raise NotSound(f"run {run}: runs/{run}/run.json in the store is that of another run, {found.id}")
    return found


def stored_rounds(store: Store, run: Run) -> list[Run]:
    """The rounds in which rows of `run` were made again, the first one first."""
    # A folder without run.json is no run: somebody else's, or one that was never registered to the end.
    names = [name for name in store.folders("runs/") if name != run.id and store.exists(f"runs/{name}/run.json")]
    others = [stored_run(store, name) for name in names]
    return sorted((other for other in others if other.round_of == run.id), key=lambda other: (other.round, other.id))


def listed_parts(store: Store, run: Run) -> tuple[dict[int, int], list[tuple[str, int]]]:
    """The parts of a run, batch number -> bytes, and the objects beside them that are none, (key, bytes)."""
    parts: dict[int, int] = {}
    strangers = []
    for key, size in store.list(f"runs/{run.id}/parts/"):
        name = PART_NAME.match(key.rpartition("/")[2])
        number = int(name[1]) if name else -1
        if 0 <= number < run.batches and key == part_key(run.id, number):
            parts[number] = size
        else:
            strangers.append((key, size))
    return parts, strangers


# -- prompts and parts, in order ---------------------------------------------------------------------------------


def prompt_lines(store: Store, run: Run) -> Iterator[bytes]:
    """The prompts of a run, one JSON line each, in order. Raises NotSound when the set is not there or damaged."""
    home = f"sets/{run.set.fingerprint}"
    number = 0
    while (piece := store.get(f"{home}/prompts-{number:05d}.jsonl.zst")) is not None:
        try:
            # Line by line: a piece holds 64 MB.
            with zstandard.ZstdDecompressor().stream_reader(piece) as stream:
                yield from io.BufferedReader(stream, 1 << 20)
        except zstandard.ZstdError as error:
            key = f"{home}/prompts-{number:05d}.jsonl.zst"
            raise NotSound(f"{key} in the store is damaged: {error}; enqueue the same file again") from error
        number += 1
    if number == 0:
        raise NotSound(
            f"run {run.id}: its prompt set {run.set.fingerprint[:12]} is not in the store {store.url}; "
            "enqueue the same file again to bring it back"
        )


class Part(msgspec.Struct, frozen=True):
    """One batch as the store has it: the lines of its prompts, and the part, None where there is none."""

    batch: Batch
    key: str
    prompts: list[bytes]
    body: bytes | None

    def lines(self) -> list[bytes]:
        """The rows' JSON; without the newlines. A last line that is cut off is one too."""
        lines = (self.body or b"").split(b"\n")
        return lines if lines[-1] else lines[:-1]


def read_parts(store: Store, run: Run, listed: dict[int, int]) -> Iterator[Part]:
    """Every batch of a run in order, fetched ahead by a few threads. `listed` is what `listed_parts` gave.

    Memory: READ_AHEAD_BYTES and one part. Raises StoreUnavailable, NotSound.
    """
    prompts = prompt_lines(store, run)
    with ThreadPoolExecutor(READERS, thread_name_prefix="parts") as pool:
        ahead: deque[Future[bytes | None] | None] = deque()
        ahead_bytes, following = 0, 0
        for number in range(run.batches):
            while following < run.batches and (following == number or ahead_bytes < READ_AHEAD_BYTES):
                there = following in listed
                ahead.append(pool.submit(store.get, part_key(run.id, following)) if there else None)
                ahead_bytes += listed.get(following, 0)
                following += 1
            fetch = ahead.popleft()
            batch = run.batch(number)
            yield Part(
                batch=batch,
                key=part_key(run.id, number),
                prompts=[line for _, line in zip(range(batch.count), prompts, strict=False)],
                body=fetch.result() if fetch else None,
            )
            ahead_bytes -= listed.get(number, 0)


class _Id(msgspec.Struct):
    id: str


_decode_id = msgspec.json.Decoder(_Id).decode
decode_row = msgspec.json.Decoder(Row).decode


def sound_rows(part: Part) -> Iterator[tuple[bytes, Row]]:
    """Each prompt's line with its row; nothing where the part is missing.

    Raises NotSound unless there is exactly one row for each prompt, in order: who trains on it must not guess.
    """
    if part.body is None:
        return
    lines = part.lines()
    if len(lines) != len(part.prompts):
        raise NotSound(f"{part.key}: {len(lines)} rows for {len(part.prompts)} prompts; run `gend verify`")
    for number, (prompt, line) in enumerate(zip(part.prompts, lines, strict=True), 1):
        try:
            row = decode_row(line)
        except msgspec.DecodeError as error:
            raise NotSound(f"{part.key}:{number}: not a row: {error}; run `gend verify`") from error
        if row.id != _decode_id(prompt).id:
            raise NotSound(f"{part.key}:{number}: row {row.id!r} is in another prompt's place; run `gend verify`")
        yield prompt, row


# -- the best row of each prompt ---------------------------------------------------------------------------------


class BestRows:
    """Which of several runs holds the best row of a prompt: `ok` before `length` before the rest, else the earlier run.

    Two prompts are the same when their lines are: id, messages, tools and all. First the rows of all runs but the
    first are offered, then those of all runs are asked for, the first run's before the others'. So the largest run
    should be the first: it is read once and takes no memory; a prompt of the others takes some 11 bytes.
    """

    def __init__(self) -> None:
        self._table = HashTable()

    def offer(self, prompt: bytes, verdict: str, source: int) -> None:
        """Run number `source` (0 is the first) has a row with this verdict for the prompt with this line."""
        key, value = hash64(prompt), _packed(verdict, source)
        known = self._table.get(key)
        if known is None:
            self._table.add(key, value)
        elif value < known:
            self._table.replace(key, value)

    def best(self, prompt: bytes, verdict: str, source: int) -> tuple[str, int]:
        """Verdict and run of the prompt's best row, given that run `source` has one with `verdict`."""
        key, value = hash64(prompt), _packed(verdict, source)
        known = self._table.get(key)
        if known is None or value <= known:
            if known is not None:
                self._table.replace(key, value)
            return verdict, source
        return VERDICTS[known & 0xFF], known >> 8 & 0xFFFF


def _packed(verdict: str, source: int) -> int:
    # Badness counts most, then the run; the word itself only rides along.
    word = VERDICTS.index(verdict) if verdict in VERDICTS else VERDICTS.index(ERROR)
    return badness(verdict) << 24 | source << 8 | word
