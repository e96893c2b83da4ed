"""SGLang's attention backends over the elastic pool give what they give over its own pool.

Both pools hold the same tokens under the same page ids, some of them lent. What lies between them,
and in pages nobody holds, is NaN in the elastic pool, as weights may be. The arithmetic is the
same, so results must be equal bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memory_backends.kv_pool import ElasticMHATokenToKVPool, page_bytes
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator

MODEL = os.environ.get("MORPH_TEST_MODEL")
"""Folder of a Llama checkpoint or configuration."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(MODEL is None, reason="set MORPH_TEST_MODEL to a Llama model's folder"),
]

LAYERS = 3
BASE_PAGES, LENT_PAGES = 400, 900
CONTEXT = 2048
LENGTHS = (700, 33, 1, 257)
"""Tokens of the requests before the step under test: more than one split, and less than a tile."""
NEW = (64, 5, 17, 1)
"""Tokens of each that an extend computes."""

Backend = Any
Build = Callable[[Any], Backend]


def triton(runner: Any) -> Backend:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return TritonAttnBackend(runner)


def flashinfer(runner: Any) -> Backend:
    pytest.importorskip("flashinfer")
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return FlashInferAttnBackend(runner)


def fa3(runner: Any) -> Backend:
    try:
        import sgl_kernel.flash_ops  # noqa: F401
    except ImportError as error:
        pytest.skip(f"FlashAttention 3 is not installed: {error}")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 needs SM90")
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    return FlashAttentionBackend(runner)


@pytest.fixture(scope="module")
def setting() -> Iterator[Any]:
    """What the backends ask of a model runner, but for the pool."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=MODEL, context_length=CONTEXT, attention_backend="triton", dtype="bfloat16"
    )
    publish(server_args, role="scheduler")
    alone = {"attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0}
    alone |= {"tp_size": 1, "tp_rank": 0, "dcp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    table = ReqToTokenPool(len(LENGTHS), CONTEXT, "cuda", enable_memory_saver=False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(BASE_PAGES + LENT_PAGES - 1, generator=generator) + 1
    start = 0
    for row, tokens in enumerate(_lengths_after(), start=1):
        table.req_to_token[row, :tokens] = ids[start : start + tokens].int().cuda()
        start += tokens
    with ExitStack() as stack:
        stack.enter_context(get_parallel().override(**alone))
        yield SimpleNamespace(
            req_to_token_pool=table,
            sliding_window_size=None,
            attention_chunk_size=None,
            page_size=1,
            model_config=server_args.get_model_config(),
            dtype=torch.bfloat16,
            kv_cache_dtype=torch.bfloat16,
            kv_cache_dtype_str="auto",
            device="cuda",
            gpu_id=0,
            server_args=server_args,
            is_draft_worker=False,
            ps=SimpleNamespace(tp_size=1, attn_cp_size=1),
        )


def _is_compiled(name: str) -> bool:
    """Whether FlashInfer has that module for some device and loads it as it is.

    Without the object files it compiles a module of its cache again.
    """
    from flashinfer.jit import env

    cached = env.FLASHINFER_JIT_DIR
    built = any(cached.glob(f"{name}/*.so")) and any(cached.glob(f"{name}/*.o"))
    return built or any(env.FLASHINFER_AOT_DIR.glob(f"{name}/*.so"))


def _lengths_after() -> list[int]:
    return [tokens + new for tokens, new in zip(LENGTHS, NEW, strict=True)]


def _pools(setting: Any) -> tuple[Any, ElasticMHATokenToKVPool]:
    """SGLang's pool and ours, of the same ids; ours full of NaN."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    config = setting.model_config
    heads, dim = config.get_num_kv_heads(1), config.head_dim
    common = {
        "page_size": 1,
        "dtype": torch.bfloat16,
        "head_num": heads,
        "head_dim": dim,
        "layer_num": LAYERS,
        "device": "cuda",
        "enable_memory_saver": False,
    }
    stock = MHATokenToKVPool(BASE_PAGES + LENT_PAGES - 1, **common)
    nbytes = page_bytes(LAYERS, heads, dim, dim, torch.bfloat16)
    storage = torch.full(
        ((BASE_PAGES + LENT_PAGES) * nbytes,), 0xFF, dtype=torch.uint8, device="cuda"
    )
    storage[:nbytes] = 0  # page 0 takes what padding writes
    return stock, ElasticMHATokenToKVPool(
        BASE_PAGES - 1, storage=storage, page_bytes=nbytes, **common
    )


def _runner(setting: Any, pool: Any) -> Any:
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    kind = TokenToKVPoolAllocator
    size = BASE_PAGES + LENT_PAGES - 1
    if isinstance(pool, ElasticMHATokenToKVPool):
        kind, size = ElasticTokenToKVPoolAllocator, BASE_PAGES - 1
    allocator = kind(size, torch.bfloat16, "cuda", pool, False)
    return SimpleNamespace(
        **vars(setting), token_to_kv_pool=pool, token_to_kv_pool_allocator=allocator
    )


