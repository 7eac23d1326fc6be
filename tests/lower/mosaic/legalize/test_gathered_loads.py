"""Loads of many gathered lanes, by loads of blocks of which the lanes are taken."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lower.mosaic.legalize.legality import assert_stays, ops_of
from tests.lower.mosaic.pallas_kernels import needs_libtpu
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import MemoryOp
from tilekern.ir.parse import parse
from tilekern.ir.shape import Reshape
from tilekern.ir.verify import verify
from tilekern.lower.mosaic.calibration import MAX_GATHERED_ROWS, MAX_TAKEN_BYTES
from tilekern.lower.mosaic.chip import SUBLANES
from tilekern.lower.mosaic.legalize import legalize
from tilekern.lower.mosaic.legalize.gathered_loads import take_gathers

MANY = MAX_GATHERED_ROWS + 22
SIDE = 13  # of a square of more lanes


@tk.kernel(out_type=lambda w, x: x)
def toeplitz(w: tk.Ref, x: tk.Ref, out: tk.Ref, *, first: int = 0) -> None:
    """x @ T, where T[m, n] = w[n - m + first], and 0 outside of w."""
    i = tk.parallel(x.shape[0], 8)
    n = jnp.arange(x.shape[1])
    out[i] = (x[i] @ w[n[None, :] - n[:, None] + first]).astype(x.dtype)


@tk.kernel(out_type=lambda w, rows, columns: jax.ShapeDtypeStruct((rows.shape[0], columns.shape[0]), w.dtype))
def square(w: tk.Ref, rows: tk.Ref, columns: tk.Ref, out: tk.Ref) -> None:
    """All pairs of a row and a column, as in `w[np.ix_(rows, columns)]`, or 3."""
    i = tk.parallel(rows.shape[0], 64)
    out[i] = w.load((rows[i][:, None], columns[:][None, :]), fill=3)


def gathered(func: Func) -> list[MemoryOp]:
    """The accesses with index vectors."""
    ops = (op for op in func.walk() if isinstance(op, MemoryOp))
    return [op for op in ops if any(dim.kind == "gather" for dim in op.access.dims)]


def loading(shape: tuple[int, ...], access: str, tile: tuple[int, ...], dtype: str, ends: str) -> Func:
    """A program that stores %x[access]. %a and %b are index vectors, %c and %d these within bounds, %n is a number."""
    sizes, whole = ", ".join(map(str, tile)), ", ".join(f"0 +: {n}" for n in tile)
    number = {"bool": "true", "f32": "7.0", "bf16": "7.0"}.get(dtype, "7")
    vectors = "".join(
        f"""
        %{name} = load %v{name}[0 +: {count}] : i32[{count}]
        %low_{name} = constant -9 : i32[{count}]
        %high_{name} = constant 50 : i32[{count}]
        %not_below_{name} = max(%{name}, %low_{name}) : i32[{count}]
        %{bounded} = min(%not_below_{name}, %high_{name}) : i32[{count}]
        """
        for name, bounded, count in (("a", "c", MANY), ("b", "d", SIDE))
    )
    return parse(
        f"""
        func @f(%x: ref<{dtype}[{", ".join(map(str, shape))}], in>, %va: ref<i32[{MANY}], in>,
                %vb: ref<i32[{SIDE}], in>, %vn: ref<i32[1], in>, %vm: ref<bool[{sizes}], in>,
                %o: ref<{dtype}[2, {sizes}], out>) {{
          grid %i in i[2 by 1]
          %n = load %vn[0] : i32[]
          {vectors}
          %m = load %vm[{whole}] : bool[{sizes}]
          %f = constant {number} : {dtype}[]
          %t = load %x[{access}]{ends} : {dtype}[{sizes}]
          store %t to %o[%i, {whole}]
        }}
        """
    )


# Positions, and whether int32 tells where they are.
NEAR = (
    ("%a", "-1*%a + 5", "%c + %i", "2*%c - 3", "1000000*%c", "7*(%c // 4) + 2", "3*(%a // 5 % 16) - %i"),
    ("%b", "3*%d - %i", "%d + 2"),
)
FAR = ("2*%a + %i", "1000000*%a", "%a + %n"), ("%b + %n", "4*%b + %n")
STARTS = ("0", "%i", "5*%i", "%n", "-1", "3")


@st.composite
def gathers(draw: Any, near: bool) -> tuple[Func, list[np.ndarray]]:
    """A program that gathers along one dim or two, beside others, and its inputs."""
    sides = draw(st.sampled_from([(0,), (0, None), (None, 0), (1, 1), (1, None, 1), (None, 0, None)]))
    shape, accesses, tile = list[int](), list[str](), list[int]()
    for side in sides:
        shape.append(draw(st.integers(1, 40)))
        size = draw(st.integers(1, 9)) if side is None else (MANY, SIDE)[side]
        if side is not None:
            accesses.append(f"gather({draw(st.sampled_from((NEAR if near else FAR)[side]))}, {size})")
        elif draw(st.booleans()):
            accesses.append(f"{draw(st.sampled_from(STARTS))} +: {size}")
        else:
            accesses.append(draw(st.sampled_from(STARTS)))
            continue
        tile.append(size)
    dtype = draw(st.sampled_from(["f32", "i32", "bf16", "i8", "u8", "bool"]))
    ends = draw(st.sampled_from(["", " mask %m", " fill %f", " mask %m fill %f"]))
    func = loading(tuple(shape), ", ".join(accesses), tuple(tile), dtype, ends)
    return func, inputs(func, draw(st.integers(0, 99)))


def inputs(func: Func, seed: int) -> list[np.ndarray]:
    """Indices lie in the array, around it, and as far away as int32 goes."""
    random = np.random.default_rng(seed)
    found = [random.integers(0, 2 if p.ref.dtype == np.bool_ else 99, p.ref.shape) for p in func.inputs]
    for n, size in ((1, MANY), (2, SIDE), (3, 1)):
        far = random.choice([-(2**31), 2**31 - 1, 2**30, -77], size)
        found[n] = np.where(random.random(size) < 0.2, far, random.integers(-3, 45, size))
    return [x.astype(p.ref.dtype) for x, p in zip(found, func.inputs, strict=True)]


@given(gathers(near=True))
def test_the_meaning_stays(found: tuple[Func, list[np.ndarray]]) -> None:
    """In the array, out of its bounds, masked, filled, of each dtype, beside blocks that end behind the array."""
    func, arrays = found
    rewritten = take_gathers(func)
    verify(rewritten)
    assert gathered(func) and not gathered(rewritten)
    assert_same(interpret(rewritten, *arrays)[0], interpret(func, *arrays)[0])
    assert_stays(func, arrays)


@given(gathers(near=False))
def test_positions_that_may_wrap_around_stay(found: tuple[Func, list[np.ndarray]]) -> None:
    func, arrays = found
    assert take_gathers(func) is func
    assert_stays(func, arrays)


def test_few_lanes_and_large_blocks_stay() -> None:
    access = f"gather(%a, {MANY})"
    for rows, stays in ((MAX_TAKEN_BYTES // 4 // SUBLANES, False), (MAX_TAKEN_BYTES // 4 // SUBLANES + 1, True)):
        func = loading((rows,), access, (MANY,), "f32", "")
        assert (take_gathers(func) is func) == stays
    few = loading((9, 9), f"gather(%b, {SIDE}), 0 +: 9", (SIDE, 9), "f32", "")
    assert take_gathers(few) is few


def test_an_array_that_programs_write_stays() -> None:
    text = str(loading((40,), f"gather(%a, {MANY})", (MANY,), "f32", "")).replace("[40], in>", "[40], inout>")
    func = parse(text)
    assert take_gathers(func) is func


# --- whole kernels ---


def test_a_toeplitz_matrix_takes_few_operations() -> None:
    """The index of 16,384 lanes stays a tile of 128 rows: it was read by 262,144 operations."""
    traced = toeplitz.trace(jax.ShapeDtypeStruct((255,), jnp.float32), jax.ShapeDtypeStruct((64, 128), jnp.float32))
    for target in ("tpu:v5e", "tpu:v6e"):
        legal = legalize(traced.ir, target.removeprefix("tpu:"))
        assert len(list(legal.walk())) < 50
        assert {op.shape for op in ops_of(legal, Reshape)} <= {(1, 255)}
        assert traced.lower(target).text.count("\n") < 200


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_toeplitz_matrices(dtype: Any) -> None:
    """Of which a part lies outside of the vector."""
    random = np.random.default_rng(0)
    w, x = (random.integers(-3, 4, shape).astype(dtype) for shape in ((200,), (19, 128)))
    lags = np.arange(128)[None, :] - np.arange(128)[:, None] + 90
    inside = (lags >= 0) & (lags < 200)
    matrix = np.where(inside, w.astype(np.int32)[np.clip(lags, 0, 199)], 0)
    found = toeplitz.trace(w, x, first=90).lower("tpu:v5e").interpret(w, x)
    assert_same(found, (x.astype(np.int32) @ matrix).astype(dtype))


@needs_libtpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_])
@pytest.mark.parametrize("target", ["tpu:v5e", "tpu:v6e"])
def test_they_compile(dtype: Any, target: str) -> None:
    """Along one index vector, along two, and from a matrix."""
    w = jax.ShapeDtypeStruct((300, 200), dtype)
    rows, columns = jax.ShapeDtypeStruct((128,), jnp.int32), jax.ShapeDtypeStruct((40,), jnp.int32)
    square.trace(w, rows, columns).lower(target).compile()
    if dtype != jnp.bool_:
        vector, x = jax.ShapeDtypeStruct((200,), dtype), jax.ShapeDtypeStruct((64, 128), dtype)
        toeplitz.trace(vector, x, first=90).lower(target).compile()
