"""Processes of this box: start one in a session of its own, know it again later, and end all of it.

A process is known by its pid *and* start time, since pids are used again: in ticks since the machine was booted, which
no clock that is set can change. What a daemon started is written down in
FOLDER/processes/NAME.json, so that the next daemon finds what a killed one left.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from gend.errors import DiskUnavailable, SettingsError, Unavailable

OOM_SCORE_ADJ = 500
"""When memory runs out, the kernel ends what we started, the largest first, and not us, Valkey or a login shell."""

Dead = tuple[int, float]
"""Pid and start time of a process that has ended and that nobody has waited for."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was started, `started` clock ticks after the boot of the machine that has the id `boot`.

    `argv` and `port` say what it is, so that a later daemon can tell whether it wants to adopt it.
    """

    name: str
    pid: int
    boot: str
    started: int
    argv: list[str]
    port: int = 0


class Process:
    """One process in a session of its own, started here or left by an earlier daemon."""

    def __init__(self, identity: Identity, popen: "subprocess.Popen[bytes] | None", record: Path):
        self.identity, self._popen, self._record = identity, popen, record

    @property
    def pid(self) -> int:
        return self.identity.pid

    def exit_code(self) -> int | None:
        """None while it lives; what it ended with (negative: the signal), or -1 where only its parent knew."""
        if self._popen is not None:
            return self._popen.poll()
        return None if _same(self.identity) else -1

    def say(self, line: bytes) -> None:
        """Write a line to its stdin, if it was started to listen and still does."""
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.write(line)
                self._popen.stdin.flush()

    def terminate(self) -> None:
        """Ask the leader alone: SGLang takes a TERM to its whole group for a crash."""
        with contextlib.suppress(ProcessLookupError):
            if self.exit_code() is None:
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the whole session, at once."""
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def members(self) -> list[psutil.Process]:
        """Everything that lives of it: its session, with children whose parent is gone."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def vital_parts(self) -> list[psutil.Process]:
        """The children that SGLang cannot live without: those that it named `sglang::...`."""
        found = []
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.pid and (process.cmdline() or [""])[0].startswith("sglang::"):
                    found.append(process)
        return found

    def forget(self) -> None:
        """It is gone, all of it: remove the record."""
        if self._popen is not None and self._popen.stdin is not None:
            self._popen.stdin.close()
        self._record.unlink(missing_ok=True)


def start(
    folder: Path, name: str, argv: Sequence[str], environment: Mapping[str, str], port: int = 0, talk: bool = False
) -> Process:
    """Start `argv` in a new session with output in FOLDER/logs/NAME.log.

    With `talk`, it listens on its stdin, which also ends when we do. Raises SettingsError if it can never start,
    Unavailable if the box has no room for it now.
    """
    record = folder / "processes" / f"{name}.json"
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        record.parent.mkdir(parents=True, exist_ok=True)
        log = open(log_path(folder, name), "ab")  # noqa: SIM115 - just below
    except OSError as error:
        raise DiskUnavailable(f"cannot start {name}: {folder}: {error.strerror}; make room there") from error
    with log:
        try:
            popen = subprocess.Popen(
                list(argv), stdin=subprocess.PIPE if talk else subprocess.DEVNULL, stdout=log, stderr=log,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise Unavailable(f"cannot start {name}: {error.strerror}; see the limits on processes") from error
            raise SettingsError(f"cannot start {name}: {argv[0]}: {error.strerror}; check servers.command") from error
    _offer_to_oom_killer(popen.pid)
    identity = Identity(
        name=name, pid=popen.pid, boot=_boot(), started=_start_ticks(popen.pid), argv=list(argv), port=port
    )
    process, temporary = Process(identity, popen, record), record.with_suffix(".new")
    try:
        temporary.write_bytes(msgspec.json.encode(identity))
        temporary.replace(record)
    except OSError as error:  # were we killed, nobody would find it again: it must not run
        process.kill()
        process.forget()
        raise DiskUnavailable(f"cannot start {name}: {record}: {error.strerror}; make room there") from error
    return process


def bury(dead: set[Dead]) -> set[Dead]:
    """Wait for those children of ours that were dead at the last look (`dead`) and still are; gives who is dead now.

    For orphans that pid 1 inherits. To wait for whatever child has ended would take the exit codes of our own; those
    are asked for many times between two looks, so whoever is dead at both is nobody's.
    """
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.add((child.pid, child.create_time()))
    for pid, _ in found & dead:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found


def left_behind(folder: Path) -> list[Process]:
    """What an earlier daemon started and did not see end: alive, or with members of its session alive."""
    found = []
    for record in sorted((folder / "processes").glob("*.json")):
        try:
            identity = msgspec.json.decode(record.read_bytes(), type=Identity)
        except (msgspec.DecodeError, OSError):
            record.unlink(missing_ok=True)
            continue
        process = Process(identity, None, record)
        if identity.boot != _boot():  # nothing outlives a boot; its pid is somebody else's
            process.forget()
            continue
        # A session keeps its leader's pid for as long as a member lives, so the pid cannot be somebody else's then.
        if process.exit_code() is None or (not psutil.pid_exists(identity.pid) and process.members()):
            found.append(process)
        else:
            process.forget()
    return found


def log_path(folder: Path, name: str) -> Path:
    """Where the output of a child goes."""
    return folder / "logs" / f"{name}.log"


def log_tail(folder: Path, name: str, lines: int = 12, tail_bytes: int = 16_384) -> list[str]:
    """The last lines of a child's log."""
    try:
        with open(log_path(folder, name), "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - tail_bytes))
            return log.read().decode("utf-8", "replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_holder(port: int) -> str:
    """Who listens on a port, in words; "another process" where the kernel does not tell us."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid:
                    return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
                break
    return "another process"


def box_name(folder: Path) -> str:
    """How the names of this box' workers begin: another box on the same Redis has another host or folder."""
    return f"{os.uname().nodename}-{folder.stat().st_ino:x}"


def kept_by_systemd(pid: int) -> bool:
    """Whether a process runs in gend.service: it would be started again if it were merely asked to end.

    Raises FileNotFoundError when there is no such process.
    """
    cgroups = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return any(line.endswith("/gend.service") for line in cgroups)


def ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or only waits to be buried."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def describe(pid: int) -> str:
    """A process in words; only its name, since its arguments may hold secrets."""
    try:
        return f"pid {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"pid {pid}"


def dump(process: Process, log_lines: list[str], path: Path) -> None:
    """Write down what a process that hangs can tell: the stacks of its members, where py-spy is there, and its log."""
    spy = shutil.which("py-spy")
    with open(path, "w") as out:
        for member in process.members():
            out.write(f"== {describe(member.pid)}\n")
            if spy:
                with contextlib.suppress(subprocess.SubprocessError):
                    stacks = subprocess.run(
                        [spy, "dump", "--nonblocking", "--pid", str(member.pid)],
                        capture_output=True,
                        text=True,
                        timeout=5,
                    )
                    out.write(stacks.stdout or stacks.stderr)
        out.write("== its log\n" + "\n".join(log_lines) + "\n")


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send us a signal when our parent dies, however it dies. Linux only, like the product."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before we had asked
        os.kill(os.getpid(), number)


def _offer_to_oom_killer(pid: int) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    with contextlib.suppress(OSError):  # it has ended already, which its exit code will tell
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(max(own, OOM_SCORE_ADJ)))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # a sandbox that does not show it


def _start_ticks(pid: int) -> int:
    """When a process was started; 0 for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # the 22nd field of all (proc(5)); the name may hold blanks


def _same(identity: Identity) -> bool:
    try:
        alive = psutil.Process(identity.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    return alive and identity.boot == _boot() and _start_ticks(identity.pid) == identity.started
