"""What is concluded about servers and prompts: who killed a server, what it can run, what canaries and rows are worth.

Tables for what is pure; real workers against a fake server for the rest. Whole daemons are in test_servers.py.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from harness.fake_server import digest
from harness.lone import Lone
from harness.processes import wait_until
from harness.reader import FolderParts, assert_whole, read_parts, read_request_log, write_prompts
from harness.services import FakeServer, Ports, Valkey, write_whole

from gend import loader
from gend.blame import AT_A_SERVER, Suspicion, accuse
from gend.canary import knows, split_fault
from gend.cli import main
from gend.concurrency import FIRST_LIMIT, Pilot
from gend.config import settings_from
from gend.engine import Load
from gend.errors import SettingsError
from gend.ledger import Control, Ledger
from gend.records import Reply, Verdicts, row_seed
from gend.report import verify
from gend.server_command import Seat, argv
from gend.sglang_flags import fitting, known_flags
from gend.verdict import AlarmLimits
from gend.worker import SERVER_GONE

# ---- blame

A_LOT = [f"r/{number}" for number in range(256)]
ALONE = {"r/7": Suspicion(3, 1)}


def at(stage: int, count: int, first: int = 0) -> dict[str, Suspicion]:
    return {f"r/{number}": Suspicion(stage) for number in range(first, first + count)}


ACCUSED: dict[str, tuple[list[str], dict[str, Suspicion], dict[str, Suspicion], set[str]]] = {
    # who was in flight, who was a suspect -> who is one now and how, who is cleared
    "many, nobody known": (A_LOT, {}, at(1, 256), set()),
    "32 of them": (A_LOT[:32], at(1, 256), at(2, 32), set(A_LOT[32:])),
    "33 are too many for the lane": (A_LOT[:33], {}, at(1, 33), set()),
    "those that were no suspects go free": (A_LOT, at(1, 20), at(2, 20), set()),
    "four of them": (A_LOT[:4], at(2, 32), at(3, 4), set(A_LOT[4:32])),
    "four, and many others": ([*A_LOT[:4], *A_LOT[100:]], at(2, 32), at(3, 4), set(A_LOT[4:32])),
    "five need another round in the lane": (A_LOT[:5], at(2, 32), at(2, 5), set(A_LOT[5:32])),
    "one alone": (["r/7"], at(3, 4, 5), ALONE, {"r/5", "r/6", "r/8"}),
    "one alone, the second time": (["r/7"], ALONE, {"r/7": Suspicion(3, 2)}, set()),
    "alone, though nobody suspected it": (["r/7"], {}, ALONE, set()),
    "not alone: it may have been another": (["r/7", "r/8"], ALONE, {"r/7": Suspicion(3, 1)}, set()),
    "suspects of another stage stay as they are": (A_LOT[:4], at(2, 4) | at(3, 1, 9), at(3, 4), set()),
    "a second culprit elsewhere": (["r/200"], at(1, 100), {"r/200": Suspicion(3, 1)}, set()),
}


@pytest.mark.parametrize("name", ACCUSED)
def test_whom_a_crash_accuses(name: str) -> None:
    in_flight, known, accused, cleared = ACCUSED[name]
    found, free = accuse(in_flight, known)
    assert (found, set(free)) == (accused, cleared)


def test_one_of_256_is_found_with_five_crashes() -> None:
    """Everybody is tried as the stages say, and the culprit kills the server each time it is tried."""
    known: dict[str, Suspicion] = {}
    culprit, crowds = "r/77", []
    in_flight = A_LOT
    while not (culprit in known and known[culprit].poison):
        crowds.append(len(in_flight))
        accused, cleared = accuse(in_flight, known)
        known = {key: value for key, value in (known | accused).items() if key not in cleared}
        company = {1: 32, 2: 4, 3: 1}[known[culprit].stage]
        in_flight = [culprit, *(key for key in known if key != culprit)][:company]
    assert crowds == [256, 32, 4, 1, 1]
    assert known == {culprit: Suspicion(3, 2)}, "and nobody else is left a suspect"
    assert AT_A_SERVER == 32


# ---- how much a server can run

SILENT = Load()


def load(running: int, waiting: int, most: int = 256, **more: Any) -> Load:
    return Load(running=running, waiting=waiting, max_running=most, **more)


Step = tuple[Load, int, tuple[int, str]]
HISTORIES: dict[str, tuple[Pilot, list[Step]]] = {
    # what the server says, how many are in flight -> the limit, and why it is not higher
    "it says what it can run: that and a queue, at once": (Pilot(), [(load(0, 0), 0, (264, "slots"))]),
    "first silent, since it loads; then at once": (
        Pilot(),
        [(SILENT, 0, (FIRST_LIMIT, "trial"))] * 5
        + [(load(0, 0), 0, (264, "slots")), (load(256, 8), 264, (264, "slots"))],
    ),
    "full": (Pilot(), [(load(0, 0, 32), 0, (34, "slots")), (load(32, 2, 32), 34, (34, "slots"))]),
    "memory for 16, whatever was asked": (Pilot(), [(load(0, 0, 16), 0, (18, "slots"))]),
    "the KV cache is full: the queue shrinks": (
        Pilot(),
        [(load(0, 0), 0, (264, "slots")), (load(100, 164), 264, (103, "kv")), (load(100, 3), 103, (109, "kv"))],
    ),
    "it retracts: fewer, and again": (
        Pilot(),
        [
            (load(0, 0), 0, (264, "slots")),
            (load(200, 64, retracted=10), 264, (237, "kv")),
            (load(200, 37, retracted=1), 237, (213, "kv")),
        ],
    ),
    "too few prompts": (Pilot(), [(load(0, 0), 0, (264, "slots")), (load(10, 0), 10, (264, "prompts"))]),
    "three quarters of it, after crashes": (Pilot(share=0.75), [(load(0, 0, 16), 0, (14, "slots"))]),
    "a share is never nothing": (Pilot(share=0.25), [(load(0, 0, 1), 0, (3, "slots"))]),
    "a fixed number": (Pilot(fixed=5), [(load(256, 100), 5, (5, "fixed")), (SILENT, 5, (5, "fixed"))]),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_how_many_shall_be_in_flight(name: str) -> None:
    pilot, steps = HISTORIES[name]
    for number, (said, in_flight, expected) in enumerate(steps):
        limit = pilot.step(said, in_flight, tokens=0, faults=0)
        assert (limit, pilot.limited_by) == expected, f"step {number}"


def tried(speed: Callable[[int], int], steps: int, faulty: Callable[[int], bool] = lambda limit: False) -> Pilot:
    """A server without `/v1/loads`: tokens a second by how many are in flight, always as many as allowed."""
    pilot, limit = Pilot(), 0
    for _ in range(steps):
        limit = pilot.step(SILENT, limit, speed(limit), int(faulty(limit)))
    return pilot


def test_a_silent_server_gets_more_for_as_long_as_that_brings_more() -> None:
    climbed = tried(lambda limit: 40 * min(limit, 100), 300)
    assert climbed.limited_by == "slots"
    assert 100 <= climbed.limit <= 125
    failing = tried(lambda limit: 40 * limit, 300, faulty=lambda limit: limit > 50)
    assert (failing.limited_by, failing.limit <= 50) == ("errors", True)


# ---- flags of the installed SGLang

BY_PARSER = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str)
        group = parser.add_argument_group("x")
        group.add_argument("--mamba-scheduler-strategy", help="see --nothing of this")
        parser.add_argument("-q", "--mem-fraction-static")
        parser.set_defaults(other="--not-a-flag")
"""
BY_FIELDS = """
@dataclasses.dataclass
class ServerArgs:
    model_path: A[str, Arg(help="x", aliases=["--model"])]
    mamba_radix_cache_strategy: Annotated[str, Arg(help="formerly something")] = "auto"
    mem_fraction_static: A[Optional[float], "GPU memory"] = None
    not_a_flag: int = 0
"""


