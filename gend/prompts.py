"""Prompts: what one line of a prompt file means, and whether it can be asked. Opening the files: prompt_files.py.

Every line becomes one accepted prompt or one rejection with file, line, field and reason; nothing is dropped in
between, so lines read = accepted + rejected. A line is an object; what is asked is in the first of these fields
that is there and not null (`--prompt-field` names another one, `a.b` for a nested one; `--template` renders it):

    messages, conversations, conversation, turns, prompt, instruction (+ input), question, query, problem

and the field's value says the shape:

    text                     one user message; `instruction` and `input` with a blank line between them; JSON text of a
                             list in the four fields that hold lists
    list of objects          messages, by role and content or by from and value
    list of texts            user turns: the first is asked, the others follow, each after the reply before it
    list of lists            the same, each turn a list of messages (BFCL's `question`)

Beside it: `system` or `system_prompt` is put in front as a system message; `tools` (OpenAI's form, also as JSON text)
or `functions`, `function` (BFCL's form, converted to OpenAI's); an id. All other keys are ignored. Where a template
makes the user message, only tools and id are read beside it.

The rows at the edge. "Template" is what Qwen3.5's and 3.6's own chat template does; see facts and tests.

    blank line                       skipped, not counted as read
    last line without newline, CRLF  accepted; a byte order mark at the start of the file is dropped
    torn last line, not JSON         rejected
    U+2028, U+2029, U+0085           accepted: text like any other
    NUL, lone surrogate              rejected: neither server nor tokenizer can be trusted with them
    a line of 2 MB                   accepted; over 64 MiB rejected without being held
    no room for a reply              rejected where the model's tokenizer is on this box; else the server refuses it
    nesting                          rejected where deeper than orjson writes (254) or reads (1024)
    id: a number                     made text; blank, over 512 characters, a list, control characters: rejected
    id: none                         p0000042: the number of the line over all files, from 0
    duplicate id                     rejected, naming the first; with duplicates="keep" it becomes ID#2, ID#3, ...
    duplicate prompt                 the same messages, tools and turns: rejected, naming the first; or kept
    no messages, system only         rejected: the template raises without a user message
    only tool responses as user      rejected: the template takes <tool_response> for no question either
    system blank                     dropped: it says nothing
    two system messages at the start joined by a blank line: the template takes one, and joining loses nothing
    system later on                  rejected: the template raises, and moving it would change what it means
    role developer                   becomes system, which is what it means; the templates do not know it
    unknown role                     rejected
    user content empty, null         rejected
    content as parts                 text parts joined as the template does it, without a blank; others rejected
    assistant last                   cut off to be made again, however many; keep_last: it becomes the prefix
    assistant without text           fine with tool calls (content ""), else rejected: history is training data too
    tool content null                rejected; empty text is a tool's good right
    tool-call arguments              text that holds a JSON object: as it is; an object: made text; null, "": {};
                                     broken JSON, a list, anything else: rejected, the template needs an object
    <|im_end|> and the like          rejected anywhere in the conversation or tools: the server would read a control
                                     token where the author wrote text, and the conversation would fall apart
    <think>, </think>, <image>       accepted: ordinary words of a conversation about such things
    very large numbers               accepted; above 2**53 rejected as an id, where every digit counts

Duplicates are found by 64-bit hashes (SipHash), held in about 21 bytes a line for id and prompt together. With n lines
some two of them share a hash with probability n*n / 2**65: 1 in 44 million for 914,000 lines, 1 in 370,000 for ten
million. That is why eight bytes and not sixteen; and even then no line vanishes: it is rejected, with the line it was
taken for.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jinja2
import jinja2.sandbox
import msgspec
import orjson

from gend.errors import PromptError, SettingsError
from gend.hash_table import HashTable, hash64
from gend.prompt_files import LINE_BYTES, Data, OpenRemote, Unreadable, read_files
from gend.records import Message, Prompt

_LIST_FIELDS = ("messages", "conversations", "conversation", "turns")
_ASKED_FIELDS = (*_LIST_FIELDS, "prompt", "instruction", "question", "query", "problem")
_ID_FIELDS = ("id", "custom_id", "task_id", "question_id", "prompt_id", "uuid", "conversation_id")
_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# BFCL's own table (bfcl_eval/constants/type_mappings.py, GORILLA_TO_OPENAPI), without the names that stay.
_BFCL_TYPES = {
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "HashMap": "object",
    "Hashtable": "object",
    "list": "array",
    "tuple": "array",
    "Array": "array",
    "ArrayList": "array",
    "Queue": "array",
    "Stack": "array",
    "any": "string",
    "Any": "string",
    "char": "string",
    "String": "string",
    "byte": "integer",
    "short": "integer",
    "long": "integer",
    "Bigint": "integer",
}
_ID_CHARACTERS = 512
_UNSAFE_IN_ID = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Qwen's added tokens of this form (tokenizer_config.json); its others (<think>, <tool_call>) are harmless as text.
_UNSAFE_IN_TEXT = re.compile(
    r"\x00|<\|(?:im_start|im_end|endoftext|(?:object_ref|box|quad|vision|audio)_(?:start|end)|(?:vision|image|video|audio)"
    r"_pad|fim_(?:prefix|middle|suffix|pad)|repo_name|file_sep)\|>"
)


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How lines are to be understood. `template` is the Jinja source that renders the user message from the fields."""

    prompt_field: str | None = None
    template: str | None = None
    keep_last: bool = False
    duplicates: Literal["reject", "keep"] = "reject"
    limit: int | None = None
    strict: bool = False


