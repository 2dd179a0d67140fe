"""What `gend status`, `gend logs` and `gend rows` say: rates, time, dollars, warnings; on any terminal, and on none."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from harness import made_ledger
from harness.made_ledger import child, worker
from harness.made_runs import add_run, prompts
from harness.processes import wait_until
from harness.services import Valkey

from gend import logs, rows, screen
from gend.cli import main
from gend.config import Settings, settings_from
from gend.errors import SettingsError
from gend.ledger import Control, Ledger
from gend.records import Batch, Row, Usage
from gend.spool import Spool
from gend.status import read_status
from gend.store import FolderStore

ESCAPE = "\x1b"


@pytest.fixture
def ledger(valkey: Valkey) -> Ledger:
    return Ledger(valkey.url)


@pytest.fixture
def settings(folder: Path) -> Settings:
    return settings_from({"work": {"folder": str(folder)}, "store": {"url": f"file://{folder}/store"}}, "test")


def gend(config: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["--config", str(config), *words])


@pytest.fixture
def config(folder: Path, valkey: Valkey) -> Path:
    path = folder / "config.toml"
    path.write_text(
        f'[store]\nurl = "file://{folder}/store"\n[work]\nfolder = "{folder}"\n[redis]\nurl = "{valkey.url}"\n'
    )
    return path


# -- what it says ----------------------------------------------------------------------------------------------------


def test_a_steady_run_is_told_with_its_rate_its_end_and_its_cost(ledger: Ledger, settings: Settings):
    run = made_ledger.fill(ledger, minutes=300)
    status = read_status(ledger, settings)

    assert re.match(r"running, 8 of 8 servers, done (\w{3} )?\d\d:\d\d, \$220 of about \$8\d\d$", status.headline)
    # 6 parts of 128 rows a minute, 2,500 tokens a row
    assert status.rows_per_second == pytest.approx(12.8, rel=0.05)
    assert status.tokens_per_second == pytest.approx(32_000, rel=0.05)
    assert status.estimate is not None
    assert status.estimate.seconds == pytest.approx((914_000 - 230_400) / 12.8, rel=0.05)
    assert status.estimate.low_seconds <= status.estimate.seconds <= status.estimate.high_seconds
    assert status.cost is not None and status.cost.to_go is not None and status.cost.per_million_tokens is not None
    assert status.cost.spent == pytest.approx(44 * 5, rel=0.01)
    assert status.cost.to_go == pytest.approx(status.estimate.seconds / 3600 * 44, rel=0.01)
    assert status.cost.per_million_tokens == pytest.approx(44 / 3600 / 32_000 * 1e6, rel=0.05)
    [one] = status.runs
    assert (one.id, one.state, one.rows_done, one.rejected) == (run.id, "active", 230_400, 3)
    assert one.active_seconds == pytest.approx(5 * 3600, rel=0.01)
    assert [server.idle_share for server in status.servers] == [pytest.approx(0.08, abs=0.05)] * 8
    assert status.warnings == []


def sample(at: float, rows: int, in_flight: int = 8) -> dict[str, Any]:
    server = {"in_flight": in_flight, "limit": 8, "rows": rows, "completion_tokens": rows * 10}
    return {"at": at, "runs": {"r": {"rows": rows, "completion_tokens": rows * 10}}, "servers": {"0": server}}


def test_a_worker_that_began_anew_and_a_night_with_the_daemon_down_leave_the_rate_as_it_is(
    ledger: Ledger, settings: Settings
):
    now = time.time()
    for ago, made in ((30_000, 500), (40, 1000), (30, 1020), (20, 20), (10, 40)):
        ledger.sample(sample(now - ago, made), 10.0)
    made_ledger.publish(ledger, [child("server-0"), child("worker-0")], [worker(0, 60)])
    # 20 rows in each 10 s: before the worker's end, after it, and up to now
    assert read_status(ledger, settings).rows_per_second == pytest.approx(2.0, rel=0.1)


def test_what_is_wrong_comes_first_the_worst_before_the_rest(ledger: Ledger, settings: Settings):
    run = made_ledger.fill(ledger, servers=3, minutes=20)
    away = {"store": {"since": time.time() - 120, "why": "Could not connect to \x1b[31mendpoint"}}
    blocked = child("server-1", "blocked", 240, last_error="port 30010 is held by pid 812 (python)")
    failing = child("worker-2", "backoff", 60, last_error="ended with 1")
    for name in ledger.redis.scan_iter("gend:worker:*"):
        ledger.redis.delete(name)
    made_ledger.publish(
        ledger,
        [child("server-0"), child("worker-0"), blocked, child("worker-1", "down"), child("server-2"), failing],
        [worker(0, 100, outages=away), worker(2, 100, outages=away)],
    )
    ledger.set_control(run.id, Control(state="paused", reason="alarm, server 0: 60 of the last 64 rows are bad"))
    status = read_status(ledger, settings)

    store, paused, held, no_worker = status.warnings
    assert store.startswith("store is away since ") and "(2 min)" in store
    assert "alarm, server 0" in paused
    assert held.startswith("server 1 blocked since ") and "pid 812" in held
    assert "server 2 has no worker" in no_worker
    assert [(outage.what, outage.waiting) for outage in status.outages] == [("store", 2)]
    lines = screen.render(status, 80, colour=False).splitlines()
    assert lines[1].startswith("! store is away")


def test_nobody_who_samples_is_a_warning(ledger: Ledger, settings: Settings):
    made_ledger.fill(ledger, minutes=20)
    ledger.redis.delete("gend:history")
    ledger.sample(sample(time.time() - 300, 5), 10.0)
    assert any("gend logs loader" in warning for warning in read_status(ledger, settings).warnings)


def test_bad_rows_are_a_warning_that_says_how_to_look_at_them(ledger: Ledger, settings: Settings):
    run = made_ledger.fill(ledger, minutes=20)
    ledger.redis.delete(f"gend:run:{run.id}:counts")
    ledger.redis.hset(f"gend:run:{run.id}:counts", mapping={"verdict:ok": 130, "verdict:empty": 870})
    [warning] = read_status(ledger, settings).warnings
    assert "87.0%" in warning and f"gend rows {run.id}" in warning


SCHEMA = {
    "Status": "schema at headline warnings daemon draining servers runs rows_per_second tokens_per_second estimate "
    "cost store redis outages page",
    "ServerStatus": "number state since gpus in_flight limit waiting limited_by open_batches rows prompt_tokens "
    "completion_tokens rows_per_second tokens_per_second idle_share restarts last_error worker_state "
    "memory_used_bytes memory_total_bytes celsius",
    "RunStatus": "id name state priority prompts rejected batches batches_done batches_leased rows_done verdicts "
    "completion_tokens rows_per_second tokens_per_second eta_seconds active_seconds reason",
    "Estimate": "seconds low_seconds high_seconds",
    "Cost": "dollars_per_hour spent to_go to_go_low to_go_high per_million_tokens per_million_tokens_so_far",
    "StoreStatus": "url last_part_at spool_batches spool_bytes",
    "RedisStatus": "own rebuilt answer_seconds memory_bytes",
    "Outage": "what since why waiting",
}


def test_the_json_has_the_fields_that_scripts_rely_on(ledger: Ledger, settings: Settings):
    """More may come; if one of these goes or changes its meaning, raise Status.schema."""
    made_ledger.fill(ledger, minutes=20)
    away = {"disk": {"since": 1.0, "why": "full"}}
    made_ledger.publish(ledger, [child("server-0"), child("worker-0")], [worker(0, 5, outages=away)])
    told = json.loads(msgspec.json.encode(read_status(ledger, settings)))
    found = {
        "Status": told, "ServerStatus": told["servers"][0], "RunStatus": told["runs"][0], "Estimate": told["estimate"],
        "Cost": told["cost"], "StoreStatus": told["store"], "RedisStatus": told["redis"], "Outage": told["outages"][0],
    }  # fmt: skip
    assert told["schema"] == 1
    gone = {name: set(fields.split()) - set(found[name]) for name, fields in SCHEMA.items()}
    assert not any(gone.values()), gone


# -- how it looks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 200])
def test_lines_fit_the_screen_and_its_most_important_columns_stay(ledger: Ledger, settings: Settings, width: int):
    made_ledger.fill(ledger, servers=8, minutes=60)
    gpus = [{"index": i, "used_bytes": 170 << 30, "total_bytes": 180 << 30, "celsius": 71} for i in range(8)]
    blocked = child("server-3", "blocked", 240, last_error="a very long error " * 30, restarts=12)
    children = [blocked if n == 3 else child(f"server-{n}") for n in range(8)]
    made_ledger.publish(ledger, children, [worker(n, 123_456) for n in range(8)], gpus=gpus)
    lines = screen.render(read_status(ledger, settings), width, colour=False).splitlines()

    assert max(map(len, lines)) <= width
    assert len(lines) <= 30
    head = next(line for line in lines if line.startswith("gpu"))
    assert {"state", "running", "tok/s", "idle"} <= set(head.split())
    assert ("temp" in head) == (width >= 80)
    text = "\n".join(lines)
    assert ESCAPE not in text
    assert "123,456" in text


def test_ten_million_rows_cost_the_status_no_more_than_ten(ledger: Ledger, settings: Settings):
    """As many commands, and answers about as long."""

    def asked() -> tuple[int, int]:
        before = ledger.redis.info("stats")
        read_status(ledger, settings)
        after = ledger.redis.info("stats")
        return tuple(after[name] - before[name] for name in ("total_commands_processed", "total_net_output_bytes"))  # type: ignore[return-value]

    made_ledger.fill(ledger, prompts=1000, minutes=1)
    few = asked()
    run = made_ledger.made_run(10_000_000, name="large")
    ledger.add_run(run, Control())
    ledger.add_done(run.id, set(range(run.batches - 10)))
    many = asked()
    assert many[0] <= few[0] + 5
    assert many[1] <= few[1] + 3000


def test_status_waits_for_no_heavy_import(config: Path):
    code = "import sys; from gend.cli import main; main(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", str(config), "status"], capture_output=True, text=True, check=True
    )
    slow = {"aiohttp", "boto3", "botocore", "jinja2", "prometheus_client", "psutil", "pyarrow", "pynvml", "rich", "rq"}
    assert slow & set(done.stdout.split()) == set()


class Terminal:
    """A command on a terminal of its own, and everything that it wrote there."""

    def __init__(self, command: list[str], columns: int, **environment: str):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
        )  # fmt: skip
        self.text = ""

    def read(self) -> str:
        while select.select([self.ours], [], [], 0.02)[0]:
            self.text += os.read(self.ours, 65536).decode()
        return self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def watching(config: Path) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "gend", "--config", str(config), "status", "--watch", "--every", "0.2"]
    with contextlib.closing(Terminal(command, 60)) as terminal:
        yield terminal


def test_watch_redraws_in_place_and_q_gives_the_terminal_back(watching: Terminal, ledger: Ledger):
    wait_until(lambda: "no run yet" in watching.read(), "the first picture", failed=watching.read)
    made_ledger.fill(ledger, minutes=20)
    wait_until(lambda: "running, 8 of 8 servers" in watching.read(), "the new state", failed=watching.read)
    assert watching.text.startswith(f"{ESCAPE}[?1049h"), "it has a screen of its own"
    assert f"{ESCAPE}[2J" not in watching.text, "the screen is never blank in between"
    os.write(watching.ours, b"q")
    assert watching.process.wait(30) == 0
    assert watching.read().endswith(f"{ESCAPE}[?7h{ESCAPE}[?25h{ESCAPE}[?1049l")
    assert termios.tcgetattr(watching.theirs) == watching.before


def test_no_color_is_honoured_on_a_terminal(config: Path, ledger: Ledger):
    made_ledger.fill(ledger, minutes=20)
    command = [sys.executable, "-m", "gend", "--config", str(config), "status"]
    shown = {}
    for name, environment in (("plain", {"NO_COLOR": "1"}), ("coloured", {"NO_COLOR": ""})):
        with contextlib.closing(Terminal(command, 80, **environment)) as terminal:
            wait_until(
                lambda terminal=terminal: "own Valkey" in terminal.read() or "Redis answers" in terminal.text, name
            )
            shown[name] = terminal.text
    assert ESCAPE not in shown["plain"]
    assert ESCAPE in shown["coloured"]


def test_watch_into_a_pipe_is_plain_text(config: Path):
    command = [sys.executable, "-m", "gend", "--config", str(config), "status", "--watch", "--every", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(12)]  # more than one picture
        process.terminate()
    assert sum("daemon is down" in line for line in seen) > 1
    assert ESCAPE not in "".join(seen)


# -- what the ledger keeps -------------------------------------------------------------------------------------------


def test_events_and_history_are_bounded_and_thinned_out(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gend.ledger.EVENTS", 20)
    for number in range(25):
        ledger.event("server", f"event {number}")
    assert [event.text for event in ledger.events(10_000)] == [f"event {number}" for number in range(24, 4, -1)]

    monkeypatch.setattr("gend.ledger.HISTORY_SAMPLES", 36)
    start = time.time() - 720
    for number in range(72):
        ledger.sample(sample(start + 10 * number, number), 10.0)
    assert len(ledger.history(10_000)) == 36
    assert len(ledger.long_history()) == 12
    assert ledger.up_seconds() == {"daemon": 720.0, "run:r": 720.0}


# -- logs ------------------------------------------------------------------------------------------------------------


def test_logs_by_number_or_name_and_what_comes_even_after_the_daemon_cut_them(folder: Path):
    home = folder / "logs"
    home.mkdir()
    (home / "server-0.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (home / "worker-0.log").write_text("")
    assert logs.chosen(folder, None) == ["server-0", "worker-0"]
    assert logs.chosen(folder, "0") == ["server-0"]
    assert logs.last_lines(folder, "server-0", 2) == ["line 98", "line 99"]
    with pytest.raises(SettingsError, match="there: server-0, worker-0"):
        logs.chosen(folder, "7")

    found: list[tuple[str, str]] = []

    def collect() -> None:
        for line in logs.follow(folder, ["server-0", "worker-0"]):
            found.append(line)
            if line[1] == "end":
                return

    follower = threading.Thread(target=collect, daemon=True)
    follower.start()
    with open(home / "worker-0.log", "a") as log:
        wait_until(lambda: log.write("begun\n") and not log.flush() and found, "the follower follows")
    os.truncate(home / "server-0.log", 0)
    with open(home / "server-0.log", "a") as log:
        log.write("half ")
        log.flush()
        wait_until(lambda: log.write("half ") and not log.flush() and time.sleep(0.3) is None, "it was looked at")
        log.write("whole\nend\n")
    follower.join(30)
    assert found[-2:] == [("server-0", "half half whole"), ("server-0", "end")]


# -- rows ------------------------------------------------------------------------------------------------------------


def change(row: Row) -> Row:
    if row.id == "p0000003":
        row.verdict, row.content = "junk", "red \x1b[31m \x9b2J \u202e end"
        row.tool_calls = [{"function": {"name": "look_up", "arguments": '{"city": "Oslo"}'}}]
    return row


def test_rows_newest_random_by_verdict_and_by_id(folder: Path):
    store = FolderStore(folder / "store")
    run = add_run(store, prompts(20), change=change, without=[4])
    open_row = Row(id="p0000017", run=run.id, batch=4, messages=[], content="fresh", verdict="ok", usage=Usage(1, 2, 0))
    spool = Spool(folder, Batch(run=run.id, number=4, first=16, count=4), "claim")
    spool.append(msgspec.json.encode(open_row))
    spool.close()
    config = folder / "config.toml"
    config.write_text(f'[store]\nurl = "file://{folder}/store"\n[work]\nfolder = "{folder}"\n')

    def shown(*words: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in gend(config, "rows", "made", "--json", *words).stdout.splitlines()]

    assert [row["id"] for row in shown("-n", "2")] == ["p0000017", "p0000015"], "the open batch comes first"
    assert [row["id"] for row in shown("--verdict", "junk")] == ["p0000003"]
    assert [row["id"] for row in shown("--id", "p0000009")] == ["p0000009"]
    assert [row["id"] for row in shown("--id", "p0000017")] == ["p0000017"]
    assert len({row["id"] for row in shown("--random", "9")}) == 9
    for words, code, said in (
        (("--id", "p0000018"), 2, "has no row yet"),
        (("--id", "nobody"), 2, "no prompt with the id"),
        (("--verdict", "good"), 2, "unknown verdict"),
        (("--verdict", "loop"), 0, "no row with verdict loop"),
    ):
        done = gend(config, "rows", "made", *words)
        assert (done.exit_code, said in done.stderr) == (code, True), done.stderr


def test_a_row_cannot_give_orders_to_the_terminal(folder: Path):
    row = change(Row(id="p0000003", run="r", batch=0, messages=[{"role": "user\x1b[2J", "content": "hi"}], verdict="ok",
                     reasoning_content="so\x07", content=None))  # fmt: skip
    text = rows.show(row, 80, colour=False)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "red \\x1b[31m \\x9b2J \\u202e end" in text
    assert "look_up" in text and "Oslo" in text
    coloured = rows.show(row, 80, colour=True)
    assert f"{ESCAPE}[2mso\\x07{ESCAPE}[0m" in coloured, "the thought is dimmed"
    assert f"{ESCAPE}[2J" not in coloured


def test_a_long_text_is_shown_by_its_two_ends(folder: Path):
    row = Row(id="p", run="r", batch=0, messages=[], verdict="ok", content="begin " + "x" * 10_000 + " end")
    short, full = (rows.show(row, 80, colour=False, full=full) for full in (False, True))
    assert "begin" in short and short.rstrip().endswith(" end") and "characters left out" in short
    assert "x" * 10_000 in full
