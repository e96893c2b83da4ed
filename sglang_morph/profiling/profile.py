"""`sglang-morph profile`: from a model and a text to a morph bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import orjson
import torch

from sglang_morph import __version__
from sglang_morph.bundle.bundle import Bundle, Served
from sglang_morph.bundle.cache import bundle_folder
from sglang_morph.bundle.checkpoint import checkpoint_digest
from sglang_morph.bundle.writer import BundleWriter
from sglang_morph.precision.plan import ModelIdentity, PrecisionPlan, plan_in_order
from sglang_morph.precision.quantizers.layer import LayerQuantizer
from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.model import LayeredModel, Weights
from sglang_morph.profiling.ranking import FIXED_ORDERS, Ladder, Ranking, Search, rank
from sglang_morph.profiling.text import SplitText, token_blocks
from sglang_morph.profiling.variants import MadeVariant, make_variants, quantizer_for

EVALUATIONS = "evaluations.jsonl"
"""In the unfinished bundle: what has been measured so far."""

QUANTIZING, RANKING = "quantizing", "ranking"

OnProgress = Callable[[str, float], None]
"""Told what is being done, and how much of it is, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What part of the text is used."""

    blocks: int
    """Number of token blocks."""
    length: int
    """Tokens of each."""
    seed: int = 0

    def token_ids(self, text: SplitText, folder: Path) -> torch.Tensor:
        """`[blocks, length]`. Raises `TextError` where the text is too short."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        # verbose: it would warn that the text is longer than the model's context.
        tokens = tokenizer(text.calibration, add_special_tokens=False, verbose=False).input_ids
        return torch.tensor(token_blocks(tokens, self.length, self.blocks, self.seed))


@dataclass(frozen=True, slots=True)
class Profile:
    """A bundle, and how its order was found; None where the bundle was there already."""

    bundle: Bundle
    ranking: Ranking | None


def profile(
    folder: Path,
    model: LayeredModel,
    text: SplitText,
    variants: Sequence[str],
    quantizer: LayerQuantizer,
    calibration: Calibration,
    search: Search,
    out: Path | None = None,
    on_progress: OnProgress = lambda phase, done: None,
) -> Profile:
    """Write the bundle of `model`, loaded from `folder`, to `out` (None: into the cache).

    What a killed run has measured is used. Raises `BundleError`, `PlanError`, `TextError`, or
    ValueError for a variant that does not suit the model.
    """
    served = Served(
        ModelIdentity.from_hf_config(model.config),
        checkpoint_digest(folder),
        model.device.type,
        str(model.served_dtype).removeprefix("torch."),
    )
    fingerprint = _fingerprint(served, text, variants, quantizer, calibration, search)
    target = bundle_folder(folder.resolve().name, fingerprint) if out is None else out
    plan_in_order(served.model, dict.fromkeys(variants, range(model.num_layers)), "")  # refuses
    with BundleWriter(target, fingerprint) as writer:
        if found := writer.finished():
            return Profile(found, None)
        token_ids = calibration.token_ids(text, folder)
        made = make_variants(model, variants, quantizer, token_ids)
        stored = _stored(writer, made, model.num_layers * len(variants), on_progress)
        ladder = collect(stored, model, variants, keep=search.order not in FIXED_ORDERS)
        evaluations = Evaluations(writer.work / EVALUATIONS, fingerprint)
        ranking = rank(model, token_ids, ladder, search, evaluations, partial(on_progress, RANKING))
        evaluations.close()
        (writer.work / EVALUATIONS).unlink()
        used = {**text.origin.as_document(), **asdict(calibration)}
        plan = _plan(served, ranking, search, text)
        for name in variants:
            writer.describe(name, quantizer_for(name, quantizer).name)
        return Profile(writer.publish(plan, served, used, _scores(ranking, search)), ranking)


def _fingerprint(
    served: Served,
    text: SplitText,
    variants: Sequence[str],
    quantizer: LayerQuantizer,
    calibration: Calibration,
    search: Search,
) -> str:
    content = {
        "tool_version": __version__,
        "served": asdict(served),
        "text": text.origin.calibration_sha256,
        "variants": list(variants),
        "quantizer": quantizer.name,
        "calibration": asdict(calibration),
        "search": asdict(replace(search, batch=1)),
    }
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def collect(
    made: Iterable[MadeVariant],
    model: LayeredModel,
    variants: Sequence[str],
    keep: bool = True,
) -> Ladder:
    """All that is `made` by `make_variants`; without `keep` only its sizes."""
    weights: dict[str, list[Weights]] = {name: [] for name in variants}
    freed: dict[str, list[int]] = {name: [] for name in variants}
    before = 0
    for one in made:
        if one.name == variants[0]:
            before = model.weight_bytes(one.layer)
        freed[one.name].append(before - one.nbytes)
        before = one.nbytes
        weights[one.name].append(one.weights if keep else {})
    return Ladder(weights, freed)


def _stored(
    writer: BundleWriter, made: Iterable[MadeVariant], total: int, on_progress: OnProgress
) -> Iterator[MadeVariant]:
    """Passes on what is `made`, `total` in all, after writing it."""
    for number, one in enumerate(made, start=1):
        if one.tensors is not None:
            writer.add(one.layer, one.name, one.tensors, one.layouts)
        on_progress(QUANTIZING, number / total)
        yield one


def _plan(served: Served, ranking: Ranking, search: Search, text: SplitText) -> PrecisionPlan:
    measured = search.order not in FIXED_ORDERS
    plan = plan_in_order(served.model, ranking.orders(), f"order {search.order}")
    return replace(
        plan,
        checkpoint_digest=served.checkpoint_digest if measured else "",
        calibration_digest=text.origin.calibration_sha256 if measured else "",
    )


def _scores(ranking: Ranking, search: Search) -> bytes:
    content = {"search": search, "ranking": ranking, "saved": ranking.forwards_saved_ratio}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
