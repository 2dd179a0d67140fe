"""The plan agrees with what real servers reported, and with itself."""

import io
import json
import tomllib

import msgspec
import pytest
from rich.console import Console

from gend import plan as plans
from gend.cards import CARDS, find_card
from gend.errors import SettingsError
from gend.model_shapes import SHIPPED, from_config, shape_of
from gend.plan import GIB, DoesNotFit, Workload, contradictions, estimate, memory, plan, step_time, suggest

Q27, H200 = shape_of("Qwen/Qwen3.6-27B"), find_card("NVIDIA H200")
THINKING = Workload(rows=914_000, prompt_tokens=150, reply_tokens=2500)

ORIGINAL_FLAGS = {
    "mem-fraction-static": 0.90,
    "mamba-scheduler-strategy": "extra_buffer",
    "max-mamba-cache-size": 80,
    "mamba-full-memory-ratio": 0.4,
    "speculative-algorithm": "EAGLE",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
RADIX_FLAGS = {
    "mem-fraction-static": 0.85,
    "mamba-scheduler-strategy": "extra_buffer",
    "mamba-full-memory-ratio": 0.4,
    "max-running-requests": 256,
}
NO_RADIX_FLAGS = {
    "mem-fraction-static": 0.88,
    "disable-radix-cache": True,
    "mamba-full-memory-ratio": 4,
    "max-running-requests": 384,
}
NO_RADIX_MTP_FLAGS = {
    "mem-fraction-static": 0.90,
    "disable-radix-cache": True,
    "mamba-full-memory-ratio": 6,
    "max-running-requests": 64,
    "speculative-algorithm": "EAGLE",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
# What SGLang 0.5.17 logged on one H200: running, slots, ssm state GB, MTP intermediate GB, KV tokens.
MEASURED = [
    pytest.param(ORIGINAL_FLAGS, 16, 80, 11.39, 9.56, 751_248, id="original-plan-fits-MTP_EXTRA_GIB"),
    pytest.param(RADIX_FLAGS, 26, 133, 18.84, 0, 788_193, id="radix-fits-usable_gib"),
    pytest.param(NO_RADIX_FLAGS, 384, 384, 54.14, 0, 267_011, id="no-radix-fits-usable_gib"),
    pytest.param(NO_RADIX_MTP_FLAGS, 64, 64, 9.14, 36.56, 337_824, id="no-radix-mtp-held-out"),
]


@pytest.mark.parametrize(("flags", "running", "slots", "state", "intermediate", "kv_tokens"), MEASURED)
def test_memory_agrees_with_measured_servers(flags, running, slots, state, intermediate, kv_tokens):
    room = memory(Q27, H200, flags)
    assert (room.max_running, room.slots) == (running, slots)
    assert room.state_gib == pytest.approx(state, rel=0.03)
    assert room.intermediate_gib == pytest.approx(intermediate, rel=0.03)
    assert room.kv_tokens == pytest.approx(kv_tokens, rel=0.03)


@pytest.mark.parametrize("left_out", range(3))
def test_memory_of_a_server_follows_from_the_two_others(left_out):
    """fraction x usable - weights - runtime = states + KV, two unknowns: fitted without one server, it is predicted."""
    slot = Q27.state_bytes() / GIB
    servers = [  # fraction, weights GiB, states GiB, KV bytes a token, KV tokens; the third is a 0.6B (377,511 tokens)
        (0.85, Q27.weight_bytes / GIB, 134 * slot, Q27.kv_bytes(), 788_193),
        (0.88, Q27.weight_bytes / GIB, 385 * slot, Q27.kv_bytes(), 267_011),
        (0.30, 1.367, 0.0, shape_of("Qwen3-0.6B").kv_bytes(), 377_511),
    ]
    fraction, weights, states, kv_bytes, kv_tokens = servers.pop(left_out)
    (f1, sum1), (f2, sum2) = [(f, w + s + b * t / GIB) for f, w, s, b, t in servers]
    usable = (sum1 - sum2) / (f1 - f2)
    runtime = f1 * usable - sum1
    predicted = (fraction * usable - runtime - weights - states) * GIB / kv_bytes
    assert predicted == pytest.approx(kv_tokens, rel=0.03)
    assert usable == pytest.approx(H200.usable_gib, rel=0.01)


def test_memory_agrees_with_a_public_log_of_another_card_and_model():
    """Qwen3-8B on a B200 without flags (April 2026): 15.28 GB of weights, 992,896 tokens."""
    room = memory(shape_of("Qwen3-8B"), find_card("B200"), {})
    assert room.weights_gib == pytest.approx(15.28, rel=0.01)
    assert room.kv_tokens == pytest.approx(992_896, rel=0.01)


@pytest.mark.parametrize(("running", "ms"), [(8, 13.6), (24, 18.0), (64, 24.4), (128, 34.2), (184, 42.3), (232, 52.2)])
def test_step_time_agrees_with_measured_steps(running, ms):
    step = step_time(Q27, H200, NO_RADIX_FLAGS, running, plans.MEASURED_LIVE_TOKENS)
    assert step.total_ms == pytest.approx(ms, rel=0.15)
    if running in (8, 128):  # what the two efficiencies were fitted on; the others are held out
        assert step.total_ms == pytest.approx(ms, rel=0.005)


def test_rate_with_radix_cache_covers_what_was_seen():
    guess = estimate(Q27, H200, Workload(rows=10_000, prompt_tokens=100, reply_tokens=1000), RADIX_FLAGS)
    assert guess.running == 26
    assert guess.low < 730 < guess.high


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        (RADIX_FLAGS, 1123),
        ({"max-running-requests": 255}, 3344),
        ({"max-running-requests": 332}, 3358),
        ({"max-running-requests": 431}, 3147),
    ],
    ids=["original flags", "255", "332", "431"],
)
def test_rates_agree_with_those_of_a_tuned_server(flags, rate):
    """`gend tune` on one H200: prompts of 97 tokens, every reply cut at 768."""
    work = Workload(rows=10_000, prompt_tokens=97, reply_tokens=768, reply_spread=0.0)
    flags = {"mem-fraction-static": 0.9, "disable-radix-cache": True, **flags} if len(flags) == 1 else flags
    assert estimate(Q27, H200, work, flags).tokens_per_second == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-0.6B", 0.596, None),
        ("Qwen3-8B", 8.19, None),
        ("Qwen3-32B", 32.76, None),
        ("Qwen3-30B-A3B", 30.53, 3.3),
        ("Qwen3.6-27B", 27.4, None),
        ("Qwen3.6-35B-A3B", 35.1, 3.0),
        ("Llama-3.1-8B-Instruct", 8.03, None),
        ("Llama-3.3-70B-Instruct", 70.55, None),
    ],
)
def test_parameters_add_up_to_what_the_model_card_says(name, billions, active):
    shape = shape_of(name)
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.01)
    if active:
        assert (shape.active_params + shape.table_params) / 1e9 == pytest.approx(active, rel=0.2)


