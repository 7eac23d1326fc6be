"""JAX's pure functions over tiles: casts, elementwise functions, reductions, shapes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from jax import lax

import tilekern as tk
from tests.ir.funcs import edges, nearest
from tests.lang.checks import COMPILED, check, kernel, like_first, numbers, refused
from tilekern import testing
from tilekern.errors import UnsupportedError
from tilekern.ir.memory import MemoryOp

X = numbers(4, 6)
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0)
DTYPES = {name: np.dtype(d) for name, d in (("f64", "f8"), ("f32", "f4"), ("f16", "f2"), ("bf16", ml_dtypes.bfloat16))}
DTYPES |= {"i32": np.dtype("i4"), "i8": np.dtype("i1"), "bool": np.dtype("?")}


# --- casts ----------------------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x: {name: jax.ShapeDtypeStruct(x.shape, d) for name, d in DTYPES.items()})
def cast(x, outs):
    for out in outs.values():
        out[...] = x[...].astype(out.dtype)


def _cast(x: np.ndarray, to: np.dtype) -> np.ndarray:
    """Cast number by number, by the definition."""
    if to == np.bool_:
        return x != 0
    if to.kind not in "iu":
        return nearest(x.astype(np.float64), to)
    if x.dtype.kind in "iub":
        return x.astype(to)
    low, high = np.iinfo(to).min, np.iinfo(to).max
    whole = [0 if np.isnan(n) else min(max(n, low), high) for n in x.astype(np.float64)]
    return np.array([int(n) for n in whole], to)


def _normal(x: np.ndarray) -> np.ndarray:
    """Drop numbers that are subnormal in some dtype: a backend may read them as zero."""
    magnitude = np.abs(x.astype(np.float64))
    return x[~((magnitude > 0) & (magnitude < 1e-4))]


@pytest.mark.parametrize("source", DTYPES)
def test_casts_among_all_dtypes(source: str) -> None:
    with jax.enable_x64(True), np.errstate(invalid="ignore"):
        x = _normal(edges(DTYPES[source]))
        check(cast, x, oracle={name: _cast(x, to) for name, to in DTYPES.items()})


# --- numbers that are none ------------------------------------------------------------------------------------------


@COMPILED
@given(testing.arrays(np.float32, (4, 6), SPECIAL), testing.arrays(np.float32, (4, 6), SPECIAL))
def test_max_and_min_keep_nan_and_infinity(x: np.ndarray, y: np.ndarray) -> None:
    def oracle(x: np.ndarray, y: np.ndarray) -> Any:
        return np.maximum(x, y), np.minimum(x, y), x.max(1), x.min(0)

    check(extremes, x, y, oracle=oracle)


@kernel(None, None, ((4,), np.float32), ((6,), np.float32))
def extremes(x, y, larger, smaller, rows, columns):
    larger[...] = jnp.maximum(x[...], y[...])
    smaller[...] = jnp.minimum(x[...], y[...])
    rows[...] = x[...].max(axis=1)
    columns[...] = x[...].min(axis=0)


def test_extremes_of_nothing_are_the_identity() -> None:
    @kernel(((6,), np.float32), ((6,), np.int32))
    def f(x, out, whole):
        nothing = x[tk.ds(0, 0)]
        out[...] = jnp.max(nothing, axis=0, initial=-jnp.inf)
        whole[...] = jnp.min(nothing.astype(jnp.int32), axis=0, initial=7)

    check(f, X, oracle=(np.full(6, -np.inf, np.float32), np.full(6, 7, np.int32)))


# --- functions of jax.numpy and jax.nn ------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu by erf": lambda x: jax.nn.gelu(x, approximate=False),
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "hard_tanh": jax.nn.hard_tanh,
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, axis=0),
    "standardize": lambda x: jax.nn.standardize(x, axis=-1),
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6),
    "logaddexp": lambda x: jnp.logaddexp(x, x.T.reshape(x.shape)),
    "powers": lambda x: x**3 + x**-2 + jnp.abs(x) ** 0.5 + jnp.abs(x) ** 1.5 + x**0,
    "trigonometry": lambda x: jnp.sin(x) + jnp.cos(x) * jnp.tanh(x) + jnp.arctan2(x, x + 1),
    "rounding": lambda x: jnp.round(x * 2) + jnp.floor(x) + jnp.ceil(x) + jnp.trunc(x),
    "modulo": lambda x: x % 0.7 + jnp.fmod(x, 0.3) + x // 0.6,
    "clip and sign": lambda x: jnp.clip(x, -0.5, 0.5) + jnp.sign(x) + jnp.where(x > 0, x, -x),
    "outer and dot": lambda x: (x.T @ x)[:4, :] + jnp.einsum("ij,kj->ik", x, x)[:, :1],
    "triangle": lambda x: jnp.tril(x) + jnp.triu(x, 2) * jnp.eye(4, 6),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_jax(name: str) -> None:
    function = FUNCTIONS[name]

    @like_first
    def f(x, out):
        out[...] = function(x[...])

    x = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    oracle, low = testing.in_float64(function, x), np.asarray(jax.jit(function)(x))
    for out in (f(x), tk.interpret(f.trace(x))(x)):
        testing.assert_close(out, oracle, low, length=6)


REARRANGED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "transpose": lambda x: x.T,
    "swapaxes": lambda x: jnp.swapaxes(x[:, None], 0, 2),
    "reshape": lambda x: x.reshape(3, 8),
    "ravel": lambda x: x.ravel(),
    "slices": lambda x: x[1:3, ::2],
    "negative slices": lambda x: x[:-1, ::-1],
    "new dims": lambda x: x[None, :, None],
    "a row": lambda x: x[2],
    "concatenate": lambda x: jnp.concatenate([x, x * 2, x[:1]]),
    "stack": lambda x: jnp.stack([x, x + 1], axis=1),
    "stack at the end": lambda x: jnp.stack([x, x + 1, x], axis=-1),
    "unstack": lambda x: jnp.unstack(x, axis=1)[4] - jnp.unstack(x, axis=-1)[0],
    "split": lambda x: jnp.split(x, [1, 4], axis=1)[1],
    "pad": lambda x: jnp.pad(x, ((1, 0), (2, 3)), constant_values=-1),
    "negative pad": lambda x: lax.pad(x, jnp.float32(9), ((-1, 0, 1), (2, -1, 0))),
    "flip": lambda x: jnp.flip(x, 0),
    "roll": lambda x: jnp.roll(x, 2, axis=1),
    "repeat": lambda x: jnp.repeat(x, 3, axis=0),
    "tile": lambda x: jnp.tile(x, (2, 3)),
    "tile with a new dim": lambda x: jnp.tile(x[0], (2, 2)),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None, :1], (4, 3, 5)),
    "iota": lambda x: x + jnp.arange(6) + lax.broadcasted_iota(jnp.int32, (4, 6), 0),
    "integer powers": lambda x: x**2 + x**5,
    "sums": lambda x: jnp.stack([x.sum(), x.prod(axis=0)[0] % 7, x.mean()]),
    "sum of a dim": lambda x: x.sum(0),
    "any and all": lambda x: jnp.stack([(x > 23).any(), (x > 3).all()]),
    "bits": lambda x: (x.astype(int) & 5) | 2 ^ (x.astype(int) << 2) >> 1,
    "one hot": lambda x: jax.nn.one_hot(x[0].astype(int), 4),
    "nan_to_num": lambda x: jnp.nan_to_num((x - 5) / (x - x)),
    "squeeze": lambda x: jnp.squeeze(x[:1]),
    "count": lambda x: jnp.count_nonzero(x > 4),
    "round away": lambda x: lax.round(x / 2, lax.RoundingMethod.AWAY_FROM_ZERO),
    "divmod": lambda x: jnp.stack(jnp.divmod((x - 9).astype(int), 4)),
    "clamp": lambda x: lax.clamp(jnp.float32(3), x, jnp.float32(9)),
    "sort": lambda x: jnp.sort(-x % 5, axis=1),
    "median": lambda x: jnp.median(x, axis=0),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "argmax": lambda x: jnp.argmax(x % 5, axis=1),
    "argmin": lambda x: jnp.argmin(x % 5, axis=0),
    "a traced element": lambda x: x[x[0, 1].astype(int)],
    "take": lambda x: jnp.take(x, jnp.array([3, 0, 9]), axis=0, fill_value=7),
    "take_along_axis": lambda x: jnp.take_along_axis(x, (x % 4).astype(int), axis=1),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (x[0, 1].astype(int), 5), (2, 3)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, -x[:2], (x[0, 4].astype(int), 1)),
    "select_n": lambda x: lax.select_n((x % 3).astype(int), x, -x, x * 10),
    "set": lambda x: x.at[:, :4].set(0.0).at[1].set(x[2]),
    "add": lambda x: x.at[0].add(1.0).at[:, x[0, 1].astype(int)].add(5.0),
    "select": lambda x: jnp.select([x > 9, x > 3], [x, -x], 5),
    "dot of integers": lambda x: lax.dot(x.astype(jnp.int8), x.T.astype(jnp.int8), preferred_element_type=jnp.int32),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_exact_functions_of_jax(name: str) -> None:
    function = REARRANGED[name]
    expected = np.asarray(jax.jit(function)(X))

    @kernel((expected.shape, expected.dtype))
    def f(x, out):
        out[...] = function(x[...])

    check(f, X, oracle=expected)


@pytest.mark.parametrize("dtype", ["f4", "f2", ml_dtypes.bfloat16, "i4", "i1", "u1"])
def test_arithmetic_stays_in_its_dtype(dtype) -> None:
    """Python numbers do not widen; integers wrap."""

    def function(x: jax.Array) -> jax.Array:
        return (x * 3 + 1 - x.T.reshape(4, 6)) * x

    @kernel(((4, 6), dtype))
    def f(x, out):
        out[...] = function(x[...])

    x = X.astype(dtype)
    check(f, x, oracle=np.asarray(jax.jit(function)(x)))


QUOTIENTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "tiles": lambda x, y: x // y - (x % y) * 3,
    "a tile and a number": lambda x, y: x // 3 + x // -3 * 5 + 7 // y,
    "divmod": lambda x, y: sum(jnp.divmod(x, 7)) + y,
}


@pytest.mark.parametrize(("name", "dtype"), [*product(QUOTIENTS, ["i1", "i4"]), ("tiles", "u1"), ("divmod", "u1")])
def test_integer_division_rounds_down(name: str, dtype: str) -> None:
    function = QUOTIENTS[name]

    @like_first
    def f(x, y, out):
        out[...] = function(x[...], y[...])

    low = 0 if dtype == "u1" else -11
    x, y = (n.ravel().astype(dtype) for n in np.meshgrid(np.arange(low, 12), [low or 1, -1 if low else 2, 3, 5]))
    check(f, x, y, oracle=np.asarray(jax.jit(function)(x, y)))


def test_positions_that_are_divided_stay_affine() -> None:
    @kernel(((6, 4), np.float32))
    def f(x, out):
        n = tk.parallel(24)
        row, column = divmod(n, 4)
        out[n // 4, n % 4] = x[row * 4 + column]

    x = numbers(24)
    check(f, x, oracle=x.reshape(6, 4))
    accesses = [op for op in f.trace(x).ir.walk() if isinstance(op, MemoryOp)]
    assert len(list(f.trace(x).ir.walk())) == len(accesses) == 2, "no arithmetic is left"


def test_a_sum_of_bfloat16_accumulates_in_float32() -> None:
    @kernel(((), ml_dtypes.bfloat16))
    def f(x, out):
        out[...] = x[...].sum()

    check(f, np.ones(1000, ml_dtypes.bfloat16), oracle=np.asarray(1000, ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("function", "primitive", "fix"),
    [
        (lambda x: jnp.fft.fft(x), "fft", "compute it outside the kernel"),
        (lambda x: jnp.linalg.cholesky(x[:4, :4]), "cholesky", "compute it outside the kernel"),
        (lambda x: jax.random.normal(jax.random.key(0), (4,)), "random_seed", "tk.random_bits"),
        (lambda x: jax.debug.print("{}", x), "debug_print", "tk.debug_print"),
        (lambda x: jax.debug.callback(print, x), "debug_callback", "tk.debug_print"),
        (lambda x: jax.pure_callback(np.sin, x, x), "pure_callback", "outside the kernel"),
        (lambda x: extremes(x, x), "tilekern_call", "one kernel after the other"),
    ],
)
def test_what_the_language_does_not_have(function, primitive, fix) -> None:
    @like_first
    def f(x, out):
        function(x[...])
        out[...] = x[...]

    with pytest.raises(UnsupportedError) as raised:
        f.trace(X)
    error = raised.value
    assert error.summary == f"`{primitive}` is not part of the language"
    assert error.got.startswith(f"{primitive}(")
    assert fix in error.fix
    assert "elementwise operations" in error.expected
    assert error.loc.file == __file__


def test_an_unknown_function_is_refused_at_its_line() -> None:
    @like_first
    def f(x, out):
        tile = x[...]
        out[...] = jnp.linalg.cholesky(tile[:4, :4]).sum() + tile  # <-

    got = "cholesky(float32[4,4])"
    with refused(UnsupportedError, "`cholesky` is not part of the language", got=got, fix="outside the kernel"):
        f.trace(X)
