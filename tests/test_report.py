"""verify sees every kind of damage, is not disturbed by rounds, and its page lets nothing out of a row."""

import html.parser
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from harness import made_runs
from harness.services import BUCKET, SeaweedFS

from gend import config, runs
from gend.cli import main
from gend.errors import NotSound
from gend.records import Row, Run, Usage, Verdicts, part_key
from gend.report import BINS, Samples, lengths, render, verify
from gend.report_page import page
from gend.store import FolderStore, open_store


@pytest.fixture
def store(folder: Path) -> FolderStore:
    return FolderStore(folder / "store")


def changed(field: str, value: object, id: str = "p0000005") -> Callable[[Row], Row]:
    """A change of one row: another value in one field."""

    def change(row: Row) -> Row:
        if row.id == id:
            setattr(row, field, value)
        return row

    return change


def test_a_sound_run_is_sound_and_everything_in_it_is_counted(store: FolderStore) -> None:
    run = made_runs.add_run(store, made_runs.prompts(10), change=changed("verdict", "length"))
    report = verify(store, run)
    assert report.sound, report.faults
    assert (report.rows, report.parts, report.batches) == (10, 3, 3)
    assert report.verdicts == {"ok": 9, "length": 1}
    assert (report.completion_tokens, report.reasoning_tokens, report.prompt_tokens) == (400, 250, 120)
    assert report.reply_lengths.percentiles["p50"] == 40 and report.thinking_lengths.longest == 25
    assert report.bytes == sum(size for _, size in store.list("runs/") if _.endswith(".jsonl"))
    assert "whole and sound" in render(report)


def test_a_retry_with_more_tokens_may_have_them(store: FolderStore) -> None:
    more = {"max_tokens": 5000}

    def longer(row: Row) -> Row:
        row.content, row.usage = "word " * 1000, Usage(12, 4000, 25)
        row.changed = more if row.id == "p0000005" else msgspec.UNSET
        return row

    rules = Verdicts(length={"retries": 1, **more})
    report = verify(store, made_runs.add_run(store, made_runs.prompts(10), change=longer, verdicts=rules))
    assert report.sound, report.faults
    assert report.doubt_count == 9, "all others are over the run's own max_tokens"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (changed("verdict", "fine"), "no known word"),
        (changed("content", " \n"), "called ok and has no answer"),
        (changed("finish_reason", "length"), "called ok, with finish_reason 'length'"),
        (changed("changed", {"top_k": 5}), "made with {'top_k': 5}, which the run's verdicts do not ask for"),
        (changed("run", "another-0123456789ab"), "a row of another-0123456789ab/1"),
        (changed("batch", 2), "/2"),
        (changed("id", "p0000004"), "row 'p0000004' where prompt 'p0000005' belongs"),
        (changed("messages", [{"role": "user", "content": "what is 5 times 5?"}]), "not carry its prompt unchanged"),
        (changed("tools", [{"type": "function"}]), "not carry its prompt unchanged"),
        (lambda row: None if row.id == "p0000005" else row, "3 rows for 4 prompts"),
    ],
)
def test_a_bad_row_is_a_fault(store: FolderStore, change: Callable[[Row], Row | None], fault: str) -> None:
    run = made_runs.add_run(store, made_runs.prompts(10), change=change)
    report = verify(store, run)
    assert not report.sound
    assert fault in report.faults[0]
    assert "00000001.jsonl" in report.faults[0], "it says which part"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda body: body[:-1], "does not end with a newline"),
        (lambda body: body[:-40], "not a row"),
        (lambda body: body + body.splitlines(keepends=True)[0], "5 rows for 4 prompts"),
        (lambda body: body.replace(b'"usage":{', b'"usage":[{'), "not a row"),
        (lambda body: body.replace(b'"completion_tokens":40', b'"completion_tokens":"40"'), "not a row"),
        (lambda body: b"", "0 rows for 4 prompts"),
    ],
)
def test_a_damaged_part_is_a_fault(store: FolderStore, damage: Callable[[bytes], bytes], fault: str) -> None:
    run = made_runs.add_run(store, made_runs.prompts(10))
    key = part_key(run.id, 1)
    store.replace(key, damage(store.get(key) or b""))
    report = verify(store, run)
    assert not report.sound
    assert any(fault in line for line in report.faults), report.faults


