"""Flags and options are two spellings of one value."""

from __future__ import annotations

import shlex
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.flags import (
    FLAGS,
    OneLineParser,
    add_flags,
    options_from_text,
    parse_options,
    to_argv,
)
from sglang_morph.options import MorphOptions
from sglang_morph.refusals import MorphRefusal

names = st.text("abcxyz0189_", min_size=1, max_size=8)
numbers = st.floats(allow_nan=False)


def test_every_option_has_its_flag() -> None:
    assert sorted(f.field for f in FLAGS) == sorted(field.name for field in fields(MorphOptions))
    assert FLAGS[0].name == "--memory-backend"
    assert all(flag.name.startswith("--morph-") for flag in FLAGS[1:])


def test_no_flags_are_the_defaults() -> None:
    assert parse_options([]) == MorphOptions()
    assert to_argv(MorphOptions()) == []


@given(
    st.builds(
        MorphOptions,
        memory_backend=names,
        policy=names,
        variants=st.lists(names, max_size=3).map(tuple),
        plan=st.none() | st.text(st.characters(codec="ascii", min_codepoint=48), min_size=1),
        order=st.sampled_from(["front", "back"]),
        max_level=st.none() | st.integers(0, 99),
        enter_pressure=numbers.map(abs),
        event_log=st.none() | names.map(lambda name: f"a folder/it's {name}"),
    )
)
def test_flags_round_trip(options: MorphOptions) -> None:
    assert parse_options(to_argv(options)) == options
    assert options_from_text(shlex.join(to_argv(options))) == options


def test_variants_are_split_at_commas() -> None:
    assert parse_options(["--morph-variants", "int8, int4,"]).variants == ("int8", "int4")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--morph-max-level", "high"], "--morph-max-level: invalid int value: 'high'"),
        (["--morph-enter-hold-s"], "--morph-enter-hold-s: expected one argument"),
        (["--memory-back", "static"], "unrecognized arguments: --memory-back"),
        (["--tp", "2"], "unrecognized arguments: --tp 2"),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(MorphRefusal, match=message) as refusal:
        parse_options(argv)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["--morph-plan 'a", "--morph-max-level x"])
def test_bad_text_names_the_variable(text: str) -> None:
    with pytest.raises(MorphRefusal, match="SGLANG_MORPH: "):
        options_from_text(text)


def test_help_has_defaults_and_units() -> None:
    parser = OneLineParser(prog="test")
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "Shortest stay at a level. Default: the policy's." in text
    assert "--morph-min-dwell-s SECONDS" in text
    assert text.count("Default: ") == len(FLAGS)