class Rejection(msgspec.Struct, frozen=True):
    """One line that cannot be asked. `line` counts from 1; `field` is empty where the line as a whole is wrong."""

    file: str
    line: int
    field: str
    reason: str


class _Wrong(Exception):
    def __init__(self, field: str, reason: str):
        super().__init__(field, reason)
        self.field, self.reason = field, reason


TooLong = Callable[[Prompt, int], str]
"""Given a prompt and its length as JSON in bytes: why the model's context has no room for a reply, or empty."""


def read_prompts(
    sources: list[str],
    options: ReadOptions,
    open_remote: OpenRemote | None = None,
    too_long: TooLong = lambda prompt, line_bytes: "",
) -> Iterator[bytes | Rejection]:
    """For each line that is not blank, in order: the prompt as one line of JSON (records.Prompt), or its rejection.

    Ends after `options.limit` accepted prompts. Raises SettingsError where a source or the template is wrong, or a
    file is damaged; with `options.strict` PromptError instead of the first rejection.
    """
    template = _template(options)
    accepted = _Accepted(options.duplicates == "keep", too_long)
    number = 0
    for file, lines in read_files(sources, open_remote):
        accepted.next_file(file)
        for line, data in lines:
            if accepted.count == options.limit:
                return
            result: bytes | Rejection
            try:
                result = accepted.add(_prompt(_fields(data), options, template, number), line)
            except _Wrong as wrong:
                if options.strict:
                    raise PromptError(file, line, wrong.field, wrong.reason) from None
                result = Rejection(file, line, wrong.field, wrong.reason)
            number += 1
            yield result


def _template(options: ReadOptions) -> jinja2.Template | None:
    if options.template is None:
        return None
    if options.prompt_field is not None:
        raise SettingsError("--template and --prompt-field: give one of them; a template can name any field")
    # Sandboxed, because templates come with data sets. Strict, because a missing field must not become no text.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    # Jinja's own tojson is for HTML and would write < as \\u003c.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        return environment.from_string(options.template)
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(f"--template, line {error.lineno}: {error.message}") from error


def _rendered(template: jinja2.Template, fields: dict[str, Any]) -> str:
    try:
        return template.render(fields)
    except jinja2.exceptions.SecurityError as error:
        raise SettingsError(
            f"--template: {error} A template may use the fields of a line, nothing behind them"
        ) from error
    except Exception as error:  # whatever the template's arithmetic or filters raise on this line's values
        raise _Wrong("template", f"{type(error).__name__}: {error}") from error


def _fields(data: Data) -> dict[str, Any]:
    if isinstance(data, Unreadable):
        raise _Wrong("", data.reason)
    if isinstance(data, dict):
        return data
    if not isinstance(fields := _parsed(data, ""), dict):
        raise _Wrong("", f"must be a JSON object, is {_kind(fields)}")
    return fields


