"""What the supervisor does next, as tables of (how it stands, what is due). No process is started here."""

import math
from typing import Any

import pytest

from gend.planner import Action, Child, Rules, State, Verb, backoff_seconds, plan

RULES = Rules(first_backoff_seconds=2.0, longest_backoff_seconds=300.0, healthy_seconds=600.0, blocked_look_seconds=5.0)
NOW = 1000.0


def server(state: State = State.READY, **more: Any) -> Child:
    return Child(name="server-0", load_seconds=100, stop_seconds=30, state=state, **{"since": NOW - 1, **more})


def worker(state: State = State.READY, **more: Any) -> Child:
    return Child(
        name="worker-0", needs="server-0", load_seconds=math.inf, stop_seconds=40, state=state,
        **{"since": NOW - 1, **more},
    )  # fmt: skip


def due(*children: Child, draining: bool = False, after: float = 0.0) -> dict[str, str]:
    """The verbs that are due, by child."""
    actions = plan(children, NOW + after, RULES, draining)
    assert len({action.child for action in actions}) == len(actions), "one action for each child at most"
    return {action.child: action.verb.value for action in actions}


ALONE: dict[str, tuple[Child, str | None]] = {
    # how a server stands, what is due
    "down: start it": (server(State.DOWN), "start"),
    "starting, no answer yet": (server(State.STARTING, since=NOW - 100), None),
    "starting and it answers": (server(State.STARTING, answers=True), "ready"),
    "starting for too long": (server(State.STARTING, since=NOW - 101), "kill"),
    "starting, and it answers wrong": (server(State.STARTING, trouble="no reasoning_content"), "kill"),
    "ended while it started": (server(State.STARTING, exit_code=1), "failed"),
    "ended well, but nobody asked it to": (server(exit_code=0), "failed"),
    "ended and answered before": (server(State.STARTING, answers=True, exit_code=1), "failed"),
    "ready": (server(since=0), None),
    "ready, and it hangs": (server(trouble="no tokens for 60 s"), "kill"),
    "ready, asked to stop": (server(asked_to_stop=True), "stop"),
    "stopping": (server(State.STOPPING, since=NOW - 30), None),
    "stopped": (server(State.STOPPING, exit_code=0), "gone"),
    "does not stop": (server(State.STOPPING, since=NOW - 31), "kill"),
    "pause after the first failure": (server(State.BACKOFF, failures=1, since=NOW - 1.9), None),
    "that pause is over": (server(State.BACKOFF, failures=1, since=NOW - 2.0), "retry"),
    "pause after the fourth": (server(State.BACKOFF, failures=4, since=NOW - 15.9), None),
    "that one is over": (server(State.BACKOFF, failures=4, since=NOW - 16.0), "retry"),
    "after a thousand it is tried still": (server(State.BACKOFF, failures=1000, since=NOW - 300), "retry"),
    "its port is taken": (server(State.BLOCKED, since=NOW - 4.9), None),
    "is it still?": (server(State.BLOCKED, since=NOW - 5.0), "look"),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_server_alone(name: str) -> None:
    child, verb = ALONE[name]
    assert due(child) == ({} if verb is None else {"server-0": verb})


PAIRS: dict[str, tuple[Child, Child, dict[str, str]]] = {
    # how a server and its worker stand, what is due
    "nothing runs": (server(State.DOWN), worker(State.DOWN), {"server-0": "start"}),
    "the worker loads beside its server": (server(State.STARTING), worker(State.DOWN), {"worker-0": "start"}),
    "and waits for it": (server(State.STARTING), worker(State.STARTING, answers=True, since=0), {}),
    "both are there": (server(), worker(State.STARTING, answers=True), {"worker-0": "ready"}),
    "the server died": (server(exit_code=-9), worker(), {"server-0": "failed"}),
    "and now the worker": (server(State.BACKOFF, failures=1), worker(), {"worker-0": "stop"}),
    "a worker does not go to a server that is away": (server(State.BLOCKED), worker(State.DOWN), {}),
    "the worker died": (server(), worker(exit_code=1), {"worker-0": "failed"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_server_and_its_worker(name: str) -> None:
    first, second, actions = PAIRS[name]
    assert due(first, second) == actions


DRAINING: dict[str, tuple[Child, Child, dict[str, str]]] = {
    "the worker first": (server(), worker(), {"worker-0": "stop"}),
    "the server waits for it": (server(), worker(State.STOPPING), {}),
    "then the server": (server(), worker(State.DOWN), {"server-0": "stop"}),
    "also one that loads": (server(State.STARTING), worker(State.DOWN), {"server-0": "stop"}),
    "nothing is started any more": (server(State.DOWN), worker(State.DOWN), {}),
    "a worker that does not stop": (server(), worker(State.STOPPING, since=NOW - 41), {"worker-0": "kill"}),
}


@pytest.mark.parametrize("name", DRAINING)
def test_draining(name: str) -> None:
    first, second, actions = DRAINING[name]
    assert due(first, second, draining=True) == actions


def test_others_wait_until_the_first_server_has_filled_the_caches_or_failed() -> None:
    def pair(**first: Any) -> tuple[Child, Child]:
        second = Child(name="server-1", waits_for_start_of="server-0")
        return server(State.STARTING, **first), second

    assert due(*pair()) == {}
    assert due(*pair(ever_ready=True)) == {"server-1": "start"}
    assert due(*pair(failures=1)) == {"server-1": "start"}


def test_one_server_in_trouble_is_nobody_elses_business() -> None:
    others = [Child(name=f"server-{number}", state=State.READY, since=0) for number in range(1, 8)]
    assert due(server(State.BACKOFF, failures=1000), *others) == {}


def test_pauses_double_up_to_a_bound() -> None:
    pauses = [backoff_seconds(failures, RULES) for failures in (0, 1, 2, 3, 8, 9, 10_000)]
    assert pauses == [2, 2, 4, 8, 256, 300, 300]


def test_reasons_are_for_people() -> None:
    assert plan([server(State.STARTING, exit_code=-9)], NOW, RULES) == [
        Action(Verb.FAILED, "server-0", "ended with -9")
    ]
