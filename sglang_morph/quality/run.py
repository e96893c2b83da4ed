"""A whole quality run: model, text, variants and plans in, report out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_morph.bundle.bundle import Bundle
from sglang_morph.demo.provenance import Provenance
from sglang_morph.precision.plan import (
    ModelIdentity,
    PlanError,
    PrecisionPlan,
    fixed_order,
    plan_in_order,
)
from sglang_morph.precision.quantizers.registry import create_layer_quantizer
from sglang_morph.profiling.datasets import choose_text
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.ranking import FIXED_ORDERS
from sglang_morph.profiling.text import SplitText, TextOrigin, token_blocks
from sglang_morph.profiling.variants import MadeVariant, make_variants
from sglang_morph.quality.bundle_variants import bundle_variants, open_bundle
from sglang_morph.quality.levels import Examiner, Material
from sglang_morph.quality.lowered import LoweredModel
from sglang_morph.quality.prompts import ReferencePrompt, docstring_prompts, read_prompts
from sglang_morph.quality.results import QualityReport, Settings
from sglang_morph.quality.variant_set import VariantSet

CALIBRATION_BLOCKS = 16
ANSWER_PROMPTS = 16
"""Of the default prompts."""


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """What to measure on."""

    text: Path | None = None
    """UTF-8 file; None: Python's help topics."""
    dataset: str | None = None
    """Instead of `text`, a name that `load_dataset` knows."""
    prompts: Path | None = None
    """LongBench's JSONL; None: Python's docstrings."""
    quantizer: str = "rtn"
    blocks: int = 16
    block_tokens: int = 256
    continued_tokens: int = 64
    prompt_tokens: int = 2048
    answer_tokens: int = 64
    seed: int = 0


Told = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)."""


def load_tokenizer(folder: Path) -> Any:
    """Of transformers. Raises OSError or ValueError where the folder has none."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def default_plans(
    identity: ModelIdentity, variants: Sequence[str], orders: Sequence[str], seed: int
) -> dict[str, PrecisionPlan]:
    """By order, for orders that need no measurement. Raises `PlanError`."""
    plans = {}
    for order in orders:
        if order not in FIXED_ORDERS:
            known = ", ".join(FIXED_ORDERS)
            raise PlanError(f"order {order!r} needs a profile, or does not exist; use {known}")
        layers = fixed_order(order, identity.num_layers, seed)
        note = f"{order} order" + (f", seed {seed}" if order == "random" else "")
        plans[order] = plan_in_order(identity, dict.fromkeys(variants, layers), note)
    return plans


def make_variant_set(
    model: LayeredModel, names: Sequence[str], quantizer: str, calibration: torch.Tensor, told: Told
) -> VariantSet:
    """Raises ValueError for an unknown quantizer, or a weight that can't take a variant."""
    made = make_variants(model, names, create_layer_quantizer(quantizer), calibration)
    return VariantSet(model, _counted(made, "quantizing", model.num_layers * len(names), told))


def _counted(
    made: Iterable[MadeVariant], what: str, total: int, told: Told
) -> Iterator[MadeVariant]:
    for count, one in enumerate(made, start=1):
        yield one
        told(what, count, total)


