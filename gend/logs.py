"""`gend logs`: the ends of the logs of the daemon's children, and what comes next in them."""

import time
from collections.abc import Iterator
from pathlib import Path

from gend.errors import SettingsError
from gend.processes import log_path, log_tail

LOOK_SECONDS = 0.25
READ_BYTES = 1 << 16
BYTES_A_LINE = 1000  # more than a line has: how far back the last lines are looked for


def chosen(folder: Path, wanted: str | None) -> list[str]:
    """The logs that `wanted` means: a server by number or name, any child by name; all of them where it is None.

    Raises SettingsError naming what there is.
    """
    names = sorted(path.stem for path in (folder / "logs").glob("*.log"))
    if wanted is None:
        if not names:
            raise SettingsError(f"no logs in {folder / 'logs'}: the daemon has not run with this folder")
        return names
    name = f"server-{wanted}" if wanted.isdecimal() else wanted
    if name not in names:
        raise SettingsError(f"no log of {name!r} in {folder / 'logs'}; there: {', '.join(names) or 'none'}")
    return [name]


def last_lines(folder: Path, name: str, lines: int) -> list[str]:
    """The last lines of one log."""
    return log_tail(folder, name, lines, lines * BYTES_A_LINE) if lines else []


def follow(folder: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """New whole lines of these logs as they come, each with its log's name; without end.

    The daemon cuts a log that grew too large back to nothing: then it is read from its start.
    """
    ends = {name: _size(log_path(folder, name)) for name in names}
    begun = dict.fromkeys(names, b"")
    while True:
        quiet = True
        for name in names:
            path = log_path(folder, name)
            size = _size(path)
            if size < ends[name]:
                ends[name], begun[name] = 0, b""
            if size == ends[name]:
                continue
            with open(path, "rb") as log:
                log.seek(ends[name])
                new = log.read(READ_BYTES)
            ends[name] += len(new)
            *whole, begun[name] = (begun[name] + new).split(b"\n")
            quiet = False
            for line in whole:
                yield name, line.decode("utf-8", "replace")
        if quiet:
            time.sleep(LOOK_SECONDS)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
