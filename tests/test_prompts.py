"""Prompt files: every line is accepted or rejected with its place and reason, whatever stands in it."""

import gzip
import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gend import prompt_files
from gend.errors import PromptError, SettingsError
from gend.hash_table import HashTable
from gend.prompts import ReadOptions, Rejection, read_prompts
from gend.records import Prompt

DEFAULTS = ReadOptions()
KEEP_LAST = ReadOptions(keep_last=True)


def read(path: Path | str, options: ReadOptions = DEFAULTS) -> list[Prompt | Rejection]:
    results: list[Prompt | Rejection] = []
    for result in read_prompts([str(path)], options):
        if isinstance(result, Rejection):
            results.append(result)
        else:
            assert result.count(b"\n") == 1 and result.endswith(b"\n")
            results.append(msgspec.json.decode(result, type=Prompt))
    return results


def prompts(path: Path | str, options: ReadOptions = DEFAULTS) -> list[Prompt]:
    results = read(path, options)
    rejected = [result for result in results if isinstance(result, Rejection)]
    assert not rejected, rejected[:3]
    return [result for result in results if isinstance(result, Prompt)]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    """A conversation in which a tool was called with these arguments, and answered."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    return {"messages": [user("2+2"), {"role": "assistant", "content": None, "tool_calls": [call], **more}, answer]}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


HI = {"messages": [user("hi")]}

# What one line of a file becomes: the fields of the prompt that matter, or (field, words of the reason).
EDGES: dict[str, tuple[Any, dict[str, Any] | tuple[str, str]]] = {
    "plain": (HI, {"id": "p0000000", "messages": [user("hi")], "tools": None, "follow_ups": [], "prefix": None}),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps(HI).encode(), HI),
    "CRLF": (json.dumps(HI).encode() + b"\r\n", HI),
    "no newline at the end": (json.dumps(HI).encode(), HI),
    "torn": (json.dumps(HI).encode()[:-5], ("", "not JSON")),
    "not an object": (b"42", ("", "must be a JSON object, is a number")),
    "not UTF-8": (b'{"prompt": "\xff"}', ("", "UTF-8")),
    "separators of Unicode": (
        json.dumps({"prompt": "a\u2028b\u2029c\u0085d"}, ensure_ascii=False).encode(),
        {"messages": [user("a\u2028b\u2029c\u0085d")]},
    ),
    "NUL": ({"prompt": "a\0b"}, ("messages[0].content", "NUL")),
    "NUL as text": ({"prompt": "a\\u0000b"}, {"messages": [user("a\\u0000b")]}),
    "lone surrogate": (b'{"prompt": "a\\ud800b"}', ("", "surrogate")),
    "emoji by surrogates": (b'{"prompt": "\\ud83d\\ude00"}', {"messages": [user("😀")]}),
    "2 MB": ({"prompt": "x" * 2_000_000}, {"messages": [user("x" * 2_000_000)]}),
    "deep beside": (b'{"prompt": "hi", "x": ' + nested(900).encode() + b"}", HI),
    "deep beyond JSON": (b'{"prompt": "hi", "x": ' + nested(100_000).encode() + b"}", ("", "depth")),
    "deep tools": (
        b'{"prompt": "hi", "tools": [{"name": "f", "parameters": {"x": ' + nested(900).encode() + b"}}]}",
        ("tools", "cannot be written"),
    ),
    "huge number": (b'{"prompt": "hi", "x": 123456789012345678901234567890}', HI),
    "extra keys": ({**HI, "score": 1, "meta": {"a": None}}, HI),
    # ids
    "id number": ({**HI, "id": 17}, {"id": "17"}),
    "id zero": ({**HI, "id": 0}, {"id": "0"}),
    "id null": ({**HI, "id": None, "uuid": "u-1"}, {"id": "u-1"}),
    "id first of several": ({**HI, "question_id": 3, "task_id": "T/1"}, {"id": "T/1"}),
    "id as a path": ({**HI, "id": "../../etc"}, {"id": "../../etc"}),
    "id blank": ({**HI, "id": " "}, ("id", "empty")),
    "id true": ({**HI, "id": True}, ("id", "true or false")),
    "id list": ({**HI, "id": [1]}, ("id", "a list")),
    "id long": ({**HI, "id": "x" * 513}, ("id", "longer than 512")),
    "id with newline": ({**HI, "id": "a\nb"}, ("id", "control character")),
    "id beyond 64 bits": (b'{"prompt": "hi", "id": 18446744073709551617}', ("id", "too large")),
    # who speaks, and in which order (C18, C29)
    "no messages": ({"messages": []}, ("messages", "no messages")),
    "messages null": ({"messages": None, "prompt": "hi"}, HI),
    "messages as JSON text": ({"messages": json.dumps([user("hi")])}, HI),
    "messages no list": ({"messages": {"role": "user"}}, ("messages", "must be text or a list")),
    "message no object": ({"messages": [user("hi"), 3]}, ("messages[1]", "must be an object")),
    "nothing to ask": ({"answer": "x", "score": 1}, ("", "fields are: answer, score")),
    "system only": ({"messages": [system("s")]}, ("messages", "no user message")),
    "assistant only": ({"messages": [assistant("a")]}, ("messages", "no user message")),
    "tool response for a question": (
        {"messages": [user("<tool_response>\n4\n</tool_response>")]},
        ("messages", "no user message"),
    ),
    "system blank": ({"messages": [system(" "), user("hi")]}, HI),
    "two systems": ({"messages": [system("a"), system("b"), user("hi")]}, {"messages": [system("a\n\nb"), user("hi")]}),
    "late system": ({"messages": [user("hi"), system("s"), user("ho")]}, ("messages[1].role", "system message after")),
    "developer": (
        {"messages": [{"role": "developer", "content": "d"}, user("hi")]},
        {"messages": [system("d"), user("hi")]},
    ),
    "system field": ({"system": "s", "prompt": "hi"}, {"messages": [system("s"), user("hi")]}),
    "system field and message": (
        {"system_prompt": "a", "messages": [system("b"), user("hi")]},
        {"messages": [system("a\n\nb"), user("hi")]},
    ),
    "unknown role": ({"messages": [{"role": "narrator", "content": "x"}]}, ("messages[0].role", "'narrator'")),
    "no role": ({"messages": [{"content": "x"}]}, ("messages[0].role", "null")),
    "user empty": ({"messages": [user("")]}, ("messages[0].content", "empty")),
    "user blank": ({"messages": [user(" \n\t")]}, ("messages[0].content", "empty")),
    "user null": ({"messages": [{"role": "user", "content": None}]}, ("messages[0].content", "null or missing")),
    "user missing": ({"messages": [{"role": "user"}]}, ("messages[0].content", "null or missing")),
    "user number": ({"messages": [{"role": "user", "content": 3}]}, ("messages[0].content", "is a number")),
    "text parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}]}, HI),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        ("messages[0].content[0]", "'image_url'"),
    ),
    "no parts": ({"messages": [{"role": "user", "content": []}]}, ("messages[0].content", "empty")),
    "several turns": ({"messages": [user("a"), assistant("b"), user("c")]},) * 2,
    "assistant last": ({"messages": [user("hi"), assistant("x")]}, {**HI, "prefix": None}),
    "assistant last, empty": ({"messages": [user("hi"), assistant(None)]}, HI),
    "assistants last": ({"messages": [user("hi"), assistant("x"), assistant("y")]}, HI),
    "assistant empty": (
        {"messages": [user("a"), assistant(""), user("b")]},
        ("messages[1].content", "neither text nor tool calls"),
    ),
    "reasoning kept": ({"messages": [user("a"), assistant("b", reasoning_content="r"), user("c")]},) * 2,
    "keys of a message": ({"messages": [{**user("hi"), "weight": 1, "name": "x", "tool_calls": None}]}, HI),
    # tools
    "arguments text": (called('{"a": 1}'), {"messages": called('{"a": 1}', content="")["messages"]}),
    "arguments object": (called({"a": 1}), {"messages": called('{"a":1}', content="")["messages"]}),
    "arguments empty": (called(""), {"messages": called("{}", content="")["messages"]}),
    "arguments null": (called(None), {"messages": called("{}", content="")["messages"]}),
    "arguments broken": (called('{"a": '), ("messages[1].tool_calls[0].function.arguments", "not JSON")),
    "arguments list": (called([1]), ("messages[1].tool_calls[0].function.arguments", "is a list")),
    "arguments list as text": (called("[1]"), ("messages[1].tool_calls[0].function.arguments", "is a list")),
    "tool call nameless": (
        {"messages": [user("a"), assistant(None, tool_calls=[{"function": {}}]), user("b")]},
        ("messages[1].tool_calls[0].function.name", "missing"),
    ),
    "tool null": (
        {"messages": [user("a"), {"role": "tool", "content": None}]},
        ("messages[1].content", "null or missing"),
    ),
    "tool empty": ({"messages": [user("a"), {"role": "tool", "content": ""}]},) * 2,
    "tools as they are": ({**HI, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},) * 2,
    "tools as JSON text": (
        {**HI, "tools": json.dumps([{"type": "function", "function": {"name": "f"}}])},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    "tools empty": ({**HI, "tools": []}, {"tools": None}),
    "tools broken": ({**HI, "tools": "[{"}, ("tools", "not JSON")),
    "tools nameless": ({**HI, "tools": [{"type": "function", "function": {}}]}, ("tools[0].function.name", "missing")),
    "tools of another type": (
        {**HI, "tools": [{"type": "x", "function": {"name": "f"}}]},
        ("tools[0].type", "function"),
    ),
    "BFCL": (
        {
            "question": [[user("hi")]],
            "function": {
                "name": "f",
                "parameters": {
                    "type": "dict",
                    "properties": {
                        "type": {"type": "float", "default": {"type": "float"}},
                        "at": {"type": "tuple", "items": {"type": "any"}},
                    },
                },
            },
        },
        {
            "messages": [user("hi")],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "type": {"type": "number", "default": {"type": "float"}},
                                "at": {"type": "array", "items": {"type": "string"}},
                            },
                        },
                    },
                }
            ],
        },
    ),
    "BFCL turns": (
        {"question": [[system("s"), user("a")], [user("b")]]},
        {"messages": [system("s"), user("a")], "follow_ups": [user("b")]},
    ),
    "BFCL empty turn": ({"question": [[user("a")], []]}, ("question[1]", "exactly one user message")),
    # what a tokenizer would not take for text
    "im_end": ({"prompt": "a <|im_end|> b"}, ("messages[0].content", "<|im_end|>")),
    "im_end escaped": (b'{"prompt": "a \\u003c|im_end|\\u003e"}', ("messages[0].content", "<|im_end|>")),
    "im_start in history": (
        {"messages": [user("a"), assistant("<|im_start|>"), user("b")]},
        ("messages[1].content", "<|im_start|>"),
    ),
    "control token in tools": (
        {**HI, "tools": [{"name": "f", "description": "<|endoftext|>"}]},
        ("tools[0].function.description", "<|endoftext|>"),
    ),
    "image pad": ({"prompt": "<|image_pad|>"}, ("messages[0].content", "<|image_pad|>")),
    "think tags": ({"prompt": "why </think> and <think>?"}, {"messages": [user("why </think> and <think>?")]}),
    "image marker": ({"prompt": "<image> what is it"}, {"messages": [user("<image> what is it")]}),
    "pipes": ({"prompt": "x <| f |> y"}, {"messages": [user("x <| f |> y")]}),
    # shapes
    "from and value": (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "x"},
            ]
        },
        {"messages": [system("s"), user("hi")]},
    ),
    "role and content": ({"conversations": [user("hi"), assistant("x")]}, HI),
    "turns": ({"turns": ["a", "b"]}, {"messages": [user("a")], "follow_ups": [user("b")]}),
    "turn blank": ({"turns": ["a", " "]}, ("turns[1]", "empty")),
    "instruction": ({"instruction": "do", "input": "this", "output": "x"}, {"messages": [user("do\n\nthis")]}),
    "instruction alone": ({"instruction": "hi", "input": "", "output": "x"}, HI),
    "instruction with a number": ({"instruction": "hi", "input": 3}, ("input", "is a number")),
    "prompt as messages": ({"prompt": [user("hi")]}, HI),
    "question": ({"question": "hi", "answer": "x"}, HI),
    "prompt before question": ({"question": "x", "prompt": "hi"}, HI),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_row_at_the_edge_is_read_or_rejected_and_its_neighbours_are_read(name: str, tmp_path: Path) -> None:
    line, expected = EDGES[name]
    text = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
    (tmp_path / "one.jsonl").write_bytes(text)
    (tmp_path / "two.jsonl").write_text(json.dumps({"prompt": "next", "id": "next"}))
    found, neighbour = read(tmp_path / "*.jsonl")
    assert isinstance(neighbour, Prompt) and neighbour.id == "next"
    if isinstance(expected, dict):
        assert isinstance(found, Prompt), found
        assert {key: getattr(found, key) for key in expected} == expected
    else:
        assert isinstance(found, Rejection), found
        assert (found.file, found.line, found.field) == (str(tmp_path / "one.jsonl"), 1, expected[0])
        assert expected[1] in found.reason


def test_blank_lines_are_skipped_and_counted_only_as_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"prompt": "a"}\n \t\r\n\n{"prompt": "b"}\nx\n\n')
    first, second, broken = read(tmp_path / "a.jsonl")
    assert isinstance(first, Prompt) and isinstance(second, Prompt) and isinstance(broken, Rejection)
    assert (first.id, second.id, broken.line) == ("p0000000", "p0000001", 6)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (assistant("The answer is"), "The answer is"),
        (assistant(""), None),
        (user("more"), None),
        (assistant("x", tool_calls=[{}]), "only plain text"),
        (assistant("x", reasoning_content="r"), "only plain text"),
    ],
)
def test_keep_last_makes_the_last_assistant_turn_a_prefix(last: Any, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [user("hi"), last]}))
    (found,) = read(tmp_path / "a.jsonl", KEEP_LAST)
    if isinstance(found, Rejection):
        assert expected is not None and expected in found.reason and found.field == "messages[1]"
    else:
        assert found.prefix == expected and found.messages[0] == user("hi")


def test_prompt_field_may_be_nested(tmp_path: Path) -> None:
    rows = [{"body": {"messages": [user("a")]}, "custom_id": "x"}, {"body": {}}, {"body.messages": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second, third = read(tmp_path / "a.jsonl", ReadOptions(prompt_field="body.messages"))
    assert isinstance(first, Prompt) and first.id == "x" and first.messages == [user("a")]
    assert isinstance(second, Rejection) and second.field == "body.messages"
    assert isinstance(third, Prompt) and third.messages == [user("b")]


def test_a_file_of_duplicates(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "prompt": "a"},
        {"id": 1, "prompt": "b"},  # the id again
        {"id": 2, "prompt": "a"},  # the prompt again
        {"id": 2, "prompt": "c"},  # 2 was never accepted: this one is
        {"id": "1#2", "prompt": "d"},
        {"id": 1, "prompt": "a"},
        {"id": 2, "prompt": "e"},
    ]
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text("\n" + "\n".join(json.dumps(row) for row in rows[:2]))
    second.write_text("\n".join(json.dumps(row) for row in rows[2:]))
    results = read(tmp_path / "*.jsonl")
    assert [result.id for result in results if isinstance(result, Prompt)] == ["1", "2", "1#2"]
    assert [(r.file, r.line, r.field, r.reason) for r in results if isinstance(r, Rejection)] == [
        (str(first), 3, "id", f"the same id as {first}:2"),
        (str(second), 1, "", f"the same prompt as {first}:2"),
        (str(second), 4, "id", f"the same id as {first}:2"),
        (str(second), 5, "id", f"the same id as {second}:2"),
    ]
    kept = prompts(tmp_path / "*.jsonl", ReadOptions(duplicates="keep"))
    assert [prompt.id for prompt in kept] == ["1", "1#2", "2", "2#2", "1#2#2", "1#3", "2#3"]


def test_many_duplicates_of_one_id_take_no_longer_each(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "x", "prompt": "a"}\n' * 20_000)  # minutes, if each tried #2, #3, ...
    kept = prompts(tmp_path / "a.jsonl", ReadOptions(duplicates="keep"))
    assert len({prompt.id for prompt in kept}) == 20_000 and kept[-1].id == "x#20000"


@given(st.lists(st.lists(st.sampled_from([0, 1, 255]), min_size=6, max_size=6).map(bytes), max_size=30))
def test_the_table_of_hashes_finds_what_was_added_and_nothing_between_two_entries(keys: list[bytes]) -> None:
    table, expected = HashTable(), dict[int, int]()
    for key in (int.from_bytes(key, "big") for key in keys):  # all in the first bucket
        assert table.get(key) == expected.get(key)
        if key in expected:
            table.replace(key, key >> 16)
        else:
            table.add(key, key >> 16)
        expected[key] = key >> 16
    assert {key: table.get(key) for key in expected} == expected


def test_limit_counts_accepted_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\nx\n{"prompt": "b"}\n{"prompt": "c"}\n')
    found = read(tmp_path / "a.jsonl", ReadOptions(limit=2))
    assert [type(result) for result in found] == [Prompt, Rejection, Prompt]


def test_strict_raises_the_first_rejection(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": " "}\n')
    with pytest.raises(PromptError, match=r"a\.jsonl:2: prompt: empty"):
        read(tmp_path / "a.jsonl", ReadOptions(strict=True))


# Files


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    table = pa.Table.from_pylist(rows)
    return table.append_column("made", pa.array([1] * len(rows), pa.timestamp("ns")))


def _write_stream(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, 2)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """`rows` in the format that the name says."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    half = len(rows) // 2
    match path.name:
        case "a.jsonl":
            path.write_bytes(lines)
        case "a.jsonl.gz":
            path.write_bytes(gzip.compress(lines[:500]) + gzip.compress(lines[500:]))  # as two that were joined
        case "a.jsonl.zst":
            path.write_bytes(zstandard.compress(lines[:500]) + zstandard.compress(lines[500:]))
        case "a.json":
            path.write_text("\n" + json.dumps(rows, indent=2))
        case "a.json.gz":
            path.write_bytes(gzip.compress(json.dumps(rows).encode()))
        case "a.parquet":
            pyarrow.parquet.write_table(_table(rows), path, row_group_size=2)
        case "stream.arrow":
            _write_stream(path, _table(rows))
        case "file.arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _table(rows).schema) as writer:
                writer.write_table(_table(rows))
        case "saved":
            _write_stream(path / "data-00000-of-00002.arrow", _table(rows[:half]))
            _write_stream(path / "data-00001-of-00002.arrow", _table(rows[half:]))
            _write_stream(path / "cache-0123.arrow", _table(rows))  # of a `map`: not the data set
            files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in (0, 1)]
            (path / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
        case "splits":
            _write(path / "train" / "saved", rows[:half])
            _write(path / "test" / "saved", rows[half:])
            (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train/saved", "test/saved"]}))


ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [user('ä\u2028 <b> \\ " [ { \n'), assistant("x"), user("y")], "tools": None},
    {"id": "b", "messages": [user("b")], "tools": None},
    *({"id": f"c{number}", "messages": [user(f"{number} " * 50)], "tools": None} for number in range(300)),
    {
        "id": "d",
        "messages": [
            user("d"),
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "4"},
        ],
        "tools": [tool("f", {"x": {"type": "null"}})],
    },
    # In a table, this tool and the one above each get the other's parameter, as null.
    {"id": "e", "messages": [user("e")], "tools": [tool("g", {"y": {"type": "null"}})]},
]
FORMATS = [
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a.json",
    "a.json.gz",
    "a.parquet",
    "stream.arrow",
    "file.arrow",
    "saved",
    "splits",
]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_prompts(name: str, tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", ROWS)
    _write(tmp_path / name, ROWS)
    assert prompts(tmp_path / name) == prompts(tmp_path / "a.jsonl")
    assert len(prompts(tmp_path / name)) == len(ROWS)


class _Pipe(io.RawIOBase):
    """Gives a few bytes at a time and cannot seek, as pipes and sockets may."""

    def __init__(self, data: bytes):
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._data.read(min(len(buffer), 7))
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.parquet", "stream.arrow"])
def test_stdin_and_remote_files_need_no_seek(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / name, ROWS)
    data = (tmp_path / name).read_bytes()
    expected = list(read_prompts([str(tmp_path / name)], DEFAULTS))
    opened: list[str] = []

    def open_remote(url: str) -> Any:
        opened.append(url)
        return _Pipe(data)

    assert list(read_prompts([f"s3://bucket/{name}"], DEFAULTS, open_remote)) == expected
    assert opened == [f"s3://bucket/{name}"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(_Pipe(data))))
    assert list(read_prompts(["-"], DEFAULTS)) == expected


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_file_cut_in_the_middle_is_said_so(name: str, share: float, tmp_path: Path) -> None:
    rows = [{"prompt": os.urandom(300).hex()} for _ in range(5)]
    _write(tmp_path / name, rows)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SettingsError, match=rf"{name}: cut off or damaged after line \d.*download it again"):
        read(tmp_path / name)


