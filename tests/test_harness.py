"""The harness itself: a fault that does not happen, or one the reader overlooks, makes all other tests worthless."""

import json
import signal
import socket
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore.exceptions
import psutil
import pytest
import redis
from harness import processes
from harness.daemon import Daemon, toml
from harness.fake_server import digest, mark
from harness.processes import wait_until
from harness.proxy import S3Fault, S3Proxy, TcpProxy, expired_token, kind_of, slow_down
from harness.reader import FolderParts, S3Parts, assert_whole, read_parts, read_prompts, read_request_log, write_prompts
from harness.services import BUCKET, Authority, FakeServer, Ports, SeaweedFS, Valkey, redis_binaries
from redis.backoff import NoBackoff
from redis.retry import Retry

INSTANT = ("--speed", "1e9")


# ---- the fake server


@pytest.fixture
def fake(folder: Path, marker: str, ports: Ports) -> Iterator[Callable[..., FakeServer]]:
    """Starts a fake server with the given flags."""
    servers = []

    def start(*flags: str) -> FakeServer:
        servers.append(FakeServer(folder / "fake", marker, ports.block(1), *flags).start())
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def ask(server: FakeServer, text: str, seconds: float = 20, **more: Any) -> tuple[int, Any]:
    """Status and body of one chat completion; raises OSError where the connection breaks or nothing comes in time."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, json.load(refusal)


def choice(server: FakeServer, text: str, **more: Any) -> dict[str, Any]:
    status, body = ask(server, text, **more)
    assert status == 200, body
    return dict(body["choices"][0])


def get(server: FakeServer, path: str, seconds: float = 20) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(server.url + path, timeout=seconds) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read()


def listens(server: FakeServer) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


def events(server: FakeServer) -> list[str]:
    return [event["event"] for event in read_request_log(server.request_log)]


def test_a_reply_belongs_to_its_prompt_and_is_logged_once(fake: Callable[..., FakeServer]) -> None:
    server = fake(*INSTANT, "--unknown-flag", "3", "--enable-metrics")
    good = choice(server, "one", return_token_ids=True)
    assert good["finish_reason"] == "stop"
    assert good["message"]["content"].startswith(mark("one"))
    assert good["message"]["reasoning_content"]
    assert good["token_ids"] and good["prompt_token_ids"]
    assert choice(server, "one")["message"] == good["message"] != choice(server, "two")["message"]
    silent = choice(server, "one", chat_template_kwargs={"enable_thinking": False})
    assert silent["message"]["reasoning_content"] is None
    cut = choice(server, "one", max_tokens=3)
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "")
    wait_until(lambda: events(server).count("finished") == 5, "all five are logged")
    logged = Counter(event["sha"] for event in read_request_log(server.request_log))
    assert logged == {digest("one"): 8, digest("two"): 2}


def test_refusals_have_the_real_shape(fake: Callable[..., FakeServer]) -> None:
    server = fake(*INSTANT, "--context-length", "100")
    refused = [
        ask(server, "long " * 200),
        ask(server, "x", max_tokens=101),
        ask(server, "x", messages=[]),
        ask(server, "x", messages=[{"role": "alien", "content": "x"}]),
        ask(server, "x", messages=[{"role": "user", "content": None}]),
        ask(server, "x \ud83d y"),
        ask(server, "x", temperature=-1),
    ]
    for status, body in refused:
        assert (status, body["object"], body["code"]) == (400, "error", 400), body
    assert "longer than the model's context" in refused[0][1]["message"]


REPLIES: dict[str, Callable[[Any], bool]] = {
    "empty": lambda c: c["message"]["content"] == "" and c["finish_reason"] == "stop",
    "null": lambda c: c["message"]["content"] is None and c["finish_reason"] == "length",
    "abort": lambda c: c["finish_reason"] == "abort",
    "thought_inside": lambda c: c["message"]["content"].startswith("<think>") and "</think>" in c["message"]["content"],
    "unclosed": lambda c: "<think>" in c["message"]["content"] and "</think>" not in c["message"]["content"],
    "loop": lambda c: c["finish_reason"] == "length" and len(c["message"]["reasoning_content"].split()) == 300,
    "junk": lambda c: set(c["message"]["content"]) == {"!"} and c["finish_reason"] == "stop",
    "wrong": lambda c: mark("q") not in c["message"]["content"] and c["finish_reason"] == "stop",
    "surrogate": lambda c: "\ud83d" in c["message"]["content"],
    "tool_call": lambda c: mark("q") in c["message"]["tool_calls"][0]["function"]["arguments"],
}


def test_bad_replies_are_bad_in_the_way_they_say(fake: Callable[..., FakeServer]) -> None:
    server = fake(*INSTANT)
    for mode, holds in REPLIES.items():
        server.mode(mode)
        assert holds(choice(server, "q", max_tokens=300)), mode
    server.mode("wrong_usage")
    assert ask(server, "q")[1]["usage"]["completion_tokens"] == 0
    server.mode("ok")
    assert mark("q") in choice(server, "q")["message"]["content"]


def test_faults_hit_the_prompts_they_are_meant_for(fake: Callable[..., FakeServer]) -> None:
    server = fake(*INSTANT)
    server.mode("http", status=500, containing="bad")
    assert [ask(server, text)[0] for text in ("good", "a bad one", "good")] == [200, 500, 200]
    server.mode("http", status=400, n=2)
    assert [ask(server, "x")[0] for _ in range(4)] == [400, 400, 200, 200]
    server.mode("http", status=503, share=0.5)
    assert {ask(server, "x")[0] for _ in range(40)} == {200, 503}
    server.mode("reset")
    with pytest.raises((OSError, ValueError)):
        ask(server, "x")
    with pytest.raises(urllib.error.HTTPError):
        server.mode("no_such_mode")


def test_hang_all_freezes_tokens_while_health_is_good(fake: Callable[..., FakeServer]) -> None:
    server = fake("--speed", "1", "--mean-tokens", "4000")
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(ask, server, "x")
        wait_until(lambda: server.stats()["tokens"] > 0, "tokens flow")
        server.mode("hang_all")
        frozen = server.stats()
        assert get(server, "/health")[0] == 200
        with pytest.raises(TimeoutError):
            ask(server, "y", seconds=0.3)
        assert server.stats()["tokens"] == frozen["tokens"]
        assert not reply.done()
        server.mode("slow", speed=1e9)
        assert reply.result(20)[0] == 200


def test_metrics_move_with_every_token(fake: Callable[..., FakeServer]) -> None:
    server = fake("--speed", "1", "--mean-tokens", "4000")
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(ask, server, "x")

        def live() -> float:
            lines = get(server, "/metrics")[1].decode().splitlines()
            return max(float(line.split()[-1]) for line in lines if line.startswith("sglang:realtime_tokens_total"))

        first = wait_until(live, "the first tokens are counted")
        wait_until(lambda: live() > first, "more tokens are counted")
        load = json.loads(get(server, "/v1/loads")[1])["loads"][0]
        assert (load["num_running_reqs"], load["max_running_requests"]) == (1, 256)
        server.mode("slow", speed=1e9)
        reply.result(20)


def test_abort_ends_one_request_with_the_text_so_far(fake: Callable[..., FakeServer]) -> None:
    server = fake("--speed", "1", "--mean-tokens", "4000")
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(ask, server, "x", rid="r1")
        wait_until(lambda: server.stats()["tokens"] > 0, "tokens flow")
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/abort_request", b'{"rid": "r1"}')).close()
        status, body = reply.result(20)
    assert (status, body["choices"][0]["finish_reason"], body["id"]) == (200, "abort", "r1")
    assert body["choices"][0]["message"]["reasoning_content"]


def test_a_crash_takes_the_tree_and_a_mode_file_survives_it(fake: Callable[..., FakeServer]) -> None:
    server = fake(*INSTANT, "--with-scheduler-child")
    scheduler = psutil.Process(server.stats()["scheduler"])
    assert scheduler.cmdline()[0] == "sglang::scheduler"
    server.mode_file.write_text(json.dumps({"mode": "crash_on", "containing": "POISON-7"}))
    wait_until(lambda: server.stats()["modes"] == ["crash_on"], "the mode file is read")
    assert ask(server, "harmless")[0] == 200
    with pytest.raises(OSError):
        ask(server, "this is POISON-7")
    assert server.process is not None and server.process.wait(20) != 0
    wait_until(lambda: not processes.alive(scheduler), "the scheduler is gone too")
    server.process = None
    server.start()
    with pytest.raises(OSError):
        ask(server, "POISON-7 again")
    assert events(server).count("crashed") == 2


def test_an_orphan_holds_the_port(fake: Callable[..., FakeServer], marker: str) -> None:
    server = fake(*INSTANT)
    server.mode("orphan", own_session=True)
    orphan = wait_until(
        lambda: [p for p in processes.marked(marker) if "sglang::orphan" in p.cmdline()], "the orphan is born"
    )[0]
    server.kill()
    orphan.terminate()
    with pytest.raises(AssertionError, match="ended with"):
        server.start()
    assert processes.alive(orphan)


def test_a_scheduler_that_stops_or_dies(fake: Callable[..., FakeServer]) -> None:
    server = fake("--speed", "1", "--mean-tokens", "4000", "--with-scheduler-child",
                  "--death-seconds", "0.4", "--health-seconds", "0.2")  # fmt: skip
    scheduler = psutil.Process(server.stats()["scheduler"])
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(ask, server, "x")
        wait_until(lambda: server.stats()["tokens"] > 0, "tokens flow")
        scheduler.send_signal(signal.SIGSTOP)
        wait_until(lambda: get(server, "/health")[0] == 503, "/health is 503")
        tokens = server.stats()["tokens"]
        assert get(server, "/metrics")[0] == 200
        assert server.stats()["tokens"] == tokens
        scheduler.send_signal(signal.SIGCONT)
        wait_until(lambda: server.stats()["tokens"] > tokens, "tokens flow again")
        scheduler.kill()
        with pytest.raises(OSError):
            reply.result(20)
    assert server.process is not None and server.process.wait(20) == -signal.SIGKILL


def test_sigterm_serves_what_is_in_flight(fake: Callable[..., FakeServer]) -> None:
    server = fake(*INSTANT)
    server.mode("hang_all")
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(ask, server, "x")
        wait_until(lambda: server.stats()["running"], "it runs")
        assert server.process is not None
        server.process.terminate()
        wait_until(lambda: not listens(server), "the port is closed")
        assert server.process.poll() is None
        server.mode_file.write_text('{"mode": "ok"}')
        assert reply.result(20)[0] == 200
        assert server.process.wait(20) == 0


def test_loading_refuses_connections_and_slots_are_limited(fake: Callable[..., FakeServer]) -> None:
    server = fake("--speed", "1", "--mean-tokens", "4000", "--max-running-requests", "200", "--max-running-cap", "2")
    with ThreadPoolExecutor() as pool:
        replies = [pool.submit(ask, server, str(number)) for number in range(3)]
        wait_until(lambda: server.stats()["in_flight"] == 3, "all are in")
        load = json.loads(get(server, "/v1/loads")[1])["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_running_requests"]) == (2, 1, 2)
        server.mode("loading", how="503")
        assert (get(server, "/health")[0], ask(server, "x")[0]) == (503, 503)
        server.mode("loading")
        for reply in replies:
            with pytest.raises(OSError):
                reply.result(20)
        assert not listens(server)
        server.mode_file.write_text('{"mode": "ok"}')
        server.wait()


def test_a_server_may_ignore_that_its_clients_are_gone(fake: Callable[..., FakeServer]) -> None:
    server = fake("--speed", "1", "--mean-tokens", "4000")
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()

    def ask_and_leave() -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_until(lambda: server.stats()["running"] == 1, "the request runs")

    ask_and_leave()
    wait_until(lambda: server.stats()["in_flight"] == 0, "the request is dropped")
    server.mode("ignore_disconnects")
    ask_and_leave()
    wait_until(lambda: events(server).count("dropped") == 2, "the client is gone")
    assert server.stats()["running"] == 1


# ---- services


@pytest.mark.parametrize("kind", redis_binaries())
@pytest.mark.parametrize("over", ["socket", "tcp"])
def test_valkey_keeps_its_data_through_a_kill(kind: str, over: str, folder: Path, marker: str, ports: Ports) -> None:
    port = ports.block(1) if over == "tcp" else 0
    with Valkey(folder / "v", marker, port=port, binary=redis_binaries()[kind]) as server:
        server.client().set("a", "1")
        server.kill()
        with pytest.raises(redis.exceptions.ConnectionError):
            server.client().get("a")
        server.start()
        assert server.client().get("a") == "1"


def test_a_stranger_on_the_port_is_noticed(folder: Path, marker: str, ports: Ports) -> None:
    port = ports.block(1)
    with Valkey(folder / "a", marker, port=port) as first:
        second = Valkey(folder / "b", marker, port=port)
        second.password = second.settings["requirepass"] = first.password
        with pytest.raises(AssertionError, match=r"somebody else|ended with"):
            second.start()
        second.kill()


def test_ports_are_handed_out_once() -> None:
    one, two = Ports(), Ports()
    blocks = [ports.block(25) for ports in (one, two) for _ in range(5)]
    assert len({port for first in blocks for port in range(first, first + 25)}) == 250
    assert all(first + 25 + Ports.MIRROR < 32768 for first in blocks)
    one.close()
    two.close()


def test_seaweed_keeps_its_data_through_a_kill(seaweed: SeaweedFS, prefix: str) -> None:
    seaweed.client().put_object(Bucket=BUCKET, Key=f"{prefix}/a", Body=b"one", IfNoneMatch="*")
    seaweed.kill()
    seaweed.start()
    assert seaweed.client().get_object(Bucket=BUCKET, Key=f"{prefix}/a")["Body"].read() == b"one"
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        seaweed.client().put_object(Bucket=BUCKET, Key=f"{prefix}/a", Body=b"two", IfNoneMatch="*")


# ---- proxies


def test_tcp_proxy(valkey: Valkey, ports: Ports) -> None:
    port = ports.block(1)
    with TcpProxy(str(valkey.socket), port) as proxy:

        def client(seconds: float = 20) -> "redis.Redis":
            return redis.Redis(port=port, socket_timeout=seconds, retry=Retry(NoBackoff(), 0), decode_responses=True)

        open_before = client(1)
        client().set("a", "1")
        for mode, error in (("refuse", redis.ConnectionError), ("reset", redis.ConnectionError),
                            ("blackhole", redis.TimeoutError)):  # fmt: skip
            open_before.get("a")
            proxy.set(mode)
            for one in (client(1), open_before):
                with pytest.raises(error):
                    one.get("a")
            proxy.set("pass")
            assert client().get("a") == "1"
        proxy.set("delay", seconds=2)
        with pytest.raises(redis.TimeoutError):
            client(1).get("a")
        proxy.set("pass")
        long = "x" * 5000
        client().set("b", long)
        for towards in ("up", "down"):
            proxy.set("cut", after=1000, towards=towards)
            with pytest.raises(redis.ConnectionError):
                client().set("b", long, get=True)
        proxy.set("refuse")
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            pass


def test_s3_proxy_over_tls(seaweed: SeaweedFS, prefix: str, authority: Authority, ports: Ports) -> None:
    with S3Proxy(seaweed.endpoint, ports.block(1), tls=authority.context(), keys=seaweed.keys) as proxy:
        s3 = seaweed.client(proxy.endpoint, verify=str(authority.bundle))

        def put(name: str, body: bytes = b"x" * 100_000, **more: Any) -> None:
            s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=body, **more)

        def get(name: str) -> bytes:
            return bytes(s3.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"].read())

        put("a")
        assert get("a") == b"x" * 100_000
        assert s3.head_object(Bucket=BUCKET, Key=f"{prefix}/a")["ContentLength"] == 100_000
        assert (proxy.counts["PutObject"], proxy.counts["GetObject"], proxy.puts[f"{prefix}/a"]) == (1, 1, 1)

        for fault, code in ((slow_down(), "SlowDown"), (expired_token(), "ExpiredToken"),
                            (S3Fault("refuse_aws_chunked"), "NotImplemented")):  # fmt: skip
            proxy.set(fault)  # this client's default checksums make an aws-chunked body over TLS
            with pytest.raises(botocore.exceptions.ClientError, match=code):
                put("b")
        proxy.set(slow_down(kinds={"GetObject"}, times=1))
        put("b")
        with pytest.raises(botocore.exceptions.ClientError, match="SlowDown"):
            get("b")
        assert get("b") == b"x" * 100_000

        proxy.set(S3Fault("ignore_if_none_match"))
        put("b", b"second" * 20_000, IfNoneMatch="*")
        assert get("b") == b"second" * 20_000

        proxy.set(S3Fault("cut_put", times=1))
        with pytest.raises((botocore.exceptions.HTTPClientError, botocore.exceptions.SSLError)):
            put("c")
        proxy.set(S3Fault("lose_answer", {"PutObject"}, times=1))
        with pytest.raises((botocore.exceptions.HTTPClientError, botocore.exceptions.SSLError)):
            put("d", b"stored")
        assert S3Parts(seaweed.client(), BUCKET, prefix).names() == [f"{prefix}/{name}" for name in "abd"]


def test_tls_by_tcp_proxy_needs_the_authority(seaweed: SeaweedFS, authority: Authority, ports: Ports) -> None:
    port = ports.block(1)
    with TcpProxy(("127.0.0.1", seaweed.port), port, tls=authority.context()):
        endpoint = f"https://127.0.0.1:{port}"
        assert seaweed.client(endpoint, verify=str(authority.bundle)).list_buckets()["Buckets"]
        with pytest.raises(botocore.exceptions.SSLError):
            seaweed.client(endpoint).list_buckets()


@pytest.mark.parametrize(("method", "path", "kind"), [
    ("PUT", "/b/k", "PutObject"),
    ("PUT", "/b/k?partNumber=1&uploadId=u", "UploadPart"),
    ("POST", "/b/k?uploads", "CreateMultipartUpload"),
    ("DELETE", "/b/k?uploadId=u", "AbortMultipartUpload"),
    ("GET", "/b?list-type=2&prefix=p", "ListObjectsV2"),
    ("GET", "/b/?uploads", "ListMultipartUploads"),
    ("HEAD", "/b", "HeadBucket"),
    ("GET", "/", "ListBuckets"),
])  # fmt: skip
def test_requests_are_counted_by_their_kind(method: str, path: str, kind: str) -> None:
    assert kind_of(method, path)[0] == kind


# ---- the reader


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A store folder with a whole run of 20 prompts in batches of 8, its prompt file, and its first part."""
    source = write_prompts(tmp_path / "prompts.jsonl", 20)
    parts = tmp_path / "store/runs/r-1/parts"
    parts.mkdir(parents=True)
    rows = [
        {"id": id, "run": "r-1", "batch": number // 8, "messages": messages, "verdict": "ok", "reasoning_content": "so",
         "content": f"{mark(messages[-1]['content'])} yes", "tool_calls": None}
        for number, (id, messages) in enumerate(read_prompts(source).items())
    ]  # fmt: skip
    for batch in range(3):
        lines = [json.dumps(row) + "\n" for row in rows if row["batch"] == batch]
        (parts / f"{batch:08d}.jsonl").write_text("".join(lines))
    return tmp_path / "store", source, parts / "00000000.jsonl"


