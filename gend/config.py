"""The settings: read once from config.toml, frozen, every key known.

`config.toml` at the top of the project holds every key with its default and a comment; a test compares the two.
"""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gend.errors import SettingsError, unknown_key
from gend.records import NotNegative, Sampling, Verdicts
from gend.verdict import AlarmLimits

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Flag = str | int | float | bool | list[str]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of config.toml: an unknown key is an error."""


class Model(_Section, frozen=True):
    path: str = "Qwen/Qwen3.6-27B"
    context_length: NotNegative = 0


class Servers(_Section, frozen=True):
    gpus: str | list[int] = "all"
    gpus_per_server: Positive = 1
    count: NotNegative = 0
    command: Annotated[list[str], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["python", "-m", "sglang.launch_server"]
    )
    flags: dict[str, Flag] = {}
    environment: dict[str, str] = {}
    base_port: Annotated[int, msgspec.Meta(ge=1024, le=65000)] = 30000
    warm_first: bool = True
    load_seconds: Seconds = 1800.0
    stall_seconds: Seconds = 30.0
    stop_seconds: Seconds = 30.0


class Redis(_Section, frozen=True):
    url: str = ""
    patience_seconds: Seconds = 20.0


class Store(_Section, frozen=True):
    url: str = ""
    endpoint: str = ""
    region: str = ""
    patience_seconds: Seconds = 20.0


class Work(_Section, frozen=True):
    folder: str = ""
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 128
    in_flight: NotNegative = 0
    open_batches: NotNegative = 0
    lease_seconds: Annotated[float, msgspec.Meta(ge=1)] = 15.0
    request_seconds: Seconds = 7200.0
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    token_ids: bool = False


class Cost(_Section, frozen=True):
    dollars_per_hour: Annotated[float, msgspec.Meta(ge=0)] = 44.0


class Page(_Section, frozen=True):
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8790


class Notices(_Section, frozen=True):
    webhook: str = ""
    command: list[str] = []


class Settings(_Section, frozen=True):
    model: Model = Model()
    servers: Servers = Servers()
    redis: Redis = Redis()
    store: Store = Store()
    work: Work = Work()
    sampling: Sampling = Sampling()
    verdicts: Verdicts = Verdicts()
    alarm: AlarmLimits = AlarmLimits()
    cost: Cost = Cost()
    page: Page = Page()
    notices: Notices = Notices()

    @property
    def folder(self) -> Path:
        """Where this box keeps its scratch: spool, prompt sets, Valkey's files, logs. Losing it costs time, no rows."""
        if self.work.folder:
            return Path(self.work.folder).expanduser()
        if state := os.environ.get("STATE_DIRECTORY"):  # set by systemd for StateDirectory=
            return Path(state.split(":")[0])
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "gend"


def find_config(given: str | None) -> Path:
    """The config file to read: --config, $GEND_CONFIG, ./config.toml, /etc/gend/config.toml, the first that is set.

    Raises SettingsError where none exists.
    """
    named = given or os.environ.get("GEND_CONFIG")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise SettingsError(f"config file {path} does not exist; give another with --config or $GEND_CONFIG")
        return path
    for path in (Path("config.toml"), Path("/etc/gend/config.toml")):
        if path.is_file():
            return path
    raise SettingsError("no config.toml here and no /etc/gend/config.toml; give one with --config FILE")


def load_settings(path: Path) -> Settings:
    """Read and check a config file. Raises SettingsError with file, key and reason in one line."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from error
    return settings_from(raw, str(path))


def settings_from(raw: dict[str, Any], where: str) -> Settings:
    """Check parsed TOML against the known keys and types. Raises SettingsError that begins with `where`."""
    _reject_unknown(raw, where)
    try:
        settings = msgspec.convert(raw, Settings)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$.")
        raise SettingsError(f"{where}: {key.rstrip('`') or 'top level'}: {reason}") from error
    gpus = settings.servers.gpus
    if isinstance(gpus, str) and gpus != "all":
        raise SettingsError(f'{where}: servers.gpus: "all" or a list of numbers, got "{gpus}"')
    if settings.store.url and not settings.store.url.startswith(("s3://", "file:///")):
        raise SettingsError(f"{where}: store.url: s3://bucket/prefix or file:///folder, got {settings.store.url!r}")
    if settings.store.endpoint and not settings.store.endpoint.startswith(("http://", "https://")):
        raise SettingsError(f"{where}: store.endpoint: https://host:port, got {settings.store.endpoint!r}")
    if settings.notices.webhook and not settings.notices.webhook.startswith(("http://", "https://")):
        raise SettingsError(f"{where}: notices.webhook: it must begin with https:// or http://")  # not said: its secret
    return settings


def changed(
    settings: Settings, changes: Sequence[str], sections: Sequence[str] = ("sampling", "verdicts", "alarm")
) -> Settings:
    """`settings` with KEY=VALUE changes from the command line, VALUE as in TOML or none.

    A plain KEY is one of [sampling], SECTION.KEY is one of `sections`. Raises SettingsError for an unknown key or a bad
    value.
    """
    known = [
        field.name if section == "sampling" else f"{section}.{field.name}"
        for section in sections
        for field in msgspec.structs.fields(getattr(settings, section))
    ]
    for change in changes:
        name, equals, text = change.partition("=")
        name = name.strip().removeprefix("sampling.")
        if not equals or name not in known:
            raise SettingsError(f"--set {change}: {unknown_key(name, known) if equals else 'give KEY=VALUE'}")
        section, _, key = name.rpartition(".")
        table = msgspec.structs.asdict(getattr(settings, section or "sampling"))
        try:
            table[key] = None if text in ("none", "null") else tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError as error:
            if not isinstance(table[key], str):
                raise SettingsError(
                    f"--set {change}: {text!r} is not a number, true, false, none or {{KEY=VALUE, ...}}"
                ) from error
            table[key] = text
        try:
            made = msgspec.convert(table, type(getattr(settings, section or "sampling")))
        except msgspec.ValidationError as error:
            raise SettingsError(f"--set {change}: {str(error).partition(' - at `$')[0]}") from error
        settings = msgspec.structs.replace(settings, **{section or "sampling": made})
    return settings


def _reject_unknown(raw: dict[str, Any], where: str) -> None:
    # msgspec also refuses unknown keys, but cannot say which known one was meant.
    sections: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for name, table in raw.items():
        if name not in sections:
            raise SettingsError(f"{where}: {unknown_key(name, list(sections))}")
        if isinstance(table, dict):
            known = [field.name for field in msgspec.structs.fields(sections[name])]
            for key in table:
                if key not in known:
                    raise SettingsError(f"{where}: {name}.{unknown_key(key, known)}")
