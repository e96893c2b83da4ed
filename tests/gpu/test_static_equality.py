"""Greedy text at a fixed level is that of a stock server over the same codes and scales.

Stock serves them as a compressed-tensors checkpoint: E4M3 weights with one scale for each output
row, activations quantized token by token. Codes of `nested_fp8` are such weights with scale 1/256
where they are E4M3. SmolLM2's are E5M2, which no stock scheme takes, so for `nested_fp8` powers of
two are first moved from its linears into what comes before them. That does not change the model.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_morph.precision.nested.encoding import E4M3_BOUND
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.registry import create_variant
from tests.gpu.stock_engine import ARGUMENTS, GREEDY, answers
from tests.server.client import PROMPTS

SMOLLM2 = os.environ.get("MORPH_TEST_SMOLLM2")
"""Folder of SmolLM2-135M-Instruct, or of another Llama in 16 bits."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA GPU with FP8 tensor cores (SM89 or newer)",
    ),
    pytest.mark.skipif(SMOLLM2 is None, reason="set MORPH_TEST_SMOLLM2 to SmolLM2's folder"),
]

FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
Weights = dict[str, torch.Tensor]


def power_moved(weights: Weights, targets: list[str], sources: list[str]) -> None:
    """Divide `targets` by the power of two that lets them nest, and multiply `sources` by it."""
    largest = max(float(weights[name].float().abs().max()) for name in targets)
    factor = 2.0 ** max(0, math.ceil(math.log2(largest / E4M3_BOUND)))
    for name in targets:
        weights[name] /= factor
    for name in sources:
        weights[name] *= factor


def made_nestable(weights: Weights) -> Weights:
    """The same model, up to fp16's smallest weights, with linears that all nest as E4M3."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    layers = sorted({int(n.split(".")[2]) for n in weights if n.startswith("model.layers.")})
    for layer in layers:
        at = f"model.layers.{layer}."
        q, k, v, o = (f"{at}self_attn.{name}_proj.weight" for name in "qkvo")
        gate, up, down = (f"{at}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        power_moved(weights, [o], [v])
        power_moved(weights, [q, k, v], [f"{at}input_layernorm.weight"])
        power_moved(weights, [down], [up])
        power_moved(weights, [gate, up], [f"{at}post_attention_layernorm.weight"])
    return weights


def write(folder: Path, weights: Weights, **config: Any) -> Path:
    """A checkpoint of `weights`, else as SmolLM2's."""
    assert SMOLLM2 is not None
    folder.mkdir()
    for file in Path(SMOLLM2).iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = orjson.loads((folder / "config.json").read_bytes()) | config
    (folder / "config.json").write_bytes(orjson.dumps(settings))
    return folder


def quantized(weights: Weights, name: str) -> Weights:
    """Codes and scales of variant `name` in place of the linears' weights, all E4M3."""
    made: Weights = {}
    for path, weight in weights.items():
        if "_proj." not in path:
            made[path] = weight
            continue
        variant = create_variant(name, "cuda", create_quantizer("rtn")).for_weight(weight.cuda())
        assert variant.name == name
        parts = variant.encode(weight.cuda())
        assert parts["codes"].dtype == torch.float8_e4m3fn
        made[path] = parts["codes"]
        made[f"{path}_scale"] = parts["scales"].unsqueeze(-1)
    return made


def stock_answers(folder: Path, out: Path) -> list[list[int]]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.stock_engine", str(folder), str(out)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return orjson.loads(out.read_bytes())


def our_answers(folder: Path, variant: str) -> tuple[list[list[int]], list[list[int]]]:
    """At full precision, and with every layer lowered."""
    from sglang_morph.engine import Engine

    engine = Engine(
        model_path=str(folder),
        memory_backend="layer_swap",
        morph_policy="manual",
        morph_variants=(variant,),
        **ARGUMENTS,
    )
    try:
        full = answers(engine)
        level = len(engine.morph("status").payload["levels"]) - 1
        assert engine.morph("set_level", level=level).success
        engine.generate(PROMPTS[0], GREEDY)
        engine.flush_cache()  # nothing computed at full precision is used again
        lowered = answers(engine)
        status = engine.morph("status").payload
        assert status["level"] == level
        assert set(status["levels"][level]["variants"]) == {variant}
        return full, lowered
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("variant", "prepared"), [("fp8", dict), ("nested_fp8", made_nestable)], ids=["fp8", "nested"]
)
def test_text_is_that_of_a_static_server(
    variant: str, prepared: Callable[[Weights], Weights], tmp_path: Path
) -> None:
    assert SMOLLM2 is not None
    weights = prepared(load_file(Path(SMOLLM2) / "model.safetensors"))
    full_precision = write(tmp_path / "full", weights)
    static = write(
        tmp_path / "static", quantized(weights, variant), quantization_config=FP8_DYNAMIC
    )
    full, ours = our_answers(full_precision, variant)
    assert ours != full
    assert all(len(ids) == GREEDY["max_new_tokens"] for ids in ours)
    expected = stock_answers(static, tmp_path / "stock.json")
    differing = [i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b]
    assert not differing
