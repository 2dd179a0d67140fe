"""Exports hold the best row of each prompt, in a form that a trainer takes, and nothing is left out uncounted."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from harness import made_runs

from gend import export as export_module
from gend.cli import main
from gend.config import Settings
from gend.errors import NotSound, SettingsError
from gend.export import ExportOptions, Manifest, export
from gend.provenance import describe
from gend.records import Prompt, Row, Run, Sampling, Usage, Verdicts, part_key
from gend.store import FolderStore


@pytest.fixture
def store(folder: Path) -> FolderStore:
    return FolderStore(folder / "store")


@pytest.fixture
def out(folder: Path) -> Path:
    return folder / "out"


def read(out: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """All exported rows, in the order of the shards."""
    rows: list[dict[str, Any]] = []
    for shard in manifest.shards:
        if shard.name.endswith(".parquet"):
            rows += pq.read_table(out / shard.name).to_pylist()
        else:
            rows += [json.loads(line) for line in (out / shard.name).read_text().splitlines()]
    return rows


def by_number(change: Callable[[Row, int], Any]) -> Callable[[Row], Row]:
    """A change that gets the row and the number in its id."""

    def changed(row: Row) -> Row:
        change(row, int(row.id[1:8]))
        return row

    return changed


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]


def test_shards_and_manifest_say_the_same(store: FolderStore, out: Path) -> None:
    run = made_runs.add_run(store, made_runs.prompts(10))
    engine = describe(Settings(), 0, {"version": "0.5.17", "mem_fraction_static": 0.9})
    store.replace(f"runs/{run.id}/engines/{engine.id}.json", msgspec.json.encode(engine))
    manifest = export(store, [run], out, ExportOptions(shard_rows=4))
    assert [(shard.name, shard.rows) for shard in manifest.shards] == [
        ("rows-00000.jsonl", 4),
        ("rows-00001.jsonl", 4),
        ("rows-00002.jsonl", 2),
    ]
    for shard in manifest.shards:
        body = (out / shard.name).read_bytes()
        assert (len(body), hashlib.sha256(body).hexdigest()) == (shard.bytes, shard.sha256)
    assert {path.name for path in out.iterdir()} == {shard.name for shard in manifest.shards} | {"manifest.json"}
    assert msgspec.json.decode((out / "manifest.json").read_bytes(), type=Manifest) == manifest
    [source] = manifest.sources
    assert (source.run, source.model, source.sampling, source.set) == (run.id, run.model, run.sampling, run.set)
    assert source.engines == {engine.id: engine}
    first = read(out, manifest)[0]
    assert first["id"] == "p0000000" and first["verdict"] == "ok" and first["run"] == run.id
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert first["messages"][-1]["reasoning_content"].startswith("Let me think about p0000000")


def test_the_manifest_says_which_rows_were_made_with_other_settings(store: FolderStore, out: Path) -> None:
    more = {"top_k": 5, "max_tokens": 5000}

    def change(row: Row, number: int) -> None:
        row.changed = more if number % 3 == 0 else msgspec.UNSET

    rules = Verdicts(length={"retries": 1, **more})
    run = made_runs.add_run(store, made_runs.prompts(10), change=by_number(change), verdicts=rules)
    [source] = export(store, [run], out, ExportOptions()).sources
    assert (source.verdicts, source.changed) == (rules, {'{"max_tokens":5000,"top_k":5}': 4})


def test_parquet_holds_the_same_rows_as_jsonl(store: FolderStore, out: Path, folder: Path) -> None:
    asked = [msgspec.structs.replace(prompt, tools=TOOLS) for prompt in made_runs.prompts(700)]

    def change(row: Row, number: int) -> None:
        if number % 2:
            row.content, row.tool_calls = None, CALLS

    run = made_runs.add_run(store, asked, change=by_number(change), batch_size=100)
    plain = read(out, export(store, [run], out, ExportOptions(shard_rows=300)))
    table = folder / "table"
    manifest = export(store, [run], table, ExportOptions(shard_rows=300, format="parquet"))
    assert [shard.rows for shard in manifest.shards] == [300, 300, 100]
    for row, expected in zip(read(table, manifest), plain, strict=True):
        row["tools"] = json.loads(row["tools"])
        for message in row["messages"]:
            message["tool_calls"] = json.loads(message["tool_calls"]) if message["tool_calls"] else None
        row["messages"] = [{k: v for k, v in message.items() if v is not None} for message in row["messages"]]
        expected["messages"] = [{k: v for k, v in message.items() if v is not None} for message in expected["messages"]]
        assert row == expected


def test_only_chosen_verdicts_and_every_other_row_is_counted(store: FolderStore, out: Path) -> None:
    words = ("ok", "length", "loop", "refused", "ok")

    def change(row: Row, number: int) -> None:
        row.verdict = words[number % 5]
        if row.verdict == "refused":
            row.content = row.reasoning_content = None
            row.error = "HTTP 400"

    run = made_runs.add_run(store, made_runs.prompts(50), change=by_number(change))
    manifest = export(store, [run], out, ExportOptions(verdicts=("ok", "length", "refused")))
    assert Counter(row["verdict"] for row in read(out, manifest)) == {"ok": 20, "length": 10}
    assert (manifest.prompts, manifest.rows) == (50, 30)
    assert (manifest.other_verdicts, manifest.left_out) == ({"loop": 10}, {"no reply": 10})


# -- what is not sound -----------------------------------------------------------------------------------------------


def test_an_unfinished_or_damaged_run_is_refused(store: FolderStore, out: Path, folder: Path) -> None:
    run = made_runs.add_run(store, made_runs.prompts(10), without=[1])
    with pytest.raises(NotSound, match="2 of 3 parts"):
        export(store, [run], out, ExportOptions())
    manifest = export(store, [run], out, ExportOptions(partial=True))
    assert manifest.rows == 6 and manifest.sources[0].missing_batches == 1
    body = store.get(part_key(run.id, 0)) or b""
    lines = body.splitlines(keepends=True)
    for damaged in (body[:-30], b"".join(lines[:3]), b"".join([lines[1], lines[0], *lines[2:]]), body + lines[0]):
        store.replace(part_key(run.id, 0), damaged)
        with pytest.raises(NotSound, match="gend verify"):
            export(store, [run], folder / hashlib.sha256(damaged).hexdigest()[:8], ExportOptions(partial=True))


def test_an_export_that_is_cut_off_has_no_manifest_and_is_not_written_over(store: FolderStore, out: Path) -> None:
    run = made_runs.add_run(store, made_runs.prompts(10))

    def cut(batches: int) -> None:
        if batches == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(store, [run], out, ExportOptions(shard_rows=3), cut)
    assert {path.name for path in out.iterdir()} == {"rows-00000.jsonl", "rows-00001.jsonl"}
    with pytest.raises(SettingsError, match="not empty"):
        export(store, [run], out, ExportOptions())


def test_no_row_at_all_is_an_error_that_says_what_there_is(store: FolderStore, out: Path) -> None:
    run = made_runs.add_run(
        store, made_runs.prompts(4), change=by_number(lambda row, _: setattr(row, "verdict", "empty"))
    )
    with pytest.raises(NotSound, match="wanted ok, there is empty 4"):
        export(store, [run], out, ExportOptions())
    assert not (out / "manifest.json").exists()


# -- several runs ----------------------------------------------------------------------------------------------------


def test_the_best_row_of_each_prompt_comes_out_once(store: FolderStore, out: Path) -> None:
    """Three runs and two rounds over overlapping prompts, with verdicts drawn at random, against a plain table."""
    draw = random.Random(5)
    asked = made_runs.prompts(120)
    made: list[tuple[Run, dict[str, str]]] = []

    def add(name: str, prompts: list[Prompt], **more: Any) -> Run:
        words = {prompt.id: draw.choice(("ok", "length", "loop", "empty")) for prompt in prompts}
        run = made_runs.add_run(
            store, prompts, name, lambda row: msgspec.structs.replace(row, verdict=words[row.id]), **more
        )
        made.append((run, words))
        return run

    runs = [add("a", asked), add("b", asked[30:90], batch_size=7), add("c", asked[60:])]
    for number in (1, 2):
        add(f"a-round-{number}", draw.sample(asked, 40), round_of=runs[0].id, round=number)
    rank = {"ok": 0, "length": 1, "loop": 2, "empty": 2}
    expected = {}
    for prompt in asked:
        having = [(rank[words[prompt.id]], at) for at, (_, words) in enumerate(made) if prompt.id in words]
        run, words = made[min(having)[1]]
        expected[prompt.id] = (run.id, words[prompt.id])

    manifest = export(store, runs, out, ExportOptions(verdicts=("ok", "length")))
    rows = read(out, manifest)
    assert {row["id"]: (row["run"], row["verdict"]) for row in rows} == {
        id: best for id, best in expected.items() if best[1] in ("ok", "length")
    }
    assert len(rows) == len({row["id"] for row in rows}) == manifest.rows
    assert manifest.prompts == 120
    assert {source.run: source.rows for source in manifest.sources if source.rows} == Counter(
        row["run"] for row in rows
    )
    assert [(source.round_of, source.round) for source in manifest.sources[3:]] == [(runs[0].id, 1), (runs[0].id, 2)]


def test_prompts_with_the_same_id_and_other_messages_are_two(store: FolderStore, out: Path) -> None:
    asked = made_runs.prompts(6)
    others = [msgspec.structs.replace(p, messages=[{"role": "user", "content": "else"}]) for p in asked[:3]]
    runs = [made_runs.add_run(store, asked, "a"), made_runs.add_run(store, others, "b")]
    assert export(store, runs, out, ExportOptions()).rows == 9


# -- SpecForge -------------------------------------------------------------------------------------------------------


def specforge_accepts(row: dict[str, Any], reasoning: bool) -> bool:
    """The rules of its scripts/validate_regenerated_data.py with --strict-think-markers, in our own words."""
    turns = row["conversations"]
    while turns and turns[0]["role"] == "system":
        assert turns[0]["content"].strip()
        turns = turns[1:]
    assert row["id"].strip() and row["status"] == "success" and turns
    for at, turn in enumerate(turns):
        assert turn["role"] == ("user", "assistant")[at % 2]
        assert isinstance(turn["content"], str) and turn["content"].strip()
        if at % 2:
            thought = turn.get("reasoning_content")
            assert thought is None or isinstance(thought, str)
            assert (thought and thought.strip()) or not reasoning
            assert not any(tag in (turn["content"] + (thought or "")).lower() for tag in ("<think>", "</think>"))
    return len(turns) % 2 == 0


USER, ASSISTANT = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}

REFUSED: list[tuple[str, Callable[[Row], Any]]] = [
    ("a blank assistant message", lambda row: setattr(row, "content", "  ")),
    ("a blank assistant message", lambda row: setattr(row, "content", None)),
    ("a think tag in an assistant message", lambda row: setattr(row, "content", "<THINK>hm</think> yes")),
    ("a think tag in an assistant message", lambda row: setattr(row, "reasoning_content", "so </think>")),
    ("a tool call", lambda row: setattr(row, "tool_calls", CALLS)),
    ("a tool message", lambda row: row.messages.append({"role": "tool", "content": "3"})),
    ("a user message where the assistant's turn is", lambda row: row.messages.append(USER)),
    ("an assistant message where the user's turn is", lambda row: row.messages.append(ASSISTANT)),
    ("a system message where the assistant's turn is", lambda row: row.messages.append({**USER, "role": "system"})),
    ("a blank user message", lambda row: row.messages.extend([ASSISTANT, {"role": "user", "content": ""}])),
]


@pytest.mark.parametrize(("reason", "change"), REFUSED)
def test_specforge_what_its_validator_refuses_is_left_out_and_counted(
    store: FolderStore, out: Path, reason: str, change: Callable[[Row], Any]
) -> None:
    def one_of_them(row: Row, number: int) -> None:
        if number == 2:
            row.messages = [*row.messages]
            change(row)

    run = made_runs.add_run(store, made_runs.prompts(8), change=by_number(one_of_them))
    manifest = export(store, [run], out, ExportOptions(form="specforge"))
    assert manifest.left_out == {reason: 1} and manifest.rows == 7
    assert all(specforge_accepts(row, reasoning=True) for row in read(out, manifest))


def test_specforge_conversations_and_the_flags_that_pass(store: FolderStore, out: Path, folder: Path) -> None:
    system = {"role": "system", "content": "Be brief."}

    def change(row: Row, number: int) -> None:
        row.messages = [system, *row.messages, *([ASSISTANT, USER] if number == 1 else [])]

    run = made_runs.add_run(store, made_runs.prompts(4), change=by_number(change))
    manifest = export(store, [run], out, ExportOptions(form="specforge"))
    rows = read(out, manifest)
    assert all(specforge_accepts(row, reasoning=False) for row in rows)
    assert manifest.validator_flags == ["--strict-think-markers"], "one earlier turn came without its thought"
    assert set(rows[0]) == {"id", "status", "conversations", "run"}
    assert [set(turn) for turn in rows[0]["conversations"][1:]] == [
        {"role", "content"},
        {"role", "content", "reasoning_content"},
    ]
    alike = export(store, [run], folder / "table", ExportOptions(form="specforge", format="parquet"))
    assert [row["conversations"][-1] for row in read(folder / "table", alike)] == [
        row["conversations"][-1] for row in rows
    ]


# -- tokens ----------------------------------------------------------------------------------------------------------


def with_ids(thin: int = 0, most: int = 40) -> Callable[[Row], Row]:
    """The server's own ids: 12 of the prompt, 40 of the reply; `thin` rows have the old bug's mask of six."""

    def change(row: Row, number: int) -> None:
        row.prompt_token_ids = list(range(100, 112))
        row.token_ids = list(range(200, 200 + (6 if number < thin else most)))

    return by_number(change)


def test_tokens_are_the_servers_own_where_the_row_has_them(store: FolderStore, out: Path, folder: Path) -> None:
    run = made_runs.add_run(store, made_runs.prompts(5), change=with_ids())
    manifest = export(store, [run], out, ExportOptions(form="tokens"))
    rows = read(out, manifest)
    assert rows[3] == {
        "id": "p0000003",
        "run": run.id,
        "input_ids": [*range(100, 112), *range(200, 240)],
        "loss_mask": [0] * 12 + [1] * 40,
    }
    table = export(store, [run], folder / "table", ExportOptions(form="tokens", format="parquet"))
    assert read(folder / "table", table) == rows


def test_a_row_without_token_ids_has_no_such_keys() -> None:
    row = Row(id="p", run="r", batch=0, messages=[], verdict="ok")
    assert not {"token_ids", "prompt_token_ids"} & json.loads(msgspec.json.encode(row)).keys()
    row.token_ids = [1, 2]
    assert msgspec.json.decode(msgspec.json.encode(row), type=Row).token_ids == [1, 2]


def test_nearly_empty_masks_are_refused_and_fail_the_export_over_one_percent(store: FolderStore, out: Path) -> None:
    few = made_runs.add_run(store, made_runs.prompts(200), "few", with_ids(thin=2), batch_size=50)
    manifest = export(store, [few], out / "few", ExportOptions(form="tokens"))
    assert manifest.rows == 198 and manifest.left_out == {"loss mask nearly empty": 2}
    assert all(sum(row["loss_mask"]) == 40 for row in read(out / "few", manifest))

    many = made_runs.add_run(store, made_runs.prompts(200), "many", with_ids(thin=3), batch_size=50)
    with pytest.raises(NotSound, match=r"3 of 200 rows .* the mask's sum is 6"):
        export(store, [many], out / "many", ExportOptions(form="tokens"))
    assert not (out / "many" / "manifest.json").exists()

    half = made_runs.add_run(store, made_runs.prompts(200), "half", with_ids(most=19), batch_size=50)
    with pytest.raises(NotSound, match="the mask's sum is 19, but 40 tokens were generated"):
        export(store, [half], out / "half", ExportOptions(form="tokens"))


def test_tokens_without_ids_need_a_tokenizer(store: FolderStore, out: Path) -> None:
    run = made_runs.add_run(store, made_runs.prompts(5))
    with pytest.raises(SettingsError, match="--tokenizer FOLDER"):
        export(store, [run], out, ExportOptions(form="tokens"))


TEMPLATE = """{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" and loop.last -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %} call {{ call.function.arguments.a }}{% endfor %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


@pytest.fixture
def model(folder: Path) -> Path:
    """A model folder with a small tokenizer and a template in the manner of Qwen's."""
    tokenizers = pytest.importorskip(
        "tokenizers", reason="the tokenizers package is not installed: no --tokenizer test"
    )
    sentence = "user assistant What is times ? Let me think about for a while , step by The answer to of made . call 1"
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "?unknown?"]
    vocabulary = {word: number for number, word in enumerate([*special, *sentence.split()])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?unknown?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special[:4])
    path = folder / "model"
    path.mkdir()
    made.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    return path


