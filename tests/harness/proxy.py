"""Proxies that misbehave on request: TcpProxy in front of anything, S3Proxy in front of an S3 server.

Both run on one event loop in a background thread, so tests of any style can use them, and are context managers.
"""

import asyncio
import contextlib
import functools
import re
import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import aiohttp
import botocore.auth
import botocore.awsrequest
import botocore.credentials
import yarl
from aiohttp import web

Value = TypeVar("Value")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="proxies", daemon=True).start()
    return loop


def _run(coroutine: Coroutine[Any, Any, Value]) -> Value:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result(30)


class TcpProxy:
    """Passes bytes on 127.0.0.1:`port` to and from `target`, (host, port) or the path of a unix socket.

    `set(mode)` takes effect at once, for open connections too:

    pass                      bytes flow; what was held back by blackhole flows now
    refuse                    nothing listens, open connections are reset
    reset                     connections are accepted and reset
    blackhole                 connections are accepted, no byte moves in either direction
    delay  seconds            each piece waits so long
    cut    after, towards     reset a connection after so many bytes "up" (to the target) or "down"; bytes before count
                              from the moment of the setting
    """

    MODES = ("pass", "refuse", "reset", "blackhole", "delay", "cut")

    def __init__(self, target: tuple[str, int] | str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        """With `tls` the proxy ends TLS, so that a plain server can be had over TLS."""
        self.target, self.port, self.tls = target, port, tls
        self.mode, self.seconds, self.after, self.towards = "pass", 0.0, 0, "down"
        self.accepted = 0
        self.connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.server: asyncio.Server | None = None
        self.flowing: asyncio.Event | None = None

    def set(self, mode: str, *, seconds: float = 0.0, after: int = 0, towards: str = "down") -> None:
        assert mode in self.MODES, mode
        assert towards in ("up", "down"), towards
        _run(self._set(mode, seconds, after, towards))

    async def _set(self, mode: str, seconds: float, after: int, towards: str) -> None:
        assert self.flowing is not None
        self.mode, self.seconds, self.after, self.towards = mode, seconds, after, towards
        if mode == "blackhole":
            self.flowing.clear()
        else:
            self.flowing.set()
        if mode == "refuse" and self.server is not None:
            self.server.close()
            self.server = None
        elif mode != "refuse" and self.server is None:
            await self._listen()
        if mode in ("refuse", "reset"):
            self._reset_all()

    async def _listen(self) -> None:
        self.flowing = self.flowing or asyncio.Event()
        self.flowing.set()
        self.server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self.tls, reuse_address=True, backlog=1024
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.mode == "reset":
            _reset(writer)
            return
        try:
            if isinstance(self.target, str):
                far_reader, far_writer = await asyncio.open_unix_connection(self.target)
            else:
                far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)  # the target is away: the client must see that, not an empty end
            return
        pair = (writer, far_writer)
        self.connections.add(pair)
        try:
            up, down = self._pump(reader, far_writer, "up", pair), self._pump(far_reader, writer, "down", pair)
            await asyncio.gather(up, down)
        finally:
            self.connections.discard(pair)
            for end in pair:
                end.close()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        towards: str,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        assert self.flowing is not None
        # Either end may go at any time (ENOTCONN, from write_eof, is no ConnectionError): the other is closed then.
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self.flowing.wait()
                if self.mode == "delay":
                    await asyncio.sleep(self.seconds)
                if self.mode == "cut" and self.towards == towards:
                    data, whole = data[: self.after], data
                    self.after -= len(data)
                    sink.write(data)
                    await sink.drain()
                    if len(data) < len(whole) or self.after == 0:
                        for end in pair:
                            _reset(end)
                        return
                    continue
                sink.write(data)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()
            else:  # TLS knows no half-closed connection
                sink.close()

    def _reset_all(self) -> None:
        for pair in self.connections:
            for end in pair:
                _reset(end)

    def __enter__(self) -> Self:
        _run(self._listen())
        return self

    def __exit__(self, *error: object) -> None:
        self.set("refuse")


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):  # already closed: as good
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass
class S3Fault:
    """What goes wrong with requests of some kinds, e.g. S3Fault("status", {"PutObject"}, status=503, code="SlowDown").

    status                     answered with `status` and the S3 error `code`, the store sees nothing
    refuse_aws_chunked         501 to bodies in aws-chunked encoding, as some stores answer
    ignore_if_none_match       the header is dropped: the last put wins, as in stores that do not know it
    cut_put                    the connection is reset in the middle of the body, the store sees nothing
    lose_answer                the store does it, the connection is reset before the answer
    cut_answer                 the store does it, the connection is reset in the middle of the answer's body
    delay                      waits `seconds` first
    blackhole                  never answers
    """

    what: str
    kinds: set[str] = field(default_factory=set)
    """Which requests, by S3's names of operations; empty: all."""
    key: str = ""
    """Only for object keys with this text."""
    times: int = 1 << 62
    """So many requests, then it is over."""
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0

    WHAT = (
        "status",
        "refuse_aws_chunked",
        "ignore_if_none_match",
        "cut_put",
        "lose_answer",
        "cut_answer",
        "delay",
        "blackhole",
    )

    def __post_init__(self) -> None:
        assert self.what in self.WHAT, self.what

    def hits(self, kind: str, key: str, headers: Any) -> bool:
        if self.times <= 0 or (self.kinds and kind not in self.kinds) or self.key not in key:
            return False
        if self.what == "refuse_aws_chunked" and not _is_aws_chunked(headers):
            return False
        if self.what == "ignore_if_none_match" and "If-None-Match" not in headers:
            return False
        if self.what == "cut_put" and not _body_bytes(headers):
            return False
        self.times -= 1
        return True