def test_the_reader_is_content_with_a_whole_run(whole: tuple[Path, Path, Path]) -> None:
    store, source, _ = whole
    assert len(assert_whole(FolderParts(store), source, "r-1").ids) == 20


def _swap_replies(lines: list[str]) -> list[str]:
    rows = [json.loads(line) for line in lines]
    rows[0]["content"], rows[1]["content"] = rows[1]["content"], rows[0]["content"]
    return [json.dumps(row) + "\n" for row in rows]


PLANTED: dict[str, Callable[[list[str]], list[str]]] = {
    "doubled": lambda lines: [*lines, lines[3]],
    "missing": lambda lines: lines[:3] + lines[4:],
    "torn": lambda lines: [*lines[:-1], lines[-1][:40]],
    "foreign": _swap_replies,
    "misplaced": lambda lines: [lines[0].replace('"batch": 0', '"batch": 1'), *lines[1:]],
    "strange": lambda lines: [lines[0].replace("p0000000", "p9999999"), *lines[1:]],
    "blank": lambda lines: [json.dumps({**json.loads(lines[0]), "content": " \n"}) + "\n", *lines[1:]],
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_reader_finds_a_planted_fault(fault: str, whole: tuple[Path, Path, Path]) -> None:
    store, source, part = whole
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(PLANTED[fault](lines)))
    assert getattr(read_parts(FolderParts(store), source), fault)
    with pytest.raises(AssertionError, match=fault):
        assert_whole(FolderParts(store), source)