def test_tokens_by_the_chat_template_begin_where_the_model_began(store: FolderStore, out: Path, model: Path) -> None:
    def change(row: Row, number: int) -> None:
        if number == 1:
            row.tool_calls = CALLS
        if number == 2:
            row.finish_reason = row.verdict = "length"

    run = made_runs.add_run(store, made_runs.prompts(4), change=by_number(change))
    options = ExportOptions(form="tokens", tokenizer=model, verdicts=("ok", "length"))
    manifest = export(store, [run], out, options)
    assert manifest.rows == 3
    assert manifest.left_out == {"cut, and without the server's token ids: a template would end it": 1}
    import tokenizers

    shown = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    for row, calls in zip(read(out, manifest), ("", "call 1", ""), strict=True):
        begin = row["loss_mask"].index(1)
        assert row["loss_mask"] == [0] * begin + [1] * (len(row["input_ids"]) - begin)
        asked, made = (
            shown.decode(ids, skip_special_tokens=False) for ids in (row["input_ids"][:begin], row["input_ids"][begin:])
        )
        assert asked.startswith("<|im_start|> user What is") and asked.endswith("<|im_start|> assistant <think>")
        assert made.startswith("Let me think about") and made.endswith(f"{calls} <|im_end|>".strip())


# The logic of Qwen3's own template that matters here: thoughts before the last question are dropped, those after it
# are kept, and without thinking an empty thought stands in the prompt.
QWEN = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == "assistant" and loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
{{- message.content.lstrip('\\n') }}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


