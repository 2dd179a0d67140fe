"""`gend doctor`: is this box fit, before the meter runs. It starts no server, and changes nothing that stays.

Each check is a generator of findings about one thing. They run side by side, each with a time limit: what hangs (a
store that swallows packets, a dead network disk) is a finding too. What cannot apply here is skipped, with the reason.
"""

import asyncio
import contextlib
import datetime
import email.utils
import os
import re
import resource
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from gend import processes, valkey
from gend.config import Settings
from gend.engine import connect
from gend.errors import GendError, PromptRefused, ServerFault, SettingsError, StoreUnavailable, Unavailable
from gend.gpus import Driver, Gpu, read_driver
from gend.ledger import Ledger
from gend.model_files import check_description, find_model, read_template, read_weights, render_prompt
from gend.records import Reply, Sampling
from gend.server_command import PORTS_PER_SERVER, Seat, environment, fitting_names, flags, seats
from gend.sglang_flags import is_sglang
from gend.store import S3Store, Store, open_store
from gend.verdict import OK, judge

State = Literal["ok", "warning", "fail", "skipped"]

CHECK_SECONDS = 8.0
"""A check that takes longer hangs; all run at once, so the whole is over in about this time."""
GENERATE_SECONDS = 300.0
PATIENCE_SECONDS = 3.0
"""How long the store and Redis may be away: a run waits longer, but a person at a terminal wants to know now."""

MIB, GIB = 2**20, 2**30
DISK_FAIL_BYTES, DISK_WARN_BYTES = GIB, 10 * GIB
"""Spool, logs and prompt sets of eight servers take some 1 GiB; ten leave room for a store that is away for an hour."""
GPU_USED_BYTES = 2 * GIB
"""A GPU with more in use is somebody's. NVML counts what the driver keeps for itself, up to about 1 GiB, as used."""
RAM_BYTES = 8 * GIB
"""What a server's processes, pinned buffers and a shard on its way to the GPU may take."""
FILES_FAIL, FILES_WARN = 1024, 4096
"""A worker holds a connection for each request in flight, and SGLang one for each too: hundreds."""
PIDS_FAIL, PIDS_WARN = 256, 1024
"""Threads of one SGLang server; they grow with the cores of the box."""
SHM_TP_BYTES, SHM_BYTES = GIB, 16 * MIB
CLOCK_FAIL_SECONDS, CLOCK_WARN_SECONDS = 600.0, 60.0
"""S3 refuses what is signed 15 minutes too early or late."""
PIECE_BYTES = 5 * MIB
"""The least that S3 takes for all but the last piece of a multipart upload."""
TRIED_SGLANG = (0, 5, 17)
OLDEST_REDIS = (6, 2)

QUESTION = "A train leaves at 14:35 and arrives at 17:10. How long does the ride take?"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line: what was looked at, how it is, what that means, and what to type where it is not well."""

    check: str
    state: State
    says: str
    do: str = ""


Found = Iterator[Finding]
Check = Callable[[Settings], Found]


def ok(check: str, says: str, do: str = "") -> Finding:
    return Finding(check=check, state="ok", says=says, do=do)


def warning(check: str, says: str, do: str = "") -> Finding:
    return Finding(check=check, state="warning", says=says, do=do)


def fail(check: str, says: str, do: str = "") -> Finding:
    return Finding(check=check, state="fail", says=says, do=do)


def skipped(check: str, says: str) -> Finding:
    return Finding(check=check, state="skipped", says=says)


def examine(settings: Settings, generate: bool = False, limit_seconds: float = CHECK_SECONDS) -> list[Finding]:
    """All findings, in the order of CHECKS. Over after about `limit_seconds`; with `generate` after minutes at most."""
    jobs = [Job(name, check, hint, limit_seconds) for name, (check, hint) in CHECKS.items()]
    if generate:
        jobs.append(Job("generate", replies, "look into the servers' logs", GENERATE_SECONDS))
    for job in jobs:
        job.start(settings)
    return [finding for job in jobs for finding in job.findings()]


class Job:
    """One check on a thread of its own, which is left behind where it hangs."""

    def __init__(self, name: str, check: Check, hint: str, limit_seconds: float):
        self.name, self.check, self.hint, self.limit_seconds = name, check, hint, limit_seconds
        self._found: list[Finding] = []
        self._thread: threading.Thread
        self._deadline = 0.0

    def start(self, settings: Settings) -> None:
        # A daemon thread: those of an executor would be waited for at the end of the process.
        self._thread = threading.Thread(target=self._run, args=(settings,), daemon=True)
        self._deadline = time.monotonic() + self.limit_seconds
        self._thread.start()

    def _run(self, settings: Settings) -> None:
        try:
            for finding in self.check(settings):
                self._found.append(finding)
        except GendError as error:
            self._found.append(fail(self.name, str(error)))
        except Exception as error:  # a check that broke off was not passed; the others go on
            self._found.append(fail(self.name, f"the check broke off: {type(error).__name__}: {error}", self.hint))

    def findings(self) -> list[Finding]:
        """What was found, once it is done or its time is over."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        found = list(self._found)
        if self._thread.is_alive():
            found.append(fail(self.name, f"no answer within {self.limit_seconds:.0f} s: it hangs", self.hint))
        return found


