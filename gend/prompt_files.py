"""Prompt files: finding them, opening them and taking them apart into lines. What a line means: prompts.py.

The format is told by the first bytes, not by the name, so that a renamed or unpacked file is read all the same:

    1f 8b, 28 b5 2f fd     gzip, zstd: unpacked, then looked at again
    PAR1                   Parquet
    ARROW1, ff ff ff ff    Arrow, as a file or as a stream (Hugging Face's save_to_disk folders hold streams)
    [ after blanks         one JSON array, taken apart element by element
    anything else          JSON lines

A "line" is a line of JSONL, an element of an array or a row of a table; its number counts from 1 in its file.
Memory: no line over LINE_BYTES is ever held, arrays and tables are streamed; only a Parquet file that comes from a
pipe or from S3 is first copied to a temporary file, because its index is at its end.
"""

import contextlib
import glob
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet

from gend.errors import SettingsError

LINE_BYTES = 64 << 20
"""The longest line that is read: no context window holds more text, and one line must never fill the memory."""

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 64
_TABLE_ROWS = 256  # turned into Python objects at a time
_BOM = b"\xef\xbb\xbf"
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")


class Unreadable(msgspec.Struct, frozen=True):
    """Stands in for a line that cannot be handed on."""

    reason: str


Data = bytes | dict[str, Any] | Unreadable
"""One line: JSON text, or a row of a table as an object, or why there is neither."""

Line = tuple[int, Data]

OpenRemote = Callable[[str], BinaryIO]


def read_files(sources: list[str], open_remote: OpenRemote | None) -> Iterator[tuple[str, Iterator[Line]]]:
    """Each file's name with its lines, in order. The lines must be taken before the next file is asked for.

    A source is a path, a glob (matches are sorted), a folder that Hugging Face's save_to_disk wrote (all its splits),
    `-` for stdin, or s3://bucket/key. All names are resolved before the first file is opened. Raises SettingsError
    for what is missing, no prompt file, or damaged so that the rest of it cannot be read.
    """
    if open_remote is None and (remote := [source for source in sources if source.startswith("s3://")]):
        raise SettingsError(f"{remote[0]}: there is no store to read it from; set [store] in the config file")
    for path in [path for source in sources for path in _resolve(source)]:
        name = "stdin" if path == "-" else os.fsencode(path).decode("utf-8", "replace")
        with _open(path, open_remote) as stream:
            yield name, _lines(stream, name)


def _resolve(source: str) -> list[str]:
    if source == "-" or source.startswith("s3://"):
        return [source]
    path = os.path.expanduser(source)
    found = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    if not found:
        raise SettingsError(f"{source}: no such file, and as a pattern it matches none; check the path")
    return [file for match in found for file in (_dataset_files(match) if os.path.isdir(match) else [match])]


class _DataFile(msgspec.Struct):
    filename: str


class _DatasetState(msgspec.Struct, rename={"data_files": "_data_files"}):
    """state.json of a saved dataset. The folder may also hold caches of `map`: they must not be read as data."""

    data_files: list[_DataFile]


class _DatasetDict(msgspec.Struct):
    """dataset_dict.json: each split is a folder of its own."""

    splits: list[str]


def _dataset_files(folder: str) -> list[str]:
    def inside(name: str) -> str:
        return os.path.join(folder, name)

    try:
        if os.path.exists(inside("dataset_dict.json")):
            with open(inside("dataset_dict.json"), "rb") as file:
                splits = msgspec.json.decode(file.read(), type=_DatasetDict).splits
            return [path for split in splits for path in _dataset_files(inside(split))]
        if os.path.exists(inside("state.json")):
            with open(inside("state.json"), "rb") as file:
                state = msgspec.json.decode(file.read(), type=_DatasetState)
            return [inside(data_file.filename) for data_file in state.data_files]
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"{folder}: a damaged dataset folder ({error}); save it again") from error
    raise SettingsError(
        f"{folder}: a folder, but no dataset saved by save_to_disk; give files, e.g. '{inside('*.jsonl')}'"
    )


def _open(path: str, open_remote: OpenRemote | None) -> contextlib.AbstractContextManager[BinaryIO]:
    if path == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    if path.startswith("s3://") and open_remote:
        return open_remote(path)
    try:
        return open(path, "rb")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be opened: {error.strerror}") from error


def _lines(source: BinaryIO, name: str) -> Iterator[Line]:
    number = 0
    try:
        for number, data in _lines_by_format(source, name):
            yield number, data
    except (OSError, pa.ArrowException) as error:
        raise SettingsError(
            f"{name}: cut off or damaged after line {number} ({error}); copy or download it again"
        ) from error


def _lines_by_format(source: BinaryIO, name: str) -> Iterator[Line]:
    head, stream = _peek(source)
    if head.startswith(b"PAR1"):
        table = pyarrow.parquet.ParquetFile(_seekable(source, stream), pre_buffer=False, buffer_size=_CHUNK_BYTES)
        return _rows(table.iter_batches(batch_size=_TABLE_ROWS))
    if head.startswith(b"ARROW1"):
        file = pa.ipc.open_file(_seekable(source, stream))
        return _rows(file.get_batch(number) for number in range(file.num_record_batches))
    if head.startswith(b"\xff\xff\xff\xff"):
        return _rows(pa.ipc.open_stream(stream))
    if name.endswith(_TABLE_SUFFIXES):
        raise SettingsError(f"{name}: begins with {head[:16]!r}, so it is no such file; download it again")
    for magic, codec in _CODECS.items():
        if head.startswith(magic):
            # pyarrow's and not zstandard's reader: that one takes a frame cut in the middle for the end of the file.
            head, stream = _peek(pa.CompressedInputStream(pa.PythonFile(stream, "r"), codec))
            break
    if head.startswith(_BOM):
        stream.read(len(_BOM))
        head = head[len(_BOM) :]
    return _array_elements(stream) if head.lstrip().startswith(b"[") else _text_lines(stream)


