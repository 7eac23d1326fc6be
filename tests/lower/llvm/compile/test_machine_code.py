"""Machine code in the cache on disk: a second process calls LLVM for nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.lower.llvm.machines import AVX2, AVX512
from tests.lower.llvm.tasks import process
from tilekern.lower.llvm.compile import toolchain

pytest.importorskip("llvmlite", reason="needs llvmlite")

TEXT = "define i32 @f() { ret i32 7 }"

PROGRAM = """
compiled = []
own = toolchain._Codegen.object
toolchain._Codegen.object = lambda self: compiled.append(0) or own(self)
from tilekern.kernels.softmax import softmax
x = jnp.sin(jnp.arange(3 * 100.0)).reshape(3, 100)
y, dx = softmax(x, target="cpu:llvm"), jax.grad(lambda x: (softmax(x, target="cpu:llvm") * x).sum())(x)
print(len(compiled), y.tobytes().hex(), dx.tobytes().hex())
"""


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that LLVM compiles, with an empty cache on disk."""
    monkeypatch.setenv("TILEKERN_CACHE", str(tmp_path))
    texts: list[str] = []

    class Codegen(toolchain._Codegen):
        def __init__(self, text: str, *options: Any) -> None:
            texts.append(text)
            super().__init__(text, *options)

    monkeypatch.setattr(toolchain, "_Codegen", Codegen)
    return texts


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "llvm").iterdir())


def run(cache: str) -> tuple[int, str]:
    """How often a new process calls LLVM for a kernel and its gradient, and the bytes of both results."""
    count, _, numbers = process(PROGRAM, TILEKERN_CACHE=cache).partition(" ")
    return int(count), numbers


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    count, numbers = run(str(tmp_path))
    assert count >= 3, "the code that all kernels share, the kernel, its backward pass"
    assert len(entries(tmp_path)) == count
    assert run(str(tmp_path)) == (0, numbers)
    assert run("off") == (count, numbers)
    assert len(entries(tmp_path)) == count
    for entry in entries(tmp_path):
        entry.write_bytes(entry.read_bytes()[:-9])
    assert run(str(tmp_path)) == (count, numbers)
    assert run(str(tmp_path)) == (0, numbers)


def test_processes_at_once_write_whole_entries(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        (_, first), (_, second) = pool.map(run, [str(tmp_path)] * 2)
    assert first == second
    assert run(str(tmp_path)) == (0, first)


@pytest.mark.parametrize("cache", ["/proc/self/nowhere", "/dev/null"])
def test_a_folder_that_cannot_be_made_is_no_error(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_CACHE", cache)
    assert toolchain.machine_code(TEXT, AVX2) == toolchain.machine_code(TEXT, AVX2)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # pyright: ignore[reportUnknownLambdaType]
    assert toolchain.machine_code(TEXT, AVX2)


def test_damaged_entries_are_replaced(compiled: list[str], tmp_path: Path) -> None:
    code = toolchain.machine_code(TEXT, AVX2)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    for damaged in (b"", content[:-1], content[:40], b"x" + content[1:], content[:50] + b"x" + content[51:], b"x" * 99):
        del compiled[:]
        entry.write_bytes(damaged)
        assert toolchain.machine_code(TEXT, AVX2) == code and compiled == [TEXT]
        assert toolchain.machine_code(TEXT, AVX2) == code and compiled == [TEXT], "the entry was written anew"
        assert entry.read_bytes() == content


def test_the_code_of_another_cpu_is_absent(compiled: list[str], tmp_path: Path) -> None:
    """Also if its file has the name that the entry of this CPU would have."""
    toolchain.machine_code(TEXT, AVX512)
    (foreign,) = entries(tmp_path)
    code = toolchain.machine_code(TEXT, AVX2)
    assert len(compiled) == 2
    (entry,) = set(entries(tmp_path)) - {foreign}
    entry.write_bytes(foreign.read_bytes())
    assert toolchain.machine_code(TEXT, AVX2) == code and len(compiled) == 3


def test_the_key_holds_all_that_decides_the_code(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite

    toolchain.machine_code(TEXT, AVX2)
    toolchain.machine_code(TEXT, AVX2, level=0)
    toolchain.machine_code(TEXT + "\n", AVX2)
    with monkeypatch.context() as patch:
        patch.setattr(llvmlite, "__version__", "0.50.99")
        toolchain.machine_code(TEXT, AVX2)
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "_source", lambda: "options of LLVM that differ")
        toolchain.machine_code(TEXT, AVX2)
    assert len(compiled) == 5
    toolchain.machine_code(TEXT, AVX2)
    assert len(compiled) == 5
    assert "loop_unrolling = False" in toolchain._source()
