"""Whose turn it is at one server, and that no slot is ever lost."""

import asyncio

import pytest

from gend.errors import Draining, Withdrawn
from gend.slots import RETRY, Slots


class Crowd:
    """Prompts that want a slot each; `entered` says in which order they got one."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.entered: list[str] = []
        self.leave = asyncio.Event()

    def come(self, name: str, rank: int = 1, run: str = "r") -> "asyncio.Task[None]":
        async def want() -> None:
            async with self.slots.slot(rank, run):
                self.entered.append(name)
                await self.leave.wait()

        return asyncio.create_task(want(), name=name)

    async def one_after_another(self) -> list[str]:
        """Let all through, one at a time."""
        self.leave.set()
        await settle()
        self.slots.set_limit(1)
        await settle()
        return self.entered


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.fixture
async def crowd() -> Crowd:
    """Nobody gets in before `one_after_another` or a limit."""
    return Crowd(Slots())


async def test_as_many_as_the_limit_are_in_flight(crowd: Crowd) -> None:
    crowd.slots.set_limit(3)
    tasks = [crowd.come(str(number)) for number in range(10)]
    await settle()
    assert (crowd.entered, crowd.slots.in_flight, crowd.slots.waiting()) == (["0", "1", "2"], 3, 7)
    crowd.leave.set()
    await asyncio.gather(*tasks)
    assert (len(crowd.entered), crowd.slots.in_flight, crowd.slots.waiting()) == (10, 0, 0)


async def test_higher_priority_goes_first_and_a_retry_before_all(crowd: Crowd) -> None:
    for name, rank in [("low", 2), ("normal", 1), ("high", 0), ("again", RETRY), ("normal too", 1)]:
        crowd.come(name, rank)
    await settle()
    assert [crowd.slots.waiting(rank) for rank in (RETRY, 0, 1, 2)] == [1, 2, 4, 5]
    assert await crowd.one_after_another() == ["again", "high", "normal", "normal too", "low"]


async def test_runs_of_one_priority_take_turns(crowd: Crowd) -> None:
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        crowd.come(name, run=name[0])
    await settle()
    assert await crowd.one_after_another() == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_one_who_gives_up_while_waiting_takes_no_slot(crowd: Crowd) -> None:
    tasks = [crowd.come(name) for name in ("first", "second", "third")]
    await settle()
    tasks[0].cancel()
    await settle()
    assert crowd.slots.waiting() == 2
    assert await crowd.one_after_another() == ["second", "third"]
    assert crowd.slots.in_flight == 0


async def test_one_who_gives_up_when_just_admitted_passes_the_slot_on(crowd: Crowd) -> None:
    """The slot was given between two steps of the loop: nobody but the waiting room knows of it yet."""
    first, second = crowd.come("first"), crowd.come("second")
    await settle()
    crowd.slots.set_limit(1)
    first.cancel()
    await settle()
    assert (crowd.entered, crowd.slots.in_flight) == (["second"], 1)
    crowd.leave.set()
    await second
    assert crowd.slots.in_flight == 0


async def test_one_who_fails_inside_gives_the_slot_back(crowd: Crowd) -> None:
    crowd.slots.set_limit(1)
    with pytest.raises(ZeroDivisionError):
        async with crowd.slots.slot(1, "r"):
            raise ZeroDivisionError
    assert crowd.slots.in_flight == 0


async def test_a_smaller_limit_lets_those_in_flight_end(crowd: Crowd) -> None:
    crowd.slots.set_limit(3)
    tasks = [crowd.come(str(number)) for number in range(5)]
    await settle()
    crowd.slots.set_limit(1)
    assert crowd.slots.in_flight == 3
    crowd.leave.set()
    await asyncio.gather(*tasks)


async def test_closing_one_run_sends_away_only_its_own(crowd: Crowd) -> None:
    gone, kept = crowd.come("a", run="a"), crowd.come("b", run="b")
    await settle()
    crowd.slots.close("a")
    with pytest.raises(Draining):
        await gone
    assert await crowd.one_after_another() == ["b"]
    await kept


async def test_closing_sends_all_away_and_lets_nobody_in_but_those_in_flight_end(crowd: Crowd) -> None:
    crowd.slots.set_limit(1)
    inside, waiting = crowd.come("inside"), crowd.come("waiting")
    await settle()
    crowd.slots.close()
    late = crowd.come("late", RETRY)
    for task in (waiting, late):
        with pytest.raises(Draining):
            await task
    crowd.leave.set()
    await inside
    assert (crowd.entered, crowd.slots.in_flight) == (["inside"], 0)


async def test_withdrawing_sends_all_away_but_retries(crowd: Crowd) -> None:
    crowd.come("again", RETRY)
    new = crowd.come("new")
    await settle()
    crowd.slots.withdraw()
    with pytest.raises(Withdrawn):
        await new
    assert await crowd.one_after_another() == ["again"]
