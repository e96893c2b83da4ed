import json

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from sglang_morph.demo.gguf_checkpoint import UnsupportedGguf, convert_gguf

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 4, 2, 8, 48
HIDDEN = HEADS * HEAD_DIM
# Ids 0 and 1 are control tokens; "ab" comes from the one merge.
TOKENS = ["<s>", "</s>", "a", "b", "c", "1", "2", "ab", "Ġ", "12"]
MERGES = ["a b", "1 2"]


def interleave(weight, heads):
    """Rows of each head in GGUF's order: first half and second half alternate."""
    rows = np.arange(weight.shape[0]).reshape(heads, 2, -1)
    return weight[rows.swapaxes(1, 2).reshape(-1)]


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        return rng.standard_normal((rows, columns)).astype(np.float16)

    result = {"model.embed_tokens": matrix(len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": matrix(HIDDEN, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HIDDEN),
            "mlp.gate_proj": matrix(FFN, HIDDEN),
            "mlp.up_proj": matrix(FFN, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, FFN),
            "input_layernorm": matrix(1, HIDDEN)[0],
            "post_attention_layernorm": matrix(1, HIDDEN)[0],
        }
        result |= {f"model.layers.{layer}.{name}": value for name, value in parts.items()}
    return result | {"model.norm": matrix(1, HIDDEN)[0]}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path, weights, *, arch="llama", extra_tensor=None):
    writer = GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for name, value in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            value = interleave(value, heads) if heads else value
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[part]}.weight", value)
        else:
            writer.add_tensor(f"{GGUF_NAMES[name]}.weight", value)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros((1, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_weight_comes_back_in_checkpoint_order(tmp_path, weights):
    seen = []
    gguf = write_gguf(tmp_path / "m.gguf", weights)
    convert_gguf(gguf, tmp_path, lambda done, total: seen.append((done, total)))
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {f"{name}.weight" for name in weights}
    for name, value in weights.items():
        np.testing.assert_array_equal(found[f"{name}.weight"], value, err_msg=name)
    assert seen == [(n, len(weights)) for n in range(1, len(weights) + 1)]


def test_config_describes_the_model(tmp_path, weights):
    convert_gguf(write_gguf(tmp_path / "m.gguf", weights), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (LAYERS, HIDDEN)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["intermediate_size"]) == (HEAD_DIM, FFN)
    assert config["vocab_size"] == len(TOKENS)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, 1)
    assert config["tie_word_embeddings"] is True


def test_a_separate_output_matrix_means_untied_embeddings(tmp_path, weights):
    head = np.ones((len(TOKENS), HIDDEN), np.float16)
    convert_gguf(write_gguf(tmp_path / "m.gguf", weights | {"lm_head": head}), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], head)


def test_tokenizer_merges_letters_keeps_digits_apart_and_knows_control_tokens(tmp_path, weights):
    convert_gguf(write_gguf(tmp_path / "m.gguf", weights), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab12</s>c").tokens == ["ab", "1", "2", "</s>", "c"]
    assert tokenizer.decode([7, 8, 4]) == "ab c"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma"}, "general.architecture is 'gemma'"),
        ({"extra_tensor": "blk.0.ssm_in.weight"}, "blk.0.ssm_in.weight"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
    ],
)
def test_what_is_no_llama_is_refused(tmp_path, weights, changes, message):
    gguf = write_gguf(tmp_path / "m.gguf", weights, **changes)
    with pytest.raises(UnsupportedGguf, match=message):
        convert_gguf(gguf, tmp_path)
