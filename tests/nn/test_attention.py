"""`dot_product_attention` is that of jax.nn: values and derivatives, shapes and dtypes, what is refused."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lang.checks import refused
from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.nn import dot_product_attention
from tilekern.nn.attention import _positions
from tilekern.testing import assert_close, in_float64

B, T, S, N, H = 2, 9, 11, 4, 8
THEIRS = jax.nn.dot_product_attention
QUICK = {"xla_backend_optimization_level": 0}  # compiled once, and run once
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, np.float32)


def bools(*shape: int) -> np.ndarray:
    return RANDOM.random(shape) < 0.7


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def inputs(groups: int = 2, dtype: Any = np.float32, batch: tuple[int, ...] = (B,)) -> list[np.ndarray]:
    shapes = ((T, N), (S, groups), (S, groups))
    return [normal(*batch, *shape, H).astype(dtype) for shape in shapes]


def test_the_signature_is_that_of_jax_and_then_the_dropout_of_flax() -> None:
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (dot_product_attention, THEIRS))
    assert [(p.name, p.kind, p.default) for p in ours[:-4]] == [(p.name, p.kind, p.default) for p in theirs]
    assert [p.name for p in ours[-4:]] == ["dropout_rate", "dropout_rng", "broadcast_dropout", "deterministic"]


# --- values and derivatives ------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "groups": (4, 2, 1),
    "bias": (None, normal(B, N, T, S), normal(B, 1, 1, S).astype(jnp.bfloat16), normal(T, S), np.arange(S)),
    "mask": (None, bools(B, 1, T, S), bools(N, T, S), bools(B, N, T, 1), bools(S)),
    "scale": (None, 0.3),
    "is_causal": (False, True),
    "query_seq_lengths": (None, lengths(5, T)),
    "key_value_seq_lengths": (None, lengths(S, 4)),
    "local_window_size": (None, 2, (3, 5), (6, -1), (-2, 5)),
}


def pairs(options: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Combinations in which any two options of different names meet at least once; few, by greed."""
    names = list(options)
    choices = {name: range(len(options[name])) for name in names}
    left = {
        frozenset(((a, m), (b, n)))
        for a, b in itertools.combinations(names, 2)
        for m, n in itertools.product(choices[a], choices[b])
    }
    while left:
        picked = dict(sorted(min(left, key=sorted)))
        for name in names:
            if name not in picked:
                met = [sum(frozenset(((name, n), p)) in left for p in picked.items()) for n in choices[name]]
                picked[name] = int(np.argmax(met))
        left -= {frozenset(pair) for pair in itertools.combinations(picked.items(), 2)}
        yield {name: options[name][picked[name]] for name in names}


COMBINATIONS = list(pairs(OPTIONS))


def attends(keywords: Mapping[str, Any]) -> np.ndarray:
    """True for queries [B, N, T] that attend to some key."""
    i, j, b = np.arange(T)[:, None], np.arange(S), np.arange(B)[:, None, None, None]
    found = np.ones((B, N, T, S), bool) if keywords["mask"] is None else np.broadcast_to(keywords["mask"], (B, N, T, S))
    if keywords["is_causal"]:
        found = found & (j <= i)
    if keywords["local_window_size"] is not None:
        window = keywords["local_window_size"]
        left, right = window if isinstance(window, tuple) else (window, window)
        found = found & (i - left <= j) & (j <= i + right)
    if keywords["query_seq_lengths"] is not None:
        found = found & (i < keywords["query_seq_lengths"][b])
    if keywords["key_value_seq_lengths"] is not None:
        found = found & (j < keywords["key_value_seq_lengths"][b])
    return found.any(axis=-1)


def with_gradients(attention: Callable[..., Any], *arrays: Any, cotangent: Any, **keywords: Any) -> list[Any]:
    """Out, residual, and the cotangents of query, key, value and, if it is float, of bias."""
    *arrays, bias = arrays
    moves = bias is not None and jnp.issubdtype(bias.dtype, jnp.floating)

    def function(*arrays: Any) -> Any:
        return attention(*arrays, *(() if moves else (bias,)), return_residual=True, **keywords)

    results, pull = jax.vjp(function, *arrays, *((bias,) if moves else ()))
    return [*results, *pull((cotangent.astype(results[0].dtype), jnp.zeros_like(results[1])))]


