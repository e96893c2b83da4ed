"""The table of refusals, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_morph.refusals import REFUSALS, MorphRefusal, Refusal, refuse_unsupported

REFUSED: dict[str, Any] = {
    "--tp-size": 2,
    "--pp-size": 2,
    "--dp-size": 2,
    "--nnodes": 2,
    "--dcp-size": 2,
    "--attn-cp-size": 2,
    "--enable-dp-attention": True,
    "--use-ray": True,
    "--tokenizer-worker-num": 2,
    "--page-size": 16,
    "--kv-cache-dtype": "fp8_e4m3",
    "--radix-cache-backend": "other",
    "--enable-hierarchical-cache": True,
    "--enable-lmcache": True,
    "--enable-flexkv": True,
    "--enable-streaming-session": True,
    "--enable-session-radix-cache": True,
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "1",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "true",
    "--enable-hisparse": True,
    "--enable-unified-memory": True,
    "--enable-page-major-kv-layout": True,
    "--prefill-only-disable-kv-cache": True,
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1",
    "--kv-canary": "log",
    "--quantization": "awq",
    "--modelopt-quant": "fp8",
    "--quantize-and-serve": True,
    "--torchao-config": "int8wo",
    "--enable-lora": True,
    "--lora-paths": ["adapter"],
    "--enable-memory-saver": True,
    "--enable-weights-cpu-backup": True,
    "--cpu-offload-gb": 4,
    "--offload-group-size": 1,
    "--kt-weight-path": "experts",
    "--weight-cache-mode": "client",
    "--checkpoint-engine-wait-weights-before-ready": True,
    "--model-impl": "transformers",
    "--enable-torch-compile": True,
    "--disaggregation-mode": "decode",
    "--enable-pdmux": True,
    "--encoder-only": True,
    "--language-only": True,
    "--speculative-algorithm": "EAGLE",
    "--dllm-algorithm": "LowConfidence",
    "--enable-return-routed-experts": True,
    "--enable-return-indexer-topk": True,
    "--smg-grpc-mode": True,
    "SGLANG_RUST_SERVER": "1",
}
"""A value for every row that must be refused."""


@pytest.fixture
def accepted(smollm2: Path) -> ServerArgs:
    """Resolved as a small CPU server has them."""
    return ServerArgs(
        model_path=str(smollm2),
        device="cpu",
        attention_backend="torch_native",
        max_total_tokens=1024,
    )


def test_every_row_has_a_test() -> None:
    assert [refusal.setting for refusal in REFUSALS] == list(REFUSED)


def test_plain_arguments_are_accepted(accepted: ServerArgs) -> None:
    refuse_unsupported(accepted, "layer_swap", {})


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.setting)
def test_row(refusal: Refusal, accepted: ServerArgs) -> None:
    environ: dict[str, str] = {}
    value = REFUSED[refusal.setting]
    if refusal.setting.startswith("--"):
        field = refusal.setting[2:].replace("-", "_")
        assert hasattr(accepted, field)  # SGLang still has the flag
        object.__setattr__(accepted, field, value)
    else:
        environ[refusal.setting] = value
    with pytest.raises(MorphRefusal) as raised:
        refuse_unsupported(accepted, "layer_swap", environ)
    message = str(raised.value)
    assert message.startswith(f"{refusal.setting} does not work with --memory-backend layer_swap")
    assert message.endswith("or use --memory-backend static")
    assert "\n" not in message


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_variable_that_is_off_is_accepted(accepted: ServerArgs, value: str) -> None:
    refuse_unsupported(accepted, "layer_swap", {"SGLANG_RUST_SERVER": value})