def test_the_lines_before_the_cut_are_counted(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": os.urandom(500).hex()}) + "\n" for _ in range(5000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-1000])
    results = []
    with pytest.raises(SettingsError, match="after line 4"):  # four thousand and some
        results.extend(read_prompts([str(tmp_path / "a.jsonl.gz")], DEFAULTS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"prompt": "a"}, {"prompt": }, {"prompt": "b"}]', ["a", (2, "not JSON"), "b"]),
        ('[{"prompt": "a"}, 7, {"prompt": "b"}]', ["a", (2, "is a number"), "b"]),
        ('[{"prompt": "a"}, {"prompt": "b"', ["a", (2, "does not end")]),
        ('[{"prompt": "a"}, {"prompt": "b}, {"prompt": "c"}]', ["a", (2, "does not end")]),
        ('[{"prompt": "a"},', ["a", (2, "does not end")]),
        ('[{"prompt": "a"}] [{"prompt": "b"}]', ["a", (2, "after the end of the array")]),
        ("[]", []),
        ("", []),
        (" \n", []),
    ],
)
def test_a_damaged_array_costs_no_neighbour(text: str, expected: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    results = read(tmp_path / "a.json")
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        if isinstance(result, Prompt):
            assert result.messages[0]["content"] == wanted
        else:
            assert result.line == wanted[0] and wanted[1] in result.reason


@pytest.mark.parametrize("shape", ["%s\n%s\n%s\n", "[%s,%s,%s]"])
@pytest.mark.parametrize("length", [3100, 5_000_000])
def test_a_line_over_the_limit_is_rejected_without_being_held(
    shape: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_files, "LINE_BYTES", 3000)
    monkeypatch.setattr(prompt_files, "_CHUNK_BYTES", 512)
    lines = [json.dumps({"prompt": letter * times}) for letter, times in (("a", 2900), ("b", length), ("c", 10))]
    (tmp_path / "a.json").write_text(shape % tuple(lines))
    read(tmp_path / "a.json")  # what is made once and kept must not be measured
    tracemalloc.start()
    first, second, third = read(tmp_path / "a.json")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(first, Prompt) and isinstance(third, Prompt)
    assert isinstance(second, Rejection) and second.line == 2 and "longer than" in second.reason
    assert peak_bytes < 2_500_000  # two tables of hashes, still empty, are 1 MB


def test_text_in_a_table_that_is_not_utf8_costs_one_row(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    _write_stream(tmp_path / "a.arrow", pa.table({"prompt": texts}))
    first, second, third = read(tmp_path / "a.arrow")
    assert isinstance(first, Prompt) and isinstance(third, Prompt)
    assert isinstance(second, Rejection) and second.line == 2 and "utf-8" in second.reason


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "no such file"),
        ("*.nothing", "no such file"),
        ("empty", "no dataset saved by save_to_disk"),
        ("pointer.parquet", "download it again"),
        ("half", "damaged dataset folder"),
        ("gone", "cannot be opened"),
    ],
)
def test_a_source_that_cannot_be_read_is_a_matter_of_settings(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "state.json").write_text('{"_data_files": ')
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(SettingsError, match=message):
        list(read_prompts([str(tmp_path / "good.jsonl"), str(tmp_path / source)], DEFAULTS))


