"""Prompt sets on this box: what is written is read again, any slice of it, and damage is noticed."""

import os
import random
import signal
from pathlib import Path

import msgspec
import pytest

from gend import sets
from gend.errors import DiskUnavailable
from gend.records import Prompt, PromptSet


def lines_of(count: int) -> list[bytes]:
    rng = random.Random(count)
    texts = ["", "plain", "line\u2028break\u0085", "ünïcödé 😀", 'quote " and \\ and \n', "x" * 5000]
    prompts = [
        Prompt(id=f"p{number}", messages=[{"role": "user", "content": rng.choice(texts) * rng.randrange(4)}])
        for number in range(count)
    ]
    return [msgspec.json.encode(prompt) + b"\n" for prompt in prompts]


def written(folder: Path, lines: list[bytes], rejects: tuple[bytes, ...] = ()) -> PromptSet:
    with sets.SetWriter(folder, "source.jsonl") as writer:
        for line in lines:
            writer.accept(line)
        for line in rejects:
            writer.reject(line)
        return writer.finish()


def test_any_slice_is_what_was_written(tmp_path: Path) -> None:
    lines = lines_of(100)
    made = written(tmp_path, lines)
    assert (made.read, made.accepted, made.rejected, made.bytes) == (100, 100, 0, sum(map(len, lines)))
    for first, count in [(0, 1), (0, 100), (99, 1), (37, 20)]:
        assert sets.read_lines(tmp_path, made.fingerprint, first, count) == lines[first : first + count]
    prompts = sets.read_prompts(tmp_path, made.fingerprint, 37, 20)
    assert [msgspec.json.encode(prompt) + b"\n" for prompt in prompts] == lines[37:57]


@pytest.mark.parametrize("piece_bytes", [1, 100, 10_000, 1 << 20])
def test_pieces_are_whole_lines_and_together_the_whole(piece_bytes: int, tmp_path: Path) -> None:
    lines = lines_of(50)
    made = written(tmp_path, lines)
    pieces = list(sets.pieces(tmp_path, made.fingerprint, piece_bytes))
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert b"".join(pieces) == b"".join(lines)


def test_a_set_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with sets.SetWriter(tmp_path, "x") as writer:
        writer.accept(lines_of(1)[0])
    assert list((tmp_path / "sets").iterdir()) == [], "left without finish"
    made = written(tmp_path, lines_of(3), (b'{"line":4}\n',))
    assert sets.present(tmp_path, made.fingerprint)
    home = sets.set_folder(tmp_path, made.fingerprint)
    assert (home / "rejects.jsonl").read_bytes() == b'{"line":4}\n'
    assert msgspec.json.decode((home / "set.json").read_bytes(), type=PromptSet) == made


def test_what_killed_writers_left_is_removed_once_nobody_writes(tmp_path: Path) -> None:
    def half_written() -> list[Path]:
        return list((tmp_path / "sets").glob(".new-*"))

    if not (pid := os.fork()):
        writer = sets.SetWriter(tmp_path, "killed")
        writer.accept(lines_of(1)[0])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = half_written()
    with sets.SetWriter(tmp_path, "first"):
        assert left not in half_written()
        with sets.SetWriter(tmp_path, "second"):
            assert len(half_written()) == 2, "who writes is left alone"
    assert not half_written()


def test_the_same_prompts_are_the_same_set_and_leave_the_first_alone(tmp_path: Path) -> None:
    first = written(tmp_path, lines_of(5))
    before = (sets.set_folder(tmp_path, first.fingerprint) / "set.json").stat().st_ino
    assert written(tmp_path, lines_of(5)).fingerprint == first.fingerprint
    assert (sets.set_folder(tmp_path, first.fingerprint) / "set.json").stat().st_ino == before
    assert len(list((tmp_path / "sets").iterdir())) == 1
    assert written(tmp_path, lines_of(5)[::-1]).fingerprint != first.fingerprint, "the order counts"


@pytest.mark.parametrize("damage", ["cut", "moved", "garbled", "no offsets", "no prompts", "gone"])
def test_a_damaged_set_is_not_read(damage: str, tmp_path: Path) -> None:
    made = written(tmp_path, lines_of(20))
    home = sets.set_folder(tmp_path, made.fingerprint)
    prompts = home / "prompts.jsonl"
    match damage:
        case "cut":
            prompts.write_bytes(prompts.read_bytes()[:-5])
        case "moved":
            prompts.write_bytes(b"x" + prompts.read_bytes())
        case "garbled":
            prompts.write_bytes(prompts.read_bytes().replace(b'"p15"', b'"p\xff5"'))
        case "no offsets":
            (home / "offsets").write_bytes(b"")
        case "no prompts":
            prompts.unlink()
        case "gone":
            home.rename(tmp_path / "elsewhere")
    with pytest.raises(DiskUnavailable):
        sets.read_prompts(tmp_path, made.fingerprint, 10, 10)
