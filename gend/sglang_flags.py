"""Which command-line flags the installed SGLang knows, read from its source, so that a wrong one costs no start.

Importing SGLang's own parser takes torch and half a minute; reading `server_args.py` takes a fraction of a second.
Flags are declared there as `add_argument("--name", ...)` and, in newer versions, as annotated fields of `ServerArgs`.
"""

import ast
import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gend.errors import SettingsError

RENAMED = (("mamba-scheduler-strategy", "mamba-radix-cache-strategy"),)
"""Flags that changed their name between versions: whichever the installed one knows is used (0.5.14 and 0.5.20)."""

REFILL, REFILL_SLOTS = "min-free-slots-delay", 4
"""SGLang (0.5.17) can hold admissions back until so many slots are free, 4 at most: fewer of them, as many rows."""

_FIND = "import importlib.util as u; s = u.find_spec('sglang'); print(s.submodule_search_locations[0] if s else '')"


def is_sglang(command: Sequence[str]) -> bool:
    """Whether a server command starts SGLang."""
    return any(part.split(".")[0] == "sglang" or os.path.basename(part) == "sglang" for part in command)


def installed(python: str, environment: Mapping[str, str]) -> Path | None:
    """The folder of the SGLang that `python` would import; None where it has none. SGLang itself is not imported."""
    try:
        answer = subprocess.run(
            [python, "-c", _FIND], env=dict(environment), capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(f"servers.command: {python} cannot be run: {error}") from error
    return Path(answer.stdout.strip()) if answer.stdout.strip() else None


def version(package: Path) -> str:
    """The version of an SGLang package folder, or "unknown"."""
    for metadata in package.parent.glob("sglang-*.dist-info"):
        return metadata.name.removeprefix("sglang-").removesuffix(".dist-info")
    return "unknown"


def known_flags(package: Path) -> set[str]:
    """The flags that this SGLang's parser takes, without dashes in front. Empty when its source has another form."""
    sources = [package / "srt" / "server_args.py", *(package / "srt" / "arg_groups").rglob("*.py")]
    flags: set[str] = set()
    for source in sources:
        if source.is_file():
            for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _name(node.func) == "add_argument":
                    flags.update(_with_opposites(_flags_in(node.args), node))
                elif isinstance(node, ast.ClassDef):
                    for field in node.body:
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                            flags.update(_field_flags(field.target.id, field.annotation))
    return flags


def _field_flags(name: str, annotation: ast.expr) -> set[str]:
    """The flags of an annotated field: its own name or its cli_name, and its aliases; none for what is worked out."""
    markers = {_name(node.value) for node in ast.walk(annotation) if isinstance(node, ast.Subscript)}
    markers |= {_name(node.func) for node in ast.walk(annotation) if isinstance(node, ast.Call)}
    keywords = {node.arg for node in ast.walk(annotation) if isinstance(node, ast.keyword)}
    if not markers & {"A", "Arg", "Annotated"} or "no_cli" in keywords:
        return set()
    names = _flags_in(list(ast.walk(annotation)))
    return _with_opposites(names if "cli_name" in keywords else {name.replace("_", "-"), *names}, annotation)


def _with_opposites(flags: set[str], declaration: ast.AST) -> set[str]:
    """Those flags, and `no-` of each where they are declared with argparse's BooleanOptionalAction."""
    both = any(
        isinstance(node, ast.Attribute) and node.attr == "BooleanOptionalAction" for node in ast.walk(declaration)
    )
    return flags | {f"no-{flag}" for flag in flags} if both else flags


def _flags_in(nodes: Sequence[ast.AST]) -> set[str]:
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text[2:] for text in texts if text.startswith("--") and " " not in text}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def fitting(flags: Mapping[str, object], known: set[str]) -> dict[str, str]:
    """What each of `flags` is called in the version that knows `known`. Raises SettingsError with the nearest name."""
    names = {}
    for flag in flags:
        other = next((pair[1 - pair.index(flag)] for pair in RENAMED if flag in pair), flag)
        if flag in known or not known:
            names[flag] = flag
        elif other in known:
            names[flag] = other
        else:
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"servers.flags: the installed SGLang has no --{flag}{hint}")
    return names
