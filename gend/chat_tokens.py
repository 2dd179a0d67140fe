"""A model folder's tokenizer and chat template: conversations to token ids, as a server would see them.

For rows without the server's own ids, and to tell at load which prompts are too long. Needs the `tokenizers` package;
the template is rendered as Hugging Face's transformers do it (model_files.py).
"""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import jinja2

from gend.errors import SettingsError
from gend.model_files import compiled, context_length, read_template, render_prompt
from gend.records import Message, Prompt

_SLICE = 1 << 18  # characters that are counted at once: a token takes the tokenizer some 100 bytes
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


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
            raise SettingsError("the tokenizers package is missing: pip install 'gend[tokenizer]'") from error
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            source = read_template(folder)
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            if source is None:
                raise SettingsError(f"{folder} has no chat template; give the folder of a chat model")
            self._template = compiled(source)
        except SettingsError:
            raise
        except Exception as error:  # tokenizers raises bare Exceptions
            raise SettingsError(f"{folder} is not a model folder with a tokenizer: {error}") from error
        self._special = {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}

    def ids(
        self, asked: list[Message], reply: Message, tools: list[dict[str, Any]] | None, thinking: bool | None
    ) -> tuple[list[int], list[int]]:
        """Token ids of the prompt as the server gets it, and of the reply with the end of its turn.

        Each is encoded by itself, as in generation: a reply's first token never merges with the prompt's last.
        Raises Unstable.
        """
        prompt = self._rendered(asked, tools, thinking, True)
        whole = self._rendered([*asked, reply], tools, thinking, False)
        if not whole.startswith(prompt):
            raise Unstable("the chat template does not render the reply right after the prompt")
        made = whole[len(prompt) :]
        if made.endswith(self._special["eos_token"] + "\n"):
            made = made[:-1]  # the model stops at the end of its turn; the newline is the template's
        return self._encode(prompt), self._encode(made)

    def count(self, prompt: Prompt, thinking: bool | None, enough: int) -> int:
        """Tokens of a prompt with its follow-ups and its prefix, without any reply; beyond `enough` it is not counted
        on. A very long text is counted in slices, and each cut may be one token too many. Raises Unstable."""
        asked = [self._rendered(prompt.messages, prompt.tools, thinking, True), prompt.prefix or ""]
        tokens = 0
        for text in (*asked, *(turn["content"] for turn in prompt.follow_ups)):
            for start in range(0, len(text), _SLICE):
                # "fast" leaves out where each token stands in the text, a third of the time.
                [found] = self._tokenizer.encode_batch_fast([text[start : start + _SLICE]], add_special_tokens=False)
                tokens += len(found)
                if tokens > enough:
                    return tokens
        return tokens

    def _rendered(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, thinking: bool | None, generate: bool
    ) -> str:
        options: dict[str, Any] = {"tools": tools, **self._special}
        if thinking is not None:
            options["enable_thinking"] = thinking
        shown = [_with_arguments(message) for message in messages]
        try:
            return self._template.render(messages=shown, add_generation_prompt=generate, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise Unstable("the chat template refuses it") from error

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class TokenBudget:
    """Which prompts leave no room for a reply in a model's context.

    Almost none has to be tokenized: a token is at least one byte, so that a line of JSON shorter than the context less
    the template's own words fits for certain. Where tools are shown, templates write their JSON with blanks, at most
    twice as long. The tokenizer, some 100 MB, is loaded for the first prompt that may be too long, and needs some 0.2 s
    for each MB of such prompts (measured with SmolLM2's).
    """

    def __init__(self, folder: Path, context: int, thinking: bool | None):
        """`context` in tokens; 0: as config.json says. Raises SettingsError where lengths cannot be told."""
        if importlib.util.find_spec("tokenizers") is None:
            raise SettingsError("the tokenizers package is missing: pip install 'gend[tokenizer]'")
        if not (folder / "tokenizer.json").is_file():
            raise SettingsError(f"{folder} has no tokenizer.json")
        template = read_template(folder)
        if template is None:
            raise SettingsError(f"{folder} has no chat template")
        self._folder, self._thinking = folder, thinking
        self.context = context or context_length(folder)
        self._words = len(render_prompt(template, "?", tools=[_TOOL]).encode())
        self._tokenizer: ChatTokenizer | None = None

    def excess(self, prompt: Prompt, line_bytes: int) -> str:
        """Why a prompt, `line_bytes` long as JSON, leaves no room for a reply; empty where it does.

        Raises SettingsError where the tokenizer cannot be read.
        """
        if line_bytes * (2 if prompt.tools else 1) + self._words < self.context:
            return ""
        self._tokenizer = self._tokenizer or ChatTokenizer(self._folder)
        try:
            tokens = self._tokenizer.count(prompt, self._thinking, self.context)
        except Unstable:  # the server renders it in the same way, and says what is wrong with it
            return ""
        if tokens < self.context:
            return ""
        return f"at least {tokens:,} tokens: no room for a reply, the context is {self.context:,}"


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


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