def _prompt(fields: dict[str, Any], options: ReadOptions, template: jinja2.Template | None, number: int) -> Prompt:
    follow_ups: list[Message] = []
    prefix = None
    if template is not None:
        messages = [_user(_rendered(template, fields), "template")]
    else:
        field, asked = _asked(fields, options.prompt_field)
        system = _system(fields)
        if isinstance(asked, str):
            messages = [*system, _user(asked, field)]
        elif not isinstance(asked, list):
            raise _Wrong(field, f"must be text or a list, is {_kind(asked)}")
        elif not asked:
            raise _Wrong(field, "no messages")
        elif isinstance(asked[0], list):
            messages, prefix = _messages(system, asked[0], f"{field}[0]", options.keep_last and len(asked) == 1)
            follow_ups = [_follow_up(turn, f"{field}[{index}]") for index, turn in enumerate(asked) if index]
        elif isinstance(asked[0], str):
            first, *follow_ups = [_user(text, f"{field}[{index}]") for index, text in enumerate(asked)]
            messages = [*system, first]
        else:
            messages, prefix = _messages(system, asked, field, options.keep_last)
    return Prompt(id=_id(fields, number), messages=messages, tools=_tools(fields), follow_ups=follow_ups, prefix=prefix)


def _asked(fields: dict[str, Any], prompt_field: str | None) -> tuple[str, Any]:
    """The field that says what to ask, and its value."""
    if prompt_field is not None:
        value: Any = fields
        for key in [prompt_field] if prompt_field in fields else prompt_field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            raise _Wrong(prompt_field, "null or missing")
        return prompt_field, value
    for field in _ASKED_FIELDS:
        value = fields.get(field)
        if value is not None:
            break
    else:
        there = ", ".join(list(fields)[:10]) or "none"
        raise _Wrong("", f"no field says what to ask; fields are: {there}. Name one with --prompt-field or --template")
    if field in _LIST_FIELDS and isinstance(value, str):  # tables often hold lists as JSON text
        return field, _parsed(value, field)
    if field == "instruction" and isinstance(value, str) and (given := fields.get("input")) is not None:
        if not isinstance(given, str):
            raise _Wrong("input", f"must be text, is {_kind(given)}")
        if given.strip():
            value = f"{value}\n\n{given}"
    return field, value


def _system(fields: dict[str, Any]) -> list[Message]:
    for field in ("system", "system_prompt"):
        text = fields.get(field)
        if text is not None and not isinstance(text, str):
            raise _Wrong(field, f"must be text, is {_kind(text)}")
        if text and text.strip():
            return [{"role": "system", "content": text}]
    return []


def _messages(system: list[Message], given: list[Any], field: str, keep_last: bool) -> tuple[list[Message], str | None]:
    """The messages to send, ending with a user or tool message, and the prefix of the reply."""
    count = len(given)
    prefix = None
    if keep_last and count and _role(given[-1], f"{field}[{count - 1}]") == "assistant":
        count -= 1
        prefix = _prefix(given[count], f"{field}[{count}]")
        if count and _role(given[count - 1], f"{field}[{count - 1}]") == "assistant":
            raise _Wrong(f"{field}[{count}]", "a second assistant turn in a row cannot be continued")
    while count and _role(given[count - 1], f"{field}[{count - 1}]") == "assistant":
        count -= 1
    systems = list(system)
    messages: list[Message] = []
    asks = False
    for index in range(count):
        message = _message(given[index], f"{field}[{index}]")
        if message["role"] == "system":
            if messages:
                raise _Wrong(f"{field}[{index}].role", "a system message after the first turn")
            if message["content"].strip():
                systems.append(message)
        else:
            messages.append(message)
            asks = asks or (message["role"] == "user" and not _is_tool_response(message["content"]))
    if not asks:
        raise _Wrong(field, "no user message")
    if systems:
        messages.insert(0, {"role": "system", "content": "\n\n".join(message["content"] for message in systems)})
    return messages, prefix


def _is_tool_response(content: str) -> bool:
    text = content.strip()
    return text.startswith("<tool_response>") and text.endswith("</tool_response>")


def _prefix(given: dict[str, Any], where: str) -> str | None:
    if given.get("tool_calls") or given.get("reasoning_content"):
        raise _Wrong(where, "only plain text can be continued, not tool calls or reasoning; leave out --keep-last")
    text = _content(given, where)
    return text if text and text.strip() else None


def _follow_up(turn: Any, where: str) -> Message:
    message = _message(turn[0], f"{where}[0]") if isinstance(turn, list) and len(turn) == 1 else {}
    if message.get("role") != "user":
        raise _Wrong(where, "a later turn must be exactly one user message")
    return message


def _message(given: Any, where: str) -> Message:
    """One message in OpenAI's form, with the keys that chat templates read and no others."""
    role = _role(given, where)
    content = _content(given, where)
    if role == "user":
        return _user(content, f"{where}.content")
    if role == "system":
        return {"role": role, "content": content or ""}
    message: Message = {"role": role, "content": content or ""}
    if role == "tool":
        if content is None:
            raise _Wrong(f"{where}.content", "null or missing")
        _copy_text(given, ("tool_call_id", "name"), message, where)
        return message
    _copy_text(given, ("reasoning_content",), message, where)
    if calls := given.get("tool_calls"):
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    elif not message["content"].strip():
        raise _Wrong(f"{where}.content", "an assistant turn with neither text nor tool calls")
    return message


