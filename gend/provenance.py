"""What rows were made with, so that each can be traced to its engine, also when a later box ran another version.

    FOLDER/engines/ID.json            on this box, before the first row that names it
    runs/RUN/engines/ID.json          in the store, before the first part that names it

ID is a digest of what is in it, so the same engine on another server, box or day is the same file. Rows name it.
"""

import hashlib
import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

import gend
from gend.config import Flag, Settings
from gend.errors import DiskUnavailable, SettingsError
from gend.model_files import find_model, read_template
from gend.records import Run
from gend.server_command import Seat, flags
from gend.store import Store

_OF_ONE_SERVER = {"host", "port", "nccl-port", "dist-init-addr"}

# What the server made of its flags and defaults, where it can change what is generated.
_EFFECTIVE = (
    "model_path", "revision", "weight_version", "dtype", "quantization", "kv_cache_dtype", "context_length",
    "tp_size", "dp_size", "pp_size", "ep_size", "device", "attention_backend", "sampling_backend", "mamba_backend",
    "linear_attn_backend", "mamba_ssm_dtype", "reasoning_parser", "tool_call_parser", "chat_template",
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_draft_model_path", "enable_deterministic_inference",
)  # fmt: skip


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What a server was. Empty: it does not say, or its files are not on this box.

    `flags` are those that it was started with; `effective` what it said of them and of what else matters.
    `template` is the SHA-256 of its chat template, 16 digits. `revision` is the commit on Hugging Face.
    """

    command: list[str]
    version: str
    model: str
    revision: str
    template: str
    flags: dict[str, Flag]
    effective: dict[str, Any]
    gend_version: str

    @property
    def id(self) -> str:
        """Twelve hex digits."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]


def describe(settings: Settings, number: int, info: dict[str, Any]) -> Engine:
    """The engine behind server `number`, given its `/server_info` (empty: it has none)."""
    asked = flags(settings, Seat(number=number, gpus=(), port=0))
    shared = {name: value for name, value in asked.items() if name not in _OF_ONE_SERVER}
    names = [*_EFFECTIVE, *(name.replace("-", "_") for name in shared)]
    effective = {name: info[name] for name in names if info.get(name) is not None}
    folder = find_model(settings.model.path, {**os.environ, **settings.servers.environment})
    snapshot = folder.name if folder and folder.parent.name == "snapshots" else ""
    return Engine(
        command=settings.servers.command,
        version=str(info.get("version") or ""),
        model=settings.model.path,
        revision=str(info.get("revision") or snapshot),
        template=_template(folder, effective.get("chat_template")),
        flags=shared,
        effective=effective,
        gend_version=gend.__version__,
    )


def _template(folder: Path | None, given: Any) -> str:
    """The digest of the chat template: of the file that the server was given, else the model's own."""
    try:
        source = Path(str(given)).read_text(encoding="utf-8") if given else read_template(folder) if folder else None
    except (OSError, ValueError, SettingsError):  # a template by name, or a folder that only the server can read
        source = None
    return hashlib.sha256(source.encode()).hexdigest()[:16] if source is not None else ""


def keep(folder: Path, engine: Engine) -> None:
    """Write it down on this box. Raises DiskUnavailable."""
    path = folder / "engines" / f"{engine.id}.json"
    temporary = path.with_name(f".new-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(engine))
        os.replace(temporary, path)
    except OSError as error:
        raise DiskUnavailable(f"{path}: {error.strerror}; make room, then it goes on") from error


_NAMED = re.compile(rb'"engine":"([0-9a-f]{12})"')


def named(part: bytes) -> set[str]:
    """The engines that the rows of a part name; perhaps also what looks like it in a tool's arguments."""
    return {found.decode() for found in _NAMED.findall(part)}


def publish(folder: Path, store: Store, run: str, engines: Iterable[str]) -> None:
    """Copy what is known here of these engines to the store. Raises StoreUnavailable."""
    for name in engines:
        path = folder / "engines" / f"{name}.json"
        if path.is_file():  # else the disk was emptied under the rows of another worker: verify says so
            store.put(f"runs/{run}/engines/{name}.json", path.read_bytes())


def stored_engines(store: Store, run: Run) -> dict[str, Engine]:
    """The engines of a run by id; what cannot be read is left out, and rows that name it are told by verify."""
    found = {}
    for key, _ in store.list(f"runs/{run.id}/engines/"):
        try:
            engine = msgspec.json.decode(store.get(key) or b"", type=Engine)
        except msgspec.DecodeError:
            continue
        found[key.rpartition("/")[2].removesuffix(".json")] = engine
    return found
