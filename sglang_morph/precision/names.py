"""Names of variants and their order. Imports nothing, so arguments can be checked first."""

from __future__ import annotations

from typing import Final

FULL: Final = "full"
"""The weights as loaded."""

NOMINAL_BITS: Final = {FULL: 16, "nested_fp8": 8, "fp8": 8, "int8": 8, "int4": 4, "int3": 3}
"""Variant -> bits per weight, scales not counted. Gives the order in which a layer may shrink."""

MORPHABLE_LINEARS: Final = (
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
"""Paths inside a decoder layer of Llama, Mistral, Qwen2 and Qwen3, in slab order."""

FUSED: Final = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""SGLang's linear -> those of the checkpoint that it consists of, in the order of their rows."""

NORMS: Final = {
    "self_attn.qkv_proj": "input_layernorm",
    "mlp.gate_up_proj": "post_attention_layernorm",
}
"""Linear -> the norm right before it, which can absorb a scaling of the linear's inputs."""
