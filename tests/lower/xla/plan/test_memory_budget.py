"""The memory budget: estimates against XLA's own account, and refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tilekern as tk
from tilekern.errors import ResourceError
from tilekern.lower.xla.plan import memory_budget


def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@tk.kernel(out_type=lambda q, k, v: q)
def attention(q, k, v, out, *, block: tk.Block = 1024):
    i = tk.parallel(q.shape[0], block)
    s = q[i] @ k[...].T
    p = jnp.exp(s - s.max(axis=1, keepdims=True))
    out[i] = (p @ v[...]) / p.sum(axis=1, keepdims=True)


@tk.kernel(out_type=lambda x: x)
def in_order(x, out):
    out[...] = jnp.sort(x[...] * 2)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((1,), x.dtype))
def last_in_order(x, out):
    tile = jnp.broadcast_to(x[0], (1 << 20,)) + jnp.arange(1 << 20, dtype=x.dtype)
    out[0] = jnp.sort(tile)[-1]


@tk.kernel(out_type=lambda x: x)
def largest_first(x, out):
    out[...] = lax.top_k(x[...], x.shape[0])[0]


@tk.kernel(out_type=lambda x: x)
def products(x, out):
    first = x[...] @ x[...]
    out[...] = (first @ first) @ first


@tk.kernel(out_type=lambda x, at: jax.ShapeDtypeStruct((at.shape[0], x.shape[1]), x.dtype))
def rows(x, at, out):
    out[...] = x[at[...]] * 2


@tk.kernel(out_type=lambda x: x)
def running(x, out):
    out[...] = jnp.cumsum(x[...] * 2) * 3


@tk.kernel(out_type=lambda x: x)
def fused(x, out):
    line = x[...]
    out[...] = (line[:, None] * line[None, :]).sum(axis=1)


CASES = [
    (attention, [like(2048, 64)] * 3),
    (in_order, [like(1 << 20)]),
    (last_in_order, [like(1)]),
    (largest_first, [like(1 << 18)]),
    (products, [like(512, 512)]),
    (rows, [like(1000, 128), like(1 << 14, dtype=jnp.int32)]),
    (running, [like(1 << 18)]),
]


@pytest.mark.parametrize(("kernel", "inputs"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_estimate_is_near_what_xla_takes(kernel: tk.Kernel, inputs: list[jax.ShapeDtypeStruct]) -> None:
    """Results count, too: the last value may be computed in place."""
    lowered = kernel.trace(*inputs).lower("cpu:xla")
    account = lowered.compile().memory_analysis()
    taken = account.temp_size_in_bytes + account.output_size_in_bytes
    estimate, _ = memory_budget.temporaries(lowered.ir)
    assert taken / 4 <= estimate <= taken


def test_what_xla_fuses_takes_nothing() -> None:
    lowered = fused.trace(like(1 << 20)).lower("cpu:xla")
    assert memory_budget.temporaries(lowered.ir) == (0, None)


def test_values_that_live_one_after_the_other_share_memory() -> None:
    once = memory_budget.temporaries(products.trace(like(512, 512)).lower("cpu:xla").ir)[0]
    assert once == 3 * 512 * 512 * 4  # two operands and a result, of three products


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((1,), x.dtype))
def nearest(x, out):
    points = x[...]
    out[0] = (points @ points.T).max()


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((1,), x.dtype))
def nearest_in_a_branch(x, out):
    points = x[...]
    out[0] = lax.cond(x[0, 0] > 0, lambda p: (p @ p.T).max(), lambda p: p.max(), points)


MANY = like(10_000_000, 8)


def test_too_large_a_block_is_refused_at_the_op_that_takes_most() -> None:
    with pytest.raises(ResourceError, match="nearest needs too much memory") as caught:
        nearest.trace(MANY).lower("cpu:xla")
    assert "points @ points.T" in str(caught.value)
    assert "half of this machine's memory" in caught.value.expected
    assert f"at least {4 * 10**14 + 32 * 10**7} bytes" in caught.value.got
    assert caught.value.fix == "use smaller blocks"


def test_too_large_a_block_in_a_branch_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"points|p @ p\.T"):
        jax.jit(lambda x: nearest_in_a_branch(x, target="cpu:xla")).trace(MANY).lower()


def test_the_budget_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    assert memory_budget.available() > 1 << 28
    monkeypatch.setattr(memory_budget.os, "sysconf", unknown)
    assert memory_budget.available() == 8 << 30


def test_all_of_the_budget_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    func = in_order.trace(like(1 << 10)).lower("cpu:xla").ir
    needed, _ = memory_budget.temporaries(func)
    monkeypatch.setattr(memory_budget, "available", lambda: needed)
    assert memory_budget.refuse_beyond_memory(func) is func
    monkeypatch.setattr(memory_budget, "available", lambda: needed - 1)
    with pytest.raises(ResourceError, match="too much memory"):
        memory_budget.refuse_beyond_memory(func)