@pytest.mark.parametrize("thinking", [True, False])
def test_a_row_of_several_turns_trains_on_its_last_reply_as_the_template_shows_it(
    thinking: bool, store: FolderStore, out: Path, model: Path
) -> None:
    """Earlier replies stand in the last one's prompt without their thoughts: not what was generated, so no target."""
    (model / "chat_template.jinja").write_text(QWEN)
    asked = [
        Prompt(id=prompt.id, messages=prompt.messages, follow_ups=[{"role": "user", "content": "What is 1 ?"}])
        for prompt in made_runs.prompts(4)
    ]

    def change(row: Row) -> Row:
        thought = "Let me think" if thinking else None
        earlier = {"role": "assistant", "content": "The answer", "reasoning_content": thought}
        row.messages = [*row.messages, earlier, {"role": "user", "content": "What is 1 ?"}]
        row.reasoning_content = "step by step" if thinking else None
        row.content = "The answer made of 1 . The answer"
        return row

    sampling = Sampling(max_tokens=1000, thinking=thinking)
    run = made_runs.add_run(store, asked, change=change, sampling=sampling)
    manifest = export(store, [run], out, ExportOptions(form="tokens", tokenizer=model, min_loss_tokens=5))
    assert manifest.rows == 4
    import tokenizers

    shown = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    for row in read(out, manifest):
        begin = row["loss_mask"].index(1)
        assert row["loss_mask"] == [0] * begin + [1] * (len(row["input_ids"]) - begin)
        asked_for, made = (
            shown.decode(ids, skip_special_tokens=False) for ids in (row["input_ids"][:begin], row["input_ids"][begin:])
        )
        start, nothing = "<|im_start|> assistant", "" if thinking else " <think> </think>"
        assert asked_for.endswith(
            f"{start} The answer <|im_end|> <|im_start|> user What is 1 ? <|im_end|> {start}{nothing}"
        )
        thought = "<think> step by step </think> " if thinking else ""
        assert made == f"{thought}The answer made of 1 . The answer <|im_end|>"


