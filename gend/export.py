"""`gend export`: training files out of parts, in the form that a trainer reads.

    FOLDER/rows-00000.jsonl (or .parquet) ...    shards of a set number of rows, each written whole
    FOLDER/manifest.json                         counts, provenance, SHA-256 of the shards; written last

A folder without a manifest is an export that did not end. Several runs, and the rounds of each, become one set with
the best row of each prompt; the chosen verdicts are then taken from those. Nothing is left out without being counted.

Three forms:

    messages    OpenAI's: id, messages (the reply is the last one, with reasoning_content), tools, verdict
    specforge   SpecForge's: id, status "success", conversations. What its scripts/validate_regenerated_data.py refuses
                is left out: roles other than system, user, assistant in turn; blank text; think tags; tool calls
    tokens      speculators', DFlash's, EAGLE's: id, input_ids, loss_mask (0 for the prompt, 1 for generated tokens)

Each row also says which run or round it came from. In Parquet, what has no fixed shape (tools, tool_calls) is JSON.
"""

import datetime
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

import gend
from gend.chat_tokens import ChatTokenizer, Unstable
from gend.errors import NotSound, SettingsError
from gend.provenance import Engine, stored_engines
from gend.records import Message, Prompt, PromptSet, Row, Run, Sampling, Verdicts
from gend.runs import BestRows, listed_parts, read_parts, sound_rows, stored_rounds
from gend.store import Store
from gend.verdict import OK

Record = dict[str, Any]
"""One exported row."""

MOST_THIN = 0.01
"""More rows than this share with a nearly empty loss mask, and the export fails. The old data set had 87 %."""

_BATCH_ROWS = 256
_GROUP_BYTES = 32 << 20  # of a Parquet row group, before compression: what is held in memory


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to export, and how. `min_loss_tokens`: a loss mask with a smaller sum is nearly empty (the old bug: 6)."""

    format: Literal["jsonl", "parquet"] = "jsonl"
    form: Literal["messages", "specforge", "tokens"] = "messages"
    verdicts: tuple[str, ...] = (OK,)
    shard_rows: int = 50_000
    tokenizer: Path | None = None
    min_loss_tokens: int = 16
    partial: bool = False


class Shard(msgspec.Struct, frozen=True):
    """One finished file."""

    name: str
    rows: int
    bytes: int
    sha256: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows came from: a run or a round, with all that its rows were made with. `rows`: how many are from it.

    `engines`: what generated them; each row in a part names one.
    `changed`: how many of those were made in a retry with another sampling than the run's, by what was changed (JSON).
    """

    run: str
    rows: int
    round_of: str | None
    round: int
    model: str
    sampling: Sampling
    verdicts: Verdicts
    changed: dict[str, int]
    set: PromptSet
    gend_version: str
    created: str
    missing_batches: int
    engines: dict[str, Engine]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported. `left_out` counts rows of a chosen verdict by the reason why they are not in the shards."""

    form: str
    format: str
    verdicts: tuple[str, ...]
    prompts: int
    rows: int
    other_verdicts: dict[str, int]
    left_out: dict[str, int]
    validator_flags: list[str]
    sources: list[Source]
    shards: list[Shard]
    created: str
    gend_version: str


class LeftOut(Exception):
    """A row that this form cannot hold; the message is the reason that is counted."""


class ThinMask(Exception):
    """A row whose loss mask is nearly empty: nothing would be learned from it, or something was lost."""


def export(
    store: Store,
    runs: Sequence[Run],
    folder: Path,
    options: ExportOptions,
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Write the best row of each prompt of `runs` and their rounds into `folder`, which must be new or empty.

    Memory: some parts, a row group, 11 bytes for each row of all runs but the first. `progress(batches read)`.
    Raises NotSound when parts are missing (unless `partial`) or damaged, no row is left or too many masks are thin;
    SettingsError, StoreUnavailable.
    """
    sources = _with_rounds(store, runs)
    listed = [listed_parts(store, run)[0] for run in sources]
    for run, parts in zip(sources, listed, strict=True):
        if run in runs and len(parts) < run.batches and not options.partial:
            there = f"{len(parts):,} of {run.batches:,} parts are in the store"
            raise NotSound(f"run {run.id} is not finished: {there}; --partial exports those")
    make = _maker(options)
    tally = _Tally()
    best_rows, batches = BestRows(), 0

    def rows_of(source: int) -> Iterator[tuple[bytes, Row]]:
        nonlocal batches
        for part in read_parts(store, sources[source], listed[source]):
            batches += 1
            if progress:
                progress(batches)
            yield from sound_rows(part)

    for source in range(1, len(sources)):
        for prompt, row in rows_of(source):
            best_rows.offer(prompt, row.verdict, source)
    with _Shards(_new_folder(folder), options) as shards:
        for source, run in enumerate(sources):
            for prompt, row in rows_of(source):
                if len(sources) > 1 and best_rows.best(prompt, row.verdict, source)[1] != source:
                    continue
                tally.prompts += 1
                if row.verdict not in options.verdicts:
                    tally.other_verdicts[row.verdict] += 1
                    continue
                try:
                    record = make(row, run, prompt)
                except LeftOut as error:
                    tally.left_out[str(error)] += 1
                    continue
                except ThinMask as error:
                    tally.left_out["loss mask nearly empty"] += 1
                    tally.first_thin = tally.first_thin or f"{run.id}, row {row.id!r}: {error}"
                    continue
                tally.add(record, row, source)
                shards.add(record)
        shards.end()
        tally.check(options)
        manifest = Manifest(
            form=options.form,
            format=options.format,
            verdicts=options.verdicts,
            prompts=tally.prompts,
            rows=tally.by_source.total(),
            other_verdicts=dict(tally.other_verdicts.most_common()),
            left_out=dict(tally.left_out.most_common()),
            validator_flags=tally.validator_flags() if options.form == "specforge" else [],
            sources=[
                _source(store, run, tally, number, run.batches - len(parts))
                for number, (run, parts) in enumerate(zip(sources, listed, strict=True))
            ],
            shards=shards.done,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            gend_version=gend.__version__,
        )
        shards.put("manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return manifest


def _with_rounds(store: Store, runs: Sequence[Run]) -> list[Run]:
    """The runs and then their rounds, each once."""
    named = {run.id: run for run in runs}
    for run in runs:
        for again in stored_rounds(store, run):
            named.setdefault(again.id, again)
    return list(named.values())


def _source(store: Store, run: Run, tally: "_Tally", number: int, missing_batches: int) -> Source:
    return Source(
        run=run.id,
        rows=tally.by_source[number],
        round_of=run.round_of,
        round=run.round,
        model=run.model,
        sampling=run.sampling,
        verdicts=run.verdicts,
        changed={what: count for (source, what), count in tally.changed.most_common() if source == number},
        set=run.set,
        gend_version=run.gend_version,
        created=run.created,
        missing_batches=missing_batches,
        engines=stored_engines(store, run),
    )


class _Tally:
    """What was counted while rows went by."""

    def __init__(self) -> None:
        self.prompts = 0
        self.by_source, self.other_verdicts, self.left_out = Counter[int](), Counter[str](), Counter[str]()
        self.changed = Counter[tuple[int, str]]()
        self.first_thin = ""
        self._all_have_thoughts = True

    def add(self, record: Record, row: Row, source: int) -> None:
        self.by_source[source] += 1
        if row.changed:
            self.changed[source, msgspec.json.encode(row.changed, order="sorted").decode()] += 1
        for turn in record.get("conversations", ()):
            if turn["role"] == "assistant" and not _filled(turn.get("reasoning_content")):
                self._all_have_thoughts = False

    def validator_flags(self) -> list[str]:
        """The strictest flags with which SpecForge's validator passes all rows."""
        return ["--strict-think-markers", *(["--expect-reasoning"] if self._all_have_thoughts else [])]

    def check(self, options: ExportOptions) -> None:
        """Raises NotSound where nobody should train on what came out."""
        rows, thin = self.by_source.total(), self.left_out["loss mask nearly empty"]
        if thin > MOST_THIN * (rows + thin):
            raise NotSound(
                f"{thin:,} of {rows + thin:,} rows have a loss mask that is nearly empty ({self.first_thin}); look at "
                "them with `gend verify RUN --html`. There is no manifest: do not train on the shards. For replies "
                "that are meant to be short: --min-loss-tokens"
            )
        if not rows:
            there = ", ".join(f"{why} {count:,}" for why, count in (self.other_verdicts + self.left_out).most_common())
            raise NotSound(f"no row was exported: wanted {' or '.join(options.verdicts)}, there is {there or 'none'}")


# -- a row in each form ------------------------------------------------------------------------------------------


def _maker(options: ExportOptions) -> Callable[[Row, Run, bytes], Record]:
    if options.form == "messages":
        return lambda row, run, prompt: as_messages(row)
    if options.form == "specforge":
        return lambda row, run, prompt: as_specforge(row)
    tokenizer = ChatTokenizer(options.tokenizer) if options.tokenizer else None
    decode = msgspec.json.Decoder(Prompt).decode
    return lambda row, run, prompt: as_tokens(row, run, decode(prompt), tokenizer, options.min_loss_tokens)


def as_messages(row: Row) -> Record:
    """OpenAI's messages with the reply as the last one. Raises LeftOut."""
    record: Record = {"id": row.id, "run": row.run, "verdict": row.verdict, "messages": [*row.messages, _reply(row)]}
    if row.tools:
        record["tools"] = row.tools
    return record


def as_specforge(row: Row) -> Record:
    """A row that SpecForge's scripts/validate_regenerated_data.py accepts. Raises LeftOut with what it would refuse."""
    conversations: list[Message] = []
    wanted, in_front = "user", True
    for message in [*row.messages, _reply(row)]:
        role, content, thought = message.get("role"), message.get("content"), message.get("reasoning_content")
        if role not in ("system", "user", "assistant"):
            raise LeftOut(f"a {role} message")
        if message.get("tool_calls"):
            raise LeftOut("a tool call")
        if not _filled(content):
            raise LeftOut(f"a blank {role} message")
        if not (role == "system" and in_front):
            if role != wanted:
                raise LeftOut(f"{'an' if role == 'assistant' else 'a'} {role} message where the {wanted}'s turn is")
            wanted, in_front = {"user": "assistant", "assistant": "user"}[role], False
        turn = {"role": role, "content": content}
        if role == "assistant":
            if _THINK_TAG.search(str(content)) or (thought and _THINK_TAG.search(thought)):
                raise LeftOut("a think tag in an assistant message")
            if thought is not None:
                turn["reasoning_content"] = thought
        conversations.append(turn)
    record: Record = {"id": row.id, "status": "success", "conversations": conversations, "run": row.run}
    if row.tools:
        record["tools"] = row.tools
    return record


def as_tokens(row: Row, run: Run, prompt: Prompt, tokenizer: ChatTokenizer | None, min_loss_tokens: int) -> Record:
    """Token ids and loss mask: the server's own ids where the row has them, else by the chat template.

    A row with several replies gives its last one; the earlier ones are part of its prompt, as the template shows them.
    Raises LeftOut, ThinMask; SettingsError for a row without ids where there is no tokenizer.
    """
    reply = _reply(row)
    if row.prompt_token_ids and row.token_ids:
        asked, made = row.prompt_token_ids, row.token_ids
    elif tokenizer is None:
        raise SettingsError(
            f"run {run.id}, row {row.id!r} has no token ids: give the model's folder with --tokenizer FOLDER "
            "(the next run keeps the server's own ids with return_token_ids = true)"
        )
    elif row.finish_reason == "length":
        raise LeftOut("cut, and without the server's token ids: a template would end it")
    else:
        try:
            thinking = (row.changed or {}).get("thinking", run.sampling.thinking)
            asked, made = tokenizer.ids(row.messages, reply, row.tools, thinking)
        except Unstable as error:
            raise LeftOut(str(error)) from error
    if len(made) < min_loss_tokens:
        raise ThinMask(f"the mask's sum is {len(made)}")
    if not prompt.follow_ups and 2 * len(made) < row.usage.completion_tokens:
        raise ThinMask(f"the mask's sum is {len(made)}, but {row.usage.completion_tokens} tokens were generated")
    return {
        "id": row.id,
        "run": row.run,
        "input_ids": [*asked, *made],
        "loss_mask": [0] * len(asked) + [1] * len(made),
    }


def _reply(row: Row) -> Message:
    """The row's reply as a message. Raises LeftOut where there is none."""
    if row.content is None and row.reasoning_content is None and not row.tool_calls:
        raise LeftOut("no reply")
    reply: Message = {"role": "assistant"}
    if row.reasoning_content is not None:
        reply["reasoning_content"] = row.reasoning_content
    reply["content"] = row.content
    if row.tool_calls:
        reply["tool_calls"] = row.tool_calls
    return reply


def _filled(text: Any) -> bool:
    return isinstance(text, str) and text.strip() != ""


_THINK_TAG = re.compile(r"</?think>", re.IGNORECASE)


# -- files -------------------------------------------------------------------------------------------------------

_MESSAGE_TYPE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.string()),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
_SCHEMAS = {
    "messages": pa.schema(
        [
            ("id", pa.string()),
            ("run", pa.string()),
            ("verdict", pa.string()),
            ("messages", pa.list_(_MESSAGE_TYPE)),
            ("tools", pa.string()),
        ]
    ),
    "specforge": pa.schema(
        [
            ("id", pa.string()),
            ("status", pa.string()),
            (
                "conversations",
                pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", "reasoning_content")])),
            ),
            ("run", pa.string()),
            ("tools", pa.string()),
        ]
    ),
    "tokens": pa.schema(
        [
            ("id", pa.string()),
            ("run", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
        ]
    ),
}


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SettingsError(f"--out {folder}: it is not empty; remove it or give another folder")
    except OSError as error:
        raise SettingsError(f"--out {folder}: cannot be made: {error.strerror}") from error
    return folder


class _File:
    """A file that gets its name when it is whole; counts and digests what is written."""

    def __init__(self, path: Path):
        self.path, self._temporary = path, path.with_name(f".new-{path.name}")
        self._file: BinaryIO = self._temporary.open("wb", buffering=1 << 20)
        self._digest, self.bytes = hashlib.sha256(), 0

    # What pyarrow asks of a file.
    closed = False

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def publish(self, rows: int) -> Shard:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        return Shard(self.path.name, rows, self.bytes, self._digest.hexdigest())

    def discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class _Shards:
    """Writes rows into numbered files of `shard_rows` rows. A context manager: what is not whole is removed."""

    def __init__(self, folder: Path, options: ExportOptions):
        self.done: list[Shard] = []
        self._folder, self._options, self._schema = folder, options, _SCHEMAS[options.form]
        self._file: _File | None = None
        self._rows = 0  # of the file that is being written
        self._waiting: list[Record] = []
        self._group: list[pa.RecordBatch] = []
        self._parquet: pq.ParquetWriter | None = None

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.discard()
        if isinstance(error, OSError):
            raise SettingsError(f"--out {self._folder}: cannot be written: {error.strerror or error}") from error

    def add(self, record: Record) -> None:
        if self._file is None:
            self._file = _File(self._folder / f"rows-{len(self.done):05d}.{self._options.format}")
        self._rows += 1
        if self._options.format == "jsonl":
            self._file.write(msgspec.json.encode(record) + b"\n")
        else:
            self._waiting.append(_flat(record))
            if len(self._waiting) == _BATCH_ROWS:
                self._make_batch()
        if self._rows == self._options.shard_rows:
            self.end()

    def _make_batch(self) -> None:
        """Turn the rows that wait into columns, a tenth of the size; write them when they are a row group."""
        if self._waiting:
            self._group.append(pa.RecordBatch.from_pylist(self._waiting, schema=self._schema))
            self._waiting = []
        if sum(batch.nbytes for batch in self._group) >= _GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if not self._group:
            return
        if self._parquet is None:
            # Dictionaries pay for what repeats only; of texts they would hold each one.
            repeating = [name for name in ("run", "verdict", "status") if name in self._schema.names]
            self._parquet = pq.ParquetWriter(self._file, self._schema, compression="zstd", use_dictionary=repeating)
        self._parquet.write_table(pa.Table.from_batches(self._group))
        self._group = []

    def end(self) -> None:
        """Publish the file that is being written, if there is one."""
        if self._file is None:
            return
        if self._options.format == "parquet":
            self._make_batch()
            self._write_group()
            if self._parquet:
                self._parquet.close()
            self._parquet = None
        self.done.append(self._file.publish(self._rows))
        self._file, self._rows = None, 0

    def put(self, name: str, body: bytes) -> None:
        """Write a small file whole, and make all names in the folder durable."""
        self._file = _File(self._folder / name)
        self._file.write(body)
        self._file.publish(0)
        self._file = None
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _flat(record: Record) -> Record:
    """The record as Parquet's columns hold it: tools and tool calls as JSON text."""
    flat = {**record}
    if "tools" in record:
        flat["tools"] = msgspec.json.encode(record["tools"]).decode()
    if "messages" in record:
        flat["messages"] = [
            {**message, "tool_calls": msgspec.json.encode(message["tool_calls"]).decode()}
            if message.get("tool_calls") else message
            for message in record["messages"]
        ]  # fmt: skip
    return flat
