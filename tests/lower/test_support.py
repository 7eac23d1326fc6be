"""The table of what each backend can do: it is complete, and what it promises is so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.ir.funcs import assert_same
from tilekern.errors import TargetError, UnsupportedError
from tilekern.ir.core import Func
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import OPS
from tilekern.ir.types import BOOL, DTYPES, F64, DType, kind_of
from tilekern.ir.verify import verify
from tilekern.lower import support
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.interpret import interpret as triton_interpret
from tilekern.lower.xla.emit import emit_xla
from tilekern.testing import assert_close

FLOATS = [n for n, d in DTYPES.items() if kind_of(d) == "float"]


def test_every_op_is_in_the_table() -> None:
    found: set[str] = set()
    for row in support.SAMPLES:
        (func, *_) = accepted(row)
        verify(func)
        ops = {op.function if isinstance(op, Elementwise) else op.name for op in func.walk()}
        (name,) = {op for op in ops if row == op or row.startswith(f"{op} ")}
        found.add(name)
    assert found == OPS.keys() - {"elementwise"} | TABLE.keys()


def accepted(row: str) -> list[Func]:
    """The samples of a row for all dtypes that the language has it for."""
    rejected = {c.dtype for c in support.table() if c.op == row and not c.backend}
    return [support.sample(row, dtype) for name, dtype in DTYPES.items() if name not in rejected]


def test_every_cell_is_supported_or_rejected_with_a_reason() -> None:
    """An error of a backend that is none of ours would have ended `table()`."""
    cells = {(c.op, c.dtype, c.backend): c.reason for c in support.table()}
    assert set(support.ATTEMPTS) == {"interpreter", *(target.backend for target in TARGETS.values())}
    for op in support.SAMPLES:
        for dtype in DTYPES:
            if (op, dtype, "") in cells:
                assert re.search(r"not accept|bitcast|assert|atomic", cells[op, dtype, ""]), (op, dtype)
            else:
                assert all((op, dtype, backend) in cells for backend in support.ATTEMPTS), (op, dtype)


def test_what_the_portable_backends_reject_is_known() -> None:
    """A cell that one of these loses is a decision, and would be named here."""
    assert [c for c in support.table() if c.backend in ("interpreter", "xla") and c.reason] == []


def test_what_triton_rejects_is_atomics_that_gpus_lack() -> None:
    reasons = [c.reason for c in support.table() if c.backend == "triton" and c.reason]
    assert reasons and all(re.fullmatch(r"cuda:sm_90 has no atomic \w+ of \w+", reason) for reason in reasons)


def test_what_mosaic_rejects_is_64_bits() -> None:
    rejected = [c for c in support.table() if c.backend == "mosaic" and c.reason]
    assert rejected and all(c.reason == "TPUs have no numbers of 64 bits" for c in rejected)


def test_llvm_rejects_nothing() -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    assert [c for c in support.table() if c.backend == "llvm" and c.reason] == []


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
    monkeypatch.setattr(support, "ATTEMPTS", {"good": lambda func: None, "poor": refuse})
    monkeypatch.setattr(support, "table", support.table.__wrapped__)
    (cell,) = [c for c in support.table() if c.backend and c.reason]
    assert cell == support.Cell("exp", "f64", "poor", "no exponentials of float64")
    text = support.markdown()
    assert "| exp | [1] | ✓ | ✓ |" in text and "| abs | ✓ | ✓ |" in text and "| – |" in text
    assert "\n[1] poor: no exponentials of float64.\n" in text

    def fail(func: Func) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(support, "ATTEMPTS", {"bad": fail})
    with pytest.raises(RuntimeError, match="a bug"):
        support.table()


def test_markdown_has_a_row_for_each_op() -> None:
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


def as_xla(funcs: list[Func]) -> Callable[..., Any]:
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


def by_xla(funcs: list[Func], many: list[list[np.ndarray]]) -> list[Any]:
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, as_xla(funcs)(many))


def by_triton(funcs: list[Func], many: list[list[np.ndarray]]) -> list[Any]:
    pytest.importorskip("triton", reason="needs triton")
    programs = [build(func, CHIPS["cuda:sm_90"], {}) for func in funcs]
    return [triton_interpret(program, arrays) for program, arrays in zip(programs, many, strict=True)]


def by_mosaic(funcs: list[Func], many: list[list[np.ndarray]]) -> list[Any]:
    lowerings = [MosaicLowering(func, TARGETS["tpu:v5e"], emit_xla.run) for func in funcs]

    def run(many: list[list[np.ndarray]]) -> list[Any]:
        pairs = zip(lowerings, many, strict=True)
        return [lowering.run(*arrays, interpret=True) for lowering, arrays in pairs]

    return jax.tree.map(np.asarray, jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(many))


def by_llvm(funcs: list[Func], many: list[list[np.ndarray]]) -> list[Any]:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    lowerings = [LlvmLowering(func) for func in funcs]

    def run(many: list[list[np.ndarray]]) -> list[Any]:
        return [lowering.run(*arrays) for lowering, arrays in zip(lowerings, many, strict=True)]

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(run)(many))


RUN = [("xla", by_xla), ("triton", by_triton), ("mosaic", by_mosaic), ("llvm", by_llvm)]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("backend", "run"), RUN)
def test_supported_cells_run(backend: str, run: Any, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    dtype = DTYPES[name]
    rows = [c.op for c in support.table() if (c.dtype, c.backend, c.reason) == (name, backend, "")]
    funcs = [support.sample(row, dtype) for row in rows]
    many = [inputs(func) for func in funcs]
    for row, func, arrays, results in zip(rows, funcs, many, run(funcs, many), strict=True):
        for got, wanted in zip(results, interpret(func, *arrays), strict=True):
            try:
                judge(row, dtype, got, wanted, arrays)
            except AssertionError as error:
                raise AssertionError(f"{row} of {name}: {error}") from error
