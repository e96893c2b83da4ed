"""A Hugging Face model taken apart into its decoder layers, whose weights can be exchanged.

What is measured here must speak for the model as SGLang serves it, so weights go by SGLang's names:
`self_attn.qkv_proj` is q, k and v one below the other, `mlp.gate_up_proj` gate and up. Quantizers
work on single rows, so rows may be joined before and split after without any difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding

from sglang_morph.precision.names import FUSED, MORPHABLE_LINEARS, NORMS
from sglang_morph.preflight import ARCHITECTURES

Weights = Mapping[str, torch.Tensor]
"""Path inside a decoder layer -> weight: the linears' `[N, K]`, the norms' `[K]`."""


class UnsupportedCheckpoint(ValueError):
    """A folder holds no model that can be taken apart. One line with the reason."""


class LayeredModel:
    """`embed`, then `layer(0)` to `layer(num_layers - 1)`, then `logits`: the model's forward.

    Causal, without padding and KV cache, no gradients. Not for use by several threads.
    """

    def __init__(self, hf: Any, served_dtype: torch.dtype) -> None:
        """`hf`: a causal LM of transformers in one of `preflight.ARCHITECTURES`."""
        architecture = type(hf).__name__
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedCheckpoint(f"{architecture} is not one of the known models: {known}")
        self.hf = hf.eval().requires_grad_(False)
        """The model itself, for generating; sees exchanged weights as well."""
        self.served_dtype = served_dtype
        """What the server computes in; what is to be quantized are weights of this dtype."""
        self._layers = hf.model.layers
        self._positions: tuple[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._replaced: dict[int, dict[str, torch.Tensor]] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str = "cpu",
        served_dtype: torch.dtype | None = None,
        *,
        random: bool = False,
    ) -> LayeredModel:
        """Of a folder with `config.json` and safetensors: float32 on a CPU, else `served_dtype`.

        `served_dtype`: None means the checkpoint's own, as SGLang chooses it. `random` needs only
        the config and makes the weights up. Raises `UnsupportedCheckpoint`.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(folder)
            served = served_dtype or _served(config, device)
            dtype = torch.float32 if device == "cpu" else served
            options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
            if random:
                with torch.device(device):
                    hf = AutoModelForCausalLM.from_config(config, **options)
            else:
                hf = AutoModelForCausalLM.from_pretrained(folder, **options).to(device)
        except (OSError, ValueError, KeyError) as error:
            cause = str(error).partition("\n")[0]
            raise UnsupportedCheckpoint(f"{folder} cannot be loaded: {cause}") from error
        return cls(hf, served)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @cached_property
    def config(self) -> Any:
        """Of transformers."""
        return self.hf.config

    @property
    def device(self) -> torch.device:
        return self.hf.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in here; not `served_dtype`."""
        return self.hf.model.embed_tokens.weight.dtype

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[B, T]` ids to hidden states `[B, T, H]`."""
        return embedding(token_ids.to(self.device), self.hf.model.embed_tokens.weight)

    @torch.inference_mode()
    def layer(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, T, H]` to `[B, T, H]`; what goes in stays as it is."""
        return self._layers[index](
            hidden,
            attention_mask=None,  # sdpa is causal then
            position_embeddings=self._position_embeddings(hidden),
        )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: `[..., H]` of the last layer to `[..., vocabulary]`."""
        return self.hf.lm_head(self.hf.model.norm(hidden))

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output head sees, `[..., H]`, of the last layer's output."""
        return self.hf.model.norm(hidden)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[B, T]` ids to the last layer's hidden states `[B, T, H]`, before the final norm."""
        hidden = self.embed(token_ids)
        for index in range(self.num_layers):
            hidden = self.layer(index, hidden)
        return hidden

    @torch.inference_mode()
    def capture(
        self, index: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The layer's output, and what goes into each linear: path -> `[B, T, K]`."""
        inputs: dict[str, torch.Tensor] = {}

        def keep(path: str) -> Any:
            def hook(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
                inputs[path] = arguments[0]

            return hook

        first = {path: FUSED.get(path, (path,))[0] for path in MORPHABLE_LINEARS}
        modules = {path: self._layers[index].get_submodule(name) for path, name in first.items()}
        hooks = [module.register_forward_pre_hook(keep(path)) for path, module in modules.items()]
        try:
            output = self.layer(index, hidden)
        finally:
            for hook in hooks:
                hook.remove()
        return output, inputs

    def weights(self, index: int) -> dict[str, torch.Tensor]:
        """The morphable linears' weights, contiguous `[N, K]`, in `served_dtype`, copies.

        As loaded, whatever has been exchanged, and as the server would have them, bit for bit.
        """
        found = self._originals(index)
        joined: dict[str, torch.Tensor] = {}
        for path in MORPHABLE_LINEARS:
            parts = [found[name].to(self.served_dtype) for name in FUSED.get(path, (path,))]
            joined[path] = torch.cat(parts)
        return joined

    def weight_bytes(self, index: int) -> int:
        """Bytes of `weights`."""
        found = self._originals(index)
        names = [name for path in MORPHABLE_LINEARS for name in FUSED.get(path, (path,))]
        return sum(found[name].numel() for name in names) * self.served_dtype.itemsize

    def norms(self, index: int) -> dict[str, torch.Tensor]:
        """The norms of `NORMS`, `[H]`, in `served_dtype`, copies, as loaded."""
        found = self._originals(index)
        return {path: found[path].to(self.served_dtype, copy=True) for path in NORMS.values()}

    def biased(self, index: int) -> frozenset[str]:
        """The linears that have a bias."""
        first = {path: FUSED.get(path, (path,))[0] for path in MORPHABLE_LINEARS}
        layer = self._layers[index]
        return frozenset(
            path for path, name in first.items() if layer.get_submodule(name).bias is not None
        )

    @contextmanager
    def replaced(self, index: int, weights: Weights) -> Iterator[None]:
        """`swap`, and at the end back to what was there before, which need not be as loaded."""
        before = {name: self._parameter(index, name).data for name in self._replaced.get(index, {})}
        self.swap(index, weights)
        try:
            yield
        finally:
            self.unswap(index)
            self._exchange(index, before)

    def swap(self, index: int, weights: Weights) -> None:
        """Compute the layer with `weights` (any dtype and device): paths of linears or norms.

        What `weights` does not name is as loaded, also after an earlier `swap`. Weights in this
        model's dtype and device are used where they lie, not copied. Raises KeyError for an
        unknown path and ValueError for a wrong shape; nothing has changed then.
        """
        split = self._split(weights, self._originals(index))
        self.unswap(index)
        self._exchange(index, split)

    def unswap(self, index: int) -> None:
        """Compute the layer as loaded again."""
        for name, weight in self._replaced.pop(index, {}).items():
            self._parameter(index, name).data = weight

    def _exchange(self, index: int, split: Weights) -> None:
        """Of a layer that is as loaded. Names are the checkpoint's."""
        if split:
            self._replaced[index] = {name: self._parameter(index, name).data for name in split}
        for name, weight in split.items():
            self._parameter(index, name).data = weight

    def _originals(self, index: int) -> dict[str, torch.Tensor]:
        names = [name for path in MORPHABLE_LINEARS for name in FUSED.get(path, (path,))]
        names += NORMS.values()
        current = {name: self._parameter(index, name).data for name in names}
        return current | self._replaced.get(index, {})

    def _parameter(self, index: int, name: str) -> torch.nn.Parameter:
        return self._layers[index].get_submodule(name).weight

    def _split(self, weights: Weights, originals: Weights) -> dict[str, torch.Tensor]:
        """`weights` under the checkpoint's names, checked against `originals`."""
        split: dict[str, torch.Tensor] = {}
        for path, weight in weights.items():
            names = FUSED.get(path, (path,))
            rows = [originals[name].shape[0] for name in names]
            expected = (sum(rows), *originals[names[0]].shape[1:])
            if tuple(weight.shape) != expected:
                raise ValueError(f"{path} has shape {list(expected)}, not {list(weight.shape)}")
            placed = weight.to(self.device, self.dtype)
            split |= zip(names, placed.split(rows), strict=True)
        return split

    def _position_embeddings(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of positions 0 to T - 1; those of the last T are kept."""
        length = hidden.shape[1]
        if self._positions is None or self._positions[0] != length:
            positions = torch.arange(length, device=hidden.device).unsqueeze(0)
            self._positions = length, self.hf.model.rotary_emb(hidden, positions)
        return self._positions[1]


def _served(config: Any, device: str) -> torch.dtype:
    """What SGLang serves a checkpoint in when it isn't told; on a CPU, what that is exact for."""
    dtype = getattr(config, "dtype", None) or torch.float32
    return torch.float16 if dtype == torch.float32 and device != "cpu" else dtype
