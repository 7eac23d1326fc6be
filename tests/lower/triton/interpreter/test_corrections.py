"""Triton's interpreter computes like a GPU; each test fails without one of the corrections."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lower.triton.sources import TILE, apply, assert_same, result, run
from tilekern.errors import InterpreterError, OutOfBoundsError
from tilekern.ir.elementwise import TABLE
from tilekern.ir.types import DTYPES, F32, F64, round_to
from tilekern.lower.triton.dtypes import TRITON_DTYPES
from tilekern.lower.triton.interpreter.floats import convert
from tilekern.testing import arrays, assert_close

pytest.importorskip("triton", reason="needs triton")

FLOATS = ("f64", "f32", "f16", "bf16", "f8e4m3fn", "f8e5m2")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
SPECIALS = (0.0, -0.0, np.nan, np.inf, -np.inf)
tiles = arrays(np.float32, (8, 8))


def narrow(dtype: str, specials: tuple[float, ...] = ()) -> st.SearchStrategy[np.ndarray]:
    return arrays(DTYPES[dtype], (64,), specials)


# --- syntax --------------------------------------------------------------------------------------------------------


@given(x=tiles)
def test_and_or_not_work_on_tiles(x: np.ndarray) -> None:
    (y,) = run(f"{TILE}tl.store(y0 + i, (x > 0 and not (x > 1)) or x < -1)", [x], [result([8, 8], "bool")])
    assert_same(y, ((x > 0) & ~(x > 1)) | (x < -1))


def test_what_the_compiler_knows_ends_a_chain_of_conditions() -> None:
    body = """
        USED: tl.constexpr = False
        if USED and tl.load(x0 - 1) > 0:
            tl.store(y0, 1.0)
        if not USED or tl.load(x0 - 1) > 0:
            tl.store(y0, 2.0)
    """
    assert run(body, [np.zeros(1, np.float32)], [result([], "f32")])[0] == 2


def test_operands_of_and_are_all_evaluated() -> None:
    body = "n = tl.load(x0)\nif n > 5 and tl.load(x0 + n) > 0:\n    n = 0\ntl.store(y0, n)"
    with pytest.raises(OutOfBoundsError):
        run(body, [np.ones(1, np.int32)], [result([], "i32")])


@given(x=tiles.map(lambda x: np.trunc(2 * x)))
@pytest.mark.parametrize("function", ["argmax", "argmin"])
def test_the_first_of_equals_is_found(function: str, x: np.ndarray) -> None:
    (y,) = run(f"{TILE}tl.store(y0 + tl.arange(0, 8), tl.{function}(x, 1))", [x], [result([8], "i32")])
    assert_same(y, getattr(np, function)(x, 1).astype(np.int32))


@pytest.mark.parametrize("loop", ["range", "tl.range"])
def test_a_loop_counts_in_tensors(loop: str) -> None:
    body = f"""
        n = tl.load(x0)
        total = tl.zeros((), tl.int64)
        wrapped = tl.zeros((), tl.int32)
        for k in {loop}(n, 5):
            total += k.to(tl.int64) * 2000000000
            wrapped += k * 2000000000
        tl.store(y0, total)
        tl.store(y1, wrapped)
    """
    total, wrapped = run(body, [np.full(1, 2, np.int32)], [result([], "i64"), result([], "i32")])
    assert total == 9 * 2000000000
    assert wrapped == np.int64(total).astype(np.int32)


def test_a_loop_with_wide_bounds_counts_in_int64() -> None:
    body = """
        start = tl.load(x0)
        for k in range(start, start + 2):
            tl.store(y0 + (k - start), k)
    """
    start = 1 << 40
    (y,) = run(body, [np.full(1, start, np.int64)], [result([2], "i64")])
    assert y.tolist() == [start, start + 1]


def test_a_number_that_is_assigned_is_a_tensor() -> None:
    body = "n = 3\na, b = 4, 5.5\ntl.store(y0, n.to(tl.float32) + a.to(tl.float32) + b.to(tl.float32))"
    assert run(body, [], [result([], "f32")])[0] == 12.5


# --- floats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3fn", "f8e5m2"])
@given(data=st.data())
def test_narrow_floats_compute_rounded_once(dtype: str, data: st.DataObject) -> None:
    x, y = (data.draw(narrow(dtype, SPECIALS)) for _ in range(2))
    with np.errstate(all="ignore"):
        for symbol, meaning in (("+", np.add), ("-", np.subtract), ("*", np.multiply)):
            assert_same(apply(f"x {symbol} y", x, y), meaning(x, y))
    assert_same(apply("x < y", x, y, dtype="bool"), x < y)
    assert_same(apply("x == y", x, y, dtype="bool"), x == y)
    assert_same(apply("tl.where(x >= y, x, y)", x, y), np.where(x >= y, x, y))


@given(x=narrow("bf16"), y=narrow("bf16"))
def test_bfloat16_divides_sorts_and_flips(x: np.ndarray, y: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        assert_same(apply("x / y", x, y), x / y)
    assert_same(apply("tl.sort(x)", x), np.sort(x))
    assert_same(apply("tl.flip(x, 0)", x), x[::-1])
    assert_same(apply("tl.abs(x)", x), np.abs(x))
    assert_same(apply("x * 2.5 + tl.full((64,), 1.0, tl.bfloat16)", x), x * x.dtype.type(2.5) + x.dtype.type(1))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
@settings(max_examples=8)
@given(data=st.data())
def test_floats_round_to_nearest_even(source: str, target: str, data: st.DataObject) -> None:
    """Also halfway between two neighbours. Float8 saturates. The oracle goes by way of float32 where Triton does."""
    x = data.draw(narrow(source, SPECIALS))
    halfway = (x.astype(F64) * (1 + 2.0**-4)).astype(x.dtype)
    for values in (x, halfway, x * x.dtype.type(16)):
        y = apply(f"x.to({triton(target)})", values, dtype=target)
        largest = {"f8e4m3fn": 448.0, "f8e5m2": 57344.0}.get(target, np.inf) if source[:2] != "f8" else np.inf
        expected = round_to(np.clip(values.astype(F64), -largest, largest), DTYPES[target])
        assert_same(y, expected)


def test_a_float32_in_the_middle_goes_to_the_even_bfloat16() -> None:
    bits = np.arange(64, dtype=np.uint32) * 0x4000 + 0x3F800000  # quarters of the last place
    x = bits.view(F32)
    assert_same(apply("x.to(tl.bfloat16)", x, dtype="bf16"), x.astype(DTYPES["bf16"]))


@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", ["f64", "f32", "f16", "bf16"])
def test_floats_become_the_nearest_integer_of_a_register(source: str, target: str) -> None:
    """PTX ISA, "cvt": .rzi saturates; int8 is the lower half of an int16."""
    limit = 2.0 ** np.arange(6, 65)
    values = np.concatenate([[0.5, -0.5, 2.75, -2.75, np.inf, -np.inf], limit, -limit, limit * 1.5])
    with np.errstate(over="ignore"):
        x = np.resize(values, 128).astype(DTYPES[source])
    first, second = (apply(f"x.to({triton(target)})", part, dtype=target) for part in np.split(x, 2))
    register = np.iinfo(_register(target))
    width = DTYPES[target].itemsize
    bits = [_nearest(v, register) % 2 ** (8 * width) for v in x.astype(F64)]
    found = np.concatenate([first, second]).view(f"u{width}")
    assert found.tolist() == bits


def _register(target: str) -> np.dtype:
    dtype = DTYPES[target]
    return np.dtype(f"{dtype.kind}{max(dtype.itemsize, 2)}")


def _nearest(value: float, limits: np.iinfo) -> int:
    if np.isinf(value):
        return limits.max if value > 0 else limits.min
    return min(max(int(value), limits.min), limits.max)


@pytest.mark.parametrize(
    ("source", "target"), [("f32", "i32"), ("f32", "i64"), ("f64", "i32"), ("f64", "u64"), ("bf16", "i8")]
)
def test_nan_becomes_zero_except_of_or_as_64_bits(source: str, target: str) -> None:
    """PTX ISA, "cvt": "NaN input results in … zero if source is not .f64 and destination is not .s64, .u64; otherwise
    1 << (BitWidth(dst) - 1)"."""
    y = apply(f"x.to({triton(target)})", np.full(64, np.nan, DTYPES[source]), dtype=target)
    bits = 8 * DTYPES[target].itemsize
    expected = 1 << bits - 1 if source == "f64" or bits == 64 else 0
    assert (y.view(f"u{bits // 8}") == expected).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", FLOATS[:4])
