"""A model's files on this box: where they are, whether they are whole, and what the chat template makes of a prompt.

Read with the standard library and Jinja alone: neither torch nor transformers is needed.
"""

import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from gend.errors import SettingsError


class Weights(msgspec.Struct, frozen=True):
    """What the weight files hold; `faults` says of each that is not whole what is wrong with it."""

    tensors: int
    bytes: int
    faults: list[str]


def find_model(name: str, environment: Mapping[str, str]) -> Path | None:
    """The folder of a model: `name` itself, or its snapshot in Hugging Face's cache. None: it is not on this box."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    home = Path(environment.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    with contextlib.suppress(OSError):
        snapshot = cache / "snapshots" / (cache / "refs" / "main").read_text().strip()
        if snapshot.is_dir():
            return snapshot
    return None


def check_description(home: Path) -> None:
    """config.json and a tokenizer are there. Raises SettingsError where one is missing or cannot be read."""
    _json_file(home / "config.json")
    if not any((home / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise SettingsError(f"{home} has no tokenizer; fetch the model again")


def read_weights(home: Path) -> Weights:
    """Look at every weight file: there, as long as its header says, with the tensors that the index expects in it.

    Reads headers only, some 100 kB a file. Raises SettingsError where there are no weights at all.
    """
    tensors = size = 0
    faults = []
    for path, wanted in sorted(_shards(home).items()):
        try:
            names, length = _read_header(path)
            if missing := wanted - names:
                faults.append(f"{path.name} lacks {len(missing)} tensors that the index says are in it")
        except _Torn as error:
            faults.append(f"{path.name} {error}")
            continue
        tensors, size = tensors + len(names), size + length
    return Weights(tensors, size, faults)


class _Torn(Exception):
    """What is wrong with a weight file, to be said after its name."""


def _shards(home: Path) -> dict[Path, set[str]]:
    """Each weight file with the tensors that the index expects in it (none known without an index)."""
    index = home / "model.safetensors.index.json"
    if index.is_file():
        shards: dict[Path, set[str]] = {}
        for tensor, name in _json_file(index).get("weight_map", {}).items():
            shards.setdefault(home / name, set()).add(tensor)
    else:
        shards = {path: set() for path in home.glob("*.safetensors")}
    if not shards:
        raise SettingsError(f"{home} has no weights (*.safetensors); fetch the model again")
    return shards


def _read_header(path: Path) -> tuple[set[str], int]:
    """The names of the tensors in a safetensors file, and its size in bytes. Raises _Torn.

    The file is the length of its header (8 bytes, little-endian), the header as JSON, then the tensors, whose
    `data_offsets` count from the end of the header.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise _Torn(f"is {size:,} bytes, but its header alone is {length:,}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        whole = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except FileNotFoundError as error:
        raise _Torn("is missing") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Torn(f"cannot be read: {error}") from error
    if size != whole:
        raise _Torn(f"is {size:,} bytes, but its header says {whole:,}")
    return set(header), size


def _json_file(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError as error:
        raise SettingsError(f"{path} is missing; fetch the model again, or change model.path") from error
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}; fetch the model again") from error


def read_template(home: Path) -> str | None:
    """The chat template of a model: chat_template.jinja, or the one in tokenizer_config.json. None: it has none."""
    if (home / "chat_template.jinja").is_file():
        return (home / "chat_template.jinja").read_text(encoding="utf-8")
    if not (home / "tokenizer_config.json").is_file():
        return None
    found = _json_file(home / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None


def context_length(home: Path) -> int:
    """Tokens that prompt and reply may have together, as SGLang reads them from config.json. Raises SettingsError."""
    config = _json_file(home / "config.json")
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}  # transformers 5 has renamed it
    try:
        if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
            return int(text["max_position_embeddings"])
        return int(text["max_position_embeddings"] * scaling.get("factor", 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(f"{home}/config.json does not say how long a context may be: {error}") from error


def compiled(template: str) -> jinja2.Template:
    """A chat template as transformers compiles it: sandboxed, since it is a program from strangers.

    Raises jinja2.TemplateSyntaxError.
    """

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Sequence[str] | None = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    """Without Jinja's own escapes for HTML; templates give these by position too."""
    comma_colon = (separators[0], separators[1]) if separators else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=comma_colon, sort_keys=sort_keys)


def render_prompt(template: str, text: str, **variables: Any) -> str:
    """What transformers' apply_chat_template makes of one user message, up to where the reply begins.

    Raises SettingsError where it fails on a plain prompt.
    """
    try:
        return compiled(template).render(
            messages=[{"role": "user", "content": text}], add_generation_prompt=True, bos_token="", eos_token="",
            **variables,
        )  # fmt: skip
    except (jinja2.TemplateError, TypeError) as error:
        raise SettingsError(f"the chat template fails on a plain prompt: {type(error).__name__}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for trainers: it renders to what is in it."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own name and type

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
