"""Derivatives of any order and in any mode, and what they cost."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import tilekern as tk
from tilekern.kernels.flash_attention import flash_attention, schedules
from tilekern.kernels.flash_attention.arguments import Config, Extras, Tangents
from tilekern.kernels.flash_attention.derivatives import flash_attention_backward
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference

BLOCKS = {"block_q": 8, "block_k": 16, "backward_block_q": 16, "backward_block_k": 8}
QUERIES, KEYS, HEADS = 19, 23, 4
ATTEND = partial(flash_attention, return_logsumexp=True, **BLOCKS)
NATIVE = partial(ATTEND, target="cpu:llvm")  # which has float64, and compiles in half of XLA's time


def scored(slopes: Any, rows: Any, columns: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    """Arrays read at n, at i, and at j and something made of n."""
    return 1.1 * s + slopes[n] * jnp.abs(i - j) + jnp.sin(rows[i]) * columns[n // 2, j]


def normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape)) for shape in shapes]


def inputs() -> dict[str, Any]:
    """All that attention is differentiable in, in float64."""
    q, k, v, bias, sinks, *carried = normal(
        *((2, QUERIES, HEADS, 8), (2, KEYS, 2, 8), (2, KEYS, 2, 6), (2, 1, QUERIES, KEYS), (HEADS,)),
        *((HEADS,), (QUERIES,), (2, KEYS)),
    )
    return {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "carried": carried}


def loss(attend: Callable[..., Any], x: dict[str, Any]) -> jax.Array:
    """A number that depends on all results of an attention with about every feature."""
    out, logsumexp = attend(
        *(x["q"], x["k"], x["v"], x["bias"]),
        sinks=x["sinks"],
        score_mod=Partial(scored, *x["carried"]),
        softcap=3.0,
        causal=True,
        q_offset=2,
        window=(9, None),
        kv_lengths=np.array([20, 23]),
        dropout_rate=0.2,
        dropout_key=jax.random.key(3),
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(logsumexp))


def along(function: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative in a fixed direction, in forward mode."""

    def derivative(x: dict[str, Any]) -> Any:
        return jax.jvp(function, (x,), (directions(x),))[1]

    return derivative


