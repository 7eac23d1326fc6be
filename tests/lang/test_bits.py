"""Random bits, stochastic rounding, and packed integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lang.checks import COMPILED, check, kernel, like_first, refused
from tilekern.errors import ArgumentError

U32 = np.uint32
WORDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=4)  # XLA takes a second to compile the rounds


# --- threefry --------------------------------------------------------------------------------------------------------


def threefry(key: Any, counter: Any) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32-20 of Salmon et al. 2011 in Python integers, word by word."""
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    keys = [int(key[0]), int(key[1]), int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA]

    def block(x: int, y: int) -> tuple[int, int]:
        x, y = (x + keys[0]) % 2**32, (y + keys[1]) % 2**32
        for n in range(20):
            x, r = (x + y) % 2**32, rotations[n % 8]
            y = ((y << r | y >> 32 - r) % 2**32) ^ x
            if n % 4 == 3:
                injected = n // 4 + 1
                x = (x + keys[injected % 3]) % 2**32
                y = (y + keys[(injected + 1) % 3] + injected) % 2**32
        return x, y

    pairs = np.broadcast_arrays(*(np.asarray(c).astype(np.int64) % 2**32 for c in counter))
    words = [block(int(x), int(y)) for x, y in zip(pairs[0].flat, pairs[1].flat, strict=True)]
    x, y = np.array(words, U32).reshape(-1, 2).T
    return x.reshape(pairs[0].shape), y.reshape(pairs[0].shape)


def bits_of(key: Any, *coordinates: Any) -> np.ndarray:
    """Oracle of `tk.random_bits` for scalar coordinates."""
    words = [*coordinates, *([0] if len(coordinates) % 2 else [])]
    for pair in zip(words[::2], words[1::2], strict=True):
        key = threefry(key, pair)
    return np.asarray(key[0])


# The test vectors of the Random123 library: key, counter, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_the_oracle_knows_the_published_vectors(key: Any, counter: Any, expected: Any) -> None:
    assert tuple(int(w) for w in threefry(key, counter)) == expected


@kernel(((), U32), ((), U32))
def both_words(key, counter, first, second):
    """First word of a block, and the block of (0, 0) under both of its words as the key."""
    first[...] = tk.random_bits(key[...], counter[0], counter[1])
    second[...] = tk.random_bits(key[...], counter[0], counter[1], 0, 0)


@pytest.mark.smoke
@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_the_published_vectors(key: Any, counter: Any, expected: Any) -> None:
    chained = threefry(expected, (0, 0))[0]
    arrays = np.array(key, U32), np.array(counter, U32)
    check(both_words, *arrays, oracle=(np.array(expected[0], U32), np.asarray(chained)))


@tk.kernel(out_type=lambda key, *, shape, start: jax.ShapeDtypeStruct(shape, U32))
def noise(key, out, *, shape: tuple[int, int], start: int, bm: tk.Block = 4, bn: tk.Block = 4):
    i, j = tk.grid((shape[0], bm), (shape[1], bn))
    out[i, j] = tk.random_bits(key[...], start + i.indices[:, None], j.indices)


@FEW
@given(st.tuples(WORDS, WORDS), st.integers(-9, 2**31 - 20), st.integers(1, 8), st.integers(1, 8))
def test_bits_depend_on_coordinates_and_not_on_blocks(key: Any, start: int, bm: int, bn: int) -> None:
    expected = bits_of(key, start + np.arange(7)[:, None], np.arange(6))
    check(noise, np.array(key, U32), oracle=expected, shape=(7, 6), start=start, bm=bm, bn=bn)


@FEW
@given(st.tuples(WORDS, WORDS), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5))
def test_any_number_of_coordinates(key: Any, coordinates: list[int]) -> None:
    @kernel(((), U32))
    def f(key, coordinates, out):
        out[...] = tk.random_bits(key[...], *(coordinates[n] for n in range(coordinates.shape[0])))

    check(f, np.array(key, U32), np.array(coordinates, np.int32), oracle=bits_of(key, *coordinates))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_coordinates_of_every_integer_dtype(dtype: str) -> None:
    @kernel(((5,), U32))
    def f(key, lanes, out):
        out[...] = tk.random_bits(key[...], lanes[...], 3)

    with jax.enable_x64(True):
        lanes, key = np.arange(5).astype(dtype) - np.asarray(2, dtype), np.array([1, 2], U32)
        check(f, key, lanes, oracle=bits_of(key, lanes, 3))


