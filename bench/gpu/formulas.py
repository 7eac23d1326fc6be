"""Formulas in `jnp` that only comparisons on GPUs need, each as fast as XLA makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def delta_rule_in_chunks(
    query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, log_decay: jax.Array, *, chunk: int = 64
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule: chunks are solved at once, by triangular systems, and a scan goes over their states.

    With T = (I + A)⁻¹, the tokens of a chunk add U = T B V - (T B exp(c) K) S to its state S (Yang et al. 2024,
    https://arxiv.org/abs/2412.06464, section 3.3). The decays between two tokens are exp(c_i) exp(-c_j), which
    overflows where the log decays of a chunk add up to less than -88; those of the cases do not.
    """
    batch, tokens, heads, width = value.shape
    wide, narrow = jnp.float32, value.dtype
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (query, key))
    decays = log_decay if log_decay.ndim == 4 else log_decay[..., None]
    parts = (x.reshape(batch, -1, chunk, *x.shape[2:]) for x in (q, k, value, beta[..., None], decays))
    q, k, v, rate, decays = (jnp.moveaxis(x, 3, 2) for x in parts)  # [batch, chunks, heads, tokens, …]
    sums = jnp.cumsum(decays, axis=3)
    start, end = jnp.exp(sums), jnp.exp(-sums)
    rows, decayed, columns = q * start, k * start, k * end

    def product(spec: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *(x.astype(narrow) for x in operands), preferred_element_type=wide)

    system = jnp.tril(rate * product("bnhid,bnhjd->bnhij", decayed, columns), -1)
    sides = jnp.concatenate([rate * v, rate * decayed], axis=-1).astype(wide)
    solved = jax.scipy.linalg.solve_triangular(system, sides, lower=True, unit_diagonal=True)
    scores = jnp.tril(product("bnhid,bnhjd->bnhij", rows, columns))
    whole = start[:, :, :, -1:]

    def step(state: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
        rows, scores, values, keys, kept, whole = one
        added = values - product("bhid,bhdv->bhiv", keys, state)
        out = product("bhid,bhdv->bhiv", rows, state) + product("bhij,bhjv->bhiv", scores, added)
        return jnp.swapaxes(whole, 2, 3) * state + product("bhjd,bhjv->bhdv", kept, added), out.astype(narrow)

    each = rows, scores, solved[..., :width], solved[..., width:], columns * whole, whole
    zeros = jnp.zeros((batch, heads, q.shape[-1], width), wide)
    last, out = jax.lax.scan(step, zeros, [jnp.moveaxis(x, 1, 0) for x in each])
    return jnp.moveaxis(out, (0, 2, 3), (1, 3, 2)).reshape(batch, tokens, heads, width), last


def ssd_by(
    linear_attention: Callable[..., Any],
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`ssd` by some linear attention."""
    out, state = linear_attention(c, b, (x * dt[..., None]).astype(x.dtype), dt * a)
    return (out + d[:, None] * x).astype(x.dtype), state


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
    """A mixture of experts: all experts for all tokens, of which the weights of `chosen` ones are not 0."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    _, experts = jax.lax.top_k(logits, chosen)
    weights = jax.nn.softmax(logits, where=jax.nn.one_hot(experts, logits.shape[1]).sum(1) > 0)

    def product(spec: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *(a.astype(wide) for a in arrays), precision="highest")

    hidden = jax.nn.silu(product("th,ehf->tef", x, w_gate)) * product("th,ehf->tef", x, w_up)
    return product("te,teh->th", weights, product("tef,efh->teh", hidden, w_down)).astype(x.dtype)
