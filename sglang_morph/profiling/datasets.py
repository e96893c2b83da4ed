"""Texts by name: the default one, files in the formats of datasets, and the cache of the hub.

A name is `python-docs`, a file or a folder, `FORMAT:PATH`, or a dataset of the hub that is in the
cache of the `datasets` library. Whatever it is becomes one text, so that `split_text` keeps what is
calibrated on apart from what is evaluated on, paragraph by paragraph. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sglang_morph.profiling.text import SplitText, TextError, load_text, read_text, split_text

PYTHON_DOCS = "python-docs"
MOST_CHARACTERS = 8 << 20
"""Rows that begin after so many are not read: it is more than is calibrated or evaluated on."""

Rows = Iterator[tuple[str, Any]]
"""(where it is, for errors; a row, by field)"""


@dataclass(frozen=True, slots=True)
class Format:
    """How rows are read, and which of their fields are text."""

    rows: Callable[[Path, Sequence[str]], Rows]
    """Of a file; the fields say what is of use."""
    suffixes: tuple[str, ...]
    fields: tuple[str, ...]
    """The first that a row has is taken."""
    joined: bool = False
    """All that a row has are taken, one below the other."""


def load_dataset(name: str, seed: int = 0) -> SplitText:
    """The text that `name` stands for, split by `seed`. Raises `TextError`, one line, where there
    is none, or where it is damaged: then with the file and the line."""
    if name == PYTHON_DOCS:
        return load_text(seed=seed)
    kind, colon, rest = name.partition(":")
    if colon and kind in FORMATS:
        texts = _texts_below(Path(rest), kind)
        source = Path(rest).name
    elif Path(name).exists():
        texts = _texts_below(Path(name))
        source = Path(name).name
    else:
        texts = _texts(_hub_rows(name), FORMATS["jsonl"])
        source = name
    return split_text("\n\n".join(_first(texts, MOST_CHARACTERS)), source, seed)


def choose_text(text: Path | None, dataset: str | None, seed: int) -> SplitText:
    """Of the file `text`, or of a dataset's name, or the default. Raises `TextError`."""
    if text is not None and dataset is not None:
        raise TextError("--text and --dataset both name a text; give one of them")
    return load_text(text, seed) if dataset is None else load_dataset(dataset, seed)


def _texts_below(path: Path, kind: str | None = None) -> Iterator[str]:
    """Of a file, or of all files in a folder that have a format's suffix, by name."""
    for file in _files(path, kind):
        form = FORMATS[kind or _KINDS.get(file.suffix.lower(), "text")]
        yield from _texts(form.rows(file, form.fields), form)


def _files(path: Path, kind: str | None) -> list[Path]:
    if not path.is_dir():
        return [path]
    suffixes = FORMATS[kind].suffixes if kind else tuple(_KINDS)
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes)
    if not found:
        raise TextError(f"{path} holds no file that ends in {', '.join(suffixes)}; give another")
    return found


def _texts(rows: Rows, form: Format) -> Iterator[str]:
    for where, row in rows:
        if not isinstance(row, dict):
            raise TextError(f"{where}: this is no object with fields; {_wanted(form)}")
        present = [name for name in form.fields if row.get(name) is not None]
        if not present:
            raise TextError(f"{where}: no text in it; {_wanted(form)}")
        for name in present if form.joined else present[:1]:
            yield from _strings(row[name], f"{where}: {name}")


def _wanted(form: Format) -> str:
    fields = f"{' and ' if form.joined else ' or '}".join(form.fields)
    return f"{fields} is needed, or name the format, as in sharegpt:PATH"


def _strings(value: Any, where: str) -> Iterator[str]:
    """Of a string, a message (`content` or `value`), or a list of either."""
    if isinstance(value, dict):
        value = next((value[key] for key in _MESSAGE_TEXT if value.get(key) is not None), "")
    if isinstance(value, list):
        for one in value:
            yield from _strings(one, where)
    elif isinstance(value, str):
        if value.strip():
            yield value
    else:
        raise TextError(f"{where} is neither text nor messages; name another format or file")


_MESSAGE_TEXT = ("content", "value", "text")
"""Fields of a message, as OpenAI and ShareGPT call its text, and of its parts."""


def _first(texts: Iterable[str], limit: int) -> Iterator[str]:
    """About `limit` characters of them."""
    taken = 0
    for text in texts:
        if taken >= limit:
            return
        taken += len(text)
        yield text


def _text_file(path: Path, _: Sequence[str]) -> Rows:
    yield str(path), {"text": read_text(path)}


def _json_lines(path: Path, _: Sequence[str]) -> Rows:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    yield where, orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise TextError(f"{where}: not JSON ({error.msg}); mend it") from error


def _json_list(path: Path, _: Sequence[str]) -> Rows:
    with _opened(path) as file:
        try:
            found = orjson.loads(file.read())
        except orjson.JSONDecodeError as error:
            where = f"{path}, line {error.lineno}"
            raise TextError(f"{where}: not JSON ({error.msg}); mend it") from error
    if not isinstance(found, list):
        raise TextError(f"{path}: a list of conversations is needed; for JSON lines use jsonl:PATH")
    yield from ((f"{path}, item {number}", row) for number, row in enumerate(found, start=1))


def _parquet_rows(path: Path, fields: Sequence[str]) -> Rows:
    if importlib.util.find_spec("pyarrow") is None:
        raise TextError(f"{path} needs pyarrow to be read; install: pip install pyarrow")
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    number = 0
    try:
        file = ParquetFile(path)
        columns = [name for name in fields if name in file.schema_arrow.names]
        if not columns:
            known = ", ".join(file.schema_arrow.names)
            raise TextError(f"{path} has the columns {known}; one of {', '.join(fields)} is needed")
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (ArrowException, OSError) as error:
        cause = str(error).partition("\n")[0]
        raise TextError(f"{path}, after row {number}: {cause}; copy the file again") from error


def _hub_rows(name: str) -> Rows:
    """Of the `train` split, or else the first, of `OWNER/NAME` or `OWNER/NAME:CONFIG`."""
    unknown = (
        f"{name} is neither a file or folder here, nor {PYTHON_DOCS}, nor in the hub's cache on "
        "this machine"
    )
    if importlib.util.find_spec("datasets") is None:
        raise TextError(f"{unknown}, for which the library `datasets` is needed; give a file")
    import datasets  # type: ignore[import-untyped]

    repository, _, config = name.partition(":")
    online, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        splits = datasets.load_dataset(repository, config or None)
    except Exception as error:  # of many kinds, by what is missing
        raise TextError(
            f"{unknown}; download it where there is a network, or give a file"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = online
    split = "train" if "train" in splits else next(iter(splits))
    for number, row in enumerate(splits[split], start=1):
        yield f"{name}, {split}, row {number}", row


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise TextError(f"{path} can't be read: {error.strerror}; give a file or a name") from error


_FIELDS = ("text", "prompt", "messages", "conversations", "context")

FORMATS = {
    "text": Format(_text_file, (".txt", ".md", ".rst"), ("text",)),
    "jsonl": Format(_json_lines, (".jsonl",), _FIELDS),
    "parquet": Format(_parquet_rows, (".parquet",), _FIELDS),
    "sharegpt": Format(_json_list, (".json",), ("conversations",)),
    "longbench": Format(_json_lines, (".jsonl",), ("context", "input"), joined=True),
}
"""By what stands before the colon."""
_KINDS = {
    suffix: kind
    for kind in ("text", "jsonl", "parquet", "sharegpt")
    for suffix in FORMATS[kind].suffixes
}
"""Suffix -> format of files whose format was not named."""