@pytest.fixture
def package(tmp_path: Path) -> Callable[[str], Path]:
    """Makes an sglang package of a made-up version, of which only server_args.py is there."""

    def make(source: str) -> Path:
        folder = tmp_path / "sglang"
        (folder / "srt").mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "srt" / "server_args.py").write_text(source)
        return folder

    return make


@pytest.mark.parametrize(
    ("source", "mamba"), [(BY_PARSER, "mamba-scheduler-strategy"), (BY_FIELDS, "mamba-radix-cache-strategy")]
)
def test_flags_follow_the_installed_version(source: str, mamba: str, package: Callable[[str], Path]) -> None:
    known = known_flags(package(source))
    assert known == {"model-path", "model", "mem-fraction-static", mamba}
    for name in ("mamba-scheduler-strategy", "mamba-radix-cache-strategy"):
        assert fitting({name: "auto", "model-path": "m"}, known) == {name: mamba, "model-path": "model-path"}
    with pytest.raises(SettingsError, match=r"no --mem-fraction-statik; did you mean mem-fraction-static\?"):
        fitting({"mem-fraction-statik": 0.9}, known)


def test_a_source_of_another_form_forbids_nothing(package: Callable[[str], Path]) -> None:
    assert fitting({"anything": 1}, known_flags(package("FLAGS = load()"))) == {"anything": "anything"}


