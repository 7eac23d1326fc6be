"""Symbolic sizes of the library's functions in `jax.export`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernel.symbols import close, exported, symbol
from tilekern import kernels, nn
from tilekern.errors import ArgumentError

pytestmark = pytest.mark.one_backend

SIZES = {"b": 3, "t": 18, "n": 5}
ONES, MASK = np.full((8, 16), 1 / 8, np.float32), (np.arange(81) % 5 > 1).reshape(1, 1, 9, 9)
SAME = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0), "dropout_broadcast": True}
INT8 = kernels.QuantizedArray.quantize(jnp.asarray(np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16)))
GROUPS = jnp.array([4, 0, 13], jnp.int32)


def first(function: Callable[..., Any], *arrays: Any, **keywords: Any) -> jax.Array:
    return function(*arrays, **keywords)[0]


def lengths(x: jax.Array) -> jax.Array:
    return (x[:, 0] * 9).astype(jnp.int32)


# Functions of positive numbers, and the shapes of their arrays.
CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[Any, ...], ...]]] = {
    "rms_norm": (lambda x: kernels.rms_norm(x, ONES[0, :8]), (("b", "t", 8),)),
    "add_rms_norm": (kernels.add_rms_norm, ((2, "b", 8),) * 2),
    "rms_norm_quantized": (lambda x: first(kernels.rms_norm_quantized, x).astype(jnp.float32), (("b", 8),)),
    "layer_norm": (kernels.layer_norm, (("b", 8), (8,))),
    "group_norm": (partial(kernels.group_norm, num_groups=2), (("b", 9, 8), (8,))),
    "softmax": (partial(kernels.softmax, axis=-2), (("b", 4, 8),)),
    "softmax of columns": (partial(kernels.softmax, axis=0), ((4, "n"),)),
    "log_softmax": (kernels.log_softmax, (("b", "t", 8),)),
    "nn.log_softmax": (lambda x: nn.log_softmax(x, where=x > 1), (("b", "t", 8),)),
    "nn.layer_norm": (lambda x: nn.layer_norm(x, ONES[0, :8]), (("b", 4, 8),)),
    "swiglu": (kernels.swiglu, (("b", 4, 8),) * 2),
    "rope": (lambda x: kernels.rope(x, jnp.arange(5)), (("b", 5, 2, 8),)),
    "rms_norm_rope": (lambda x: kernels.rms_norm_rope(x, ONES[0, :8], jnp.arange(5)), (("b", 5, 2, 8),)),
    "matmul": (kernels.matmul, (("t", 8), (8, 40))),
    "matmul of a batch": (kernels.matmul, (("b", "t", 8), (8, 40))),
    "matmul of batches": (kernels.matmul, ((2, "t", 8), (2, 8, "n"))),
    "fused_matmul": (lambda x, w: kernels.fused_matmul(x, w, epilogue=jnp.tanh), (("t", 8), (8, 40))),
    "quantized_matmul": (lambda x: kernels.quantized_matmul(x, INT8), (("t", 8),)),
    "ragged_dot": (lambda x, w: kernels.ragged_dot(x, w, GROUPS), ((5, 8), (3, 8, "n"))),
    "ragged_dot of rows": (lambda x, w: kernels.ragged_dot(x, w, GROUPS), (("t", 8), (3, 8, "n"))),
    "ragged_contracting_dot": (lambda x, y: kernels.ragged_contracting_dot(x, y, GROUPS), (("t", 8), ("t", 4))),
    "fused_ragged_dot": (
        lambda x, w, s: kernels.fused_ragged_dot(x, w, GROUPS, s, epilogue=lambda x, s: jnp.tanh(x) * s),
        (("t", 8), (3, 8, 4), ("t", 1)),
    ),
    "cross_entropy": (
        lambda h, x: kernels.cross_entropy(h, ONES, x.astype(jnp.int32)[..., 0]),
        (("b", "t", 8), ("b", "t", 1)),
    ),
    "distillation": (lambda h, t: kernels.distillation(h, ONES, t, ONES[:, ::-1]), (("t", 8), ("t", 8))),
    "attention": (
        lambda q, k: kernels.flash_attention(q, k, k, None, MASK, causal=True, **SAME),
        (("b", 9, 4, 8), ("b", 9, 2, 8)),
    ),
    "attention of lengths": (
        lambda q, x: kernels.flash_attention(q, q, q, kv_lengths=lengths(x), segment_ids=((x > 1) * 1, (x > 1) * 1)),
        (("b", 9, 4, 8), ("b", 9)),
    ),
    "attention of scores": (
        lambda q: kernels.flash_attention(q, q, q, score_mod=lambda s, b, n, i, j: s - abs(i - j)),
        (("b", 9, 4, 8),),
    ),
    "nn.attention": (
        lambda q, m: nn.dot_product_attention(q, q, q, mask=m > 0.5, is_causal=True),
        (("b", 9, 4, 8), ("b", 1, 9, 9)),
    ),
    "nn.attention_fn": (lambda q: nn.attention_fn(q, q, q, mask=MASK), (("b", 9, 4, 8),)),
    "causal_conv1d": (partial(first, kernels.causal_conv1d), (("b", 9, 8), (4, 8))),
    "linear_attention": (
        lambda q, d: first(kernels.linear_attention, q, q, q, -d),
        (("b", 9, 2, 8), ("b", 9, 2)),
    ),
    "gated_delta_rule": (
        lambda q, d: first(kernels.gated_delta_rule, q, q, q, d / 4, -d),
        (("b", 9, 2, 8), ("b", 9, 2)),
    ),
    "rg_lru": (partial(first, kernels.rg_lru), (("b", 9, 8),) * 3 + ((8,),)),
    "selective_scan": (
        lambda x, b: first(kernels.selective_scan, x, x, -jnp.ones((8, 4)), b, b),
        (("b", 9, 8), ("b", 9, 4)),
    ),
    "sample": (lambda x: kernels.sample(x, jax.random.key(0)), (("t", 16),)),
}
DIFFERENTIATED = [
    "rms_norm",
    "group_norm",
    "matmul of batches",
    "ragged_dot of rows",
    "ragged_contracting_dot",
    "fused_ragged_dot",
    "cross_entropy",
    "attention",
    "rg_lru",
]


def arrays_of(shapes: tuple[tuple[Any, ...], ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.uniform(0.1, 1, [SIZES.get(n, n) for n in shape]).astype(np.float32) for shape in shapes]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CALLS)
def test_an_exported_function_serves_any_size(name: str) -> None:
    function, shapes = CALLS[name]
    arrays, run = arrays_of(shapes), exported(function, *(symbol(*shape) for shape in shapes))
    for result, expected in zip(*(jax.tree.leaves(f(*arrays)) for f in (run, function)), strict=True):
        if jnp.issubdtype(expected.dtype, jnp.floating):
            close(result, expected, arrays)
        else:
            np.testing.assert_array_equal(result, expected)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_exported_gradients_of_any_size(name: str) -> None:
    function, shapes = CALLS[name]
    arrays, floats = arrays_of(shapes), len(shapes) - (name == "cross_entropy")

    def gradient(*arrays: Any) -> Any:
        return jax.grad(lambda *moving: function(*moving, *arrays[floats:]).sum(), range(floats))(*arrays[:floats])

    run = exported(gradient, *(symbol(*shape) for shape in shapes))
    for result, expected in zip(run(*arrays), gradient(*arrays), strict=True):
        close(result, expected, arrays)


# --- refusals ---------------------------------------------------------------------------------------------------------


def whole(query: Any, **keywords: Any) -> Any:
    return kernels.flash_attention(query, query, query, dropout_key=jax.random.key(0), **keywords)


HEADS = (symbol("b", 8, 2, 4),)
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "attention over keys": (whole, (symbol(2, "t", 2, 4),), "dimension comparison 't' <= '128' is inconclusive"),
    "a mask by the batch": (partial(whole, mask_mod=lambda b, n, i, j: i >= j * b), HEADS, "with its index"),
    "a score by the batch": (partial(whole, score_mod=lambda s, b, n, i, j: s + b), HEADS, "with its index"),
    "dropout by the batch": (partial(whole, dropout_rate=0.5), HEADS, "with its index"),
    "softmax over it": (kernels.softmax, (symbol(8, "n"),), "dim 1 is the symbol n"),
    "softmax over the batch": (partial(kernels.softmax, axis=0), (symbol("b", 8),), "the symbol b"),
    "a norm over it": (kernels.rms_norm, (symbol("b", "c"), symbol("c")), "the symbol c"),
    "a contraction": (kernels.matmul, (symbol(4, "k"), symbol("k", 8)), "the symbol k"),
    "a vocabulary": (
        lambda w: kernels.cross_entropy(ONES.T, w, jnp.ones(16, jnp.int32)),
        (symbol(8, "v"),),
        "symbol v",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_dim_that_is_refused_is_named(name: str) -> None:
    function, types, got = REFUSED[name]
    with pytest.raises(ArgumentError, match="needs arrays of known sizes") as raised:
        jax.eval_shape(lambda *arrays: function(*arrays), *types)
    assert raised.value.loc.file == __file__
    assert "jax.vmap" in raised.value.fix and got in raised.value.got


def test_a_score_mod_with_an_array_of_unknown_size_is_refused() -> None:
    def attention(a: Any) -> Any:
        q = jnp.ones((1, 8, 2, 4))
        mod = jax.tree_util.Partial(lambda a, s, b, n, i, j: s + a[i], a)
        return kernels.flash_attention(q, q, q, score_mod=mod)

    with pytest.raises(ArgumentError, match="needs arrays of known sizes"):
        jax.eval_shape(attention, symbol("t"))
