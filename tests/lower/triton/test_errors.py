"""Bad input from the user's view: through a kernel, its stages and jax.jit. Errors of single modules are tested next to
them (`test_toolchain`, `test_failure`, `test_resources`, `legalize/test_refuse`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import kernel, like_first, marked_line, numbers, refused
from tilekern import _machine
from tilekern.errors import CompileError, DependencyError, DeviceAssertionError, ResourceError, TargetError
from tilekern.lower.triton import interpret as interpreter
from tilekern.lower.triton.compile import compile_program as compiler

X = numbers(9)
GPUS = ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"]


@like_first
def double(x, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk, and nothing in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_memory", {})
    return tmp_path / "tilekern"


# --- the machine ----------------------------------------------------------------------------------------------------


def test_source_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "@triton.jit" in double.trace(X).lower("cuda:sm_90").text


@pytest.mark.parametrize("how", ["compiled", "jitted"])
def test_triton_is_missing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    lowered, jitted = double.trace(X).lower("cuda:sm_90"), jax.jit(double).trace(X)
    with refused(
        DependencyError,
        "the targets cuda:* and rocm:* need Triton",
        expected="triton >= 3.6, < 3.10",
        got="ModuleNotFoundError: import of triton halted",
        fix="pip install 'triton>=3.6,<3.10'",
    ):
        lowered.compile() if how == "compiled" else jitted.lower(lowering_platforms=("cuda",))  # <-


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_triton_is_of_another_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setattr(triton, "__version__", version)
    lowered = double.trace(X).lower("cuda:sm_90")
    with refused(
        DependencyError,
        "this version of Triton is not supported",
        expected="triton >= 3.6, < 3.10",
        got=f"triton {version}",
        fix="pip install 'triton>=3.6,<3.10'",
    ):
        lowered.compile()  # <-


def test_the_interpreter_wants_the_same_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_child", interpreter._Child())
    monkeypatch.setattr(interpreter, "version", lambda _: "3.5.1")
    with pytest.raises(DependencyError, match="this version of Triton is not supported") as caught:
        double.trace(X).lower("cuda:sm_90").interpret(X)
    assert caught.value.got == "triton 3.5.1"


@pytest.mark.parametrize("target", GPUS)
def test_there_is_no_gpu(target: str) -> None:
    """JAX sees no GPU, or has no CUDA plugin."""
    pytest.importorskip("triton", reason="needs triton")
    compiled = double.trace(X).lower(target).compile()
    with refused(
        TargetError,
        "there is no GPU here to run double on",
        expected="JAX with CUDA: pip install 'jax[cuda13]'",
        got="JAX runs on cpu",
        fix="interpret it",
    ):
        compiled(X)  # <-


# --- what a chip, or Triton, does not have ---------------------------------------------------------------------------


def test_a_dtype_that_the_chip_lacks() -> None:
    @kernel(((9,), np.float32))
    def widen(x, out):
        i = tk.parallel(9, 4)
        out[i] = x[i].astype(jnp.float32)  # <-

    with pytest.raises(TargetError, match="cuda:sm_80 has no f8e4m3fn") as caught:
        widen.trace(jax.ShapeDtypeStruct((9,), jnp.float8_e4m3fn)).lower("cuda:sm_80")
    error = caught.value
    assert "sm_89 or newer" in error.expected and "f8e4m3fn" in error.got and 'target="cpu:xla"' in error.fix
    assert (error.loc.file, error.loc.line) == (__file__, line_of(widen))
    widen.trace(jax.ShapeDtypeStruct((9,), jnp.float8_e4m3fn)).lower("cuda:sm_90")


def line_of(function: tk.Kernel) -> int:
    """The line of a kernel's body with the comment `# <-`."""
    body: Any = function
    return marked_line(body.__wrapped__.__code__)


