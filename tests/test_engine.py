"""One server over HTTP: what is sent, and whose fault it is when it fails."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from harness.fake_server import mark
from harness.processes import wait_until
from harness.services import FakeServer, Ports

from gend.engine import Load, Pulse, connect, error_message, read_pulse, request_body
from gend.errors import PromptRefused, ServerFault, ServerUnavailable
from gend.records import Reply, Sampling

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def _shared_fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    ports = Ports()
    with FakeServer(tmp_path_factory.mktemp("fake"), "engine", ports.block(1), "--speed", "1e9") as server:
        yield server
    ports.close()


@pytest.fixture
def fake(_shared_fake: FakeServer) -> FakeServer:
    """A fake server without faults, the same for all tests here. You may kill it."""
    if _shared_fake.process is None:
        _shared_fake.start()
    _shared_fake.wait()
    _shared_fake.mode("ok")
    return _shared_fake


async def ask(url: str, messages: list[dict[str, Any]] = HELLO, request_seconds: float = 60, **more: Any) -> Reply:
    async with connect(url, "m", request_seconds) as server:
        return await server.chat(messages, more.get("tools"), Sampling(max_tokens=64), seed=1)


def test_a_request_says_everything_that_was_set_and_nothing_else() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(request_body("m", HELLO, tools, Sampling(), 42)) == {
        "model": "m", "messages": HELLO, "stream": False, "seed": 42, "tools": tools, "temperature": 1.0,
        "top_p": 0.95, "top_k": 20, "max_tokens": 32768, "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    nothing = Sampling(temperature=None, top_p=None, top_k=None, max_tokens=1, thinking=None)
    assert json.loads(request_body("m", HELLO, None, nothing, 0)) == {
        "model": "m", "messages": HELLO, "stream": False, "seed": 0, "max_tokens": 1,
    }  # fmt: skip
    zeroes = json.loads(request_body("m", HELLO, [], Sampling(temperature=0.0, min_p=0.0, thinking=False), 0))
    assert (zeroes["temperature"], zeroes["min_p"], zeroes["chat_template_kwargs"]) == (
        0,
        0,
        {"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"object":"error","message":"Messages cannot be empty.","code":400}', "Messages cannot be empty."),
        (b'{"error":{"message":"too  long\\n  by 3","code":400}}', "too long by 3"),
        (b'{"detail":[{"loc":["body"],"msg":"Field required"}]}', "[{'loc': ['body'], 'msg': 'Field required'}]"),
        (b"<html><body>502 Bad Gateway</body></html>", "<html><body>502 Bad Gateway</body></html>"),
        (b'["not", "an", "object"]', '["not", "an", "object"]'),
        (b'{"error": "a string"}', '{"error": "a string"}'),
        (b"\xff\xfe broken", "\ufffd\ufffd broken"),
        (b"x" * 10_000, "x" * 300),
        (b"", ""),
    ],
)
def test_error_messages_are_one_short_line(raw: bytes, message: str) -> None:
    assert error_message(raw) == message


SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs_offline_batch{model_name="m",tp_rank="0"} 9.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m"} 70.0
sglang:realtime_tokens_total{mode="decode",model_name="m"} 1.5e+03
"""
LLAMA = """\
llamacpp:tokens_predicted_total 200
llamacpp:n_decode_total 42
llamacpp:requests_processing 8
llamacpp:requests_deferred 17
"""


@pytest.mark.parametrize(
    ("metrics", "pulse"),
    [
        (SGLANG, Pulse(1570.0, 5.0)),
        (LLAMA, Pulse(42.0, 25.0)),
        (LLAMA.replace(" 8", " 0").replace(" 17", " 0"), Pulse(42.0, 0.0)),
        ("", None),
        ("vllm:num_requests_running 3\n", None),
    ],
)
def test_a_pulse_is_what_moves_while_requests_run(metrics: str, pulse: Pulse | None) -> None:
    assert read_pulse(metrics) == pulse


async def test_a_reply_comes_back_whole(fake: FakeServer) -> None:
    reply = await ask(fake.url)
    assert mark("Hello") in (reply.content or "")
    assert (reply.finish_reason, reply.tool_calls) == ("stop", None)
    assert reply.usage.prompt_tokens > 0 < reply.usage.completion_tokens


@pytest.mark.parametrize(
    ("mode", "more", "error", "says"),
    [
        ("http", {"status": 400, "message": "no"}, PromptRefused, "HTTP 400: no"),
        ("http", {"status": 413, "message": "no"}, PromptRefused, "HTTP 413: no"),
        ("http", {"status": 500, "message": "oh"}, ServerFault, "HTTP 500: oh"),
        ("http", {"status": 429, "message": "oh"}, ServerFault, "HTTP 429: oh"),
        ("http", {"status": 404, "message": "oh"}, ServerFault, "HTTP 404: oh"),
        ("reset", {}, ServerFault, "Client"),
        ("hang", {}, ServerFault, "no reply within 1 s"),
    ],
)
async def test_whose_fault_it_is(
    mode: str, more: dict[str, Any], error: type[Exception], says: str, fake: FakeServer
) -> None:
    fake.mode(mode, **more)
    with pytest.raises(error, match=says):
        await ask(fake.url, request_seconds=1)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"choices":[]}', b'{"choices":[{"message":null}]}', b"<html>", b'{"choices":[{"mess']
)
async def test_an_answer_that_is_no_completion_is_the_servers_fault(body: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(ServerFault, match="cannot be read"):
            await ask(f"http://127.0.0.1:{port}")


async def test_a_dead_server_is_gone_for_all_who_asked_it_at_once(fake: FakeServer) -> None:
    fake.mode("hang_all")
    async with connect(fake.url, "m", 60) as server:
        asked = [asyncio.create_task(server.chat(HELLO, None, Sampling(), seed)) for seed in range(20)]
        await asyncio.to_thread(wait_until, lambda: fake.stats()["in_flight"] == 20, "20 requests are in flight")
        fake.kill()
        assert {type(result) for result in await asyncio.gather(*asked, return_exceptions=True)} == {ServerUnavailable}


async def test_a_server_that_is_back_at_once_was_not_gone(fake: FakeServer) -> None:
    fake.mode("hang_all")
    async with connect(fake.url, "m", 60) as server:
        asked = asyncio.create_task(server.chat(HELLO, None, Sampling(), 1))
        await asyncio.to_thread(wait_until, lambda: fake.stats()["in_flight"] == 1, "the request is in flight")
        fake.kill()
        with socket.create_server(("127.0.0.1", fake.port)), pytest.raises(ServerFault):
            await asked


async def test_load_says_what_really_runs_and_nothing_where_nobody_tells(fake: FakeServer) -> None:
    async with connect(fake.url, "m", 60) as server:
        load = await server.load()
        assert (load.running, load.waiting, load.max_running) == (0, 0, 256)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
    async with connect(f"http://127.0.0.1:{port}", "m", 60) as server:
        assert await server.load() == Load()
