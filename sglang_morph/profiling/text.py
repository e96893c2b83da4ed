"""Text to calibrate on and to evaluate on, never the same; neither torch nor SGLang.

A text is a UTF-8 file, or by default the prose in the help topics that come with Python, so that
everything works offline. Paragraphs that occur twice are kept once: a paragraph on both sides of
the split would make evaluation look better than it is.
"""

from __future__ import annotations

import hashlib
import platform
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BLOCK_CHARACTERS = 4096
"""About 1000 tokens: the text is dealt out in runs of paragraphs about so long."""

_MIN_PROSE_CHARACTERS = 80
_MIN_LETTERS = 0.85
"""Share of letters and blanks: tables, grammar rules and code have fewer."""
_EMPHASIS = re.compile(r"""(?<![\w*"'(])(\*{1,2})(\w(?:[^*"]*\w)?)\1(?![\w*])""")


class TextError(ValueError):
    """A text can't be used. The message is one line with cause and remedy."""


@dataclass(frozen=True, slots=True)
class TextOrigin:
    """Where a split text comes from, for reports and bundles."""

    source: str
    """The file's name, or which default."""
    seed: int
    """Of the split."""
    calibration_sha256: str
    evaluation_sha256: str

    def as_document(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SplitText:
    """Two halves of one text without a paragraph in common."""

    calibration: str
    evaluation: str
    origin: TextOrigin


def load_text(path: Path | None = None, seed: int = 0) -> SplitText:
    """The text in `path`, or the default one, split by `seed`. Raises `TextError`."""
    if path is None:
        return split_text(
            default_text(), f"help topics of Python {platform.python_version()}", seed
        )
    return split_text(read_text(path), path.name, seed)


def read_text(path: Path) -> str:
    """Of a UTF-8 file. Raises `TextError`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"{path} can't be read: {error.strerror}; give a UTF-8 file") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 ({error.reason}); convert it") from error


def split_text(content: str, source: str, seed: int = 0) -> SplitText:
    """Deal the text's blocks to the two sides, at random but evenly; each keeps their order.

    Raises `TextError` where there is not one block for each side.
    """
    blocks = list(_blocks(content))
    if len(blocks) < 2:
        raise TextError(
            f"{source} has under {2 * BLOCK_CHARACTERS} characters in different paragraphs, too "
            "few to calibrate and to evaluate; give a longer text"
        )
    order = list(range(len(blocks)))
    random.Random(f"text {seed}").shuffle(order)
    chosen = set(order[: len(blocks) // 2])
    sides = [
        "\n\n".join(block for i, block in enumerate(blocks) if (i in chosen) is calibration)
        for calibration in (True, False)
    ]
    origin = TextOrigin(source, seed, *(_sha256(side) for side in sides))
    return SplitText(sides[0], sides[1], origin)


def default_text() -> str:
    """English prose out of Python's help topics: no code, grammar or tables; paragraphs on one
    line each, between blank lines."""
    from pydoc_data.topics import topics

    found = (prose for name in sorted(topics) for prose in _prose(topics[name]))
    return "\n\n".join(dict.fromkeys(found))


def token_blocks(
    tokens: Sequence[int], length: int, count: int | None = None, seed: int = 0
) -> list[list[int]]:
    """`count` blocks of exactly `length` tokens that don't overlap, chosen by `seed`, in order.

    `count` None takes all there are; what is left at the end of `tokens` is dropped. Raises
    `TextError` where the text is too short.
    """
    available = len(tokens) // length
    wanted = available if count is None else count
    if available < max(1, wanted):
        raise TextError(
            f"the text has {len(tokens)} tokens, but {max(1, wanted)} blocks of {length} are "
            "wanted; give a longer text, or ask for fewer or shorter blocks"
        )
    starts = sorted(random.Random(f"blocks {seed}").sample(range(available), wanted))
    return [list(tokens[i * length : (i + 1) * length]) for i in starts]


def _blocks(content: str) -> Iterator[str]:
    """Runs of paragraphs of about `BLOCK_CHARACTERS`, every paragraph once."""
    run: list[str] = []
    size = 0
    for paragraph in dict.fromkeys(_paragraphs(content)):
        run.append(paragraph)
        size += len(paragraph)
        if size >= BLOCK_CHARACTERS:
            yield "\n\n".join(run)
            run, size = [], 0
    if run:
        yield "\n\n".join(run)


def _paragraphs(content: str) -> Iterator[str]:
    """What stands between blank lines; a text without any is cut at its blanks."""
    for paragraph in re.split(r"\n\s*\n", content):
        rest = paragraph.strip()
        while len(rest) > BLOCK_CHARACTERS:
            cut = rest.rfind(" ", 1, BLOCK_CHARACTERS)
            cut = BLOCK_CHARACTERS if cut < 0 else cut
            yield rest[:cut]
            rest = rest[cut:].lstrip()
        if rest:
            yield rest


def _prose(topic: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", topic):
        line = " ".join(paragraph.split()).removeprefix("* ")
        line = _EMPHASIS.sub(r"\2", line)
        if _is_prose(line):
            yield line


def _is_prose(line: str) -> bool:
    if len(line) < _MIN_PROSE_CHARACTERS or line[-1] not in ".:?!)":
        return False
    if not (line[0].isupper() or line[0] in "\"'“") or "::=" in line or ">>>" in line:
        return False
    return sum(c.isalpha() or c.isspace() for c in line) >= _MIN_LETTERS * len(line)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