def _user(text: Any, where: str) -> Message:
    if not isinstance(text, str):
        raise _Wrong(where, "null or missing" if text is None else f"must be text, is {_kind(text)}")
    if not text or text.isspace():
        raise _Wrong(where, "empty")
    return {"role": "user", "content": text}


def _role(given: Any, where: str) -> str:
    if not isinstance(given, dict):
        raise _Wrong(where, f"must be an object with role and content, is {_kind(given)}")
    role = given.get("role")
    if role is None:
        role = given.get("from")
    if isinstance(role, str) and role in _ROLES:
        return _ROLES[role]
    shown = repr(role[:40]) if isinstance(role, str) else _kind(role)
    raise _Wrong(f"{where}.role", f"unknown role {shown}; known are {', '.join(_ROLES)}")


def _content(given: dict[str, Any], where: str) -> str | None:
    content = given.get("content")
    if content is None:
        content = given.get("value")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Wrong(f"{where}.content", f"must be text, is {_kind(content)}")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise _Wrong(f"{where}.content[{index}]", f"must be a text part, is {str(kind)[:40]!r}")
        texts.append(text)
    return "".join(texts)


def _copy_text(given: dict[str, Any], keys: tuple[str, ...], message: Message, where: str) -> None:
    for key in keys:
        value = given.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise _Wrong(f"{where}.{key}", f"must be text, is {_kind(value)}")
            message[key] = value


