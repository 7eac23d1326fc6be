"""Dots of bfloat16 in a form that XLA's CPU backend runs.

It fails to run a product of bfloat16 whose right operand has several dims that only the result has, where the
contracted dim of the left operand is not its last (jaxlib 0.12.0: "Unsupported element type for DotThunk"). Axes of the
grid are such dims, so they are joined here, where both kinds are known.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.ir.compute import Dot
from tilekern.ir.types import accumulator
from tilekern.lower.xla.emit.access import Batched, as_array


def narrow_dot(op: Dot, lhs: Batched, rhs: Batched, axes: tuple[int, ...]) -> jax.Array:
    """The product of all programs, with a leading dim for each of `axes`; exact products, as of other dtypes."""
    left, right = as_array(lhs), as_array(rhs)
    shared = [a for a in axes if a in lhs.axes and a in rhs.axes]
    (left_batch, right_batch), (left_contract, right_contract) = (
        [[len(v.axes) + d for d in dims] for v, dims in zip((lhs, rhs), pair, strict=True)]
        for pair in (op.batch, op.contract)
    )
    left_batch = [lhs.axes.index(a) for a in shared] + left_batch
    right_batch = [rhs.axes.index(a) for a in shared] + right_batch
    left_free = [d for d in range(left.ndim) if d not in left_batch + left_contract]
    right_free = [d for d in range(right.ndim) if d not in right_batch + right_contract]

    right = right.transpose(*right_batch, *right_contract, *right_free)
    bound = len(right_batch) + len(right_contract)
    batch, contract = range(len(right_batch)), range(len(right_batch), bound)
    product = lax.dot_general(
        left,
        right.reshape(*right.shape[:bound], -1),
        ((left_contract, contract), (left_batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=accumulator(left.dtype),
    )
    product = product.reshape(*product.shape[:-1], *right.shape[bound:])

    of_left, of_right = (
        [v.axes[d] for d in free if d < len(v.axes)] for v, free in ((lhs, left_free), (rhs, right_free))
    )
    own = len(left_free) - len(of_left)
    dim_axes = [*shared, *(None for _ in op.batch[0]), *of_left, *(None for _ in range(own)), *of_right]
    return jnp.moveaxis(product, [dim_axes.index(a) for a in axes], range(len(axes)))
