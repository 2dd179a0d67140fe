"""`gend rows`: real rows of a run, out of its parts and out of the spool of what is open now, for a person to read.

Rows hold whatever a model can say: control characters and escape sequences are shown as text, never sent to a terminal.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from gend import sets
from gend.errors import NotSound, SettingsError
from gend.records import Row, Run, part_key
from gend.runs import decode_row, listed_parts, prompt_lines
from gend.spool import checked_row, row_files
from gend.store import Store

HEAD_CHARS, TAIL_CHARS = 1500, 600
"""What is shown of a long text: how a reply ends tells most about it."""

ROWS_OF_A_PART = 3
"""Of one part so many random rows at most, so that they are not all of the same stretch of the prompt set."""

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
# What a terminal obeys, and what turns the direction of writing: shown as \x1b, \u202e, ...
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


# -- which rows --------------------------------------------------------------------------------------------------


def newest_rows(store: Store, run: Run, folder: Path, looked: Callable[[int], None]) -> Iterator[Row]:
    """Rows of the open batches on this box, newest first, then of the parts, from the last batch on down.

    `looked` is told how many parts were read.
    """
    yield from spooled_rows(folder, run)
    parts, _ = listed_parts(store, run)
    for count, number in enumerate(sorted(parts, reverse=True), 1):
        looked(count)
        yield from reversed(rows_of_part(store, run, number))


def random_rows(store: Store, run: Run, luck: Random, looked: Callable[[int], None]) -> Iterator[Row]:
    """Rows of the parts in random order, a few of each part."""
    parts, _ = listed_parts(store, run)
    numbers = sorted(parts)
    luck.shuffle(numbers)
    for count, number in enumerate(numbers, 1):
        looked(count)
        rows = rows_of_part(store, run, number)
        luck.shuffle(rows)
        yield from rows[:ROWS_OF_A_PART]


def row_of_prompt(store: Store, run: Run, folder: Path, prompt: str) -> Row:
    """The row of one prompt. Raises SettingsError where the run has no such prompt, or no row for it yet."""
    start = b'{"id":' + msgspec.json.encode(prompt) + b","
    if sets.present(folder, run.set.fingerprint):
        with open(sets.set_folder(folder, run.set.fingerprint) / "prompts.jsonl", "rb") as lines:
            index = _index(lines, start)
    else:
        index = _index(prompt_lines(store, run), start)
    if index is None:
        raise SettingsError(f"run {run.id} has no prompt with the id {prompt!r}")
    number = index // run.batch_size
    for row in [*rows_of_part(store, run, number), *spooled_rows(folder, run, [number])]:
        if row.id == prompt:
            return row
    raise SettingsError(f"prompt {prompt!r} of batch {run.id}/{number} has no row yet; see gend status")


def _index(lines: Iterable[bytes], start: bytes) -> int | None:
    return next((number for number, line in enumerate(lines) if line.startswith(start)), None)


def rows_of_part(store: Store, run: Run, number: int) -> list[Row]:
    """The rows of one part; none where there is no part. Raises NotSound where one cannot be read."""
    key = part_key(run.id, number)
    try:
        return [decode_row(line) for line in (store.get(key) or b"").splitlines()]
    except msgspec.DecodeError as error:
        raise NotSound(f"{key}: not a part: {error}; run `gend verify {run.id}`") from error


def spooled_rows(folder: Path, run: Run, numbers: Sequence[int] | None = None) -> Iterator[Row]:
    """Rows that wait on this box for the end of their batch (of all, or of these), the newest file's last row first."""
    found = []
    for number in numbers if numbers is not None else [None]:
        for path in row_files(folder, run.id, number):
            try:
                found.append((path.stat().st_mtime, path))
            except FileNotFoundError:  # its part has just arrived
                continue
    for _, path in sorted(found, reverse=True):
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            continue
        for line in reversed(lines):
            if row := checked_row(line):
                yield decode_row(row)


# -- how they look -----------------------------------------------------------------------------------------------


def show(row: Row, width: int, colour: bool, full: bool = False) -> str:
    """One row as text: the conversation, then the thought dimmed, the answer, tool calls, the error."""

    def paint(text: str, *styles: str) -> str:
        codes = ";".join(_STYLES[style] for style in styles)
        return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else line for line in text.split("\n"))

    if not colour:
        paint = _unpainted
    tone = {"ok": "green", "length": "yellow"}.get(row.verdict, "red")
    usage = row.usage
    facts = [f"{usage.completion_tokens:,} tokens", f"{usage.reasoning_tokens:,} of thought", f"{row.seconds:.1f} s"]
    facts += [f"server {row.server}", f"batch {row.batch}", f"ended by {row.finish_reason or 'nothing'}"]
    facts += [f"{row.attempts} attempts"] if row.attempts > 1 else []
    facts += [f"made with {name} {value}" for name, value in (row.changed or {}).items()]
    lines = [f"{paint(plain(row.id), 'bold')}  {paint(plain(row.verdict), tone, 'bold')}"]
    lines += [paint(line, "dim") for line in textwrap.wrap(plain(", ".join(facts)), width)]

    def part(title: str, text: str, *styles: str) -> None:
        body = clipped(plain(text), full)
        lines.append(paint(f"-- {title}, {len(text):,} characters", "cyan"))
        lines.append(paint(body, *styles) if styles else body)

    for message in row.messages:
        role = plain(str(message.get("role", "?")))
        if thought := message.get("reasoning_content"):
            part(f"{role}, thought", _text(thought), "dim")
        part(role, _text(message.get("content")))
        if calls := message.get("tool_calls"):
            part(f"{role}, tool calls", _text(calls))
    if row.tools:
        names = [str((tool.get("function") or tool).get("name", "?")) for tool in row.tools]
        part(f"{len(row.tools)} tools offered", ", ".join(names))
    if row.reasoning_content:
        part("thought", row.reasoning_content, "dim")
    if row.content:
        part("answer", row.content)
    for call in row.tool_calls or ():
        function = call.get("function") or {}
        part(f"tool call {plain(str(function.get('name', '?')))}", _text(function.get("arguments")))
    if row.error:
        part("error", row.error, "red")
    if not (row.reasoning_content or row.content or row.tool_calls):
        lines.append(paint("-- no reply at all", "red"))
    return "\n".join(lines) + "\n"


def _unpainted(text: str, *_: str) -> str:
    return text


def plain(text: str) -> str:
    """`text` without anything that a terminal obeys but newline and tab: it is shown by its code."""
    return _OBEYED.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def clipped(text: str, full: bool) -> str:
    """The beginning and the end of a long text."""
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    if full or left_out <= 0:
        return text
    return f"{text[:HEAD_CHARS]}\n[... {left_out:,} characters left out; --full shows them ...]\n{text[-TAIL_CHARS:]}"


def _text(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()
