"""Nobody in, nothing out: who may reach gend, what leaves it by logs, `ps`, status and errors, and what a hostile
name, file or reply can do. At most it costs one row.
"""

import asyncio
import json
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from harness.daemon import Daemon
from harness.lone import Lone
from harness.processes import wait_until
from harness.proxy import S3Proxy, internal_error
from harness.reader import FolderParts, assert_whole, read_parts, write_prompts
from harness.services import BUCKET, FakeServer, Ports, SeaweedFS, Valkey

import gend.worker
from gend import loader
from gend.errors import SettingsError
from gend.ledger import Ledger
from gend.records import run_id
from gend.report import verify
from gend.store import FolderStore

SECRET_PROMPT = "SWORDFISH"
"""A word of every prompt, which must not be found outside of prompt sets, spool and parts."""


# ---- a running daemon, seen from outside


def test_nothing_out(
    make_daemon: Callable[..., Daemon],
    folder: Path,
    marker: str,
    ports: Ports,
    seaweed: SeaweedFS,
    prefix: str,
    tmp_path: Path,
) -> None:
    """A password for Redis, keys for S3, servers that repeat prompts in refusals, an outage, wrong settings."""
    with (
        Valkey(folder / "redis", marker, port=ports.block(1)) as redis,
        S3Proxy(seaweed.endpoint, ports.block(1), keys=seaweed.keys) as s3,
    ):
        daemon = make_daemon(
            servers=2,
            redis=redis.url,
            store=f"s3://{BUCKET}/{prefix}",
            endpoint=s3.endpoint,
            environment=seaweed.variables(),
            server_flags=("--speed", "4"),
            config={"store": {"patience_seconds": 1.0}},
        )
        source = write_prompts(tmp_path / "prompts.jsonl", 60, containing=dict.fromkeys(range(60), SECRET_PROMPT))
        repeats = f"1 validation error: {{'input': '{SECRET_PROMPT}'}}"
        daemon.mode("http", status=400, message=repeats, n=2, containing=SECRET_PROMPT)
        run = daemon.enqueue(source)
        s3.on_request = lambda kind, key: s3.set(internal_error()) if "/parts/" in key and kind == "PutObject" else None
        daemon.start()
        wait_until(lambda: daemon.status()["outages"], "the store is away", every=0.3, failed=daemon.logs)
        processes = daemon.all_processes()
        listening = sorted(place for process in processes for place in listens_on(process))
        environments = [str(process.environ()) for process in daemon.servers().values()]
        shown = [" ".join(process.cmdline()) for process in processes]
        shown += [
            daemon.cli(*what, code=None).stdout for what in (["status"], ["status", "--json"], ["logs", "loader"])
        ]
        s3.on_request = None
        s3.set()
        wait_until(
            lambda: daemon.status()["runs"][0]["state"] == "finished", "the run ends", every=0.3, failed=daemon.logs
        )
        daemon.stop()
        right = daemon.config.read_text()
        for wrong in (
            redis.url.replace(":" + redis.password, ":not-" + redis.password),
            "redis://:a/b-pass#word@h:1/0",
        ):
            daemon.config.write_text(right.replace(redis.url, wrong))
            shown.append(daemon.cli("status", code=2).stderr)
        daemon.config.write_text(right)
        shown += [daemon.cli("status").stdout, daemon.cli("verify", run).stdout]
        logs = [*daemon.folder.glob("*.log"), *(log for log in daemon.work.rglob("*.log") if "server" not in log.name)]
        shown += [log.read_text() for log in logs]
        in_redis = everything_in(redis)
    assert {place.rpartition(":")[0] for place in listening} == {"127.0.0.1"}, listening
    for secret in (redis.password, seaweed.keys[1], "a/b-pass", "pass#word", SECRET_PROMPT):
        assert not [text for text in [*shown, *environments] if secret in text], secret
    assert SECRET_PROMPT not in in_redis and "AWS_" not in str(environments)


def listens_on(process: psutil.Process) -> list[str]:
    connections = process.net_connections("inet") if process.is_running() else []
    return [f"{one.laddr.ip}:{one.laddr.port}" for one in connections if one.status == psutil.CONN_LISTEN]


def everything_in(redis: Valkey) -> str:
    """All keys and values of a Redis; what RQ compresses is read."""
    client, found = redis.client(), []
    client.connection_pool.connection_kwargs["decode_responses"] = False
    with client:
        for key in client.scan_iter("*"):
            value = client.dump(key) if client.type(key) != b"hash" else b"".join(sum(client.hgetall(key).items(), ()))
            if key.startswith(b"rq:job:") and client.hexists(key, "data"):
                value += zlib.decompress(client.hget(key, "data"))
            found.append(f"{key!r} {value!r}")
    return "\n".join(found)


