"""Judging a reply: one word for what a row is worth. Pure: no clock, no files, no network."""

import re
import zlib
from collections import Counter, deque
from math import log
from unicodedata import category

import msgspec

from gend.records import Reply, Sampling

OK, LENGTH, EMPTY, UNCLOSED, LOOP, JUNK = "ok", "length", "empty", "unclosed", "loop", "junk"
NO_THINKING, ABORT, REFUSED, POISON, ERROR = "no_thinking", "abort", "refused", "poison", "error"
VERDICTS = (OK, LENGTH, EMPTY, UNCLOSED, LOOP, JUNK, NO_THINKING, ABORT, REFUSED, POISON, ERROR)
"""All words a row's verdict can be: the last three are the worker's, the others `judge`'s."""


class VerdictRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    min_thought_chars: int = 8
    min_answer_chars: int = 0
    junk_symbol_share: float = 0.9
    junk_broken_share: float = 0.05
    junk_script_share: float = 0.01
    loop_ratio_cut: float = 0.16
    loop_ratio_stop: float = 0.1
    loop_share_cut: float = 0.5
    loop_share_stop: float = 0.8


# A new server's word for an end is not known here and so counts as none.
FINISHED = frozenset(("stop", "length", "tool_calls", "function_call"))
THINK_TAG = re.compile(r"</?think>", re.IGNORECASE)
INVISIBLE = "\u200b-\u200f\u2060\ufeff"
BLANK = re.compile(rf"(?:\s|[{INVISIBLE}]|</?think>|<\|\w+\|>)*", re.IGNORECASE)
ALPHANUMERIC = re.compile(r"[^\W_]")
BROKEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufff0-\uffff\ue000-\uf8ff\ud800-\udfff\U000f0000-\U0010ffff]")
_SCRIPTS = ("\u0400-\u052f", "\u0530-\u058f", "\u0590-\u05ff", "\u0600-\u077f", "\u0900-\u097f", "\u0980-\u0dff",
            "\u0e00-\u0e7f", "\u10a0-\u10ff", "\u1100-\u11ff\u3041-\u30ff\u3400-\u9fff\uac00-\ud7af")  # fmt: skip
SCRIPTS_TOUCH = re.compile("|".join(f"[{one}][{''.join(s for s in _SCRIPTS if s != one)}]" for one in _SCRIPTS))
TOKEN = re.compile(r"\w{1,4}|[^\w\s]")


def judge(reply: Reply, sampling: Sampling, rules: VerdictRules = VerdictRules()) -> str:
    thought, answer = reply.reasoning_content or "", reply.content or ""
    no_thought, no_answer = _blank(thought), _blank(answer) and not reply.tool_calls
    cut = reply.finish_reason == "length"
    if reply.finish_reason not in FINISHED:
        return ABORT
    if no_thought and no_answer:
        return EMPTY
    if _is_junk(thought, rules) or _is_junk(answer, rules):
        return JUNK
    if _loops(thought, cut, rules) or _loops(answer, cut, rules):
        return LOOP
    if cut:
        return LENGTH
    if THINK_TAG.search(answer) or (no_answer and 0 < reply.usage.completion_tokens <= reply.usage.reasoning_tokens):
        return UNCLOSED
    if no_answer or (len(answer) < rules.min_answer_chars and not reply.tool_calls):
        return EMPTY
    if sampling.thinking and len(thought.strip()) < rules.min_thought_chars:
        return NO_THINKING
    return OK


def _blank(text: str) -> bool:
    return BLANK.fullmatch(text) is not None


def _is_junk(text: str, rules: VerdictRules) -> bool:
    if _blank(text):
        return False
    if not ALPHANUMERIC.search(text):
        marks = set("".join(text.split()))
        if len(marks) <= 2 and all(category(mark) in ("Po", "Pd", "Pc", "Cc") for mark in marks):
            return True
    tail = text[-1024:]
    visible = "".join(tail.split())[-512:]
    if len(visible) >= 128 and Counter(visible).most_common(1)[0][1] >= rules.junk_symbol_share * len(visible):
        return True
    if tail.isascii() and tail.isprintable():
        return False
    broken, touches = len(BROKEN.findall(tail)), len(SCRIPTS_TOUCH.findall(tail))
    return broken >= max(3, rules.junk_broken_share * len(tail)) or touches >= max(
        3, rules.junk_script_share * len(tail)
    )


def _loops(text: str, cut: bool, rules: VerdictRules) -> bool:
    if len(text) < 256:
        return False
    most, share = (rules.loop_ratio_cut, rules.loop_share_cut) if cut else (rules.loop_ratio_stop, rules.loop_share_stop)
    for size in (2048, 16384):
        tail = text[-size:]
        data = tail.encode("utf-8", "surrogatepass")
        if len(zlib.compress(data, 1)) < most * len(data) and _repeated_share(tail[-8192:]) >= share:
            return True
        if len(text) <= size:
            break
    return False


