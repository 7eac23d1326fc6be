"""Private copies of integers, partial sums of floats, and slices of columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.machines import here
from tests.lower.llvm.running import Canaries, run
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.plan.task_partition import Runs, TaskPartition, partition_tasks

pytest.importorskip("llvmlite", reason="needs llvmlite")

KINDS = ("add", "max", "min", "and_", "or_", "xor")


@tk.kernel(out_type=lambda where, x, *, count, kind: tk.Zeros(jax.ShapeDtypeStruct((count,), x.dtype)))
def scattered(where: tk.Ref, x: tk.Ref, out: tk.Ref, *, count: int, kind: str, block: tk.Block = 32) -> None:
    n = tk.parallel(x.shape[0], block)
    ordered = {"ordered": False} if jnp.issubdtype(x.dtype, jnp.floating) and kind == "add" else {}
    getattr(out.at[where[n]], kind)(x[n], mask=n.valid & (x[n] != 3), **ordered)


@tk.kernel(out_type=lambda ids, x, *, count: tk.Zeros(jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)))
def rows(ids: tk.Ref, x: tk.Ref, out: tk.Ref, *, count: int, block: tk.Block = 16, width: tk.Block = 0) -> None:
    n = tk.parallel(x.shape[0], block)
    columns = tk.tile(x.shape[1], width or x.shape[1], 0)
    add = out.at[ids[n], columns].add
    if jnp.issubdtype(x.dtype, jnp.floating):
        add(2 * x[n, columns], ordered=False)
    else:
        add(2 * x[n, columns])


@tk.kernel(
    out_type=lambda x: (tk.Zeros(jax.ShapeDtypeStruct((8,), x.dtype)), tk.Zeros(jax.ShapeDtypeStruct((8,), x.dtype)))
)
def two_ways(x: tk.Ref, updated: tk.Ref, stored: tk.Ref) -> None:
    n = tk.parallel(x.shape[0], 32)
    updated.at[x[n] % 4].add(1)
    updated.at[4 + x[n] % 4].max(x[n])
    stored.at[x[n] % 4].add(1)

    @tk.when(n.index == 0)
    def _() -> None:
        stored[4] = jnp.ones((), x.dtype)


def func_of(kernel: Any, *arrays: Any, **fields: Any) -> Func:
    return kernel.trace(*arrays, **fields).lower("cpu:xla").ir


def check(func: Func, *arrays: Any) -> TaskPartition:
    """The code of all machines gives what the interpreter gives, in any order of tasks; the partition into tasks."""
    expected = interpret(func, *arrays, orders=1)
    for machine in (None, *here()):
        lowering = LlvmLowering(func, machine)
        for seed in (None, 1):
            canaries = Canaries()
            found = run(lowering, arrays, canaries, seed=seed)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other, str(machine))
            assert canaries.untouched()
    return partition_tasks(LlvmLowering(func).legal)


def places(count: int, size: int) -> np.ndarray:
    """Often the same place several times in a row; some lie outside."""
    rng = np.random.default_rng(count)
    return np.repeat(rng.integers(-1, count + 1, size), 3)[:size].astype(np.int32)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_integers_are_updated_in_private_copies(dtype: str) -> None:
    x = np.random.default_rng(0).integers(0, 100, 700).astype(dtype)
    for kind in KINDS if dtype == "int32" else ("add", "max"):
        partition = check(func_of(scattered, places(37, 700), x, count=37, kind=kind), places(37, 700), x)
        assert [copy.ref.name for copy in partition.private] == ["out"] and partition.runs == Runs(1, 22, 2)


def test_integers_of_64_bits() -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(0).integers(-(2**60), 2**60, 700)
        assert check(func_of(scattered, places(5, 700), x, count=5, kind="min"), places(5, 700), x).private


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("width", [1, 3, 17, 21])
def test_rows_of_floats(dtype: str, width: int) -> None:
    """Sums of few small integers, which every dtype holds."""
    rng = np.random.default_rng(width)
    x, ids = (
        rng.integers(0, 2, (50, width)).astype(jnp.dtype(dtype)),
        np.repeat(np.arange(-1, 25), 2)[:50].astype(np.int32),
    )
    assert check(func_of(rows, ids, x, count=23), ids, x).slices == 1


@pytest.mark.parametrize("width", [13, 40])
def test_rows_of_integers(width: int) -> None:
    x, ids = np.arange(1000 * width, dtype=np.int32).reshape(1000, width), places(9, 1000)
    assert check(func_of(rows, ids, x, count=9), ids, x).private
    assert check(func_of(rows, ids, x, count=9, width=32), ids, x).private  # columns that the tile has too many, or not


@pytest.mark.parametrize(("shape", "count", "slices"), [((40, 128), 90, 4), ((40, 64), 90, 2), ((40, 96), 90, 1)])
def test_columns_are_cut_where_partial_sums_do_not_pay(shape: tuple[int, int], count: int, slices: int) -> None:
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    ids = places(count, shape[0])
    partition = check(func_of(rows, ids, x, count=count), ids, x)
    assert (partition.runs.count, partition.slices, partition.partial_sums) == (1, slices, ())
    assert len(partition.in_place) == 1
    narrow = check(func_of(rows, ids, x.astype(jnp.bfloat16), count=count), ids, x.astype(jnp.bfloat16))
    assert narrow.slices == slices and [s.count for s in narrow.partial_sums] == [1]


@tk.kernel(out_type=lambda ids, x, *, count: tk.Zeros(jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)))
def single_rows(ids: tk.Ref, x: tk.Ref, out: tk.Ref, *, count: int) -> None:
    n = tk.parallel(x.shape[0])
    out.at[ids[n]].add(jnp.abs(x[n]) - x[n], ordered=False)


def test_addends_of_slices_are_prefetched() -> None:
    """Of rows further on in the tile: where a program adds one row, there are none."""
    x, ids = np.random.default_rng(0).integers(-9, 9, (40, 128)).astype(np.float32), places(90, 40)
    for kernel, width, prefetches in ((rows, 128, True), (rows, 96, False), (single_rows, 128, False)):
        func = func_of(kernel, ids, x[:, :width], count=90)
        assert (check(func, ids, x[:, :width]).slices > 1) == (width == 128)
        assert ("@llvm.prefetch" in LlvmLowering(func).text) == prefetches


def test_many_updates_of_few_floats_have_partial_sums() -> None:
    x, ids = np.ones((4096, 32), np.float32), places(3, 4096)
    partition = check(func_of(rows, ids, x, count=3), ids, x)
    assert (partition.runs.count, partition.slices) == (16, 1) and [s.count for s in partition.partial_sums] == [16]


@tk.kernel(out_type=lambda x, y: tk.Sum(jax.ShapeDtypeStruct((x.shape[1], y.shape[1]), x.dtype)))
def sum_of_products(x: tk.Ref, y: tk.Ref, out: tk.Ref) -> None:
    n = tk.parallel(x.shape[0], 512)
    out.at[...].add(x[n].T @ y[n])


def test_sums_of_products_pay_by_their_multiplications() -> None:
    """Not by the elements of operands and results, which are 16 times fewer here."""
    types = [jax.ShapeDtypeStruct((8192, 256), jnp.float32)] * 2
    partition = partition_tasks(LlvmLowering(func_of(sum_of_products, *types)).legal)
    assert [s.count for s in partition.partial_sums] == [16]


def test_private_copies_are_for_arrays_that_one_kind_of_update_touches_often() -> None:
    x = np.arange(1000, dtype=np.int32)
    assert not check(func_of(two_ways, x), x).private
    where = places(900, 1000)
    assert not check(func_of(scattered, where, x, count=900, kind="add"), where, x).private
    assert not check(func_of(scattered, places(3, 1000), x, count=3, kind="add", block=1), places(3, 1000), x).private
    few = np.zeros(0, np.int32)
    assert not check(func_of(scattered, few, few, count=3, kind="add"), few, few).private


def test_arrays_beyond_the_cache_have_no_private_copies() -> None:
    size, count = 1 << 23, 1 << 19
    types = [jax.ShapeDtypeStruct((size,), jnp.int32)] * 2
    assert not partition_tasks(func_of(scattered, *types, count=count, kind="add")).private
    assert partition_tasks(func_of(scattered, *types, count=count // 2, kind="add")).private


def test_columns_are_not_cut_where_a_program_does_more_than_add() -> None:
    @tk.kernel(
        out_type=lambda x: (
            tk.Sum(jax.ShapeDtypeStruct((90, x.shape[1]), x.dtype)),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
        )
    )
    def also_stores(x: tk.Ref, total: tk.Ref, out: tk.Ref) -> None:
        n = tk.parallel(x.shape[0], 8)
        total.at[n].add(x[n])
        out[n] = x[n]

    x = np.ones((40, 128), np.float32)
    partition = check(func_of(also_stores, x), x)
    assert partition.slices == 1