@pytest.mark.parametrize("source", [*INTEGERS, "bool"])
@settings(max_examples=8)
@given(data=st.data())
def test_integers_become_the_nearest_float(source: str, target: str, data: st.DataObject) -> None:
    bits = data.draw(arrays(np.int64, (64,))) * 0x123456789ABCD  # 53 of them, which float64 has
    x = (bits % 2 if source == "bool" else bits).astype(DTYPES[source])
    with np.errstate(over="ignore"):
        assert_same(apply(f"x.to({triton(target)})", x, dtype=target), round_to(x, DTYPES[target]))


def test_conversions_know_no_other_rounding() -> None:
    with pytest.raises(InterpreterError, match="rounds to nearest even only"):
        apply("x.to(tl.float8e5, fp_downcast_rounding='rtz')", np.zeros(64, np.float32), dtype="f8e5m2")


def test_converting_keeps_shapes() -> None:
    assert convert(np.zeros((2, 0, 3), F32), DTYPES["f8e5m2"]).shape == (2, 0, 3)


def triton(dtype: str) -> str:
    return f"tl.{TRITON_DTYPES[dtype]}"


# --- accesses ------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64", "i32", "u32", "i64"])
@given(data=st.data())
def test_atomics_add_every_lane(dtype: str, data: st.DataObject) -> None:
    x = data.draw(arrays(DTYPES[dtype], (64,)))
    places = data.draw(arrays(np.int32, (64,))) % 4
    body = """
        i = tl.arange(0, 64)
        tl.atomic_add(y0 + tl.load(x1 + i), tl.load(x0 + i), mask=i < 50)
    """
    (y,) = run(body, [x, places], [result([4], dtype, zeroed=True)])
    expected = np.zeros(4, x.dtype)
    np.add.at(expected, places[:50], x[:50])
    assert_same(y, expected)


