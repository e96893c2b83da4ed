"""Prompts with reference answers: LongBench's JSONL, or the docstrings that come with Python."""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

_MODULES = (
    *("bisect", "configparser", "contextlib", "csv", "datetime", "difflib", "fractions"),
    *("ftplib", "functools", "getpass", "glob", "graphlib", "heapq", "imaplib", "inspect"),
    *("ipaddress", "linecache", "locale", "mimetypes", "os", "pathlib", "platform", "queue"),
    *("random", "selectors", "shelve", "shutil", "smtplib", "socket", "statistics", "subprocess"),
    *("symtable", "tempfile", "textwrap", "threading", "timeit", "traceback", "types", "weakref"),
)
_SUMMARY_CHARACTERS = range(30, 121)
_BODY_CHARACTERS = range(250, 1501)
_MIN_LETTERS = 0.88
"""Share of letters and blanks in the body, so that it is prose."""


class PromptsError(ValueError):
    """Prompts can't be used. One line with cause and remedy."""


@dataclass(frozen=True, slots=True)
class ReferencePrompt:
    text: str
    answers: tuple[str, ...]
    """At least one."""


class _Row(msgspec.Struct, frozen=True):
    """What is read of a LongBench row."""

    answers: tuple[str, ...]
    input: str = ""
    context: str = ""


def read_prompts(path: Path) -> list[ReferencePrompt]:
    """Of a JSONL file with `context`, `input` and `answers`. Raises `PromptsError`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PromptsError(f"{path} can't be read: {error.strerror}; give a JSONL file") from error
    found = [
        _read_row(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise PromptsError(f"{path} is empty; give a line of JSON for each prompt")
    return found


def _read_row(line: bytes, where: str) -> ReferencePrompt:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError as error:
        raise PromptsError(f"{where}: {error}; LongBench's fields are needed") from error
    text = "\n\n".join(part for part in (row.context, row.input) if part.strip())
    if not text or not row.answers:
        raise PromptsError(f"{where}: no {'answers' if text else 'context or input'}; add some")
    return ReferencePrompt(text, row.answers)


def docstring_prompts(count: int, seed: int = 0) -> list[ReferencePrompt]:
    """The task: say in a sentence what something in the standard library does, by the rest of its
    docstring. The answer is the docstring's first line. Fewer than `count` where there are no more.
    """
    found = list({prompt.answers: prompt for prompt in _docstring_prompts()}.values())
    return random.Random(f"prompts {seed}").sample(found, min(count, len(found)))


def _docstring_prompts() -> Iterator[ReferencePrompt]:
    library = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        file = library / f"{module}.py"
        if not file.is_file():  # another version of Python
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield from _prompt_of(module, node.name, ast.get_docstring(node) or "")


def _prompt_of(module: str, name: str, docstring: str) -> Iterator[ReferencePrompt]:
    summary, _, body = docstring.partition("\n\n")
    summary, body = " ".join(summary.split()), body.strip()
    prose = sum(c.isalpha() or c.isspace() for c in body) >= _MIN_LETTERS * len(body)
    if not (len(summary) in _SUMMARY_CHARACTERS and len(body) in _BODY_CHARACTERS and prose):
        return
    if summary.endswith(".") and ">>>" not in body:
        question = f"In one sentence, what does `{name}` of Python's module `{module}` do?"
        yield ReferencePrompt(f"{body}\n\n{question}", (summary,))


def encode(tokenizer: Any, prompts: Sequence[ReferencePrompt], longest: int) -> list[list[int]]:
    """Token ids, in the model's chat template where it has one.

    A text of more than `longest` tokens loses its middle, as in LongBench; the template comes on
    top.
    """
    return [_encode(tokenizer, prompt.text, longest) for prompt in prompts]


def _encode(tokenizer: Any, text: str, longest: int) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) > longest:
        head = longest // 2
        ids = [*ids[:head], *ids[len(ids) - (longest - head) :]]
        text = tokenizer.decode(ids)
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=True, return_dict=False
    )