def test_s3_without_a_store_is_a_matter_of_settings() -> None:
    with pytest.raises(SettingsError, match="no store"):
        list(read_prompts(["s3://bucket/key"], DEFAULTS))


# Templates


def test_a_template_renders_the_user_message(tmp_path: Path) -> None:
    rows = [{"id": "x", "title": "T", "tags": ["<a>"]}, {"id": "y", "tags": []}, {"id": "z", "title": "", "tags": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ReadOptions(template="{{ title }}{% for tag in tags %} {{ tag | tojson }}{% endfor %}")
    first, second, third = read(tmp_path / "a.jsonl", options)
    assert isinstance(first, Prompt) and first.messages == [user('T "<a>"')] and first.id == "x"
    assert isinstance(second, Rejection) and "'title' is undefined" in second.reason
    assert isinstance(third, Rejection) and third.reason == "empty"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ prompt.__class__.__mro__ }}", "unsafe"),
        ("{{ prompt.__class__ }}", "unsafe"),
        ("{{ lipsum.__globals__['os'] }}", "unsafe"),
        ("{{ '{0.__class__}'.format(prompt) }}", "unsafe"),
        ("{% if %}", "--template, line 1"),
    ],
)
def test_a_template_that_reaches_out_is_refused(template: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(SettingsError, match=message):
        read(tmp_path / "a.jsonl", ReadOptions(template=template))


def test_a_template_that_fails_on_a_line_costs_that_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": 2}\n')
    first, second = read(tmp_path / "a.jsonl", ReadOptions(template="{{ 4 / n }}"))
    assert isinstance(first, Rejection) and "ZeroDivisionError" in first.reason
    assert isinstance(second, Prompt)


# Whatever stands in the file

WORDS = st.sampled_from(
    ["user", "assistant", "system", "tool", "human", "gpt", "text", "function", "f", "{}", "", " ", "<|im_end|>", "\0"]
)
# fmt: off
KEYS = st.sampled_from([
    "messages", "conversations", "turns", "prompt", "instruction", "input", "question", "system", "tools", "function",
    "id", "role", "content", "from", "value", "type", "text", "tool_calls", "name", "arguments", "parameters",
    "properties", "items", "reasoning_content", "tool_call_id",
])
# fmt: on
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS | st.text()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": WORDS | VALUES},
    optional={"tool_calls": VALUES, "reasoning_content": VALUES},
)
CONVERSATIONS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=4)}, optional={"id": SCALARS, "tools": VALUES, "function": VALUES}
)
LINES = (st.dictionaries(KEYS, VALUES, max_size=5) | CONVERSATIONS).map(lambda value: json.dumps(value).encode())
FILES = st.lists(LINES | st.binary(max_size=40), max_size=6).map(b"\n".join)


