"""`gend verify`: reads every part with its own eyes. The ledger is not asked: what trains a model is the store.

A run is whole and sound when each batch has one part and nothing else lies beside them, each part has exactly one row
for each of its prompts, in order, each row says what run and batch it belongs to and carries its prompt unchanged,
every verdict is a known word, no row called `ok` lacks its answer, none was made with settings that the run's verdicts
do not ask for, and the stored prompts are those that were registered (SHA-256). What is only strange, such as token
counts that cannot be, is a doubt and no fault.

The rounds in which rows were made again are read like the run itself. A round that is not finished is no fault of the
run, whose own row then counts.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from gend.hash_table import HashTable, hash64
from gend.provenance import Engine, stored_engines
from gend.records import Message, Prompt, Row, Run
from gend.runs import BestRows, Part, decode_row, listed_parts, read_parts
from gend.store import Store
from gend.verdict import FAILED, LENGTH, OK, VERDICTS, next_attempt

MOST_SHOWN = 20
"""So many faults and doubts are described; all are counted."""

PERCENTILES = (5, 25, 50, 75, 95, 99)
BINS = 40
"""Bars of a histogram, at most."""


class Lengths(msgspec.Struct, kw_only=True):
    """How long something is, in tokens, over `rows` rows. `bins[i]` counts those from i * step on, below the next."""

    rows: int = 0
    mean: float = 0.0
    percentiles: dict[str, int] = {}
    longest: int = 0
    step: int = 1
    bins: list[int] = []


class Repeats(msgspec.Struct, kw_only=True):
    """Answers that several rows share: so many rows, so many different answers, and the most frequent one's start."""

    rows: int = 0
    answers: int = 0
    most: int = 0
    text: str = ""


