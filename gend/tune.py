"""`gend tune`: which flags make the most tokens a second here. Real servers, real prompts, minutes for each.

Every seat (a GPU, or a server's group of them) tries candidates one after the other, all seats at the same time:

    next      The candidate that promises most: first those given, then the neighbours of the best one so far.
    start     A server with its flags. One that does not come up is a row in the table, with the reason.
    ramp      As many requests as it can run, and a few that wait, until as many replies have ended as run at once: by
              then requests of all ages run, as they do for the rest of a long run.
    window    Tokens made in it, per second. What is in flight at its end is aborted, and its tokens count too.
    again     Ramp and window once more on the same server, where it came out too close to the best one.
    stop      The server, and all of its processes, before the next one wants its memory.

Ctrl-C or the end of the time stops the servers and keeps what was measured.
"""

import asyncio
import contextlib
import itertools
import math
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from gend import processes
from gend.config import Flag, Settings
from gend.engine import Server, connect
from gend.errors import GendError, PromptRefused, ServerFault, ServerUnavailable, SettingsError
from gend.records import Prompt, Sampling
from gend.server_command import PORTS_PER_SERVER, Seat, argv, environment, fitting_names
from gend.sglang_flags import REFILL, REFILL_SLOTS
from gend.verdict import ABORT, LENGTH, OK, judge

NOISE = 0.03
"""Two windows on one server differ by so much: a gain must be larger to count, or the flags stay as they are."""

PROMISE = 0.7
"""Candidates that the plan gives less than this share of the best one's rate are not worth the minutes. Its own range
is no better than that (gend.plan.RANGE_SCALED)."""

UNMODELLED = 0.98
"""What a candidate promises of whose change the plan sees no effect: tried after those that may win a little more."""

STEP = 1.3
"""Running requests and state pools are tried in steps of this factor: 30 % more of them are 10 % more tokens/s."""

CHUNK_TOKENS = 8192
"""SGLang's --chunked-prefill-size on cards of 60 to 160 GiB; above it is 16384, which is then a step away."""

GRAPH, GRAPH_REQUESTS = "cuda-graph-max-bs-decode", 256
"""The largest decode batch with a CUDA graph, and its default on cards of 60 GiB and more."""

MTP_STEPS = range(1, 6)
WORSE = 0.05
"""More replies that are not good, by this share and twice what chance does to it, and a candidate cannot win: fast and
wrong is of no use."""

IN_FLIGHT = 64
"""For a server that does not say how many requests it can run, with flags that do not either."""

ANSWER_SECONDS = 120.0
"""A first prompt takes so long at most, kernels compiled meanwhile, once the server listens."""

ABORT_SECONDS = 15.0
GONE_SECONDS = 30.0
"""From KILL until the kernel has taken a server's GPU memory back: 8 s were seen."""
FAULTS = 50  # in one window: this server is broken

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANARY = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]

Flags = Mapping[str, Flag]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Flags to try. `promise` is the plan's tokens/s of one server; 0 where there is no plan for this model or card."""

    name: str
    flags: dict[str, Flag]
    promise: float = 0.0

    @property
    def key(self) -> str:
        """The same for what serves alike: a decode graph that is larger than needed changes nothing."""
        return repr(sorted((name, value) for name, value in self.flags.items() if name != GRAPH))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: what a candidate did. Rates are of one server."""

    name: str
    flags: dict[str, Flag]
    promise: float = 0.0
    tokens_per_second: float = 0.0
    running: int = 0
    """How many requests the server says it can run."""
    replies: int = 0
    bad_share: float = 0.0
    """Replies that came to an end with a verdict other than ok and length."""
    start_seconds: float = 0.0
    seconds: float = 0.0
    windows: int = 0
    failed: str = ""


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """What came out: all trials in the order in which they ended, and the best one, if any server worked."""

    trials: list[Trial]
    best: Trial | None
    stopped: str = ""
    """Why it ended before all candidates were tried."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How much time there is: for all, for a ramp at most, for a window."""

    minutes: float = 30.0
    ramp_seconds: float = 120.0
    window_seconds: float = 60.0


Predict = Callable[[Flags], float]


