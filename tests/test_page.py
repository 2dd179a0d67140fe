"""The page: in a real browser while a real daemon works, and what it refuses to whom."""

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from harness import made_ledger
from harness.browser import CHROMIUM, Browser
from harness.daemon import Daemon
from harness.made_runs import add_run, prompts
from harness.processes import wait_until
from harness.services import Ports, Valkey
from prometheus_client.parser import text_string_to_metric_families

from gend import metrics
from gend.config import Settings, settings_from
from gend.ledger import Control, Ledger
from gend.page import Page, columns
from gend.records import Batch, Row, Usage
from gend.row_samples import RowSamples, histogram
from gend.spool import Spool
from gend.status import read_status
from gend.store import FolderStore

SCRIPT = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"


@pytest.fixture
def ledger(valkey: Valkey) -> Ledger:
    return Ledger(valkey.url)


@pytest.fixture
def settings(folder: Path) -> Settings:
    return settings_from({"work": {"folder": str(folder)}, "store": {"url": f"file://{folder}/store"}}, "test")


@pytest.fixture
async def client(settings: Settings, ledger: Ledger, folder: Path) -> AsyncIterator[TestClient[Any, Any]]:
    """Asks a page that shows a made-up run; nobody looks after it."""
    made_ledger.fill(ledger, servers=2, minutes=30)
    page = Page(settings, ledger, FolderStore(folder / "store"))
    page.status = read_status(ledger, settings)
    async with TestClient(TestServer(page.app(), host="127.0.0.1")) as made:
        yield made


async def until(look: Callable[[], Awaitable[bool]], running: "asyncio.Task[None]") -> None:
    """Wait until it is so, while the page runs."""
    async with asyncio.timeout(60):
        while not await look():
            assert not running.done(), running.result()
            await asyncio.wait([running], timeout=0.1)


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium; THE PAGE WAS NOT TESTED IN A BROWSER")
async def test_the_page_follows_a_run_without_a_complaint_and_rows_stay_text(
    make_daemon: Callable[..., Daemon], client: TestClient[Any, Any], folder: Path, ports: Ports, marker: str
):
    port = ports.block(1)
    daemon = make_daemon(servers=2, server_flags=("--speed", "2"), config={"page": {"port": port}})
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{number}: {SCRIPT}"}) + "\n" for number in range(1000)))
    run = daemon.enqueue(source, SCRIPT[:8])
    daemon.start()

    def listens() -> bool:
        assert daemon.process is not None and daemon.process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await asyncio.to_thread(wait_until, listens, "the page listens", failed=daemon.logs)
    async with Browser(folder / "browser", marker) as browser:
        await browser.look(390, 844, dark=True)
        await browser.open(f"http://127.0.0.1:{port}/")
        await browser.until("document.querySelectorAll('#servers tr').length === 3")
        assert await browser.evaluate("document.documentElement.scrollWidth") == 390, "nothing sticks out on a phone"

        value = "document.querySelector('#runs progress').value"
        first = await browser.evaluate(value)
        await browser.until(f"{value} > {first}")
        await browser.until("document.querySelector('#headline').textContent.startsWith('running, 2 of 2 servers')")
        await browser.until(
            "!!document.querySelector('#replies canvas') && !!document.querySelector('#thoughts canvas')"
        )
        await browser.until("document.querySelectorAll('#events li').length > 1")

        await browser.until("!!document.querySelector('#rows details')")
        await browser.evaluate("document.querySelector('#rows details').open = true")
        shown = await browser.until("document.querySelector('#rows details pre')?.textContent")
        assert SCRIPT in shown
        assert await browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert await browser.evaluate("document.title") != "owned"
        assert run.startswith("script-")
        assert browser.complaints == []

        # Hours of history, which this run has not had: a page with made-up ones.
        await browser.look(1200, 900)
        await browser.open(str(client.make_url("/")))
        for place in ("tokens", "shares", "idle"):
            await browser.until(f"!!document.querySelector('#{place} canvas')")
        await browser.evaluate("document.querySelector('#spans button:last-child').click()")
        await browser.until("document.querySelector('#spans button:last-child').ariaPressed === 'true'")
        assert browser.complaints == []
    assert daemon.stop() == 0
    assert daemon.survivors() == []


