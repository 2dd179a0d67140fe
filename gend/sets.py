"""Prompt sets on this box: the accepted prompts of a checked file, and where each of them begins.

    FOLDER/sets/FINGERPRINT/prompts.jsonl     one Prompt as JSON a line, in the order of the file
    FOLDER/sets/FINGERPRINT/offsets           little-endian u64 for each prompt, then one for the end: 8 bytes a prompt
    FOLDER/sets/FINGERPRINT/rejects.jsonl     the lines that were not accepted, each with file, line, field, reason
    FOLDER/sets/FINGERPRINT/set.json          the PromptSet

A copy lies in the store; losing the folder costs a download. A set's folder appears whole (renamed into place).
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import sys
import uuid
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gend.errors import DiskUnavailable
from gend.records import Prompt, PromptSet

_BUFFER_BYTES = 1 << 20


class SetWriter:
    """Collects a prompt set in a temporary folder; `finish` gives it its name. Use as a context manager.

    Methods raise DiskUnavailable when the disk refuses; nothing is left then.
    """

    def __init__(self, folder: Path, source: str):
        self._sets, self._source = folder / "sets", source
        with _disk(self._sets):
            self._sets.mkdir(parents=True, exist_ok=True)
            self._lock = _among_writers(self._sets)
            try:
                # Not mkdtemp: others in the group read it too.
                self._temporary = self._sets / f".new-{uuid.uuid4().hex}"
                self._temporary.mkdir()
                self._prompts = (self._temporary / "prompts.jsonl").open("wb", buffering=_BUFFER_BYTES)
                self._rejects = (self._temporary / "rejects.jsonl").open("wb")
            except BaseException:
                os.close(self._lock)
                raise
        self._offsets = array("Q", [0])
        self._digest = hashlib.sha256()
        self.accepted = self.rejected = 0

    def __enter__(self) -> "SetWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in (self._prompts, self._rejects):
            with contextlib.suppress(OSError):  # what a full disk did not take has been said already
                file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
        os.close(self._lock)

    def accept(self, line: bytes) -> None:
        """Add one prompt: its JSON and a newline."""
        with _disk(self._sets):
            self._prompts.write(line)
        self._digest.update(line)
        self._offsets.append(self._offsets[-1] + len(line))
        self.accepted += 1

    def reject(self, line: bytes) -> None:
        """Add one rejection: its JSON and a newline."""
        with _disk(self._sets):
            self._rejects.write(line)
        self.rejected += 1

    @property
    def fingerprint(self) -> str:
        """Of what was accepted so far."""
        return self._digest.hexdigest()

    def first_reject(self) -> str:
        """The first rejection, for an error message; empty where there is none."""
        self._rejects.flush()
        with open(self._rejects.name, "rb") as file:
            return file.readline().decode("utf-8", "replace").strip()[:300]

    def finish(self) -> PromptSet:
        """Make everything durable and give the folder its name; a set that is there already is left as it is."""
        prompt_set = PromptSet(
            fingerprint=self.fingerprint,
            source=self._source,
            read=self.accepted + self.rejected,
            accepted=self.accepted,
            rejected=self.rejected,
            bytes=self._offsets[-1],
        )
        with _disk(self._sets):
            for file in (self._prompts, self._rejects):
                file.flush()
                os.fsync(file.fileno())
            write_offsets(self._temporary / "offsets", self._offsets)
            with open(self._temporary / "set.json", "wb") as file:
                file.write(msgspec.json.encode(prompt_set))
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self._temporary)
            place(self._temporary, self._sets / prompt_set.fingerprint)
        return prompt_set


def _among_writers(sets: Path) -> int:
    """A descriptor that is locked for as long as somebody writes a set. Whoever is alone first removes what writers
    that were killed have left: gigabytes, each. Where the file system knows no such locks, it is left."""
    lock = os.open(sets, os.O_RDONLY)
    with contextlib.suppress(OSError):  # somebody writes: the next one will find nobody
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in sets.glob(".new-*"):
            shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskUnavailable(f"prompt set in {folder}: {error.strerror}; make room, then try again") from error


def place(temporary: Path, final: Path) -> None:
    """Rename a complete folder to its name, unless somebody was faster."""
    try:
        os.rename(temporary, final)
    except OSError:
        if not (final / "set.json").is_file():
            raise
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_offsets(path: Path, offsets: "array[int]") -> None:
    """Write the offsets as little-endian u64, durably."""
    if sys.byteorder == "big":
        offsets.byteswap()
    with open(path, "wb") as file:
        offsets.tofile(file)
        file.flush()
        os.fsync(file.fileno())


def set_folder(folder: Path, fingerprint: str) -> Path:
    """Where the set with this fingerprint lies, if it is on this box."""
    return folder / "sets" / fingerprint


def present(folder: Path, fingerprint: str) -> bool:
    """Whether the whole set is on this box."""
    return (set_folder(folder, fingerprint) / "set.json").is_file()


def read_lines(folder: Path, fingerprint: str, first: int, count: int) -> list[bytes]:
    """The JSON lines of `count` prompts from index `first` on. Raises DiskUnavailable when they cannot be read."""
    home = set_folder(folder, fingerprint)
    try:
        with open(home / "offsets", "rb") as file:
            file.seek(8 * first)
            offsets = array("Q", file.read(8 * (count + 1)))
        if sys.byteorder == "big":
            offsets.byteswap()
        with open(home / "prompts.jsonl", "rb") as file:
            file.seek(offsets[0])
            blob = file.read(offsets[-1] - offsets[0])
    except (OSError, IndexError) as error:
        raise DiskUnavailable(f"prompt set {fingerprint[:12]} cannot be read here: {error}") from error
    base = offsets[0]
    lines = [blob[start - base : end - base] for start, end in itertools.pairwise(offsets)]
    if len(lines) != count or not all(line.endswith(b"\n") for line in lines):
        raise DiskUnavailable(f"prompt set {fingerprint[:12]} is damaged here: remove {home}, it is fetched again")
    return lines


def read_prompts(folder: Path, fingerprint: str, first: int, count: int) -> list[Prompt]:
    """`count` prompts from index `first` on. Raises DiskUnavailable when they cannot be read."""
    decoder = msgspec.json.Decoder(Prompt)
    lines = read_lines(folder, fingerprint, first, count)
    try:
        return [decoder.decode(line) for line in lines]
    except msgspec.DecodeError as error:
        home = set_folder(folder, fingerprint)
        raise DiskUnavailable(
            f"prompt set {fingerprint[:12]} is damaged here ({error}): remove {home}, it is fetched again"
        ) from error


def pieces(folder: Path, fingerprint: str, piece_bytes: int) -> Iterator[bytes]:
    """The prompts.jsonl of a set in pieces of about `piece_bytes`, cut at line ends: what the store keeps."""
    with open(set_folder(folder, fingerprint) / "prompts.jsonl", "rb") as file:
        while piece := file.read(piece_bytes):
            yield piece + file.readline()
