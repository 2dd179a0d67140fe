"""Runs made up for tests of what reads parts back: real objects in a real store, without any generating."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zstandard

from gend.records import Prompt, PromptSet, Row, Run, Sampling, Usage, Verdicts, part_key, run_id, run_identity
from gend.store import Store

MODEL = "made-up-model"


def prompts(count: int) -> list[Prompt]:
    """Different prompts p0000000 on."""
    return [
        Prompt(id=f"p{number:07d}", messages=[{"role": "user", "content": f"What is {number} times {number}?"}])
        for number in range(count)
    ]


def good_row(run: Run, batch: int, prompt: Prompt) -> Row:
    """A sound row for a prompt: verdict ok, an answer of its own, token counts that fit."""
    return Row(
        id=prompt.id, run=run.id, batch=batch, messages=prompt.messages, tools=prompt.tools,
        reasoning_content=f"Let me think about {prompt.id} for a while, step by step.",
        content=f"The answer to {prompt.id} of {run.name}.", finish_reason="stop", verdict="ok",
        usage=Usage(prompt_tokens=12, completion_tokens=40, reasoning_tokens=25), seed=7, server="0", seconds=1.5,
    )  # fmt: skip


def add_run(
    store: Store,
    asked: Sequence[Prompt],
    name: str = "made",
    change: Callable[[Row], Row | None] = lambda row: row,
    *,
    batch_size: int = 4,
    sampling: Sampling = Sampling(max_tokens=1000),  # noqa: B008 - frozen
    verdicts: Verdicts = Verdicts(),  # noqa: B008 - frozen
    round_of: str | None = None,
    round: int = 0,
    without: Iterable[int] = (),
) -> Run:
    """Put a whole run into the store: set, run and parts. `change` makes each good row what the test needs (None:
    leave it out); batches in `without` have no part."""
    lines = [msgspec.json.encode(prompt) + b"\n" for prompt in asked]
    fingerprint = hashlib.sha256(b"".join(lines)).hexdigest()
    prompt_set = PromptSet(
        fingerprint=fingerprint, source="made up", read=len(lines), accepted=len(lines), rejected=0,
        bytes=sum(map(len, lines)),
    )  # fmt: skip
    run = Run(
        id=run_id(name, run_identity(fingerprint, MODEL, sampling)), name=name, set=prompt_set, model=MODEL,
        sampling=sampling, verdicts=verdicts, batch_size=batch_size, created="2026-01-02T03:04:05.678+00:00",
        gend_version="0", round_of=round_of, round=round,
    )  # fmt: skip
    half = len(lines) // 2  # two pieces, as large sets have several
    for number, piece in enumerate([lines[:half], lines[half:]] if half else [lines]):
        packed = zstandard.ZstdCompressor().compress(b"".join(piece))
        store.replace(f"sets/{fingerprint}/prompts-{number:05d}.jsonl.zst", packed)
    store.replace(f"sets/{fingerprint}/set.json", msgspec.json.encode(prompt_set))
    store.replace(f"runs/{run.id}/run.json", msgspec.json.encode(run))
    for number in set(range(run.batches)) - set(without):
        batch = run.batch(number)
        rows = [change(good_row(run, number, prompt)) for prompt in asked[batch.first : batch.first + batch.count]]
        body = b"".join(msgspec.json.encode(row) + b"\n" for row in rows if row)
        store.replace(part_key(run.id, number), body)
    return run
