"""Stock SGLang's greedy answers, in a process of its own, where nothing of ours is hooked in.

python -m tests.gpu.stock_engine MODEL_FOLDER OUT.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from tests.server.client import PROMPTS

GREEDY = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
NUMBER = 20
ARGUMENTS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mm_feature_transport": "cpu",
    "context_length": 1024,
    "max_total_tokens": 8192,
    "disable_cuda_graph": True,
    "log_level": "error",
}


def answers(engine: Any) -> list[list[int]]:
    """Token ids, one request at a time: batches of other sizes round differently."""
    return [engine.generate(prompt, GREEDY)["output_ids"] for prompt in PROMPTS[:NUMBER]]


def main(folder: str, out: str) -> None:
    import sglang

    engine = sglang.Engine(model_path=folder, **ARGUMENTS)
    Path(out).write_bytes(orjson.dumps(answers(engine)))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
