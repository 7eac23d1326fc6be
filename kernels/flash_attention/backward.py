"""The backward kernels of flash attention: the transpose of the tangent kernel, with no matrix of scores in memory.

With weights p, `Scores.weights`, from the cotangents of out and logsumexp (FlashAttention-2, Dao 2023, algorithm 2)

    δ = Σ_h dout out - dlogsumexp,    dp = dout vᵀ,    ds = p (dp - δ),    dq = scale Σ_j ds k,
    dk = scale Σ_i dsᵀ q,    dv = Σ_i pᵀ dout,

where ds goes back through the function from dot products to scores first. A kernel whose programs own queries computes
dq; a kernel whose programs own keys computes dk and dv. One program sums each element in one order, so results are
deterministic. Where programs run in sequence, as on a TPU, the kernel of dk and dv adds up dq as well, and scores are
computed once.
"""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.flash_attention import schedules
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals
from tilekern.kernels.flash_attention.scores import Scores, of_queries


def _query_type(query: Any, *unused: Any) -> Any:
    return jax.ShapeDtypeStruct(query.shape, query.dtype)


@tk.kernel(out_type=_query_type)
def flash_attention_backward_query(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    extras: Extras,
    residuals: Residuals,
    cotangent: tk.Ref,
    delta: tk.Ref,
    query_cotangent: tk.Ref,
    *,
    config: Config,
    block_q: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """The forward kernel's arrays, residuals, dout[B, T, N, Hv], δ[B, T, N] -> dq[B, T, N, H]."""
    scores, g, i = of_queries(config, extras, query, key, block_q)
    b, n, wide = scores.b, scores.n, scores.wide

    q, dout = scores.load_queries(query, i), scores.load_queries(cotangent, i)
    rows, d = residuals.at(b, i, n), delta[b, i, n]

    def step(j: tk.Tile, attends: jax.Array, acc: jax.Array) -> jax.Array:
        k, v = scores.load_keys(key, j, g), scores.load_keys(value, j, g)
        draw, _ = scores.cotangents(i, j, (q, k), (dout, v), attends, rows, lambda: d)
        return tk.dot(draw.astype(k.dtype), k, acc, precision=config.precision[0])

    acc = scores.over_keys(i, block_k, step, tk.zeros((i, query.shape[3]), wide))
    query_cotangent[b, i, n] = (acc * wide.type(config.scale)).astype(query.dtype)


def _key_type(query: Any, key: Any, value: Any, *unused: Any, with_query: bool) -> tuple[Any, ...]:
    shared = with_query and query.shape[2] > key.shape[2]
    wide = tk.accumulator(query.dtype)
    dkey, dvalue = (jax.ShapeDtypeStruct(x.shape, wide if shared else x.dtype) for x in (key, value))
    dquery = tk.Sum(jax.ShapeDtypeStruct(query.shape, wide)) if with_query else None
    return tk.Sum(dkey) if shared else dkey, tk.Sum(dvalue) if shared else dvalue, dquery


@tk.kernel(out_type=_key_type)
def flash_attention_backward_key(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    extras: Extras,
    residuals: Residuals,
    cotangent: tk.Ref,
    delta: tk.Ref,
    key_cotangent: tk.Ref,
    value_cotangent: tk.Ref,
    query_cotangent: tk.Ref | None,
    *,
    config: Config,
    with_query: bool = False,
    block_q: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """The arrays of `flash_attention_backward_query` -> dk[B, S, K, H], dv[B, S, K, Hv].

    `extras.ranges` are the ranges of queries for each key. With `with_query` there is also dq / scale [B, T, N, H],
    a sum over the programs that own keys. Then each head has its own programs, and dk and dv are sums over the heads of
    a group.
    """
    groups = key.shape[2]
    group = query.shape[2] // max(groups, 1)
    b = tk.parallel(query.shape[0])
    g = tk.parallel(groups)
    r = tk.parallel(group) if with_query and group > 1 else 0
    # The first keys are seen by the most queries: their programs start first.
    j = tk.parallel(key.shape[1], block_k)
    wide = tk.accumulator(query.dtype)
    lengths = query.shape[1], key.shape[1]
    of_scores, of_values = config.precision
    loads = Scores(config, extras, b, 0, lengths, wide, transposed=True)
    k, v = loads.load_keys(key, j, g), loads.load_keys(value, j, g)

    def head(r: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        n = g * group + r
        scores = Scores(config, extras, b, n, lengths, wide, transposed=True)

        def step(i: tk.Tile, attends: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dk, dv = sums
            q, dout = scores.load_queries(query, i), scores.load_queries(cotangent, i)
            draw, p = scores.cotangents(i, j, (q, k), (dout, v), attends, residuals.at(b, i, n), lambda: delta[b, i, n])
            dv = tk.dot(scores.drop_weights(i, j, p).astype(dout.dtype), dout, dv, precision=of_values)
            draw = draw.astype(q.dtype)
            if query_cotangent is not None:
                query_cotangent.at[b, i, n].add(tk.dot(draw.T, k, precision=of_scores))
            return tk.dot(draw, q, dk, precision=of_scores), dv

        return scores.over_queries(j, block_q, step, sums)

    sums = tk.zeros((j, key.shape[3]), wide), tk.zeros((j, value.shape[3]), wide)
    dk, dv = head(r, sums) if with_query or group == 1 else tk.fold(tk.serial(group), head, sums)
    dk = dk * wide.type(config.scale)
    if with_query and group > 1:
        key_cotangent.at[b, j, g].add(dk)
        value_cotangent.at[b, j, g].add(dv)
    else:
        key_cotangent[b, j, g] = dk.astype(key_cotangent.dtype)
        value_cotangent[b, j, g] = dv.astype(value_cotangent.dtype)


for _kernel in (flash_attention_backward_query, flash_attention_backward_key):
    schedules.declare(_kernel)
