"""Notices: each once, also across restarts, no storm, nothing lost where a hook fails, and no secret in a log."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from harness.daemon import Daemon
from harness.services import Ports, Valkey

from gend import notices
from gend.config import Notices
from gend.ledger import Ledger
from gend.notices import Teller, matters
from gend.status import Outage, RedisStatus, RunStatus, ServerStatus, Status, StoreStatus

SECRET = "T0KEN-nobody-may-see"


class Hook:
    """A web server that takes notices, or refuses them with `status`."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}/hook/{SECRET}"
        self.port, self.status, self.got = port, 200, list[dict[str, Any]]()

    async def take(self, request: web.Request) -> web.Response:
        if self.status == 200:
            self.got.append(await request.json())
        return web.Response(status=self.status)

    @property
    def kinds(self) -> list[str]:
        return [notice["kind"] for notice in self.got]


@pytest.fixture
async def hook(ports: Ports) -> AsyncIterator[Hook]:
    made = Hook(ports.block(1))
    app = web.Application()
    app.router.add_post("/{path:.*}", made.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", made.port).start()
    yield made
    await runner.cleanup()


@pytest.fixture
def ledger(valkey: Valkey) -> Ledger:
    return Ledger(valkey.url)


def status(
    runs: Sequence[RunStatus] = (), servers: Sequence[ServerStatus] = (), outages: Sequence[Outage] = ()
) -> Status:
    """At 1e9 seconds."""
    return Status(
        at=1e9, daemon=True, draining=False, servers=list(servers), runs=list(runs), rows_per_second=0,
        tokens_per_second=0,
        estimate=None, cost=None, store=StoreStatus(url="s3://b"), outages=list(outages),
        redis=RedisStatus(own=True, rebuilt=True, answer_seconds=0, memory_bytes=0),
    )  # fmt: skip


def run(state: str, name: str = "a", **more: Any) -> RunStatus:
    values = {"verdicts": {"ok": 99, "loop": 1}, "active_seconds": 5.0, **more}
    return RunStatus(
        id=name, name=name, state=state, priority="normal", prompts=100, rejected=0, batches=1, batches_done=1,
        batches_leased=0, rows_done=100, completion_tokens=1, **values,
    )  # fmt: skip


def server(state: str, since: float) -> ServerStatus:
    return ServerStatus(number=3, state=state, since=since, gpus=[3], last_error="port 30030 is held")


def teller(hooks: Notices, ledger: Ledger) -> Teller:
    return Teller(hooks, ledger, lambda call, *args: asyncio.get_running_loop().run_in_executor(None, call, *args))


# -- what is worth a notice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "kinds"),
    [
        (status(runs=[run("active"), run("cancelled", "b")]), []),
        (status(runs=[run("finished")]), ["finished"]),
        (status(runs=[run("finished", active_seconds=None)]), []),  # found whole in the store: old news
        (status(runs=[run("paused", reason="paused by hand")]), []),
        (status(runs=[run("paused", reason="alarm, server 0: 60 of 64 rows are bad")]), ["paused"]),
        (status(servers=[server("blocked", 1e9 - 5)]), []),  # memory of the last process, gone in a moment
        (status(servers=[server("blocked", 1e9 - 60)]), ["blocked"]),
        (status(servers=[server("ready", 1e9 - 60)]), []),
        (status(outages=[Outage(what="store", since=1e9 - 60, why="refused")]), ["store"]),
        (status(outages=[Outage(what="store", since=1e9 - 5, why="refused")]), []),
    ],
)
def test_what_is_worth_a_notice(now: Status, kinds: list[str]):
    assert [kind for kind, _ in matters(now).values()] == kinds


# -- telling ---------------------------------------------------------------------------------------------------------


