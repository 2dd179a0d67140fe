"""Judging a reply: one word for what a row is worth. Pure: no clock, no files, no network.

`judge` gives the first word of this table that fits. Thought is reasoning_content, answer is content. Every row is kept
whatever its verdict, so a false alarm costs at most one more attempt, while a bad row that passes is trained on.

| verdict     | when                                            | why, and why this number                             |
|-------------|-------------------------------------------------|------------------------------------------------------|
| abort       | finish_reason is not stop, length, tool_calls   | The server ended it, not the model. Null as well: an |
|             | or function_call                                | end that nobody announced is none.                   |
| empty (1)   | no thought, no answer, no tool call; white and  | The old failure: `<think>`, `</think>`, newlines and |
|             | invisible characters, think tags and special    | the end of the turn are six tokens and say nothing.  |
|             | tokens such as `<|im_end|>` count for nothing   | Before `length`, which has at least a beginning.     |
| junk        | of thought or answer:                           |                                                      |
|             | - it is one or two punctuation marks, as often  | `!!!!`, at any length: NaN logits decode to that.    |
|             |   as it likes, and nothing else                 | `+`, `[]` and emoji are symbols or brackets.         |
|             | - of its last 512 visible characters (128 or    | Ruled lines have 80 or 120 characters, a googol 101. |
|             |   more), 90 % are one and the same              | The tail only: once there, a model stays there.      |
|             | - of its last 1024, 5 % (3 or more) are U+FFFD, | One U+FFFD is a character that max_tokens cut.       |
|             |   control, private-use or surrogate characters  |                                                      |
|             | - of its last 1024, at 1 % (3 or more) a letter | Broken weights and caches draw from the whole        |
|             |   stands next to one of a foreign script        | vocabulary and mix scripts within words. Latin and   |
|             |                                                 | Greek do so in right text and are not counted.       |
| loop        | thought or answer repeats itself to its end,    | Before `length`: it ran to max_tokens because it     |
|             | see `_loops`                                    | loops, and more tokens would not have helped.        |
| length      | finish_reason is length                         | Cut in the answer, or within the thought: content is |
|             |                                                 | then "" behind a reasoning parser.                   |
| unclosed    | the answer has `<think>` or `</think>`, or it   | No parser, or one that failed: the thought would be  |
|             | is blank while usage says that all tokens were  | learnt as answer. Also said of an answer *about* the |
|             | thought                                         | tags, which SpecForge's validator refuses too.       |
| empty (2)   | no answer and no tool call                      | A thought, then stop: 17 % of replies in one report. |
| no_thinking | thinking was asked for, and the thought has     | A stub of six tokens that stops normally ends here.  |
|             | fewer than 8 characters                         | "Okay." is no thought; real ones have hundreds.      |
| ok          | the rest                                        |                                                      |

`refused`, `poison` and `error` are never judged: the worker gives them to rows for which there is no reply.

What no rule for one row can see: without thinking, "I can help with that." may be right or a stub. Many equal ones are
stubs, which is why `Alarm` counts equal texts. Nonsense made of whole words is for canaries to find.
"""

import re
import zlib
from collections import Counter, deque
from math import log
from typing import Annotated, Any, Literal
from unicodedata import category

import msgspec

from gend.records import Reply, Sampling, Verdicts, often_and_changes

OK, LENGTH, EMPTY, UNCLOSED, LOOP, JUNK = "ok", "length", "empty", "unclosed", "loop", "junk"
NO_THINKING, ABORT, REFUSED, POISON, ERROR = "no_thinking", "abort", "refused", "poison", "error"
VERDICTS = (OK, LENGTH, EMPTY, UNCLOSED, LOOP, JUNK, NO_THINKING, ABORT, REFUSED, POISON, ERROR)
"""Every word that can be a row's verdict; the last three come from the worker, the others from `judge`."""

Limit = Annotated[float, msgspec.Meta(gt=0, le=1)]

DEFAULT_VERDICTS = Verdicts()