async def tune(
    settings: Settings,
    seats: list[Seat],
    prompts: list[Prompt],
    sampling: Sampling,
    starts: list[Candidate],
    others: list[Candidate],
    predict: Predict,
    pace: Pace,
    show: Callable[[str], None],
) -> Tuned:
    """Try `starts` in order, then `others` and neighbours of the best one by what they promise, while there is time.

    `predict` gives the tokens/s that the plan sees for one server with these flags: 0 where they do not fit. `show`
    takes lines for a person. Of two that are as good, the first one stays the best. Nothing is written.
    """
    await end_leftovers(settings.folder, show)
    search = Search(starts, others, predict)
    tuner = Tuner(settings, prompts, sampling, search, pace, show)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in STOP:
        loop.add_signal_handler(number, task.cancel)
    try:
        async with asyncio.TaskGroup() as group:
            for seat in seats:
                group.create_task(tuner.work(seat))
    except asyncio.CancelledError:
        tuner.stopped = "stopped by hand"
    finally:
        for number in STOP:
            loop.remove_signal_handler(number)
    return Tuned(trials=search.trials, best=search.best, stopped=tuner.stopped)


async def end_leftovers(folder: Path, show: Callable[[str], None]) -> None:
    """End servers that something killed left behind: they hold the memory that is to be measured."""
    for process in processes.left_behind(folder):
        show(f"ending {process.identity.name}, pid {process.pid}, left by something that was killed")
        process.kill()
        await _until(lambda process=process: not process.members(), GONE_SECONDS)  # type: ignore[misc]
        process.forget()


# -- what to try next ------------------------------------------------------------------------------------------------


class Search:
    """What was tried, and what is to be tried next."""

    def __init__(self, starts: list[Candidate], others: list[Candidate], predict: Predict):
        self._starts, self._others, self._predict = starts, others, predict
        self._tried: set[str] = set()
        self.trials: list[Trial] = []
        self.best: Trial | None = None

    def next(self) -> Candidate | None:
        """The candidate that promises most; None when there is none left that is worth it."""
        for candidate in self._starts:
            if candidate.key not in self._tried:
                self._tried.add(candidate.key)
                return candidate
        flags, running = self._base()
        near = [
            Candidate(name=name, flags=other, promise=self._predict(other))
            for name, other in neighbours(flags, running)
        ]
        promised = self._predict(flags)
        options = []
        for option in [*self._others, *near]:
            gain = option.promise / promised if promised else 1.0
            if option.key not in self._tried and gain >= PROMISE:
                options.append((UNMODELLED if abs(gain - 1) < 0.001 else gain, option))
        if not options:
            return None
        _, best = max(options, key=lambda pair: pair[0])  # the first of equals
        self._tried.add(best.key)
        return best

    def _base(self) -> tuple[Flags, int]:
        """Flags to go on from, and how many requests run with them: the best's, once every start has been measured."""
        if self.best and len(self.trials) >= len(self._starts):
            return self.best.flags, self.best.running
        return max(self._starts, key=lambda start: start.promise).flags, 0

    def record(self, trial: Trial) -> bool:
        """Add a row; whether it is the best one now."""
        self.trials.append(trial)
        won = not trial.failed and (self.best is None or self.beats(trial, self.best))
        if won:
            self.best = trial
        return won

    def beats(self, trial: Trial, best: Trial) -> bool:
        faster = trial.tokens_per_second > best.tokens_per_second * (1 + NOISE)
        chance = math.sqrt(sum(one.bad_share * (1 - one.bad_share) / max(1, one.replies) for one in (trial, best)))
        return faster and trial.bad_share <= best.bad_share + WORSE + 2 * chance

    def close_to_best(self, tokens_per_second: float) -> bool:
        """Whether another window may change the order."""
        return self.best is not None and abs(tokens_per_second / self.best.tokens_per_second - 1) < NOISE


