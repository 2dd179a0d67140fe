"""Errors, named by what the caller must do next.

Every message says what is wrong and, after it, what to do. `exit_code` is what the command line ends with:
1 the work is not sound, 2 wrong use or settings, 3 something needed is not reachable.
"""

import difflib
from collections.abc import Sequence


class GendError(Exception):
    """Base of all errors that a person is meant to read without a traceback."""

    exit_code = 1


class NotSound(GendError):
    """The work itself is wrong (a part is missing, torn or doubled): look at it before you train on it."""


class SettingsError(GendError):
    """The settings or the command line are wrong: change them, then try again. Waiting does not help."""

    exit_code = 2


class PromptError(GendError):
    """One line of a prompt file is wrong. Carries where and why; the caller rejects that line, or the whole set."""

    exit_code = 2

    def __init__(self, file: str, line: int, field: str, reason: str):
        """`line` counts from 1; `field` is empty where the line as a whole is wrong."""
        super().__init__(f"{file}:{line}: {field + ': ' if field else ''}{reason}")
        self.file, self.line, self.field, self.reason = file, line, field, reason


class Unavailable(GendError):
    """Something outside is away for now: keep what you have and try again later. Never a prompt's fault."""

    exit_code = 3


class LedgerUnavailable(Unavailable):
    """Redis does not answer, is still loading, or refuses writes."""


class StoreUnavailable(Unavailable):
    """The store does not answer, asks to slow down, or refuses credentials for now."""


class ServerUnavailable(Unavailable):
    """This server is down or loading: give its batches to the others."""


class DiskUnavailable(Unavailable):
    """The spool cannot be written (disk full, folder gone): stop claiming until it can."""


class LeaseLost(GendError):
    """Somebody else holds this batch now: drop it, write nothing more for it."""


class PromptRefused(GendError):
    """The server refuses this very prompt (HTTP 400): it becomes a row with verdict `refused`; neighbours go on.

    `room`: where only max_tokens is too large for the context, how many tokens a reply may have; else 0.
    """

    def __init__(self, message: str, room: int = 0):
        super().__init__(message)
        self.room = room


class ServerFault(GendError):
    """The server lives but failed on this request (5xx, reset, no reply in time): try again after a pause."""


class Draining(GendError):
    """Nothing new is sent any more: finish or give back what is held."""


class Withdrawn(GendError):
    """This prompt need not wait here: offer it to all servers of the box, and take its row from whoever made it."""


def unknown_key(key: str, known: Sequence[str]) -> str:
    """What to say of a key that nobody knows: the known one that was probably meant, else all of them."""
    near = [name for name in known if name.endswith(f".{key}")] or difflib.get_close_matches(key, known, n=1)
    return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}")
