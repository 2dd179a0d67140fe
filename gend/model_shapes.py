"""The shape of a model: how many bytes its weights, a token of KV and a request's state take. Pure arithmetic.

Read from a config.json (dense, mixture of experts, hybrid with gated delta-net linear attention), or from the shapes
shipped below for when the model is not here yet. What is not modelled is refused by name, not guessed.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from gend.errors import SettingsError

BF16 = 2
"""Bytes of one bfloat16: weights that are not FP8, the KV cache, the convolution state."""
_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a decoder. Layers are full attention or linear attention; each has a dense or an expert MLP."""

    name: str
    hidden: int
    vocab: int
    full_layers: int
    linear_layers: int = 0
    heads: int
    kv_heads: int
    head_dim: int
    gated_attention: bool = False
    mlp: int
    """Width of a dense MLP; in a mixture of experts, of the layers that have none."""
    dense_layers: int
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0
    state_dtype: str = "float32"
    tied: bool = False
    mtp_layers: int = 0
    vision_params: int = 0
    fp8: bool = False
    context: int = 0

    @property
    def layers(self) -> int:
        return self.full_layers + self.linear_layers

    @property
    def expert_params(self) -> int:
        """Parameters of one expert: gate, up and down."""
        return 3 * self.hidden * self.expert_mlp

    @property
    def _full_layer(self) -> int:
        queries = self.heads * self.head_dim
        # The output gate doubles the query projection (Qwen3-Next, Qwen3.5 and later).
        return self.hidden * (queries * (3 if self.gated_attention else 2) + 2 * self.kv_heads * self.head_dim)

    @property
    def _linear_layer(self) -> int:
        keys = self.linear_key_heads * self.linear_key_dim
        values = self.linear_value_heads * self.linear_value_dim
        # in: q, k, v, z and the two gates a, b; out: one projection; and the depthwise convolution over q, k, v.
        inward = self.hidden * (2 * keys + 2 * values + 2 * self.linear_value_heads)
        return inward + values * self.hidden + (2 * keys + values) * self.linear_conv

    @property
    def shared_params(self) -> int:
        """Parameters that every token of every step goes through, without experts, embedding and head."""
        expert_layers = self.layers - self.dense_layers
        mlp = self.dense_layers * 3 * self.hidden * self.mlp
        mlp += expert_layers * self.hidden * (3 * self.shared_mlp + self.experts)
        return self.full_layers * self._full_layer + self.linear_layers * self._linear_layer + mlp

    @property
    def all_expert_params(self) -> int:
        return (self.layers - self.dense_layers) * self.experts * self.expert_params

    @property
    def table_params(self) -> int:
        """Parameters of the embedding, and as many again in the head unless they are tied."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters that are loaded without MTP (norms left out: below 0.01 %)."""
        tables = self.table_params * (1 if self.tied else 2)
        return self.shared_params + self.all_expert_params + tables + self.vision_params

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with."""
        experts = (self.layers - self.dense_layers) * self.experts_per_token * self.expert_params
        return self.shared_params + experts + self.table_params

    @property
    def layer_bytes_per_param(self) -> int:
        # FP8 checkpoints keep embedding, head and vision in bf16; the block scales are below 0.1 %.
        return 1 if self.fp8 else BF16

    @property
    def weight_bytes(self) -> int:
        tables = self.table_params * (1 if self.tied else 2)
        layers = (self.shared_params + self.all_expert_params) * self.layer_bytes_per_param
        return layers + (tables + self.vision_params) * BF16

    @property
    def mtp_bytes(self) -> int:
        """Weights of the MTP head: its layer and the projection that joins embedding and hidden state."""
        mlp = self.mlp * 3 * self.hidden
        if self.layers > self.dense_layers:
            mlp = self.experts * self.expert_params + self.hidden * (3 * self.shared_mlp + self.experts)
        return self.mtp_layers * (self._full_layer + mlp + 2 * self.hidden**2) * self.layer_bytes_per_param

    def read_bytes(self, tokens: int) -> float:
        """Weight bytes that a step over `tokens` tokens reads: all but the embedding, and of the experts those hit.

        With uniform routing an expert is missed by all tokens with probability (1 - k/E) ** tokens.
        """
        hit = 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        layers = (self.shared_params + hit * self.all_expert_params) * self.layer_bytes_per_param
        return layers + self.table_params * BF16

    def kv_bytes(self, tp: int = 1, kv_element_bytes: int = BF16) -> int:
        """Bytes of one token of KV on one GPU: K and V of each full-attention layer (SGLang's `_compute_cell_size`).

        With more GPUs than KV heads each keeps one head: the cache no longer gets smaller.
        """
        return self.full_layers * 2 * max(1, self.kv_heads // tp) * self.head_dim * kv_element_bytes

    def recurrent_bytes(self, tp: int = 1, dtype: str = "") -> int:
        """The recurrent part of a state slot on one GPU: value heads x value dim x key dim in each linear layer.

        This alone is what SGLang's log calls "ssm_state size". `dtype` is --mamba-ssm-dtype, "" for the config's.
        """
        cells = self.linear_value_heads * self.linear_value_dim * self.linear_key_dim // tp
        return self.linear_layers * cells * _STATE_BYTES[dtype or self.state_dtype]

    def state_bytes(self, tp: int = 1, dtype: str = "") -> int:
        """Bytes of one state slot on one GPU (SGLang's `mamba_cache_per_req`); 0 for a model without linear attention.

        The recurrent state, and the last (kernel - 1) inputs of the convolution over q, k and v, in bf16.
        """
        channels = 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim
        convolution = self.linear_layers * (channels // tp) * max(0, self.linear_conv - 1) * BF16
        return self.recurrent_bytes(tp, dtype) + convolution

    def can_split(self, tp: int) -> bool:
        """Whether SGLang can spread the heads of this model over `tp` GPUs."""
        kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and kv and self.linear_value_heads % tp == 0 and self.linear_key_heads % tp == 0


def shape_of(model: str) -> Shape:
    """The shape of a model: a folder with a config.json, or the name of a shipped one ("Qwen/Qwen3.6-27B", "-FP8" too).

    Raises SettingsError where there is neither, or where the config has parts that are not modelled.
    """
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        try:
            return from_config(json.loads(config.read_bytes()), Path(model).resolve().name)
        except (OSError, ValueError) as error:
            raise SettingsError(f"{config}: cannot be read as JSON: {error}") from error
    name = model.rstrip("/").rsplit("/", 1)[-1]
    plain = re.sub(r"-FP8$", "", name, flags=re.IGNORECASE)
    for known, shipped in SHIPPED.items():
        if known.lower() == plain.lower():
            return msgspec.structs.replace(from_config(shipped, known), name=name, fp8=plain != name)
    raise SettingsError(
        f"model {model!r}: no folder with a config.json, and its shape is not shipped; "
        f"shipped are {', '.join(SHIPPED)}: download the model's config.json and give its folder"
    )


def from_config(config: dict[str, Any], name: str) -> Shape:
    """The shape that a config.json of transformers describes. Raises SettingsError for what is not modelled."""
    text: dict[str, Any] = config.get("text_config") or config
    for key in ("kv_lora_rank", "mamba_num_heads", "mamba_d_state"):
        if text.get(key):
            raise SettingsError(f"{name}: config.json has {key}: latent attention and Mamba-2 are not modelled")
    quantisation = (config.get("quantization_config") or {}).get("quant_method")
    if quantisation not in (None, "fp8"):
        raise SettingsError(f"{name}: quantization {quantisation!r} is not modelled; known are none and fp8")
    try:
        layers = int(text["num_hidden_layers"])
        kinds = text.get("layer_types")
        if kinds is None:
            every = int(text.get("full_attention_interval") or 1)
            kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
        if unknown := set(kinds) - {"full_attention", "linear_attention"}:
            raise SettingsError(f"{name}: layers of type {', '.join(sorted(unknown))} are not modelled")
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        step = int(text.get("decoder_sparse_step") or 1)
        skipped = set(text.get("mlp_only_layers") or [])
        dense = sum(1 for i in range(layers) if not experts or i in skipped or (i + 1) % step)
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        return Shape(
            name=name,
            hidden=hidden,
            vocab=int(text["vocab_size"]),
            full_layers=kinds.count("full_attention"),
            linear_layers=kinds.count("linear_attention"),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            gated_attention=bool(text.get("attn_output_gate", "full_attention_interval" in text)),
            mlp=int(text.get("intermediate_size") or 0),
            dense_layers=dense,
            experts=experts,
            experts_per_token=int(text.get("num_experts_per_tok") or 0),
            expert_mlp=int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0) if experts else 0,
            shared_mlp=int(text.get("shared_expert_intermediate_size") or 0),
            linear_key_heads=int(text.get("linear_num_key_heads") or 0),
            linear_value_heads=int(text.get("linear_num_value_heads") or 0),
            linear_key_dim=int(text.get("linear_key_head_dim") or 0),
            linear_value_dim=int(text.get("linear_value_head_dim") or 0),
            linear_conv=int(text.get("linear_conv_kernel_dim") or 0),
            state_dtype=str(text.get("mamba_ssm_dtype") or "float32"),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            mtp_layers=int(text.get("mtp_num_hidden_layers") or 0),
            vision_params=_vision_params(config.get("vision_config") or {}),
            fp8=quantisation == "fp8",
            context=int(text.get("max_position_embeddings") or 0),
        )
    except KeyError as error:
        raise SettingsError(f"{name}: config.json has no {error.args[0]}: not the config of a decoder") from error


def _vision_params(vision: dict[str, Any]) -> int:
    """Parameters of a Qwen-VL vision tower: it is loaded (0.9 GiB for Qwen3.6-27B) though prompts are text."""
    if not {"depth", "hidden_size", "intermediate_size", "out_hidden_size", "spatial_merge_size"} <= set(vision):
        return 0
    width = int(vision["hidden_size"])
    merged = width * int(vision["spatial_merge_size"]) ** 2
    blocks = int(vision["depth"]) * (4 * width**2 + 2 * width * int(vision["intermediate_size"]))
    return blocks + merged * (merged + int(vision["out_hidden_size"]))


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        **more,
    }


def _qwen3_6(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": hidden,
            "spatial_merge_size": 2,
        },
        "text_config": {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 256,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": value_heads,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
            **more,
        },
    }


_EXPERTS_35B = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

SHIPPED: dict[str, dict[str, Any]] = {
    "Qwen3.6-27B": _qwen3_6(64, 5120, 24, 4, 48, intermediate_size=17408),
    "Qwen3.6-35B-A3B": _qwen3_6(40, 2048, 16, 2, 32, **_EXPERTS_35B),
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64),
    "Qwen3-30B-A3B": _qwen3(
        48, 2048, 6144, 32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "Llama-3.1-8B-Instruct": _qwen3(32, 4096, 14336, 32, vocab_size=128256, max_position_embeddings=131072),
    "Llama-3.3-70B-Instruct": _qwen3(80, 8192, 28672, 64, vocab_size=128256, max_position_embeddings=131072),
}
"""What the models' config.json say, as far as the arithmetic needs it."""