def test_a_missing_part_a_stranger_and_a_strange_prompt_set_are_faults(store: FolderStore) -> None:
    run = made_runs.add_run(store, made_runs.prompts(10), without=[1])
    report = verify(store, run)
    assert (report.missing_batches, report.fault_count, report.sound) == (1, 1, False)

    run = made_runs.add_run(store, made_runs.prompts(10))
    for name in ("00000003.jsonl", "00000001.jsonl.part", "old/00000001.jsonl"):
        store.replace(f"runs/{run.id}/parts/{name}", b"{}\n")
    report = verify(store, run)
    assert (report.strangers, report.fault_count, report.rows) == (3, 3, 10)

    other = made_runs.add_run(store, made_runs.prompts(9), name="other")
    key = "sets/{}/prompts-00001.jsonl.zst"
    store.replace(key.format(other.set.fingerprint), store.get(key.format(run.set.fingerprint)) or b"")
    assert any("not those that were registered" in fault for fault in verify(store, other).faults)
    store.replace(key.format(other.set.fingerprint), b"no zstd")
    with pytest.raises(NotSound, match="damaged"):
        verify(store, other)


@pytest.mark.parametrize(
    ("usage", "doubt"),
    [
        (Usage(12, 40, 41), "more thinking tokens"),
        (Usage(12, 1001, 25), "over max_tokens"),
        (Usage(12, 0, 0), "but 0 tokens"),
        (Usage(12, 800, 25), "text was lost"),
        (Usage(12, 40, -1), "negative"),
    ],
)
def test_token_counts_that_cannot_be_are_doubts_and_no_faults(store: FolderStore, usage: Usage, doubt: str) -> None:
    report = verify(store, made_runs.add_run(store, made_runs.prompts(10), change=changed("usage", usage)))
    assert report.sound and report.doubt_count == 1
    assert doubt in report.doubts[0]


def test_repeated_answers_are_counted(store: FolderStore) -> None:
    answers = ["six tokens of boilerplate"] * 5 + ["yes", "yes", "a", "b", "c"]

    def change(row: Row) -> Row:
        row.content = answers[int(row.id[1:])]
        return row

    repeats = verify(store, made_runs.add_run(store, made_runs.prompts(10), change=change)).repeats
    assert (repeats.rows, repeats.answers, repeats.most, repeats.text) == (7, 2, 5, "six tokens of boilerplate")


