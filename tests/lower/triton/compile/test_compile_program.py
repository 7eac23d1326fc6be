"""Source text → machine code, and the layers of the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lower.triton import samples
from tilekern.ir.types import DTYPES
from tilekern.lower.triton.chip import CHIPS, Chip
from tilekern.lower.triton.compile import compile_program as compiler
from tilekern.lower.triton.compile.binary import Binary, DescriptorFormat
from tilekern.lower.triton.compile.compile_program import compile_program, file_name
from tilekern.lower.triton.program import Program
from tilekern.lower.triton.vendor import NVIDIA
from tilekern.source import UNKNOWN

triton = pytest.importorskip("triton", reason="needs triton")
HOPPER = CHIPS["cuda:sm_90"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache on disk, and nothing in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_memory", {})
    yield tmp_path / "tilekern" / "triton"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the programs that Triton compiles from now on."""
    names: list[str] = []
    run: Callable[..., Binary] = compiler._run

    def count(program: Program, chip: Chip, where: Path) -> Binary:
        names.append(program.name)
        return run(program, chip, where)

    monkeypatch.setattr(compiler, "_run", count)
    return names


def test_a_matrix_product_for_hopper() -> None:
    program = samples.matmul(num_warps=8)
    binary = compile_program(program, HOPPER)
    assert (binary.name, binary.capability, binary.num_warps, binary.num_ctas) == ("matmul", 90, 8, 1)
    assert binary.global_scratch_bytes == 0
    assert binary.shared_bytes >= 3 * (128 * 64 + 64 * 128) * 2
    # bfloat16 is number 10 in Triton; 128 bytes of a row are 64 elements, so a copy moves no more.
    assert binary.descriptors == tuple(DescriptorFormat(10, 3, box) for box in ((128, 64), (64, 64), (128, 64)))
    assert "tt.func public @matmul" in binary.text("ttir")
    assert file_name(program) in binary.text("ttgir")
    assert ".version 8.6\n.target sm_90a" in binary.text("ptx")
    assert "wgmma.mma_async" in binary.text("ptx") and "cp.async.bulk.tensor" in binary.text("ptx")
    assert binary.code.startswith(b"\x7fELF")
    assert "HGMMA" in binary.sass and "EXIT" in binary.sass
    assert Binary.from_files(binary.to_files()) == binary


@pytest.mark.parametrize("chip", [c for c in CHIPS.values() if c.vendor is NVIDIA], ids=lambda chip: chip.name)
def test_every_chip(chip: Chip) -> None:
    binary = compile_program(samples.add(1024), chip)
    version = {103: "8.8", 120: "8.7"}.get(chip.capability, "8.6")
    assert f".version {version}\n.target sm_{chip.capability}" in binary.text("ptx")
    assert "ld.global.v4" in binary.text("ptx")  # pointers are known to be aligned
    assert binary.descriptors == ()
    assert binary.num_warps == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    assert compile_program(samples.copy(DTYPES[dtype]), HOPPER).code


def test_the_same_program_gives_the_same_bytes(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # nothing can be kept there
    first = compile_program(samples.matmul(num_warps=8), HOPPER)
    compiler._memory.clear()
    assert compile_program(samples.matmul(num_warps=8), HOPPER) == first
    assert len(compiled) == 2


def test_assertions_stay_only_where_there_are_some() -> None:
    check = "tl.device_assert(tl.load(x_ptr + i) > 0, 'positive')\ntl.store(out_ptr + i, 1.0)"
    body = f"i = tl.arange(0, 128)\n{check}"
    asserting = samples.program("asserting", samples.pointers("x_ptr", "out_ptr"), body)
    assert "__assertfail" in compile_program(asserting, HOPPER).text("ptx")
    assert "__assertfail" not in compile_program(samples.add(), HOPPER).text("ptx")


def test_memory_then_disk_then_triton(compiled: list[str], folder: Path) -> None:
    binary = compile_program(samples.add(), HOPPER)
    assert compile_program(samples.add(), HOPPER) is binary
    compiler._memory.clear()
    assert compile_program(samples.add(), HOPPER) == binary
    assert compiled == ["add"]
    compiler._memory.clear()
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-100])
    assert compile_program(samples.add(), HOPPER) == binary
    assert compiled == ["add", "add"]
    compiler._memory.clear()
    assert compile_program(samples.add(), HOPPER) == binary  # the damaged entry was written anew
    assert compiled == ["add", "add"]


