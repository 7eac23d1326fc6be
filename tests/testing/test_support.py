"""The table of what each backend can do: it is complete, and what it promises is so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from tests.ir.funcs import assert_same
from tilekern.errors import TargetError, TilekernError, UnsupportedError, VerifyError
from tilekern.ir.core import Func
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import OPS
from tilekern.ir.types import BOOL, DTYPES, F64, DType, dtype_name, kind_of
from tilekern.ir.verify import verify
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.interpret import interpret as triton_interpret
from tilekern.lower.xla.emit import emit_xla
from tilekern.lower.xla.legalize import legalize
from tilekern.testing import assert_close, support

FLOATS = [n for n, d in DTYPES.items() if kind_of(d) == "float"]


def sample(row: str, dtype: DType) -> Func | None:
    """The sample of a row, or None where the language refuses it with a good reason."""
    try:
        return support.sample(row, dtype)
    except VerifyError as error:
        assert re.search(r"not accept|bitcast|assert|atomic", error.summary), (row, dtype)
        return None


def test_every_op_is_in_the_table() -> None:
    found: set[str] = set()
    for row in support.SAMPLES:
        func = next(filter(None, (sample(row, dtype) for dtype in DTYPES.values())))
        verify(func)
        ops = {op.function if isinstance(op, Elementwise) else op.name for op in func.walk()}
        (name,) = {op for op in ops if row == op or row.startswith(f"{op} ")}
        found.add(name)
    assert found == OPS.keys() - {"elementwise"} | TABLE.keys()


def test_every_backend_is_in_the_table() -> None:
    assert set(support.attempts()) == {"interpreter", *(target.backend for target in TARGETS.values())}


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("chip", ["tpu:v5e", "tpu:7x"])
def test_supported_cells_compile_for_tpus(chip: str, name: str) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for row in [c.op for c in support.table() if (c.dtype, c.backend, c.reason) == (name, "mosaic", "")]:
        MosaicLowering(support.sample(row, DTYPES[name]), TARGETS[chip], emit_xla.run).compile()


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("chip", CHIPS)
def test_supported_cells_compile(chip: str, name: str) -> None:
    pytest.importorskip("triton", reason="needs triton")
    for row in [c.op for c in support.table() if (c.dtype, c.backend, c.reason) == (name, "triton", "")]:
        try:
            program = build(support.sample(row, DTYPES[name]), CHIPS[chip], {})
        except TargetError:
            continue  # older chips have less
        compile_program(program, CHIPS[chip])


def test_reasons_and_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(func: Func) -> None:
        if func.name == "exp" and func.inputs[0].ref.dtype == F64:
            raise UnsupportedError("no exponentials of float64")

    monkeypatch.setattr(support, "SAMPLES", {name: support.SAMPLES[name] for name in ("exp", "abs")})
    monkeypatch.setattr(support, "attempts", lambda: {"good": lambda func: None, "poor": refuse})
    monkeypatch.setattr(support, "table", support.table.__wrapped__)
    (cell,) = [c for c in support.table() if c.backend and c.reason]
    assert cell == support.Cell("exp", "f64", "poor", "no exponentials of float64")
    text = support.markdown()
    assert "| exp | [1] | ✓ | ✓ |" in text and "| abs | ✓ | ✓ |" in text and "| – |" in text
    assert "\n[1] poor: no exponentials of float64.\n" in text

    def fail(func: Func) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(support, "attempts", lambda: {"bad": fail})
    with pytest.raises(RuntimeError, match="a bug"):
        support.table()


def test_markdown_has_a_row_for_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "attempts", lambda: {"good": lambda func: None})
    monkeypatch.setattr(support, "table", support.table.__wrapped__)
    lines = support.markdown().splitlines()
    rows = {line.split("|")[1].strip(): line.count("|") for line in lines if line.startswith("|")}
    assert set(rows) == {"op", ":---", *support.SAMPLES} and set(rows.values()) == {len(DTYPES) + 2}


# --- what is supported runs, and computes what the interpreter says ---------------------------------------------------


def inputs(func: Func) -> list[np.ndarray]:
    """Small numbers of both signs, not 0 (integer division by it is unspecified); as indices some lie outside."""
    rng = np.random.default_rng(0)
    arrays: list[np.ndarray] = []
    for param in func.inputs:
        shape, own = param.ref.shape, param.ref.dtype
        x: Any = rng.integers(1, 8, shape) / 4 if kind_of(own) == "float" else rng.integers(1, 8, shape)
        if own == BOOL:
            x = rng.integers(0, 2, shape)
        elif kind_of(own) in ("float", "signed"):
            x = x * rng.choice([-1, 1], shape)
        arrays.append(np.asarray(x).astype(own))
    return arrays


def as_xla(funcs: Sequence[Func]) -> Callable[..., Any]:
    """One program for many Funcs: compiling each apart takes minutes."""

    def run(many: list[list[np.ndarray]]) -> list[Any]:
        return [emit_xla.run(func, *arrays) for func, arrays in zip(funcs, many, strict=True)]

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def judge(name: str, dtype: DType, got: np.ndarray, wanted: np.ndarray, arrays: list[np.ndarray]) -> None:
    """Bit for bit; or, of what rounds, as near to the same op on float64 as the interpreter is."""
    if kind_of(got.dtype) != "float" or np.array_equal(got, wanted, equal_nan=True):
        assert_same(got, wanted, zeros=False)
        return
    wide = support.sample(name, F64)
    oracle = interpret(wide, *(x.astype(F64) if x.dtype == dtype else x for x in arrays))[-1]
    assert_close(got, oracle.astype(F64), wanted, length=16)  # of the polynomials behind the functions


Run = Callable[[Sequence[Any], list[list[np.ndarray]]], list[Any]]


def by_xla(funcs: Sequence[Func], many: list[list[np.ndarray]]) -> list[Any]:
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, as_xla(funcs)(many))


def for_triton(func: Func) -> Any:
    return build(func, CHIPS["cuda:sm_90"], {})


def by_triton(programs: Sequence[Any], many: list[list[np.ndarray]]) -> list[Any]:
    return [triton_interpret(program, arrays) for program, arrays in zip(programs, many, strict=True)]


def for_mosaic(func: Func) -> MosaicLowering:
    return MosaicLowering(func, TARGETS["tpu:v5e"], emit_xla.run)


def by_mosaic(lowerings: Sequence[MosaicLowering], many: list[list[np.ndarray]]) -> list[Any]:
    def run(many: list[list[np.ndarray]]) -> list[Any]:
        pairs = zip(lowerings, many, strict=True)
        return [lowering.run(*arrays, interpret=True) for lowering, arrays in pairs]

    return jax.tree.map(np.asarray, jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(many))


def by_llvm(lowerings: Sequence[LlvmLowering], many: list[list[np.ndarray]]) -> list[Any]:
    def run(many: list[list[np.ndarray]]) -> list[Any]:
        return [lowering.run(*arrays) for lowering, arrays in zip(lowerings, many, strict=True)]

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(run)(many))


@dataclass(frozen=True)
class Backend:
    """Lowers a cell, and runs many of them at once.

    Attributes:
      needs: the package without which it is not tested.
      lower: raises a `TilekernError` for a cell that the backend refuses.
      run: the results of what `lower` returned.
      refuses: the only reason of a refusal. A cell that is lost for another one is a decision, and would be named here.
      poor_in: dtypes of which something is refused.
    """

    needs: str
    lower: Callable[[Func], Any]
    run: Run
    refuses: str = "(?!)"
    poor_in: Sequence[str] = ()


NARROW = [n for n, d in DTYPES.items() if d.itemsize < 4]
BACKENDS = {
    "xla": Backend("jax", legalize, by_xla),
    "triton": Backend("triton", for_triton, by_triton, r"cuda:sm_90 has no atomic \w+ of \w+", NARROW),
    "mosaic": Backend("jax", for_mosaic, by_mosaic, "TPUs have no numbers of 64 bits", [*DTYPES]),
    "llvm": Backend("llvmlite", LlvmLowering, by_llvm),
}


def lowered(backend: Backend, dtype: DType) -> dict[str, tuple[Func, Any]]:
    """The cells of a dtype that a backend takes, each with its lowering."""
    cells = {row: func for row in support.SAMPLES if (func := sample(row, dtype))}
    taken: dict[str, tuple[Func, Any]] = {}
    for row, func in cells.items():
        try:
            taken[row] = func, backend.lower(func)
        except TilekernError as error:
            assert re.fullmatch(backend.refuses, error.summary), f"{row}: {error.summary}"
    assert (len(taken) < len(cells)) == (dtype_name(dtype) in backend.poor_in)
    return taken


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cells_run_or_are_refused(backend: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(BACKENDS[backend].needs, reason=f"needs {BACKENDS[backend].needs}")
    dtype = DTYPES[name]
    cells = lowered(BACKENDS[backend], dtype)
    many = [inputs(func) for func, _ in cells.values()]
    results = BACKENDS[backend].run([lowering for _, lowering in cells.values()], many)
    for (row, (func, _)), arrays, outputs in zip(cells.items(), many, results, strict=True):
        for got, wanted in zip(outputs, interpret(func, *arrays), strict=True):
            try:
                judge(row, dtype, got, wanted, arrays)
            except AssertionError as error:
                raise AssertionError(f"{row} of {name}: {error}") from error


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", DTYPES)
def test_cells_have_text_for_tpus(name: str) -> None:
    """The documentation's table takes the text of each cell, too, but compares nothing."""
    assert all(lowering.text for _, lowering in lowered(BACKENDS["mosaic"], DTYPES[name]).values())
