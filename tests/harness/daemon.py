"""The real `gend up` in its own session with fake servers: start it, look, kill parts of it, clean up after it."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from gend.server_command import PORTS_PER_SERVER
from harness import processes
from harness.processes import wait_until
from harness.services import FAKE_SERVER, Ports, write_whole

REPO = Path(__file__).resolve().parents[2]
Config = Mapping[str, Mapping[str, Any]]


def toml(config: Config) -> str:
    """A config file: one table of plain values, with tables of plain values in them."""
    lines = []
    for name, table in config.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
        for key, inner in table.items():
            if isinstance(inner, dict):
                lines.append(f"[{name}.{key}]")
                lines += [f"{json.dumps(inside)} = {json.dumps(value)}" for inside, value in inner.items()]
    return "\n".join(lines) + "\n"


class Daemon:
    """`gend up` with `servers` fake servers, all below one short folder, all its processes marked.

    `config` adds to or replaces keys of config.toml ({"work": {"batch_size": 8}}); `server_flags` go to the fake
    servers; `environment` to everything. Use it as a context manager: leaving it ends every process it started.
    """

    def __init__(
        self,
        folder: Path,
        ports: Ports,
        *,
        servers: int = 2,
        store: str = "",
        endpoint: str = "",
        redis: str = "",
        config: Config | None = None,
        server_flags: tuple[str, ...] = ("--speed", "50"),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.marker = folder.resolve(), uuid.uuid4().hex
        self.store = self.folder / "store"
        """Where the parts are if no other store was given."""
        self.work, self.modes = folder / "work", folder / "modes"
        self.request_log = folder / "requests.jsonl"
        for path in (self.store, self.work, self.modes):
            path.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(FAKE_SERVER), "--request-log", str(self.request_log),
                   "--mode-file", str(self.modes / "{port}.json"), "--mode-file", str(self.modes / "all.json"),
                   *server_flags]  # fmt: skip
        self.base_port = ports.block(max(100, servers * PORTS_PER_SERVER))
        settings: dict[str, dict[str, Any]] = {
            "model": {"path": "fake"},
            "servers": {"count": servers, "command": command, "base_port": self.base_port},
            "store": {"url": store or f"file://{self.store}", "endpoint": endpoint},
            "redis": {"url": redis},
            "work": {"folder": str(self.work), "batch_size": 8},
            "page": {"port": 0},
        }
        for name, table in (config or {}).items():
            settings[name] = {**settings.get(name, {}), **table}
        self.config = folder / "config.toml"
        self.config.write_text(toml(settings))
        self.environment = {
            **processes.environment(self.marker),
            "PYTHONPATH": str(REPO),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            **(environment or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    # ---- the daemon

    def start(self, *flags: str) -> Self:
        """Start `gend up`; it may take a while until anything answers."""
        assert self.process is None or self.process.poll() is not None, "the daemon runs already"
        self.process = processes.start(
            [sys.executable, "-m", "gend", "--config", self.config, "up", *flags],
            self.folder,
            "up",
            last_signal="TERM",  # it can end its children, which a SIGKILL would leave behind
            env=self.environment,
            cwd=self.folder,
        )
        return self

    def wait(self, seconds: float = 120) -> int:
        """The exit status of `gend up`, once it ends by itself. Raises AssertionError with the logs if it does not."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"gend up did not end within {seconds:.0f} s\n{self.logs()}") from None

    def run_until_idle(self, seconds: float = 120) -> None:
        """`gend up --until-idle`, from start to a good end."""
        code = self.start("--until-idle").wait(seconds)
        assert code == 0, f"gend up --until-idle ended with {code}\n{self.logs()}"

    def stop(self, seconds: float = 90) -> int:
        """SIGTERM to the supervisor, as systemd does it; gives the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.wait(seconds)

    # ---- the command line

    def cli(self, *args: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """`gend ARGS`; fails unless it ends with `code` (None: any)."""
        done = subprocess.run(
            [sys.executable, "-m", "gend", "--config", str(self.config), *map(str, args)],
            env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        shown = f"gend {' '.join(map(str, args))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert code is None or done.returncode == code, shown
        return done

    def enqueue(self, source: Path, name: str = "test", *more: str) -> str:
        """Register a prompt file; gives the run's id."""
        return str(json.loads(self.cli("enqueue", source, "--name", name, "--json", *more).stdout)["run"])

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.cli("status", "--json").stdout))

    # ---- its processes

    def all_processes(self) -> list[psutil.Process]:
        """Every live process that this daemon or its commands left, however they are related to it now."""
        return processes.marked(self.marker, self.folder)

    def workers(self) -> dict[int, psutil.Process]:
        """The live worker processes by number."""
        found = {}
        for process in self.all_processes():
            arguments = _arguments(process)
            if "gend" in arguments and "worker" in arguments:
                found[int(arguments[arguments.index("--number") + 1])] = process
        return found

    def servers(self) -> dict[int, psutil.Process]:
        """The live main processes of the fake servers by number."""
        found = {}
        for process in self.all_processes():
            arguments = _arguments(process)
            if str(FAKE_SERVER) in arguments[:3]:  # python [-u] fake_server.py
                port = int(arguments[arguments.index("--port") + 1])
                found[(port - self.base_port) // PORTS_PER_SERVER] = process
        return found

    def loader(self) -> psutil.Process | None:
        """The loader, while it lives."""
        for process in self.all_processes():
            if {"gend", "loader"} <= set(_arguments(process)):
                return process
        return None

    def valkey(self) -> psutil.Process | None:
        """gend's own Valkey, where it runs one."""
        for process in self.all_processes():
            arguments = _arguments(process)
            if arguments and Path(arguments[0]).name.startswith(("valkey-server", "redis-server")):
                return process
        return None

    @property
    def supervisor(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def kill(self, process: psutil.Process, number: int = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL wait until the process is gone (a zombie is gone)."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        if number == signal.SIGKILL:
            if self.process is not None and process.pid == self.process.pid:
                self.process.wait(60)
            wait_until(lambda: not processes.alive(process), f"{process} is gone")

    def survivors(self) -> list[str]:
        """One line for each process that is left: [] after an orderly stop."""
        return [processes.describe(process) for process in self.all_processes()]

    def wait_for_processes(self, *, workers: int = 0, servers: int = 0, seconds: float = 60) -> None:
        """Wait until so many workers and servers live."""
        wait_until(
            lambda: len(self.workers()) >= workers and len(self.servers()) >= servers,
            f"{workers} workers and {servers} servers",
            seconds=seconds,
            failed=lambda: "\n".join(self.survivors()) + self.logs(),
        )

    # ---- the fake servers

    def port(self, server: int) -> int:
        return self.base_port + server * PORTS_PER_SERVER

    def mode(self, mode: str, *, server: int | None = None, **more: Any) -> None:
        """Set a fault on all servers, or on one; returns when those that run have taken note. Survives restarts."""
        self.set_modes([{"mode": mode, **more}], server=server)

    def set_modes(self, faults: list[dict[str, Any]], *, server: int | None = None) -> None:
        """Like `mode`, for several faults at once."""
        write_whole(self.modes / ("all.json" if server is None else f"{self.port(server)}.json"), json.dumps(faults))
        for number, process in self.servers().items():
            if server in (None, number):
                wait_until(
                    functools.partial(self._took_note, number, process, [fault["mode"] for fault in faults]),
                    f"server {number} in mode {faults}",
                )

    def _took_note(self, number: int, process: psutil.Process, modes: list[str]) -> bool:
        stats = self.stats(number)
        if stats is None:  # it cannot say; a server that is still loading reads the file before it listens
            return True
        return not processes.alive(process) or stats["modes"] == [mode for mode in modes if mode != "ok"]

    def stats(self, server: int) -> dict[str, Any] | None:
        """/fake/stats of a server, or None where nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port(server)}/fake/stats", timeout=10) as answer:
                return dict(json.load(answer))
        except OSError:
            return None

    # ---- after the test

    def logs(self) -> str:
        """The ends of all log files of this daemon, for a failure message."""
        logs = sorted({*self.folder.glob("*.log"), *self.work.rglob("*.log")})
        return "\n".join(f"---- {log.relative_to(self.folder)}\n{_tail(log)}" for log in logs)

    def close(self) -> None:
        """End everything that was started, whatever session or parent it has now."""
        processes.end_all(self.all_processes)
        if self.process is not None:
            self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _tail(log: Path, size: int = 3000) -> str:
    return log.read_bytes()[-size:].decode("utf-8", "replace")
