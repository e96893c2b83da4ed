"""Quality of SmolLM2-135M for every order of layers and every variant, at a quarter, half and all.

    python -m benchmarks.quality            # measure what is missing, print tables, draw
    python -m benchmarks.quality --fresh    # measure all again
    python -m benchmarks.quality --again "int4 gptq"    # measure one variant again
    python -m benchmarks.quality --record   # also write the rows of acceptance.json

Goes on where it was ended. Takes about 40 minutes on one core, a variant about 5.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.acceptance import ACCEPTANCE, upsert
from benchmarks.quality_results import (
    ALL,
    ALTERNATING,
    ANY,
    ARMS,
    DEFAULT_ORDER,
    LEVELS,
    ORDERS,
    SEARCHED,
    Arm,
    Cell,
    Found,
    read_found,
)
from benchmarks.quality_tables import acceptance_rows, draw, tables
from sglang_morph.demo.model import ensure_model, model_path
from sglang_morph.demo.provenance import provenance
from sglang_morph.precision.names import FULL
from sglang_morph.precision.plan import ModelIdentity, fixed_order, plan_in_order
from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.ranking import Ladder, Search, rank
from sglang_morph.profiling.text import load_text, token_blocks
from sglang_morph.quality.levels import Examiner
from sglang_morph.quality.lowered import LoweredModel
from sglang_morph.quality.metrics import perplexity
from sglang_morph.quality.run import (
    QualityOptions,
    calibration_tokens,
    encode_text,
    evaluation_material,
    load_tokenizer,
    make_variant_set,
    settings_of,
)
from sglang_morph.quality.variant_set import VariantSet

COMMAND = "python -m benchmarks.quality --fresh --record"
AGAIN = "python -m benchmarks.quality --again '{}' --record"
"""What measures an arm that was added later."""
OPTIONS = QualityOptions(block_tokens=128, continued_tokens=32, answer_tokens=48)
SEARCH_BLOCKS = 2
"""Of the calibration text, to search orders on."""


class Measuring:
    """Measures what `found` lacks."""

    def __init__(
        self, folder: Path, console: Console, *, fresh: bool, again: str | None = None
    ) -> None:
        self._console = console
        self._began = time.monotonic()
        self._model, self._tokenizer = LayeredModel.load(folder), load_tokenizer(folder)
        self._text = load_text(seed=OPTIONS.seed)
        self._variants = VariantSet(self._model, [])
        self._lowered = LoweredModel(self._model, lambda *key: self._variants.weights(*key))
        material = evaluation_material(self._tokenizer, self._text, OPTIONS)
        self._examiner = Examiner(self._lowered, self._tokenizer, material)
        settings = settings_of(self._text, material, OPTIONS)
        full = self._examiner.full(FULL)
        known = None if fresh else read_found(settings)
        self._added = known is not None
        self.found = known or Found(settings, asdict(provenance(COMMAND)), full, {}, [], [])
        if again is not None:
            self.found.forget(again)

    def run(self) -> None:
        for arm in ARMS:
            unsearched, missing = self._unsearched(arm), list(self._missing(arm))
            alternate = self._alternates(arm)
            if unsearched or missing or alternate:
                self._make(arm)
            if unsearched:
                self._search(arm, unsearched)
            for number, (order, level) in enumerate(missing, start=1):
                cell = self._measure(arm, order, level)
                self._keep(cell)
                self._say(
                    f"{arm.name}, {number} of {len(missing)}: {cell.order}, {level}: perplexity "
                    f"{perplexity(cell.text.loss):.3f}, KL {np.mean(cell.text.kl):.4f}"
                )
            if alternate:
                self._alternate(arm)

    def _make(self, arm: Arm) -> None:
        # Also makes the examiner forget states of the arm before: variants may share a name.
        if not np.allclose(self._examiner.text(self._lowered.full).loss, self.found.full.text.loss):
            raise RuntimeError("full precision is not what it was; begin anew with --fresh")
        self._say(f"{arm.name}: quantizing")
        if self._added:
            self.found.origins[arm.name] = asdict(provenance(AGAIN.format(arm.name)))
        tokens = calibration_tokens(self._tokenizer, self._text, OPTIONS)
        self._variants = make_variant_set(
            self._model, [arm.variant], arm.quantizer, tokens, lambda *_: None
        )

    def _unsearched(self, arm: Arm) -> list[str]:
        if arm.searched_in != arm.name:
            return []
        return [order for order in SEARCHED if order not in self.found.orders.get(arm.name, {})]

    def _search(self, arm: Arm, orders: list[str]) -> None:
        ids = encode_text(self._tokenizer, self._text.calibration)
        blocks = token_blocks(ids, OPTIONS.block_tokens, SEARCH_BLOCKS, OPTIONS.seed)
        known = self.found.orders.setdefault(arm.name, {})
        for order in orders:
            self._say(f"{arm.name}: searching order {order}")
            known[order] = self._searched(arm, order, torch.tensor(blocks))
            self.found.save()

    def _searched(self, arm: Arm, order: str, tokens: torch.Tensor) -> list[int]:
        layers = range(self._model.num_layers)
        weights = [self._variants.weights(layer, arm.variant) for layer in layers]
        freed = [self._variants.freed_bytes(self._lower(arm, [layer])) for layer in layers]
        ladder = Ladder({arm.variant: weights}, {arm.variant: freed})
        notes = model_path().parent / f"quality-{arm.variant}-{arm.quantizer}-{order}.jsonl"
        evaluations = Evaluations(notes, self._text.origin.calibration_sha256)
        self._lowered.lower(self._lowered.full)
        found = rank(self._model, tokens, ladder, Search(order, lazy=True), evaluations)
        evaluations.close()
        notes.unlink()
        return found.orders()[arm.variant]

    def _missing(self, arm: Arm) -> Iterator[tuple[str, str]]:
        for order in ORDERS:
            for level in LEVELS:
                only_once = level == ALL and order != DEFAULT_ORDER
                if not only_once and self.found.cell(arm.name, order, level) is None:
                    yield order, level

    def _measure(self, arm: Arm, order: str, level: str) -> Cell:
        lowered = self._order(arm, order)[: math.ceil(LEVELS[level] * self._model.num_layers)]
        variants = self._lower(arm, lowered)
        text = self._examiner.text(variants)
        going_on = self._examiner.continuations(variants) if order == DEFAULT_ORDER else None
        freed = self._variants.freed_bytes(variants)
        name = ANY if level == ALL else order
        return Cell(arm.name, name, level, lowered, freed, text, going_on)

    def _order(self, arm: Arm, order: str) -> list[int]:
        if order in SEARCHED:
            return self.found.orders[arm.searched_in][order]
        name, _, seed = order.partition(" ")
        return fixed_order(name, self._model.num_layers, int(seed or 0))

    def _lower(self, arm: Arm, layers: list[int]) -> list[str]:
        count = self._model.num_layers
        return [arm.variant if layer in layers else FULL for layer in range(count)]

    def _alternates(self, arm: Arm) -> bool:
        done = {result.plan for result in self.found.alternating}
        return arm.name in ALTERNATING and arm.name not in done

    def _alternate(self, arm: Arm) -> None:
        self._say(f"{arm.name}: changes of level in the middle of responses")
        identity = ModelIdentity.from_hf_config(self._model.config)
        plan = plan_in_order(identity, {arm.variant: self._order(arm, DEFAULT_ORDER)}, "")
        half = plan.levels.index(math.ceil(LEVELS["half"] * self._model.num_layers))
        self.found.alternating += self._examiner.examine(
            arm.name, plan, half, self._variants.freed_bytes
        )
        self.found.save()

    def _keep(self, cell: Cell) -> None:
        self.found.cells.append(cell)
        self.found.save()

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:5.0f} s  {text}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of SmolLM2-135M by order and variant.")
    parser.add_argument("--fresh", action="store_true", help="measure all again")
    parser.add_argument("--record", action="store_true", help="write rows of acceptance.json")
    parser.add_argument("--again", choices=[arm.name for arm in ARMS], help="measure it again")
    arguments = parser.parse_args()
    console = Console()
    folder = ensure_model(console)
    measuring = Measuring(folder, console, fresh=arguments.fresh, again=arguments.again)
    measuring.run()
    print(tables(measuring.found))
    draw(measuring.found)
    if arguments.record:
        upsert(acceptance_rows(measuring.found), ACCEPTANCE)


if __name__ == "__main__":
    main()
