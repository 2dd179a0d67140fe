"""How a row lives: attempts at one prompt, with a slot of the server for each. Part of the worker's flow.

attempt   The prompt, then each follow-up with the replies so far; where max_tokens does not fit, with as many as do.
judge     One word for the reply (verdict.py); for a bad one the run's verdicts say whether there is another attempt,
          with a new seed, perhaps with other settings. The best attempt becomes the row.
blame     A fault of the machinery uses up no attempt. It counts against the prompt only where the server answers
          something else right after; after BLAMES of them the row is an error.
"""

import asyncio
import time
from typing import Any

import msgspec

from gend.blame import suspect_key
from gend.engine import Server
from gend.errors import PromptRefused, ServerFault, ServerUnavailable
from gend.guard import Guard
from gend.records import Batch, Message, Prompt, Reply, Row, Run, Sampling, Usage, row_seed
from gend.slots import RETRY
from gend.verdict import ABORT, ERROR, POISON, REFUSED, badness, judge, next_attempt

BLAMES = 6  # faults of one prompt, each with the server well right after, until its row is an error: some 16 s


class Generator:
    """Makes rows at one server. `name` is the server's, as rows give it."""

    def __init__(self, name: str, server: Server, guard: Guard, token_ids: bool):
        self._name, self._server, self._guard, self._token_ids = name, server, guard, token_ids
        self.engine = ""  # id of the record of what makes these rows (provenance.py)
        self.faults = 0  # of the machinery, so far

    async def row(self, run: Run, batch: Batch, prompt: Prompt, rank: int) -> Row:
        """One prompt to one row: the best of as many attempts as the run's verdicts ask for.

        Raises Draining, Withdrawn (`rank` from 0 on: sent away before it was begun), ServerUnavailable.
        """
        key = suspect_key(run.id, prompt.id)
        rows: list[Row] = []
        changes: dict[str, Any] | None = {}
        well = False
        try:
            while changes is not None:
                sampling = msgspec.structs.replace(run.sampling, **changes)
                row = Row(
                    id=prompt.id, run=run.id, batch=batch.number, messages=prompt.messages, tools=prompt.tools,
                    verdict=ERROR, seed=row_seed(sampling.seed, prompt.id, len(rows)), server=self._name,
                    engine=self.engine, changed=changes or msgspec.UNSET,
                )  # fmt: skip
                await self._attempt(run, prompt, row, sampling, key, RETRY if rows else rank)
                rows.append(row)
                changes = next_attempt(row.verdict, len(rows), run.verdicts)
            well = True
        finally:
            await self._guard.ended(key, well)
        best = min(rows, key=lambda row: badness(row.verdict))  # of equal ones the first
        best.attempts = len(rows)
        return best

    async def _attempt(self, run: Run, prompt: Prompt, row: Row, sampling: Sampling, key: str, rank: int) -> None:
        """One attempt at a row, which it fills; the machinery's faults do not end it."""
        blames, pause = 0, 0.5
        while True:
            if why := self._guard.poison(key):
                row.verdict, row.error = POISON, why
                return
            async with self._guard.place(key, RETRY if blames else rank, run.id):
                started = time.monotonic()
                try:
                    reply = await self._converse(prompt, row, sampling)
                except PromptRefused as error:
                    row.verdict, row.error = REFUSED, str(error)
                    return
                except ServerUnavailable:
                    self._guard.crashed()
                    raise
                except ServerFault as error:
                    fault = str(error)
                    self.faults += 1
                    self._guard.failed()
                else:
                    self._guard.lives(key)
                    row.seconds = round(time.monotonic() - started, 3)
                    row.verdict = judge(reply, sampling, run.verdicts)
                    if row.verdict != ABORT:
                        return
                    fault = "the server aborted the request"
            # The machinery failed, and a row fails only for its own sake: it is blamed only when the server answers
            # something else right after.
            if await self._guard.answers():
                self._guard.lives(key)
                blames += 1
            if blames >= BLAMES:
                row.verdict, row.error = ERROR, fault
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, 30.0)

    async def _converse(self, prompt: Prompt, row: Row, sampling: Sampling) -> Reply:
        """Ask the prompt, then each follow-up with the replies so far as context; fills the row."""
        messages = list(prompt.messages)
        reply = await self._ask(prompt, row, sampling, messages, prompt.prefix)
        usage = reply.usage
        for follow_up in prompt.follow_ups:
            turn = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning_content}
            messages += [{name: value for name, value in turn.items() if value is not None}, follow_up]
            reply = await self._ask(prompt, row, sampling, messages)
            usage = Usage(*(a + b for a, b in zip(_tokens(usage), _tokens(reply.usage), strict=True)))
        row.messages, row.usage = messages, usage
        row.content, row.reasoning_content = reply.content, reply.reasoning_content
        if prompt.prefix and not prompt.follow_ups:
            row.content = prompt.prefix + (reply.content or "")
        row.tool_calls, row.finish_reason = reply.tool_calls, reply.finish_reason
        if reply.token_ids:
            row.prompt_token_ids, row.token_ids = reply.prompt_token_ids or [], reply.token_ids
        return reply

    async def _ask(
        self, prompt: Prompt, row: Row, sampling: Sampling, messages: list[Message], prefix: str | None = None
    ) -> Reply:
        """One reply; where max_tokens does not fit beside the prompt, with as many as do."""
        for _ in range(3):  # the first refusal may only name the context, and the second what the prompt leaves of it
            try:
                return await self._server.chat(messages, prompt.tools, sampling, row.seed, self._token_ids, prefix)
            except PromptRefused as error:
                if not 0 < error.room < sampling.max_tokens:
                    raise
                row.max_tokens = error.room
                sampling = msgspec.structs.replace(sampling, max_tokens=error.room)
        raise PromptRefused("the context has no room for a reply")


def _tokens(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens
