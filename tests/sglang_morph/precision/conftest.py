"""Real weights and a real SGLang model for the precision tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SMOLLM2_LAYERS = (0, 14, 29)


@pytest.fixture(scope="session")
def smollm2_weights(smollm2: Path) -> dict[str, torch.Tensor]:
    """float32 linears of three decoder layers of SmolLM2-135M, q/k/v and gate/up apart."""
    from safetensors import safe_open

    prefixes = tuple(f"model.layers.{layer}." for layer in SMOLLM2_LAYERS)
    with safe_open(smollm2 / "model.safetensors", framework="pt") as file:
        names = [n for n in file.keys() if n.startswith(prefixes) and "proj" in n]  # noqa: SIM118
        return {name: file.get_tensor(name).float() for name in names}


@pytest.fixture(scope="module")
def sglang_distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """SGLang's process groups of size 1 and its global arguments, as its layers need them."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.distributed.parallel_state import destroy_distributed_environment
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("sglang")
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
    )
    set_global_server_args_for_scheduler(arguments)
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"file://{folder / 'rendezvous'}",
    )
    initialize_model_parallel()
    initialize_dp_attention(arguments, ModelConfig.from_server_args(arguments))
    yield
    destroy_model_parallel()
    destroy_distributed_environment()
