"""Grouped products that are added to an array, with rows divided over devices in `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tilekern.kernels.ragged_dot import ragged_contracting_dot, ragged_dot
from tilekern.testing import assert_close, in_float64

MESH = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
ROWS, INNER, COLUMNS, GROUPS = 12, 8, 10, 3
# Of each device; one has no rows of a group, one has rows beyond the last group.
SIZES = np.array([[5, 4, 3], [0, 12, 0], [2, 2, 2], [12, 0, 0]], np.int32)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def rows_by_group(lhs: Any, rhs: Any, sizes: Any, total: Any, function: Callable[..., Any]) -> Any:
    """A part of the rows of lhs[R, K], and of total[R, N]."""
    return function(lhs, rhs, sizes[0], accumulate=total)


def sums_by_group(lhs: Any, rhs: Any, sizes: Any, total: Any, function: Callable[..., Any]) -> Any:
    """A part of the rows of lhs[R, K] and rhs[R, N]: their products, summed over devices, and total[G, K, N] once."""
    first = jnp.where(jax.lax.axis_index("data") == 0, total, 0)
    return jax.lax.psum(function(lhs, rhs, sizes[0], accumulate=first), "data")


def product(lhs: Any, rhs: Any, sizes: Any, accumulate: Any) -> Any:
    """By masks of groups."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(lhs.shape[0])[:, None]
    member = ((row >= ends - sizes) & (row < ends)).astype(lhs.dtype)
    return accumulate + jnp.einsum("rk,rg,gkn->rn", lhs, member, rhs)


def contraction(lhs: Any, rhs: Any, sizes: Any, accumulate: Any) -> Any:
    ends = jnp.cumsum(sizes)
    row = jnp.arange(lhs.shape[0])[:, None]
    member = ((row >= ends - sizes) & (row < ends)).astype(lhs.dtype)
    return accumulate + jnp.einsum("rk,rg,rn->gkn", lhs, member, rhs)


CASES = {
    "product": (rows_by_group, ragged_dot, product, (GROUPS, INNER, COLUMNS), (4 * ROWS, COLUMNS), P("data")),
    "contraction": (
        sums_by_group,
        ragged_contracting_dot,
        contraction,
        (4 * ROWS, COLUMNS),
        (GROUPS, INNER, COLUMNS),
        P(),
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("target", ["cpu:llvm", "cpu:xla"])
@pytest.mark.parametrize("name", CASES)
def test_an_accumulating_product_of_parts(name: str, target: str, check_vma: bool) -> None:
    of_part, function, plain, of_rhs, of_total, spec = CASES[name]
    rhs_spec = P() if name == "product" else P("data")
    lhs, rhs, total, cotangent = arrays((4 * ROWS, INNER), of_rhs, of_total, of_total)

    def both(function: Callable[..., Any], *floats: Any) -> Any:
        local = jax.shard_map(
            partial(of_part, function=function),
            mesh=MESH,
            in_specs=(P("data"), rhs_spec, P("data"), spec),
            out_specs=spec,
            check_vma=check_vma,
        )
        out, pull = jax.vjp(lambda lhs, rhs, total: local(lhs, rhs, SIZES, total), *floats)
        return out, pull(cotangent.astype(out.dtype))

    found = jax.jit(partial(both, partial(function, target=target)))(lhs, rhs, total)
    oracle = in_float64(partial(both, plain), lhs, rhs, total)
    naive = jax.jit(partial(both, plain))(lhs, rhs, total)
    for f, exact, low in zip(*map(jax.tree.leaves, (found, oracle, naive)), strict=True):
        assert_close(np.asarray(f), exact, np.asarray(low), length=4 * ROWS)