@pytest.mark.parametrize("change", [
    {"num_ctas": None}, {"more": 1}, {"num_warps": "4"}, {"descriptors": [{}]}, {"descriptors": 1}, [], "text"
], ids=str)  # fmt: skip
def test_an_entry_with_other_fields_is_as_good_as_absent(change: Any, compiled: list[str], folder: Path) -> None:
    first = compile_program(samples.add(), HOPPER)
    (entry,) = folder.iterdir()
    files = first.to_files()
    launch = json.loads(files["launch.json"])
    if isinstance(change, dict):
        launch = {name: value for name, value in (launch | change).items() if value is not None}
    else:
        launch = change
    compiler.CACHE.store(entry.name, {**files, "launch.json": json.dumps(launch).encode()})
    compiler._memory.clear()
    assert compile_program(samples.add(), HOPPER) == first
    assert len(compiled) == 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_KEPT", 2)
    for count in (128, 256, 512):
        compile_program(samples.add(count), HOPPER)
    assert len(compiler._memory) == 2


def test_the_key_holds_all_inputs_of_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    program = samples.add()
    sixteen = [replace(argument, dtype=DTYPES["f16"]) for argument in program.arguments]
    others = [
        (program, CHIPS["cuda:sm_100"]),
        (replace(program, text=program.text + "\n"), HOPPER),
        (replace(program, num_warps=8), HOPPER),
        (replace(program, num_stages=2), HOPPER),
        (replace(program, arguments=tuple(sixteen)), HOPPER),
        (replace(program, lines={}), HOPPER),
        (replace(program, loc=UNKNOWN), HOPPER),
    ]
    keys = [compiler._key_parts(*other) for other in ((program, HOPPER), *others)]
    monkeypatch.setattr(triton, "__version__", "3.9.99")
    keys.append(compiler._key_parts(program, HOPPER))
    assert len({tuple(key) for key in keys}) == len(keys)
    same = replace(program, programs=7)
    assert compiler._key_parts(same, HOPPER) == keys[-1]


def test_threads_compile_a_program_once(compiled: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        binaries = list(pool.map(lambda count: compile_program(samples.add(count), HOPPER), [128, 256] * 4))
    assert sorted(compiled) == ["add", "add"]
    assert binaries[0] is binaries[2] and binaries[0] != binaries[1]


@pytest.mark.smoke
def test_another_process_finds_the_code(folder: Path) -> None:
    """The other process has no compiler."""
    compile_program(samples.add(), HOPPER)
    code = """
from tests.lower.triton import samples
from tilekern.lower.triton.compile import compile_program as compiler
from tilekern.lower.triton.chip import CHIPS
compiler._run = None
print(compiler.compile_program(samples.add(), CHIPS["cuda:sm_90"]).num_warps)
"""
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "4\n", done.stderr


def test_triton_keeps_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our compilations leave nothing in Triton's cache, which other threads use as before."""
    theirs = tmp_path / "theirs"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(theirs))
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")  # would take the texts away
    manager_of: Callable[[str], Any] = triton.runtime.cache.get_cache_manager
    seen: list[Any] = []
    with compiler._files_in(tmp_path):
        thread = threading.Thread(target=lambda: seen.append(manager_of("ab12")))
        thread.start()
        thread.join()
        ours = manager_of("ab12")
    assert isinstance(seen[0], triton.runtime.cache.FileCacheManager)
    assert not isinstance(ours, triton.runtime.cache.FileCacheManager)
    for file in theirs.iterdir():  # the folder that the other thread's manager made
        file.rmdir()
    assert compile_program(samples.add(), HOPPER).text("ttgir")
    assert list(theirs.iterdir()) == []
    assert triton.knobs.cache.manager_class is None
    assert os.environ["TRITON_STORE_BINARY_ONLY"] == "1"
