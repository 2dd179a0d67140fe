"""Tuning: what is tried next, on numbers; then real processes whose speed depends on their flags."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import processes
from harness.processes import wait_until
from harness.services import FAKE_SERVER, FakeServer, Ports

from gend import tune
from gend.config import Settings, settings_from
from gend.engine import connect
from gend.records import Prompt, Sampling
from gend.server_command import seats
from gend.tune import Candidate, Pace, Search, Traffic, Trial, Tuned, neighbours

MAMBA = {"mamba-full-memory-ratio": 0.5, "max-running-requests": 100}
PROMPTS = [Prompt(id=f"p{i}", messages=[{"role": "user", "content": f"Count to {i}."}]) for i in range(300)]
SHORT = Sampling(max_tokens=1024)
QUICK = Pace(minutes=2.0, ramp_seconds=2.0, window_seconds=0.6)


def trial(rate: float, flags: dict[str, Any], **more: Any) -> Trial:
    return Trial(name="t", flags=flags, tokens_per_second=rate, **more)


# -- what is tried next ----------------------------------------------------------------------------------------------


def test_neighbours_change_one_thing_and_keep_the_rest() -> None:
    kept = {"load-format": "dummy", "max-running-requests": 100, "disable-radix-cache": True}
    for name, flags in neighbours(kept, running=100):
        assert flags["load-format"] == "dummy", name
        changed = {key for key in flags if flags[key] != kept.get(key)}
        assert len(changed) == 1, (name, changed)


def test_more_running_requests_take_their_state_pool_along() -> None:
    found = dict(neighbours(MAMBA, running=100))
    assert found["running 130"] == {"mamba-full-memory-ratio": 0.65, "max-running-requests": 130}
    assert "mamba ratio 0.65" in found and "radix cache off" in found
    assert dict(neighbours({"max-running-requests": 300}, 300))["running 390"]["cuda-graph-max-bs-decode"] == 390


def test_mtp_steps_move_together_with_their_drafts() -> None:
    mtp = {"speculative-algorithm": "EAGLE", "speculative-num-steps": 3, "speculative-num-draft-tokens": 4}
    found = dict(neighbours(mtp, running=0))
    assert found["MTP 4 steps"]["speculative-num-draft-tokens"] == 5
    assert not any(name.startswith("MTP") for name in dict(neighbours(MAMBA, 0)))


def test_the_most_promising_comes_first_and_the_hopeless_never() -> None:
    def predict(flags: Any) -> float:
        return {100: 1000.0, 130: 1200.0, 77: 900.0}.get(flags["max-running-requests"], 0.0) * (
            0.5 if flags.get("disable-radix-cache") else 1.0
        )

    flags = {"max-running-requests": 100}
    search = Search([Candidate(name="plan", flags=flags)], [], predict)
    order = []
    while candidate := search.next():
        order.append(candidate.name)
        search.record(trial(100.0, candidate.flags))
    chunks = ["chunked prefill 16384", "chunked prefill 4096"]
    assert order == ["plan", "running 130", "refill 4 at once", *chunks, "running 77"]


def test_the_climb_goes_on_from_the_best() -> None:
    flags = {"max-running-requests": 100}
    search = Search([Candidate(name="config", flags=flags)], [], lambda flags: 0.0)
    assert search.next() and search.record(trial(100.0, flags))
    up = search.next()
    assert up and up.name == "running 130" and search.record(trial(120.0, up.flags))
    again = search.next()
    assert again and again.name == "running 169"


def test_beside_starts_that_still_run_the_most_promising_of_them_leads() -> None:
    """With two GPUs the config's flags and the plan's are measured together; a third must not climb from the worse."""
    promise = {16: 500.0, 12: 400.0, 21: 600.0, 100: 4000.0, 130: 3900.0}
    starts = [Candidate(name=str(n), flags={"max-running-requests": n}, promise=promise[n]) for n in (16, 100)]
    search = Search(starts, [], lambda flags: promise.get(flags["max-running-requests"], 0.0))
    assert [search.next(), search.next()] == starts
    search.record(trial(500.0, starts[0].flags))
    third = search.next()
    assert third and third.flags["max-running-requests"] >= 100


@pytest.mark.parametrize(
    ("second", "wins"),
    [
        (trial(110.0, {}), True),
        (trial(102.0, {}), False),
        (trial(200.0, {}, bad_share=0.5, replies=100), False),
        (trial(200.0, {}, bad_share=0.13, replies=50), True),
        (trial(200.0, {}, failed="died"), False),
    ],
    ids=["faster", "within noise", "fast and wrong", "fast and perhaps unlucky", "failed"],
)
def test_only_a_clear_gain_wins(second: Trial, wins: bool) -> None:
    search = Search([], [], lambda flags: 0.0)
    search.record(trial(100.0, {}, bad_share=0.04, replies=50))
    assert search.record(second) == wins


# -- real servers ----------------------------------------------------------------------------------------------------

WRAPPER = """case "$*" in *"--max-running-requests 40"*) echo "ValueError: no memory for 40" >&2; exit 3;; esac
exec "$@" """
"""The fake server, except that it does not come up with 40 running requests, as one without memory for them."""


def config_for(folder: Path, ports: Ports, running: int, **flags: Any) -> tuple[Path, Settings]:
    command = ["sh", "-c", WRAPPER, "sh", sys.executable, str(FAKE_SERVER), "--speed", "5", "--mean-tokens", "100"]
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": "fake"},
        "servers": {
            "count": 1,
            "base_port": ports.block(10),
            "command": command,
            "flags": {"max-running-requests": running, **flags},
            "stop_seconds": 5.0,
        },
        "work": {"folder": str(folder / "work")},
    }
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        for key, value in table.items():
            pairs = ", ".join(f"{flag} = {json.dumps(what)}" for flag, what in value.items()) if key == "flags" else ""
            lines.append(f"{key} = {'{ ' + pairs + ' }' if pairs else json.dumps(value)}")
    config = folder / "config.toml"
    config.write_text("# mine\n" + "\n".join(lines) + "\n")
    return config, settings_from(tables, "test")


def try_these(
    settings: Settings, starts: list[Candidate], pace: Pace = QUICK, predict: Any = None
) -> tuple[Tuned, str]:
    """The starts alone: everything else is said to be hopeless."""
    known = {candidate.key for candidate in starts}
    alone = lambda flags: 1.0 if Candidate(name="", flags=flags).key in known else 0.0  # noqa: E731
    shown: list[str] = []
    done = asyncio.run(
        tune.tune(settings, seats(settings, 0), PROMPTS, SHORT, starts, [], predict or alone, pace, shown.append)
    )
    return done, "\n".join(shown)


def test_gend_tune_climbs_survives_a_crash_and_keeps_the_best_on_ctrl_c(
    folder: Path, ports: Ports, marker: str
) -> None:
    config, settings = config_for(folder, ports, 24)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {i}."}) + "\n" for i in range(50)))
    running = processes.start(
        [sys.executable, "-m", "gend", "--config", config, "tune", prompts, "--minutes", "5", "--ramp-seconds", "2",
         "--window-seconds", "0.6"],
        folder, "tune", env=processes.environment(marker, PYTHONPATH=str(Path(tune.__file__).parents[1])), cwd=folder,
    )  # fmt: skip
    log = folder / "tune.log"

    def reached() -> bool:
        assert running.poll() is None, log.read_text()
        text = log.read_text()
        return "ValueError" in text and text.rindex("starting on") > text.index("ValueError")

    wait_until(reached, "a candidate after the one that dies", failed=log.read_text)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 0, log.read_text()

    rows = [line for line in log.read_text().splitlines() if "starting" not in line]
    assert any(line.startswith("config ") and "best" in line for line in rows), rows
    assert any(line.startswith("running 31 ") and "<- best" in line for line in rows), rows
    assert any(line.startswith("running 40 ") and "ended with 3: ValueError: no memory for 40" in line for line in rows)
    assert "stopped by hand" in log.read_text()
    written = config.read_text()
    assert "max-running-requests = 31" in written and written.startswith("# mine\n")
    assert processes.marked(marker) == [], "a server is left"
    assert not list((settings.folder / "processes").iterdir())


def test_a_server_that_dies_under_load_is_a_row_and_not_the_end(folder: Path, ports: Ports) -> None:
    mode = folder / "mode.json"
    mode.write_text('{"mode": "crash_above", "running": 30}')
    _, settings = config_for(folder, ports, 8, **{"mode-file": str(mode)})
    own = settings.servers.flags
    starts = [Candidate(name=str(n), flags={**own, "max-running-requests": n}) for n in (48, 12)]
    done, shown = try_these(settings, starts)
    assert [bool(one.failed) for one in done.trials] == [True, False], shown
    assert "died under load" in done.trials[0].failed
    assert done.best is not None and done.best.name == "12"
    assert done.best.running == 12


def test_a_server_that_answers_nothing_is_a_row(folder: Path, ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ANSWER_SECONDS", 1.0)
    mode = folder / "mode.json"
    mode.write_text('{"mode": "hang_all"}')
    _, settings = config_for(folder, ports, 8, **{"mode-file": str(mode)})
    done, _ = try_these(settings, [Candidate(name="hangs", flags=settings.servers.flags)])
    assert done.best is None
    assert "listens, but: no reply within 1 s" in done.trials[0].failed


def test_the_time_is_kept(folder: Path, ports: Ports) -> None:
    _, settings = config_for(folder, ports, 8)
    starts = [Candidate(name=str(n), flags={"max-running-requests": n}) for n in (8, 12)]
    done, _ = try_these(settings, starts, Pace(minutes=0.08, ramp_seconds=1.0, window_seconds=2.0))
    assert [one.name for one in done.trials] == ["8"]
    assert "a candidate takes" in done.stopped


def test_what_a_killed_tune_left_is_ended_first(folder: Path, ports: Ports, marker: str) -> None:
    from gend.processes import port_free, start

    _, settings = config_for(folder, ports, 8)
    port = settings.servers.base_port
    command = [sys.executable, str(FAKE_SERVER), "--port", str(port)]
    left = start(settings.folder, "tune-7", command, processes.environment(marker), port)
    wait_until(lambda: not port_free(port), "the leftover listens")
    done, shown = try_these(settings, [Candidate(name="8", flags={"max-running-requests": 8})])
    assert left.exit_code() is not None
    assert f"ending tune-7, pid {left.pid}" in shown
    assert done.best is not None


async def test_tokens_of_replies_that_were_cut_off_count(folder: Path, ports: Ports, marker: str) -> None:
    """Replies far longer than ramp and window: nearly all that is measured comes from those aborted at the end."""
    flags = ("--speed", "1", "--mean-tokens", "5000", "--max-running-requests", "16")
    with FakeServer(folder / "fake", marker, ports.block(1), *flags) as server:
        async with connect(server.url, "fake", 60.0) as client:
            traffic = Traffic(client, PROMPTS, Sampling(max_tokens=16384), 16)
            await traffic.run(Pace(ramp_seconds=0.5, window_seconds=1.5))
        stats = server.stats()
    # A step of 11.5 ms and 0.175 for each of 16 that run: 16 tokens in 14.3 ms.
    assert traffic.tokens_per_second == pytest.approx(16 / 0.0143, rel=0.15), stats
    assert traffic.ended < 16