def test_atomics_give_the_old_element_of_each_lane() -> None:
    body = """
        i = tl.arange(0, 4)
        tl.store(y1 + i, tl.atomic_add(y0 + i // 2, i + 1))
        tl.store(y2, tl.atomic_cas(y0, 3, 9))
        tl.store(y2 + 1, tl.atomic_cas(y0, 3, 11))
        tl.store(y2 + 2, tl.atomic_xchg(y0 + 1, 5))
    """
    y, old, more = run(body, [], [result([2], "i32", zeroed=True), result([4], "i32"), result([3], "i32")])
    assert (y.tolist(), old.tolist(), more.tolist()) == ([9, 5], [0, 1, 0, 3], [3, 9, 7])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", ["f32", "f64", "i32", "u32", "i64"])
@pytest.mark.parametrize("kind", ["max", "min"])
@given(data=st.data())
def test_atomics_take_the_extreme(kind: str, dtype: str, data: st.DataObject) -> None:
    x = data.draw(arrays(DTYPES[dtype], (64,)))
    (y,) = run(
        f"tl.atomic_{kind}(y0 + tl.arange(0, 64) // 32, tl.load(x0 + tl.arange(0, 64)))",
        [x],
        [result([2], dtype, zeroed=True)],
    )
    zero = x.dtype.type(0)
    assert_same(y, getattr(np, kind)(x.reshape(2, 32), 1, initial=zero))


@given(x=narrow("bool"))
def test_booleans_are_loaded_and_stored(x: np.ndarray) -> None:
    assert_same(apply("~x", x), ~x)
    body = "i = tl.arange(0, 64)\ntl.store(y0 + i, tl.load(x0 + i, mask=i < 9, other=True))"
    assert_same(run(body, [x], [result([64], "bool")])[0], x | (np.arange(64) >= 9))


# --- arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@given(data=st.data())
def test_maximum_drops_nan_unless_told_otherwise(dtype: str, data: st.DataObject) -> None:
    x, y = (data.draw(narrow(dtype, SPECIALS)) for _ in range(2))
    for kind in ("max", "min"):
        every = f"tl.{kind}imum(x, y, propagate_nan=tl.PropagateNan.ALL)"
        assert_same(apply(f"tl.{kind}imum(x, y)", x, y), getattr(np, f"f{kind}")(x, y))
        assert_same(apply(every, x, y), getattr(np, f"{kind}imum")(x, y))


