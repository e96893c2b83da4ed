"""The bundle a server starts with: the one it was given, or one of its own in the cache."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.progress import track

from memory_backends.base import MorphableLayer
from sglang_morph import __version__
from sglang_morph.bundle import AUTO
from sglang_morph.bundle.bundle import Bundle, Served
from sglang_morph.bundle.cache import bundle_folder
from sglang_morph.bundle.checkpoint import checkpoint_digest, checkpoint_folder
from sglang_morph.bundle.errors import BundleError
from sglang_morph.bundle.source import BundleSource
from sglang_morph.bundle.writer import BundleWriter
from sglang_morph.precision.names import MORPHABLE_LINEARS
from sglang_morph.precision.plan import ModelIdentity, default_plan
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.variants.base import DerivedVariant
from sglang_morph.precision.variants.registry import create_variant

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors")
"""Of SGLang's `--load-format`: those that load what the checkpoint's files hold."""

_QUANTIZER = RoundToNearest.name


def check_bundle(server_args: Any, bundle: str) -> None:
    """Before anything is loaded: raises `BundleError` where a bundle given by its folder is
    damaged or made for something else. `auto` is left for later: the model may not be there yet.
    """
    if server_args.load_format not in LOAD_FORMATS:
        raise BundleError(
            f"--load-format {server_args.load_format} may load other weights than a bundle's; "
            f"use {' or '.join(LOAD_FORMATS)}, or leave out --morph-bundle"
        )
    if bundle != AUTO:
        opened = Bundle.open(Path(bundle))
        opened.check_served(served_by(server_args.get_model_config(), server_args.device))
        opened.check_layouts()
        opened.check_files()


def served_by(model_config: Any, device_type: str) -> Served:
    """Of SGLang's model configuration. Raises `BundleError` unless the model's files are here."""
    folder = checkpoint_folder(model_config.model_path, model_config.revision)
    return Served(
        ModelIdentity.from_hf_config(model_config.hf_text_config),
        checkpoint_digest(folder),
        device_type,
        str(model_config.dtype).removeprefix("torch."),
    )


def source_for(
    bundle: str,
    model_config: Any,
    device_type: str,
    variants: Sequence[str],
    layers: Callable[[], Sequence[MorphableLayer]],
) -> BundleSource | None:
    """The source of `variants` that `bundle`, a folder or `auto`, stands for.

    `layers` finds the loaded model's, to make what `auto` lacks; None where there is nothing to
    keep, or the cache cannot be used. Raises `BundleError` for a folder that does not fit.
    """
    if bundle != AUTO:
        opened = Bundle.open(Path(bundle))
        opened.check_served(served_by(model_config, device_type))
        return BundleSource(opened)
    try:
        return _cached_or_made(model_config, device_type, variants, layers)
    except (BundleError, OSError) as error:
        logger.warning("The variants are not kept for the next start: %s", error)
        return None


def _cached_or_made(
    model_config: Any,
    device_type: str,
    variants: Sequence[str],
    layers: Callable[[], Sequence[MorphableLayer]],
) -> BundleSource | None:
    encoders = {name: create_variant(name, device_type, RoundToNearest()) for name in variants}
    layouts = {
        name: encoder.layout
        for name, encoder in encoders.items()
        if not isinstance(encoder, DerivedVariant)
    }
    if not layouts:
        return None
    served = served_by(model_config, device_type)
    fingerprint = _fingerprint(served, layouts)
    target = bundle_folder(model_config.model_path, fingerprint)
    with BundleWriter(target, fingerprint, wait=True) as writer:
        bundle = _intact(writer)
        if bundle is None:
            bundle = _make(writer, served, layouts, layers())
            logger.info("Wrote the variants to %s for the next start", target)
    return BundleSource(bundle)


def _intact(writer: BundleWriter) -> Bundle | None:
    """What is there already; a damaged one is removed."""
    try:
        found = writer.finished()
        if found is not None:
            found.check_files()
        return found
    except ValueError as error:
        logger.warning("%s; making it again", error)
        shutil.rmtree(writer.target)
        return writer.finished()


def _make(
    writer: BundleWriter, served: Served, layouts: dict[str, str], layers: Sequence[MorphableLayer]
) -> Bundle:
    for layer in track(layers, description="Quantizing layers"):
        full = {name: tensor.cpu() for name, tensor in layer.full_tensors().items()}
        for name, layout in layouts.items():
            tensors = layer.variant_tensors(name, full)
            writer.add(layer.index, name, tensors, dict.fromkeys(MORPHABLE_LINEARS, layout))
    for name in layouts:
        writer.describe(name, _QUANTIZER)
    return writer.publish(default_plan(served.model, list(layouts)), served, calibration={})


def _fingerprint(served: Served, layouts: dict[str, str]) -> str:
    content = {
        "tool_version": __version__,
        "checkpoint": served.checkpoint_digest,
        "device": served.device,
        "dtype": served.dtype,
        "layouts": layouts,
        "quantizer": _QUANTIZER,
    }
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()
