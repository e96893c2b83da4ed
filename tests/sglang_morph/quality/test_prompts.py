from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from transformers import AutoTokenizer

from sglang_morph.quality.prompts import (
    PromptsError,
    ReferencePrompt,
    docstring_prompts,
    encode,
    read_prompts,
)


def test_longbench_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    rows = [
        {"input": "Who?", "context": "Ada was.", "answers": ["Ada", "Lovelace"], "length": 3},
        {"input": "", "context": "To be summed up.", "answers": ["sum"], "all_classes": None},
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)) + b"\n\n")
    assert read_prompts(file) == [
        ReferencePrompt("Ada was.\n\nWho?", ("Ada", "Lovelace")),
        ReferencePrompt("To be summed up.", ("sum",)),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: .*LongBench"),
        ('{"input": "x"}', "line 2: .*answers"),
        ('{"input": "x", "answers": []}', "line 2: no answers"),
        ('{"input": " ", "answers": ["x"]}', "line 2: no context or input"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"input": "x", "answers": ["y"]}\n' + line, encoding="utf-8")
    with pytest.raises(PromptsError, match=reason):
        read_prompts(file)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="can't be read"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(PromptsError, match="is empty"):
        read_prompts(tmp_path / "empty.jsonl")


def test_docstrings_do_not_give_their_answer_away() -> None:
    found = docstring_prompts(24, seed=1)
    assert len(found) == len({prompt.answers for prompt in found}) == 24
    assert all(prompt.answers[0] not in prompt.text for prompt in found)
    assert found == docstring_prompts(24, seed=1)
    assert found != docstring_prompts(24, seed=2)


def test_a_long_prompt_loses_its_middle(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = ReferencePrompt("begin " + "and so on " * 200 + "end", ("x",))
    (short,) = encode(tokenizer, [prompt], 20)
    assert len(short) <= 22  # a cut may fall within a word
    text = tokenizer.decode(short)
    assert text.startswith("begin")
    assert text.endswith("end")
    (whole,) = encode(tokenizer, [prompt], 10_000)
    assert tokenizer.decode(whole) == prompt.text


def test_a_chat_template_is_used(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = "U:{{ messages[0]['content'] }}|A:"
    (ids,) = encode(tokenizer, [ReferencePrompt("why", ("x",))], 100)
    assert tokenizer.decode(ids) == "U:why|A:"
