from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_morph.bundle.bundle import Bundle
from sglang_morph.bundle.cache import CACHE_VARIABLE
from sglang_morph.bundle.errors import BundleError
from sglang_morph.bundle.serving import check_bundle, source_for
from sglang_morph.bundle.source import BundleSource
from sglang_morph.flags import parse_options, to_argv
from sglang_morph.option_checks import check_options
from sglang_morph.options import MorphOptions
from sglang_morph.precision.layers import SglangLayer, find_morphable_layers
from sglang_morph.preflight import make_plan
from sglang_morph.refusals import MorphRefusal
from tests.sglang_morph.precision.test_layers import SIZES, llama

pytestmark = pytest.mark.usefixtures("sglang_distributed")

VARIANTS = ("int8", "int4")


@pytest.fixture(scope="module")
def model(sglang_distributed: None) -> Any:
    return llama()


@pytest.fixture
def served(tmp_path: Path) -> SimpleNamespace:
    """SGLang's configuration of a model whose files are in a folder."""
    from transformers import LlamaConfig

    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    return SimpleNamespace(
        model_path=str(folder), revision=None, hf_text_config=config, dtype=torch.float32
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "bundles"


Start = Callable[..., "BundleSource | None"]


@pytest.fixture
def start(model: Any, served: SimpleNamespace) -> Start:
    def start(bundle: str = "auto", variants: Sequence[str] = VARIANTS) -> BundleSource | None:
        def layers() -> list[SglangLayer]:
            return find_morphable_layers(model, variants)

        return source_for(bundle, served, "cpu", variants, layers)

    return start


def test_the_first_start_makes_what_the_next_one_reads(
    start: Start, model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    assert first is not None
    [folder] = cache.glob("tiny-*")
    plain = find_morphable_layers(model, VARIANTS)
    full = [layer.full_tensors() for layer in plain]
    expected = [layer.variant_tensors("int4", full[layer.index]) for layer in plain]

    monkeypatch.setattr(SglangLayer, "_collect", lambda *_: pytest.fail("quantized again"))
    second = start(str(folder))
    assert second is not None
    for source in (start(), second):
        layers = find_morphable_layers(model, VARIANTS, source=source)
        for layer in layers:
            found = layer.variant_tensors("int4", full[layer.index])
            assert list(found) == list(expected[layer.index])
            for name, tensor in expected[layer.index].items():
                assert torch.equal(found[name], tensor)


def test_a_damaged_bundle_in_the_cache_is_made_again(
    start: Start, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    [folder] = cache.glob("tiny-*")
    damaged = folder / "int8" / "layer_001.safetensors"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    assert start() is not None
    assert "is damaged" in caplog.text
    assert damaged.read_bytes() == content


def test_other_weights_have_a_bundle_of_their_own(
    start: Start, served: SimpleNamespace, cache: Path
) -> None:
    start()
    save_file({"weight": torch.ones(3)}, Path(served.model_path) / "model.safetensors")
    start()
    folders = list(cache.glob("tiny-*"))
    assert len(folders) == 2
    with pytest.raises(BundleError, match="other weights than this checkpoint's"):
        for folder in folders:
            start(str(folder))


def test_variants_that_are_derived_are_not_kept(start: Start, cache: Path) -> None:
    assert start(variants=("fp8",)) is None
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_does_not_stop_the_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert start() is None
    assert "not kept for the next start" in caplog.text


# What the launcher checks


def test_the_plan_is_the_bundles(start: Start, served: SimpleNamespace, cache: Path) -> None:
    start()
    [folder] = cache.glob("tiny-*")
    options = MorphOptions(memory_backend="layer_swap", bundle=str(folder), levels=(1,))
    plan = make_plan(served.hf_text_config, options, "cpu")
    assert plan == Bundle.open(folder).plan.with_levels((1,))
    served.hf_text_config.vocab_size += 1
    with pytest.raises(MorphRefusal, match="the precision plan is for another model: vocab_size"):
        make_plan(served.hf_text_config, options, "cpu")
    missing = MorphOptions(memory_backend="layer_swap", bundle=str(cache / "missing"))
    with pytest.raises(MorphRefusal, match="is no morph bundle"):
        make_plan(served.hf_text_config, missing, "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bundle": "folder", "plan": "plan.json"}, "brings its own plan"),
        ({"bundle": "folder", "variants": ("int8",)}, "brings its own plan"),
        ({"bundle": "auto", "variant_checkpoint": "folder"}, "both bring variants"),
    ],
)
def test_options_that_contradict_a_bundle(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MorphRefusal, match=message):
        check_options(MorphOptions(memory_backend="layer_swap", **options), "cpu")


def test_flag() -> None:
    assert parse_options(["--morph-bundle", "none"]).bundle is None
    assert parse_options(["--morph-bundle", "auto"]).bundle == "auto"
    assert to_argv(parse_options(["--morph-bundle", "a b"])) == ["--morph-bundle", "a b"]


@pytest.fixture
def arguments(served: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(load_format="auto", device="cpu", get_model_config=lambda: served)


def test_a_bundle_of_this_model_is_accepted(
    start: Start, arguments: SimpleNamespace, cache: Path
) -> None:
    start()
    [folder] = cache.glob("tiny-*")
    check_bundle(arguments, str(folder))
    check_bundle(arguments, "auto")


def test_damage_is_found_before_anything_is_loaded(
    start: Start, arguments: SimpleNamespace, cache: Path
) -> None:
    start()
    [folder] = cache.glob("tiny-*")
    shutil.copy(folder / "int8/layer_000.safetensors", folder / "int8/layer_001.safetensors")
    with pytest.raises(BundleError, match="SHA-256 of int8/layer_001.safetensors"):
        check_bundle(arguments, str(folder))


@pytest.mark.parametrize("bundle", ["auto", "somewhere"])
def test_made_up_weights_have_no_bundle(arguments: SimpleNamespace, bundle: str) -> None:
    arguments.load_format = "dummy"
    with pytest.raises(BundleError, match="--load-format dummy may load other weights"):
        check_bundle(arguments, bundle)
