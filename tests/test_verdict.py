import gzip
import json
import os
import random
import sysconfig
from collections import Counter
from math import comb
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gend.records import Reply, Sampling, Usage, Verdicts
from gend.verdict import (
    ABORT,
    EMPTY,
    JUNK,
    LENGTH,
    LOOP,
    NO_THINKING,
    OK,
    REFUSED,
    UNCLOSED,
    VERDICTS,
    Alarm,
    AlarmLimits,
    badness,
    judge,
    next_attempt,
)

LABELLED = Path(__file__).parent / "data" / "labelled_replies.jsonl.gz"
THOUGHT = "The user asks for the capital of Peru. That is Lima; Cusco was the capital of the Incas."
WAIT = "Wait, let me check that again. Three times eleven is 33, plus 6 is 39. Yes, 39. "


def reply(content=None, thought=None, finish="stop", calls=None, usage=(50, 20)):
    return Reply(
        content=content, reasoning_content=thought, finish_reason=finish, tool_calls=calls,
        usage=Usage(completion_tokens=usage[0], reasoning_tokens=usage[1]),
    )  # fmt: skip


def labelled(split):
    with gzip.open(LABELLED, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["split"] == split]


def verdict_on(row):
    sampling = Sampling(thinking=row["thinking"], max_tokens=row["max_tokens"])
    return judge(msgspec.convert(row["reply"], Reply), sampling)


# The labelled replies --------------------------------------------------------------------------------


def test_on_the_held_out_half_few_bad_replies_are_missed_and_hardly_any_good_one_is_blamed():
    rows = [row for row in labelled("test") if row["label"] != "salad"]  # salad is no verdict: see the next test
    said = [(row["label"], verdict_on(row), row.get("doubt", False)) for row in rows]
    figures = {}
    for word in sorted({label for label, _, _ in said}):
        called = [label for label, verdict, _ in said if verdict == word]
        there = [verdict for label, verdict, _ in said if label == word]
        sure = [verdict for label, verdict, doubt in said if label == word and not doubt]
        figures[word] = (
            called.count(word) / max(1, len(called)),
            there.count(word) / len(there),
            sure.count(word) / max(1, len(sure)),
        )
        precision, recall, of_sure = figures[word]
        print(f"{word:12} {len(there):4} precision {precision:.3f} recall {recall:.3f}, without doubtful {of_sure:.3f}")
    for word in (JUNK, EMPTY, UNCLOSED, NO_THINKING, ABORT):
        assert min(figures[word]) >= 0.95, word
    precision, recall, of_sure = figures[LOOP]
    # Missed are loops of a few rounds in replies of a few hundred tokens, and those that end with something else.
    assert precision >= 0.95 and recall >= 0.75 and of_sure >= 0.9
    long = [verdict_on(row) for row in rows if row["label"] == LOOP and row["reply"]["finish_reason"] == "length"
            and row["reply"]["usage"]["completion_tokens"] >= 1000]  # fmt: skip
    print(f"loops cut after 1000 tokens or more: {long.count(LOOP)} of {len(long)} found")
    assert len(long) >= 30 and long.count(LOOP) >= 0.95 * len(long)


def test_pieces_of_all_scripts_are_junk_while_shuffled_words_of_one_language_pass():
    verdicts = Counter((row["group"].startswith("salad-words"), verdict_on(row)) for row in labelled("test")
                       if row["label"] == "salad" and row["by"] == "made")  # fmt: skip
    assert set(verdicts) == {(False, JUNK), (True, OK)}  # the second is a known hole: canaries are for that


def test_program_texts_are_neither_loops_nor_junk():
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for path in modules if len(text := path.read_text(encoding="utf-8")) > 1000]
    assert len(texts) > 100
    for finish, most in (("stop", 0), ("length", 0.02)):
        verdicts = Counter(judge(reply(text, None, finish), Sampling(thinking=False)) for text in texts)
        assert verdicts[LOOP] + verdicts[JUNK] <= most * len(texts), verdicts


