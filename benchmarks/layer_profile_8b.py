"""How long it takes to profile 32 layers of Llama-3.1-8B's shape with made-up weights.

Run by `python -m benchmarks.layer_profile llama8b`. Weights and tokens are random, so nothing is
read from files but a config that is written first. What has been measured is in the JSON at once; a
part that fails, or that the time is up for, is noted there, and the next one follows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from rich.console import Console
from transformers import LlamaConfig

from benchmarks.acceptance import RESULTS, Row
from sglang_morph.demo.provenance import Provenance
from sglang_morph.precision.quantizers.layer import AsTheyAre, LayerWeights, variants_for
from sglang_morph.precision.quantizers.registry import LAYER_QUANTIZERS, create_layer_quantizer
from sglang_morph.precision.quantizers.statistics import statistics_of
from sglang_morph.precision.variants.registry import default_variants
from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.profile import Calibration, collect
from sglang_morph.profiling.ranking import Ladder, Ranking, Search, rank
from sglang_morph.profiling.variants import MadeVariant, make_variants

RAW = RESULTS / "profile_llama8b_h200.json"
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "architectures": ["LlamaForCausalLM"],
}
CALIBRATION = Calibration(blocks=4, length=128)
"""As `sglang-morph profile` has it by default."""
BATCH = 8
"""Likewise, on a GPU."""
DEFAULT = "kl, lazy"
SEARCHES = {
    DEFAULT: Search("kl", lazy=True, batch=BATCH),
    "lis": Search("lis", batch=BATCH),
    "kl": Search("kl", batch=BATCH),
}
MOST_MINUTES = 5
LEAST_SAVED = 0.5


class OutOfTime(Exception):
    """The time budget is used up."""


class Measuring:
    """Fills `document`, and writes it to `out` whenever something has been added."""

    def __init__(
        self, device: str, out: Path, budget_s: float, origin: Provenance, console: Console
    ) -> None:
        self._device = device
        self._out = out
        self._console = console
        self._began = time.monotonic()
        self._ends = self._began + budget_s
        self.document: dict[str, Any] = {
            "origin": asdict(origin),
            "shape": SHAPE,
            "calibration": asdict(CALIBRATION),
            "variants": list(default_variants(device)),
            "searches": {},
            "quantizer_seconds_a_layer": {},
            "failed": {},
            "finished": False,
        }

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            self._part("everything", lambda: self._run(Path(scratch)))
        self.document["finished"] = not self.document["failed"]
        self._keep()

    def _run(self, scratch: Path) -> None:
        model = self._timed("load", lambda: self._load(scratch))
        generator = torch.Generator().manual_seed(0)
        shape = (CALIBRATION.blocks, CALIBRATION.length)
        tokens = torch.randint(0, SHAPE["vocab_size"], shape, generator=generator)
        ladder = self._timed("variants", lambda: self._ladder(model, tokens))
        for name, search in SEARCHES.items():
            self._part(name, partial(self._search, model, tokens, ladder, name, search))
        for name in LAYER_QUANTIZERS:
            self._part(name, partial(self._quantize, model, tokens, name))

    def _load(self, scratch: Path) -> LayeredModel:
        LlamaConfig(**SHAPE, dtype="bfloat16").save_pretrained(scratch)
        model = LayeredModel.load(scratch, self._device, random=True)
        self._synchronize()
        return model

    def _ladder(self, model: LayeredModel, tokens: torch.Tensor) -> Ladder:
        names = self.document["variants"]
        made = make_variants(model, names, AsTheyAre(), tokens)
        ladder = collect(self._watched(made, model.num_layers * len(names)), model, names)
        self._synchronize()
        return ladder

    def _watched(self, made: Iterator[MadeVariant], total: int) -> Iterator[MadeVariant]:
        progress = self._progress("variants")
        for number, one in enumerate(made, start=1):
            yield one
            progress(number / total)

    def _search(
        self, model: LayeredModel, tokens: torch.Tensor, ladder: Ladder, name: str, search: Search
    ) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            evaluations = Evaluations(Path(scratch) / "evaluations.jsonl", name)
            found = rank(model, tokens, ladder, search, evaluations, self._progress(name))
            evaluations.close()
        self.document["searches"][name] = cost(found)
        self._say(
            f"{name}: {found.seconds:.1f} s, {found.candidates} candidates, "
            f"{found.forwards_saved_ratio:.1%} of the forwards saved"
        )

    def _quantize(self, model: LayeredModel, tokens: torch.Tensor, name: str) -> None:
        """Choose the int4 codes of one layer; packing them for a kernel is not included."""
        layer = LayerWeights(model.weights(0), model.norms(0), model.biased(0))
        variants = variants_for("int4", model.device.type, layer.linears)
        self._synchronize()
        began = time.monotonic()
        _, read = model.capture(0, model.embed(tokens))
        create_layer_quantizer(name).adapt(layer, variants, statistics_of(read)).rounded(variants)
        self._synchronize()
        seconds = round(time.monotonic() - began, 2)
        self.document["quantizer_seconds_a_layer"][name] = seconds
        self._say(f"int4 by {name}: {seconds} s a layer")

    def _timed(self, name: str, compute: Callable[[], Any]) -> Any:
        began = time.monotonic()
        found = compute()
        self.document[f"{name}_seconds"] = round(time.monotonic() - began, 2)
        self._say(f"{name}: {self.document[f'{name}_seconds']} s")
        self._keep()
        return found

    def _part(self, name: str, measure: Callable[[], None]) -> None:
        try:
            self._check_time()
            measure()
        except Exception as error:  # whatever it is, the other parts are still worth their time
            cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.document["failed"][name] = cause
            self._say(f"{name} failed: {cause}")
        self._keep()

    def _progress(self, name: str) -> Callable[[float], None]:
        """Says every fourth; ends what is being done when the time is up."""
        said = 0

        def told(done: float) -> None:
            nonlocal said
            self._check_time()
            if int(4 * done) > said:
                said = int(4 * done)
                self._say(f"{name}: {done:.0%}")

        return told

    def _check_time(self) -> None:
        if time.monotonic() > self._ends:
            raise OutOfTime("the time budget is used up; give a longer --time-budget")

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _say(self, text: str) -> None:
        passed = time.monotonic() - self._began
        self._console.print(f"{passed:5.0f} s  {text}", highlight=False, soft_wrap=True)

    def _keep(self) -> None:
        self.document["gpu_gib_at_most"] = (
            0.0 if self._device == "cpu" else round(torch.cuda.max_memory_allocated() / 2**30, 1)
        )
        self._out.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._out.with_suffix(".tmp")
        scratch.write_bytes(orjson.dumps(self.document, option=orjson.OPT_INDENT_2) + b"\n")
        scratch.replace(self._out)


def cost(ranking: Ranking) -> dict[str, float]:
    """What it took, without the order: that of made-up weights says nothing."""
    return {
        "seconds": round(ranking.seconds, 2),
        "candidates": ranking.candidates,
        "full_forwards": round(ranking.full_forwards, 2),
        "full_forwards_plain": ranking.full_forwards_plain,
        "forwards_saved_ratio": round(ranking.forwards_saved_ratio, 4),
    }


def acceptance_rows(document: Mapping[str, Any]) -> list[Row]:
    """Of a document that has the default search. Raises KeyError for another."""
    search = document["searches"][DEFAULT]
    seconds = document["load_seconds"] + document["variants_seconds"] + search["seconds"]
    minutes, saved = seconds / 60, search["forwards_saved_ratio"]
    origin = {**document["origin"], "raw": str(RAW.relative_to(RESULTS.parents[1]))}
    return [
        Row(
            "profile.llama8b_minutes",
            round(minutes, 2),
            "min, made-up weights",
            f"< {MOST_MINUTES}",
            minutes < MOST_MINUTES,
            **origin,
        ),
        Row(
            "profile.llama8b_forwards_saved_ratio",
            round(saved, 3),
            "",
            f">= {LEAST_SAVED}",
            saved >= LEAST_SAVED,
            **origin,
        ),
    ]