def test_the_key_is_that_of_jax() -> None:
    key = jax.random.key(17, impl="threefry2x32")
    data = jax.random.key_data(key)
    found = noise(data, shape=(3, 2), start=0)
    assert_same(np.asarray(found), bits_of(np.asarray(data), np.arange(3)[:, None], np.arange(2)))
    folded = jax.random.key_data(jax.random.fold_in(key, 5))
    assert int(bits_of(np.asarray(data), 0, 5)) == int(folded[0])  # fold_in is a block on (0, data)


def test_half_of_the_bits_are_set() -> None:
    bits = np.asarray(noise(np.array([3, 4], U32), shape=(128, 64), start=0, bm=64, bn=64))
    counts = np.unpackbits(bits.reshape(-1, 1).view(np.uint8), axis=1).mean(axis=0)
    # Six standard deviations of the mean of 8192 fair coins.
    assert np.abs(counts - 0.5).max() < 6 * 0.5 / np.sqrt(bits.size)
    assert len(np.unique(bits)) > 0.999 * bits.size


BAD_KEYS = {
    "float": (lambda: jnp.zeros(2), "float32[2]"),
    "int": (lambda: jnp.zeros(2, jnp.int32), "int32[2]"),
    "long": (lambda: jnp.zeros(4, jnp.uint32), "uint32[4]"),
    "scalar": (lambda: jnp.uint32(1), "uint32[]"),
}
PROMISE = "tk.random_bits takes the data of a key, and coordinates"


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_key_of_the_wrong_type(name: str) -> None:
    make, got = BAD_KEYS[name]

    @like_first
    def f(x, out):
        out[...] = tk.random_bits(make(), 0)  # <-

    with refused(ArgumentError, PROMISE, expected="uint32[2]", got=f"key_data = {got}", fix="jax.random.key_data"):
        f.trace(np.zeros((), U32))


def test_keys_of_rows_give_the_bits_of_each_key() -> None:
    @tk.kernel(out_type=lambda keys, x: x)
    def f(keys, x, out):
        i, j = tk.grid((x.shape[0], 2), (x.shape[1], 4))
        out[i, j] = tk.random_bits((keys[i, 0][:, None], keys[i, 1][:, None]), j.indices[None, :])

    keys = np.arange(10, dtype=U32).reshape(5, 2)
    expected = [tk.random_bits(key, np.arange(7, dtype=U32)) for key in keys]
    np.testing.assert_array_equal(f(keys, np.zeros((5, 7), U32)), expected)


@pytest.mark.parametrize("words", [(1,), (np.zeros(2, np.int32),) * 2, (np.zeros(2, np.uint32),) * 3])
def test_a_pair_of_the_wrong_type(words: Any) -> None:
    with pytest.raises(ArgumentError, match=PROMISE):
        tk.random_bits(words, 0)


def test_no_coordinates() -> None:
    @like_first
    def f(x, out):
        out[...] = tk.random_bits(x[...])  # <-

    with refused(ArgumentError, PROMISE, expected="at least one coordinate", got="0 coordinates", fix="tile.indices"):
        f.trace(np.zeros(2, U32))


@pytest.mark.parametrize(("coordinate", "got"), [(1.5, "1.5 (float)"), (np.float32(2), "float32[]")])
def test_a_coordinate_that_is_no_integer(coordinate: Any, got: str) -> None:
    @like_first
    def f(x, out):
        out[...] = tk.random_bits(x[...], 1, coordinate)  # <-

    with refused(
        ArgumentError, "a coordinate of tk.random_bits must be an integer", expected="tile", got=got, fix="tile.indices"
    ):
        f.trace(np.zeros(2, U32))


# --- stochastic rounding ---------------------------------------------------------------------------------------------