# The order of the table ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (reply("Lima.", THOUGHT), OK),
        (reply("", THOUGHT, "tool_calls", calls=[{"id": "c"}]), OK),
        (reply(None, THOUGHT, calls=[{"id": "c"}]), OK),
        (reply("Lima.", THOUGHT, usage=(0, 999_999)), OK),  # wrong usage
        (reply("[]", THOUGHT), OK),
        (reply("👍", THOUGHT), OK),
        (reply("Lima.", THOUGHT, "abort"), ABORT),
        (reply("", "", "abort"), ABORT),
        (reply("Lima.", THOUGHT, None), ABORT),
        (reply("<think>\n\n</think>\n\n"), EMPTY),
        (reply(None, None, "length"), EMPTY),
        (reply("\u200b<|im_end|>\n", "\n\n"), EMPTY),
        (reply("\n\n", THOUGHT), EMPTY),
        (reply("", THOUGHT, "length"), LENGTH),
        (reply("The capital of", THOUGHT, "length"), LENGTH),
        (reply(f"<think>\n{THOUGHT}", None, "length"), LENGTH),
        (reply("", THOUGHT + WAIT * 60, "length"), LOOP),
        (reply("39.", WAIT * 60), LOOP),
        (
            reply(THOUGHT + "".join(f"Attempt {n}: too large, try another. " for n in range(90)), THOUGHT, "length"),
            LOOP,
        ),
        (reply("!!!!", THOUGHT), JUNK),
        (reply("", "!" * 4000, "length"), JUNK),
        (reply("Lima" + "\ufffd" * 40, THOUGHT), JUNK),
        (reply("Lima, as the \ud83d\ud83d\ud83d\ud83d", THOUGHT), JUNK),
        (reply(f"<think>\n{THOUGHT}"), UNCLOSED),
        (reply(f"{THOUGHT}\n</think>\n\nLima."), UNCLOSED),
        (reply("", THOUGHT, usage=(20, 20)), UNCLOSED),
        (reply("Sure, I can help with that."), NO_THINKING),
        (reply("Lima.", "\n\n"), NO_THINKING),
    ],
)
def test_the_first_rule_that_fits_gives_the_word(made, verdict):
    assert judge(made, Sampling(thinking=True)) == verdict


def test_a_thought_is_asked_for_only_where_thinking_is_on():
    assert judge(reply("Lima."), Sampling(thinking=False)) == judge(reply("Lima."), Sampling(thinking=None)) == OK


def test_every_number_can_be_set_per_run():
    loop, short = reply("", WAIT * 60, "length"), reply("Sure.")
    off = Verdicts(loop_ratio_cut=0.0)
    assert judge(loop, Sampling(), off) == LENGTH
    assert judge(short, Sampling(thinking=False), Verdicts(min_answer_chars=40)) == EMPTY


@settings(max_examples=300, deadline=None)
@given(
    st.none() | st.text(st.characters(exclude_categories=())),
    st.none() | st.text(st.characters(exclude_categories=())),
    st.integers(1, 400),
    st.sampled_from(["stop", "length", "tool_calls", "abort", None, "new"]),
    st.tuples(st.integers(-5, 5), st.integers(-5, 5)),
)
def test_no_reply_makes_it_raise(content, thought, times, finish, usage):
    made = reply(content and content * times, thought and thought * times, finish, usage=usage)
    assert judge(made, Sampling()) in VERDICTS


# Retries and the alarm -------------------------------------------------------------------------------


def test_bad_rows_are_tried_once_more_and_cut_ones_are_kept():
    assert next_attempt(EMPTY, 1) == {} and next_attempt(EMPTY, 2) is None
    assert {next_attempt(verdict, 1) for verdict in (OK, LENGTH, LOOP, ABORT, REFUSED)} == {None}
    assert next_attempt(LENGTH, 3, Verdicts(length=3)) == {} and next_attempt(LENGTH, 4, Verdicts(length=3)) is None


