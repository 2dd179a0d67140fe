"""Prompts that leave no room for a reply are rejected at load, where the model's tokenizer is on this box."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.daemon import Daemon

from gend import chat_tokens, loader
from gend.chat_tokens import TokenBudget
from gend.config import settings_from
from gend.errors import SettingsError
from gend.model_files import context_length
from gend.prompts import ReadOptions, Rejection, read_prompts
from gend.records import Prompt

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed: nothing is counted")

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{{ tools | tojson if tools }}{% if enable_thinking %}<think>{% endif %}"
)
ASKED = "<user>" + "<think>"
CONTEXT = 300


@pytest.fixture
def model(folder: Path) -> Path:
    """A model folder whose tokenizer makes one token of each byte."""
    bytes_ = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made = tokenizers.Tokenizer(tokenizers.models.BPE({sign: number for number, sign in enumerate(bytes_)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    home = folder / "model"
    home.mkdir()
    made.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (home / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": CONTEXT}}))
    return home


def accepted(folder: Path, model: Path, *lines: dict[str, Any], **options: Any) -> list[bool]:
    """Of each line, whether it was accepted."""
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    budget = TokenBudget(model, 0, True)
    read = read_prompts([str(source)], ReadOptions(**options), too_long=budget.excess)
    return [not isinstance(result, Rejection) for result in read]


def test_one_token_must_be_left_for_the_reply(folder: Path, model: Path) -> None:
    room = CONTEXT - 1 - len(ASKED)
    assert accepted(folder, model, {"prompt": "x" * room}, {"prompt": "y" * (room + 1)}) == [True, False]
    assert accepted(folder, model, {"prompt": "ß" * (room // 2)}, {"prompt": "é" * room}) == [True, False]
    turns = [{"turns": ["x" * (room - 10), "y" * 10]}, {"turns": ["x" * (room - 10), "y" * 11]}]
    assert accepted(folder, model, *turns) == [True, False]
    prefixes = [
        {"messages": [{"role": "user", "content": "x" * (room - 10)}, {"role": "assistant", "content": "y" * more}]}
        for more in (10, 11)
    ]
    assert accepted(folder, model, *prefixes, keep_last=True) == [True, False]
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 200}}
    assert accepted(folder, model, {"prompt": "x", "tools": [tool]}, {"prompt": "x" * 30, "tools": [tool]}) == [
        True,
        False,
    ]


def test_a_long_prompt_is_rejected_with_its_place_and_does_not_count_as_a_first_one(folder: Path, model: Path) -> None:
    source = folder / "prompts.jsonl"
    long = json.dumps({"id": "a", "messages": [{"role": "user", "content": "x" * 600}]})
    source.write_text(f"{long}\n{long}\n" + json.dumps({"id": "a", "prompt": "hi"}) + "\n")
    first, second, last = read_prompts([str(source)], ReadOptions(), too_long=TokenBudget(model, 0, True).excess)
    why = "at least 613 tokens: no room for a reply, the context is 300"
    assert first == Rejection(str(source), 1, "messages[0].content", why)
    assert second == Rejection(str(source), 2, "messages[0].content", why)
    assert isinstance(last, bytes)


def test_a_very_long_text_is_counted_in_slices_and_no_further_than_needed(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tokens, "_SLICE", 64)
    room = CONTEXT - 1 - len(ASKED)
    assert accepted(folder, model, {"prompt": "x" * room}, {"prompt": "y" * (room + 1)}) == [True, False]
    endless = Prompt(id="a", messages=[{"role": "user", "content": "x" * 100_000}])
    assert TokenBudget(model, 0, True).excess(endless, 100_000).startswith("at least 320 tokens")


def test_what_surely_fits_is_not_tokenized(folder: Path, model: Path) -> None:
    (model / "tokenizer.json").write_text("no tokenizer")
    assert accepted(folder, model, {"prompt": "x" * 100}, {"prompt": "ß" * 50}) == [True, True]
    with pytest.raises(SettingsError, match="not a model folder with a tokenizer"):
        accepted(folder, model, {"prompt": "x" * 600})


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, 4096),
        ({"text_config": {"max_position_embeddings": 262144}, "max_position_embeddings": 1}, 262144),
    ],
)
def test_the_context_is_read_as_sglang_reads_it(folder: Path, config: dict[str, Any], tokens: int) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert context_length(folder) == tokens


def test_settings_go_before_the_models_own_context(model: Path) -> None:
    def context(**sections: Any) -> int:
        sections["model"] = {"path": str(model), **sections.get("model", {})}
        return loader.token_budget(settings_from(sections, "test")).context

    assert context() == CONTEXT
    assert context(model={"context_length": 500}) == 500
    assert context(model={"context_length": 500}, servers={"flags": {"context_length": 600}}) == 600


def test_enqueue_counts_them_or_says_that_it_did_not_look(make_daemon: Callable[..., Daemon], model: Path) -> None:
    daemon = make_daemon(servers=1, config={"model": {"path": str(model)}})
    (daemon.folder / "prompts.jsonl").write_text('{"prompt": "hi"}\n' + json.dumps({"prompt": "x" * 600}) + "\n")
    done = json.loads(daemon.cli("enqueue", "prompts.jsonl", "--json").stdout)
    assert (done["read"], done["prompts"], done["rejected"]) == (2, 1, 1)
    [rejected] = Path(done["rejects_file"]).read_text().splitlines()
    assert json.loads(rejected)["reason"] == "at least 613 tokens: no room for a reply, the context is 300"
    (model / "tokenizer.json").unlink()
    said = daemon.cli("enqueue", "prompts.jsonl").stdout
    assert "2 prompts" in said and f"left to the server to refuse: {model} has no tokenizer.json" in said
