"""A random Llama with a byte tokenizer, small enough to try every order by brute force."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_morph.profiling.model import LayeredModel

LAYERS = 4


def save_llama(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Weights are bfloat16, as those of most checkpoints."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
    model.to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama") / "tiny-llama")


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> LayeredModel:
    """Shared: leave it as loaded."""
    return LayeredModel.load(llama_folder)


@pytest.fixture(scope="session")
def token_ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