def test_arithmetic_of_the_original_plan():
    tokens = THINKING.tokens
    assert plans.cost(tokens, 1600, 44).hours / 24 == pytest.approx(16.5, abs=0.05)
    assert plans.cost(tokens, 15_000, 44).hours / 24 == pytest.approx(1.76, abs=0.01)
    assert plans.cost(tokens, 25_000, 44).hours / 24 == pytest.approx(1.06, abs=0.01)
    assert plans.parse_offer("8xB200")[2] == plans.parse_offer("8 x B200 @ $44")[2] == 44
    made = plan(model="Qwen3.6-27B", card="B200", gpus=8, workload=THINKING, tokens_per_second=25_000)
    assert made.offers[0].costs[1].dollars == pytest.approx(1117, abs=1)
    assert made.offers[0].costs[1].dollars_per_million == pytest.approx(44 / 3600 / 25_000 * 1e6)


def test_warns_that_the_original_plan_runs_16_of_80():
    made = plan(model="Qwen3.6-27B", card="H200", workload=THINKING, flags=ORIGINAL_FLAGS, in_flight=80)
    assert made.given.running == 16
    assert made.suggested.running > 10 * made.given.running
    text = "\n".join(made.warnings)
    assert "80 in flight at each server, but 16 run (limited by the state slots)" in text
    assert "counts state slots, not GiB" in text
    assert "refused from 0.5.20" in text


