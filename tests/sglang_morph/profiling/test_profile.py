from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from sglang_morph.bundle.bundle import Bundle
from sglang_morph.bundle.cache import CACHE_VARIABLE
from sglang_morph.bundle.errors import BundleError
from sglang_morph.bundle.manifest import SCORES
from sglang_morph.bundle.source import BundleSource
from sglang_morph.cli import app
from sglang_morph.precision.names import MORPHABLE_LINEARS
from sglang_morph.precision.quantizers.registry import create_layer_quantizer
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.variants.registry import create_variant
from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.profile import Calibration, Profile, profile
from sglang_morph.profiling.ranking import Search
from sglang_morph.profiling.text import load_text
from tests.sglang_morph.profiling.conftest import LAYERS

VARIANTS = ("int8", "int4")
Make = Callable[..., Profile]


@pytest.fixture
def make(llama_folder: Path, llama: LayeredModel) -> Make:
    def make(
        out: Path, order: str = "lis", quantizer: str = "rtn", variants: tuple = VARIANTS, seed=0
    ) -> Profile:
        return profile(
            llama_folder,
            llama,
            load_text(seed=seed),
            variants,
            create_layer_quantizer(quantizer),
            Calibration(2, 16, seed),
            Search(order, seed=seed),
            out,
        )

    return make


@pytest.mark.parametrize("order", ["lis", "kl", "front"])
def test_a_bundle_holds_plan_and_variants(make: Make, tmp_path: Path, order: str) -> None:
    done = make(tmp_path / "bundle", order)
    assert done.ranking is not None
    bundle = Bundle.open(tmp_path / "bundle")
    bundle.check_files()
    bundle.check_layouts()
    assert bundle.plan.levels == (0, 1, 2, 4, 8)
    planned = [(step.variant, step.layer) for step in bundle.plan.steps]
    assert planned == [
        (v, layer) for v, layers in done.ranking.orders().items() for layer in layers
    ]
    measured = order != "front"
    assert bool(bundle.plan.checkpoint_digest) is bool(bundle.plan.calibration_digest) is measured
    scores = msgspec.json.decode((bundle.folder / SCORES).read_bytes())
    assert [stage["variant"] for stage in scores["ranking"]["stages"]] == list(VARIANTS)
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("quantizer", ["rtn", "awq", "gptq"])
def test_stored_tensors_are_what_the_kernels_read(
    make: Make, llama: LayeredModel, tmp_path: Path, quantizer: str
) -> None:
    source = BundleSource(make(tmp_path / "bundle", "front", quantizer).bundle)
    for name in VARIANTS:
        for layer in range(LAYERS):
            tensors = source.tensors(layer, name)
            assert tensors is not None
            for path, weight in llama.weights(layer).items():
                encoded = create_variant(name, "cpu", RoundToNearest()).encode(weight)
                stored = {part: tensors[f"{path}.{part}"] for part in encoded}
                assert {k: v.dtype for k, v in stored.items()} == {
                    k: v.dtype for k, v in encoded.items()
                }
                if quantizer == "rtn" or name != "int4":
                    assert all(torch.equal(stored[part], encoded[part]) for part in encoded)
    assert not source.provides(LAYERS, "int8")
    assert not source.provides(0, "int3")
    assert source.tensors(0, "fp8") is None


def test_the_order_of_a_layers_tensors_is_kept(make: Make, tmp_path: Path) -> None:
    tensors = BundleSource(make(tmp_path / "bundle", "front").bundle).tensors(0, "int8")
    assert tensors is not None
    paths = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    assert paths == list(MORPHABLE_LINEARS)


def test_derived_variants_are_not_stored(make: Make, tmp_path: Path) -> None:
    bundle = make(tmp_path / "bundle", "kl", variants=("fp8", "int4")).bundle
    assert bundle.manifest.variants["fp8"].layers == ()
    assert len(bundle.manifest.variants["int4"].layers) == LAYERS
    assert not BundleSource(bundle).provides(0, "fp8")


def test_a_finished_bundle_is_not_made_again(make: Make, tmp_path: Path) -> None:
    first = make(tmp_path / "bundle")
    again = make(tmp_path / "bundle")
    assert again.ranking is None
    assert again.bundle == first.bundle
    with pytest.raises(BundleError, match="holds a bundle of another model, text or setting"):
        make(tmp_path / "bundle", seed=1)


class Killed(Exception):
    pass


def test_a_killed_run_goes_on(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(tmp_path / "whole", "kl")
    put, puts = Evaluations.put, 0

    def dies_at_tenth(self: Evaluations, *arguments: object) -> None:
        nonlocal puts
        puts += 1
        if puts == 10:
            raise Killed
        put(self, *arguments)

    monkeypatch.setattr(Evaluations, "put", dies_at_tenth)
    with pytest.raises(Killed):
        make(tmp_path / "bundle", "kl")
    assert not (tmp_path / "bundle").exists()
    resumed = make(tmp_path / "bundle", "kl")
    assert puts == 10 + 22 - 9  # as many as a whole run puts, and the one that failed
    assert resumed.bundle.plan == whole.bundle.plan


def test_two_runs_at_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(*_: object) -> None:
        make(tmp_path / "bundle")

    monkeypatch.setattr(Evaluations, "put", second)
    with pytest.raises(BundleError, match="another process is writing"):
        make(tmp_path / "bundle")


def test_command(llama_folder: Path, tmp_path: Path) -> None:
    arguments = ["profile", str(llama_folder), "--variants", "int8,int4", "--device", "cpu"]
    arguments += ["--blocks", "1", "--length", "8", "--order", "lis", "--weights", "1,1,2"]
    environment = {CACHE_VARIABLE: str(tmp_path)}
    done = CliRunner().invoke(app, arguments, env=environment)
    assert done.exit_code == 0, done.output
    [folder] = (tmp_path / "bundles").glob("tiny-llama-*")
    assert str(folder) in done.output
    assert "int8: layers" in done.output
    again = CliRunner().invoke(app, arguments, env=environment)
    assert "there already" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--order", "middle"], "unknown order 'middle'"),
        (["--weights", "1,2"], "--weights is '1,2'; give three numbers"),
        (["--weights", "0,0,0"], "give three numbers"),
        (["--variants", "int5"], "variant 'int5' does not exist on device 'cpu'"),
        (["--variants", "int4,int8"], "no larger"),
        (["--quantizer", "best"], "unknown quantizer 'best'"),
        (["--dtype", "float64"], "--dtype is 'float64'"),
        (["--length", "100000000"], "ask for fewer or shorter blocks"),
    ],
)
def test_refused_arguments(
    llama_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    command = ["profile", str(llama_folder), "--device", "cpu", *arguments]
    done = CliRunner().invoke(app, command, env={CACHE_VARIABLE: str(tmp_path)})
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.strip().count("sglang_morph:") == 1


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["profile", "someone/some-model"], env={"HF_HUB_OFFLINE": "1"})
    assert done.exit_code == 2
    assert "is not on this machine" in done.output