def _tool_calls(given: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise _Wrong(where, f"must be a list, is {_kind(given)}")
    calls = []
    for index, call in enumerate(given):
        function = _function(call, f"{where}[{index}]")
        arguments = _arguments(function.get("arguments"), f"{where}[{index}].function.arguments")
        made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        _copy_text(call, ("id",), made, f"{where}[{index}]")
        calls.append(made)
    return calls


def _function(given: Any, where: str) -> dict[str, Any]:
    """The function in a tool definition or call: OpenAI wraps it, others leave it bare."""
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise _Wrong(where, f"must be an object, is {_kind(function or given)}")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _Wrong(f"{where}.function.name", "missing, empty or no text")
    return function


def _arguments(given: Any, where: str) -> str:
    """Tool-call arguments as JSON text of an object, which is what servers parse and templates iterate over."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return "{}"
    if isinstance(given, dict):
        return _dumps(given, where)
    if not isinstance(given, str):
        raise _Wrong(where, f"must be a JSON object, is {_kind(given)}")
    if not isinstance(value := _parsed(given, where), dict):
        raise _Wrong(where, f"must be a JSON object, is {_kind(value)}")
    return given


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tool definitions in OpenAI's form."""
    for field in ("tools", "functions", "function"):
        given = fields.get(field)
        if given is None or (field == "function" and isinstance(given, str)):  # code sets name their source so
            continue
        if isinstance(given, str):
            given = _parsed(given, field) if given.strip() else []
        if isinstance(given, dict):
            given = [given]
        if not isinstance(given, list):
            raise _Wrong(field, f"must be a list of tool definitions, is {_kind(given)}")
        if given:
            _dumps(given, field)
            return [_tool(tool, f"{field}[{index}]") for index, tool in enumerate(given)]
    return None


def _tool(given: Any, where: str) -> dict[str, Any]:
    function = _function(given, where)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise _Wrong(f"{where}.function.parameters", f"must be an object, is {_kind(parameters)}")
    if function is given:  # BFCL's form: the bare function, with its own names for types
        function = {key: given[key] for key in ("name", "description", "parameters") if given.get(key) is not None}
        if parameters is not None:
            function["parameters"] = _schema(parameters)
    elif given.get("type", "function") != "function":
        raise _Wrong(f"{where}.type", "must be 'function'")
    return {"type": "function", "function": function}


def _schema(given: Any) -> Any:
    """BFCL's schema as JSON schema. Only where a schema stands: `default` and `enum` hold data and stay as they are."""
    if not isinstance(given, dict):
        return given
    schema = dict(given)
    if isinstance(kind := given.get("type"), str):
        schema["type"] = _BFCL_TYPES.get(kind, kind)
    if isinstance(properties := given.get("properties"), dict):
        schema["properties"] = {name: _schema(value) for name, value in properties.items()}
    for key in ("items", "additionalProperties"):
        if key in given:
            schema[key] = _schema(given[key])
    return schema


def _id(fields: dict[str, Any], number: int) -> str:
    for field in _ID_FIELDS:
        value = fields.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise _Wrong(field, f"must be text or a number, is {_kind(value)}")
        if isinstance(value, float) and abs(value) >= 2**53:  # also what an integer over 64 bits was read as
            raise _Wrong(field, "too large a number to be told from its neighbours; write it as text")
        text = str(value)
        if not text.strip():
            raise _Wrong(field, "empty")
        if len(text) > _ID_CHARACTERS:
            raise _Wrong(field, f"longer than {_ID_CHARACTERS} characters")
        if _UNSAFE_IN_ID.search(text):
            raise _Wrong(field, "holds a control character")
        return text
    return f"p{number:07d}"


def _parsed(text: bytes | str, where: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _Wrong(where, f"not JSON: {error}") from error


def _dumps(value: Any, where: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise _Wrong(where, f"cannot be written as JSON: {error}") from error


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


_encode = msgspec.json.Encoder().encode


def _json_line(prompt: Prompt) -> bytes:
    try:
        line = _encode(prompt) + b"\n"
    except UnicodeEncodeError as error:
        raise _Wrong("", "holds a lone surrogate") from error
    if len(line) > LINE_BYTES:
        raise _Wrong("", f"longer than {LINE_BYTES >> 20} MiB")
    # A look at the whole line is cheap, a look at each text is not; and a search for one byte is fifty times faster.
    if (b"|" in line and b"<|" in line) or b"\\u0000" in line:
        for field, text in _texts(msgspec.structs.asdict(prompt), ""):
            if found := _UNSAFE_IN_TEXT.search(text):
                shown = "NUL" if found.group() == "\0" else found.group()
                raise _Wrong(field, f"holds {shown}: not text to a tokenizer; take it out or write it differently")
    return line


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """All texts in a value with their places, the keys of objects among them."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield where, key
            yield from _texts(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{where}[{index}]")


class _Accepted:
    """What was accepted so far, to tell duplicates.

    Where duplicates are rejected, both tables hold the place of the first: its line, counted over all files. Where
    they are kept, the table of ids holds how often each came, and prompts are not looked at.
    """

    def __init__(self, keep_duplicates: bool, too_long: TooLong):
        self.count = 0
        self._keep, self._too_long = keep_duplicates, too_long
        self._ids, self._prompts = HashTable(), HashTable()
        self._files: list[str] = []
        self._before: list[int] = []  # for each file, the place of the last line accepted before it
        self._last = 0

    def next_file(self, name: str) -> None:
        self._files.append(name)
        self._before.append(self._last)

    def add(self, prompt: Prompt, line: int) -> bytes:
        """The prompt as a line of JSON, under a new id if need be. Raises _Wrong if it is too long, or a duplicate."""
        text = _json_line(prompt)
        if why := self._too_long(prompt, len(text)):
            longest = max(_texts(msgspec.structs.asdict(prompt), ""), key=lambda found: len(found[1]))
            raise _Wrong(longest[0], why)
        id_hash = hash64(prompt.id)
        if self._keep:
            if (times := self._ids.get(id_hash)) is not None:
                prompt, id_hash = self._renamed(prompt, id_hash, times)
                text = _json_line(prompt)
            self._ids.add(id_hash, 1)
        else:
            # No `"` stands unescaped in an id, so this finds where it ends.
            prompt_hash = hash64(text[text.index(b',"messages":') :])
            for field, first in (("id", self._ids.get(id_hash)), ("", self._prompts.get(prompt_hash))):
                if first is not None:
                    raise _Wrong(field, f"the same {field or 'prompt'} as {self._place(first)}")
            self._last = self._before[-1] + line
            self._ids.add(id_hash, self._last)
            self._prompts.add(prompt_hash, self._last)
        self.count += 1
        return text

    def _renamed(self, prompt: Prompt, id_hash: int, times: int) -> tuple[Prompt, int]:
        while True:
            times += 1
            new_id = f"{prompt.id}#{times}"
            new_hash = hash64(new_id)
            if self._ids.get(new_hash) is None:
                self._ids.replace(id_hash, times)
                return msgspec.structs.replace(prompt, id=new_id), new_hash

    def _place(self, place: int) -> str:
        index = bisect_right(self._before, place - 1) - 1
        return f"{self._files[index]}:{place - self._before[index]}"
