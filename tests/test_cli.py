"""The command line as people use it, in processes of its own: what it says, how it ends, what it leaves behind."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness.daemon import Daemon
from harness.processes import wait_until
from harness.reader import FolderParts, S3Parts, assert_whole, write_prompts
from harness.services import BUCKET, Ports, SeaweedFS

Make = Callable[..., Daemon]


def the_error(done: "subprocess.CompletedProcess[str]") -> str:
    """What a command that failed said: nothing on stdout, no traceback, one line `gend: ...` (and a log's tail)."""
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("gend: ")]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("gend: ")


def up(daemon: Daemon, code: int) -> str:
    """`gend up` that must end by itself with `code`; gives what it said."""
    return the_error(daemon.cli("up", code=code))


def assert_nothing_left(daemon: Daemon, ledger: bool = True) -> None:
    """No process, no object in the store, and (where there is a ledger to ask) no run in it."""
    assert daemon.survivors() == []
    assert FolderParts(daemon.store).names() == []
    if ledger:
        status = daemon.status()
        assert (status["daemon"], status["runs"]) == (False, [])
        assert daemon.survivors() == [], "gend status left its Valkey running"


# -- bad input -------------------------------------------------------------------------------------------------------

NO_MESSAGES = '{"id": "a", "text": "Hello"}\n'
BAD_PROMPTS = {
    "missing": (None, (), "prompts.jsonl: no such file"),
    "empty": ("", (), "no prompt was accepted (0 lines rejected)"),
    "not JSON": ("Dear all,\nplease answer.\n", (), "no prompt was accepted (2 lines rejected, the first: "),
    "no messages": (NO_MESSAGES, (), "prompts.jsonl"),
    "no such field": (NO_MESSAGES, ("--prompt-field", "txt"), "no prompt was accepted (1 lines rejected, the first: "),
    "strict": ('{"messages": [{"role": "user", "content": "Hi"}]}\n' + NO_MESSAGES, ("--strict",), "prompts.jsonl:2: "),
    "no template": (NO_MESSAGES, ("--template", "none.txt"), "--template none.txt: cannot be read: No such file"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_prompt_file_that_is_no_use_registers_nothing(name: str, make_daemon: Make) -> None:
    text, options, message = BAD_PROMPTS[name]
    daemon = make_daemon(servers=1)
    if text is not None:
        (daemon.folder / "prompts.jsonl").write_text(text)
    assert message in the_error(daemon.cli("enqueue", "prompts.jsonl", *options, code=2))
    assert_nothing_left(daemon)


@pytest.mark.parametrize("command", [("enqueue", "prompts.jsonl"), ("status",), ("up",)], ids=lambda words: words[0])
def test_redis_that_is_not_there(command: tuple[str, ...], make_daemon: Make, ports: Ports) -> None:
    redis = {"url": f"redis://127.0.0.1:{ports.block(1)}", "patience_seconds": 0.1}
    daemon = make_daemon(servers=1, config={"redis": redis})
    write_prompts(daemon.folder / "prompts.jsonl", 3)
    said = the_error(daemon.cli(*command, code=3))
    assert "Redis does not answer: " in said
    assert said.endswith("See that it runs, and check redis.url.")
    assert_nothing_left(daemon, ledger=False)


BAD_STORES: dict[str, tuple[str, dict[str, str], int, str]] = {
    # the bucket, changes to the environment, exit code, advice
    "no such bucket": ("nowhere", {}, 2, "the bucket does not exist: create it, or change store.url"),
    "wrong key": (BUCKET, {"AWS_ACCESS_KEY_ID": "nobody"}, 2, "check AWS_ACCESS_KEY_ID"),
    "wrong secret": (BUCKET, {"AWS_SECRET_ACCESS_KEY": "wrong"}, 2, "check AWS_SECRET_ACCESS_KEY"),
    "no endpoint": ("", {}, 3, "Could not connect to the endpoint URL"),
}


@pytest.mark.parametrize("name", BAD_STORES)
def test_a_store_that_is_no_use(name: str, make_daemon: Make, seaweed: SeaweedFS, prefix: str, ports: Ports) -> None:
    bucket, changes, code, advice = BAD_STORES[name]
    daemon = make_daemon(
        servers=1,
        store=f"s3://{bucket or BUCKET}/{prefix}",
        endpoint=seaweed.endpoint if bucket else f"http://127.0.0.1:{ports.block(1)}",
        config={"store": {"patience_seconds": 0.1, "region": "us-east-1"}},
        environment={**seaweed.variables(), **changes},
    )
    write_prompts(daemon.folder / "prompts.jsonl", 3)
    commands = [("enqueue", "prompts.jsonl"), ("up",)] if code == 3 else [("enqueue", "prompts.jsonl")]
    for command in commands:
        said = the_error(daemon.cli(*command, code=code))
        assert f"store s3://{bucket or BUCKET}/{prefix}: " in said
        assert advice in said
    assert_nothing_left(daemon)
    assert S3Parts(seaweed.client(), BUCKET, prefix).names() == []


def test_a_port_that_is_taken(make_daemon: Make) -> None:
    daemon = make_daemon(servers=1)
    with socket.create_server(("127.0.0.1", daemon.base_port + 3)):
        said = up(daemon, code=2)
    assert said.startswith(f"no server can start: port {daemon.base_port + 3} is held by pid ")
    assert said.endswith("; stop that process, or change servers.base_port")
    assert_nothing_left(daemon)


def test_a_model_that_is_missing(make_daemon: Make) -> None:
    if find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed (extra demo), so no real engine can look for its model")
    command = [sys.executable, "-m", "gend.cpu_server"]
    daemon = make_daemon(servers=1, config={"model": {"path": "/no/x.gguf"}, "servers": {"command": command}})
    done = daemon.cli("up", code=3)
    assert the_error(done).startswith("no server ever started; server-0 ended with 2")
    assert "cpu_server: no model file /no/x.gguf" in done.stderr, "the tail of the engine's own log"
    assert "check model.path, servers.command, servers.flags" in done.stderr
    assert_nothing_left(daemon)


def test_an_engine_that_ends_at_once(make_daemon: Make) -> None:
    daemon = make_daemon(servers=2)
    daemon.mode("exit", code=7)
    done = daemon.cli("up", code=3)
    assert the_error(done).startswith("no server ever started; server-0 ended with 7")
    assert str(daemon.work / "logs" / "server-0.log") in done.stderr
    assert_nothing_left(daemon)


def test_an_engine_that_is_not_installed(make_daemon: Make) -> None:
    daemon = make_daemon(servers=1, config={"servers": {"command": ["/no/such/engine"]}})
    assert (
        up(daemon, code=2) == "cannot start server-0: /no/such/engine: No such file or directory; check servers.command"
    )
    assert_nothing_left(daemon)


def test_a_run_that_is_not_there(make_daemon: Make) -> None:
    daemon = make_daemon(servers=1)
    assert the_error(daemon.cli("verify", "mine", code=2)).startswith("no run 'mine' in file://")
    assert_nothing_left(daemon)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_command_that_is_ended_lets_go_of_what_it_holds(number: int, make_daemon: Make) -> None:
    daemon = make_daemon(servers=1)
    command = [sys.executable, "-m", "gend", "--config", daemon.config, "enqueue", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, cwd=daemon.folder, env=daemon.environment,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # as from a terminal, also where we run under nohup
    ) as enqueue:  # fmt: skip
        wait_until(lambda: list(daemon.work.glob("sets/.new-*")), "it reads prompts")
        enqueue.send_signal(number)
        assert enqueue.wait(60) == 128 + number
    assert daemon.survivors() == []
    assert list(daemon.work.glob("sets/.new-*")) == []
    assert_nothing_left(daemon)


# -- good input ------------------------------------------------------------------------------------------------------


def test_enqueued_while_the_daemon_is_down(make_daemon: Make) -> None:
    """Bad lines are counted, the limit holds, the same thing twice adds nothing, and `up` finishes it."""
    daemon = make_daemon(servers=1)
    source = write_prompts(daemon.folder / "prompts.jsonl", 20)
    lines = source.read_text().splitlines(keepends=True)
    (daemon.folder / "mixed.jsonl").write_text("".join([*lines[:9], NO_MESSAGES, "no JSON\n", *lines[9:]]))

    first = daemon.cli("enqueue", "mixed.jsonl", "--limit", "10").stdout
    assert ": 10 prompts in 2 batches\n2 of 12 lines were rejected, each with its reason: " in first
    rejects = [json.loads(line) for line in Path(first.split("reason: ")[1].splitlines()[0]).read_text().splitlines()]
    assert [reject["line"] for reject in rejects] == [10, 11]
    assert all(reject["reason"] for reject in rejects)
    run = first.split()[1].rstrip(":")

    objects = FolderParts(daemon.store).names()
    again = daemon.cli("enqueue", "mixed.jsonl", "--limit", "10", "--name", "another").stdout
    assert f"run {run} is there already with these 10 prompts: nothing was added\n" in again
    assert FolderParts(daemon.store).names() == objects

    [before] = daemon.status()["runs"]
    assert (before["id"], before["prompts"], before["rejected"], before["rows_done"]) == (run, 10, 2, 0)
    assert daemon.cli("verify", "mixed", code=1).stdout.endswith("\n")
    daemon.run_until_idle()
    ten = daemon.folder / "ten.jsonl"
    ten.write_text("".join(lines[:10]))
    assert_whole(FolderParts(daemon.store), ten, run)
    daemon.cli("verify", "mixed")

    status = daemon.status()
    [after] = status["runs"]
    assert (status["daemon"], after["state"], after["rows_done"], after["verdicts"]) == (
        False,
        "finished",
        10,
        {"ok": 10},
    )
    shown = daemon.cli("status").stdout
    assert "daemon is down" in shown
    assert "!" not in shown, "nothing is wrong"
    assert daemon.survivors() == []


def test_enqueued_while_the_daemon_runs(make_daemon: Make) -> None:
    """Two runs of the same prompts with other sampling live side by side; a second daemon is refused."""
    daemon = make_daemon(servers=2).start()
    source = write_prompts(daemon.folder / "prompts.jsonl", 20)
    wait_until(lambda: daemon.status()["daemon"], "the daemon says that it is there", failed=daemon.logs)
    runs = [
        daemon.enqueue(source, "warm"),
        daemon.enqueue(source, "cold", "--set", "temperature=0.2", "--priority", "high"),
    ]

    def all_finished() -> dict[str, Any] | None:
        states = {run["id"]: run for run in daemon.status()["runs"]}
        return states if [states[run]["state"] for run in runs] == ["finished"] * 2 else None

    states = wait_until(all_finished, "both runs are finished", every=0.2, failed=daemon.logs)
    assert [states[run]["verdicts"] for run in runs] == [{"ok": 20}] * 2
    assert [server["state"] for server in daemon.status()["servers"]] == ["ready"] * 2
    assert f"a gend daemon runs already with folder {daemon.work}: pid {daemon.supervisor.pid}" in up(daemon, code=2)

    assert daemon.stop() == 0
    assert daemon.survivors() == []
    for run in runs:
        assert_whole(FolderParts(daemon.store), source, run)
        daemon.cli("verify", run)
    seeds = [{json.loads(line)["seed"] for line in body.splitlines()} for body in map(FolderParts(daemon.store).read, (
        f"runs/{run}/parts/00000000.jsonl" for run in runs))]  # fmt: skip
    assert seeds[0] == seeds[1], "a seed is the prompt's own, whatever the other settings"


def test_verify_does_not_believe_the_ledger(make_daemon: Make) -> None:
    daemon = make_daemon(servers=1)
    run = daemon.enqueue(write_prompts(daemon.folder / "prompts.jsonl", 20))
    daemon.run_until_idle()
    parts = daemon.store / "runs" / run / "parts"
    whole = (parts / "00000001.jsonl").read_bytes()
    for damaged in (
        None,
        whole[:-1],
        whole[: whole.index(b"\n") + 1],
        whole + whole,
        whole.replace(b'"ok"', b'"oh"', 1),
    ):
        if damaged is None:
            (parts / "00000001.jsonl").unlink()
        else:
            (parts / "00000001.jsonl").write_bytes(damaged)
        report = json.loads(daemon.cli("verify", run, "--json", code=1).stdout)
        assert not report["sound"]
        assert "00000001.jsonl" in report["faults"][0]
    (parts / "00000001.jsonl").write_bytes(whole)
    daemon.cli("verify", run)
    shutil.copy(parts / "00000001.jsonl", parts / "00000009.jsonl")
    daemon.cli("verify", run, code=1)
