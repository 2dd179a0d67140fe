"""The real SGLang 0.5.23 on the CPU under gend's own daemon: what it truly does when it starts, dies, hangs and ends.

It needs .venv-sglang, which tools/setup-sglang-cpu makes. One server, SmolLM2-135M, on 2 cores.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.daemon import REPO, Daemon
from harness.processes import wait_until
from harness.reader import FolderParts, Seen, read_parts, write_prompts

from gend.processes import port_free
from gend.server_command import PORTS_PER_SERVER
from gend.sglang_flags import installed, known_flags, version

HOME = REPO / ".venv-sglang"
PYTHON, MODEL = HOME / "bin" / "python", HOME / "smollm2"
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent / "sglang_cpu" / "stub"),
    "OMP_NUM_THREADS": "1",  # two that spin for each other stand still as soon as another test runs beside (3 tokens/s)
}

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not (HOME / "installed").is_file(), reason="no real SGLang here: tools/setup-sglang-cpu installs it (2.6 GB)"
    ),
]

MakeDaemon = Callable[..., Daemon]

CPU_FLAGS = {
    "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none",
    "disable-overlap-schedule": True, "mem-fraction-static": 0.5, "max-total-tokens": 8192, "max-running-requests": 8,
}  # fmt: skip
STALL_SECONDS = 10.0

THE_PARSER = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
print(json.dumps([option for action in parser._actions for option in action.option_strings]))
"""


def make(make_daemon: MakeDaemon, **flags: Any) -> Daemon:
    servers = {
        "count": 1, "command": [str(PYTHON), "-m", "sglang.launch_server"], "environment": ENVIRONMENT,
        "flags": {**CPU_FLAGS, **flags}, "load_seconds": 300.0, "stall_seconds": STALL_SECONDS, "stop_seconds": 30.0,
    }  # fmt: skip
    config = {
        "model": {"path": str(MODEL)}, "servers": servers, "sampling": {"thinking": False, "max_tokens": 32},
        "work": {"batch_size": 8, "drain_seconds": 5.0}, "alarm": {"action": "warn"},
    }  # fmt: skip
    return make_daemon(config=config)  # type: ignore[no-any-return]