def calibration_tokens(tokenizer: Any, text: SplitText, options: QualityOptions) -> torch.Tensor:
    """`[B, T]` of the side that is not evaluated on. Raises `TextError`."""
    ids = encode_text(tokenizer, text.calibration)
    blocks = min(CALIBRATION_BLOCKS, len(ids) // options.block_tokens)
    return torch.tensor(token_blocks(ids, options.block_tokens, blocks, options.seed))


def evaluation_material(tokenizer: Any, text: SplitText, options: QualityOptions) -> Material:
    """Raises `TextError` or `PromptsError`."""
    ids = encode_text(tokenizer, text.evaluation)
    return Material(
        blocks=token_blocks(ids, options.block_tokens, options.blocks, options.seed),
        continued_tokens=options.continued_tokens,
        prompts=_prompts(options),
        prompt_tokens=options.prompt_tokens,
        answer_tokens=options.answer_tokens,
    )


def _prompts(options: QualityOptions) -> list[ReferencePrompt]:
    if options.prompts is not None:
        return read_prompts(options.prompts)
    return docstring_prompts(ANSWER_PROMPTS, options.seed)


def settings_of(text: SplitText, material: Material, options: QualityOptions) -> Settings:
    own = f"{len(material.prompts)} docstrings of Python's library, answer: the first line"
    return Settings(
        text=text.origin.as_document(),
        prompts=own if options.prompts is None else options.prompts.name,
        blocks=options.blocks,
        block_tokens=options.block_tokens,
        continued_tokens=options.continued_tokens,
        answer_tokens=options.answer_tokens,
        seed=options.seed,
    )


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Which plans: a bundle's, one from a file, or default plans by `variants` and `orders`."""

    bundle: Path | None = None
    plan: Path | None = None
    variants: Sequence[str] = ("int8", "int4")
    orders: Sequence[str] = ("front",)


def run_quality(
    folder: Path,
    choice: PlanChoice,
    options: QualityOptions,
    origin: Provenance,
    told: Told,
    device: str = "cpu",
) -> QualityReport:
    """Examine every level of the plans for the model in `folder`.

    Raises ValueError, one line, for a text, plan, bundle, model or variant that can't be used.
    """
    text = choose_text(options.text, options.dataset, options.seed)
    told("loading the model", 0, 1)
    model, tokenizer = LayeredModel.load(folder, device), load_tokenizer(folder)
    identity = ModelIdentity.from_hf_config(model.config)
    bundle = None if choice.bundle is None else open_bundle(choice.bundle, folder, model)
    if bundle is not None:
        _check_split(bundle.manifest.calibration, text.origin)
    plans = _plans(choice, bundle, identity, options.seed)
    names = tuple(dict.fromkeys(name for plan in plans.values() for name in plan.variants))
    material = evaluation_material(tokenizer, text, options)
    if bundle is None:
        calibration = calibration_tokens(tokenizer, text, options)
        variants = make_variant_set(model, names, options.quantizer, calibration, told)
    else:
        made = bundle_variants(bundle, model)
        variants = VariantSet(model, _counted(made, "reading", model.num_layers * len(names), told))
    told("full precision", 0, 1)
    examiner = Examiner(LoweredModel(model, variants.weights), tokenizer, material)
    results = [examiner.full(next(iter(plans)))]
    steps = [(name, level) for name, plan in plans.items() for level in range(1, len(plan.levels))]
    for count, (name, level) in enumerate(steps):
        told(f"{name}, level {level}", count, len(steps))
        results += examiner.examine(name, plans[name], level, variants.freed_bytes)
    return QualityReport(
        model=folder.name,
        model_digest=identity.digest,
        settings=settings_of(text, material, options),
        plans={name: plan.digest for name, plan in plans.items()},
        provenance=asdict(origin),
        results=results,
    )


def _check_split(calibration: Mapping[str, Any], evaluated: TextOrigin) -> None:
    """Raises ValueError where a bundle was calibrated on what is to be evaluated on."""
    same_text = calibration.get("source") == evaluated.source
    if same_text and calibration["calibration_sha256"] != evaluated.calibration_sha256:
        raise ValueError(
            f"the bundle was calibrated on another half of {evaluated.source}, which overlaps what "
            f"would be evaluated on; give --seed {calibration['seed']}, that of its profile"
        )


def _plans(
    choice: PlanChoice, bundle: Bundle | None, identity: ModelIdentity, seed: int
) -> dict[str, PrecisionPlan]:
    """By name. Raises `PlanError`."""
    if bundle is not None:
        return {bundle.folder.name: bundle.plan}
    if choice.plan is None:
        return default_plans(identity, choice.variants, choice.orders, seed)
    plan = PrecisionPlan.load(choice.plan)
    plan.check_model(identity)
    return {choice.plan.stem: plan}
