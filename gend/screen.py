"""`gend status` as text for a terminal, and `--watch`. By hand rather than with rich, whose import takes 70 ms."""

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

from gend.errors import LedgerUnavailable
from gend.status import RunStatus, ServerStatus, Status, clock, dollars, duration

PIPED_WIDTH = 100
NARROWEST = 40
FINISHED_SHOWN = 3

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def coloured(stream: Any = None) -> bool:
    """Whether to send colours to `stream` (stdout): only to a terminal, and not where NO_COLOR is set."""
    stream = stream or sys.stdout
    return bool(stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


def render(status: Status, width: int | None = None, colour: bool | None = None) -> str:
    """The status as lines of at most `width` columns (the terminal's; 100 where there is none)."""
    terminal = sys.stdout.isatty()
    width = max(NARROWEST, width or (shutil.get_terminal_size().columns if terminal else PIPED_WIDTH))
    return "\n".join(_Screen(width, coloured() if colour is None else colour).lines(status)) + "\n"


class _Screen:
    """Makes the lines, for one width."""

    def __init__(self, width: int, colour: bool):
        self.width, self.colour = width, colour

    def paint(self, text: str, *styles: str) -> str:
        if not self.colour or not styles or not text:
            return text
        return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}\x1b[0m"

    def wrapped(self, text: str, *styles: str, indent: str = "") -> Iterator[str]:
        text = _CONTROL.sub(" ", text)
        for line in textwrap.wrap(text, self.width, subsequent_indent=indent, break_on_hyphens=False):
            yield self.paint(line, *styles)

    def lines(self, status: Status) -> Iterator[str]:
        quiet = "green" if status.daemon and not status.warnings else "yellow"
        yield from self.wrapped(status.headline, "bold", *([quiet] if status.runs else []))
        for number, warning in enumerate(status.warnings):
            yield from self.wrapped(f"! {warning[:400]}", "red" if number == 0 else "yellow", indent="  ")
        yield from self.totals(status)
        if status.servers:
            yield ""
            yield from self.servers(status)
        yield ""
        yield from self.runs(status)
        yield ""
        yield from self.outside(status)

    def totals(self, status: Status) -> Iterator[str]:
        if status.tokens_per_second:
            words = [f"{status.tokens_per_second:,.0f} tokens/s", f"{status.rows_per_second:.2f} rows/s"]
            if (cost := status.cost) and cost.per_million_tokens:
                words.append(f"{dollars(cost.per_million_tokens)} per million tokens")
            yield from self.wrapped(", ".join(words))
        if estimate := status.estimate:
            low, high = duration(estimate.low_seconds), duration(estimate.high_seconds)
            words = [f"{duration(estimate.seconds)} left" + (f" ({low} to {high})" if low != high else "")]
            if (cost := status.cost) and cost.to_go is not None and cost.to_go_low is not None:
                low, high = dollars(cost.to_go_low), dollars(cost.to_go_high or 0)
                words.append(f"{dollars(cost.to_go)} to go" + (f" ({low} to {high})" if low != high else ""))
            yield from self.wrapped(", ".join(words))

    # -- servers -------------------------------------------------------------------------------------------------

    def servers(self, status: Status) -> Iterator[str]:
        servers = status.servers
        own = all(server.gpus == [server.number] for server in servers)
        # Title, which goes first where the screen is narrow (the highest number; 0 stays), and the cell of each server.
        columns: list[tuple[str, int, list[str]]] = [
            ("gpu" if own else "srv", 0, [str(s.number) for s in servers]),
            *([] if own else [("gpu", 5, [",".join(map(str, s.gpus)) or "-" for s in servers])]),
            ("state", 0, [s.state for s in servers]),
            ("for", 2, [_short(status.at - s.since) for s in servers]),
            ("running", 0, [f"{s.in_flight}/{s.limit}" for s in servers]),
            ("wait", 5, [str(s.waiting) for s in servers]),
            ("limit", 4, [s.limited_by if s.limit else "" for s in servers]),
            ("tok/s", 1, [f"{s.tokens_per_second:,.0f}" for s in servers]),
            ("rows", 3, [f"{s.rows:,}" for s in servers]),
            ("idle", 3, [f"{s.idle_share:.0%}" if s.idle_share is not None else "-" for s in servers]),
            ("rst", 5, [str(s.restarts) for s in servers]),
            ("mem", 6, [_share(s.memory_used_bytes, s.memory_total_bytes) for s in servers]),
            ("temp", 6, ["" if s.celsius is None else f"{s.celsius} C" for s in servers]),
        ]
        columns = [column for column in columns if column[1] < 6 or any(column[2])]
        while self.needs(columns, 1) > self.width and any(column[1] for column in columns):
            columns.remove(max(columns, key=lambda column: column[1]))
        space = " " * (2 if self.needs(columns, 2) <= self.width else 1)
        widths = {title: max(len(title), *map(len, cells)) for title, _, cells in columns}
        yield self.paint(space.join(_padded(title, title, widths[title]) for title in widths).rstrip(), "dim")
        for number, server in enumerate(servers):
            cells = [(title, _padded(title, cells[number], widths[title])) for title, _, cells in columns]
            yield space.join(self.paint(c, _tone(server)) if t == "state" else c for t, c in cells).rstrip()
        for server in servers:
            if server.last_error and server.state in ("ready", "starting"):  # the others' are among the warnings
                note = f" ({server.note})" if server.note else ""
                text = f"server {server.number}{note}, last error: {server.last_error}"
                yield self.paint(_CONTROL.sub(" ", text)[: self.width], "dim")

    def needs(self, columns: list[tuple[str, int, list[str]]], space: int) -> int:
        return sum(max(len(title), *map(len, cells)) + space for title, _, cells in columns) - space

    # -- runs ----------------------------------------------------------------------------------------------------

    def runs(self, status: Status) -> Iterator[str]:
        if not status.runs:
            yield "no run yet: gend enqueue FILE"
        shown = [run for run in status.runs if run.state in ("active", "paused")]
        for run in shown:
            yield from self.run(run)
        over = [run for run in reversed(status.runs) if run not in shown]
        for run in over[:FINISHED_SHOWN]:
            rejected = f", {run.rejected:,} lines rejected" if run.rejected else ""
            text = f"{run.id}  {run.state}, {run.rows_done:,} rows{rejected}; {_verdicts(run)}"
            yield from self.wrapped(text, "dim", indent="  ")
        if len(over) > FINISHED_SHOWN:
            yield self.paint(f"and {len(over) - FINISHED_SHOWN} more that are over", "dim")

    def run(self, run: RunStatus) -> Iterator[str]:
        state = run.state + (f", priority {run.priority}" if run.priority != "normal" else "")
        tone = "yellow" if run.state == "paused" else ""
        name = run.id[: self.width - len(state) - 2]
        yield f"{self.paint(name, 'bold')}  {self.paint(state, tone) if tone else state}"
        share = run.rows_done / run.prompts if run.prompts else 1.0
        count = f" {_floor_percent(share)}  {run.rows_done:,} of {run.prompts:,}"
        if run.eta_seconds is not None:
            count += f"  {duration(run.eta_seconds)} left"
        bar = min(24, self.width - len(count) - 4)
        yield from [f"  {self.bar(share, bar)}{count}"] if bar >= 6 else self.wrapped(f" {count}", indent="  ")
        words = [_verdicts(run)] if run.verdicts else ["no part in the store yet"]
        if run.tokens_per_second:
            words.append(f"{run.rows_per_second:.2f} rows/s, {run.tokens_per_second:,.0f} tokens/s")
        if run.rejected:
            words.append(f"{run.rejected:,} input lines rejected")
        yield from self.wrapped("  " + "; ".join(words), indent="  ")
        for example in run.examples:
            yield self.paint(_CONTROL.sub(" ", f"  {example}")[: self.width], "dim")

    def bar(self, share: float, width: int) -> str:
        full = int(share * width)
        if not self.colour:
            return f"[{'#' * full}{'-' * (width - full)}]"
        return self.paint("█" * full, "green") + self.paint("░" * (width - full), "dim")

    # -- outside -------------------------------------------------------------------------------------------------

    def outside(self, status: Status) -> Iterator[str]:
        store, redis, away = status.store, status.redis, {outage.what for outage in status.outages}
        words = [f"store {store.url}"]
        words.append("away" if "store" in away else "")
        words.append(
            f"last part {duration(status.at - store.last_part_at)} ago" if store.last_part_at else "no part yet"
        )
        if store.spool_batches:
            plural = "batch" if store.spool_batches == 1 else "batches"
            words.append(f"spool {store.spool_batches} {plural}, {_bytes(store.spool_bytes)}")
        yield from self.wrapped(", ".join(filter(None, words)), "red" if "store" in away else "dim", indent="  ")
        name = "own Valkey" if redis.own else "Redis"
        answer = f"answers in {redis.answer_seconds * 1000:.1f} ms"
        yield from self.wrapped(f"{name} {answer}, {_bytes(redis.memory_bytes)}", "dim")
        if status.page:
            yield from self.wrapped(f"page {status.page}", "dim")


def _tone(server: ServerStatus) -> str:
    return {"ready": "green", "blocked": "red", "backoff": "red"}.get(server.state, "yellow")


def _padded(title: str, cell: str, width: int) -> str:
    return cell.ljust(width) if title in ("state", "limit") else cell.rjust(width)


def _short(seconds: float) -> str:
    """A time in at most six signs: `41s`, `12m`, `3h20m`, `1d04h`."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole}s"
    minutes, hours = whole // 60, whole // 3600
    if minutes < 100:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60:02}m" if hours < 24 else f"{hours // 24}d{hours % 24:02}h"


def _share(used: int | None, total: int | None) -> str:
    return f"{used / total:.0%}" if used is not None and total else ""


def _floor_percent(share: float) -> str:
    """A share as a percentage that says 100 % only when nothing is missing."""
    return f"{int(share * 1000) / 10:.1f} %" if share < 1 else "100 %"


def _verdicts(run: RunStatus) -> str:
    total = sum(run.verdicts.values())
    ranked = sorted(run.verdicts.items(), key=lambda item: -item[1])
    return ", ".join(f"{word} {count / total:.1%}" for word, count in ranked) if total else "nothing counted yet"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


# -- watch -----------------------------------------------------------------------------------------------------------


def watch(read: Callable[[], Status], every_seconds: float) -> None:
    """Show the status again and again, until q or Ctrl-C; plain blocks where the output is no terminal."""
    if not sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            while True:
                print(_frame(read, None, False), flush=True)
                time.sleep(every_seconds)
        return
    with contextlib.suppress(KeyboardInterrupt), _whole_screen():
        while True:
            size = os.get_terminal_size()
            # One column less: erasing the rest of a line that is full would take its last sign.
            lines = _frame(read, size.columns - 1, coloured()).splitlines()[: size.lines]
            # Home, each line with the rest of it erased, then what is below: nothing is ever blank in between.
            body = "\x1b[K\r\n".join(lines)
            sys.stdout.write(f"\x1b[?2026h\x1b[H{body}\x1b[K\x1b[J\x1b[?2026l")
            sys.stdout.flush()
            if _quit_asked(every_seconds, size):
                return


def _frame(read: Callable[[], Status], width: int | None, colour: bool) -> str:
    try:
        return render(read(), width, colour)
    except LedgerUnavailable as error:
        return f"{clock(time.time(), time.time())[:5]} {error}; trying again, q quits\n"


@contextlib.contextmanager
def _whole_screen() -> Iterator[None]:
    """The terminal's other screen, without cursor and line wrap, keys as they are typed; all put back at the end."""
    import termios
    import tty

    keys = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    before = {number: signal.signal(number, _interrupted) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        if keys:
            tty.setcbreak(sys.stdin)
        sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[?7l")
        yield
    finally:
        sys.stdout.write("\x1b[?7h\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if keys:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, keys)
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def _quit_asked(seconds: float, size: os.terminal_size) -> bool:
    """Wait for a key, a new size of the terminal, or the time; whether the key was q."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if os.get_terminal_size() != size:
            return False
        if not sys.stdin.isatty():
            time.sleep(min(left, 0.2))
        elif select.select([sys.stdin], [], [], min(left, 0.2))[0]:
            key = os.read(sys.stdin.fileno(), 32)
            return not key or key[:1] in b"qQ"
    return False
