from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.mistral import MistralForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

from sglang_morph.precision.names import MORPHABLE_LINEARS
from sglang_morph.profiling.model import LayeredModel, UnsupportedCheckpoint

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


def test_is_the_model_it_takes_apart(llama: LayeredModel, token_ids: torch.Tensor) -> None:
    with torch.inference_mode():
        expected = llama.hf(token_ids).logits
    assert torch.equal(llama.logits(llama.forward(token_ids)), expected)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (MistralForCausalLM, MistralConfig),
        (Qwen2ForCausalLM, Qwen2Config),
        (Qwen3ForCausalLM, Qwen3Config),
    ],
)
def test_other_architectures(architecture: type, config: type, token_ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    hf = architecture._from_config(config(**SIZES), attn_implementation="sdpa")
    model = LayeredModel(hf, torch.bfloat16)
    with torch.inference_mode():
        expected = hf(token_ids).logits
    assert torch.equal(model.logits(model.forward(token_ids)), expected)
    assert model.biased(0) == ({"self_attn.qkv_proj"} if config is Qwen2Config else frozenset())


def test_weights_are_fused_and_come_back(llama: LayeredModel, token_ids: torch.Tensor) -> None:
    weights = llama.weights(1)
    assert list(weights) == list(MORPHABLE_LINEARS)
    assert {path: tuple(weight.shape) for path, weight in weights.items()} == {
        "self_attn.qkv_proj": (128, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_up_proj": (192, 64),
        "mlp.down_proj": (64, 96),
    }
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert llama.weight_bytes(1) == sum(weight.nbytes for weight in weights.values())
    expected = llama.forward(token_ids)
    with llama.replaced(1, weights | llama.norms(1)):
        assert torch.equal(llama.forward(token_ids), expected)


def test_what_is_replaced_is_computed_with_and_taken_back(
    llama: LayeredModel, token_ids: torch.Tensor
) -> None:
    hidden = llama.embed(token_ids)
    before = llama.layer(0, hidden)
    silent = {
        path: torch.zeros_like(llama.weights(0)[path])
        for path in ("self_attn.o_proj", "mlp.down_proj")
    }
    with llama.replaced(0, silent):
        assert torch.equal(llama.layer(0, hidden), hidden)
        assert all(llama.weights(0)[path].any() for path in silent)  # those loaded
        with llama.replaced(0, {"mlp.down_proj": silent["mlp.down_proj"]}):
            assert not torch.equal(llama.layer(0, hidden), hidden)
        assert torch.equal(llama.layer(0, hidden), hidden)
    assert torch.equal(llama.layer(0, hidden), before)


def test_a_wrong_shape_changes_nothing(llama: LayeredModel, token_ids: torch.Tensor) -> None:
    before = llama.forward(token_ids)
    weights = {"mlp.down_proj": torch.zeros(64, 96), "self_attn.qkv_proj": torch.zeros(64, 64)}
    with pytest.raises(ValueError, match=r"self_attn.qkv_proj has shape \[128, 64\], not"):
        llama.swap(0, weights)
    assert torch.equal(llama.forward(token_ids), before)


def test_capture_gives_what_each_linear_reads(llama: LayeredModel, token_ids: torch.Tensor) -> None:
    hidden = llama.embed(token_ids)
    output, inputs = llama.capture(0, hidden)
    assert torch.equal(output, llama.layer(0, hidden))
    assert torch.equal(
        inputs["self_attn.qkv_proj"], llama.hf.model.layers[0].input_layernorm(hidden)
    )
    down = llama.hf.model.layers[0].mlp.down_proj
    rest = output - down(inputs["mlp.down_proj"])
    attended = hidden + llama.hf.model.layers[0].self_attn.o_proj(inputs["self_attn.o_proj"])
    torch.testing.assert_close(rest, attended)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="cannot be loaded"):
        LayeredModel.load(tmp_path)


def test_random_weights_need_only_the_config(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    assert LayeredModel.load(tmp_path, random=True).num_layers == 4
