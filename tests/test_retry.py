"""A round makes exactly those prompts again whose best row so far is not good enough, with another seed."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from harness import made_runs
from harness.services import Valkey

from gend import config, sets
from gend.cli import main
from gend.errors import SettingsError
from gend.records import Row, Run, Sampling, Verdicts
from gend.retry import next_round
from gend.runs import stored_rounds, stored_run
from gend.store import FolderStore
from gend.verdict import AlarmLimits

WORDS = ("ok", "length", "loop", "ok", "empty")


def word_of(row: Row) -> Row:
    row.verdict = WORDS[int(row.id[1:]) % 5]
    return row


@pytest.fixture
def store(folder: Path) -> FolderStore:
    return FolderStore(folder / "store")


@pytest.fixture
def settings(folder: Path) -> config.Settings:
    return config.Settings(model=config.Model(path=made_runs.MODEL), work=config.Work(folder=str(folder / "state")))


def test_a_round_holds_the_same_lines_of_the_chosen_prompts(store: FolderStore, settings: config.Settings) -> None:
    asked = made_runs.prompts(20)
    run = made_runs.add_run(store, asked, change=word_of)
    again = next_round(settings, store, run, [], ("length", "loop"), ["max_tokens=32768"])
    assert (again.number, again.name) == (1, "made-round-1")
    assert again.set.accepted == 8
    assert sets.read_prompts(settings.folder, again.set.fingerprint, 0, 8) == [
        prompt for number, prompt in enumerate(asked) if number % 5 in (1, 2)
    ]
    assert again.settings.sampling == Sampling(max_tokens=32768, seed=run.sampling.seed + 1)
    assert next_round(settings, store, run, [], ("loop",), ["seed=99"]).settings.sampling.seed == 99


def test_a_round_is_judged_and_watched_like_its_run(store: FolderStore, settings: config.Settings) -> None:
    strict = Verdicts(min_answer_chars=40)
    run = made_runs.add_run(store, made_runs.prompts(20), change=word_of, verdicts=strict)
    store.replace(f"runs/{run.id}/control.json", b'{"alarm": {"length": 0.5}}')
    again = next_round(settings, store, run, [], ("loop",), ["verdicts.loop=2", "alarm.bad=0.5"])
    assert again.settings.verdicts == msgspec.structs.replace(strict, loop=2)
    assert again.settings.alarm == AlarmLimits(length=0.5, bad=0.5)


def test_a_later_round_takes_what_the_earlier_ones_did_not_mend(store: FolderStore, settings: config.Settings) -> None:
    asked = made_runs.prompts(20)
    run = made_runs.add_run(store, asked, change=word_of)

    def mended(row: Row) -> Row:
        row.verdict = "ok" if int(row.id[1:]) < 10 else "length"
        return row

    cut = [prompt for number, prompt in enumerate(asked) if number % 5 in (1, 2)]
    first = made_runs.add_run(store, cut, "made-round-1", mended, round_of=run.id, round=1)
    again = next_round(settings, store, run, [first], ("length", "loop"), [])
    assert again.number == 2 and again.settings.sampling.seed == run.sampling.seed + 2
    ids = [prompt.id for prompt in sets.read_prompts(settings.folder, again.set.fingerprint, 0, again.set.accepted)]
    assert ids == ["p0000011", "p0000012", "p0000016", "p0000017"]


def test_what_makes_no_sense_to_make_again_is_refused(store: FolderStore, settings: config.Settings) -> None:
    asked = made_runs.prompts(20)
    run = made_runs.add_run(store, asked, change=word_of)
    with pytest.raises(SettingsError, match="no prompt's best row is junk"):
        next_round(settings, store, run, [], ("junk",), [])
    other = config.Settings(model=config.Model(path="another"), work=settings.work)
    with pytest.raises(SettingsError, match="made with made-up-model; the config file has another"):
        next_round(other, store, run, [], ("loop",), [])
    first = made_runs.add_run(store, asked[:8], "made-round-1", round_of=run.id, round=1, without=[1])
    with pytest.raises(SettingsError, match="rounds do not nest"):
        next_round(settings, store, first, [], ("loop",), [])
    with pytest.raises(SettingsError, match=r"round 1 of run .* is not finished, 1 of 2 parts"):
        next_round(settings, store, run, [first], ("loop",), [])
    store.replace(f"runs/{first.id}/control.json", b'{"state": "cancelled"}')
    assert next_round(settings, store, run, [first], ("loop",), []).number == 2


def test_the_command_registers_the_round_as_a_run_of_its_own(store: FolderStore, valkey: Valkey, folder: Path) -> None:
    run = made_runs.add_run(store, made_runs.prompts(20), change=word_of)
    toml = folder / "config.toml"
    toml.write_text(
        f'[model]\npath = "{made_runs.MODEL}"\n[store]\nurl = "{store.url}"\n[redis]\nurl = "{valkey.url}"\n'
        f'[work]\nfolder = "{folder / "state"}"\n'
    )

    def gend(*words: str) -> Result:
        return CliRunner().invoke(main, ["--config", str(toml), *words])

    done = gend("retry", "made", "--verdict", "length,loop", "--set", "max_tokens=32768", "--json")
    assert done.exit_code == 0, done.output
    made: dict[str, Any] = json.loads(done.stdout)
    assert made["new"] is True and made["prompts"] == 8
    again = stored_run(store, made["run"])
    assert (again.round_of, again.round, again.sampling.max_tokens) == (run.id, 1, 32768)
    assert [found.id for found in stored_rounds(store, run)] == [again.id]
    found: Run = stored_run(store, run.id)
    assert found.round_of is None
    # Asked again before it is finished: no second round of the same rows.
    assert gend("retry", "made", "--verdict", "length,loop").exit_code == 2
    assert gend("retry", again.id, "--verdict", "loop").exit_code == 2
    assert json.loads(gend("verify", "made", "--json").stdout)["rounds"][0]["missing_batches"] > 0
