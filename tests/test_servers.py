"""Servers that die, hang, lie or never start, under the real `gend up`: what happens to them, and to the rows.

The fake servers can do what SGLang was seen to do. What is expected each time: every prompt has its one row, nobody
else's row is lost or made anew, and `gend status` says what happened.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from harness.daemon import REPO, Daemon
from harness.processes import alive, wait_until
from harness.reader import FolderParts, assert_whole, read_parts, read_request_log, times_finished, write_prompts

SHORT: dict[str, dict[str, Any]] = {
    "servers": {"stall_seconds": 2.0, "stop_seconds": 5.0},
    "work": {"drain_seconds": 3.0, "lease_seconds": 3.0},
}
FLAGS = ("--speed", "20", "--max-running-requests", "4")

MakeDaemon = Callable[..., Daemon]


def make(make_daemon: MakeDaemon, *flags: str, config: dict[str, dict[str, Any]] | None = None, **more: Any) -> Daemon:
    """A daemon of two servers with little patience."""
    merged = {name: {**SHORT.get(name, {}), **(config or {}).get(name, {})} for name in SHORT | (config or {})}
    return make_daemon(config=merged, server_flags=FLAGS + flags, **more)


def server(daemon: Daemon, number: int) -> dict[str, Any]:
    """What status says of a server."""
    return next((dict(shown) for shown in daemon.status()["servers"] if shown["number"] == number), {})


def finished(daemon: Daemon, source: Path) -> None:
    """Wait until every row is there, and ok."""
    store = FolderParts(daemon.store)
    wait_until(lambda: not read_parts(store, source).missing, "all rows are there", every=0.2, failed=daemon.logs)
    assert_whole(store, source)


def log_of(daemon: Daemon) -> str:
    return (daemon.folder / "up.log").read_text()


def said(daemon: Daemon, text: str, times: int = 1) -> None:
    """Wait until the daemon's log says something so often."""
    wait_until(lambda: log_of(daemon).count(text) >= times, f"the log says {text!r}", failed=daemon.logs)


def test_a_prompt_that_kills_servers_is_found_and_costs_nobody_else_a_row(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon)
    source = write_prompts(daemon.folder / "prompts.jsonl", 60, containing={33: "POISON-7"})
    daemon.mode("crash_on", containing="POISON-7")
    daemon.enqueue(source)
    daemon.run_until_idle()
    seen = assert_whole(FolderParts(daemon.store), source, verdicts={"ok": 59, "poison": 1})
    assert (seen.rows["p0000033"]["verdict"], seen.rows["p0000033"]["content"]) == ("poison", None)
    assert "alone" in seen.rows["p0000033"]["error"]
    crashes = [event for event in read_request_log(daemon.request_log) if event["event"] == "crashed"]
    print(f"{len(crashes)} crashes")
    assert 3 <= len(crashes) <= 5
    times = times_finished(daemon.request_log, source)
    # A reply that was on its way when its server died is made again, and only such a one.
    assert set(times.values()) <= {1, 2}, "rows that were there were not made again"
    assert sum(count == 2 for count in times.values()) <= len(crashes), times
    assert len(times) == 59


def test_a_server_that_hangs_is_ended_and_one_with_slow_health_is_not(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon, "--speed", "2")
    source = write_prompts(daemon.folder / "prompts.jsonl", 80)
    daemon.enqueue(source)
    daemon.mode("health_slow", server=0, seconds=25)
    daemon.start()
    wait_until(lambda: (daemon.stats(1) or {}).get("in_flight", 0) > 2, "server 1 has work", failed=daemon.logs)
    daemon.mode("hang_all", server=1)
    said(daemon, "server-1 hangs")
    daemon.mode("ok", server=1)
    finished(daemon, source)
    [dump] = (daemon.work / "logs").glob("server-1.hang-*.txt")
    assert "== pid" in dump.read_text()
    assert server(daemon, 0)["restarts"] == 0
    said(daemon, "server-1: starting -> ready", 2)
    assert (server(daemon, 1)["restarts"], set(times_finished(daemon.request_log, source).values())) == (1, {1})
    assert "no token for" in server(daemon, 1)["last_error"]


