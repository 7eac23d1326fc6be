"""Recurrences and products in plain `jnp`, as fast as its operations allow: chunks, and scans by doubling.

They are peers of benchmarks. Products have operands of the inputs' dtype, sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 64
"""Tokens of a chunk."""

_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)


# --- chunks -----------------------------------------------------------------------------------------------------------


def linear_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, *, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """`linear_attention` of tilekern: products of all chunks at once, and a scan over their states.

    Returns out[B, T, H, V] in the dtype of value, and the last state float32[B, H, K, V].
    """
    q, k, v, decays = _chunks(chunk, query, key, value, log_decay)
    sums = jnp.cumsum(decays, axis=2)
    scores = _einsum("bnihk,bnjhk->bnijh", q, k) * _between(sums)
    inner = _einsum("bnijh,bnjhv->bnihv", scores.astype(v.dtype), v)
    decayed = (k * jnp.exp(sums[:, :, -1:] - sums)[..., None]).astype(v.dtype)
    added = _einsum("bnjhk,bnjhv->bnhkv", decayed, v)

    def step(state: jax.Array, of_chunk: Any) -> tuple[jax.Array, jax.Array]:
        total, new = of_chunk
        return state * jnp.exp(total)[..., None, None] + new, state

    start = jnp.zeros((*added.shape[:1], *added.shape[2:]), jnp.float32)
    last, states = jax.lax.scan(step, start, (_first(sums[:, :, -1]), _first(added)))
    before = _einsum("bnihk,nbhkv->bnihv", q, states.astype(q.dtype))
    out = inner + before * jnp.exp(sums)[..., None]
    return out.reshape(value.shape).astype(value.dtype), last


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    *,
    by: Callable[..., Any] = linear_attention,
) -> tuple[jax.Array, jax.Array]:
    """`ssd` of tilekern by the linear attention `by`."""
    value = (x.astype(jnp.float32) * dt[..., None]).astype(x.dtype)
    out, state = by(c, b, value, dt * a)
    return (out.astype(jnp.float32) + d[:, None] * x.astype(jnp.float32)).astype(x.dtype), state


def gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, log_decay: jax.Array, *, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of tilekern in chunks (Yang et al. 2024, https://arxiv.org/abs/2412.06464, section 3.3).

    Kimi has decays of channels, log_decay[B, T, H, K]. A factor exp(-Σ log_decay) is held below e⁸⁰ there: a formula
    with products alone, which loses digits where the decays of a chunk are stronger.

    Returns:
      out[B, T, H, V] in the dtype of value, and the last state float32[B, H, K, V].

    Args:
      query: [B, T, G, K].
      key: like the query.
      value: [B, T, H, V].
      beta: [B, T, H].
      log_decay: [B, T, H], or [B, T, H, K].
      chunk: tokens of a chunk.
    """
    by_channel = log_decay.ndim == 4
    q, k, v, rates, decays = _chunks(chunk, query, key, value, beta, log_decay)
    sums = jnp.cumsum(decays, axis=2)
    of_keys = sums if by_channel else sums[..., None]
    narrow = partial(jnp.asarray, dtype=v.dtype)
    if by_channel:
        grown, shrunk = narrow(k * jnp.exp(jnp.minimum(-sums, 80))), narrow(k * jnp.exp(sums))
        past = jnp.tril(jnp.ones((chunk, chunk)))
        scores = _einsum("bnihk,bnjhk->bnhij", narrow(q * jnp.exp(sums)), grown) * past
        a = _einsum("bnihk,bnjhk->bnhij", shrunk, grown)
    else:
        between = jnp.moveaxis(_between(sums), -1, 2)
        scores = _einsum("bnihk,bnjhk->bnhij", q, k) * between
        a = _einsum("bnihk,bnjhk->bnhij", k, k) * between
    a = jnp.tril(a, -1) * jnp.moveaxis(rates, 3, 2)[..., None]
    keyed = rates[..., None] * k * jnp.exp(of_keys)
    targets = jnp.moveaxis(jnp.concatenate([rates[..., None] * v, keyed], axis=-1), 3, 2)
    solutions = _solved(a, targets.astype(jnp.float32))
    width = v.shape[-1]
    alone, of_state = solutions[..., :width], narrow(solutions[..., width:])
    read = narrow(q * jnp.exp(of_keys))
    decayed = narrow(k * jnp.exp(of_keys[:, :, -1:] - of_keys))

    def step(state: jax.Array, of_chunk: Any) -> tuple[jax.Array, jax.Array]:
        alone, of_state, scores, read, decayed, total = of_chunk
        added = narrow(alone - _einsum("bhik,bhkv->bhiv", of_state, narrow(state)))
        out = _einsum("bihk,bhkv->bihv", read, narrow(state)) + _einsum("bhij,bhjv->bihv", narrow(scores), added)
        return state * jnp.exp(total)[..., None] + _einsum("bjhk,bhjv->bhkv", decayed, added), narrow(out)

    start = jnp.zeros((*k.shape[:1], *k.shape[3:], width), jnp.float32)
    chunks = [_first(x) for x in (alone, of_state, scores, read, decayed, of_keys[:, :, -1])]
    last, out = jax.lax.scan(step, start, tuple(chunks))
    return jnp.moveaxis(out, 0, 1).reshape(value.shape), last