# -- who may ask for what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8790", 200), ("localhost:9999", 200), ("LOCALHOST", 200), ("[::1]:8790", 200),
        ("rebound.example:8790", 403), ("127.0.0.1.rebound.example", 403), ("", 403), ("[::1", 403),
        ("user@127.0.0.1.example", 403), ("10.0.0.5:8790", 403),
    ],
)  # fmt: skip
async def test_only_names_of_this_machine_are_answered(client: TestClient[Any, Any], host: str, status: int):
    for path in ("/", "/api/status", "/api/rows", "/metrics"):
        async with client.get(path, headers={"Host": host}) as answer:
            assert answer.status == status, (host, path)


async def test_it_can_only_be_read_and_no_other_site_gets_an_answer(client: TestClient[Any, Any]):
    for path in (
        "/",
        "/page.js",
        "/api/status",
        "/api/history?hours=72",
        "/api/rows?run=none",
        "/api/events",
        "/metrics",
    ):
        async with client.get(path, headers={"Origin": "https://elsewhere.example"}) as answer:
            assert answer.status == 200, path
            assert "Access-Control-Allow-Origin" not in answer.headers
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            async with client.request(method, path) as answer:
                assert answer.status == 405, (method, path)
    for path in ("/config.toml", "/../page.py", "/uplot/LICENSE", "/api/status/"):
        async with client.get(path) as answer:
            assert answer.status == 404
    async with client.get("/api/history?hours=many") as answer:
        assert answer.status == 400


async def test_the_page_needs_nothing_from_elsewhere(client: TestClient[Any, Any]):
    async with client.get("/") as answer:
        text = await answer.text()
    assert "http:" not in text and "https:" not in text and "style=" not in text and "onload" not in text


async def test_a_port_that_is_taken_is_a_warning_and_notices_go_on(settings: Settings, ledger: Ledger, folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = msgspec.structs.replace(settings, page=type(settings.page)(port=taken.getsockname()[1]))
        made_ledger.fill(ledger, servers=1, minutes=5)
        stop, page = asyncio.Event(), Page(settings, ledger, FolderStore(folder / "store"))
        running = asyncio.create_task(page.run(stop))

        async def warned() -> bool:
            return any("page:" in warning for warning in read_status(ledger, settings).warnings)

        await until(warned, running)
        stop.set()
        await running


async def test_while_redis_is_away_the_last_known_is_shown_and_metrics_are_not_made_up(
    settings: Settings, valkey: Valkey, ledger: Ledger, folder: Path
):
    made_ledger.fill(ledger, servers=1, minutes=5)
    page = Page(settings, Ledger(valkey.url, patience_seconds=0.2), FolderStore(folder / "store"))
    stop = asyncio.Event()
    running = asyncio.create_task(page.run(stop))
    async with TestClient(TestServer(page.app(), host="127.0.0.1")) as client:

        async def metrics_answer(status: int) -> bool:
            async with client.get("/metrics") as answer:
                return answer.status == status

        async def told() -> dict[str, Any]:
            async with client.get("/api/status") as answer:
                return dict(await answer.json())

        async def no_trouble() -> bool:
            return not (await told())["trouble"]

        await until(lambda: metrics_answer(200), running)
        valkey.kill()
        await until(lambda: metrics_answer(503), running)
        last = await told()
        assert "Redis does not answer" in last["trouble"]
        assert last["status"]["headline"].startswith("running, 1 of 1 server")
        valkey.start()
        await until(no_trouble, running)
    stop.set()
    await running


# -- what it shows ---------------------------------------------------------------------------------------------------


def test_metrics_are_what_prometheus_reads(ledger: Ledger, settings: Settings):
    run = made_ledger.fill(ledger, servers=2, minutes=30)
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.exposition(read_status(ledger, settings)).decode())
    }
    assert {name for name in families if not name.startswith("gend_")} == set()

    def values(name: str) -> dict[tuple[str, ...], float]:
        return {tuple(sample.labels.values()): sample.value for sample in families[name].samples}

    assert values("gend_daemon_up") == {(): 1}
    assert values("gend_run_prompts") == {(run.id,): 914_000}
    assert values("gend_run_rows")[run.id, "ok"] == pytest.approx(30 * 6 * 128 * 0.971, abs=1)
    assert families["gend_run_rows"].type == "counter"
    assert values("gend_server_state")["0", "ready"] == 1
    assert sum(values("gend_server_state").values()) == 2
    assert values("gend_server_in_flight_requests") == {("0",): 240, ("1",): 240}
    assert values("gend_server_gpu_temperature_celsius") == {}, "unknown is left out, not told as 0"
    assert values("gend_outage_seconds") == {("store",): 0, ("redis",): 0, ("disk",): 0}