@given(FILES, st.booleans(), st.sampled_from(["reject", "keep"]))
@example(b"\x0b\n\x0c\r", False, "reject")
@settings(max_examples=200, deadline=None)
def test_lines_read_are_accepted_or_rejected(tmp_path_factory: Any, data: bytes, keep_last: bool, how: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"{}\n" + data)  # a first line that makes it JSON lines
    results = list(read_prompts([str(path)], ReadOptions(keep_last=keep_last, duplicates=how)))
    assert len(results) == 1 + sum(1 for line in data.split(b"\n") if line.strip())
    accepted = [msgspec.json.decode(result, type=Prompt) for result in results if isinstance(result, bytes)]
    assert len({prompt.id for prompt in accepted}) == len(accepted)
    msgspec.json.encode([result for result in results if isinstance(result, Rejection)])


@given(st.sampled_from([b"", b"[", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"ARROW1\0\0", b"\xff\xff\xff\xff"]), FILES)
@settings(max_examples=100, deadline=None)
def test_whatever_the_first_bytes_say_only_settings_errors_come(
    tmp_path_factory: Any, magic: bytes, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(magic + data)
    try:
        read(path)
    except SettingsError as error:
        assert str(path) in str(error)


@given(st.lists(VALUES, max_size=8), st.sampled_from([None, 0, 3]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_an_array_is_read_like_its_elements_one_a_line(
    tmp_path_factory: Any, values: list[Any], indent: int | None, ascii_only: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = [json.dumps(value) for value in ["first", *values]]
    (folder / "l.jsonl").write_text("\n".join(lines))
    (folder / "l.json").write_text(
        json.dumps(["first", *values], indent=indent, ensure_ascii=ascii_only), encoding="utf-8"
    )
    as_lines, as_array = read(folder / "l.jsonl"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_files, "_CHUNK_BYTES", 64)  # so that elements, strings and escapes are cut everywhere
        as_array = read(folder / "l.json")
    assert [(type(r), getattr(r, "field", r)) for r in as_array] == [
        (type(r), getattr(r, "field", r)) for r in as_lines
    ]


# The real files


def _real(name: str) -> Path:
    shared = Path(os.environ.get("GEND_SHARED") or Path(__file__).parents[2] / "shared")
    path = shared / "prompts" / name
    if not path.exists():
        pytest.skip(f"{path} is missing: put the real prompt files beside the checkout or set GEND_SHARED")
    return path


def _independent(name: str) -> list[dict[str, Any]]:
    data = _real(name).read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    rows: list[dict[str, Any]] = (
        json.loads(text) if name.endswith(".json") else list(map(json.loads, text.splitlines()))
    )
    return rows


@pytest.mark.parametrize(
    ("name", "field", "count"),
    [
        ("humaneval.jsonl.gz", None, 164),
        ("gsm8k_test.jsonl", "question", 1319),
        ("gsm8k_test.jsonl", None, 1319),
        ("mt_bench.jsonl", None, 80),
        ("bfcl_simple_python.jsonl", None, 400),
        ("code_alpaca_2k.json", None, 2017),
    ],
)
def test_the_real_files_load_whole(name: str, field: str | None, count: int) -> None:
    rows = _independent(name)
    found = prompts(_real(name), ReadOptions(prompt_field=field))
    assert len(found) == len(rows) == count
    for row, prompt in zip(rows, found, strict=True):
        match name:
            case "humaneval.jsonl.gz":
                assert (prompt.id, prompt.messages) == (row["task_id"], [user(row["prompt"])])
            case "gsm8k_test.jsonl":
                assert prompt.messages == [user(row["question"])]
            case "mt_bench.jsonl":
                assert prompt.id == str(row["question_id"])
                assert [*prompt.messages, *prompt.follow_ups] == [user(text) for text in row["turns"]]
            case "bfcl_simple_python.jsonl":
                assert (prompt.id, prompt.messages) == (row["id"], row["question"][0])
                assert prompt.tools is not None and prompt.tools[0]["function"]["name"] == row["function"][0]["name"]
                kinds = set(_kinds(prompt.tools[0]["function"]["parameters"]))
                assert kinds <= {"object", "array", "string", "number", "integer", "boolean"}
            case "code_alpaca_2k.json":
                content = prompt.messages[0]["content"]
                assert content.startswith(row["instruction"]) and content.endswith(row["input"])


def _kinds(schema: dict[str, Any]) -> list[str]:
    inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
    return [schema["type"], *(kind for value in inner for kind in _kinds(value))]