@pytest.mark.parametrize("how", ["max", "min", "and_", "or_", "xor"])
@pytest.mark.parametrize("target", GPUS)
def test_atomics_of_bools(target: str, how: str) -> None:
    @tk.kernel(out_type=lambda x: tk.Zeros(jax.ShapeDtypeStruct((), np.bool_)))
    def anywhere(x, out):
        i = tk.parallel(9, 3)
        getattr(out.at[()], how)((x[i] > 4).any())  # <-

    with pytest.raises(TargetError, match=rf"{target} has no atomic \w+ of bool") as caught:
        anywhere.trace(X).lower(target)
    error = caught.value
    assert "i32" in error.expected and "bool" in error.got and "convert it afterwards" in error.fix
    assert (error.loc.file, error.loc.line) == (__file__, line_of(anywhere))


def test_a_grid_that_is_too_large() -> None:
    @like_first
    def doubled(x, out, *, block: tk.Block = 4):
        i, j = tk.grid((x.shape[0], block), (x.shape[1], block))
        out[i, j] = x[i, j] * 2

    x = jax.ShapeDtypeStruct((2**16, 2**15), np.int8)
    with pytest.raises(TargetError, match="the grid of doubled is too large for a GPU") as caught:
        doubled.trace(x, block=1).lower("cuda:sm_90")
    error = caught.value
    assert "at most 2147483647" in error.expected and "2147483648 programs" in error.got
    assert "larger blocks" in error.fix
    assert (error.loc.file, error.loc.function.rpartition(".")[2]) == (__file__, "doubled")
    doubled.trace(x, block=4).lower("cuda:sm_90")


def test_a_tile_that_is_too_large() -> None:
    @like_first
    def whole(x, out):
        out[...] = x[...] * 2  # <-

    with pytest.raises(TargetError, match="a tile is too large for Triton") as caught:
        whole.trace(jax.ShapeDtypeStruct(((1 << 20) + 1,), np.float32)).lower("cuda:sm_90")
    error = caught.value
    assert "at most 1048576 elements" in error.expected and "f32[2097152]" in error.got and "smaller" in error.fix
    assert (error.loc.file, error.loc.line) == (__file__, line_of(whole))


# --- what a program takes -------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def matmul(x, w, out, *, block_m: tk.Block = 128, block_n: tk.Block = 128, block_k: tk.Block = 64):
    i, j = tk.parallel(x.shape[0], block_m), tk.parallel(w.shape[1], block_n)

    def step(k, acc):
        return tk.dot(x[i, k], w[k, j], acc)  # <-

    acc = tk.fold(tk.serial(x.shape[1], block_k), step, tk.zeros((i, j)))
    out[i, j] = acc.astype(out.dtype)


SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
BLOCKS = {"block_m": 128, "block_n": 128, "block_k": 256}


def test_without_num_stages_fewer_iterations_are_in_flight_if_their_tiles_do_not_fit() -> None:
    pytest.importorskip("triton", reason="needs triton")
    with pytest.raises(ResourceError):
        matmul.trace(SQUARE, SQUARE, **BLOCKS, num_stages=2).lower("cuda:sm_90").compile()
    lowered = matmul.trace(SQUARE, SQUARE, **BLOCKS).lower("cuda:sm_90")
    assert "loads of 2 iterations in flight at most" in lowered.plan
    compiled = lowered.compile()
    assert 2 * 2 * 128 * 256 <= compiled.resources.shared_bytes <= 227 << 10


def test_the_plan_and_the_explanation_say_how_many_iterations_are_in_flight() -> None:
    pytest.importorskip("triton", reason="needs triton")
    lowered = matmul.trace(SQUARE, SQUARE, **BLOCKS).lower("cuda:sm_90")
    explanation = lowered.explain(0)
    assert "loads of 1 iteration in flight\n" in lowered.plan
    assert explanation.memory["iterations in flight"] == "1: the tiles of 2 do not fit shared memory"
    fits = matmul.trace(SQUARE, SQUARE, block_m=64, block_n=64, block_k=64).lower("cuda:sm_90")
    assert "iterations in flight" not in fits.explain(0).memory
    assert "loads of 2 iterations in flight\n" in fits.plan
    asked = matmul.trace(SQUARE, SQUARE, **BLOCKS, num_stages=4).lower("cuda:sm_90")
    assert "loads of 4 iterations in flight\n" in asked.plan  # or it does not compile
    no_loop = copied.trace(SQUARE).lower("cuda:sm_90")
    assert "in flight" not in no_loop.plan


