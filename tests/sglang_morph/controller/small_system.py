"""A whole elastic memory system at toy size, of real parts: backend, pool, allocator, SGLang's
radix cache, request table and requests. No scheduler and no model.

A token's KV page holds a value computed from the token and its position, so a page that was lost,
doubled or overwritten shows up as wrong bytes.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import Range, Req, ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from memory_backends.base import FULL, MemoryBackend, TensorMap
from memory_backends.kv_pool import ElasticMHATokenToKVPool, page_bytes
from memory_backends.layer_swap import LayerSwapBackend
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator
from sglang_morph.controller.commands import Command, CommandKind
from sglang_morph.controller.executor import Executor
from sglang_morph.controller.outcome import Outcome
from sglang_morph.controller.reclaim import PageTables, requests_with_kv

KV_LAYERS, HEADS, DIM = 2, 1, 4
PAGE_BYTES = page_bytes(KV_LAYERS, HEADS, DIM, DIM, torch.float32)
SHRINK = {"half": 2, "quarter": 4}
CONTEXT = 64


class ToyLayer:
    """A `MorphableLayer` whose variants are shorter byte strings; it remembers what was bound."""

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        generator = torch.Generator().manual_seed(index)
        self.original = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        self.variant = FULL
        self.bound: TensorMap = {"weight": self.original.clone()}

    def full_tensors(self) -> TensorMap:
        return self.bound

    def variant_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        return {"codes": self.expected(variant)}

    def is_derived(self, variant: str) -> bool:
        return False

    def is_lossless(self, variant: str) -> bool:
        return False

    def bind(self, variant: str, tensors: TensorMap) -> None:
        self.variant, self.bound = variant, tensors

    def current(self) -> torch.Tensor:
        """What it computes with."""
        (tensor,) = self.bound.values()
        return tensor

    def expected(self, variant: str) -> torch.Tensor:
        """What the bound tensor must hold."""
        if variant == FULL:
            return self.original
        return self.original[: len(self.original) // SHRINK[variant]] ^ SHRINK[variant]


class NestedToyLayer(ToyLayer):
    """`half` is derived and lossless: every other byte; the rest is the residual."""

    def is_derived(self, variant: str) -> bool:
        return variant == "half"

    def is_lossless(self, variant: str) -> bool:
        return variant == "half"

    def derived_like(self, variant: str) -> TensorMap:
        return {"codes": self.original[::2].to("meta")}

    def derive(self, variant: str, full: TensorMap, out: TensorMap) -> None:
        out["codes"].copy_(full["weight"][::2])

    def residual_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        return {"lower": full["weight"][1::2]}

    def rebuild(
        self,
        variant: str,
        tensors: TensorMap,
        residual: TensorMap,
        out: TensorMap,
        spare: torch.Tensor,
    ) -> None:
        lower = spare[: len(residual["lower"])].copy_(residual["lower"])
        out["weight"][::2] = tensors["codes"]
        out["weight"][1::2] = lower

    def expected(self, variant: str) -> torch.Tensor:
        return self.original[::2] if variant == "half" else super().expected(variant)


class HalvesToyLayer(ToyLayer):
    """`half` is the first half of the weights, and the second half is the residual."""

    def is_derived(self, variant: str) -> bool:
        return True

    def is_lossless(self, variant: str) -> bool:
        return True

    def derived_like(self, variant: str) -> TensorMap:
        return {"codes": self.expected("half").to("meta")}

    def derive(self, variant: str, full: TensorMap, out: TensorMap) -> None:
        out["codes"].copy_(full["weight"][: len(out["codes"])])

    def residual_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        return {"lower": full["weight"][len(full["weight"]) // 2 :]}

    def rebuild(
        self,
        variant: str,
        tensors: TensorMap,
        residual: TensorMap,
        out: TensorMap,
        spare: torch.Tensor,
    ) -> None:
        lower = spare[: len(residual["lower"])].copy_(residual["lower"])
        torch.cat((tensors["codes"], lower), out=out["weight"])

    def prepare_merged(self, variant: str) -> int:
        return len(self.original)

    def bind_merged(
        self, variant: str, tensors: TensorMap, residual: TensorMap, scratch: torch.Tensor
    ) -> None:
        self.bind(FULL, {**tensors, **residual})
        self._scratch = scratch

    def current(self) -> torch.Tensor:
        if len(self.bound) == 1:
            return super().current()
        out = {"weight": self._scratch[: len(self.original)]}
        self.rebuild("half", self.bound, self.bound, out, torch.empty_like(self.original))
        return out["weight"]

    def expected(self, variant: str) -> torch.Tensor:
        return self.original[: len(self.original) // (1 if variant == FULL else 2)]


class SmallSystem:
    """`layers` slabs of `slab_bytes`; plan: all layers to `half`, then all to `quarter`.

    With `dim` a page has `16 * dim` bytes.
    """

    def __init__(
        self,
        base: int = 24,
        layers: int = 4,
        slab_bytes: int = 1800,
        layer_type: type[ToyLayer] = ToyLayer,
        backend: MemoryBackend | None = None,
        variants: tuple[str, ...] = tuple(SHRINK),
        dim: int = DIM,
    ) -> None:
        steps = [SimpleNamespace(layer=i, variant=v) for v in variants for i in range(layers)]
        self.layers = [layer_type(i, slab_bytes) for i in range(layers)]
        self.backend = backend or LayerSwapBackend()
        self.backend.adopt_weights(self.layers, steps, torch.device("cpu"))
        self.page_bytes = page_bytes(KV_LAYERS, HEADS, dim, dim, torch.float32)
        self.backend.allocate(base + 1, self.page_bytes)
        self.pool = ElasticMHATokenToKVPool(
            base,
            storage=self.backend.kv_storage,
            page_bytes=self.page_bytes,
            page_size=1,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=dim,
            layer_num=KV_LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = ElasticTokenToKVPoolAllocator(base, torch.float32, "cpu", self.pool, False)
        self.req_to_token = ReqToTokenPool(16, CONTEXT, "cpu", False)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.req_to_token,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
            )
        )
        self.published = base
        levels = sorted({0, 1, 2, layers, len(steps)})
        plan = SimpleNamespace(levels=tuple(levels))
        self.executor = Executor(
            self.backend,
            plan,
            self.allocator,
            self.pool,
            publish=self._publish,
            order=lambda: None,
            tables=self.tables,
            reserve=lambda: self.reserve,
        )
        self.reserve = 0
        self.top_level = len(plan.levels) - 1
        self.requests: list[Req] = []
        self._serial = 0
        self._revision = 0

    def _publish(self, pages: int) -> None:
        self.published = pages

    def tables(self) -> PageTables:
        return PageTables(
            allocator=self.allocator,
            pool=self.pool,
            tree_cache=self.tree,
            req_to_token_pool=self.req_to_token,
            requests=requests_with_kv([self.requests]),
            chunked=None,
        )

    # What a controller does

    def move(self, level: int) -> Outcome:
        """Go to `level`, or begin to."""
        kind: CommandKind = "lower" if level > self.executor.target_level else "withdraw"
        outcome = self.executor.execute(Command(kind, level, self._next_revision(), "a test"))
        assert outcome is not None
        return outcome

    def advance(self) -> Outcome | None:
        """Continue a restore by one level, if one is under way and its weights are at hand."""
        readiness = self.executor.readiness()
        if readiness is None or not readiness.ready:
            return None
        return self.executor.execute(
            Command("commit", readiness.level, readiness.revision, "a test")
        )

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    # What a scheduler does with requests

    def admit(self, tokens: list[int]) -> Req | None:
        """Match the cached prefix, allocate the rest, write its KV, put it into the cache."""
        self._serial += 1
        req = Req(str(self._serial), "", array("q", tokens), SamplingParams(max_new_tokens=8))
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens[:-1]))))
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.cache_protected_len = len(req.prefix_indices)
        self.tree.inc_lock_ref(req.last_node)
        pages = self._allocate(len(tokens) - len(req.prefix_indices))
        if pages is None:
            self.tree.dec_lock_ref(req.last_node)
            return None
        self.req_to_token.alloc([req])
        req._refresh_fill_ids()
        req.extend_range = Range(len(req.prefix_indices), len(tokens))
        req.kv = ReqKvInfo(kv_allocated_len=len(tokens), swa_evicted_seqlen=0)
        req.kv_committed_len = len(tokens)
        row = self.req_to_token.req_to_token[req.req_pool_idx]
        row[: len(tokens)] = torch.cat((req.prefix_indices, pages)).to(torch.int32)
        self._write(pages, tokens, len(req.prefix_indices))
        self.requests.append(req)
        self.tree.cache_unfinished_req(req)
        return req

    def decode(self, req: Req, token: int) -> bool:
        """Append one token and its page; False where no page is left."""
        length = req.kv.kv_allocated_len
        pages = self._allocate(1)
        if pages is None:
            return False
        req.output_ids.append(token)
        self.req_to_token.req_to_token[req.req_pool_idx, length] = pages[0].to(torch.int32)
        self._write(pages, [*req.origin_input_ids, *req.output_ids], length)
        req.kv.kv_allocated_len = req.kv_committed_len = length + 1
        return True

    def finish(self, req: Req, insert: bool) -> None:
        self.requests.remove(req)
        self.tree.cache_finished_req(req, insert, kv_len_to_handle=req.kv.kv_allocated_len)
        self.req_to_token.free(req)
        req.kv = None

    def flush(self) -> None:
        """SGLang's flush_cache, which it allows only while no request is alive."""
        self.tree.reset()
        self.req_to_token.clear()
        self.allocator.clear()

    def _allocate(self, number: int) -> torch.Tensor | None:
        missing = number - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        return self.allocator.alloc(number)

    def _write(self, pages: torch.Tensor, tokens: list[int], start: int) -> None:
        for layer in range(KV_LAYERS):
            values = self._kv(tokens[start:], start, layer)
            self.pool.k_buffer[layer][pages] = values
            self.pool.v_buffer[layer][pages] = -values

    # What must always hold

    def check(self) -> None:
        self._check_pages()
        self._check_kv()
        self._check_weights()

    def _existing(self) -> list[int]:
        ids = list(range(1, self.allocator.base_size + 1))
        return ids + [i for r in self.allocator.lent for i in range(r.start, r.stop)]

    def _check_pages(self) -> None:
        allocator, tree = self.allocator, self.tree
        free = torch.cat((allocator.free_pages, allocator.release_pages)).tolist()
        cached = tree.all_values_flatten().tolist() if tree.root_node.children else []
        own = [
            page
            for req in self.requests
            for page in self._row(req)[req.cache_protected_len :].tolist()
        ]
        assert sorted(free + cached + own) == sorted(self._existing())
        assert allocator.size == self.published == len(self._existing())
        accounted = allocator.available_size() + tree.evictable_size() + tree.protected_size()
        assert accounted + len(own) == allocator.size

    def _check_kv(self) -> None:
        for req in self.requests:
            tokens, row = [*req.origin_input_ids, *req.output_ids], self._row(req).long()
            for layer in range(KV_LAYERS):
                expected = self._kv(tokens, 0, layer)
                assert torch.equal(self.pool.k_buffer[layer][row], expected)
                assert torch.equal(self.pool.v_buffer[layer][row], -expected)

    def _check_weights(self) -> None:
        for layer in self.layers:
            assert torch.equal(layer.current(), layer.expected(layer.variant)), layer.index

    def _row(self, req: Req) -> torch.Tensor:
        return self.req_to_token.req_to_token[req.req_pool_idx, : req.kv.kv_allocated_len]

    def _kv(self, tokens: list[int], start: int, layer: int) -> torch.Tensor:
        """Pages' content: distinct for every (token, position, layer)."""
        numbers = [t * 10_000 + (start + i) * 10 + layer + 1 for i, t in enumerate(tokens)]
        shape = (len(tokens), HEADS, self.pool.head_dim)
        return torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(shape)
