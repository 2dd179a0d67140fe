"""The spool: local files in which a batch's rows collect before they become a part. Scratch: losing it costs time.

    FOLDER/spool/RUN/BATCH/CLAIM.rows

One file for each claim, written only by the claim's holder and never opened for writing again. So a late owner cannot
harm a new one: the new owner reads what all earlier claims left and writes a file of its own. A line is the CRC-32 of
the row, a space, the row, a newline; what does not check (a torn tail, blocks that a power cut filled with zeros) is
not a row. A row is written at once, which survives any kill, and made durable with `sync`, which survives a power cut.
"""

import contextlib
import errno
import glob
import os
import shutil
import threading
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from gend.errors import DiskUnavailable
from gend.records import Batch


class _RowId(msgspec.Struct):
    id: str


_decode_id = msgspec.json.Decoder(_RowId).decode


def batch_folder(folder: Path, run: str, number: int) -> Path:
    """Where the rows of a batch collect."""
    return folder / "spool" / run / f"{number:08d}"


def spooled(folder: Path) -> dict[str, set[int]]:
    """The batches of which rows lie here, by run."""
    found: dict[str, set[int]] = {}
    with contextlib.suppress(FileNotFoundError):  # here as below: somebody removes while we look
        for run in os.listdir(folder / "spool"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found[run] = {int(name) for name in os.listdir(folder / "spool" / run) if name.isdecimal()}
    return found


def row_files(folder: Path, run: str, number: int | None = None) -> list[Path]:
    """The files with rows of a run, or of one batch, as they are now; any of them may be gone when it is read."""
    batch = "*" if number is None else f"{number:08d}"
    # Not Path.glob, which fails when a folder goes while it looks.
    return [Path(name) for name in glob.glob(f"{glob.escape(str(folder / 'spool' / run))}/{batch}/*.rows")]


def remove(folder: Path, run: str, number: int) -> None:
    """Remove all rows of a batch."""
    shutil.rmtree(batch_folder(folder, run, number), ignore_errors=True)


class Spool:
    """The rows of one batch under one claim. Methods raise DiskUnavailable when the disk refuses."""

    def __init__(self, folder: Path, batch: Batch, claim: str):
        self.home = batch_folder(folder, batch.run, batch.number)
        self._path = self.home / f"{claim}.rows"
        self._descriptor = -1
        self._closed = False
        self._end = 0  # everything up to here is whole lines
        self._synced = 0
        self._lock = threading.Lock()  # rows that waited for the disk come from several threads at once

    def append(self, row: bytes) -> None:
        """Add one row (its JSON, without newline). After a refusal nothing of it is left, so it can be tried again."""
        line = b"%08x %s\n" % (zlib.crc32(row), row)
        with self._lock:
            try:
                if self._closed:
                    raise OSError(errno.EBADF, "closed: the batch was given back or is done")
                if self._descriptor < 0:
                    self.home.mkdir(parents=True, exist_ok=True)
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._descriptor = os.open(self._path, flags, 0o600)
                written = os.pwrite(self._descriptor, line, self._end)
                if written != len(line):
                    raise OSError(errno.ENOSPC, "disk full: only a part of the row was written")
            except OSError as error:
                if self._descriptor >= 0:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._descriptor, self._end)
                raise DiskUnavailable(f"spool {self._path}: {error.strerror}") from error
            self._end += len(line)

    @property
    def end(self) -> int:
        """How many bytes of rows this claim has written."""
        return self._end

    def cut_back(self, end: int) -> None:
        """Forget the rows that this claim wrote after `end` bytes: they are to be made again."""
        with self._lock:
            if self._descriptor >= 0 and end < self._end:
                try:
                    os.ftruncate(self._descriptor, end)
                except OSError as error:
                    raise DiskUnavailable(f"spool {self._path}: {error.strerror}") from error
                self._end, self._synced = end, min(self._synced, end)

    def sync(self) -> None:
        """Make every row that was appended survive a power cut."""
        with self._lock:
            if self._descriptor < 0 or self._end == self._synced:
                return
            end, first = self._end, not self._synced
            descriptor = os.dup(self._descriptor)  # the batch may end in another thread while the disk is slow
        try:
            os.fdatasync(descriptor)
            if first:  # the names of file and folders are what a new file can lose
                for folder in (self.home, *self.home.parents[:3]):
                    _sync_folder(folder)
        except OSError as error:
            raise DiskUnavailable(f"spool {self._path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self._synced = end

    def rows(self) -> dict[str, bytes]:
        """Every whole row of this batch by prompt id, whoever wrote it; for an id that came twice, the first one."""
        rows: dict[str, bytes] = {}
        for line in self._lines():
            if row := checked_row(line):
                rows.setdefault(_decode_id(row).id, row)
        return rows

    def _lines(self) -> Iterator[bytes]:
        # Our own file through its descriptor: it can be read even when somebody has removed the folder.
        try:
            names = sorted(name for name in os.listdir(self.home) if name.endswith(".rows"))
        except FileNotFoundError:
            names = []
        except OSError as error:
            raise DiskUnavailable(f"spool {self.home}: {error.strerror}") from error
        try:
            for name in names:
                if self._descriptor < 0 or name != self._path.name:
                    with contextlib.suppress(FileNotFoundError):
                        yield from (self.home / name).read_bytes().split(b"\n")
            with self._lock:
                own = os.pread(self._descriptor, self._end, 0) if self._descriptor >= 0 else b""
            yield from own.split(b"\n")
        except OSError as error:
            raise DiskUnavailable(f"spool {self.home}: {error.strerror}") from error

    def part(self, ids: Collection[str]) -> bytes | None:
        """The batch as a part: exactly one row for each of `ids`, in that order; None while one is missing."""
        rows = self.rows()
        if any(prompt not in rows for prompt in ids):
            return None
        return b"".join(rows[prompt] + b"\n" for prompt in ids)

    def close(self, sync: bool = True) -> None:
        """Close the file; its rows stay for whoever claims the batch next. Blocks for the disk unless told not to."""
        if sync:
            with contextlib.suppress(DiskUnavailable):  # a file of scratch that will not sync costs time, no rows
                self.sync()
        self._let_go()

    def delete(self) -> None:
        """Remove everything of this batch, once its part is in the store and marked done."""
        self._let_go()
        shutil.rmtree(self.home, ignore_errors=True)

    def _let_go(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor, self._closed = -1, True


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody has removed it: there is no name to keep
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checked_row(line: bytes) -> bytes | None:
    """The row in one spool line, or None when the line is torn or garbled."""
    if len(line) < 10 or line[8:9] != b" ":
        return None
    try:
        expected = int(line[:8], 16)
    except ValueError:
        return None
    row = line[9:]
    return row if zlib.crc32(row) == expected else None
