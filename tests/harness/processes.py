"""Finding and ending what a test started, however deep in the tree and whatever session it moved to."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

Value = TypeVar("Value")

MARKER = "GEND_TEST_ID"
"""The environment variable whose value all processes of one test share; children inherit it."""


def start(args: Sequence[str | Path], folder: Path, name: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in its own session, its output in folder/name.log; it dies when this test process does.

    setpriv sets PR_SET_PDEATHSIG and then becomes the program, so the pid is the program's own.
    """
    with open(folder / f"{name}.log", "ab") as log:
        command = ["setpriv", "--pdeathsig", options.pop("last_signal", "KILL"), *map(str, args)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **options
        )


def marked(value: str, folder: Path | None = None) -> list[psutil.Process]:
    """All live processes whose environment has the marker with this value, or that live in `folder`; no zombies.

    The folder is for those that write their title over their environment, as Valkey does.
    """
    needle = f"{MARKER}={value}".encode()
    found = []
    for pid in psutil.pids():
        try:
            at_home = folder is not None and Path(f"/proc/{pid}/cwd").readlink().is_relative_to(folder)
            if at_home or needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(pid))
        except (OSError, psutil.NoSuchProcess):  # gone meanwhile, or not ours to look at: then not ours at all
            continue
    return [process for process in found if alive(process)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def end_all(find: Callable[[], list[psutil.Process]]) -> None:
    """SIGKILL what `find` finds until it finds nothing: a child may be born while its parent is killed."""

    def none_left() -> bool:
        for process in (left := find()):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        return not left

    wait_until(none_left, "killed processes are gone", seconds=30)


def describe(process: psutil.Process) -> str:
    """One line for a failure message."""
    try:
        return f"{process.pid} (parent {process.ppid()}, {process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def wait_until(
    look: Callable[[], Value],
    what: str,
    *,
    seconds: float = 60.0,
    every: float = 0.02,
    failed: Callable[[], str] = str,
) -> Value:
    """Look until the answer is true, and give it. The deadline is a net for hangs, not a measurement.

    Raises AssertionError with `what` and `failed()`, which should say how things stand.
    """
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain for: {what}\n{failed()}")
        time.sleep(every)
    return answer


def environment(marker: str, **more: str) -> dict[str, str]:
    """This process's environment, with the marker and `more`."""
    return {**os.environ, MARKER: marker, **more}