def test_a_server_without_its_scheduler_is_not_waited_for(make_daemon: MakeDaemon) -> None:
    """The leader would notice after ten minutes here; its rows are elsewhere long before."""
    daemon = make(make_daemon, "--speed", "2", "--with-scheduler-child", "--death-seconds", "600")
    source = write_prompts(daemon.folder / "prompts.jsonl", 80)
    daemon.enqueue(source)
    daemon.start()
    stats = wait_until(
        lambda: found if (found := daemon.stats(1) or {}).get("in_flight", 0) > 2 else None, "server 1 has work"
    )
    daemon.kill(psutil.Process(stats["scheduler"]))
    finished(daemon, source)
    said(daemon, "server-1: starting -> ready", 2)
    assert f"its process {stats['scheduler']} died" in server(daemon, 1)["last_error"]
    assert set(times_finished(daemon.request_log, source).values()) == {1}


def test_rows_of_a_server_that_lies_are_made_again(make_daemon: MakeDaemon) -> None:
    """One server answers other questions than it was asked, the other one says "!!!!": no such row gets into a part."""
    daemon = make(make_daemon, "--speed", "1", config={"alarm": {"action": "warn"}})
    source = write_prompts(daemon.folder / "prompts.jsonl", 64)
    daemon.enqueue(source)
    daemon.start()
    for server, mode in enumerate(("wrong", "junk")):
        wait_until(lambda n=server: (daemon.stats(n) or {}).get("finished", 0) > 4, "it has answered well so far")
        daemon.mode(mode, server=server)
    for server in (0, 1):
        said(daemon, f"server-{server}: ready -> stopping (its worker saw a wrong canary)")
        daemon.mode("ok", server=server)
    finished(daemon, source)
    assert {"wrong", "junk"} <= {event.get("mode") for event in read_request_log(daemon.request_log)}


def test_a_port_that_somebody_holds(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon)
    source = write_prompts(daemon.folder / "prompts.jsonl", 40)
    daemon.enqueue(source)
    daemon.mode("orphan", server=0)
    with socket.create_server(("127.0.0.1", daemon.port(1) + 3)):
        daemon.start()
        finished(daemon, source)
        blocked = server(daemon, 1)
        assert (blocked["state"], blocked["restarts"]) == ("blocked", 0)
        assert f"port {daemon.port(1) + 3} is held by pid {os.getpid()}" in blocked["last_error"]
    said(daemon, "server-1: starting -> ready")

    # A child of the server itself that outlives it: part of its session, so it goes too.
    [orphan] = [process for process in daemon.all_processes() if process.cmdline()[:1] == ["sglang::orphan"]]
    daemon.kill(daemon.servers()[0])
    wait_until(lambda: not alive(orphan), "the orphan is gone", failed=daemon.logs)
    said(daemon, "server-0: starting -> ready", 2)
    assert "blocked" not in log_of(daemon).split("server-0: ready -> backoff")[1]


def test_a_server_that_crashes_for_no_prompts_sake_gets_less_to_do(make_daemon: MakeDaemon) -> None:
    """More than 7 at once kill it. Nobody is to blame: after two crashes 6 of 8 are sent. A third turns MTP off."""
    config = {"servers": {"flags": {"speculative-algorithm": "NEXTN", "speculative-num-steps": 3}}}
    daemon = make(make_daemon, "--speed", "4", "--max-running-requests", "6", servers=1, config=config)
    source = write_prompts(daemon.folder / "prompts.jsonl", 60)
    daemon.enqueue(source)
    daemon.mode("crash_above", running=7)
    daemon.start()

    def note() -> str:
        return str(server(daemon, 0).get("note", ""))

    finished(daemon, source)
    assert note() == "75% of its slots after 2 crashes", "the third did not come"
    assert "--speculative-algorithm" in daemon.servers()[0].cmdline()
    daemon.kill(daemon.servers()[0])
    said(daemon, "server-0: ready -> backoff", 3)
    wait_until(lambda: note() == "56% of its slots after 3 crashes, speculative decoding off", "MTP is off", every=0.5)


