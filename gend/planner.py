"""What the supervisor does next: a pure function of its children and the time.

    down --start--> starting --answers--> ready --asked to stop--> stopping --gone--> down or backoff
                       |                    |                          |
                       +---- ends, or too slow, or hangs: failed ------+--> backoff --after a while--> down
    blocked: something of the last process is still there (a port, GPU memory); looked at again every few seconds

A worker stands on its server: it starts beside it, is ready when the server is, and stops when the server is gone.
Nothing ever gives up: the pause between starts grows to `longest_backoff_seconds` and shrinks again after healthy time.
"""

import enum
from collections.abc import Iterable

import msgspec


class State(enum.StrEnum):
    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    BLOCKED = "blocked"


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds; from the settings."""

    first_backoff_seconds: float = 0.5
    longest_backoff_seconds: float = 300.0
    healthy_seconds: float = 600.0
    blocked_look_seconds: float = 5.0


class Child(msgspec.Struct, kw_only=True):
    """One child as the supervisor knows it. Times are of a monotonic clock.

    `exit_code` is None while a process lives or none was started. `answers` and `trouble` are what probes found.
    """

    name: str
    needs: str | None = None
    load_seconds: float = 1800.0
    stop_seconds: float = 30.0
    waits_for_start_of: str | None = None
    state: State = State.DOWN
    since: float = 0.0
    failures: int = 0
    starts: int = 0
    ever_ready: bool = False
    exit_code: int | None = None
    answers: bool = False
    trouble: str = ""
    last_error: str = ""
    asked_to_stop: bool = False


class Verb(enum.StrEnum):
    START = "start"
    READY = "ready"
    STOP = "stop"
    KILL = "kill"
    FAILED = "failed"
    GONE = "gone"
    RETRY = "retry"
    LOOK = "look"


class Action(msgspec.Struct, frozen=True):
    """What to do with which child, and why, for the log."""

    verb: Verb
    child: str
    reason: str = ""


def backoff_seconds(failures: int, rules: Rules) -> float:
    """The pause after this many failures in a row: it doubles, up to a bound."""
    return min(rules.first_backoff_seconds * 2.0 ** max(0, min(failures - 1, 30)), rules.longest_backoff_seconds)


def plan(children: Iterable[Child], now: float, rules: Rules, draining: bool = False) -> list[Action]:
    """The actions that are due, at most one for each child."""
    known = {child.name: child for child in children}
    actions = (_next(child, known, now, rules, draining) for child in known.values())
    return [action for action in actions if action is not None]


def _next(child: Child, known: dict[str, Child], now: float, rules: Rules, draining: bool) -> Action | None:
    def act(verb: Verb, reason: str = "") -> Action:
        return Action(verb, child.name, reason)

    ground = known.get(child.needs) if child.needs else None
    standing = ground is None or ground.state in (State.STARTING, State.READY)
    ready = ground is None or ground.state == State.READY
    match child.state:
        case State.DOWN:
            first = known.get(child.waits_for_start_of) if child.waits_for_start_of else None
            warmed = first is None or first.ever_ready or first.failures > 0
            return act(Verb.START) if standing and warmed and not draining else None
        case State.STARTING | State.READY if child.exit_code is not None:
            return act(Verb.FAILED, f"ended with {child.exit_code}")
        case State.STARTING | State.READY if draining or child.asked_to_stop:
            # A worker gives its batches back before the server goes away under it.
            worker_first = any(other.needs == child.name and _present(other) for other in known.values())
            return None if worker_first and draining else act(Verb.STOP, "draining" if draining else "asked to")
        case State.STARTING | State.READY if not standing:
            return act(Verb.STOP, f"{child.needs} is gone")
        case State.STARTING | State.READY if child.trouble:
            return act(Verb.KILL, child.trouble)  # wrong from the start, or it does not move: nothing to wait for
        case State.STARTING if child.answers and ready:
            return act(Verb.READY)
        case State.STARTING if now - child.since > child.load_seconds:
            return act(Verb.KILL, f"not ready after {child.load_seconds:.0f} s")
        case State.STOPPING if child.exit_code is not None:
            return act(Verb.GONE)
        case State.STOPPING if now - child.since > child.stop_seconds:
            return act(Verb.KILL, f"still there {child.stop_seconds:.0f} s after it was asked to stop")
        case State.BACKOFF if now - child.since >= backoff_seconds(child.failures, rules):
            return act(Verb.RETRY)
        case State.BLOCKED if now - child.since >= rules.blocked_look_seconds:
            return act(Verb.LOOK)
    return None


def _present(child: Child) -> bool:
    return child.state in (State.STARTING, State.READY, State.STOPPING)
