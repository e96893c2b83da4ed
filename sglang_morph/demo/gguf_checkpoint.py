"""Turn a Llama GGUF file into an ordinary Hugging Face checkpoint (float16 safetensors)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file

Metadata = dict[str, Any]
Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.weight")


class UnsupportedGguf(ValueError):
    """The file is not a Llama model with a byte-level BPE tokenizer."""


def convert_gguf(source: Path, target: Path, progress: Progress = lambda done, total: None) -> None:
    """Write config, tokenizer and weights of `source` into the existing folder `target`.

    Raises `UnsupportedGguf`.
    """
    reader = GGUFReader(source)
    metadata: Metadata = {name: field.contents() for name, field in reader.fields.items()}
    _require(metadata, "general.architecture", "llama")
    _require(metadata, "tokenizer.ggml.model", "gpt2")

    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(target / "config.json", _config(metadata, tied))
    _write_json(target / "generation_config.json", _special_ids(metadata))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(metadata))
    _write_json(target / "tokenizer.json", _tokenizer(metadata))
    template = metadata["tokenizer.chat_template"]
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")

    weights: dict[str, npt.NDArray[np.float16]] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        weights[_checkpoint_name(tensor.name)] = _restore_rotary(tensor.name, values, metadata)
        progress(len(weights), len(reader.tensors))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _require(metadata: Metadata, key: str, wanted: str) -> None:
    found = metadata.get(key)
    if found != wanted:
        raise UnsupportedGguf(f"{key} is {found!r}; only {wanted!r} can be converted")


def _write_json(path: Path, content: object) -> None:
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _special_ids(metadata: Metadata) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }


def _config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    hidden = metadata["llama.embedding_length"]
    heads = metadata["llama.attention.head_count"]
    special = _special_ids(metadata)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata["llama.rope.freq_base"],
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", special["eos_token_id"]),
        **special,
    }


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    special = _special_ids(metadata)
    eos = tokens[special["eos_token_id"]]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[special["bos_token_id"]],
        "eos_token": eos,
        "pad_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }


def _tokenizer(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _control_token(index, token)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == TokenType.CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(metadata, {**byte_level, "add_prefix_space": False}),
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def _control_token(index: int, token: str) -> dict[str, Any]:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _pre_tokenizer(metadata: Metadata, byte_level: dict[str, Any]) -> dict[str, Any]:
    if metadata.get("tokenizer.ggml.pre") != "smollm":
        return byte_level
    # This family was trained with every digit as a token of its own.
    digits = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [digits, byte_level]}


def _checkpoint_name(gguf_name: str) -> str:
    if match := _LAYER_NAME.fullmatch(gguf_name):
        part = _LAYER_TENSORS.get(match["part"])
        if part is not None:
            return f"model.layers.{match['layer']}.{part}.weight"
    elif part := _MODEL_TENSORS.get(gguf_name.removesuffix(".weight")):
        return f"{part}.weight"
    raise UnsupportedGguf(f"tensor {gguf_name!r} has no place in a Llama checkpoint")


def _restore_rotary(
    gguf_name: str, values: npt.NDArray[np.float16], metadata: Metadata
) -> npt.NDArray[np.float16]:
    """Undo GGUF's row order of the query and key projections; other tensors pass through.

    GGUF alternates the rows of the two rotary halves of a head; a checkpoint has the first half
    of the rows in front of the second. `values` is `(heads * head_dim, hidden)` for those two.
    """
    heads_key = {
        "attn_q": "llama.attention.head_count",
        "attn_k": "llama.attention.head_count_kv",
    }.get(gguf_name.removesuffix(".weight").rpartition(".")[2])
    if heads_key is None:
        return values
    heads, hidden = metadata[heads_key], values.shape[1]
    halves = values.reshape(heads, -1, 2, hidden).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(values.shape))
