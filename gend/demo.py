"""`gend demo`: the whole job, small, on this machine alone.

It types what a user would type: it writes a config.toml, enqueues 32 prompts, runs the daemon until it is idle with a
small real model on the CPU, and verifies the run. What it tells about rows it reads from the files themselves.
"""

import contextlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gend.cpu_server import BUILT_IN_MODEL, find_model
from gend.errors import NotSound, SettingsError, Unavailable
from gend.processes import port_free
from gend.records import Row, part_key
from gend.server_command import PORTS_PER_SERVER
from gend.spool import row_files
from gend.verdict import OK

PROMPTS = Path(__file__).with_name("demo_prompts.jsonl")
BATCH_SIZE = 8
SLOTS = 8
STALL_SECONDS = 180.0
"""Without a new row for so long something is wrong; a slow machine loads the model in some 20 s and then writes one
row or more every few seconds."""
LINE_SECONDS = 3.0
"""Between two lines of progress where the output is not a terminal."""


def demo(folder: Path) -> None:
    """Run the demo in `folder`, or show what is there when it ran before. Prints to stdout.

    Raises SettingsError where the model is not installed, Unavailable where the daemon failed, NotSound where the run
    is not whole. Ends the process with status 130 after ^C, once the daemon has stopped; the rows so far are kept.
    """
    find_model(BUILT_IN_MODEL)
    folder = folder.absolute()
    config = write_config(folder)
    gend = [sys.executable, "-m", "gend", "--config", str(config)]
    registered = _enqueue(gend)
    run, prompts = registered["run"], registered["prompts"]

    print(f"{prompts} prompts, SmolLM2-135M on the CPU, everything in {folder}")
    if len(_parts(folder, run)) == registered["batches"]:
        print("The demo was run here before and is complete: nothing to generate.")
    else:
        _generate(gend, folder, run, prompts)

    print(flush=True)
    if subprocess.run([*gend, "verify", run]).returncode:
        raise NotSound(f"run {run} is not sound: see above, and {folder / 'demo.log'}")
    _show(folder, run)


def write_config(folder: Path) -> Path:
    """The demo's config.toml. One that is there stays as it is: somebody may have tried other settings."""
    path = folder / "config.toml"
    if path.exists():
        return path
    text = f"""\
# Written by `gend demo`. All keys, with their defaults and what they mean, stand in gend's own config.toml.
[model]
path = "{BUILT_IN_MODEL}"

[servers]
gpus = []
count = 1
command = [{_toml(sys.executable)}, "-m", "gend.cpu_server"]   # in place of SGLang
flags = {{ max-running-requests = {SLOTS} }}
base_port = {_free_port()}

[redis]
url = ""    # gend's own Valkey

[store]
url = {_toml((folder / "store").as_uri())}

[work]
folder = {_toml(str(folder / "work"))}
batch_size = {BATCH_SIZE}
in_flight = {SLOTS}

[sampling]
temperature = 0.7
max_tokens = 160
thinking = false

[cost]
dollars_per_hour = 0.0
"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
    return path


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a basic string is written alike in both


def _free_port() -> int:
    """The first of a server's block of ports, all free, below those that the kernel hands out to clients."""
    for port in range(30000, 32000, PORTS_PER_SERVER):
        if all(port_free(port + offset) for offset in range(PORTS_PER_SERVER)):
            return port
    raise SettingsError("no free ports between 30000 and 32000: end what listens there")