def test_without_speculative_decoding_only_its_flags_are_gone() -> None:
    flags = {"speculative-algorithm": "NEXTN", "speculative-num-steps": 3, "mem-fraction-static": 0.9}
    made = settings_from({"model": {"path": "m"}, "servers": {"command": ["serve"], "flags": flags}}, "test")
    line = argv(made, Seat(number=0, gpus=(), port=30000), dropped="speculative")
    assert " ".join(line) == "serve --model-path m --host 127.0.0.1 --port 30000 --mem-fraction-static 0.9"


# ---- canaries


def reply(content: str | None, thought: str | None = None) -> Reply:
    return Reply(content=content, reasoning_content=thought, finish_reason="stop")


def test_canaries() -> None:
    assert knows(reply("Paris")) and knows(reply(None, "It is paris.")) and knows(reply("**PARIS**!"))
    assert not knows(reply("!!!!")) and not knows(reply(None)) and not knows(reply("London"))
    assert split_fault(reply("Paris", "France's capital ...")) == ""
    assert "servers.flags.reasoning-parser" in split_fault(reply("<think>hm</think>Paris"))
    assert split_fault(reply("Paris", " \n"))


# ---- replies that are worth less than they look


WORTH: dict[str, tuple[dict[str, Any], str, int]] = {
    # how the server answers prompts with this text -> the row's verdict, and its attempts
    "(null)": ({"mode": "null"}, "length", 1),
    "(thought inside)": ({"mode": "thought_inside"}, "unclosed", 2),
    "(no closing tag)": ({"mode": "unclosed"}, "unclosed", 2),
    "(empty)": ({"mode": "empty"}, "empty", 2),
    "(empty once)": ({"mode": "empty", "n": 1}, "ok", 2),
    "(loop)": ({"mode": "loop"}, "loop", 1),
    "(junk)": ({"mode": "junk"}, "junk", 2),
    "(refused)": ({"mode": "http", "status": 400}, "refused", 1),
    # the server's faults use up no attempts
    "(aborted)": ({"mode": "abort", "n": 2}, "ok", 1),
    "(reset)": ({"mode": "reset", "n": 2}, "ok", 1),
    "(503)": ({"mode": "http", "status": 503, "n": 1}, "ok", 1),
    "(good)": ({"mode": "ok"}, "ok", 1),
}


@pytest.fixture
def server(folder: Path, marker: str, ports: Ports) -> Iterator[FakeServer]:
    with FakeServer(folder / "fake", marker, ports.block(1), "--speed", "200") as fake:
        yield fake


@pytest.fixture
def lone(folder: Path, server: FakeServer, valkey: Valkey) -> Iterator[Lone]:
    """A box without a daemon."""
    box = Lone(folder / "box", server.url, valkey.url, config={"sampling": {"max_tokens": 1500}})
    yield box
    box.end()


