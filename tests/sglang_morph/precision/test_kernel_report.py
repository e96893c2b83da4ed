from __future__ import annotations

from sglang_morph.precision.variants.kernel_report import describe_kernels, kernels_of_layers


def layer(qkv: str, down: str) -> dict[str, dict[str, str]]:
    return {"nested_fp8": {"qkv_proj": qkv, "down_proj": down}, "int4": {"qkv_proj": "marlin"}}


LAYERS = [layer("e4m3", "e4m3" if index not in (1, 3, 4) else "e5m2") for index in range(6)]


def test_layers_by_kernel() -> None:
    assert kernels_of_layers(LAYERS) == {
        "nested_fp8": {
            "qkv_proj": {"e4m3": "0-5"},
            "down_proj": {"e4m3": "0, 2, 5", "e5m2": "1, 3-4"},
        },
        "int4": {"qkv_proj": {"marlin": "0-5"}},
    }


def test_log_names_what_is_unusual() -> None:
    assert describe_kernels(LAYERS) == [
        "nested_fp8: e4m3 in 9 linears; e5m2 in down_proj of layers 1, 3-4",
        "int4: marlin in 6 linears",
    ]
    assert describe_kernels([]) == describe_kernels([{}]) == []
