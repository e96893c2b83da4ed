import json

import numpy as np
from safetensors.numpy import save_file

from sglang_morph.demo.model_shape import read_shape


def test_only_the_layers_matrices_count_and_in_float32(tmp_path):
    config = {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": np.zeros((100, 16), np.float16),
        "model.layers.0.self_attn.q_proj.weight": np.zeros((16, 16), np.float16),
        "model.layers.1.mlp.up_proj.weight": np.zeros((4, 16), np.float16),
        "model.layers.1.input_layernorm.weight": np.zeros(16, np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shape = read_shape(tmp_path)
    assert shape.layer_weight_bytes == 4 * (16 * 16 + 4 * 16)
    assert shape.page_bytes == 4 * 2 * 2 * 3 * 8
