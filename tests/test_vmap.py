"""`jax.vmap` of kernels and ops, in JAX programs of every shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lang.checks import COMPILED, like_first, numbers
from tilekern.kernel.instance import Instance
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul

SIZE = 3
TRACES: list[tuple[int, ...]] = []


@tk.kernel(out_type=lambda x, w, n: (x, {"rows": jax.ShapeDtypeStruct(x.shape[:1], np.int32)}))
def mixed(x, w, n, out, extra, *, block: tk.Block = 4):
    """out[i, j] = x[i, j] * w[j] + n[0], and the index of each row."""
    TRACES.append(x.shape)
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * w[...] + n[0]
    extra["rows"][i] = i.indices


@tk.kernel(out_type=lambda x, bounds, **_: jax.ShapeDtypeStruct((), x.dtype))
def span(x, bounds, out, *, block: tk.Block = 2):
    """Sum of x from bounds[0] to bounds[1]."""
    axis = tk.serial(x.shape[0], block, start=bounds[0], stop=bounds[1])
    out[...] = tk.fold(axis, lambda k, acc: acc + x[k].sum(), jnp.float32(0))


@tk.kernel(out_type=lambda state, where: (tk.Zeros(where), tk.Sum(where)), donate=("state",))
def roles(state, where, seen, total):
    """Write a row of the state, count elements in `seen`, and sum up all elements."""
    i = tk.parallel(where.shape[0])
    state[where[i]] = state[where[i]] + 1
    seen.at[where[i] // 2].add(1)
    total.at[tk.ds(where[i], 1)].add(where[i])


def by_slices(function: Callable[..., Any], in_axes: Any, out_axes: Any, size: int, *args: Any) -> Any:
    """Oracle of `jax.vmap`: one call for each slice, and the results stacked."""

    def part(n: int, axis: int | None, x: Any) -> Any:
        return x if axis is None else jax.tree.map(lambda leaf: np.take(leaf, n, axis=axis), x)

    calls = [function(*(part(n, a, x) for a, x in zip(in_axes, args, strict=True))) for n in range(size)]
    leaves = [jax.tree.leaves(call) for call in calls]
    axes = out_axes if isinstance(out_axes, tuple) else (out_axes,) * len(leaves[0])
    return [
        np.stack([np.asarray(x) for x in column], axis=a)
        for column, a in zip(zip(*leaves, strict=True), axes, strict=True)
    ]


def assert_equal(found: Any, expected: Any) -> None:
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_same(np.asarray(got), np.asarray(wanted), zeros=False)


def stacked(x: np.ndarray, axis: int | None, size: int = SIZE) -> np.ndarray:
    """Stack `size` different versions of an array along an axis."""
    return x if axis is None else np.stack([x + n for n in range(size)], axis=axis).astype(x.dtype)


# --- operands and results --------------------------------------------------------------------------------------------

X, W, N = numbers(6, 5), numbers(5), np.array([7], np.float32)


def axes(rank: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(-rank - 1, rank)


@COMPILED
@given(axes(2), axes(1), axes(1), st.tuples(st.integers(-3, 2), st.integers(-2, 1)), st.sampled_from([1, SIZE]))
def test_any_operands_along_any_axes(x: Any, w: Any, n: Any, outs: tuple[int, int], size: int) -> None:
    in_axes = (x, w, n)
    if in_axes == (None, None, None):
        in_axes = (0, None, None)
    args = [stacked(a, axis, size) for a, axis in zip((X, W, N), in_axes, strict=True)]
    expected = by_slices(mixed, in_axes, outs, size, *args)
    for call in (jax.vmap(mixed, in_axes, outs), jax.jit(jax.vmap(mixed, in_axes, outs))):
        assert_equal(call(*args), expected)


@pytest.mark.smoke
@pytest.mark.parametrize("in_axes", [(0, None, 0), (None, 1, None)])
def test_nested(in_axes: tuple[int | None, ...]) -> None:
    outer = (1, None, 0)
    args = [stacked(stacked(a, i), o, 2) for a, i, o in zip((X, W, N), in_axes, outer, strict=True)]
    inner = partial(by_slices, mixed, in_axes, 0, SIZE)
    found = jax.vmap(jax.vmap(mixed, in_axes), outer)(*args)
    assert_equal(found, by_slices(inner, outer, 0, 2, *args))


@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(size: int) -> None:
    found, extra = jax.vmap(mixed, (0, None, None))(np.zeros((size, 6, 5), np.float32), W, N)
    assert found.shape == (size, 6, 5) and extra["rows"].shape == (size, 6)
    assert_equal(
        (found, extra), (np.full((size, 6, 5), 7, np.float32), np.tile(np.arange(6, dtype=np.int32), (size, 1)))
    )


def test_arrays_without_elements() -> None:
    found, _ = jax.vmap(mixed, (0, None, None))(np.zeros((2, 0, 5), np.float32), W, N)
    assert found.shape == (2, 0, 5)


def test_no_batched_operand() -> None:
    found, _ = jax.vmap(lambda _: mixed(X, W, N))(np.arange(2))
    assert_equal(found, np.stack([X * W + 7] * 2))


# --- what a kernel may do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [(None, 0), (0, 0), (1, 1), (0, None)])
def test_bounds_of_loops_that_differ(in_axes: tuple[int | None, int | None]) -> None:
    bounds = np.array([[0, 7], [3, 5], [5, 2], [-4, 90]], np.int32)
    bounds = bounds[1] if in_axes[1] is None else np.moveaxis(bounds, 0, in_axes[1])
    x = stacked(numbers(7), in_axes[0], 4)
    assert_equal(jax.vmap(span, in_axes)(x, bounds), by_slices(span, in_axes, 0, 4, x, bounds))


@pytest.mark.parametrize("in_axes", [(0, 0), (1, 1), (None, 0), (2, None)])
def test_donated_inputs_zeros_and_sums(in_axes: tuple[int | None, int | None]) -> None:
    where = np.stack([np.roll([0, 2, 3], n) + n for n in range(SIZE)]).astype(np.int32)
    where = where[1] if in_axes[1] is None else np.moveaxis(where, 0, in_axes[1])
    state = stacked(numbers(7, 2), in_axes[0])
    kept, given = state.copy(), jnp.asarray(state)
    found = jax.vmap(roles, in_axes)(given, where)
    assert_equal(found, by_slices(roles, in_axes, 0, SIZE, state, where))
    assert_same(np.asarray(given), kept)


@pytest.mark.parametrize("size", [3, 5000])
def test_a_body_that_closes_over_an_array(size: int) -> None:
    """A small array is a constant of the IR, a large array is an operand."""
    table = np.arange(size, dtype=np.float32)

    @like_first
    def f(x, out):
        out[...] = x[...] + jnp.asarray(table)[size - 3 :]

    x = numbers(4, 3)
    assert_equal(jax.vmap(f)(x), x + table[-3:])


@pytest.mark.parametrize("batched", [True, False])
def test_a_body_that_closes_over_a_traced_value(batched: bool) -> None:
    def shifted(x, shift):
        @like_first
        def f(x, out):
            out[...] = x[...] + shift[None]

        return f(x)

    x, shifts = numbers(4, 3), numbers(4)
    found = jax.jit(jax.vmap(shifted, (0, 0 if batched else None)))(x, shifts if batched else shifts[1])
    assert_equal(found, x + (shifts[:, None] if batched else shifts[1]))


def test_missing_operands_and_pytrees() -> None:
    @tk.kernel(out_type=lambda tree, b: jax.tree.map(lambda x: x, tree))
    def f(tree, b, out):
        out["a"][...] = tree["a"][...] + (0 if b is None else b[...])
        out["b"][...] = tree["b"][...]

    tree = {"a": numbers(2, 3), "b": numbers(4)}
    found = jax.vmap(f, ({"a": 0, "b": None}, None), {"a": 1, "b": 0})(tree, None)
    assert_equal(found, {"a": tree["a"].T, "b": np.stack([tree["b"]] * 2)})


# --- ops -------------------------------------------------------------------------------------------------------------


@tk.op(out_type=lambda x, w: (jax.ShapeDtypeStruct((x.shape[0],), x.dtype), x))
def both_kernels(x, w, *, splits: tk.Block = 2):
    """Sums of parts of the row, then the sum of the parts; and x times w."""
    scaled, _ = mixed(x, w, jnp.zeros(1))
    parts = scaled.reshape(x.shape[0], splits, -1).sum(axis=2)
    return jax.vmap(lambda row: span(row, jnp.array([0, splits])))(parts), scaled


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (2, 1)])
def test_an_op(in_axes: tuple[int | None, int | None]) -> None:
    args = [stacked(x, axis) for x, axis in zip((numbers(4, 6), numbers(6)), in_axes, strict=True)]
    expected = by_slices(both_kernels, in_axes, 0, SIZE, *args)
    assert_equal(jax.vmap(both_kernels, in_axes)(*args), expected)
    assert_equal(jax.jit(jax.vmap(both_kernels, in_axes))(*args), expected)


def test_an_op_twice() -> None:
    x = stacked(stacked(numbers(4, 6), 0), 1, 2)
    found = jax.vmap(jax.vmap(both_kernels, (0, None)), (1, None))(x, numbers(6))
    expected = np.einsum("batk,k->batk", np.moveaxis(x, 1, 0), numbers(6))
    assert_equal(found, (expected.sum(axis=-1), expected))


# --- in programs -----------------------------------------------------------------------------------------------------


def test_jit_scan_and_spmd_axes() -> None:
    x = stacked(numbers(6, 5), 0)
    once = x * W + 7
    vmapped = jax.vmap(lambda x: mixed(x, W, N)[0])
    assert_equal(jax.vmap(jax.jit(lambda x: mixed(x, W, N)[0]))(x), once)
    assert_equal(jax.jit(vmapped)(x), once)
    assert_equal(jax.vmap(lambda x: mixed(x, W, N)[0], spmd_axis_name="batch")(x), once)
    assert_equal(jax.vmap(lambda x: mixed(x, W, N)[0], axis_name="batch")(x), once)
    twice = once * W + 7
    assert_equal(lax.fori_loop(0, 2, lambda _, x: vmapped(x), jnp.asarray(x)), twice)
    assert_equal(lax.scan(lambda c, _: (vmapped(c), None), jnp.asarray(x), length=2)[0], twice)

    def scanned(x):
        return lax.scan(lambda c, w: (mixed(c, w, N)[0], None), x, np.stack([W, W]))[0]

    assert_equal(jax.vmap(scanned)(jnp.asarray(x)), twice)
    assert_equal(lax.map(lambda x: mixed(x, W, N)[0], jnp.asarray(x), batch_size=2), once)


def test_a_collective_around_a_kernel() -> None:
    def mean_of_batch(x):
        return mixed(x - lax.pmean(x, "batch"), W, N)[0]

    x = stacked(numbers(6, 5), 0)
    assert_equal(jax.vmap(mean_of_batch, axis_name="batch")(x), (x - x.mean(axis=0)) * W + 7)


@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (0, None, None, 0), (None, 1, 1, None), (2, 0, 0, 0)])
def test_flash_attention_with_an_offset_for_each_slice(in_axes: tuple[int | None, ...]) -> None:
    shapes = (2, 9, 4, 8), (2, 13, 2, 8), (2, 13, 2, 8)
    random = np.random.default_rng(0)
    args: list[Any] = []
    for shape, axis in zip(shapes, in_axes, strict=False):
        full = shape if axis is None else (*shape[:axis], SIZE, *shape[axis:])
        args.append(random.standard_normal(full, np.float32))
    args.append(np.int32(4) if in_axes[3] is None else np.array([-3, 0, 5], np.int32))

    def attend(q, k, v, offset):
        return flash_attention(q, k, v, causal=True, q_offset=offset, block_q=8, block_k=8, return_logsumexp=True)

    found = jax.jit(jax.vmap(attend, in_axes))(*args)
    for got, expected in zip(found, by_slices(attend, in_axes, 0, SIZE, *args), strict=True):
        # Batched products may add up in another order: as in a sum of 13 terms.
        np.testing.assert_allclose(
            got, expected, rtol=16 * np.finfo(np.float32).eps, atol=16 * np.finfo(np.float32).eps
        )


def test_a_batched_kernel_has_derivatives() -> None:
    found = jax.grad(lambda x, w: jax.vmap(lambda x: mixed(x, w, N)[0])(x).sum(), (0, 1))(stacked(X, 0), W)
    x = stacked(X, 0)
    np.testing.assert_array_equal(found[0], np.broadcast_to(W, x.shape))
    np.testing.assert_array_equal(found[1], x.sum(axis=(0, 1)))


# --- what it costs ---------------------------------------------------------------------------------------------------


def family_of(function: Callable[..., Any], *args: Any) -> Instance:
    """Family of the only kernel call in a function."""

    def search(jaxpr: Any) -> list[Instance]:
        found: list[Instance] = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "tilekern_call":
                found.append(eqn.params["callee"])
            elif "jaxpr" in eqn.params:
                found += search(eqn.params["jaxpr"])
        return found

    (family,) = search(jax.make_jaxpr(function)(*args))
    return family


def test_the_ir_is_that_of_a_kernel_with_the_axis_written_by_hand() -> None:
    @tk.kernel(out_type=lambda x, w: x)
    def f(x, w, out):
        i = tk.parallel(x.shape[0], 4)
        k = tk.fold(tk.serial(w.shape[0]), lambda k, acc: acc + w[k], jnp.float32(0))
        out[i] = x.load(i, mask=i.valid[:, None]) * k

    @tk.kernel(out_type=lambda x, w: x)
    def by_hand(x, w, out):
        batch = tk.parallel(x.shape[0])
        i = tk.parallel(x.shape[1], 4)
        k = tk.fold(tk.serial(w.shape[0]), lambda k, acc: acc + w[k], jnp.float32(0))
        out[batch, i] = x.load((batch, i), mask=i.valid[:, None]) * k

    x = stacked(X, 0)
    found = str(family_of(jax.vmap(f, (0, None)), x, W).func())
    assert found == str(by_hand.trace(x, W)).replace("by_hand", "f")


def test_shared_operands_are_not_copied() -> None:
    x, w = np.ones((5, 64, 32), np.float32), np.ones((32, 48), np.float32)
    shared, both = jax.vmap(matmul, (0, None)), jax.vmap(matmul)
    params = family_of(shared, x, w).func().params
    assert [p.ref.shape for p in params] == [(5, 64, 32), (32, 48), (5, 64, 48)]
    copy = "tensor<5x32x48xf32>"
    assert copy not in jax.jit(shared).lower(x, w).as_text()
    assert copy in jax.jit(both).lower(x, np.stack([w] * 5)).as_text()


def test_a_stacked_operand_is_not_transposed() -> None:
    x = np.ones((64, 5, 32), np.float32)
    family = family_of(jax.vmap(matmul, (1, None)), x, np.ones((32, 48), np.float32))
    assert family.func().params[0].ref.shape == (64, 5, 32)


def test_only_donated_inputs_that_are_shared_are_copied() -> None:
    where = np.zeros((4, 3), np.int32)
    shapes = [p.ref.shape for p in family_of(jax.vmap(roles, (None, 0)), numbers(7, 2), where).func().params]
    assert shapes == [(4, 7, 2), (4, 3), (4, 3), (4, 3)]


def test_nothing_is_traced_or_compiled_twice() -> None:
    x = stacked(numbers(6, 7), 0, 4)
    w = numbers(7)
    del TRACES[:]
    function = jax.vmap(mixed, (0, None, None))
    for n in range(3):
        assert_equal(function(x + n, w, N)[0], (x + n) * w + 7)
    jax.jit(function)(x, w, N)
    assert TRACES == [(6, 7)]
    family = family_of(function, x, w, N)
    assert family is family_of(function, x, w, N)

    def computations(calls: int) -> int:
        text = jax.jit(lambda x: [function(x + n, w, N) for n in range(calls)]).lower(x).as_text()
        return text.count("func.func")

    assert computations(3) == computations(1)


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0, 1, -1]), min_size=1, max_size=4))
def test_vmap_of_vmap(places: list[int]) -> None:
    """Each vmap adds an axis to the grid, the outermost first, and a dim to the results."""
    function, w, sizes = mixed, W, list[int]()
    for size, place in enumerate(places, 1):
        w = stacked(w, place, size)
        function = jax.vmap(function, (None, place, None))
        sizes.insert(0, size)
    family = family_of(function, X, w, N)
    assert [a.extent for a in family.func().axes] == [*sizes, 6]
    assert [o.shape for o in family.outputs] == [(*sizes, 6, 5), (*sizes, 6)]
