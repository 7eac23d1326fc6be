"""A transformer of two layers, on our kernels or on plain JAX: its lowering is a first call of many kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tilekern.kernels import cross_entropy, matmul, rms_norm, rope, swiglu
from tilekern.kernels.cross_entropy import reference as cross_entropy_reference
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.rms_norm import reference as rms_norm_reference
from tilekern.kernels.rope import reference as rope_reference
from tilekern.kernels.swiglu import reference as swiglu_reference

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, TOKENS = 4, 128, 256, 8, 4, 32, 512, 256


class Functions(NamedTuple):
    """The functions that the model is made of."""

    dense: Callable[..., Any]
    norm: Callable[..., Any]
    rotate: Callable[..., Any]
    attend: Callable[..., Any]
    gate: Callable[..., Any]
    losses: Callable[..., Any]


_ATTEND = partial(jax.nn.dot_product_attention, is_causal=True)
FUNCTIONS = {
    "ours": Functions(matmul, rms_norm, rope, partial(flash_attention, causal=True), swiglu, cross_entropy),
    "theirs": Functions(
        jnp.matmul, rms_norm_reference, rope_reference, _ATTEND, swiglu_reference, cross_entropy_reference
    ),
}


def example() -> tuple[dict[str, Any], Any, Any, Any]:
    """The types of the weights, the tokens, the labels and the positions."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {
        "attention_norm": floats(WIDTH),
        "query": floats(WIDTH, HEADS * HEAD_DIM),
        "key": floats(WIDTH, KV_HEADS * HEAD_DIM),
        "value": floats(WIDTH, KV_HEADS * HEAD_DIM),
        "out": floats(HEADS * HEAD_DIM, WIDTH),
        "hidden_norm": floats(WIDTH),
        "gate": floats(WIDTH, HIDDEN),
        "up": floats(WIDTH, HIDDEN),
        "down": floats(HIDDEN, WIDTH),
    }
    weights = {
        "embedding": floats(TOKENS, WIDTH),
        "layers": [layer] * 2,
        "norm": floats(WIDTH),
        "head": floats(WIDTH, TOKENS),
    }
    numbers = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return weights, numbers, numbers, numbers


def loss(use: Functions, weights: dict[str, Any], tokens: Any, labels: Any, positions: Any) -> Any:
    """float32[], the mean loss of tokens[BATCH, LENGTH] and as many labels and positions, in nats a token."""
    x = weights["embedding"][tokens.reshape(-1)]
    for layer in weights["layers"]:
        x = _block(use, layer, x, positions)
    return use.losses(use.norm(x, weights["norm"]), weights["head"], labels.reshape(-1)).mean()


def _block(use: Functions, layer: dict[str, Any], x: Any, positions: Any) -> Any:
    normed = use.norm(x, layer["attention_norm"])
    query, key, value = (
        use.dense(normed, layer[name]).reshape(BATCH, LENGTH, -1, HEAD_DIM) for name in ("query", "key", "value")
    )
    attended = use.attend(use.rotate(query, positions), use.rotate(key, positions), value)
    x += use.dense(attended.reshape(BATCH * LENGTH, -1), layer["out"])
    normed = use.norm(x, layer["hidden_norm"])
    return x + use.dense(use.gate(use.dense(normed, layer["gate"]), use.dense(normed, layer["up"])), layer["down"])
