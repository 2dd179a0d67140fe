"""Wrong settings and wrong use: one clear line that names the key, and exit code 2. Nothing is started or written."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gend.cli import main
from gend.config import Settings, changed, load_settings
from gend.errors import SettingsError
from gend.records import Sampling, Verdicts
from gend.verdict import AlarmLimits


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a config.toml, and no settings from the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("GEND_CONFIG", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)


def gend(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def the_line(result: Result) -> str:
    """The one line of an error in the settings."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("gend: ")


BAD = {
    "unknown key": ("[work]\nbatchsize = 8", "work.batchsize: unknown key; did you mean batch_size?"),
    "unknown section": ("[server]\ncount = 2", "server: unknown key; did you mean servers?"),
    "nothing like it": ("[cost]\nx = 2", "cost.x: unknown key; known are dollars_per_hour"),
    "key outside its section": ("batch_size = 8", "batch_size: unknown key"),
    "text for a number": ("[work]\nbatch_size = '8'", "work.batch_size: Expected `int`, got `str`"),
    "half a prompt": ("[work]\nbatch_size = 8.5", "work.batch_size: Expected `int`"),
    "yes for a number": ("[work]\nbatch_size = true", "work.batch_size: Expected `int`"),
    "a number for a section": ("work = 3", "work: Expected"),
    "no prompt a batch": ("[work]\nbatch_size = 0", "work.batch_size: Expected `int` >= 1"),
    "no time": ("[work]\nlease_seconds = nan", "work.lease_seconds: Expected"),
    "temperature below zero": ("[sampling]\ntemperature = -0.1", "sampling.temperature: Expected `float` >= 0"),
    "no tokens": ("[sampling]\nmax_tokens = 0", "sampling.max_tokens: Expected `int` >= 1"),
    "GPUs in words": ("[servers]\ngpus = 'both'", 'servers.gpus: "all" or a list of numbers, got "both"'),
    "no command": ("[servers]\ncommand = []", "servers.command: Expected"),
    "a table as a flag": ("[servers.flags]\nx = { y = 1 }", "servers.flags"),
    "another store": (
        "[store]\nurl = 'gs://bucket'",
        "store.url: s3://bucket/prefix or file:///folder, got 'gs://bucket'",
    ),
    "no scheme": ("[store]\nurl = 's3://b/p'\nendpoint = 'host:9000'", "store.endpoint: https://host:port"),
    "retries below zero": ("[verdicts]\nempty = -1", "verdicts.empty: Expected `int` >= 0"),
    "a word for a number of retries": ("[verdicts]\nempty = 'once'", "verdicts.empty: Expected `int | object`"),
    "no verdict": ("[verdicts]\nlop = 1", "verdicts.lop: unknown key; did you mean loop?"),
    "a retry that is no sampling": (
        "[verdicts]\nloop = { temprature = 1.2 }",
        "verdicts: loop: temprature: unknown key; did you mean temperature?",
    ),
    "a retry that is refused each time": (
        "[verdicts]\nloop = { top_p = 2 }",
        "verdicts: loop: top_p: Expected `float` <= 1",
    ),
    "a negative retry": ("[verdicts]\nloop = { retries = -1 }", "verdicts: loop: retries: Expected `int` >= 0"),
    "half a retry": ("[verdicts]\nloop = { retries = 0.5 }", "verdicts: loop: retries: Expected `int`, got `float`"),
    "no share": ("[alarm]\nbad = 0", "alarm.bad: Expected `float` > 0"),
    "no action": ("[alarm]\naction = 'stop'", "alarm.action: Invalid enum value 'stop'"),
    "not TOML": ("[work]\nbatch_size = = 8", "not TOML: Invalid value (at line 2"),
    "not UTF-8": (b"[work]\nfolder = '\xff'", "not TOML: 'utf-8' codec"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_file(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = tmp_path / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert the_line(gend("--config", str(path), "status")).startswith(f"{path}: {message}")


BAD_WHEN_USED = {
    "no store": ("", "store.url is empty: say where parts shall go, s3://bucket/prefix or file:///folder"),
    "no bucket": ("[store]\nurl = 's3:///prefix'", "store.url: s3:///prefix: the bucket is missing"),
    "a blank in it": (
        "[store]\nurl = 's3://a b/p'\nendpoint = 'http://127.0.0.1:9'",
        "store.url: s3://a b/p: ",
    ),
    "a store below a device": ("[store]\nurl = 'file:///dev/null/x'", "store.url: /dev/null/x cannot be written"),
    "not Redis": (
        "[store]\nurl = 'file:///tmp'\n[redis]\nurl = 'host:6379'",
        "redis.url cannot be read: write redis://",
    ),
    "a folder below a device": (
        "[store]\nurl = 'file:///tmp'\n[work]\nfolder = '/dev/null/x'",
        "work.folder: /dev/null/x cannot be used: Not a directory; choose another",
    ),
    "a folder too long for a socket": (
        f"[store]\nurl = 'file:///tmp'\n[work]\nfolder = '/tmp/{'x' * 100}'",
        f"work.folder: /tmp/{'x' * 100} is too long for a unix socket; choose a shorter path",
    ),
}


@pytest.mark.parametrize("name", BAD_WHEN_USED)
def test_settings_that_are_bad_when_they_are_used(name: str, tmp_path: Path) -> None:
    text, message = BAD_WHEN_USED[name]
    (tmp_path / "config.toml").write_text(text)
    assert the_line(gend("enqueue", "prompts.jsonl")).startswith(message)


def test_a_config_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert the_line(gend("--config", "nowhere.toml", "status")) == (
        "config file nowhere.toml does not exist; give another with --config or $GEND_CONFIG"
    )
    monkeypatch.setenv("GEND_CONFIG", str(tmp_path))  # a folder is no file
    assert the_line(gend("status")).startswith(f"config file {tmp_path} does not exist")


def test_config_files_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--config, then $GEND_CONFIG, then ./config.toml: each is told by the mistake that only it has."""
    for name in ("given", "named", "config"):
        (tmp_path / f"{name}.toml").write_text(f"{name} = 1")
    assert the_line(gend("status")).startswith("config.toml: config:")
    monkeypatch.setenv("GEND_CONFIG", "named.toml")
    assert the_line(gend("status")).startswith("named.toml: named:")
    assert the_line(gend("--config", "given.toml", "status")).startswith("given.toml: given:")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("temprature=0.6", "temprature: unknown key; did you mean temperature?"),
        ("temperature", "give KEY=VALUE"),
        ("temperature=hot", "'hot' is not a number, true, false, none or {KEY=VALUE, ...}"),
        ("temperature='1'", "Expected `float | null`, got `str`"),
        ("max_tokens=0", "Expected `int` >= 1"),
        ("seed=none", "Expected `int`, got `null`"),
        ("loop=1", "loop: unknown key; did you mean verdicts.loop?"),
        ("verdicts.lop=1", "verdicts.lop: unknown key; did you mean verdicts.loop?"),
        ("verdict.loop=1", "verdict.loop: unknown key; did you mean verdicts.loop?"),
        ("verdicts.loop=-1", "Expected `int` >= 0"),
        ("verdicts.loop={retries=-1}", "loop: retries: Expected `int` >= 0"),
        ("verdicts.loop={temprature=1}", "loop: temprature: unknown key; did you mean temperature?"),
        ("verdicts.loop={retries=1", "'{retries=1' is not a number"),
        ("verdicts.loop_ratio_cut={retries=1}", "Expected `float`, got `object`"),
        ("alarm.bad=20", "Expected `float` <= 1"),
        ("alarm.action=stop", "Invalid enum value 'stop'"),
        ("work.batch_size=8", "work.batch_size: unknown key"),
    ],
)
def test_what_cannot_be_set_for_a_run(change: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"[store]\nurl = 'file://{tmp_path}/store'")
    assert the_line(gend("enqueue", "prompts.jsonl", "--set", change)).startswith(f"--set {change}: {message}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


def test_what_is_set_for_a_run() -> None:
    words = ["temperature=0", "min_p=0.1", "top_k=none", "sampling.thinking=false", "verdicts.loop=1"]
    words += ["verdicts.loop_ratio_cut=0.2", "verdicts.length={retries=2, max_tokens=65536}", "alarm.action=warn"]
    made = changed(Settings(), [*words, "alarm.bad=0.1"])
    assert made.sampling == Sampling(temperature=0.0, min_p=0.1, top_k=None, thinking=False)
    assert made.verdicts == Verdicts(loop=1, loop_ratio_cut=0.2, length={"retries": 2, "max_tokens": 65536})
    assert made.alarm == AlarmLimits(action="warn", bad=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("enqueue",), "Missing argument 'SOURCE...'"),
        (("enqueue", "x", "--limit", "0"), "0 is not in the range x>=1"),
        (("enqueue", "x", "--priority", "urgent"), "'urgent' is not one of 'high', 'normal', 'low'"),
        (("verfy", "x"), "No such command 'verfy'"),
        (("verify",), "Missing argument 'RUN'"),
    ],
)
def test_wrong_use(words: tuple[str, ...], message: str) -> None:
    result = gend(*words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_folder_comes_from_the_settings_or_systemd_or_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert load_settings(path).folder == Path("/state/gend")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/gend:/var/lib/other")
    assert load_settings(path).folder == Path("/var/lib/gend")
    path.write_text("[work]\nfolder = '~/here'")
    assert load_settings(path).folder == Path.home() / "here"


def test_a_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path)
