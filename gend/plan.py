"""`gend plan`: flags, concurrency, time and cost of a model on a card. Pure arithmetic, except `write_config`.

Memory follows SGLang 0.5.17's own rules (`KVCacheConfigurator` in srt/mem_cache/kv_cache_configurator.py) and agrees
within 0.1 % with what its servers reported. Speed is a roofline whose efficiencies were fitted on one card; each
constant below says where. All GiB are 2**30 bytes (SGLang's log writes them "GB").
"""

import contextlib
import itertools
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import tomlkit
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tomlkit.items import AbstractTable

from gend.cards import CARDS, Card, find_card
from gend.config import Flag, settings_from
from gend.errors import SettingsError
from gend.model_shapes import BF16, Shape, shape_of
from gend.sglang_flags import REFILL, REFILL_SLOTS

GIB = 2**30

RUNTIME_GIB = 0.05
"""Taken between weights and KV cache. Fitted with the H200's usable memory on two servers (27B hybrid, fractions 0.85
and 0.88); a third (0.6B, 0.30), not used in the fit, shows 0.07."""

MTP_EXTRA_GIB = 1.54
"""Held with MTP beyond the head's own layer and its copies of embedding and head (freed only after SGLang has sized the
KV cache). Origin unknown. Fitted on one server with MTP; a second one, not used in the fit, agrees to 0.1 %."""

WEIGHT_STREAM = 0.873
"""Share of peak bandwidth at which a step reads weights. This and the next were fitted on two step times of the 27B
hybrid in bf16 on one H200 (8 running: 13.6 ms, 128: 34.2 ms); 24, 64, 184 and 232 running then agree within 10 %."""

REQUEST_STREAM = 0.421
"""The same for what each request moves: its state (read, written) and its KV. Triton kernels; sampling is in it too."""

MEASURED_LIVE_TOKENS = 600
"""Mean length of a request in those measurements: not recorded, at most 1,150 (their KV cache held no more)."""

MATMUL = 0.7
"""Share of peak FLOPs of large matrix products. Assumed; gives 0.07 ms of prefill a token for the 27B on an H200."""

ADMIT_SECONDS = 0.037
"""What a row costs beside its steps and the prefill of its tokens: decoding waits while it is admitted, in an eager
pass through all layers. Fitted on two servers of `gend tune` on an H200 (27B hybrid, replies of 768 tokens, 255 and 332
running: 3,344 and 3,358 tokens/s). Prefill CUDA graphs were off there; with them it may be less."""

RADIX_HYBRID = 0.78
"""Speed of a hybrid model with the radix cache on against off, which the step time does not explain. From three servers
of `gend tune` on an H200: 26 running gave 1,118 to 1,136 tokens/s where the rest of this page says 1,439."""

KV_FILL = 0.9
"""Share of the KV cache that live requests can fill: SGLang holds back room for tokens still to come. Assumed."""

MTP_STEPS, MTP_DRAFT_TOKENS = 3, 4
MTP_ACCEPTED = 2.5
"""Tokens a request gains in one step with MTP 3/1/4. Assumed: MTP was not measured."""

ALL_REDUCE_SECONDS = {True: 12e-6, False: 40e-6}
"""Latency of one all-reduce with and without NVLink; a layer needs two. Assumed."""

MARGIN = 1.2
"""MTP, TP and a hybrid's radix cache must promise this much more than the plain layout: none of them was measured."""

MAX_RUNNING = 512
"""Never suggest more: SGLang's largest default decode graph, and twice what was measured."""

RANGE_MEASURED, RANGE_SCALED = (0.8, 1.25), (0.6, 1.5)
"""Low and high of expected tokens/s: what was measured (the fit's error, and longer requests); all else."""

_SLOTS = {"extra_buffer": 5, "extra_buffer_lazy": 4, "no_buffer": 3}
_STRATEGY, _OLD_STRATEGY = "mamba-radix-cache-strategy", "mamba-scheduler-strategy"

PLANNED = (
    "mem-fraction-static",
    "max-running-requests",
    "cuda-graph-max-bs-decode",
    "cuda-graph-max-bs",
    "disable-radix-cache",
    _STRATEGY,
    _OLD_STRATEGY,
    "mamba-full-memory-ratio",
    "max-mamba-cache-size",
    "speculative-algorithm",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
)
"""The flags that a plan decides; `write_config` replaces these and leaves others alone."""

Flags = Mapping[str, Flag]


