"""Judging a reply: one word for what a row is worth. Pure: no clock, no files, no network."""

import re

from gend.records import Reply, Sampling

OK, LENGTH, EMPTY, UNCLOSED, ABORT = "ok", "length", "empty", "unclosed", "abort"
REFUSED, ERROR = "refused", "error"

THINK_TAG = re.compile(r"</?think>", re.IGNORECASE)


def judge(reply: Reply, sampling: Sampling) -> str:
    """The verdict on a reply, the first that fits: abort, length, unclosed, empty, ok."""
    content = reply.content or ""
    if reply.finish_reason == "abort":
        return ABORT
    if reply.finish_reason == "length":
        return LENGTH
    if THINK_TAG.search(content):
        return UNCLOSED
    if not content.strip() and not reply.tool_calls:
        return EMPTY
    return OK