def test_warns_of_a_limit_that_is_cut_silently():
    made = plan(model="Qwen3.6-27B", card="H200", workload=THINKING, flags=RADIX_FLAGS)
    assert any("--max-running-requests 256 will be cut to 26 by the state slots" in line for line in made.warnings)


def test_warns_of_replies_that_no_context_holds():
    long = msgspec.structs.replace(THINKING, max_tokens=50_000)
    made = plan(model="Qwen3-8B", card="H200", workload=long)
    assert any("max_tokens 50000" in line and "context is 40,960" in line for line in made.warnings)


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_suggested_flags_are_balanced_and_without_contradiction(card, name, mtp, radix):
    """As many slots as the KV holds requests: in what SGLang allocates for these flags no further request would fit."""
    shape = shape_of(name)
    if mtp and not shape.mtp_layers:
        with pytest.raises(SettingsError, match="no MTP layer"):
            suggest(shape, card, THINKING, plans.Choice(mtp=True))
        return
    try:
        best = suggest(shape, card, THINKING, plans.Choice(mtp=mtp, radix=radix), gpus=8)
    except DoesNotFit:
        return
    asked, room, tp = best.flags["max-running-requests"], best.memory, best.gpus_per_server
    assert asked - 1 <= best.running <= asked
    kv = THINKING.live_tokens / plans.KV_FILL * shape.kv_bytes(tp) / GIB
    states = (room.slots_per_request + (plans.MTP_DRAFT_TOKENS if mtp else 0)) * shape.state_bytes(tp) / GIB
    if asked < plans.MAX_RUNNING:
        assert room.kv_gib - asked * kv < 1.1 * (kv + states), "one more request would fit"
    assert contradictions(shape, card, THINKING, best) == []


def test_layout_is_data_parallel_where_the_model_fits_on_one_gpu():
    assert suggest(Q27, find_card("B200"), THINKING, gpus=8).gpus_per_server == 1
    assert suggest(shape_of("Llama-3.3-70B-Instruct"), H200, THINKING, gpus=8).gpus_per_server == 2
    with pytest.raises(DoesNotFit, match="weights a GPU leave none") as refused:
        suggest(shape_of("Llama-3.3-70B-Instruct"), find_card("H100"), THINKING)
    assert refused.value.exit_code == 2


def test_flags_that_are_no_plans_business_are_kept_and_counted():
    fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", "max-mamba-cache-size": 80}
    made = plan(model="Qwen3.6-27B", card="H200", workload=THINKING, flags=fp8)
    bf16 = plan(model="Qwen3.6-27B", card="H200", workload=THINKING)
    assert made.suggested.flags["kv-cache-dtype"] == "fp8_e4m3"
    assert "max-mamba-cache-size" not in made.suggested.flags
    assert made.suggested.memory.weights_gib < 0.6 * bf16.suggested.memory.weights_gib
    assert made.suggested.running > 1.5 * bf16.suggested.running
    assert shape_of("Qwen/Qwen3.6-27B-FP8").fp8


