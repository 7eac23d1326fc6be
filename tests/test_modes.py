"""JAX's debugging modes: under each mode, kernels behave like jnp code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.layer_norm import layer_norm
from tilekern.kernels.matmul import matmul
from tilekern.kernels.ragged_dot import ragged_dot
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.rope import rope
from tilekern.kernels.softmax import softmax
from tilekern.kernels.swiglu import swiglu

TARGETS = ["cpu:xla", "cpu:llvm"]


@contextlib.contextmanager
def both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def strict_dtypes() -> Any:
    return jax.numpy_dtype_promotion("strict")


def strict_ranks() -> Any:
    return jax.numpy_rank_promotion("raise")


MODES: dict[str, Callable[[], Any]] = {
    "debug": lambda: both(jax.debug_nans(True), jax.debug_infs(True)),
    "checking_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "disable_jit": jax.disable_jit,
    "strict": lambda: both(strict_dtypes(), strict_ranks()),
    "compile_time_eval": jax.ensure_compile_time_eval,
}


def needs(target: str) -> str:
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    return target


def fresh(call: str, target: str) -> Callable[[Any], Any]:
    """Make a function [T, N, H] -> [T, N, H] of untraced kernels; kernels of the library may have been traced."""

    @like_first
    def own(x, out, *, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        n = tk.parallel(x.shape[1])
        out[i, n] = tk.fold(tk.serial(3), lambda k, acc: acc * 2 + 1, jnp.log(x[i, n]))

    @tk.op(out_type=lambda x: x)
    def op(x):
        return own(x) * 2

    def gradient(x: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: flash_attention(x, x, x, causal=True, target=target), x)[1](x)[0]

    return {
        "own": lambda x: own(x, target=target),
        "op": lambda x: op(x, target=target),
        "library": lambda x: softmax(x, target=target),
        "gradient": gradient,
    }[call]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", ["own", "op", "library", "gradient"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_changes_no_result(mode: str, call: str, target: str) -> None:
    function = fresh(call, needs(target))
    # Arrays of a shape that no other mode has, so that the library's kernels, too, are traced in this mode.
    x = jnp.asarray(numbers(5 + list(MODES).index(mode), 2, 4) / 64)
    jitted = jax.jit(lambda x: function(x))
    with MODES[mode]():
        found = jax.block_until_ready([function(x), jitted(x)])
    for y, run in zip(found, (function, jitted), strict=True):
        np.testing.assert_array_equal(y, run(x))


@pytest.mark.parametrize("target", TARGETS)
def test_the_loops_of_a_gradient_leak_nothing(target: str) -> None:
    blocks = {"block_q": 8, "block_k": 8, "backward_block_q": 8, "backward_block_k": 8}

    def slope(a: jax.Array, s: jax.Array, b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        return s + a[n] * (i - j).astype(s.dtype)

    def loss(a: jax.Array) -> jax.Array:
        mod = jax.tree_util.Partial(slope, a)
        return flash_attention(x, x, x, causal=True, score_mod=mod, target=needs(target), **blocks).sum()

    x, a = jnp.asarray(numbers(1, 40, 2, 4) / 512), jnp.ones(2)
    with jax.checking_leaks():
        found = jax.grad(loss)(a)
    np.testing.assert_array_equal(found, jax.grad(loss)(a))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", ["own", "op", "library", "gradient"])
@pytest.mark.parametrize("jit", [False, True])
def test_nan_is_an_error_that_names_the_kernel(jit: bool, call: str, target: str) -> None:
    function = fresh(call, needs(target))
    names = {"library": "softmax_forward", "gradient": "flash_attention_"}
    bad = jnp.asarray(numbers(5, 2, 4)).at[3].set(jnp.inf if call in names else -1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=rf"\(nan\) .*in {names.get(call, call)}"):
        (jax.jit(function) if jit else function)(bad)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("jit", [False, True])
def test_infinity_is_an_error_that_names_the_kernel(jit: bool, target: str) -> None:
    function = fresh("own", needs(target))
    bad = jnp.zeros((5, 2, 4))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) .*in own"):
        (jax.jit(function) if jit else function)(bad)


def _library() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions of the library and the types of their arguments, with a length that no other test uses."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def attention(q: Any, bias: Any, mask: Any, sinks: Any, offset: Any, ids: Any, key: Any) -> jax.Array:
        scores = {"softcap": 3.0, "sinks": sinks, "causal": True, "window": (3, None), "q_offset": offset}
        dropout = {"dropout_rate": 0.5, "dropout_key": key}
        return flash_attention(q, q, q, bias, mask, **scores, segment_ids=ids, kv_lengths=offset, **dropout).sum()

    x, w, queries, scores = floats(23, 8), floats(8), floats(1, 23, 2, 8), floats(1, 2, 23, 23)
    mask, key = jax.ShapeDtypeStruct(scores.shape, bool), jax.ShapeDtypeStruct((2,), jnp.uint32)
    return {
        "softmax": (softmax, (x,)),
        "rms_norm": (rms_norm, (x, w)),
        "layer_norm": (layer_norm, (x, w, w)),
        "swiglu": (swiglu, (x, x)),
        "matmul": (matmul, (x, floats(8, 4))),
        "ragged_dot": (ragged_dot, (x, floats(3, 8, 4), integers(3))),
        "rope": (rope, (queries, integers(1, 23))),
        "interleaved rope": (lambda x: rope(x, interleaved=True), (queries,)),
        "cross_entropy": (cross_entropy, (x, floats(8, 16), integers(23))),
        "attention": (jax.grad(attention), (queries, scores, mask, floats(2), integers(1), integers(1, 23), key)),
    }


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", _library())
def test_strict_modes_leave_the_library_alone(name: str) -> None:
    function, types = _library()[name]
    with MODES["strict"]():
        found = jax.eval_shape(lambda *arrays: function(*arrays), *types)
    assert [x.dtype for x in jax.tree.leaves(found)] == [jnp.float32]


def test_more_modes_change_no_result() -> None:
    function, x = fresh("own", "cpu:xla"), jnp.asarray(numbers(5, 2, 4))
    with jax.debug_key_reuse(True), jax.log_compiles():
        found = function(x)
    np.testing.assert_array_equal(found, function(x))


@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_attend_to_nothing_are_no_infinity(target: str) -> None:
    """Their results and residuals are finite; only a logsumexp that the caller requests is infinite."""

    def attention(x: jax.Array, **more: Any) -> Any:
        return flash_attention(x, x, x, causal=True, q_offset=-2, target=needs(target), **more)

    x = jnp.asarray(numbers(1, 6, 2, 4) / 64)
    with jax.debug_infs(True):
        assert not attention(x)[0, :2].any()
        found = jax.grad(lambda x: (attention(x) ** 2).sum())(x)
        with pytest.raises(FloatingPointError, match=r"\(inf\) .*in flash_attention_forward"):
            attention(x, return_logsumexp=True)
    np.testing.assert_array_equal(found, jax.grad(lambda x: (attention(x) ** 2).sum())(x))


def test_an_error_of_a_mode_leaves_no_trace_of_it() -> None:
    function = fresh("own", "cpu:xla")
    bad = jnp.full((5, 2, 4), jnp.nan)
    with jax.debug_nans(True), contextlib.suppress(FloatingPointError):
        function(bad)
    assert jnp.isnan(function(bad)).all()


def test_strict_modes_reach_into_a_body() -> None:
    """Results equal those of jnp code, also if the kernel was called without the mode before."""

    @like_first
    def mixed(x, y, out):
        out[...] = x[...] + y[...]

    x, y = jnp.ones((2, 3)), jnp.ones(3, jnp.int32)
    plain = mixed(x, y)
    for mode, error in ((strict_dtypes, "dtype_promotion"), (strict_ranks, "rank_promotion")):
        with mode(), pytest.raises(Exception, match=error) as expected:
            jnp.add(x, y)
        with mode(), pytest.raises(type(expected.value), match=error):
            mixed(x, y)
    np.testing.assert_array_equal(mixed(x, y), plain)