def test_flags_are_those_of_its_own_parser() -> None:
    environment = {**os.environ, **ENVIRONMENT}
    package = installed(str(PYTHON), environment)
    assert package is not None and version(package) == "0.5.23"
    said = subprocess.run(
        [PYTHON, "-c", THE_PARSER], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    options = json.loads(said.stdout.splitlines()[-1])
    assert known_flags(package) == {option[2:] for option in options if option.startswith("--")}


def test_a_flag_that_it_does_not_have_costs_no_start(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon, **{"max-runing-requests": 8})
    assert daemon.start().wait() == 2
    said = (daemon.folder / "up.log").read_text()
    assert "the installed SGLang has no --max-runing-requests; did you mean max-running-requests?" in said
    assert not (daemon.work / "logs" / "server-0.log").exists()


def test_it_lives_dies_hangs_and_ends(make_daemon: MakeDaemon) -> None:
    """One daemon through all of it, since each start takes half a minute. Seen on 2 cores, with much else on them:

    start               ready by canary after 24 to 77 s
    scheduler killed    noticed at the next look, each second, before its main process has; batches given back within
                        1 s, its rows kept in the spool; loading again 2 to 3 s after it was noticed
    scheduler stopped   with stall_seconds = 10: 22 s without a token when it was ended (a probe of 10 s among them);
                        loading again 4 s after that. /metrics goes on answering with numbers that stand still, with 0
                        requests if it was idle; /v1/loads and chat completions hang without end
    TERM                rows in flight had their 5 s, batches were given back; then SGLang was asked, and ended within
                        8 s; nothing was left, no process and no port
    """
    daemon = make(make_daemon)
    daemon.start()
    ready(daemon, starts=1)
    source, run = enqueue(daemon, "killed", seed=1)
    kept = some_rows(daemon, run)
    daemon.kill(scheduler(daemon))
    restarted(daemon, starts=2, why="its process")
    finished(daemon, source, run, kept)

    # In a pause, when its own numbers say that nothing runs: they go on saying so, whatever is sent to it then.
    daemon.kill(scheduler(daemon), signal.SIGSTOP)
    source, run = enqueue(daemon, "stopped", seed=2)
    restarted(daemon, starts=3, why="and a probe failed")
    assert list((daemon.work / "logs").glob("server-0.hang-*.txt"))
    finished(daemon, source, run, {})

    source, run = enqueue(daemon, "drained", seed=3)
    some_rows(daemon, run)
    assert daemon.stop() == 0, daemon.logs()
    assert not daemon.survivors()
    assert all(port_free(port) for port in range(daemon.base_port, daemon.base_port + PORTS_PER_SERVER))


def server(daemon: Daemon) -> dict[str, Any]:
    """What status says of the server; nothing while there is no daemon."""
    return next(iter(daemon.status()["servers"]), {})


def ready(daemon: Daemon, starts: int) -> None:
    def look() -> bool:
        now = server(daemon)
        return now.get("state") == "ready" and now["restarts"] == starts - 1

    wait_until(look, f"ready after start {starts}", seconds=300, every=1.0, failed=daemon.logs)


def scheduler(daemon: Daemon) -> psutil.Process:
    """The process that holds the model."""
    found = [process for process in daemon.all_processes() if title(process).startswith("sglang::scheduler")]
    assert len(found) == 1, daemon.survivors()
    return found[0]


def title(process: psutil.Process) -> str:
    """What a process calls itself."""
    return (process.cmdline() or [""])[0]


def enqueue(daemon: Daemon, name: str, seed: int) -> tuple[Path, str]:
    """Twenty-four prompts, which `seed` makes a run of their own."""
    source = write_prompts(daemon.folder / f"{name}.jsonl", 24)
    return source, daemon.enqueue(source, name, "--set", f"seed={seed}")


def some_rows(daemon: Daemon, run: str) -> dict[str, bytes]:
    """The rows in the spool, by id, as soon as there are some and others are in flight."""

    def look() -> dict[str, bytes]:
        rows = {}
        for spool in (daemon.work / "spool" / run).glob("*/*.rows"):
            for line in spool.read_bytes().split(b"\n")[:-1]:
                row = line.partition(b" ")[2]
                rows[json.loads(row)["id"]] = row
        return rows if len(rows) >= 3 else {}

    return wait_until(look, "three rows in the spool", failed=daemon.logs)


def restarted(daemon: Daemon, starts: int, why: str) -> None:
    """Wait until it loads again, and for no other reason than `why`."""
    wait_until(
        lambda: server(daemon).get("restarts") == starts - 1,
        f"start {starts}",
        seconds=120,
        every=1.0,
        failed=daemon.logs,
    )
    assert why in server(daemon)["last_error"]
    ready(daemon, starts)


def finished(daemon: Daemon, source: Path, run: str, kept: dict[str, bytes]) -> Seen:
    """Wait until the run is whole: each prompt one row, at its first attempt, and none made again that was kept."""

    def look() -> bool:
        return {one["id"]: one["state"] for one in daemon.status()["runs"]}[run] == "finished"

    wait_until(look, f"run {run} is finished", seconds=300, every=1.0, failed=daemon.logs)
    store = FolderParts(daemon.store)
    seen = read_parts(store, source, run)
    seen.foreign.clear()  # a real model does not repeat the prompt's mark
    assert not seen.problems(), seen.problems()
    assert {row["attempts"] for row in seen.rows.values()} == {1}
    assert len(seen.rows) == 24 and seen.verdicts.keys() <= {"ok", "length"}
    parts = {line for name in store.names() if f"/{run}/" in name for line in store.read(name).splitlines()}
    assert set(kept.values()) <= parts
    daemon.cli("verify", run)
    return seen