class DoesNotFit(SettingsError):
    """The model, or one request of it, does not fit: use more GPUs a server, a bigger card, FP8, or other flags."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be made. `reply_spread` is the standard deviation of reply lengths over their mean.

    `max_tokens` is the cap of one reply, 0 where it is not known. `shared_prefix_tokens` begin every prompt: only the
    radix cache saves their prefill.
    """

    rows: int
    prompt_tokens: float
    reply_tokens: float
    reply_spread: float = 0.8
    max_tokens: int = 0
    shared_prefix_tokens: float = 0.0

    @property
    def tokens(self) -> float:
        return self.rows * self.reply_tokens

    @property
    def live_tokens(self) -> float:
        """Mean length of a request while it runs. Long replies run longer, so they weigh more: E[r^2] / 2 E[r]."""
        return self.prompt_tokens + self.reply_tokens * (1 + self.reply_spread**2) / 2


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """How one server spends the memory of one GPU, and what that lets run."""

    weights_gib: float
    draft_gib: float
    budget_gib: float
    """Left of --mem-fraction-static for states and KV."""
    slots: int
    slots_per_request: int
    state_gib: float
    """The recurrent states alone, as SGLang's log gives them ("ssm_state size"), with one slot of padding."""
    intermediate_gib: float
    kv_gib: float
    kv_tokens: int
    max_running: int
    """What /v1/loads will show as max_running_requests."""
    limit: str


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one decode step goes, in milliseconds."""

    weights_ms: float
    compute_ms: float
    state_ms: float
    kv_ms: float
    link_ms: float
    draft_ms: float

    @property
    def total_ms(self) -> float:
        """Reading weights and multiplying overlap: the longer of the two counts. The rest comes one after the other."""
        return max(self.weights_ms, self.compute_ms) + self.state_ms + self.kv_ms + self.link_ms + self.draft_ms


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan may not decide: None leaves MTP and the radix cache to it; `kept` flags go along unchanged."""

    mtp: bool | None = None
    radix: bool | None = None
    kept: Flags = {}


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve: flags, what fits, what runs, how fast. Rates are of the whole box."""

    flags: dict[str, Flag]
    gpus_per_server: int
    servers: int
    memory: Memory
    running: int
    """Requests that run at once on one server with this workload."""
    limit: str
    step: Step
    step_ms: float
    prefill_ms_per_row: float
    low: float
    tokens_per_second: float
    high: float


class Cost(msgspec.Struct, frozen=True):
    hours: float
    dollars: float
    dollars_per_million: float


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A box one could rent. `costs` are at the high, the expected and the low rate; none where `refused` says why."""

    card: str
    gpus: int
    dollars_per_hour: float
    estimate: Estimate | None = None
    costs: tuple[Cost, Cost, Cost] | None = None
    refused: str = ""


class Figure(msgspec.Struct, frozen=True):
    """One number of the plan and, in one line, where it comes from."""

    name: str
    value: str
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    card: str
    gpus: int
    workload: Workload
    suggested: Estimate
    given: Estimate | None
    figures: list[Figure]
    offers: list[Offer]
    warnings: list[str]


def plan(
    *,
    model: str,
    card: str,
    workload: Workload,
    gpus: int = 1,
    gpus_per_server: int = 0,
    flags: Flags | None = None,
    flags_gpus_per_server: int = 1,
    in_flight: int = 0,
    mtp: bool | None = None,
    radix: bool | None = None,
    offers: Sequence[str] = (),
    dollars_per_hour: float = 0.0,
    tokens_per_second: float = 0.0,
) -> Plan:
    """The whole plan.

    `flags` (those of config.toml, for servers of `flags_gpus_per_server`) are judged beside the suggested ones, which
    keep what is no plan's business (not PLANNED), such as --quantization and --kv-cache-dtype. None: nothing to judge.
    `gpus_per_server`, `mtp` and `radix` leave the choice to the plan at 0 and None. `in_flight` is what the client will
    keep in flight at each server, 0 for as many as run. `offers` are boxes like "8xB200@44" (dollars an hour for the
    box, optional); without any, all known cards are put side by side. `dollars_per_hour` is for the box of `card` and
    `gpus`, 0 for the table's price. `tokens_per_second`, where it was measured on this box, replaces the estimate.
    Raises SettingsError for an unknown model or card, DoesNotFit where the model does not fit on the box.
    """
    shape, kind = shape_of(model), find_card(card)
    flags = flags if flags is None else plain_names(flags)
    kept = {name: value for name, value in (flags or {}).items() if name not in PLANNED}
    choice = Choice(mtp=mtp, radix=radix, kept=kept)
    chosen = suggest(shape, kind, workload, choice, gpus=gpus, gpus_per_server=gpus_per_server)
    given, warnings = None, []
    if flags is not None:
        try:
            given = estimate(shape, kind, workload, flags, gpus=gpus, gpus_per_server=flags_gpus_per_server)
        except DoesNotFit as error:
            warnings.append(f"with the flags of the config: {error}")
    warnings += contradictions(shape, kind, workload, given or chosen, in_flight)
    if not _measured(_as_served(shape, kept), kind):
        warnings.append(
            f"{shape.name} on {kind.name} was not measured: speed is scaled from a 27B hybrid on an H200 by bandwidth "
            "and FLOPs, hence the wide range; `gend tune` on the box gives the true one"
        )
    price = dollars_per_hour or kind.dollars_per_hour * gpus
    costs = _costs(workload, chosen, price, tokens_per_second)
    others = [parse_offer(text) for text in offers]
    if not offers:
        others = [(other, gpus, other.dollars_per_hour * gpus) for other in CARDS if other != kind]
    boxes = [Offer(card=kind.name, gpus=gpus, dollars_per_hour=price, estimate=chosen, costs=costs)]
    for other, count, dollars in others:
        if (other, count, dollars) == (kind, gpus, price):
            continue  # the box that it is all about
        try:
            best = suggest(shape, other, workload, choice, gpus=count)
            box = Offer(
                card=other.name,
                gpus=count,
                dollars_per_hour=dollars,
                estimate=best,
                costs=_costs(workload, best, dollars),
            )
        except DoesNotFit as error:
            box = Offer(card=other.name, gpus=count, dollars_per_hour=dollars, refused=str(error))
        boxes.append(box)
    return Plan(
        model=shape.name,
        card=kind.name,
        gpus=gpus,
        workload=workload,
        suggested=chosen,
        given=given,
        figures=_figures(shape, kind, workload, kept, gpus, chosen, price, tokens_per_second, costs),
        offers=boxes,
        warnings=warnings,
    )