def test_the_last_batch_of_a_dead_server_is_accused_too(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    """The drain cancels what is open at once, also a batch that is just writing down who was in flight."""

    def slow_redis() -> None:
        inner = Ledger.suspects

        def suspects(ledger: Ledger) -> dict[str, Suspicion]:
            time.sleep(0.3)
            return inner(ledger)

        Ledger.suspects = suspects  # type: ignore[method-assign]

    run = lone.register(write_prompts(tmp_path / "prompts.jsonl", 8, containing={3: "POISON-7"}))
    server.mode("crash_on", containing="POISON-7")
    worker = lone.start(slow_redis)
    assert worker.wait() == SERVER_GONE, worker.log.read_text()
    assert f"{run.id}/p0000003" in lone.ledger.suspects()


def test_what_rows_are_worth_and_how_often_they_were_tried(lone: Lone, server: FakeServer, tmp_path: Path) -> None:
    write_whole(server.mode_file, json.dumps([{**fault, "containing": text} for text, (fault, *_) in WORTH.items()]))
    source = write_prompts(tmp_path / "prompts.jsonl", len(WORTH), containing=dict(enumerate(WORTH)))
    lone.finish(lone.register(source))
    seen = assert_whole(FolderParts(lone.store_folder), source, verdicts=Counter(worth[1] for worth in WORTH.values()))
    rows = [seen.rows[id] for id in seen.ids]
    assert {text: (row["verdict"], row["attempts"]) for text, row in zip(WORTH, rows, strict=True)} == {
        text: tuple(worth) for text, (_, *worth) in WORTH.items()
    }
    tries = [event for event in read_request_log(server.request_log) if event["event"] == "started"]
    empty = [event["seed"] for event in tries if event["sha"] == digest(rows[3]["messages"][0]["content"])]
    assert len(set(empty)) == 2, "the second attempt has another seed"


def test_a_run_that_an_alarm_has_paused_stays_so_when_redis_is_emptied(
    lone: Lone, server: FakeServer, tmp_path: Path
) -> None:
    run = lone.register(write_prompts(tmp_path / "prompts.jsonl", 300))
    server.mode("empty", containing="Question")
    with lone.supplied():
        worker = lone.start()
        control = lambda: loader.stored_control(lone.store, run)  # noqa: E731
        wait_until(lambda: control().state == "paused", "the alarm", failed=lone.logs)
        worker.end()
    lone.ledger.redis.flushall()
    loader.reconcile(lone.ledger, lone.store)
    assert lone.ledger.controls()[run.id] == control()
    assert "rows are bad" in control().reason


RETRIED: dict[str, tuple[list[dict[str, Any]], str, int, dict[str, Any] | None]] = {
    # how the server answers prompts with this text -> the row's verdict, its attempts, what the kept one was made with
    "(mended)": ([{"mode": "null", "n": 1}], "ok", 2, {"max_tokens": 50_000}),
    "(cut, then a loop)": ([{"mode": "null", "n": 1}, {"mode": "loop"}], "length", 2, None),
    "(cut, then refused)": ([{"mode": "null", "n": 1}, {"mode": "http", "status": 400}], "length", 2, None),
    "(empty, then cut)": ([{"mode": "empty", "n": 1}, {"mode": "null"}], "length", 2, None),
    "(junk, then good)": ([{"mode": "junk", "n": 1}], "ok", 2, {"thinking": False, "temperature": 0.3}),
    "(loops)": ([{"mode": "loop"}], "loop", 1, None),
}


def test_a_row_is_the_best_of_attempts_with_the_settings_that_the_verdict_asks_for(
    folder: Path, server: FakeServer, valkey: Valkey, tmp_path: Path
) -> None:
    faults = [{**fault, "containing": text} for text, (faults, *_) in RETRIED.items() for fault in faults]
    write_whole(server.mode_file, json.dumps(faults))
    verdicts = {
        "length": {"retries": 1, "max_tokens": 50_000},
        "junk": {"thinking": False, "temperature": 0.3},
        "min_thought_chars": 9,
    }
    lone = Lone(folder / "box", server.url, valkey.url, config={"sampling": {"max_tokens": 1500}, "verdicts": verdicts})
    try:
        source = write_prompts(tmp_path / "prompts.jsonl", len(RETRIED), containing=dict(enumerate(RETRIED)))
        run = lone.register(source)
        # The worker goes by what the run was registered with, whatever the config says by now.
        lone.config.write_text(lone.config.read_text().replace("50000", "600"))
        lone.finish(run)
        seen = read_parts(FolderParts(lone.store_folder), source)
        rows = [seen.rows[id] for id in seen.ids]
        assert {
            text: (row["verdict"], row["attempts"], row.get("changed")) for text, row in zip(RETRIED, rows, strict=True)
        } == {text: tuple(worth) for text, (_, *worth) in RETRIED.items()}
        mended, cut, _, after_empty, unthinking, _ = rows
        assert mended["max_tokens"] == 32_768, "still clamped to the server's context"
        assert "max_tokens" not in cut and cut["error"] is None and cut["content"] is None
        assert [row["seed"] for row in (cut, after_empty)] == [
            row_seed(run.sampling.seed, cut["id"], 0), row_seed(run.sampling.seed, after_empty["id"], 1)
        ]  # fmt: skip
        assert unthinking["reasoning_content"] is None
        report = verify(lone.store, run)
        assert report.sound, report.faults
    finally:
        lone.end()


def test_an_alarm_shows_rows_and_can_be_changed_for_a_run(
    folder: Path, server: FakeServer, valkey: Valkey, tmp_path: Path
) -> None:
    write_whole(server.mode_file, json.dumps([{"mode": "http", "status": 400, "containing": "Question"}]))
    lone = Lone(folder / "box", server.url, valkey.url, config={"alarm": {"minimum": 10, "failed": 0.5}})
    try:
        run = lone.register(write_prompts(tmp_path / "prompts.jsonl", 200))

        def gend(*words: str) -> str:
            done = CliRunner().invoke(main, ["--config", str(lone.config), *words])
            assert done.exit_code == 0, done.output
            return done.stdout

        with lone.supplied():
            lone.wait_up(lone.start())
            wait_until(lambda: lone.ledger.controls()[run.id].state == "paused", "the alarm", failed=lone.logs)
            status = json.loads(gend("status", "--json"))
            [shown] = status["runs"]
            assert "rows are refused or failed, alarm.failed is 0.5" in shown["reason"]
            assert len(shown["examples"]) == 3 and all(" refused: 'HTTP 400" in one for one in shown["examples"])
            [warning] = [warning for warning in status["warnings"] if "is paused" in warning]
            assert shown["reason"] in warning and f"`gend resume {run.id}`" in warning
            assert shown["examples"][0] in gend("status")
            gend("resume", run.id, "--set", "alarm.failed=1.0")
            lone.wait_done(run)
        decided = lone.ledger.controls()[run.id]
        assert decided.alarm == AlarmLimits(minimum=10, failed=1.0) and decided.examples == []
        assert msgspec.json.decode(lone.store.get(f"runs/{run.id}/control.json") or b"", type=Control) == decided
    finally:
        lone.end()


def test_a_run_that_is_there_with_other_verdicts_is_not_silently_another(lone: Lone, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", 3)

    def enqueue(*changes: str) -> str:
        sets = [word for change in changes for word in ("--set", change)]
        done = CliRunner().invoke(main, ["--config", str(lone.config), "enqueue", str(source), *sets])
        assert done.exit_code == 0, done.output
        return done.stdout

    first = enqueue("verdicts.loop={retries=1, top_k=5}", "alarm.bad=0.1")
    [run] = lone.ledger.runs().values()
    assert run.verdicts == Verdicts(loop={"retries": 1, "top_k": 5})
    assert lone.ledger.controls()[run.id].alarm == AlarmLimits(bad=0.1)
    assert "keeps" not in first
    assert "keeps" not in enqueue("verdicts.loop={retries=1, top_k=5}", "alarm.bad=0.1")
    again = enqueue()
    assert 'keeps verdicts.loop={"retries":1,"top_k":5}' in again and "keeps alarm.bad=0.1" in again
    assert f"gend retry {run.id}" in again and f"gend resume {run.id} --set alarm." in again
    # Also where only the store remembers it.
    lone.ledger.redis.flushdb()
    assert "keeps verdicts.loop" in enqueue()
    assert list(lone.ledger.runs().values()) == [run]
    assert lone.ledger.controls()[run.id].alarm == AlarmLimits(bad=0.1)