def test_percentiles_and_histogram_agree_with_the_sorted_values() -> None:
    draw = random.Random(3)
    for most in (1, 39, 40, 41, 999, 16384):
        values = sorted(draw.randint(1, most) for _ in range(500))
        found = lengths(Counter(values))
        assert found.percentiles == {f"p{p}": values[-(-p * 500 // 100) - 1] for p in (5, 25, 50, 75, 95, 99)}
        assert sum(found.bins) == 500 and 1 <= len(found.bins) <= BINS + 1
        assert all(
            count == sum(at * found.step <= value < (at + 1) * found.step for value in values)
            for at, count in enumerate(found.bins)
        )


# -- rounds ----------------------------------------------------------------------------------------------------------


def with_round(store: FolderStore, without: tuple[int, ...] = ()) -> tuple[Run, Run]:
    """A run of 10 with three cut rows (1, 4, 7), and a round that made them again: 4 ok, 7 cut once more, 1 empty."""
    asked = made_runs.prompts(10)
    cut = {"p0000001", "p0000004", "p0000007"}

    def first(row: Row) -> Row:
        row.verdict = "length" if row.id in cut else "ok"
        return row

    def second(row: Row) -> Row:
        row.verdict = {"p0000004": "ok", "p0000007": "length"}.get(row.id, "empty")
        return row

    run = made_runs.add_run(store, asked, "first", first)
    again = [prompt for prompt in asked if prompt.id in cut]
    return run, made_runs.add_run(
        store, again, "first-round-1", second, batch_size=2, round_of=run.id, round=1, without=without
    )


def test_the_best_row_of_each_prompt_counts_over_the_rounds(store: FolderStore) -> None:
    run, again = with_round(store)
    store.replace("runs/no-run/notes.txt", b"somebody else's")
    assert [found.id for found in runs.stored_rounds(store, run)] == [again.id]
    report = verify(store, run, [again])
    assert report.sound, render(report)
    assert report.verdicts == {"ok": 7, "length": 3}
    assert report.best == {"ok": 8, "length": 2}
    assert report.best_from == {run.id: 9, again.id: 1}
    assert report.rounds[0].verdicts == {"ok": 1, "length": 1, "empty": 1}


def test_a_round_that_is_not_finished_is_no_fault_but_a_damaged_one_is(store: FolderStore) -> None:
    run, again = with_round(store, without=(0,))
    report = verify(store, run, [again])
    assert report.sound and not report.rounds[0].sound
    store.replace(part_key(again.id, 1), b"torn")
    assert not verify(store, run, [again]).sound


# -- memory ----------------------------------------------------------------------------------------------------------


def test_parts_are_fetched_ahead_but_not_without_bound(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_runs.add_run(store, made_runs.prompts(400))
    listed, _ = runs.listed_parts(store, run)
    asked: list[str] = []
    read = store.get

    def get(key: str) -> bytes | None:
        if "/parts/" in key:
            asked.append(key)
        return read(key)

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr(runs, "READ_AHEAD_BYTES", 10 * listed[0])
    most_ahead = max(len(asked) - number for number, _ in enumerate(runs.read_parts(store, run, listed)))
    assert 5 <= most_ahead <= 12
    assert asked == [part_key(run.id, number) for number in range(100)]


# -- the page --------------------------------------------------------------------------------------------------------

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} {% raw %} & \x00 \u202e \" ' -->"


class Tags(html.parser.HTMLParser):
    """Which tags and attributes a page has, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_rows_of_each_verdict_and_nothing_of_a_row_is_markup(store: FolderStore) -> None:
    asked = [
        msgspec.structs.replace(prompt, id=prompt.id + HOSTILE, messages=[{"role": "user", "content": HOSTILE}])
        for prompt in made_runs.prompts(30)
    ]

    def change(row: Row) -> Row:
        number = int(row.id[1:8])
        row.verdict = ("ok", "length", "refused")[number % 3]
        row.content = HOSTILE + "x" * 10_000 if number % 3 < 2 else None
        row.reasoning_content = HOSTILE
        row.error = HOSTILE if row.verdict == "refused" else None
        row.tool_calls = [{"function": {"name": HOSTILE, "arguments": "{}"}}] if number % 2 else None
        return row

    run = made_runs.add_run(store, asked, change=change)
    run = msgspec.structs.replace(run, model=HOSTILE)
    samples = Samples(4, run.id)
    report = verify(store, run, samples=samples)
    for kind in ("fault", "doubt"):
        getattr(report, kind)(HOSTILE)
    text = page(run, [], report, samples)
    seen = Tags()
    seen.feed(text)
    assert seen.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "span", "p", "br", "div", "b", "ul", "li",
        "table", "tr", "td", "th", "svg", "rect", "details", "summary", "pre",
    }  # fmt: skip
    assert not {"src", "href", "onerror", "onclick", "srcset"} & seen.attributes
    assert "{{ 7 * 7 }}" in seen.text, "the template engine leaves rows alone"
    assert {word: len(rows) for word, rows in samples.rows.items()} == {"ok": 4, "length": 4, "refused": 4}
    assert all(f"{word}</b>" in text for word in report.verdicts)
    assert "characters left out" in text and len(text) < 400_000


def test_every_row_has_the_same_chance_to_be_a_sample() -> None:
    drawn = Counter[bytes]()
    for seed in range(400):
        samples = Samples(2, str(seed))
        for number in range(8):
            samples.offer("ok", b"%d" % number)
        drawn.update(samples.rows["ok"])
    assert all(60 < drawn[b"%d" % number] < 140 for number in range(8)), drawn  # 100 expected, sigma 8.7


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_it_with_its_exit_code(store: FolderStore, folder: Path) -> None:
    run, again = with_round(store)
    settings = folder / "config.toml"
    settings.write_text(f'[store]\nurl = "{store.url}"\n')
    written = folder / "report.html"
    done = CliRunner().invoke(main, ["--config", str(settings), "verify", "first", "--json", "--html", str(written)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["run"] == run.id and report["rounds"][0]["run"] == again.id
    assert report["sound"] is True and report["reply_lengths"]["percentiles"]["p99"] == 40
    assert written.read_text().startswith("<!doctype html>") and not list(folder.glob(".new-*"))

    store.replace(part_key(run.id, 0), b"")
    done = CliRunner().invoke(main, ["--config", str(settings), "verify", run.id])
    assert done.exit_code == 1
    assert "0 rows for 4 prompts" in done.output and "NOT SOUND" in done.output
    assert CliRunner().invoke(main, ["--config", str(settings), "verify", "nobody"]).exit_code == 2


def test_parts_are_read_from_s3_too(seaweed: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.variables().items():
        monkeypatch.setenv(name, value)
    store = open_store(config.Store(url=f"s3://{BUCKET}/{prefix}", endpoint=seaweed.endpoint, region="us-east-1"))
    run = made_runs.add_run(store, made_runs.prompts(50), without=[3])
    report = verify(store, run)
    assert (report.rows, report.parts, report.missing_batches) == (46, 12, 1)
    assert report.fault_count == 1