def test_reads_a_local_config(tmp_path):
    config = SHIPPED["Qwen3.6-27B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert msgspec.structs.replace(shape_of(str(tmp_path)), name=Q27.name) == Q27
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(64)]
    named = {**config, "text_config": {**config["text_config"], "layer_types": kinds}}
    assert from_config(named, Q27.name) == Q27


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_refuses_by_name_what_is_not_modelled(change, reason):
    config = {key: value for key, value in (SHIPPED["Qwen3-8B"] | change).items() if value is not None}
    with pytest.raises(SettingsError, match=reason):
        from_config(config, "x")


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("rtx-pro-6000", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
    ],
)
def test_finds_a_card_as_the_driver_writes_it(written, card):
    assert find_card(written).name == card


@pytest.mark.parametrize("other", ["H100 PCIe", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB", "H100 NVL", ""])
def test_takes_no_card_for_another(other):
    with pytest.raises(SettingsError, match="known are B200"):
        find_card(other)


def test_every_card_says_where_its_numbers_are_from():
    told = {"total_mib", "usable_gib", "bytes_per_second", "flops", "link", "dollars_per_hour"}
    assert all(set(card.sources) == told and all(card.sources.values()) for card in CARDS)


def test_plan_is_json_and_text():
    offers = ["8xB200@44", "4xH200", "L40S@0.8"]
    made = plan(model="Qwen3.6-27B", card="B200", gpus=8, workload=THINKING, flags=RADIX_FLAGS, offers=offers)
    read = json.loads(msgspec.json.encode(made))
    assert [(box["card"], box["gpus"]) for box in read["offers"]] == [("B200", 8), ("H200", 4), ("L40S", 1)], (
        "the box itself first, and not again as an offer"
    )
    assert "take FP8 weights" in read["offers"][2]["refused"]
    out = io.StringIO()
    Console(file=out, width=250).print(plans.render(made))
    assert all(figure.name in out.getvalue() and figure.why for figure in made.figures)
    assert "--disable-radix-cache" in out.getvalue()


CONFIG = """\
# our box
[servers]
gpus = "all"      # every one
gpus_per_server = 2  # was needed once
{table}
max-mamba-cache-size = 80    # gigabytes, we thought
mamba_scheduler_strategy = "extra_buffer"
log-level = "info"           # ours
[cost]
dollars_per_hour = 44.0
"""


def test_writes_flags_into_a_config_and_keeps_the_rest(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(table="[servers.flags]  # SGLang's"))
    path.chmod(0o600)
    plans.write_config(path, {"max-running-requests": 341, "disable-radix-cache": True})
    text = path.read_text()
    assert tomllib.loads(text) == {
        "servers": {
            "gpus": "all",
            "gpus_per_server": 1,
            "flags": {"log-level": "info", "max-running-requests": 341, "disable-radix-cache": True},
        },
        "cost": {"dollars_per_hour": 44.0},
    }
    for comment in ("# our box", "# every one", "# was needed once", "# SGLang's", "# ours"):
        assert comment in text
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_writes_flags_into_an_inline_table_or_none(tmp_path):
    for before in ("[servers]\nflags = { }   # added\nbase_port = 30000\n", "[servers]\nbase_port = 30000\n", ""):
        path = tmp_path / "config.toml"
        path.write_text(before)
        plans.write_config(path, {"mem-fraction-static": 0.85})
        assert tomllib.loads(path.read_text())["servers"]["flags"] == {"mem-fraction-static": 0.85}


def test_leaves_a_config_alone_that_is_not_valid(tmp_path):
    path = tmp_path / "config.toml"
    for before, reason in (("[servers]\nflags = 3\n", "flags"), ("[servrs]\n", "servrs"), ("[", "not TOML")):
        path.write_text(before)
        with pytest.raises(SettingsError, match=reason):
            plans.write_config(path, {"mem-fraction-static": 0.85})
        assert path.read_text() == before
    with pytest.raises(SettingsError, match="cannot be rewritten"):
        plans.write_config(tmp_path / "missing.toml", {})
