from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.profiling.text import (
    BLOCK_CHARACTERS,
    TextError,
    default_text,
    load_text,
    split_text,
    token_blocks,
)


def paragraphs(text: str) -> set[str]:
    return set(text.split("\n\n"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_text_is_split_without_a_paragraph_in_common(seed: int) -> None:
    found = load_text(seed=seed)
    assert not paragraphs(found.calibration) & paragraphs(found.evaluation)
    assert paragraphs(found.calibration) | paragraphs(found.evaluation) == paragraphs(
        default_text()
    )
    shorter, longer = sorted((len(found.calibration), len(found.evaluation)))
    assert shorter > 50_000
    assert longer < 1.2 * shorter


def test_the_split_depends_on_the_seed_alone() -> None:
    assert load_text(seed=3) == load_text(seed=3)
    assert load_text(seed=3).origin.evaluation_sha256 != load_text(seed=4).origin.evaluation_sha256


def test_the_default_text_is_prose() -> None:
    text = default_text()
    assert "::=" not in text
    assert ">>>" not in text
    assert "****" not in text
    assert sum(c.isalpha() or c.isspace() for c in text) > 0.9 * len(text)


@given(
    st.lists(st.text("abc \n", min_size=1, max_size=40), min_size=1, max_size=30),
    st.integers(0, 5),
)
def test_no_paragraph_is_on_both_sides(pieces: list[str], seed: int) -> None:
    # Whole paragraphs of a block's size, some of them repeated.
    content = "\n\n".join((piece * BLOCK_CHARACTERS)[:BLOCK_CHARACTERS] for piece in pieces * 2)
    try:
        found = split_text(content, "made up", seed)
    except TextError:
        return
    assert not paragraphs(found.calibration) & paragraphs(found.evaluation)


def test_a_text_without_blank_lines_is_split_as_well() -> None:
    words = " ".join(f"word{number}" for number in range(5000))
    found = split_text(words, "words")
    assert set(found.calibration.split()) | set(found.evaluation.split()) == set(words.split())
    assert not set(found.calibration.split()) & set(found.evaluation.split())


def test_a_file_is_named_in_the_origin_and_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "novel.txt"
    file.write_text("\n\n".join(f"{n} " + "prose " * 100 for n in range(40)), encoding="utf-8")
    assert load_text(file).origin.source == "novel.txt"
    file.write_text("short", encoding="utf-8")
    with pytest.raises(TextError, match="novel.txt .* longer text"):
        load_text(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TextError, match="not UTF-8"):
        load_text(file)
    with pytest.raises(TextError, match="can't be read"):
        load_text(tmp_path / "missing.txt")


def test_token_blocks_are_of_one_length_and_do_not_overlap() -> None:
    found = token_blocks(range(1000), 64, 10, seed=2)
    assert [len(block) for block in found] == [64] * 10
    flat = [token for block in found for token in block]
    assert flat == sorted(set(flat))
    assert found == token_blocks(range(1000), 64, 10, seed=2)
    assert found != token_blocks(range(1000), 64, 10, seed=3)
    assert len(token_blocks(range(1000), 64)) == 15


@pytest.mark.parametrize(("length", "count"), [(64, 16), (1001, None)])
def test_too_few_tokens_are_refused(length: int, count: int | None) -> None:
    with pytest.raises(TextError, match="1000 tokens"):
        token_blocks(range(1000), length, count)
