"""A stand-in for one SGLang server process, with faults that are switched while it runs.

    python fake_server.py --port 20000 [--speed 50] [--request-log FILE] [--mode-file FILE] [any SGLang flag]

The reply is a function of the last user message alone: its answer begins with `mark(text)`, so a reader can tell
whether a row's reply belongs to its prompt. It takes tokens / rate / speed seconds, with the rate of a real server
(a step of 11.5 ms + 0.175 ms for each running request); `--speed 1e9` answers at once.

Faults come by POST /fake/mode and from any number of --mode-file (read again whenever one changes, so they survive a
restart; `{port}` in a name stands for the port): one JSON object or a list of them, and the newest setting replaces
all before it. Faults of the whole process:

    ok                                nothing wrong
    loading   seconds, how            answers 503 (how = "503") or refuses connections (how = "refuse", the default)
    exit      code                    the process ends at once, with a line on stderr
    hang_all                          accepts and never answers, tokens stand still, /health is 200
    health_slow  seconds (25)         /health and /health_generate are slow while tokens flow
    slow      speed                   another speed
    crash_above  running              the process tree dies as soon as more requests than that run
    ignore_disconnects                goes on generating for clients that are gone
    leak      mb                      every request costs that much memory for ever
    orphan    own_session (false)     a child that ignores SIGTERM holds the port, and outlives this process

Faults of single requests. `containing` limits them to prompts with that text, `share` to that share of them, `n`
to the first n (for hang_after: to those after n):

    hang, hang_after                  never answered
    crash_on                          the process tree dies when the request arrives
    http      status, message         refused with that status
    reset                             the connection is reset in the middle of the body
    abort                             finish_reason abort after half of the text
    empty                             empty content with stop
    null                              null content with length
    thought_inside                    the thought in the content, between think tags
    unclosed                          the thought in the content, without its closing tag
    loop                              the same words until max_tokens
    junk                              "!!!!" with stop
    wrong                             a good-looking reply to another prompt
    wrong_usage                       a good reply whose usage does not fit
    surrogate                         a lone surrogate in the content
    tool_call                         a call of the first tool, the mark in its arguments
"""

import argparse
import asyncio
import contextlib
import ctypes
import hashlib
import json
import math
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

Fault = dict[str, Any]

OF_THE_PROCESS = {
    "loading", "exit", "hang_all", "health_slow", "slow", "crash_above", "ignore_disconnects", "leak", "orphan",
}  # fmt: skip
OF_A_REQUEST = {
    "hang", "hang_after", "crash_on", "http", "reset", "abort", "empty", "null", "thought_inside", "unclosed", "loop",
    "junk", "wrong", "wrong_usage", "surrogate", "tool_call",
}  # fmt: skip
ROLES = {"system", "user", "assistant", "tool", "function", "developer"}
WORDS = [
    "then", "look", "at", "each", "part", "in", "turn", "and", "write", "down", "what", "holds", "before", "the", "end",
    "river", "stone", "paper", "a", "boat", "with", "three", "sails", "goes", "over", "to", "an", "island", "where",
    "people", "wait", "for", "news", "from", "far", "away", "but", "nobody", "knows", "when", "it", "will", "come",
    "if", "we", "count", "all", "of", "them", "twice", "number", "must", "be", "same", "or", "else", "one", "lost",
    "so", "first", "second", "third", "last", "perhaps", "never", "often", "blue", "green", "small", "large", "old",
]  # fmt: skip
CRASHED = 134  # what a shell shows for SIGABRT, which is how a CUDA error ends a process
LOOK_SECONDS = 0.05


def mark(text: str) -> str:
    """The words with which the reply to this last user message begins: `[[` 16 hex digits `]]`."""
    return f"[[{digest(text)}]]"


