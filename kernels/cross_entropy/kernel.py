from __future__ import annotations
from typing import Any
import jax
import jax.numpy as jnp
import tilekern as tk

def _out_type(hidden: Any, weight: Any, labels: Any) -> Any:
    aval = jax.ShapeDtypeStruct(labels.shape, tk.accumulator(hidden.dtype))
    return aval, aval

@tk.kernel(out_type=_out_type)
def cross_entropy_forward(hidden, weight, labels, loss, logsumexp, *,
    block_t: tk.Block = 128, block_v: tk.Block = 128, block_d: tk.Block = 64) -> None:
    i = tk.parallel(hidden.shape[0], block_t)
    wide = tk.accumulator(hidden.dtype)
    width, vocabulary = weight.shape
    label = labels[i]

    def step(j, carry):
        m, d, picked = carry
        s = tk.fold(tk.serial(width, block_d), lambda k, acc: tk.dot(hidden[i, k], weight[k, j], acc), tk.zeros((i, j), wide))
        s = jnp.where(j.valid[None, :], s, -jnp.inf)
        grown = jnp.maximum(m, s.max(axis=1))
        base = jnp.where(jnp.abs(grown) == jnp.inf, 0, grown)
        d = d * jnp.exp(m - base) + jnp.exp(s - base[:, None]).sum(axis=1)
        picked = picked + jnp.where(j.indices[None, :] == label[:, None], s, 0).sum(axis=1)
        return grown, d, picked

    start = tk.full(i, -jnp.inf, wide), tk.zeros(i, wide), tk.zeros(i, wide)
    m, d, picked = tk.fold(tk.serial(vocabulary, block_v), step, start)
    lse = m + jnp.log(d)
    logsumexp[i] = lse
    loss[i] = lse - picked
