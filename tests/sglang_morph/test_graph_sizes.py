"""The largest decode graph follows the largest KV cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config

from sglang_morph.server_args import MorphServerArgs, prepare_morph_server_args

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
CARD_MIB = 24 * 1024
H200_MIB = 143771


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def chosen(model: Path, gpu_mib: float, *flags: str, max_bs: int | None = None) -> int | None:
    """The largest decode batch that is captured on a GPU of that size."""
    argv = ["--model-path", str(model), "--device", "cpu", "--dtype", "bfloat16"]
    args: MorphServerArgs = prepare_morph_server_args(argv)
    # As on a GPU, from the step on that asks for its memory; the rest needs none.
    args.__dict__ |= {"device": "cuda", "mem_fraction_static": 0.85, "max_total_tokens": None}
    for flag in flags:
        name, _, value = flag.partition("=")
        args.__dict__[name] = int(value) if value.isdigit() else value
    args.__dict__["cuda_graph_config"] = default_cuda_graph_config()
    args.cuda_graph_config.decode.max_bs = max_bs
    args._handle_gpu_memory_settings(gpu_mib)
    assert max(args.cuda_graph_config.decode.bs) == args.cuda_graph_config.decode.max_bs
    return args.cuda_graph_config.decode.max_bs


def test_it_grows_with_the_room_that_weights_can_make(llama_8b: Path) -> None:
    stock = chosen(llama_8b, CARD_MIB)
    elastic = chosen(llama_8b, CARD_MIB, "memory_backend=layer_swap")
    assert (stock, elastic) == (24, 96)


def test_it_counts_from_the_size_that_is_given(llama_8b: Path) -> None:
    flags = ("memory_backend=layer_swap", "max_total_tokens=20000")
    assert chosen(llama_8b, CARD_MIB, *flags) == 72


def test_a_large_kv_cache_that_grows_little_has_stocks(llama_8b: Path) -> None:
    flags = ("memory_backend=layer_swap", "max_total_tokens=300000")
    assert chosen(llama_8b, CARD_MIB, *flags) == 24


@pytest.mark.parametrize("flags", [(), ("memory_backend=layer_swap",)])
def test_where_memory_is_plenty_it_is_stocks(llama_8b: Path, flags: tuple[str, ...]) -> None:
    assert chosen(llama_8b, H200_MIB, *flags) == 256


def test_what_is_given_stays(llama_8b: Path) -> None:
    assert chosen(llama_8b, CARD_MIB, "memory_backend=layer_swap", max_bs=16) == 16
