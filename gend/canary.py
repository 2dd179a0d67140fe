"""Canaries: prompts with a known answer, which tell a server that is sane from one that answers 200 with nonsense.

A model that cannot answer them (dummy weights, a base model) is not held to them: what counts is that a server does
not know any more what it knew before, or does not know what another server with the same model knows.
"""

from gend.records import Message, Reply, Sampling

MESSAGES: list[Message] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]

PLAIN = Sampling(temperature=0.0, top_p=None, top_k=None, max_tokens=24, thinking=False)
"""Answered at once, without a thought: a handful of tokens, so that it can be asked every second."""

THINKING = Sampling(temperature=0.0, top_p=None, top_k=None, max_tokens=48, thinking=True)
"""Asked once at the start where thinking is wanted: does the server split the thought from the answer?"""


def knows(reply: Reply) -> bool:
    """Whether the reply holds the right answer."""
    return "paris" in f"{reply.content or ''} {reply.reasoning_content or ''}".lower()


def split_fault(reply: Reply) -> str:
    """What is wrong with the split of thought and answer, in words; empty when a thought came as it should."""
    if (reply.reasoning_content or "").strip():
        return ""
    return (
        "thinking is on, but its reply has no reasoning_content: set servers.flags.reasoning-parser for this model, "
        "or sampling.thinking = false"
    )