class _Rejoined(io.RawIOBase):
    """`head`, then the rest of the stream it was read from: looking at the first bytes of a pipe, without seeking."""

    def __init__(self, head: bytes, rest: Any):
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head or self._rest.read(len(buffer))
        self._head = b""
        buffer[: len(data)] = data
        return len(data)


def _peek(source: Any) -> tuple[bytes, io.BufferedReader]:
    """The first bytes, and a stream that begins with them again. `source` needs nothing but `read`."""
    head = b""
    while len(head) < _HEAD_BYTES and (more := source.read(_HEAD_BYTES - len(head))):
        head += more
    return head, io.BufferedReader(_Rejoined(head, source), _CHUNK_BYTES)


def _seekable(source: BinaryIO, stream: io.BufferedReader) -> Any:
    if source.seekable():  # pyarrow itself seeks before each read
        return source
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the last reference to it)
    shutil.copyfileobj(stream, copy, _CHUNK_BYTES)
    return copy


_TOO_LONG = Unreadable(f"longer than {LINE_BYTES >> 20} MiB")


def _text_lines(stream: io.BufferedReader) -> Iterator[Line]:
    """Lines end at \\n alone: str.splitlines would also cut at U+2028, U+2029 and U+0085 inside a string."""
    number = 0
    while text := stream.readline(LINE_BYTES + 1):
        number += 1
        if len(text) > LINE_BYTES and not text.endswith(b"\n"):
            while text and not text.endswith(b"\n"):
                text = stream.readline(_CHUNK_BYTES)
            yield number, _TOO_LONG
        elif not text.isspace():
            yield number, text


_BRACKET_OR_COMMA = re.compile(rb"[\[\]{},]")


def _array_elements(stream: io.BufferedReader) -> Iterator[Line]:
    """The texts between the commas of the outermost array; whether each is JSON is not looked at here.

    A damaged element costs only itself, unless a quote or bracket is unbalanced: then everything up to the end of
    the file is one unreadable line. Strings are skipped by looking for their quotes alone, which is ten times faster
    than looking at each byte.
    """
    number = depth = position = start = 0  # of the lines, of the brackets, in the buffer, of the element in it
    buffer, in_string, too_long = b"", False, False
    while True:
        quote = buffer.find(b'"', position)
        end = quote if quote >= 0 else len(buffer)
        if in_string:
            escaped = _ends_escaped(buffer, position, end)
            in_string = quote < 0 or escaped
        else:
            for token in _BRACKET_OR_COMMA.finditer(buffer, position, end):
                at, kind = token.start(), token.group()
                if kind in b"[{":
                    depth += 1
                    start = at + 1 if depth == 1 else start
                    continue
                if kind in b"]}":
                    depth -= 1
                if depth > 1 or (depth == 1 and kind != b","):
                    continue
                too_long = too_long or at - start > LINE_BYTES
                if too_long or buffer[start:at].strip():
                    number += 1
                    yield number, _TOO_LONG if too_long else buffer[start:at]
                start, too_long = at + 1, False
                if depth == 0:
                    rest = buffer[start:].strip()
                    while more := stream.read(_CHUNK_BYTES):
                        rest = rest or more.strip()
                    if rest:
                        yield number + 1, Unreadable(f"text after the end of the array: {rest[:_HEAD_BYTES]!r}")
                    return
            escaped = False
            in_string = quote >= 0
        if quote >= 0:
            position = quote + 1
            continue
        if len(buffer) - start > LINE_BYTES:
            start, too_long = len(buffer), True
        more = stream.read1(_CHUNK_BYTES)
        if not more:
            yield number + 1, Unreadable("the array does not end: cut off here, or a quote or bracket is missing")
            return
        # Where the buffer ends in an escape, the first byte of `more` belongs to it.
        buffer, position, start = buffer[start:] + more, len(buffer) - start + escaped, 0


def _ends_escaped(buffer: bytes, first: int, end: int) -> bool:
    """Whether the byte at `end` is escaped: an odd number of backslashes stands before it."""
    at = end
    while at > first and buffer[at - 1] == 0x5C:
        at -= 1
    return (end - at) % 2 == 1


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Line]:
    number = 0
    for batch in batches:
        # Times are never part of a prompt, and nanoseconds do not fit Python's types: left out.
        kept = [index for index, field in enumerate(batch.schema) if not pa.types.is_temporal(field.type)]
        for first in range(0, batch.num_rows, _TABLE_ROWS):
            for row in _row_objects(batch.slice(first, _TABLE_ROWS), kept):
                number += 1
                yield number, row


def _row_objects(batch: pa.RecordBatch, kept: list[int]) -> list[dict[str, Any] | Unreadable]:
    if not kept:
        return [{} for _ in range(batch.num_rows)]
    try:
        return [_without_nulls(row) for row in batch.select(kept).to_pylist()]
    except (ValueError, OverflowError, RecursionError) as error:  # ValueError: text that is not UTF-8, among others
        if batch.num_rows == 1:
            return [Unreadable(f"the row cannot be read: {error}")]
        return [row for index in range(batch.num_rows) for row in _row_objects(batch.slice(index, 1), kept)]


def _without_nulls(value: Any) -> Any:
    """A table gives every struct all keys that any row has; those this row never had come back as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
