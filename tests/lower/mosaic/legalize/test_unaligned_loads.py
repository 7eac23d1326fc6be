"""Loads at any place, by loads of tiles at multiples of their sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lower.mosaic.pallas_kernels import needs_libtpu
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Load
from tilekern.ir.parse import parse
from tilekern.ir.verify import verify
from tilekern.lower.mosaic.legalize.unaligned_loads import align_loads
from tilekern.passes import pipeline
from tilekern.passes.cse import cse

OFFSETS = (-1, 0, 1)


@tk.kernel(out_type=lambda x: x)
def stencil(x: tk.Ref, out: tk.Ref, *, rows: tk.Block = 8, columns: tk.Block = 128) -> None:
    """The sum of the nine elements around each one; there are zeros around the array."""
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
    near = [(tk.ds(i.start + di, i.size), tk.ds(j.start + dj, j.size)) for di in OFFSETS for dj in OFFSETS]
    parts = [x.load(place, fill=0) for place in near]
    total = parts[0]
    for part in parts[1:]:
        total = total | part if x.dtype == np.bool_ else total + part
    out[i, j] = total


@tk.kernel(out_type=lambda x, starts: jax.ShapeDtypeStruct((starts.shape[0], 16, 128), x.dtype))
def windows(x: tk.Ref, starts: tk.Ref, out: tk.Ref) -> None:
    """A tile at a place that is computed in the kernel, of both dims."""
    n = tk.parallel(starts.shape[0])
    start = jnp.max(starts[n])
    out[n] = x.load((tk.ds(start, 16), tk.ds(start * 3 - 7, 128)), fill=5)


def image(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Small whole numbers, of which sums are exact."""
    return np.random.default_rng(0).integers(0, 2, shape).astype(dtype)


def odd_loads(func: Func) -> list[Load]:
    """Loads at computed places that are no multiples of their sizes."""
    dims = [(op, d) for op in func.walk() if isinstance(op, Load) for d in op.access.dims if d.kind == "block"]
    return [op for op, d in dims if d.position.terms and not d.position.is_multiple_of(d.size)]


def sums(shape: tuple[int, int], accesses: list[str]) -> Func:
    """A program that stores what it loads by each access, of 16 rows and 128 columns."""
    loads = "\n".join(
        f"%a{n} = load %x[{access}] mask %m fill %f : i32[16, 128]"
        if n % 2
        else f"%a{n} = load %x[{access}] : i32[16, 128]"
        for n, access in enumerate(accesses)
    )
    (rows, columns), count = shape, len(accesses)
    stores = "\n".join(f"store %a{n} to %o[{n}, 16*%i +: 16, 128*%j +: 128]" for n in range(count))
    return parse(
        f"""
        func @f(%x: ref<i32[{rows}, {columns}], in>, %y: ref<i32[3], in>, %o: ref<i32[{count}, 48, 256], out>) {{
          grid %i in i[48 by 16], %j in j[256 by 128]
          %n = load %y[%i] : i32[]
          %f = constant 7 : i32[]
          %c = constant 9 : i32[16, 128]
          %t = iota() {{dim=1}} : i32[16, 128]
          %m = ge(%t, %c) : bool[16, 128]
          {loads}
          {stores}
        }}
        """
    )


ROWS = st.sampled_from(["16*%i", "8*%i", "24*%i", "%i", "3*%i", "%n", "16*%n", "2*%n", "%n + 8*%i"])
COLUMNS = st.sampled_from(["128*%j", "256*%j", "64*%j", "%j", "%n", "5*%n", "128*%n", "%n + 128*%i"])


@st.composite
def accesses(draw: Any) -> list[str]:
    places = [f"{draw(ROWS)} {{}} +: 16, {draw(COLUMNS)} {{}} +: 128" for _ in range(draw(st.integers(1, 2)))]
    constants = st.sampled_from(["", "- 1", "+ 1", "+ 3", "- 8", "+ 40", "- 130"])
    return [
        draw(st.sampled_from(places)).format(draw(constants), draw(constants)) for _ in range(draw(st.integers(1, 5)))
    ]


