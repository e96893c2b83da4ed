"""A Llama of 4 small layers with made-up weights, and a tokenizer for it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_morph.profiling.text import default_text


def save_tiny_llama(folder: Path) -> None:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([default_text()[:20_000]], vocab_size=320, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).half().save_pretrained(folder)