class Report(msgspec.Struct, kw_only=True):
    """What `gend verify` found. `faults` and `doubts` describe the first MOST_SHOWN of `fault_count`, `doubt_count`.

    `engines` counts rows by what made them (empty: they do not say), `made_with` says what that was.
    `best` and `best_from` count the best row of each prompt, over the run and its rounds, by verdict and by run.
    """

    run: str
    sound: bool = False
    prompts: int = 0
    batches: int = 0
    rows: int = 0
    parts: int = 0
    missing_batches: int = 0
    strangers: int = 0
    verdicts: dict[str, int] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    bytes: int = 0
    reply_lengths: Lengths = msgspec.field(default_factory=Lengths)
    thinking_lengths: Lengths = msgspec.field(default_factory=Lengths)
    repeats: Repeats = msgspec.field(default_factory=Repeats)
    fault_count: int = 0
    faults: list[str] = []
    doubt_count: int = 0
    doubts: list[str] = []
    rounds: list["Report"] = []
    engines: dict[str, int] = {}
    made_with: dict[str, Engine] = {}
    best: dict[str, int] = {}
    best_from: dict[str, int] = {}

    def fault(self, what: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MOST_SHOWN:
            self.faults.append(what)

    def doubt(self, what: str) -> None:
        self.doubt_count += 1
        if len(self.doubts) < MOST_SHOWN:
            self.doubts.append(what)


class Samples:
    """A few rows of each verdict as JSON lines, each row with the same chance (Vitter's algorithm R)."""

    def __init__(self, each: int, seed: str):
        self.rows: dict[str, list[bytes]] = {}
        self._each, self._random, self._seen = each, random.Random(seed), Counter[str]()

    def offer(self, verdict: str, line: bytes) -> None:
        kept = self.rows.setdefault(verdict, [])
        self._seen[verdict] += 1
        if len(kept) < self._each:
            kept.append(line)
        elif (place := self._random.randrange(self._seen[verdict])) < self._each:
            kept[place] = line


def verify(
    store: Store,
    run: Run,
    rounds: Sequence[Run] = (),
    samples: Samples | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Read every part of a run and its rounds. Some parts are in memory at a time, and about 25 bytes a row.

    `progress(batches read)` is called for each. Raises StoreUnavailable; NotSound when the prompts cannot be read.
    """
    best_rows, best, best_from, batches = BestRows(), Counter[str](), Counter[str](), 0
    names = [run.id, *(again.id for again in rounds)]

    def count(part: Part) -> Part:
        nonlocal batches
        batches += 1
        if progress:
            progress(batches)
        return part

    reports = []
    for source, again in enumerate(rounds, 1):
        reading = _Reading(again, None)
        for part in read_parts(store, again, reading.listed(store)):
            for prompt, row in reading.read(count(part)):
                best_rows.offer(prompt, row.verdict, source)
        reports.append(reading.end(stored_engines(store, again)))
    reading = _Reading(run, samples)
    for part in read_parts(store, run, reading.listed(store)):
        for prompt, row in reading.read(count(part)):
            verdict, source = best_rows.best(prompt, row.verdict, 0) if rounds else (row.verdict, 0)
            best[verdict] += 1
            best_from[names[source]] += 1
    report = reading.end(stored_engines(store, run))
    report.rounds, report.best, report.best_from = reports, dict(best.most_common()), dict(best_from.most_common())
    report.sound = report.sound and all(again.fault_count == again.missing_batches for again in reports)
    return report


class _Reading:
    """One run while it is read, part after part."""

    def __init__(self, run: Run, samples: Samples | None):
        self._run, self._samples = run, samples
        self._report = Report(run=run.id, prompts=run.set.accepted, batches=run.batches)
        self._verdicts, self._engines = Counter[str](), Counter[str]()
        # Exact, and no larger than the longest reply is long.
        self._replies, self._thoughts = Counter[int](), Counter[int]()
        self._answers = HashTable()
        self._prompts_digest = hashlib.sha256()

    def listed(self, store: Store) -> dict[int, int]:
        """The parts that are there; what lies beside them is a fault."""
        listed, strangers = listed_parts(store, self._run)
        self._report.strangers = len(strangers)
        for key, size in strangers:
            self._report.fault(f"{key}: not a part of this run: remove it ({size} bytes)")
        return listed

    def read(self, part: Part) -> list[tuple[bytes, Row]]:
        """Check one part; gives the rows that stand in their prompt's place, each with the prompt's line."""
        report = self._report
        for prompt_line in part.prompts:
            self._prompts_digest.update(prompt_line)
        if part.body is None:
            report.missing_batches += 1
            report.fault(f"{part.key}: missing: {part.batch.count} rows are not there; `gend up` makes them")
            return []
        report.parts += 1
        report.bytes += len(part.body)
        if not part.body.endswith(b"\n"):
            report.fault(f"{part.key}: torn: it does not end with a newline")
        lines = part.lines()
        if len(lines) != part.batch.count:
            report.fault(f"{part.key}: {len(lines)} rows for {part.batch.count} prompts")
        placed = []
        for index, line in enumerate(lines):
            where = f"{part.key}:{index + 1}"
            try:
                row = decode_row(line)
            except msgspec.DecodeError as error:
                report.fault(f"{where}: not a row: {error}")
                continue
            self._count(row, line)
            if row.run != self._run.id or row.batch != part.batch.number:
                report.fault(f"{where}: a row of {row.run}/{row.batch}")
            if (lie := _lie(row, self._run)) is not None:
                report.fault(f"{where}: row {row.id!r} {lie}")
            if index < len(part.prompts):
                prompt = _decode_prompt(part.prompts[index])
                if (doubt := _doubt(row, prompt, self._run)) is not None:
                    report.doubt(f"{where}: row {row.id!r} {doubt}")
                if row.id != prompt.id:
                    report.fault(f"{where}: row {row.id!r} where prompt {prompt.id!r} belongs")
                elif not prompt_unchanged(row, prompt):
                    report.fault(f"{where}: row {row.id!r} does not carry its prompt unchanged")
                else:
                    placed.append((part.prompts[index], row))
        return placed

    def _count(self, row: Row, line: bytes) -> None:
        report, usage = self._report, row.usage
        report.rows += 1
        self._verdicts[row.verdict] += 1
        self._engines[row.engine or ""] += 1
        report.prompt_tokens += usage.prompt_tokens
        report.completion_tokens += usage.completion_tokens
        report.reasoning_tokens += usage.reasoning_tokens
        if usage.completion_tokens > 0:
            self._replies[usage.completion_tokens] += 1
            self._thoughts[max(usage.reasoning_tokens, 0)] += 1
        if row.content and not row.content.isspace():
            self._count_answer(row.content)
        if self._samples:
            self._samples.offer(row.verdict, line)

    def _count_answer(self, answer: str) -> None:
        key, repeats = hash64(answer), self._report.repeats
        before = self._answers.get(key)
        if before is None:
            self._answers.add(key, 1)
            return
        self._answers.replace(key, before + 1)
        repeats.rows += 2 if before == 1 else 1
        repeats.answers += before == 1
        if before >= repeats.most:
            repeats.most, repeats.text = before + 1, answer[:200]

    def end(self, engines: dict[str, Engine]) -> Report:
        report = self._report
        report.engines = dict(self._engines.most_common())
        report.made_with = {name: engines[name] for name in report.engines if name in engines}
        for name in report.engines.keys() - engines.keys() - {""}:
            rows = report.engines[name]
            report.doubt(f"runs/{self._run.id}/engines/{name}.json: not there: what made {rows:,} rows is not known")
        if self._prompts_digest.hexdigest() != self._run.set.fingerprint:
            report.fault(
                f"sets/{self._run.set.fingerprint}: the stored prompts are not those that were registered "
                f"({self._run.set.accepted} with this SHA-256); enqueue the same file again to mend them"
            )
        report.verdicts = dict(self._verdicts.most_common())
        report.reply_lengths, report.thinking_lengths = lengths(self._replies), lengths(self._thoughts)
        report.sound = report.fault_count == 0 and report.rows == self._run.set.accepted
        return report


_decode_prompt = msgspec.json.Decoder(Prompt).decode


def prompt_unchanged(row: Row, prompt: Prompt) -> bool:
    """Whether a row's conversation is the prompt's, with replies between the follow-ups."""
    asked = len(prompt.messages)
    if row.messages[:asked] != prompt.messages or (row.tools or None) != (prompt.tools or None):
        return False
    later: list[Message] = [message for message in row.messages[asked:] if message.get("role") != "assistant"]
    return later == prompt.follow_ups or (row.error is not None and later == prompt.follow_ups[: len(later)])


def _lie(row: Row, run: Run) -> str | None:
    """How a row contradicts itself or its run, as far as a look tells it."""
    if row.verdict not in VERDICTS:
        return f"has the verdict {row.verdict!r}, which is no known word"
    if row.verdict == OK:
        if not (row.content and not row.content.isspace()) and not row.tool_calls:
            return "is called ok and has no answer"
        if row.finish_reason == "length" or row.error is not None:
            return f"is called ok, with finish_reason {row.finish_reason!r} and error {row.error!r}"
    if row.changed and not any(row.changed == next_attempt(word, 0, run.verdicts) for word in VERDICTS):
        return f"was made with {row.changed}, which the run's verdicts do not ask for"
    return None


def _doubt(row: Row, prompt: Prompt, run: Run) -> str | None:
    """What is strange about a row without being wrong for certain: mostly token counts that cannot be."""
    usage = row.usage
    if row.verdict in FAILED:
        return None if row.error else f"is called {row.verdict} and does not say why"
    text = sum(len((part or "").encode("utf-8", "replace")) for part in (row.content, row.reasoning_content))
    turns = 1 + len(prompt.follow_ups)
    if min(usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens) < 0:
        return f"has negative token counts: {usage}"
    if text and not (usage.prompt_tokens and usage.completion_tokens):
        return f"has {text} bytes of reply, but {usage.completion_tokens} tokens to {usage.prompt_tokens} of prompt"
    if usage.reasoning_tokens > usage.completion_tokens:
        return f"has more thinking tokens ({usage.reasoning_tokens}) than tokens ({usage.completion_tokens})"
    most = (row.changed or {}).get("max_tokens", run.sampling.max_tokens)
    if usage.completion_tokens > turns * most:
        return f"has {usage.completion_tokens} tokens, over max_tokens ({most}) for {turns} replies"
    # A token is at least a byte of text, but for the few that mark turns, thoughts and calls.
    if turns == 1 and not row.tool_calls and usage.completion_tokens > 2 * text + 64:
        return f"has {usage.completion_tokens} tokens, but only {text} bytes of text: text was lost on the way"
    if row.verdict == LENGTH and row.finish_reason != "length":
        return f"is called length, with finish_reason {row.finish_reason!r}"
    return None


def render(report: Report) -> str:
    """The report as lines for a terminal."""
    lines = [
        f"run {report.run}: {report.rows:,} rows for {report.prompts:,} prompts, "
        f"{report.parts:,} of {report.batches:,} parts, {report.bytes / 1e6:,.1f} MB, "
        f"{report.completion_tokens:,} tokens made",
        "verdicts: " + shares(report.verdicts),
        f"tokens a reply:  {_percentiles(report.reply_lengths)}",
        f"tokens thinking: {_percentiles(report.thinking_lengths)}",
    ]
    for name, engine in report.made_with.items():
        lines.append(f"made with: {in_words(engine)}: {report.engines[name]:,} rows ({name})")
    if report.repeats.rows:
        lines.append(
            f"repeated answers: {report.repeats.rows:,} rows share {report.repeats.answers:,} answers; "
            f"{report.repeats.most:,} times: {report.repeats.text[:60]!r}"
        )
    for again in report.rounds:
        lines.append(
            f"round {again.run}: {again.rows:,} of {again.prompts:,} rows made again, "
            f"{report.best_from.get(again.run, 0):,} of them better: {shares(again.verdicts)}"
        )
    if report.rounds:
        lines.append("best row of each prompt: " + shares(report.best))
    for kind, count, shown in troubles(report):
        lines += [f"{count:,} {kind}:", *(f"  {line}" for line in shown)]
        if count > len(shown):
            lines.append(f"  and {count - len(shown):,} more")
    lines.append("whole and sound" if report.sound else "NOT SOUND: do not train on it before you know why")
    return "\n".join(lines)


def shares(verdicts: dict[str, int]) -> str:
    """Counts by verdict in words, with their share."""
    rows = sum(verdicts.values())
    return ", ".join(f"{word} {count:,} ({count / rows:.1%})" for word, count in verdicts.items()) or "none"


def in_words(engine: Engine) -> str:
    """An engine in a few words."""
    words = [f"{' '.join(engine.command)} {engine.version}".strip(), engine.model]
    words += [f"revision {engine.revision[:12]}"] if engine.revision else []
    words += [f"template {engine.template}"] if engine.template else []
    return ", ".join(words)


def _percentiles(lengths: Lengths) -> str:
    shown = "  ".join(f"{name} {value:,}" for name, value in lengths.percentiles.items())
    return f"{shown}  longest {lengths.longest:,}  mean {lengths.mean:,.0f}" if lengths.rows else "none"


def troubles(report: Report) -> list[tuple[str, int, list[str]]]:
    """Faults and doubts of a run and of its rounds: what they are, how many, and the first of them."""
    every = [("faults", report.fault_count, report.faults), ("doubts", report.doubt_count, report.doubts)]
    for again in report.rounds:
        every.append((f"faults in round {again.run}", again.fault_count, again.faults))
        every.append((f"doubts in round {again.run}", again.doubt_count, again.doubts))
    return [trouble for trouble in every if trouble[1]]


def lengths(counts: Counter[int]) -> Lengths:
    """Percentiles (nearest rank) and histogram of tokens -> rows."""
    rows = counts.total()
    if not rows:
        return Lengths()
    ordered = sorted(counts)
    percentiles: dict[str, int] = {}
    seen, at = 0, iter(ordered)
    value = 0
    for percent in PERCENTILES:
        while seen * 100 < percent * rows:
            value = next(at)
            seen += counts[value]
        percentiles[f"p{percent}"] = value
    longest = ordered[-1]
    step = _round_step(longest // BINS + 1)
    bins = [0] * (longest // step + 1)
    for value, number in counts.items():
        bins[value // step] += number
    mean = sum(value * number for value, number in counts.items()) / rows
    return Lengths(rows=rows, mean=round(mean, 1), percentiles=percentiles, longest=longest, step=step, bins=bins)


def _round_step(least: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is `least` or more."""
    power = 1
    while power * 10 < least:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
