"""Triton and NVIDIA's tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lower.triton import samples
from tilekern.errors import DependencyError
from tilekern.lower.triton.chip import CHIPS, Chip
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.vendor import NVIDIA


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1+git123", "3.9"])
def test_versions_that_work(version: str) -> None:
    toolchain.check_version(version)


@pytest.mark.parametrize("version", ["2.3.1", "3.5.1", "3.10.0", "4.0", "unknown"])
def test_versions_that_do_not(version: str) -> None:
    with pytest.raises(DependencyError, match=r"expected: triton >= 3\.6, < 3\.10") as caught:
        toolchain.check_version(version)
    assert f"got: triton {version}" in str(caught.value)
    assert caught.value.fix == "pip install 'triton>=3.6,<3.10'"


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DependencyError, match="need Triton") as caught:
        compile_program(samples.add(), CHIPS["cuda:sm_90"])
    assert isinstance(caught.value, ImportError)
    assert caught.value.fix == "pip install 'triton>=3.6,<3.10'"
    assert caught.value.loc.file == __file__


@pytest.mark.parametrize("fault", ["raise OSError('libtriton.so: file too short')", ""])
def test_a_broken_triton(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "triton", None)  # so that the broken one goes, also if none was imported
    monkeypatch.delitem(sys.modules, "triton")
    with pytest.raises(DependencyError, match=r"need Triton(.|\n)*OSError|triton of no version") as caught:
        compile_program(samples.add(), CHIPS["cuda:sm_90"])
    assert caught.value.fix == "pip install 'triton>=3.6,<3.10'"


def test_the_interpreter_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(DependencyError, match="got: TRITON_INTERPRET=1"):
        compile_program(samples.add(), CHIPS["cuda:sm_90"])


@pytest.mark.parametrize("chip", [c for c in CHIPS.values() if c.vendor is NVIDIA], ids=lambda chip: chip.name)
def test_assembling_again_gives_the_same_code(chip: Chip) -> None:
    """The report is about the code that runs: assembling again gives the same cubin."""
    pytest.importorskip("triton", reason="needs triton")
    binary = compile_program(samples.spill() if chip.capability == 90 else samples.sine(), chip)
    cubin, report = toolchain.assemble(binary.text("ptx"), chip.capability)
    assert cubin == binary.code
    assert "bytes spill stores" in report


def test_the_identity_names_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    before = toolchain.identity(CHIPS["cuda:sm_90"])
    assert toolchain.triton().__version__ in before
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", "/other.bc")
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert {"TRITON_LIBDEVICE_PATH=/other.bc", "DISABLE_LLVM_OPT=1"} <= {
        part.replace("=true", "=1") for part in toolchain.identity(CHIPS["cuda:sm_90"])
    }
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path("elsewhere")))
    assert toolchain.identity(CHIPS["cuda:sm_90"])[: len(before)] == before


def test_a_tool_that_fails_is_an_error() -> None:
    pytest.importorskip("triton", reason="needs triton")
    for fails in (lambda: toolchain.assemble("no PTX", 90), lambda: toolchain.disassemble(b"no cubin")):
        with pytest.raises(subprocess.CalledProcessError):
            fails()
