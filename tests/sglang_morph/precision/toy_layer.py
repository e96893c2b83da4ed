"""One Llama decoder layer in a few lines of torch, for asking what changed weights compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from sglang_morph.precision.quantizers.layer import LayerWeights

HIDDEN, INNER, HEAD = 64, 96, 16
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def random_layer(kv_heads: int, dtype: torch.dtype = torch.float32) -> LayerWeights:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = {
        "self_attn.qkv_proj": (HIDDEN + 2 * kv_heads * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_up_proj": (2 * INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return LayerWeights(
        {
            path: (torch.randn(shape, generator=generator) * 0.1).to(dtype)
            for path, shape in shapes.items()
        },
        {path: (1 + torch.rand(HIDDEN, generator=generator)).to(dtype) for path in norms},
    )


def random_hidden(tokens: int = 96) -> torch.Tensor:
    """`[T, HIDDEN]` with a few channels that are much larger, as in real models."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    hidden[:, ::16] *= 20
    return hidden


def run(
    weights: Mapping[str, torch.Tensor], hidden: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The layer's output `[T, HIDDEN]`, and what each linear read; `weights` by path, and norms."""
    read: dict[str, torch.Tensor] = {}

    def apply(path: str, x: torch.Tensor) -> torch.Tensor:
        read[path] = x
        return linear(x, weights[path].float())

    def norm(path: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (HIDDEN,), weights[path].float(), 1e-5)

    qkv = apply("self_attn.qkv_proj", norm("input_layernorm", hidden))
    heads = qkv.view(len(hidden), -1, HEAD).transpose(0, 1)
    kv_heads = (len(heads) - HIDDEN // HEAD) // 2
    q, k, v = heads.split((HIDDEN // HEAD, kv_heads, kv_heads))
    attended = scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), is_causal=True, enable_gqa=True
    )[0]
    hidden = hidden + apply("self_attn.o_proj", attended.transpose(0, 1).flatten(1))
    gate, up = apply("mlp.gate_up_proj", norm("post_attention_layernorm", hidden)).chunk(2, dim=-1)
    return hidden + apply("mlp.down_proj", silu(gate) * up), read


def unrounded(layer: LayerWeights) -> dict[str, torch.Tensor]:
    return {**layer.linears, **layer.norms}
