"""Rows as they are made, for the page: the newest of each verdict, and how long replies are.

Read from the spool of open batches, where every row is at once, and from a few parts: those of batches that were whole
before anybody looked. Bounded: so many bytes a look, so many rows and runs in memory.
"""

import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gend.errors import StoreUnavailable
from gend.ledger import Ledger
from gend.records import Row, Run, part_key
from gend.runs import decode_row
from gend.spool import checked_row, row_files
from gend.store import Store

ROWS_KEPT = 12
"""Of each verdict of a run."""

RUNS_KEPT = 4
LOOK_BYTES = 8 << 20
FIRST_PARTS, MORE_PARTS = 6, 2
PARTS_EVERY_SECONDS = 30.0
MOST_BINS = 60
HEAD_CHARS, TAIL_CHARS = 4000, 2000
"""What is shown of a long text: how a reply ends tells most about it."""


class _Kept:
    """What is known of one run."""

    def __init__(self) -> None:
        self.newest: dict[str, deque[Row]] = {}
        self.seen: Counter[str] = Counter()
        self.replies: Counter[int] = Counter()
        self.thoughts: Counter[int] = Counter()
        self.ends: dict[Path, int] = {}  # of each spool file, up to where it was read
        self.batches: set[int] = set()  # read from the spool or as a part
        self.parts_at = 0.0

    def add(self, row: Row) -> None:
        self.newest.setdefault(row.verdict, deque(maxlen=ROWS_KEPT)).appendleft(row)
        self.seen[row.verdict] += 1
        if row.usage.completion_tokens:
            self.replies[row.usage.completion_tokens] += 1
            self.thoughts[row.usage.reasoning_tokens] += 1


class RowSamples:
    """The samples of the newest runs. `look` blocks and belongs in a thread; `view` may be called meanwhile."""

    def __init__(self, folder: Path, store: Store, ledger: Ledger):
        self._folder, self._store, self._ledger = folder, store, ledger
        self._kept: dict[str, _Kept] = {}

    def look(self, runs: Sequence[Run]) -> None:
        """Read what is new of these runs, those first that matter most. Raises LedgerUnavailable, StoreUnavailable."""
        left = LOOK_BYTES
        for run in runs[:RUNS_KEPT]:
            kept = self._kept.setdefault(run.id, _Kept())
            left -= self._read_spool(run, kept, left)
        for gone in set(self._kept) - {run.id for run in runs[:RUNS_KEPT]}:
            del self._kept[gone]
        for run in runs[:RUNS_KEPT]:
            kept = self._kept[run.id]
            if time.monotonic() - kept.parts_at > PARTS_EVERY_SECONDS or not kept.parts_at:
                self._read_parts(run, kept, MORE_PARTS if kept.parts_at else FIRST_PARTS)
                kept.parts_at = time.monotonic()

    def _read_spool(self, run: Run, kept: _Kept, most_bytes: int) -> int:
        ends, taken = {}, 0
        for path in row_files(self._folder, run.id):
            end = kept.ends.get(path, 0)
            try:
                if taken < most_bytes and path.stat().st_size > end:
                    with open(path, "rb") as file:
                        file.seek(end)
                        new = file.read(most_bytes - taken)
                    taken += len(new)
                    end += new.rfind(b"\n") + 1
                    for line in new.split(b"\n")[:-1]:
                        if row := checked_row(line):
                            kept.add(decode_row(row))
                    kept.batches.add(int(path.parent.name))
            except FileNotFoundError:  # its part has just arrived
                continue
            ends[path] = end
        kept.ends = ends
        return taken

    def _read_parts(self, run: Run, kept: _Kept, most: int) -> None:
        there = sorted(self._ledger.done(run.id) - kept.batches)
        chosen = there[-most // 2 :] + random.sample(there[: -most // 2], min(most // 2, len(there[: -most // 2])))
        for number in chosen:
            kept.batches.add(number)
            for line in (self._store.get(part_key(run.id, number)) or b"").splitlines():
                try:
                    kept.add(decode_row(line))
                except msgspec.DecodeError as error:
                    raise StoreUnavailable(f"{part_key(run.id, number)} is no part: {error}") from error

    def view(self, run: str) -> dict[str, Any]:
        """What the page shows of a run: rows by verdict, newest first, and two histograms, as JSON values."""
        kept = self._kept.get(run) or _Kept()
        return {
            "seen": dict(kept.seen.most_common()),
            "rows": {word: [_shown(row) for row in list(rows)] for word, rows in list(kept.newest.items())},
            "replies": histogram(kept.replies.copy()),
            "thoughts": histogram(kept.thoughts.copy()),
        }


def histogram(counts: Counter[int]) -> dict[str, Any]:
    """`bins[i]` counts the lengths from i * step on, below the next; steps are 1, 2 or 5 times a power of ten."""
    longest, step, factors = max(counts, default=0), 1, (2, 5, 10)
    while longest // step >= MOST_BINS:
        power = 10 ** (len(str(step)) - 1)
        step = next(factor * power for factor in factors if factor * power > step)
    bins = [0] * (longest // step + 1)
    for length, count in counts.items():
        bins[length // step] += count
    total = sum(counts.values())
    mean = sum(length * count for length, count in counts.items()) / total if total else 0.0
    return {"step": step, "bins": bins if total else [], "rows": total, "mean": round(mean, 1), "longest": longest}


def _shown(row: Row) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(row)
    for name in ("prompt_token_ids", "token_ids"):
        shown.pop(name, None)
    shown["messages"] = [
        {name: _clipped(value if isinstance(value, str) else _json(value)) for name, value in message.items() if value}
        for message in row.messages
    ]
    for name in ("content", "reasoning_content", "error"):
        shown[name] = _clipped(shown[name] or "")
    for name in ("tools", "tool_calls"):
        shown[name] = _clipped(_json(shown[name])) if shown[name] else ""
    return shown


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _clipped(text: str) -> str:
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    if left_out <= 0:
        return text
    return f"{text[:HEAD_CHARS]}\n\n[... {left_out:,} characters left out ...]\n\n{text[-TAIL_CHARS:]}"