def digest(text: str) -> str:
    """16 hex digits for a text, lone surrogates included: what the request log names a prompt by."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def last_user_text(messages: list[dict[str, Any]]) -> str:
    """The text of the last user message, or of the last message where there is no user."""
    users = [message for message in messages if message.get("role") == "user"]
    return text_of((users or messages)[-1].get("content"))


class Clock:
    """Virtual seconds, whose speed may change (or be 0) while somebody waits for a moment in them."""

    def __init__(self, speed: float) -> None:
        self.speed, self._at, self._since, self._changed = speed, 0.0, time.monotonic(), asyncio.Event()

    def now(self) -> float:
        return self._at + (time.monotonic() - self._since) * self.speed

    def set_speed(self, speed: float) -> None:
        self._at, self._since, self.speed = self.now(), time.monotonic(), speed
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left / self.speed if self.speed else None)


class Generation:
    """One request that the server works on: `tokens` at `rate` per virtual second from `start` on."""

    def __init__(self, rid: str, text: str, tokens: int, prompt_tokens: int, connection: asyncio.Transport | None):
        self.rid, self.text, self.tokens, self.prompt_tokens = rid, text, tokens, prompt_tokens
        self.connection, self.start, self.rate = connection, math.inf, 0.0
        self.aborted, self.made_when_aborted = asyncio.Event(), 0

    @property
    def running(self) -> bool:
        """Whether it has a slot, so that its tokens flow."""
        return self.start < math.inf

    def made(self, now: float) -> int:
        return int(min(self.tokens, max(0.0, (now - self.start) * self.rate)))


class Server:
    """One process's state: its faults, what runs, and the socket it listens on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clock = Clock(args.speed)
        self.slots = asyncio.Semaphore(args.max_running)
        self.faults: list[Fault] = []
        self.faults_changed = asyncio.Event()
        self.mode_files = [Path(name.format(port=args.port)) for name in args.mode_file]
        self.mode_file_read: tuple[int, Path] | None = None  # when it was written, and which one
        self.log = open_log(args.request_log.format(port=args.port)) if args.request_log else None
        self.random = random.Random(args.port)
        self.generations: dict[str, Generation] = {}
        self.started = self.finished = self.finished_tokens = self.prompt_tokens = 0
        self.seen: dict[int, int] = {}  # id of a fault -> how many requests it was looked up for
        self.leaked: list[bytearray] = []
        self.site: web.SockSite | None = None
        self.socket: socket.socket | None = None
        self.runner: web.AppRunner | None = None
        self.ready_at = time.monotonic() + args.load_seconds
        self.draining = self.orphaned = False
        self.scheduler = spawn_scheduler() if args.with_scheduler_child else None

    # ---- faults

    def fault(self, mode: str) -> Fault | None:
        """The fault of the whole process with this name, where it is set."""
        return next((fault for fault in self.faults if fault["mode"] == mode), None)

    def set_faults(self, given: Fault | list[Fault]) -> None:
        """Replace all faults. Raises ValueError for a mode that does not exist, so that no test runs without one."""
        faults = [dict(fault) for fault in (given if isinstance(given, list) else [given]) if fault["mode"] != "ok"]
        for fault in faults:
            if fault["mode"] not in OF_THE_PROCESS | OF_A_REQUEST:
                raise ValueError(f"no such mode: {fault['mode']}")
            fault["since"] = time.monotonic()
        self.faults, self.seen = faults, {}
        self.clock.set_speed(self.speed())
        self.faults_changed.set()
        self.faults_changed = asyncio.Event()
        if exit_now := self.fault("exit"):
            print("fake server: told to exit", file=sys.stderr, flush=True)
            self.die(exit_now.get("code", 1))

    def speed(self) -> float:
        if self.fault("hang_all") or self.scheduler_stopped():
            return 0.0
        slow = self.fault("slow")
        return float(slow["speed"]) if slow else float(self.args.speed)

    def fault_for(self, messages: list[dict[str, Any]]) -> Fault | None:
        """The first fault that is meant for this request."""
        everything = "\n".join(text_of(message.get("content")) for message in messages)
        for fault in self.faults:
            if fault["mode"] not in OF_A_REQUEST or fault.get("containing", "") not in everything:
                continue
            if self.random.random() >= fault.get("share", 1.0):
                continue
            self.seen[id(fault)] = count = self.seen.get(id(fault), 0) + 1
            limit = fault.get("n", math.inf)
            if count > limit if fault["mode"] == "hang_after" else count <= limit:
                return fault
        return None

    def read_mode_files(self) -> None:
        newest = max(((file.stat().st_mtime_ns, file) for file in self.mode_files if file.exists()), default=None)
        if newest and newest != self.mode_file_read:
            self.mode_file_read = newest
            self.set_faults(json.loads(newest[1].read_bytes()))

    # ---- life

    async def live(self) -> None:
        """Look at the mode file, the scheduler and the port, again and again, until SIGTERM has been answered."""
        while not (self.draining and not self.generations):
            self.read_mode_files()
            if self.scheduler is not None:
                if self.scheduler.poll() is not None:
                    await self.die_slowly()
                if self.clock.speed != (speed := self.speed()):
                    self.clock.set_speed(speed)
            await self.open_or_close_port()
            if (orphan := self.fault("orphan")) and self.socket is not None and not self.orphaned:
                spawn_orphan(self.socket, orphan.get("own_session", False))
                self.orphaned = True
            await asyncio.sleep(LOOK_SECONDS)

    async def open_or_close_port(self) -> None:
        loading = self.fault("loading")
        refusing = loading is not None and loading.get("how", "refuse") == "refuse" and self.loading()
        wanted = time.monotonic() >= self.ready_at and not refusing and not self.draining
        if wanted and self.site is None:
            assert self.runner is not None
            self.socket = socket.create_server((self.args.host, self.args.port))  # in use: we end, as the real one does
            self.site = web.SockSite(self.runner, self.socket, backlog=1024)
            await self.site.start()
        elif not wanted and self.site is not None:
            site, self.site, self.socket = self.site, None, None
            await site.stop()
            if refusing:
                self.reset_all()

    def loading(self) -> bool:
        fault = self.fault("loading")
        return fault is not None and time.monotonic() < fault["since"] + fault.get("seconds", math.inf)

    def scheduler_stopped(self) -> bool:
        if self.scheduler is None or self.scheduler.poll() is not None:
            return self.scheduler is not None
        stat = Path(f"/proc/{self.scheduler.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "Tt"

    async def die_slowly(self) -> NoReturn:
        """What a real server does without its scheduler: resets its requests just before it kills itself."""
        self.clock.set_speed(0.0)
        await asyncio.sleep(self.args.death_seconds * 7.5 / 8)
        self.reset_all()
        await asyncio.sleep(self.args.death_seconds * 0.5 / 8)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def die(self, code: int) -> NoReturn:
        """The whole process tree ends, this moment."""
        if self.scheduler is not None:
            self.scheduler.kill()
        os._exit(code)

    def reset_all(self) -> None:
        for generation in self.generations.values():
            if generation.connection is not None:
                reset(generation.connection)

    def note(self, event: str, text: str, **more: Any) -> None:
        """One line in the request log, in one write, so that several servers can share a file."""
        if self.log is not None:
            line = {"time": time.time(), "port": self.args.port, "pid": os.getpid(), "event": event,
                    "sha": digest(text), **more}  # fmt: skip
            os.write(self.log, (json.dumps(line) + "\n").encode())

    # ---- requests

    async def chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body, refusal = self.parsed(raw)
        if refusal is not None:
            return refusal
        messages = body["messages"]
        text = last_user_text(messages)
        rid = str(body.get("rid") or uuid.uuid4().hex)
        fault = self.fault_for(messages) or {"mode": "ok"}
        self.started += 1
        self.note("started", text, rid=rid, mode=fault["mode"], seed=body.get("seed"), running=len(self.generations))
        crash_above = self.fault("crash_above")
        if fault["mode"] == "crash_on" or (crash_above and len(self.generations) >= crash_above["running"]):
            self.note("crashed", text, rid=rid)
            self.die(CRASHED)
        if fault["mode"] == "http":
            self.note("refused", text, rid=rid)
            return error(fault.get("message", "told to refuse"), fault["status"])
        if leak := self.fault("leak"):
            self.leaked.append(bytearray(os.urandom(1024) * int(leak["mb"] * 1024)))
        generation = Generation(rid, text, 0, prompt_tokens_of(messages), request.transport)
        reply = self.reply(body, generation, fault)
        self.generations[rid] = generation
        work = asyncio.ensure_future(self.generate(generation, fault))
        try:
            await (asyncio.shield(work) if self.fault("ignore_disconnects") else work)
            response = await self.send(request, generation, reply, fault)
        except (asyncio.CancelledError, ConnectionError):
            self.note("dropped", text, rid=rid)
            if not self.fault("ignore_disconnects"):
                self.generations.pop(rid, None)
            raise
        self.note("aborted" if generation.aborted.is_set() else "finished", text, rid=rid)
        return response

    async def generate(self, generation: Generation, fault: Fault) -> None:
        """Wait for a slot, then for the tokens; an abort ends both. Leaves the books in order for any ending."""
        async with self.slots:
            generation.start, generation.rate = self.clock.now(), 1000.0 / (11.5 + 0.175 * (len(self.running()) + 1))
            waits: list[asyncio.Future[Any]]
            if fault["mode"] in ("hang", "hang_after"):
                generation.rate = 0.0
                waits = [asyncio.ensure_future(self.until_fault_is_gone(fault))]
            else:
                share = 0.5 if fault["mode"] == "abort" else 1.0
                end = generation.start + share * generation.tokens / generation.rate
                waits = [asyncio.ensure_future(self.clock.until(end))]
            waits.append(asyncio.ensure_future(generation.aborted.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        generation.made_when_aborted = generation.made(self.clock.now())
        if fault["mode"] == "abort":
            generation.aborted.set()
            generation.made_when_aborted = generation.tokens // 2
        self.finished += 1
        self.finished_tokens += generation.made_when_aborted if generation.aborted.is_set() else generation.tokens
        self.prompt_tokens += generation.prompt_tokens
        self.generations.pop(generation.rid, None)

    async def until_fault_is_gone(self, fault: Fault) -> None:
        while fault in self.faults:
            await self.faults_changed.wait()

    async def send(
        self, request: web.Request, generation: Generation, reply: dict[str, Any], fault: Fault
    ) -> web.StreamResponse:
        if generation.aborted.is_set():
            cut_short(reply, generation)
        raw = json.dumps(reply).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(raw)
        await response.prepare(request)
        if fault["mode"] == "reset":
            await response.write(raw[: len(raw) // 2])
            if request.transport is not None:
                reset(request.transport)
            return response
        await response.write(raw)
        await response.write_eof()
        return response

    def parsed(self, raw: bytes) -> tuple[dict[str, Any], web.Response | None]:
        """The body, or the refusal that a real server sends for it."""
        if self.loading():
            return {}, web.json_response({"status": "loading"}, status=503)
        try:
            body = json.loads(raw)
        except ValueError as problem:
            return {}, error("1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode "
                             f"error', 'ctx': {{'error': '{problem}'}}}}", kind="Bad Request")  # fmt: skip
        messages = body.get("messages") if isinstance(body, dict) else None
        if messages is None:
            return {}, error("1 validation error:\n  {'type': 'missing', 'loc': ('body', 'messages'), "
                             "'msg': 'Field required'}", kind="Bad Request")  # fmt: skip
        if not messages:
            return {}, error("Messages cannot be empty.")
        for number, message in enumerate(messages):
            content = message.get("content")
            if message.get("role") not in ROLES or (message["role"] == "user" and content is None):
                return {}, error(f"1 validation error:\n  {{'type': 'value_error', 'loc': ('body', 'messages', "
                                 f"{number}), 'input': {message.get('role')!r}}}", kind="Bad Request")  # fmt: skip
            if any("\ud800" <= letter <= "\udfff" for letter in text_of(content)):
                return {}, error("TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, "
                                 "InputSequence]]", kind="BadRequest")  # fmt: skip
        context, prompt_tokens = self.args.context_length, prompt_tokens_of(messages)
        if prompt_tokens >= context:
            return {}, error(f"The input ({prompt_tokens} tokens) is longer than the model's context length "
                             f"({context} tokens).")  # fmt: skip
        if limit_of(body, context) > context:
            return {}, error(f"max_completion_tokens is too large: {limit_of(body, context)}.This model supports at "
                             f"most {context} completion tokens.")  # fmt: skip
        if (body.get("temperature") or 0) < 0:
            return {}, error(f"temperature must be a non-negative finite number, got {body['temperature']}.")
        if body.get("stream"):
            return {}, error("the fake server does not stream")
        return body, None

    def reply(self, body: dict[str, Any], generation: Generation, fault: Fault) -> dict[str, Any]:
        """The whole answer, computed before any time is spent; sets how many tokens it takes."""
        mode, text = fault["mode"], generation.text
        thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        about = text + "?" if mode == "wrong" else text
        known = known_answer(about) if mode != "wrong" else None
        want = 12 if known else length_for(text, self.args.mean_tokens)
        context = self.args.context_length
        limit = max(1, min(limit_of(body, context), context - generation.prompt_tokens))
        thought = words(want * 7 // 10, f"thought {about}") if thinking else []
        answer = [mark(about), known] if known else [mark(about), *words(want - len(thought) - 1, about)]
        if mode == "loop":
            again = [WORDS[i % 6] for i in range(limit)]
            thought, answer = (again, []) if thinking else ([], again)
        made = (thought + answer)[:limit]
        finish = "stop" if len(made) == len(thought + answer) and mode != "loop" else "length"
        thought, answer = made[: len(thought)], made[len(thought) :]
        reasoning: str | None = " ".join(thought) if thinking else None
        content: str | None = " ".join(answer)
        calls = None
        if mode == "empty":
            content, finish = "", "stop"
        elif mode == "null":
            content, finish = None, "length"
        elif mode == "thought_inside":
            reasoning, content = None, f"<think>\n{reasoning or 'so'}\n</think>\n\n{content}"
        elif mode == "unclosed":
            reasoning, content = None, f"<think>\n{reasoning or 'so'}\n\n{content}"
        elif mode == "junk":
            reasoning, content = ("!" * 40 if thinking else None), "!" * 80
        elif mode == "surrogate":
            content = f"{content} \ud83d end"
        elif mode == "tool_call":
            tools = body.get("tools") or [{"function": {"name": "f"}}]
            function = {"name": tools[0]["function"]["name"], "arguments": json.dumps({"mark": mark(text)})}
            calls = [{"id": "call_0", "index": 0, "type": "function", "function": function}]
            content, finish = "", "tool_calls"
        generation.tokens = len(made)
        usage = {"prompt_tokens": generation.prompt_tokens, "completion_tokens": len(made),
                 "total_tokens": generation.prompt_tokens + len(made), "prompt_tokens_details": None,
                 "reasoning_tokens": len(thought)}  # fmt: skip
        if mode == "wrong_usage":
            usage |= {"completion_tokens": 0, "reasoning_tokens": 999_999, "total_tokens": -1}
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = token_ids(text, generation.prompt_tokens)
            choice["token_ids"] = token_ids(mark(text), len(made))
        return {"id": generation.rid, "object": "chat.completion", "created": int(time.time()),
                "model": body.get("model") or self.args.model_path, "choices": [choice], "usage": usage,
                "metadata": {"weight_version": "default"}}  # fmt: skip

    async def abort(self, request: web.Request) -> web.Response:
        asked = await request.json()
        for generation in list(self.generations.values()):
            if asked.get("abort_all") or generation.rid == asked.get("rid"):
                generation.aborted.set()
        return web.Response()

    # ---- looking in from outside

    async def health(self, request: web.Request) -> web.Response:
        if self.loading():
            return web.Response(status=503)
        if slow := self.fault("health_slow"):
            await asyncio.sleep(slow.get("seconds", 25.0))
        if self.scheduler_stopped():
            await asyncio.sleep(self.args.health_seconds)
            if self.scheduler_stopped():
                return web.Response(status=503)
        return web.Response()

    def running(self) -> list[Generation]:
        return [generation for generation in self.generations.values() if generation.running]

    def tokens_per_second(self) -> float:
        return sum(generation.rate for generation in self.running()) * self.clock.speed

    def tokens(self) -> int:
        """Tokens made so far, those of unfinished requests included."""
        return self.finished_tokens + sum(generation.made(self.clock.now()) for generation in self.running())

    async def server_info(self, request: web.Request) -> web.Response:
        args = self.args
        inside = {"effective_max_running_requests_per_dp": args.max_running,
                  "last_gen_throughput": self.tokens_per_second()}  # fmt: skip
        return web.json_response(
            {"model_path": args.model_path, "served_model_name": args.model_path, "context_length": args.context_length,
             "max_running_requests": args.max_running_asked, "host": args.host, "port": args.port, "status": "ready",
             "max_total_num_tokens": 377511, "max_req_input_len": args.context_length - 6, "reasoning_parser": "qwen3",
             "version": args.version, "internal_states": [inside]})  # fmt: skip

    async def model_info(self, request: web.Request) -> web.Response:
        path = self.args.model_path
        return web.json_response({"model_path": path, "tokenizer_path": path, "is_generation": True,
                                  "weight_version": "default", "model_type": "qwen3"})  # fmt: skip

    async def models(self, request: web.Request) -> web.Response:
        path = self.args.model_path
        model = {"id": path, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": path,
                 "parent": None, "max_model_len": self.args.context_length}  # fmt: skip
        return web.json_response({"object": "list", "data": [model]})

    async def loads(self, request: web.Request) -> web.Response:
        running = self.running()
        used = sum(g.prompt_tokens + g.made(self.clock.now()) for g in running)
        load = {"timestamp": time.time(), "dp_rank": 0, "num_running_reqs": len(running),
                "num_waiting_reqs": len(self.generations) - len(running), "num_used_tokens": used,
                "num_total_tokens": used, "max_total_num_tokens": 377511,
                "max_running_requests": self.args.max_running, "token_usage": used / 377511,
                "gen_throughput": self.tokens_per_second()}  # fmt: skip
        return web.json_response({"version": "0.5.17", "accelerator": "none", "num_accelerators": 1, "loads": [load]})

    async def metrics(self, request: web.Request) -> web.Response:
        """generation_tokens_total counts finished requests only, realtime_tokens_total moves with every token."""
        model = f'engine_type="unified",model_name="{self.args.model_path}"'
        rank = f'{model},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        running, now = self.running(), self.clock.now()
        used = sum(g.prompt_tokens + g.made(now) for g in running)
        values: list[tuple[str, str, float]] = [
            ("num_running_reqs", rank, len(running)),
            ("num_queue_reqs", rank, len(self.generations) - len(running)),
            ("gen_throughput", rank, self.tokens_per_second()),
            ("num_used_tokens", rank, used),
            ("decode_sum_seq_lens", rank, used),
            ("token_usage", rank, used / 377511),
            ("cache_hit_rate", rank, 0.0),
            ("max_total_num_tokens", rank, 377511),
            ("context_len", rank, self.args.context_length),
            ("realtime_tokens_total", f'mode="decode",{rank}', self.tokens()),
            ("generation_tokens_total", model, self.finished_tokens),
            ("prompt_tokens_total", model, self.prompt_tokens),
            ("num_requests_total", model, self.finished),
            ("generation_tokens_histogram_sum", model, self.finished_tokens),
            ("generation_tokens_histogram_count", model, self.finished),
            ("http_requests_active", 'endpoint="/v1/chat/completions",method="POST"', len(self.generations)),
        ]
        text = "".join(f"sglang:{name}{{{labels}}} {float(value)}\n" for name, labels, value in values)
        return web.Response(text=text, content_type="text/plain")

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"pid": os.getpid(), "port": self.args.port, "started": self.started, "finished": self.finished,
             "in_flight": len(self.generations), "running": len(self.running()), "tokens": self.tokens(),
             "modes": [fault["mode"] for fault in self.faults], "argv": sys.argv[1:],
             "scheduler": self.scheduler.pid if self.scheduler else None})  # fmt: skip

    async def mode(self, request: web.Request) -> web.Response:
        try:
            self.set_faults(await request.json())
        except (ValueError, KeyError, TypeError) as problem:
            return error(str(problem))
        return web.Response()


def error(message: str, status: int = 400, kind: str = "BadRequestError") -> web.Response:
    """A refusal in the shape of the real server's."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return web.json_response(body, status=status)


def cut_short(reply: dict[str, Any], generation: Generation) -> None:
    """Make an aborted reply of a whole one: the words so far, finish_reason abort."""
    choice, usage, made = reply["choices"][0], reply["usage"], generation.made_when_aborted
    message, thought = choice["message"], min(usage["reasoning_tokens"], made)
    if message["reasoning_content"] is not None:
        message["reasoning_content"] = " ".join(message["reasoning_content"].split()[:thought])
    message["content"] = " ".join((message["content"] or "").split()[: made - thought])
    choice["finish_reason"] = "abort"
    if "token_ids" in choice:
        choice["token_ids"] = choice["token_ids"][:made]
    usage |= {"completion_tokens": made, "reasoning_tokens": thought, "total_tokens": usage["prompt_tokens"] + made}


def limit_of(body: dict[str, Any], context: int) -> int:
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or context)


def prompt_tokens_of(messages: list[dict[str, Any]]) -> int:
    """About four letters a token, and a few for the template."""
    return 8 + sum(len(text_of(message.get("content"))) for message in messages) // 4


def length_for(text: str, mean_tokens: float) -> int:
    """Tokens in the reply to this text: exponential around the mean and never short, a function of the text alone."""
    number = int(digest(text), 16) / 2**64
    return 8 + int(-math.log(1.0 - number) * max(1.0, mean_tokens - 8))


def words(count: int, salt: str) -> list[str]:
    """Words without any repeating order, which would rightly be taken for a looping reply."""
    return random.Random(digest(salt)).choices(WORDS, k=count)


def token_ids(salt: str, count: int) -> list[int]:
    first = int(digest(salt), 16)
    return [1000 + (first + i * 7919) % 150_000 for i in range(count)]


def known_answer(text: str) -> str | None:
    """The right answer to the simple questions that canaries are made of: a capital, a sum."""
    if "capital of france" in text.lower():
        return "Paris"
    if found := re.search(r"\b(\d+)\s*(\+|plus|-|minus|\*|x|×|times)\s*(\d+)\b", text):
        left, sign, right = int(found[1]), found[2], int(found[3])
        return str(left + right if sign in ("+", "plus") else left - right if sign in ("-", "minus") else left * right)
    return None


def reset(connection: asyncio.BaseTransport) -> None:
    """Close with a reset instead of an end, as a dying process's kernel does with unread data."""
    sock = connection.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):  # the client may have closed it already: as good
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if isinstance(connection, asyncio.Transport):
        connection.abort()


def open_log(name: str) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def spawn_scheduler() -> subprocess.Popen[bytes]:
    """A child named as SGLang names its own, which dies with this process."""
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        ["sglang::scheduler", "infinity"],
        executable="/bin/sleep",
        preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
    )


def spawn_orphan(listening: socket.socket, own_session: bool) -> None:
    """A child that holds our listening socket, ignores SIGTERM and outlives us, as a stuck CUDA process does."""
    subprocess.Popen(
        ["sglang::orphan", "infinity"],
        executable="/bin/sleep",
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),  # what is ignored stays so through exec
        pass_fds=[listening.fileno()],
        start_new_session=own_session,
    )


async def serve(args: argparse.Namespace) -> None:
    server = Server(args)
    app = web.Application(client_max_size=256 << 20)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/abort_request", server.abort)
    app.router.add_post("/fake/mode", server.mode)
    for path, handler in (
        ("/health", server.health),
        ("/health_generate", server.health),
        ("/v1/models", server.models),
        ("/server_info", server.server_info),
        ("/get_server_info", server.server_info),
        ("/model_info", server.model_info),
        ("/get_model_info", server.model_info),
        ("/v1/loads", server.loads),
        ("/metrics", server.metrics),
        ("/fake/stats", server.stats),
    ):
        app.router.add_get(path, handler)
    server.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await server.runner.setup()

    def drain() -> None:
        server.draining = True  # requests in flight are served to the end, however long that takes

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, drain)
    await server.live()
    await server.runner.cleanup()
    if server.scheduler is not None:
        server.scheduler.kill()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model-path", default="fake")
    parser.add_argument("--context-length", type=int, default=32768)
    parser.add_argument("--max-running-requests", dest="max_running_asked", type=int, default=256)
    parser.add_argument("--max-running-cap", type=int, default=4096, help="what the memory allows, whatever was asked")
    parser.add_argument("--version", default="0.5.17", help="that it says it is")
    parser.add_argument("--mean-tokens", type=float, default=40)
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as real time")
    parser.add_argument("--load-seconds", type=float, default=0.0, help="nothing listens for so long")
    parser.add_argument("--request-log", default="", help="JSON lines; {port} stands for the port")
    parser.add_argument("--mode-file", action="append", default=[], help="{port} stands for the port")
    parser.add_argument("--with-scheduler-child", action="store_true")
    parser.add_argument("--death-seconds", type=float, default=8.0, help="from the scheduler's death to our own")
    parser.add_argument("--health-seconds", type=float, default=20.0, help="until /health gives up on the scheduler")
    args, _ = parser.parse_known_args()
    args.max_running = min(args.max_running_asked, args.max_running_cap)
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
