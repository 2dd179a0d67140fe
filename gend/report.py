"""`gend verify`: reads every part with its own eyes. The ledger is not asked: what trains a model is the store.

A run is whole and sound when each batch has one part, each part has exactly one row for each of its prompts, in order,
each row says what run and batch it belongs to and carries its prompt unchanged, and every verdict is a known word.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
import zstandard

from gend.errors import NotSound
from gend.records import PART_NAME, Message, Prompt, Row, Run, part_key
from gend.store import Store
from gend.verdict import VERDICTS

MOST_FAULTS = 20
"""So many faults are described; all are counted."""


class Report(msgspec.Struct, kw_only=True):
    """What `gend verify` found. `faults` describes the first MOST_FAULTS of `fault_count`."""

    run: str
    sound: bool = False
    prompts: int = 0
    batches: int = 0
    rows: int = 0
    parts: int = 0
    missing_batches: int = 0
    verdicts: dict[str, int] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    bytes: int = 0
    fault_count: int = 0
    faults: list[str] = []

    def fault(self, what: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(what)


def verify(store: Store, run: Run, progress: Callable[[int, int], None] | None = None) -> Report:
    """Read every part of a run. Memory is bounded by one part and one piece of the prompt set.

    `progress(batches read, batches in all)` is called now and then. Raises StoreUnavailable, NotSound.
    """
    report = Report(run=run.id, prompts=run.set.accepted, batches=run.batches)
    verdicts: Counter[str] = Counter()
    for key, size in store.list(f"runs/{run.id}/parts/"):
        name = PART_NAME.match(key.rpartition("/")[2])
        if name is None or int(name[1]) >= run.batches:
            report.fault(f"{key}: not a part of this run: remove it ({size} bytes)")
    prompts = stored_prompts(store, run)
    for number in range(run.batches):
        expected = [next_prompt for _, next_prompt in zip(range(run.batch(number).count), prompts, strict=False)]
        key = part_key(run.id, number)
        body = store.get(key)
        if body is None:
            report.missing_batches += 1
            report.fault(f"{key}: missing: {len(expected)} rows are not there; `gend up` makes them")
        else:
            report.parts += 1
            report.bytes += len(body)
            _read_part(report, verdicts, run, number, key, body, expected)
        if progress:
            progress(number + 1, run.batches)
    if next(prompts, None) is not None:
        report.fault("the stored prompt set is longer than the run says")
    report.verdicts = dict(verdicts.most_common())
    report.sound = report.fault_count == 0 and report.rows == run.set.accepted
    return report


def _read_part(
    report: Report, verdicts: Counter[str], run: Run, number: int, key: str, body: bytes, expected: list[Prompt]
) -> None:
    if not body.endswith(b"\n"):
        report.fault(f"{key}: torn: it does not end with a newline")
    lines = body.splitlines()
    if len(lines) != len(expected):
        report.fault(f"{key}: {len(lines)} rows for {len(expected)} prompts")
    for index, line in enumerate(lines):
        try:
            row = _decode_row(line)
        except msgspec.DecodeError as error:
            report.fault(f"{key}:{index + 1}: not a row: {error}")
            continue
        report.rows += 1
        verdicts[row.verdict] += 1
        report.prompt_tokens += row.usage.prompt_tokens
        report.completion_tokens += row.usage.completion_tokens
        report.reasoning_tokens += row.usage.reasoning_tokens
        if row.run != run.id or row.batch != number:
            report.fault(f"{key}:{index + 1}: a row of {row.run}/{row.batch}")
        if row.verdict not in VERDICTS:
            report.fault(f"{key}:{index + 1}: verdict {row.verdict!r} is no known word")
        if index < len(expected):
            prompt = expected[index]
            if row.id != prompt.id:
                report.fault(f"{key}:{index + 1}: row {row.id!r} where prompt {prompt.id!r} belongs")
            elif not prompt_unchanged(row, prompt):
                report.fault(f"{key}:{index + 1}: row {row.id!r} does not carry its prompt unchanged")


def prompt_unchanged(row: Row, prompt: Prompt) -> bool:
    """Whether a row's conversation is the prompt's, with replies between the follow-ups."""
    asked = len(prompt.messages)
    if row.messages[:asked] != prompt.messages or (row.tools or None) != (prompt.tools or None):
        return False
    later: list[Message] = [message for message in row.messages[asked:] if message.get("role") != "assistant"]
    return later == prompt.follow_ups or (row.error is not None and later == prompt.follow_ups[: len(later)])


def stored_prompts(store: Store, run: Run) -> Iterator[Prompt]:
    """All prompts of a run from the store, in order. Raises NotSound when the set is not there."""
    home = f"sets/{run.set.fingerprint}"
    decode = msgspec.json.Decoder(Prompt).decode
    number = 0
    while (piece := store.get(f"{home}/prompts-{number:05d}.jsonl.zst")) is not None:
        for line in zstandard.ZstdDecompressor().decompress(piece).splitlines():
            yield decode(line)
        number += 1
    if number == 0:
        raise NotSound(f"run {run.id}: its prompt set {run.set.fingerprint[:12]} is not in the store {store.url}")


_decode_row = msgspec.json.Decoder(Row).decode