# Mantissas, least exponents of normal numbers, and how many of the random bits count.
NARROW = {
    "bfloat16": (7, -126, 16),
    "float16": (10, -14, 24),
    "float8_e4m3fn": (3, -6, 24),
    "float8_e5m2": (2, -14, 24),
}


def rounded(x: np.ndarray, bits: np.ndarray, dtype: str) -> np.ndarray:
    """Oracle of `tk.stochastic_round` in float64, which has all numbers in question."""
    mantissa, least, count = NARROW[dtype]
    wide = np.abs(np.where(np.isfinite(x), x, 0)).astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, least)
    distance = np.exp2(exponent - mantissa)
    size = wide / distance
    up = (bits >> (32 - count)) / 2.0**count < size % 1
    greatest = (np.floor(size) + up) * distance
    kept = np.where(greatest <= float(jnp.finfo(dtype).max), greatest, np.floor(size) * distance)
    return np.where(np.isfinite(x), np.copysign(kept, x), x).astype(np.float32).astype(dtype)


@tk.kernel(out_type=lambda x, bits, *, dtype: jax.ShapeDtypeStruct(x.shape, dtype))
def rounding(x, bits, out, *, dtype: str, block: tk.Block = 8):
    i = tk.parallel(x.shape[0], block)
    out[i] = tk.stochastic_round(x[i], bits[i], dtype)