def test_the_servers_own_ids_of_several_turns_are_those_of_the_last(store: FolderStore, out: Path) -> None:
    asked = [
        Prompt(id=prompt.id, messages=prompt.messages, follow_ups=[{"role": "user", "content": "and?"}])
        for prompt in made_runs.prompts(2)
    ]

    def change(row: Row) -> Row:
        row.messages = [*row.messages, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and?"}]
        row.prompt_token_ids, row.token_ids = [1, 2, 3], list(range(100, 130))
        row.usage = Usage(prompt_tokens=10, completion_tokens=400)  # of both turns
        return row

    run = made_runs.add_run(store, asked, change=change)
    for row in read(out, export(store, [run], out, ExportOptions(form="tokens"))):
        assert row["input_ids"] == [1, 2, 3, *range(100, 130)]
        assert row["loss_mask"] == [0] * 3 + [1] * 30


def test_a_row_that_a_retry_made_without_thinking_is_rendered_so(store: FolderStore, out: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{{ 'think' if enable_thinking else 'answer' }} "
        "{% if not add_generation_prompt %}{{ messages[-1].content }}{% endif %}"
    )

    def change(row: Row, number: int) -> None:
        row.usage = Usage(1, 6, 0)
        row.changed = {"thinking": False} if number == 1 else msgspec.UNSET

    run = made_runs.add_run(
        store, made_runs.prompts(2), change=by_number(change), verdicts=Verdicts(loop={"thinking": False})
    )
    import tokenizers

    shown = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    options = ExportOptions(form="tokens", tokenizer=model, min_loss_tokens=1)
    rows = read(out, export(store, [run], out, options))
    assert [shown.decode(row["input_ids"][:1]) for row in rows] == ["think", "answer"]


def test_a_template_that_rewrites_the_prompt_gives_no_mask(store: FolderStore, out: Path, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages | length }}{{ messages[-1].content }}")
    run = made_runs.add_run(store, made_runs.prompts(4))
    with pytest.raises(NotSound, match="does not render the reply right after the prompt 4"):
        export(store, [run], out, ExportOptions(form="tokens", tokenizer=model))


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_exports_and_says_what_is_not_in_it(store: FolderStore, folder: Path, out: Path) -> None:
    def change(row: Row, number: int) -> None:
        row.verdict = "loop" if number < 3 else "ok"

    run = made_runs.add_run(store, made_runs.prompts(10), change=by_number(change))
    config = folder / "config.toml"
    config.write_text(f'[store]\nurl = "{store.url}"\n')

    def gend(*words: str) -> Any:
        return CliRunner().invoke(main, ["--config", str(config), "export", "made", *words])

    done = gend("--out", str(out), "--form", "specforge")
    assert done.exit_code == 0, done.output
    assert f"7 from {run.id}" in done.output and "other verdict: 3 loop" in done.output
    assert "--strict-think-markers --expect-reasoning" in done.output
    assert gend("--out", str(out)).exit_code == 2, "the folder is not empty"
    assert gend("--out", str(folder / "x"), "--verdict", "good").exit_code == 2
    assert gend("--out", str(folder / "y"), "--verdict", "empty").exit_code == 1
    assert json.loads(gend("--out", str(folder / "z"), "--json").stdout)["rows"] == 7


def test_row_groups_are_written_before_the_shard_is_whole(
    store: FolderStore, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "_GROUP_BYTES", 50_000)
    run = made_runs.add_run(store, made_runs.prompts(2000), batch_size=500)
    manifest = export(store, [run], out, ExportOptions(format="parquet"))
    file = pq.ParquetFile(out / manifest.shards[0].name)
    assert file.metadata.num_rows == 2000 and file.metadata.num_row_groups >= 4
