"""Rejection sampling of a tree of drafts, between the kernels of `sample`."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.kernels.sample.drafts import drawn_from, drawn_of_weights, probabilities_of, uniforms


class _Walk(NamedTuple):
    """The way of each row down its tree.

    Attributes:
      node: int32[B], the last accepted draft; -1 for none.
      depth: int32[B], the number of accepted drafts.
      nodes: int32[B, N], the accepted drafts from the root on; -1 behind them.
      residual: float32[B, V], in proportion to what the next token is drawn from.
      total: float32[B], the sum of `residual`.
    """

    node: jax.Array
    depth: jax.Array
    nodes: jax.Array
    residual: jax.Array
    total: jax.Array


def verified_tree(
    logarithms: jax.Array,
    drafts: jax.Array,
    parents: jax.Array,
    keys: jax.Array,
    draft_logits: jax.Array | None,
    lens: jax.Array,
    **blocks: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens int32[B, N + 1], lens int32[B] and nodes int32[B, N] of `verify_draft_tree`.

    `logarithms` is float32[B, N + 1, V], of `drawable_logits`; drafts and parents int32[B, N]; lens int32[B] from 0 to
    N. One loop over the nodes is enough, for a parent stands before its children: the children of an accepted node
    come later, and its siblings, whose parent is no longer the last accepted draft, are passed over.
    """
    rows, count = drafts.shape
    p = jax.nn.softmax(logarithms, axis=-1)
    of_drafts = None if draft_logits is None else jnp.asarray(draft_logits)
    uniform = uniforms(keys, count)

    def visit(n: jax.Array, walk: _Walk) -> _Walk:
        n = n.astype(jnp.int32)
        draft = drafts[:, n]
        q = drawn_from(None if of_drafts is None else of_drafts[:, n], draft, p.shape[2])
        # q of a certain draft is 1, also of a token outside of the vocabulary, whose p is 0.
        of_draft = 1.0 if of_drafts is None else probabilities_of(q, draft)
        is_child = (parents[:, n] == walk.node) & (n < lens)
        accepted = is_child & (uniform[:, n] * of_draft * walk.total < probabilities_of(walk.residual, draft))
        rejected = jnp.maximum(walk.residual - walk.total[:, None] * q, 0)
        # Where the residual is 0 everywhere but for rounding, p and q are equal, and the residual stays.
        changes = (is_child & ~accepted & (rejected.max(axis=1) > 0))[:, None]
        residual = jnp.where(accepted[:, None], p[:, n + 1], jnp.where(changes, rejected, walk.residual))
        place = (jnp.arange(count) == walk.depth[:, None]) & accepted[:, None]
        return _Walk(
            jnp.where(accepted, n, walk.node),
            walk.depth + accepted,
            jnp.where(place, n, walk.nodes),
            residual,
            jnp.where(accepted, 1, jnp.where(changes[:, 0], rejected.sum(axis=1), walk.total)),
        )

    none = jnp.full((rows, count), -1, jnp.int32)
    root = _Walk(jnp.full(rows, -1, jnp.int32), jnp.zeros(rows, jnp.int32), none, p[:, 0], jnp.ones(rows, jnp.float32))
    walk = cast(_Walk, lax.fori_loop(0, count, visit, root)) if count else root
    token = drawn_of_weights(walk.residual, keys, **blocks)
    path = jnp.where(walk.nodes < 0, -1, jnp.take_along_axis(drafts, jnp.maximum(walk.nodes, 0), axis=1))
    padded = jnp.pad(path, ((0, 0), (0, 1)), constant_values=-1)
    tokens = jnp.where(jnp.arange(count + 1) == walk.depth[:, None], token[:, None], padded)
    return tokens, walk.depth + 1, walk.nodes