@pytest.mark.parametrize("dtype", NARROW)
@FEW
@given(data=st.data())
def test_any_float_with_any_bits(dtype: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    floats = st.floats(width=32, allow_subnormal=False) | st.floats(-70000, 70000, width=32, allow_subnormal=False)
    x = np.array(data.draw(st.lists(floats, min_size=n, max_size=n)), np.float32)
    bits = np.array(data.draw(st.lists(WORDS, min_size=n, max_size=n)), U32)
    check(rounding, x, bits, oracle=rounded, dtype=dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_borders_of_rounding(dtype: str) -> None:
    """Numbers of the dtype and between them, least and largest ones, with the least and the greatest chance."""
    info = jnp.finfo(dtype)
    one = [float(n) for n in (info.max, info.tiny, info.smallest_normal, 1, 1 + float(info.eps), 0)]
    between = [1 + float(info.eps) / 4, float(info.tiny) * 1.3, float(np.nextafter(np.float32(info.max), np.inf)), 3.3]
    every = np.float32([*one, *between, np.inf, np.nan])
    x = np.tile(np.concatenate([every, -every]), 3)
    bits = np.repeat(U32([0, 2**32 - 1, 2**31]), x.size // 3)
    check(rounding, x, bits, oracle=rounded, dtype=dtype)
    exact = np.float32(one)
    for chance in (0, 2**32 - 1):
        found = rounding(exact, np.full(exact.shape, chance, U32), dtype=dtype)
        assert_same(np.asarray(found), exact.astype(dtype), zeros=False)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_mean_of_roundings_is_the_number(dtype: str) -> None:
    x = np.repeat(np.float32([1.03, -2.9, 0.77, 1e-3]), 4096)
    bits = np.random.default_rng(0).integers(0, 2**32, x.shape, U32)
    found = np.asarray(rounding(x, bits, dtype=dtype, block=4096)).astype(np.float64).reshape(4, -1)
    step = np.ptp(found, axis=1)
    # Six standard deviations of the mean of 4096 coins.
    assert (np.abs(found.mean(1) - x[::4096]) <= 6 * 0.5 * step / np.sqrt(4096) + 1e-7).all()


def test_its_derivative_is_that_of_a_cast() -> None:
    x, bits = np.float32([1.3, 2.7]), U32([5, 2**31])
    slope = jax.grad(lambda x: (rounding(x, bits, dtype="bfloat16").astype(jnp.float32) * jnp.array([3.0, 5.0])).sum())
    assert slope(x).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("x", "bits", "dtype", "got"),
    [
        (np.float32([1]), U32([1]), "float32", "dtype = float32"),
        (np.float32([1]), U32([1]), "no dtype", "dtype = no dtype"),
        (np.float32([1]), np.int32([1]), "bfloat16", "bits = int32[1]"),
        (np.float32([1]), U32([1, 2]), "bfloat16", "bits = uint32[2]"),
        (np.int32([1]), U32([1]), "bfloat16", "tile = int32[1]"),
    ],
)
def test_what_it_cannot_round(x: Any, bits: Any, dtype: str, got: str) -> None:
    @kernel(((1,), "bfloat16"))
    def f(x, bits, out):
        out[...] = tk.stochastic_round(x[...], bits[...], dtype)  # <-

    with refused(ArgumentError, "tk.stochastic_round takes", expected="bfloat16", got=got, fix="tk.random_bits"):
        f.trace(x, bits)


# --- packed integers -------------------------------------------------------------------------------------------------


def unpacked(x: np.ndarray, axis: int) -> np.ndarray:
    """The nibbles of bytes by arithmetic on Python integers."""

    def halves(byte: int) -> list[int]:
        found = [byte % 16, byte // 16 % 16]
        return [n - 16 if x.dtype == np.int8 and n > 7 else n for n in found]

    rows = np.moveaxis(x, axis, -1)
    every = np.array([n for byte in rows.flat for n in halves(int(byte))], x.dtype)
    return np.moveaxis(every.reshape(*rows.shape[:-1], 2 * rows.shape[-1]), -1, axis)


def _unpacked_type(x: Any, *, axis: int) -> Any:
    shape = list(x.shape)
    shape[axis] *= 2
    return jax.ShapeDtypeStruct(shape, x.dtype)


@tk.kernel(out_type=_unpacked_type)
def unpack(x, out, *, axis: int):
    out[...] = tk.unpack(x[...], axis)


@pytest.mark.parametrize("dtype", ["i1", "u1"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((256,), -1), ((2, 3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), -1), ((3, 0), 1)]
)
def test_the_low_half_comes_first(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    x = (np.arange(np.prod(shape)) * (1 if len(shape) == 1 else 41)).astype(np.uint8).view(dtype).reshape(shape)
    check(unpack, x, oracle=unpacked, axis=axis)


def test_the_last_axis_is_the_default() -> None:
    @kernel(((2, 4), np.int8))
    def f(x, out):
        out[...] = tk.unpack(x[...])

    check(f, np.array([[0x21, 0x43], [-1, 0x7F]], np.int8), oracle=np.array([[1, 2, 3, 4], [-1, -1, -1, 7]], np.int8))


@tk.kernel(out_type=lambda packed, scale: jax.ShapeDtypeStruct((packed.shape[0] * 2, packed.shape[1]), scale.dtype))
def dequantize(packed, scale, out, *, block: tk.Block = 4):
    """A tile of weights and the bytes that hold it, one axis: packed[k // 2]."""
    k = tk.parallel(packed.shape[0] * 2, block)
    out[k] = tk.unpack(packed[k // 2], axis=0).astype(scale.dtype) * scale[k // 4]


@COMPILED
@given(st.sampled_from([2, 6, 10]), st.sampled_from([2, 4]))
def test_packed_weights_with_scales_for_groups(rows: int, block: int) -> None:
    packed = (np.arange(rows * 3) * 97).astype(np.uint8).view(np.int8).reshape(rows, 3)
    scale = np.float32(2) ** np.arange(tk.cdiv(rows * 2, 4) * 3, dtype=np.float32).reshape(-1, 3)
    expected = unpacked(packed, 0) * np.repeat(scale, 4, axis=0)[: rows * 2]
    check(dequantize, packed, scale, oracle=expected, block=block)


@pytest.mark.parametrize(
    ("shape", "dtype", "axis"), [((4,), "i4", -1), ((4,), "?", -1), ((4,), "i1", 1), ((4,), "u1", -2), ((), "i1", 0)]
)
def test_a_tile_that_is_not_packed(shape: tuple[int, ...], dtype: str, axis: int) -> None:
    @like_first
    def f(x, out):
        out[...] = tk.unpack(x[...], axis)  # <-

    with refused(
        ArgumentError,
        "tk.unpack takes a tile of bytes",
        expected="int8 or uint8",
        got=f"axis = {axis}",
        fix="view packed",
    ):
        f.trace(np.zeros(shape, dtype))