# Reasons that a model gives for its own end. A word that is not known here counts as an end by the server.
_FINISHED = frozenset(("stop", "length", "tool_calls", "function_call"))
_THINK_TAG = re.compile(r"</?think>", re.IGNORECASE)
_BLANK = re.compile(r"(?:\s|[\u200b-\u200f\u2060\ufeff]|</?think>|<\|\w+\|>)*", re.IGNORECASE)
_ALPHANUMERIC = re.compile(r"[^\W_]")
_MARKS = ("Po", "Pd", "Pc", "Cc")  # not brackets (Ps, Pe) nor symbols (S*): "[]" and "+" can be answers
_BROKEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff\ue000-\uf8ff\ufff0-\uffff\U000f0000-\U0010ffff]")
# Cyrillic, Armenian, Hebrew, Arabic, Devanagari, the other Indic ones, Thai, Georgian, and the East Asian as one.
_SCRIPTS = ("\u0400-\u052f", "\u0530-\u058f", "\u0590-\u05ff", "\u0600-\u077f", "\u0900-\u097f", "\u0980-\u0dff",
            "\u0e00-\u0e7f", "\u10a0-\u10ff", "\u1100-\u11ff\u3041-\u30ff\u3400-\u9fff\uac00-\ud7af")  # fmt: skip
_SCRIPTS_TOUCH = re.compile("|".join(f"[{one}][{''.join(s for s in _SCRIPTS if s != one)}]" for one in _SCRIPTS))
_PIECES = re.compile(r"\w{1,6}")
_WINDOW_BYTES = (512, 1024, 4096, 16384)
_DEFLATE_BYTES = 32  # header, checksum and code tables: what even a single repeated word costs


def judge(reply: Reply, sampling: Sampling, rules: Verdicts = DEFAULT_VERDICTS) -> str:
    """The verdict on a reply: the first that fits of the table in this module's docstring.

    Token counts are the server's and can be wrong: they only ever choose between `unclosed` and `empty`. All rules but
    the search for tags read a tail of bounded length, so the cost does not grow with the reply.
    """
    thought, answer = reply.reasoning_content or "", reply.content or ""
    no_thought, no_answer = _blank(thought), _blank(answer) and not reply.tool_calls
    cut = reply.finish_reason == "length"
    if reply.finish_reason not in _FINISHED:
        return ABORT
    if no_thought and no_answer:
        return EMPTY
    if _is_junk(thought, rules) or _is_junk(answer, rules):
        return JUNK
    if _loops(thought, cut, rules) or _loops(answer, cut, rules):
        return LOOP
    if cut:
        return LENGTH
    if _THINK_TAG.search(answer) or (no_answer and 0 < reply.usage.completion_tokens <= reply.usage.reasoning_tokens):
        return UNCLOSED
    if no_answer or (len(answer.strip()) < rules.min_answer_chars and not reply.tool_calls):
        return EMPTY
    if sampling.thinking and len(thought.strip()) < rules.min_thought_chars:
        return NO_THINKING
    return OK


def _blank(text: str) -> bool:
    return _BLANK.fullmatch(text.strip()) is not None


def _is_junk(text: str, rules: Verdicts) -> bool:
    text = text.strip()
    tail = text[-1024:]
    if len(text) <= 1024 and not _ALPHANUMERIC.search(text):  # a longer one is found by its most frequent mark
        marks = set("".join(text.split()))
        if 1 <= len(marks) <= 2 and all(category(mark) in _MARKS for mark in marks):
            return True
    visible = "".join(tail.split())[-512:]
    if len(visible) >= 128 and Counter(visible).most_common(1)[0][1] >= rules.junk_symbol_share * len(visible):
        return True
    broken, touches = len(_BROKEN.findall(tail)), len(_SCRIPTS_TOUCH.findall(tail))
    if broken >= max(3, rules.junk_broken_share * len(tail)):
        return True
    return touches >= max(3, rules.junk_script_share * len(tail))


