"""How many requests shall be in flight at one server: found from what the server says and does. Pure, no clock.

The true bound is not what was asked for at the start: SGLang lowers --max-running-requests to what its memory pools
allow without an error, and the KV cache may hold fewer long requests than that. So the limit follows the server:

- It says how many run and wait (`/v1/loads`): enough are in flight when all that can run are running and a small
  queue waits, so that a freed slot finds its next request at once. More only wait, fewer leave slots idle.
- It retracts requests (KV cache full): fewer, since every retracted request is computed again.
- It says nothing: more, by a quarter at a time, for as long as that brings more tokens a second; less when it fails.
"""

import msgspec

from gend.engine import Load

FIRST_LIMIT = 16
"""In flight at a server that does not say what it can run, to begin with."""

MOST = 4096
GAIN = 1.05  # a quarter more requests must bring 5 % more tokens, or it was not worth it
WINDOW_STEPS = 10  # steps between two trials of a server that says nothing: replies must have come in


def queue_wanted(running: int) -> int:
    """Requests that should wait in the server's own queue: some 3 % of what runs, at least 2."""
    return max(2, running // 32)


class Pilot(msgspec.Struct, kw_only=True):
    """The limit of one server, and why it is not higher: slots, kv, prompts, errors, fixed, trial.

    `share`: of what the server says it can run, no more than this is used.
    """

    fixed: int = 0
    share: float = 1.0
    limit: int = 0
    limited_by: str = "trial"
    _steps: int = 0
    _tokens: int = 0
    _rate: float = 0.0
    _before: int = 0
    _settled: bool = False
    _told: bool = False  # the server has said what it can run

    def step(self, load: Load, in_flight: int, tokens: int, faults: int) -> int:
        """One look a second. `tokens` made and `faults` seen since the last look; gives the new limit."""
        if self.fixed:
            self.limit, self.limited_by = self.fixed, "fixed"
        elif load.max_running is not None:
            self._follow(load, max(1, int(load.max_running * self.share)), in_flight)
        else:
            self._try(in_flight, tokens, faults)
        return self.limit

    def _follow(self, load: Load, most: int, in_flight: int) -> None:
        running, waiting = load.running or 0, load.waiting or 0
        top = most + queue_wanted(most)
        if not self._told:
            self._told, self.limit, self.limited_by = True, top, "slots"
        elif load.retracted:
            self.limit, self.limited_by = max(2, min(self.limit, in_flight) * 9 // 10), "kv"
        elif waiting > 2 * queue_wanted(running) and running < most:
            # It cannot run what it has, though slots are free: the KV cache is full. Let the queue shrink.
            self.limit, self.limited_by = max(2, running + queue_wanted(running)), "kv"
        elif in_flight < self.limit:
            self.limited_by = "prompts"
            self.limit = max(self.limit, min(top, running + 2 * queue_wanted(running)))
        elif self.limit < top and waiting <= queue_wanted(running):
            self.limit = min(top, self.limit + max(2, self.limit // 16))
        if self.limit >= top:
            self.limit = top
            if in_flight >= top:
                self.limited_by = "slots"

    def _try(self, in_flight: int, tokens: int, faults: int) -> None:
        self.limit = self.limit or FIRST_LIMIT
        self._steps += 1
        self._tokens += tokens
        if faults:
            self.limit, self.limited_by, self._settled = max(2, self.limit * 3 // 4), "errors", True
            self._steps = self._tokens = 0
            return
        if self._steps < WINDOW_STEPS:
            return
        rate, self._steps, self._tokens = self._tokens / self._steps, 0, 0
        if in_flight < self.limit:
            self.limited_by = "prompts"
        elif not self._settled and (self._rate == 0 or rate > GAIN * self._rate):
            self._before, self._rate = self.limit, rate
            self.limit, self.limited_by = min(MOST, self.limit + max(4, self.limit // 4)), "trial"
        elif not self._settled:
            self.limit, self.limited_by, self._settled = self._before, "slots", True
