"""Each row can be traced to the engine that made it, also where a later box ran another version."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import made_runs
from harness.lone import Lone
from harness.processes import wait_until
from harness.reader import write_prompts
from harness.services import FakeServer, Ports, Valkey

from gend.config import settings_from
from gend.export import ExportOptions, export
from gend.provenance import describe, named, stored_engines
from gend.records import Row
from gend.report import render, verify
from gend.store import FolderStore


def settings(**sections: Any) -> Any:
    return settings_from(sections, "test")


def test_an_engine_is_the_same_on_every_server_and_another_with_other_flags_or_version() -> None:
    info = {"version": "0.5.17", "dtype": "bfloat16", "mem_fraction_static": 0.88, "port": 30000, "log_level": "info"}
    first = describe(settings(), 0, info)
    assert (first.version, first.model, first.flags["mem-fraction-static"]) == ("0.5.17", "Qwen/Qwen3.6-27B", 0.88)
    assert first.effective == {"dtype": "bfloat16", "mem_fraction_static": 0.88}, "and nothing of one server alone"
    assert describe(settings(), 5, {**info, "port": 30050}).id == first.id
    others = [
        describe(settings(), 0, {**info, "version": "0.5.23"}),
        describe(settings(), 0, {**info, "mem_fraction_static": 0.8}),
        describe(settings(servers={"flags": {"disable-cuda-graph": True}}), 0, info),
        describe(settings(), 0, {}),
    ]
    assert len({first.id, *(other.id for other in others)}) == 5


def test_revision_and_template_are_those_of_the_files_here(folder: Path) -> None:
    commit = "c" * 40
    snapshot = folder / "hub" / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    (snapshot / "chat_template.jinja").write_text("own")
    given = folder / "given.jinja"
    given.write_text("given")
    here = settings(model={"path": "some/model"}, servers={"environment": {"HF_HOME": str(folder)}})
    assert (describe(here, 0, {}).revision, describe(here, 0, {}).template) == (commit, _digest("own"))
    assert describe(here, 0, {"chat_template": str(given)}).template == _digest("given")
    assert describe(here, 0, {"chat_template": "chatml"}).template == "", "a name that only the server knows"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_texts_and_other_ids_name_no_engine() -> None:
    row = {"content": 'it says "engine":"0123456789ab"', "engine": "abcdef012345"}
    assert named(json.dumps(row, separators=(",", ":")).encode()) == {"abcdef012345"}


@pytest.fixture
def serve(folder: Path, marker: str, ports: Ports) -> Iterator[Callable[[str], FakeServer]]:
    started: list[FakeServer] = []

    def start(version: str) -> FakeServer:
        flags = ("--speed", "5", "--max-running-requests", "6", "--version", version)
        started.append(FakeServer(folder / version, marker, ports.block(1), *flags).__enter__())
        return started[-1]

    yield start
    for server in started:
        server.__exit__(None, None, None)


def test_a_run_on_two_versions_says_which_row_is_whose(
    folder: Path, valkey: Valkey, serve: Callable[[str], FakeServer]
) -> None:
    first = Lone(folder / "first", serve("0.5.17").url, valkey.url)
    run = first.register(write_prompts(folder / "prompts.jsonl", 80))
    with first.supplied():
        worker = first.start()
        wait_until(lambda: first.ledger.done(run.id), "a batch is done", failed=first.logs)
        worker.end()
    before = len(first.ledger.done(run.id))
    # The same spool: some rows of the first engine end in parts that the second one puts.
    second = Lone(folder / "first", serve("0.5.23").url, valkey.url)
    second.finish(run)

    store = FolderStore(first.store_folder)
    engines = stored_engines(store, run)
    assert {engine.version for engine in engines.values()} == {"0.5.17", "0.5.23"}
    report = verify(store, run)
    assert report.sound and not report.doubts and set(report.engines) == set(engines)
    by_version = {engine.version: report.engines[name] for name, engine in engines.items()}
    assert by_version["0.5.17"] >= 8 * before and sum(by_version.values()) == 80
    assert "0.5.17, fake: " in render(report)
    manifest = export(store, [run], folder / "out", ExportOptions(verdicts=tuple(report.verdicts)))
    assert manifest.sources[0].engines == engines

    for path in first.store_folder.glob("runs/*/engines/*"):
        path.unlink()
    assert Counter(doubt.rpartition(": ")[2].startswith("what made") for doubt in verify(store, run).doubts) == {
        True: 2
    }


def test_rows_from_before_gend_knew_engines_are_sound(folder: Path) -> None:
    store = FolderStore(folder / "store")

    def known(row: Row) -> Row:
        if row.id == "p0000003":
            row.engine = "abcdef012345"
        return row

    run = made_runs.add_run(store, made_runs.prompts(8), change=known)
    report = verify(store, run)
    assert report.sound and report.engines == {"": 7, "abcdef012345": 1}
    assert report.doubts == [f"runs/{run.id}/engines/abcdef012345.json: not there: what made 1 rows is not known"]
