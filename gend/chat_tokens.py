"""A model folder's tokenizer and chat template: conversations to token ids, as a server would see them.

Only for rows without the server's own ids. Needs the `tokenizers` package; the template is rendered as Hugging Face's
transformers do it (sandboxed Jinja, trim_blocks, lstrip_blocks, loopcontrols, `tojson` without escapes for HTML).
"""

import importlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from gend.errors import SettingsError
from gend.records import Message


class Unstable(Exception):
    """The template does not render the reply right after the prompt, so that no loss mask can be told. The message is
    one of a few: it is counted."""


class ChatTokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path):
        """Raises SettingsError where the folder or the package lacks something."""
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise SettingsError("--tokenizer needs the tokenizers package: pip install tokenizers") from error
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            file = folder / "chat_template.jinja"
            source = file.read_text(encoding="utf-8") if file.exists() else config["chat_template"]
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            environment.filters["tojson"] = _to_json
            environment.globals.update(raise_exception=_raise, strftime_now=datetime.now().strftime)
            self._template = environment.from_string(source)
        except KeyError as error:
            raise SettingsError(f"--tokenizer {folder}: it has no chat template") from error
        except Exception as error:  # tokenizers raises bare Exceptions
            raise SettingsError(f"--tokenizer {folder}: not a model folder with a tokenizer: {error}") from error
        self._special = {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}

    def ids(
        self, asked: list[Message], reply: Message, tools: list[dict[str, Any]] | None, thinking: bool | None
    ) -> tuple[list[int], list[int]]:
        """Token ids of the prompt as the server gets it, and of the reply with the end of its turn.

        Each is encoded by itself, as in generation: a reply's first token never merges with the prompt's last.
        Raises Unstable.
        """
        options: dict[str, Any] = {"tools": tools, **self._special}
        if thinking is not None:
            options["enable_thinking"] = thinking
        asked, reply = [_with_arguments(message) for message in asked], _with_arguments(reply)
        try:
            prompt = self._template.render(messages=asked, add_generation_prompt=True, **options)
            whole = self._template.render(messages=[*asked, reply], add_generation_prompt=False, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise Unstable("the chat template refuses it") from error
        if not whole.startswith(prompt):
            raise Unstable("the chat template does not render the reply right after the prompt")
        made = whole[len(prompt) :]
        if made.endswith(self._special["eos_token"] + "\n"):
            made = made[:-1]  # the model stops at the end of its turn; the newline is the template's
        return self._encode(prompt), self._encode(made)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _with_arguments(message: Message) -> Message:
    """Tool-call arguments as objects: over HTTP they are text, and templates iterate over them."""
    if not (calls := message.get("tool_calls")):
        return message
    return {**message, "tool_calls": [{**call, "function": _parsed(call["function"])} for call in calls]}


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    try:
        return {**function, "arguments": json.loads(arguments)} if isinstance(arguments, str) else function
    except ValueError as error:
        raise Unstable("a tool call's arguments are not JSON") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Sequence[str] | None = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    comma_colon = (separators[0], separators[1]) if separators else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=comma_colon, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