# -- GPUs and what runs on them --------------------------------------------------------------------------------------


def gpus(settings: Settings) -> Found:
    """Visible, as many as wanted, whole, empty."""
    yield from judge_gpus(settings, read_driver(), own_servers_up=bool(own_servers(settings)))


def judge_gpus(settings: Settings, driver: Driver | None, own_servers_up: bool) -> Found:
    """The GPUs against what the settings want of them."""
    servers = settings.servers
    wanted = servers.gpus if isinstance(servers.gpus, list) else None
    if driver is None or not driver.gpus:
        here = "no NVIDIA driver here" if driver is None else "the NVIDIA driver shows no GPU"
        if servers.count and not wanted:
            yield skipped("gpus", f"{here}, and servers.count asks for {servers.count} servers without")
            yield skipped("nvlink", here)
        else:
            yield fail("gpus", here, "nvidia-smi; in a container docker run --gpus all; without GPUs servers.count")
        return
    there = {gpu.index: gpu for gpu in driver.gpus}
    if missing := sorted(set(wanted or ()) - set(there)):
        says = f"servers.gpus wants {missing}, but the driver shows {len(there)}, the last is {max(there)}"
        yield fail("gpus", says, "change servers.gpus, or ask for another box")
        return
    ours = [there[index] for index in (wanted or there)]
    kinds = sorted({gpu.name for gpu in ours})
    if worn := [gpu.index for gpu in ours if gpu.worn_out]:
        says = f"GPU {worn}: memory failed and could not be replaced, so replies may be wrong"
        yield fail("gpus", says, "ask for another box, or leave it out of servers.gpus")
    if busy := [gpu for gpu in ours if gpu.used_bytes > GPU_USED_BYTES and not own_servers_up]:
        yield fail("gpus", "; ".join(map(_in_use, busy)), "nvidia-smi; end what runs there")
    if not worn and not busy:
        size = min(gpu.total_bytes for gpu in ours) / GIB
        use = "gend's own servers are up" if own_servers_up else "empty"
        yield ok("gpus", f"{len(ours)} x {', '.join(kinds)}, {size:.0f} GiB, {use}")
    if len(kinds) > 1:
        yield warning("gpus", f"different cards ({', '.join(kinds)}): flags that fit one may not fit all")
    if (size := servers.gpus_per_server) == 1:
        yield skipped("nvlink", "one GPU a server: nothing goes between them")
    elif alone := [gpu.index for gpu in ours if not gpu.nvlinks]:
        says = f"GPU {alone} has no NVLink up, but a server spreads over {size}: every layer waits for PCIe"
        yield warning("nvlink", says, "nvidia-smi nvlink -s; see gend plan --gpus-per-server 1")
    else:
        yield ok("nvlink", f"{min(gpu.nvlinks for gpu in ours)} links a GPU are up")