def _attention(setting: Any, layer: int) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    config = setting.model_config
    dim = config.head_dim
    return RadixAttention(
        config.num_attention_heads, dim, dim**-0.5, config.get_num_kv_heads(1), layer
    )


def _batch(setting: Any, lengths: list[int], prefixes: list[int] | None) -> Any:
    """A decode step, whose last token of each request is new, or an extend from `prefixes` on."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    rows = torch.arange(1, len(lengths) + 1, device="cuda")
    starts = [length - 1 for length in lengths] if prefixes is None else prefixes
    table = setting.req_to_token_pool.req_to_token
    places = torch.cat(
        [
            table[row, start:length]
            for row, start, length in zip(rows.tolist(), starts, lengths, strict=True)
        ]
    ).long()
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if prefixes is None else ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=torch.zeros(len(places), dtype=torch.int64, device="cuda"),
        req_pool_indices=rows,
        seq_lens=torch.tensor(lengths, device="cuda"),
        out_cache_loc=places,
        seq_lens_sum=sum(lengths),
        seq_lens_cpu=torch.tensor(lengths),
    )
    if prefixes is not None:
        new = [length - prefix for length, prefix in zip(lengths, prefixes, strict=True)]
        batch.extend_num_tokens = sum(new)
        batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32, device="cuda")
        batch.extend_seq_lens_cpu = new
        batch.extend_prefix_lens = torch.tensor(prefixes, dtype=torch.int32, device="cuda")
        batch.extend_prefix_lens_cpu = prefixes
        batch.extend_start_loc = batch.extend_seq_lens.cumsum(0).int() - batch.extend_seq_lens
    return batch


def _random(setting: Any, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k and v as the projections give them: rows of all heads."""
    config = setting.model_config
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = (config.num_attention_heads, *[config.get_num_kv_heads(1)] * 2)
    return tuple(
        torch.randn(tokens, n * config.head_dim, generator=generator, device="cuda").bfloat16()
        for n in heads
    )


def _fill(setting: Any, pool: Any, lengths: list[int]) -> None:
    """Store the KV of the requests' tokens, as a forward would."""
    batch = _batch(setting, lengths, [0] * len(lengths))
    config = setting.model_config
    for layer in range(LAYERS):
        _, k, v = _random(setting, len(batch.out_cache_loc), 100 + layer)
        shape = (-1, config.get_num_kv_heads(1), config.head_dim)
        pool.set_kv_buffer(
            _attention(setting, layer), batch.out_cache_loc, k.view(shape), v.view(shape)
        )


def _outputs(
    setting: Any, build: Build, pool: Any, lengths: list[int], prefixes: list[int] | None
) -> list[torch.Tensor]:
    """What every layer's attention gives for one step, whose own KV it stores."""
    _fill(setting, pool, lengths)
    batch = _batch(setting, lengths, prefixes)
    with torch.inference_mode():
        backend = build(_runner(setting, pool))
        backend.init_forward_metadata(batch)
        found = []
        for layer in range(LAYERS):
            q, k, v = _random(setting, len(batch.out_cache_loc), layer)
            shape = (-1, setting.model_config.get_num_kv_heads(1), setting.model_config.head_dim)
            attention = _attention(setting, layer)
            found.append(backend.forward(q, k.view(shape), v.view(shape), attention, batch))
    torch.cuda.synchronize()
    return found


def _compare(setting: Any, build: Build, lengths: list[int], prefixes: list[int] | None) -> None:
    stock, elastic = _pools(setting)
    expected = _outputs(setting, build, stock, lengths, prefixes)
    found = _outputs(setting, build, elastic, lengths, prefixes)
    for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert bool(theirs.isfinite().all()) and float(theirs.abs().max()) > 0.1
        assert torch.equal(ours, theirs), f"layer {layer}"
    held = _batch(setting, lengths, [0] * len(lengths)).out_cache_loc
    buffers = zip(elastic.k_buffer + elastic.v_buffer, stock.k_buffer + stock.v_buffer, strict=True)
    assert all(torch.equal(ours[held], theirs[held]) for ours, theirs in buffers)


def test_pages_of_the_requests_are_base_and_lent(setting: Any) -> None:
    held = setting.req_to_token_pool.req_to_token.unique()
    assert int((held < BASE_PAGES).sum()) > 100
    assert int((held >= BASE_PAGES).sum()) > 100


@pytest.mark.parametrize("build", [triton, flashinfer, fa3])
def test_decode(setting: Any, build: Build) -> None:
    _compare(setting, build, list(LENGTHS), None)


@pytest.mark.parametrize("build", [triton, flashinfer, fa3])
@pytest.mark.parametrize("prefix", ["cached", "none"])
def test_extend(setting: Any, build: Build, prefix: str) -> None:
    if build is flashinfer:
        pytest.importorskip("flashinfer")
        if not _is_compiled("batch_prefill_with_kv_cache*_sm90"):
            pytest.skip("FlashInfer's prefill is not compiled yet, which takes two minutes")
    if prefix == "cached":
        _compare(setting, build, _lengths_after(), list(LENGTHS))
    else:
        _compare(setting, build, list(NEW), [0] * len(NEW))
