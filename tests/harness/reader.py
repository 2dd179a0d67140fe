"""Counts rows with its own eyes: reads all parts of a store and compares them with the prompt file, line by line.

Nothing here comes from gend: a mistake in the product must not hide itself. Its own idea of a right store:

    every part is PREFIX/runs/RUN/parts/NNNNNNNN.jsonl, whole lines of JSON, each ended by a newline
    every prompt of the source has exactly one row, in the part that its batch number names
    a good row's answer carries the mark of its last user message (see fake_server.mark), and its messages begin
    with those of the source
"""

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harness.fake_server import digest, last_user_text, mark

PART = re.compile(r"(?:.*/)?runs/([^/]+)/parts/(\d{8})\.jsonl$")


class Parts(Protocol):
    """A store to read from: names of all objects, and the bytes of one."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...


class FolderParts:
    """The objects below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


class S3Parts:
    """The objects of a bucket below a prefix, through a boto3 client."""

    def __init__(self, client: Any, bucket: str, prefix: str = "") -> None:
        self.client, self.bucket, self.prefix = client, bucket, prefix

    def names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        return sorted(found["Key"] for page in pages for found in page.get("Contents", []))

    def read(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read())


@dataclass
class Seen:
    """What the reader found. All lists are empty for a whole run, but `rows` and `verdicts`."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By id, the first row of each."""
    verdicts: Counter[str] = field(default_factory=Counter)
    parts: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Ids of the source without a row."""
    doubled: list[str] = field(default_factory=list)
    """Ids with more than one row."""
    strange: list[str] = field(default_factory=list)
    """Ids of rows that the source does not have."""
    torn: list[str] = field(default_factory=list)
    """Lines that are not whole JSON objects, as part:line."""
    foreign: list[str] = field(default_factory=list)
    """Ids of good rows whose reply or messages belong to another prompt."""
    misplaced: list[str] = field(default_factory=list)
    """Ids of rows whose run or batch is not what the part's name says."""
    blank: list[str] = field(default_factory=list)
    """Ids of rows called ok without any text or tool call."""
    strangers: list[str] = field(default_factory=list)
    """Objects that are not parts."""

    @property
    def ids(self) -> list[str]:
        return sorted(self.rows)

    def problems(self) -> str:
        """One line for each kind of trouble, with the first few names; "" where there is none."""
        kinds = ("missing", "doubled", "strange", "torn", "foreign", "misplaced", "blank")
        lists = {kind: getattr(self, kind) for kind in kinds}
        return "\n".join(f"{len(found)} {kind}: {', '.join(found[:5])}" for kind, found in lists.items() if found)


def read_prompts(source: Path) -> dict[str, list[dict[str, Any]]]:
    """The messages of each prompt by id, from a file made by `write_prompts` (or any with id and messages)."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    return {line["id"]: line["messages"] for line in lines}


def write_prompts(path: Path, count: int, *, containing: dict[int, str] | None = None) -> Path:
    """A prompt file of `count` different prompts, ids p0000000 on; `containing` adds a text to some of them."""
    with open(path, "w") as out:
        for number in range(count):
            text = f"Question {number}: what is a good name for boat number {number}?"
            text += " " + containing[number] if containing and number in containing else ""
            line = {"id": f"p{number:07d}", "messages": [{"role": "user", "content": text}]}
            out.write(json.dumps(line) + "\n")
    return path


def read_parts(store: Parts, source: Path, run: str = "", ignore: frozenset[str] = frozenset()) -> Seen:
    """Read everything, judge nothing by trust. `run` limits it to one run; ids in `ignore` are not expected."""
    prompts = {id: messages for id, messages in read_prompts(source).items() if id not in ignore}
    seen, times = Seen(), Counter[str]()
    for name in store.names():
        place = PART.match(name)
        if place is None:
            seen.strangers.append(name)
            continue
        if run and place[1] != run:
            continue
        seen.parts.append(name)
        lines = store.read(name).split(b"\n")
        if lines.pop() != b"":
            seen.torn.append(f"{name}: no newline at its end")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                id = row["id"]
            except (ValueError, KeyError, TypeError):
                seen.torn.append(f"{name}:{number}")
                continue
            times[id] += 1
            seen.rows.setdefault(id, row)
            seen.verdicts[row.get("verdict", "no verdict")] += 1
            if row.get("run") != place[1] or row.get("batch") != int(place[2]):
                seen.misplaced.append(id)
            if id in prompts and row.get("verdict") == "ok":
                if not belongs(row, prompts[id]):
                    seen.foreign.append(id)
                if not (row.get("content") or "").strip() and not row.get("tool_calls"):
                    seen.blank.append(id)
    seen.missing = sorted(prompts.keys() - times.keys())
    seen.strange = sorted(times.keys() - prompts.keys())
    seen.doubled = sorted(id for id, count in times.items() if count > 1)
    return seen


def belongs(row: dict[str, Any], messages: list[dict[str, Any]]) -> bool:
    """Whether the row asked these messages (and perhaps more after them), and its reply answers the last of them."""
    asked = row.get("messages") or []
    same = [(m.get("role"), m.get("content")) for m in asked[: len(messages)]] == [
        (m.get("role"), m.get("content")) for m in messages
    ]
    answer = (row.get("content") or "") + json.dumps(row.get("tool_calls") or "")
    return same and mark(last_user_text(asked)) in answer


def assert_whole(
    store: Parts,
    source: Path,
    run: str = "",
    *,
    verdicts: dict[str, int] | None = None,
    ignore: frozenset[str] = frozenset(),
) -> Seen:
    """Fail unless every prompt has exactly one row, whole and its own, with the expected verdicts (default: all ok)."""
    seen = read_parts(store, source, run, ignore)
    assert not seen.problems(), seen.problems()
    expected = {"ok": len(seen.rows)} if verdicts is None else verdicts
    assert dict(seen.verdicts) == {verdict: count for verdict, count in expected.items() if count}
    return seen


# ---- what the fake servers saw


def read_request_log(path: Path) -> list[dict[str, Any]]:
    """The request log of one or more fake servers; a line that is being written is left for the next time."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def times_finished(log: Path, source: Path) -> dict[str, int]:
    """How many times each prompt of the source was answered to the end, by id, for those answered at all."""
    by_sha = {digest(last_user_text(messages)): id for id, messages in read_prompts(source).items()}
    times: dict[str, int] = defaultdict(int)
    for event in read_request_log(log):
        if event["event"] == "finished" and event["sha"] in by_sha:
            times[by_sha[event["sha"]]] += 1
    return dict(times)