def _in_use(gpu: Gpu) -> str:
    who = f" by pid {', '.join(map(str, gpu.pids))}" if gpu.pids else ""
    return f"GPU {gpu.index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.0f} GiB in use{who}"


def software(settings: Settings) -> Found:
    """SGLang and torch fit the driver, and know the flags."""
    found = server_software(settings)
    yield from judge_software(settings, read_driver(), found)
    if found and found.sglang:
        names = fitting_names(settings, _first_seat(settings))
        yield ok("flags", f"SGLang {found.sglang} knows all {len(names)} flags")


class Software(msgspec.Struct, frozen=True, array_like=True):
    """Versions in the environment of the servers; empty: not installed. `cuda` is what torch was built for."""

    python: str
    sglang: str = ""
    torch: str = ""
    cuda: str = ""


# Read from files: importing torch takes seconds.
_ASK_SOFTWARE = r"""
import importlib.metadata as metadata, importlib.util, json, pathlib, re, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
spec = importlib.util.find_spec("torch")
text = (pathlib.Path(spec.origin).parent / "version.py").read_text() if spec and spec.origin else ""
cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", text, re.M)
print(json.dumps([sys.version.split()[0], version("sglang"), version("torch"), cuda[1] if cuda else ""]))
"""


def server_software(settings: Settings) -> Software | None:
    """What is installed for the servers; None where servers.command is not a Python that runs SGLang.

    Raises SettingsError where that Python does not start.
    """
    python = settings.servers.command[0]
    if not is_sglang(settings.servers.command) or not Path(python).name.startswith("python"):
        return None
    python = sys.executable if python in ("python", "python3") else python
    variables = environment(settings, _first_seat(settings))
    try:
        done = subprocess.run([python, "-c", _ASK_SOFTWARE], capture_output=True, text=True, env=variables, timeout=60)
    except OSError as error:
        raise SettingsError(f"servers.command: {python} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise SettingsError(f"servers.command: {python} fails: {done.stderr.strip().splitlines()[-1:]}")
    return msgspec.json.decode(done.stdout, type=Software)


def judge_software(settings: Settings, driver: Driver | None, software: Software | None) -> Found:
    """SGLang and torch against the driver."""
    if software is None:
        yield skipped("software", f"servers.command is no python that runs SGLang: {settings.servers.command[0]}")
        return
    have = f"SGLang {software.sglang or 'missing'}, torch {software.torch or 'missing'}"
    have += f" for CUDA {software.cuda}" if software.cuda else ""
    built_for = _numbers(software.cuda)
    if not software.sglang or not software.torch:
        says = f"{have} in the python of servers.command ({software.python})"
        yield fail("software", says, "tools/install --sglang 0.5.17, or point servers.command to where it is")
    elif driver is None:
        yield ok("software", f"{have}; there is no driver to hold it against")
    elif not built_for:
        yield fail("software", f"{have}: a torch for the CPU", "install a CUDA build of torch")
    elif built_for[0] > driver.cuda[0]:
        says = f"{have}, but driver {driver.version} runs CUDA {_dotted(driver.cuda)} and older"
        yield fail("software", says, "take a box with a newer driver, or an SGLang for that CUDA")
    elif built_for > driver.cuda:
        says = f"{have}; driver {driver.version} is for CUDA {_dotted(driver.cuda)}: kernels made on the box may fail"
        yield warning("software", says, "if servers die with 'PTX' or 'toolchain': take a box with a newer driver")
    elif _numbers(software.sglang) < TRIED_SGLANG:
        says = f"{have}: gend was tried with {_dotted(TRIED_SGLANG)} and later"
        yield warning("software", says, "pip install --upgrade sglang")
    else:
        yield ok("software", f"{have}; driver {driver.version} runs CUDA {_dotted(driver.cuda)}")


def _first_seat(settings: Settings) -> Seat:
    """For what is the same on every seat."""
    return Seat(number=0, gpus=(), port=settings.servers.base_port)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


# -- the model -------------------------------------------------------------------------------------------------------


def model(settings: Settings) -> Found:
    """Everything that a server reads is there, and as long as it says it is."""
    home, fetch = _model_folder(settings), f"tools/fetch-model {settings.model.path}"
    if home is None:
        if is_sglang(settings.servers.command):
            says = f"{settings.model.path} is not on this box: every server would fetch it, and the meter runs"
            yield fail("model", says, fetch)
        else:
            yield skipped("model", f"{settings.model.path} is no folder, and servers.command is not SGLang")
        return
    check_description(home)
    if flags(settings, _first_seat(settings)).get("load-format") == "dummy":
        yield warning("model", "load-format is dummy: the weights are noise, and so are the replies")
        return
    weights = read_weights(home)
    for fault in weights.faults[:5]:
        yield fail("model", fault, fetch)
    if len(weights.faults) > 5:
        yield fail("model", f"and {len(weights.faults) - 5} more files", fetch)
    if not weights.faults:
        yield ok("model", f"{home}: {weights.tensors:,} tensors, {_size(weights.bytes)}, no file cut short")


def template(settings: Settings) -> Found:
    """The chat template makes a prompt that asks for a thought, and SGLang is told to find it in the reply."""
    thinking, wanted = settings.sampling.thinking, flags(settings, _first_seat(settings))
    if thinking and is_sglang(settings.servers.command) and "reasoning-parser" not in wanted:
        says = "sampling.thinking is on, but without a reasoning parser the thought comes inside the answer"
        yield fail("template", says, 'servers.flags: reasoning-parser = "qwen3", or what fits the model')
    home, given = _model_folder(settings), str(wanted.get("chat-template", ""))
    if home is None:
        yield skipped("template", f"{settings.model.path} is not here")
        return
    # SGLang takes a file, or the name of one of its own.
    source = Path(given).read_text(encoding="utf-8") if Path(given).is_file() else read_template(home)
    if source is None:
        yield fail("template", f"{home} has no chat template", 'servers.flags: chat-template = "FILE"')
        return
    plain, thought = (render_prompt(source, QUESTION, enable_thinking=on) for on in (False, True))
    chosen = plain if thinking is False else thought
    if QUESTION not in chosen:
        yield fail("template", "the chat template drops what the user says", 'servers.flags: chat-template = "FILE"')
        return
    end = chosen[chosen.rindex(QUESTION) + len(QUESTION) :]
    if thinking and end.rstrip().endswith("</think>"):
        yield fail("template", f"the chat template closes the thought before it begins: {end!r}")
    elif thinking and thought == plain and not end.rstrip().endswith("<think>"):
        says = "sampling.thinking is on, but the chat template knows no enable_thinking: there may be no thought"
        yield warning("template", says, "gend doctor --generate, once servers are up")
    else:
        yield ok("template", f"a {'thinking ' if thinking else ''}prompt ends with {end!r}")


def _model_folder(settings: Settings) -> Path | None:
    return find_model(settings.model.path, {**os.environ, **settings.servers.environment})


# -- the box ---------------------------------------------------------------------------------------------------------


def disk(settings: Settings) -> Found:
    """Room for spool, prompt sets and logs, and that they can be written."""
    folder, probe = settings.folder, settings.folder / f".doctor-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\0" * MIB)
        finally:
            probe.unlink(missing_ok=True)
        room = os.statvfs(folder)
    except OSError as error:
        yield fail("disk", f"{folder} cannot be written: {error.strerror}", "set work.folder, or make room there")
        return
    free = room.f_bavail * room.f_frsize
    says, do = f"{_size(free)} free in {folder}", "make room, or set work.folder to a larger disk"
    if free < DISK_FAIL_BYTES or (room.f_files and room.f_favail < 10_000):
        yield fail("disk", f"{says} and {room.f_favail:,} files: too little for spool, prompt sets and logs", do)
    elif free < DISK_WARN_BYTES:
        yield warning("disk", f"{says} for spool, prompt sets and logs", do)
    else:
        yield ok("disk", says)


