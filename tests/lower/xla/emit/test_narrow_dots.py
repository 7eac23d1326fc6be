"""Dots of bfloat16 whose operands depend on different axes of the grid."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk

B, H, K, M, N = 2, 3, 16, 8, 5


def _products(x: Any, w: Any, *_: Any) -> Any:
    return jax.ShapeDtypeStruct((B, H, x.shape[-1], w.shape[-1]), jnp.float32)


@tk.kernel(out_type=_products)
def products(x, w, out, *, last: bool):
    """out[b, h] = x[b or h or both].T @ w[b or h or both]; `last` puts the contracted dim of x last."""
    b, h = tk.parallel(B), tk.parallel(H)

    def tile(array):
        lead = {(B,): (b,), (H,): (h,), (B, H): (b, h), (): ()}[array.shape[:-2]]
        return array[(*lead, slice(None), slice(None))]

    left, right = tile(x), tile(w)
    dims = ((1,), (0,)) if last else ((0,), (0,))
    out[b, h] = jax.lax.dot_general(
        left.T if last else left, right, (dims, ((), ())), preferred_element_type=jnp.float32
    )


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("of_w", [(), (B,), (H,), (B, H)])
@pytest.mark.parametrize("of_x", [(), (B,), (H,), (B, H)])
def test_operands_of_different_axes(of_x: tuple[int, ...], of_w: tuple[int, ...], last: bool) -> None:
    random = np.random.default_rng(0)
    x, w = (random.integers(-4, 5, shape).astype(jnp.bfloat16) for shape in ((*of_x, K, M), (*of_w, K, N)))
    names = {(): "", (B,): "b", (H,): "h", (B, H): "bh"}
    formula = f"{names[of_x]}km,{names[of_w]}kn->bhmn" if of_x + of_w else "km,kn->mn"
    oracle = np.broadcast_to(_einsum(formula, x, w), (B, H, M, N))
    np.testing.assert_array_equal(products(x, w, last=last, target="cpu:xla"), oracle)


def _einsum(formula: str, x: Any, w: Any) -> Any:
    terms, out = formula.split("->")
    kept = "".join(c for c in out if c in terms)
    found = np.einsum(f"{terms}->{kept}", x.astype(np.float32), w.astype(np.float32))
    missing = [place for place, c in enumerate("bhmn") if c not in kept]
    return np.expand_dims(found, missing)
