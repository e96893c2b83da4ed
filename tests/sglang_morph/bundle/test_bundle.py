from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_morph.bundle.bundle import Bundle, Served
from sglang_morph.bundle.checkpoint import checkpoint_digest, checkpoint_folder
from sglang_morph.bundle.errors import BundleError
from sglang_morph.bundle.layer_file import read_layer, write_layer
from sglang_morph.bundle.manifest import MANIFEST
from sglang_morph.bundle.source import BundleSource
from sglang_morph.bundle.writer import BundleWriter
from sglang_morph.precision.plan import ModelIdentity, PlanError, default_plan
from sglang_morph.precision.sources import SourceError
from sglang_morph.precision.variants.int8_cpu import Int8Cpu

IDENTITY = ModelIdentity("LlamaForCausalLM", 2, 64, 96, 4, 2, 256)
SERVED = Served(IDENTITY, "digest of the weights", "cpu", "bfloat16")


def write(target: Path, fingerprint: str = "one", layout: str = "Int8Cpu-1") -> Bundle:
    with BundleWriter(target, fingerprint) as writer:
        assert writer.finished() is None
        for layer in range(2):
            tensors = {
                "mlp.down_proj.scales": torch.full((4,), float(layer)),
                "mlp.down_proj.codes": torch.full((4, 8), layer, dtype=torch.int8),
            }
            writer.add(layer, "int8", tensors, {"mlp.down_proj": layout})
        writer.describe("int8", "rtn")
        return writer.publish(default_plan(IDENTITY, ["int8"]), SERVED, {}, b"{}")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write(tmp_path / "bundle")


def test_round_trip(bundle: Bundle) -> None:
    bundle.check_files()
    bundle.check_served(SERVED)
    bundle.check_layouts()
    assert bundle.plan == default_plan(IDENTITY, ["int8"])
    tensors = BundleSource(bundle).tensors(1, "int8")
    assert tensors is not None
    assert list(tensors) == ["mlp.down_proj.scales", "mlp.down_proj.codes"]
    assert torch.equal(tensors["mlp.down_proj.codes"], torch.ones(4, 8, dtype=torch.int8))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, r"int8/layer_001.safetensors has \d+ bytes, not \d+"),
        (flip_a_bit, "SHA-256 of int8/layer_001.safetensors is not the recorded one"),
        (Path.unlink, "int8/layer_001.safetensors: No such file"),
    ],
)
def test_damaged_tensors(bundle: Bundle, damage: Callable[[Path], None], reason: str) -> None:
    damage(bundle.folder / "int8/layer_001.safetensors")
    with pytest.raises(BundleError, match=f"is damaged: .*{reason}") as refused:
        bundle.check_files()
    assert "\n" not in str(refused.value)


def test_swapped_layers(bundle: Bundle) -> None:
    first, second = (bundle.folder / f"int8/layer_00{i}.safetensors" for i in (0, 1))
    first.rename(first.with_suffix(".x"))
    second.rename(first)
    first.with_suffix(".x").rename(second)
    with pytest.raises(BundleError, match="SHA-256 of int8/layer_000.safetensors"):
        bundle.check_files()


@pytest.mark.parametrize("name", ["plan.json", "bundle.json"])
def test_damaged_documents(bundle: Bundle, name: str) -> None:
    truncate(bundle.folder / name)
    with pytest.raises(BundleError, match=f"is damaged: {name}"):
        Bundle.open(bundle.folder)


def test_a_plan_of_another_bundle(bundle: Bundle, tmp_path: Path) -> None:
    default_plan(IDENTITY, ["int8"], "back").save(bundle.folder / "plan.json")
    with pytest.raises(BundleError, match="plan.json"):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checkpoint_digest": "another"}, "other weights than this checkpoint's"),
        ({"model": dataclasses.replace(IDENTITY, vocab_size=7)}, "a model of another shape"),
        ({"device": "cuda"}, "device cpu, not cuda"),
        ({"dtype": "float16"}, "weights in bfloat16, not float16"),
    ],
)
def test_foreign_bundles(bundle: Bundle, change: dict, reason: str) -> None:
    with pytest.raises(BundleError, match=f"was made for {reason}; give this model's bundle"):
        bundle.check_served(dataclasses.replace(SERVED, **change))