def test_a_retry_may_have_other_settings():
    rules = Verdicts(length={"retries": 2, "max_tokens": 65536}, loop={"temperature": 1.2})
    assert [next_attempt(LENGTH, made, rules) for made in (1, 2, 3)] == [{"max_tokens": 65536}] * 2 + [None]
    assert [next_attempt(LOOP, made, rules) for made in (1, 2)] == [{"temperature": 1.2}, None]


def test_a_whole_reply_is_better_than_a_cut_one_and_that_than_any_other():
    assert badness(OK) < badness(LENGTH) < badness(LOOP)
    assert {badness(verdict) for verdict in VERDICTS if verdict not in (OK, LENGTH)} == {badness(LOOP)}


def test_the_old_failure_stops_before_a_thousandth_of_the_rows_is_made():
    draw, made = random.Random(7), 0
    for _worker in range(8):  # each with its own alarm, 256 in flight, and the pause drops what is in flight
        alarm = Alarm()
        while not alarm.verdict(in_flight=256):
            alarm.add(EMPTY if draw.random() < 0.87 else OK)
            made += 1
    assert made < 914


def test_a_healthy_run_is_left_alone():
    draw, alarm = random.Random(7), Alarm()
    for _ in range(100_000):
        number = draw.random()
        alarm.add(JUNK if number < 0.02 else LENGTH if number < 0.1 else OK)
        assert alarm.verdict() is None


def test_luck_alarms_less_than_once_in_fifty_million_looks():
    for total in (50, 100, 200, 500, 1000):
        alarm = Alarm()
        for _ in range(total):
            alarm.add(OK)
        bad = 0
        while not alarm.verdict():  # a window of `total` with one more bad reply each time
            alarm = Alarm()
            bad += 1
            for number in range(total):
                alarm.add(EMPTY if number < bad else OK)
        tail = sum(comb(total, k) * 0.02**k * 0.98 ** (total - k) for k in range(bad, total + 1))
        assert tail < 2e-8, (total, bad)


def test_the_first_wave_is_measured_against_all_that_were_started():
    alarm = Alarm()
    for number in range(50):
        alarm.add(EMPTY if number < 11 else OK)  # the quick stubs of 550 requests, 2 % of them, end first
    assert alarm.verdict(in_flight=500) is None
    assert "11 of the last 50 rows are bad, alarm.bad is 0.05" in (alarm.verdict() or "")


def test_a_server_that_breaks_in_mid_run_is_seen_within_seventy_replies():
    alarm = Alarm()
    for _ in range(5000):
        alarm.add(OK)
    broken = 0
    while not alarm.verdict(in_flight=256):
        alarm.add(JUNK)
        broken += 1
    assert broken < 70


def test_stubs_that_no_rule_knows_are_seen_by_being_equal():
    alarm, stub = Alarm(), "I can help with that."
    for number in range(60):
        alarm.add(OK, stub if number % 8 else f"Answer {number}", f"p{number}")
    assert "the same text" in (alarm.verdict() or "")
    assert alarm.examples == ["p57", "p58", "p59"]


def test_an_alarm_shows_rows_of_the_kind_that_it_is_about():
    alarm = Alarm()
    for number in range(60):
        alarm.add((OK, LENGTH, JUNK)[number % 3], example=f"p{number}")
    assert "20 of the last 60 rows are bad" in (alarm.verdict() or "")
    assert alarm.examples == ["p53", "p56", "p59"]


def test_every_limit_can_be_turned_off_and_the_state_stays_small():
    alarm = Alarm(AlarmLimits(bad=1.0, length=1.0, failed=1.0, same=1.0, window=100))
    for number in range(5000):
        alarm.add(EMPTY, os.urandom(8).hex() if number % 2 else "same")
    assert alarm.verdict() is None
    assert len(alarm._last) == 100 and len(alarm._texts) <= 51