@tk.kernel(out_type=lambda x: x)
def copied(x: Any, out: Any, *, block: tk.Block = 8) -> None:
    i = tk.parallel(x.shape[0], block)
    out[i, :] = x[i, :]


@pytest.mark.parametrize("how", ["compiled", "jitted"])
def test_too_much_shared_memory(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bill names the user's lines, and nothing is launched: the program is not even lowered."""
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setattr(_machine, "compute_capability", lambda: 90)
    with pytest.raises(ResourceError, match="needs more bytes of shared memory than cuda:sm_90 allows") as caught:
        if how == "compiled":
            matmul.trace(SQUARE, SQUARE, **BLOCKS, num_stages=4).lower("cuda:sm_90").compile()
        else:
            jitted = jax.jit(lambda x, w: matmul(x, w, **BLOCKS, num_stages=4))
            jitted.trace(SQUARE, SQUARE).lower(lowering_platforms=("cuda",))
    error = caught.value
    here = f"at {__file__}:{line_of(matmul)}"
    assert "at most 232,448" in error.expected
    assert f"262,144 bytes: 4 × 128 × 256 bf16 {here}\n" in error.got
    assert f"262,144 bytes: 4 × 256 × 128 bf16 {here}\n" in error.got
    assert "blocks smaller" in error.fix and "num_stages=4" in error.fix
    assert (error.loc.file, error.loc.line) == (__file__, line_of(matmul))


@pytest.mark.parametrize("option, value", [("num_warps", 3), ("num_warps", 64)])
def test_warps_that_no_program_has(option: str, value: int) -> None:
    lowered = double.trace(X, **{option: value}).lower("cuda:sm_90")
    with pytest.raises(ResourceError, match="`double` cannot run with this number of warps") as caught:
        lowered.compile()
    error = caught.value
    assert "1, 2, 4, 8, 16 or 32" in error.expected and error.got == f"{option}={value}" and "suits" in error.fix
    assert (error.loc.file, error.loc.function) == (__file__, "double")


# --- what fails below us --------------------------------------------------------------------------------------------


def test_the_compiler_fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A compiler bug: the error shows the user's line, the generated line, and a file with all details."""
    triton = pytest.importorskip("triton", reason="needs triton")
    lowered = double.trace(X).lower("cuda:sm_90")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton, "compile", fail)
    with pytest.raises(CompileError, match="Triton cannot compile `double` for cuda:sm_90") as caught:
        lowered.compile()
    error = caught.value
    assert "RuntimeError: PassManager::run failed" in error.got and "please report it" in error.fix
    assert (error.loc.file, error.loc.function) == (__file__, "double")
    (dump,) = (folder / "failures").iterdir()
    assert str(dump) in error.fix and lowered.text in dump.read_text()


def test_an_assertion_that_does_not_hold() -> None:
    pytest.importorskip("triton", reason="needs triton")

    @like_first
    def roots(x, out):
        i = tk.parallel(9, 4)
        s = x[i]
        tk.device_assert(s >= 0, "a negative number has no root")  # <-
        out[i] = jnp.sqrt(s)

    lowered = roots.trace(X).lower("cuda:sm_90")
    np.testing.assert_array_equal(lowered.interpret(X**2), X)
    with pytest.raises(DeviceAssertionError, match="a negative number has no root") as caught:
        lowered.interpret(-X)
    assert "of the generated source: tl.device_assert(" in caught.value.got
    assert (caught.value.loc.file, caught.value.loc.line) == (__file__, line_of(roots))