def _loops(text: str, cut: bool, rules: Verdicts) -> bool:
    """Whether the end of `text` says the same over and over.

    It does if some tail of it (512 bytes for a passage of a few words, up to 16 kB for one of 5 kB) both

    - is deflated to less than `loop_ratio` of its bytes. Prose and code come down to 0.5, so with a passage that fills
      the tail three times to 0.5 / 3 = 0.17: 0.18 means three times or more, 0.15 four.
    - and repeats its sequences of words: of all of them, at least `loop_share` are not there for the first time. This
      spares tables, lists of numbers, JSON and HTML, which deflate as well as loops do and yet say new things.

    A reply that was cut is judged by sequences of four words with all numbers left out, as loops vary: "attempt 41: too
    large, attempt 42: ...". One that stopped by itself knew its end: only word for word repetition counts there, by
    sequences of eight words, and more of it. This spares songs, and lists and grids that count on purpose.

    The numbers were chosen on the tune half of tests/data/labelled_replies.jsonl.gz and on 1,408 random pieces of files
    that are no loops (Python, C, HTML, JSON, manuals, data): of these 1.1 % are called loops when cut, 0.1 % when not.
    With a share of 0.4 it was 5 %. Missed are loops of some hundred characters at the end of something longer, which
    need more rounds to show, and those that end with something else.
    """
    if len(text) < 256:
        return False
    ratio, least = rules.loop_ratio_stop, rules.loop_share_stop
    if cut:
        ratio, least = rules.loop_ratio_cut, rules.loop_share_cut
    data = text[-_WINDOW_BYTES[-1] :].encode("utf-8", "surrogatepass")
    for size in _WINDOW_BYTES:
        tail = data[-size:]
        if len(zlib.compress(tail, 1)) - _DEFLATE_BYTES < ratio * len(tail) and _repeated_share(tail, cut) >= least:
            return True
        if len(data) <= size:
            break
    return False


def _repeated_share(text: bytes, cut: bool) -> float:
    """Of the word sequences, the share (0 to 1) that came before; 1 where there are too few words to judge by."""
    length = 4 if cut else 8
    if cut:
        text = text.translate(None, b"0123456789")
    words: list[Any] = text.split()
    if len(words) * 16 < len(text):  # a language, or a loop, without spaces
        words = _PIECES.findall(text.decode("utf-8", "ignore"))
    sequences = len(words) - length + 1
    if sequences < 1:
        return 1.0
    return 1 - len(set(zip(*(words[skip:] for skip in range(length)), strict=False))) / sequences


def next_attempt(verdict: str, attempts: int, rules: Verdicts = DEFAULT_VERDICTS) -> dict[str, Any] | None:
    """What to change in the run's sampling for one more attempt at a row; None: keep the best of those that were made.

    `verdict` is that on the last of `attempts`, the first one counted. Nothing to change is {}: only the seed is new.
    """
    often, changes = often_and_changes(getattr(rules, verdict, 0))
    return changes if attempts <= often else None


def badness(verdict: str) -> int:
    """Of several rows of one prompt the one with the least is the best; of equal ones, the first.

    A cut reply is right as far as it goes. The others are bad in ways that nobody has weighed against each other.
    """
    return {OK: 0, LENGTH: 1}.get(verdict, 2)


BAD = frozenset((EMPTY, UNCLOSED, LOOP, JUNK, NO_THINKING))
FAILED = frozenset((REFUSED, POISON, ERROR))


class AlarmLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which share of a run's last `window` rows at a server is too much, and what is done then: the run is paused, or
    it is only said (`warn`). 1.0 turns a limit off. No alarm before `minimum` rows.

    `bad` is for empty, unclosed, loop, junk and no_thinking together, `failed` for refused, poison and error, `same`
    for the most frequent text: stubs that no rule for one row knows (turn it off for sets answered by yes or no).
    """

    action: Literal["pause", "warn", "off"] = "pause"
    bad: Limit = 0.05
    length: Limit = 0.2
    failed: Limit = 0.2
    same: Limit = 0.5
    window: Annotated[int, msgspec.Meta(ge=1)] = 1000
    minimum: Annotated[int, msgspec.Meta(ge=1)] = 50


DEFAULT_LIMITS = AlarmLimits()


class Alarm:
    """Says when too many of the replies that come in are bad. One per run and one per server; a new one after a resume.

    A healthy run must never be stopped by bad luck, and a broken one must stop early. So two things are asked for: the
    share k/n is over its limit, and it is more than luck does to a healthy source, one at 0.4 of the limit (2 % bad).
    Luck is bounded by Chernoff, P(share >= q) <= exp(-n KL(q, healthy)), and the bound must be below e**-16 = 1.1e-7.
    The exact binomial tail at the first k that alarms is then below 2e-8 for every n up to the window (6 of 10, 14 of
    100, 33 of 500, 51 of 1000), so a healthy run of 914,000 rows alarms with a chance below 2 % even if each of its
    looks were independent. (Over 5 % of the last 500, as such, has 1.4e-5 a look and stops every other healthy run.)

    Short replies finish first: of 256 requests that start together, 2 % stubs are the first five to end and look like
    100 %. So while the window may hold replies of that first wave, all started ones count: n = replies + in_flight.

    The old failure, 87 % stubs: with 256 in flight a server's alarm comes at its 50th reply (`minimum`; the evidence is
    there after 26 stubs). With eight workers, none telling another, that is 400 replies, 0.044 % of 914,000. This holds
    if a pause drops what is in flight. Let to finish, 8 x 256 more are made: 2,448, 0.27 %.
    """

    def __init__(self, limits: AlarmLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.examples: list[str] = []  # three of the rows that `verdict` complained about
        self._last: deque[tuple[str, int, str]] = deque()
        self._verdicts: Counter[str] = Counter()
        self._texts: Counter[int] = Counter()
        self._seen = 0

    def add(self, verdict: str, text: str = "", example: str = "") -> None:
        """Count one row. `text` is its thought and answer, `example` what a person shall be shown of it."""
        entry = (verdict, hash(text) if text else 0, example)
        self._last.append(entry)
        self._count(entry, 1)
        self._seen += 1
        if len(self._last) > self.limits.window:
            self._count(self._last.popleft(), -1)

    def verdict(self, in_flight: int = 0) -> str | None:
        """Why to pause, in words, or None. `in_flight` is how many requests of this run or server are open now."""
        replies, limits = len(self._last), self.limits
        if replies < limits.minimum:
            return None
        first_wave = self._seen < 2 * limits.window
        started = replies + (in_flight if first_wave else 0)
        groups = (
            ("bad", "bad", BAD, limits.bad),
            ("length", "cut by max_tokens", {LENGTH}, limits.length),
            ("failed", "refused or failed", FAILED, limits.failed),
        )
        for key, what, words, limit in groups:
            count = sum(self._verdicts[word] for word in words)
            if _beyond_luck(count, started, limit):
                return self._complaint([one for one in self._last if one[0] in words], what, key, limit)
        most = max(self._texts.values(), default=0)
        if _beyond_luck(most, started, limits.same):
            text = next(text for text, count in self._texts.items() if count == most)
            return self._complaint([one for one in self._last if one[1] == text], "the same text", "same", limits.same)
        return None

    def _complaint(self, rows: list[tuple[str, int, str]], what: str, key: str, limit: float) -> str:
        self.examples = [example for *_, example in rows[-3:]]
        words = ", ".join(f"{number} {word}" for word, number in self._verdicts.most_common() if number)
        return f"{len(rows)} of the last {len(self._last)} rows are {what}, alarm.{key} is {limit:g} ({words})"

    def _count(self, entry: tuple[str, int, str], change: int) -> None:
        verdict, text, _ = entry
        self._verdicts[verdict] += change
        if text:
            self._texts[text] += change
            if not self._texts[text]:
                del self._texts[text]  # else the state would grow with the run


def _beyond_luck(count: int, total: int, limit: float) -> bool:
    """Whether count/total is over the limit and, by Chernoff's bound, not the luck of a source at 0.4 of the limit."""
    share, healthy = count / total, 0.4 * limit
    if share <= limit:
        return False
    divergence = share * log(share / healthy)
    if share < 1:
        divergence += (1 - share) * log((1 - share) / (1 - healthy))
    return total * divergence >= 16
