"""One server, over HTTP: OpenAI's chat completions as SGLang speaks them, and what the server says of itself.

Whether a server lives is decided by what it does with requests: refused connections for `GONE_SECONDS` mean that it is
gone; anything else that fails is a fault of this request, which the caller tries again.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from gend.errors import PromptRefused, ServerFault, ServerUnavailable
from gend.records import Message, Reply, Sampling, Usage

GONE_SECONDS = 1.0
"""How long connections may be refused before the server counts as gone. Nothing listens while SGLang loads."""

_KEEPALIVE_SECONDS = 4.0  # below uvicorn's 5 s: a connection that the server is just closing must not be used again
_REFUSALS = {400, 413, 422}


class Load(msgspec.Struct, frozen=True):
    """What a server says of itself: requests running, waiting, and how many can run. None: it does not say."""

    running: int | None = None
    waiting: int | None = None
    max_running: int | None = None
    kv_usage: float | None = None
    retracted: int | None = None


class Pulse(msgspec.Struct, frozen=True):
    """Whether a server is at work: tokens made since it started, and requests that run or wait."""

    tokens: float
    requests: float


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Completion).decode

MOST_DEPTH = 200
"""Lists and objects in a reply's tool calls are nested at most so deep: what is deeper, others could not read again."""


def shallow(value: Any, depth: int) -> bool:
    """Whether lists and objects in `value` are nested at most `depth` deep."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(shallow(item, depth - 1) for item in inner)


def _count(tokens: int | None) -> int:
    """A number of tokens as the server gives it; 0 for none, and for one that cannot be."""
    return tokens if tokens is not None and 0 <= tokens < 1 << 31 else 0


class Server:
    """A client of one server."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession):
        self.url, self.model, self._session = url, model, session
        self._probing: asyncio.Task[bool] | None = None

    async def chat(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        sampling: Sampling,
        seed: int,
        token_ids: bool = False,
        prefix: str | None = None,
    ) -> Reply:
        """One reply. Raises PromptRefused, ServerFault, ServerUnavailable. It never retries by itself."""
        body = request_body(self.model, messages, tools, sampling, seed, token_ids, prefix)
        try:
            async with self._session.post(
                f"{self.url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
            ) as answer:
                raw, status = await answer.read(), answer.status
        except TimeoutError as error:
            raise ServerFault(f"no reply within {self._session.timeout.total:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if await self._gone():
                raise ServerUnavailable(f"{self.url} refuses connections") from error
            raise ServerFault(f"{type(error).__name__}: {error}") from error
        if status in _REFUSALS:
            said = error_message(raw)
            raise PromptRefused(f"HTTP {status}: {said}", room_left(said))
        if status != 200:
            raise ServerFault(f"HTTP {status}: {error_message(raw)}")
        try:
            completion = _decode(raw)
            choice = completion.choices[0]
        except (msgspec.DecodeError, UnicodeError, IndexError, RecursionError) as error:
            raise ServerFault(f"a reply that cannot be read: {error}") from error
        usage, message = completion.usage or _Usage(), choice.message
        if not shallow(message.tool_calls, MOST_DEPTH):
            raise ServerFault("a reply that cannot be read: tool calls nested too deep")
        return Reply(
            content=message.content,
            reasoning_content=message.reasoning_content,
            tool_calls=message.tool_calls or None,
            finish_reason=choice.finish_reason,
            usage=Usage(*map(_count, (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens))),
            prompt_token_ids=choice.prompt_token_ids,
            token_ids=choice.token_ids or choice.response_token_ids,  # 0.5.17 and 0.5.23 name it differently
        )

    async def load(self) -> Load:
        """What the server says of its own load; an empty Load when it has no `/v1/loads`."""
        try:
            async with self._session.get(f"{self.url}/v1/loads", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status != 200:
                    return Load()
                loads = json.loads(await answer.read())["loads"]
            return Load(
                running=sum(load["num_running_reqs"] for load in loads),
                waiting=sum(load["num_waiting_reqs"] for load in loads),
                max_running=sum(load["max_running_requests"] for load in loads),
                kv_usage=max(load.get("token_usage", 0.0) for load in loads),
                retracted=sum(load.get("queues", {}).get("retracted", 0) for load in loads),
            )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
            return Load()  # a server that cannot be asked is judged by its replies alone

    async def info(self) -> dict[str, Any]:
        """What the server says of its version and arguments; empty when it has no `/server_info`."""
        try:
            async with self._session.get(f"{self.url}/server_info", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                said = json.loads(await answer.read()) if answer.status == 200 else {}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    async def abort_all(self) -> None:
        """Ask the server to end all requests at once; each comes back with what it has so far.

        A server that cannot do that goes on with them.
        """
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):  # gone: then they end by themselves
            timeout = aiohttp.ClientTimeout(total=10)
            async with self._session.post(
                f"{self.url}/abort_request", json={"abort_all": True}, timeout=timeout
            ) as answer:
                await answer.read()

    async def pulse(self) -> Pulse | None:
        """How many tokens it has made and how many requests run, by its own metrics; None when it does not say."""
        try:
            async with self._session.get(f"{self.url}/metrics", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return read_pulse((await answer.read()).decode("utf-8", "replace")) if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _gone(self) -> bool:
        """Whether connections are refused for GONE_SECONDS; all requests that failed together share one probe."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> bool:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        deadline = asyncio.get_running_loop().time() + GONE_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), GONE_SECONDS)
            except ConnectionRefusedError:
                await asyncio.sleep(0.2)
                continue
            except (OSError, TimeoutError):
                return False  # it is there, and slow: that alone is no death
            writer.close()
            return False
        return True


@contextlib.asynccontextmanager
async def connect(url: str, model: str, request_seconds: float) -> AsyncIterator[Server]:
    """A client of the server at `url`; a request may take `request_seconds`, and any number may be in flight."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=request_seconds, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Server(url, model, session)


def read_pulse(metrics: str) -> Pulse | None:
    """Tokens and requests out of a Prometheus page of SGLang or llama.cpp; None when they are not there.

    `realtime_tokens_total` moves while requests run; `generation_tokens_total` of some versions only at their end, as
    do llama.cpp's counts of tokens: what moves there is the count of its steps.
    """
    tokens, requests = 0.0, None
    for line in metrics.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in _WORK_DONE:
            tokens += float(rest.rpartition(" ")[2])
        elif name in _REQUESTS:
            requests = (requests or 0.0) + float(rest.rpartition(" ")[2])
    return None if requests is None else Pulse(tokens, requests)


_WORK_DONE = {"sglang:realtime_tokens_total", "sglang:generation_tokens_total", "llamacpp:n_decode_total"}
_REQUESTS = {
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "llamacpp:requests_processing", "llamacpp:requests_deferred"
}  # fmt: skip


def request_body(
    model: str,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    sampling: Sampling,
    seed: int,
    token_ids: bool = False,
    prefix: str | None = None,
) -> bytes:
    """The JSON of one chat completion. What is None is left out, so that the server's own default holds."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": False, "seed": seed}
    if tools:
        body["tools"] = tools
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens"):
        if (value := getattr(sampling, name)) is not None:
            body[name] = value
    if sampling.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking}
    if token_ids:
        body["return_token_ids"] = True
    if prefix:
        body["messages"] = [*messages, {"role": "assistant", "content": prefix}]
        body["continue_final_message"] = True
    return msgspec.json.encode(body)


_MOST = re.compile(r"supports at most (\d+) completion tokens")
_TOTAL = re.compile(r"context length of (\d+) tokens\D+\d+ tokens: (\d+) tokens from the input")


def room_left(refusal: str) -> int:
    """How many tokens a reply may have, where SGLang (0.5.17, 0.5.23) refuses only because max_tokens is too large."""
    if found := _MOST.search(refusal):
        return int(found[1])
    if found := _TOTAL.search(refusal):
        return max(0, int(found[1]) - int(found[2]))
    return 0


def error_message(raw: bytes) -> str:
    """The message of an error body, in one short line. Never the request: it would put prompts into logs."""
    try:
        body = json.loads(raw)
        message = body.get("message") or body.get("error", {}).get("message") or body.get("detail")
    except (ValueError, AttributeError):
        message = raw.decode("utf-8", "replace")
    return " ".join(str(message).split())[:300]