def shm(settings: Settings) -> Found:
    """/dev/shm: NCCL's way between the GPUs of one server; a container has 64 MiB of it unless told otherwise."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        yield fail("shm", f"/dev/shm: {error.strerror}", "mount -t tmpfs none /dev/shm")
        return
    free, size = room.f_bavail * room.f_frsize, settings.servers.gpus_per_server
    says, do = f"{_size(free)} free in /dev/shm", "empty it, or docker run --shm-size 16g"
    if size > 1 and free < SHM_TP_BYTES:
        yield fail("shm", f"{says}: too little for NCCL over {size} GPUs", do)
    elif free < SHM_BYTES:
        yield warning("shm", says, do)
    else:
        yield ok("shm", says)


def limits(settings: Settings) -> Found:
    """Open files, processes and threads."""
    files = _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    says = f"{_count(files)} open files a process, as started from here"
    do = "ulimit -n 65536; systemd LimitNOFILE=65536; docker run --ulimit nofile=65536"
    if files < FILES_FAIL:
        yield fail("nofile", f"{says}: too few for a worker's connections", do)
    elif files < FILES_WARN:
        yield warning("nofile", says, do)
    else:
        yield ok("nofile", says)
    servers = max(1, len(_seats_or_none(settings)))
    left = _cgroup_limit("pids", "pids.max", "pids.max", "pids.current")
    if os.geteuid():  # root is not held to it
        left = min(left, _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]))
    says = f"room for {_count(left)} more processes and threads; servers: {servers}"
    do = "docker run --pids-limit -1; systemd TasksMax=infinity; ulimit -u"
    if left < PIDS_FAIL * servers:
        yield fail("pids", f"{says}: too few", do)
    elif left < PIDS_WARN * servers:
        yield warning("pids", says, do)
    else:
        yield ok("pids", says)


def memory(settings: Settings) -> Found:
    """RAM for the servers and, where it is on, SGLang's hierarchical cache (KV that was pushed off the GPU)."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = _cgroup_limit("memory", "memory.max", "memory.limit_in_bytes")
    free = min(free, int(found[1]) * 1024) if found else free
    places, wanted = _seats_or_none(settings), flags(settings, _first_seat(settings))
    gpus = sum(len(seat.gpus) for seat in places)
    need, who = len(places) * (RAM_BYTES if gpus else GIB), f"{len(places)} servers"
    if wanted.get("enable-hierarchical-cache"):
        # --hicache-size is in GB for each GPU; where it is 0, --hicache-ratio times the GPU's KV cache, at most all.
        each = float(str(wanted.get("hicache-size", 0))) * 1e9
        if not each and (driver := read_driver()):
            each = float(str(wanted.get("hicache-ratio", 2.0))) * max(gpu.total_bytes for gpu in driver.gpus)
        need, who = need + int(each) * gpus, f"{who} with a hierarchical cache for {gpus} GPUs"
    says = f"{_size(free)} of RAM free; {who} may want {_size(need)}"
    if free >= need:
        yield ok("memory", says)
    elif wanted.get("hicache-size"):
        yield fail("memory", says, "lower hicache-size, or take a box with more RAM")
    else:
        yield warning("memory", says, "lower hicache-ratio, end what else runs, or take a box with more RAM")