def test_clamp_drops_nan() -> None:
    x = np.resize(np.asarray([np.nan, -3, 3, 0.5], F32), 64)
    assert apply("tl.clamp(x, -1.0, 1.0)", x)[:4].tolist() == [-1, -1, 1, 0.5]


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("f32", "ieee"), ("f32", "tf32x3"), ("f32", "bf16x3"), ("f64", "ieee"), *((d, "ieee") for d in FLOATS[2:])],
)
@given(data=st.data())
def test_dots_accumulate_in_float32(dtype: str, precision: str, data: st.DataObject) -> None:
    out = "f64" if dtype == "f64" else "f32"
    x, y, z = (data.draw(arrays(DTYPES[d], (4, 16, 16))) for d in (dtype, dtype, out))
    body = f"""
        j = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        i = tl.arange(0, 4)[:, None, None] * 256 + j[None, :, :]
        x, y, acc = tl.load(x0 + i), tl.load(x1 + i), tl.load(x2 + i)
        tl.store(y0 + i, tl.dot(x, y, acc, input_precision="{precision}", out_dtype={triton(out)}))
    """
    (r,) = run(body, [x, y, z], [result([4, 16, 16], out)])
    wide = [v.astype(F64) for v in (x, y, z)]
    low = np.matmul(x.astype(r.dtype), y.astype(r.dtype)) + z
    assert_close(r, np.matmul(wide[0], wide[1]) + wide[2], low, length=16)


def test_tf32_rounds_operands_and_is_the_default() -> None:
    x = np.full((16, 16), 1 + 2.0**-12, F32)
    body = """
        i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(x0 + i)
        tl.store(y0 + i, tl.dot(x, x))
        tl.store(y1 + i, tl.dot(x * 1.5, x * 1.5, input_precision="ieee"))
    """
    rounded, exact = run(body, [x], [result([16, 16], "f32")] * 2)
    assert (rounded == 16).all() and (exact > 36.01).all()


@given(data=st.data())
def test_dots_of_bytes_are_exact(data: st.DataObject) -> None:
    x, y = (data.draw(arrays(np.int8, (16, 16))) * np.int8(15) for _ in range(2))
    body = """
        i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(y0 + i, tl.dot(tl.load(x0 + i), tl.load(x1 + i), out_dtype=tl.int32))
    """
    (z,) = run(body, [x, y], [result([16, 16], "i32")])
    assert_same(z, x.astype(np.int32) @ y.astype(np.int32))


@given(index=st.integers(-66, 66))
def test_gather_stays_inside(index: int) -> None:
    x = np.arange(64, dtype=np.float32)
    if 0 <= index < 64:
        assert (apply(f"tl.gather(x, i * 0 + {index}, 0)", x) == index).all()
        return
    with pytest.raises(OutOfBoundsError, match=r"tl.gather leaves the tile"):
        apply(f"tl.gather(x, i * 0 + {index}, 0)", x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", INTEGERS)
@given(data=st.data())
def test_integers_are_inverted_divided_and_shifted(dtype: str, data: st.DataObject) -> None:
    x, y = (data.draw(arrays(DTYPES[dtype], (64,))) for _ in range(2))
    assert_same(apply("~x", x), ~x)
    assert_same(apply("x >> 1", x), x >> 1)
    nonzero = y != 0
    quotient, rest = apply("x // y", x, y), apply("x % y", x, y)  # by zero, too: any value
    assert_same(quotient[nonzero], TABLE["div"].meaning(x, y)[nonzero])
    assert_same(rest[nonzero], np.fmod(x[nonzero], y[nonzero]))


@given(x=tiles, bound=st.integers(-2, 2))
def test_a_comparison_of_scalars_becomes_a_tile_of_booleans(x: np.ndarray, bound: int) -> None:
    (y,) = run(f"{TILE}tl.store(y0 + i, (tl.load(x0) < {bound}) & (x > 0))", [x], [result([8, 8], "bool")])
    assert_same(y, (x[0, 0] < bound) & (x > 0))