def test_a_slow_start_is_not_death_and_a_killed_supervisor_costs_no_start(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon, "--load-seconds", "5")
    daemon.start()
    daemon.wait_for_processes(workers=2, servers=2)
    before = {number: process.pid for number, process in daemon.servers().items()}
    daemon.kill(daemon.supervisor)
    source = write_prompts(daemon.folder / "prompts.jsonl", 40)
    daemon.enqueue(source)
    daemon.start()
    finished(daemon, source)
    assert {number: process.pid for number, process in daemon.servers().items()} == before
    assert [server(daemon, number)["restarts"] for number in (0, 1)] == [0, 0]
    assert daemon.stop() == 0
    assert daemon.survivors() == []


def test_a_server_that_always_exits_is_nobody_elses_business(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon)
    source = write_prompts(daemon.folder / "prompts.jsonl", 40)
    daemon.mode("exit", server=1, code=3)
    daemon.enqueue(source)
    daemon.start()
    finished(daemon, source)
    said(daemon, "server-1: starting -> backoff (ended with 3: fake server: told to exit)", 2)
    assert "ended with 3: fake server: told to exit" in server(daemon, 1)["last_error"]
    assert server(daemon, 0)["restarts"] == 0
    assert "server 1" in daemon.cli("status").stdout


def test_a_run_of_stubs_is_paused_and_goes_on_when_told_to(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon, "--max-running-requests", "8")
    source = write_prompts(daemon.folder / "prompts.jsonl", 1000)
    daemon.mode("empty", share=0.87, containing="Question")  # canaries come back right
    run = daemon.enqueue(source)
    daemon.start()

    def shown() -> dict[str, Any]:
        return dict(daemon.status()["runs"][0])

    wait_until(lambda: shown()["state"] == "paused", "the alarm", every=0.5, failed=daemon.logs)
    wait_until(lambda: not any((daemon.stats(n) or {}).get("in_flight") for n in (0, 1)), "nothing is in flight")
    assert "rows are bad, alarm.bad is 0.05" in shown()["reason"], shown()
    made = len(times_finished(daemon.request_log, source))
    assert made < 300
    daemon.mode("ok")
    daemon.cli("resume", run)
    wait_until(lambda: shown()["state"] == "finished", "it goes on", every=0.5, failed=daemon.logs)
    seen = read_parts(FolderParts(daemon.store), source)
    assert not seen.problems()
    assert seen.verdicts["ok"] + seen.verdicts["empty"] == 1000
    print(f"{made} made, {seen.verdicts} after the alarm")
    assert 20 < seen.verdicts["empty"] <= made


def test_a_server_that_does_not_split_the_thought_is_never_ready(make_daemon: MakeDaemon) -> None:
    daemon = make(make_daemon, servers=1)
    daemon.mode("thought_inside")
    assert daemon.start().wait() == 3
    assert "set servers.flags.reasoning-parser for this model" in log_of(daemon)
    assert "-> ready" not in log_of(daemon).replace("loader: starting -> ready", "")


def test_a_wrong_flag_is_one_line_before_anything_starts(make_daemon: MakeDaemon, folder: Path) -> None:
    package = folder / "stub" / "sglang" / "srt"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    names = ("model-path", "host", "port", "enable-metrics", "nccl-port", "dist-init-addr", "max-running-requests")
    lines = "".join(f"    parser.add_argument('--{name}')\n" for name in names)
    (package / "server_args.py").write_text(f"def add_cli_args(parser):\n{lines}")
    command = ["python", "-m", "sglang.launch_server"]
    daemon = make_daemon(
        config={"servers": {"command": command, "flags": {"max-runing-requests": 4}}},
        environment={"PYTHONPATH": f"{folder / 'stub'}:{REPO}"},
    )
    assert daemon.start().wait() == 2
    last = log_of(daemon).splitlines()[-1]
    assert "the installed SGLang has no --max-runing-requests; did you mean max-running-requests?" in last
    assert not (daemon.work / "logs" / "server-0.log").exists()