def ports(settings: Settings) -> Found:
    """Each server's block of ports is free, or held by gend's own server."""
    places, own = seats(settings, _gpu_count()), own_servers(settings)
    blocks = [range(seat.port, seat.port + PORTS_PER_SERVER) for seat in places if seat.port not in own]
    if held := [port for block in blocks for port in block if not processes.port_free(port)]:
        says = "; ".join(f"{port} is held by {processes.port_holder(port)}" for port in held[:4])
        yield fail("ports", says, "end it, or change servers.base_port")
    else:
        last = places[-1].port + PORTS_PER_SERVER - 1
        use = "free" if not own else f"{len(places) - len(blocks)} held by gend's own servers"
        yield ok("ports", f"{places[0].port} to {last} for {len(places)} servers: {use}")


def supervision(settings: Settings) -> Found:
    """Who looks after the daemon."""
    if Path("/run/systemd/system").is_dir():
        yield ok("init", "systemd: it starts the daemon, and starts it again")
        return
    first = Path("/proc/1/comm").read_text().strip()
    says = f"no systemd (process 1 is {first}): a plain container, where nobody starts the daemon again"
    yield ok("init", says, "gend up &    # it goes on when the SSH session ends")


def own_servers(settings: Settings) -> set[int]:
    """The ports of gend's own servers that are alive."""
    left = processes.left_behind(settings.folder)
    return {process.identity.port for process in left if process.identity.port and process.exit_code() is None}


