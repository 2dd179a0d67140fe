"""`gend verify --html`: the report as one HTML file with plots and rows to read. No scripts, nothing fetched.

Rows hold HTML, scripts and control characters of every kind; the template escapes all of it.
"""

import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from gend.errors import SettingsError
from gend.records import Row, Run
from gend.report import Report, Samples, troubles
from gend.verdict import LENGTH, OK

HEAD_CHARS, TAIL_CHARS = 4000, 2000
"""What is shown of a long text: how a reply ends tells most about it."""


def write_page(path: Path, run: Run, rounds: Sequence[Run], report: Report, samples: Samples) -> None:
    """Write the page whole. Raises SettingsError where it cannot be written."""
    # What UTF-8 does not know (a lone surrogate) is shown, not refused.
    body = page(run, rounds, report, samples).encode("utf-8", "backslashreplace")
    temporary = path.with_name(f".new-{path.name}")
    try:
        temporary.write_bytes(body)
        os.replace(temporary, path)
    except OSError as error:
        raise SettingsError(f"--html {path}: cannot be written: {error.strerror}") from error


def page(run: Run, rounds: Sequence[Run], report: Report, samples: Samples) -> str:
    """The page as text."""
    template = importlib.resources.files("gend").joinpath("report_page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(clip=_clip, json=_json)
    environment.globals["tone"] = _tone
    decode = msgspec.json.Decoder(Row).decode
    sampling = msgspec.structs.asdict(run.sampling)
    return environment.from_string(template).render(
        run=run,
        rounds=rounds,
        report=report,
        troubles=troubles(report),
        samples={word: [decode(line) for line in lines] for word, lines in samples.rows.items()},
        sampling=", ".join(f"{name} {value}" for name, value in sampling.items() if value is not None),
    )


def _clip(text: str) -> str:
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    if left_out <= 0:
        return text
    return f"{text[:HEAD_CHARS]}\n\n[… {left_out:,} characters left out …]\n\n{text[-TAIL_CHARS:]}"


def _json(value: Any) -> str:
    # A message has only the keys that it needs: what is not there is undefined, and shown as nothing.
    return msgspec.json.format(msgspec.json.encode(value)).decode() if value else ""


def _tone(verdict: str) -> str:
    return {OK: "good", LENGTH: "warn"}.get(verdict, "bad")