async def test_a_matter_is_told_once_also_after_a_restart(hook: Hook, ledger: Ledger):
    hooks, done = Notices(webhook=hook.url), status(runs=[run("finished")])
    first = teller(hooks, ledger)
    for _ in range(3):
        await first.look(done)
    await teller(hooks, ledger).look(done)
    [notice] = hook.got
    assert notice["kind"] == "finished"
    assert notice["text"] == notice["content"]
    assert "a is finished: 100 rows, ok 99.0%, loop 1.0%" in notice["text"]
    assert [event.text for event in ledger.events(9)] == ["a is finished: 100 rows, ok 99.0%, loop 1.0%"]


async def test_what_comes_and_goes_is_told_once_and_again_after_a_quiet_hour(
    hook: Hook, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    clock = [1e9]
    monkeypatch.setattr(notices.time, "time", lambda: clock[0])
    one = teller(Notices(webhook=hook.url), ledger)
    for _ in range(10):
        await one.look(status(servers=[server("blocked", 1e9 - 60)]))
        clock[0] += 60
        await one.look(status(servers=[server("ready", 1e9)]))
        clock[0] += 60
    assert hook.kinds == ["blocked"]
    clock[0] += notices.QUIET_SECONDS + 120
    await one.look(status(servers=[server("ready", 1e9)]))
    await one.look(status(servers=[server("blocked", 1e9 - 60)]))
    assert hook.kinds == ["blocked", "blocked"]


async def test_a_hook_that_fails_is_tried_again_and_its_secret_stays_out_of_the_log(
    hook: Hook, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    clock = [1e9]
    monkeypatch.setattr(notices.time, "time", lambda: clock[0])
    done, one = status(runs=[run("finished")]), teller(Notices(webhook=hook.url), ledger)
    hook.status = 500
    for _ in range(5):
        await one.look(done)  # at once again: nothing is sent
    assert sum("failed" in line for line in caplog.messages) == 1
    hook.status = 200
    clock[0] += notices.FIRST_PAUSE_SECONDS + 1
    await one.look(done)
    assert hook.kinds == ["finished"]
    for url in (f"http://127.0.0.1:1/{SECRET}", f"http://[::1/{SECRET}", f"http://user:{SECRET}@127.0.0.1:1/"):
        await teller(Notices(webhook=url), ledger).look(status(runs=[run("finished", f"run-{len(url)}")]))
    assert sum("failed" in line for line in caplog.messages) == 4
    assert SECRET not in caplog.text


async def test_a_command_gets_the_notice_on_stdin_and_only_the_hook_that_failed_is_tried_again(
    hook: Hook, ledger: Ledger, folder: Path
):
    script = f"cat > {folder}/got; test -e {folder}/fine"
    one = teller(Notices(webhook=hook.url, command=["sh", "-c", script]), ledger)
    done = status(runs=[run("finished")])
    await one.look(done)
    (folder / "fine").touch()
    await one.look(done, last=True)
    assert hook.kinds == ["finished"]
    assert json.loads((folder / "got").read_text())["kind"] == "finished"
    assert list(ledger.told()) == ["finished:a"]


async def test_a_command_that_hangs_is_ended(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notices, "HOOK_SECONDS", 0.2)
    one = teller(Notices(command=["sh", "-c", "sleep 1000 & wait"]), ledger)
    await one.look(status(runs=[run("finished")]))
    assert ledger.told() == {}


# -- from the daemon -------------------------------------------------------------------------------------------------


def test_the_daemon_tells_the_end_of_a_run_before_it_ends(
    make_daemon: Callable[..., Daemon], folder: Path, tmp_path: Path
):
    """The run's last part and the daemon's own end are a moment apart: the notice must not be lost between them."""
    told = tmp_path / "told"
    daemon = make_daemon(servers=1, server_flags=("--speed", "1e9"),
                         config={"notices": {"command": ["sh", "-c", f"cat >> {told}"]}})  # fmt: skip
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(20)))
    name = daemon.enqueue(source)
    daemon.run_until_idle()
    notice = json.loads(told.read_text())  # one, or this is no JSON
    assert notice["kind"] == "finished"
    assert f"{name} is finished: 20 rows, ok 100.0%" in notice["text"]
    assert daemon.survivors() == []
