"""The ledger: who holds what, and what is done. Everything in Redis is named here.

| key                        | type   | holds                                                                       |
|----------------------------|--------|-----------------------------------------------------------------------------|
| gend:epoch                 | string | Redis' own run_id when the ledger was last brought to agree with the store  |
| gend:runs                  | hash   | run id -> the run as JSON                                                   |
| gend:control               | hash   | run id -> Control as JSON: state, priority, alarm, reason                   |
| gend:run:ID:done           | set    | numbers of the batches that have a complete part in the store               |
| gend:run:ID:leases         | zset   | batch number -> when its lease ends (ms, Redis' own clock); 0: given back   |
| gend:run:ID:owners         | hash   | batch number -> claim, the name of who holds it                             |
| gend:run:ID:counts         | hash   | rows, tokens, and rows by verdict, of the batches in counted                |
| gend:run:ID:counted        | set    | numbers of the done batches whose rows are in counts                        |
| gend:box:BOX:offers        | list   | prompts that any server of the box may take, at the end: Offer as JSON       |
| gend:box:BOX:takers        | hash   | Offer as JSON -> the worker that took it                                    |
| gend:suspects              | hash   | RUN/PROMPT -> Suspicion as JSON: who was in flight when a server died       |
| gend:lane                  | string | the worker that may try suspects in small company, expires                  |
| gend:canary:MODEL          | string | set when some server with this model knew the canary's answer               |
| gend:daemon                | string | the supervisor's view as JSON, expires                                      |
| gend:worker:NAME           | string | a worker's own view as JSON, expires                                        |
| gend:probe                 | string | whether Redis takes what is written, expires                                |
| gend:loader                | string | what the loader finds to be away, as JSON, expires                          |
| gend:history               | list   | samples of totals, newest first: the last hour, 10 s apart                  |
| gend:history:long          | list   | the same for three days, a minute apart                                     |
| gend:up                    | hash   | seconds that the daemon was up (`daemon`), and each run active (`run:ID`)   |
| gend:last_part             | string | when a batch was last marked done: its part is in the store (unix seconds)  |
| gend:events                | list   | what happened, newest first: Event as JSON, bounded                         |
| gend:notices               | hash   | what people were told and still holds -> when (unix seconds)                |
| gend:page                  | string | what the page says of itself as JSON, expires                               |
| rq:*                       |        | RQ's own: one queue a run, `gend-ID`; jobs are hints which batches to try   |

Batches are derived, so missing = all - done - leased, and no list of what is to be done is kept. A lease is the right,
until a time, to work on a batch; two holders are harmless (see worker.py). Memory does not grow with the text.
"""

import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import msgspec
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from gend.blame import Suspicion
from gend.errors import LedgerUnavailable, SettingsError
from gend.records import Run
from gend.verdict import AlarmLimits

State = Literal["active", "paused", "cancelled"]
Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")

HISTORY_SAMPLES = 360  # 10 s apart: an hour
LONG_HISTORY_SECONDS = 60.0
LONG_HISTORY_SAMPLES = 3 * 24 * 60  # with eight servers 1.25 kB each: two days and the last hour take 4 MB, all 6 MB
EVENTS = 1000

# Claim: the batch must be neither done nor leased. KEYS done, leases, owners; ARGV batch, claim, lease ms.
_CLAIM = """
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then return 'done' end
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ends = redis.call('ZSCORE', KEYS[2], ARGV[1])
if ends and tonumber(ends) > now then return 'leased' end
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
return 'claimed'
"""

# Renew: fails when somebody else owns the batch, or when it is done. A ledger that forgot the lease takes it anew.
_RENEW = """
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 1 then return 0 end
local owner = redis.call('HGET', KEYS[3], ARGV[1])
if owner and owner ~= ARGV[2] then return 0 end
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
return 1
"""

# Give back: only what is ours. A lease that has ended stays listed until the batch is claimed again or done.
_GIVE_BACK = """
if redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZADD', KEYS[2], 0, ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
return 1
"""

# Mark done: counts are added once, however often it is called, whoever said before that the part is there.
# KEYS[4] counts, KEYS[5] counted, KEYS[6] last part; ARGV batch, then field, amount pairs.
_MARK_DONE = """
local new = redis.call('SADD', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('SADD', KEYS[5], ARGV[1]) == 1 then
  for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[4], ARGV[i], ARGV[i + 1]) end
end
if new == 1 then redis.call('SET', KEYS[6], redis.call('TIME')[1]) end
return new
"""