# Each takes a second, most of it XLA's.
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] if n % 4 else []) for n in range(len(COMBINATIONS))],
)
def test_all_pairs_of_arguments(number: int) -> None:
    keywords = dict(COMBINATIONS[number])
    some = np.moveaxis(attends(keywords), 1, 2)  # [B, T, N]
    q, k, v = inputs(keywords.pop("groups"), jnp.dtype(keywords.pop("dtype")))
    cotangent = np.where(some[..., None], normal(*q.shape), 0)  # what is said of the other rows is tested below
    keywords["cotangent"], bias = cotangent, keywords.pop("bias")

    def run(attention: Callable[..., Any], **options: Any) -> list[Any]:
        function = jax.jit(lambda *a: with_gradients(attention, *a, **keywords), compiler_options=options)
        return [np.asarray(x) for x in function(q, k, v, bias)]

    ours, low = run(dot_product_attention), run(THEIRS, **QUICK)
    oracle = in_float64(lambda *a: with_gradients(THEIRS, *a, **keywords), q, k, v, bias)
    assert (ours[0][~some] == 0).all() and np.isneginf(ours[1][~some]).all()
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in low]
    if q.dtype == jnp.bfloat16:  # of its gradients jax.nn computes a part in float32
        low[2:] = gradients_in(q.dtype, q, k, v, bias, keywords)
    for place, (found, exact, naive) in enumerate(zip(ours, oracle, low, strict=True)):
        found, exact, naive = (x[some] if place < 2 else x for x in (found, exact, naive))
        assert_close(found, np.asarray(exact, np.float64), naive, length=S * N * B + H, factor=2 if place < 2 else 3)


def gradients_in(dtype: Any, q: Any, k: Any, v: Any, bias: Any, keywords: Mapping[str, Any]) -> list[Any]:
    """Results of the naive computation with all numbers in a dtype."""
    window = keywords["local_window_size"]
    ranked = [None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (bias, keywords["mask"])]

    def naive(q: Any, k: Any, v: Any, bias: Any, return_residual: bool) -> Any:
        return reference(
            *(q, k, v, bias, ranked[1]),
            scale=keywords["scale"],
            causal=keywords["is_causal"],
            window=window if isinstance(window, tuple) else (window, window),
            q_lengths=keywords["query_seq_lengths"],
            kv_lengths=keywords["key_value_seq_lengths"],
            dtype=dtype,
        )

    function = jax.jit(
        lambda *a: with_gradients(naive, *a, cotangent=keywords["cotangent"])[2:], compiler_options=QUICK
    )
    found = function(q, k, v, ranked[0])
    return [np.asarray(x).reshape(shape) for x, shape in zip(found, map(np.shape, (q, k, v, bias)), strict=False)]


@pytest.mark.parametrize("causal", [False, True])
def test_every_window_is_one_of_flash_attention(causal: bool) -> None:
    """The keys that `flash_attention` lets a query see are those of the window, negative numbers included."""
    i, j = np.arange(20, 29)[:, None], np.arange(50)
    for window in itertools.product(range(-4, 5), repeat=2):
        left, right = window
        wanted = (i - left <= j) & (j <= i + right) & ((j <= i) | (not causal))
        is_causal, offset, around = _positions(causal, window)
        assert around is not None
        seen = (i + offset - around[0] <= j) & (j <= i + offset + around[1]) & ((j <= i + offset) | (not is_causal))
        np.testing.assert_array_equal(seen, wanted, err_msg=str(window))


def test_float16() -> None:
    q, k, v = inputs(dtype=np.float16)
    found, low = (f(q, k, v, is_causal=True, return_residual=True) for f in (dot_product_attention, THEIRS))
    oracle = in_float64(lambda *a: THEIRS(*a, is_causal=True, return_residual=True), q, k, v)
    for x, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(x, exact, naive, length=S + H)


