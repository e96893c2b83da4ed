from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sglang_morph.bundle.errors import BundleError
from sglang_morph.cli import app
from sglang_morph.precision.quantizers.registry import create_layer_quantizer
from sglang_morph.profiling.model import LayeredModel
from sglang_morph.profiling.profile import Calibration, profile
from sglang_morph.profiling.ranking import Search
from sglang_morph.profiling.text import load_text
from sglang_morph.profiling.variants import make_variants
from sglang_morph.quality.bundle_variants import bundle_variants, open_bundle
from sglang_morph.quality.report import read_report

INTEGERS = ("int8", "int4", "int3")
CALIBRATION = Calibration(blocks=2, length=32)


def make_bundle(checkpoint: Path, out: Path, names: Sequence[str], quantizer: str = "rtn") -> Path:
    model, chosen = LayeredModel.load(checkpoint), create_layer_quantizer(quantizer)
    search = Search("back")
    profile(checkpoint, model, load_text(), names, chosen, CALIBRATION, search, out)
    return out


@pytest.mark.parametrize(
    ("names", "quantizer"),
    [(INTEGERS, "rtn"), (INTEGERS, "awq"), (INTEGERS, "gptq"), (("fp8", "int4"), "rtn")],
)
def test_decoded_weights_are_those_that_were_encoded(
    checkpoint: Path, model: LayeredModel, tmp_path: Path, names: Sequence[str], quantizer: str
) -> None:
    folder = make_bundle(checkpoint, tmp_path / "b", names, quantizer)
    bundle = open_bundle(folder, checkpoint, model)
    found = {(one.layer, one.name): one for one in bundle_variants(bundle, model)}
    tokens = CALIBRATION.token_ids(load_text(), checkpoint)
    for made in make_variants(model, names, create_layer_quantizer(quantizer), tokens):
        read = found.pop((made.layer, made.name))
        assert read.nbytes == made.nbytes
        changed = {path: w for path, w in made.weights.items() if path in read.weights}
        assert len(changed) >= 4
        for path, weight in changed.items():
            assert torch.allclose(read.weights[path], weight, rtol=1e-6, atol=0), (made.name, path)
        kept = made.weights.keys() - read.weights.keys()  # norms as loaded are not stored
        assert all(torch.equal(made.weights[p], model.norms(made.layer)[p].float()) for p in kept)
    assert not found


def test_the_levels_of_a_bundle_are_measured(checkpoint: Path, tmp_path: Path) -> None:
    bundle = make_bundle(checkpoint, tmp_path / "b", INTEGERS, "awq")
    arguments = ["quality", str(checkpoint), "--bundle", str(bundle), "--blocks", "3"]
    arguments += ["--block-tokens", "16", "--tokens", "4", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    report = read_report(tmp_path / "out" / "quality.json")
    layers = [r.layers for r in report.results if r.text is not None]
    assert layers == [{}, {"int8": 1}, {"int8": 2}, *({name: 4} for name in INTEGERS)]


def test_a_bundle_is_not_evaluated_on_what_it_was_calibrated_on(
    checkpoint: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(checkpoint, tmp_path / "b", ["int4"], "awq")
    arguments = ["quality", str(checkpoint), "--bundle", str(bundle), "--seed", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "give --seed 0" in done.stderr


def test_a_damaged_bundle_is_refused(checkpoint: Path, model: LayeredModel, tmp_path: Path) -> None:
    folder = make_bundle(checkpoint, tmp_path / "b", ["int4"])
    file = next(folder.glob("int4/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(BundleError, match="SHA-256"):
        open_bundle(folder, checkpoint, model)