def neighbours(flags: Flags, running: int) -> Iterator[tuple[str, dict[str, Flag]]]:
    """Flags one step away, each with its name. `running`: what a server with these flags said it can run, or 0."""
    asked = int(_number(flags, "max-running-requests", running))
    for factor in (STEP, 1 / STEP):
        if asked and (wanted := max(1, round(asked * factor))) != asked:
            changed = dict(flags) | {"max-running-requests": wanted}
            for pool in ("mamba-full-memory-ratio", "max-mamba-cache-size"):  # the states of as many requests
                if pool in flags:
                    changed[pool] = _like(flags[pool], _number(flags, pool, 0) * factor)
            if wanted > _number(flags, GRAPH, GRAPH_REQUESTS):  # beyond the largest graph each step is slower
                changed[GRAPH] = wanted
            yield f"running {wanted}", changed
    radix = not flags.get("disable-radix-cache")
    # Said in either case: gend itself switches the cache off for some models.
    yield f"radix cache {'off' if radix else 'on'}", dict(flags) | {"disable-radix-cache": radix}
    if radix:
        for factor in (STEP, 1 / STEP):
            if "mamba-full-memory-ratio" in flags:
                ratio = round(_number(flags, "mamba-full-memory-ratio", 0) * factor, 3)
                yield f"mamba ratio {ratio}", dict(flags) | {"mamba-full-memory-ratio": ratio}
    if flags.get("speculative-algorithm"):
        steps = int(_number(flags, "speculative-num-steps", 3))
        for other in (steps + 1, steps - 1):
            if other in MTP_STEPS:
                drafts = {"speculative-num-steps": other, "speculative-num-draft-tokens": other + 1}
                yield f"MTP {other} steps", dict(flags) | drafts
    if asked > 2 * REFILL_SLOTS and REFILL not in flags:
        yield f"refill {REFILL_SLOTS} at once", dict(flags) | {REFILL: REFILL_SLOTS}
    chunk = int(_number(flags, "chunked-prefill-size", CHUNK_TOKENS))
    for size in (chunk * 2, chunk // 2):
        yield f"chunked prefill {size}", dict(flags) | {"chunked-prefill-size": size}


def _number(flags: Flags, name: str, default: float) -> float:
    try:
        return float(str(flags[name]))
    except KeyError:
        return default
    except ValueError as error:
        raise SettingsError(f"servers.flags.{name}: a number is needed, got {flags[name]!r}") from error


def _like(old: Flag, new: float) -> Flag:
    return round(new) if isinstance(old, int) else round(new, 3)


# -- one candidate after the other -----------------------------------------------------------------------------------


class _Failed(Exception):
    """This candidate has no rate, and why."""


class Tuner:
    """The seats' common state: the search, the clock, and how long a trial takes."""

    def __init__(
        self,
        settings: Settings,
        prompts: list[Prompt],
        sampling: Sampling,
        search: Search,
        pace: Pace,
        show: Callable[[str], None],
    ):
        self.settings, self.prompts, self.sampling = settings, prompts, sampling
        self.search, self.pace, self.show = search, pace, show
        self.stopped = ""
        self._deadline = time.monotonic() + 60 * pace.minutes
        self._longest_seconds = 0.0
        self._numbers = itertools.count(1)

    async def work(self, seat: Seat) -> None:
        """Try candidates on one seat until none is left or time is."""
        while candidate := self.search.next():
            if (left := self._deadline - time.monotonic()) < self._longest_seconds:
                self.stopped = f"{left:.0f} s are left, and a candidate takes {self._longest_seconds:.0f}"
                return
            trial = await self._try(candidate, seat)
            won = self.search.record(trial)
            self._longest_seconds = max(self._longest_seconds, trial.seconds)
            self.show(row(trial) + ("  <- best" if won else ""))

    async def _try(self, candidate: Candidate, seat: Seat) -> Trial:
        started = time.monotonic()
        trial = Trial(name=candidate.name, flags=candidate.flags, promise=candidate.promise)
        servers = msgspec.structs.replace(self.settings.servers, flags=dict(candidate.flags))
        settings = msgspec.structs.replace(self.settings, servers=servers)
        name = f"tune-{next(self._numbers)}"
        where = f"GPU {','.join(map(str, seat.gpus))}" if seat.gpus else f"port {seat.port}"
        self.show(f"{candidate.name}: starting on {where}, log {processes.log_path(settings.folder, name)}")
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._deadline - time.monotonic()):
                async with _running(settings, seat, name) as process:
                    return await self._measure(trial, settings, seat, process, started)
        except TimeoutError:
            failed = "the time was over before there was a rate"
        except (_Failed, GendError) as error:
            failed = str(error)
        return msgspec.structs.replace(trial, failed=failed, seconds=time.monotonic() - started)

    async def _measure(
        self, trial: Trial, settings: Settings, seat: Seat, process: processes.Process, started: float
    ) -> Trial:
        model, limit = settings.model.path, settings.work.request_seconds
        async with connect(seat.url, model, ANSWER_SECONDS) as server:
            await _wait_until_it_answers(server, self.sampling, process, settings)
        start_seconds = time.monotonic() - started
        made: list[Traffic] = []
        async with connect(seat.url, model, limit) as server:
            running = (await server.load()).max_running or 0
            for _ in range(2):
                in_flight = running or int(_number(trial.flags, "max-running-requests", IN_FLIGHT))
                traffic = Traffic(server, self.prompts, self.sampling, in_flight + max(2, in_flight // 32))
                made.append(traffic)
                try:
                    await traffic.run(self.pace)
                except ServerUnavailable as error:
                    raise _Failed(f"died under load: {_last_words(settings, process)}") from error
                rate = sum(one.tokens_per_second for one in made) / len(made)
                if not self.search.close_to_best(rate):
                    break
        ended, bad = (sum(numbers) for numbers in zip(*((one.ended, one.bad) for one in made), strict=True))
        return msgspec.structs.replace(
            trial,
            tokens_per_second=rate,
            running=running,
            replies=ended,
            bad_share=bad / ended if ended else 0.0,
            start_seconds=start_seconds,
            seconds=time.monotonic() - started,
            windows=len(made),
        )


@contextlib.asynccontextmanager
async def _running(settings: Settings, seat: Seat, name: str) -> AsyncIterator[processes.Process]:
    """A server for the block; all of it is gone afterwards, however the block ends. Raises _Failed."""
    for port in range(seat.port, seat.port + PORTS_PER_SERVER):
        if not processes.port_free(port):
            raise _Failed(f"port {port} is held by {processes.port_holder(port)}")
    processes.log_path(settings.folder, name).unlink(missing_ok=True)
    names = await asyncio.to_thread(fitting_names, settings, seat)
    command = argv(settings, seat, names)
    process = processes.start(settings.folder, name, command, environment(settings, seat), seat.port)
    try:
        yield process
    finally:
        process.terminate()
        try:
            await _until(lambda: process.exit_code() is not None, settings.servers.stop_seconds)
        finally:  # also where somebody is tired of waiting
            process.kill()
        await _until(lambda: not process.members(), GONE_SECONDS)
        process.forget()


async def _until(true: Callable[[], object], seconds: float) -> None:
    """Look until it is true, for at most so long."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:  # noqa: ASYNC110  # no event tells of another process' end
        await asyncio.sleep(0.05)


async def _wait_until_it_answers(
    server: Server, sampling: Sampling, process: processes.Process, settings: Settings
) -> None:
    """Until a real reply came back. Raises _Failed."""
    short = Sampling(max_tokens=16, thinking=sampling.thinking)
    deadline = time.monotonic() + settings.servers.load_seconds
    while True:
        asked = time.monotonic()
        asking = asyncio.create_task(server.chat(CANARY, None, short, seed=1))
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=0.2)
                if (code := process.exit_code()) is not None:
                    raise _Failed(f"ended with {code}: {_last_words(settings, process)}")
                if time.monotonic() > deadline:
                    raise _Failed(f"did not answer within {settings.servers.load_seconds:.0f} s")
            await asking
            return
        except PromptRefused as error:
            raise _Failed(f"refuses a plain prompt: {error}") from error
        except ServerFault as error:
            if time.monotonic() - asked >= ANSWER_SECONDS:
                raise _Failed(f"listens, but: {error}") from error
            await asyncio.sleep(0.2)
        except ServerUnavailable:
            await asyncio.sleep(0.2)  # refused while it loads: no failure
        finally:
            asking.cancel()


def _last_words(settings: Settings, process: processes.Process) -> str:
    """The line of its log that tells most of why a server ended."""
    lines = processes.log_tail(settings.folder, process.identity.name, 200)
    telling = [line for line in lines if re.search(r"\w(Error|Exception)\b|\berror:|out of memory", line)]
    return (telling or lines or ["its log is empty"])[-1].strip()[:200]


# -- requests, and what they bring -----------------------------------------------------------------------------------


class Traffic:
    """Keeps `in_flight` requests at a server, and counts the tokens that it makes in a window.

    Replies come whole, so the tokens of one are taken as made evenly from when it was sent to when it ended.
    """

    def __init__(self, server: Server, prompts: list[Prompt], sampling: Sampling, in_flight: int):
        self._server, self._prompts, self._sampling, self.in_flight = server, prompts, sampling, in_flight
        self._random = random.Random(1)  # the same requests for every candidate
        self._order = self._random.sample(range(len(prompts)), len(prompts))
        self._numbers = itertools.count()
        self._out: dict[int, float] = {}  # number of a request -> when it was sent
        self._spans: list[tuple[float, float, float]] = []  # of those that came back: sent, ended, tokens
        self._closed = False
        self._faults, self._last_fault = 0, ""
        self.ended = self.bad = 0
        self.tokens_per_second = 0.0

    async def run(self, pace: Pace) -> None:
        """Ramp and window. Raises _Failed, ServerUnavailable."""
        begun = time.monotonic()
        lanes = [asyncio.create_task(self._lane()) for _ in range(self.in_flight)]
        try:
            while self.ended < self.in_flight and time.monotonic() - begun < pace.ramp_seconds:
                await self._look(lanes)
            first = time.monotonic()
            while time.monotonic() - first < pace.window_seconds:
                await self._look(lanes)
            last = time.monotonic()
            self._closed = True
            await self._server.abort_all()
            await asyncio.wait(lanes, timeout=ABORT_SECONDS)
            self.tokens_per_second = self._tokens_between(first, last) / (last - first)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        if not self.tokens_per_second:
            raise _Failed(f"not one token in {last - begun:.0f} s; {self._last_fault or 'requests hang'}")

    async def _look(self, lanes: list["asyncio.Task[None]"]) -> None:
        await asyncio.sleep(0.1)
        for lane in lanes:
            if lane.done():
                lane.result()  # raises: a lane ends by itself only where the server is gone
        if self._faults > FAULTS:
            raise _Failed(f"{self._faults} requests failed: {self._last_fault}")

    async def _lane(self) -> None:
        """One request after the other."""
        # The first is cut at random, so that they end one by one also where all replies run to max_tokens.
        cut = self._random.uniform(0.05, 1.0)
        while not self._closed:
            number = next(self._numbers)
            prompt = self._prompts[self._order[number % len(self._order)]]
            sampling = msgspec.structs.replace(self._sampling, max_tokens=round(self._sampling.max_tokens * cut) or 1)
            self._out[number] = sent = time.monotonic()
            try:
                reply = await self._server.chat(prompt.messages, prompt.tools, sampling, seed=number)
            except (PromptRefused, ServerFault) as error:
                del self._out[number]
                self._last_fault = str(error)
                self._faults += isinstance(error, ServerFault)  # a prompt that is refused is its own fault
                await asyncio.sleep(0.1)
                continue
            del self._out[number]
            self._spans.append((sent, time.monotonic(), reply.usage.completion_tokens))
            cut = 1.0
            if (verdict := judge(reply, sampling)) != ABORT:
                self.ended += 1
                self.bad += verdict not in (OK, LENGTH)

    def _tokens_between(self, first: float, last: float) -> float:
        seconds = sum(ended - sent for sent, ended, _ in self._spans)
        pace = sum(tokens for *_, tokens in self._spans) / seconds if seconds else 0.0
        # What could not be aborted is taken to have made as many a second as the others.
        spans = [*self._spans, *((sent, last, (last - sent) * pace) for sent in self._out.values())]
        return sum(
            tokens * max(0.0, min(ended, last) - max(sent, first)) / (ended - sent) for sent, ended, tokens in spans
        )


# -- what a person reads ---------------------------------------------------------------------------------------------


def row(trial: Trial) -> str:
    """One line of the table."""
    if trial.failed:
        return f"{trial.name:24} {'-':>7} {'-':>9}  {trial.failed}"
    promise = f"plan {trial.promise:,.0f}" if trial.promise else ""
    bad = f", {trial.bad_share:.0%} not good" if trial.bad_share else ""
    again = ", measured twice" if trial.windows > 1 else ""
    return (
        f"{trial.name:24} {trial.running or '?':>7} {trial.tokens_per_second:>9,.0f}  {promise:12} "
        f"{trial.replies} replies{bad}{again}, up after {trial.start_seconds:.0f} s"
    )


HEAD = f"{'flags':24} {'running':>7} {'tokens/s':>9}"