def test_the_reader_expects_the_verdicts_it_is_told(whole: tuple[Path, Path, Path]) -> None:
    store, source, part = whole
    part.write_text(part.read_text().replace('"verdict": "ok"', '"verdict": "length"', 1))
    assert_whole(FolderParts(store), source, verdicts={"ok": 19, "length": 1})
    with pytest.raises(AssertionError):
        assert_whole(FolderParts(store), source)


# ---- processes


def test_marked_processes_are_found_wherever_they_moved(folder: Path, marker: str) -> None:
    script = "setsid sleep 1000 & sleep 1000"
    parent = processes.start(["sh", "-c", script], folder, "sh", env=processes.environment(marker))
    wait_until(lambda: len(processes.marked(marker)) == 3, "all three run")
    parent.kill()
    parent.wait()
    wait_until(lambda: len(processes.marked(marker)) == 2, "two are left")
    processes.end_all(lambda: processes.marked(marker))
    assert processes.marked(marker) == []


# ---- the daemon's driver


def test_the_driver_finds_kills_and_cleans_up(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(servers=1, server_flags=("--speed", "1", "--mean-tokens", "4000", "--with-scheduler-child"))
    run = daemon.enqueue(write_prompts(tmp_path / "prompts.jsonl", 4))
    daemon.start().wait_for_processes(workers=1, servers=1)
    wait_until(lambda: read_request_log(daemon.request_log), "a request came", failed=daemon.logs)
    daemon.mode("hang_all", server=0)
    stats, valkey = daemon.stats(0), daemon.valkey()
    assert stats is not None and stats["modes"] == ["hang_all"]
    assert valkey is not None and daemon.loader() is not None
    assert [found["id"] for found in daemon.status()["runs"]] == [run]
    for process in (daemon.supervisor, daemon.workers()[0]):
        daemon.kill(process)
    assert valkey in daemon.all_processes() and daemon.servers()
    assert "sglang::scheduler" in "".join(daemon.survivors())
    daemon.close()
    assert daemon.survivors() == []
    assert "---- up.log" in daemon.logs()


def test_the_config_file_says_what_was_meant() -> None:
    servers = {"count": 2, "command": ["a b", 'c"d'], "flags": {"mem-fraction-static": 0.9}}
    config: dict[str, dict[str, Any]] = {"servers": servers, "redis": {"url": ""}}
    assert tomllib.loads(toml(config)) == config