@given(accesses(), st.tuples(st.integers(1, 60), st.integers(1, 300)), st.integers(0, 9))
def test_the_meaning_stays(found: list[str], shape: tuple[int, int], seed: int) -> None:
    func = sums(shape, found)
    random = np.random.default_rng(seed)
    arrays = random.integers(0, 99, shape).astype(np.int32), random.integers(-70, 70, 3).astype(np.int32)
    rewritten = cse(align_loads(func))
    verify(rewritten)
    assert_same(interpret(rewritten, *arrays)[0], interpret(func, *arrays)[0])
    assert not odd_loads(rewritten)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("shape", "rows", "columns", "dtype"),
    [
        ((21, 37), 8, 128, np.float32),
        ((21, 37), 1, 128, ml_dtypes.bfloat16),
        ((40, 300), 8, 128, np.int8),
        ((40, 300), 24, 512, np.bool_),
        ((40, 300), 12, 128, ml_dtypes.bfloat16),
        ((40, 300), 16, 100, np.float32),
    ],
)
def test_a_stencil(shape: tuple[int, int], rows: int, columns: int, dtype: Any) -> None:
    x = image(shape, dtype)
    lowered = stencil.trace(x, rows=rows, columns=columns).lower("tpu:v5e")
    padded = np.pad(x, 1).astype(np.int32)
    near = [padded[1 + di :, 1 + dj :][: shape[0], : shape[1]] for di in OFFSETS for dj in OFFSETS]
    np.testing.assert_array_equal(np.asarray(lowered.interpret(x)), sum(near).astype(dtype))
    assert lowered.text.count("\n") < 2000 and "row by row" not in lowered.plan


@pytest.mark.sweep(2)
@needs_libtpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.float16])
def test_a_stencil_compiles(dtype: Any) -> None:
    for shape, rows in (((21, 37), 8), ((500, 300), 1)):
        stencil.trace(jax.ShapeDtypeStruct(shape, dtype), rows=rows).lower("tpu:v5e").compile()


def test_a_tile_at_a_computed_place() -> None:
    """Before the array, in it, and behind it."""
    x, starts = image((40, 300), np.int32), np.array([[-20, -30], [-3, 1], [7, 4], [33, 5], [99, 0]], np.int32)
    traced = windows.trace(x, starts)
    lowered = traced.lower("tpu:v5e")
    np.testing.assert_array_equal(np.asarray(lowered.interpret(x, starts)), interpret(traced.ir, x, starts)[0])
    assert "row by row" not in lowered.plan


@needs_libtpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_tile_at_a_computed_place_compiles(dtype: Any) -> None:
    x, starts = jax.ShapeDtypeStruct((400, 300), dtype), jax.ShapeDtypeStruct((5, 2), jnp.int32)
    windows.trace(x, starts).lower("tpu:v5e").compile()


def test_overlapping_loads_are_parts_of_the_same_tiles() -> None:
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    func = pipeline.run(align_loads(stencil.trace(x, rows=64, columns=128).ir))
    loads = [op for op in func.walk() if isinstance(op, Load)]
    assert sorted(op.access.shape for op in loads) == sorted((r, c) for r in (8, 8, 64) for c in (128, 128, 128))


def test_what_is_at_multiples_stays() -> None:
    func = sums((60, 300), ["16*%i +: 16, 128*%j +: 128", "16*%i + 16 +: 16, 128*%j +: 128"])
    assert align_loads(func) is func


@pytest.mark.sweep(1)
@pytest.mark.parametrize("place", ["%n + 3*%i", "3*(%n // 2)"])
def test_a_position_that_may_leave_int32_stays(place: str) -> None:
    """No int32 holds a sum, or a multiple of a digit, of any two int32."""
    func = sums((60, 300), [f"16*%i +: 16, {place} +: 128"])
    aligned = align_loads(func)
    assert odd_loads(aligned)
    x, y = np.arange(60 * 300, dtype=np.int32).reshape(60, 300), np.array([-30, 5, 71], np.int32)
    assert_same(interpret(aligned, x, y)[0], interpret(func, x, y)[0])