def slow_down(**only: Any) -> S3Fault:
    return S3Fault("status", status=503, code="SlowDown", **only)


def internal_error(**only: Any) -> S3Fault:
    return S3Fault("status", status=500, code="InternalError", **only)


def expired_token(**only: Any) -> S3Fault:
    return S3Fault("status", status=403, code="ExpiredToken", **only)


class S3Proxy:
    """An S3 endpoint in front of another one, with faults, which counts what is asked.

    The signature stays good because the Host header is passed on unchanged; `keys` are needed for ignore_if_none_match,
    which changes what was signed. `counts` holds requests by kind (S3's names of operations), `puts` by key, `answers`
    by (kind, status).
    """

    def __init__(
        self, endpoint: str, port: int, *, tls: ssl.SSLContext | None = None, keys: tuple[str, str] | None = None
    ) -> None:
        self.keys = keys
        self.behind, self.port, self.tls = endpoint.rstrip("/"), port, tls
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        self.faults: list[S3Fault] = []
        self.counts: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()
        self.puts: Counter[str] = Counter()
        self.on_request: Callable[[str, str], None] | None = None
        """Called with kind and key before a request is passed on: a test can kill something at that very moment."""
        self.runner: web.AppRunner | None = None
        self.session: aiohttp.ClientSession | None = None

    def set(self, *faults: S3Fault) -> None:
        """These faults from now on, and no others. The first that fits a request is what happens to it."""
        self.faults = list(faults)

    async def _start(self) -> None:
        # The body's encoding and all headers must reach the other side as they are: they are signed.
        self.session = aiohttp.ClientSession(
            auto_decompress=False, connector=aiohttp.TCPConnector(limit=0), skip_auto_headers=("User-Agent", "Accept")
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, auto_decompress=False)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, ssl_context=self.tls).start()

    async def _stop(self) -> None:
        assert self.runner is not None and self.session is not None
        await self.runner.cleanup()
        await self.session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert self.session is not None
        kind, key = kind_of(request.method, request.raw_path)
        self.counts[kind] += 1
        if kind in ("PutObject", "CompleteMultipartUpload"):
            self.puts[key] += 1
        fault = next((fault for fault in self.faults if fault.hits(kind, key, request.headers)), None)
        what = fault.what if fault else ""
        if what == "cut_put":
            await request.content.readexactly(max(1, _body_bytes(request.headers) // 2))
            return self._cut(request, kind)
        body = await request.read()
        if self.on_request:
            self.on_request(kind, key)
        if fault and what == "delay":
            await asyncio.sleep(fault.seconds)
        if what == "blackhole":
            await asyncio.Event().wait()
        if fault and what in ("status", "refuse_aws_chunked"):
            status, code = (501, "NotImplemented") if what == "refuse_aws_chunked" else (fault.status, fault.code)
            return self._refuse(request, kind, status, code)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        if what == "ignore_if_none_match":
            assert self.keys is not None, "to drop a signed header, S3Proxy needs the keys"
            headers = signed_again(request.method, self.behind + request.raw_path, headers, self.keys)
        try:
            async with self.session.request(
                request.method, yarl.URL(self.behind + request.raw_path, encoded=True), headers=headers, data=body
            ) as answer:
                data = await answer.read()
        except aiohttp.ClientError:
            return self._cut(request, kind)  # the store behind is away
        if what == "lose_answer":
            return self._cut(request, kind)
        self.answers[kind, answer.status] += 1
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        if what == "cut_answer" and data:
            half = web.StreamResponse(status=answer.status, headers={**kept, "Content-Length": str(len(data))})
            await half.prepare(request)
            await half.write(data[: len(data) // 2])
            return self._cut(request, kind)
        response = web.Response(status=answer.status, headers=kept, body=data if request.method != "HEAD" else None)
        if request.method == "HEAD" and "Content-Length" in answer.headers:
            response.headers["Content-Length"] = answer.headers["Content-Length"]
        return response

    def _refuse(self, request: web.Request, kind: str, status: int, code: str) -> web.Response:
        self.answers[kind, status] += 1
        xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>"
        text = None if request.method == "HEAD" else xml
        return web.Response(status=status, text=text, content_type="application/xml")

    def _cut(self, request: web.Request, kind: str) -> web.Response:
        self.answers[kind, 0] += 1
        if request.transport is not None:
            sock = request.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert isinstance(request.transport, asyncio.Transport)
            request.transport.abort()
        return web.Response()  # never arrives

    def __enter__(self) -> Self:
        _run(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        _run(self._stop())


HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "upgrade", "te", "trailer"}


class _Signer(botocore.auth.S3SigV4Auth):
    def _modify_request_before_signing(self, request: Any) -> None:
        # S3SigV4Auth would hash the body anew; what the client declared of it (a trailer, perhaps) must stay.
        botocore.auth.SigV4Auth._modify_request_before_signing(self, request)  # type: ignore[attr-defined]


def signed_again(method: str, url: str, headers: dict[str, str], keys: tuple[str, str]) -> dict[str, str]:
    """The headers without If-None-Match, under a signature of our own for what else the client had signed."""
    small = {name.lower(): value for name, value in headers.items() if name.lower() != "if-none-match"}
    found = re.search(r"SignedHeaders=([^,]*)", small.pop("authorization"))
    assert found is not None
    signed = {name: small[name] for name in found[1].split(";") if name in small}
    request = botocore.awsrequest.AWSRequest(method=method, url=url, headers=signed)
    _Signer(botocore.credentials.Credentials(*keys), "s3", "us-east-1").add_auth(request)
    return {**small, **{name.lower(): value for name, value in request.headers.items()}}


def _body_bytes(headers: Any) -> int:
    return int(headers.get("x-amz-decoded-content-length") or headers.get("Content-Length") or 0)


def _is_aws_chunked(headers: Any) -> bool:
    return "aws-chunked" in headers.get("Content-Encoding", "") or headers.get("x-amz-content-sha256", "").startswith(
        "STREAMING-"
    )


def kind_of(method: str, raw_path: str) -> tuple[str, str]:
    """S3's name of the operation, and the object's key ("" for operations on a bucket or on all buckets)."""
    url = urlsplit(raw_path)
    query = parse_qs(url.query, keep_blank_values=True)
    found = re.fullmatch(r"/([^/]*)/?(.*)", unquote(url.path), re.DOTALL)
    bucket, key = (found[1], found[2]) if found else ("", "")
    if key:
        if "uploads" in query:
            return "CreateMultipartUpload", key
        if "uploadId" in query:
            names = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
            return names.get(method, "ListParts"), key
        names = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
        return names.get(method, method), key
    if not bucket:
        return "ListBuckets", ""
    if method == "GET":
        return "ListMultipartUploads" if "uploads" in query else "ListObjects" if "list-type" not in query else (
            "ListObjectsV2"), ""  # fmt: skip
    if method == "POST" and "delete" in query:
        return "DeleteObjects", ""
    return {"HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}.get(method, method), ""