def _cgroup_limit(controller: str, name: str, old_name: str, used: str = "") -> int:
    """What this process's control groups leave of something, the tightest of them; sys.maxsize without limits.

    `name` and `old_name` are the limit's file in versions 2 and 1, `used` that of what is in use (none: not taken off).
    """
    left = sys.maxsize
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = Path("/sys/fs/cgroup") / (controller if controllers else "")
        # In a container the path may be the host's, and not be here: `base` is then the container's own group.
        group = base / path.lstrip("/")
        for folder in [group, *group.parents]:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit = int((folder / (old_name if controllers else name)).read_text())
                left = min(left, limit - (int((folder / used).read_text()) if used else 0))
            if folder == base:
                break
    return left


def _limit(value: int) -> int:
    return sys.maxsize if value == resource.RLIM_INFINITY else value


def _gpu_count() -> int:
    driver = read_driver()
    return len(driver.gpus) if driver else 0


def _seats_or_none(settings: Settings) -> list[Seat]:
    """The seats, or none where the settings do not fit the box: that is told by the check of ports."""
    try:
        return seats(settings, _gpu_count())
    except GendError:
        return []


# -- Redis and store -------------------------------------------------------------------------------------------------


def redis(settings: Settings) -> Found:
    """The ledger's Redis: its version, that it keeps what it is told, and throws nothing away."""
    if not settings.redis.url:
        with valkey.hold(settings.folder) as url:
            yield from judge_redis(Ledger(url, PATIENCE_SECONDS).about(), "gend's own")
        return
    ledger = Ledger(settings.redis.url, PATIENCE_SECONDS)
    ledger.check()
    where = re.sub(r"//[^@/]*@", "//", settings.redis.url)  # no password on a screen
    yield from judge_redis(ledger.about(), where)


def judge_redis(about: Mapping[str, Any], where: str) -> Found:
    """What INFO says. A Redis that forgets costs a listing of the store, no rows: hence a warning."""
    name = f"Valkey {about['valkey_version']}" if "valkey_version" in about else f"Redis {about['redis_version']}"
    says, well = f"{where}: {name}", True
    if _numbers(str(about["redis_version"])) < OLDEST_REDIS:
        well = False
        yield fail("redis", f"{says} is too old", f"Redis {_dotted(OLDEST_REDIS)} or later, or any Valkey")
    if about.get("role", "master") != "master":
        well = False
        yield fail("redis", f"{says} is a replica, which takes no writes", "change redis.url")
    if about.get("cluster_enabled"):
        well = False
        yield fail("redis", f"{says} is a cluster, which RQ cannot use", "change redis.url")
    if (policy := about.get("maxmemory_policy", "noeviction")) != "noeviction":
        well = False
        text = f"{says} throws keys away once memory is short ({policy}): progress would vanish"
        do = "redis-cli CONFIG SET maxmemory-policy noeviction"
        yield fail("redis", text, do) if about.get("maxmemory") else warning("redis", text, do)
    if not about.get("aof_enabled"):
        well = False
        text = f"{says} has no append-only file: after a restart progress must be listed anew from the store"
        yield warning("redis", text, "redis-cli CONFIG SET appendonly yes")
    if about.get("aof_last_write_status", "ok") != "ok" or about.get("rdb_last_bgsave_status", "ok") != "ok":
        well = False
        yield fail("redis", f"{says} cannot write its files", "make room on its disk")
    if well:
        yield ok("redis", f"{says}, append-only file, noeviction")


