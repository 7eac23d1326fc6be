"""Pages that a table chooses: held in VMEM all at once where that moves fewer bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.mosaic.every_plan import every_plan
from tests.lower.mosaic.pallas_kernels import needs_libtpu
from tilekern.ir.interpret import interpret


@tk.kernel(out_type=lambda pool, table, x: jax.ShapeDtypeStruct((*table.shape, *pool.shape[1:]), pool.dtype))
def paged(pool: tk.Ref, table: tk.Ref, x: tk.Ref, out: tk.Ref) -> None:
    """Each page that a table names, plus a tile."""
    b, p = tk.parallel(table.shape[0]), tk.parallel(table.shape[1])
    out[b, p] = pool[table[b, p]] + x[b]


def types(pages: int, rows: int, count: int) -> list[jax.ShapeDtypeStruct]:
    shapes = ((pages, rows, 128), jnp.float32), ((count, 8), jnp.int32), ((count, rows, 128), jnp.float32)
    return [jax.ShapeDtypeStruct(*one) for one in shapes]


@pytest.mark.parametrize(
    ("pages", "rows", "count", "held"),
    [(64, 16, 256, True), (64, 16, 4, False), (1 << 16, 64, 1 << 14, False)],
    ids=["few pages, often", "few pages, seldom", "too many to hold"],
)
def test_a_pool_is_held_where_that_moves_less(pages: int, rows: int, count: int, held: bool) -> None:
    plan = paged.trace(*types(pages, rows, count)).lower("tpu:v5e").plan
    line = next(line for line in plan.splitlines() if " pool[" in line)
    assert (": resident " in line) is held
    assert f"blocked [{rows}, 128]" in next(line for line in plan.splitlines() if " x[" in line)


def test_both_ways_give_the_same() -> None:
    random = np.random.default_rng(0)
    pool, x = (random.integers(-9, 9, (n, 16, 128)).astype(np.float32) for n in (6, 40))
    table = random.integers(-2, 9, (40, 8)).astype(np.int32)
    traced = paged.trace(pool, table, x)
    wanted = interpret(traced.ir, pool, table, x)[0]
    forms = list(every_plan(traced.ir))
    assert len(forms) > 1
    for form in forms:
        np.testing.assert_array_equal(form.interpret(pool, table, x)[0], wanted)


@needs_libtpu
def test_a_held_pool_compiles() -> None:
    compiled = paged.trace(*types(64, 16, 256)).lower("tpu:v5e").compile()
    assert 64 * 16 * 512 <= compiled.resources.vmem_bytes < 64 * 16 * 512 + (256 << 10)