def _solved(a: jax.Array, x: jax.Array) -> jax.Array:
    """(I + a)⁻¹ x by inverses of diagonal blocks, whose size doubles; products of float32 in full precision."""
    size = a.shape[-1]
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, a.shape[-2:], d) for d in (0, 1))
    inverse = jnp.broadcast_to(jnp.eye(size), a.shape)
    block = 1
    while block < size:
        pair = (rows // (2 * block) == columns // (2 * block)) & (rows // block % 2 == 1) & (columns // block % 2 == 0)
        below = jnp.where(pair, a, 0)
        inverse = inverse - (product(inverse, product(below, inverse)) if block > 1 else below)
        block *= 2
    return product(inverse, x)


def _chunks(chunk: int, query: jax.Array, key: jax.Array, value: jax.Array, *gates: jax.Array) -> list[jax.Array]:
    """All arrays as [B, N, C, H, ...], for N chunks of C tokens; heads that share a query have a copy each."""
    heads = value.shape[2]
    wide = [jnp.repeat(x, heads // x.shape[2], axis=2) for x in (query, key)]
    return [x.reshape(x.shape[0], -1, chunk, *x.shape[2:]) for x in (*wide, value, *gates)]


def _between(sums: jax.Array) -> jax.Array:
    """The decays from token j up to i of each chunk, [B, N, C, C, H]; 0 for i < j."""
    chunk = sums.shape[2]
    past = jnp.tril(jnp.ones((chunk, chunk), bool))[:, :, None]
    return jnp.exp(jnp.where(past, sums[:, :, :, None] - sums[:, :, None], -jnp.inf))


def _first(x: jax.Array) -> jax.Array:
    """x[B, N, ...] as [N, B, ...]."""
    return jnp.moveaxis(x, 1, 0)


# --- scans ------------------------------------------------------------------------------------------------------------


def rg_lru(
    x: jax.Array, input_gate: jax.Array, recurrence_gate: jax.Array, a_param: jax.Array, *, scale_first: bool = True
) -> tuple[jax.Array, jax.Array]:
    """`rg_lru` of tilekern by `lax.associative_scan`."""
    assert scale_first
    wide = jnp.float32
    log_a = -8 * jax.nn.softplus(a_param) * jax.nn.sigmoid(recurrence_gate.astype(wide))
    added = jnp.sqrt(-jnp.expm1(2 * log_a)) * jax.nn.sigmoid(input_gate.astype(wide)) * x.astype(wide)
    out = _doubled(jnp.exp(log_a), added)
    return out.astype(x.dtype), out[:, -1]


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    z: jax.Array,
    dt_bias: jax.Array,
    *,
    dt_softplus: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """`selective_scan` of tilekern by `lax.associative_scan`."""
    assert dt_softplus
    dtype = x.dtype
    x, dt, b, c, z = (array.astype(jnp.float32) for array in (x, dt, b, c, z))
    steps = jax.nn.softplus(dt + dt_bias)
    states = _doubled(jnp.exp(steps[..., None] * a), (steps * x)[..., None] * b[:, :, None, :])
    out = jnp.einsum("btcn,btn->btc", states, c) + d * x
    return (out * jax.nn.silu(z)).astype(dtype), states[:, -1]


def _doubled(factors: jax.Array, terms: jax.Array) -> jax.Array:
    """All h_t = factors_t h_{t-1} + terms_t along the second dim, stacked like `terms`."""

    def after(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(after, (factors, terms), axis=1)[1]


# --- products ---------------------------------------------------------------------------------------------------------


def gated(dot: Callable[..., Any], lhs: jax.Array, gate: jax.Array, up: jax.Array, sizes: jax.Array) -> jax.Array:
    """silu(gate) up of two grouped products."""
    return jax.nn.silu(dot(lhs, gate, sizes)) * dot(lhs, up, sizes)


def gelu_product(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    """The first layer of an MLP."""
    return jax.nn.gelu(x @ w + bias, approximate=True)


def added_product(x: jax.Array, w: jax.Array, residual: jax.Array) -> jax.Array:
    """The last product of a layer, added to its input."""
    return residual + x @ w


def mixture(
    x: jax.Array,
    logits: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    chosen: int,
    dtype: Any = None,
) -> jax.Array:
    """A mixture of experts, x[T, H] to [T, H]: all experts for all tokens, where only `chosen` weights are not 0."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    _, experts = jax.lax.top_k(logits, chosen)
    weights = jax.nn.softmax(logits, where=jax.nn.one_hot(experts, logits.shape[1]).sum(1) > 0)

    def product(spec: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *(a.astype(wide) for a in arrays), precision="highest")

    hidden = jax.nn.silu(product("th,ehf->tef", x, w_gate)) * product("th,ehf->tef", x, w_up)
    return product("te,teh->th", weights, product("tef,efh->teh", hidden, w_down)).astype(x.dtype)