def store(settings: Settings) -> Found:
    """Write, read back, list, delete, write under a condition and in pieces: everything, once."""
    place = open_store(msgspec.structs.replace(settings.store, patience_seconds=PATIENCE_SECONDS))
    place.check()
    home, body = f"probe-{os.getpid()}-{time.time_ns():x}", os.urandom(64 * 1024)
    try:
        yield from _store_basics(place, f"{home}/small", body)
        yield from _store_condition(place, f"{home}/once")
        if isinstance(place, S3Store):
            yield from _store_multipart(place, f"{home}/large", body)
        else:
            yield skipped("multipart", "the store is a folder")
    finally:
        for name in ("small", "once", "large"):
            place.delete(f"{home}/{name}")


def _store_basics(place: Store, key: str, body: bytes) -> Found:
    place.replace(key, body)
    wrong = []
    if place.get(key) != body:
        wrong.append("what was put does not come back")
    if (key, len(body)) not in list(place.list(key)):
        wrong.append("a listing does not show what was put")
    place.delete(key)
    if place.get(key) is not None:
        wrong.append("what was deleted is still there")
    if wrong:
        yield fail("store", f"{place.url}: {'; '.join(wrong)}", "take another store: a run cannot trust this one")
    else:
        yield ok("store", f"{place.url}: put, read back, list, delete")


def _store_condition(place: Store, key: str) -> Found:
    place.put(key, b"first")
    if not place.put(key, b"second") and place.get(key) == b"first":
        yield ok("once", "of two parts of a batch the first stays (If-None-Match)")
    else:
        yield warning("once", "the store ignores If-None-Match: of two parts of a batch the last stays, as good a one")


