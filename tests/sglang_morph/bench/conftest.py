"""A stub server in a process of its own, and a tokenizer that turns every word into a token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from sglang_morph.bench.prompts import default_text
from sglang_morph.demo.server import ServerProcess

STUB = [sys.executable, "-m", "tests.sglang_morph.bench.stub_server"]


@pytest.fixture
def stub_server(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a stub with the flags given, and returns its URL."""
    with ExitStack() as stack:

        def start(*flags: str) -> str:
            process = ServerProcess([*STUB, *flags], {}, tmp_path / "stub.log")
            stack.enter_context(process)
            process.wait_ready(20.0, lambda passed: None)
            return process.url

        yield start


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.json."""
    folder = tmp_path_factory.mktemp("model")
    words = sorted({word for word, _ in Whitespace().pre_tokenize_str(default_text())})
    ids = {word: position for position, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