def against(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same in reverse mode."""

    def derivative(x: dict[str, Any]) -> Any:
        gradient = jax.grad(function)(x)
        return sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (gradient, directions(x))), strict=True))

    return derivative


def directions(x: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), x)


@pytest.fixture(autouse=True)
def _double() -> Any:
    with jax.enable_x64(True):
        yield


MODES = {"forward": along, "reverse": against}


@pytest.mark.sweep(4)
@pytest.mark.one_backend
@pytest.mark.parametrize("names", [("forward",), ("reverse",), ("forward", "reverse"), ("reverse", "reverse")], ids=str)
@pytest.mark.slow
def test_derivatives_are_differences(names: tuple[str, ...]) -> None:
    """Of the last derivative but one, along the same direction; fourth order in the step, so errors are about 1e-9."""
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    function = partial(loss, NATIVE)
    for name in names[:-1]:
        function = MODES[name](function)
    x = inputs()
    found = jax.jit(MODES[names[-1]](function))(x)
    step, run = 1e-3, jax.jit(function)

    def at(steps: int) -> float:
        return float(run(jax.tree.map(lambda a, d: a + steps * step * d, x, directions(x))))

    difference = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
    np.testing.assert_allclose(found, difference, rtol=1e-6)


@pytest.mark.one_backend
def test_the_hessian_is_that_of_the_reference() -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    q, k, v = normal((3, 2, 4), (5, 1, 4), (5, 1, 3))

    def total(attend: Callable[..., Any], q: jax.Array, k: jax.Array) -> jax.Array:
        out, logsumexp = attend(q, k, v, causal=True, q_offset=1)
        return jnp.sum(out**2) + jnp.sum(logsumexp**2)

    hessians = [jax.jit(jax.hessian(partial(total, f), (0, 1)))(q, k) for f in (NATIVE, reference)]
    for found, expected in zip(*map(jax.tree.leaves, hessians), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    jacobians = [jax.jit(jax.jacfwd(jax.jacrev(partial(total, f))))(q, k) for f in (NATIVE, reference)]
    np.testing.assert_allclose(*jacobians, rtol=1e-9, atol=1e-12)


def test_forward_and_reverse_mode_are_transposes(backend: str) -> None:
    """<ct, J t> = <Jᵀ ct, t>, to rounding."""
    dtype = jnp.float64 if backend in ("xla", "llvm") else jnp.float32
    q, k, v, *tangents = (x.astype(dtype) for x in normal(*[(2, QUERIES, 4, 8), (2, KEYS, 2, 8), (2, KEYS, 2, 6)] * 2))
    function = partial(ATTEND, causal=True, q_offset=4)
    results, moved = jax.jvp(function, (q, k, v), tuple(tangents))
    cotangents = tuple(jnp.sin(x) for x in results)
    pulled = jax.vjp(function, q, k, v)[1](cotangents)
    left, right = (
        sum(float(jnp.vdot(a, b)) for a, b in zip(x, y, strict=True))
        for x, y in ((cotangents, moved), (pulled, tangents))
    )
    np.testing.assert_allclose(left, right, rtol=1e3 * np.finfo(dtype).eps)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_backward_kernel_computes_what_two_do(groups: int, backend: str) -> None:
    shapes = (2, QUERIES, 4, 8), (2, KEYS, groups, 8), (2, KEYS, groups, 6), (2, QUERIES, 4, 6)
    q, k, v, cotangent = (x.astype(jnp.float32) for x in normal(*shapes))
    extras = Extras(kv_lengths=jnp.array([20, 23], jnp.int32))
    config = Config(scale=8**-0.5, causal=True, blocks=(("block_q", 8), ("block_k", 16)))
    out, logsumexp, residuals = flash_attention_forward(
        q, k, v, extras, config=config, return_logsumexp=True, return_residuals=True, block_q=8, block_k=16
    )

    def backward(one_kernel: bool) -> Any:
        arrays = q, k, v, extras, out, residuals, (cotangent, jnp.cos(logsumexp))
        wanted = Tangents(query=True, key=True, value=True)
        return flash_attention_backward(*arrays, config=config, needs=wanted, one_kernel=one_kernel)

    for one, two in zip(*(jax.tree.leaves(backward(one_kernel)) for one_kernel in (True, False)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("target", "length", "groups", "features", "one_kernel"),
    [
        ("tpu:v5e", 32768, 8, {}, True),
        ("tpu:v5e", 65536, 8, {}, False),  # too long for vector memory
        ("tpu:v5e", 32768, 2, {}, False),  # dk and dv are kept, too
        ("tpu:7x", 16384, 8, {}, True),
        ("tpu:7x", 32768, 8, {}, False),
        ("tpu:v6e", 1024, 8, {"bias": (1, 8, 1, 1024)}, True),
        ("tpu:v6e", 1024, 8, {"bias": (1, 1, 1024, 1024)}, False),
        ("tpu:v6e", 1024, 8, {"mask": (1, 1, 1024, 1024)}, False),
    ],
)
def test_one_backward_kernel_where_a_head_fits(
    target: str, length: int, groups: int, features: dict[str, Any], one_kernel: bool
) -> None:
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for heads in (8, groups))
    extras = Extras(**{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in features.items()})
    blocks = schedules.tpu_backward(query, key, key, extras, config=Config(scale=1.0), device=tk.device(target))
    assert blocks == {"one_kernel": one_kernel}


def test_vmap_and_loops_agree(backend: str) -> None:
    if backend == "mosaic":
        pytest.skip("needs a backend that is not interpreted")
    q, k, v, sinks = (x.astype(jnp.float32) for x in normal((3, QUERIES, 4, 8), (KEYS, 2, 8), (KEYS, 2, 6), (3, 4)))

    def total(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return sum(jnp.sum(x) for x in ATTEND(q, k, v, sinks=sinks, causal=True))

    gradient = jax.grad(total, (0, 1, 2, 3))
    each = [gradient(q[m], k, v, sinks[m]) for m in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    mapped = jax.jit(jax.vmap(gradient, (0, None, None, 0)))(q, k, v, sinks)
    summed = jax.jit(jax.grad(lambda *x: jax.vmap(total, (0, None, None, 0))(*x).sum(), (0, 1, 2, 3)))(q, k, v, sinks)
    for found, expected in (
        (mapped, stacked),
        (summed, [stacked[0], stacked[1].sum(0), stacked[2].sum(0), stacked[3]]),
    ):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def calls(jaxpr: Any, name: str) -> int:
    """The number of calls of a kernel in a program."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "tilekern_call" and str(eqn.params["callee"]) == name
        for leaf in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(leaf, "jaxpr", leaf)
            count += calls(inner, name) if hasattr(inner, "eqns") else 0
    return count


@pytest.mark.one_backend
@pytest.mark.parametrize(("names", "forwards"), [((), 2), (("flash_attention_out", "flash_attention_logsumexp"), 1)])
def test_checkpoints_may_save_the_results(names: tuple[str, ...], forwards: int) -> None:
    q, k, v = (x.astype(jnp.float32) for x in normal((QUERIES, 4, 8), (KEYS, 2, 8), (KEYS, 2, 6)))
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def layer(q: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(flash_attention(jnp.sin(q), k, v, causal=True, **BLOCKS)))

    plain, saving = jax.grad(layer), jax.grad(jax.checkpoint(layer, policy=policy))
    assert calls(jax.make_jaxpr(saving)(q).jaxpr, "flash_attention_forward") == forwards
    # XLA fuses, and so contracts, the two programs in different ways: the last bit may differ.
    np.testing.assert_allclose(jax.jit(plain)(q), jax.jit(saving)(q), rtol=0, atol=2 * np.finfo(np.float32).eps)


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm"])
def test_memory_is_linear_in_the_length(target: str) -> None:
    """By XLA's account, up to 32k: less than four times query, key, value and their gradients, at each length."""
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")

    def gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.grad(lambda *x: flash_attention(*x, causal=True, target=target).sum(), (0, 1, 2))(q, k, v)

    for length in (2048, 32768):
        aval = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
        memory = jax.jit(gradient).lower(aval, aval, aval).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * 6 * length * 2 * 64 * 4


@pytest.mark.one_backend
@pytest.mark.parametrize("order", [1, 2, 3])
def test_no_derivative_has_a_matrix_of_scores(order: int) -> None:
    """At no order does an array of the program have the dims T and S, or as many elements."""
    queries, keys = 509, 521

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, logsumexp = flash_attention(q, k, v, causal=True, softcap=5.0, return_logsumexp=True)
        return jnp.sum(out) + jnp.sum(logsumexp)

    derivative: Any = function
    for _ in range(order):
        derivative = partial(lambda f, q, k, v: jnp.vdot(jax.grad(f)(q, k, v), q), derivative)
    q, k, v = (jax.ShapeDtypeStruct((n, 1, 4), jnp.float32) for n in (queries, keys, keys))
    largest = max(shape_sizes(jax.make_jaxpr(derivative)(q, k, v).jaxpr))
    assert 128 * keys <= largest < queries * keys // 2 if order > 1 else largest < 16 * keys


def shape_sizes(jaxpr: Any) -> list[int]:
    """The elements of every array of a program."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "size")]
    for eqn in jaxpr.eqns:
        for leaf in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(leaf, "jaxpr", leaf)
            sizes += shape_sizes(inner) if hasattr(inner, "eqns") else []
    return sizes or [0]


@pytest.mark.one_backend
def test_gradients_are_the_same_bits_each_time() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, n, h, 16), np.float32) for n, h in ((200, 4), (230, 2), (230, 2)))
    table = random.standard_normal((4, 200, 230), np.float32)

    def total(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return jnp.sum(jnp.sin(flash_attention(q, k, v, bias[None], causal=True)))

    run = jax.jit(jax.grad(total, (0, 1, 2, 3)))
    first = run(q, k, v, table)
    for _ in range(5):
        for a, b in zip(first, run(q, k, v, table), strict=True):
            np.testing.assert_array_equal(a, b)