def test_the_dashboard_asks_for_metrics_that_exist(ledger: Ledger, settings: Settings):
    dashboard = (Path(__file__).parents[1] / "tools" / "grafana-dashboard.json").read_text()
    asked = set(re.findall(r"\bgend_\w+", " ".join(re.findall(r'"expr": "(.*?)",?\n', dashboard))))
    made_ledger.fill(ledger, servers=2, minutes=30)
    text = metrics.exposition(read_status(ledger, settings)).decode()
    there = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    assert asked and asked - there == set()


def test_history_becomes_columns_with_gaps_where_the_daemon_was_down():
    def sample(at: float, rows: int, in_flight: int) -> dict[str, Any]:
        server = {"in_flight": in_flight, "limit": 8, "completion_tokens": 10 * rows, "verdict:ok": rows}
        return {"at": at, "runs": {"r": {}}, "servers": {"0": server}}

    # 6 rows in 30 s, then nothing for 10 minutes, then the worker began anew and made 12 in 30 s
    past = [sample(at, rows, full) for at, rows, full in ((0, 0, 8), (30, 6, 8), (630, 0, 4), (660, 12, 4))]
    found = columns(past[::-1], 660.0, 3600.0)
    known = {at: tokens for at, tokens in zip(found["at"], found["tokens"]["0"], strict=True) if tokens is not None}
    assert known == {15.0: 2.0, 645.0: 4.0}
    assert [share for share in found["verdicts"]["ok"] if share is not None] == [1.0, 1.0]
    assert [share for share in found["idle"] if share is not None] == [0.0, 0.5]
    assert len(columns(past[::-1], 660.0, 72 * 3600.0)["at"]) == 240


def test_rows_are_seen_in_the_spool_before_their_batch_is_whole_and_in_parts_afterwards(folder: Path, ledger: Ledger):
    store = FolderStore(folder / "store")
    run = add_run(store, prompts(40), without=[9])
    ledger.add_run(run, Control())
    ledger.add_done(run.id, set(range(9)))
    spool, samples = (
        Spool(folder, Batch(run=run.id, number=9, first=36, count=4), "claim"),
        RowSamples(folder, store, ledger),
    )
    row = Row(id="p0000036", run=run.id, batch=9, messages=[{"role": "user", "content": "x" * 50_000}], verdict="empty",
              usage=Usage(10, 6, 0), content="")  # fmt: skip
    spool.append(msgspec.json.encode(row))
    samples.look([run])
    samples.look([run])  # nothing is counted twice
    seen = samples.view(run.id)
    assert seen["seen"] == {"ok": 24, "empty": 1}
    [empty] = seen["rows"]["empty"]
    assert empty["id"] == "p0000036"
    assert "44,000 characters left out" in empty["messages"][0]["content"]
    assert seen["rows"]["ok"][0]["id"].startswith("p00")
    assert seen["replies"]["rows"] == 25

    row.id, row.verdict = "p0000037", "ok"
    spool.append(msgspec.json.encode(row))
    samples.look([run])
    spool.delete()
    samples.look([run])
    assert samples.view(run.id)["seen"] == {"ok": 25, "empty": 1}
    assert samples.view("no-such-run")["seen"] == {}
    assert json.loads(msgspec.json.encode(samples.view(run.id)))


def test_histograms_have_few_bins_of_round_steps_and_lose_nobody():
    for lengths in ([0], [1, 2, 3], [6] * 87 + [2500] * 13, [1, 59, 60], [16384, 7, 700]):
        found = histogram(Counter(lengths))
        assert sum(found["bins"]) == len(lengths) == found["rows"]
        assert len(found["bins"]) <= 60
        assert str(found["step"])[0] in "125"
        assert found["longest"] == max(lengths)
    assert histogram(Counter())["bins"] == []
