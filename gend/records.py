"""Ids, names and the shapes of what gend handles: Prompt, PromptSet, Run, Batch, Reply, Row.

Everything here is plain data. What is written to disk, Redis or the store is JSON of these structs, never pickle.
"""

import hashlib
import re
from collections import Counter
from typing import Annotated, Any

import msgspec

from gend.errors import unknown_key

Message = dict[str, Any]

PART_NAME = re.compile(r"^(\d{8})\.jsonl$")
"""The file name of a part: its batch number, eight digits."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How replies are drawn: part of a run's identity. `None` leaves a value to the server.

    The bounds are the engine's: a value outside would have every single prompt refused.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = 0.95
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = 20
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 32768
    thinking: bool | None = True
    seed: int = 7


NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Ratio = Annotated[float, msgspec.Meta(ge=0)]
Retries = NotNegative | dict[str, int | float | bool | None]
"""How often a row is tried again, each time with a new seed: a number; or a table of `retries` (1 if not there) and of
keys of Sampling that are changed for it: `{"retries": 1, "max_tokens": 65536}`."""


def often_and_changes(retries: Retries) -> tuple[Any, dict[str, Any]]:
    """The two things that Retries says."""
    if not isinstance(retries, dict):
        return retries, {}
    changes = {**retries}
    return changes.pop("retries", 1), changes


class Verdicts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the replies of a run are judged, and what is done about a bad one; no part of a run's identity.

    First, by verdict, how a row is tried again (verdict.py: `next_attempt`, `badness`). Words that are not named are
    never tried again for the row's sake: `ok` needs it not, `refused` and `poison` would come again, `abort` and
    `error` are the server's fault and use up no attempt of the row.

    Then the numbers behind the table in verdict.py. A share above 1 or a ratio of 0 turns its rule off.
    `min_answer_chars` makes a shorter answer `empty`. Off by default, as "Yes." is right for some prompts; for prompts
    that all ask for long answers without thinking it is the one rule on a single row that sees a stub.
    `loop_*` are explained at verdict.py's `_loops`: `cut` for replies that ran to max_tokens, `stop` for others.
    """

    empty: Retries = 1
    unclosed: Retries = 1
    loop: Retries = 0  # it ran to max_tokens: one more try costs a dozen rows
    junk: Retries = 1
    no_thinking: Retries = 1
    length: Retries = 0  # the same max_tokens would cut again

    min_thought_chars: NotNegative = 8
    min_answer_chars: NotNegative = 0
    junk_symbol_share: Ratio = 0.9
    junk_broken_share: Ratio = 0.05
    junk_script_share: Ratio = 0.01
    loop_ratio_cut: Ratio = 0.18
    loop_share_cut: Ratio = 0.7
    loop_ratio_stop: Ratio = 0.15
    loop_share_stop: Ratio = 0.8

    def __post_init__(self) -> None:
        """Raises ValueError (msgspec: ValidationError) for a table that no attempt can be made with."""
        for field in msgspec.structs.fields(self):
            if isinstance(retries := getattr(self, field.name), dict):
                often, changes = often_and_changes(retries)
                sampling = msgspec.structs.asdict(Sampling())
                for key, value in [("retries", often), *changes.items()]:
                    if key not in ("retries", *sampling):
                        raise ValueError(f"{field.name}: {unknown_key(key, ['retries', *sampling])}")
                    try:
                        msgspec.convert(value, NotNegative) if key == "retries" else msgspec.convert(
                            {**sampling, key: value}, Sampling
                        )
                    except msgspec.ValidationError as error:
                        raise ValueError(f"{field.name}: {key}: {str(error).partition(' - at ')[0]}") from error


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accepted input line.

    `messages` are sent as they are. `follow_ups` are user messages to be asked one after the other once the reply
    before them is there (MT-bench's turns). `prefix` is the start of the last assistant turn, to be continued.
    """

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    follow_ups: list[Message] = []
    prefix: str | None = None


class PromptSet(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a checked prompt file. `fingerprint` is the SHA-256 of the accepted prompts as JSON lines."""

    fingerprint: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    source: str
    read: int
    accepted: Annotated[int, msgspec.Meta(ge=1)]
    rejected: int
    bytes: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt set with one model and one sampling setting, to be finished once.

    `verdicts` are those it was registered with: a run that was registered before there were any has the defaults.

    A round makes some rows of another run again, `round_of`: its prompts are a subset, `round` counts from 1.
    Ids and fingerprints become folders, keys and queue names, so nothing that is read from outside may climb with them.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
    name: str
    set: PromptSet
    model: str
    sampling: Sampling
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    created: str
    gend_version: str
    verdicts: Verdicts = Verdicts()
    round_of: str | None = None
    round: int = 0

    @property
    def batches(self) -> int:
        """How many batches the run has: the last one may be short."""
        return -(-self.set.accepted // self.batch_size)

    def batch(self, number: int) -> "Batch":
        """Slice `number` of the prompt set. Raises IndexError outside 0..batches-1."""
        if not 0 <= number < self.batches:
            raise IndexError(f"batch {number} of run {self.id}: it has {self.batches}")
        first = number * self.batch_size
        return Batch(self.id, number, first, min(self.batch_size, self.set.accepted - first))


class Batch(msgspec.Struct, frozen=True):
    """A fixed, consecutive slice of a run's prompts: `count` of them from index `first` on."""

    run: str
    number: int
    first: int
    count: int

    def __str__(self) -> str:
        return f"{self.run}/{self.number}"


class Usage(msgspec.Struct, frozen=True):
    """Tokens, as the server counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered to one request, before anybody judged it."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Row(msgspec.Struct, kw_only=True):
    """One output line: exactly one for each prompt of a batch, a result or an error.

    `messages` is the whole conversation up to the last reply; the last reply is in reasoning_content, content and
    tool_calls. `error` says why there is no reply, else null. `attempts` is how many were made; all else is of the one
    that was kept: `seed`, `seconds`, and `changed`, its sampling where that was not the run's: {"max_tokens": 65536}.
    `max_tokens` is there where what was to be asked for did not fit beside the prompt, and less was asked for.
    `engine` names what made it (provenance.py); rows of a gend that did not know it yet have none.
    `prompt_token_ids` and `token_ids` are the server's own, of the last reply; without any, the keys are left out.
    """

    id: str
    run: str
    batch: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    verdict: str
    usage: Usage = Usage()
    attempts: int = 1
    seed: int = 0
    server: str = ""
    seconds: float = 0.0
    error: str | None = None
    engine: str | msgspec.UnsetType = msgspec.UNSET
    changed: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    max_tokens: int | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


def run_identity(fingerprint: str, model: str, sampling: Sampling) -> str:
    """Twelve hex digits that are the same exactly for the same prompts, model and sampling."""
    payload = msgspec.json.encode([fingerprint, model, sampling], order="deterministic")
    return hashlib.sha256(payload).hexdigest()[:12]


def run_id(name: str, identity: str) -> str:
    """`name` made safe for file names, object keys and RQ job ids (letters, digits, `-`), then the identity."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"
    return f"{slug}-{identity}"


def row_seed(run_seed: int, prompt_id: str, attempt: int) -> int:
    """The seed of one attempt at one row, below 2**31, so that a row can be made again exactly."""
    digest = hashlib.sha256(f"{run_seed}\0{prompt_id}\0{attempt}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class _Brief(msgspec.Struct):
    id: str
    run: str
    batch: int
    verdict: str
    usage: Usage


_decode_brief = msgspec.json.Decoder(_Brief).decode


def counts_of(part: bytes, batch: Batch) -> dict[str, int] | None:
    """Rows, tokens, and rows by verdict of a part; None where it is not the part of `batch`, one row a prompt, whole.

    Rows name their run, whose id stands for its prompts, so the prompts themselves are not needed here.
    """
    counts: Counter[str] = Counter()
    ids = set()
    *lines, end = part.split(b"\n")
    for line in lines:
        try:
            row = _decode_brief(line)
        except msgspec.DecodeError:
            return None
        if (row.run, row.batch) != (batch.run, batch.number):
            return None
        ids.add(row.id)
        counts["rows"] += 1
        counts[f"verdict:{row.verdict}"] += 1
        for name, tokens in msgspec.structs.asdict(row.usage).items():
            counts[name] += tokens
    return dict(counts) if end == b"" and len(lines) == len(ids) == batch.count else None


def part_key(run: str, batch: int) -> str:
    """Where the part of a batch lies in the store, below the store's prefix."""
    return f"runs/{run}/parts/{batch:08d}.jsonl"