def _enqueue(gend: list[str]) -> dict[str, Any]:
    """Register the prompts, which adds nothing the second time. Returns what was registered."""
    command = [*gend, "enqueue", str(PROMPTS), "--name", "demo", "--json"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if answer.returncode:
        raise SystemExit(answer.returncode)  # it said itself what is wrong
    return dict(json.loads(answer.stdout))


def _generate(gend: list[str], folder: Path, run: str, total: int) -> None:
    """Run the daemon until it is idle, showing how many rows there are."""
    log = folder / "demo.log"
    with open(log, "ab") as out:
        # In a session of its own, so that ^C reaches only us and we can end it in order.
        daemon = subprocess.Popen(
            [*gend, "up", "--until-idle"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with _interrupt_on_hangup(), _progress(total) as show:
            _watch(daemon, lambda: _count(folder, run), show)
    except KeyboardInterrupt:
        print("Stopping: rows in flight may end, all are kept, and the same command goes on from there ...", flush=True)
        _stop(daemon)
        raise SystemExit(130) from None
    except BaseException:
        _stop(daemon)
        _print_tail(log)
        raise
    if daemon.returncode:
        _print_tail(log)
        raise Unavailable(f"the daemon ended with status {daemon.returncode}: see above, and {log}")


def _watch(daemon: "subprocess.Popen[bytes]", count: Callable[[], int], show: Callable[[int], None]) -> None:
    """Show the count until the daemon has ended. Raises Unavailable when it stands still."""
    rows, changed = 0, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout=0.25)
        now = count()
        if now != rows:
            rows, changed = now, time.monotonic()
        show(rows)
        if daemon.returncode is not None:
            return
        if time.monotonic() - changed > STALL_SECONDS:
            raise Unavailable(f"no new row for {STALL_SECONDS:.0f} s: see the daemon's last lines above")


def _stop(daemon: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the daemon needs its time to end what it started
    daemon.terminate()
    daemon.wait()


@contextlib.contextmanager
def _interrupt_on_hangup() -> Iterator[None]:
    """A closed terminal or a TERM is to us what ^C is: the daemon must not stay behind."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line every few seconds."""

    def phase(rows: int) -> str:
        return "starting" if not rows else "generating" if rows < total else "finishing"

    console = Console()
    if console.is_terminal:
        columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task(phase(0), total=total)
            yield lambda rows: progress.update(task, completed=rows, description=phase(rows))
        return

    started, printed = time.monotonic(), -LINE_SECONDS

    def line(rows: int) -> None:
        nonlocal printed
        seconds = time.monotonic() - started
        if seconds - printed >= LINE_SECONDS:
            printed = seconds
            print(f"{phase(rows)}: {rows}/{total} rows, {seconds:.0f} s", flush=True)

    yield line


def _count(folder: Path, run: str) -> int:
    """Rows there are by now: those in parts, and the spool's of batches without a part."""
    parts = {path.stem: path for path in _parts(folder, run)}
    spooled = row_files(folder / "work", run)
    counts: Counter[str] = Counter()
    for path in [*parts.values(), *(path for path in spooled if path.parent.name not in parts)]:
        with contextlib.suppress(FileNotFoundError):  # a spool whose part is written this moment
            counts[path.stem if path.suffix == ".jsonl" else path.parent.name] += path.read_bytes().count(b"\n")
    # A batch that was given back may hold a row twice in its spool, until its part holds it once.
    return sum(min(number, BATCH_SIZE) for number in counts.values())


def _parts(folder: Path, run: str) -> list[Path]:
    return sorted((folder / "store" / part_key(run, 0)).parent.glob("*.jsonl"))


def _show(folder: Path, run: str) -> None:
    decode = msgspec.json.Decoder(Row).decode
    rows = [decode(line) for path in _parts(folder, run) for line in path.read_bytes().splitlines()]
    for row in _three(rows):
        print(f"\n{row.id}, verdict {row.verdict}, {row.usage.completion_tokens} tokens")
        for message in row.messages:
            _print_text("prompt" if message["role"] == "user" else message["role"], _text(message.get("content")))
        _print_text("reply", row.error or row.content or _text(row.tool_calls))

    print("\nThe parts, one row for each prompt:")
    for path in _parts(folder, run):
        print(f"  {path}")
    print("\nWhat to type next:")
    if not shutil.which("gend"):
        print(f"  . {shlex.quote(str(Path(sys.executable).with_name('activate')))}")
    print(f"""\
  export GEND_CONFIG={shlex.quote(str(folder / "config.toml"))}
  gend status
  gend verify {run}
  gend export {run} --out {shlex.quote(str(folder / "export"))}
  gend enqueue YOUR_PROMPTS.jsonl && gend up --until-idle
On a GPU box: see README.md.""")


def _three(rows: list[Row]) -> list[Row]:
    """Three rows of different kinds (the kind begins the id), among them one that is not ok, if there is one."""
    chosen: dict[str, Row] = {}
    bad = [row for row in rows if row.verdict != OK]
    for row in [*bad[:1], *(row for row in rows if row.verdict == OK), *bad]:
        chosen.setdefault(row.id.rpartition("-")[0], row)
    return list(chosen.values())[:3][::-1]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _print_text(label: str, text: str) -> None:
    """At most six lines of `text`, indented, the first with its label."""
    lines = [piece for line in text.splitlines() for piece in textwrap.wrap(line, 100) or [""]]
    for line in lines[:6] + ["..."] * (len(lines) > 6):
        print(f"  {label:10}{line}".rstrip())
        label = ""


def _print_tail(log: Path) -> None:
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]:
        print(f"  {line}", file=sys.stderr)
