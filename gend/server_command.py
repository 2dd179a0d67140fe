"""How a server is started: which GPUs, which ports, which arguments, which environment."""

import contextlib
import os
import sys
from collections.abc import Mapping

import msgspec

from gend.config import Flag, Settings
from gend.errors import SettingsError
from gend.sglang_flags import fitting, installed, is_sglang, known_flags

PORTS_PER_SERVER = 10
"""A fixed block for each server: its own port, then those that SGLang derives from it (nccl, dist-init)."""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Where one server sits: its number, its GPUs (none on a machine without), its block of ports."""

    number: int
    gpus: tuple[int, ...]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def seats(settings: Settings, visible_gpus: int) -> list[Seat]:
    """One seat for each server. Raises SettingsError when GPUs and settings do not fit together."""
    servers = settings.servers
    if servers.count and not (isinstance(servers.gpus, list) and servers.gpus):
        groups: list[tuple[int, ...]] = [()] * servers.count
    else:
        gpus = list(servers.gpus) if isinstance(servers.gpus, list) else list(range(visible_gpus))
        if not gpus:
            raise SettingsError(
                "no GPU is visible here and servers.count is 0: set servers.count to run that many servers without "
                "GPUs, or check nvidia-smi"
            )
        if len(set(gpus)) != len(gpus) or min(gpus) < 0:
            raise SettingsError(f"servers.gpus: {gpus}: each GPU once, counted from 0")
        if visible_gpus and max(gpus) >= visible_gpus:
            raise SettingsError(f"servers.gpus: {gpus}: only {visible_gpus} GPUs are visible here, 0 is the first")
        size = servers.gpus_per_server
        if len(gpus) % size:
            raise SettingsError(f"servers.gpus_per_server: {len(gpus)} GPUs cannot be shared out in groups of {size}")
        groups = [tuple(gpus[i : i + size]) for i in range(0, len(gpus), size)]
        if servers.count:
            groups = groups[: servers.count]
    last = servers.base_port + len(groups) * PORTS_PER_SERVER
    if last > _first_ephemeral_port():
        raise SettingsError(
            f"servers.base_port: ports {servers.base_port} to {last} reach into those that the kernel hands out "
            f"(from {_first_ephemeral_port()}); choose a lower one"
        )
    return [
        Seat(number=number, gpus=group, port=servers.base_port + number * PORTS_PER_SERVER)
        for number, group in enumerate(groups)
    ]


def visible_gpus() -> int:
    """How many GPUs the driver shows; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def flags(settings: Settings, seat: Seat) -> dict[str, Flag]:
    """The flags of the server on `seat`: what any server needs, SGLang's own, then those of the settings."""
    result: dict[str, Flag] = {"model-path": settings.model.path, "host": "127.0.0.1", "port": seat.port}
    if settings.model.context_length:
        result["context-length"] = settings.model.context_length
    if settings.servers.gpus_per_server > 1:
        result["tp-size"] = settings.servers.gpus_per_server
    if is_sglang(settings.servers.command):
        result |= sglang_defaults(settings.model.path)
        # Ports that SGLang would draw at random could be another server's by then.
        result |= {"nccl-port": seat.port + 1, "dist-init-addr": f"127.0.0.1:{seat.port + 2}"}
    given = {name.lstrip("-").replace("_", "-"): value for name, value in settings.servers.flags.items()}
    return result | given


def sglang_defaults(model: str) -> dict[str, Flag]:
    """Flags for a model by its name; `gend plan` finds better ones, and `servers.flags` wins over each."""
    name = model.lower()
    result: dict[str, Flag] = {"enable-metrics": True}
    if "qwen3" in name:
        result["reasoning-parser"] = "qwen3"
    if any(hybrid in name for hybrid in ("qwen3.5", "qwen3.6", "qwen3-next")):
        # Linear attention keeps a state of 144 MB a request. With the radix cache on, a request takes 3 to 5 of them,
        # and SGLang lowers the number of requests that run to 16 or 26 without an error (measured on an H200).
        result |= {"disable-radix-cache": True, "mem-fraction-static": 0.88, "max-running-requests": 256}
    return result


def argv(settings: Settings, seat: Seat, names: Mapping[str, str] | None = None, dropped: str = "") -> list[str]:
    """The command line of the server on `seat`. `names`: what a flag is called in the installed SGLang, where it has
    another name there. Flags that begin with `dropped` are left out (a fallback after crashes)."""
    command = list(settings.servers.command)
    if command[0] in ("python", "python3"):
        command[0] = sys.executable  # the environment that gend was installed in
    wanted = {
        (names or {}).get(name, name): value
        for name, value in flags(settings, seat).items()
        if not (dropped and name.startswith(dropped))
    }
    return command + flag_arguments(wanted)


def fitting_names(settings: Settings, seat: Seat) -> dict[str, str]:
    """What each flag is called in the SGLang that would be started. Raises SettingsError for one that it has not.

    Nothing is checked where another engine is started, or where its SGLang cannot be found from here.
    """
    if not is_sglang(settings.servers.command):
        return {}
    python = argv(settings, seat)[0]
    if "python" not in os.path.basename(python):
        return {}
    package = installed(python, environment(settings, seat))
    if package is None:
        raise SettingsError(
            f"servers.command: {python} has no sglang: pip install 'gend[sglang]' there, or name another command"
        )
    return fitting(flags(settings, seat), known_flags(package))


def flag_arguments(flags: Mapping[str, Flag]) -> list[str]:
    """`{"a": True, "b": False, "c": 1, "d": ["x", "y"]}` as `--a --c 1 --d x y`."""
    arguments: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            arguments.extend(str(item) for item in (value if isinstance(value, list) else [value]))
    return arguments


def environment(settings: Settings, seat: Seat) -> dict[str, str]:
    """The environment of the server on `seat`: ours, its GPUs, what the settings add; none of the store's secrets."""
    result = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    if seat.gpus:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in seat.gpus)
    result["PYTHONUNBUFFERED"] = "1"
    result.update(settings.servers.environment)
    return result


def _first_ephemeral_port() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError):
        return 32768
