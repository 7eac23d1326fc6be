"""The tangent kernel of flash attention: the derivative of out and logsumexp along tangents of all their inputs.

With weights p, `Scores.weights`, and ds the tangents of the scores,

    dlogsumexp = Σ p ds (+ p_sink dsink),
    dout = Σ p (ds - dlogsumexp) v + Σ p dv = Σ (p ds v + p dv) - dlogsumexp out.

One pass over the keys computes both sums.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.flash_attention import schedules
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals, Tangents
from tilekern.kernels.flash_attention.scores import of_queries, sink_logits


def _out_type(
    query: Any, key: Any, value: Any, extras: Extras, out: Any, residuals: Residuals, tangents: Tangents
) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, residuals.largest))


@tk.kernel(out_type=_out_type, linear=("tangents",))
def flash_attention_tangent(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    extras: Extras,
    out: tk.Ref,
    residuals: Residuals,
    tangents: Tangents,
    out_tangent: tk.Ref,
    logsumexp_tangent: tk.Ref,
    *,
    config: Config,
    block_q: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """The arrays of the forward kernel, its results, and tangents -> the tangents of its results."""
    scores, g, i = of_queries(config, extras, query, key, block_q)
    b, n, wide = scores.b, scores.n, scores.wide
    of_scores, of_values = config.precision

    q = scores.load_queries(query, i)
    dq = None if tangents.query is None else scores.load_queries(tangents.query, i)
    rows = residuals.at(b, i, n)

    def step(j: tk.Tile, attends: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, acc = carry
        k, v = scores.load_keys(key, j, g), scores.load_keys(value, j, g)
        products = scores.products(q, k, of_scores)
        p = scores.weights(scores.logits(i, j, products, attends), rows)
        moved = None
        if dq is not None:
            moved = scores.products(dq, k, of_scores)
        if tangents.key is not None:
            more = scores.products(q, scores.load_keys(tangents.key, j, g), of_scores)
            moved = more if moved is None else moved + more
        ds = scores.tangents(i, j, products, moved, tangents.bias, tangents.carried)
        if ds is not None:
            weighted = jnp.where(attends, p * ds, 0)
            total = total + weighted.sum(axis=1)
            acc = tk.dot(scores.drop_weights(i, j, weighted).astype(v.dtype), v, acc, precision=of_values)
        if tangents.value is not None:
            dv = scores.load_keys(tangents.value, j, g)
            acc = tk.dot(scores.drop_weights(i, j, p).astype(v.dtype), dv, acc, precision=of_values)
        return total, acc

    total, acc = scores.over_keys(i, block_k, step, (tk.zeros(i, wide), tk.zeros((i, value.shape[3]), wide)))
    if tangents.sinks is not None:
        sink = jnp.broadcast_to(sink_logits(config, extras, extras.sinks[n], wide), i.size)
        total = total + scores.weights(sink[:, None], rows)[:, 0] * tangents.sinks[n].astype(wide)
    logsumexp_tangent[b, i, n] = total
    out_tangent[b, i, n] = (acc - total[:, None] * out[b, i, n].astype(wide)).astype(out.dtype)


schedules.declare(flash_attention_tangent)