@pytest.mark.parametrize("batch", [(), (B,)], ids=str)
def test_values_of_another_width(batch: tuple[int, ...]) -> None:
    q, k, v = inputs(batch=batch)
    wide = np.concatenate([v, 2 * v[..., :3]], axis=-1)
    out, residual = dot_product_attention(q, k, wide, is_causal=True, return_residual=True)
    expected, of_narrow = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert out.shape == (*batch, T, N, H + 3)
    np.testing.assert_allclose(out, jnp.concatenate([expected, 2 * expected[..., :3]], axis=-1), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(residual, of_narrow)


def test_lengths_of_64_bits_are_not_cut_off() -> None:
    q, k, v = inputs()
    far, whole = (dot_product_attention(q, k, v, key_value_seq_lengths=np.full(B, n)) for n in (2**32, S))
    np.testing.assert_array_equal(far, whole)


def test_float64_is_better_than_in_jax() -> None:
    """There the softmax is in float32."""
    arrays = inputs(dtype=np.float64)
    oracle = in_float64(reference, *arrays)
    with jax.enable_x64(True):
        found, low = (f(*arrays, return_residual=True) for f in (dot_product_attention, THEIRS))
    for x, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(x, exact, exact, length=S + H)
        np.testing.assert_allclose(naive, exact, atol=1e-6)


@pytest.mark.parametrize("bias", [None, normal(B, 1, 1, S)], ids=["no bias", "bias"])
def test_a_traced_scale_is_differentiated(bias: Any) -> None:
    q, k, v = inputs()

    def loss(scale: Any, bias: Any, attention: Callable[..., Any]) -> Any:
        return jnp.sum(jnp.sin(attention(q, k, v, bias, scale=scale, local_window_size=4)))

    def derivatives(scale: Any, bias: Any, attention: Callable[..., Any]) -> Any:
        wanted = (0,) if bias is None else (0, 1)
        return *jax.grad(loss, wanted)(scale, bias, attention), jax.grad(jax.grad(loss))(scale, bias, attention)

    found, low = (jax.jit(derivatives, static_argnums=2)(0.3, bias, f) for f in (dot_product_attention, THEIRS))
    oracle = in_float64(derivatives, np.float32(0.3), bias, attention=THEIRS)
    for x, exact, naive in zip(found, oracle, low, strict=True):
        assert_close(x, exact, naive, length=q.size * S, factor=3)
    of_array, of_number = (dot_product_attention(q, k, v, bias, scale=s) for s in (jnp.float32(0.25), 0.25))
    np.testing.assert_array_equal(of_array, of_number)


# --- inside JAX programs ---------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_jit_vmap_and_grad() -> None:
    q, k, v = inputs()

    def losses(attention: Callable[..., Any]) -> Callable[..., Any]:
        def loss(q: Any, k: Any, v: Any, bias: Any, length: Any) -> Any:
            out = attention(q, k, v, bias, is_causal=True, key_value_seq_lengths=length[None])
            return jnp.sum(jnp.sin(out))

        each = jax.vmap(jax.value_and_grad(loss, (0, 1, 2, 3)), in_axes=(1, 0, None, None, 0))
        return jax.jit(lambda *args: jax.tree.leaves(each(*args)))

    args = q.swapaxes(0, 1), k, v[0], normal(1, T, S), lengths(7, S)
    oracle = in_float64(losses(THEIRS), *args)
    for x, exact, naive in zip(losses(dot_product_attention)(*args), oracle, losses(THEIRS)(*args), strict=True):
        assert_close(x, exact, naive, length=q.size, factor=3)


def test_second_derivatives() -> None:
    arrays = inputs()
    along = inputs()
    mask = bools(N, T, S) | (np.arange(S) == 0)  # each query attends to the first key

    def product(attention: Callable[..., Any], *arrays: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            return jnp.sum(jnp.sin(attention(*arrays, mask=mask, is_causal=True)))

        gradient = jax.grad(loss, (0, 1, 2))
        return jax.jvp(gradient, arrays, tuple(jnp.asarray(x, arrays[0].dtype) for x in along))[1]

    found, low = (jax.jit(lambda *a, f=f: product(f, *a))(*arrays) for f in (dot_product_attention, THEIRS))
    for x, exact, naive in zip(found, in_float64(lambda *a: product(THEIRS, *a), *arrays), low, strict=True):
        assert_close(x, exact, naive, length=S * N, factor=3)


def test_no_gradient_flows_through_the_residual() -> None:
    q, k, v = inputs()
    for attention in (dot_product_attention, THEIRS):
        gradient = jax.grad(lambda q, f=attention: f(q, k, v, return_residual=True)[1].sum())(q)
        assert not np.any(gradient)


# --- shapes, dtypes and numbers that come in several forms -----------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "shapes",
    [((T, N, H), (S, 2, H)), ((T, N, H), (1, S, 2, H)), ((N, H), (S, 2, H)), ((H,), (H,)), ((0, N, H), (S, N, H))],
    ids=str,
)
def test_dims_that_are_left_out(shapes: Any) -> None:
    q, k = (normal(*shape) for shape in shapes)
    ours, theirs = (f(q, k, k, normal(S) * 0, np.ones((1, S), bool)) for f in (dot_product_attention, THEIRS)) if (
        len(shapes[1]) > 1) else (f(q, k, k) for f in (dot_product_attention, THEIRS))  # fmt: skip
    assert ours.shape == theirs.shape == q.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for residual in (f(q, k, k, return_residual=True)[1] for f in (dot_product_attention, THEIRS)):
        assert residual.shape == q.shape[:-1]


def test_numbers_and_arrays_of_other_libraries() -> None:
    q, k, v = inputs()
    expected = dot_product_attention(q, k, v, scale=0.5, local_window_size=(3, 0), query_seq_lengths=lengths(4, 5))
    found = dot_product_attention(
        q.astype(np.float64),  # float32 to JAX, unless 64 bits are on
        k.tolist(),
        jnp.asarray(v),
        scale=np.float64(0.5),
        local_window_size=[np.int64(3), 0],
        query_seq_lengths=[4, 5],
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["xla", "cudnn", None])
def test_every_implementation_is_this_one(name: Any) -> None:
    q, k, v = inputs()
    found = dot_product_attention(q, k, v, implementation=name)
    np.testing.assert_array_equal(found, dot_product_attention(q, k, v))


# --- where the results differ from those of jax.nn -------------------------------------------------------------------

ROW = np.arange(T) != 3  # the query that attends to nothing
NOTHING: dict[str, dict[str, Any]] = {
    "mask": {"mask": ROW[:, None]},
    "bias": {"bias": np.where(ROW, 0, -np.inf).astype(np.float32)[:, None]},
    "keys": {"key_value_seq_lengths": lengths(0, S)},
    "window": {"local_window_size": (2, -3)},  # such a window has no position at all
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", NOTHING)
def test_a_query_that_attends_to_nothing(kind: str) -> None:
    """0, where jax.nn has the mean of all values, or NaN."""
    q, k, v = inputs(groups=4)
    keywords = dict(NOTHING[kind])
    bias = keywords.pop("bias", None)
    cotangent = np.zeros_like(q)
    cotangent[0, 3] = 1

    def at(attention: Callable[..., Any]) -> Any:
        def run(*arrays: Any) -> Any:
            return with_gradients(attention, *arrays, cotangent=cotangent, **keywords)

        out, residual, *gradients = map(np.asarray, jax.jit(run, compiler_options=QUICK)(q, k, v, bias))
        return out[0, 3], residual[0, 3], gradients

    out, residual, gradients = at(dot_product_attention)
    assert (out == 0).all() and np.isneginf(residual).all()
    assert all((g == 0).all() for g in gradients)
    out, residual, _ = at(THEIRS)
    np.testing.assert_allclose(out, np.full_like(out, np.nan) if kind == "bias" else v[0].mean(axis=0), atol=1e-6)
    assert (residual < -2.3e38).all()


def test_queries_beyond_their_length_are_zero_as_in_jax() -> None:
    q, k, v = inputs()
    for attention in (dot_product_attention, THEIRS):
        assert not np.any(attention(q, k, v, query_seq_lengths=lengths(3, T))[0, 3:])


def test_padding_may_hold_anything() -> None:
    q, k, v = inputs()
    keywords = {"query_seq_lengths": lengths(3, T), "key_value_seq_lengths": lengths(S, 4)}
    loss = lambda *a: jnp.sin(dot_product_attention(*a, **keywords)).sum()  # noqa: E731
    expected = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
    q[0, 3:], k[1, 4:], v[1, 4:] = np.nan, np.inf, np.nan
    jax.tree.map(np.testing.assert_array_equal, jax.value_and_grad(loss, (0, 1, 2))(q, k, v), expected)


# --- errors ----------------------------------------------------------------------------------------------------------

Q, K, V = inputs()
ARRAYS = "the arrays of dot_product_attention do not fit"
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str, str]] = {
    "value": ((Q, K, V[:, :4]), {}, ARRAYS, "value = float32[2, 4, 2, 8]"),
    "batch": ((Q[:1], K, V), {}, ARRAYS, "query = float32[1, 9, 4, 8]"),
    "width": ((Q[..., :4], K, V), {}, ARRAYS, "query = float32[2, 9, 4, 4]"),
    "heads": ((Q[:, :, :3], K, V), {}, ARRAYS, "query = float32[2, 9, 3, 8]"),
    "dtype": ((Q.astype(jnp.bfloat16), K, V), {}, ARRAYS, "query = bfloat16[2, 9, 4, 8], key = float32"),
    "rank": ((Q[None], K, V), {}, "cannot take this query", "query = float32[1, 2, 9, 4, 8]"),
    "mask's dtype": ((Q, K, V), {"mask": np.ones((T, S))}, "cannot take this mask", "mask = float32[1, 1, 9, 11]"),
    "mask's heads": ((Q, K, V), {"mask": bools(2, T, S)}, "this mask", "mask = bool[1, 2, 9, 11]"),
    "bias's shape": ((Q, K, V), {"bias": normal(3, S)}, "cannot take this bias", "bias = float32[1, 1, 3, 11]"),
    "bias's rank": ((Q, K, V), {"bias": normal(1, 1, 1, 1, S)}, "this bias", "bias = float32[1, 1, 1, 1, 11]"),
    "a length": ((Q, K, V), {"query_seq_lengths": lengths(3)}, "this query_seq_lengths", "= int32[1]"),
    "int8": (
        (Q, K, V),
        {"key_value_seq_lengths": lengths(3, 3).astype(np.int8)},
        "this key_value_seq_lengths",
        "= int8[2]",
    ),
    "window": ((Q, K, V), {"local_window_size": (1, 2, 3)}, "this local_window_size", "= (1, 2, 3) (tuple)"),
    "no window": ((Q, K, V), {"local_window_size": 1.5}, "this local_window_size", "= 1.5 (float)"),
    "name": ((Q, K, V), {"implementation": "triton"}, "this implementation", "= 'triton' (str)"),
    "scale": ((Q, K, V), {"scale": normal(3)}, "this scale", "scale = float32[3]"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_jax_refuses(kind: str) -> None:
    args, keywords, summary, got = REFUSED[kind]
    with pytest.raises((ValueError, TypeError, AssertionError)):
        THEIRS(*args, **keywords)
    with refused(ArgumentError, summary, expected="", got=got, fix=""):
        dot_product_attention(*args, **keywords)  # <-
    with pytest.raises(ValueError, match="dot_product_attention"):
        dot_product_attention(*args, **keywords)


def test_keys_need_a_head() -> None:
    with refused(ArgumentError, ARRAYS, expected="K dividing N", got="key = float32[2, 11, 0, 8]", fix=""):
        dot_product_attention(Q, K[:, :, :0], V[:, :, :0])  # <-


def test_what_only_jax_takes() -> None:
    for dtype in (np.int32, jnp.float8_e5m2):
        with refused(ArgumentError, "do not fit", expected="at least 16 bits", got="query = ", fix="cast"):
            dot_product_attention(*inputs(dtype=dtype))  # <-
    with pytest.raises(ArgumentError, match="this bias"):
        dot_product_attention(Q, K, V, normal(S) * 1j)
