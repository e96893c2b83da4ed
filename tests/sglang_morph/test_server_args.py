"""MorphServerArgs: SGLang's arguments, ours, and what is checked when they are built."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.runtime_context import get_context, publish
from sglang.srt.server_args import ServerArgs

from sglang_morph.cpu.defaults import MAX_TOTAL_TOKENS
from sglang_morph.flags import FLAGS
from sglang_morph.options import MorphOptions
from sglang_morph.refusals import MorphRefusal
from sglang_morph.server_args import MorphServerArgs, prepare_morph_server_args


def parse(smollm2: Path, *argv: str) -> MorphServerArgs:
    return prepare_morph_server_args(["--model-path", str(smollm2), "--device", "cpu", *argv])


def test_options_survive_pickling_into_a_child(smollm2: Path) -> None:
    flags = ["--memory-backend", "layer_swap", "--morph-policy", "manual"]
    flags += ["--morph-variants", "int8", "--morph-min-dwell-s", "3.5"]
    args = parse(smollm2, *flags)
    expected = MorphOptions(
        memory_backend="layer_swap", policy="manual", variants=("int8",), min_dwell_s=3.5
    )
    assert args.morph == expected
    assert pickle.loads(pickle.dumps(args)).morph == expected


def test_published_arguments_keep_our_fields(smollm2: Path) -> None:
    args = parse(smollm2, "--memory-backend", "layer_swap")
    publish(args, role="test")
    resolved = get_context().resolved_server_args_dict()
    assert resolved["memory_backend"] == "layer_swap"
    assert {flag.dest for flag in FLAGS} <= resolved.keys()


def test_defaults_are_static(smollm2: Path) -> None:
    assert parse(smollm2).morph == MorphOptions()


def test_config_file_sets_our_flags_and_gives_way_to_the_command_line(
    smollm2: Path, tmp_path: Path
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("memory-backend: layer_swap\nmorph-policy: manual\nmax-total-tokens: 512\n")
    args = parse(smollm2, "--config", str(config), "--morph-policy", "threshold")
    assert args.morph == MorphOptions(memory_backend="layer_swap")
    assert args.max_total_tokens == 512


def test_missing_config_file_is_refused(smollm2: Path) -> None:
    with pytest.raises(MorphRefusal, match="--config: .*no-such.yaml"):
        parse(smollm2, "--config", "no-such.yaml")


def test_cpu_defaults_fill_what_is_open(smollm2: Path) -> None:
    args = parse(smollm2)
    assert args.attention_backend == "torch_native"
    assert args.sampling_backend == "pytorch"
    assert args.dtype == "float32"
    assert args.max_total_tokens == MAX_TOTAL_TOKENS


def test_cpu_defaults_give_way(smollm2: Path) -> None:
    args = parse(smollm2, "--dtype", "bfloat16", "--max-total-tokens", "64")
    assert (args.dtype, args.max_total_tokens) == ("bfloat16", 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--memory-backend", "swap"], "unknown memory backend"),
        (["--memory-backend", "layer_swap", "--page-size", "16"], "--page-size does not work"),
        (["--memory-backend", "layer_swap", "--morph-plan", "none.json"], "none.json"),
        (["--morph-max-level", "x"], "invalid int value"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refused_in_one_line(smollm2: Path, argv: list[str], message: str) -> None:
    with pytest.raises(MorphRefusal, match=message) as refusal:
        parse(smollm2, *argv)
    assert "\n" not in str(refusal.value)


def test_static_accepts_what_an_elastic_backend_refuses(smollm2: Path) -> None:
    assert parse(smollm2, "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all")


def test_arguments_are_sglangs(smollm2: Path) -> None:
    assert isinstance(parse(smollm2), ServerArgs)


def test_launcher_exits_with_one_line_before_it_starts_anything(smollm2: Path) -> None:
    command = [sys.executable, "-m", "sglang_morph.launch_server", "--model-path", str(smollm2)]
    command += ["--memory-backend", "layer_swap", "--morph-enter-pressure", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert not done.stdout
    ours = [line for line in done.stderr.splitlines() if line.startswith("sglang_morph: ")]
    assert len(ours) == 1
    assert "--morph-enter-pressure 0.3" in ours[0]
    assert "Traceback" not in done.stderr