def _measured(shape: Shape, card: Card) -> bool:
    """Whether the step times behind the constants are of this very model on this card."""
    return card.measured and msgspec.structs.replace(shape, name="Qwen3.6-27B") == shape_of("Qwen3.6-27B")


def estimate(
    shape: Shape, card: Card, workload: Workload, flags: Flags, *, gpus: int = 1, gpus_per_server: int = 1
) -> Estimate:
    """What these flags give on a box of `gpus` cards. Raises DoesNotFit."""
    servers = gpus // gpus_per_server
    if not servers:
        raise DoesNotFit(f"{gpus_per_server} GPUs a server, but the box has {gpus}")
    room = memory(shape, card, flags, gpus_per_server)
    running, limit = room.max_running, room.limit
    if (by_kv := int(room.kv_tokens * KV_FILL / workload.live_tokens)) < running:
        running, limit = by_kv, "the KV cache"
    if (by_rows := -(-workload.rows // servers)) < running:
        running, limit = by_rows, "the rows"
    if running < 1:
        raise DoesNotFit(
            f"{shape.name} on {gpus_per_server} x {card.name}: the KV cache holds {room.kv_tokens:,} tokens, less than "
            f"one request of {workload.live_tokens:,.0f}; give a server more GPUs or fewer state slots"
        )
    step = step_time(shape, card, flags, running, workload.live_tokens, gpus_per_server)
    radix = not flags.get("disable-radix-cache")
    prompt = workload.prompt_tokens - (workload.shared_prefix_tokens if radix else 0)
    prefill = prefill_seconds(_as_served(shape, flags), card, max(0.0, prompt), gpus_per_server)
    prefill += ADMIT_SECONDS / min(REFILL_SLOTS, max(1.0, _number(flags, REFILL, 1)))
    mtp = bool(_draft_tokens(flags))
    seconds_per_token = step.total_ms / 1000 / running / (MTP_ACCEPTED if mtp else 1) + prefill / workload.reply_tokens
    rate = servers / seconds_per_token * (RADIX_HYBRID if radix and shape.linear_layers else 1)
    as_measured = _measured(_as_served(shape, flags), card) and not (mtp or radix)
    low, high = RANGE_MEASURED if as_measured else RANGE_SCALED
    return Estimate(
        flags=dict(flags),
        gpus_per_server=gpus_per_server,
        servers=servers,
        memory=room,
        running=running,
        limit=limit,
        step=step,
        step_ms=step.total_ms,
        prefill_ms_per_row=prefill * 1000,
        low=rate * low,
        tokens_per_second=rate,
        high=rate * high,
    )


def suggest(
    shape: Shape,
    card: Card,
    workload: Workload,
    choice: Choice = Choice(),  # noqa: B008  # frozen
    *,
    gpus: int = 1,
    gpus_per_server: int = 0,
) -> Estimate:
    """The best layout and flags: the plain one, unless another promises MARGIN times more. Raises DoesNotFit.

    Plain is the fewest GPUs a server that fit (a lost GPU then stops the least, and nothing waits for a link), no MTP,
    and no radix cache for a hybrid, which pays for it in state slots (for others it costs nothing, and is on).
    """
    if choice.mtp and not shape.mtp_layers:
        raise SettingsError(f"{shape.name} has no MTP layer; leave MTP off")
    mtps = [False, True] if choice.mtp is None and shape.mtp_layers else [bool(choice.mtp)]
    radixes = [choice.radix] if choice.radix is not None else [False, True] if shape.linear_layers else [True]
    best, refused = None, DoesNotFit(f"{shape.name}: its heads cannot be spread over {gpus_per_server} GPUs")
    for tp in _sizes(shape, gpus_per_server or gpus, only=bool(gpus_per_server)):
        for mtp, radix in itertools.product(mtps, radixes):
            try:
                flags = suggest_flags(shape, card, workload, tp=tp, mtp=mtp, radix=radix, kept=choice.kept)
                other = estimate(shape, card, workload, flags, gpus=gpus, gpus_per_server=tp)
            except DoesNotFit as error:
                refused = error
                continue
            if best is None or other.tokens_per_second > best.tokens_per_second * MARGIN:
                best = other
    if best is None:
        raise refused
    return best


class Forecast:
    """What the plan says of one server of this model, for `gend tune`: where to begin, and what to expect."""

    def __init__(self, model: str, card: str, workload: Workload, gpus_per_server: int):
        """Raises SettingsError for an unknown model or card."""
        self._shape, self._card = shape_of(model), find_card(card)
        self._workload, self._gpus = workload, gpus_per_server

    def rate(self, flags: Flags) -> float:
        """Tokens/s of a server with these flags; 0 where nothing would run."""
        try:
            return estimate(
                self._shape, self._card, self._workload, flags, gpus=self._gpus, gpus_per_server=self._gpus
            ).tokens_per_second
        except DoesNotFit:
            return 0.0

    def layouts(self, flags: Flags, mtp: bool | None, radix: bool | None) -> list[tuple[str, dict[str, Flag]]]:
        """Balanced flags, each with a name: the plan's own first, then those with MTP or radix cache the other way.

        `flags` are the config's, of which those stay that are no plan's business. Raises DoesNotFit.
        """
        kept = {name: value for name, value in flags.items() if name not in PLANNED}
        mtps = [False, True] if mtp is None and self._shape.mtp_layers else [bool(mtp)]
        radixes = [radix] if radix is not None else [False, True]
        found = {"plan": self._suggest(Choice(mtp=mtp, radix=radix, kept=kept))}
        for with_mtp, with_radix in itertools.product(mtps, radixes):
            name = f"{'MTP' if with_mtp else 'no MTP'}, radix cache {'on' if with_radix else 'off'}"
            with contextlib.suppress(DoesNotFit):
                other = self._suggest(Choice(mtp=with_mtp, radix=with_radix, kept=kept))
                if other not in found.values():
                    found[name] = other
        return list(found.items())

    def _suggest(self, choice: Choice) -> dict[str, Flag]:
        size = self._gpus
        return suggest(self._shape, self._card, self._workload, choice, gpus=size, gpus_per_server=size).flags


def _sizes(shape: Shape, gpus: int, only: bool = False) -> list[int]:
    """How many GPUs a server can have so that `gpus` are used up; `only` one server of them all."""
    return [n for n in range(gpus if only else 1, gpus + 1) if gpus % n == 0 and shape.can_split(n)]


def suggest_flags(
    shape: Shape,
    card: Card,
    workload: Workload,
    *,
    tp: int = 1,
    mtp: bool = False,
    radix: bool = False,
    kept: Flags | None = None,
) -> dict[str, Flag]:
    """SGLang's flags (0.5.14 and later) with which states and KV run out at the same number of requests.

    Each request takes its state slots and, on average, the KV of `workload.live_tokens`. `kept` are flags that go along
    and count (a smaller KV or state dtype). Raises DoesNotFit.
    """
    flags = dict(kept or {})
    if mtp:
        flags |= {
            "speculative-algorithm": "EAGLE",
            "speculative-num-steps": MTP_STEPS,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": MTP_DRAFT_TOKENS,
        }
    flags["disable-radix-cache"] = not radix  # said in either case: gend itself switches it off for some models
    if radix and shape.linear_layers:
        flags[_STRATEGY] = "extra_buffer_lazy"  # one slot a request cheaper than extra_buffer
    slot, drafts = shape.state_bytes(tp, _state_dtype(flags)), _draft_tokens(flags)
    states = slot * (_slots_per_request(flags) + drafts)
    kv = workload.live_tokens / KV_FILL * shape.kv_bytes(tp, _kv_element_bytes(flags))
    graph_bs = default = _default_graph_bs(card, tp)
    for _ in range(2):  # larger decode graphs take memory, which leaves room for fewer requests
        flags["mem-fraction-static"] = math.floor(default_mem_fraction(card, tp, graph_bs) * 100) / 100
        room = _budget_gib(shape, card, flags, tp) * GIB - slot * (1 + drafts)
        running = min(MAX_RUNNING, int(room // (states + kv)))
        if running < 1:
            raise DoesNotFit(
                f"{shape.name} on {tp} x {card.name}: {room / GIB:.1f} GiB beside the weights, but one request takes "
                f"{(states + kv) / GIB:.1f}; give a server more GPUs, or take FP8 weights"
            )
        graph_bs = max(default, running)
    flags["max-running-requests"] = running
    if running > default:
        flags["cuda-graph-max-bs-decode"] = running
    if radix and shape.linear_layers:
        # Rounded up: a slot too few costs a request, a token of KV too few nothing.
        pool = running * states + slot * (1 + drafts)
        ratio = pool / (room - running * states)
        flags["mamba-full-memory-ratio"] = math.ceil(ratio * 1000) / 1000
    return flags


# Memory: what SGLang 0.5.17 allocates.


def memory(shape: Shape, card: Card, flags: Flags, tp: int = 1) -> Memory:
    """What a server with these flags allocates on each of its `tp` GPUs. Raises DoesNotFit.

    Follows `_profile_available_bytes`, `_handle_max_mamba_cache`, `_calculate_mamba_ratio` and `resolve_max_num_reqs`.
    """
    shape = _as_served(shape, flags)
    draft_tokens = _draft_tokens(flags)
    dtype = _state_dtype(flags)
    slot, recurrent = shape.state_bytes(tp, dtype) / GIB, shape.recurrent_bytes(tp, dtype) / GIB
    budget = _budget_gib(shape, card, flags, tp)
    # With speculative decoding SGLang sets 48 where nothing is asked for.
    asked = int(_number(flags, "max-running-requests", 48 if draft_tokens else 0))
    per_request = _slots_per_request(flags)
    slots = intermediate = 0
    if slot:
        if fixed := int(_number(flags, "max-mamba-cache-size", 0)):
            slots = fixed
        elif flags.get("disable-radix-cache") and asked:
            slots = asked  # the ratio plays no part then
        else:
            # K slots, one of padding, and the drafts' intermediate states of K / per_request requests, one of padding.
            ratio = _number(flags, "mamba-full-memory-ratio", 0.9)
            share = budget * ratio / (1 + ratio)
            slots = max(0, int((share / slot - 1 - draft_tokens) // (1 + draft_tokens / per_request)))
        if draft_tokens:
            intermediate = (min(asked, slots // per_request) + 1) * draft_tokens
    used = (slots + 1 + intermediate) * slot
    if used >= budget or (slot and slots < per_request):
        raise DoesNotFit(
            f"{shape.name} on {tp} x {card.name}: {budget:.1f} GiB are left beside the weights, {slots} state slots "
            f"and {intermediate} intermediate states take {used:.1f} GiB, and nothing would run; "
            "lower --max-running-requests or --max-mamba-cache-size, or give a server more GPUs"
        )
    kv_token = shape.kv_bytes(tp, _kv_element_bytes(flags))
    kv_tokens = int((budget - used) * GIB // kv_token)
    kv_tokens = int(min(kv_tokens, _number(flags, "max-total-tokens", kv_tokens)))
    context = _number(flags, "context-length", shape.context or 32768)
    limits = {"the KV cache": kv_tokens // 2}
    limits["--max-running-requests"] = asked or max(2048, min(4096, int(kv_tokens / context * 512)))
    if slot:
        limits["the state slots"] = slots // per_request
    limit = min(limits, key=lambda name: limits[name])
    return Memory(
        weights_gib=shape.weight_bytes / tp / GIB,
        draft_gib=_draft_gib(shape, tp) if draft_tokens else 0.0,
        budget_gib=budget,
        slots=slots,
        slots_per_request=per_request if slot else 0,
        state_gib=(slots + 1) * recurrent if slot else 0.0,
        intermediate_gib=intermediate * recurrent,
        kv_gib=kv_tokens * kv_token / GIB,
        kv_tokens=kv_tokens,
        max_running=limits[limit],
        limit=limit,
    )


def default_mem_fraction(card: Card, tp: int = 1, graph_max_bs: int = 0) -> float:
    """SGLang's own --mem-fraction-static (`_handle_gpu_memory_settings`): it leaves room for activations and graphs.

    1.5 MiB a token of chunked prefill, 2 MiB a request of the largest decode graph, 8 MiB a prefill graph (46 to 74 of
    them), 512 MiB and 128 a GPU; at least 10 GiB on a big card.
    """
    chunk, prefill_graphs = (16384, 74) if card.total_mib >= 160 * 1024 else (8192, 58)
    if card.total_mib < 60 * 1024:
        chunk, prefill_graphs = 4096, 46
    reserved = 512 + 1.5 * chunk + 128 * tp + 2 * (graph_max_bs or _default_graph_bs(card, tp)) + 8 * prefill_graphs
    if card.total_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round(1 - reserved / card.total_mib, 3)


def _default_graph_bs(card: Card, tp: int) -> int:
    """The largest decode batch that SGLang captures as a CUDA graph by default; above it steps are launched eagerly."""
    if card.total_mib < 60 * 1024:
        return 32 if tp < 4 else 160
    return 256 if card.total_mib < 160 * 1024 and tp < 4 else 512


def _budget_gib(shape: Shape, card: Card, flags: Flags, tp: int) -> float:
    """GiB of one GPU for states and KV: its share of what was free, less weights (and MTP's)."""
    shape = _as_served(shape, flags)
    graph_bs = int(_number(flags, "cuda-graph-max-bs-decode", _number(flags, "cuda-graph-max-bs", 0)))
    fraction = _number(flags, "mem-fraction-static", 0)
    if not fraction:
        # SGLang takes another 7.5 % off for a vision tower of Qwen's size (`adjust_mem_fraction_for_vlm`).
        fraction = default_mem_fraction(card, tp, graph_bs) * (0.925 if shape.vision_params else 1.0)
    draft = _draft_gib(shape, tp) if _draft_tokens(flags) else 0.0
    budget = card.usable_gib * fraction - shape.weight_bytes / tp / GIB - draft - RUNTIME_GIB
    if budget <= 0:
        raise DoesNotFit(
            f"{shape.name} on {tp} x {card.name}: {shape.weight_bytes / tp / GIB:.1f} GiB of weights a GPU leave none "
            f"of the {card.usable_gib * fraction:.1f} GiB; give a server more GPUs, take FP8 weights or a bigger card"
        )
    return budget


def _draft_gib(shape: Shape, tp: int) -> float:
    # The head comes with its own embedding and output table; SGLang drops them for the model's only after it has sized
    # the KV cache. Its KV (one layer) is not in the budget at all: it comes out of what the fraction leaves free.
    return (shape.mtp_bytes + 2 * shape.table_params * BF16) / tp / GIB + MTP_EXTRA_GIB


def _draft_tokens(flags: Flags) -> int:
    return int(_number(flags, "speculative-num-draft-tokens", 4)) if flags.get("speculative-algorithm") else 0


def _slots_per_request(flags: Flags) -> int:
    if flags.get("disable-radix-cache"):
        return 1
    strategy = str(flags.get(_STRATEGY) or flags.get(_OLD_STRATEGY) or "auto")
    strategy = "extra_buffer" if strategy == "auto" else strategy
    if strategy not in _SLOTS:
        raise SettingsError(f"--{_STRATEGY} {strategy}: known are auto, {', '.join(_SLOTS)}")
    return 4 if strategy == "extra_buffer" and flags.get("disable-overlap-schedule") else _SLOTS[strategy]


def _kv_element_bytes(flags: Flags) -> int:
    return 1 if str(flags.get("kv-cache-dtype", "")).startswith("fp8") else BF16


def _state_dtype(flags: Flags) -> str:
    return str(flags.get("mamba-ssm-dtype") or "")


def plain_names(flags: Flags) -> dict[str, Flag]:
    """Flags under the names that SGLang gives them: config.toml takes other spellings too."""
    return {_plain(name): value for name, value in flags.items()}


def _plain(name: str) -> str:
    """A flag's name as SGLang writes it, without the leading dashes: config.toml takes other spellings too."""
    return name.lstrip("-").replace("_", "-")


def _as_served(shape: Shape, flags: Flags) -> Shape:
    return msgspec.structs.replace(shape, fp8=True) if flags.get("quantization") == "fp8" else shape


def _number(flags: Flags, name: str, default: float) -> float:
    value = flags.get(name)
    if value is None:
        return default
    try:
        return float(value)  # type: ignore[arg-type]  # a list is a TypeError, and told as one
    except (TypeError, ValueError) as error:
        raise SettingsError(f"servers.flags.{name}: a number is needed, got {value!r}") from error


# Speed: a roofline with fitted efficiencies.


def step_time(shape: Shape, card: Card, flags: Flags, running: int, live_tokens: float, tp: int = 1) -> Step:
    """One decode step of `running` requests of `live_tokens` each. With MTP the step also drafts and checks drafts."""
    shape = _as_served(shape, flags)
    draft_tokens = _draft_tokens(flags)
    checked = running * max(1, draft_tokens)
    # A state is read and written once; with MTP read once, written for each draft, and the accepted one copied.
    state_moves = 3 + draft_tokens if draft_tokens else 2
    state = shape.state_bytes(tp, _state_dtype(flags))
    drafting = MTP_STEPS * (shape.mtp_bytes + shape.table_params * BF16) / tp if draft_tokens else 0.0
    link_seconds = 0.0
    if tp > 1:
        reduced = checked * shape.hidden * BF16 * 2 * (tp - 1) / tp
        link_seconds = 2 * shape.layers * (ALL_REDUCE_SECONDS[card.nvlink] + reduced / card.link_bytes_per_second)
    millisecond = card.bytes_per_second / 1000
    return Step(
        weights_ms=shape.read_bytes(checked) / tp / (millisecond * WEIGHT_STREAM),
        compute_ms=checked * 2 * shape.active_params / tp / (_flops(shape, card) / 1000 * MATMUL),
        state_ms=running * state_moves * state / (millisecond * REQUEST_STREAM),
        kv_ms=running * live_tokens * shape.kv_bytes(tp, _kv_element_bytes(flags)) / (millisecond * REQUEST_STREAM),
        link_ms=link_seconds * 1000,
        draft_ms=drafting / (millisecond * WEIGHT_STREAM),
    )


def prefill_seconds(shape: Shape, card: Card, tokens: float, tp: int = 1) -> float:
    """Time that reading `tokens` of prompt takes, decoding stopped meanwhile: compute alone, attention left out."""
    return tokens * 2 * (shape.active_params - shape.table_params) / tp / (_flops(shape, card) * MATMUL)


def _flops(shape: Shape, card: Card) -> float:
    return card.fp8_flops if shape.fp8 and card.fp8_flops else card.bf16_flops


# What a person reads.


def contradictions(shape: Shape, card: Card, workload: Workload, chosen: Estimate, in_flight: int = 0) -> list[str]:
    """What in these flags will not do what it seems to ask for; SGLang itself says so in a log line at most."""
    flags, room = chosen.flags, chosen.memory
    found = []
    if in_flight > 1.25 * chosen.running:  # a few more than run keep the server's queue from running dry
        found.append(
            f"{in_flight} in flight at each server, but {chosen.running} run (limited by {chosen.limit}): the others "
            "wait in its queue; change the flags, or set in_flight to 0"
        )
    elif 0 < in_flight < chosen.running:
        found.append(f"{in_flight} in flight leaves a server that runs {chosen.running} short of work: set it to 0")
    longest = workload.prompt_tokens + workload.max_tokens
    context = _number(flags, "context-length", shape.context)
    if workload.max_tokens and longest > min(room.kv_tokens, context):
        found.append(
            f"a prompt and a reply of max_tokens {workload.max_tokens} are {longest:,.0f} tokens, but the context is "
            f"{context:,.0f} and the KV cache {room.kv_tokens:,}: the server refuses them, or never starts them"
        )
    asked = int(_number(flags, "max-running-requests", 0))
    if asked > room.max_running:
        found.append(
            f"--max-running-requests {asked} will be cut to {room.max_running} by {room.limit}"
            + (f": {room.slots} slots, {room.slots_per_request} a request" if shape.linear_layers else "")
        )
    if _draft_tokens(flags) and not asked:
        found.append("with MTP SGLang runs at most 48 requests unless --max-running-requests says otherwise")
    if "max-mamba-cache-size" in flags:
        found.append(f"--max-mamba-cache-size counts state slots, not GiB: here {room.state_gib:.1f} GiB")
    if "mamba-full-memory-ratio" in flags and (
        "max-mamba-cache-size" in flags or (flags.get("disable-radix-cache") and asked)
    ):
        found.append("--mamba-full-memory-ratio has no effect here: the number of slots is set by the other flags")
    if _OLD_STRATEGY in flags:
        found.append(f"--{_OLD_STRATEGY} is called --{_STRATEGY} from SGLang 0.5.14 and refused from 0.5.20")
    if flags.get("disable-radix-cache") and (_STRATEGY in flags or _OLD_STRATEGY in flags):
        found.append(f"--{_STRATEGY} has no effect with --disable-radix-cache")
    graph = int(_number(flags, "cuda-graph-max-bs-decode", _number(flags, "cuda-graph-max-bs", 0)))
    graph = graph or _default_graph_bs(card, chosen.gpus_per_server)
    if chosen.running > graph:
        found.append(f"{chosen.running} run, but decode graphs end at {graph}: set --cuda-graph-max-bs-decode")
    safe = default_mem_fraction(card, chosen.gpus_per_server)
    if _number(flags, "mem-fraction-static", 0) > safe + 0.02:
        found.append(
            f"--mem-fraction-static {flags['mem-fraction-static']} leaves less for activations than SGLang's own "
            f"{safe:.2f}: it may run out of memory under load"
        )
    return found


def cost(tokens: float, tokens_per_second: float, dollars_per_hour: float) -> Cost:
    """Hours and dollars for making `tokens` at a rate, without starting (2 to 4 minutes) and the last replies' tail."""
    hours = tokens / tokens_per_second / 3600
    return Cost(hours, hours * dollars_per_hour, dollars_per_hour / 3600 / tokens_per_second * 1e6)


def parse_offer(text: str) -> tuple[Card, int, float]:
    """ "8xB200@44" as card, GPUs and dollars an hour for the box; "B200" is one at the table's price."""
    rest, _, dollars = text.partition("@")
    count, times, name = rest.partition("x")
    if not (times and count.strip().isdigit()):
        count, name = "1", rest
    card = find_card(name)
    try:
        price = float(dollars.strip().lstrip("$")) if dollars else card.dollars_per_hour * int(count)
    except ValueError as error:
        raise SettingsError(f"offer {text!r}: {dollars!r} is not a price; write it as 8xB200@44") from error
    if int(count) < 1:
        raise SettingsError(f"offer {text!r}: at least one GPU is needed")
    return card, int(count), price


def _costs(workload: Workload, best: Estimate, price: float, measured: float = 0.0) -> tuple[Cost, Cost, Cost]:
    """At the high, the expected and the low rate; thrice the same where the rate was measured."""
    rates = [measured or rate for rate in (best.high, best.tokens_per_second, best.low)]
    fast, likely, slow = (cost(workload.tokens, rate, price) for rate in rates)
    return fast, likely, slow


def _figures(
    shape: Shape,
    card: Card,
    workload: Workload,
    kept: Flags,
    gpus: int,
    chosen: Estimate,
    price: float,
    measured: float,
    costs: tuple[Cost, Cost, Cost],
) -> list[Figure]:
    room, tp, step = chosen.memory, chosen.gpus_per_server, chosen.step
    shape = _as_served(shape, kept)
    dtype, element = _state_dtype(kept), _kv_element_bytes(kept)
    slot, kv = shape.state_bytes(tp, dtype), shape.kv_bytes(tp, element)
    mtp, radix = bool(_draft_tokens(chosen.flags)), not chosen.flags.get("disable-radix-cache")

    def against(tp: int = tp, mtp: bool = mtp, radix: bool = radix) -> str:
        try:
            choice = Choice(mtp=mtp, radix=radix, kept=kept)
            other = suggest(shape, card, workload, choice, gpus=gpus, gpus_per_server=tp)
        except DoesNotFit:
            return "does not fit"
        return f"{other.tokens_per_second:,.0f} tokens/s, {other.running} running"

    figures: list[Figure] = []

    def add(name: str, value: str, why: str) -> None:
        figures.append(Figure(name, value, why))

    bits = "FP8" if shape.fp8 else "BF16"
    add(
        "weights",
        f"{room.weights_gib:.1f} GiB",
        f"a GPU: {shape.params / 1e9:.2f} billion parameters in {bits} over {tp}",
    )
    share = f"{card.usable_gib} GiB usable x --mem-fraction-static {chosen.flags['mem-fraction-static']}"
    draft = f" and {room.draft_gib:.1f} for the MTP head" if mtp else ""
    add("for requests", f"{room.budget_gib:.1f} GiB", f"a GPU: {share}, less weights{draft}")
    heads = max(1, shape.kv_heads // tp)
    add(
        "KV a token",
        f"{kv / 1024:.0f} KiB",
        f"{shape.full_layers} layers x K, V x {heads} heads x {shape.head_dim} x {element} bytes",
    )
    weight = (1 + workload.reply_spread**2) / 2
    add(
        "live length",
        f"{workload.live_tokens:,.0f} tokens",
        f"prompt + {weight:.2f} of a mean reply: long ones run longer",
    )
    if slot:
        heads, per_request = shape.linear_value_heads // tp, room.slots_per_request
        size = f"{shape.linear_layers} layers x {heads} heads x {shape.linear_value_dim} x {shape.linear_key_dim}"
        add(
            "state",
            f"{slot / 2**20:.1f} MiB",
            f"a slot: {size} {dtype or shape.state_dtype}, + convolution; {per_request} a request",
        )
        pool = (room.slots + 1) * slot / GIB + room.intermediate_gib * slot / shape.recurrent_bytes(tp, dtype)
        add("run by states", f"{room.slots // per_request}", f"{room.slots} slots / {per_request}; {pool:.1f} GiB")
        why = "states / KV; it is --mamba-full-memory-ratio with the radix cache, else --max-running-requests sets it"
        add("balanced ratio", f"{pool / room.kv_gib:.2f}", why)
    by_kv = int(room.kv_tokens * KV_FILL / workload.live_tokens)
    add("run by KV", f"{by_kv}", f"{room.kv_tokens:,} tokens x {KV_FILL} (room to grow) / live length")
    why = "--max-running-requests: states and KV run out together" if slot else "--max-running-requests: as KV allows"
    add("running", f"{chosen.running} a server", f"{why}; at most {MAX_RUNNING}")
    why = "data parallel: the model fits on one, nothing waits for a link, a lost GPU stops one server"
    if tp > 1:
        why = "tensor parallel: fewer GPUs a server do not fit, or are slower"
    why = "; ".join([why, *(f"{n} a server: {against(tp=n)}" for n in _sizes(shape, gpus) if n != tp)])
    add("layout", f"{chosen.servers} server(s) of {tp}", why)
    why = "with it a hybrid's request takes 4 state slots, not 1" if slot else "it costs no memory"
    add("radix cache", "on" if radix else "off", f"{why}; the other way: {against(radix=not radix)}")
    if shape.mtp_layers:
        why = f"takes {_draft_gib(shape, tp):.1f} GiB"
        why += f" and {MTP_DRAFT_TOKENS * slot / 2**20:,.0f} MiB of states more a request" if slot else ""
        why += f", gains {MTP_ACCEPTED} tokens a step (assumed)"
        add("MTP", "on" if mtp else "off", f"{why}; the other way: {against(mtp=not mtp)}")
    why = (
        f"the longer of weights {step.weights_ms:.1f} and compute {step.compute_ms:.1f}, + states {step.state_ms:.1f} "
    )
    why += f"+ KV {step.kv_ms:.1f} + links {step.link_ms:.1f} + drafting {step.draft_ms:.1f}"
    add("decode step", f"{chosen.step_ms:.1f} ms", why)
    why = f"a row: prompt x 2 x active parameters at {MATMUL:.0%} of peak FLOPs, + admission; decoding stops meanwhile"
    add("prefill", f"{chosen.prefill_ms_per_row:.1f} ms", why)
    why = f"{chosen.low:,.0f} to {chosen.high:,.0f}: {chosen.servers} server(s) x running / step, less prefill"
    add("tokens/s", f"{measured or chosen.tokens_per_second:,.0f}", "measured, as given" if measured else why)
    fast, likely, slow = costs
    why = (
        f"{workload.rows:,} rows x {workload.reply_tokens:,.0f} tokens: {fast.hours / 24:.2f} to {slow.hours / 24:.2f}"
    )
    add("time", f"{likely.hours:,.1f} h", f"{why} days, without start (2 to 4 minutes) and the last replies' tail")
    add("dollars", f"{likely.dollars:,.0f}", f"{price:g} an hour: {fast.dollars:,.0f} to {slow.dollars:,.0f}")
    add("a million", f"${likely.dollars_per_million:.3f}", "generated tokens")
    return figures


def render(made: Plan) -> Group:
    """The plan for a terminal: numbers with reasons, flags side by side, offers side by side, warnings."""
    figures = Table("", "", "why", box=None, title=f"{made.model} on {made.gpus} x {made.card}", title_justify="left")
    for figure in made.figures:
        figures.add_row(figure.name, Text(figure.value, style="bold"), figure.why)
    flags = Table("flag", "suggested", *(["config"] if made.given else []), box=None)
    given = made.given.flags if made.given else {}
    for name in dict.fromkeys([*made.suggested.flags, *(name for name in given if name in PLANNED)]):
        row = [_flag(made.suggested.flags.get(name)), *([_flag(given.get(name))] if made.given else [])]
        flags.add_row("--" + name, *row)
    both = [made.suggested, *([made.given] if made.given else [])]
    flags.add_row(Text("running a server", style="bold"), *(str(e.running) for e in both))
    flags.add_row(Text("tokens/s", style="bold"), *(f"{e.tokens_per_second:,.0f}" for e in both))
    refused = []
    offers = Table("box", "$/h", "servers", "running", "tokens/s", "hours", "dollars", "$/M tokens", box=None)
    for offer in made.offers:
        name, price = f"{offer.gpus} x {offer.card}", f"{offer.dollars_per_hour:.2f}"
        if offer.estimate is None or offer.costs is None:
            refused.append(Text(f"{name}: {offer.refused}", style="dim"))
            continue
        best, (fast, likely, slow) = offer.estimate, offer.costs
        offers.add_row(
            name,
            price,
            f"{best.servers} of {best.gpus_per_server}",
            f"{best.running}",
            f"{best.tokens_per_second:,.0f} ({best.low:,.0f} to {best.high:,.0f})",
            f"{likely.hours:,.1f} ({fast.hours:,.1f} to {slow.hours:,.1f})",
            f"{likely.dollars:,.0f} ({fast.dollars:,.0f} to {slow.dollars:,.0f})",
            f"{likely.dollars_per_million:.3f}",
        )
    warnings = [Text(f"warning: {line}", style="yellow") for line in made.warnings]
    return Group(figures, "", flags, "", offers, *refused, *warnings)


def _flag(value: Flag | None) -> str:
    return "" if value is None else "yes" if value is True else str(value)


def write_config(path: Path, flags: Flags, gpus_per_server: int = 1) -> None:
    """Put a plan's flags into an existing config.toml, comments kept; other PLANNED flags are taken out.

    Written whole or not at all. Raises SettingsError where the file cannot be read, written, or would not be valid.
    """
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
        servers = document.setdefault("servers", tomlkit.table())
        table = servers.setdefault("flags", tomlkit.table())
        if not isinstance(servers, AbstractTable) or not isinstance(table, AbstractTable):
            raise SettingsError(f"{path}: servers and servers.flags must be tables")
        for name in [name for name in table if _plain(name) in PLANNED and name not in flags]:
            del table[name]
        for name, value in flags.items():
            table[name] = value
        servers["gpus_per_server"] = gpus_per_server
        text = tomlkit.dumps(document)
        settings_from(tomllib.loads(text), str(path))
        target = path.resolve()  # a link stays one
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(beside, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            kept = target.stat()  # root may write it for a service of another group
            with contextlib.suppress(PermissionError):
                os.chown(beside, kept.st_uid, kept.st_gid)
            os.chmod(beside, kept.st_mode)
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be rewritten: {error.strerror}") from error
    except (tomlkit.exceptions.ParseError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from error