def _store_multipart(place: S3Store, key: str, body: bytes) -> Found:
    pieces = [body * (PIECE_BYTES // len(body)), body]
    try:
        place.put_multipart(key, pieces)
        back = place.get(key)
    except StoreUnavailable as error:
        yield warning("multipart", f"{error}: no object can be larger than 5 GB, which parts never are")
        return
    if back == b"".join(pieces):
        yield ok("multipart", f"an object in two pieces, {_size(len(back))}, comes back as it was put")
    else:
        yield fail("multipart", "an object in two pieces does not come back as it was put", "take another store")


def tls(settings: Settings) -> Found:
    """Encryption on the way to the store, and our clock against the store's."""
    if not settings.store.url.startswith("s3://"):
        why = "the store is a folder" if settings.store.url else "there is no store"
        yield skipped("tls", why)
        yield skipped("clock", why)
        return
    region = settings.store.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    url = settings.store.endpoint or f"https://s3.{region or 'us-east-1'}.amazonaws.com"
    try:
        theirs = http_date(url)
    except ssl.SSLError as error:
        do = "for a certificate authority of your own: AWS_CA_BUNDLE=/path/to/ca.pem"
        yield fail("tls", f"{url}: {error}", do)
        return
    if url.startswith("https://"):
        yield ok("tls", f"{url}: its certificate is good")
    elif urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        yield ok("tls", f"{url}: not encrypted, and stays on this box")
    else:
        says = f"{url}: prompts and replies go over the network in the clear"
        yield warning("tls", says, 'store.endpoint = "https://..."')
    if theirs is None:
        yield skipped("clock", f"{url} sends no Date")
    else:
        yield judge_clock((datetime.datetime.now(datetime.UTC) - theirs).total_seconds())


def judge_clock(ahead_seconds: float) -> Finding:
    """Our clock against the store's: what is signed at a wrong time is refused."""
    off = abs(ahead_seconds)
    says = f"{off:,.0f} s {'ahead of' if ahead_seconds > 0 else 'behind'} the store's"
    do = "timedatectl set-ntp true; in a container the host's clock must be right"
    if off > CLOCK_FAIL_SECONDS:
        return fail("clock", f"{says}: it refuses what is signed 15 minutes off", do)
    return warning("clock", says, do) if off > CLOCK_WARN_SECONDS else ok("clock", "agrees with the store's")


def http_date(url: str) -> datetime.datetime | None:
    """What a server's Date header says; any answer is good for that. Raises ssl.SSLError, Unavailable."""
    context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE"))
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS, context=context) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            raise reason from error
        raise Unavailable(f"{url}: {reason}; check store.endpoint and the network") from error
    text = headers.get("Date")
    return email.utils.parsedate_to_datetime(text) if text else None


# -- one real reply of each server -----------------------------------------------------------------------------------


def replies(settings: Settings) -> Found:
    """One real thinking reply of each server. Starts none."""
    yield from asyncio.run(_ask_all(settings, seats(settings, _gpu_count())))


async def _ask_all(settings: Settings, places: list[Seat]) -> list[Finding]:
    return await asyncio.gather(*(_ask(settings, seat) for seat in places))


async def _ask(settings: Settings, seat: Seat) -> Finding:
    name = f"server-{seat.number}"
    sampling = msgspec.structs.replace(settings.sampling, max_tokens=min(settings.sampling.max_tokens, 4096))
    started = time.monotonic()
    async with connect(seat.url, settings.model.path, GENERATE_SECONDS - 10) as server:
        try:
            reply = await server.chat([{"role": "user", "content": QUESTION}], None, sampling, seed=1)
        except Unavailable as error:
            return fail(name, f"is not up: {error}", "gend up")
        except (ServerFault, PromptRefused) as error:
            return fail(name, str(error), f"less {processes.log_path(settings.folder, name)}")
    return judge_reply(name, reply, sampling, time.monotonic() - started)


def judge_reply(name: str, reply: Reply, sampling: Sampling, seconds: float) -> Finding:
    """A reply to QUESTION: its verdict, and whether there is sense in it (the answer is 2 hours, 35 minutes)."""
    verdict, usage = judge(reply, sampling), reply.usage
    says = f"{usage.completion_tokens} tokens, {usage.reasoning_tokens} of them thought, in {seconds:.1f} s"
    if verdict != OK:
        return fail(name, f"{says}: verdict {verdict}", "look at reasoning-parser, chat template and max_tokens")
    answer = " ".join((reply.content or "").split())
    if "35" not in answer:
        return warning(name, f"{says}; 2 h 35 min is not in {answer[:60]!r}", "with real weights: is the model whole?")
    return ok(name, f"{says}: {answer[:60]!r}")


CHECKS: dict[str, tuple[Check, str]] = {
    "gpus": (gpus, "does nvidia-smi hang too? then restart the box, or ask for another"),
    "software": (software, "is the servers' python on a network disk that hangs?"),
    "model": (model, "is model.path on a network disk that hangs?"),
    "template": (template, "is model.path on a network disk that hangs?"),
    "disk": (disk, "is work.folder on a network disk that hangs?"),
    "shm": (shm, "mount | grep shm"),
    "limits": (limits, "ulimit -a"),
    "memory": (memory, "free -h"),
    "ports": (ports, "ss -ltnp"),
    "init": (supervision, "ps 1"),
    "redis": (redis, "check redis.url; does something between here and there swallow packets?"),
    "store": (store, "check store.endpoint; does something between here and there swallow packets?"),
    "tls": (tls, "check store.endpoint; does something between here and there swallow packets?"),
}
"""Each check, and what to look at where it hangs or breaks off."""


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.0f} MiB"


def _count(number: int) -> str:
    return "any number of" if number == sys.maxsize else f"{number:,}"


def lines(findings: list[Finding]) -> Iterator[tuple[State, str]]:
    """The lines for a person, each with the state that gives it its colour."""
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        yield finding.state, f"{finding.state:8} {finding.check:{width}}  {finding.says}"
        if finding.do:
            yield finding.state, f"{'':8} {'':{width}}  -> {finding.do}"
