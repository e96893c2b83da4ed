"""What a process gets on a machine without a GPU, and that it gets nothing with one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_morph.cpu import environment
from sglang_morph.cpu.environment import STAND_IN, cpu_environment, prepare_process, wants_cpu


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed `sgl_kernel`: at first a CUDA build."""
    package = tmp_path / "site" / "sgl_kernel"
    (package / "sm90").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sm90" / "common_ops.abi3.so").touch()
    monkeypatch.setattr(sys, "path", [STAND_IN, str(package.parent)])
    return package


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The drivers that can be loaded; none at first."""
    loadable: set[str] = set()
    monkeypatch.setattr(environment, "_loadable", loadable.__contains__)
    return loadable


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], True),
        (["--device", "cpu"], True),
        (["--device=cpu"], True),
        (["--device", "cuda"], False),
        (["--device", "cuda", "--device=cpu"], True),
        (["--device"], True),
    ],
)
def test_device_without_a_driver(argv: list[str], expected: bool, driver: set[str]) -> None:
    assert wants_cpu(argv) is expected


@pytest.mark.parametrize(("argv", "expected"), [([], False), (["--device", "cpu"], True)])
def test_device_with_a_driver(argv: list[str], expected: bool, driver: set[str]) -> None:
    driver.add("libcuda.so.1")
    assert wants_cpu(argv) is expected


@pytest.mark.parametrize(
    ("content", "expected"), [("device: cpu", True), ("port: 1", False), ("a: [", False)]
)
def test_device_in_a_config_file(
    content: str, expected: bool, tmp_path: Path, driver: set[str]
) -> None:
    driver.add("libcuda.so.1")
    path = tmp_path / "server.yaml"
    path.write_text(content)
    assert wants_cpu(["--config", str(path)]) is expected
    assert wants_cpu(["--config", str(path), "--device", "cuda"]) is False


def test_cuda_build_is_stood_in_for(kernels: Path) -> None:
    changes = cpu_environment({"PYTHONPATH": "/a"})
    assert changes["PYTHONPATH"] == os.pathsep.join([STAND_IN, "/a"])
    assert changes["SGLANG_USE_CPU_ENGINE"] == "1"
    assert int(changes["OMP_NUM_THREADS"]) >= 1


def test_cpu_build_is_used(kernels: Path) -> None:
    (kernels / "common_ops.cpython-311-x86_64-linux-gnu.so").touch()
    assert "PYTHONPATH" not in cpu_environment({})


def test_missing_build_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [STAND_IN])
    assert cpu_environment({})["PYTHONPATH"] == STAND_IN


def test_what_the_user_set_stays(kernels: Path) -> None:
    assert "OMP_NUM_THREADS" not in cpu_environment({"OMP_NUM_THREADS": "7"})


def test_second_preparation_changes_nothing(kernels: Path) -> None:
    environ = {"PYTHONPATH": "/a"}
    environ.update(cpu_environment(environ))
    assert cpu_environment(environ) == {}


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (7, "1"), (8, "2"), (64, "16")])
def test_torch_leaves_cores_to_the_other_processes(
    cores: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert cpu_environment({})["OMP_NUM_THREADS"] == threads


def test_another_device_is_left_alone(driver: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ), list(sys.path)
    assert prepare_process(["--device", "cuda"]) is False
    assert (dict(os.environ), sys.path) == before


def test_late_preparation_is_refused(driver: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", sys)
    with pytest.raises(RuntimeError, match="import sglang_morph first, or .*sglang-morph exec"):
        prepare_process(["--device", "cpu"])
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ


def test_stand_in_raises_only_when_called() -> None:
    script = """
import sgl_kernel
from sgl_kernel import any_kernel_cpu
assert not hasattr(sgl_kernel, "__wrapped__")
try:
    any_kernel_cpu(1, x=2)
except RuntimeError as error:
    print(error)
"""
    environ = {**os.environ, "PYTHONPATH": STAND_IN}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sgl_kernel.any_kernel_cpu does not exist on this CPU")
    assert done.stdout.count("\n") == 1


def test_preparing_imports_neither_torch_nor_sglang() -> None:
    script = """
import sys
from sglang_morph.cpu import prepare_process
prepare_process(["--device", "cpu"])
assert not {"torch", "sglang", "sgl_kernel"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