def test_a_cpu_serves_16_bit_weights_in_float32(bundle: Bundle) -> None:
    bundle.check_served(dataclasses.replace(SERVED, dtype="float32"))


def test_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write(tmp_path / "bundle")
    monkeypatch.setattr(Int8Cpu, "layout_version", 2)
    with pytest.raises(BundleError, match="as Int8Cpu-1, the kernel here reads Int8Cpu-2"):
        bundle.check_layouts()


def test_folders_that_are_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is no morph bundle .*No such file"):
        Bundle.open(tmp_path / "missing")
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(BundleError, match="schema version None"):
        Bundle.open(tmp_path)


def test_another_schema(bundle: Bundle) -> None:
    path = bundle.folder / MANIFEST
    document = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(document | {"schema_version": 2}))
    with pytest.raises(BundleError, match="has schema version 2, this program reads 1"):
        Bundle.open(bundle.folder)
    path.write_bytes(msgspec.json.encode(document | {"model": 3}))
    with pytest.raises(BundleError, match="is damaged: bundle.json: Expected"):
        Bundle.open(bundle.folder)


def test_a_plan_for_other_variants_is_refused(bundle: Bundle) -> None:
    plan = bundle.folder / "plan.json"
    plan.write_text(plan.read_text().replace('"int8"', '"int9"'))
    with pytest.raises((BundleError, PlanError)):
        Bundle.open(bundle.folder)


def test_a_layer_that_cannot_be_read(bundle: Bundle) -> None:
    (bundle.folder / "int8/layer_000.safetensors").write_bytes(b"nothing")
    with pytest.raises(SourceError, match="layer 0 in int8 cannot be read"):
        BundleSource(bundle).tensors(0, "int8")


def test_layer_files_take_views_and_tensors_that_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    write_layer(tmp_path / "layer.safetensors", {"b": whole.t(), "a": whole})
    found = read_layer(tmp_path / "layer.safetensors")
    assert list(found) == ["b", "a"]
    assert torch.equal(found["b"], whole.t())
    save_file({"a": whole}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not a layer of a bundle"):
        read_layer(tmp_path / "other.safetensors")


def test_what_a_killed_writer_left(tmp_path: Path) -> None:
    def begin(fingerprint: str) -> list[str]:
        with BundleWriter(tmp_path / "bundle", fingerprint) as writer:
            assert writer.finished() is None
            found = [path.name for path in writer.work.rglob("*.safetensors")]
            writer.add(0, "int8", {"a": torch.zeros(1)}, {})
            return found

    assert begin("one") == []
    assert begin("one") == ["layer_000.safetensors"]
    assert begin("other") == []
    assert not (tmp_path / "bundle").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot be written"):
        BundleWriter(tmp_path / "file" / "bundle", "one").__enter__()


# Checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        tensors = {f"{number}.{name}": torch.randn(50, 70, generator=generator) for name in "ab"}
        save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


def test_equal_checkpoints_have_equal_digests(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert checkpoint_digest(tmp_path / "copy") == checkpoint_digest(checkpoint)


@pytest.mark.parametrize("element", [0, 1750])
def test_other_weights_have_another_digest(checkpoint: Path, element: int) -> None:
    before = checkpoint_digest(checkpoint)
    path = checkpoint / "model-1.safetensors"
    tensors = load_file(path)
    tensors["1.b"].view(-1)[element] += 1
    save_file(tensors, path)
    assert checkpoint_digest(checkpoint) != before


def test_checkpoints_that_cannot_be_told(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model-0.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(BundleError, match="model-0.safetensors is not a whole safetensors file"):
        checkpoint_digest(checkpoint)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="has no safetensors files"):
        checkpoint_digest(tmp_path / "empty")


def test_a_model_path_is_a_folder_or_in_the_hubs_cache(checkpoint: Path) -> None:
    assert checkpoint_folder(str(checkpoint)) == checkpoint
    with pytest.raises(BundleError, match="download the model first"):
        checkpoint_folder("someone/some-model")