# Take offers: the oldest whose batch still belongs to who offered them. KEYS offers, takers; ARGV most, name.
# Gives all that the worker has, also those that an answer which was lost on its way had told it of.
_TAKE_OFFERS = """
local function holds(offer)
  local it = cjson.decode(offer)
  return redis.call('HGET', 'gend:run:' .. it.run .. ':owners', it.batch) == it.claim
end
local taken = 0
while taken < tonumber(ARGV[1]) do
  local offer = redis.call('LPOP', KEYS[1])
  if not offer then break end
  if holds(offer) then
    redis.call('HSET', KEYS[2], offer, ARGV[2])
    taken = taken + 1
  end
end
local has, all = {}, redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  if all[i + 1] == ARGV[2] then
    if holds(all[i]) then has[#has + 1] = all[i] else redis.call('HDEL', KEYS[2], all[i]) end
  end
end
return has
"""


# Enter the lane, or stay in it. KEYS lane; ARGV worker, ms.
_ENTER_LANE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class Offer(msgspec.Struct, frozen=True):
    """One prompt of a batch that its owner lets any server of the box take: prompt `index` of the batch, from 0."""

    run: str
    batch: int
    index: int
    claim: str


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What a person or an alarm decided about a run, and why; kept in the store too, so that it outlives Redis.

    `drop`: what is in flight is dropped at once, rather than let to its end. `alarm`: when too many of its rows are
    bad, None: as the config has it. `examples`: three of the rows that an alarm was raised over, for a person.
    """

    state: State = "active"
    priority: Priority = "normal"
    reason: str = ""
    drop: bool = False
    alarm: AlarmLimits | None = None
    examples: list[str] = []


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. `kind` is what it happened to: daemon, server, worker, run, store, redis, disk."""

    at: float
    kind: str
    text: str
    bad: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one run is. `counts` holds rows, tokens and rows by verdict of the done batches."""

    run: Run
    control: Control
    done_batches: int
    last_done: bool
    leased_batches: int
    counts: dict[str, int]

    @property
    def finished(self) -> bool:
        return self.done_batches >= self.run.batches

    @property
    def done_rows(self) -> int:
        """Rows of the done batches; the last batch may be short."""
        short = self.run.batches * self.run.batch_size - self.run.set.accepted if self.last_done else 0
        return self.done_batches * self.run.batch_size - short


@contextlib.contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise LedgerUnavailable(f"Redis does not answer: {error}") from error
    except redis.RedisError as error:
        # LOADING, READONLY, MISCONF, OOM, CLUSTERDOWN, MASTERDOWN: it will not write now, but may again.
        raise LedgerUnavailable(f"Redis refuses: {error}") from error


class Ledger:
    """Redis, as gend uses it. Blocking: a loop calls it through a thread. Every method raises LedgerUnavailable."""

    def __init__(self, url: str, patience_seconds: float = 5.0):
        """`patience_seconds` bounds one call; what to do when it is over is the caller's choice."""
        self.url = url
        options: dict[str, Any] = {
            "socket_timeout": patience_seconds,
            "socket_connect_timeout": patience_seconds,
            "health_check_interval": 30,
            "retry": Retry(ExponentialBackoff(cap=1.0, base=0.05), 2),
        }
        try:
            self.redis = redis.Redis.from_url(url, decode_responses=True, **options)
            self.raw = redis.Redis.from_url(url, **options)  # RQ wants bytes
        except ValueError:  # whose text may hold a piece of the password
            raise SettingsError(
                "redis.url cannot be read: write redis://USER:PASSWORD@HOST:PORT/0 or unix:///path, with %3A for a : "
                "and %2F for a / and so on in the password"
            ) from None
        self._claim = self.redis.register_script(_CLAIM)
        self._renew = self.redis.register_script(_RENEW)
        self._give_back = self.redis.register_script(_GIVE_BACK)
        self._mark_done = self.redis.register_script(_MARK_DONE)
        self._enter_lane = self.redis.register_script(_ENTER_LANE)
        self._take_offers = self.redis.register_script(_TAKE_OFFERS)

    # -- is it fit -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a Redis that would lose what it is told. Raises SettingsError with the setting to change."""
        try:
            with _redis_errors():
                memory = self.redis.info("memory")
        except LedgerUnavailable as error:
            if isinstance(error.__cause__, redis.AuthenticationError):
                raise SettingsError(
                    "redis.url: user or password are missing or wrong, write redis://USER:PASSWORD@HOST:PORT "
                    f"({error.__cause__})"
                ) from error
            raise LedgerUnavailable(f"{error} See that it runs, and check redis.url.") from error
        policy, limit = memory.get("maxmemory_policy", "noeviction"), memory.get("maxmemory", 0)
        if policy != "noeviction" and limit:
            raise SettingsError(
                f"Redis may throw keys away (maxmemory-policy {policy}, maxmemory {limit}): progress would vanish. "
                "Run: redis-cli CONFIG SET maxmemory-policy noeviction"
            )

    def about(self) -> dict[str, Any]:
        """What Redis says of itself: version, persistence, memory (INFO)."""
        with _redis_errors():
            return self.redis.info()

    def refuses_writes(self) -> str:
        """Why Redis answers but takes nothing (read-only, out of memory, disk full); empty when it takes what it gets.

        Then nobody can say through it how they stand, so whoever asks must find out for himself.
        """
        try:
            self.publish("gend:probe", 1, 1.0)
        except LedgerUnavailable as error:
            if isinstance(error.__cause__, redis.ResponseError):
                return str(error)
            raise
        return ""

    # -- epoch and runs ------------------------------------------------------------------------------------------

    def rebuilt(self) -> bool:
        """Whether this ledger was brought to agree with the store since Redis was last started or emptied.

        A Redis that was started anew may have come back with old data: what it says holds only after a new look.
        """
        with _redis_errors():
            return bool(self.redis.get("gend:epoch") == self._redis_run())

    def mark_rebuilt(self) -> None:
        with _redis_errors():
            self.redis.set("gend:epoch", self._redis_run())

    def _redis_run(self) -> str:
        return str(self.redis.info("server").get("run_id", "unknown"))

    def add_run(self, run: Run, control: Control) -> bool:
        """Register a run; False when it was there already (its control is then left alone)."""
        with _redis_errors():
            new = self.redis.hsetnx("gend:runs", run.id, msgspec.json.encode(run))
            self.redis.hsetnx("gend:control", run.id, msgspec.json.encode(control))
            return bool(new)

    def runs(self) -> dict[str, Run]:
        """All runs, oldest first."""
        with _redis_errors():
            raw = cast(dict[str, str], self.redis.hgetall("gend:runs"))
        runs = [msgspec.json.decode(value, type=Run) for value in raw.values()]
        return {run.id: run for run in sorted(runs, key=lambda run: (run.created, run.id))}

    def controls(self) -> dict[str, Control]:
        with _redis_errors():
            raw = cast(dict[str, str], self.redis.hgetall("gend:control"))
        return {name: msgspec.json.decode(value, type=Control) for name, value in raw.items()}

    def set_control(self, run: str, control: Control) -> None:
        before = self.controls().get(run)
        with _redis_errors():
            self.redis.hset("gend:control", run, msgspec.json.encode(control))
        if before is None or (before.state, before.priority) != (control.state, control.priority):
            why = f": {control.reason}" if control.reason else ""
            text = f"{run} is {control.state}, priority {control.priority}{why}"
            self.event("run", text, bad=control.state == "paused")

    def progress(self) -> list[Progress]:
        """Every run with how far it is, oldest first; one round trip a run."""
        runs, controls = self.runs(), self.controls()
        now_ms = self._now_ms()
        with _redis_errors():
            pipe = self.redis.pipeline(transaction=False)
            for run in runs.values():
                pipe.scard(f"gend:run:{run.id}:done")
                pipe.sismember(f"gend:run:{run.id}:done", str(run.batches - 1))
                pipe.zcount(f"gend:run:{run.id}:leases", now_ms, "+inf")
                pipe.hgetall(f"gend:run:{run.id}:counts")
            answers = iter(pipe.execute())
        return [
            Progress(
                run=run,
                control=controls.get(run.id, Control()),
                done_batches=done,
                last_done=bool(last),
                leased_batches=leased,
                counts={field: int(value) for field, value in counts.items()},
            )
            for run, done, last, leased, counts in zip(runs.values(), *[answers] * 4, strict=True)
        ]

    # -- batches -------------------------------------------------------------------------------------------------

    def claim(self, run: str, batch: int, claim: str, lease_seconds: float) -> Literal["claimed", "leased", "done"]:
        """Try for a batch under the name `claim`."""
        with _redis_errors():
            answer = self._claim(keys=_keys(run)[:3], args=[batch, claim, round(lease_seconds * 1000)])
        return cast(Literal["claimed", "leased", "done"], answer)

    def renew(self, held: Mapping[tuple[str, int], str], lease_seconds: float) -> list[tuple[str, int]]:
        """Prolong the leases of {(run, batch): claim}; returns those that are ours no longer."""
        with _redis_errors():
            pipe = self.redis.pipeline(transaction=False)
            for (run, batch), claim in held.items():
                self._renew(keys=_keys(run)[:3], args=[batch, claim, round(lease_seconds * 1000)], client=pipe)
            return [key for key, kept in zip(held, pipe.execute(), strict=True) if not kept]

    def give_back(self, run: str, batch: int, claim: str) -> None:
        """Drop a lease before its time, so that somebody else can have the batch at once."""
        with _redis_errors():
            self._give_back(keys=_keys(run)[:3], args=[batch, claim])

    def mark_done(self, run: str, batch: int, counts: Mapping[str, int]) -> bool:
        """Say that the part of this batch is in the store; its counts add up once. False when it was marked before."""
        pairs: list[str | int] = list(itertools.chain.from_iterable(counts.items()))
        with _redis_errors():
            return bool(self._mark_done(keys=[*_keys(run), "gend:last_part"], args=[batch, *pairs]))

    def add_done(self, run: str, batches: set[int]) -> None:
        """Say of `batches` that a listing of the store has shown their parts; what is in them is not counted yet."""
        done, leases, owners, *_ = _keys(run)
        with _redis_errors():
            for some in _chunks(sorted(batches), 10_000):
                pipe = self.redis.pipeline(transaction=True)
                pipe.sadd(done, *some)
                pipe.zrem(leases, *some)
                pipe.hdel(owners, *map(str, some))
                pipe.execute()

    def uncounted(self, run: str, most: int) -> list[int]:
        """Up to `most` done batches whose rows are not in the run's counts: a listing has shown them."""
        done, _, _, _, counted = _keys(run)
        with _redis_errors():
            if self.redis.scard(done) == self.redis.scard(counted):
                return []
            found = cast(set[str], self.redis.sdiff([done, counted]))
        return sorted(map(int, found))[:most]

    def forget_done(self, run: str, batches: set[int]) -> None:
        """Say of `batches` that a listing of the store has not shown their parts: they are missing again."""
        with _redis_errors():
            for some in _chunks(sorted(batches), 10_000):
                self.redis.srem(f"gend:run:{run}:done", *some)

    def done(self, run: str) -> set[int]:
        with _redis_errors():
            return {int(batch) for batch in cast(set[str], self.redis.smembers(f"gend:run:{run}:done"))}

    def leased(self, run: str) -> set[int]:
        """Batches whose lease has not ended."""
        now_ms = self._now_ms()
        with _redis_errors():
            live = self.redis.zrangebyscore(f"gend:run:{run}:leases", now_ms, "+inf")
            return {int(batch) for batch in cast(list[str], live)}

    def _now_ms(self) -> int:
        with _redis_errors():
            seconds, micros = self.redis.time()
        return seconds * 1000 + micros // 1000

    def release_owner(self, prefix: str) -> int:
        """Give back every batch whose claim begins with `prefix` (a worker that is dead), and the lane if it had it.

        Its view goes too: whoever offered it prompts sees at once that nobody makes them. Gives how many batches there
        were.
        """
        released = 0
        with _redis_errors():
            for view in self.redis.scan_iter(f"gend:worker:{prefix}*", count=1000):
                self.redis.delete(view)
            if cast(str, self.redis.get("gend:lane") or "").startswith(prefix):
                self.redis.delete("gend:lane")  # somebody else in it by now: then two are, which is only slower to tell
            for run in cast(list[str], self.redis.hkeys("gend:runs")):
                owners = cast(dict[str, str], self.redis.hgetall(f"gend:run:{run}:owners"))
                for batch, claim in owners.items():
                    if claim.startswith(prefix):
                        released += int(cast(Any, self._give_back(keys=_keys(run)[:3], args=[batch, claim])))
        return released

    def all_taken(self, runs: Iterable[Run]) -> bool:
        """Whether every batch of these runs is done or leased: nothing is left to claim."""
        runs, now_ms = list(runs), self._now_ms()
        with _redis_errors():
            pipe = self.redis.pipeline(transaction=False)
            for run in runs:
                pipe.scard(f"gend:run:{run.id}:done")
                pipe.zcount(f"gend:run:{run.id}:leases", now_ms, "+inf")
            answers = iter(pipe.execute())
        return all(done + leased >= run.batches for run, done, leased in zip(runs, answers, answers, strict=True))

    def fair_share(self, runs: Iterable[str], workers: int) -> int:
        """How many prompts each worker may have out, when what is left of the active `runs` is shared evenly between
        those that live, and at least `workers` of them."""
        wanted = set(runs)
        left = sum(
            progress.run.set.accepted - progress.done_rows
            for progress in self.progress()
            if progress.run.id in wanted and progress.control.state == "active"
        )
        return max(1, -(-left // max(1, workers, len(self.workers()))))

    # -- the end of a run: prompts that any server of the box may take -------------------------------------------

    def offer(self, box: str, offers: Iterable[Offer]) -> None:
        """Let any server of the box take these prompts."""
        lines = [msgspec.json.encode(offer) for offer in offers]
        if lines:
            with _redis_errors():
                self.redis.rpush(f"gend:box:{box}:offers", *lines)

    def take_offers(self, box: str, most: int, worker: str) -> list[Offer]:
        """All offers that this worker has, after it took up to `most` more.

        Those whose batch has another owner by now are dropped.
        """
        keys = [f"gend:box:{box}:offers", f"gend:box:{box}:takers"]
        with _redis_errors():
            taken = cast(list[str], self._take_offers(keys=keys, args=[most, worker]))
        return [msgspec.json.decode(line, type=Offer) for line in taken]

    def close_offers(self, box: str, offers: Iterable[Offer]) -> None:
        """These are over: their rows are in the spool, or they are not to be made here after all."""
        lines = [msgspec.json.encode(offer) for offer in offers]
        if lines:
            with _redis_errors():
                self.redis.hdel(f"gend:box:{box}:takers", *lines)

    def open_offers(self, box: str, asked: Iterable[Offer]) -> set[Offer]:
        """Those of `asked` that wait for somebody, or that a live worker has taken."""
        lines = {msgspec.json.encode(offer).decode(): offer for offer in asked}
        with _redis_errors():
            waiting = set(cast(list[str], self.redis.lrange(f"gend:box:{box}:offers", 0, -1)))
            takers = cast(list[str | None], self.redis.hmget(f"gend:box:{box}:takers", list(lines)))
            names = sorted({name for name in takers if name})
            views = cast(list[str | None], self.redis.mget([f"gend:worker:{n}" for n in names])) if names else []
        live = {name for name, view in zip(names, views, strict=True) if view}
        taken = zip(lines.items(), takers, strict=True)
        return {offer for (line, offer), name in taken if line in waiting or name in live}

    # -- suspects: who was in flight when a server died -----------------------------------------------------------

    def suspects(self) -> dict[str, Suspicion]:
        """All suspects by key."""
        with _redis_errors():
            raw = cast(dict[str, str], self.redis.hgetall("gend:suspects"))
        return {key: msgspec.json.decode(value, type=Suspicion) for key, value in raw.items()}

    def change_suspects(self, accused: Mapping[str, Suspicion], cleared: Iterable[str]) -> None:
        """Write down what a crash, or a row that came to its end, has shown."""
        cleared = list(cleared)
        with _redis_errors():
            pipe = self.redis.pipeline(transaction=True)
            if accused:
                pipe.hset("gend:suspects", mapping={key: msgspec.json.encode(s) for key, s in accused.items()})
            if cleared:
                pipe.hdel("gend:suspects", *cleared)
            pipe.execute()

    def enter_lane(self, worker: str, seconds: float) -> bool:
        """Whether this worker has the lane now, for so long."""
        with _redis_errors():
            return bool(self._enter_lane(keys=["gend:lane"], args=[worker, round(seconds * 1000)]))

    def model_knows(self, model: str, learned: bool) -> bool:
        """Whether any server with this model knew the canary's answer; `learned`: this one just did."""
        with _redis_errors():
            if learned:
                self.redis.set(f"gend:canary:{model}", 1)
            return learned or bool(self.redis.exists(f"gend:canary:{model}"))

    # -- hints: RQ -----------------------------------------------------------------------------------------------

    def stock(self, run: Run, wanted: int) -> int:
        """See that up to `wanted` jobs for missing batches wait in the run's RQ queue; returns how many were added.

        RQ may lose, double or delay a job: a batch that is neither done, leased nor waiting is simply enqueued again.
        One whose lease has ended is enqueued in front: its worker is gone, and rows of it may be in the spool.
        """
        from rq import Queue
        from rq.serializers import JSONSerializer

        queue = Queue(queue_name(run.id), connection=self.raw, serializer=JSONSerializer)
        done, leases, *_ = _keys(run.id)
        now_ms = self._now_ms()
        with _redis_errors():
            names = cast(list[bytes], self.raw.lrange(queue.key, 0, -1))  # others' may be any bytes
            ours = map(re.compile(rf"{run.id}-(\d+)-[0-9a-f]+".encode()).fullmatch, names)
            order = [int(name[1]) for name in ours if name]
            waiting = sorted(set(order))
            pipe = self.redis.pipeline(transaction=False)
            pipe.smismember(done, waiting or [-1])
            pipe.zmscore(leases, [str(batch) for batch in waiting] or ["-1"])
            pipe.zrangebyscore(leases, 0, now_ms)
            are_done, lease_ends, ended = pipe.execute()
        stale = sum(bool(is_done or (ends or 0) > now_ms) for is_done, ends in zip(are_done, lease_ends, strict=True))
        # A hint at one of them that waits deep in the queue would be followed minutes later.
        returned = {int(batch) for batch in ended}.difference(order[: 2 * len(ended) + 8])
        hints = [(batch, True) for batch in sorted(returned, reverse=True) if batch < run.batches]
        useful = len(waiting) - stale
        if useful * 2 <= wanted:
            taken = returned.union(waiting, self.done(run.id), self.leased(run.id))
            missing = (batch for batch in range(run.batches) if batch not in taken)
            hints += [(batch, False) for batch in itertools.islice(missing, wanted - useful)]
        jobs = [
            Queue.prepare_data(
                JOB_FUNCTION,
                args=[run.id, batch],
                # Named anew each time: RQ's clean-up of a job that a killed worker left must not touch this one.
                job_id=f"{run.id}-{batch}-{time.time_ns():x}",
                timeout=-1,  # the lease bounds the work, not RQ: its timeout would be swallowed as a plain Exception
                result_ttl=0,
                failure_ttl=600,
                description=f"{run.id}/{batch}",
                at_front=in_front,
            )
            for batch, in_front in hints
        ]
        if jobs:
            with _redis_errors():
                queue.enqueue_many(jobs)
        return len(jobs)

    def forget_queue(self, run: str) -> None:
        """Empty a run's queue (paused, cancelled or finished): its hints are made again when they are wanted."""
        from rq import Queue
        from rq.serializers import JSONSerializer

        with _redis_errors():
            Queue(queue_name(run), connection=self.raw, serializer=JSONSerializer).empty()  # type: ignore[no-untyped-call]

    # -- what the processes say of themselves --------------------------------------------------------------------

    def publish(self, key: str, view: Any, expires_seconds: float) -> None:
        """Store `view` as JSON under `key` for a while."""
        with _redis_errors():
            self.redis.set(key, msgspec.json.encode(view), px=round(expires_seconds * 1000))

    def unpublish(self, key: str) -> None:
        """Take a view back: its process ends in an orderly way."""
        with _redis_errors():
            self.redis.delete(key)

    def daemon(self) -> dict[str, Any] | None:
        """The supervisor's last view, or None where none is alive."""
        with _redis_errors():
            raw = self.redis.get("gend:daemon")
        return msgspec.json.decode(cast(str, raw)) if raw else None

    def loader(self) -> dict[str, Any]:
        """The loader's last view: outages, if it has met any."""
        with _redis_errors():
            raw = self.redis.get("gend:loader")
        return msgspec.json.decode(cast(str, raw)) if raw else {"outages": {}}

    def workers(self) -> list[dict[str, Any]]:
        """The last views of all live workers."""
        with _redis_errors():
            keys = sorted(self.redis.scan_iter("gend:worker:*", count=1000))
            raw = cast(list[str | None], self.redis.mget(keys)) if keys else []
        return [msgspec.json.decode(value) for value in raw if value]

    def view(self, key: str) -> dict[str, Any] | None:
        """What was published under `key`, or None when it has expired."""
        with _redis_errors():
            raw = self.redis.get(key)
        return msgspec.json.decode(cast(str, raw)) if raw else None

    # -- what happened -------------------------------------------------------------------------------------------

    def sample(self, sample: Mapping[str, Any], up_seconds: float) -> None:
        """Add one sample of totals to the history, and the time since the last one to how long the daemon was up.

        `sample` has "at" (unix seconds), "runs" (the active ones) and "servers".
        """
        line = msgspec.json.encode(sample)
        with _redis_errors():
            newest = cast(str | None, self.redis.lindex("gend:history:long", 0))
            pipe = self.redis.pipeline(transaction=True)
            pipe.lpush("gend:history", line)
            pipe.ltrim("gend:history", 0, HISTORY_SAMPLES - 1)
            if newest is None or sample["at"] - msgspec.json.decode(newest)["at"] > LONG_HISTORY_SECONDS - 5:
                pipe.lpush("gend:history:long", line)
                pipe.ltrim("gend:history:long", 0, LONG_HISTORY_SAMPLES - 1)
            for name in ("daemon", *(f"run:{run}" for run in sample["runs"])):
                pipe.hincrbyfloat("gend:up", name, round(up_seconds, 3))
            pipe.execute()

    def history(self, samples: int) -> list[dict[str, Any]]:
        """The last `samples` samples, 10 s apart, newest first; at most the last hour."""
        with _redis_errors():
            raw = cast(list[str], self.redis.lrange("gend:history", 0, samples - 1))
        return [msgspec.json.decode(value) for value in raw]

    def long_history(self, samples: int = LONG_HISTORY_SAMPLES) -> list[dict[str, Any]]:
        """The last `samples` samples that are a minute apart, newest first; at most the last three days."""
        with _redis_errors():
            raw = cast(list[str], self.redis.lrange("gend:history:long", 0, samples - 1))
        return [msgspec.json.decode(value) for value in raw]

    def up_seconds(self) -> dict[str, float]:
        """How long the daemon was up, `daemon`, and each run active meanwhile, `run:ID`."""
        with _redis_errors():
            raw = cast(dict[str, str], self.redis.hgetall("gend:up"))
        return {name: float(seconds) for name, seconds in raw.items()}

    def last_part(self) -> float | None:
        """When a batch was last marked done (unix seconds, Redis' own clock); None before the first."""
        with _redis_errors():
            raw = self.redis.get("gend:last_part")
        return float(cast(str, raw)) if raw else None

    def event(self, kind: str, text: str, bad: bool = False, at: float | None = None) -> None:
        """Note that something happened, now or `at` (unix seconds)."""
        event = Event(at=round(at or time.time(), 1), kind=kind, text=text[:500], bad=bad)
        with _redis_errors():
            pipe = self.redis.pipeline(transaction=True)
            pipe.lpush("gend:events", msgspec.json.encode(event))
            pipe.ltrim("gend:events", 0, EVENTS - 1)
            pipe.execute()

    def events(self, most: int) -> list[Event]:
        """The last events, newest first."""
        with _redis_errors():
            raw = cast(list[str], self.redis.lrange("gend:events", 0, most - 1))
        return [msgspec.json.decode(value, type=Event) for value in raw]

    def told(self) -> dict[str, float]:
        """What people were told and still holds -> when."""
        with _redis_errors():
            raw = cast(dict[str, str], self.redis.hgetall("gend:notices"))
        return {name: float(at) for name, at in raw.items()}

    def set_told(self, told: Mapping[str, float], gone: Iterable[str] = ()) -> None:
        """Remember what people were told; `gone` holds no longer."""
        with _redis_errors():
            if told:
                self.redis.hset("gend:notices", mapping={name: f"{at:.1f}" for name, at in told.items()})
            if names := list(gone):
                self.redis.hdel("gend:notices", *names)


JOB_FUNCTION = "gend.worker.run_batch"
"""What an RQ job calls, by name only: the ledger does not import the worker."""


def queue_name(run: str) -> str:
    """The RQ queue of a run."""
    return f"gend-{run}"


def _keys(run: str) -> list[str]:
    return [f"gend:run:{run}:{name}" for name in ("done", "leases", "owners", "counts", "counted")]


def _chunks(values: list[int], size: int) -> Iterator[list[int]]:
    return (values[start : start + size] for start in range(0, len(values), size))