def _repeated_share(text: str) -> float:
    tokens = TOKEN.findall(text)
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], tokens[4:], tokens[5:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 1.0


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often a row with a verdict is tried again, each time with a new seed; after that it is kept as it is.

    What is not named here is never tried again by this rule: `ok` needs none, `refused` and `poison` would come again,
    `abort` and `error` are the server's fault and use up no attempt of the row.
    """

    empty: int = 1
    unclosed: int = 1
    loop: int = 1
    junk: int = 1
    no_thinking: int = 1
    length: int = 0  # the same max_tokens cuts again; `gend retry` gives more


def retries_left(verdict: str, attempts: int, policy: Policy = Policy()) -> bool:
    """Whether a row that has this verdict after `attempts` attempts (1 or more) is tried again."""
    return attempts <= getattr(policy, verdict, 0)


BAD = frozenset((EMPTY, UNCLOSED, LOOP, JUNK, NO_THINKING))
FAILED = frozenset((REFUSED, POISON, ERROR))


class AlarmLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which share of the last `window` rows is too much; 1.0 turns a limit off. No alarm before `minimum` rows.

    `bad` counts empty, unclosed, loop, junk and no_thinking; `failed` counts refused, poison and error; `same` counts
    the most frequent text, for stubs that no rule on one row can know (raise it for sets answered by yes or no).
    """

    bad: float = 0.05
    length: float = 0.2
    failed: float = 0.2
    same: float = 0.5
    window: int = 1000
    minimum: int = 50


class Alarm:
    """Says when the rows that come in are too often bad. One per run and one per server; a new one after a resume.

    Sound but small samples must not stop a run, and a broken server must stop early. So the alarm asks for two things:
    the share k/n is over the limit, and it is beyond what luck does to a healthy source, one with 0.4 of the limit
    (2 % bad). Luck is bounded by Chernoff: P(share >= q) <= exp(-n KL(q, healthy)), asked to be below e**-16 = 1.1e-7.
    The exact binomial tail at the smallest k that alarms is below 2e-8 for every n up to 2,000 (14 of 100, 33 of 500,
    51 of 1000), so over 914,000 rows a healthy run alarms with less than 1.4 % even if every look were a new draw.
    (A plain "over 5 % of the last 500" has 1.4e-5 at each look: it stops every second healthy run of that length.)

    Short replies finish first: of 256 requests that start together, 2 % stubs are the first five rows and look like
    100 %. So while the window may hold rows of that first wave, all that started count: n = rows + `in_flight`.

    The old failure, 87 % stubs: with 256 in flight a server's alarm comes at its 50th row (`minimum`; the evidence is
    there at 26 bad rows). Eight workers, each with its own alarm and none telling the others: 400 rows of 914,000,
    0.044 %. That holds only if a pause drops what is in flight. Let to finish, 8 x 256 = 2,048 more rows are made: 0.27 %.
    """

    def __init__(self, limits: AlarmLimits = AlarmLimits()):
        self._limits = limits
        self._last: deque[tuple[str, int]] = deque()
        self._verdicts: Counter[str] = Counter()
        self._texts: Counter[int] = Counter()
        self._seen = 0

    def add(self, verdict: str, text: str = "") -> None:
        """Count one finished row: its verdict and, for the limit on equal texts, thought and answer together."""
        entry = (verdict, hash(text) if text else 0)
        self._last.append(entry)
        self._count(entry, 1)
        self._seen += 1
        if len(self._last) > self._limits.window:
            self._count(self._last.popleft(), -1)

    def verdict(self, in_flight: int = 0) -> str | None:
        """Why to stop, in words, or None. `in_flight` is how many requests this alarm's source has open now."""
        rows = len(self._last)
        if rows < self._limits.minimum:
            return None
        first_wave = self._seen < 2 * self._limits.window
        started = rows + (in_flight if first_wave else 0)
        groups = (
            ("bad", sum(self._verdicts[word] for word in BAD), self._limits.bad),
            ("cut by max_tokens", self._verdicts[LENGTH], self._limits.length),
            ("refused or failed", sum(self._verdicts[word] for word in FAILED), self._limits.failed),
            ("the same text", max(self._texts.values(), default=0), self._limits.same),
        )
        for what, count, limit in groups:
            if _over(count, started, limit):
                shares = ", ".join(f"{word} {number}" for word, number in self._verdicts.most_common() if number)
                return f"{count} of the last {rows} rows are {what}, over the limit of {limit:.0%} ({shares})"
        return None

    def _count(self, entry: tuple[str, int], change: int) -> None:
        verdict, text = entry
        self._verdicts[verdict] += change
        if text:
            self._texts[text] += change
            if not self._texts[text]:
                del self._texts[text]  # else the state grows with the run


def _over(count: int, total: int, limit: float) -> bool:
    """Whether count of total is over the limit and, by Chernoff's bound, no luck of a source with 0.4 of it."""
    share, healthy = count / total, 0.4 * limit
    if share <= limit:
        return False
    evidence = share * log(share / healthy)
    if share < 1:
        evidence += (1 - share) * log((1 - share) / (1 - healthy))
    return total * evidence >= 16