def test_nobody_in(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """gend's own Valkey: a socket in a folder for nobody else, no port, and JSON in all that RQ keeps."""
    daemon = make_daemon(servers=1, server_flags=("--speed", "1", "--mean-tokens", "400"))
    daemon.enqueue(write_prompts(tmp_path / "prompts.jsonl", 300))
    daemon.start().wait_for_processes(workers=1, servers=1)
    home, running = daemon.work / "valkey", daemon.valkey()
    assert running is not None
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "valkey.sock").stat().st_mode) == 0o700
    assert not listens_on(running)
    assert not [name for name in running.environ() if name.startswith("AWS_")]
    raw = Ledger(f"unix://{home / 'valkey.sock'}").raw
    jobs = [raw.hget(key, "data") for key in raw.scan_iter("rq:job:*")]
    assert jobs and all(json.loads(zlib.decompress(job)) for job in jobs)
    daemon.stop()


# ---- names that climb


CLIMBING = ["../../up", "/etc/up", "..", ".", "a/../../../up", "x" * 300, "-rf", "%2e%2e%2fup", "~up", "ünï"]


def test_names_do_not_climb(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Of runs and of prompts: everything stays in the store and in the work folder, and ids come back as they were."""
    daemon = make_daemon(
        servers=1,
        server_flags=(
            "--speed",
            "1e9",
        ),
    )
    source = tmp_path / "prompts.jsonl"
    lines = [{"id": id, "messages": [{"role": "user", "content": f"Question {id}"}]} for id in CLIMBING]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    around = {*tmp_path.iterdir(), *daemon.folder.parent.iterdir()}
    runs = [daemon.enqueue(source, name, "--set", f"seed={seed}") for seed, name in enumerate(CLIMBING[::4])]
    assert all(re.fullmatch("[a-z0-9-]{1,64}", run) for run in runs), runs
    daemon.run_until_idle()
    for run in runs:
        seen = assert_whole(FolderParts(daemon.store), source, run)
        assert set(seen.rows) == set(CLIMBING)
    assert {*tmp_path.iterdir(), *daemon.folder.parent.iterdir()} == around
    assert not Path("/etc/up").exists()
    assert {path.name for path in daemon.store.iterdir()} == {"runs", "sets"}
    assert {path.name for path in (daemon.store / "runs").iterdir()} == set(runs)
    for command in ("verify", "pause", "resume"):
        assert daemon.cli(command, "../../up", code=2).stderr.startswith("gend: ")
    assert all(re.fullmatch("[a-z0-9-]{1,64}", run_id(name, "0" * 12)) for name in CLIMBING)
    assert "control character" in daemon.cli("enqueue", with_nul(tmp_path), code=2).stderr


def with_nul(folder: Path) -> Path:
    source = folder / "nul.jsonl"
    source.write_text(json.dumps({"id": "a\0b", "messages": [{"role": "user", "content": "x"}]}) + "\n")
    return source


@pytest.fixture
def server(folder: Path, marker: str, ports: Ports) -> Iterator[FakeServer]:
    with FakeServer(folder / "fake", marker, ports.block(1), "--speed", "50") as fake:
        yield fake


@pytest.fixture
def lone(folder: Path, server: FakeServer, valkey: Valkey) -> Iterator[Lone]:
    box = Lone(folder / "box", server.url, valkey.url)
    yield box
    box.end()


def test_runs_in_the_store_do_not_climb(lone: Lone, tmp_path: Path) -> None:
    """A run.json that names another place for its rows or prompts is left alone, whatever folder it lies in."""
    run = lone.register(write_prompts(tmp_path / "prompts.jsonl", 8))
    good = json.loads(lone.store.get(f"runs/{run.id}/run.json") or b"")
    for number, change in enumerate([{"id": "../../up"}, {"id": "/up"}, {"id": run.id}, {"batch_size": 0},
                                     {"set": {**good["set"], "fingerprint": "../../../../etc"}}]):  # fmt: skip
        name = f"evil-{number}"
        lone.store.replace(f"runs/{name}/run.json", json.dumps({**good, "id": name, **change}).encode())
    lone.ledger.redis.flushall()
    loader.reconcile(lone.ledger, lone.store)
    assert list(lone.ledger.runs()) == [run.id]
    for key in ("../up", "/up", "a/../../up", "a\0b"):
        with pytest.raises(SettingsError, match="would leave"):
            FolderStore(tmp_path / "store").put(key, b"")


# ---- hostile rows

DEEP = 100_000


def hostile_replies() -> dict[str, bytes]:
    """Bodies of replies, by the word in the prompt that calls for them."""
    good = {"role": "assistant", "content": "fine", "reasoning_content": "so"}

    def reply(finish: str = "stop", **message: Any) -> bytes:
        choice = {"index": 0, "message": {**good, **message}, "finish_reason": finish}
        return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 5}}).encode()

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "@"}}
    deep = reply("tool_calls", content=None, tool_calls=[call])
    return {
        "HUGE": reply(content="many words here " * 650_000),
        "DEEP": deep.replace(b'"@"', b"[" * DEEP + b"]" * DEEP),
        "STEEP": deep.replace(b'"@"', b"[" * 400 + b"]" * 400),
        "CONTROL": reply(content="".join(map(chr, range(32))) + "\x7f\u2028\u0085 end"),
        "SURROGATE": reply(content="half \ud83d of a face"),
        "NUL": reply(content="a\0b"),
        "NOT-JSON": b"<html>",
        "NOT-UTF8": reply().replace(b"fine", b"\xff\xfe"),
        "NOTHING": b"",
        "EMPTY": b'{"choices": []}',
        "TYPES": b'{"choices": [{"message": {"content": 7, "tool_calls": "x"}}], "usage": []}',
        "NUMBERS": reply().replace(b'"completion_tokens": 5', b'"completion_tokens": 1e400'),
        "BIG-NUMBER": reply().replace(b'"completion_tokens": 5', b'"completion_tokens": 99999999999999999999'),
    }


class HostileServer:
    """In front of a fake server: prompts with a hostile word get its reply instead."""

    def __init__(self, behind: str, port: int) -> None:
        self.behind, self.port, self.replies = behind, port, hostile_replies()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        word = next((word for word in self.replies if f"<{word}>".encode() in body), None)
        if word is not None:
            return web.Response(body=self.replies[word], content_type="application/json")
        async with self.session.request(request.method, self.behind + request.path_qs, data=body) as answer:
            return web.Response(body=await answer.read(), status=answer.status)

    async def serve(self) -> None:
        self.session = aiohttp.ClientSession()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    def __enter__(self) -> "HostileServer":
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.serve(), self.loop).result(30)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(30)
        asyncio.run_coroutine_threadsafe(self.session.close(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def test_a_hostile_reply_costs_its_row_alone(
    folder: Path, server: FakeServer, valkey: Valkey, ports: Ports, tmp_path: Path
) -> None:
    with HostileServer(server.url, ports.block(1)) as hostile:
        words = dict(enumerate(hostile.replies, 3))
        source = write_prompts(
            tmp_path / "prompts.jsonl", 64, containing={number: f"<{word}>" for number, word in words.items()}
        )
        lone = Lone(folder / "box", f"http://127.0.0.1:{hostile.port}", valkey.url)
        try:
            run = lone.register(source)
            lone.finish(run, lambda: setattr(gend.worker, "BLAMES", 2))  # sooner than in earnest
            log = lone.logs()
        finally:
            lone.end()
    seen = read_parts(FolderParts(lone.store_folder), source, run.id)
    hit = {f"p{number:07d}" for number in words}
    assert not (seen.missing or seen.doubled or seen.torn or seen.strange or seen.misplaced), seen.problems()
    assert {row["id"] for row in seen.rows.values() if row["verdict"] == "ok"} >= set(seen.rows) - hit
    assert set(seen.foreign) <= hit
    assert verify(lone.store, run).sound
    assert "Traceback" not in log


def test_a_hostile_line_costs_itself_alone(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    """In a prompt file: huge, deep and steep ones, control characters. What is accepted comes to a row."""
    source = tmp_path / "prompts.jsonl"
    tool = {"type": "function", "function": {"name": "f", "parameters": "@"}}
    lines = [
        json.dumps({"id": f"good-{n}", "messages": [{"role": "user", "content": f"Question {n}"}]}) for n in range(8)
    ]
    for name, depth in (("deep", DEEP), ("steep", 240), ("slope", 60)):
        line = {"id": name, "messages": [{"role": "user", "content": f"Question {name}"}], "tools": [tool]}
        lines.append(json.dumps(line).replace('"@"', '{"a":' * depth + "1" + "}" * depth))
    lines.append(json.dumps({"id": "huge", "messages": [{"role": "user", "content": "words and words " * 650_000}]}))
    control = "".join(map(chr, range(1, 32))) + "\x7f"
    lines.append(json.dumps({"id": f"control {control}", "messages": [{"role": "user", "content": f"Ask {control}"}]}))
    source.write_text("\n".join(lines) + "\n")
    run = lone.register(source)
    assert run.set.read == len(lines) and run.set.accepted >= 9
    lone.finish(run)
    assert verify(lone.store, run).sound
    seen = read_parts(FolderParts(lone.store_folder), good_lines(source, tmp_path), run.id)
    assert not (seen.missing or seen.doubled or seen.torn)
    assert "Traceback" not in lone.logs()


def good_lines(source: Path, folder: Path) -> Path:
    good = folder / "good.jsonl"
    good.write_text("".join(line + "\n" for line in source.read_text().split("\n") if '"good-' in line))
    return good
