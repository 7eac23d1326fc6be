"""The dump for `perf`: names, lines, regions and code, read by a small reader, and by `perf` where it is installed."""

from __future__ import annotations

import collections
import mmap
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.lower.llvm.compile import jit_dump, toolchain
from tilekern.lower.llvm.compile.object_file import Line, ObjectFile, Symbol
from tilekern.source import Loc

pytest.importorskip("llvmlite", reason="needs llvmlite")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SCRIPT = """\
import jax, jax.numpy as jnp, tilekern as tk

@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def my_kernel(x, w, out):
    i = tk.parallel(x.shape[0], 64)
    j = tk.parallel(w.shape[1], 64)
    with tk.region("scores"):
        s = tk.dot(x[i, :], w[:, j])
        with tk.region("mask"):
            s = jnp.where(s > 0.5, s, -1.0)
    out[i, j] = jnp.exp(s)

f = jax.jit(lambda x, w: my_kernel(x, w, target="cpu:llvm"))
for _ in range(ROUNDS):
    f(jnp.ones((512, 300)), jnp.ones((300, 512))).block_until_ready()
"""


@dataclass
class Function:
    """A function of a dump: its address, its code and its lines, (address, file, line)."""

    address: int
    code: bytes
    lines: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])


def read(path: Path) -> dict[str, Function]:
    """The functions of a dump by name, by `jitdump-specification.txt` alone."""
    data = path.read_bytes()
    magic, version, size, machine, _, pid, _, flags = struct.unpack_from("<IIIIIIQQ", data)
    assert (magic, version, size, flags) == (0x4A695444, 1, 40, 0)
    assert path.name == f"jit-{pid}.dump"
    assert machine == {"x86_64": 62, "aarch64": 183}[os.uname().machine]
    functions, lines, at, times = dict[str, Function](), dict[int, list[tuple[int, str, int]]](), size, [0]
    while at < len(data):
        kind, total, time = struct.unpack_from("<IIQ", data, at)
        times.append(time)
        body = data[at + 16 : at + total]
        if kind == 2:  # JIT_CODE_DEBUG_INFO
            address, count = struct.unpack_from("<QQ", body)
            begin = 16
            for _ in range(count):
                line_address, line, discriminator = struct.unpack_from("<QII", body, begin)
                end = body.index(b"\0", begin + 16)
                lines.setdefault(address, []).append((line_address, body[begin + 16 : end].decode(), line))
                begin = end + 1
                assert discriminator == 0
            assert begin == len(body)
        else:
            assert kind == 0  # JIT_CODE_LOAD
            process, thread, vma, address, length, index = struct.unpack_from("<IIQQQQ", body)
            name, code = body[40 : body.index(b"\0", 40)].decode(), body[-length:]
            assert process == pid and thread > 0 and vma == address and index == len(functions)
            assert total == 16 + 40 + len(name) + 1 + length
            functions[name] = Function(address, code, lines.get(address, []))
        at += total
    assert at == len(data) and times == sorted(times)
    return functions


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of the script."""
    return run(tmp_path_factory.mktemp("dump"))


def run(folder: Path, *command: str, rounds: int = 1) -> Path:
    """Run the script below a command; returns its dump."""
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("ROUNDS", str(rounds)))
    environment = {**os.environ, "TILEKERN_DEBUG": "perf", "TMPDIR": str(folder), "JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, sys.executable, str(script)], check=True, env=environment, capture_output=True)
    (dump,) = folder.glob("tilekern-perf-*/jit-*.dump")
    Path(f"/tmp/perf-{dump.stem.removeprefix('jit-')}.map").unlink()
    return dump


def test_functions_have_the_users_lines_and_regions(dump: Path) -> None:
    functions, folder = read(dump), dump.parent
    assert all(name.startswith("tilekern my_kernel ") and function.code for name, function in functions.items())
    places = collections.Counter(
        (os.path.relpath(file, folder if Path(file).is_relative_to(folder) else folder.parent), line)
        for function in functions.values()
        for _, file, line in function.lines
    )
    assert set(places) == {
        ("script.py", 4),  # the grid
        ("scores/script.py", 8),
        ("scores/mask/script.py", 10),
        ("script.py", 11),
    }
    for function in functions.values():
        addresses = [address for address, _, _ in function.lines]
        assert addresses == sorted(set(addresses))
        assert not addresses or addresses[-1] == function.address + len(function.code)
        assert all(Path(file).read_text().startswith("import jax") for _, file, _ in function.lines)


def test_a_microkernel_of_a_line_has_that_line(dump: Path) -> None:
    products = [function for name, function in read(dump).items() if "dot_float32" in name]
    assert products and all({line for _, _, line in function.lines} == {8} for function in products)


@pytest.mark.skipif(not shutil.which("perf"), reason="needs perf")
def test_perf_finds_the_lines(tmp_path: Path) -> None:
    data, injected = str(tmp_path / "perf.data"), str(tmp_path / "perf.jit.data")
    record = ("perf", "record", "-e", "cpu-clock", "-k", "mono", "-o", data)
    if subprocess.run([*record, "true"], capture_output=True).returncode:
        pytest.skip("needs the permission to record events")
    run(tmp_path, *record, rounds=30)
    subprocess.run(["perf", "inject", "--jit", "-i", data, "-o", injected], check=True, capture_output=True)
    samples = subprocess.run(
        ["perf", "script", "-i", injected, "-F", "ip,sym"], check=True, capture_output=True, text=True
    ).stdout
    assert "tilekern my_kernel dot_float32" in samples
    objects = [path.read_bytes() for path in tmp_path.glob("tilekern-perf-*/jitted-*.so")]
    assert any(b"/scores/mask/script.py\0" in code for code in objects)


# --- lines -----------------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def attention_like(x: tk.Ref, w: tk.Ref, out: tk.Ref, *, block: tk.Block = 64) -> None:
    i = tk.parallel(x.shape[0], block)
    j = tk.parallel(w.shape[1], block)

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        with tk.region("product"):
            return tk.dot(x[i, k], w[k, j], acc)

    acc = tk.fold(tk.serial(x.shape[1], block), step, tk.zeros((i, j)))
    e = jnp.exp(acc - acc.max(axis=1, keepdims=True))
    out[i, j] = e / e.sum(axis=1, keepdims=True)


def _text_section(monkeypatch: pytest.MonkeyPatch, option: str) -> dict[str, bytes]:
    """The machine code of each function."""
    monkeypatch.setenv("TILEKERN_DEBUG", option)
    lowered = attention_like.trace(jnp.ones((100, 200)), jnp.ones((200, 90))).lower("cpu:llvm")
    assert ("!dbg" in lowered.text) == (option == "perf")
    code = toolchain.machine_code(lowered.text, toolchain.host())
    object_file = ObjectFile(code)
    assert bool(object_file.lines) == (option == "perf")
    return {f.name: object_file.bytes_of(f) for f in object_file.functions}


def test_lines_cost_no_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _text_section(monkeypatch, "perf") == _text_section(monkeypatch, "verify")


PLACES = [
    Line(1, 0, "region:a", "f.py", 7),
    Line(1, 4, "region:a", "f.py", 7),
    Line(1, 8, "", "", 0),
    Line(1, 16, "/x", "f.py", 9),
    Line(2, 20, "/x", "f.py", 10),
    Line(1, 24, "/x", "f.py", 11),
]


def test_places_of_a_function() -> None:
    kernel, in_a = Loc("/x/f.py", 5), Loc("f.py", 7, region="a")
    places = jit_dump.places_of(Symbol("f", 1, 0, 24), PLACES, kernel)
    assert places == [(0, in_a), (8, kernel), (16, Loc("/x/f.py", 9)), (24, Loc("/x/f.py", 9))]


def test_unknown_code_of_a_function_of_one_line_has_that_line() -> None:
    in_a = Loc("f.py", 7, region="a")
    assert jit_dump.places_of(Symbol("f", 1, 0, 12), PLACES, Loc("/x/f.py", 5)) == [(0, in_a), (12, in_a)]
    assert jit_dump.places_of(Symbol("f", 3, 0, 12), PLACES, Loc("/x/f.py", 5)) == []


def test_a_folder_that_may_not_hold_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(tk.errors.SettingError, match="set TMPDIR to another folder"):
        jit_dump.Dump(1, 62)
