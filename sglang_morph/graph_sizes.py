"""The largest decode graph: for the largest KV cache, not for the one at rest.

SGLang chooses it by the GPU's memory, as large as batches get with the KV cache that the weights
leave there. Once weights have become KV pages, batches are larger: on a 24 GiB card an 8B model
decodes up to 24 requests in graphs and gets room for four times as many of a thousand tokens, and a
step without a graph takes about twice as long. Graphs share their memory, so those of larger
batches cost little: up to 96 at four levels 0.18 GiB on an H200, where SGLang's own took 0.07.
"""

from __future__ import annotations

from typing import Any

from sglang_morph.options import MorphOptions
from sglang_morph.precision.names import NOMINAL_BITS
from sglang_morph.preflight import linear_shapes, make_plan, model_bytes
from sglang_morph.refusals import MorphRefusal
from sglang_morph.stock_choices import stock_choices

LEAST_GROWTH = 1.25
"""Of the KV cache; less is not worth graphs of its own."""
REQUEST_TOKENS = 1024
"""KV tokens of a request, as of the batches that are captured."""
MOST = 512
STEP = 8
STATIC_FRACTION = 0.85
"""Share of the memory for weights and KV cache, where it is not given."""


def largest_decode_graph(server_args: Any, options: MorphOptions, gpu_mib: float) -> int | None:
    """For the largest KV cache that `options` can make; None: SGLang's choice is right.

    `server_args` may still be incomplete; what is wrong with them is told by the checks to come.
    """
    try:
        at_rest, largest = kv_tokens(server_args, options, gpu_mib)
    except (MorphRefusal, AttributeError):
        return None
    _, stock = stock_choices(gpu_mib / 1024)
    batch = min(MOST, -(-round(largest / REQUEST_TOKENS) // STEP) * STEP)
    return batch if batch > stock and largest >= LEAST_GROWTH * at_rest > 0 else None


def kv_tokens(server_args: Any, options: MorphOptions, gpu_mib: float) -> tuple[float, float]:
    """About the tokens of the KV cache at rest, at most 0 where weights leave no room, and of the
    largest one.
    """
    model_config = server_args.get_model_config()
    config, itemsize = model_config.hf_text_config, model_config.dtype.itemsize
    shapes = list(linear_shapes(config))
    plan = make_plan(config, options, server_args.device)
    last = {step.layer: NOMINAL_BITS[step.variant] for step in plan.steps}
    layer = sum(shape.rows * shape.columns for shape in shapes)
    freed = sum(layer * (itemsize - bits / 8) for bits in last.values())
    heads, head_dim = model_config.get_num_kv_heads(1), model_config.head_dim
    token = 2 * config.num_hidden_layers * heads * head_dim * itemsize
    if server_args.max_total_tokens:
        at_rest = float(server_args.max_total_tokens)
    else:
        fraction = server_args.mem_fraction_static or STATIC_FRACTION
        room = fraction * gpu_mib * (1 << 20) - model_bytes(config, shapes, itemsize)
        at_rest = room / token
    return at_rest, at_rest + freed / token
